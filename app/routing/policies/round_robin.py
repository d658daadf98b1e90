"""The node that was chosen longest ago comes first."""

from __future__ import annotations

from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.registry import Candidate


class RoundRobin(Policy):
    """In turn over whichever nodes can serve, so that one node's absence leaves no gap in the order."""

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: candidate.node.picked)

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        return [{"score": candidate.node.picked} for candidate in candidates]
