"""The HTTP server: uvicorn, with a bound on what a client may send before its request is understood. The only module
that knows uvicorn.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.settings import Settings

HEAD_BYTES_MAX = 64 * 1024
DRAIN_SECONDS = 30
_KEEPALIVE_SECONDS = 75  # longer than clients keep their connections, so that they close first
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\ncontent-length: 109\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the headers are too long","type":"invalid_request_error","param":null,"code":"headers"}}'
)


class PortTaken(Exception):
    """Somebody else listens there."""


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
    """Ends well: the first signal lets running requests end, the second one does not."""

    def __init__(self, config: uvicorn.Config, on_closing: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_closing = on_closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would raise the signal again at the end, and the process would die of it.
        self.force_exit = self.should_exit
        self.should_exit = True
        if self.force_exit:
            # What breaks off now does so on purpose; uvicorn would show a traceback for each of it.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        else:
            self._on_closing()


def make_server(app: FastAPI, settings: Settings, on_closing: Callable[[], None]) -> Server:
    """A server for the app, not started yet. Raises `PortTaken`."""
    _check_port(settings.host, settings.port)
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
    return Server(config, on_closing)


def _check_port(host: str, port: int) -> None:
    """Looks before uvicorn does, whose own words name neither setting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"PORT: {port} on {host} is in use; set another, or stop what uses it") from error
