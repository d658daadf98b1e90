"""Our counts look to Prometheus as its own would, one by one and put together."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client import Gauge as TheirGauge
from prometheus_client.utils import floatToGoString

from app.telemetry.exposition import number
from app.telemetry.tallies import OTHER, Count, Family, Followed, Gauge, Merge, Spread, merged

VALUES = (0.0, 0.05, 0.1, 0.1000001, 0.7, 3.0, 99.0)
AWKWARD = 'q"uo\\te\nä€'


def _rendered(*families: Family) -> bytes:
    return "".join(line for family in families for line in (family.head(), *family.lines(family.read()))).encode()


@pytest.fixture
def registry() -> CollectorRegistry:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


def test_counts_render_as_prometheus_own_counter_does(registry: CollectorRegistry) -> None:
    theirs = Counter("things", 'What "and" \\ why.', ("b", "a"), registry=registry)
    ours = Count("things_total", 'What "and" \\ why.', "b", "a")
    for amount in (1, 2.5, 9e9):
        for value in (AWKWARD, "plain"):
            theirs.labels("x", value).inc(amount)
            ours.add(("x", value), amount)

    assert _rendered(ours) == generate_latest(registry)


def test_spreads_render_as_prometheus_own_histogram_does(registry: CollectorRegistry) -> None:
    theirs = Histogram("times", "When.", ("z", "a"), registry=registry, buckets=(0.1, 1, 5))
    ours = Spread("times", "When.", (0.1, 1, 5), "z", "a")
    for value in VALUES:
        theirs.labels("x", AWKWARD).observe(value)
        ours.add(("x", AWKWARD), value)

    assert _rendered(ours) == generate_latest(registry)


def test_gauges_render_as_prometheus_own_gauge_does(registry: CollectorRegistry) -> None:
    theirs = TheirGauge("level", "Now.", ("a",), registry=registry)
    theirs.labels("x").set(-2)
    ours = Gauge("level", "Now.", "a", source=lambda: [(("x",), -2)])

    assert _rendered(ours) == generate_latest(registry)


def test_what_has_no_labels_is_there_before_it_is_counted(registry: CollectorRegistry) -> None:
    Counter("things", "What.", registry=registry)
    Histogram("times", "When.", registry=registry, buckets=(1,))

    assert _rendered(Count("things_total", "What."), Spread("times", "When.", (1,))) == generate_latest(registry)


@pytest.mark.parametrize(
    "value",
    [
        *(0, 1, -1, 0.1, 1e-7, 999_999, 999_999.5, 1_000_000, 1_234_567.25, 5e9, 1e15, 123e20, -5e9, True),
        *(math.inf, -math.inf, math.nan),
    ],
)
def test_numbers_are_written_as_prometheus_writes_them(value: float) -> None:
    assert number(value) == floatToGoString(value)  # type: ignore[no-untyped-call]


def test_small_money_adds_up_exactly() -> None:
    ours = Count("dollars_total", "Money.", unit=1_000_000)
    for _ in range(1000):
        ours.add((), 1)

    assert _rendered(ours).endswith(b"dollars_total 0.001\n")


def test_there_is_an_end_to_how_many_labels_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.tallies._LABEL_SETS", 3)
    ours = Count("things_total", "What.", "a", "b")
    for index in range(10):
        ours.add((str(index), "x"))
        ours.add(("0", "x"))

    found = {labels: cell[0] for labels, cell in ours.read()}
    assert found == {("0", "x"): 11, ("1", "x"): 1, ("2", "x"): 1, (OTHER, OTHER): 7}


def test_what_is_counted_elsewhere_is_added_to_what_was_inherited() -> None:
    seen = [3.0]
    ours = Followed("things_total", "What.", source=lambda: [((), seen[0])])
    ours.begin([([], [100])])

    first = ours.read()
    seen[0] = 5
    second = ours.read()

    assert (first, second) == ([((), [103])], [((), [105])])


def test_counts_go_on_from_where_another_ended() -> None:
    ours = Spread("times", "When.", (1, 5), "a")
    ours.begin([(["x"], [1, 2, 3, 40.5]), (["odd"], [1]), (["a", "b"], [1, 2, 3, 4])])
    ours.add(("x",), 0.5)

    assert ours.read() == [(("x",), [2, 2, 3, 41.0])]


@pytest.mark.parametrize(("merge", "value"), [(Merge.SUM, 9), (Merge.MAX, 5), (Merge.MIN, 4)])
def test_workers_samples_become_one(merge: Merge, value: float) -> None:
    ours = Gauge("level", "Now.", "a", source=list, merge=merge)

    found = merged(ours, [[(("x",), [4]), (("y",), [1])], [(["x"], [5]), (["z"], [2]), (["odd", "one"], [1])]])

    assert list(found) == [(("x",), [value]), (("y",), [1]), (("z",), [2])]
