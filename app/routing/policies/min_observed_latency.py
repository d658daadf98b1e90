"""The node whose last answers took the shortest time comes first, counting what it has to do now."""

from __future__ import annotations

import random
from statistics import fmean
from weakref import WeakKeyDictionary

from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.policies.load import unfinished
from app.routing.registry import Candidate, Node

_EXPLORED_SAMPLES = 3  # with fewer, a mean says little
_FORGOTTEN_AFTER = 100  # choices


class MinObservedLatency(Policy):
    """By the mean of the last 15 whole answers x (in flight + 1) / weight, ties by lot.

    The load multiplies: the mean is known only when answers are over, and until then everything would go to one node.
    A node with few samples is tried first, but only so many times: one that fails has none to show, and a failure must
    not earn it more. A node that was not chosen for long is tried once, or a bad minute would count for ever.
    """

    lots = "equal scores are drawn by lot"

    def __init__(self, uniform: random.Random | None = None) -> None:
        self._uniform = (uniform or random.Random()).random
        self._tries: WeakKeyDictionary[Node, int] = WeakKeyDictionary()

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        if len(candidates) < 2:
            return candidates
        unknown = _unknown(candidates)
        newest = max(candidate.node.picked for candidate in candidates)
        ranked = sorted(candidates, key=lambda candidate: self._key(candidate, unknown, newest))
        if self._unexplored(ranked[0].node):
            self._tries[ranked[0].node] = self._tries.get(ranked[0].node, 0) + 1
        return ranked

    def rehearsal(self) -> MinObservedLatency:
        other = MinObservedLatency()
        other._uniform, other._tries = self._uniform, self._tries.copy()
        return other

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        unknown = _unknown(candidates)
        newest = max((candidate.node.picked for candidate in candidates), default=0)
        return [self._terms(candidate, unknown, newest) for candidate in candidates]

    def _terms(self, candidate: Candidate, unknown: float, newest: int) -> Terms:
        settled, score, *_ = self._key(candidate, unknown, newest)
        return {
            "score": score if settled else 0.0,  # the others are tried first
            "mean_seconds": _mean(candidate.node, unknown),
            "samples": len(candidate.node.latencies),
            "unfinished": unfinished(candidate),
        }

    def _key(self, candidate: Candidate, unknown: float, newest: int) -> tuple[bool, float, bool, float]:
        node = candidate.node
        forgotten = newest - node.picked >= _FORGOTTEN_AFTER
        score = _mean(node, unknown) * unfinished(candidate) / node.spec.weight
        return not (forgotten or self._unexplored(node)), score, not node.latencies, self._uniform()

    def _unexplored(self, node: Node) -> bool:
        return len(node.latencies) < _EXPLORED_SAMPLES and self._tries.get(node, 0) < _EXPLORED_SAMPLES


def _unknown(candidates: list[Candidate]) -> float:
    """The mean of a node that has shown nothing: nothing suggests that it is better than the worst."""
    return max((_mean(candidate.node, 0.0) for candidate in candidates), default=0.0) or 1.0


def _mean(node: Node, otherwise: float) -> float:
    return fmean(node.latencies) if node.latencies else otherwise
