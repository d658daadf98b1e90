"""What is measured, under which names and labels.

Label values are bounded: configured or listed names, enums and statuses, never a client's string.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.domain import AttemptRecord, NodeState, Operation, Outcome, tier_name
from app.routing.admission import Admission
from app.routing.registry import Node, Registry
from app.routing.trail import Trail
from app.telemetry.tallies import Count, Spread

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120, 300)
_WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)
_CACHE_SECONDS = 1.0


class Metrics:
    """Counts what requests and attempts came to, and reads the nodes' state when it is scraped."""

    def __init__(self, nodes: Registry, admission: Admission) -> None:
        self._requests = Count(
            "hearth_requests",
            "Client requests by what became of them.",
            *("operation", "route", "tier", "node", "outcome"),
        )
        self._attempts = Count("hearth_attempts", "Attempts on nodes.", "node", "outcome", "failure")
        self._fallbacks = Count("hearth_fallbacks", "Requests not served by their first choice, by reason.", "reason")
        self._leaks = Count(
            "hearth_leaked_prefill_sessions",
            "Caches that a prefill node holds for ever, as nobody can name them.",
            "node",
        )
        self._tokens = Count("hearth_tokens", "Tokens, as the nodes counted them.", "node", "tier", "direction")
        self._first_token = Spread(
            "hearth_time_to_first_token_seconds",
            "From the request to its first content.",
            _FIRST_TOKEN_BUCKETS,
            *("node", "tier"),
        )
        self._whole = Spread(
            "hearth_request_seconds", "From the request to its last byte.", _WHOLE_BUCKETS, "node", "tier"
        )
        self._registry = CollectorRegistry()
        for collector in (
            _Nodes(nodes, admission),
            *(
                self._requests,
                self._attempts,
                self._fallbacks,
                self._leaks,
                self._tokens,
                self._first_token,
                self._whole,
            ),
        ):
            self._registry.register(collector)
        self._rendered = (0.0, b"")
        self._rendering = asyncio.Lock()

    def attempt(self, node: Node, record: AttemptRecord) -> None:
        """Counts one settled attempt."""
        self._attempts.add((node.name, record.outcome, record.failure or ""))

    def leak(self, node: Node) -> None:
        """Counts one cache that a prefill node cannot be told to free."""
        self._leaks.add((node.name,))

    def request(self, operation: Operation, trail: Trail, outcome: Outcome) -> None:
        """Counts one finished request."""
        node = trail.node
        tier = tier_name(trail.tier) if node else ""
        self._requests.add((operation, trail.route, tier, node, outcome))
        if trail.fallback:
            self._fallbacks.add((trail.fallback,))
        if trail.first_content is not None:
            self._first_token.add((node, tier), trail.first_content - trail.started)
            self._whole.add((node, tier), trail.seconds())
        if trail.usage is not None:
            self._tokens.add((node, tier, "prompt"), trail.usage.prompt_tokens)
            self._tokens.add((node, tier, "completion"), trail.usage.completion_tokens)

    async def render(self) -> bytes:
        """The exposition text, made off the loop and kept for a second."""
        async with self._rendering:
            made, text = self._rendered
            if time.monotonic() - made > _CACHE_SECONDS:
                text = await asyncio.to_thread(generate_latest, self._registry)
                self._rendered = (time.monotonic(), text)
        return text


class _Nodes(Collector):
    """What the registry knows, at the moment of the scrape."""

    def __init__(self, nodes: Registry, admission: Admission) -> None:
        self._nodes = nodes
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily("hearth_in_flight", "Requests on the node now.", labels=("node",))
        state = GaugeMetricFamily("hearth_node_state", "1 for the node's state, else 0.", labels=("node", "state"))
        breaker = GaugeMetricFamily("hearth_breaker_open", "1 while the node is left alone.", labels=("node",))
        for node in list(self._nodes):
            in_flight.add_metric([node.name], node.in_flight)
            breaker.add_metric([node.name], float(node.breaker.state != "closed"))
            for each in NodeState:
                state.add_metric([node.name, each.value], float(node.state is each))
        waiting = GaugeMetricFamily("hearth_waiting", "Requests that wait for a free node.")
        waiting.add_metric([], self._admission.waiting)
        yield from (in_flight, state, breaker, waiting)
