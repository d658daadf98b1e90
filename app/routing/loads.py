"""Models on their way into memory: loads that go on when the client that caused them leaves, and loads beforehand.

An engine that loads on demand gives a load up when its only request is closed. When others wait for the same model,
the request is therefore kept open here until its answer begins, and ended then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from app.domain import NodeState
from app.errors import HearthError, NodeFailure
from app.routing.asking import Asking
from app.routing.attempt import Attempt
from app.routing.forecast import Forecast, Progress
from app.routing.job import Job
from app.routing.obstacles import usable
from app.routing.plan import Plan
from app.routing.registry import Candidate
from app.routing.reply import Reply
from app.routing.work import Loading, Seat


class Loads:
    """Owns what goes on without a client. Close it before the connections to nodes are."""

    def __init__(
        self,
        asking: Asking,
        forecast: Forecast,
        on_trouble: Callable[[Candidate, NodeFailure | HearthError], None] = lambda candidate, failure: None,
    ) -> None:
        self._on_trouble = on_trouble
        self._asking = asking
        self.forecast = forecast
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, plan: Plan, attempt: Attempt) -> Reply:
        """As `Asking.ask`, but a load that others wait for is not given up with the request that caused it."""
        progress = attempt.progress
        if progress is None or not progress.carries:
            return await self._asking.ask(plan, attempt)
        asking = asyncio.create_task(self._asking.ask(plan, attempt), name="load")
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            if not self._adopted(asking, progress):
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                _close(asking)
            raise

    def _adopted(self, asking: asyncio.Task[Reply], progress: Progress) -> bool:
        if asking.done() or not self.forecast.wanted(progress.booking):
            return False
        handed = self.forecast.hand_over(progress.booking)
        if handed is None:
            return False
        self._own(self._finish(asking, *handed))
        return True

    async def _finish(self, asking: asyncio.Task[Reply], seat: Seat, loading: Loading) -> None:
        seconds = None
        try:
            reply = await asking
            seconds = self.forecast.clock() - loading.since
            reply.close()
        except (NodeFailure, HearthError):
            pass  # those who wait ask a node themselves, and hear why
        finally:
            asking.cancel()
            self.forecast.load_ended(seat, loading, seconds)

    def start(self, candidate: Candidate, job: Job) -> None:
        """Makes the node load the model, where its kind knows how."""
        node = candidate.node
        if usable(node) and node.state is NodeState.HEALTHY and node.known_kind.load is not None:
            # Known at once: other requests are decided on before the task runs.
            self._own(self._load(candidate, job, *self.forecast.load_begins(candidate)))

    async def _load(self, candidate: Candidate, job: Job, seat: Seat, loading: Loading) -> None:
        seconds = None
        try:
            await self._asking.load(candidate, job)
            seconds = self.forecast.clock() - loading.since
        except (NodeFailure, HearthError) as failure:
            self._on_trouble(candidate, failure)  # no client waits for it
        finally:
            self.forecast.load_ended(seat, loading, seconds)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="load")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _close(asking: asyncio.Task[Reply]) -> None:
    """Closes an answer that came in the very moment in which its client left."""
    if asking.done() and not asking.cancelled() and asking.exception() is None:
        asking.result().close()
