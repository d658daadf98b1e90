"""The ledger: what is written into it, and what it says of budgets. Maps the drivers' errors to ours.

SQLAlchemy is slow to import: whoever may do without a ledger imports this module when there is one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import Self

from sqlalchemy import case, func, select, true, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import ColumnElement, Update

from app.errors import LedgerRefused, LedgerUnavailable
from app.ledger.database import database, in_a_line
from app.ledger.engines import AsyncConnection, AsyncEngine
from app.ledger.inspection import lost_sums
from app.ledger.migrations import HEAD, NewerTables, revision_of, upgrade
from app.ledger.rows import Batch
from app.ledger.statements import Statements
from app.ledger.tables import spend
from app.sharing.meter import GATEWAY, Spent
from app.sharing.periods import now_ms


class Store:
    """One process's way into the ledger. Opened and closed with `async with`, or `open` and `close`.

    `url`: `sqlite:///relative`, `sqlite:////absolute`, `postgresql://` or `postgres://` as libpq knows them. Every
    method raises `LedgerUnavailable` when the database cannot be asked, with one line that shows no password, and
    `LedgerRefused` when it can, and does not take these values.
    """

    def __init__(self, url: str) -> None:
        self._database = database(url)
        self._engine: AsyncEngine | None = None
        self._writing: AsyncEngine | None = None

    @property
    def name(self) -> str:
        """What people know the database by; no password."""
        return self._database.name

    async def open(self) -> None:
        """Connects, and brings the tables up to date. Several processes may do so at once."""
        self._database.prepare()
        self._engine = self._database.engine()
        self._writing = self._engine.execution_options(writing=True)
        self._statements = Statements(self._engine)
        try:
            async with self._connecting():
                await self._database.begin_use(self._engine)
            await self._migrate()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        engine, self._engine, self._writing = self._engine, None, None
        if engine is not None:
            await self._database.close()
            await engine.dispose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AsyncConnection]:
        """A connection to read from. `IntegrityError` passes through."""
        async with self._mapped(), self._opened(self._engine).connect() as connection:
            yield connection

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """A transaction to write in, committed at the block's end. `IntegrityError` passes through.

        What is read in it stays true until its end on SQLite, where there is one writer at a time.
        """
        async with self._mapped(), self._opened(self._writing).begin() as connection:
            yield connection

    async def write(self, batch: Batch) -> None:
        """All of it or nothing; when it returns, the rows survive this process. To write a batch again changes nothing.

        The first settlement of a spend counts. One that was given up as lost takes it, too: it knows better.
        """
        try:
            await self._write(batch)
        except LedgerRefused:
            # What a client calls a model may be longer than any name, or hold what PostgreSQL takes for no text.
            fitting = self._statements.fitting(batch)
            if fitting == batch:
                raise
            await self._write(fitting)

    async def _write(self, batch: Batch) -> None:
        async with self._mapped():
            try:
                await self._database.write(self._opened(self._writing), partial(self._statements.write, batch))
            # Whole numbers that are too large, and text that is no Unicode, do not even reach the database.
            except (IntegrityError, OverflowError, UnicodeError) as error:
                raise LedgerRefused(f"the ledger refused a row: {in_a_line(error)}") from error

    async def spent(self, scope: str, since_ms: int) -> Spent:
        """What was reserved since then in one scope: what it came to, and what is open by hold."""
        is_open = spend.c.state == "open"
        # One statement, so that a row which is settled meanwhile is counted once.
        rows = (
            select(
                case((is_open, spend.c.id), else_=None).label("hold"),
                case((is_open, spend.c.reserved), else_=spend.c.cost).label("amount"),
            )
            .where(spend.c.at >= since_ms, _in_scope(scope))
            .subquery()
        )
        async with self.connect() as connection:
            sums = await connection.execute(select(rows.c.hold, func.sum(rows.c.amount)).group_by(rows.c.hold))
            amounts: dict[str | None, int] = {hold: int(amount) for hold, amount in sums}
        settled = amounts.pop(None, 0)
        return Spent(settled, {hold: amount for hold, amount in amounts.items() if hold is not None})

    async def lose_open(self, instances_alive: Collection[str] | None, before_ms: int) -> int:
        """Gives up what dead processes left open before that time: it counts as reserved. Returns how many rows.

        `instances_alive` are the processes that may yet settle theirs; None = no other process lives.
        """
        change = (
            update(spend)
            .where(spend.c.state == "open", spend.c.at < before_ms)
            .values(state="lost", cost=spend.c.reserved)
        )
        if instances_alive:
            change = change.where(spend.c.instance.not_in(list(instances_alive)))
        return await self._changed(change)

    async def lost(self) -> tuple[int, int]:
        """How many rows are lost, and the micro-dollars that were reserved for them. Cheap."""
        async with self.connect() as connection:
            return await lost_sums(connection)

    async def reconcile(self, spend_id: str, cost: int) -> bool:
        """An operator knows what a lost attempt came to. False when no lost row has this id."""
        change = (
            update(spend)
            .where(spend.c.id == spend_id, spend.c.state == "lost")
            .values(state="settled", cost=cost, settled_at=now_ms())
        )
        return await self._changed(change) > 0

    async def _changed(self, change: Update) -> int:
        async with self.begin() as connection:
            return (await connection.execute(change)).rowcount

    async def _migrate(self) -> None:
        async with self.connect() as connection:
            if await connection.run_sync(revision_of) == HEAD:
                return
        patient = self._database.engine(answer_seconds=None)
        try:
            async with self._mapped(), patient.execution_options(writing=True).begin() as connection:
                await self._database.lock(connection)
                if await connection.run_sync(revision_of) != HEAD:
                    await connection.run_sync(upgrade)
        except NewerTables as error:
            raise LedgerUnavailable(
                f"DATABASE_URL: a newer Hearth has changed the tables in {self.name} (revision {error}); start that one"
            ) from error
        finally:
            await patient.dispose()

    def _opened(self, engine: AsyncEngine | None) -> AsyncEngine:
        if engine is None:
            raise LedgerUnavailable("the ledger is closed")
        return engine

    @asynccontextmanager
    async def _mapped(self) -> AsyncIterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except self._database.errors as error:
            kind = LedgerRefused if self._database.blames_values(error) else LedgerUnavailable
            raise kind(f"the ledger's database {self.name} failed: {in_a_line(error)}") from error

    @asynccontextmanager
    async def _connecting(self) -> AsyncIterator[None]:
        try:
            yield
        except self._database.errors as error:
            raise LedgerUnavailable(f"DATABASE_URL: {self.name} cannot be opened: {in_a_line(error)}") from error


def _in_scope(scope: str) -> ColumnElement[bool]:
    if scope == GATEWAY:
        return true()
    kind, _, whose = scope.partition(":")
    columns = {"key": spend.c.key, "route": spend.c.route, "provider": spend.c.node}
    return columns[kind] == whose
