"""Models that the operator wants in memory before anybody asks for them: PRELOAD, and `preload` of single nodes.

Each is loaded once each time that its node comes up. What drives it out later had a reason, and what is asked for now
decides then. A load that would drive out a model which is in use waits until there is room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

from app.domain import NodeState, Operation, Request, Role
from app.errors import ModelNotFound
from app.routing.forecast import Forecast
from app.routing.job import Job
from app.routing.registry import Candidate, Node, Registry
from app.routing.routes import Routes
from app.routing.work import Seat, Work

_LOOK_SECONDS = 30.0  # between looks although nothing changed: what was in use may be so no more
_LIKELY = 0.9  # a load that so probably drives a model out is taken to do so
_LATELY = 0.05  # requests: less than that is left of one after three minutes
_EVER = 86400.0

StartLoad = Callable[[Candidate, Job], None]


class Preload:
    """`models` are names as clients use them, each of which one node is to have; the best one is chosen."""

    def __init__(
        self, models: Sequence[str], registry: Registry, routes: Routes, forecast: Forecast, start_load: StartLoad
    ) -> None:
        self._models = models
        self._registry = registry
        self._routes = routes
        self._forecast = forecast
        self._start_load = start_load
        self._started: WeakKeyDictionary[Node, tuple[int, set[str]]] = WeakKeyDictionary()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """A node came, went or changed."""
        self._changed.set()

    async def run(self) -> None:
        """Until it is cancelled. Loads that it has started are not its own."""
        while True:
            self._changed.clear()
            self.look()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def look(self) -> None:
        """Starts what is wanted, is not there, and has room."""
        nodes = self._registry.local()
        if any(node.state is NodeState.UNKNOWN for node in nodes):
            return  # one that was not asked yet may have it already
        for node in nodes:
            for name in node.spec.preload:
                there = [each for each in self._candidates(name) if each.node is node]
                self._load_one(name, there)
        for name in self._models:
            self._load_one(name, self._candidates(name))

    def _candidates(self, name: str) -> list[Candidate]:
        """Nodes that are up and serve it."""
        try:
            local = self._routes.resolve(name).local
        except ModelNotFound:
            return []  # it may be pulled later
        return [] if local is None else [each for each in self._registry.serving(local) if _usable(each.node)]

    def _load_one(self, name: str, candidates: Iterable[Candidate]) -> None:
        candidates = list(candidates)
        if any(self._has(each) for each in candidates):
            return
        job = self._job(name, candidates)
        free = [each for each in candidates if each.node.known_kind.load is not None and self._has_room(each)]
        if free:
            best = min(free, key=lambda each: self._cost(each, job))
            self._done(best.node).add(best.model)
            self._start_load(best, job)

    def _has(self, candidate: Candidate) -> bool:
        """Whether it is in memory, on its way there, or was since the node came up."""
        node = candidate.node
        seat = None if node.work is None else node.work.seats.get(candidate.model)
        loading = seat is not None and seat.loading is not None
        return loading or node.holds(candidate.model) or candidate.model in self._done(node)

    def _done(self, node: Node) -> set[str]:
        incarnation, models = self._started.get(node, (-1, set[str]()))
        if incarnation != node.incarnation:
            models = set()
            self._started[node] = node.incarnation, models
        return models

    def _job(self, name: str, candidates: Sequence[Candidate]) -> Job:
        """A request for nothing, with what a load depends on."""
        infos = [each.info for each in candidates]
        embeds = any(info is not None and _embeds_only(info.capabilities) for info in infos)
        job = Job(Request("", Operation.EMBEDDING if embeds else Operation.CHAT, name, b"", {}))
        job.num_ctx = self._routes.resolve(name).num_ctx if candidates else None
        return job

    def _cost(self, candidate: Candidate, job: Job) -> tuple[float, float]:
        seat = self._forecast.seat(candidate)
        return seat.work.chance_of_eviction(seat.takes), self._forecast.prediction(seat, job).score

    def _has_room(self, candidate: Candidate) -> bool:
        """Whether a load costs nobody anything; one at a time."""
        seat = self._forecast.seat(candidate)
        work = seat.work
        if work.loads:
            return False
        chance = work.chance_of_eviction(seat.takes)
        if not chance:
            return True
        busy = work.node.in_flight_everywhere or work.node.foreign or work.promised
        return not busy and not any(self._missed(work, seat, chance >= _LIKELY))

    def _missed(self, work: Work, seat: Seat, surely: bool) -> Iterator[str]:
        """Models in the node's memory that somebody would miss. When one has to go for sure, then also those of which
        nothing is known, and those that were loaded for the operator."""
        now = self._forecast.clock()
        for model in work.in_memory():
            other = work.seats.get(model)
            asked = other is not None and other.demand.ahead(now, _EVER) > _LATELY
            if asked or (surely and (other is None or model in self._done(work.node))):
                yield model


def _usable(node: Node) -> bool:
    return node.state is NodeState.HEALTHY and not node.draining and node.spec.role is not Role.PREFILL


def _embeds_only(capabilities: frozenset[str] | None) -> bool:
    return capabilities is not None and "embedding" in capabilities and "completion" not in capabilities
