"""What a client is told when nobody could serve its request."""

from __future__ import annotations

from collections.abc import Callable

from app.domain import Failure
from app.errors import (
    AllAttemptsFailed,
    Forbidden,
    HearthError,
    NodeFailure,
    RequestRefused,
    SpendingRefused,
    Unavailable,
)
from app.routing.obstacles import obstacles, state_of
from app.routing.plan import Plan
from app.routing.registry import Candidate, Node

_RETRY_AFTER_SECONDS = 2.0
_TIMEOUTS = (Failure.CONNECT_TIMEOUT, Failure.FIRST_TOKEN_TIMEOUT, Failure.IDLE_TIMEOUT, Failure.DEADLINE)


def nobody_left(plan: Plan) -> HearthError:
    """The error that ends a request: it names every node that was tried or could not be, and why.

    The first cause decides when the prompt was too long for a node, and others that might have had room failed; and
    when others failed, and it was too long for those that were left.
    """
    if plan.too_long is not None and plan.failures[0][1].failure is Failure.CONTEXT_TOO_SMALL:
        return _too_long(plan, plan.too_long)
    if plan.unpaid is not None:
        return _unpaid(plan, plan.unpaid)
    if plan.failures:
        return _all_failed(plan)
    if plan.route.local is None and plan.cloud_refusal is not None:
        return Forbidden(f"only the cloud serves this model, and {plan.cloud_refusal}", code="local_only")
    return _none_available(plan)


def _unpaid(plan: Plan, unpaid: SpendingRefused) -> SpendingRefused:
    """Only the cloud was left, and could not be paid. What local nodes said comes along."""
    if plan.route.local is None:
        return unpaid
    error = SpendingRefused(
        f"{unpaid.message}; and {_local_note(plan)}",
        code=unpaid.code,
        status=unpaid.status,
        retry_after_seconds=min(unpaid.retry_after_seconds or _RETRY_AFTER_SECONDS, _local_retry_after(plan)),
    )
    error.logged = f"{unpaid.logged}; and no local node served it"
    return error


def _too_long(plan: Plan, refusal: RequestRefused) -> RequestRefused:
    """The node's own words, and what became of those with a larger context."""
    others = [failed for failed in plan.failures if failed[1].failure is not Failure.CONTEXT_TOO_SMALL]
    if not others:
        return refusal
    tried = _listed(others, lambda failure: failure.message)
    return RequestRefused(
        f"{refusal.message}; nodes with a larger context failed ({tried})",
        status=refusal.status,
        type=refusal.type,
        param=refusal.param,
        code=refusal.code,
    )


def _local_note(plan: Plan) -> str:
    if plan.failures:
        return f"every node that was tried failed ({_tried(plan, lambda failure: failure.message)})"
    return f"no local node can serve this model now ({_local_state(plan)})"


def _all_failed(plan: Plan) -> AllAttemptsFailed:
    last = next(why for _, why in reversed(plan.failures) if why.failure is not Failure.CONTEXT_TOO_SMALL)
    busy = [failure for _, failure in plan.failures if failure.failure is Failure.BUSY]
    retry_after = max((failure.retry_after_seconds or _RETRY_AFTER_SECONDS for failure in busy), default=None)
    return AllAttemptsFailed(
        _every_failed(plan, lambda failure: failure.message),
        logged=_every_failed(plan, lambda failure: failure.summary),
        status=_status(last),
        code=last.failure.value,
        retry_after_seconds=retry_after,
    )


def _status(failure: NodeFailure) -> int:
    """A node's own 429 or 503 stays; every other breakage of a node is a bad gateway, or its silence a timeout."""
    if failure.failure is Failure.BUSY:
        return failure.status if failure.status in (429, 503) else 503
    if failure.failure in _TIMEOUTS:
        return 504
    if failure.failure is Failure.MODEL_MISSING:
        return 404
    return 502


def _every_failed(plan: Plan, words: Callable[[NodeFailure], str]) -> str:
    return f"every node that was tried failed ({_tried(plan, words)}){_cloud_note(plan)}"


def _tried(plan: Plan, words: Callable[[NodeFailure], str]) -> str:
    return _listed(plan.failures, words)


def _listed(failures: list[tuple[Candidate, NodeFailure]], words: Callable[[NodeFailure], str]) -> str:
    return "; ".join(f"{candidate.node.name}: {_said(failure, words(failure))}" for candidate, failure in failures)


def _said(failure: NodeFailure, words: str) -> str:
    return f"{failure.failure.value.replace('_', ' ')}: {words}" if words else failure.failure.value


def _none_available(plan: Plan) -> Unavailable:
    return Unavailable(
        f"no node can serve this model now ({_local_state(plan)}){_cloud_note(plan)}",
        retry_after_seconds=_local_retry_after(plan),
    )


def _local_state(plan: Plan) -> str:
    nodes = plan.local_nodes() or (plan.cloud_nodes() if plan.route.local is None else [])
    if not nodes:
        return "no local node is configured; set LOCAL_NODES"
    return "; ".join(f"{node.name}: {_why_not(node)}" for node in nodes)


def _local_retry_after(plan: Plan) -> float:
    waits = [wait for node in plan.local_nodes() if (wait := node.breaker.retry_after_seconds())]
    return min(waits, default=_RETRY_AFTER_SECONDS)


def _why_not(node: Node) -> str:
    return next((obstacle.message for obstacle in obstacles(node)), state_of(node))


def _cloud_note(plan: Plan) -> str:
    if plan.cloud_refusal is not None and plan.has_cloud():
        return f"; the cloud was not asked: {plan.cloud_refusal}"
    return ""
