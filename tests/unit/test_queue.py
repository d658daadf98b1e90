"""Whose turn it is: fair between keys, by class, and never without an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

import pytest

from app.routing.queue import Entry, Pace, Standing, Turns

HIGH, NORMAL, LOW = range(3)


class Named(Entry):
    """A request that can be told from others."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        self.line = None


class Waiting:
    """A queue in which a place falls free once a second."""

    def __init__(self) -> None:
        self.turns: Turns[Named] = Turns()
        self.now = 0.0

    def join(self, key: str, count: int = 1, *, route: str = "r", weight: int = 1, rank: int = NORMAL) -> list[Named]:
        joined = [Named(key) for _ in range(count)]
        for entry in joined:
            self.turns.join(entry, Standing(route, "m", key, weight, rank), self.now)
        return joined

    def served(self, count: int) -> list[str]:
        """The keys of the next ones, who are served one by one."""
        names = []
        for _ in range(count):
            entry = next(iter(self.turns))
            self.now += 1
            self.turns.serve(entry, self.now)
            names.append(entry.name)
        return names

    def order(self, count: int) -> list[str]:
        """The keys of those who would be next, of whom nobody is served."""
        return names(islice(self.turns, count))


def names(entries: Iterable[Named]) -> list[str]:
    return [entry.name for entry in entries]


def test_requests_of_one_key_are_served_in_the_order_of_their_coming() -> None:
    waiting = Waiting()
    joined = waiting.join("a", 5)

    assert list(waiting.turns) == joined


def test_keys_take_turns_however_many_requests_each_has() -> None:
    waiting = Waiting()
    waiting.join("a", 100)
    waiting.join("b", 3)

    assert waiting.served(8) == ["a", "b", "a", "b", "a", "b", "a", "a"]


def test_a_weight_is_a_number_of_turns() -> None:
    waiting = Waiting()
    waiting.join("a", 100, weight=3)
    waiting.join("b", 100)

    assert Counter(waiting.served(40)) == {"a": 30, "b": 10}


def test_the_order_is_that_in_which_they_would_be_served() -> None:
    waiting = Waiting()
    waiting.join("a", 9, weight=2)
    waiting.join("b", 3)
    waiting.join("c", 4, rank=HIGH)
    waiting.served(5)

    order = waiting.order(11)

    assert order == waiting.served(11)


def test_whoever_comes_and_goes_gains_nothing() -> None:
    waiting = Waiting()
    waiting.join("steady", 200)
    served: list[str] = []
    for _ in range(60):
        if "flighty" not in names(waiting.turns):
            waiting.join("flighty")
        served += waiting.served(1)

    assert served.count("flighty") == pytest.approx(30, abs=1)


def test_one_that_leaves_costs_its_key_no_turn() -> None:
    waiting = Waiting()
    left = waiting.join("a", 10)
    waiting.join("b", 20)
    for entry in left[:5]:
        waiting.turns.leave(entry, 0)
    waiting.turns.leave(left[0], 0)  # again, which does nothing

    assert Counter(waiting.served(10)) == {"a": 5, "b": 5}


def test_a_line_whose_first_cannot_be_served_does_not_lose_its_turn() -> None:
    waiting = Waiting()
    waiting.join("a", 2)
    waiting.join("b", 2)
    second = list(waiting.turns)[1]
    waiting.turns.serve(second, 1)  # the first one waited for something better

    assert waiting.order(3) == ["a", "b", "a"]


def test_keys_take_turns_across_routes() -> None:
    waiting = Waiting()
    waiting.join("a", 50, route="one")
    waiting.join("b", 5, route="two")

    assert Counter(waiting.served(10)) == {"a": 5, "b": 5}


# -- classes


def test_a_higher_class_comes_first() -> None:
    waiting = Waiting()
    waiting.join("low", 2, rank=LOW)
    waiting.join("normal", 2)
    waiting.join("high", 2, rank=HIGH)

    assert waiting.served(6) == ["high"] * 2 + ["normal"] * 2 + ["low"] * 2


def test_no_class_waits_for_ever() -> None:
    waiting = Waiting()
    waiting.join("high", 500, rank=HIGH)
    waiting.join("normal", 500)
    waiting.join("low", 500, rank=LOW)

    served = waiting.served(200)
    assert set(served[:20]) == {"high", "normal", "low"}
    assert served.count("high") > 120
    assert served.count("normal") >= 20
    assert served.count("low") >= 20


def test_lower_classes_are_owed_nothing_for_what_happens_on_other_routes() -> None:
    waiting = Waiting()
    waiting.join("elsewhere", 100, route="other", rank=HIGH)
    waiting.join("low", 5, rank=LOW)
    waiting.served(50)
    waiting.join("normal", 5)

    assert [name for name in waiting.order(60) if name != "elsewhere"] == ["normal"] * 5 + ["low"] * 5


def test_one_key_has_a_line_in_each_class() -> None:
    waiting = Waiting()
    waiting.join("a", 3, rank=LOW)
    urgent = waiting.join("a", 1, rank=HIGH)

    assert next(iter(waiting.turns)) is urgent[0]
    assert len(waiting.turns) == 4


# -- full


def test_the_newest_of_the_longest_line_gives_way_to_a_shorter_one() -> None:
    waiting = Waiting()
    greedy = waiting.join("greedy", 10)
    waiting.join("modest", 2)

    assert waiting.turns.longest(Standing("r", "m", "modest")) is greedy[-1]
    assert waiting.turns.longest(Standing("r", "m", "greedy")) is None


def test_lines_of_one_length_leave_each_other_alone() -> None:
    waiting = Waiting()
    waiting.join("a", 5)
    waiting.join("b", 4)

    assert waiting.turns.longest(Standing("r", "m", "b")) is None


def test_a_weight_counts_for_the_length_of_a_line_too() -> None:
    waiting = Waiting()
    waiting.join("heavy", 30, weight=10)
    light = waiting.join("light", 6)

    assert waiting.turns.longest(Standing("r", "m", "heavy", weight=10)) is light[-1]


def test_a_lower_class_gives_way_and_never_a_higher_one() -> None:
    waiting = Waiting()
    low = waiting.join("low", 1, rank=LOW)
    waiting.join("high", 50, rank=HIGH)

    assert waiting.turns.longest(Standing("r", "m", "high", rank=HIGH)) is low[0]
    waiting.turns.leave(low[0], 0)
    assert waiting.turns.longest(Standing("r", "m", "low", rank=LOW)) is None


# -- how long it takes


@pytest.mark.parametrize(
    ("key", "rank", "ahead"), [("a", NORMAL, 13), ("b", NORMAL, 10), ("new", NORMAL, 5), ("new", HIGH, 1)]
)
def test_those_ahead_are_those_who_would_be_served_before(key: str, rank: int, ahead: int) -> None:
    waiting = Waiting()
    waiting.join("a", 7)
    waiting.join("b", 3)
    waiting.join("high", 3, rank=HIGH)
    standing = Standing("r", "m", key, rank=rank)

    assert waiting.turns.ahead(standing)[0] == ahead
    mine = Named("mine")
    waiting.turns.join(mine, standing, 0)
    assert abs(list(waiting.turns).index(mine) - ahead) <= 1


def test_the_wait_is_told_from_the_pace_of_those_before() -> None:
    waiting = Waiting()
    waiting.join("a", 40)
    assert waiting.turns.seconds(Standing("r", "m", "a"), 0) is None, "nothing is known yet"
    waiting.served(20)

    assert waiting.turns.seconds(Standing("r", "m", "a"), waiting.now) == pytest.approx(21, rel=0.05)
    assert waiting.turns.seconds(Standing("r", "m", "new"), waiting.now) == pytest.approx(2, rel=0.05)


def test_a_low_class_reckons_with_those_who_go_on_to_come_before_it() -> None:
    waiting = Waiting()
    waiting.join("low", 20, rank=LOW)
    for _ in range(100):
        waiting.join("high", 1, rank=HIGH)
        waiting.served(1)
    waiting.join("high", 1, rank=HIGH)

    seconds = waiting.turns.seconds(Standing("r", "m", "low", rank=LOW), waiting.now)
    assert seconds is not None
    assert seconds > 60


def test_time_in_which_nobody_waits_says_nothing_of_the_pace() -> None:
    pace = Pace()
    for start in (0.0, 1000.0, 2000.0):
        pace.waits(start)
        for second in range(1, 11):
            pace.turn(start + second)
        pace.nobody_waits(start + 10)

    pace.waits(5000)
    assert pace.per_second(5000.0) == pytest.approx(1.0)


def test_a_queue_that_was_empty_for_long_has_the_pace_that_it_had() -> None:
    waiting = Waiting()
    waiting.join("a", 20)
    waiting.join("high", 20, rank=HIGH)
    waiting.served(40)
    waiting.now += 10_000
    waiting.join("a", 5)
    waiting.join("high", 1, rank=HIGH)

    assert waiting.turns.seconds(Standing("r", "m", "a"), waiting.now) == pytest.approx(8, abs=3)


def test_a_pace_that_stops_falls() -> None:
    pace = Pace()
    pace.waits(0)
    for second in range(1, 31):
        pace.turn(second)

    rates = [pace.per_second(30.0 + seconds) for seconds in (0, 10, 100)]
    assert rates == sorted(rates, key=lambda rate: -(rate or 0))
    assert (rates[-1] or 0) < 0.2


@pytest.mark.parametrize("per_second", [0.02, 3.0, 500.0])
def test_a_pace_is_learned_and_a_change_is_noticed(per_second: float) -> None:
    pace, now = Pace(), 0.0
    pace.waits(now)
    for rate in (per_second, per_second * 4):
        for _ in range(max(60, int(rate * 20))):
            now += 1 / rate
            pace.turn(now)

    assert pace.per_second(now) == pytest.approx(per_second * 4, rel=0.15)


def test_places_that_fall_free_in_one_moment_count_each() -> None:
    pace = Pace()
    pace.waits(0)
    for second in range(1, 21):
        for _ in range(8):
            pace.turn(float(second))

    assert pace.per_second(20.0) == pytest.approx(8, rel=0.1)


def test_what_is_remembered_of_routes_has_a_bound() -> None:
    waiting = Waiting()
    for number in range(1000):
        waiting.join("a", 1, route=f"route {number}")
        waiting.served(1)

    assert len(waiting.turns) == 0
    assert len(waiting.turns.lengths()) <= 3 * 256


def test_a_thousand_keys_are_served_alike() -> None:
    waiting = Waiting()
    for number in range(1000):
        waiting.join(f"key {number}", 2)

    assert set(Counter(waiting.served(1000)).values()) == {1}
