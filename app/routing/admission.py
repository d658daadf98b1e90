"""A place on a node: who holds one, and who waits for one.

In-flight counts change here alone. A slot is bound to the node object that it was taken on, and is given back once,
however often it is released. Waiting is bounded, and nobody waits in vain; whose turn it is `Turns` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from app.errors import Overloaded
from app.routing.job import Job
from app.routing.queue import Entry, Queue, Standing, Turns
from app.routing.registry import Candidate, Node

_LOOK_SECONDS = 0.2  # between looks at those who wait although nothing happened
_DECLINES_MAX = 8  # of a route, one after the other, before only those are asked who wait for a node that fell free
_TARGETED_MAX = 32  # with these
_DEEP = 64  # in the looks at which nothing has happened: what the first ones decline may be what later ones want
_FEW_WAITING = 8
_SIFT_SECONDS = 1.0  # between looks for those who wait in vain by now
_LATE = 1.25  # times what is left of their time, that their turn would take
_MOMENT_SECONDS = 0.002
_WAITER_SECONDS = 10e-6  # more than it takes to have a waiter in a look
_RETRY_AFTER_SECONDS = 2.0  # where nothing is known of how long requests take
_RETRY_AFTER_SECONDS_MAX = 600.0


Choose = Callable[[list[Candidate]], Candidate | None]

_ANYBODY = Standing()


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


class Waiter(Entry):
    """One request that waits. `choose` names the candidate that it should take now, if any."""

    __slots__ = ("candidates", "choose", "job", "slot", "until")

    def __init__(
        self,
        candidates: Callable[[], list[Candidate]],
        slot: asyncio.Future[Slot | None],
        choose: Choose,
        job: Job | None,
        until: float,
    ) -> None:
        self.line = None
        self.candidates = candidates
        self.slot = slot
        self.choose = choose
        self.job = job
        self.until = until


class QueueFull(Overloaded):
    """The queue had no place (any more)."""

    reason = "full"


class PushedOut(Overloaded):
    """Another key, whose line was shorter, or one of a higher class has taken the place in the full queue."""

    reason = "pushed_out"


class Hopeless(Overloaded):
    """The turn would come too late."""

    reason = "hopeless"


class Overtaken(Overloaded):
    """So many whose turn is earlier have come since that its own would come too late."""

    reason = "overtaken"


class Outlook(NamedTuple):
    """What the queue would be for a request."""

    standing: Standing
    waiting: int  # on its route
    ahead: int  # of these, how many would be served before it
    per_second: float | None  # how many have had their turn lately; None = too little is known
    expected_seconds: float | None
    seconds_at_most: float
    refusal: str | None  # why it would not be let in


class Admission:
    """Gives out slots within each node's `max_concurrency`.

    With a `chooser`, requests may also wait where no node is full, for a better place than those that are free. Then
    they are looked at now and then even when nothing happens, as what is predicted changes with time.
    """

    def __init__(self, chooser: Chooser | None = None) -> None:
        self._chooser = chooser
        self._turns: Turns[Waiter] = Turns()
        self._freed: set[Node] = set()  # since the last look
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._sifting: asyncio.TimerHandle | None = None
        self._looking = False

    @property
    def waiting(self) -> int:
        return len(self._turns)

    def lengths(self) -> list[tuple[str, str, int]]:
        """Route, class and how many wait, where somebody has."""
        return self._turns.lengths()

    def take(self, candidate: Candidate) -> Slot | None:
        """A slot now, or None when the node is full."""
        return None if candidate.node.full else Slot(candidate, self)

    async def wait(
        self,
        candidates: Callable[[], list[Candidate]],
        seconds: float,
        choose: Choose | None = None,
        job: Job | None = None,
        standing: Standing = _ANYBODY,
    ) -> Slot | None:
        """Waits for a slot on any of the candidates, as they are when one falls free; None when none is left.

        Raises `Overloaded` when too many wait already or it would wait for longer than `seconds`, both at once, or
        when its place goes to another; and TimeoutError after `seconds`.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._check(standing, candidates, seconds, now)
        waiter = Waiter(candidates, loop.create_future(), choose or _first_free, job, now + seconds)
        self._turns.join(waiter, standing, now)
        self._watch()
        try:
            async with asyncio.timeout(seconds):
                return await waiter.slot
        except BaseException:
            self._turns.leave(waiter, loop.time())
            # The slot may have been handed over in the very moment in which the waiter gave up.
            slot = waiter.slot
            if slot.done() and not slot.cancelled() and slot.exception() is None and (got := slot.result()):
                got.release()
            raise

    def _check(self, standing: Standing, candidates: Callable[[], list[Candidate]], seconds: float, now: float) -> None:
        """Raises `Overloaded` for whoever had better not wait. In a full queue another may have to go."""
        waiting = self._turns.waiting(standing)
        if not waiting:
            return  # the first in the queue is never told that it would wait in vain: it would not be found out
        pace = self._turns.per_second(standing, now)
        if pace is not None and waiting + 1 > seconds * pace:
            expected = self._turns.seconds(standing, now) or 0.0
            if expected > seconds:
                raise Hopeless(
                    f"a node would be free for this request in about {_rounded(expected)} s, and it may wait for "
                    f"{_rounded(seconds)} s; try again later, or raise QUEUE_TIMEOUT",
                    retry_after_seconds=_bounded(expected),
                )
        if waiting >= standing.size:
            self._make_room(standing, candidates, waiting, now)

    def _make_room(
        self, standing: Standing, candidates: Callable[[], list[Candidate]], waiting: int, now: float
    ) -> None:
        seconds = self.retry_after_seconds(standing, candidates(), now)
        longest = self._turns.longest(standing)
        if longest is None:
            raise QueueFull(
                f"{waiting} requests wait for a free node already; try again later, or raise QUEUE_SIZE",
                retry_after_seconds=seconds,
            )
        self._turns.leave(longest, now)
        if not longest.slot.done():
            longest.slot.set_exception(
                PushedOut(
                    f"{waiting} requests wait for a free node, and most of those that it is fair to refuse are yours; "
                    "try again later, or raise QUEUE_SIZE",
                    retry_after_seconds=seconds,
                )
            )

    def retry_after_seconds(self, standing: Standing, candidates: Iterable[Candidate], now: float) -> float:
        """When a request that came then would probably have its turn: those ahead of it now, by the pace."""
        seconds = self._turns.seconds(standing, now)
        if seconds is None:
            pace = sum(map(_pace, candidates))
            seconds = (self._turns.ahead(standing)[0] + 1) / pace if pace else _RETRY_AFTER_SECONDS
        return _bounded(seconds)

    def outlook(self, standing: Standing, seconds: float, now: float) -> Outlook:
        """What a request would find that had to wait now, and might for so many seconds."""
        turns = self._turns
        waiting, expected = turns.waiting(standing), turns.seconds(standing, now)
        refusal = None
        if waiting and expected is not None and expected > seconds:
            refusal = Hopeless.reason
        elif waiting >= standing.size and turns.longest(standing) is None:
            refusal = QueueFull.reason
        pace = turns.per_second(standing, now)
        return Outlook(standing, waiting, turns.ahead(standing)[0], pace, expected, seconds, refusal)

    def freed(self, node: Node) -> None:
        """Hands a place that fell free on `node` to the first who can use it."""
        if not self._turns:
            return
        if self._chooser is not None and len(self._turns) > _FEW_WAITING:
            self._freed.add(node)
            self._look_soon()
        else:
            self._hand_out(lambda: node.full, {node})

    def changed(self) -> None:
        """A node came, went or changed: those who wait look again."""
        if self._turns:
            freed, self._freed = self._freed, set()
            self._hand_out(lambda: False, freed)

    def _look_soon(self) -> None:
        """One look for all places that fall free within a moment: to choose for many who wait is not cheap."""
        if self._soon is None:
            seconds = max(_MOMENT_SECONDS, len(self._turns) * _WAITER_SECONDS)
            self._soon = asyncio.get_running_loop().call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._soon = None
        self.changed()

    def _watch(self) -> None:
        if self._sifting is None and self._turns:
            self._sifting = asyncio.get_running_loop().call_later(_SIFT_SECONDS, self._sift)
        if self._chooser is not None and self._timer is None and self._turns:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        self._hand_out(lambda: False, set(), _DEEP)
        self._watch()

    def _sift(self) -> None:
        """Tells those who wait in vain by now, rather than hold them to the end of their time."""
        self._sifting = None
        now = asyncio.get_running_loop().time()
        places: dict[Queue, int] = {}
        for waiter in list(self._turns):
            queue = waiter.line.queue  # type: ignore[union-attr]
            place = places.get(queue, 0) + 1
            pace = queue.pace.per_second(now) if place > 1 else None
            if pace is None or place <= pace * _LATE * (waiter.until - now) or waiter.slot.done():
                places[queue] = place
                continue
            self._turns.leave(waiter, now)
            message = f"others came whose turn is earlier, and its own would come in about {_rounded(place / pace)} s"
            waiter.slot.set_exception(
                Overtaken(
                    f"{message}; try again later, or raise QUEUE_TIMEOUT", retry_after_seconds=_bounded(place / pace)
                )
            )
        self._watch()

    def _hand_out(self, enough: Callable[[], bool], freed: set[Node], declines_max: int = _DECLINES_MAX) -> None:
        """Looks at those who wait, in the order of their turns, until it is enough."""
        if self._looking:  # what a choice has caused is for the next look
            self._look_soon()
            return
        self._looking = True
        look = _Look(freed, self._chooser, self, declines_max)
        try:
            if look.is_of_use(self._turns):
                look.at_each(self._turns, enough)
        finally:
            self._looking = False
            for waiter in look.served:
                self._turns.serve(waiter, look.now)
            for waiter in look.gone:
                self._turns.leave(waiter, look.now)


class _Look:
    """One look at those who wait.

    Whom nothing was offered that is good enough is likely to be followed by others of whom the same is true. So with a
    chooser, for whom each of them is work, a few of a route are asked, and those who wait for what has fallen free.
    """

    __slots__ = ("_admission", "_chooser", "_declines", "_declines_max", "_freed", "gone", "now", "served")

    def __init__(self, freed: set[Node], chooser: Chooser | None, admission: Admission, declines_max: int) -> None:
        self.now = asyncio.get_running_loop().time()
        self.served: list[Waiter] = []
        self.gone: list[Waiter] = []
        self._freed = freed
        self._chooser = chooser
        self._admission = admission
        self._declines: dict[Queue, int] = {}  # in a row
        self._declines_max = declines_max

    def is_of_use(self, waiters: Iterable[Waiter]) -> bool:
        """Whether somebody may be served now; nothing has to be predicted anew otherwise."""
        if self._chooser is None:
            return True
        for waiter in waiters:
            if self._may_be_asked(waiter):
                candidates = waiter.candidates()
                if not candidates or not _all_full(candidates):
                    self._declines.clear()
                    return True
                self._decline(waiter)
        return False

    def at_each(self, waiters: Iterable[Waiter], enough: Callable[[], bool]) -> None:
        chooser = self._chooser
        if chooser is not None:
            waiters = list(waiters)
            chooser.look_again([waiter.job for waiter in waiters if waiter.job is not None])
        is_enough = False
        for waiter in waiters:
            is_enough = is_enough or enough()
            if not is_enough and self._may_be_asked(waiter):
                self._ask(waiter)
            elif chooser is not None and waiter.job is not None and not waiter.slot.done():
                chooser.renew(waiter.job)
            elif is_enough:
                return

    def _may_be_asked(self, waiter: Waiter) -> bool:
        """Not one who has given up, or is about to, as its time is over."""
        if waiter.slot.done() or waiter.until <= self.now:
            return False
        if self._chooser is None:
            return True
        declines = self._declines.get(waiter.line.queue, 0)  # type: ignore[union-attr]
        return declines < self._declines_max or (declines < _TARGETED_MAX and _targets(waiter, self._freed))

    def _ask(self, waiter: Waiter) -> None:
        candidates = waiter.candidates()
        if candidates and _all_full(candidates):
            self._decline(waiter)
            if self._chooser is not None and waiter.job is not None:
                self._chooser.renew(waiter.job)
        elif candidates and (free := waiter.choose(candidates)) is None:
            self._decline(waiter)
        elif candidates and free is not None:
            waiter.slot.set_result(Slot(free, self._admission))
            self.served.append(waiter)
            self._declines.pop(waiter.line.queue, None)  # type: ignore[union-attr]
        else:
            waiter.slot.set_result(None)
            self.gone.append(waiter)

    def _decline(self, waiter: Waiter) -> None:
        queue = waiter.line.queue  # type: ignore[union-attr]
        self._declines[queue] = self._declines.get(queue, 0) + 1


def _all_full(candidates: list[Candidate]) -> bool:
    return all(candidate.node.full for candidate in candidates)


def _first_free(candidates: list[Candidate]) -> Candidate | None:
    return next((candidate for candidate in candidates if not candidate.node.full), None)


def _targets(waiter: Waiter, nodes: set[Node]) -> bool:
    """Whether the request waits for one of these nodes."""
    return waiter.job is not None and waiter.job.seat is not None and waiter.job.seat.work.node in nodes


def _pace(candidate: Candidate) -> float:
    """Requests in a second that the node seems to answer now; 0 = not known."""
    seconds = candidate.node.latencies
    return candidate.node.in_flight * len(seconds) / sum(seconds) if sum(seconds) > 0 else 0.0


def _bounded(seconds: float) -> float:
    return min(seconds, _RETRY_AFTER_SECONDS_MAX)


def _rounded(seconds: float) -> float:
    return round(seconds, 1 if seconds < 10 else None)
