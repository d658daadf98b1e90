"""The breaker, without a clock of its own and without a network."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from app.domain import Failure
from app.errors import NodeFailure
from app.routing.breaker import Breaker, BreakerState, Permit

RESET_SECONDS = 15.0
FAULT = NodeFailure(Failure.CONNECT, "connection refused")


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, RESET_SECONDS, clock=clock)


def admitted(breaker: Breaker) -> Permit:
    permit = breaker.acquire()
    assert permit is not None
    return permit


def trip(breaker: Breaker) -> None:
    while breaker.state != "open":
        admitted(breaker).fail(FAULT)


def half_open(breaker: Breaker, clock: Clock) -> Permit:
    trip(breaker)
    clock.now += RESET_SECONDS
    return admitted(breaker)


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(2):
        admitted(breaker).fail(FAULT)
    assert breaker.state == "closed"

    admitted(breaker).fail(FAULT)

    assert breaker.state == "open"
    assert breaker.acquire() is None


def test_a_success_between_failures_starts_the_count_again(breaker: Breaker) -> None:
    for _ in range(2):
        admitted(breaker).fail(FAULT)
    admitted(breaker).succeed()
    for _ in range(2):
        admitted(breaker).fail(FAULT)

    assert breaker.state == "closed"


def test_refused_callers_learn_how_long_to_wait(breaker: Breaker, clock: Clock) -> None:
    assert breaker.retry_after_seconds() == 0
    trip(breaker)
    clock.now += 5

    assert breaker.retry_after_seconds() == 10


def test_half_open_lets_one_caller_of_fifty_through(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += RESET_SECONDS

    permits = [breaker.acquire() for _ in range(50)]

    assert sum(permit is not None for permit in permits) == 1
    assert breaker.state == "half_open"
    assert breaker.retry_after_seconds() > 0


def test_a_probe_that_succeeds_closes_it(breaker: Breaker, clock: Clock) -> None:
    half_open(breaker, clock).succeed()

    assert breaker.state == "closed"
    assert breaker.reason is None


def test_a_probe_that_fails_opens_it_for_the_whole_time_again(breaker: Breaker, clock: Clock) -> None:
    half_open(breaker, clock).fail(FAULT)

    assert breaker.state == "open"
    assert breaker.retry_after_seconds() == RESET_SECONDS


def test_a_probe_whose_client_left_frees_the_slot_and_decides_nothing(breaker: Breaker, clock: Clock) -> None:
    half_open(breaker, clock).neutral()

    assert breaker.state == "half_open"
    assert breaker.acquire() is not None


def test_clients_that_leave_do_not_open_it(breaker: Breaker) -> None:
    for _ in range(10):
        admitted(breaker).neutral()

    assert breaker.state == "closed"


def test_a_client_that_leaves_does_not_hide_failures(breaker: Breaker) -> None:
    """Neutral is not success: it must not reset the count."""
    for _ in range(2):
        admitted(breaker).fail(FAULT)
    admitted(breaker).neutral()
    admitted(breaker).fail(FAULT)

    assert breaker.state == "open"


def test_a_late_failure_does_not_keep_it_open(breaker: Breaker, clock: Clock) -> None:
    late = admitted(breaker)
    trip(breaker)
    clock.now += 10
    late.fail(FAULT)

    assert breaker.retry_after_seconds() == 5


def test_a_late_success_does_not_close_it(breaker: Breaker, clock: Clock) -> None:
    late = admitted(breaker)
    probe = half_open(breaker, clock)
    late.succeed()

    assert breaker.state == "half_open"
    assert not breaker.would_admit()
    probe.succeed()
    assert breaker.state == "closed"


def test_a_late_neutral_does_not_free_anothers_probe_slot(breaker: Breaker, clock: Clock) -> None:
    late = admitted(breaker)
    half_open(breaker, clock)
    late.neutral()

    assert breaker.acquire() is None


def test_a_failure_from_before_a_recovery_does_not_count(breaker: Breaker, clock: Clock) -> None:
    late = [admitted(breaker) for _ in range(3)]
    half_open(breaker, clock).succeed()
    for permit in late:
        permit.fail(FAULT)

    assert breaker.state == "closed"


def test_a_permit_takes_only_its_first_outcome(breaker: Breaker, clock: Clock) -> None:
    permit = admitted(breaker)
    for _ in range(3):
        permit.fail(FAULT)
    assert breaker.state == "closed"

    probe = half_open(breaker, clock)
    probe.neutral()
    probe.fail(FAULT)
    assert breaker.state == "half_open"


def test_looking_changes_nothing(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    assert not breaker.would_admit()
    clock.now += RESET_SECONDS

    assert [breaker.would_admit() for _ in range(3)] == [True, True, True]
    assert breaker.state == "open"


def test_zero_turns_it_off() -> None:
    """0 means off, never "use the default"."""
    breaker = Breaker(0, RESET_SECONDS)
    for _ in range(20):
        admitted(breaker).fail(FAULT)
        admitted(breaker).succeed()

    assert breaker.state == "closed"
    assert breaker.would_admit()


def test_one_failure_is_enough_when_asked_for(clock: Clock) -> None:
    breaker = Breaker(1, RESET_SECONDS, clock=clock)
    admitted(breaker).fail(FAULT)

    assert breaker.state == "open"


def test_the_reason_is_what_the_failure_said(breaker: Breaker) -> None:
    assert breaker.reason is None
    trip(breaker)
    assert breaker.reason == "connection refused"


def test_changes_are_told_with_their_reason(clock: Clock) -> None:
    changes: list[tuple[str, str, str | None]] = []

    def note(old: str, new: str) -> None:
        changes.append((old, new, watched.reason))

    watched = Breaker(3, RESET_SECONDS, clock=clock, on_change=note)
    half_open(watched, clock).succeed()

    assert changes == [
        ("closed", "open", "connection refused"),
        ("open", "half_open", "connection refused"),
        ("half_open", "closed", None),
    ]


def test_a_failures_traceback_does_not_grow(breaker: Breaker) -> None:
    fault = NodeFailure(Failure.CONNECT, "connection refused")
    admitted(breaker).fail(fault)

    assert fault.__traceback__ is None


class BreakerMachine(RuleBasedStateMachine):
    """Callers, outcomes and time in any order, against a model in plain words."""

    permits = Bundle("permits")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(2, RESET_SECONDS, clock=self.clock)
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.opened_at = 0.0
        self.epoch = 0
        self.probe_is_out = False
        self.pending: dict[Permit, int] = {}

    def _become(self, state: BreakerState) -> None:
        self.state = state
        self.epoch += 1
        self.failures = 0
        self.probe_is_out = False

    def _is_due(self) -> bool:
        return self.clock.now >= self.opened_at + RESET_SECONDS

    def _would_admit(self) -> bool:
        return {
            BreakerState.CLOSED: True,
            BreakerState.OPEN: self._is_due(),
            BreakerState.HALF_OPEN: not self.probe_is_out,
        }[self.state]

    def _take(self, permit: Permit) -> bool:
        """Whether the outcome counts: the permit's first, and of this epoch."""
        return self.pending.pop(permit, None) == self.epoch

    @rule(target=permits)
    def acquire(self) -> object:
        expected = self._would_admit()
        permit = self.breaker.acquire()
        assert (permit is not None) == expected
        if permit is None:
            return multiple()
        if self.state is BreakerState.OPEN:
            self._become(BreakerState.HALF_OPEN)
        self.probe_is_out = self.state is BreakerState.HALF_OPEN
        self.pending[permit] = self.epoch
        return permit

    @rule(permit=permits)
    def succeed(self, permit: Permit) -> None:
        permit.succeed()
        if self._take(permit):
            self.failures = 0
            if self.state is BreakerState.HALF_OPEN:
                self._become(BreakerState.CLOSED)

    @rule(permit=permits)
    def fail(self, permit: Permit) -> None:
        permit.fail(FAULT)
        if self._take(permit):
            self.failures += 1
            if self.state is BreakerState.HALF_OPEN or self.failures == 2:
                self._become(BreakerState.OPEN)
                self.opened_at = self.clock.now

    @rule(permit=permits)
    def leave(self, permit: Permit) -> None:
        permit.neutral()
        if self._take(permit):
            self.probe_is_out = False

    @rule(seconds=st.sampled_from([1.0, 7.0, RESET_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.breaker.state is self.state
        assert self.breaker.would_admit() == self._would_admit()
        assert (self.breaker.retry_after_seconds() == 0) == self._would_admit()


TestAnyOrder = BreakerMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# Replicas


@pytest.fixture
def heard(breaker: Breaker) -> list[BreakerState]:
    """What other replicas hear of the breaker."""
    states: list[BreakerState] = []
    breaker.share(lambda: states.append(breaker.state))
    return states


def test_others_hear_that_it_opens_and_closes_and_not_that_it_probes(
    breaker: Breaker, clock: Clock, heard: list[BreakerState]
) -> None:
    trip(breaker)
    clock.now += 2 * RESET_SECONDS
    admitted(breaker).succeed()

    assert heard == ["open", "closed"]


def test_what_others_said_is_applied_and_not_said_again(breaker: Breaker, heard: list[BreakerState]) -> None:
    breaker.open_from_elsewhere("refused")
    assert (breaker.state, breaker.reason, breaker.acquire()) == ("open", "refused", None)
    breaker.close_from_elsewhere()

    assert (breaker.state, breaker.reason) == ("closed", None)
    assert heard == []


def test_what_others_said_begins_an_epoch(breaker: Breaker, heard: list[BreakerState]) -> None:
    """A late success must not close what another replica opened, nor a late failure open what one closed."""
    late = [admitted(breaker) for _ in range(4)]
    breaker.open_from_elsewhere("refused")
    late.pop().succeed()
    assert breaker.state == "open"
    breaker.close_from_elsewhere()
    for permit in late:
        permit.fail(FAULT)

    assert breaker.state == "closed"
    assert heard == []


def test_failures_from_before_another_replica_closed_it_count_no_more(breaker: Breaker) -> None:
    for _ in range(2):
        admitted(breaker).fail(FAULT)
    breaker.open_from_elsewhere("refused")
    breaker.close_from_elsewhere()
    for _ in range(2):
        admitted(breaker).fail(FAULT)

    assert breaker.state == "closed"


def test_its_own_probe_decides_while_it_is_out(breaker: Breaker, clock: Clock) -> None:
    probe = half_open(breaker, clock)
    breaker.open_from_elsewhere("refused")
    assert breaker.state == "half_open"
    probe.succeed()

    assert breaker.state == "closed"


def test_a_failed_probe_of_another_postpones_ours(breaker: Breaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += RESET_SECONDS - 1
    breaker.open_from_elsewhere("refused")
    clock.now += RESET_SECONDS - 1
    assert not breaker.would_admit()
    clock.now += 1

    assert breaker.would_admit()


def test_replicas_probe_at_different_times(clock: Clock) -> None:
    waits = set()
    for _ in range(20):
        breaker = Breaker(3, RESET_SECONDS, clock=clock)
        breaker.share(lambda: None)
        trip(breaker)
        waits.add(breaker.retry_after_seconds())

    assert len(waits) > 1
    assert all(0.8 * RESET_SECONDS <= wait <= 1.2 * RESET_SECONDS for wait in waits)


def test_a_breaker_that_is_off_stays_off_whatever_others_say() -> None:
    breaker = Breaker(0, RESET_SECONDS)
    breaker.open_from_elsewhere("refused")

    assert breaker.acquire() is not None
