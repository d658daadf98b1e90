"""What the dashboard is shown: how it is counted, and how it is dealt out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from app.commands.top import Picture
from app.domain import (
    Budget,
    EngineLoad,
    LoadedModel,
    ModelInfo,
    NodeSpec,
    NodeState,
    Operation,
    Outcome,
    Period,
    Request,
    Usage,
)
from app.errors import LedgerUnavailable, Unavailable
from app.ledger.report import BudgetState, Query, Report, Sums, UsageLine
from app.ledger.span import period_span
from app.providers import KINDS
from app.routing.admission import Admission
from app.routing.breaker import Breaker
from app.routing.ended import Ended
from app.routing.registry import Node, Registry
from app.routing.trail import Trail
from app.sharing.meter import Account
from app.telemetry import money as money_module
from app.telemetry import snapshot
from app.telemetry.look import Look
from app.telemetry.money import Money
from app.telemetry.pulse import STEPS, Pulse, percentiles
from app.telemetry.ring import Record, Ring
from app.telemetry.snapshot import MOST_VIEWERS, About, Snapshots
from tests.system.harness import until

NOW_MS = 1_800_000_002_000
REQUEST = Request("1", Operation.CHAT, "m", b"{}", {}, stream=True)


def _record(
    at: int = NOW_MS, *, tier: int = 0, tokens: int = 10, first: float = 0.1, outcome: Outcome = Outcome.OK
) -> Record:
    ring = Ring("random", has_cloud=True)
    trail = Trail(started=5.0, node="n", tier=tier, first_content=5.0 + first, usage=Usage(3, tokens))
    ring(Ended(REQUEST, "id", Operation.CHAT, trail, outcome, None, trail.seconds()))
    return ring.latest(1)[0]._replace(at=at)


def _pulse(*records: Record) -> Pulse:
    pulse = Pulse()
    pulse.take(records)
    return pulse


def test_a_minute_is_counted_by_who_served() -> None:
    pulse = _pulse(
        _record(NOW_MS - 70_000, tokens=1000),  # too long ago
        _record(NOW_MS - 30_000),
        _record(NOW_MS - 20_000, tier=1, first=0.3),
        _record(outcome=Outcome.FAILED),
        _record(),
    )

    minute = pulse.minute(NOW_MS, up_seconds=1000)
    assert (minute["requests"], minute["failed"]) == (4, 1)
    assert minute["local_share"] == round(2 / 3, 4)
    assert minute["tokens_per_second"] == round(30 / 57, 1)  # the step that runs now has 2 of its 5 seconds
    assert minute["first_content_ms"] == {"p50": 100.0, "p95": 300.0}


def test_a_young_gateway_is_not_taken_for_a_slow_one() -> None:
    assert _pulse(_record()).minute(NOW_MS, up_seconds=2)["requests_per_second"] == 0.5


def test_the_series_has_a_place_for_every_step() -> None:
    series = _pulse(_record(NOW_MS - 10_000, tokens=50), _record(tier=1, tokens=5)).series(NOW_MS)

    assert series["until"] == NOW_MS + 3000
    assert len(series["requests"]) == STEPS
    assert series["tokens_local"][-3:] == [10.0, 0, 0.0]
    assert series["tokens_cloud"][-3:] == [0.0, 0, 1.0]
    assert series["first_content_p50"][-3:] == [100.0, None, 100.0]


def test_what_comes_after_a_look_counts_in_the_next_one() -> None:
    pulse = _pulse(_record(first=0.1))
    before = pulse.series(NOW_MS)["first_content_p95"][-1]
    pulse.take([_record(first=0.3)])

    after = pulse.series(NOW_MS)["first_content_p95"][-1]

    assert (before, after) == (100.0, 300.0)


def test_a_million_requests_take_no_more_memory() -> None:
    pulse = _pulse(*(_record(first=number / 1000) for number in range(5000)))

    step = pulse._steps[-1]
    assert (step.requests, len(step.samples)) == (5000, 200)
    p50, _ = percentiles(step.samples)
    assert p50 is not None
    assert 1500 < p50 < 3500, "a fair choice of all"


@pytest.mark.parametrize(
    ("samples", "expected"), [([], (None, None)), ([7.0], (7.0, 7.0)), (list(range(1, 101)), (50, 95))]
)
def test_percentiles_are_of_nearest_rank(samples: list[float], expected: tuple[float | None, float | None]) -> None:
    assert percentiles(samples) == expected


# -- dealing out


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_EVERY_SECONDS", 0.01)


class Gateway:
    """What snapshots are made of."""

    def __init__(self, *nodes: Node, money: Money | None = None) -> None:
        self.closing = False
        self.ring = Ring("random", has_cloud=True)
        self.troubles: list[str] = []
        self.registry = Registry(nodes)
        self.snapshots = Snapshots(
            About("1.0", "me", "random", time.monotonic()),
            registry=self.registry,
            admission=Admission(),
            ring=self.ring,
            money=money,
            peers=lambda: ["other"],
            closing=lambda: self.closing,
            on_trouble=lambda message, **_: self.troubles.append(message),
        )

    def serve(self, count: int = 1) -> None:
        for _ in range(count):
            trail = Trail(route="m", node="n", model="m", candidates=1)
            self.ring(Ended(REQUEST, "id", Operation.CHAT, trail, Outcome.OK, None, trail.seconds()))


async def _next(viewer: AsyncIterator[bytes]) -> dict[str, Any]:
    async with asyncio.timeout(5):
        return dict(orjson.loads(await anext(viewer)))


def _node(number: int = 0, models: int = 1) -> Node:
    spec = NodeSpec(
        f"http://user:secret@node{number}:1/?key=secret", name=f"node{number}", api_key="secret", vram_gb=24
    )
    node = Node(spec, Breaker(3, 30), KINDS["ollama"])
    node.state, node.reason = NodeState.HEALTHY, ""
    node.list_models(ModelInfo(f"model{model}") for model in range(models))
    node.loaded = {f"model{model}": LoadedModel(f"model{model}", 2**30, 8192) for model in range(min(4, models))}
    return node


async def test_the_first_is_whole_and_others_bring_what_is_new() -> None:
    gateway = Gateway(_node())
    gateway.serve(60)
    async with gateway.snapshots.viewer() as viewer:
        first = await _next(viewer)
        gateway.serve(2)
        while not (second := await _next(viewer))["requests"]:
            pass

    assert first["whole"]
    assert [request["seq"] for request in first["requests"]] == list(range(60, 10, -1))
    assert not second["whole"]
    assert [request["seq"] for request in second["requests"]] == [62, 61]


async def test_the_live_table_shows_each_request_once_and_the_newest_first() -> None:
    """Whoever joins another viewer is sent the latest requests as a whole, and some of them with the others' news."""
    gateway = Gateway(_node())
    gateway.serve(60)
    async with gateway.snapshots.viewer():
        gateway.serve()
        async with gateway.snapshots.viewer() as joining:
            picture = Picture(await _next(joining))
            gateway.serve()
            while picture.snapshot["seq"] < 62:
                picture.take(await _next(joining))

    assert [request["seq"] for request in picture.snapshot["requests"]] == list(range(62, 12, -1))


async def test_all_viewers_get_the_same_bytes() -> None:
    gateway = Gateway(_node())
    async with gateway.snapshots.viewer() as one, gateway.snapshots.viewer() as two:
        await _next(one)
        await _next(two)
        async with asyncio.timeout(5):
            mine, others = await asyncio.gather(anext(one), anext(two))

    assert mine is others


async def test_a_slow_viewer_misses_some_and_then_gets_a_whole_one() -> None:
    gateway = Gateway(_node())
    async with gateway.snapshots.viewer() as quick, gateway.snapshots.viewer() as slow:
        await _next(slow)
        await _next(quick)
        gateway.serve()
        for _ in range(4):
            await _next(quick)
        late = await _next(slow)

    assert late["whole"]
    assert [request["seq"] for request in late["requests"]] == [1]


async def test_nothing_is_made_when_nobody_looks() -> None:
    gateway = Gateway(_node())
    before = asyncio.all_tasks()
    async with gateway.snapshots.viewer() as viewer:
        await _next(viewer)
        assert len(asyncio.all_tasks() - before) == 1

    assert asyncio.all_tasks() == before


async def test_a_viewer_who_comes_again_at_once_is_served() -> None:
    gateway = Gateway(_node())
    for _ in range(3):
        async with gateway.snapshots.viewer() as viewer:
            await _next(viewer)
            await _next(viewer)


async def test_viewers_are_sent_away_when_the_process_ends() -> None:
    gateway = Gateway(_node())
    async with gateway.snapshots.viewer() as viewer:
        gateway.closing = True
        async with asyncio.timeout(5):
            async for _ in viewer:
                pass
    with pytest.raises(Unavailable, match="shutting down"):
        async with gateway.snapshots.viewer():
            pass


async def test_viewers_are_bounded() -> None:
    gateway = Gateway(_node())
    async with asyncio.TaskGroup() as group:
        full = asyncio.Event()

        async def look() -> None:
            async with gateway.snapshots.viewer():
                await full.wait()

        for _ in range(MOST_VIEWERS):
            group.create_task(look())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="viewers"):
            async with gateway.snapshots.viewer():
                pass
        full.set()


async def test_a_fault_is_told_and_sends_viewers_away() -> None:
    gateway = Gateway(_node())
    async with gateway.snapshots.viewer() as viewer:
        await _next(viewer)
        gateway.registry.add(None)  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            async for _ in viewer:
                pass

    assert gateway.troubles == ["the dashboard's snapshots have ended"]


async def test_no_secret_of_a_node_is_shown() -> None:
    text = await Gateway(_node()).snapshots.now()

    assert b"secret" not in text
    assert b"http://node0:1/" in text


async def test_a_node_is_shown_with_its_memory_and_the_load_of_its_engine() -> None:
    node = _node(models=5)
    node.engine, node.foreign = EngineLoad(running=2, slots=4), 2
    shown = orjson.loads(await Gateway(node).snapshots.now())

    (seen,) = shown["nodes"]
    assert (seen["models"], seen["vram_bytes"], seen["vram_gb"]) == (5, 4 * 2**30, 24)
    assert (seen["foreign"], seen["slots"]) == (2, 4)
    assert seen["loaded"][0] == {"name": "model0", "vram_bytes": 2**30, "context_length": 8192}
    assert shown["replicas"] == ["me", "other"]


async def test_a_large_house_costs_under_two_milliseconds_a_second() -> None:
    gateway = Gateway(*(_node(number, models=50) for number in range(20)))
    gateway.serve(1000)
    await gateway.snapshots.now()
    costs = []
    for _ in range(9):
        gateway.serve(200)
        began = time.thread_time()
        gateway.snapshots._show()
        costs.append(time.thread_time() - began)

    assert min(costs) < 0.002


# -- money


class Books:
    """A ledger of one month: 9 local requests, 1 in the cloud."""

    def __init__(self) -> None:
        self.asked = 0
        self.reachable = True
        self.answers = asyncio.Event()
        self.answers.set()

    async def usage(self, query: Query) -> Report:
        self.asked += 1
        await self.answers.wait()
        if not self.reachable:
            raise LedgerUnavailable("the ledger's database cannot be asked now")
        lines = [
            UsageLine(("cloud",), Sums(requests=1, tokens_out=5, cost=250_000)),
            UsageLine(("local",), Sums(requests=9, tokens_out=90, saved=1_500_000)),
        ]
        return Report(query, lines, Sums(requests=10, tokens_out=95, cost=250_000, saved=1_500_000))

    async def budgets(self, accounts: Any, now_ms: int) -> list[BudgetState]:
        return [BudgetState(each, period_span(each.budget.period, now_ms), 200_000, 50_000) for each in accounts]

    async def lost(self) -> Any:
        raise NotImplementedError

    async def reconcile(self, spend_id: str, cost: int) -> Any:
        raise NotImplementedError


def _account() -> Account:
    return Account("gateway", Budget(1_000_000, Period.WEEK))


async def test_money_is_that_of_the_budgets_period() -> None:
    money = Money(Books(), [_account()], lambda: NOW_MS)
    await money.refresh()

    told = money.document
    assert told is not None
    assert (told["period"], told["since"], told["resets"]) == ("week", "2027-01-11", "2027-01-18")
    assert (told["local_share"], told["spent_usd"], told["saved_usd"]) == (0.9, 0.25, 1.5)
    assert told["budget"]["left_usd"] == 0.75


async def test_the_ledger_is_not_asked_again_within_ten_seconds() -> None:
    books = Books()
    gateway = Gateway(_node(), money=Money(books, []))
    shown = [orjson.loads(await gateway.snapshots.now()) for _ in range(3)]

    assert books.asked == 1
    assert shown[0]["money"]["spent_usd"] == 0.25
    assert shown[0]["money"]["budget"] is None


async def test_a_ledger_out_of_reach_leaves_the_last_figures() -> None:
    books = Books()
    money = Money(books, [])
    await money.refresh()
    books.reachable, money._look._due = False, 0.0
    await money.refresh()

    assert money.document is not None
    assert money.document["spent_usd"] == 0.25
    assert "cannot be asked" in money.document["trouble"]


async def test_a_slow_ledger_is_asked_once_and_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks goes on without its figures, and they are there for who asks later."""
    monkeypatch.setattr(money_module, "_WAIT_SECONDS", 0.01)
    books = Books()
    books.answers.clear()
    money = Money(books, [])
    gateway = Gateway(_node(), money=money)
    without = [orjson.loads(await gateway.snapshots.now())["money"] for _ in range(3)]
    async with gateway.snapshots.viewer() as viewer:
        await _next(viewer)
    books.answers.set()
    await until(lambda: money.document is not None, "the ledger has answered")
    shown = orjson.loads(await gateway.snapshots.now())["money"]

    assert without == [{}, {}, {}]
    assert shown["spent_usd"] == 0.25
    assert books.asked == 1


async def test_the_ledger_is_not_asked_after_the_end() -> None:
    books = Books()
    books.answers.clear()
    money = Money(books, [])
    before = asyncio.all_tasks()
    money.begin()
    await asyncio.sleep(0)
    await money.close()
    await money.refresh()

    assert books.asked == 1
    assert money.document is None
    assert asyncio.all_tasks() == before


async def test_what_takes_long_is_looked_at_less_often() -> None:
    async def take() -> None:
        await asyncio.sleep(0.02)

    look = Look(take, "test", every_seconds=0.01)
    await look.refresh(5)

    assert 0.3 < look._due - time.monotonic() < 20
