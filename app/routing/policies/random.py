"""A node by lot, heavier ones more often."""

from __future__ import annotations

import random

from app.routing.registry import Candidate


class Random:
    """Weighted random order without replacement (Efraimidis and Spirakis, 2006: sort by u^(1/w))."""

    def __init__(self, uniform: random.Random | None = None) -> None:
        self._uniform = (uniform or random.Random()).random

    def rank(self, candidates: list[Candidate]) -> list[Candidate]:
        keys = {id(candidate): self._uniform() ** (1 / candidate.node.spec.weight) for candidate in candidates}
        return sorted(candidates, key=lambda candidate: keys[id(candidate)], reverse=True)
