"""A fake node: an engine without a model on a real port, which remembers what it was asked and fails on request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from demo.engine import Engine
from demo.httpd import Answer, Exchange, Received, Server, deliver, json_answer
from demo.script import Script
from tests.fakes.behaviour import HEALTHY, Behaviour, Fault, On, misbehave

CONTROL = "/_fake/"
NO_REQUEST = frozenset({Behaviour.REFUSE, Behaviour.RESET_AT_ACCEPT})

EngineT = TypeVar("EngineT", bound=Engine)


class FaultSettings(TypedDict, total=False):
    """The settings of Fault, for those who pass them on."""

    on: On
    at: int | None
    after: int | None
    seconds: float | None
    size: int
    message: str
    location: str


@dataclass(slots=True)
class Queued:
    """A fault that is used up."""

    fault: Fault
    times: int


class FakeNode(Generic[EngineT]):
    """Use with `async with`. It listens on a free loopback port, which it keeps while it refuses connections.

    `requests` holds all that it received but for the control requests, `inferences` those that cost an engine work.
    `slots` bounds how many of these are served at a time; `queue` how many may wait before the node says it is busy.
    """

    def __init__(self, engine: EngineT, *, port: int = 0, slots: int | None = None, queue: int | None = None) -> None:
        self.engine = engine
        self.requests: list[Received] = []
        self.inferences: list[Received] = []
        self.connections = 0  # accepted so far
        self.open = 0  # inference requests being answered
        self.peak = 0
        self.served = 0  # inference requests that were answered to the end, in whatever way
        self.controls: Mapping[str, Callable[[Received], Awaitable[Answer]]] = {}  # more than `_control` has, by name
        self.details: Callable[[], dict[str, Any]] = dict  # more of the state
        self._server = Server(self._serve, port, self._admit)
        self._standing = HEALTHY
        self._queued: deque[Queued] = deque()
        self._slots = asyncio.Semaphore(slots) if slots else None
        self._queue = queue
        self._waiting = 0

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def script(self) -> Script:
        """What the node says; change it at any time."""
        return self.engine.script

    @property
    def aborted(self) -> list[Received]:
        """Inference requests whose client left before the answer ended; `aborted_at` says when."""
        return [request for request in self.inferences if request.aborted_at is not None]

    @property
    def seen(self) -> list[str | None]:
        """The Authorization header of each inference request."""
        return [request.authorization for request in self.inferences]

    @property
    def fault(self) -> Fault:
        """The standing fault, or the one that is to be used up before it."""
        return self._queued[0].fault if self._queued else self._standing

    def behave(
        self, behaviour: Behaviour | str, *, times: int | None = None, **settings: Unpack[FaultSettings]
    ) -> None:
        """Behaves in this way from now on, until told otherwise, also for what was queued before.

        With `times`, for so many requests only; such behaviours queue up and go before the standing one.
        """
        fault = Fault(Behaviour(behaviour), **settings)
        if times is None:
            self._queued.clear()
            self._standing = fault
            self._listen_or_refuse()
        elif fault.behaviour is Behaviour.REFUSE:
            raise ValueError("a node that refuses connections cannot count them: give no `times`")
        else:
            self._queued.append(Queued(fault, times))
        if fault.behaviour in NO_REQUEST:
            self._server.drop_connections(idle_only=True)

    def recover(self) -> None:
        """Behaves well from now on."""
        self.behave(Behaviour.OK)

    def crash(self) -> None:
        """Resets every connection and refuses new ones, as the death of the process would."""
        self._server.drop_connections()
        self.behave(Behaviour.REFUSE)

    async def until(self, condition: Callable[[Self], object], seconds: float = 2.0) -> None:
        """Returns once the condition holds; raises TimeoutError when it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition(self):
            if time.monotonic() > deadline:
                raise TimeoutError(f"open={self.open} served={self.served} aborted={len(self.aborted)}")
            await asyncio.sleep(0.002)

    async def start(self) -> None:
        self._server.listen()
        self._listen_or_refuse()

    async def stop(self) -> None:
        await self._server.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _listen_or_refuse(self) -> None:
        if self._server.port == 0:
            return  # not started yet
        if self._standing.behaviour is Behaviour.REFUSE:
            self._server.refuse()
        else:
            self._server.listen()

    def _admit(self) -> bool:
        self.connections += 1
        if self.fault.behaviour is not Behaviour.RESET_AT_ACCEPT:
            return True
        if self._queued:
            self._use_up(self._queued[0])
        return False

    def _take(self, inference: bool) -> Fault:
        """The fault for a request of this sort; one that is counted is used up by it."""
        for queued in self._queued:
            if _meets(queued.fault, inference):
                self._use_up(queued)
                return queued.fault
        return self._standing if _meets(self._standing, inference) else HEALTHY

    def _use_up(self, queued: Queued) -> None:
        queued.times -= 1
        if queued.times <= 0:
            self._queued.remove(queued)

    async def _serve(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path.startswith(CONTROL):
            control = self.controls.get(request.path.removeprefix(CONTROL))
            await deliver(exchange, await control(request) if control else self._control(request))
            return
        self.requests.append(request)
        inference = self.engine.infers(request)
        fault = self._take(inference)
        if not inference:
            await misbehave(exchange, self.engine, fault)
            return
        self.inferences.append(request)
        if self._slots and self._queue is not None and self._slots.locked() and self._waiting >= self._queue:
            await deliver(exchange, self.engine.error(self.engine.busy_status))
            return
        async with self._counted(), self._slot():
            await misbehave(exchange, self.engine, fault)
        self.served += 1

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            yield
        finally:
            self.open -= 1

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    def _control(self, request: Received) -> Answer:
        """`POST /_fake/behave` with a behaviour and its settings, `GET /_fake/state`, `GET /_fake/requests`."""
        action = request.path.removeprefix(CONTROL)
        if action == "state":
            return json_answer(self._state())
        if action == "requests":
            return json_answer([_shown(received) for received in self.requests])
        if action != "behave":
            return json_answer({"error": f"no such control: {action}"}, 404)
        try:
            self._behave_as(dict(request.json))
        except (ValueError, TypeError) as error:
            return json_answer({"error": str(error)}, 400)
        return json_answer(self._state())

    def _behave_as(self, settings: dict[str, Any]) -> None:
        """Takes {"behaviour": …, "times": …, "script": {…}, and the settings of Fault}."""
        for name, value in settings.pop("script", {}).items():
            setattr(self.script, name, value)
        behaviour = Behaviour(settings.pop("behaviour", Behaviour.OK))
        if "on" in settings:
            settings["on"] = On(settings["on"])
        if behaviour is Behaviour.REFUSE:
            # The answer to this very request must get out first.
            asyncio.get_running_loop().call_later(0.05, self.behave, behaviour)
        else:
            self.behave(behaviour, **settings)

    def _state(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "behaviour": self.fault.behaviour,
            "requests": len(self.requests),
            "inferences": len(self.inferences),
            "open": self.open,
            "peak": self.peak,
            "served": self.served,
            "aborted": len(self.aborted),
            **self.details(),
        }


def _meets(fault: Fault, inference: bool) -> bool:
    if fault.behaviour in NO_REQUEST:
        return False
    return fault.on is On.ALL or (fault.on is On.INFERENCE) == inference


def _shown(received: Received) -> dict[str, Any]:
    body = received.body.decode(errors="replace")
    return {"method": received.method, "path": received.path, "headers": received.headers, "body": body}
