"""Counters, histograms and gauges with labels, of which the event loop is the only one who counts.

prometheus-client's own take a lock and a check for every step, 3 us for a counter; here it is 0.2. Reading from another
thread is safe: what is read is copied in one step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

from app.telemetry.exposition import head, number, sample_name

Labels = tuple[str, ...]
Cell = list[float]  # a counter's or a gauge's one value; a histogram's buckets, each for itself, and the sum
Samples = Sequence[tuple[Labels, Cell]]

OTHER = "other"  # stands for labels that are too many to be told apart

_LABEL_SETS = 4096  # of one metric


class Merge(StrEnum):
    """What becomes of several workers' samples with the same labels."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    OWN = "own"  # every worker sees the same, so that the one that is asked shows its own


MERGES: dict[Merge, Callable[[float, float], float]] = {
    Merge.SUM: lambda one, other: one + other,
    Merge.MAX: max,
    Merge.MIN: min,
}


class Family(Protocol):
    """A metric: its name, labels and samples."""

    name: str
    text: str
    labels: Labels
    kind: str
    merge: Merge
    lasting: bool  # counts on when its worker has ended
    width: int  # of a cell

    def read(self) -> Samples: ...

    def lines(self, samples: Samples) -> Iterator[str]:
        """The samples as text: a piece for each set of labels."""
        ...

    def head(self) -> str: ...


class _Named:
    """What all kinds have in common."""

    kind = "untyped"
    merge = Merge.SUM
    lasting = False
    width = 1

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.text, self.labels = name, text, labels
        self._names: dict[Labels, tuple[str, ...]] = {}

    def head(self) -> str:
        return head(self.name, self.text, self.kind)

    def _sample_names(self, labels: Labels) -> tuple[str, ...]:
        """Made once, as they are half of the work."""
        found = self._names.get(labels)
        if found is None:
            if len(self._names) > 2 * _LABEL_SETS:
                self._names.clear()
            found = self._names[labels] = tuple(self._make_names(labels))
        return found

    def _make_names(self, labels: Labels) -> Iterator[str]:
        yield sample_name(self.name, self.labels, labels)


class _Counted(_Named):
    """What only grows."""

    lasting = True

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__(name, text, *labels)
        self._cells: dict[Labels, Cell] = {}
        if not labels:
            self.at(())

    def at(self, labels: Labels) -> Cell:
        """The cell of these labels, to count in. There is an end to how many; the rest share one."""
        cell = self._cells.get(labels)
        if cell is None:
            if len(self._cells) >= _LABEL_SETS:
                labels = (OTHER,) * len(self.labels)
            cell = self._cells.setdefault(labels, self._empty())
        return cell

    def begin(self, samples: Iterable[tuple[Sequence[str], Cell]]) -> None:
        """Goes on from where another one ended."""
        for labels, values in samples:
            if fits(self, labels, values):
                cell = self.at(tuple(labels))
                cell[:] = [one + other for one, other in zip(cell, values, strict=True)]

    def read(self) -> Samples:
        return [(labels, list(cell)) for labels, cell in list(self._cells.items())]

    def _empty(self) -> Cell:
        return [0] * self.width


class Count(_Counted):
    """A counter. What is counted is shown divided by `unit`: small money is exact in whole numbers alone."""

    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str, unit: int = 1) -> None:
        super().__init__(name, text, *labels)
        self._unit = unit

    def add(self, labels: Labels, amount: float = 1) -> None:
        cell = self._cells.get(labels) or self.at(labels)
        cell[0] += amount

    def lines(self, samples: Samples) -> Iterator[str]:
        for labels, cell in samples:
            yield f"{self._sample_names(labels)[0]} {number(cell[0] / self._unit)}\n"


class Spread(_Counted):
    """A histogram. `bounds` are the buckets' upper ends, rising, without the last, which has none."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> None:
        self.bounds = tuple(bounds)
        self.width = len(self.bounds) + 2
        super().__init__(name, text, *labels)

    def add(self, labels: Labels, value: float) -> None:
        cell = self._cells.get(labels) or self.at(labels)
        cell[bisect_left(self.bounds, value)] += 1
        cell[-1] += value

    def lines(self, samples: Samples) -> Iterator[str]:
        for labels, cell in samples:
            reached = list(accumulate(cell[:-1]))
            values = [*reached, reached[-1], cell[-1]]
            names = self._sample_names(labels)
            yield "".join([f"{name} {number(value)}\n" for name, value in zip(names, values, strict=True)])

    def _make_names(self, labels: Labels) -> Iterator[str]:
        for end in (*map(number, self.bounds), "+Inf"):
            yield sample_name(f"{self.name}_bucket", (*self.labels, "le"), (*labels, end))
        yield sample_name(f"{self.name}_count", self.labels, labels)
        yield sample_name(f"{self.name}_sum", self.labels, labels)


class Gauge(_Named):
    """What is read at the moment of the scrape: `source` gives labels and values."""

    kind = "gauge"

    def __init__(
        self,
        name: str,
        text: str,
        *labels: str,
        source: Callable[[], Iterable[tuple[Labels, float]]],
        merge: Merge = Merge.SUM,
    ) -> None:
        super().__init__(name, text, *labels)
        self.merge = merge
        self._source = source

    def read(self) -> Samples:
        return [(labels, [value]) for labels, value in self._source()]

    def lines(self, samples: Samples) -> Iterator[str]:
        for labels, cell in samples:
            yield f"{self._sample_names(labels)[0]} {number(cell[0])}\n"


class Followed(Count):
    """A counter that follows a number which is counted elsewhere in this process. `source` gives it."""

    def __init__(
        self, name: str, text: str, *labels: str, source: Callable[[], Iterable[tuple[Labels, float]]]
    ) -> None:
        super().__init__(name, text, *labels)
        self._source = source
        self._seen: dict[Labels, float] = {}

    def read(self) -> Samples:
        for labels, value in self._source():
            self.add(labels, value - self._seen.get(labels, 0))
            self._seen[labels] = value
        return super().read()


def fits(family: Family | _Counted, labels: Sequence[str], cell: Cell) -> bool:
    """Whether a sample is one of the family's. Another worker's may not be, if Hearth was updated while it ran."""
    return len(labels) == len(family.labels) and len(cell) == family.width


def merged(family: Family, parts: Iterable[Iterable[tuple[Sequence[str], Cell]]]) -> Samples:
    """Samples of several workers, as one. `family` is none that each worker has alike."""
    join = MERGES[family.merge]
    found: dict[Labels, Cell] = {}
    for samples in parts:
        for labels, cell in samples:
            if fits(family, labels, cell):
                key = tuple(labels)
                before = found.get(key)
                found[key] = cell if before is None else [join(*each) for each in zip(before, cell, strict=True)]
    return list(found.items())
