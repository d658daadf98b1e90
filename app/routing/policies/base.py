"""What a policy is: an order of candidates, and for those that need it, notice of what became of the choice."""

from __future__ import annotations

from collections.abc import Iterable

from app.routing.forecast import Progress
from app.routing.job import Job
from app.routing.registry import Candidate, Node


class Policy:
    """Orders candidates, best first. Called once per attempt; the first one with a free slot is taken.

    A policy that `schedules` may leave out those that are worth less than a wait, even all of them, and is told where
    a request goes.
    """

    schedules = False

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        raise NotImplementedError

    def placed(self, candidate: Candidate, job: Job) -> Progress | None:
        """The request goes to this node now. Whoever sends it tells what becomes of it."""
        return None

    def left(self, job: Job) -> None:
        """The request waits no more."""

    def look_again(self, jobs: Iterable[Job]) -> None:
        """Those who wait are about to be ranked anew in this order, or to be told to `renew` their wait."""

    def renew(self, job: Job) -> None:
        """The request waits on as it did."""

    def dropped(self, node: Node) -> None:
        """The node is no more."""

    def first_token_seconds(self, candidates: list[Candidate], job: Job) -> float | None:
        """How long the best candidate will probably take to its first content; None = nothing is predicted."""
        return None
