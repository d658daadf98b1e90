"""Counts kept in plain dictionaries, and shown to Prometheus when it asks.

prometheus-client's own counters take a lock and a check for every step; a request makes eight of them, and the event
loop is the only one who counts. Reading from another thread is safe: what is read is copied in one step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


class Count(Collector):
    """A counter with labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class Spread(Collector):
    """A histogram with labels. `bounds` are the buckets' upper ends, rising, without the last, which has none."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds = tuple(bounds)
        self._ends = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
        self._values: dict[Labels, tuple[list[int], list[float]]] = {}  # how many by bucket, and the sum

    def add(self, labels: Labels, value: float) -> None:
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = ([0] * len(self._ends), [0.0])
        found[0][bisect_left(self._bounds, value)] += 1
        found[1][0] += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for labels, (counts, total) in list(self._values.items()):
            family.add_metric(labels, self._cumulative(list(counts)), total[0])
        yield family

    def _cumulative(self, counts: list[int]) -> list[tuple[str, float]]:
        reached, buckets = 0, []
        for end, count in zip(self._ends, counts, strict=True):
            reached += count
            buckets.append((end, float(reached)))
        return buckets
