"""One HTTP/1.1 connection to a node: a request goes out, an answer comes in. The only module that knows httptools.

An answer is read in pieces as they come. While nobody reads, little is taken from the socket, so that a slow client
slows the node down instead of filling the memory. And where a stream comes faster than one piece in a millisecond,
which no reader can follow, the socket is left alone for two after each, and read once for all that has come meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

import httptools

HEAD_BYTES_MAX = 64 * 1024
_UNREAD_BYTES_MAX = 256 * 1024
_ONE_WRITE_BYTES = 64 * 1024
_FAST_SECONDS = 0.001  # between pieces
_REST_SECONDS = 0.002


class ConnectionFailed(Exception):
    """The connection is of no more use. `heard` tells whether anything of an answer had come."""

    def __init__(self, message: str, *, heard: bool) -> None:
        super().__init__(message)
        self.heard = heard


class ConnectionClosed(ConnectionFailed):
    """The node closed it, or it broke."""


class InvalidAnswer(ConnectionFailed):
    """What came is no HTTP."""


class Connection(asyncio.Protocol):
    """Call `send`, then `head`, then `read` until `complete`; then `send` again if it is `reusable`.

    Whoever waits in `head` or `read` gets what `fail` is called with. Cancelling a wait leaves the connection in the
    middle of an answer: `abort` it then.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._pieces: list[bytes] = []
        # For the parser, which looks for it when it is made. A stream has a piece for each of its events.
        self.on_body: Callable[[bytes], None] = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._unread = 0  # bytes, as they came
        self._paused = False
        self._rest: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._busy = False
        self._keep_alive = True
        self.idle_since = 0.0  # on the loop's clock; kept by the pool
        self._begin()

    def _begin(self) -> None:
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._interim = False
        self._has_head = False
        self._whole = 0  # pieces of the answer, once it is complete
        self.status = 0
        self.complete = False
        self._moderate = False

    # -- for the owner

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent on it."""
        return self.complete and self._keep_alive and not self._busy and self._error is None and self.open

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers by lower-case name; of a repeated one the last."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._fields}

    def header(self, name: bytes) -> bytes | None:
        """One header of the answer, by its lower-case name."""
        for field, value in self._fields:
            if field.lower() == name:
                return value
        return None

    def send(self, head: bytes, body: bytes) -> None:
        """Sends a request. Never waits: what the node does not take yet is kept."""
        if self._transport is None or self._transport.is_closing():
            self._error = self._error or ConnectionClosed("closed", heard=False)
            return
        self._begin()
        self._busy = True
        if len(body) < _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def head(self) -> None:
        """Waits until status and headers are there. Raises `ConnectionFailed`, or what `fail` was given."""
        while not self._has_head:
            await self._woken()

    async def read(self) -> bytes:
        """The next bytes of the body, b"" at its end. Raises `ConnectionFailed`, or what `fail` was given."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._woken()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._paused:
            self._paused = False
            self._read_on()
        return data

    def moderate(self, *, fast: bool) -> None:
        """What follows is a stream, which may be read a little later where it is fast, as its first piece may show."""
        self._moderate = True
        self._heard_at = self.loop.time()
        if fast:
            self._take_rest()

    @property
    def drained(self) -> bool:
        """Whether the body has been read to its end."""
        return self.complete and not self._pieces

    def fail(self, error: Exception) -> None:
        """Ends the exchange: whoever reads gets this error."""
        if self._error is None:
            self._error = error
        self._wake()

    def abort(self) -> None:
        """Closes it at once. The node sees that, and can stop its work."""
        if self._transport is not None:
            self._transport.abort()

    def _woken(self) -> asyncio.Future[None]:
        """Done as soon as something has come. Raises what the exchange failed with."""
        if self._error is not None:
            raise self._error
        self._waiter = self.loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            # Nothing was asked: an answer nobody waits for would be taken for the next one's.
            self._keep_alive = False
            self.abort()
            return
        try:
            if not self._has_head:
                self._count_head(data)
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._keep_alive = False
            # After a whole answer it does not matter what else comes.
            if not self.complete:
                self.fail(InvalidAnswer("invalid", heard=True))
        if self.complete:
            self._busy = False
            del self._pieces[self._whole :]  # of an answer too many
        else:
            self._count_unread(data)
            if self._moderate:
                self._moderated()
        self._wake()

    def _count_unread(self, data: bytes) -> None:
        self._unread += len(data)
        if self._unread > _UNREAD_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            if self._rest is None:
                self._transport.pause_reading()

    def _moderated(self) -> None:
        """Rests after a piece that came right after another one."""
        now = self.loop.time()
        if now - self._heard_at < _FAST_SECONDS:
            self._take_rest()
        self._heard_at = now

    def _take_rest(self) -> None:
        if self._rest is None and self._transport is not None:
            self._rest = self.loop.call_later(_REST_SECONDS, self._rested)
            if not self._paused:
                self._transport.pause_reading()

    def _rested(self) -> None:
        self._rest = None
        self._heard_at = self.loop.time()  # what waits there already came as fast as before
        self._read_on()

    def _read_on(self) -> None:
        if not self._paused and self._rest is None and self._transport is not None:
            self._transport.resume_reading()

    def _count_head(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX and b"\r\n\r\n" not in data:
            raise httptools.HttpParserError("head too long")

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_alive = False
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._has_head and not self.complete and self._ends_with_connection() and exc is None:
            self.complete = True
        elif self._busy and not self.complete:
            self.fail(ConnectionClosed("closed", heard=self._head_bytes > 0))
        self._busy = False
        self._transport = None
        # The parser holds this object's methods: the two would wait for the garbage collector.
        del self._parser
        self._wake()

    def _ends_with_connection(self) -> bool:
        """Whether the body has neither a length nor chunks, so that only the end of the connection ends it."""
        return self.header(b"content-length") is None and self.header(b"transfer-encoding") is None

    # -- from the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        if self.complete:  # an answer too many
            self._keep_alive = False
            return
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200 and status != 101
        if self._interim:
            self._fields = []
            return
        self.status = status
        self._has_head = True

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self.complete:
            self.complete = True
            self._whole = len(self._pieces)
            self._keep_alive = self._keep_alive and self._parser.should_keep_alive()
