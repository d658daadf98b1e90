"""Which node is believed to hold which beginnings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.routing.prefixes import ENTRIES, Held, Prefixes

CHAINS = st.lists(st.integers(0, 12), max_size=6)


def _held(prefixes: Prefixes, node: Held, chain: list[int], sizes: list[int]) -> int:
    return next((size for bits, size in prefixes.look_up(chain, sizes) if bits & node.bit), 0)


def test_a_beginning_that_was_read_is_held() -> None:
    prefixes, one = Prefixes(), Held(0)
    prefixes.learn(one, [1, 2, 3], [10, 20, 30])

    assert (
        prefixes.look_up([1, 2, 9], [10, 20, 5]) == [(-1 & 1, 30)]
        or prefixes.look_up([1, 2, 9], [10, 20, 5])[0][1] == 30
    )


def test_each_node_is_told_for_as_much_as_it_holds() -> None:
    prefixes, one, two = Prefixes(), Held(0), Held(1)
    prefixes.learn(one, [1, 2, 3], [10, 20, 30])
    prefixes.learn(two, [1], [10])

    found = prefixes.look_up([1, 2, 3], [10, 20, 30])

    assert {size for bits, size in found if bits & two.bit} == {10}
    assert {size for bits, size in found if bits & one.bit} == {60}


def test_who_lost_a_part_is_told_for_what_is_left() -> None:
    prefixes, one, two, three = Prefixes(), Held(0), Held(1), Held(2)
    prefixes.learn(one, [1, 2, 3, 4], [10, 20, 30, 40])
    prefixes.learn(two, [1, 2], [10, 20])
    prefixes.learn(three, [1, 2], [10, 20])

    assert prefixes.look_up([1, 2, 3, 5], [10, 20, 30, 7]) == [(two.bit | three.bit, 30), (one.bit, 60)]
    assert prefixes.look_up([], []) == prefixes.look_up([5, 1], [7, 10]) == []


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    prefixes, one = Prefixes(), Held(0)
    one.limit = 25
    prefixes.learn(one, [1], [10])
    prefixes.learn(one, [2], [10])
    prefixes.learn(one, [1], [10])

    prefixes.learn(one, [3], [10])

    assert prefixes.look_up([1], [10])
    assert not prefixes.look_up([2], [10])


def test_a_shared_beginning_outlives_the_ends() -> None:
    prefixes, one = Prefixes(), Held(0)
    one.limit = 25
    prefixes.learn(one, [1, 2], [10, 10])
    prefixes.learn(one, [1, 3], [10, 10])

    assert _held(prefixes, one, [1, 3], [10, 10]) == 20
    assert 2 not in one.entries


def test_a_node_that_is_forgotten_leaves_the_others() -> None:
    prefixes, one, two = Prefixes(), Held(0), Held(1)
    prefixes.learn(one, [1], [10])
    prefixes.learn(two, [1], [10])

    prefixes.forget(one)

    found = prefixes.look_up([1], [10])
    assert not any(bits & one.bit for bits, _ in found)
    assert any(bits & two.bit for bits, _ in found)
    assert one.size == 0


def test_entries_are_bounded() -> None:
    prefixes, one = Prefixes(), Held(0)
    for digest in range(3 * ENTRIES):
        prefixes.learn(one, [digest], [1])

    assert len(one.entries) == ENTRIES
    assert len(prefixes) == ENTRIES


@given(st.lists(st.tuples(st.integers(0, 2), CHAINS), max_size=30))
def test_both_tables_always_say_the_same(steps: list[tuple[int, list[int]]]) -> None:
    prefixes, nodes = Prefixes(), [Held(number) for number in range(3)]
    for held in nodes:
        held.limit = 40
    for number, chain in steps:
        prefixes.learn(nodes[number], chain, [7] * len(chain))

    for held in nodes:
        assert held.size == sum(held.entries.values()) <= 40
    for digest in {digest for held in nodes for digest in held.entries}:
        found = prefixes.look_up([digest], [7])
        for held in nodes:
            assert any(bits & held.bit for bits, _ in found) == (digest in held.entries)
    assert len(prefixes) == len({digest for held in nodes for digest in held.entries})
