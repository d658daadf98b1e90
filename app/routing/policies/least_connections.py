"""The node with the fewest requests in flight for its weight comes first."""

from __future__ import annotations

from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.policies.load import unfinished
from app.routing.registry import Candidate


class LeastConnections(Policy):
    """By (in flight + 1) / weight; the request about to be placed counts. Ties go to the node chosen longest ago."""

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        return sorted(candidates, key=_load) if len(candidates) > 1 else candidates

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        return [{"score": _load(candidate)[0], "unfinished": unfinished(candidate)} for candidate in candidates]


def _load(candidate: Candidate) -> tuple[float, int]:
    return unfinished(candidate) / candidate.node.spec.weight, candidate.node.picked
