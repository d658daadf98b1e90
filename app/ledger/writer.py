"""Writes the ledger behind the requests' backs, many rows at a time.

What an attempt may cost is waited for; all else is taken at once and written within a quarter of a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, Self

from app.errors import LedgerRefused, LedgerUnavailable
from app.ledger.rows import Batch, RequestRow, Settlement, SpendRow

_FLUSH_SECONDS = 0.25
_BATCH_ROWS = 300  # in one transaction: more would hold up other processes' writes
_SPACE_SECONDS = 0.005  # between the beginnings of two transactions that somebody waits for
_WAIT_SECONDS = (0.1, 2.0)  # between attempts while the database is out of reach: the first and the longest
_TELL_SECONDS = 60.0  # between two words on dropped rows


MakeRow = Callable[[], RequestRow]


class Ledger(Protocol):
    """Where rows are kept."""

    async def write(self, batch: Batch) -> None:
        """All of it or nothing; raises `LedgerRefused` or `LedgerUnavailable`."""
        ...


class _Opening(NamedTuple):
    """A row that somebody waits for."""

    row: SpendRow
    done: asyncio.Future[None]


_Money = _Opening | Settlement


class Writer:
    """The writer of one process. Used with `async with`, or `start` and `close`.

    Rows of requests are kept up to `limit`, and dropped beyond; what concerns money is never dropped. `on_trouble`
    gets a message and fields: once when the database goes out of reach and once when it is back, when it refuses a
    row, and at most once a minute that rows were dropped. `on_written` gets the rows of requests once they are written.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_trouble: Callable[..., None],
        *,
        on_written: Callable[[Sequence[RequestRow]], None] = lambda rows: None,
        limit: int = 20_000,
        close_seconds: float = 5.0,
    ) -> None:
        self.dropped = 0  # rows of requests that were never written
        self._ledger = ledger
        self._on_trouble = on_trouble
        self._on_written = on_written
        self._limit = limit
        self._close_seconds = close_seconds
        self._requests: deque[MakeRow] = deque()
        self._money: deque[_Money] = deque()  # in order: a row is opened before it is settled
        self._some = asyncio.Event()  # there is something to write
        self._now = asyncio.Event()  # and somebody waits for it
        self._down: LedgerUnavailable | None = None
        self._closed = True
        self._began = 0.0  # the last transaction; monotonic
        self._told_at = -_TELL_SECONDS
        self._untold = 0
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many rows wait."""
        return len(self._requests) + len(self._money)

    @property
    def up(self) -> bool:
        """Whether the database took the last rows."""
        return self._down is None

    def start(self) -> None:
        self._closed = False
        self._task = asyncio.create_task(self._run(), name="ledger writer")

    async def close(self) -> None:
        """Writes what waits, for some seconds at most. What is added later is not written."""
        self._closed = True
        self._some.set()
        self._now.set()
        task, self._task = self._task, None
        if task is None:
            return
        try:
            await asyncio.wait([task], timeout=self._close_seconds)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._give_up_waiting(LedgerUnavailable("the ledger was closed"))
        if len(self):
            self._on_trouble("Hearth ends with rows that could not be written to the ledger", rows=len(self))

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def add(self, make: MakeRow) -> None:
        """Takes what makes a request's row when it is written."""
        if len(self._requests) >= self._limit:
            self._drop(1)
            return
        if not self._requests:
            self._some.set()  # it stays set until nothing is left
        self._requests.append(make)

    def settle(self, settlement: Settlement) -> None:
        """Takes what an attempt came to. One whose row is not there is written without effect."""
        self._money.append(settlement)
        self._some.set()

    async def opened(self, row: SpendRow) -> None:
        """Returns once the row survives this process. Raises `LedgerUnavailable`, at once while it is known.

        When it raises or is cancelled the row may be there or not: settle it in any case.
        """
        if self._closed:
            raise LedgerUnavailable("the ledger is closed")
        if self._down is not None:
            raise LedgerUnavailable(self._down.message)
        opening = _Opening(row, asyncio.get_running_loop().create_future())
        self._money.append(opening)
        self._some.set()
        self._now.set()
        await opening.done

    async def _run(self) -> None:
        wait, longest = _WAIT_SECONDS
        while len(self) or not self._closed:
            await self._turn()
            try:
                await self._flush()
            # Whatever it was: without this task nothing would be written any more, and others wait for it.
            except Exception as error:
                self._failed(error)
                await asyncio.sleep(wait)
                wait = min(wait * 2, longest)
            else:
                self._worked()
                wait = _WAIT_SECONDS[0]

    async def _turn(self) -> None:
        """Returns when it is time to write."""
        if not len(self) and self._down is None:
            self._some.clear()
            await self._some.wait()
        try:
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._now.wait()
        except TimeoutError:
            return
        if not self._closed:
            self._now.clear()
            # Whoever comes alone is served at once; many who come together share transactions.
            await asyncio.sleep(self._began + _SPACE_SECONDS - time.monotonic())

    async def _flush(self) -> None:
        """Writes what waits, or an empty batch, which tells whether the database is back."""
        full = True
        while full:
            self._began = time.monotonic()
            money = list(islice(self._money, _BATCH_ROWS))
            rows = [make() for make in islice(self._requests, _BATCH_ROWS - len(money))]
            full = len(money) + len(rows) == _BATCH_ROWS
            await self._write(money, rows)
            # They leave the queue now, and not before: until here any fault leaves everything in place.
            for _ in money:
                self._money.popleft()
            for _ in rows:
                self._requests.popleft()
            self._on_written(rows)

    async def _write(self, money: Sequence[_Money], rows: Sequence[RequestRow]) -> None:
        """Writes them in one transaction, or, where the database refuses some, all but those."""
        try:
            await self._ledger.write(_batch(money, rows))
        except LedgerRefused as error:
            if len(money) + len(rows) > 1:
                for part in _parts(money, rows):
                    await self._write(*part)
            else:
                self._refused((*money, *rows)[0], error)
        else:
            for entry in money:
                if isinstance(entry, _Opening) and not entry.done.done():
                    entry.done.set_result(None)

    def _refused(self, entry: _Money | RequestRow, error: LedgerRefused) -> None:
        if isinstance(entry, _Opening):
            _fail(entry, error)
            return
        if isinstance(entry, RequestRow):
            self.dropped += 1
        self._on_trouble("the ledger refused a row", row=entry.id, error=error.message)

    def _failed(self, error: Exception) -> None:
        told = self._down is not None
        self._down = (
            error if isinstance(error, LedgerUnavailable) else LedgerUnavailable(f"the ledger failed: {error!r}")
        )
        self._give_up_waiting(self._down)
        if not told:
            self._on_trouble(
                "the ledger cannot be written; rows are kept, and the cloud is closed until it can",
                error=self._down.message,
                waiting=len(self),
            )

    def _worked(self) -> None:
        if self._down is not None:
            self._down = None
            self._on_trouble("the ledger is written again")

    def _give_up_waiting(self, error: LedgerUnavailable) -> None:
        """Nobody waits for a database that is out of reach: the requests of these rows never leave."""
        kept: list[Settlement] = []
        for entry in self._money:
            if isinstance(entry, _Opening):
                _fail(entry, error)
            else:
                kept.append(entry)
        self._money = deque(kept)

    def _drop(self, rows: int) -> None:
        self.dropped += rows
        self._untold += rows
        now = time.monotonic()
        if now - self._told_at >= _TELL_SECONDS:
            self._on_trouble("the ledger is too slow; rows of requests were dropped", rows=self._untold)
            self._told_at, self._untold = now, 0


def _batch(money: Sequence[_Money], rows: Sequence[RequestRow]) -> Batch:
    opened = [entry.row for entry in money if isinstance(entry, _Opening)]
    return Batch(rows, opened, [entry for entry in money if isinstance(entry, Settlement)])


def _parts(
    money: Sequence[_Money], rows: Sequence[RequestRow]
) -> Iterator[tuple[Sequence[_Money], Sequence[RequestRow]]]:
    """All that there is in two parts, in its order."""
    if money and rows:
        yield money, []
        yield [], rows
        return
    middle = (len(money) + len(rows)) // 2
    yield money[:middle], rows[:middle]
    yield money[middle:], rows[middle:]


def _fail(opening: _Opening, error: LedgerUnavailable) -> None:
    if not opening.done.done():
        # Each gets an exception of its own: a traceback belongs to one task.
        opening.done.set_exception(type(error)(error.message))
