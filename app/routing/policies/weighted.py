"""Each node's share of the requests follows its weight."""

from __future__ import annotations

from statistics import fmean
from weakref import WeakKeyDictionary

from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.registry import Candidate, Node


class Weighted(Policy):
    """Smooth weighted round robin: shares are exact over any run, and a heavy node's turns are spread out.

    Each choice adds every candidate's share to its credit and takes the whole from the winner's (the method is
    nginx's, 2012). A node's share is its weight times its speed, else its VRAM.
    """

    def __init__(self) -> None:
        self._credit: WeakKeyDictionary[Node, float] = WeakKeyDictionary()

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        if not candidates:
            return candidates
        shares = _shares([candidate.node for candidate in candidates])
        for node, share in shares.items():
            self._credit[node] = self._credit.get(node, 0.0) + share
        ranked = sorted(candidates, key=lambda candidate: (-self._credit[candidate.node], candidate.node.picked))
        self._credit[ranked[0].node] -= sum(shares.values())
        return ranked

    def rehearsal(self) -> Weighted:
        other = Weighted()
        other._credit = self._credit.copy()
        return other

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        shares = _shares([candidate.node for candidate in candidates])
        credit = [self._credit.get(node, 0.0) + share for node, share in shares.items()]
        return [{"score": -each, "share": share} for each, share in zip(credit, shares.values(), strict=True)]


def _shares(nodes: list[Node]) -> dict[Node, float]:
    """A node that lacks a figure that others have counts as their mean."""
    specs = [node.spec for node in nodes]
    figures = [spec.speed for spec in specs]
    if not any(figures):
        figures = [spec.vram_gb for spec in specs]
    given = [figure for figure in figures if figure]
    mean = fmean(given) if given else 1.0
    return {node: node.spec.weight * (figure or mean) for node, figure in zip(nodes, figures, strict=True)}
