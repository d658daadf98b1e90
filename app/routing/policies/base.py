"""What a policy is: an order of candidates, and what it goes by."""

from __future__ import annotations

from collections.abc import Mapping

from app.routing.registry import Candidate

# Named parts of a policy's decision, with the unit in the name. The lower `score` comes first.
Terms = Mapping[str, float]


class Policy:
    """Orders candidates, best first. Called once per attempt; the first one with a free slot is taken."""

    lots = ""  # what of the order is drawn by lot, for people

    def rank(self, candidates: list[Candidate]) -> list[Candidate]:
        raise NotImplementedError

    def rehearsal(self) -> Policy:
        """One that decides as this one would now. What it is asked changes nothing here."""
        return self

    def terms(self, candidates: list[Candidate]) -> list[Terms]:
        """What each candidate is judged by now, in their order."""
        return [{} for _ in candidates]
