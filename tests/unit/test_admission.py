"""Who gets a place on a node, and who waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest

from app.errors import Overloaded
from app.routing.admission import Admission, Choose, Slot
from app.routing.job import Job
from app.routing.queue import Standing
from app.routing.registry import Candidate
from benchmarks.cluster import run
from tests.unit.nodes import candidate, node


async def _waits(admission: Admission, *candidates: Candidate, seconds: float = 5) -> asyncio.Task[Slot | None]:
    task = asyncio.create_task(admission.wait(lambda: list(candidates), seconds))
    await asyncio.sleep(0)
    return task


async def _got(waiter: asyncio.Task[Slot | None]) -> Slot:
    slot = await asyncio.wait_for(waiter, 1)
    assert slot is not None
    return slot


def test_a_node_without_a_limit_is_never_full() -> None:
    one, admission = candidate(node()), Admission()

    assert all(admission.take(one) for _ in range(100))
    assert one.node.in_flight == 100


def test_a_full_node_gives_no_slot_until_one_is_released() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    slot = admission.take(one)

    assert slot is not None
    assert admission.take(one) is None
    slot.release()
    assert admission.take(one) is not None


def test_a_slot_released_twice_counts_once() -> None:
    one, admission = candidate(node()), Admission()
    admission.take(one)
    slot = admission.take(one)

    assert slot is not None
    slot.release()
    slot.release()

    assert one.node.in_flight == 1


async def test_those_who_wait_are_served_in_the_order_in_which_they_came() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    slot = admission.take(one)
    first, second = await _waits(admission, one), await _waits(admission, one)

    assert slot is not None
    slot.release()
    got = await _got(first)

    assert not second.done()
    assert one.node.in_flight == 1
    got.release()
    assert (await _got(second)).candidate is one


async def test_a_slot_that_falls_free_is_not_taken_by_one_who_came_later() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    slot = admission.take(one)
    waiter = await _waits(admission, one)

    assert slot is not None
    slot.release()

    assert admission.take(one) is None
    assert await waiter


async def test_one_who_gives_up_leaves_the_queue_and_keeps_no_slot() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    slot = admission.take(one)
    waiter = await _waits(admission, one)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)

    assert slot is not None
    slot.release()

    assert admission.waiting == 0
    assert one.node.in_flight == 0


async def test_one_who_gives_up_in_the_moment_of_the_handover_passes_the_slot_on() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    slot = admission.take(one)
    quitter, next_one = await _waits(admission, one), await _waits(admission, one)

    assert slot is not None
    slot.release()  # handed to the quitter, who has not run yet
    quitter.cancel()
    await asyncio.gather(quitter, return_exceptions=True)

    assert (await _got(next_one)).candidate is one
    assert one.node.in_flight == 1


async def test_waiting_ends_after_its_time() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    admission.take(one)

    with pytest.raises(TimeoutError):
        await admission.wait(lambda: [one], 0.01)
    assert admission.waiting == 0


async def test_too_many_waiters_are_refused_at_once() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    admission.take(one)
    waiter = await _waits(admission, one)

    with pytest.raises(Overloaded) as refused:
        await admission.wait(lambda: [one], 5, standing=Standing(size=1))
    assert refused.value.retry_after_seconds
    waiter.cancel()


async def test_a_node_that_comes_back_serves_those_who_wait_for_another() -> None:
    busy, back, admission = candidate(node("a", max_concurrency=1)), candidate(node("b")), Admission()
    admission.take(busy)
    able = [busy]
    waiter = asyncio.create_task(admission.wait(lambda: able, 5))
    await asyncio.sleep(0)

    able.append(back)
    admission.changed()

    assert (await _got(waiter)).candidate is back


# -- who had better not wait: on a clock of its own


class _Bench:
    """A node with one place, whose requests take a second each, under a queue."""

    def __init__(self) -> None:
        self.one = candidate(node(max_concurrency=1))
        self.admission = Admission()
        self.served: list[str] = []
        self.refused: list[tuple[str, Overloaded]] = []
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, key: str = "", seconds: float = 600, size: int = 1000, weight: int = 1) -> None:
        self.tasks.append(asyncio.create_task(self._ask(key, seconds, Standing("r", "m", key, weight, size=size))))

    async def _ask(self, key: str, seconds: float, standing: Standing) -> None:
        try:
            slot = self.admission.take(self.one)
            slot = slot or await self.admission.wait(lambda: [self.one], seconds, standing=standing)
        except Overloaded as error:
            self.refused.append((key, error))
            return
        assert slot is not None
        self.served.append(key)
        await asyncio.sleep(1)
        slot.release()

    async def over(self) -> None:
        await asyncio.gather(*self.tasks)
        assert self.admission.waiting == self.one.node.in_flight == 0


def test_places_are_shared_between_keys_under_load() -> None:
    async def work() -> None:
        bench = _Bench()
        for _ in range(300):
            bench.ask("greedy")
        for _ in range(30):
            bench.ask("modest")
        await asyncio.sleep(50)

        assert bench.served[10:50].count("modest") == 20
        await bench.over()

    run(work)


def test_one_whose_turn_would_come_too_late_is_told_at_once_and_when_to_come_back() -> None:
    async def work() -> None:
        bench = _Bench()
        for _ in range(30):
            bench.ask()
        await asyncio.sleep(10.5)
        bench.ask("hasty", seconds=10)
        bench.ask("modest", seconds=4)  # another key's turn comes after two others
        await asyncio.sleep(0)

        assert not bench.refused, "keys take turns"
        bench.ask(seconds=16)
        await asyncio.sleep(0)

        (key, error), *others = bench.refused
        assert not others
        assert (key, error.reason) == ("", "hopeless")
        assert error.retry_after_seconds == pytest.approx(22, rel=0.15)
        await bench.over()

    run(work)


def test_the_first_in_a_queue_is_never_told_that_it_is_hopeless() -> None:
    async def work() -> None:
        bench = _Bench()
        for _ in range(10):
            bench.ask()
        await bench.over()
        bench.ask()
        await asyncio.sleep(0.8)
        bench.ask(seconds=0.5)
        await bench.over()

        assert not bench.refused
        assert len(bench.served) == 12

    run(work)


def test_one_whose_time_is_over_is_never_served() -> None:
    async def work() -> None:
        bench = _Bench()
        bench.ask("first")
        with pytest.raises(TimeoutError):
            await asyncio.gather(bench._ask("late", 1.0, Standing()), return_exceptions=False)
        await asyncio.sleep(5)

        assert bench.served == ["first"]
        await bench.over()

    run(work)


async def test_a_place_that_falls_free_in_the_moment_of_giving_up_goes_to_the_next() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    slot = admission.take(one)
    late = await _waits(admission, one, seconds=0.02)
    patient = await _waits(admission, one)
    time.sleep(0.03)  # noqa: ASYNC251 - the loop has not looked at its timers yet

    assert slot is not None
    slot.release()

    assert (await _got(patient)).candidate is one
    with pytest.raises(TimeoutError):
        await late


def test_a_full_queue_says_when_to_come_back_by_its_pace() -> None:
    async def work() -> None:
        bench = _Bench()
        for _ in range(40):
            bench.ask(size=40)
        await asyncio.sleep(10.5)
        for _ in range(12):
            bench.ask(size=40)
        await asyncio.sleep(0)

        (error,) = {error.retry_after_seconds for _, error in bench.refused}
        assert {error.reason for _, error in bench.refused} == {"full"}
        assert error == pytest.approx(40, rel=0.15)
        await bench.over()

    run(work)


def test_when_to_come_back_is_guessed_from_the_nodes_answers_before_a_pace_is_known() -> None:
    async def work() -> None:
        bench = _Bench()
        bench.one.node.latencies.extend([4.0, 6.0])
        for _ in range(4):
            bench.ask(size=2)
        await asyncio.sleep(0)

        assert [error.retry_after_seconds for _, error in bench.refused] == [pytest.approx(15)]
        await bench.over()

    run(work)


def test_a_newcomer_takes_the_place_of_whoever_holds_most_of_a_full_queue() -> None:
    async def work() -> None:
        bench = _Bench()
        for _ in range(11):
            bench.ask("greedy", size=10)
        await asyncio.sleep(0)
        for _ in range(8):
            bench.ask("modest", size=10)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        told = [(key, error.reason) for key, error in bench.refused]
        assert told.count(("greedy", "pushed_out")) == 5
        assert told.count(("modest", "full")) == 3
        assert bench.admission.waiting == 10
        await bench.over()

    run(work)


async def test_one_who_is_pushed_out_while_it_leaves_is_forgotten() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission()
    admission.take(one)
    leaving = asyncio.create_task(admission.wait(lambda: [one], 5, standing=Standing(key="a", size=2)))
    other = asyncio.create_task(admission.wait(lambda: [one], 5, standing=Standing(key="a", size=2)))
    await asyncio.sleep(0)

    newcomer = asyncio.create_task(admission.wait(lambda: [one], 5, standing=Standing(key="b", size=2)))
    await asyncio.sleep(0)
    other.cancel()  # it was pushed out just now
    gone = await asyncio.gather(other, return_exceptions=True)

    assert isinstance(gone[0], asyncio.CancelledError)
    assert admission.waiting == 2
    for task in (leaving, newcomer):
        task.cancel()
    await asyncio.gather(leaving, newcomer, return_exceptions=True)
    assert admission.waiting == 0


def test_those_who_wait_in_vain_by_now_are_told_before_their_time_is_over() -> None:
    async def work() -> None:
        bench = _Bench()
        for _ in range(4):
            bench.ask("early")
        await asyncio.sleep(4.5)
        for _ in range(10):
            bench.ask("early", seconds=12)
        await asyncio.sleep(1)
        assert not bench.refused
        for _ in range(10):
            bench.ask("other")
        await asyncio.sleep(3)

        assert {(key, error.reason) for key, error in bench.refused} == {("early", "overtaken")}
        assert 2 <= len(bench.refused) <= 5
        await bench.over()
        assert bench.served.count("other") == 10

    run(work)


# -- with somebody who chooses


class _Chooser:
    """Sees who is asked; what those say is their own affair."""

    def look_again(self, jobs: Iterable[Job]) -> None: ...

    def renew(self, job: Job) -> None: ...


async def _picky(admission: Admission, count: int, says: Choose, *candidates: Candidate) -> list[asyncio.Task[Any]]:
    waits = [
        asyncio.create_task(admission.wait(lambda: list(candidates), 30, says, standing=Standing("r")))
        for _ in range(count)
    ]
    await asyncio.sleep(0)
    return waits


async def test_few_of_those_who_decline_are_asked_for_one_place() -> None:
    one, admission = candidate(node(max_concurrency=9)), Admission(chooser=_Chooser())
    asked: list[list[Candidate]] = []
    waits = await _picky(admission, 100, asked.append, one)

    admission.changed()

    assert len(asked) == 8
    await _end(waits)


async def test_of_those_who_decline_only_those_in_a_row_count() -> None:
    one, admission = candidate(node(max_concurrency=99)), Admission(chooser=_Chooser())
    waits: list[asyncio.Task[Any]] = []
    for _ in range(10):
        waits += await _picky(admission, 7, lambda candidates: None, one)
        waits += await _picky(admission, 1, lambda candidates: one, one)

    admission.changed()
    await asyncio.sleep(0)

    assert sum(task.done() for task in waits) == 10
    await _end(waits)


async def test_nobody_is_asked_where_every_node_is_at_its_limit() -> None:
    one, admission = candidate(node(max_concurrency=1)), Admission(chooser=_Chooser())
    admission.take(one)
    asked: list[list[Candidate]] = []
    waits = await _picky(admission, 20, asked.append, one)

    admission.changed()

    assert not asked
    await _end(waits)


async def test_one_who_waits_behind_many_that_decline_is_asked_at_last() -> None:
    one, admission = candidate(node()), Admission(chooser=_Chooser())
    waits = await _picky(admission, 30, lambda candidates: None, one)
    taking = await _picky(admission, 1, lambda candidates: one, one)

    assert (await _got(taking[0])).candidate is one
    await _end(waits)


async def test_those_who_decline_keep_nobody_of_another_route_from_being_asked() -> None:
    one, admission = candidate(node()), Admission(chooser=_Chooser())
    waits = await _picky(admission, 30, lambda candidates: None, one)
    other = asyncio.create_task(admission.wait(lambda: [one], 30, lambda candidates: one, standing=Standing("other")))
    await asyncio.sleep(0)

    admission.changed()

    assert (await _got(other)).candidate is one
    await _end(waits)


async def _end(waits: list[asyncio.Task[Any]]) -> None:
    for task in waits:
        task.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
