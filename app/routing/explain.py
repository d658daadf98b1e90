"""What would become of a request, decided by what decides in earnest: nothing is sent, kept or counted.

A document for people and JSON. Every reason has a `code` for programs and a `message` for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.domain import MICRO_DOLLARS, Budget, Rate, Request, Role, tier_name
from app.errors import HearthError, ModelNotFound
from app.routing.admission import Outlook
from app.routing.choice import Choice, Step
from app.routing.dispatch import Dispatcher
from app.routing.gate import NO_CLOUD, Quote
from app.routing.obstacles import Obstacle
from app.routing.plan import Plan
from app.routing.policies.base import Terms
from app.routing.queue import PRIORITIES
from app.routing.registry import Candidate, Node, Registry
from app.routing.routes import Route
from app.routing.trail import Trail
from app.routing.verdict import nobody_left
from app.routing.windows import least_tokens, window

Document = dict[str, Any]


class Explainer:
    """Explains for one gateway. `policy` is the name of the policy that `choice` goes by."""

    def __init__(
        self, *, registry: Registry, dispatcher: Dispatcher, choice: Choice, policy: str, max_attempts: int
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._choice = choice
        self._policy = policy
        self._max_attempts = max_attempts

    async def explain(self, request: Request) -> Document:
        """Who would be asked for it now, in which order, and why not the others.

        `error` is what the client would be told when nobody can be asked, as with a name that nobody serves. Raises
        `LedgerUnavailable` where budgets cannot be read.
        """
        document: Document = {
            "asked": request.model,
            "operation": request.operation.value,
            "key": {"id": request.caller.id, "name": request.caller.name} if request.caller.id else None,
            "policy": {"name": self._policy, "lots": self._choice.policy.lots or None},
            "max_attempts": self._max_attempts,
        }
        try:
            plan = self._plan(request)
        except ModelNotFound as error:
            return {**document, "route": None, **_nothing(error)}
        return {**document, "route": _route(plan.route), **await self._of_plan(plan)}

    def _plan(self, request: Request) -> Plan:
        return self._dispatcher.plan(request, Trail())

    async def _of_plan(self, plan: Plan) -> Document:
        quotes = await self._quotes(plan)
        rehearsed = self._plan(plan.request)
        steps = await self._choice.rehearse(rehearsed, self._max_attempts)
        order = [self._step(plan, steps, position) for position in range(len(steps))]
        positions = {step.candidate.node: position for position, step in enumerate(steps, start=1)}
        terms = self._terms(plan)
        nodes = [
            self._node(plan, node, quotes.get(node), terms.get(node), positions.get(node))
            for node in [*self._registry.local(), *self._registry.cloud()]
        ]
        return {
            "nodes": nodes,
            "pairs": [_pair(*sides) for sides in plan.pairs()],
            "order": order,
            "queue": _queue(self._choice.outlook(plan), steps, terms),
            "cloud": _cloud(plan, quotes),
            "error": None if steps else _error(nobody_left(rehearsed)),
        }

    async def _quotes(self, plan: Plan) -> dict[Node, Quote]:
        """What paying for each cloud target would be told, whether or not its turn comes."""
        purse, quotes = self._choice.purse, dict[Node, Quote]()
        if purse is not None:
            for node in self._registry.cloud():
                name = node.cloud_name(plan.route.cloud)
                if name is not None:
                    quotes[node] = await purse.look(plan.request, plan.route, Candidate(node, name))
        return quotes

    def _terms(self, plan: Plan) -> dict[Node, Terms]:
        candidates = plan.local()
        return {
            candidate.node: terms
            for candidate, terms in zip(
                candidates, self._choice.policy.terms(candidates, self._choice.job(plan)), strict=True
            )
        }

    def _step(self, plan: Plan, steps: Sequence[Step], position: int) -> Document:
        """Only the first one's `fallback` is known: that of the others is how the one before fails."""
        step = steps[position]
        node = step.candidate.node
        known = position == 0 or steps[position - 1].waits
        return {
            "node": node.name,
            "tier": tier_name(node.spec.tier),
            "model": step.candidate.model,
            "candidates": step.candidates,
            "fallback": (step.fallback or None) if known else "how_the_one_before_fails",
            "waits_seconds_at_most": self._choice.queue_seconds(plan) if step.waits else None,
            "last_resort": step.last_resort,
        }

    def _node(self, plan: Plan, node: Node, quote: Quote | None, terms: Terms | None, position: int | None) -> Document:
        candidate = plan.candidate(node)
        dropped = list(_dropped(plan, node, candidate, quote))
        return {
            "name": node.name,
            "tier": tier_name(node.spec.tier),
            "kind": node.kind.name if node.kind else None,
            "state": node.state.value,
            "reason": node.reason or None,
            "model": candidate.model if candidate else None,
            "kept": not dropped,
            "dropped": [_obstacle(each) for each in dropped],
            "remarks": [_obstacle(each) for each in _remarks(plan, candidate, dropped, position)],
            "position": position,
            "terms": None if terms is None else {name: round(value, 6) for name, value in terms.items()},
            "in_flight": node.in_flight_everywhere,
            "engine": None if node.engine is None else {**node.engine._asdict(), "foreign": node.foreign},
            "max_concurrency": node.spec.max_concurrency,
            "context": None if candidate is None else window(candidate, plan.route.num_ctx),
        }


def _dropped(plan: Plan, node: Node, candidate: Candidate | None, quote: Quote | None) -> Iterable[Obstacle]:
    """Why the node would not be asked, all there is."""
    if node.cloud:
        if plan.cloud_refusal is not None:
            yield Obstacle("cloud_refused", plan.cloud_refusal)
        if quote is not None and quote.refusal is not None:
            yield Obstacle(quote.refusal.code or "unpaid", quote.refusal.message)
    if candidate is None:
        yield _not_serving(plan.route, node)
    elif not plan.has_role(node):
        yield Obstacle("role", f"it only does the {node.spec.role.value} of a pair")
    yield from plan.obstacles(node)


def _not_serving(route: Route, node: Node) -> Obstacle:
    if node.cloud:
        named = route.cloud or "no model by default"
        return Obstacle("model_absent", f"it may not be asked for {named}; see CLOUD_MODEL and MODEL_MAP")
    if route.local is None:
        return Obstacle("cloud_only", f"the route {route.name} names no local model")
    if node.models is None:
        return Obstacle("models_unknown", "it was not reached yet, so that its models are not known")
    return Obstacle("model_absent", f"it does not list {route.local[:100]}")


def _remarks(
    plan: Plan, candidate: Candidate | None, dropped: Sequence[Obstacle], position: int | None
) -> Iterable[Obstacle]:
    """What else matters of a node that is kept."""
    if candidate is None or dropped:
        return
    node = candidate.node
    if plan.comes_late(candidate):
        tokens, room = least_tokens(plan.request), window(candidate, plan.route.num_ctx)
        yield Obstacle("context_too_small", f"asked last: the prompt has {tokens} tokens at least, and {room} fit")
    if node.full:
        yield Obstacle("full", f"all of its {node.spec.max_concurrency} places are taken")
    if seconds := node.busy_seconds():
        yield Obstacle("busy", "it said that it is busy, and is asked last in its tier", round(seconds, 1))
    if node.foreign:
        yield Obstacle("foreign", "requests that came by another way than Hearth are there", node.foreign)
    if not node.holds(candidate.model):
        yield Obstacle("cold", "the model is not in its memory, and has to be loaded")
    if position is None:
        yield Obstacle("not_reached", "its turn would not come: see `order` and MAX_ATTEMPTS")


def _nothing(error: HearthError) -> Document:
    return {"nodes": [], "pairs": [], "order": [], "queue": None, "cloud": None, "error": _error(error)}


def _queue(outlook: Outlook, steps: Sequence[Step], terms: Mapping[Node, Terms]) -> Document:
    """Whether the request would have to wait, and what for."""
    standing, expected = outlook.standing, outlook.expected_seconds
    first = steps[0] if steps else None
    slot_seconds = terms.get(first.candidate.node, {}).get("slot_seconds", 0.0) if first is not None else 0.0
    waits = first is not None and (first.waits or slot_seconds > 0)
    if slot_seconds > 0 and (expected is None or not outlook.waiting):
        expected = slot_seconds
    return {
        "waits": waits,
        "refusal": outlook.refusal if waits else None,
        "priority": PRIORITIES[standing.rank].value,
        "weight": standing.weight,
        "waiting": outlook.waiting,
        "size": standing.size,
        "ahead": outlook.ahead,
        "served_per_second": None if outlook.per_second is None else round(outlook.per_second, 3),
        "expected_seconds": round(expected, 3) if waits and expected is not None else None,
        "seconds_at_most": outlook.seconds_at_most,
    }


def _route(route: Route) -> Document:
    return {
        "name": route.name,
        "local": route.local,
        "cloud": route.cloud,
        "cloud_allowed": route.cloud_allowed,
        "local_only": route.local_only,
        "num_ctx": route.num_ctx,
    }


def _cloud(plan: Plan, quotes: dict[Node, Quote]) -> Document:
    targets = plan.cloud_nodes()
    refusals = [quote.refusal for quote in quotes.values() if quote.refusal is not None]
    why = plan.cloud_refusal or (None if targets else NO_CLOUD)
    if why is None and targets and len(refusals) == len(targets):
        why = refusals[0].message
    return {
        "allowed": why is None,
        "why": why or _when(plan),
        "targets": [_target(node, quotes.get(node)) for node in targets],
    }


def _when(plan: Plan) -> str:
    return "the route has no local model" if plan.route.local is None else "when no local node can serve it"


def _target(node: Node, quote: Quote | None) -> Document:
    budgets = quote.budgets if quote else ()
    refusal = quote.refusal if quote else None
    return {
        "node": node.name,
        "price_at_most_usd": None if quote is None or quote.at_most is None else _usd(quote.at_most),
        "budgets": [
            {"scope": each.scope, **_budget(each.budget), "spent_usd": _usd(each.spent), "refuses": each.refuses}
            for each in budgets
        ],
        "rate": _rate(node.spec.rate),
        "refusal": None if refusal is None else _error(refusal),
    }


def _budget(budget: Budget) -> Document:
    return {"period": budget.period.value, "limit_usd": _usd(budget.limit)}


def _rate(rate: Rate | None) -> Document | None:
    return None if rate is None else rate._asdict()


def _pair(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Document:
    return {
        Role.PREFILL.value: [each.node.name for each in prefills],
        Role.DECODE.value: [each.node.name for each in decodes],
    }


def _error(error: HearthError) -> Document:
    return {"status": error.status, "code": error.code, "message": error.message}


def _obstacle(obstacle: Obstacle) -> Document:
    return obstacle._asdict()


def _usd(micro_dollars: int) -> float:
    return micro_dollars / MICRO_DOLLARS
