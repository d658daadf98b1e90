"""Why a node cannot be asked now, whatever is asked for. The only place that has the words for it."""

from __future__ import annotations

from typing import NamedTuple

from app.domain import NodeState
from app.routing.breaker import BreakerState
from app.routing.registry import Node

ROUTABLE = (NodeState.HEALTHY, NodeState.UNKNOWN)


class Obstacle(NamedTuple):
    """`seconds`: for how long at least, where that is known."""

    code: str
    message: str
    seconds: float | None = None


def usable(node: Node) -> bool:
    """Whether there is no obstacle. Asked for every candidate of every request; `obstacles` has the reasons."""
    return node.state in ROUTABLE and not node.draining and node.kind is not None and node.breaker.would_admit()


def obstacles(node: Node) -> list[Obstacle]:
    """All of them, what people did first."""
    found = []
    if node.draining:
        found.append(Obstacle("draining", "draining"))
    if not node.breaker.would_admit():
        found.append(_left_alone(node))
    if node.state not in ROUTABLE:
        found.append(Obstacle(node.state.value, state_of(node)))
    if node.kind is None:
        found.append(Obstacle("kind_unknown", f"its kind is not known yet ({state_of(node)})"))
    return found


def state_of(node: Node) -> str:
    """What probes say of it."""
    return f"{node.state.value}, {node.reason}" if node.reason else node.state.value


def _left_alone(node: Node) -> Obstacle:
    code = "breaker_open" if node.breaker.state is BreakerState.OPEN else "breaker_half_open"
    message = f"left alone after failures, the last: {node.breaker.reason}"
    return Obstacle(code, message, round(node.breaker.retry_after_seconds(), 1))
