"""The command line: `python -m app serve`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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

    from app.main import create_app
    from app.server import DRAIN_SECONDS, PortTaken, make_server
    from app.start import announce
    from app.telemetry.logs import StandardBridge, make_logger, open_writer

    sink = open_writer()
    log = make_logger(sink, settings.log_level, settings.log_format)
    logging.basicConfig(handlers=[StandardBridge(log)], level=logging.WARNING, force=True)
    app = create_app(settings, sink)

    def closing() -> None:
        app.state.phase.closing = True
        log.info("Hearth ends when running requests have. A second signal stops at once", seconds=DRAIN_SECONDS)

    try:
        server = make_server(app, settings, closing)
    except PortTaken as error:
        print(f"hearth: {error}", file=sys.stderr)
        return 1
    announce(settings, log)
    server.run()
    return 0 if server.started else 1
