"""Which node next. A policy is one module here and one row in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from app.routing.policies.least_connections import LeastConnections
from app.routing.policies.min_expected_latency import MinExpectedLatency
from app.routing.policies.min_observed_latency import MinObservedLatency
from app.routing.policies.random import Random
from app.routing.policies.round_robin import RoundRobin
from app.routing.policies.weighted import Weighted
from app.routing.registry import Candidate


class Policy(Protocol):
    """Orders candidates, best first. Called once per attempt; the first one with a free slot is taken."""

    def rank(self, candidates: list[Candidate]) -> list[Candidate]: ...


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_connections": LeastConnections,
    "weighted": Weighted,
    "random": Random,
    "min_expected_latency": MinExpectedLatency,
    "min_observed_latency": MinObservedLatency,
}
