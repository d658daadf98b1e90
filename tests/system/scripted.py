"""A node whose answers a test writes itself, byte by byte, and a client on a plain socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self

from demo.httpd import Answer, Exchange, Received, Server, deliver, json_answer

SSE = {"content-type": "text/event-stream; charset=utf-8"}
NDJSON = {"content-type": "application/x-ndjson"}
DONE = b"data: [DONE]\n\n"

Write = Callable[[Exchange], Awaitable[None]]


class ScriptedNode:
    """A node with the model `m` that answers probes as every kind does, and leaves every other answer to `write`."""

    def __init__(self, write: Write) -> None:
        self.inferences: list[Received] = []
        self.open = 0
        self._write = write
        self._server = Server(self._serve)

    @property
    def url(self) -> str:
        return self._server.url

    async def __aenter__(self) -> Self:
        self._server.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    async def _serve(self, exchange: Exchange) -> None:
        if exchange.request.method == "GET":
            await deliver(exchange, _probed(exchange.request.path))
            return
        self.inferences.append(exchange.request)
        self.open += 1
        try:
            await self._write(exchange)
        finally:
            self.open -= 1


def _probed(path: str) -> Answer:
    match path:
        case "/api/version":
            return json_answer({"version": "0.32.15"})
        case "/api/tags":
            return json_answer({"models": [{"name": "m"}]})
        case "/info":
            return json_answer({"model_id": "m", "version": "3.3.6", "router": "text-generation-router"})
        case "/health":
            return json_answer({"status": "healthy"})
        case "/v1/models":
            return json_answer({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "test"}]})
    return json_answer({"error": "no such path"}, 404)


def local_nodes(*nodes: ScriptedNode, kind: str = "vllm", **shared: Any) -> str:
    """LOCAL_NODES for these nodes, named n0, n1, ..."""
    return json.dumps(
        [{"url": node.url, "kind": kind, "name": f"n{index}", **shared} for index, node in enumerate(nodes)]
    )


def says(*pieces: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Write:
    """Sends these pieces one by one, as a stream of events unless the headers say otherwise."""

    async def write(exchange: Exchange) -> None:
        exchange.head(status, SSE if headers is None else headers)
        for piece in pieces:
            exchange.body(piece)
            await exchange.drain()
            await asyncio.sleep(0)
        exchange.end()

    return write


def event(**fields: Any) -> bytes:
    """An event with this JSON, compact as engines write it."""
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(content: str | None = None, *, finish: str | None = None, **delta: Any) -> bytes:
    """A piece of a chat."""
    told = {**({} if content is None else {"content": content}), **delta}
    return event(
        id="chatcmpl-1",
        object="chat.completion.chunk",
        created=1767323045,
        model="m",
        choices=[{"index": 0, "delta": told, "finish_reason": finish}],
    )


def line(content: str = "", **fields: Any) -> bytes:
    """A line of Ollama's stream."""
    told = {
        "model": "m",
        "created_at": "2026-01-02T03:04:05Z",
        "message": {"role": "assistant", "content": content},
        "done": False,
        **fields,
    }
    return json.dumps(told).encode() + b"\n"


def whole(words: Iterable[str]) -> bytes:
    """A whole chat of these words."""
    return b"".join(map(chunk, words)) + chunk(finish="stop") + DONE


class RawClient:
    """A client on a plain socket: its leaving is exactly one close, and it reads only when it is told to.

    Use with `async with`; it leaves at the end at the latest.
    """

    def __init__(self, url: str) -> None:
        self._address = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    async def ask(self, *, receive_bytes: int | None = None, **fields: Any) -> None:
        """Sends a chat. `receive_bytes` bounds what the kernel keeps for a client that does not read."""
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
        await self.send(json.dumps(body).encode(), receive_bytes)

    async def send(self, body: bytes, receive_bytes: int | None = None) -> None:
        if self._writer is None:
            await self._connect(receive_bytes)
        lines = ("POST /v1/chat/completions HTTP/1.1", "host: h", "content-type: application/json")
        head = "\r\n".join((*lines, f"content-length: {len(body)}", "", ""))
        assert self._writer is not None
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    async def _connect(self, receive_bytes: int | None) -> None:
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        self._reader, self._writer = await asyncio.open_connection(sock=connection, limit=1024)

    @property
    def reader(self) -> asyncio.StreamReader:
        assert self._reader is not None, "ask first"
        return self._reader

    async def read_until(self, mark: bytes) -> bytes:
        """What comes up to and with `mark`, and whatever came along with it."""
        got = bytearray()
        while mark not in got:
            data = await self.reader.read(65536)
            assert data, f"{mark!r} did not come: {bytes(got[-500:])!r}"
            got += data
        return bytes(got)

    def leave(self) -> None:
        """Closes without a goodbye. Does nothing when it left before."""
        if self._writer is not None:
            self._writer.transport.abort()
