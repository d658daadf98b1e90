"""What a replica makes of the counts that others send."""

from __future__ import annotations

import pytest

from app.routing.forecast import Forecast
from app.routing.policies.load import unfinished
from app.routing.registry import Node
from app.sharing.counts import SILENT_SECONDS, Counts, places
from tests.unit.nodes import candidate, node


@pytest.fixture
def freed() -> list[str]:
    """On which nodes others gave places back."""
    return []


@pytest.fixture
def nodes() -> list[Node]:
    return [node("a", max_concurrency=3), node("b")]


@pytest.fixture
def counts(freed: list[str], nodes: list[Node]) -> Counts:
    made = Counts(lambda node: freed.append(node.name))
    made.place(nodes)
    return made


def place(made: Node) -> str:
    return next(iter(places([made])))


def test_counts_of_others_add_up_and_count_as_load(counts: Counts, nodes: list[Node]) -> None:
    a = nodes[0]
    counts.hear("one", {place(a): 1}, 0.0, whole=True)
    counts.hear("two", {place(a): 2}, 0.0, whole=True)

    assert a.others_in_flight == 3
    assert a.full
    assert unfinished(candidate(a)) == 4
    assert nodes[1].others_in_flight == 0


def test_a_load_without_a_request_counts_for_others(counts: Counts, nodes: list[Node]) -> None:
    nodes[1].in_flight = 1
    Forecast().load_begins(candidate(nodes[1]))

    assert counts.changes() == {place(nodes[1]): 2}


def test_a_change_leaves_the_other_counts_and_a_whole_replaces_them(counts: Counts, nodes: list[Node]) -> None:
    a, b = nodes
    counts.hear("one", {place(a): 1, place(b): 1}, 0.0, whole=True)
    counts.hear("one", {place(b): 5}, 0.0, whole=False)
    assert (a.others_in_flight, b.others_in_flight) == (1, 5)
    counts.hear("one", {place(b): 2}, 0.0, whole=True)

    assert (a.others_in_flight, b.others_in_flight) == (0, 2)


def test_those_who_wait_hear_when_others_give_places_back(counts: Counts, nodes: list[Node], freed: list[str]) -> None:
    counts.hear("one", {place(nodes[0]): 3}, 0.0, whole=True)
    assert freed == []
    counts.hear("one", {place(nodes[0]): 2}, 0.0, whole=False)

    assert freed == ["a"]


def test_a_silent_replica_is_forgotten(counts: Counts, nodes: list[Node], freed: list[str]) -> None:
    counts.hear("one", {place(nodes[0]): 3}, 0.0, whole=True)
    counts.hear("two", {place(nodes[0]): 1}, 1.0, whole=True)
    counts.forget_silent(SILENT_SECONDS + 0.5)

    assert nodes[0].others_in_flight == 1
    assert counts.peers == {"two"}
    assert freed == ["a"]


def test_a_node_that_comes_later_has_the_counts_that_were_heard_before(counts: Counts, nodes: list[Node]) -> None:
    late = node("late")
    counts.hear("one", {place(late): 4}, 0.0, whole=True)
    counts.place([*nodes, late])

    assert late.others_in_flight == 4


def test_only_what_changed_is_told(counts: Counts, nodes: list[Node]) -> None:
    a, b = nodes
    a.in_flight = 2
    assert counts.changes() == {place(a): 2}
    counts.told(counts.changes())
    assert counts.changes() == {}
    a.in_flight, b.in_flight = 0, 1

    assert counts.changes() == {place(a): 0, place(b): 1}


def test_a_node_that_left_counts_no_more(counts: Counts, nodes: list[Node]) -> None:
    a, b = nodes
    a.in_flight = 2
    counts.told(counts.changes())
    counts.place([b])

    assert counts.changes() == {place(a): 0}


def test_nodes_that_came_and_left_do_not_fill_the_memory(counts: Counts) -> None:
    for number in range(50):
        late = node(f"late-{number}")
        late.in_flight = 1
        counts.place([late])
        counts.told(counts.changes())
    counts.place([])
    counts.told(counts.changes())

    assert counts.changes() == {}
    assert not counts._told


def test_nodes_are_told_apart_by_tier_and_by_their_turn_at_one_url() -> None:
    nodes = [node("a"), node("a"), node("a", tier=1), node("b")]

    assert len(places(nodes)) == 4
    assert list(places(nodes).values()) == nodes
    assert list(places([node("other name", max_concurrency=1)])) != list(places(nodes))


def test_too_many_replicas_do_not_fill_the_memory(counts: Counts, nodes: list[Node]) -> None:
    for number in range(3000):
        counts.hear(f"{number}", {place(nodes[0]): 1}, 0.0, whole=True)

    assert len(counts.peers) <= 1024
