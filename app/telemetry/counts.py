"""Counts what requests and attempts came to. Runs at the end of every request, and so must be cheap."""

from __future__ import annotations

from collections.abc import Iterable

from app.domain import MICRO_DOLLARS, AttemptRecord, Usage, tier_name
from app.errors import RateLimited
from app.routing.ended import Ended
from app.routing.registry import Node
from app.routing.trail import UNROUTED, Trail
from app.telemetry.tallies import Count, Family, Spread

_FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 60, 120, 300)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1)
_WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)
_QUEUE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)


class Counts:
    """A report of requests, and an observer of attempts."""

    def __init__(self) -> None:
        served = ("node", "tier")
        self._requests = Count(
            "hearth_requests_total",
            "Client requests by what became of them. The node is the one that was asked last.",
            *("operation", "route", "tier", "node", "outcome", "fallback"),
        )
        self._attempts = Count("hearth_attempts_total", "Attempts on nodes.", "node", "outcome", "failure")
        self._fallbacks = Count(
            "hearth_fallbacks_total", "Requests not served by their first choice, by reason.", "reason"
        )
        self._turns = Count(
            "hearth_continuations_total",
            "Streams whose node died after they had begun, by what became of them.",
            "outcome",
        )
        self._leaks = Count(
            "hearth_leaked_prefill_sessions_total",
            "Caches that a prefill node holds for ever, as nobody can name them.",
            "node",
        )
        self._limited = Count("hearth_rate_limited_total", "Requests refused as their key had asked for too much.")
        self._unpaid = Count(
            "hearth_spending_refused_total", "Requests for which the cloud could not be paid, by why.", "code"
        )
        self._tokens = Count("hearth_tokens_total", "Tokens, as the nodes counted them.", *served, "direction")
        self._guessed = Count(
            "hearth_estimated_tokens_total", "Tokens of answers that no node counted.", *served, "direction"
        )
        self._spent = Count("hearth_spend_dollars_total", "What requests cost.", *served, unit=MICRO_DOLLARS)
        self._saved = Count(
            "hearth_saved_dollars_total",
            "What the cloud would have cost in the place of local nodes.",
            "node",
            unit=MICRO_DOLLARS,
        )
        self._first_token = Spread(
            "hearth_time_to_first_token_seconds",
            "From the request to its first content.",
            _FIRST_TOKEN_BUCKETS,
            *served,
        )
        self._each_token = Spread(
            "hearth_time_per_output_token_seconds",
            "Of streams, from the first token to the last, by token.",
            _TOKEN_BUCKETS,
            *served,
        )
        self._whole = Spread(
            "hearth_request_seconds",
            "From the request to its last byte, where there was content.",
            _WHOLE_BUCKETS,
            *served,
        )
        self._queued = Spread(
            "hearth_queue_seconds",
            "How long requests waited for a free node, of those that had to.",
            _QUEUE_BUCKETS,
            "route",
        )
        self._refused = Count(
            "hearth_queue_refused_total", "Requests that got no place on a local node, by why.", "route", "reason"
        )
        self.families: tuple[Family, ...] = (
            self._requests,
            self._attempts,
            self._fallbacks,
            self._turns,
            self._leaks,
            self._limited,
            self._unpaid,
            self._tokens,
            self._guessed,
            self._spent,
            self._saved,
            self._first_token,
            self._each_token,
            self._whole,
            self._queued,
            self._refused,
        )

    def attempt(self, node: Node, record: AttemptRecord) -> None:
        """Counts one settled attempt."""
        self._attempts.add((record.node, record.outcome, record.failure or ""))

    def leak(self, node: Node) -> None:
        """Counts one cache that a prefill node cannot be told to free."""
        self._leaks.add((node.name,))

    def booked(self, trail: Trail, usage: Usage, estimated: bool, cost: int) -> None:
        """Counts what only the ledger knows of a request. Money is in micro-dollars."""
        tier = tier_name(trail.tier)
        if cost:
            self._spent.add((trail.node, tier), cost)
        if estimated:
            self._guessed.add((trail.node, tier, "prompt"), usage.prompt_tokens)
            self._guessed.add((trail.node, tier, "completion"), usage.completion_tokens)

    def saved(self, amounts: Iterable[tuple[str, int]]) -> None:
        """Counts what nodes have saved, in micro-dollars."""
        for node, amount in amounts:
            if amount:
                self._saved.add((node,), amount)

    def __call__(self, ended: Ended) -> None:
        """Counts one request that is over."""
        trail = ended.trail
        node = trail.node
        tier = tier_name(trail.tier) if node else ""
        fallback = trail.fallback
        self._requests.add((ended.operation, trail.route or UNROUTED, tier, node, ended.outcome, fallback))
        if fallback:
            self._fallbacks.add((fallback,))
        for turn in trail.turns:
            self._turns.add((turn,))
        if trail.queued_seconds:
            self._queued.add((trail.route,), trail.queued_seconds)
        if trail.queue_refusal:
            self._refused.add((trail.route, trail.queue_refusal))
        if trail.unpaid is not None:
            self._unpaid.add((trail.unpaid[0] or "",))
        if isinstance(ended.error, RateLimited):
            self._limited.add(())
        if trail.first_content is not None:
            self._served((node, tier), ended)
        if trail.usage is not None:
            prompt, completion, cached = trail.usage
            self._tokens.add((node, tier, "prompt"), prompt)
            self._tokens.add((node, tier, "completion"), completion)
            if cached:
                self._tokens.add((node, tier, "cached"), cached)

    def _served(self, who: tuple[str, str], ended: Ended) -> None:
        trail = ended.trail
        assert trail.first_content is not None
        first_seconds = trail.first_content - trail.started
        self._first_token.add(who, first_seconds)
        self._whole.add(who, ended.seconds)
        if ended.request is not None and ended.request.stream:
            tokens = trail.events if trail.usage is None else trail.usage.completion_tokens
            if tokens > 1:
                self._each_token.add(who, (ended.seconds - first_seconds) / (tokens - 1))
