"""A client on a plain socket: sends what no HTTP library would, and shows answers as they came over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SECONDS = 30.0
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Response:
    """One answer. Header names are lower-case and stand in their order, repeated ones too."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def header(self, name: str) -> str | None:
        """The header's value; fails when it was sent twice."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} was sent {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class PlainClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def flushed(self) -> None:
        """Returns once the kernel has all that was written."""
        await self._writer.drain()

    async def answer(self, method: str = "POST") -> Response:
        """The next answer, whole; interim ones (1xx) come as answers of their own."""
        async with asyncio.timeout(SECONDS):
            status, headers = _head(await self.reader.readuntil(b"\r\n\r\n"))
            fields = dict(headers)
            if method == "HEAD" or status < 200 or status in (204, 304):
                body = b""
            elif "chunked" in fields.get("transfer-encoding", ""):
                body = await self._chunks()
            else:
                body = await self.reader.readexactly(int(fields["content-length"]))
            return Response(status, headers, body)

    async def ask(self, data: bytes, method: str = "POST") -> Response:
        self.write(data)
        return await self.answer(method)

    async def closed(self) -> bool:
        """Whether the other side closes without another byte."""
        async with asyncio.timeout(SECONDS):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    def finish(self) -> None:
        """Says that nothing more comes, and still reads."""
        self._writer.write_eof()

    def leave(self) -> None:
        """Closes at once."""
        self._writer.transport.abort()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        assert await self.reader.readexactly(2) == b"\r\n"
        return body


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[PlainClient]:
    """A connection to the gateway at this URL."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20)
    try:
        yield PlainClient(reader, writer)
    finally:
        writer.transport.abort()


async def send(url: str, data: bytes, method: str = "POST") -> Response:
    """One request on a connection of its own."""
    async with connected(url) as client:
        return await client.ask(data, method)


def request(
    body: object = b"",
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = JSON,
    *,
    chunks: int = 0,
) -> bytes:
    """A request's bytes: a body that is no bytes becomes JSON; with `chunks` it comes in chunks of this size."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = list(headers.items() if isinstance(headers, Mapping) else headers)
    fields.append(("transfer-encoding", "chunked") if chunks else ("content-length", str(len(data))))
    lines = [f"{method} {path} HTTP/1.1", "host: hearth", *(f"{name}: {value}" for name, value in fields), "", ""]
    return "\r\n".join(lines).encode("latin-1") + (_chunked(data, chunks) if chunks else data)


def _chunked(data: bytes, size: int) -> bytes:
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _head(data: bytes) -> tuple[int, list[tuple[str, str]]]:
    first, *lines = data.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    version, status, *_ = first.split(" ")
    assert version == "HTTP/1.1"
    fields = (line.partition(":") for line in lines)
    return int(status), [(name.lower(), value.strip()) for name, _, value in fields]
