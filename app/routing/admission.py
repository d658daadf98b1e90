"""A place on a node: who holds one, and who waits for one.

In-flight counts change here alone. A slot is bound to the node object that it was taken on, and is given back once,
however often it is released. Waiting is first come, first served, and bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from app.errors import Overloaded
from app.routing.registry import Candidate, Node

MAX_WAITING = 1000
_RETRY_AFTER_SECONDS = 2.0


class Slot:
    """One request's place on a node."""

    __slots__ = ("_admission", "_held", "candidate")

    def __init__(self, candidate: Candidate, admission: Admission) -> None:
        self.candidate = candidate
        self._admission = admission
        self._held = True
        candidate.node.in_flight += 1

    def release(self) -> None:
        if self._held:
            self._held = False
            self.candidate.node.in_flight -= 1
            self._admission.freed(self.candidate.node)


class _Waiter:
    __slots__ = ("candidates", "slot")

    def __init__(self, candidates: Callable[[], Iterable[Candidate]], slot: asyncio.Future[Slot | None]) -> None:
        self.candidates = candidates
        self.slot = slot


class Admission:
    """Gives out slots within each node's `max_concurrency`."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiters: deque[_Waiter] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def take(self, candidate: Candidate) -> Slot | None:
        """A slot now, or None when the node is full."""
        return None if candidate.node.full else Slot(candidate, self)

    async def wait(self, candidates: Callable[[], Iterable[Candidate]], seconds: float) -> Slot | None:
        """Waits for a slot on any of the candidates, as they are when one falls free; None when none is left.

        Raises `Overloaded` when too many wait already, and TimeoutError after `seconds`.
        """
        if len(self._waiters) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiters)} requests wait for a free node already; try again later",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        waiter = _Waiter(candidates, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(seconds):
                return await waiter.slot
        except BaseException:
            # The slot may have been handed over in the very moment in which the waiter gave up.
            if waiter.slot.done() and not waiter.slot.cancelled() and (slot := waiter.slot.result()):
                slot.release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def freed(self, node: Node) -> None:
        """Hands a place that fell free on `node` to the first who can use it."""
        if self._waiters:
            self._hand_out(lambda: node.full)

    def changed(self) -> None:
        """A node came, went or changed: those who wait look again."""
        if self._waiters:
            self._hand_out(lambda: False)

    def _hand_out(self, enough: Callable[[], bool]) -> None:
        """Looks at those who wait, in their order, until it is enough."""
        unseen, self._waiters = self._waiters, deque()
        while unseen and not enough():
            waiter = unseen.popleft()
            if waiter.slot.done():
                continue
            candidates = list(waiter.candidates())
            free = next((candidate for candidate in candidates if not candidate.node.full), None)
            if free is not None:
                waiter.slot.set_result(Slot(free, self))
            elif candidates:
                self._waiters.append(waiter)
            else:
                waiter.slot.set_result(None)
        self._waiters += unseen
