"""Who waits for which node, and what is left of that afterwards."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from app.domain import Caller, ModelInfo, Operation, Priority, QueueRules, Request
from app.errors import Overloaded
from app.routing.admission import Admission
from app.routing.choice import Choice
from app.routing.plan import Plan
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.queue import PRIORITIES
from app.routing.registry import Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail
from tests.unit.nodes import node


class _Nobody:
    def attempt(self, node: Node, record: Any) -> None: ...


class _House:
    """One node with a large context window and two with small ones, each with a place for one request."""

    def __init__(self) -> None:
        self.policy = ShortestExpectedDelay()
        self.admission = Admission(chooser=self.policy)
        self.nodes = [node(name, max_concurrency=1) for name in ("large", "small", "little")]
        self.registry = Registry(self.nodes, self.admission.changed)
        for each, window in zip(self.nodes, (100_000, 500, 500), strict=True):
            each.list_models([ModelInfo("m", context_length=window)])
        self.choice = Choice(self.policy, self.admission, _Nobody(), queue_seconds=0.02)

    def plan(self, characters: int) -> Plan:
        text = "x" * characters
        fields = {"model": "m", "messages": [{"role": "user", "content": text}]}
        request = Request("r", Operation.CHAT, "m", text.encode(), fields)
        return Plan(request, Route("r", local="m"), self.registry, Trail(), asyncio.get_running_loop().time() + 100)

    def promised(self) -> int:
        return sum(len(each.work.promised) for each in self.nodes if each.work is not None)


async def test_whoever_has_waited_in_vain_leaves_no_promise_behind() -> None:
    house = _House()
    held = [await house.choice.next(house.plan(10)) for _ in house.nodes]

    for _ in range(3):
        with pytest.raises(Overloaded):
            await house.choice.next(house.plan(40_000))

    assert house.admission.waiting == 0
    assert house.promised() == 0
    for attempt in held:
        attempt.succeed()
    house.nodes[0].draining = True
    assert (await house.choice.next(house.plan(10))).candidate.node in house.nodes[1:]


@pytest.mark.parametrize("doubted", [0, 1, 2])
async def test_whoever_could_serve_is_counted_even_where_it_is_not_the_moment_to_ask_it(doubted: int) -> None:
    house = _House()
    candidates = house.plan(10).local()
    house.policy.forecast.seat(candidates[doubted]).doubted_until = math.inf

    for _ in range(20):  # which of them is best is drawn by lot
        explained = (await house.choice.rehearse(house.plan(10), 1))[0]
        plan = house.plan(10)
        attempt = await house.choice.next(plan)
        attempt.succeed()

        assert attempt.candidate.node is not house.nodes[doubted]
        assert explained.candidate.node is not house.nodes[doubted]
        assert plan.trail.candidates == explained.candidates == len(house.nodes)


async def test_a_wait_for_a_full_node_that_is_far_better_is_explained() -> None:
    house = _House()
    house.nodes[2].draining = True
    for candidate, seconds in zip(house.plan(10).local(), (0.01, 0.4), strict=True):
        for _ in range(5):
            house.policy.forecast.seat(candidate).speed.decode.add(seconds, 0.0)
    held = await house.choice.next(house.plan(10))

    explained = await house.choice.rehearse(house.plan(10), 4)
    with pytest.raises(Overloaded):
        await house.choice.next(house.plan(10))

    assert held.candidate.node is house.nodes[0]
    assert [(step.candidate.node.name, step.waits) for step in explained] == [("large", True)]


# -- with what right a request waits


@pytest.mark.parametrize(
    ("key", "route", "asked", "stands"),
    [
        (None, None, None, "normal"),
        (None, "high", None, "high"),
        ("low", "high", None, "low"),
        ("high", "low", None, "high"),
        (None, None, "low", "low"),
        (None, None, "high", "normal"),
        ("high", None, "normal", "normal"),
        ("low", None, "normal", "low"),
    ],
)
async def test_the_key_goes_before_the_name_and_a_request_may_stand_back(
    key: str | None, route: str | None, asked: str | None, stands: str
) -> None:
    house = _House()
    plan = house.plan(10)
    plan.request = plan.request._replace(
        caller=Caller("k", weight=4, priority=Priority(key) if key else None),
        priority=Priority(asked) if asked else None,
    )
    plan.route = Route("r", local="m", queue=QueueRules(size=7, priority=Priority(route) if route else None))

    standing = house.choice.standing(plan)

    assert PRIORITIES[standing.rank] == stands
    assert (standing.route, standing.model, standing.key, standing.weight, standing.size) == ("r", "m", "k", 4, 7)


async def test_a_name_may_say_how_long_its_requests_wait() -> None:
    house = _House()
    for _ in house.nodes:
        await house.choice.next(house.plan(10))
    plan = house.plan(10)
    plan.route = Route("r", local="m", queue=QueueRules(timeout_seconds=0.2))
    began = asyncio.get_running_loop().time()

    with pytest.raises(Overloaded):
        await house.choice.next(plan)

    assert asyncio.get_running_loop().time() - began >= 0.2
    assert plan.trail.queue_refusal == "timeout"
    assert plan.trail.queued_seconds >= 0.19
