"""What several policies weigh: how much a node can do, and how much it has to do."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from app.routing.registry import Candidate

# A cold model costs seconds to load: worth waiting behind about this many requests on a node that has it in memory.
_COLD_REQUESTS = 2


def unfinished(candidate: Candidate) -> int:
    """Requests that the node would have with this one, in flight or as good as that."""
    cold = 0 if candidate.node.holds(candidate.model) else _COLD_REQUESTS
    return candidate.node.in_flight + candidate.node.others_in_flight + 1 + cold


def mean_speed(candidates: Iterable[Candidate]) -> float:
    """The mean of the speeds that were given; 1 when none was."""
    given = [candidate.node.spec.speed for candidate in candidates if candidate.node.spec.speed]
    return fmean(given) if given else 1.0


def capacity(candidate: Candidate, otherwise: float) -> float:
    """How much the node can do: its weight times its speed, or times `otherwise` when it has none."""
    spec = candidate.node.spec
    return spec.weight * (spec.speed or otherwise)
