"""How the ledger's tables came to be what they are, step by step.

A new step is a module in `versions/`; its revision becomes HEAD.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

HEAD = "0001"


class NewerTables(Exception):
    """The tables have come to a revision that is not known here."""


def revision_of(connection: Connection) -> str | None:
    """Which step the tables have come to; None when there are none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def upgrade(connection: Connection) -> None:
    """Leads to HEAD, in the connection's transaction. Raises `NewerTables`."""
    # Imported here: most starts find the tables as they should be.
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise NewerTables(revision_of(connection)) from error
