"""The data plane: sends a request to a node and reads its answer piece by piece, over connections that are kept.

What goes wrong on the way is a `NodeFailure` for callers, which tells a request that never reached the node from one
that the node may have begun.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from app.connection import Connection, ConnectionClosed, ConnectionFailed
from app.domain import Failure, NodeSpec
from app.errors import NodeFailure
from app.providers.urls import join
from app.tls import Trust, UnusableCaFile, trouble

# Engines built on uvicorn close idle connections after 5 s; ours must go first, or a request meets a closing socket.
_KEEPALIVE_SECONDS = 3.5
_SWEEP_SECONDS = 1.0
_ADDRESS_SECONDS = 30.0  # how long a name's addresses are taken for current
_NEXT_ADDRESS_SECONDS = 0.25  # as RFC 8305 recommends
_ERROR_BODY_BYTES = 64 * 1024
_EVENTS_AT_ONCE = 2  # some engines say in two that they begin, and how
_DRAIN_SECONDS = 0.25
_LOOK_SECONDS = 0.05
_TOO_LATE = {
    Failure.FIRST_TOKEN_TIMEOUT: "it began no answer within FIRST_TOKEN_TIMEOUT",
    Failure.IDLE_TIMEOUT: "it stopped sending for longer than IDLE_TIMEOUT",
    Failure.DEADLINE: "the request took longer than REQUEST_TIMEOUT",
}


class Limits(NamedTuple):
    """Seconds that an attempt may take. `deadline` is the whole request's, on the loop's clock."""

    first_token: float
    idle: float
    deadline: float


class Target:
    """A node's address, the unchanging part of every request to it, and its idle connections.

    The node's key is in the former: never logged.
    """

    __slots__ = (
        *("__weakref__", "_base", "_common", "_heads"),
        *("addresses", "host", "idle", "port", "resolved_at", "spec", "tls"),
    )

    def __init__(self, spec: NodeSpec, common: str) -> None:
        parts = urlsplit(spec.url)
        self.spec = spec
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.tls else 80)
        self.addresses: list[AddrInfoType] = []
        self.resolved_at = 0.0
        self.idle: list[Connection] = []
        self._base = spec.url
        self._common = common
        self._heads: dict[str, bytes] = {}

    def head(self, path: str) -> bytes:
        """The request line and the headers that do not change, without the blank line."""
        head = self._heads.get(path)
        if head is None:  # paths are the providers' own, so there are few
            parts = urlsplit(join(self._base, path))
            where = parts.path + (f"?{parts.query}" if parts.query else "")
            host = parts.netloc.rpartition("@")[2]
            head = f"POST {where} HTTP/1.1\r\nhost: {host}\r\n{self._common}".encode("latin-1")
            self._heads[path] = head
        return head


class _Watchdogs:
    """One timer that looks at all watchdogs, as a timer for each would cost more than all else that they do."""

    def __init__(self) -> None:
        self._watchdogs: set[_Watchdog] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watchdog: _Watchdog) -> None:
        self._watchdogs.add(watchdog)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def discard(self, watchdog: _Watchdog) -> None:
        self._watchdogs.discard(watchdog)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        for watchdog in list(self._watchdogs):
            watchdog.look()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LOOK_SECONDS, self._look) if self._watchdogs else None


class _Watchdog:
    """Watches an attempt for its whole life: it first limits the time to the first content, then each gap.

    It is moved for a piece of an answer only by writing down when it is due next. A gap that a slow client makes, as
    nothing is read meanwhile, is none.
    """

    __slots__ = ("_limits", "_watchdogs", "begun", "connection", "due", "loop", "waiting")

    def __init__(self, limits: Limits, watchdogs: _Watchdogs) -> None:
        self.loop = asyncio.get_running_loop()
        self._limits = limits
        self._watchdogs = watchdogs
        self.begun = False
        self.waiting = True  # for the node, rather than for the client
        self.connection: Connection | None = None
        self.due = min(self.loop.time() + limits.first_token, limits.deadline)
        watchdogs.add(self)

    def content(self) -> None:
        """From now on it is the gap between pieces that is limited."""
        self.begun = True
        self.touch()

    def touch(self) -> None:
        self.due = min(self.loop.time() + self._limits.idle, self._limits.deadline)

    def seconds_left(self) -> float:
        return self.due - self.loop.time()

    def stop(self) -> None:
        self._watchdogs.discard(self)

    def failure(self) -> NodeFailure:
        """Why it barks."""
        late = Failure.IDLE_TIMEOUT if self.begun else Failure.FIRST_TOKEN_TIMEOUT
        if self.loop.time() >= self._limits.deadline:
            late = Failure.DEADLINE
        # A node at work in mid-answer is not to blame when the whole request takes longer than it may.
        blamed = not (self.begun and late is Failure.DEADLINE)
        return NodeFailure(late, _TOO_LATE[late], counts=blamed)

    def look(self) -> None:
        if not self.waiting:
            self.touch()
        if self.connection is not None and self.loop.time() >= self.due:
            self.connection.fail(self.failure())
            self.stop()


class NodeResponse:
    """A node's answer that has begun. Close it always."""

    __slots__ = ("_connection", "_inflate", "_target", "_upstream", "_watchdog", "status")

    def __init__(self, upstream: Upstream, target: Target, connection: Connection, watchdog: _Watchdog) -> None:
        self.status = connection.status
        self._upstream = upstream
        self._target = target
        self._connection = connection
        self._watchdog = watchdog
        self._inflate = _inflater(connection.header(b"content-encoding"))

    @property
    def headers(self) -> Mapping[str, str]:
        return self._connection.headers

    def began(self, events: int) -> None:
        """Content has come: from now on it is the gap between pieces that is limited. Of a stream, so many events."""
        if not self.at_end:
            self._watchdog.content()
            if events:
                self._connection.moderate(fast=events > _EVENTS_AT_ONCE)

    async def read(self) -> bytes:
        """The next bytes as they came, b"" at the end. Raises `NodeFailure`."""
        watchdog = self._watchdog
        watchdog.waiting = True
        if watchdog.begun:
            watchdog.touch()
        try:
            data = await self._connection.read()
        except ConnectionFailed as error:
            raise _broken(error) from error
        watchdog.waiting = False
        return data if self._inflate is None else self._inflated(data)

    @property
    def at_end(self) -> bool:
        """Whether all of the answer has been read."""
        return self._connection.drained

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
        """Keeps the connection when the answer was read to its end; else closes it, so that the node stops."""
        self._watchdog.stop()
        self._upstream.give_back(self._target, self._connection)

    def _inflated(self, data: bytes) -> bytes:
        assert self._inflate is not None
        try:
            out: bytes = self._inflate.decompress(data) if data else self._inflate.flush()
        except zlib.error as error:
            raise NodeFailure(Failure.MALFORMED, "the node's compressed answer is broken") from error
        return out


class Upstream:
    """Connections to all nodes. Open it inside the running loop.

    How many a node gets is decided by admission; here there is no limit, so that nothing waits unseen.
    """

    def __init__(self, user_agent: str, connect_seconds: float, trust: Trust) -> None:
        self._connect_seconds = connect_seconds
        headers = ("accept-encoding: identity", "accept: */*", "content-type: application/json")
        self._common = "".join(f"{header}\r\n" for header in (*headers, f"user-agent: {user_agent}"))
        self._trust = trust
        self._open: set[Connection] = set()
        self._targets: WeakSet[Target] = WeakSet()
        self._sweeper: asyncio.TimerHandle | None = None
        self._watchdogs = _Watchdogs()

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._watchdogs.close()
        for connection in self._open:
            connection.abort()
        self._open.clear()

    def target(self, spec: NodeSpec) -> Target:
        """Where to send a node's requests."""
        key = f"authorization: Bearer {spec.api_key}\r\n" if spec.api_key else ""
        target = Target(spec, self._common + key)
        self._targets.add(target)
        return target

    async def send(
        self, target: Target, path: str, extra: Iterable[tuple[str, str]], body: bytes, limits: Limits
    ) -> NodeResponse:
        """Sends, and returns once the node has begun to answer. Raises `NodeFailure`.

        `extra` are more headers; neither names nor values may hold line breaks.
        """
        more = "".join([f"{name}: {value}\r\n" for name, value in extra])
        head = target.head(path) + f"{more}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        watchdog = _Watchdog(limits, self._watchdogs)
        try:
            connection = await self._exchange(target, head, body, watchdog)
        except BaseException:
            watchdog.stop()
            raise
        try:
            return NodeResponse(self, target, connection, watchdog)
        except NodeFailure:
            watchdog.stop()
            self._discard(connection)
            raise

    async def _exchange(self, target: Target, head: bytes, body: bytes, watchdog: _Watchdog) -> Connection:
        """The connection on which the answer has begun."""
        kept = self._take(target, watchdog.loop.time())
        if kept is not None:
            try:
                return await self._ask(kept, head, body, watchdog)
            except ConnectionClosed as error:
                # The node closed the connection while nobody used it: a closed door, not a broken node.
                if error.heard:
                    raise _broken(error, Failure.DISCONNECTED) from error
            except ConnectionFailed as error:
                raise _broken(error) from error
        try:
            return await self._ask(await self._connect(target, watchdog), head, body, watchdog)
        except ConnectionFailed as error:
            raise _broken(error, Failure.DISCONNECTED) from error

    async def _ask(self, connection: Connection, head: bytes, body: bytes, watchdog: _Watchdog) -> Connection:
        watchdog.connection = connection
        try:
            connection.send(head, body)
            await connection.head()
        except BaseException:
            self._discard(connection)
            raise
        return connection

    # -- the pool

    def _take(self, target: Target, now: float) -> Connection | None:
        """A connection that is idle, the one used last first."""
        oldest = now - _KEEPALIVE_SECONDS
        while target.idle:
            connection = target.idle.pop()
            if connection.reusable and connection.idle_since > oldest:
                return connection
            self._discard(connection)
        return None

    def give_back(self, target: Target, connection: Connection) -> None:
        """Keeps a connection that can be used again, and closes any other."""
        if not (connection.reusable and connection.drained):
            self._discard(connection)
            return
        connection.idle_since = connection.loop.time()
        target.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Closes what has been idle for long."""
        loop = asyncio.get_running_loop()
        oldest, left = loop.time() - _KEEPALIVE_SECONDS, False
        for target in self._targets:
            for connection in target.idle:
                if not connection.reusable or connection.idle_since <= oldest:
                    self._discard(connection)
            target.idle = [connection for connection in target.idle if connection in self._open]
            left = left or bool(target.idle)
        self._sweeper = loop.call_later(_SWEEP_SECONDS, self._sweep) if left else None

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.abort()

    # -- new connections

    async def _connect(self, target: Target, watchdog: _Watchdog) -> Connection:
        seconds = min(self._connect_seconds, watchdog.seconds_left())
        try:
            async with asyncio.timeout(seconds):
                connection = await self._dial(target)
        except TimeoutError as error:
            if seconds < self._connect_seconds:
                raise watchdog.failure() from error
            message = f"no connection within {self._connect_seconds:g} s"
            raise NodeFailure(Failure.CONNECT_TIMEOUT, message, sent=False) from error
        except UnusableCaFile as error:
            raise NodeFailure(Failure.CONNECT, str(error), sent=False) from error
        except OSError as error:
            target.addresses = []
            raise NodeFailure(Failure.CONNECT, _why_no_connection(error), sent=False) from error
        self._open.add(connection)
        return connection

    async def _dial(self, target: Target) -> Connection:
        loop = asyncio.get_running_loop()
        tls = await self._trust.context(target.spec) if target.tls else None
        plug = await aiohappyeyeballs.start_connection(
            await self._addresses(target), happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop
        )
        try:
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _, connection = await loop.create_connection(
                Connection, sock=plug, ssl=tls, server_hostname=target.host if tls else None
            )
        except BaseException:
            plug.close()
            raise
        return connection

    async def _addresses(self, target: Target) -> list[AddrInfoType]:
        loop = asyncio.get_running_loop()
        if not target.addresses or loop.time() - target.resolved_at > _ADDRESS_SECONDS:
            found: Sequence[Any] = _literal(target.host, target.port)
            found = found or await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            target.addresses = list(found)
            target.resolved_at = loop.time()
        return target.addresses


def _literal(host: str, port: int) -> list[AddrInfoType]:
    """The address itself where the host is one; nothing has to be asked then."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return []
    if version == 6:
        return [(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0))]
    return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]


def _why_no_connection(error: OSError) -> str:
    if no_tls := trouble(error):
        return no_tls
    if isinstance(error, socket.gaierror):
        return "its name could not be resolved"
    return os.strerror(error.errno).lower() if error.errno else "no connection"


def _broken(error: ConnectionFailed, closed: Failure = Failure.CUT) -> NodeFailure:
    if not isinstance(error, ConnectionClosed):
        return NodeFailure(Failure.MALFORMED, "its answer is no valid HTTP")
    if closed is Failure.CUT:
        return NodeFailure(Failure.CUT, "it closed the connection in the middle of its answer")
    return NodeFailure(Failure.DISCONNECTED, "it closed the connection before it answered")


def _inflater(encoding: bytes | None) -> Any:
    """Undoes a compression that was not asked for. Some nodes and reverse proxies compress all the same."""
    name = (encoding or b"").lower()
    if name in (b"", b"identity"):
        return None
    if name in (b"gzip", b"x-gzip", b"deflate"):
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    shown = name[:20].decode("ascii", "replace")
    raise NodeFailure(Failure.MALFORMED, f"it compressed its answer as {shown}, which was not asked for")
