"""A cluster of simulated engines behind Hearth's own routing, on a clock that jumps from event to event.

Everything from the dispatcher to the translators is the real thing; only the connections to nodes are made up, and
minutes of traffic take seconds.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.domain import Failure, LoadedModel, ModelInfo, NodeSpec, NodeState, Operation, Request
from app.errors import NodeFailure
from app.providers import KINDS
from app.providers.base import Health
from app.routing.admission import Admission
from app.routing.asking import Asking, Timeouts
from app.routing.breaker import Breaker
from app.routing.choice import Choice
from app.routing.dispatch import Dispatcher
from app.routing.loads import Loads
from app.routing.policies import Policy
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.registry import Node, Registry
from app.routing.retry import Retry
from app.routing.routes import Routes
from app.routing.trail import Trail

_PIECES = 12  # in which an answer comes
_MODEL_BYTES = 5 * 10**9


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when there is nothing left to do."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now


class _Skipping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self._loop.now += max(0.0, timeout)
        return []


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a coroutine on a clock of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


@dataclass(frozen=True)
class Machine:
    """What a simulated node can do. `crowding`: how much another stream slows one down, as a share."""

    prefill_tps: float
    decode_tps: float
    slots: int
    models: tuple[str, ...]
    cache_tokens: int = 40_000
    max_loaded: int = 1
    load_s: float = 10.0
    crowding: float = 0.05
    slots_per_model: bool = False  # as Ollama counts them
    honest: bool = True  # it says truly how long it took
    sizes: Mapping[str, int] = field(default_factory=dict)


class Engine:
    """One simulated node."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loaded: OrderedDict[str, int] = OrderedDict()  # with the requests on each
        self.running = 0
        self.loads = self.requests = self.hit_tokens = self.prompt_tokens = self.aborted = 0
        self.down = False
        self.open: set[_Answer] = set()
        self._free: dict[str, asyncio.Semaphore] = {}
        self._loading = asyncio.Lock()
        self._left = asyncio.Event()
        self._cache: OrderedDict[tuple[Any, ...], int] = OrderedDict()

    def slots(self, model: str) -> asyncio.Semaphore:
        key = model if self.machine.slots_per_model else ""
        return self._free.setdefault(key, asyncio.Semaphore(self.machine.slots))

    async def load(self, model: str) -> float:
        """Seconds until the model was in memory."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._loading:
            if model not in self.loaded:
                while len(self.loaded) >= self.machine.max_loaded:
                    idle = next((other for other, users in self.loaded.items() if not users), None)
                    if idle is not None:
                        del self.loaded[idle]
                    else:
                        self._left.clear()
                        await self._left.wait()
                await self._bring(model)
            self.loaded.move_to_end(model)
            self.loaded[model] += 1
        return loop.time() - began

    async def _bring(self, model: str) -> None:
        self.loads += 1
        self.loaded[model] = 0  # engines list a model from the moment on at which they begin to load it
        try:
            await asyncio.sleep(self.machine.load_s)
        except asyncio.CancelledError:
            del self.loaded[model]
            raise

    def leave(self, model: str) -> None:
        if model in self.loaded:
            self.loaded[model] -= 1
        self._left.set()

    def read(self, model: str, messages: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
        """Tokens of the prompt, and those that were cached."""
        total = hit = 0
        key: tuple[Any, ...] = (model,)
        known = True
        for message in messages:
            tokens = len(message["content"]) // 4 + 2
            key = (hash(key), message["role"], hash(message["content"]))
            known = known and key in self._cache
            hit += tokens if known else 0
            total += tokens
            self._cache[key] = tokens
            self._cache.move_to_end(key)
        while sum(self._cache.values()) > self.machine.cache_tokens:
            self._cache.popitem(last=False)
        self.requests += 1
        self.prompt_tokens += total
        self.hit_tokens += hit
        return total, hit

    def crash(self) -> None:
        self.down = True
        self._cache.clear()
        for answer in list(self.open):
            answer.close()
            answer.put(NodeFailure(Failure.CUT, "the simulated node died"))

    async def answer(self, fields: dict[str, Any], emit: Callable[[dict[str, Any], bool], None]) -> None:
        loop = asyncio.get_running_loop()
        machine, model = self.machine, fields["model"].removesuffix(":latest")
        async with self.slots(model):
            load = await self.load(model)
            self.running += 1
            try:
                if not fields["messages"]:
                    emit({"message": {"content": ""}, "done": True, "done_reason": "load"}, True)
                    return
                total, hit = self.read(model, fields["messages"])
                prefill = (total - hit) / machine.prefill_tps
                await asyncio.sleep(prefill)
                tokens = fields["options"]["num_predict"]
                began, step = loop.time(), max(1, tokens // _PIECES)
                emit({"message": {"content": "t"}, "done": False}, False)
                for done in range(1, tokens, step):
                    count = min(step, tokens - done)
                    await asyncio.sleep(count * (1 + machine.crowding * (self.running - 1)) / machine.decode_tps)
                    emit({"message": {"content": "t" * count}, "done": False}, False)
                nanoseconds = 1e9 if machine.honest else 0
                emit(
                    {
                        "message": {"content": ""},
                        "done": True,
                        "done_reason": "stop",
                        "prompt_eval_count": total,
                        "eval_count": tokens,
                        "load_duration": int(load * nanoseconds),
                        "prompt_eval_duration": int(prefill * nanoseconds),
                        "eval_duration": int((loop.time() - began) * nanoseconds),
                    },
                    True,
                )
            except asyncio.CancelledError:
                self.aborted += 1
                raise
            finally:
                self.running -= 1
                self.leave(model)


class _Answer:
    """Stands in for `NodeResponse`."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, engine: Engine, fields: dict[str, Any]) -> None:
        self.at_end = False
        self._engine = engine
        self._pieces: asyncio.Queue[bytes | NodeFailure] = asyncio.Queue()
        self._first: bytes | NodeFailure | None = None
        engine.open.add(self)
        self._task = asyncio.create_task(self._run(fields))

    async def _run(self, fields: dict[str, Any]) -> None:
        stream = fields.get("stream", True)
        text = ""

        def emit(part: dict[str, Any], last: bool) -> None:
            nonlocal text
            if stream:
                self.put(orjson.dumps(part) + b"\n")
            else:
                text += part["message"]["content"]
                if last:
                    self.put(orjson.dumps({**part, "message": {"content": text}}))
            if last:
                self.put(b"")

        try:
            await self._engine.answer(fields, emit)
        finally:
            self._engine.open.discard(self)

    def put(self, piece: bytes | NodeFailure) -> None:
        self._pieces.put_nowait(piece)

    async def head(self) -> None:
        self._first = await self._pieces.get()
        if isinstance(self._first, NodeFailure):
            raise self._first

    async def read(self) -> bytes:
        piece, self._first = self._first, None
        if piece is None:
            piece = await self._pieces.get()
        if isinstance(piece, NodeFailure):
            raise piece
        self.at_end = piece == b""
        return piece

    async def body(self) -> bytes:
        parts = []
        while part := await self.read():
            parts.append(part)
        return b"".join(parts)

    async def drain(self) -> None:
        self.at_end = True

    def began(self, events: int) -> None: ...

    def close(self) -> None:
        self._task.cancel()


class _Wires:
    """Stands in for `Upstream`."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def target(self, spec: NodeSpec) -> Engine:
        return self._engines[spec.url]

    async def send(self, target: Engine, path: str, extra: Any, body: bytes, limits: Any) -> _Answer:
        if target.down:
            raise NodeFailure(Failure.CONNECT, "no connection", sent=False)
        answer = _Answer(target, orjson.loads(body))
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer


class _Nobody:
    def attempt(self, node: Node, record: Any) -> None: ...


class Cluster:
    """The nodes and Hearth's routing in front of them. Make it inside the running loop, and close it."""

    def __init__(
        self,
        machines: Iterable[Machine],
        policy: Policy,
        hints: Iterable[Mapping[str, Any]] = (),
        *,
        probe_seconds: float = 5.0,
        seed: int = 1,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.policy = policy
        self._uniform = random.Random(seed)
        machines = list(machines)
        given = list(hints) or [{} for _ in machines]
        self.engines = [Engine(machine) for machine in machines]
        specs = [
            NodeSpec(f"http://n{index}", kind="ollama", name=f"n{index}", **hint) for index, hint in enumerate(given)
        ]
        self.nodes = [Node(spec, Breaker(3, 15.0, clock=loop.time), KINDS["ollama"]) for spec in specs]
        self.admission = Admission(chooser=policy if policy.schedules else None)
        self.registry = Registry(self.nodes, self.admission.changed)
        upstream: Any = _Wires(dict(zip((spec.url for spec in specs), self.engines, strict=True)))
        asking = Asking(upstream, Timeouts(3600, 3600))
        self.loads: Loads | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        if isinstance(policy, ShortestExpectedDelay):
            self.loads = Loads(asking, policy.forecast)
            policy.start_load = self.loads.start
            policy.forecast.on_look = self._look_soon
        self.dispatcher = Dispatcher(
            registry=self.registry,
            routes=Routes((), self.registry),
            choice=Choice(policy, self.admission, _Nobody(), 3600),
            asking=asking,
            retry=Retry(4),
            request_seconds=36000,
            loads=self.loads,
            suspect=self._look_soon,
        )
        for index in range(len(self.nodes)):
            self.look(index)
            self._own(self._probe(index, probe_seconds))

    def look(self, index: int) -> None:
        """What a probe does."""
        engine, node = self.engines[index], self.nodes[index]
        if engine.down:
            self.registry.observe(node, Health(NodeState.DOWN, "connection refused"))
            return
        models = [
            ModelInfo(name, size_bytes=engine.machine.sizes.get(name, _MODEL_BYTES)) for name in engine.machine.models
        ]
        loaded = {name: LoadedModel(name, _MODEL_BYTES) for name in engine.loaded}
        self.registry.observe(node, Health(NodeState.HEALTHY), models, loaded)

    def _look_soon(self, node: Node) -> None:
        async def look() -> None:
            work, clock = node.work, asyncio.get_running_loop().time
            while True:
                spread = 0.1 if work is not None and work.in_doubt(clock()) else 0.5
                await asyncio.sleep(spread * self._uniform.random())
                self.look(self.nodes.index(node))
                if work is None or not work.in_doubt(clock()):
                    return

        self._own(look())

    async def _probe(self, index: int, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds * self._uniform.uniform(0.9, 1.1))
            self.look(index)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self.loads is not None:
            await self.loads.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ask(
        self, model: str, messages: list[dict[str, str]], tokens: int, stream: bool = True
    ) -> tuple[float, float, Trail]:
        """Seconds to the first content and to the end."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        fields = {"model": model, "messages": messages, "max_tokens": tokens, "stream": stream}
        request = Request("r", Operation.CHAT, model, b"", fields, stream=stream)
        trail = Trail()
        reply = await self.dispatcher.dispatch(request, trail)
        first = loop.time() - began
        try:
            while not reply.over:
                await reply.next()
        finally:
            reply.close()
        return first, loop.time() - began, trail
