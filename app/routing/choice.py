"""Who is asked next: takes a slot and the breaker's permit on the best node, tier by tier."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from app.domain import Outcome, Priority
from app.errors import Overloaded, SpendingRefused
from app.routing.admission import Admission, Hopeless, Outlook, QueueFull, Slot
from app.routing.attempt import Attempt, Observer
from app.routing.breaker import Permit
from app.routing.gate import Purse
from app.routing.job import Job
from app.routing.plan import Plan
from app.routing.policies import Policy
from app.routing.queue import PRIORITIES, QUEUE_SIZE, Standing
from app.routing.registry import Candidate
from app.routing.verdict import nobody_left


class Step(NamedTuple):
    """One attempt that would be made: `candidates` is how many there are to choose from, `fallback` the reason that
    the client is told."""

    candidate: Candidate
    candidates: int
    fallback: str
    waits: bool = False  # for a place on this node or another of its tier
    last_resort: bool = False


class Choice:
    """Chooses for every request alike.

    `queue_seconds` is the longest that one waits for a free node, and `queue_size` how many may wait on a route, where
    the route itself says nothing else.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        observer: Observer,
        queue_seconds: float,
        purse: Purse | None = None,
        spill_after_ms: float | None = None,
        queue_size: int = QUEUE_SIZE,
    ) -> None:
        self._policy = policy
        self._admission = admission
        self._observer = observer
        self._queue_seconds = queue_seconds
        self._purse = purse
        self._spill_after_ms = spill_after_ms
        self._queue_size = queue_size
        self._choices = 0

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def purse(self) -> Purse | None:
        return self._purse

    def queue_seconds(self, plan: Plan) -> float:
        """The longest that the request waits for a free node at a time."""
        return plan.route.queue.timeout_seconds or self._queue_seconds

    def standing(self, plan: Plan) -> Standing:
        """With what right the request waits."""
        route, caller, rules = plan.route, plan.request.caller, plan.route.queue
        rank = PRIORITIES.index(caller.priority or rules.priority or Priority.NORMAL)
        if plan.request.priority is not None:
            rank = max(rank, PRIORITIES.index(plan.request.priority))  # a client may stand back, and not push forward
        size = rules.size or self._queue_size
        return Standing(route.name, route.local or "", caller.id, caller.weight, rank, size)

    def outlook(self, plan: Plan) -> Outlook:
        """What the queue would be for the request."""
        return self._admission.outlook(self.standing(plan), self.queue_seconds(plan), asyncio.get_running_loop().time())

    async def rehearse(self, plan: Plan, attempts: int) -> list[Step]:
        """What `next` would give, one after the other, if every attempt failed and nothing else happened meanwhile.

        Takes nothing and changes nothing but the plan, which is of no use afterwards. Of nodes that are all full, or
        not worth it beside one that is, one is listed, and then whoever is asked when none falls free in time; these do
        not count as attempts.
        """
        policy, steps = self._policy.rehearsal(), list[Step]()
        while len(steps) - sum(step.waits for step in steps) < attempts:
            step = await self._rehearsed(plan, policy)
            if step is None:
                break
            steps.append(step)
            plan.choose(step.candidate)
            if not plan.more_candidates():
                break
        if not steps:
            resort = (each for each in plan.last_resort() if not each.node.full)
            steps = [Step(each, 1, _fallback(plan, each), last_resort=True) for each in resort][:1]
        return steps

    async def _rehearsed(self, plan: Plan, policy: Policy) -> Step | None:
        for candidates in plan.tiers():
            if candidates and candidates[0].node.cloud and self._purse is not None:
                refusal = (await self._purse.look(plan.request, plan.route, candidates[0])).refusal
                if refusal is not None:
                    plan.unpaid = refusal
                    plan.choose(candidates[0])
                    continue
            ranked = _busy_last(policy.rank(candidates, self.job(plan)))
            free = next((candidate for candidate in ranked if not candidate.node.full), None)
            if free is not None:
                return Step(free, len(candidates), _fallback(plan, free))
            if ranked and plan.overloaded is None:
                step = Step(ranked[0], len(candidates), _fallback(plan, ranked[0]), waits=True)
                plan.overloaded = self._too_full(plan, candidates)
                for each in candidates:  # none of them is asked when the wait was in vain
                    plan.choose(each)
                return step
        return None

    async def next(self, plan: Plan) -> Attempt:
        """Takes a slot and the breaker's permit on the best node, or raises what the client is told."""
        attempt = await self._in_order(plan)
        if attempt is None and plan.forgive_busy():
            attempt = await self._in_order(plan)
        attempt = attempt or self._last_resort(plan)
        if attempt is None:
            raise nobody_left(plan)
        return attempt

    async def _in_order(self, plan: Plan) -> Attempt | None:
        """Tier by tier; waits where a tier is only full, but not for ever when there is another."""
        plan.spill_seconds = self._spill_seconds(plan)
        for candidates in plan.tiers():
            try:
                attempt = await self._in_tier(plan, candidates)
            except Overloaded as error:
                plan.overloaded = error
            else:
                if attempt is not None:
                    return attempt
        if plan.overloaded is not None and plan.spill_seconds is not None:
            # The cloud did not take it: late is better than never.
            plan.overloaded = plan.spill_seconds = None
            return await self.among(plan, plan.local())
        if plan.overloaded is not None:
            raise plan.overloaded
        return None

    def _spill_seconds(self, plan: Plan) -> float | None:
        """How late the first token may be before the cloud is asked; None where it may not be for that."""
        after = plan.route.spill_after_ms or self._spill_after_ms
        if after is None or plan.cloud_refusal is not None or not plan.has_cloud():
            return None
        return after / 1000

    async def _in_tier(self, plan: Plan, candidates: list[Candidate]) -> Attempt | None:
        if not candidates or not candidates[0].node.cloud:
            job = self.job(plan)
            if plan.spill_seconds is not None and job is not None:
                predicted = self._policy.first_token_seconds(candidates, job)
                if predicted is not None and predicted > plan.spill_seconds:
                    raise self._too_full(plan, candidates)
            return await self.among(plan, candidates)
        if self._purse is None:
            return await self.among(plan, candidates)
        try:
            return await self._paid(plan, candidates[0], self._purse)
        except SpendingRefused as refusal:
            plan.unpaid = refusal
            plan.trail.unpaid = refusal.code, refusal.logged
            plan.choose(candidates[0])
            return None

    async def _paid(self, plan: Plan, candidate: Candidate, purse: Purse) -> Attempt | None:
        """An attempt on a cloud target, with what it may cost reserved. Raises `SpendingRefused`."""
        reservation = await purse.reserve(plan.request, plan.route, candidate, plan.trail)
        attempt = None
        try:
            attempt = await self.among(plan, plan.open([candidate]))
        finally:
            if attempt is None:
                reservation.release()
        if attempt is not None:
            attempt.reservation = reservation
        return attempt

    async def among(self, plan: Plan, candidates: list[Candidate]) -> Attempt | None:
        """An attempt on one of these, after a wait if they are only full; None when none of them can be asked."""
        while candidates:
            attempt = self._take(plan, candidates) or await self._queue(plan, candidates)
            if attempt is not None:
                return attempt
            candidates = plan.open(candidates)
        return None

    def _last_resort(self, plan: Plan) -> Attempt | None:
        for candidate in plan.last_resort():
            slot = self._admission.take(candidate)
            if slot is not None:
                return self._begin(plan, slot, None, 1)
        return None

    def _ranked(self, plan: Plan, candidates: list[Candidate]) -> list[Candidate]:
        """The policy's order, with nodes that just said that they are busy moved to the end."""
        return _busy_last(self._policy.rank(candidates, self.job(plan)))

    def job(self, plan: Plan) -> Job | None:
        """What the policy is told of the request, where it wants to know."""
        if plan.job is None and self._policy.schedules:
            plan.job = Job(plan.request)
            plan.job.num_ctx = plan.route.num_ctx
        return plan.job

    def _take(self, plan: Plan, candidates: list[Candidate]) -> Attempt | None:
        for candidate in self._ranked(plan, candidates):
            slot = self._admission.take(candidate)
            if slot is not None and (attempt := self._permitted(plan, slot, len(candidates))):
                return attempt
        return None

    async def _queue(self, plan: Plan, candidates: list[Candidate]) -> Attempt | None:
        """Waits for a place on a local node: no other has a limit. None: there is none to wait for any more."""
        job = plan.job
        if not ((job is not None and job.seat is not None) or any(candidate.node.full for candidate in candidates)):
            return None
        try:
            slot = await self._wait(plan, candidates)
        except BaseException:
            self._forget(plan)
            raise
        finally:
            if job is not None:
                self._policy.left(job)
        attempt = None if slot is None else self._permitted(plan, slot, len(candidates))
        if attempt is None:
            self._forget(plan)
        return attempt

    async def _wait(self, plan: Plan, candidates: list[Candidate]) -> Slot | None:
        """Raises `Overloaded` after as long as it may wait; at once where another tier was too full already."""
        if plan.overloaded is not None:
            raise plan.overloaded
        trail, began, let_in = plan.trail, time.perf_counter(), True
        try:
            slot = await self._admission.wait(
                lambda: plan.like(candidates),
                self._patience(plan),
                lambda now: self._first_free(plan, now),
                plan.job,
                self.standing(plan),
            )
        except TimeoutError as error:
            trail.queue_refusal = "timeout" if plan.spill_seconds is None else "spill"
            raise self._too_full(plan, candidates) from error
        except Overloaded as error:
            trail.queue_refusal = error.reason if plan.spill_seconds is None else "spill"
            let_in = not isinstance(error, QueueFull | Hopeless)
            raise
        finally:
            if let_in:
                trail.queued_seconds += time.perf_counter() - began
        trail.queue_refusal = ""
        return slot

    def _patience(self, plan: Plan) -> float:
        """Seconds that the request may wait from now on."""
        seconds = min(self.queue_seconds(plan), plan.deadline - asyncio.get_running_loop().time())
        if plan.spill_seconds is not None:
            seconds = min(seconds, max(0.0, plan.spill_seconds - plan.trail.queued_seconds))
        return seconds

    def _too_full(self, plan: Plan, candidates: list[Candidate]) -> Overloaded:
        now = asyncio.get_running_loop().time()
        return Overloaded(
            "no node became free in time; try again later, or raise max_concurrency",
            retry_after_seconds=self._admission.retry_after_seconds(self.standing(plan), candidates, now),
        )

    def _first_free(self, plan: Plan, candidates: list[Candidate]) -> Candidate | None:
        """Where one that waits may go now. The policy hears of it at once, as it asks for the next one at once."""
        ranked = self._ranked(plan, candidates) if self._policy.schedules else candidates
        free = next((candidate for candidate in ranked if not candidate.node.full), None)
        if free is not None and plan.job is not None:
            plan.progress = self._policy.placed(free, plan.job)
        return free

    def _forget(self, plan: Plan) -> None:
        """The request does not go where it was to go."""
        progress, plan.progress = plan.progress, None
        if progress is not None:
            progress.ended(Outcome.ABANDONED, None, None)

    def _permitted(self, plan: Plan, slot: Slot, candidates: int) -> Attempt | None:
        permit = slot.candidate.node.breaker.acquire()
        if permit is None:
            slot.release()
            return None
        return self._begin(plan, slot, permit, candidates)

    def _begin(self, plan: Plan, slot: Slot, permit: Permit | None, candidates: int) -> Attempt:
        candidate, trail = slot.candidate, plan.trail
        self._choices += 1
        candidate.node.picked = self._choices
        plan.choose(candidate)
        trail.node, trail.tier, trail.model = candidate.node.name, candidate.node.spec.tier, candidate.model
        trail.spec = candidate.node.spec
        trail.candidates = candidates
        trail.tried += 1
        trail.fallback = _fallback(plan, candidate)
        attempt = Attempt(slot, permit, trail, self._observer)
        if plan.job is not None:
            attempt.progress, plan.progress = plan.progress or self._policy.placed(candidate, plan.job), None
        return attempt


def _fallback(plan: Plan, candidate: Candidate) -> str:
    """Why it is not the first choice that is asked; what was said so far where there is nothing new."""
    if plan.failures and not plan.repeats(candidate):
        return plan.failures[-1][1].failure
    if candidate.node.cloud and plan.route.local is not None:
        return "no_local_node" if plan.overloaded is None else "overloaded"
    return plan.trail.fallback


def _busy_last(ranked: list[Candidate]) -> list[Candidate]:
    now = time.monotonic()
    for candidate in ranked:
        if candidate.node.penalty_until > now:
            return sorted(ranked, key=lambda candidate: candidate.node.penalty_until > now)
    return ranked
