"""Who waits for which node, and what is left of that afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.domain import ModelInfo, Operation, Request
from app.errors import Overloaded
from app.routing.admission import Admission
from app.routing.choice import Choice
from app.routing.plan import Plan
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.registry import Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail
from tests.unit.nodes import node


class _Nobody:
    def attempt(self, node: Node, record: Any) -> None: ...


class _House:
    """One node with a large context window and two with small ones, each with a place for one request."""

    def __init__(self) -> None:
        policy = ShortestExpectedDelay()
        self.admission = Admission(chooser=policy)
        self.nodes = [node(name, max_concurrency=1) for name in ("large", "small", "little")]
        self.registry = Registry(self.nodes, self.admission.changed)
        for each, window in zip(self.nodes, (100_000, 500, 500), strict=True):
            each.list_models([ModelInfo("m", context_length=window)])
        self.choice = Choice(policy, self.admission, _Nobody(), queue_seconds=0.02)

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
