"""Writes to SQLite in a thread, a transaction at a time.

A transaction is one errand of the thread here. Through SQLAlchemy and aiosqlite it is eight, and takes five times the
CPU: 1 ms for a row that somebody waits for.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

Execute = Callable[[str, Sequence[Any]], Any]  # a statement, and the values of each time that it is to run


class SqliteThread:
    """Whoever makes it closes it."""

    def __init__(self, path: Path, busy_seconds: float) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._connection: sqlite3.Connection | None = None  # the thread's own

    async def transaction(self, work: Callable[[Execute], None]) -> None:
        """Does the work, in the thread, as one transaction. Cancelled, it is done or not, and never half done."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    async def close(self) -> None:
        """Returns once the last transaction is over."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown()

    def _transaction(self, work: Callable[[Execute], None]) -> None:
        connection = self._connected()
        try:
            connection.execute("BEGIN IMMEDIATE")
            work(connection.executemany)
            connection.execute("COMMIT")
        except sqlite3.OperationalError:
            self._disconnect()  # a new one may fare better, and what was begun is rolled back
            raise
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, timeout=self._busy_seconds, isolation_level=None)
            self._connection.execute("PRAGMA synchronous = NORMAL")
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):  # it is given up in any case
                connection.close()
