"""A small HTTP/1.1 server on asyncio for nodes that are not real. The only module that knows what HTTP looks like.

It parses by hand and gives its user the raw connection, so that a fake node can also answer wrongly on purpose.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from enum import StrEnum
from http import HTTPStatus
from typing import Any, cast

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
BACKLOG = 1024
LOOPBACK = "127.0.0.1"


class BadRequest(Exception):
    """What came in is not an HTTP/1.1 request that this server reads."""


@dataclass(slots=True, eq=False)
class Received:
    """One request as it arrived. Header names are lower-case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool = True
    at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None  # when this side ended its answer, well or badly
    aborted_at: float | None = None  # when the peer left before that

    @property
    def json(self) -> Any:
        """The body, decoded; raises ValueError when it is not JSON."""
        return json.loads(self.body)

    @property
    def authorization(self) -> str | None:
        """The credentials that came with it, as sent."""
        return self.headers.get("authorization")


class RequestParser:
    """Cuts a stream of bytes into requests. Sans-I/O."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._requests = self._parse()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Received | None:
        """The next whole request, or None when more bytes are needed. Raises BadRequest."""
        return next(self._requests)

    def _parse(self) -> Generator[Received | None, None, None]:
        while True:
            head = yield from self._until(b"\r\n\r\n", MAX_HEAD_BYTES)
            method, target, version, headers = _parse_head(head)
            body = yield from self._body(headers)
            path, _, query = target.partition("?")
            yield Received(method, path, query, headers, body, _keeps_alive(version, headers))

    def _body(self, headers: Mapping[str, str]) -> Generator[None, None, bytes]:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return (yield from self._chunks())
        return (yield from self._exactly(_number(headers.get("content-length", "0"), 10)))

    def _chunks(self) -> Generator[None, None, bytes]:
        body = bytearray()
        while True:
            line = yield from self._until(b"\r\n", MAX_HEAD_BYTES)
            size = _number(line.partition(b";")[0].decode("latin-1"), 16)
            if size == 0:
                break
            body += yield from self._exactly(size)
            yield from self._until(b"\r\n", 2)
            if len(body) > MAX_BODY_BYTES:
                raise BadRequest("body too large")
        while (yield from self._until(b"\r\n", MAX_HEAD_BYTES)):
            pass  # trailer fields
        return bytes(body)

    def _until(self, mark: bytes, limit: int) -> Generator[None, None, bytes]:
        while (end := self._buffer.find(mark)) < 0:
            if len(self._buffer) > limit + len(mark):
                raise BadRequest("head too large")
            yield
        return self._take(end, len(mark))

    def _exactly(self, count: int) -> Generator[None, None, bytes]:
        if count > MAX_BODY_BYTES:
            raise BadRequest("body too large")
        while len(self._buffer) < count:
            yield
        return self._take(count, 0)

    def _take(self, count: int, skip: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[: count + skip]
        return taken


def _parse_head(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
    except ValueError:
        raise BadRequest("no request line") from None
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return method, target, version, headers


def _keeps_alive(version: str, headers: Mapping[str, str]) -> bool:
    return version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"


def _number(text: str, base: int) -> int:
    try:
        value = int(text.strip(), base)
    except ValueError:
        raise BadRequest(f"not a length: {text!r}") from None
    if value < 0:
        raise BadRequest(f"not a length: {text!r}")
    return value


class Exchange:
    """One request, and the means to answer it, well or badly."""

    def __init__(self, request: Received, connection: Connection) -> None:
        self.request = request
        self.begun = False  # a status line was written
        self.over = False  # the answer ended, or this side cut it
        self._chunked = False
        self._connection = connection
        self._transport = connection.transport

    @property
    def socket(self) -> socket.socket:
        return connection_socket(self._transport)

    def head(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """Writes the status line and headers; without a length the body follows in chunks."""
        self.raw(render_head(status, headers, length))
        self.begun = True
        self._chunked = length is None

    def body(self, data: bytes) -> None:
        """Writes a part of the body, framed as the head announced."""
        if self.request.method == "HEAD" or not data:
            return
        self.raw(chunk(data) if self._chunked else data)

    def end(self) -> None:
        """Ends the answer; the connection stays open when the peer wants it to."""
        if self._chunked and self.request.method != "HEAD":
            self.raw(b"0\r\n\r\n")
        self.finish()
        if not self.request.keep_alive:
            self.close()

    def raw(self, data: bytes) -> None:
        """Writes bytes as they are, below all framing."""
        self._transport.write(data)

    async def drain(self) -> None:
        """Returns once the kernel has taken all that was written."""
        await self._connection.writable.wait()

    def close(self) -> None:
        """Closes the connection with a FIN, after what was written."""
        self.finish()
        self._transport.close()

    def reset(self) -> None:
        """Closes the connection with a RST. Call `drain` before, or what was written is lost."""
        self.finish()
        reset_on_close(self.socket)
        self._transport.abort()

    def finish(self) -> None:
        """Notes that this side is done: from now on the peer may leave without aborting anything."""
        if self.over:
            return
        self.over = True
        if self.request.aborted_at is None:
            self.request.ended_at = time.monotonic()


def render_head(status: int, headers: Mapping[str, str], length: int | None = None) -> bytes:
    """A status line and headers with their framing; None announces chunks."""
    framing = ("transfer-encoding", "chunked") if length is None else ("content-length", str(length))
    fields = [("date", formatdate(usegmt=True)), *headers.items(), framing]
    lines = [f"HTTP/1.1 {status} {_reason(status)}", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def connection_socket(transport: asyncio.BaseTransport) -> socket.socket:
    found: socket.socket = transport.get_extra_info("socket")
    return found


def reset_on_close(connection: socket.socket) -> None:
    """Makes the close of this socket a RST instead of a FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


Serve = Callable[[Exchange], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One client connection: one request at a time, the next once the answer has ended."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._server = server
        self._parser = RequestParser()
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return self._exchange is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        if not self._server.listening:  # it was accepted in the very moment in which that ended
            reset_on_close(connection_socket(transport))
            self.transport.abort()
            return
        connection_socket(transport).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport.set_write_buffer_limits(0)  # so that `drain` waits for the kernel, not for our own buffer
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        self._advance()

    def eof_received(self) -> None:
        # Go's and uvicorn's servers take a half-closed client for one that left, so this one does as well.
        if not self.idle:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self.writable.set()
        if self._exchange is not None and not self._exchange.over:
            self._exchange.request.aborted_at = time.monotonic()
        if self._task is not None:
            self._task.cancel()

    def abandon(self) -> None:
        """Ends the connection from this side at once."""
        if self._exchange is not None:
            self._exchange.finish()
        self.transport.abort()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def _advance(self) -> None:
        if not self.idle or self.transport.is_closing():
            return
        try:
            request = self._parser.next()
        except BadRequest:
            self.transport.write(render_head(400, {"connection": "close"}, 0))
            self.transport.close()
            return
        if request is not None:
            self._exchange = Exchange(request, self)
            self._task = self._server.spawn(self._answer(self._exchange))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._server.serve(exchange)
        finally:
            self._exchange = self._task = None
            if not exchange.over:
                exchange.close()
            elif self._server.listening:
                self._advance()
            else:
                self.transport.close()  # else its client would go on as before, and never notice


class Server:
    """Listens on a loopback port and calls `serve` for each request. Use with `async with`, or open and close it.

    `admit` may turn a connection away, with a RST.
    """

    def __init__(self, serve: Serve, port: int = 0, admit: Callable[[], bool] = lambda: True) -> None:
        self.serve = serve
        self.connections: set[Connection] = set()
        self.port = port
        self._admit = admit
        self._listener: socket.socket | None = None
        self.listening = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def listen(self) -> None:
        """Accepts connections from now on; on a free port the first time when none was named."""
        if self.listening:
            return
        if self._listener is None:
            self._listener = self._bound()
        self._listener.listen(BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept, self._listener)
        self.listening = True

    def refuse(self) -> None:
        """Refuses connections from now on but keeps the port: bound without listening, the kernel answers RST."""
        self._stop_listening()
        self._listener = self._bound()

    def drop_connections(self, *, idle_only: bool = False) -> None:
        """Resets connections, as the death of the process would."""
        for connection in list(self.connections):
            if connection.idle or not idle_only:
                reset_on_close(connection_socket(connection.transport))
                connection.abandon()

    async def close(self) -> None:
        self._stop_listening()
        for connection in list(self.connections):
            connection.abandon()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets the aborted transports close their sockets

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    async def __aenter__(self) -> Server:
        self.listen()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a fake node failed to answer", "exception": error, "task": task}
            )

    def _bound(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind((LOOPBACK, self.port))
        except OSError:
            listener.close()
            raise
        self.port = listener.getsockname()[1]
        return listener

    def _stop_listening(self) -> None:
        if self._listener is None:
            return
        if self.listening:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        self.listening = False

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if self._admit():
                connection.setblocking(False)
                self.spawn(self._adopt(connection))
            else:
                reset_on_close(connection)
                connection.close()

    async def _adopt(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Connection(self), connection)


class PartKind(StrEnum):
    """What a part of an answer is for."""

    ROLE = "role"  # opens a stream, without content
    DELTA = "delta"
    FINISH = "finish"
    USAGE = "usage"
    END = "end"  # the terminator of the dialect
    ERROR = "error"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a body, and how long the node takes before it is ready."""

    data: bytes
    kind: PartKind = PartKind.DOCUMENT
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node answers."""

    parts: tuple[Part, ...] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False  # in chunks, each part when it is ready; else one body of known length
    head_first: bool = False  # a stream's head leaves before its first part is ready

    @property
    def body(self) -> bytes:
        return b"".join(part.data for part in self.parts)

    @property
    def wait_seconds(self) -> float:
        return sum(part.wait_seconds for part in self.parts)


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer((Part(encode(value)),), status, {"content-type": "application/json", **(headers or {})})


def text_answer(text: str, status: int = 200) -> Answer:
    return Answer((Part(text.encode()),), status, {"content-type": "text/plain; charset=utf-8"})


def encode(value: Any) -> bytes:
    """Compact JSON, with characters outside ASCII as they are, as engines write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


async def deliver(exchange: Exchange, answer: Answer) -> None:
    """Sends an answer as a node in good health does."""
    if not answer.stream:
        await asyncio.sleep(answer.wait_seconds)
        exchange.head(answer.status, answer.headers, len(answer.body))
        exchange.body(answer.body)
    else:
        if answer.head_first:
            exchange.head(answer.status, answer.headers)
        await deliver_parts(exchange, answer, answer.parts)
    exchange.end()


async def deliver_parts(exchange: Exchange, answer: Answer, parts: Iterable[Part]) -> None:
    """Sends parts of a stream at their pace, the head before them when it has not been sent."""
    for part in parts:
        await asyncio.sleep(part.wait_seconds)
        if not exchange.begun:
            exchange.head(answer.status, answer.headers)
        exchange.body(part.data)
        await exchange.drain()
