"""The command line: `python -m app serve`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from app import __version__

if TYPE_CHECKING:
    from app.settings import Settings

_USAGE = """\
usage: python -m app COMMAND

commands:
  serve [--SETTING VALUE ...]   start the gateway; every setting of .env.example is a flag too (--port 9000)

options:
  --help, --version
"""
_BAD_USAGE = 2
_DRAIN_SECONDS = 30
_KEEPALIVE_SECONDS = 75  # longer than clients keep their connections, so that they close first


def main(argv: Sequence[str]) -> int:
    """Runs a command and returns the exit status."""
    match list(argv):
        case ["serve", *flags] if "--help" not in flags:
            return serve(flags)
        case ["--version"]:
            print(f"hearth {__version__}")
            return 0
        case ["--help"] | ["-h"] | ["serve", *_]:
            print(_USAGE)
            return 0
        case []:
            print(_USAGE, file=sys.stderr)
            return _BAD_USAGE
        case [command, *_]:
            print(f"unknown command '{command}'\n\n{_USAGE}", file=sys.stderr)
            return _BAD_USAGE
    return _BAD_USAGE


def serve(flags: Sequence[str]) -> int:
    """Serves until it is told to stop."""
    from app.settings import SettingsError, load_settings

    try:
        settings = load_settings(flags)
    except SettingsError as error:
        print(f"hearth: {error.message}", file=sys.stderr)
        return _BAD_USAGE
    return _run(settings)


def _run(settings: Settings) -> int:
    import logging

    import uvicorn

    from app.main import create_app
    from app.start import announce
    from app.telemetry.logs import StandardBridge, make_logger, open_writer

    sink = open_writer()
    log = make_logger(sink, settings.log_level, settings.log_format)
    logging.basicConfig(handlers=[StandardBridge(log)], level=logging.WARNING, force=True)
    app = create_app(settings, sink)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # The first signal lets running requests end, the second one does not. uvicorn would raise the signal
            # again after that, and the process would die of it instead of ending well.
            app.state.phase.closing = True
            self.force_exit = self.should_exit
            self.should_exit = True
            if self.force_exit:
                # What breaks off now does so on purpose; uvicorn would show a traceback for each of it.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            else:
                log.info(
                    "Hearth ends when running requests have. A second signal stops at once", seconds=_DRAIN_SECONDS
                )

    server = Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            http="httptools",
            loop="auto",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEPALIVE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
    )
    announce(settings, log)
    server.run()
    return 0 if server.started else 1
