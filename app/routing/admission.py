"""A place on a node: who holds one, and who waits for one.

In-flight counts change here alone. A slot is bound to the node object that it was taken on, and is given back once,
however often it is released. Waiting is first come, first served, and bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from app.errors import Overloaded
from app.routing.job import Job
from app.routing.registry import Candidate, Node

MAX_WAITING = 1000
_LOOK_SECONDS = 0.2  # between looks at those who wait although nothing happened
_DECLINES_MAX = 32  # of those who would rather wait on, before only those are asked who wait for the node
_RETRY_AFTER_SECONDS = 2.0
_FEW_WAITING = 8
_MOMENT_SECONDS = 0.002
_WAITER_SECONDS = 20e-6  # more than it takes to look at one who waits


Choose = Callable[[list[Candidate]], Candidate | None]


class Slot:
    """One request's place on a node."""

    __slots__ = ("_admission", "_held", "candidate")

    def __init__(self, candidate: Candidate, admission: Admission) -> None:
        self.candidate = candidate
        self._admission = admission
        self._held = True
        candidate.node.in_flight += 1

    def look_again(self) -> None:
        """Something that others may have waited for has happened on the node."""
        self._admission.changed()

    def release(self) -> None:
        if self._held:
            self._held = False
            self.candidate.node.in_flight -= 1
            self._admission.freed(self.candidate.node)


class Chooser(Protocol):
    """Who decides where those who wait go."""

    def look_again(self, jobs: Iterable[Job]) -> None: ...

    def renew(self, job: Job) -> None: ...


class Waiter:
    """One request that waits. `choose` names the candidate that it should take now, if any."""

    __slots__ = ("candidates", "choose", "job", "slot")

    def __init__(
        self,
        candidates: Callable[[], Iterable[Candidate]],
        slot: asyncio.Future[Slot | None],
        choose: Choose,
        job: Job | None,
    ) -> None:
        self.candidates = candidates
        self.slot = slot
        self.choose = choose
        self.job = job


class Admission:
    """Gives out slots within each node's `max_concurrency`.

    With a `chooser`, requests may also wait where no node is full, for a better place than those that are free. Then
    they are looked at now and then even when nothing happens, as what is predicted changes with time.
    """

    def __init__(self, max_waiting: int = MAX_WAITING, chooser: Chooser | None = None) -> None:
        self._max_waiting = max_waiting
        self._chooser = chooser
        self._waiters: deque[Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def take(self, candidate: Candidate) -> Slot | None:
        """A slot now, or None when the node is full."""
        return None if candidate.node.full else Slot(candidate, self)

    async def wait(
        self,
        candidates: Callable[[], Iterable[Candidate]],
        seconds: float,
        choose: Choose | None = None,
        job: Job | None = None,
    ) -> Slot | None:
        """Waits for a slot on any of the candidates, as they are when one falls free; None when none is left.

        Raises `Overloaded` when too many wait already, and TimeoutError after `seconds`.
        """
        if len(self._waiters) >= self._max_waiting:
            raise Overloaded(
                f"{len(self._waiters)} requests wait for a free node already; try again later",
                retry_after_seconds=_RETRY_AFTER_SECONDS,
            )
        waiter = Waiter(candidates, asyncio.get_running_loop().create_future(), choose or _first_free, job)
        self._waiters.append(waiter)
        self._watch()
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
        if self._chooser is not None and len(self._waiters) > _FEW_WAITING:
            self._look_soon()
        elif self._waiters:
            self._hand_out(lambda: node.full, node)

    def changed(self) -> None:
        """A node came, went or changed: those who wait look again."""
        if self._waiters:
            self._hand_out(lambda: False, None)

    def _look_soon(self) -> None:
        """One look for all places that fall free within a moment: to choose for many who wait is not cheap."""
        if self._soon is None:
            seconds = max(_MOMENT_SECONDS, len(self._waiters) * _WAITER_SECONDS)
            self._soon = asyncio.get_running_loop().call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._soon = None
        self.changed()

    def _watch(self) -> None:
        if self._chooser is not None and self._timer is None and self._waiters:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        self.changed()
        self._watch()

    def _hand_out(self, enough: Callable[[], bool], node: Node | None) -> None:
        """Looks at those who wait, in their order, until it is enough."""
        unseen, self._waiters = self._waiters, deque()
        if self._chooser is not None:
            self._chooser.look_again([waiter.job for waiter in unseen if waiter.job is not None])
        declined = 0
        try:
            while unseen and not enough():
                waiter = unseen.popleft()
                if waiter.slot.done():
                    continue
                if declined >= _DECLINES_MAX and not _targets(waiter, node):
                    self._keep(waiter)
                    continue
                declined += not self._served(waiter)
        finally:
            for waiter in unseen:
                self._keep(waiter)

    def _served(self, waiter: Waiter) -> bool:
        """Whether it waits no more."""
        candidates = list(waiter.candidates())
        free = waiter.choose(candidates)
        if free is not None:
            waiter.slot.set_result(Slot(free, self))
        elif candidates:
            self._waiters.append(waiter)
            return False
        else:
            waiter.slot.set_result(None)
        return True

    def _keep(self, waiter: Waiter) -> None:
        if waiter.job is not None and self._chooser is not None and not waiter.slot.done():
            self._chooser.renew(waiter.job)
        self._waiters.append(waiter)


def _first_free(candidates: list[Candidate]) -> Candidate | None:
    return next((candidate for candidate in candidates if not candidate.node.full), None)


def _targets(waiter: Waiter, node: Node | None) -> bool:
    """Whether the request waits for this very node."""
    return (
        node is not None
        and waiter.job is not None
        and waiter.job.seat is not None
        and waiter.job.seat.work.node is node
    )
