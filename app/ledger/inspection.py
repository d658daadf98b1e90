"""Looks at a ledger and changes nothing in it: no table is made, and none brought up to date."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sqlalchemy import func, select

from app.errors import LedgerUnavailable
from app.ledger.database import database, in_a_line
from app.ledger.engines import AsyncConnection
from app.ledger.migrations import HEAD, revision_of
from app.ledger.tables import spend

_FILE = "sqlite:///"


class Inspection(NamedTuple):
    """`revision` is the tables', `head` the one that this version needs. Money is micro-dollars."""

    revision: str | None  # None = there are no tables
    head: str
    lost: int = 0
    lost_micro_dollars: int = 0


def place(url: str) -> tuple[str, Path | None]:
    """What people know the ledger by, and its file where it is one. Raises `LedgerUnavailable` when the URL is none."""
    name = database(url).name
    return name, Path(name.removeprefix(_FILE)) if name.startswith(_FILE) else None


async def inspect(url: str) -> Inspection:
    """Connects and looks. Raises `LedgerUnavailable`, with a line that shows no password. A file must be there."""
    store = database(url)
    engine = store.engine()
    try:
        async with engine.connect() as connection:
            revision = await connection.run_sync(revision_of)
            if revision is None:
                return Inspection(None, HEAD)
            return Inspection(revision, HEAD, *await lost_sums(connection))
    except store.errors as error:
        raise LedgerUnavailable(f"{store.name} cannot be read: {in_a_line(error)}") from error
    finally:
        await store.close()
        await engine.dispose()


async def lost_sums(connection: AsyncConnection) -> tuple[int, int]:
    """How many spends are lost, and the micro-dollars that were reserved for them."""
    sums = select(func.count(), func.coalesce(func.sum(spend.c.reserved), 0)).where(spend.c.state == "lost")
    count, reserved = (await connection.execute(sums)).one()
    return int(count), int(reserved)
