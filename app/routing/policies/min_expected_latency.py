"""The node that should be done first comes first, by its load and the speed that the operator gave it."""

from __future__ import annotations

import random

from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.policies.load import capacity, mean_speed, unfinished
from app.routing.registry import Candidate


class MinExpectedLatency(Policy):
    """By (in flight + 1) / (weight x speed), ties by speed, then by lot.

    LMDeploy leaves out the request that is about to be placed. Idle nodes are all equal then, however slow.
    """

    lots = "equal scores are drawn by lot"

    def __init__(self, uniform: random.Random | None = None) -> None:
        self._uniform = (uniform or random.Random()).random

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        if len(candidates) < 2:
            return candidates
        mean = mean_speed(candidates)
        return sorted(candidates, key=lambda candidate: self._key(candidate, capacity(candidate, mean)))

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        mean = mean_speed(candidates)
        return [self._terms(candidate, capacity(candidate, mean)) for candidate in candidates]

    def _terms(self, candidate: Candidate, able: float) -> Terms:
        return {"score": self._key(candidate, able)[0], "unfinished": unfinished(candidate), "capacity": able}

    def _key(self, candidate: Candidate, able: float) -> tuple[float, float, float]:
        return unfinished(candidate) / able, -able, self._uniform()
