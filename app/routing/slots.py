"""How many requests a node works on at once, where its operator does not say: learned from how they begin.

Several answers that run side by side prove that there are that many slots. A request that does not begin for long, and
then does as soon as another has ended, shows that there are no more. Engines that report what is in their memory also
work with a fixed, mostly small, number of slots and queue the rest unseen, so those are tried with a few at first, and
then with twice what they have shown.
"""

from __future__ import annotations

from math import inf

_FIRST = 3
_TRY_AGAIN_AFTER = 12  # requests, until one more than the known ceiling is tried; twice as many each time in vain
_TRY_AGAIN_MAX = 400


class Slots:
    """What one node, or one model on it, has shown."""

    __slots__ = ("_careful", "_patience", "_since", "ceiling", "proven")

    def __init__(self, careful: bool) -> None:
        """`careful`: begin with a few, instead of with as many as come."""
        self.proven = 0
        self.ceiling: int | None = None
        self._careful = careful
        self._since = 0  # requests since the ceiling was met
        self._patience = _TRY_AGAIN_AFTER

    def limit(self, guessed: bool = True) -> float:
        """How many requests to give it at once."""
        if self.ceiling is not None:
            return self.ceiling + (self._since >= self._patience)
        return max(_FIRST, 2 * self.proven) if self._careful and guessed else inf

    def placed(self) -> None:
        self._since += 1

    def ran(self, together: int) -> None:
        """So many answers run at the same time."""
        if together > self.proven:
            self.proven = together
        if self.ceiling is not None and together > self.ceiling:
            self.ceiling = None
            self._patience = _TRY_AGAIN_AFTER

    def met(self) -> None:
        """A request had to wait until another ended: there are no more slots than have been seen at work."""
        ceiling = max(1, self.proven)
        if self.ceiling is not None:
            self._patience = min(2 * self._patience, _TRY_AGAIN_MAX)
        self.ceiling = ceiling
        self._since = 0

    def heard(self, running: int, waiting: int) -> None:
        """The engine itself says how many it works on, and how many wait there."""
        if not waiting:
            self.ran(running)
        elif running and running != self.ceiling:
            self.proven = self.ceiling = running
            self._since = 0

    def forget(self) -> None:
        """The engine is a new one."""
        self.proven = 0
        self.ceiling = None
        self._since = 0
