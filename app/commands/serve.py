"""`python -m app serve`: the gateway itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.commands import BAD_USAGE

if TYPE_CHECKING:
    from app.settings import Settings


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop. `argv` are settings, as flags."""
    from app.settings import SettingsError, load_settings

    try:
        settings = load_settings(argv)
    except SettingsError as error:
        print(f"hearth: {error.message}", file=sys.stderr)
        return BAD_USAGE
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
