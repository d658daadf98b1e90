"""The data plane's HTTP client: sends a request to a node and reads its answer piece by piece.

The only module that imports aiohttp. Its errors end here: callers see `NodeFailure`, which tells a request that
never reached the node from one that the node may have begun.
"""

from __future__ import annotations

import asyncio
import io
import os
import ssl
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from app.domain import Failure
from app.errors import NodeFailure
from app.providers.urls import join

# Engines built on uvicorn close idle connections after 5 s; ours must go first, or a request meets a closing socket.
_KEEPALIVE_SECONDS = 3.5
_ERROR_BODY_BYTES = 64 * 1024
_READ_BUFFER_BYTES = 64 * 1024
_DNS_SECONDS = 60
_DRAIN_SECONDS = 0.25
_LONG_BODY_BYTES = 2**20
_TOO_LATE = {
    Failure.FIRST_TOKEN_TIMEOUT: "it began no answer within FIRST_TOKEN_TIMEOUT",
    Failure.IDLE_TIMEOUT: "it stopped sending for longer than IDLE_TIMEOUT",
    Failure.DEADLINE: "the request took longer than REQUEST_TIMEOUT",
}

# Whether the connection under the current task's request came from the pool.
_from_pool: ContextVar[bool] = ContextVar("from_pool", default=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that an attempt may take. `deadline` is the whole request's, on the loop's clock."""

    first_token: float
    idle: float
    deadline: float


class Target:
    """A node's address, with each path's URL parsed once, and its headers. The node's key is in them: never logged."""

    __slots__ = ("_base", "_urls", "headers")

    def __init__(self, base: str, headers: CIMultiDict[str]) -> None:
        self._base = base
        self._urls: dict[str, URL] = {}
        self.headers = headers

    def url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:  # paths are the providers' own, so there are few
            url = self._urls[path] = URL(join(self._base, path), encoded=True)
        return url


class _Connector(aiohttp.TCPConnector):
    """Remembers whether a request's connection was an old one."""

    async def connect(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        _from_pool.set(True)
        return await super().connect(req, traces, timeout)

    async def _create_connection(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        _from_pool.set(False)
        return await super()._create_connection(req, traces, timeout)


class _Watchdog:
    """One timer for an attempt's whole life: it first limits the time to the first content, then each gap.

    It is moved for a piece of an answer only by writing down when it is due next; when it rings, it looks there.
    A gap that a slow client makes, as nothing is read meanwhile, is none.
    """

    __slots__ = ("_limits", "_loop", "_task", "_timer", "due", "fired", "late", "stream", "waiting")

    def __init__(self, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._task = asyncio.current_task()  # whoever waits for the answer to begin
        self.late = Failure.FIRST_TOKEN_TIMEOUT
        self.fired: Failure | None = None
        self.waiting = True  # for the node, rather than for the client
        self.stream: aiohttp.StreamReader | None = None  # where the answer is read, once it has begun
        self.due = min(self._loop.time() + limits.first_token, limits.deadline)
        self._timer = self._loop.call_at(self.due, self._ring)

    def content(self) -> None:
        """From now on it is the gap between pieces that is limited."""
        self._timer.cancel()
        self.late = Failure.IDLE_TIMEOUT
        self.touch()
        self._timer = self._loop.call_at(self.due, self._ring)

    def touch(self) -> None:
        self.due = min(self._loop.time() + self._limits.idle, self._limits.deadline)

    def stop(self) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        now = self._loop.time()
        if not self.waiting:
            self.touch()
        if now < self.due:
            self._timer = self._loop.call_at(self.due, self._ring)
            return
        self.fired = Failure.DEADLINE if now >= self._limits.deadline else self.late
        if self.stream is not None:
            self.stream.set_exception(_Late(self.fired, begun=self.late is Failure.IDLE_TIMEOUT))
        elif self._task is not None:
            self._task.cancel()


class NodeResponse:
    """A node's answer that has begun. Close it always."""

    __slots__ = ("_inflate", "_raw", "_watchdog", "status")

    def __init__(self, raw: aiohttp.ClientResponse, watchdog: _Watchdog) -> None:
        self.status = raw.status
        self._raw = raw
        self._inflate = _inflater(raw.headers.get("content-encoding"))
        self._watchdog = watchdog
        watchdog.stream = raw.content

    @property
    def headers(self) -> Mapping[str, str]:
        return {name.lower(): value for name, value in self._raw.headers.items()}

    def began(self) -> None:
        """Content has come: from now on it is the gap between pieces that is limited."""
        if not self.at_end:
            self._watchdog.content()

    async def read(self) -> bytes:
        """The next bytes as they came, b"" at the end. Raises `NodeFailure`."""
        watchdog = self._watchdog
        watchdog.waiting = True
        if watchdog.late is Failure.IDLE_TIMEOUT:
            watchdog.touch()
        try:
            data = await self._raw.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error, Failure.CUT) from error
        watchdog.waiting = False
        return data if self._inflate is None else self._inflated(data)

    @property
    def at_end(self) -> bool:
        """Whether all of the answer has been read."""
        return self._raw.content.at_eof()

    async def drain(self) -> None:
        """Reads what may be left after an answer that said it is complete, so that the connection can be used again."""
        with suppress(TimeoutError, NodeFailure):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await self.read():
                    pass

    async def body(self) -> bytes:
        """The start of an error's body, 64 KiB at most."""
        parts, size = [], 0
        while size < _ERROR_BODY_BYTES and (data := await self.read()):
            parts.append(data)
            size += len(data)
        return b"".join(parts)[:_ERROR_BODY_BYTES]

    def close(self) -> None:
        """Gives the connection back when the answer was read to its end; else closes it, so that the node stops."""
        self._watchdog.stop()
        self._raw.close()

    def _inflated(self, data: bytes) -> bytes:
        assert self._inflate is not None
        try:
            out: bytes = self._inflate.decompress(data) if data else self._inflate.flush()
        except zlib.error as error:
            raise NodeFailure(Failure.MALFORMED, "the node's compressed answer is broken") from error
        return out


class _Late(aiohttp.ClientError):
    """A limit of ours ran out while a read waited."""

    def __init__(self, failure: Failure, *, begun: bool) -> None:
        super().__init__(failure)
        self.failure = failure
        # A node at work in mid-answer is not to blame when the whole request takes longer than it may.
        self.counts = not (begun and failure is Failure.DEADLINE)


class Upstream:
    """Connections to all nodes, kept open between requests. Open it inside the running loop."""

    def __init__(self, user_agent: str, connect_seconds: float, verify: ssl.SSLContext | bool = True) -> None:
        self._connect_seconds = connect_seconds
        self._headers = {"accept-encoding": "identity", "user-agent": user_agent, "content-type": "application/json"}
        self._verify = verify
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Upstream:
        self._session = aiohttp.ClientSession(
            connector=_Connector(
                limit=0,  # how many requests a node gets is decided by admission
                keepalive_timeout=_KEEPALIVE_SECONDS,
                ttl_dns_cache=_DNS_SECONDS,
                ssl=self._verify,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("accept",),
            read_bufsize=_READ_BUFFER_BYTES,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()

    def target(self, base: str, api_key: str) -> Target:
        """Where to send a node's requests, and the headers that all of them carry."""
        headers = CIMultiDict(self._headers)
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        return Target(base, headers)

    async def send(
        self, target: Target, path: str, extra: Iterable[tuple[str, str]], body: bytes, limits: Limits
    ) -> NodeResponse:
        """Sends, and returns once the node has begun to answer. Raises `NodeFailure`."""
        headers = target.headers
        if extra:
            headers = headers.copy()
            headers.extend(extra)
        watchdog = _Watchdog(limits)
        raw = None
        try:
            raw = await self._post(target.url(path), headers, body)
            return NodeResponse(raw, watchdog)
        except asyncio.CancelledError:
            watchdog.stop()
            task = asyncio.current_task()
            if watchdog.fired is None or task is None or task.uncancel():
                raise
            raise NodeFailure(watchdog.fired, _TOO_LATE[watchdog.fired]) from None
        except BaseException:
            watchdog.stop()
            if raw is not None:
                raw.close()
            raise

    async def _post(
        self, url: URL, headers: CIMultiDict[str], body: bytes, *, again: bool = True
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "open the upstream first"
        try:
            return await self._session.post(
                url,
                # aiohttp hands a long body to the transport in one piece unless it comes as a file.
                data=body if len(body) <= _LONG_BODY_BYTES else io.BytesIO(body),
                headers=headers,
                allow_redirects=False,
            )
        except aiohttp.ServerTimeoutError as error:
            raise NodeFailure(
                Failure.CONNECT_TIMEOUT, f"no connection within {self._connect_seconds:g} s", sent=False
            ) from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            # A kept-alive connection that the node closed meanwhile: the request met a closed door, not a broken node.
            if again and _from_pool.get() and not isinstance(error, aiohttp.ClientConnectorError):
                return await self._post(url, headers, body, again=False)
            raise _failure(error, Failure.DISCONNECTED) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(error, Failure.MALFORMED) from error


def _failure(error: Exception, otherwise: Failure) -> NodeFailure:
    """What an error of aiohttp means. Its own text may hold the URL with its query, so only ours is used."""
    if isinstance(error, _Late):
        return NodeFailure(error.failure, _TOO_LATE[error.failure], counts=error.counts)
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return NodeFailure(Failure.CONNECT, "its TLS certificate was not accepted", sent=False)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return NodeFailure(Failure.CONNECT, "its name could not be resolved", sent=False)
    if isinstance(error, aiohttp.ClientConnectorError):
        code = error.os_error.errno
        return NodeFailure(Failure.CONNECT, os.strerror(code).lower() if code else "no connection", sent=False)
    if isinstance(error, aiohttp.ClientResponseError):
        return NodeFailure(Failure.MALFORMED, "its answer is no valid HTTP")
    if otherwise is Failure.CUT:
        return NodeFailure(Failure.CUT, "it closed the connection in the middle of its answer")
    if otherwise is Failure.DISCONNECTED:
        return NodeFailure(Failure.DISCONNECTED, "it closed the connection before it answered")
    return NodeFailure(otherwise, f"its answer could not be read ({type(error).__name__})")


def _inflater(encoding: str | None) -> Any:
    """Undoes a compression that was not asked for. Some nodes and reverse proxies compress all the same."""
    if encoding is None or encoding.lower() in ("identity", ""):
        return None
    if encoding.lower() in ("gzip", "x-gzip", "deflate"):
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    raise NodeFailure(Failure.MALFORMED, f"it compressed its answer as {encoding[:20]}, which was not asked for")
