"""Looks after the nodes: what kind they are, whether they are up, what they serve. No inference, no model load.

Each node has a loop of its own, so that a hanging one delays nobody. The control plane's client is httpx.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.domain import LoadedModel, ModelInfo, NodeState
from app.gauges import Gauges, Unanswered
from app.lean_httpx import httpx
from app.node_clients import Clients, causes, why_no_tls
from app.providers.base import Health, Kind
from app.providers.urls import join
from app.routing.registry import Node, Registry
from app.telemetry.logs import Logger
from app.tls import Trust, UnusableCaFile

# A node is called down after this much bad evidence in a row. A node at work that is slow to answer is half a case.
_DOWN_AT = 2.0
_SLOW_BUT_BUSY = 0.5
_UP_AFTER = 2  # good probes in a row, once it was down
_JOINING_PROBES = 120  # bad ones until a node that registered and was never up counts as down
_SOON_SECONDS = 0.5  # to the next probe while the evidence is not enough
_IN_DOUBT_SECONDS = 0.1  # while requests wait to hear which models a load has left in memory
_JITTER = 0.1
_REFUSED = "connection refused"
_NOT_PROBED = "not probed, as its health_check is off"
_ANSWER_BYTES = 8 * 2**20
_GAUGE_SECONDS = 1.0  # that an engine may take to say how busy it is, at most
_LOOPBACKS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class _Seen:
    """One probe's result. `weight` is how much it speaks against the node."""

    health: Health
    models: list[ModelInfo] | None = None
    loaded: Mapping[str, LoadedModel] | None = None
    weight: float = 0.0


class _Bad(Exception):
    """A probe failed; `slow` when the node may only be busy."""

    def __init__(self, reason: str, *, slow: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.slow = slow


class Prober:
    """Watches every node of the registry until it is cancelled."""

    def __init__(
        self,
        registry: Registry,
        kinds: Sequence[Kind],
        *,
        interval_seconds: float,
        timeout_seconds: float,
        log: Logger,
        trust: Trust,
    ) -> None:
        self._registry = registry
        self._kinds = kinds  # in the order in which they are recognised
        self._interval = interval_seconds
        self._timeout = timeout_seconds
        self._log = log
        self._trust = trust
        self._wake: dict[Node, asyncio.Event] = {}
        self._start: Callable[[Node], asyncio.Task[None]] | None = None  # once it runs
        self._tasks: dict[Node, asyncio.Task[None]] = {}
        self._pending: set[Node] = set()
        self._gauges = Gauges(min(timeout_seconds, _GAUGE_SECONDS))
        self.first_round = asyncio.Event()

    def suspect(self, node: Node) -> None:
        """A request met trouble: look at the node now rather than at its turn."""
        if node in self._wake:
            self._wake[node].set()

    def watch(self, node: Node) -> None:
        """Looks after one more node, from now on or from the start. One that may not be probed is taken to be up."""
        if not node.spec.health_check:
            self._registry.observe(node, Health(NodeState.HEALTHY, _NOT_PROBED))
            return
        self._wake[node] = asyncio.Event()
        if self._start is not None:
            self._tasks[node] = self._start(node)

    def forget(self, node: Node) -> None:
        """Looks after this node no more."""
        self._wake.pop(node, None)
        self._pending.discard(node)
        task = self._tasks.pop(node, None)
        if task is not None:
            task.cancel()

    async def run(self) -> None:
        async with Clients(self._trust, seconds=self._timeout) as clients, asyncio.TaskGroup() as tasks:
            self._start = lambda node: tasks.create_task(self._watch(clients, node), name=f"probe {node.name}")
            self._pending = {node for node in self._registry if node.spec.health_check}
            for node in self._registry:
                self.watch(node)
            if not self._pending:
                self.first_round.set()
            await asyncio.Event().wait()  # nodes may come at any time

    async def _watch(self, clients: Clients, node: Node) -> None:
        against, good = 0.0, 0
        wake = self._wake[node]
        while True:
            wake.clear()
            seen = await self._look(clients, node)
            against = against + seen.weight if seen.weight else 0.0
            good = 0 if seen.weight else good + 1
            settled = self._judge(node, seen, against, good)
            await self._hear(clients, node, seen)
            self._pending.discard(node)
            if not self._pending:
                self.first_round.set()
            await self._pause(node, wake, settled)

    def _judge(self, node: Node, seen: _Seen, against: float, good: int) -> bool:
        """Tells the registry what is now believed; False when one more probe should come soon."""
        before = node.state
        if before is NodeState.JOINING and seen.weight and against < _JOINING_PROBES:
            return False  # an engine registers before it listens, and may load its model for minutes
        if seen.weight:
            settled = before is NodeState.DOWN or against >= _DOWN_AT or before is NodeState.UNKNOWN
            if settled:
                self._registry.observe(node, seen.health)
        else:
            settled = before is not NodeState.DOWN or good >= _UP_AFTER
            if settled:
                self._registry.observe(node, seen.health, seen.models, seen.loaded)
        if node.state is not before:
            self._log.info("node changed", node=node.name, state=node.state, before=before, reason=node.reason)
        return settled

    async def _pause(self, node: Node, wake: asyncio.Event, settled: bool) -> None:
        seconds = self._interval if settled else _SOON_SECONDS
        if _in_doubt(node):
            seconds = _IN_DOUBT_SECONDS
        try:
            async with asyncio.timeout(seconds * random.uniform(1 - _JITTER, 1 + _JITTER)):
                await wake.wait()
            many = _IN_DOUBT_SECONDS if _in_doubt(node) else _SOON_SECONDS
            await asyncio.sleep(many * random.random())  # many requests may raise the same suspicion
        except TimeoutError:
            pass

    async def _look(self, clients: Clients, node: Node) -> _Seen:
        try:
            async with asyncio.timeout(self._timeout * 2):
                client = await clients.of(node.spec)
                kind = node.kind or await self._recognise(client, node)
                return await self._probe(client, node, kind)
        except _Bad as bad:
            slow = bad.slow and node.in_flight_everywhere > 0
            return _Seen(Health(NodeState.DOWN, bad.reason), weight=_SLOW_BUT_BUSY if slow else 1.0)
        except UnusableCaFile as error:
            return _Seen(Health(NodeState.DOWN, str(error)), weight=1.0)
        except TimeoutError:
            weight = _SLOW_BUT_BUSY if node.in_flight_everywhere else 1.0
            return _Seen(Health(NodeState.DOWN, "does not answer probes in time"), weight=weight)

    async def _hear(self, clients: Clients, node: Node, seen: _Seen) -> None:
        """Asks a node that is up how busy its engine is."""
        if seen.weight or node.state is not NodeState.HEALTHY or node.cloud:
            self._registry.hear(node, None, 0)
            return
        client = await clients.of(node.spec)

        async def get(path: str, at_most: int) -> tuple[int, bytes]:
            try:
                return await self._fetch(client, node, path, at_most)
            except _Bad as error:
                raise Unanswered from error

        before = node.in_flight_everywhere
        load = await self._gauges.read(node, get)
        self._registry.hear(node, load, max(before, node.in_flight_everywhere))

    async def _probe(self, client: httpx.AsyncClient, node: Node, kind: Kind) -> _Seen:
        probe = kind.probe
        health = probe.health(*await self._get(client, node, probe.health_path))
        if health.state is NodeState.DOWN:
            raise _Bad(health.reason)
        if health.state is not NodeState.HEALTHY:
            return _Seen(health)
        models = None if node.spec.models and not node.cloud else await self._models(client, node, kind)
        return _Seen(health, models, await self._loaded(client, node, kind))

    async def _models(self, client: httpx.AsyncClient, node: Node, kind: Kind) -> list[ModelInfo] | None:
        status, document = await self._get(client, node, kind.probe.models_path)
        if status == httpx.codes.TOO_MANY_REQUESTS or (node.cloud and status != httpx.codes.OK):
            return None  # not every cloud lists its models
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise _Bad("refuses the key when asked for its models; set the node's api_key")
        if status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            raise _Bad("lists no models; name them in the node's models")
        try:
            return kind.probe.models(document)
        except ValueError as error:
            raise _Bad(f"its list of models cannot be read: {error}") from error

    async def _loaded(self, client: httpx.AsyncClient, node: Node, kind: Kind) -> dict[str, LoadedModel] | None:
        if kind.probe.loaded_path is None or kind.probe.loaded is None:
            return None
        try:
            status, document = await self._get(client, node, kind.probe.loaded_path)
            return {model.name: model for model in kind.probe.loaded(document)} if status == httpx.codes.OK else None
        except (_Bad, ValueError):
            return None  # slow while a model loads: no reason to call the node down

    async def _recognise(self, client: httpx.AsyncClient, node: Node) -> Kind:
        """Finds the node's kind by what only that kind answers."""
        answers: dict[str, tuple[int, Any]] = {}
        for kind in self._kinds:
            for signature in kind.signatures:
                if signature.path not in answers:
                    answers[signature.path] = await self._get(client, node, signature.path)
            if kind.signatures and all(sign.matches(*answers[sign.path]) for sign in kind.signatures):
                self._registry.become(node, kind)
                self._log.info("node recognised", node=node.name, kind=kind.name)
                return kind
        raise _Bad("answers, but as no kind of node that Hearth knows; set its kind")

    async def _get(self, client: httpx.AsyncClient, node: Node, path: str) -> tuple[int, Any]:
        """Status, and the JSON document or None. Raises `_Bad` when there is no answer."""
        status, body = await self._fetch(client, node, path, _ANSWER_BYTES)
        return status, _json(body)

    async def _fetch(self, client: httpx.AsyncClient, node: Node, path: str, at_most: int) -> tuple[int, bytes]:
        """Status and body. Raises `_Bad` when there is no answer, or one that is too long."""
        headers = {"authorization": f"Bearer {node.spec.api_key}"} if node.spec.api_key else {}
        try:
            async with client.stream("GET", join(node.spec.url, path), headers=headers) as response:
                body = b""
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > at_most:
                        raise _Bad("answers probes with endless data")
        except httpx.ConnectTimeout as error:
            raise _Bad("no connection in time; is its address right, and no firewall between?") from error
        except httpx.ConnectError as error:
            reason = _connect_reason(error)
            raise _Bad(reason + _container_hint(node.spec.url) if reason == _REFUSED else reason) from error
        except httpx.TimeoutException as error:
            raise _Bad("does not answer probes in time", slow=True) from error
        except httpx.HTTPError as error:
            raise _Bad(f"does not answer as an HTTP server does ({type(error).__name__})") from error
        return response.status_code, body


def _in_doubt(node: Node) -> bool:
    return node.work is not None and node.work.in_doubt(time.monotonic())


def _connect_reason(error: BaseException) -> str:
    """In plain words."""
    text = " ".join(f"{type(cause).__name__} {cause}" for cause in causes(error)).lower()
    if "refused" in text:
        return _REFUSED
    if no_tls := why_no_tls(error):
        return no_tls
    if "gaierror" in text or "name or service" in text or "nodename" in text:
        return "its name could not be resolved"
    if "unreachable" in text or "no route" in text:
        return "no route to it"
    return "no connection"


def _container_hint(url: str) -> str:
    """Why an address of this machine may lead nowhere, where that is a container."""
    if urlsplit(url).hostname not in _LOOPBACKS or not Path("/.dockerenv").exists():
        return ""
    return "; inside a container localhost is the container itself: use host.docker.internal or the host's address"


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
