"""The metrics of several workers, put together by any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.routing.admission import Admission
from app.routing.registry import Registry
from app.telemetry.metrics import Metrics
from app.telemetry.slates import Slates, open_slates
from tests.unit import nodes


@pytest.fixture(autouse=True)
def _metrics_are_always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.metrics._CACHE_SECONDS", 0)


@pytest.fixture
def handle() -> Iterator[int]:
    handle = open_slates()
    yield handle
    os.close(handle)


def worker(handle: int, place: int, in_flight: int = 0) -> Metrics:
    node = nodes.node("n0")
    node.in_flight = in_flight
    return Metrics(Registry([node]), Admission(), Slates(handle, place))


async def shown(metrics: Metrics, name: str) -> float:
    """The sum of all samples of this name."""
    families = text_string_to_metric_families((await metrics.render()).decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


LEAKS = "hearth_leaked_prefill_sessions_total"


async def test_what_was_shown_once_is_known_to_all(handle: int) -> None:
    """Also when nobody had the time to write it down before."""
    one, two = worker(handle, 0), worker(handle, 1)
    node = nodes.node("n0")
    one.counts.leak(node)
    two.counts.leak(node)
    two.counts.leak(node)

    assert [await shown(one, LEAKS), await shown(two, LEAKS), await shown(one, LEAKS)] == [1, 3, 3]


async def test_of_a_worker_that_has_ended_only_counts_are_left(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, living = worker(handle, 0, in_flight=3), worker(handle, 1, in_flight=2)
    dead.counts.leak(nodes.node("n0"))
    await dead.render()
    before = await shown(living, "hearth_in_flight")

    monkeypatch.setattr("app.telemetry.slates._FRESH_SECONDS", 0)

    assert (before, await shown(living, "hearth_in_flight"), await shown(living, LEAKS)) == (5, 2, 1)


async def test_a_successor_counts_on(handle: int) -> None:
    async with worker(handle, 0) as first:
        first.counts.leak(nodes.node("n0"))
    async with worker(handle, 0) as second:
        second.counts.leak(nodes.node("n0"))

        assert await shown(second, LEAKS) == 2
        assert await shown(second, "hearth_process_cpu_seconds_total") > 0


async def test_what_each_knows_alike_is_shown_once(handle: int) -> None:
    one, two = worker(handle, 0), worker(handle, 1)
    await one.render()

    assert await shown(two, "hearth_node_state") == 1
    assert await shown(two, "hearth_build_info") == 1
    assert await shown(two, "hearth_in_flight_everywhere") == 0


async def test_metrics_that_cannot_be_shared_are_still_shown(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    troubles: list[str] = []
    monkeypatch.setattr("app.telemetry.slates._HALF_BYTES", 10)
    metrics = Metrics(Registry([]), Admission(), Slates(handle, 0), lambda message, **fields: troubles.append(message))

    for _ in range(2):
        assert await shown(metrics, "hearth_build_info") == 1
    assert len(troubles) == 1


async def test_a_node_that_lists_no_unicode_breaks_nothing() -> None:
    node = nodes.node("n0")
    metrics = Metrics(Registry([node]), Admission())
    metrics.counts.leak(nodes.node("a\ud800b"))

    assert await shown(metrics, LEAKS) == 1
