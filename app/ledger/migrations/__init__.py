"""How the ledger's tables came to be what they are, step by step.

A new step is a module in `versions/`; its revision becomes HEAD. New tables are made at once as they should be, which
the steps must lead to as well: Alembic takes 8 MiB of memory, and most processes never need it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, text

from app.ledger.tables import metadata

HEAD = "0002"


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
    if revision_of(connection) is None:
        make(connection)
    else:
        migrate(connection)


def make(connection: Connection) -> None:
    """The tables of HEAD, where there are none."""
    metadata.create_all(connection, checkfirst=False)
    # As Alembic makes it.
    version = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))
    version.create(connection)
    connection.execute(version.insert().values(version_num=HEAD))


def migrate(connection: Connection) -> None:
    """Step by step, from whatever is there. Raises `NewerTables`."""
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
