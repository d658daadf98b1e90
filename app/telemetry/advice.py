"""What the operator should change: each warning once for every node and model."""

from __future__ import annotations

from app.domain import LOCAL_TIER
from app.routing.names import matches
from app.routing.registry import Candidate
from app.routing.routes import DIRECT, Route
from app.routing.trail import Trail
from app.telemetry.logs import Logger

_REMEMBERED = 1000  # names may come from clients


class Advice:
    """Hears of what looks like a wrong setting."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._given: set[tuple[str, str, str]] = set()

    def missing(self, candidate: Candidate, route: Route) -> None:
        """A node says that it does not have a model, which it lists itself or the operator named."""
        named_in = _named_in(candidate, route)
        if named_in and self._first("missing", candidate.node.name, candidate.model):
            self._log.warning(
                "a node does not have the model that it is asked for; correct the name, or load the model there",
                node=candidate.node.name,
                model=candidate.model,
                route=route.name,
                named_in=named_in,
            )

    def filled(self, trail: Trail) -> None:
        """A prompt filled the whole context of its node."""
        if self._first("filled", trail.node, trail.model):
            remedy = "raise num_ctx of the node or the route" if trail.tier == LOCAL_TIER else "shorten the prompt"
            self._log.warning(
                f"a prompt filled the whole context, so that its beginning was probably cut off; {remedy}",
                node=trail.node,
                model=trail.model,
                route=trail.route,
                context=trail.context_filled,
            )

    def _first(self, *what: str) -> bool:
        subject, node, model = what
        key = (subject, node, model)
        if key in self._given or len(self._given) >= _REMEMBERED:
            return False
        self._given.add(key)
        return True


def _named_in(candidate: Candidate, route: Route) -> str | None:
    """Where the name of the model stands that a node was asked for; None when only its client named it."""
    node, model = candidate.node, candidate.model
    named = route.cloud if node.cloud else route.local
    if route.name != DIRECT and named is not None:
        return "MODEL_MAP"
    if node.cloud and model == node.spec.default_model:
        return "the cloud target's model"
    if any(matches(pattern, model) for pattern in node.spec.models):
        return "the node's models"
    return "the node's own list" if model in (node.models or ()) else None
