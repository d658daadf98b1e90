"""What each node is doing now, and what it has shown of itself: what a forecast is made of.

A `Seat` is one model on one node. A `Booking` is one request on a seat, from the moment it is sent there to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heapreplace
from math import inf
from typing import TYPE_CHECKING

from app.domain import GIB, EngineLoad, LoadedModel, NodeSpec
from app.routing.demand import Demand
from app.routing.job import Job
from app.routing.prefixes import Held
from app.routing.slots import Slots
from app.routing.speeds import Known, Speed

if TYPE_CHECKING:
    from app.routing.registry import Candidate, Node

DOUBT_SECONDS = 1.0  # for which nobody is sent to a model that may just have been driven out, until the node says
_OVERDUE = 0.25  # of the expected time, that what should be over still takes
# Chances that a load drives another model out of a memory of unknown size, where so many models would be there then.
_FITS, _TWO, _THREE, _MORE = 0.0, 0.25, 0.5, 0.9
_DARED = 0.25  # a chance for which it is not waited until the node is idle: whether there is room is found out once
_AHEAD = 64  # of those who wait for a node, that are looked at one by one
_LOADS_BLOCK = 0.5  # how likely it is that an engine serves nobody while it loads, until it shows
SURE = 0.9
_POWER = 0.35  # nodes with more slots are a little faster, as a rule
_FOREIGN_SECONDS = 5.0  # that requests of others take, until Hearth's own have shown how long that is


class Loading:
    """A model on its way into memory. `carrier` is the booking that asked for it, None for a load for its own sake."""

    __slots__ = ("_guess", "blocks", "carrier", "expected", "others", "since")

    def __init__(
        self, since: float, expected: float, guess: float, carrier: Booking | None, others: frozenset[str]
    ) -> None:
        """`expected` are the seconds until its end, of which `guess` are the load's own."""
        self.since = since
        self.expected = expected
        self._guess = guess
        self.carrier = carrier
        self.others = others  # what was in memory when it began
        self.blocks = 0.0  # how likely the engine waits until nobody uses another model, to drive that out

    def guess_anew(self, seconds: float) -> None:
        """What other loads took tells more of this one's own time by now."""
        self.expected = max(seconds, self.expected + seconds - self._guess)
        self._guess = seconds

    def left(self, now: float) -> float:
        return max(self.since + self.expected - now, _OVERDUE * max(now - self.since, 0.2 * self.expected))


class Booking:
    """One request on a seat."""

    __slots__ = (
        "began",
        "beside",
        "expected_first",
        "fresh",
        "hit",
        "job",
        "output",
        "placed",
        "running_before",
        "seat",
        "waited_for_load",
    )

    def __init__(self, seat: Seat, job: Job, now: float) -> None:
        self.seat = seat
        self.job = job
        self.placed = now
        self.began: float | None = None
        self.running_before = 0.0
        self.fresh = self.hit = 0.0  # tokens to read, and tokens believed to be cached
        self.expected_first = 0.0
        self.output = 0.0  # tokens that it will probably have
        self.waited_for_load = False
        self.beside: Loading | None = None  # another model's load that was under way when it was sent

    @property
    def carries(self) -> bool:
        """Whether it is the request that makes the node load the model."""
        loading = self.seat.loading
        return loading is not None and loading.carrier is self

    @property
    def runs(self) -> bool:
        """Whether it holds a slot for sure: it has begun, or begins to be seen only when it is over."""
        return self.began is not None or not self.job.stream

    def left(self, now: float) -> float:
        """Seconds until it will be over."""
        decode = self.output * self.seat.decode_s  # as is known by now
        expected = self.expected_first + decode
        if self.began is None:
            return max(self.placed + expected - now, decode, _OVERDUE * expected)
        return max(self.began + decode - now, _OVERDUE * decode)


class Work:
    """One node: who is on it, and who waits for it."""

    __slots__ = (
        "bookings",
        "ended_alike",
        "ended_at",
        "foreign_seconds",
        "foreign_until",
        "incarnation",
        "load_over",
        "loads_block",
        "node",
        "number",
        "promised",
        "running",
        "running_at",
        "running_sum",
        "seats",
        "slots",
        "together_max",
        "tried",
        "turned_out_at",
        "version",
        "wanted",
    )

    def __init__(self, node: Node, number: int, now: float) -> None:
        self.node = node
        self.number = number
        self.version = 0  # goes up whenever forecasts have to be made anew
        self.incarnation = node.incarnation
        self.seats: dict[str, Seat] = {}
        self.bookings: dict[Booking, None] = {}  # in the order in which they came
        self.promised: dict[Job, float] = {}  # requests that wait for this node, and the seconds that they will take
        self.slots = Slots(careful=self.careful)
        self.running = 0
        self.running_sum = 0.0  # streams x seconds
        self.running_at = now
        self.ended_at = 0.0
        self.foreign_until: float | None = None  # when requests that came by another way should be over
        self.foreign_seconds = _FOREIGN_SECONDS
        self.ended_alike = ("", 0)  # when one last ended: its model, and the streams of that model then
        self.tried = False  # a request was sent there, or a load begun
        self.together_max = 1  # most models seen in memory at once
        self.turned_out_at: int | None = None  # so many were too many
        self.loads_block = _LOADS_BLOCK  # how likely requests for what is in memory wait while another model is loaded
        self.wanted: tuple[Candidate, Job, float] | None = None  # a load that pays, for which request, until when
        self.load_over: tuple[str, frozenset[str]] | None = None  # a model that came, and what was there before

    @property
    def careful(self) -> bool:
        kind = self.node.kind
        return kind is not None and kind.probe.loaded_path is not None

    # -- memory

    def must_be_idle(self, seat: Seat) -> bool:
        """Whether an engine would wait for those who are at work with a model that has to go, and all with it."""
        return seat.chance > _DARED and bool(self.bookings) and not self.idle_others(seat)

    def in_doubt(self, now: float) -> bool:
        """Whether a load may have driven out a model that the node has not been asked about since."""
        return any(seat.doubted_until > now for seat in self.seats.values())

    def may_be_tried(self, seat: Seat) -> bool:
        """Whether the node was never asked, nobody uses it or has plans for it, and the model may fit there."""
        node, vram = self.node, self.node.spec.vram_gb
        return (
            not self.tried
            and node.loaded is not None
            and not node.loaded
            and node.known_kind.load is not None
            and not (node.spec.preload or node.in_flight_everywhere or node.foreign)
            and (vram is None or seat.takes <= vram * GIB)
        )

    def in_memory(self) -> frozenset[str]:
        listed = frozenset(self.node.loaded or ())
        return listed.union(model for model, seat in self.seats.items() if seat.warm) - frozenset(
            model for model, seat in self.seats.items() if not seat.warm
        )

    def chance_of_eviction(self, size: float) -> float:
        """How likely a load of so many bytes drives another model out."""
        there = self.in_memory().union(seat.model for seat in self.seats.values() if seat.loading is not None)
        count = len(there) + 1
        if count == 1:
            return 0.0
        vram = self.node.spec.vram_gb
        if vram is not None and size:
            return _FITS if size + self._bytes(there) <= vram * GIB else 1.0
        if self.turned_out_at is not None and count >= self.turned_out_at:
            return 1.0
        if count <= self.together_max:
            return _FITS
        return {2: _TWO, 3: _THREE}.get(count, _MORE)

    def _bytes(self, models: Iterable[str]) -> float:
        """What they take: as the node says, or said when it last had them, else what their files have."""
        loaded = self.node.loaded or {}
        return sum([self._taken(loaded.get(model), self.seats.get(model)) for model in models])

    def _taken(self, loaded: LoadedModel | None, seat: Seat | None) -> float:
        if loaded is not None and loaded.vram_bytes is not None:
            return loaded.vram_bytes
        return 0.0 if seat is None else seat.takes

    def others(self, seat: Seat) -> list[Seat]:
        """The models that are in memory or on their way, beside this one."""
        return [each for each in self.seats.values() if each is not seat and (each.loading is not None or each.warm)]

    @property
    def loads(self) -> bool:
        """Whether a model is on its way into memory."""
        return any(seat.loading is not None for seat in self.seats.values())

    @property
    def loads_alone(self) -> int:
        """How many of these go on without a request: for their own sake, or since their client left."""
        return sum(seat.loads_alone for seat in self.seats.values())

    def beside(self, seat: Seat) -> Loading | None:
        """The load of another model."""
        return next((each.loading for each in self.seats.values() if each is not seat and each.loading), None)

    def load_blocked(self, blocked: bool) -> None:
        """A request for what was in memory waited until another model's load was over, or did not."""
        self.loads_block += (blocked - self.loads_block) * 0.5
        self.version += 1

    def idle_others(self, seat: Seat) -> list[Seat]:
        """Those that could be driven out at once: engines leave models alone that are at work."""
        return [each for each in self.others(seat) if not each.count and each.loading is None]

    def victim(self, seat: Seat) -> Seat | None:
        """Whom a load would drive out: as engines do, the idle one that was used longest ago."""
        return min(self.others(seat), key=lambda each: (each.count > 0, each.used_at), default=None)

    def listed(self) -> None:
        """The node has said what is in its memory."""
        there = frozenset(self.node.loaded or ())
        self.version += 1
        self.together_max = max(self.together_max, len(there))
        unseen = any(seat.loading is not None and seat.model not in there for seat in self.seats.values())
        for seat in self.seats.values():
            if seat.model in there and (taken := (self.node.loaded or {})[seat.model].vram_bytes):
                seat.taken = taken
            if seat.model not in there and seat.warm_before and not seat.warm:
                seat.demand.prefixes.forget(seat.held)  # it was unloaded
            seat.warm_before = seat.warm
            if not unseen:
                seat.doubted_until = 0.0
        if self.turned_out_at is not None and len(there) >= self.turned_out_at:
            self.turned_out_at = None
        if self.load_over is not None and self.load_over[0] in there:
            others = self.load_over[1]
            self.load_over = None
            if others - there:
                self.turned_out_at = min(len(others) + 1, self.turned_out_at or 99)
                self.together_max = min(self.together_max, max(len(there), 1))

    def load_ended(self, loading: Loading, model: str, now: float) -> None:
        """Remembers what was there before a load, until the node lists what is there now."""
        self.load_over = (model, loading.others - {model})
        if loading.blocks:
            for seat in self.seats.values():
                if seat.model != model and seat.model in loading.others:
                    seat.doubted_until = now + DOUBT_SECONDS

    # -- those who wait

    def promise(self, job: Job, seconds: float) -> None:
        """The request waits for a place here, and will take so long."""
        self.promised[job] = seconds
        self.version += 1

    def withdraw(self, job: Job) -> None:
        """The request does not wait here any more, if it did."""
        self.promised.pop(job, None)
        self.version += 1

    # -- slots

    def heard(self) -> None:
        """The engine has said how busy it is."""
        self.version += 1
        self.foreign_until = None
        load = self.node.engine
        if load is not None and load.running is not None and load.slots is None:
            self.slots.heard(load.running, load.waiting or 0)

    def foreign_left(self, now: float) -> float:
        """Seconds until a request that came by another way should be over: they take as long as Hearth's own."""
        if self.foreign_until is None:
            seconds = [seat.demand.length(None) * seat.decode_s for seat in self.seats.values() if seat.decode_s]
            self.foreign_seconds = max(seconds, default=_FOREIGN_SECONDS)
            self.foreign_until = now + self.foreign_seconds
        return max(self.foreign_until - now, _OVERDUE * self.foreign_seconds)

    @property
    def foreign_streams(self) -> int:
        """Requests that came by another way and run, as far as the engine tells them from those that wait."""
        engine = self.node.engine
        return 0 if engine is None else min(self.node.foreign, engine.running or 0)

    @property
    def tells_slots(self) -> bool:
        """Whether there is nothing to find out: its operator or the engine says how many requests it works on."""
        engine = self.node.engine
        return self.node.spec.max_concurrency is not None or (engine is not None and engine.slots is not None)

    def room(self, seat: Seat, *, guessed: bool = True) -> float:
        """Requests that could start on the seat at once; none or less when it is full.

        Without what is `guessed`, only what the operator says or requests have shown counts.
        """
        node = self.node
        given, busy = node.spec.max_concurrency, node.in_flight_everywhere
        told = inf if node.engine is None else _told_slots(node.engine) - busy - node.foreign
        if given is not None:
            return min(given - busy, told)
        if told < inf:
            return told
        return min(self.slots.limit(guessed) - busy - node.foreign, seat.slots.limit(guessed) - seat.count)

    def has_room(self, seat: Seat, waited: float, *, guessed: bool = True) -> bool:
        """Whether one more request may go there, which has `waited` for so many seconds.

        Who has waited for as long as requests of others take, takes its turn in the engine's queue: these would take
        every slot that falls free before Hearth could.
        """
        room, node = self.room(seat, guessed=guessed), self.node
        if node.foreign and waited > self.foreign_seconds:
            given = node.spec.max_concurrency
            room = min(room + node.foreign, inf if given is None else given - node.in_flight_everywhere)
        return room > len(self.promised)

    def wait(self, room: float, now: float) -> float:
        """Seconds until one more request could start, with so much `room`, after those that wait for the node now."""
        foreign = self.node.foreign
        ends = [booking.left(now) for booking in self.bookings]
        limit = max(1, int(self.node.in_flight_everywhere + foreign + room))
        if foreign:
            ends += [self.foreign_left(now)] * min(foreign, limit)
        ends.sort()
        ends = ends[-limit:] + [0.0] * (limit - len(ends))
        heapify(ends)
        ahead = [self.foreign_seconds] * (foreign - limit) + list(self.promised.values())
        for seconds in ahead[:_AHEAD]:
            heapreplace(ends, ends[0] + seconds)
        return ends[0] + sum(ahead[_AHEAD:]) / limit

    def tick(self, now: float) -> float:
        """Streams x seconds so far."""
        self.running_sum += self.running * (now - self.running_at)
        self.running_at = now
        return self.running_sum

    def forget(self) -> None:
        """The engine may have been started anew."""
        self.incarnation = self.node.incarnation
        for seat in self.seats.values():
            seat.forget()
        self.version += 1


def _told_slots(engine: EngineLoad) -> float:
    """So many requests it works on at once, by its own word. One that is out of room for caches works on fewer."""
    if engine.slots is None:
        return inf
    return min(engine.slots, max(1, engine.running or 0)) if engine.waiting else engine.slots


class Seat:
    """One model on one node.

    What `__init__` sets from `version` on is a forecast, good until the node's own version changes.
    """

    __slots__ = (
        "alone_s",
        "blocked",
        "chance",
        "cold",
        "confirmed",
        "count",
        "crowding",
        "decode_s",
        "demand",
        "doubted_until",
        "good_until",
        "guess_until",
        "held",
        "load_s",
        "load_wait",
        "loading",
        "model",
        "power",
        "prefill_s",
        "press",
        "price",
        "ready_at",
        "rest",
        "share",
        "size",
        "slot_wait",
        "slots",
        "speed",
        "taken",
        "tells_reading",
        "toll",
        "used_at",
        "version",
        "warm_before",
        "work",
    )

    def __init__(self, work: Work, model: str, demand: Demand, size: float) -> None:
        self.work = work
        self.model = model
        self.demand = demand
        self.size = size
        self.power = _power(work.node.spec)
        self.taken: int | None = None  # bytes of video memory, when the node last had it there
        self.held = Held(work.number)
        self.speed = Speed()
        self.tells_reading = False  # the engine says how much of a prompt it read, and how long that took
        self.slots = Slots(careful=work.careful)
        self.count = 0  # requests on it
        self.loading: Loading | None = None
        self.confirmed: object = None  # what the node listed when an answer showed that the model is in memory
        self.warm_before = False  # when the node last said what is in memory
        self.doubted_until = 0.0  # it may have been driven out: wait for what the node says
        self.used_at = 0.0
        self.version = -1
        self.good_until = 0.0
        self.guess_until = -1.0
        self.alone_s = self.decode_s = self.prefill_s = 0.0
        self.crowding = 0.0
        self.cold = False
        self.blocked = False  # requests wait here rather than there: another model's load comes first
        self.chance = 0.0  # that a load drives another model out
        self.price = 0.0  # seconds that a load for its own sake costs
        self.load_s = self.load_wait = self.slot_wait = 0.0
        self.ready_at = self.press = self.rest = self.toll = self.share = 0.0

    @property
    def warm(self) -> bool:
        """Whether the model is in memory: the node lists it, or has answered since it last listed what is."""
        if self.loading is not None:
            return False  # engines list a model from the moment on at which they begin to load it
        loaded = self.work.node.loaded
        if loaded is None or self.model in loaded:
            return True
        return self.confirmed is loaded or any(
            booking.seat is self and booking.began is not None for booking in self.work.bookings
        )

    @property
    def loads_alone(self) -> bool:
        """Whether it is on its way into memory without a request that asked for it."""
        return self.loading is not None and self.loading.carrier is None

    @property
    def takes(self) -> float:
        """Bytes of memory; 0 = unknown. It may be more than the file has, or less where a CPU has a part."""
        return self.taken or self.size

    def forget(self) -> None:
        self.demand.prefixes.forget(self.held)
        self.slots.forget()
        self.confirmed = None

    def known(self, take: Callable[[Seat], float | None]) -> Known | None:
        seconds = take(self)
        return None if seconds is None else Known(seconds, self.power, self.size)


def _power(spec: NodeSpec) -> float:
    """What the operator says of the node: a hint while it has shown nothing."""
    if spec.speed is not None:
        return spec.weight * spec.speed
    return spec.weight * math.pow(spec.max_concurrency or 4, _POWER)


def shown_prefill(seat: Seat) -> float | None:
    return seat.speed.prefill.value if seat.speed.prefill.known else None


def shown_decode(seat: Seat) -> float | None:
    return seat.speed.decode.line()[0] if seat.speed.decode.known else None


def shown_load(seat: Seat) -> float | None:
    return seat.speed.load.value if seat.speed.load.known else None
