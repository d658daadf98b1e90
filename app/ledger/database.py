"""The two kinds of database that the ledger may live in: how each is connected to, and what is peculiar to it."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from sqlalchemy import URL, Connection, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from app.errors import LedgerUnavailable
from app.ledger.engines import AsyncConnection, AsyncEngine, create_async_engine
from app.ledger.sqlite_thread import Execute, SqliteThread

_POSTGRES = re.compile(r"postgres(ql)?(\+\w+)?(?=://)", re.IGNORECASE)
_SQLITE = re.compile(r"sqlite(\+\w+)?://", re.IGNORECASE)
_BUSY_SECONDS = 5.0  # that a writer waits for another process's
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
_EXAMPLES = "a URL such as sqlite:///data/hearth.db or postgresql://hearth@localhost/hearth is needed"
_REFUSALS_OF_SQLITE = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
_REFUSALS_OF_POSTGRES = ("22", "23")  # classes of SQLSTATE: values, and what tables ask of them
_MIGRATION_LOCK = 0x48656172  # any number that no other program takes


class Database(Protocol):
    """One of them."""

    name: str  # what people know it by; no password
    errors: tuple[type[Exception], ...]  # SQLAlchemy's, and the driver's own, which it may let through

    def prepare(self) -> None:
        """What must be there before the first connection."""
        ...

    def engine(self, answer_seconds: float | None = _ANSWER_SECONDS) -> AsyncEngine:
        """Connections to it; `answer_seconds` is how long a statement may take, where there is a server."""
        ...

    async def begin_use(self, engine: AsyncEngine) -> None:
        """The first connection. Raises as the driver does."""
        ...

    async def write(self, engine: AsyncEngine, work: Callable[[Execute], None]) -> None:
        """Does the work as one transaction, in the way that costs least."""
        ...

    async def close(self) -> None: ...

    async def lock(self, connection: AsyncConnection) -> None:
        """Keeps every other process from migrating until the transaction's end."""
        ...

    def blames_values(self, error: Exception) -> bool:
        """Whether the statement failed by its values, and would fail again."""
        ...


def database(url: str) -> Database:
    """Raises `LedgerUnavailable` when the URL is none."""
    if _POSTGRES.match(url):
        return _Postgres(url)
    if _SQLITE.match(url):
        return _Sqlite(url)
    raise LedgerUnavailable(f"DATABASE_URL: {_EXAMPLES}")


def in_a_line(error: Exception) -> str:
    """What the driver said."""
    cause = getattr(error, "orig", None) or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


class _Sqlite:
    """A file of its own: any number of readers, and one writer at a time."""

    errors: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, sqlite3.Error)

    def __init__(self, url: str) -> None:
        path = _parsed(url).database
        if not path or path == ":memory:":
            raise LedgerUnavailable(f"DATABASE_URL: {_EXAMPLES}; off keeps nothing")
        self._path = Path(path)
        self._thread: SqliteThread | None = None
        self.name = f"sqlite:///{path}"

    def prepare(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise LedgerUnavailable(
                f"DATABASE_URL: the folder {self._path.parent} cannot be made: {reason.lower()}"
            ) from error

    def engine(self, answer_seconds: float | None = _ANSWER_SECONDS) -> AsyncEngine:
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(self._path)),
            async_creator=self._connected,
            pool_size=2,
            max_overflow=2,
        )
        event.listen(engine.sync_engine, "begin", self._on_begin)
        return engine

    async def begin_use(self, engine: AsyncEngine) -> None:
        """Lets readers and the writer work side by side, which the file remembers."""
        end = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                async with engine.connect() as connection:
                    raw: Any = (await connection.get_raw_connection()).driver_connection
                    async with raw.execute("PRAGMA journal_mode = WAL"):
                        return
            # This change alone does not wait for other processes.
            except Exception as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
            await asyncio.sleep(0.02)

    async def write(self, engine: AsyncEngine, work: Callable[[Execute], None]) -> None:
        if self._thread is None:
            self._thread = SqliteThread(self._path, _BUSY_SECONDS)
        await self._thread.transaction(work)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await thread.close()

    async def lock(self, connection: AsyncConnection) -> None:
        """A transaction that writes has the file for itself from its beginning."""

    def blames_values(self, error: Exception) -> bool:
        cause = error.orig if isinstance(error, DBAPIError) else error
        return isinstance(cause, _REFUSALS_OF_SQLITE)

    async def _connected(self) -> Any:
        import aiosqlite

        # aiosqlite does not wait for the end of its thread when it cannot open a file: it would answer a closed loop.
        await asyncio.to_thread(self._try)
        # Transactions begin where we say, and not where the driver guesses.
        connection = await aiosqlite.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        # In WAL mode this survives every death of the process; a power cut may take the last transactions.
        await connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _try(self) -> None:
        """Raises what is wrong with the file."""
        with closing(sqlite3.connect(self._path, timeout=_BUSY_SECONDS)) as connection:
            connection.execute("PRAGMA schema_version")

    @staticmethod
    def _on_begin(connection: Connection) -> None:
        # A transaction that first reads and then writes could not wait for its turn.
        writing = connection.get_execution_options().get("writing", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


class _Postgres:
    """A server. asyncpg reads the URL itself, so that all of libpq's forms and parameters work."""

    def __init__(self, url: str) -> None:
        import asyncpg

        self.name = _name_of(url)
        self._dsn = _POSTGRES.sub("postgresql", url, count=1)
        self._connect: Callable[..., Any] = asyncpg.connect
        self.errors: tuple[type[Exception], ...] = (
            SQLAlchemyError,
            OSError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
        )

    def prepare(self) -> None:
        """Nothing to do."""

    def engine(self, answer_seconds: float | None = _ANSWER_SECONDS) -> AsyncEngine:
        async def connect() -> Any:
            try:
                return await self._connect(self._dsn, timeout=_CONNECT_SECONDS, command_timeout=answer_seconds)
            except ValueError:
                raise _no_url() from None

        return create_async_engine(
            "postgresql+asyncpg://", async_creator=connect, pool_size=4, max_overflow=4, pool_pre_ping=True
        )

    async def begin_use(self, engine: AsyncEngine) -> None:
        async with engine.connect():
            """The login is all that may fail."""

    async def write(self, engine: AsyncEngine, work: Callable[[Execute], None]) -> None:
        async with engine.begin() as connection:
            await connection.run_sync(lambda sync: work(sync.exec_driver_sql))

    async def close(self) -> None:
        """Nothing to do."""

    async def lock(self, connection: AsyncConnection) -> None:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})

    def blames_values(self, error: Exception) -> bool:
        state = getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None
        return state is not None and state[:2] in _REFUSALS_OF_POSTGRES


def _parsed(url: str) -> URL:
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise _no_url() from None


def _name_of(url: str) -> str:
    """A PostgreSQL's URL as people may see it: hosts and database alone."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _no_url() from None
    if "@" in parts.path:  # a slash in the password has ended the hosts too early
        raise _no_url()
    hosts = parts.netloc.rpartition("@")[2] or parse_qs(parts.query).get("host", ["localhost"])[0]
    return f"postgresql://{hosts}{parts.path}"


def _no_url() -> LedgerUnavailable:
    # Whoever found it out may have named a part of the password.
    return LedgerUnavailable(
        "DATABASE_URL: it is no URL of a database; in a password, write special characters as %40 and the like"
    )
