"""Why a node is not asked agrees with whether it is, and looking at a choice changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain import NodeState, Operation, Request, Role
from app.errors import NodeFailure
from app.routing.obstacles import obstacles, usable
from app.routing.plan import Plan
from app.routing.policies import POLICIES, Policy
from app.routing.registry import Candidate, Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail
from tests.unit import nodes

LONG = Request("1", Operation.CHAT, "m", b"x" * 9000, {"messages": [{"role": "user", "content": "x" * 9000}]})


def _in_state(
    state: NodeState, draining: bool, known: bool, failures: int, probing: bool, role: Role, room: int | None
) -> Node:
    made = nodes.node("a", role=role, num_ctx=room)
    made.state, made.draining = state, draining
    for _ in range(failures):
        permit = made.breaker.acquire()
        if permit is not None:
            permit.fail("broken")
    if probing and failures >= 3:
        made.breaker._open_seconds = 0.0  # its time is up: the next caller is its probe
        made.breaker.acquire()
    if not known:
        made.kind = None
    return made


states = st.tuples(
    st.sampled_from(NodeState),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from(Role),
    st.sampled_from([None, 100, 100_000]),
)


class _Pairing:
    def __init__(self, alone: bool) -> None:
        self._alone = alone

    def serves_alone(self, node: Node) -> bool:
        return self._alone


@settings(deadline=None)
@given(states, st.booleans(), st.sampled_from([None, _Pairing(True), _Pairing(False)]))
def test_there_are_reasons_exactly_when_a_node_is_left_out(state: Any, tried: bool, pairing: _Pairing | None) -> None:
    made = _in_state(*state)
    plan = Plan(LONG, Route("r", local="m"), Registry([made]), Trail(), 1000.0, pairing)
    candidate = plan.candidate(made)
    assert candidate is not None
    if tried:
        plan.choose(candidate)

    asked = any(tier for tier in plan.tiers())

    assert asked == (not plan.obstacles(made) and plan.has_role(made))
    assert usable(made) == (not obstacles(made))


def _some(count: int) -> list[Candidate]:
    return [nodes.candidate(nodes.node("abcde"[place], weight=place + 1)) for place in range(count)]


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_rehearsal_leaves_the_policy_where_it_was(make: Callable[[], Policy]) -> None:
    watched, untouched, candidates = make(), make(), _some(4)
    for policy in (watched, untouched):
        if hasattr(policy, "_uniform"):
            policy._uniform = lambda: 0.5
        if hasattr(policy, "_arrival"):
            policy._arrival = lambda rate: 1 / rate

    for turn in range(1, 12):
        rehearsed = [watched.rehearsal().rank(list(candidates)) for _ in range(3)]
        watched.terms(candidates)
        real, expected = watched.rank(list(candidates)), untouched.rank(list(candidates))
        real[0].node.picked = turn
        if turn % 3:
            real[0].node.latencies.append(random.Random(turn).random())

        assert real == expected
        assert rehearsed == [real] * 3


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_the_lowest_score_comes_first(make: Callable[[], Policy]) -> None:
    policy, candidates = make(), _some(4)
    for place, candidate in enumerate(candidates):
        candidate.node.picked = place
        candidate.node.latencies.extend([(1.0 + place) ** 2] * 3)

    scores = [terms.get("score") for terms in policy.terms(candidates)]
    first = policy.rehearsal().rank(list(candidates))[0]

    if policy.lots.startswith("all"):
        assert scores == [None] * 4
    else:
        assert scores[candidates.index(first)] == min(scores, key=lambda score: score or 0)
        assert len(set(scores)) == 4


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_every_policy_has_terms_of_nobody(make: Callable[[], Policy]) -> None:
    assert make().terms([]) == []


def test_an_obstacle_says_for_how_long() -> None:
    made = nodes.node("a")
    for _ in range(3):
        permit = made.breaker.acquire()
        assert permit is not None
        permit.fail(NodeFailure.__name__)

    obstacle = obstacles(made)[0]

    assert obstacle.code == "breaker_open"
    assert obstacle.seconds == pytest.approx(15, abs=1)
    assert "NodeFailure" in obstacle.message
