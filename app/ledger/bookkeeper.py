"""Writes down what became of every request."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from app.domain import LOCAL_TIER, NodeSpec, Operation, Outcome, Request, Usage
from app.errors import HearthError
from app.ledger.estimates import TokenEstimator
from app.ledger.rows import RequestRow
from app.ledger.tariffs import Tariff
from app.routing.ended import Ended
from app.routing.trail import Trail

_NONE = Usage(0, 0)

OnFigures = Callable[[Trail, Usage, bool, int], None]  # trail, usage, whether it is a guess, cost (micro-dollars)


class RequestLog(Protocol):
    """Where rows go."""

    def add(self, row: Callable[[], RequestRow]) -> None: ...


class Prices(Protocol):
    """Who knows what a model costs, without waiting."""

    def known(self, node: NodeSpec, model: str) -> Tariff | None: ...


class Bookkeeper:
    """Makes the ledger's row of a request."""

    def __init__(
        self,
        log: RequestLog,
        prices: Prices,
        estimator: TokenEstimator,
        *,
        instance: str,
        in_the_cloud: Callable[[str], tuple[NodeSpec, str] | None],
        on_figures: OnFigures = lambda trail, usage, estimated, cost: None,
    ) -> None:
        """`in_the_cloud` says who would serve a model there, and as what. `on_figures` hears of what is not zero."""
        self._log = log
        self._prices = prices
        self._estimator = estimator
        self._instance = instance
        self._in_the_cloud = in_the_cloud
        self._on_figures = on_figures

    def __call__(self, ended: Ended) -> None:
        """Takes a request that is over. One that never reached a route has no row."""
        request, request_id, operation, trail, outcome, error, seconds = ended
        if request is None or not trail.route:
            return
        usage, estimated = trail.usage, False
        if usage is None:
            usage, estimated = self._guess(request, trail)
        else:
            self._estimator.learn(request, usage)
        local = trail.tier == LOCAL_TIER and trail.node != ""
        cost, spec = trail.cost, trail.spec
        if local and spec is not None and spec.price is not None:
            cost += self._local_cost(spec, trail.model, usage)
        if cost or estimated:
            self._on_figures(trail, usage, estimated, cost)
        end = (time.time(), seconds, operation, outcome, "" if error is None else _code(ended))
        instead = request.model if local and outcome is Outcome.OK else None
        # Made when it is written, with many others: here, between other things, it would take twice as long.
        self._log.add(partial(self._row, trail, request_id, request.caller.id, end, usage, estimated, cost, instead))

    def _row(
        self,
        trail: Trail,
        request_id: str,
        key: str,
        end: tuple[float, float, Operation, Outcome, str],
        usage: Usage,
        estimated: bool,
        cost: int,
        instead: str | None,
    ) -> RequestRow:
        """`instead` is the model that the cloud would have been asked for."""
        now, seconds, operation, outcome, code = end
        first_content = trail.first_content
        values = (
            trail.row,
            request_id,
            round((now - seconds) * 1000),
            self._instance,
            key,
            str(operation),  # databases' drivers are slow to find out what an enum's member is
            trail.route,
            trail.model,
            trail.node,
            trail.tier,
            str(outcome),
            code,
            trail.fallback,
            trail.tried,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            estimated,
            cost,
            0 if instead is None else self._saved(instead, usage),
            round(trail.queued_seconds * 1000),
            None if first_content is None else round((first_content - trail.started) * 1000),
            round(seconds * 1000),
        )
        return tuple.__new__(RequestRow, values)  # `_make` would count them, which costs as much again

    def _guess(self, request: Request, trail: Trail) -> tuple[Usage, bool]:
        """What it took, where no node counted; and whether it took anything."""
        if trail.first_content is None:
            return _NONE, False
        return Usage(self._estimator.estimate_prompt(request), self._written(request, trail)), True

    def _written(self, request: Request, trail: Trail) -> int:
        if request.stream:
            return trail.events
        return self._estimator.estimate_text(request.model, trail.document_bytes)

    def _local_cost(self, spec: NodeSpec, model: str, usage: Usage) -> int:
        """By the operator's figure."""
        tariff = self._prices.known(spec, model)
        return 0 if tariff is None else tariff.cost(usage)

    def _saved(self, model: str, usage: Usage) -> int:
        """What the cloud would have cost; 0 when there is none, or nobody knows."""
        elsewhere = self._in_the_cloud(model)
        if elsewhere is None:
            return 0
        tariff = self._prices.known(*elsewhere)
        return 0 if tariff is None else tariff.cost(usage)


def _code(ended: Ended) -> str:
    return ended.code or (ended.error.type if isinstance(ended.error, HearthError) else "")
