"""The nodes and what is known of each: state, models, load. What this page shows is what routing uses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.domain import LOCAL_TIER, EngineLoad, LoadedModel, ModelInfo, NodeSpec, NodeState
from app.providers.base import Health, Kind
from app.routing.breaker import Breaker
from app.routing.names import canonical, matches

if TYPE_CHECKING:
    from app.routing.work import Work

LATENCIES = 15  # how many are remembered of each node

_CACHED_NAMES = 1024


class Node:
    """One upstream server as Hearth sees it now.

    `in_flight` is changed by `Slot` alone. A node that leaves and comes back is a new object, so that old requests
    settle their accounts with the old one.
    """

    __slots__ = (
        "__weakref__",
        "_key",
        "_names",
        "breaker",
        "draining",
        "engine",
        "foreign",
        "in_flight",
        "incarnation",
        "kind",
        "latencies",
        "loaded",
        "models",
        "name",
        "others_in_flight",
        "penalty_until",
        "picked",
        "reason",
        "spec",
        "state",
        "work",
    )

    def __init__(self, spec: NodeSpec, breaker: Breaker, kind: Kind | None = None) -> None:
        self.spec = spec
        self.name = spec.name
        self.breaker = breaker
        self.kind: Kind | None = None
        self.state = NodeState.UNKNOWN
        self.reason = "not reached yet"
        self.models: Mapping[str, ModelInfo] | None = None  # by the node's own name; None = not known yet
        self.loaded: Mapping[str, LoadedModel] | None = None  # None = this kind does not say
        self.engine: EngineLoad | None = None  # what the engine says of its load; None = nothing
        self.foreign = 0  # requests on the engine that came by another way, when it last said
        self.in_flight = 0
        self.others_in_flight = 0  # of other replicas, as they last said: requests, and loads without one
        self.latencies: deque[float] = deque(maxlen=LATENCIES)  # seconds that the last answers took, whole ones only
        self.incarnation = 0  # how often it came back; its engine may have forgotten everything then
        self.penalty_until = 0.0  # monotonic seconds; until then it is asked last
        self.picked = 0  # when it was last chosen, in choices
        self.draining = False
        self.work: Work | None = None  # kept by the forecast, where there is one
        self._names: dict[str, str] = {}
        self._key: Callable[[str], str | None] = str.lower
        if kind is not None:
            self.become(kind)

    @property
    def cloud(self) -> bool:
        return self.spec.tier != LOCAL_TIER

    @property
    def known_kind(self) -> Kind:
        """The kind of a node that may be asked: its kind is always known."""
        assert self.kind is not None, f"{self.name} is of unknown kind"
        return self.kind

    @property
    def in_flight_everywhere(self) -> int:
        """Requests of this and all other replicas, these as they last said."""
        return self.in_flight + self.others_in_flight

    @property
    def full(self) -> bool:
        """Whether `max_concurrency` requests are in flight, with those of other replicas.

        What these took in the last few dozen milliseconds is not known yet. So when all of them fill one node in the
        same moment, it gets at most `max_concurrency` from each.
        """
        limit = self.spec.max_concurrency
        return limit is not None and self.in_flight + self.others_in_flight >= limit

    def become(self, kind: Kind) -> None:
        """Takes on the kind that it was said or found to be."""
        self.kind = kind
        self._key = canonical if kind.names_have_tags else str.lower
        if self.spec.models and not self.cloud:
            self.list_models([ModelInfo(name) for name in self.spec.models])

    def list_models(self, models: Iterable[ModelInfo]) -> None:
        """Takes the models that the node serves; the operator's own list, where given, limits it."""
        self.models = {model.name: model for model in models}
        self._names = {}
        for name in self.models:
            self._names.setdefault(self._key(name) or name, name)
        # An exact name wins over one that differs in case only.
        self._names.update({name: name for name in self.models})

    def own_name(self, name: str) -> str | None:
        """The node's own name for the model that a client calls `name`, or None when it does not serve it."""
        return self._names.get(name) or self._names.get(self._key(name) or "")

    def cloud_name(self, wanted: str | None) -> str | None:
        """The model to ask this cloud target for, or None when it may not be asked for `wanted`."""
        return cloud_name(self.spec, wanted)

    def busy_seconds(self) -> float:
        """For how long it is asked last, as it said that it is busy."""
        return max(0.0, self.penalty_until - time.monotonic())

    def holds(self, own_name: str) -> bool:
        """Whether the model is in memory; True when the kind does not say."""
        return self.loaded is None or own_name in self.loaded


def cloud_name(spec: NodeSpec, wanted: str | None) -> str | None:
    """The model to ask a cloud target for: `wanted`, else its default; None when it may not be asked for it."""
    name = wanted or spec.default_model
    if name is None or (spec.models and not any(matches(pattern, name) for pattern in spec.models)):
        return None
    return name


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that can serve a request now, and its own name for the model."""

    node: Node
    model: str

    @property
    def info(self) -> ModelInfo | None:
        return (self.node.models or {}).get(self.model)


class Registry:
    """All nodes, local ones and cloud targets."""

    def __init__(self, nodes: Iterable[Node], on_change: Callable[[], None] = lambda: None) -> None:
        self._nodes = list(nodes)
        self._serving: dict[str, tuple[Candidate, ...]] = {}
        self.on_change = on_change

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def add(self, node: Node) -> None:
        self._nodes.append(node)
        self._changed()

    def remove(self, node: Node) -> None:
        self._nodes = [other for other in self._nodes if other is not node]
        self._changed()

    def _changed(self) -> None:
        self._serving.clear()
        self.on_change()

    def local(self) -> list[Node]:
        return [node for node in self._nodes if not node.cloud]

    def cloud(self) -> list[Node]:
        """Cloud targets in the order in which they are tried."""
        return sorted((node for node in self._nodes if node.cloud), key=lambda node: node.spec.tier)

    def serving(self, name: str) -> tuple[Candidate, ...]:
        """Local nodes that list the model, whatever their state."""
        found = self._serving.get(name)
        if found is None:
            if len(self._serving) >= _CACHED_NAMES:  # names come from clients
                self._serving.clear()
            found = tuple(
                Candidate(node, own) for node in self._nodes if not node.cloud and (own := node.own_name(name))
            )
            self._serving[name] = found
        return found

    def known_models(self) -> set[str]:
        """Every name that a local node lists."""
        return {name for node in self._nodes if not node.cloud for name in node.models or ()}

    def unlisted(self) -> list[Node]:
        """Local nodes whose models are not known yet: any of them may serve any name."""
        return [node for node in self._nodes if not node.cloud and node.models is None]

    def observe(
        self,
        node: Node,
        health: Health,
        models: Iterable[ModelInfo] | None = None,
        loaded: Mapping[str, LoadedModel] | None = None,
    ) -> None:
        """Takes what a probe saw. None for `models` or `loaded` leaves what was known."""
        changed = node.state is not health.state
        if changed and health.state is NodeState.HEALTHY:
            node.incarnation += 1
            if node.state is NodeState.DOWN:
                node.breaker.try_soon()
        node.state, node.reason = health.state, health.reason
        if models is not None:
            listed = {model.name: model for model in models}
            if listed != node.models:
                node.list_models(listed.values())
                self._serving.clear()
                changed = True
        if loaded is not None:
            changed = changed or node.loaded is None or loaded.keys() != node.loaded.keys()
            node.loaded = loaded
            if node.work is not None:
                node.work.listed()
        if changed:
            self.on_change()

    def hear(self, node: Node, load: EngineLoad | None, own: int) -> None:
        """Takes what the node's engine says of its load, while `own` requests of this and other replicas were there."""
        there = 0 if load is None else (load.running or 0) + (load.waiting or 0)
        foreign = max(0, there - own)
        if load is None and node.engine is None:
            return
        node.engine, node.foreign = load, foreign
        if node.work is not None:
            node.work.heard()

    def become(self, node: Node, kind: Kind) -> None:
        node.become(kind)
        self._serving.clear()
