"""The loop of attempts, with time that only the loop's own waits move."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Failure
from app.errors import InvalidRequest, NodeFailure
from app.routing.retry import BACKOFF_SECONDS_MAX, WAIT_SECONDS_MAX, Retry


@dataclass
class Plan:
    """A request's prospects as a test wants them."""

    deadline: float = 1000.0
    untried: int = 0
    waitable: bool = False
    again: bool = False

    def more_candidates(self) -> bool:
        return self.untried > 0

    def asks_again(self) -> bool:
        return self.again

    def may_wait(self) -> bool:
        return self.waitable


@dataclass
class Loop:
    """A clock, the waits that were made on it, and a jitter."""

    jitter: float = 0.0
    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def retry(self, max_attempts: int) -> Retry:
        return Retry(max_attempts, sleep=self.sleep, jitter=lambda: self.jitter, clock=lambda: self.now)


def broken() -> NodeFailure:
    return NodeFailure(Failure.CONNECT, "connection refused")


def busy(retry_after_seconds: float | None = None) -> NodeFailure:
    return NodeFailure(Failure.BUSY, "busy", status=429, retry_after_seconds=retry_after_seconds)


async def run(retry: Retry, plan: Plan, *outcomes: Exception | str) -> tuple[str, int]:
    """Makes the attempts end like `outcomes`, the last for ever; each attempt takes an untried node."""
    made = 0
    async for attempt in retry.attempts(plan):
        with attempt:
            plan.untried = max(0, plan.untried - 1)
            outcome = outcomes[min(made, len(outcomes) - 1)]
            made += 1
            if isinstance(outcome, Exception):
                raise outcome
            return outcome, made
    raise AssertionError("the loop neither returned nor raised")


async def failures(retry: Retry, plan: Plan, *outcomes: NodeFailure) -> int:
    """How many attempts were made until the loop gave up."""
    made = 0
    with pytest.raises(NodeFailure) as caught:  # noqa: PT012  the loop is what is tested
        async for attempt in retry.attempts(plan):
            with attempt:
                plan.untried = max(0, plan.untried - 1)
                made += 1
                raise outcomes[min(made, len(outcomes)) - 1]
    assert caught.value is outcomes[min(made, len(outcomes)) - 1], "the last failure is the one that is raised"
    return made


async def test_success_ends_the_loop() -> None:
    loop = Loop()

    assert await run(loop.retry(4), Plan(untried=3), "answer") == ("answer", 1)
    assert loop.waits == []


async def test_a_body_that_ends_by_itself_ends_the_loop() -> None:
    made = 0
    async for attempt in Loop().retry(4).attempts(Plan(untried=3)):
        with attempt:
            made += 1

    assert made == 1


async def test_a_sibling_is_asked_at_once() -> None:
    loop = Loop(jitter=0.9)

    assert await run(loop.retry(4), Plan(untried=3), broken(), busy(20), "answer") == ("answer", 3)
    assert loop.waits == []


@pytest.mark.parametrize(("jitter", "waits"), [(0.0, [0.1, 0.2, 0.4]), (0.5, [0.15, 0.3, 0.6])])
async def test_the_same_node_is_asked_again_after_a_short_growing_pause(jitter: float, waits: list[float]) -> None:
    loop = Loop(jitter=jitter)

    assert await failures(loop.retry(4), Plan(untried=9, again=True), broken()) == 4
    assert loop.waits == pytest.approx(waits)


async def test_the_same_node_is_not_waited_for_past_the_deadline() -> None:
    assert await failures(Loop().retry(4), Plan(untried=9, again=True, deadline=0.25), broken()) == 2


@pytest.mark.parametrize("max_attempts", [1, 2, 4])
async def test_attempts_are_bounded(max_attempts: int) -> None:
    assert await failures(Loop().retry(max_attempts), Plan(untried=100), broken()) == max_attempts


async def test_it_ends_without_a_wait_when_nobody_is_left() -> None:
    """A wait would only delay the error."""
    loop = Loop(jitter=0.5)

    assert await failures(loop.retry(4), Plan(untried=2), broken()) == 2
    assert loop.waits == []


async def test_a_deadline_that_has_passed_ends_it() -> None:
    loop = Loop(now=1000.0)

    assert await failures(loop.retry(4), Plan(untried=3, deadline=1000.0), broken()) == 1


async def test_a_wait_that_would_pass_the_deadline_is_not_begun() -> None:
    loop = Loop()

    assert await failures(loop.retry(4), Plan(waitable=True, deadline=5.0), busy(5.0)) == 1
    assert loop.waits == []


async def test_waits_double_up_to_the_limit_with_full_jitter() -> None:
    loop = Loop(jitter=0.5)
    await failures(loop.retry(7), Plan(waitable=True), busy())

    assert loop.waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


async def test_many_waits_do_not_overflow() -> None:
    loop = Loop(jitter=0.5)

    assert await failures(loop.retry(1500), Plan(waitable=True, deadline=1e9), busy()) == 1500


async def test_only_waits_make_the_backoff_longer() -> None:
    """Siblings that failed at once say nothing of how long the next wait should be."""
    loop = Loop(jitter=0.5)
    await failures(loop.retry(5), Plan(untried=4, waitable=True), broken(), broken(), broken(), busy())

    assert loop.waits == pytest.approx([0.1])


async def test_retry_after_is_waited_for_with_jitter_on_top() -> None:
    loop = Loop(jitter=0.5)

    assert await run(loop.retry(4), Plan(waitable=True), busy(3.0), "answer") == ("answer", 2)
    assert loop.waits == pytest.approx([3.1])


async def test_the_busy_node_that_is_ready_first_decides() -> None:
    loop = Loop()
    await run(loop.retry(9), Plan(untried=3, waitable=True), busy(9.0), busy(4.0), broken(), "answer")

    assert loop.waits == [4.0]


async def test_a_busy_node_that_names_no_time_is_ready_soon() -> None:
    loop = Loop(jitter=0.5)
    await run(loop.retry(9), Plan(untried=2, waitable=True), busy(), busy(9.0), "answer")

    assert loop.waits == pytest.approx([0.1])


async def test_each_round_listens_to_its_own_retry_after() -> None:
    loop = Loop()
    await run(loop.retry(9), Plan(waitable=True), busy(1.0), busy(7.0), busy(2.0), "answer")

    assert loop.waits == [1.0, 7.0, 2.0]


async def test_a_long_retry_after_is_left_to_the_client() -> None:
    loop = Loop()

    assert await failures(loop.retry(4), Plan(waitable=True), busy(WAIT_SECONDS_MAX + 1)) == 1


@pytest.mark.parametrize("error", [InvalidRequest("no"), asyncio.CancelledError(), KeyboardInterrupt(), ValueError()])
async def test_what_is_no_failure_of_a_node_passes_straight_through(error: BaseException) -> None:
    made = 0
    with pytest.raises(type(error)) as caught:  # noqa: PT012  the loop is what is tested
        async for attempt in Loop().retry(4).attempts(Plan(untried=3)):
            with attempt:
                made += 1
                raise error

    assert caught.value is error
    assert made == 1


async def test_a_client_that_leaves_during_a_wait_is_let_go_at_once() -> None:
    waiting = asyncio.Event()

    async def sleep(seconds: float) -> None:
        waiting.set()
        await asyncio.sleep(3600)

    retry = Retry(4, sleep=sleep, clock=lambda: 0.0)
    task = asyncio.create_task(run(retry, Plan(waitable=True), busy()))
    await waiting.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_requests_that_share_it_do_not_disturb_each_other() -> None:
    retry = Retry(50, jitter=lambda: 0.0)

    async def request(failing: int) -> int:
        made = 0
        async for attempt in retry.attempts(Plan(untried=60, deadline=1e12)):
            with attempt:
                made += 1
                await asyncio.sleep(0)
                if made <= failing:
                    raise broken()
                await asyncio.sleep(0)
                return made
        raise AssertionError

    results = await asyncio.gather(*(request(failing) for failing in range(40)))

    assert results == [failing + 1 for failing in range(40)]


async def test_it_works_in_another_thread_than_the_one_that_built_it() -> None:
    retry = Loop().retry(4)

    result = await asyncio.to_thread(lambda: asyncio.run(run(retry, Plan(untried=2), broken(), "answer")))

    assert result == ("answer", 2)


async def test_its_clock_is_the_event_loops() -> None:
    retry = Retry(4)
    now = asyncio.get_running_loop().time()

    assert await failures(retry, Plan(untried=9, deadline=now - 1), broken()) == 1
    assert await failures(retry, Plan(untried=9, deadline=now + 60), broken()) == 4


seconds = st.floats(0, 100)
outcome = st.one_of(st.just(broken), st.builds(lambda after: lambda: busy(after), st.none() | seconds))


@given(
    makers=st.lists(outcome, min_size=1, max_size=6),
    untried=st.integers(0, 6),
    waitable=st.booleans(),
    max_attempts=st.integers(1, 6),
    deadline=st.floats(0.001, 200),
    jitter=st.floats(0, 0.999),
)
def test_no_request_outlives_its_bounds(
    makers: list[Callable[[], NodeFailure]],
    untried: int,
    waitable: bool,
    max_attempts: int,
    deadline: float,
    jitter: float,
) -> None:
    loop = Loop(jitter=jitter)
    plan = Plan(deadline=deadline, untried=untried, waitable=waitable)
    made = asyncio.run(failures(loop.retry(max_attempts), plan, *(make() for make in makers)))

    assert made <= max_attempts
    assert loop.now < deadline
    assert all(0 < wait <= WAIT_SECONDS_MAX + BACKOFF_SECONDS_MAX for wait in loop.waits)
    assert waitable or (not loop.waits and made <= max(1, untried))


async def test_requests_leave_nothing_for_the_garbage_collector() -> None:
    """Whatever refers to itself stays in memory until it runs, and makes it run often."""
    retry = Loop().retry(3)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            await run(retry, Plan(), "ok")

        assert gc.collect() == 0
    finally:
        gc.enable()
