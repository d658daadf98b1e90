"""Which node each policy puts first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from app.domain import LoadedModel
from app.routing.policies import POLICIES, Policy
from app.routing.policies.least_connections import LeastConnections
from app.routing.policies.random import Random
from app.routing.policies.round_robin import RoundRobin
from app.routing.policies.weighted import Weighted
from app.routing.registry import Candidate
from tests.unit.nodes import candidate, node


def _chosen(policy: Policy, candidates: list[Candidate], times: int, *, hold: bool = False) -> list[str]:
    """The names of the nodes chosen in a run, as the dispatcher chooses; with `hold` requests never end."""
    names = []
    for turn in range(1, times + 1):
        first = policy.rank(list(candidates))[0]
        first.node.picked = turn
        first.node.in_flight += hold
        names.append(first.node.name)
    return names


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_every_policy_keeps_all_candidates(make: Callable[[], Policy]) -> None:
    candidates = [candidate(node(name)) for name in "abc"]

    ranked = make().rank(list(candidates))

    assert sorted(c.node.name for c in ranked) == ["a", "b", "c"]


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_every_policy_bears_having_nobody(make: Callable[[], Policy]) -> None:
    assert make().rank([]) == []


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_idle_equal_nodes_all_get_work(make: Callable[[], Policy]) -> None:
    candidates = [candidate(node(name)) for name in "abc"]

    shares = Counter(_chosen(make(), candidates, 300))

    assert all(60 <= shares[name] <= 140 for name in "abc")


def test_round_robin_goes_in_turn_when_a_node_is_missing_for_a_while() -> None:
    a, b, c = (candidate(node(name)) for name in "abc")
    policy = RoundRobin()

    assert _chosen(policy, [a, b, c], 3) == ["a", "b", "c"]
    for turn, able in enumerate(([a, c], [a, c], [a, b, c]), start=10):
        first = policy.rank(able)[0]
        first.node.picked = turn
    assert first.node.name == "b"


def test_least_connections_spreads_held_requests_evenly() -> None:
    candidates = [candidate(node(name)) for name in "abc"]

    shares = Counter(_chosen(LeastConnections(), candidates, 30, hold=True))

    assert shares == {"a": 10, "b": 10, "c": 10}


def test_least_connections_honours_weights() -> None:
    candidates = [candidate(node("a", weight=3)), candidate(node("b"))]

    shares = Counter(_chosen(LeastConnections(), candidates, 400, hold=True))

    assert shares["a"] == pytest.approx(300, abs=2)


def test_least_connections_prefers_a_node_that_holds_the_model() -> None:
    cold, warm = candidate(node("cold")), candidate(node("warm"))
    cold.node.loaded, warm.node.loaded = {}, {"m": LoadedModel("m")}

    assert _chosen(LeastConnections(), [cold, warm], 3, hold=True) == ["warm", "warm", "cold"]


def test_weighted_shares_are_exact_and_spread_out() -> None:
    candidates = [candidate(node("a", weight=3)), candidate(node("b"))]

    names = _chosen(Weighted(), candidates, 8)

    assert Counter(names) == {"a": 6, "b": 2}
    assert names[:4].count("b") == 1


@pytest.mark.parametrize("figure", ["speed", "vram_gb"])
def test_weighted_uses_what_the_operator_said_of_the_hardware(figure: str) -> None:
    candidates = [candidate(node("a", **{figure: 24.0})), candidate(node("b", **{figure: 8.0})), candidate(node("c"))]

    shares = Counter(_chosen(Weighted(), candidates, 480))

    assert shares == {"a": 240, "b": 80, "c": 160}  # c counts as the mean of the others


def test_random_draws_by_weight() -> None:
    candidates = [candidate(node("a", weight=3)), candidate(node("b"))]

    shares = Counter(_chosen(Random(random.Random(7)), candidates, 4000))

    assert shares["a"] == pytest.approx(3000, abs=120)
