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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.ports import DRAIN_SECONDS
from app.settings import Settings

HEAD_BYTES_MAX = 64 * 1024
_KEEPALIVE_SECONDS = 75  # longer than clients keep their connections, so that they close first
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\ncontent-length: 109\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the headers are too long","type":"invalid_request_error","param":null,"code":"headers"}}'
)


class BoundedHttp(HttpToolsProtocol):
    """Refuses a request whose head does not end in time: the parser would collect it in memory without a bound."""

    _head_bytes = 0  # of a head that has begun and not ended

    def data_received(self, data: bytes) -> None:
        if (self.cycle is None or self.cycle.response_complete) and b"\r\n\r\n" not in data:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.transport.write(_TOO_LONG)
                self.transport.close()
                return
        else:
            self._head_bytes = 0
        super().data_received(data)


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
