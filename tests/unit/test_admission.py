"""Who gets a place on a node, and who waits."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import Overloaded
from app.routing.admission import Admission, Slot
from app.routing.queue import Standing
from app.routing.registry import Candidate
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
