"""Prometheus metrics. The only module that knows prometheus-client.

Label values are bounded: configured or listed names, enums and statuses, never a client's string.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.domain import AttemptRecord, NodeState, Operation, Outcome, tier_name
from app.routing.admission import Admission
from app.routing.registry import Node, Registry
from app.routing.trail import Trail

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120, 300)
_WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)
_CACHE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Served:
    """What is counted of the requests that one node answered."""

    first_token: Histogram
    whole: Histogram
    prompt: Counter
    completion: Counter


class Metrics:
    """Counts what requests and attempts came to, and reads the nodes' state when it is scraped."""

    def __init__(self, nodes: Registry, admission: Admission) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
        self._registry = CollectorRegistry()
        self._registry.register(_Nodes(nodes, admission))
        self._requests = self._counter(
            "requests", "Client requests by what became of them.", "operation", "route", "tier", "node", "outcome"
        )
        self._attempts = self._counter("attempts", "Attempts on nodes.", "node", "outcome", "failure")
        self._fallbacks = self._counter("fallbacks", "Requests not served by their first choice, by reason.", "reason")
        self._tokens = self._counter("tokens", "Tokens, as the nodes counted them.", "node", "tier", "direction")
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first content.", _FIRST_TOKEN_BUCKETS
        )
        self._whole = self._histogram("request_seconds", "From the request to its last byte.", _WHOLE_BUCKETS)
        self._children: dict[tuple[Counter, tuple[str, ...]], Counter] = {}
        self._served: dict[str, _Served] = {}
        self._rendered = (0.0, b"")
        self._rendering = asyncio.Lock()

    def attempt(self, node: Node, record: AttemptRecord) -> None:
        """Counts one settled attempt."""
        self._child(self._attempts, node.name, record.outcome, record.failure or "").inc()

    def request(self, operation: Operation, trail: Trail, outcome: Outcome) -> None:
        """Counts one finished request."""
        tier = tier_name(trail.tier) if trail.node else ""
        self._child(self._requests, operation, trail.route, tier, trail.node, outcome).inc()
        if trail.fallback:
            self._child(self._fallbacks, trail.fallback).inc()
        if trail.first_content is not None:
            served = self._served.get(trail.node) or self._serve(trail.node, tier)
            served.first_token.observe(trail.first_content - trail.started)
            served.whole.observe(trail.seconds())
            if trail.usage is not None:
                served.prompt.inc(trail.usage.prompt_tokens)
                served.completion.inc(trail.usage.completion_tokens)

    def _serve(self, node: str, tier: str) -> _Served:
        """A node's own metrics, found once: prometheus-client's look-up by labels costs more than the counting."""
        served = self._served[node] = _Served(
            self._first_token.labels(node, tier),
            self._whole.labels(node, tier),
            self._tokens.labels(node, tier, "prompt"),
            self._tokens.labels(node, tier, "completion"),
        )
        return served

    async def render(self) -> bytes:
        """The exposition text, made off the loop and kept for a second."""
        async with self._rendering:
            made, text = self._rendered
            if time.monotonic() - made > _CACHE_SECONDS:
                text = await asyncio.to_thread(generate_latest, self._registry)
                self._rendered = (time.monotonic(), text)
        return text

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"hearth_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(f"hearth_{name}", text, ("node", "tier"), registry=self._registry, buckets=tuple(buckets))

    def _child(self, metric: Counter, *labels: str) -> Counter:
        key = (metric, labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child


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
