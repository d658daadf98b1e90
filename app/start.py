"""Starts the gateway: one process, or several workers."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, cast

from app import __version__
from app.ports import DRAIN_SECONDS, PortTaken, check_port
from app.telemetry.logs import LineSink, Logger, StandardBridge, make_logger, open_writer

if TYPE_CHECKING:
    from app.settings import Settings
    from app.telemetry.slates import Slates
    from app.workers import Channel


def run(settings: Settings, flags: Sequence[str]) -> int:
    """Serves until it is told to stop, and returns the exit status. `flags` are those that gave the settings."""
    sink = open_writer()
    log = _logger(settings, sink)
    try:
        if settings.workers > 1:
            return _run_workers(settings, flags, log)
        return _run_alone(settings, sink, log)
    except PortTaken as error:
        print(f"hearth: {error}", file=sys.stderr)
        return 1


def _run_alone(settings: Settings, sink: LineSink, log: Logger) -> int:
    from app.main import create_app
    from app.server import make_server

    app = create_app(settings, sink)

    def closing() -> None:
        app.state.phase.closing = True
        log.info("Hearth ends when running requests have. A second signal stops at once", seconds=DRAIN_SECONDS)

    check_port(settings.host, settings.port)
    server = make_server(app, settings, closing)
    announce(settings, log)
    server.run()
    return 0 if server.started else 1


def _run_workers(settings: Settings, flags: Sequence[str], log: Logger) -> int:
    from app.workers import supervise

    check_port(settings.host, settings.port)
    announce(settings, log)
    return supervise(settings, flags, log)


def serve_worker(
    settings: Settings, index: int, slates: Slates, channel: Channel, listeners: Sequence[socket.socket]
) -> int:
    """Serves as one of several, on these sockets. Only the first worker writes the nodes file; all share `slates`."""
    from app.main import create_app
    from app.server import make_server
    from app.workers import WholeLines

    sink = open_writer(cast(BinaryIO, WholeLines(sys.stderr.buffer, str(os.getpid()))))
    _logger(settings, sink)
    app = create_app(settings, sink, keeps_nodes=index == 0, slates=slates)

    def closing() -> None:
        app.state.phase.closing = True
        channel.closing()

    server = make_server(app, settings, closing, channel.ready, one_of_many=True)
    channel.obey(server.drain, server.stop)
    server.run(list(listeners))
    return 0 if server.started else 1


def _logger(settings: Settings, sink: LineSink) -> Logger:
    """A logger, which from now on also gets what libraries log."""
    log = make_logger(sink, settings.log_level, settings.log_format)
    logging.basicConfig(handlers=[StandardBridge(log)], level=logging.WARNING, force=True)
    return log


def announce(settings: Settings, log: Logger) -> None:
    """One line on what starts, and one for each thing that is likely a mistake."""
    scheme = "https" if settings.ssl_certfile else "http"
    workers = {"workers": settings.workers} if settings.workers > 1 else {}
    log.info(
        "Hearth starts",
        version=__version__,
        url=f"{scheme}://{settings.host}:{settings.port}",
        nodes=[node.name for node in settings.local_node_specs()],
        cloud=[node.name for node in settings.cloud_specs()],
        strategy=settings.lb_strategy,
        **workers,
    )
    for warning in settings.warnings:
        log.warning(warning)
