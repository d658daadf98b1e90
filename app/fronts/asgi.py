"""What a raw ASGI endpoint needs: headers, a bounded body, an answer, and notice of a client that left."""

from __future__ import annotations

import asyncio
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from types import TracebackType
from typing import Any

import orjson

from app.errors import BodyTooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Lines:
    """Headers as the lines that they are on the wire, which Hearth's own server writes as they are.

    For every other they are pairs as it expects them. Whoever makes them sees to it that they hold nothing that is not
    allowed in a header. `length` is that of the body, None = it comes in chunks.
    """

    __slots__ = ("length", "lines")

    def __init__(self, lines: bytes, length: int | None = None) -> None:
        self.lines = lines if length is None else lines + b"content-length: %d\r\n" % length
        self.length = length

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        for line in self.lines.split(b"\r\n")[:-1]:
            name, _, value = line.partition(b": ")
            yield name, value


def lines_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


_WATCH_AFTER_SECONDS = 0.04


class ClientGone(Exception):
    """The client left before its request was whole."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Header values by lower-case name; of a repeated header the last."""
    return dict(scope["headers"])


def request_id(given: bytes | None) -> str:
    """The client's own id where it is a sane one: it goes into logs, headers and to the node."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{random.getrandbits(96):024x}"


async def read_body(receive: Receive, declared: bytes | None, limit: int) -> bytes:
    """The whole body, at most `limit` bytes. Raises `BodyTooLarge` as soon as that is clear, and `ClientGone`."""
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body") and len(body) <= limit:
        return body
    return await _read_rest(receive, message, limit)


async def _read_rest(receive: Receive, message: Message, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit // 2**20} MB; shorten it, or raise MAX_BODY_MB")


async def send_json(send: Send, status: int, document: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a whole JSON answer."""
    body = orjson.dumps(document)
    whole = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": whole})
    await send({"type": "http.response.body", "body": body})


class WatchStarts:
    """Begins watches when they are due, with one timer for all."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, ClientWatch]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watch: ClientWatch, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.append((loop.time() + _WATCH_AFTER_SECONDS, watch))
        if self._timer is None:
            self._timer = loop.call_later(_WATCH_AFTER_SECONDS, self._begin_those_due)

    def _begin_those_due(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and self._waiting[0][0] <= loop.time():
            self._waiting.popleft()[1].begin()
        self._timer = loop.call_at(self._waiting[0][0], self._begin_those_due) if self._waiting else None


class ClientWatch:
    """Cancels the work inside it when the client leaves, and swallows that cancellation; `gone` then tells.

    Enter it when the body has been read: from then on the server has only the client's leaving to report. It is begun
    after 40 ms, since an answer that is there sooner needs no watch, and a task costs what a small answer does.
    """

    __slots__ = ("_deadline", "_done", "_limit", "_receive", "_starts", "_task", "_watcher", "gone")

    def __init__(self, receive: Receive, starts: WatchStarts) -> None:
        self.gone = False
        self._deadline: float | None = None
        self._starts = starts
        self._done = False
        self._limit: asyncio.TimerHandle | None = None
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> ClientWatch:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._starts.add(self, task.get_loop())
        return self

    def begin(self) -> None:
        """Watches from now on, if the work goes on still."""
        if self._task is not None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
            self._set_limit()

    def ends_at(self, deadline: float) -> None:
        """A client that reads so slowly that its answer lasts until then, on the loop's clock, counts as gone."""
        self._deadline = deadline
        if self._watcher is not None:
            self._set_limit()

    def _set_limit(self) -> None:
        if self._deadline is not None:
            self._limit = asyncio.get_running_loop().call_at(self._deadline, self._leave)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        task, watcher = self._task, self._watcher
        assert task is not None
        if watcher is not None:
            watcher.cancel()
        if self._limit is not None:
            self._limit.cancel()
        # The watcher's end holds on to this object: without this the two would wait for the garbage collector.
        self._task = self._watcher = None
        return self.gone and kind is asyncio.CancelledError and task.uncancel() == 0

    def done(self) -> None:
        """All is about to be sent: what the server reports after that is no leaving."""
        self._done = True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._done:
            self._leave()

    def _leave(self) -> None:
        if self._task is not None and not self.gone:
            self.gone = True
            self._task.cancel()
