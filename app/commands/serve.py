"""`python -m app serve`: the gateway itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from app.commands import BAD_USAGE


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop. `argv` are settings, as flags."""
    from app.settings import SettingsError, load_settings

    try:
        settings = load_settings(argv)
    except SettingsError as error:
        print(f"hearth: {error.message}", file=sys.stderr)
        return BAD_USAGE
    from app.start import run

    return run(settings, argv)
