"""Loads for their own sake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.domain import NodeSpec, NodeState, Operation, Request
from app.providers import KINDS
from app.routing.breaker import Breaker
from app.routing.forecast import Forecast
from app.routing.job import Job
from app.routing.loads import Loads
from app.routing.registry import Candidate, Node


class Asking:
    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def load(self, candidate: Candidate, job: Job) -> None:
        self.loaded.append(candidate.model)


@pytest.mark.parametrize("state", ["healthy", "draining", "down", "left alone"])
async def test_only_a_node_that_can_be_asked_is_made_to_load(state: str) -> None:
    asking: Any = Asking()
    loads = Loads(asking, Forecast())
    node = Node(NodeSpec("http://n"), Breaker(1, 15.0), KINDS["ollama"])
    node.state = NodeState.DOWN if state == "down" else NodeState.HEALTHY
    node.draining = state == "draining"
    if state == "left alone":
        permit = node.breaker.acquire()
        assert permit is not None
        permit.fail("cut")
    candidate = Candidate(node, "m")

    loads.start(candidate, Job(Request("r", Operation.CHAT, "m", b"", {})))
    seat = loads.forecast.seat(candidate)
    begun = seat.loading is not None
    assert seat.work.loads_alone == int(begun)
    await asyncio.sleep(0)
    await loads.close()

    assert begun == (state == "healthy")
    assert seat.work.loads_alone == 0
    assert asking.loaded == (["m"] if begun else [])
