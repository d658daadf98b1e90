"""Which node next. A policy is one module here and one row in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.routing.policies.base import Policy
from app.routing.policies.least_connections import LeastConnections
from app.routing.policies.min_expected_latency import MinExpectedLatency
from app.routing.policies.min_observed_latency import MinObservedLatency
from app.routing.policies.random import Random
from app.routing.policies.round_robin import RoundRobin
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.policies.weighted import Weighted

__all__ = ["POLICIES", "Policy"]

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "shortest_expected_delay": ShortestExpectedDelay,
    "round_robin": RoundRobin,
    "least_connections": LeastConnections,
    "weighted": Weighted,
    "random": Random,
    "min_expected_latency": MinExpectedLatency,
    "min_observed_latency": MinObservedLatency,
}
