"""Who is asked again, before whom, and who is not."""

from __future__ import annotations

import pytest

from app.domain import Failure, Operation, Request, Role
from app.errors import NodeFailure
from app.routing.plan import Plan
from app.routing.registry import Candidate, Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail
from tests.unit import nodes

UNHEARD = NodeFailure(Failure.CONNECT, "connection refused", sent=False)
BROKEN = NodeFailure(Failure.SERVER_ERROR, "broken", status=500)
REQUEST = Request("1", Operation.CHAT, "m", b"{}", {"messages": []})


def _plan(*made: Node) -> Plan:
    return Plan(REQUEST, Route("r", local="m", cloud="m"), Registry(made), Trail(), 1000.0)


def _first(plan: Plan) -> list[str]:
    """The names in the first tier that has any."""
    return next(([each.node.name for each in tier] for tier in plan.tiers() if tier), [])


def _fail(plan: Plan, candidate: Candidate, failure: NodeFailure) -> None:
    plan.choose(candidate)
    plan.failed(candidate, failure)


def test_a_node_that_is_asked_again_comes_before_all_others() -> None:
    a, b = nodes.node("a", retries=1), nodes.node("b")
    plan = _plan(a, b)

    _fail(plan, nodes.candidate(a), UNHEARD)

    assert _first(plan) == ["a"]
    assert plan.asks_again()
    assert plan.repeats(nodes.candidate(a))


def test_another_is_asked_when_that_one_has_become_full_meanwhile() -> None:
    a, b = nodes.node("a", retries=1, max_concurrency=1), nodes.node("b")
    plan = _plan(a, b)
    _fail(plan, nodes.candidate(a), UNHEARD)

    a.in_flight = 1

    assert "b" in _first(plan)


def test_a_failure_of_another_sort_ends_it() -> None:
    a, b = nodes.node("a", retries=5), nodes.node("b")
    plan = _plan(a, b)

    _fail(plan, nodes.candidate(a), UNHEARD)
    _fail(plan, nodes.candidate(a), BROKEN)

    assert _first(plan) == ["b"]
    assert not plan.asks_again()


def test_a_cloud_target_that_is_asked_again_does_not_come_before_local_nodes() -> None:
    a, cloud = nodes.node("a"), nodes.node("c", retries=1, tier=1)
    plan = _plan(a, cloud)

    _fail(plan, nodes.candidate(cloud), UNHEARD)

    assert _first(plan) == ["a"]
    assert plan.asks_again()


def test_half_of_a_pair_is_not_asked_for_the_whole() -> None:
    a, b = nodes.node("a", retries=1, role=Role.PREFILL), nodes.node("b")
    plan = _plan(a, b)

    _fail(plan, nodes.candidate(a), UNHEARD)

    assert _first(plan) == ["b"]


def test_a_prompt_that_fits_everywhere_is_compared_with_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nodes.node("a"), nodes.node("b")
    plan = _plan(a, b)
    monkeypatch.setattr("app.routing.plan.window", lambda *_: pytest.fail("it was compared"))

    assert [each.node for each in plan.like(plan.local())] == [a, b]
