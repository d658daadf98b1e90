"""What a policy is: an order of candidates, what it goes by, and for those that need it, notice of what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.routing.forecast import Progress
from app.routing.job import Job
from app.routing.registry import Candidate, Node

# Named parts of a policy's decision, with the unit in the name. The lower `score` comes first.
Terms = Mapping[str, float]


class Policy:
    """Orders candidates, best first. Called once per attempt; the first one with a free slot is taken.

    A policy that `schedules` is told what the request asks for and where it goes, and may leave out those that are
    worth less than a wait, even all of them.
    """

    schedules = False
    lots = ""  # what of the order is drawn by lot, for people

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        raise NotImplementedError

    def rehearsal(self) -> Policy:
        """One that decides as this one would now. What it is asked changes nothing here."""
        return self

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        """What each candidate is judged by now, in their order."""
        return [{} for _ in candidates]

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
