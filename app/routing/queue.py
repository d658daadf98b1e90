"""Who has the next turn of those who wait: by class, fair between keys, and at last everybody. Plain decisions, no I/O.

Each key has a line of its own on each route and in each class. Lines of a class take turns, and a key of weight 3 has
three at a time. A higher class comes first, but of eight turns of a route a lower class that waits has at least one. A
turn is one request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from math import exp
from typing import Generic, NamedTuple, TypeVar

from app.domain import Priority

PRIORITIES = tuple(Priority)  # the first comes first
QUEUE_SIZE = 1000  # requests that may wait on a route

_LOWER_SHARE = 1 / 8  # of a route's turns, for each class that waits while a higher one is served
_QUEUES_MAX = 256  # routes of which the pace is remembered; more only while somebody waits on them
_PACE_TURNS = 16  # that are remembered at least,
_PACE_SECONDS = 5.0  # or those of so long a time
_PACE_KNOWN = 4  # turns, before which there is no pace


class Standing(NamedTuple):
    """For what a request waits, and with what right."""

    route: str = ""  # safe as a metric's label
    model: str = ""  # routes without a name of their own are told apart by it
    key: str = ""
    weight: int = 1
    rank: int = PRIORITIES.index(Priority.NORMAL)  # in PRIORITIES
    size: int = QUEUE_SIZE

    @property
    def queue(self) -> Hashable:
        return self.route, self.model


class Pace:
    """How often those who wait have a turn. Only the time counts in which somebody waits."""

    __slots__ = ("_idle", "_open", "_seconds", "_since", "_turns")

    def __init__(self) -> None:
        self._turns = self._seconds = 0.0  # both fade
        self._since = 0.0  # of the last turn, when time that does not count is left out
        self._open = 0.0  # seconds since the last turn, when nobody waits any more
        self._idle = True

    def waits(self, now: float) -> None:
        """Somebody waits from now on."""
        if self._idle:
            self._idle, self._since = False, now - self._open

    def nobody_waits(self, now: float) -> None:
        if not self._idle:
            self._idle, self._open = True, now - self._since

    def turn(self, now: float) -> None:
        gap = now - self._since
        self._since = now
        kept = max(1 - 1 / _PACE_TURNS, exp(-gap / _PACE_SECONDS))
        self._turns = self._turns * kept + 1
        self._seconds = self._seconds * kept + gap

    def per_second(self, now: float) -> float | None:
        """None as long as too little is known."""
        if self._turns < _PACE_KNOWN:
            return None
        return self._turns / max(self._seconds + (self._open if self._idle else now - self._since), 1e-6)


class Entry:
    """One request in a line."""

    __slots__ = ("line",)

    line: Line | None


E = TypeVar("E", bound=Entry)


class Line:
    """The requests of one key and class on one route, in the order in which they came."""

    __slots__ = ("credit", "entries", "key", "queue", "rank", "weight")

    def __init__(self, queue: Queue, standing: Standing) -> None:
        self.queue = queue
        self.key, self.rank, self.weight = standing.key, standing.rank, standing.weight
        self.credit = standing.weight  # turns that it has before the next line
        self.entries: dict[Entry, None] = {}


class Queue:
    """Those who wait on one route. `counts`, `owed` and `paces` are by class."""

    __slots__ = ("counts", "label", "length", "lines", "owed", "pace", "paces")

    def __init__(self, label: str) -> None:
        self.label = label
        self.length = 0
        self.lines: dict[tuple[int, str], Line] = {}  # those that hold somebody
        self.counts = [0] * len(PRIORITIES)
        self.owed = [0.0] * len(PRIORITIES)  # turns that higher classes have had before it, times its share
        self.pace = Pace()
        self.paces = [Pace() for _ in PRIORITIES]


class Turns(Generic[E]):
    """All who wait, in the order of their turns. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, Queue] = {}
        self._lines: tuple[OrderedDict[Line, None], ...] = tuple(OrderedDict() for _ in PRIORITIES)
        self._owing: dict[tuple[Queue, int], None] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def lengths(self) -> list[tuple[str, str, int]]:
        """Route, class and how many wait, where somebody has."""
        found: dict[tuple[str, str], int] = {}
        for queue in list(self._queues.values()):  # in one step, as another thread may ask
            for priority, count in zip(PRIORITIES, queue.counts, strict=True):
                at = (queue.label, priority.value)
                found[at] = found.get(at, 0) + count
        return [(*at, count) for at, count in found.items()]

    def __iter__(self) -> Iterator[E]:
        """Everybody, in the order in which they would be served if all could be. Change nothing meanwhile."""
        first = [entry for queue, rank in self._owing if (entry := self._head(queue, rank)) is not None]
        yield from first  # type: ignore[misc]
        for lines in self._lines:
            if lines and not first:
                yield from _rounds(lines)  # type: ignore[misc]
            elif lines:
                yield from (entry for entry in _rounds(lines) if entry not in first)  # type: ignore[misc]

    def _head(self, queue: Queue, rank: int) -> Entry | None:
        line = next((line for line in self._lines[rank] if line.queue is queue), None)
        return None if line is None else next(iter(line.entries))

    def join(self, entry: E, standing: Standing, now: float) -> None:
        """Puts a request at the end of its key's line."""
        queue = self._queue(standing)
        line = queue.lines.get((standing.rank, standing.key))
        if line is None:
            line = queue.lines[standing.rank, standing.key] = Line(queue, standing)
            self._lines[line.rank][line] = None
        line.weight = standing.weight  # it may have been changed
        line.entries[entry] = None
        entry.line = line
        queue.counts[line.rank] += 1
        queue.length += 1
        self._length += 1
        queue.pace.waits(now)
        queue.paces[line.rank].waits(now)

    def _queue(self, standing: Standing) -> Queue:
        name = standing.queue
        queue = self._queues.get(name)
        if queue is None:
            if len(self._queues) >= _QUEUES_MAX:  # the names of models may come from clients
                idle = next((name for name, queue in self._queues.items() if not queue.length), None)
                if idle is not None:
                    del self._queues[idle]
            queue = self._queues[name] = Queue(standing.route)
        return queue

    def serve(self, entry: E, now: float) -> None:
        """It has its turn."""
        line = entry.line
        assert line is not None, "it waits"
        queue = line.queue
        line.credit -= 1
        if line.credit <= 0:
            line.credit = line.weight
            self._lines[line.rank].move_to_end(line)
        queue.pace.turn(now)
        queue.paces[line.rank].turn(now)
        self._settle(queue, line.rank)
        self.leave(entry, now)

    def _settle(self, queue: Queue, rank: int) -> None:
        """What a turn of this class means for the lower ones that wait."""
        if queue.owed[rank]:
            queue.owed[rank] = 0.0
            self._owing.pop((queue, rank), None)
        for lower in range(rank + 1, len(PRIORITIES)):
            if queue.counts[lower]:
                queue.owed[lower] += _LOWER_SHARE
                if queue.owed[lower] >= 1:
                    self._owing[queue, lower] = None

    def leave(self, entry: E, now: float) -> None:
        """It waits no more; nothing happens when it does not anyhow."""
        line = entry.line
        if line is None:
            return
        entry.line = None
        del line.entries[entry]
        queue, rank = line.queue, line.rank
        queue.counts[rank] -= 1
        queue.length -= 1
        self._length -= 1
        if not line.entries:
            del queue.lines[rank, line.key], self._lines[rank][line]
        if not queue.counts[rank]:
            queue.paces[rank].nobody_waits(now)
            queue.owed[rank] = 0.0
            self._owing.pop((queue, rank), None)
            if not queue.length:
                queue.pace.nobody_waits(now)

    # -- how full it is, and how long it takes

    def waiting(self, standing: Standing) -> int:
        """How many wait on the route."""
        queue = self._queues.get(standing.queue)
        return queue.length if queue is not None else 0

    def longest(self, standing: Standing) -> E | None:
        """Whose place in a full queue a newcomer may take: the last of the line that is longest for its weight.

        None when it would be the newcomer's own line. A lower class gives way before all else.
        """
        queue = self._queues.get(standing.queue)
        if queue is None or not queue.lines:
            return None
        longest = max(queue.lines.values(), key=_measure)
        own = queue.lines.get((standing.rank, standing.key))
        mine = (standing.rank, ((len(own.entries) if own else 0) + 1) / standing.weight)
        return next(reversed(longest.entries)) if _measure(longest) > mine else None  # type: ignore[return-value]

    def ahead(self, standing: Standing) -> tuple[int, int]:
        """How many would be served before a newcomer: on its route, and of those in its class."""
        queue = self._queues.get(standing.queue)
        if queue is None or not queue.length:
            return 0, 0
        own = queue.lines.get((standing.rank, standing.key))
        before = len(own.entries) if own is not None else 0
        rounds = before // standing.weight + 1
        alike = before + sum(
            min(len(line.entries), rounds * line.weight)
            for line in queue.lines.values()
            if line.rank == standing.rank and line is not own
        )
        first = sum(queue.counts[: standing.rank]) + alike
        lower = sum(min(count, int(first * _LOWER_SHARE)) for count in queue.counts[standing.rank + 1 :])
        return first + lower, alike

    def per_second(self, standing: Standing, now: float) -> float | None:
        """Turns on the route; None as long as too little is known."""
        queue = self._queues.get(standing.queue)
        return None if queue is None else queue.pace.per_second(now)

    def seconds(self, standing: Standing, now: float) -> float | None:
        """How long a newcomer would wait for its turn, by the pace at which others have had theirs; None = unknown."""
        queue = self._queues.get(standing.queue)
        pace = None if queue is None else queue.pace.per_second(now)
        if queue is None or pace is None:
            return None
        ahead, alike = self.ahead(standing)
        seconds = (ahead + 1) / pace
        # While higher classes go on to come, those who wait now are not all that a lower one waits for.
        own = queue.paces[standing.rank].per_second(now) if sum(queue.counts[: standing.rank]) else None
        return seconds if own is None else max(seconds, (alike + 1) / own)


def _measure(line: Line) -> tuple[int, float]:
    return line.rank, len(line.entries) / line.weight


def _rounds(lines: OrderedDict[Line, None]) -> Iterator[Entry]:
    """Each line as often in a round as its weight; in the first round as often as it has turns left."""
    going: list[tuple[Line, Iterator[Entry], int]] = []
    for line in lines:
        entries = iter(line.entries)
        yield from islice(entries, line.credit)
        left = len(line.entries) - line.credit
        if left > 0:
            going.append((line, entries, left))
    while len(going) > 1:
        again = []
        for line, entries, left in going:
            yield from islice(entries, line.weight)
            if left > line.weight:
                again.append((line, entries, left - line.weight))
        going = again
    for _, entries, _ in going:
        yield from entries
