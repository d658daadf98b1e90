"""The node that will probably be done first comes first, counting what the choice costs others.

A forecast says for each candidate how long the request would wait for a slot and for the model, read, and write there,
by how much it would slow others down, and what it would cost to drive another model out of memory. A request waits in
Hearth rather than on a node: when the best place is not free yet, nobody is named, and those who wait are asked about
again whenever something changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from math import exp, inf
from operator import itemgetter

from app.domain import Operation, Request
from app.routing.forecast import Forecast, Prediction, Progress, investment
from app.routing.job import Job
from app.routing.policies.base import Policy, Terms
from app.routing.registry import Candidate, Node
from app.routing.work import Seat, Work

_TIE = 0.03  # differences below this share say nothing: chance decides
_WAIT_GAIN = 1.05  # how much better a place must be that is worth a wait
_WAIT_GAIN_SECONDS = 0.02
_FIRST_TOKEN_WEIGHT = 0.5  # seconds before the first word count for more than later ones
_LOAD_PATIENCE = 3.0  # of the time that a load should take: then requests are sent to where it goes on
_REGRET_SECONDS = 90.0  # how long a loss is remembered
_AHEAD = 0.3  # of what will be lost, if those who come lose as much as this one; not all, as they may not come
_WANTED_LOADS = 6.0  # times that a load takes, for which a chance to start it is waited for
_TRIALS = 2  # at a time, of one model; one less where the operator has told nodes apart
_UNSEEN_AFTER = 150  # choices; each time so many went elsewhere, a node is believed to be better than it was
_UNSEEN_BONUS = 0.75

_FIRST = itemgetter(0)
_SOMETHING = Request("", Operation.CHAT, "", b"", {})  # for whoever asks without saying what for

StartLoad = Callable[[Candidate, Job], None]


class ShortestExpectedDelay(Policy):
    """`start_load` makes a node load a model for its own sake."""

    schedules = True
    lots = "differences of a few per cent are drawn by lot"

    def __init__(
        self,
        forecast: Forecast | None = None,
        uniform: random.Random | None = None,
        start_load: StartLoad | None = None,
    ) -> None:
        self.forecast = forecast or Forecast()
        self.start_load = start_load
        self._uniform = (uniform or random.Random()).random
        self.forecast.on_end = self._load_wanted

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        """Those that are worth to be asked now, best first; none when a wait is better."""
        if not candidates or candidates[0].node.cloud:
            return candidates
        job = job or Job(_SOMETHING)
        forecast = self.forecast
        now = forecast.clock()
        demand = forecast.seat(candidates[0]).demand
        arrives = not job.since
        if arrives:
            job.since = now
            demand.asked(now)
        if len(candidates) == 1:
            return self._only(candidates, job, now)
        if job.seat is not None and self._nowhere(candidates, job.seat, now - job.since):
            self._promise(job, job.seat, job.wait_for)
            return []
        tokens, output, ratio = forecast.needs(demand, job)
        held = demand.prefixes.look_up(job.chain, job.sizes)
        uniform = self._uniform
        holders = sum([bits for bits, _ in held])  # nobody is in two of them
        newest = oldest = candidates[0].node.picked
        scores: list[tuple[float, float, Seat, Candidate]] = []
        shortest = inf
        cold = False
        for candidate in candidates:
            node = candidate.node
            if node.picked > newest:
                newest = node.picked
            try:
                seat = node.work.seats[candidate.model]  # type: ignore[union-attr]
            except (AttributeError, KeyError):
                seat = forecast.seat(candidate)
            if seat.version != seat.work.version or now > seat.good_until:
                forecast.refresh(seat, now)
            fresh = tokens
            if holders & seat.held.bit:
                for bits, size in held:
                    if bits & seat.held.bit:
                        fresh -= size * ratio
                        break
            first = fresh * seat.prefill_s
            service = first + output * seat.decode_s
            if service < shortest:
                shortest = service
            if seat.cold:
                cold = True
                ready = seat.load_wait if seat.load_wait > seat.slot_wait else seat.slot_wait
            else:
                ready = seat.ready_at - now
                if node.picked < oldest:
                    oldest = node.picked
            if ready > 0.0:
                first += ready
                score = ready + service
            else:
                score = service
            score += first * _FIRST_TOKEN_WEIGHT + seat.toll
            if seat.press:
                score += seat.press * (service if service < seat.rest else seat.rest)
            score *= 1.0 + _TIE * uniform()
            scores.append((score, service, seat, candidate))
        if newest - oldest > _UNSEEN_AFTER:
            _favour_unseen(scores, newest)
        if cold:
            self._add_loads(scores, shortest, job, now, arrives)
        scores.sort(key=_FIRST)
        ranked = self.worth_now(scores, now - job.since, now)
        if not ranked:
            _, service, seat, _ = scores[0]
            self._promise(job, seat, service)
        if cold and arrives:
            self._try_out(scores, ranked, job)
        return ranked

    def _add_loads(
        self,
        scores: list[tuple[float, float, Seat, Candidate]],
        shortest: float,
        job: Job,
        now: float,
        arrives: bool,
    ) -> None:
        """What a load would cost later, for the places that it could make the best."""
        best = steady = inf
        comes = False
        colds = []
        for each in scores:
            score, service, seat, _ = each
            if seat.cold:
                colds.append(each)
            else:
                best = score if score < best else best
                there = service + seat.slot_wait
                steady = there if there < steady else steady
                comes = comes or seat.loading is not None
        best = best * _WAIT_GAIN + _WAIT_GAIN_SECONDS
        for place, (score, service, seat, candidate) in enumerate(scores):
            if score < best and seat.cold:
                scores[place] = (score + investment(seat, service - shortest, comes), service, seat, candidate)
        if arrives and shortest < steady < inf and not comes and self.start_load is not None:
            self._regret(colds, steady, job, now)

    def _nowhere(self, candidates: list[Candidate], waits_for: Seat, waited: float) -> bool:
        """Whether no place is free, and the one that is waited for is still one of them: then nothing has changed."""
        there = False
        for candidate in candidates:
            seat = self.forecast.seat(candidate)
            if seat.work.has_room(seat, waited):
                return False
            there = there or seat is waits_for
        return there

    def _only(self, candidates: list[Candidate], job: Job, now: float) -> list[Candidate]:
        seat = self.forecast.seat(candidates[0])
        # With nowhere else to go, only a limit that is known is a reason to wait here rather than there.
        if seat.work.has_room(seat, now - job.since, guessed=False):
            return candidates
        self._promise(job, seat, 1.0)
        return []

    def worth_now(
        self, scores: list[tuple[float, float, Seat, Candidate]], waited: float, now: float
    ) -> list[Candidate]:
        """Whom a request that has `waited` for so many seconds is sent to now, best first; none: it waits for the best.

        `scores` are sorted.
        """
        best, _, seat, _ = scores[0]
        if self._free(seat, waited, now):
            return [each[3] for each in scores]
        limit = best * _WAIT_GAIN + _WAIT_GAIN_SECONDS
        return [each[3] for each in scores if each[0] <= limit and self._free(each[2], waited, now)]

    def _free(self, seat: Seat, waited: float, now: float) -> bool:
        """Whether a request would start on it at once, or make it load."""
        if not seat.work.has_room(seat, waited):
            return False
        loading = seat.loading
        if now < seat.doubted_until:
            return False
        if seat.cold:
            if seat.work.loads:
                return False
            return not seat.work.must_be_idle(seat) or waited > seat.load_wait
        if seat.warm:
            return not seat.blocked
        return loading is None or now - loading.since > _LOAD_PATIENCE * loading.expected

    def _promise(self, job: Job, seat: Seat, service: float) -> None:
        job.seat, job.wait_for = seat, service
        if seat.work.node.foreign:
            self.forecast.on_look(seat.work.node)  # nobody else will say when those are over
        self.renew(job)

    def renew(self, job: Job) -> None:
        if job.seat is not None:
            job.seat.work.promise(job, job.wait_for)

    # -- those who wait

    def look_again(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.seat is not None:
                job.seat.work.withdraw(job)

    def left(self, job: Job) -> None:
        seat, job.seat = job.seat, None
        if seat is not None:
            seat.work.withdraw(job)

    def placed(self, candidate: Candidate, job: Job) -> Progress | None:
        self.left(job)
        return None if candidate.node.cloud else Progress(self.forecast, self.forecast.placed(candidate, job))

    def dropped(self, node: Node) -> None:
        self.forecast.drop(node)

    # -- loads for their own sake

    def _try_out(self, scores: list[tuple[float, float, Seat, Candidate]], ranked: list[Candidate], job: Job) -> None:
        """Makes nodes load the model that were never asked for anything and have nothing in memory.

        That drives nobody out, gives the model another home and, with its first answer there, tells how fast the node
        is, which no guess does. A few at a time, so that empty nodes are left for other models: one where the operator
        has told nodes apart, two where nothing is known of any. Then those with the most models come first, as what is
        learned of them counts for the most. Not for embeddings, whose small models would take the place of those that
        are slow to load.
        """
        if self.start_load is None or job.operation is Operation.EMBEDDING:
            return
        untried = [each for each in scores if each[2].cold and not each[2].work.tried]
        if not untried:
            return
        under_way = sum([each[2].loads_alone for each in scores])
        left = _TRIALS - under_way
        if left <= 0:
            return
        if any(each[2].power != scores[0][2].power for each in scores):
            left -= 1
        else:
            untried.sort(key=_models, reverse=True)
        chosen = ranked[0] if ranked else None
        empty = [each for _, _, seat, each in untried if each is not chosen and seat.work.may_be_tried(seat)]
        # Beside another trial, the last empty node is left for another model.
        for candidate in empty[: max(min(left, len(empty) - 1), 0 if under_way else 1)]:
            self.start_load(candidate, job)

    def _regret(self, colds: list[tuple[float, float, Seat, Candidate]], steady: float, job: Job, now: float) -> None:
        """Adds up what is lost because the model is not where it would do best; starts a load when that is enough.

        `steady` is what the request takes where the model is. Whoever rents until the rent has cost as much as to buy
        never pays more than twice of what was best.
        """
        ahead = max([each[2].share for each in colds])
        _, service_there, seat, candidate = min(colds, key=lambda each: each[1] * ahead + each[2].price)
        demand = seat.demand
        demand.regret *= exp((demand.regret_at - now) / _REGRET_SECONDS)
        demand.regret_at = now
        loss = max(0.0, steady - service_there - seat.press * min(service_there, seat.rest))
        demand.regret += loss
        if demand.regret + _AHEAD * seat.share * loss > seat.price:
            demand.regret = 0.0
            seat.work.wanted = (candidate, job, now + _WANTED_LOADS * seat.load_s)
            self._load_wanted(seat.work)

    def _load_wanted(self, work: Work) -> None:
        """Starts a load that pays, at a moment at which it makes nobody wait for those that it may drive out."""
        if work.wanted is None or self.start_load is None:
            return
        candidate, job, until = work.wanted
        seat, now = self.forecast.seat(candidate), self.forecast.clock()
        if seat.warm or seat.loading is not None or now > until:
            work.wanted = None
        elif not (work.must_be_idle(seat) or now < seat.doubted_until or work.loads):
            work.wanted = None
            self.start_load(candidate, job)

    # -- what is predicted

    def rehearsal(self) -> Policy:
        return _Rehearsal(self)

    def terms(self, candidates: list[Candidate], job: Job | None = None) -> list[Terms]:
        return [_terms(prediction) for prediction in self.explain(candidates, job or Job(_SOMETHING))]

    def first_token_seconds(self, candidates: list[Candidate], job: Job) -> float | None:
        if not candidates:
            return None
        return min(self.explain(candidates, job), key=score).first_token

    def explain(self, candidates: list[Candidate], job: Job) -> list[Prediction]:
        """Every term for every candidate, in their order."""
        seats = [self.forecast.seat(candidate) for candidate in candidates]
        plain = [self.forecast.prediction(seat, job) for seat in seats]
        best = min((each.service for each in plain), default=0.0)
        comes = any(seat.loading is not None for seat in seats)
        return [
            each._replace(investment=investment(seat, each.service - best, comes)) if seat.cold else each
            for seat, each in zip(seats, plain, strict=True)
        ]


class _Rehearsal(Policy):
    """The same order, without lots, and nobody waits or is counted for it."""

    def __init__(self, policy: ShortestExpectedDelay) -> None:
        self._policy = policy

    def rank(self, candidates: list[Candidate], job: Job | None = None) -> list[Candidate]:
        if not candidates or candidates[0].node.cloud:
            return candidates
        job = job or Job(_SOMETHING)
        forecast = self._policy.forecast
        scores = [
            (score(prediction), prediction.service, forecast.seat(candidate), candidate)
            for candidate, prediction in zip(candidates, self._policy.explain(candidates, job), strict=True)
        ]
        scores.sort(key=_FIRST)
        return self._policy.worth_now(scores, 0.0, forecast.clock()) or [scores[0][3]]  # it is what would be waited for


def score(prediction: Prediction) -> float:
    """What the choice goes by: a prediction's own score, with the wait for the first word counted more."""
    return prediction.score + _FIRST_TOKEN_WEIGHT * prediction.first_token


def _favour_unseen(scores: list[tuple[float, float, Seat, Candidate]], newest: int) -> None:
    """Lowers the scores of nodes that have the model in memory and were not chosen for long."""
    for place, (score, service, seat, candidate) in enumerate(scores):
        unseen = newest - candidate.node.picked
        if unseen > _UNSEEN_AFTER and not seat.cold and seat.loading is None:
            scores[place] = (score * _UNSEEN_BONUS ** (unseen // _UNSEEN_AFTER), service, seat, candidate)


def _models(scored: tuple[float, float, Seat, Candidate]) -> int:
    return len(scored[3].node.models or ())


def _terms(prediction: Prediction) -> Terms:
    terms = {f"{name}_seconds": value for name, value in prediction._asdict().items()}
    return {"score": score(prediction), "first_token_seconds": prediction.first_token, **terms}
