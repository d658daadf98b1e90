"""What is written often, compiled once, for the driver itself: SQLAlchemy would look at every value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Table, bindparam, false, literal_column, update

from app.ledger.engines import AsyncEngine
from app.ledger.rows import Batch, RequestRow, Settlement, SpendRow
from app.ledger.sqlite_thread import Execute
from app.ledger.tables import requests, spend

# In one statement. SQLite's driver gives up the interpreter for each, and a busy event loop is slow to hand it back: a
# statement for each row would cost twice the CPU.
_SQLITE_ROWS = (100, 10)
_WIDTH = len(RequestRow._fields)
_ESTIMATED = RequestRow._fields.index("estimated")

_Row = TypeVar("_Row", RequestRow, SpendRow, Settlement)


class Statements:
    """Writes batches."""

    def __init__(self, engine: AsyncEngine) -> None:
        dialect = engine.dialect
        insert = _insert(dialect.name)
        sizes = _SQLITE_ROWS if dialect.name == "sqlite" else ()
        opening: dict[str, Any] = {name: bindparam(name) for name in SpendRow._fields} | {
            "state": literal_column("'open'"),
            "tokens_in": literal_column("0"),
            "tokens_out": literal_column("0"),
            "tokens_cached": literal_column("0"),
            "estimated": false(),
            "outcome": literal_column("''"),
        }
        settling = (
            update(spend)
            .where(spend.c.id == bindparam("row"), spend.c.state != literal_column("'settled'"))
            .values({name: bindparam(name) for name in Settlement._fields[1:]})
            .values(state=literal_column("'settled'"))
        )
        asking: dict[str, Any] = {name: bindparam(name) for name in RequestRow._fields}
        # The values of both come in the order of the tables' columns, which is that of the rows.
        self._requests, _ = _compiled(insert(requests).values(asking).on_conflict_do_nothing(), dialect)
        self._many_requests = [(size, _for_many(self._requests, size)) for size in sizes]
        self._open, _ = _compiled(insert(spend).values(opening).on_conflict_do_nothing(), dialect)
        self._settle, order = _compiled(settling, dialect)
        self._arrange = itemgetter(*(("row", *Settlement._fields[1:]).index(name) for name in order))

    def write(self, batch: Batch, execute: Execute) -> None:
        if batch.opened:
            execute(self._open, list(batch.opened))
        if batch.settled:
            execute(self._settle, [self._arrange(row) for row in batch.settled])
        rows = batch.requests
        for size, statement in self._many_requests:
            while len(rows) >= size:
                execute(statement, [_values(rows[:size])])
                rows = rows[size:]
        if rows:
            execute(self._requests, list(rows))

    def fitting(self, batch: Batch) -> Batch:
        """The same rows, with texts that every database takes."""
        return Batch(
            [_fitting(row, requests) for row in batch.requests],
            [_fitting(row, spend) for row in batch.opened],
            [_fitting(row, spend) for row in batch.settled],
        )


def _insert(database: str) -> Any:
    """The database's own, that knows of conflicts. Each is a megabyte, and one is enough."""
    if database == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def _fitting(row: _Row, table: Table) -> _Row:
    changed: dict[str, Any] = {}
    for name, value in row._asdict().items():
        if isinstance(value, str):
            text = value.encode(errors="replace").decode().replace("\0", "")
            changed[name] = text[: getattr(table.c[name].type, "length", None)]
    return row._replace(**changed)


def _values(rows: Sequence[RequestRow]) -> list[Any]:
    """Row by row, as SQLite's driver takes them fastest: it searches its adapters for what is not plain, as a bool."""
    values: list[Any] = list(chain.from_iterable(rows))
    values[_ESTIMATED::_WIDTH] = map(int, values[_ESTIMATED::_WIDTH])
    return values


def _for_many(insert: str, rows: int) -> str:
    """An insert of one row, made to take many."""
    head, values, rest = re.fullmatch(r"(.* VALUES )(\([?, ]*\))(.*)", insert, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{head}{', '.join([values] * rows)}{rest}"


def _compiled(statement: Any, dialect: Any) -> tuple[str, list[str]]:
    """A statement's text, and the names of its values in their order."""
    compiled = statement.compile(dialect=dialect)
    return str(compiled), list(compiled.positiontup)
