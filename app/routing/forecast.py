"""What becomes of a request on each node, in seconds, and how that is learned from what became of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from app.domain import Operation, Outcome, Timings, Usage
from app.routing import speeds
from app.routing.demand import Demand
from app.routing.job import Job
from app.routing.obstacles import usable
from app.routing.registry import Candidate, Node
from app.routing.work import DOUBT_SECONDS, SURE, Booking, Loading, Seat, Work, shown_decode, shown_load, shown_prefill

Clock = Callable[[], float]

_EMBEDDING = Operation.EMBEDDING  # to look it up costs more than to compare
_LOAD_PRICE = 0.5  # what a load costs beside the wait for it, as a share of the time that it takes
_EVICTION_PRICE = 30.0  # and times what it costs those who are driven out: they would drive others out
_TRIAL_PRICE = 20.0  # the same where nobody knows whether the node has room: that is known afterwards
_MOVE_PRICE = 5.0  # and where those who are driven out have another home
_NEARLY = 2.0  # times as slow, that such a home may be
_GUESS_SECONDS = 0.2
_TOLL = 0.5  # whom a load really drives out is the engine's secret: half of the worst is counted
_GOOD_SECONDS = 0.5  # a forecast is made anew at least this often
_HORIZON_LOADS = 10.0  # how far ahead a load is judged, in times that a load takes
_OLD_SECONDS = 600.0  # after which a node may have become another in speed
_MODELS = 512  # of which demand is remembered
_LATE = 2.0  # times the expected time to the first token
_LATE_SECONDS = 0.05
_MISS_TOKENS = 256  # believed to be cached: from here on a miss can be told from a hit
_MISS_SHARE = 0.5  # of those, that a node must have had at least
_BELIEVED_SHARE = 0.5  # of the whole time, that a node's own timings must explain


class Prediction(NamedTuple):
    """What is expected of one candidate, in seconds. The last three are what the choice costs others."""

    slot: float  # until a slot is free
    load: float  # until the model is in memory, at the same time as that
    prefill: float
    decode: float
    crowding: float  # by which the streams that run there are slowed down, together
    eviction: float  # what it costs those who want the model that has to go
    investment: float  # what a load at this place costs later requests, compared with the best place

    @property
    def first_token(self) -> float:
        return max(self.slot, self.load) + self.prefill

    @property
    def service(self) -> float:
        return self.prefill + self.decode

    @property
    def whole(self) -> float:
        return self.first_token + self.decode

    @property
    def score(self) -> float:
        """What the choice goes by."""
        return self.whole + self.crowding + self.eviction + self.investment


class Forecast:
    """All seats, and what is known of each."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.on_look: Callable[[Node], None] = lambda node: None  # what is in its memory may have changed
        self.on_end: Callable[[Work], None] = lambda work: None  # a request is over where a load is wanted
        self._works: dict[Node, Work] = {}
        self._numbers: set[int] = set()
        self._demands: dict[str, Demand] = {}

    # -- seats

    def seat(self, candidate: Candidate) -> Seat:
        work = candidate.node.work
        if work is not None:
            seat = work.seats.get(candidate.model)
            if seat is not None:
                return seat
        return self._new_seat(candidate)

    def _new_seat(self, candidate: Candidate) -> Seat:
        node, now = candidate.node, self.clock()
        if node.work is None:
            node.work = self._works[node] = self._new_work(node, now)
        info = candidate.info
        size = float(info.size_bytes or 0) if info is not None else 0.0
        seat = Seat(node.work, candidate.model, self._demand(candidate.model, now), size)
        node.work.seats[candidate.model] = seat
        return seat

    def _new_work(self, node: Node, now: float) -> Work:
        number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
        self._numbers.add(number)
        return Work(node, number, now)

    def drop(self, node: Node) -> None:
        """The node is no more: its number may be given to another."""
        work = self._works.pop(node, None)
        if work is not None:
            work.wanted = None
            work.forget()
            self._numbers.discard(work.number)

    def _demand(self, model: str, now: float) -> Demand:
        name = model.lower().removesuffix(":latest")
        demand = self._demands.get(name)
        if demand is None:
            if len(self._demands) >= _MODELS:
                del self._demands[next(iter(self._demands))]
            demand = self._demands[name] = Demand(now)
        return demand

    # -- the forecast

    def refresh(self, seat: Seat, now: float) -> None:
        """Works out what does not depend on the request."""
        work = seat.work
        if work.incarnation != work.node.incarnation:
            work.forget()
        seat.version = work.version
        seat.good_until = now + _GOOD_SECONDS
        self._speeds(seat, now)
        room = work.room(seat)
        self._crowd(seat, room, now)
        self._load(seat, now)
        seat.slot_wait = work.wait(room, now) if room <= len(work.promised) else 0.0
        seat.ready_at = now + max(seat.slot_wait, seat.load_wait)

    def _speeds(self, seat: Seat, now: float) -> None:
        speed = seat.speed
        guess = now > seat.guess_until
        if guess:
            seat.guess_until = now + _GUESS_SECONDS
        if speed.prefill.known:
            seat.prefill_s = speed.prefill.value
        elif guess:
            seat.prefill_s = self._guess(seat, shown_prefill)
        if speed.decode.known:
            seat.alone_s, seat.crowding = speed.decode.line()
        elif guess:
            seat.alone_s, seat.crowding = self._guess(seat, shown_decode), speeds.CROWDING

    def _guess_anew(self) -> None:
        """A node has shown for the first time how fast it is: what is guessed of others goes by that."""
        for work in self._works.values():
            work.version += 1
            for seat in work.seats.values():
                seat.guess_until = -1.0
                if seat.loading is not None:
                    seat.loading.guess_anew(self.load_seconds(seat))

    def _guess(self, seat: Seat, shown: Callable[[Seat], float | None]) -> float:
        mine, demand = seat.work, seat.demand
        other_nodes: list[speeds.Known] = []
        same_node: list[speeds.Known] = []
        powers: list[float] = []
        for work in self._works.values():
            for other in work.seats.values():
                powers.append(other.power)
                known = other.known(shown)
                if known is None:
                    continue
                if work is mine:
                    same_node.append(known)
                else:
                    other_nodes += [known, known] if other.demand is demand else [known]
        power = seat.power
        guess = speeds.from_others(other_nodes, same_node, power, seat.size)
        if guess is not None:
            return guess
        relative = power * len(powers) / sum(powers)
        if shown is shown_load:
            return speeds.load_guess(seat.size) / relative
        return (speeds.prefill_guess if shown is shown_prefill else speeds.decode_guess)(seat.size, relative)

    def _crowd(self, seat: Seat, room: float, now: float) -> None:
        work = seat.work
        foreign = work.foreign_streams
        there = len(work.bookings) + foreign
        if not there:
            seat.decode_s, seat.press, seat.rest = seat.alone_s, 0.0, 0.0
            return
        crowding = seat.crowding
        beside = there if room > 0 else max(0, there - 1)
        seat.decode_s = seat.alone_s * (1 + crowding * beside)
        seat.press = beside * crowding / (1 + crowding * max(0, beside - 1))
        left = sum([booking.left(now) for booking in work.bookings])
        seat.rest = (left + foreign * work.foreign_left(now) if foreign else left) / there

    def _load(self, seat: Seat, now: float) -> None:
        seat.cold = seat.blocked = False
        seat.load_wait = seat.toll = seat.share = seat.chance = 0.0
        if seat.warm:
            for other in seat.work.seats.values() if len(seat.work.seats) > 1 else ():
                if other.loading is None or other is seat:
                    continue
                left = other.loading.left(now)
                if other.loading.blocks:
                    seat.blocked = True
                    left += other.loading.blocks * self.load_seconds(seat)
                else:
                    left *= seat.work.loads_block
                    seat.blocked = seat.blocked or seat.work.loads_block > SURE
                seat.load_wait = max(seat.load_wait, left)
            return
        if seat.loading is not None:
            seat.load_wait = seat.loading.left(now)
            return
        seat.cold = True
        self._cold(seat, now)

    def _cold(self, seat: Seat, now: float) -> None:
        """What a load here takes, and what it costs others."""
        work = seat.work
        load = seat.load_s = self.load_seconds(seat)
        seat.load_wait = load + sum(
            other.loading.left(now) for other in work.seats.values() if other.loading is not None
        )
        seat.share = seat.demand.ahead(now, load * _HORIZON_LOADS)
        chance = seat.chance = work.chance_of_eviction(seat.takes)
        eviction = _EVICTION_PRICE if chance == 1 else _TRIAL_PRICE
        price = 0.0
        victim = work.victim(seat) if chance else None
        if victim is not None:
            busy = [booking.left(now) for booking in work.bookings if booking.seat is victim]
            seat.load_wait += chance * max(busy, default=0.0)
            costs = {other: self.eviction_seconds(other, now) for other in work.others(seat)}
            seat.toll = _of_victims(work, seat, victim, costs) * chance
            for other in costs:
                costs[other] *= _MOVE_PRICE if self._has_another_home(other) else eviction
            price = _of_victims(work, seat, victim, costs) * chance * chance
        waiting = sum([job.seat is not seat for job in work.promised])
        waiting += sum([booking.began is None and booking.seat is not seat for booking in work.bookings])
        blocked = work.loads_block * load * waiting
        seat.toll += blocked
        seat.price = _LOAD_PRICE * load + price + eviction * chance * blocked

    def load_seconds(self, seat: Seat) -> float:
        return seat.speed.load.value if seat.speed.load.known else self._guess(seat, shown_load)

    def eviction_seconds(self, victim: Seat, now: float) -> float:
        """What it costs those who want this model that it has to be loaded again, or is elsewhere only."""
        load = self.load_seconds(victim)
        rate = victim.demand.rate(now)
        soon = victim.demand.ahead(now, load * _HORIZON_LOADS)
        elsewhere = [
            other
            for work in self._works.values()
            if work is not victim.work and usable(work.node)
            for other in work.seats.values()
            if other.demand is victim.demand and other.warm
        ]
        # Whoever comes while it is loaded again waits for that.
        again = min(1.0, soon) * load * (1 + rate * load / 2)
        if not elsewhere:
            return again
        tokens = victim.demand.length(None)
        worse = max(0.0, min(self._alone(other) for other in elsewhere) - self._alone(victim)) * tokens
        return min(again, soon * worse + 0.2 * again)

    def _has_another_home(self, victim: Seat) -> bool:
        """Whether a node that is nearly as good has it too, or could have it without driving another one out."""
        alone = victim.alone_s * _NEARLY
        return any(
            other.demand is victim.demand
            and other.alone_s <= alone
            and (other.warm or (other.cold and not other.chance))
            and other.model in (work.node.models or ())
            for work in self._works.values()
            if work is not victim.work and usable(work.node)
            for other in work.seats.values()
        )

    def _alone(self, seat: Seat) -> float:
        return seat.speed.decode.line()[0] if seat.speed.decode.known else self._guess(seat, shown_decode)

    def prediction(self, seat: Seat, job: Job) -> Prediction:
        """Every term for one request on one seat, but for the investment, which other seats have a say in."""
        now = self.clock()
        if seat.version != seat.work.version or now > seat.good_until:
            self.refresh(seat, now)
        tokens, output, ratio = self.needs(seat.demand, job)
        held = seat.demand.prefixes.look_up(job.chain, job.sizes)
        hit = next((size for bits, size in held if bits & seat.held.bit), 0) * ratio
        prefill = (tokens - hit) * seat.prefill_s
        decode = output * seat.decode_s
        service = prefill + decode
        return Prediction(
            slot=seat.slot_wait,
            load=seat.load_wait,
            prefill=prefill,
            decode=decode,
            crowding=seat.press * min(service, seat.rest),
            eviction=seat.toll,
            investment=0.0,
        )

    def needs(self, demand: Demand, job: Job) -> tuple[float, float, float]:
        """Tokens to read and to write, and tokens per character."""
        ratio = demand.tokens_per_character
        output = 0.0 if job.operation is _EMBEDDING else demand.length(job.limit)
        return job.characters * ratio, output, ratio

    # -- what happens

    def placed(self, candidate: Candidate, job: Job) -> Booking:
        """The request is sent to this node now."""
        now = self.clock()
        seat = self.seat(candidate)
        work = seat.work
        if seat.version < 0:
            self.refresh(seat, now)
        booking = Booking(seat, job, now)
        tokens, output, ratio = self.needs(seat.demand, job)
        if job.chain:
            for bits, size in seat.demand.prefixes.look_up(job.chain, job.sizes):
                if bits & seat.held.bit:
                    booking.hit = size * ratio
                    break
        booking.fresh = tokens - booking.hit
        booking.output = output
        if now - seat.used_at > _OLD_SECONDS:
            seat.speed.age()
        warm = seat.warm
        booking.waited_for_load = not warm
        booking.beside = work.beside(seat) if warm else None
        ready = 0.0 if warm and work.room(seat) > 0 else max(seat.slot_wait, seat.load_wait)
        booking.expected_first = ready + booking.fresh * seat.prefill_s
        if not warm and seat.loading is None:
            loading = Loading(now, seat.load_wait, self.load_seconds(seat), booking, work.in_memory())
            self._load_began(seat, loading, now)
        work.bookings[booking] = None
        work.tried = True
        if not job.stream:
            booking.running_before = work.tick(now)
            work.running += 1
        seat.count += 1
        seat.used_at = now
        seat.slots.placed()
        work.slots.placed()
        work.withdraw(job)
        return booking

    def began(self, booking: Booking) -> bool:
        """Its first content has come. True when others may have waited for that."""
        now = self.clock()
        seat, work = booking.seat, booking.seat.work
        if booking.began is not None or booking not in work.bookings:
            return False
        carried = booking.carries
        grown = False
        known = seat.speed.known
        booking.began = now
        seat.confirmed = work.node.loaded
        if booking.job.stream:
            booking.running_before = work.tick(now)
            work.running += 1
            if not work.tells_slots:
                grown = self._learn_slots(booking, now)
            self._learn_first(booking, now)
        elif carried and seat.loading is not None:
            work.load_ended(seat.loading, seat.model, now)
            seat.loading = None
        if booking.job.chain and self._works.get(work.node) is work:  # else its number may be another's by now
            seat.demand.prefixes.learn(seat.held, booking.job.chain, booking.job.sizes)
        work.version += 1
        if seat.speed.known > known:
            self._guess_anew()
        if carried:
            self.on_look(work.node)
        return carried or grown

    def _learn_first(self, booking: Booking, now: float) -> None:
        seat, work = booking.seat, booking.seat.work
        took = now - booking.placed
        if booking.waited_for_load:
            loading, seat.loading = seat.loading, None
            if loading is not None and loading.carrier is booking:
                work.load_ended(loading, seat.model, now)
                seat.speed.loaded_and_read(booking.fresh, took, booking.fresh * seat.prefill_s)
            return
        seat.loading = None
        late = took > _LATE * booking.expected_first + _LATE_SECONDS
        if booking.beside is not None:
            over = work.beside(seat) is not booking.beside
            if late or not over:
                work.load_blocked(over)
            if late:
                return
        if late and work.ended_at > booking.placed:
            took = now - work.ended_at  # it waited for a slot until then
        if seat.tells_reading:
            return
        read = booking.fresh
        if booking.hit >= _MISS_TOKENS and seat.speed.prefill.known:
            with_hit, without = booking.fresh * seat.prefill_s, (booking.fresh + booking.hit) * seat.prefill_s
            if took * took > with_hit * without:
                seat.held.missed()
                read += booking.hit
            else:
                seat.held.had()
        seat.speed.prefilled(read, took)

    def _learn_slots(self, booking: Booking, now: float) -> bool:
        """True when the node has turned out to have more room."""
        seat, work = booking.seat, booking.seat.work
        took = now - booking.placed
        reading = booking.fresh * seat.prefill_s
        late = took > _LATE * max(reading, booking.expected_first) + _LATE_SECONDS
        if late and not booking.waited_for_load and work.ended_at > booking.placed and seat.speed.prefill.known:
            since_end = now - work.ended_at
            if since_end <= _LATE * reading + _LATE_SECONDS:
                self._met(seat)
            return False
        room = work.room(seat)
        alike = len([other for other in work.bookings if other.runs and other.seat is seat])
        seat.slots.ran(alike)
        work.slots.ran(work.running)
        return work.room(seat) > room

    def _met(self, seat: Seat) -> None:
        """A request began only when another ended: so many as ran then are all that run at once."""
        model, alike = seat.work.ended_alike
        if model != seat.model or alike < seat.slots.proven:
            seat.work.slots.met()  # it is the node that has no more, whatever the model
        else:
            seat.slots.met()

    def ended(self, booking: Booking, outcome: Outcome, usage: Usage | None, timings: Timings | None) -> None:
        """It is over, in whatever way."""
        now = self.clock()
        seat, work = booking.seat, booking.seat.work
        if booking not in work.bookings:
            return
        work.ended_at = now
        if not work.tells_slots:
            alike = len([other for other in work.bookings if other.runs and other.seat is seat])
            work.ended_alike = (seat.model, alike)
        total = work.tick(now)
        if booking.runs:
            work.running -= 1
        known = seat.speed.known
        if outcome is Outcome.OK:
            self._learn_whole(booking, now, total, usage, timings)
        del work.bookings[booking]
        seat.count -= 1
        seat.used_at = now
        if booking.carries:
            seat.loading = None
        work.version += 1
        if seat.speed.known > known:
            self._guess_anew()
        if work.wanted is not None:
            self.on_end(work)

    def _learn_whole(
        self, booking: Booking, now: float, total: float, usage: Usage | None, timings: Timings | None
    ) -> None:
        seat, job = booking.seat, booking.job
        if usage is None or job.operation is Operation.EMBEDDING:
            return
        tokens = usage.completion_tokens
        seat.demand.answered(tokens, job.limit)
        seat.demand.read(job.characters, usage.prompt_tokens)
        believed = _believable(timings, now - booking.placed)
        if timings is not None and (timings.read is not None or seat.tells_reading):
            _learn_reading(booking, timings, usage)
        if booking.job.stream and booking.began is not None:
            seconds = now - booking.began
            others = (total - booking.running_before) / seconds - 1 + seat.work.foreign_streams if seconds > 0 else 0.0
            if believed is not None and believed.decode is not None:
                seconds = believed.decode
            seat.speed.decoded(tokens - 1, seconds, max(0.0, others))
        elif believed is not None and believed.decode is not None:
            seat.speed.decoded(tokens, believed.decode, max(0, len(seat.work.bookings) - 1))
            if believed.prefill is not None and not seat.tells_reading:
                seat.speed.prefilled(usage.prompt_tokens - (usage.cached_tokens or booking.hit), believed.prefill)
        elif not booking.waited_for_load:
            seconds = now - booking.placed - booking.fresh * seat.prefill_s
            seat.speed.decoded(tokens, seconds, max(0, len(seat.work.bookings) - 1))

    def load_begins(self, candidate: Candidate) -> tuple[Seat, Loading]:
        """A load for its own sake."""
        seat, now = self.seat(candidate), self.clock()
        seconds = self.load_seconds(seat)
        loading = Loading(now, seconds, seconds, None, seat.work.in_memory())
        self._load_began(seat, loading, now)
        return seat, loading

    def _load_began(self, seat: Seat, loading: Loading, now: float) -> None:
        chance = seat.work.chance_of_eviction(seat.takes)  # asked before it counts as one of those that are there
        seat.loading = loading
        seat.work.tried = True
        self._want_no_more(seat.demand)
        others = seat.work.others(seat) if chance else []
        for other in others:
            other.doubted_until = now + DOUBT_SECONDS  # which of them goes is the engine's secret
        if others:
            if any(booking.seat is not seat for booking in seat.work.bookings):
                loading.blocks = chance
            self.on_look(seat.work.node)
        seat.work.version += 1

    def _want_no_more(self, demand: Demand) -> None:
        """The model comes to a new place: what was lost without that says nothing of what still will be."""
        demand.regret = 0.0
        for work in self._works.values():
            if work.wanted is not None and self.seat(work.wanted[0]).demand is demand:
                work.wanted = None

    def wanted(self, booking: Booking) -> bool:
        """Whether others wait for the model that this request made the node load."""
        seat = booking.seat
        return booking.carries and (
            any(other.seat is seat and other is not booking for other in seat.work.bookings)
            or any(job.seat is seat for job in seat.work.promised)
        )

    def hand_over(self, booking: Booking) -> tuple[Seat, Loading] | None:
        """The load goes on although the request that carries it is over."""
        loading = booking.seat.loading
        if loading is None or loading.carrier is not booking:
            return None
        loading.carrier = None
        return booking.seat, loading

    def load_ended(self, seat: Seat, loading: Loading, seconds: float | None) -> None:
        """A load that no request carries is over; `seconds` is None when it failed."""
        if seat.loading is loading:
            seat.loading = None
        if seconds is not None:
            seat.work.load_ended(loading, seat.model, self.clock())
            seat.speed.loaded(seconds)
            self._guess_anew()
            seat.confirmed = seat.work.node.loaded
            seat.used_at = self.clock()
            self.on_look(seat.work.node)
        seat.work.version += 1


class Progress:
    """What becomes of one request on the node that it was sent to, told step by step."""

    __slots__ = ("booking", "forecast")

    def __init__(self, forecast: Forecast, booking: Booking) -> None:
        self.forecast = forecast
        self.booking = booking

    def began(self) -> bool:
        """The first content has come. True when others waited for that."""
        return self.forecast.began(self.booking)

    def ended(self, outcome: Outcome, usage: Usage | None, timings: Timings | None) -> None:
        self.forecast.ended(self.booking, outcome, usage, timings)

    @property
    def carries(self) -> bool:
        """Whether the request makes the node load the model."""
        return self.booking.carries


def _of_victims(work: Work, seat: Seat, victim: Seat, costs: Mapping[Seat, float]) -> float:
    """Of what each would cost: whom the engine would take, and the worst of those that it could take."""
    idle = [costs[other] for other in work.idle_others(seat)] or list(costs.values())
    return _TOLL * (costs[victim] + max(idle))


def investment(seat: Seat, worse: float, comes: bool) -> float:
    """What a load here costs later requests, compared with the best place; never more than to move once.

    Where the model `comes` to another place already, a second load has a price of its own, or two would be started
    where one is nearly as good.
    """
    later = min(seat.share * max(0.0, worse), seat.load_s)
    return later + _LOAD_PRICE * seat.load_s if comes else later


def _learn_reading(booking: Booking, timings: Timings, usage: Usage) -> None:
    """From an engine that says how much it read itself, and how much it had; where it does not this time, nothing."""
    seat = booking.seat
    cached = usage.cached_tokens if timings.cached is None else timings.cached
    read = usage.prompt_tokens - cached if timings.read is None else timings.read
    if not seat.tells_reading:
        seat.tells_reading = True
        seat.speed.prefill = speeds.Ratio()  # what was measured from here has waits in it
    if timings.prefill is not None:
        seat.speed.prefilled(read, timings.prefill)
    if booking.hit >= _MISS_TOKENS:
        if cached < _MISS_SHARE * booking.hit:
            seat.held.missed()
        else:
            seat.held.had()


def _believable(timings: Timings | None, whole: float) -> Timings | None:
    """Some servers that speak Ollama's API send durations that mean nothing."""
    if timings is None:
        return None
    told = sum(part for part in (timings.load, timings.prefill, timings.decode) if part is not None)
    return timings if _BELIEVED_SHARE * whole <= told <= whole * 1.1 + _LATE_SECONDS else None
