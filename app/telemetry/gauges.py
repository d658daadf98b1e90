"""What is known of nodes, the queue and other replicas at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Protocol

from app.domain import GIB, NodeState, tier_name
from app.routing.admission import Admission
from app.routing.breaker import BreakerState
from app.routing.registry import Node, Registry
from app.telemetry.tallies import Family, Gauge, Labels, Merge

_LOADED = 64  # models of one node: what it lists is its own affair

Value = tuple[Labels, float]


def node_gauges(nodes: Registry, admission: Admission) -> tuple[Family, ...]:
    """Of every node. Only what this process itself has in flight, and who waits here, is other in other workers."""

    def each(value: Callable[[Node], float | None]) -> Callable[[], Iterator[Value]]:
        def read() -> Iterator[Value]:
            for node in list(nodes):
                found = value(node)
                if found is not None:
                    yield (node.name,), found

        return read

    def many(values: Callable[[Node], Iterable[tuple[str, float]]]) -> Callable[[], Iterator[Value]]:
        def read() -> Iterator[Value]:
            for node in list(nodes):
                for label, value in values(node):
                    yield (node.name, label), value

        return read

    def info() -> Iterator[Value]:
        for node in list(nodes):
            yield (node.name, tier_name(node.spec.tier), node.kind.name if node.kind else ""), 1

    own = Merge.OWN
    return (
        Gauge("hearth_in_flight", "Requests on the node now.", "node", source=each(lambda node: node.in_flight)),
        Gauge(
            "hearth_in_flight_everywhere",
            "Requests on the node now, with those of other replicas and the loads that these began, as they last said.",
            "node",
            source=each(lambda node: node.in_flight_everywhere),
            merge=Merge.MAX,
        ),
        Gauge(
            "hearth_max_concurrency",
            "How many requests the node may have, where there is a limit.",
            "node",
            source=each(lambda node: node.spec.max_concurrency),
            merge=own,
        ),
        Gauge(
            "hearth_foreign_in_flight",
            "Requests on the node that came by another way, where its engine says.",
            "node",
            source=each(lambda node: None if node.engine is None else node.foreign),
            merge=own,
        ),
        Gauge("hearth_waiting", "Requests that wait for a free node.", source=lambda: [((), admission.waiting)]),
        Gauge(
            "hearth_queue_length",
            "Requests that wait for a free node, by route and class.",
            "route",
            "priority",
            source=lambda: [((route, priority), count) for route, priority, count in admission.lengths()],
        ),
        Gauge("hearth_node_info", "1; the labels say what it is.", "node", "tier", "kind", source=info, merge=own),
        Gauge("hearth_node_state", "1 for the node's state, else 0.", "node", "state", source=many(_states), merge=own),
        Gauge(
            "hearth_breaker_open",
            "1 while the node is left alone.",
            "node",
            source=each(lambda node: node.breaker.state is not BreakerState.CLOSED),
            merge=own,
        ),
        Gauge(
            "hearth_breaker_state",
            "1 for the state of the node's breaker, else 0.",
            "node",
            "state",
            source=many(_breakers),
            merge=own,
        ),
        Gauge(
            "hearth_node_draining",
            "1 while the node gets no new requests.",
            "node",
            source=each(lambda node: node.draining),
            merge=own,
        ),
        Gauge("hearth_node_models", "Models that the node lists.", "node", source=each(_listed), merge=own),
        Gauge("hearth_node_loaded_models", "Models in the node's memory.", "node", source=each(_loaded), merge=own),
        Gauge(
            "hearth_node_vram_used_bytes",
            "Video memory that the node's loaded models take.",
            "node",
            source=each(_vram),
            merge=own,
        ),
        Gauge(
            "hearth_node_vram_bytes",
            "Video memory of the node, as the settings say.",
            "node",
            source=each(lambda node: None if node.spec.vram_gb is None else node.spec.vram_gb * GIB),
            merge=own,
        ),
        Gauge(
            "hearth_model_vram_bytes",
            "Video memory that a loaded model takes; 0 where the node does not say.",
            "node",
            "model",
            source=many(_models),
            merge=own,
        ),
    )


class Server(Protocol):
    """What replicas share."""

    up: bool


def sharing_gauges(server: Server, peers: Callable[[], Set[str]]) -> tuple[Family, ...]:
    """With Redis alone."""
    return (
        Gauge(
            "hearth_shared_state_up",
            "1 while Redis can be reached.",
            source=lambda: [((), server.up)],
            merge=Merge.MIN,
        ),
        Gauge(
            "hearth_replicas",
            "Processes of Hearth that share their state, with this one.",
            source=lambda: [((), len(peers()) + 1)],
            merge=Merge.OWN,
        ),
    )


def _states(node: Node) -> Iterator[tuple[str, float]]:
    return ((state.value, node.state is state) for state in NodeState)


def _breakers(node: Node) -> Iterator[tuple[str, float]]:
    return ((state.value, node.breaker.state is state) for state in BreakerState)


def _listed(node: Node) -> int | None:
    return None if node.models is None else len(node.models)


def _loaded(node: Node) -> int | None:
    return None if node.loaded is None else len(node.loaded)


def _vram(node: Node) -> int | None:
    loaded = node.loaded
    return None if loaded is None else sum(model.vram_bytes or 0 for model in loaded.values())


def _models(node: Node) -> Iterator[tuple[str, float]]:
    for name, model in list((node.loaded or {}).items())[:_LOADED]:
        yield name, model.vram_bytes or 0
