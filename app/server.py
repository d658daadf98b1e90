"""The HTTP server: uvicorn, with a bound on what a client may send before its request is understood. The only module
that knows uvicorn.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.fronts.asgi import Lines
from app.ports import DRAIN_SECONDS
from app.settings import Settings

HEAD_BYTES_MAX = 64 * 1024
_KEEPALIVE_SECONDS = 75  # longer than clients keep their connections, so that they close first
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\ncontent-length: 109\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the headers are too long","type":"invalid_request_error","param":null,"code":"headers"}}'
)


class _Cycle(RequestResponseCycle):
    """Sends an answer's head together with its first bytes, and takes one as it is whose headers are `Lines`.

    uvicorn writes the two one by one, which is two system calls and two packets, and searches every header twice for
    what is not allowed there.
    """

    _lines = False  # the answer's headers are `Lines`
    _head = b""  # what waits for the first bytes

    async def send(self, message: Any) -> None:
        if self._lines and not self.response_complete:
            if self.flow.write_paused and not self.disconnected:
                await self.flow.drain()
            if not self.disconnected:
                self._write(message.get("body", b""), message.get("more_body", False))
        elif self.response_started or type(message.get("headers")) is not Lines:
            await super().send(message)
        elif not self.disconnected:
            self._hold(message["status"], message["headers"])

    def _hold(self, status: int, headers: Lines) -> None:
        self.response_started = self._lines = True
        self.waiting_for_100_continue = False
        head = [STATUS_LINE[status]]
        for name, value in self.default_headers:
            head += (name, b": ", value, b"\r\n")
        head.append(headers.lines)
        self.chunked_encoding = headers.length is None
        self.expected_content_length = headers.length or 0
        if self.chunked_encoding:
            head.append(b"transfer-encoding: chunked\r\n")
        head.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(head)

    def _write(self, body: bytes, more: bool) -> None:
        head, self._head = self._head, b""
        if self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(head + chunk + (b"" if more else b"0\r\n\r\n"))
        else:
            self.expected_content_length -= len(body)
            self.transport.write(head + body)
        if not more:
            self._end()

    def _end(self) -> None:
        if self.expected_content_length:
            raise RuntimeError("the answer is not as long as its content-length says")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request whose head does not end in time: the parser would collect it in memory without a bound.

    And spends less than its base on answers, and on the timer that closes idle connections: it has one for all the
    time, in place of one for every request.
    """

    _head_bytes = 0  # of a head that has begun and not ended
    _idle_since: float | None = None  # on the loop's clock; None = at work

    def data_received(self, data: bytes) -> None:
        if (self.cycle is None or self.cycle.response_complete) and data.find(b"\r\n\r\n") < 0:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.write(_TOO_LONG)
                self.transport.close()
                return
        else:
            self._head_bytes = 0
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_again_in(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None or self.transport.is_closing():
            return  # the end of what is at work sets it anew
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._look_again_in(left)
        else:
            self.transport.close()

    def _look_again_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.__class__ = _Cycle
        super()._start_asgi_task(cycle, app)


class Server(uvicorn.Server):
    """Ends well: the first signal lets running requests end, the second one does not.

    `on_closing` hears of the end, `on_started` of the begin. One of several workers takes every signal for the first:
    a terminal or a service manager may send one to each process, and the parent sends its own.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_closing: Callable[[], None],
        on_started: Callable[[], None] = lambda: None,
        *,
        one_of_many: bool = False,
    ) -> None:
        super().__init__(config)
        self._on_closing = on_closing
        self._on_started = on_started
        self._one_of_many = one_of_many

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def drain(self) -> None:
        """Takes no more connections, and ends when running requests have. May be called from any thread."""
        if not self.should_exit:
            self.should_exit = True
            self._on_closing()

    def stop(self) -> None:
        """Ends at once. May be called from any thread."""
        self.should_exit = self.force_exit = True
        # What breaks off now does so on purpose; uvicorn would show a traceback for each of it.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again at the end, and the process would die of it.
        if self.should_exit and not self._one_of_many:
            self.stop()
        else:
            self.drain()


def make_server(
    app: FastAPI,
    settings: Settings,
    on_closing: Callable[[], None],
    on_started: Callable[[], None] = lambda: None,
    *,
    one_of_many: bool = False,
) -> Server:
    """A server for the app, not started yet."""
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
    }
    config = uvicorn.Config(
        app,
        **options,
        http=BoundedHttp,
        loop="auto",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEPALIVE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    return Server(config, on_closing, on_started, one_of_many=one_of_many)
