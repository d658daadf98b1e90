"""How replicas agree on whose breakers are open."""

from __future__ import annotations

import pytest

from app.routing.registry import Node
from app.sharing.counts import places
from app.sharing.transitions import Transitions
from tests.unit.nodes import node


class Replica:
    """One replica's node and what it knows of breakers."""

    def __init__(self, name: str) -> None:
        self.now = 1_000
        self.changes = 0
        self.transitions = Transitions(name, lambda: self.now, self._count)
        self.node: Node = node("a")
        self.transitions.place(places([self.node]))

    def _count(self) -> None:
        self.changes += 1

    @property
    def state(self) -> str:
        return self.node.breaker.state.value

    def breaks(self) -> None:
        for _ in range(3):
            permit = self.node.breaker.acquire()
            assert permit is not None
            permit.fail("refused")

    def mends(self) -> None:
        self.node.breaker._opened_at -= 100  # its time is up
        permit = self.node.breaker.acquire()
        assert permit is not None
        permit.succeed()

    def hears(self, other: Replica, since: int = 0) -> None:
        self.transitions.hear({place: list(last) for place, last in other.transitions.all().items()}, lambda _: since)


@pytest.fixture
def one() -> Replica:
    return Replica("one")


@pytest.fixture
def two() -> Replica:
    return Replica("two")


def test_an_open_and_a_close_reach_others_with_their_reason(one: Replica, two: Replica) -> None:
    one.breaks()
    two.hears(one)
    assert (two.state, two.node.breaker.reason) == ("open", "refused")
    one.mends()
    two.hears(one)

    assert two.state == "closed"


def test_what_was_heard_is_not_said_again(one: Replica, two: Replica) -> None:
    one.breaks()
    two.hears(one)

    assert two.changes == 0
    assert two.transitions.changes() == {}
    assert one.transitions.changes()
    assert one.transitions.changes() == {}


def test_hearing_the_same_again_changes_nothing(one: Replica, two: Replica) -> None:
    one.breaks()
    two.hears(one)
    two.mends()
    two.hears(one)

    assert two.state == "closed"


def test_after_a_time_apart_the_last_change_holds_for_both(one: Replica, two: Replica) -> None:
    one.breaks()
    two.now = 2_000
    two.breaks()
    two.now = 3_000
    two.mends()
    one.hears(two)
    two.hears(one)

    assert one.state == two.state == "closed"


def test_a_change_counts_as_later_than_the_one_that_it_follows_whatever_the_clock_says(
    one: Replica, two: Replica
) -> None:
    one.now = 9_000
    one.breaks()
    two.hears(one)
    two.mends()
    one.hears(two)

    assert one.state == two.state == "closed"


def test_what_befell_the_node_before_it_came_back_is_past(one: Replica, two: Replica) -> None:
    one.breaks()
    two.hears(one, since=one.now + 1)

    assert two.state == "closed"


def test_a_breaker_that_left_with_its_node_is_not_heard_any_more(one: Replica) -> None:
    old = one.node
    one.node = node("a")
    one.transitions.place(places([one.node]))
    for _ in range(3):
        permit = old.breaker.acquire()
        assert permit is not None
        permit.fail("refused")

    assert one.changes == 0
    assert one.transitions.all() == {}


def test_a_node_that_came_open_is_told_of(one: Replica) -> None:
    late = node("late")
    for _ in range(3):
        permit = late.breaker.acquire()
        assert permit is not None
        permit.fail("refused")
    one.transitions.place(places([one.node, late]))

    assert [each.open for each in one.transitions.changes().values()] == [True]
