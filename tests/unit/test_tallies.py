"""Our counts look to Prometheus as its own would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from app.telemetry.tallies import Count, Spread

VALUES = (0.0, 0.05, 0.1, 0.1000001, 0.7, 3.0, 99.0)


def _rendered(*collectors: Count | Spread) -> bytes:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def test_counts_render_as_prometheus_own_counter_does() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    theirs = Counter("things", "What.", ("a", "b"), registry=registry)
    ours = Count("things", "What.", "a", "b")
    for amount in (1, 2.5):
        theirs.labels("x", 'q"uote').inc(amount)
        ours.add(("x", 'q"uote'), amount)

    assert _rendered(ours) == generate_latest(registry)


def test_spreads_render_as_prometheus_own_histogram_does() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    theirs = Histogram("times", "When.", ("a",), registry=registry, buckets=(0.1, 1, 5))
    ours = Spread("times", "When.", (0.1, 1, 5), "a")
    for value in VALUES:
        theirs.labels("x").observe(value)
        ours.add(("x",), value)

    assert _rendered(ours) == generate_latest(registry)
