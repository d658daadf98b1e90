"""A node by lot, heavier and faster ones more often."""

from __future__ import annotations

import random

from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.policies.load import capacity, mean_speed
from app.routing.registry import Candidate


class Random(Policy):
    """Weighted random order without replacement: a race in which each runs as fast as its weight x speed says.

    The same draw as sorting by u^(1/w) (Efraimidis and Spirakis, 2006), which cannot tell large weights apart.
    """

    lots = "all of it is drawn by lot anew for every attempt"

    def __init__(self, uniform: random.Random | None = None) -> None:
        self._arrival = (uniform or random.Random()).expovariate

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        mean = mean_speed(candidates)
        return sorted(candidates, key=lambda candidate: self._arrival(capacity(candidate, mean)))

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        mean = mean_speed(candidates)
        able = [capacity(candidate, mean) for candidate in candidates]
        return [{"chance": each / sum(able)} for each in able]
