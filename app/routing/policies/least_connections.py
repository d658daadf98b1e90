"""The node with the fewest requests in flight for its weight comes first."""

from __future__ import annotations

from app.routing.registry import Candidate

# A cold model costs seconds to load: worth waiting behind about this many requests on a node that has it in memory.
_COLD_REQUESTS = 2


class LeastConnections:
    """By (in flight + 1) / weight; the request about to be placed counts. Ties go to the node chosen longest ago."""

    def rank(self, candidates: list[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=_load) if len(candidates) > 1 else candidates


def _load(candidate: Candidate) -> tuple[float, int]:
    node = candidate.node
    cold = 0 if node.holds(candidate.model) else _COLD_REQUESTS
    return (node.in_flight + 1 + cold) / node.spec.weight, node.picked
