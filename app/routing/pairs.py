"""Generations that a prefill and a decode node share: which two, in what order, and what is done when one fails.

Whatever fails before the client has seen content leaves nothing behind on the prefill node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from app.domain import Failure, Operation
from app.errors import HearthError, NodeFailure, Overloaded
from app.providers.base import Outgoing
from app.providers.disaggregation.base import Disaggregation, Handoff, PrefillBroken, PrefillNode
from app.routing.asking import Asking
from app.routing.attempt import Attempt
from app.routing.choice import Choice
from app.routing.links import Link, Links
from app.routing.plan import Plan
from app.routing.registry import Candidate, Node
from app.routing.reply import Reply
from app.upstream import NodeResponse

_PREFILL_BYTES = 16 * 2**20
_PARTED_SECONDS = 1.0  # how long a decode node that failed after prefill is asked last


class Pair(NamedTuple):
    """Two attempts that belong together."""

    prefill: Attempt
    decode: Attempt

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.prefill.candidate.node, self.decode.candidate.node


class Pairs:
    """Chooses pairs, and asks them."""

    def __init__(
        self, choice: Choice, asking: Asking, links: Links, on_leak: Callable[[Node], None] = lambda node: None
    ) -> None:
        """`on_leak` hears of a prefill node that keeps a cache which nobody can tell it to free."""
        self._on_leak = on_leak
        self._choice = choice
        self._asking = asking
        self._links = links
        self._parted: WeakKeyDictionary[Plan, set[tuple[Node, Node]]] = WeakKeyDictionary()

    def serves_alone(self, node: Node) -> bool:
        protocol = self._links.protocol(node)
        return protocol is not None and protocol.plain_decode_allowed

    async def next(self, plan: Plan) -> Pair | None:
        """Takes a place on both nodes of the best pair; None when there is none for this request."""
        if plan.request.operation is Operation.EMBEDDING:
            return None
        try:
            for prefills, decodes in plan.pairs():
                pair = await self._among(plan, prefills, decodes)
                if pair is not None:
                    return pair
        except Overloaded as error:
            plan.overloaded = error  # nodes that do all by themselves, and the cloud, may still have room
        return None

    async def _among(self, plan: Plan, prefills: list[Candidate], decodes: list[Candidate]) -> Pair | None:
        parted = self._parted.get(plan, set())
        for group in _unparted_first(prefills, {prefill for prefill, _ in parted}):
            left = {each: partners for each in group if (partners := self._partners(plan, each, decodes))}
            while left:
                prefill = await self._choice.among(plan, plan.open(left))
                if prefill is None:
                    break
                for partners in _unparted_first(left.pop(prefill.candidate), {decode for _, decode in parted}):
                    decode = await self._with_partner(plan, prefill, partners)
                    if decode is not None:
                        plan.trail.tried -= 1  # two nodes, but one try
                        return Pair(prefill, decode)
                self._take_back(plan, prefill)
        return None

    def _partners(self, plan: Plan, prefill: Candidate, decodes: list[Candidate]) -> list[Candidate]:
        parted = self._parted.get(plan, set())
        return [
            decode
            for decode in decodes
            if (prefill.node, decode.node) not in parted and not self._links.hopeless(prefill.node, decode.node)
        ]

    async def _with_partner(self, plan: Plan, prefill: Attempt, partners: list[Candidate]) -> Attempt | None:
        try:
            return await self._choice.among(plan, plan.open(partners))
        except BaseException:
            self._take_back(plan, prefill)
            raise

    def _take_back(self, plan: Plan, prefill: Attempt) -> None:
        prefill.abandon()
        plan.release(prefill.candidate)
        plan.trail.tried -= 1

    async def ask(self, plan: Plan, pair: Pair) -> Reply:
        """The decode node's answer, which has begun. Raises as `Asking.ask` does."""
        protocol = self._links.protocol(pair.nodes[0])
        assert protocol is not None, "the plan pairs only nodes whose kinds can"
        try:
            call = self._asking.call(plan, pair.decode.candidate)
            protocol.refuse(call)
            splits = protocol.splits(call)
            if not splits or protocol.skipped is not None:
                pair.prefill.abandon()
                outgoing = protocol.decode(call, protocol.skipped if splits else None)
                return await self._asking.ask(plan, pair.decode, outgoing)
            if protocol.concurrent:
                return await self._both(plan, pair, protocol)
            return await self._one_by_one(plan, pair, protocol)
        finally:
            if pair.prefill.open and not plan.committed:
                pair.prefill.abandon()
            if self._did_its_part(plan, pair):
                plan.release(pair.prefill.candidate)

    async def _one_by_one(self, plan: Plan, pair: Pair, protocol: Disaggregation) -> Reply:
        prefill, decode = pair.nodes
        linking = asyncio.create_task(self._links.ensure(prefill, decode), name="linking")
        handoff: Handoff | None = None
        try:
            handoff = await self._prefill(plan, pair, protocol)
            self._hold(pair, handoff)
            call = self._asking.call(plan, pair.decode.candidate)
            if handoff.finished:
                return await self._asking.ask(plan, pair.decode, protocol.decode(call, None))
            await self._linked(plan, pair, linking)
            return await self._together(plan, pair, protocol.decode(call, handoff))
        except NodeFailure as failure:
            # A prefill node that says what is wrong is the process that was linked; a busy node of either sort too.
            if failure.failure is not Failure.BUSY and (handoff is not None or failure.status is None):
                self._links.forget(linking)
            raise
        finally:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)
            if handoff is not None and (handoff.finished or not plan.committed):
                self._links.later(prefill, protocol.abandon(handoff))
            self._let_go(pair, handoff)

    async def _linked(self, plan: Plan, pair: Pair, linking: asyncio.Task[Link]) -> None:
        try:
            await linking
        except NodeFailure as failure:
            self._part(plan, pair, failure)
            raise

    async def _together(self, plan: Plan, pair: Pair, outgoing: Outgoing) -> Reply:
        """Asks the decode node to go on from what the prefill node has."""
        try:
            return await self._asking.ask(plan, pair.decode, outgoing)
        except NodeFailure as failure:
            if failure.failure in (Failure.SERVER_ERROR, Failure.ERROR_EVENT) and pair.decode.open:
                node = pair.decode.candidate.node
                node.penalty_until = max(node.penalty_until, time.monotonic() + _PARTED_SECONDS)
                self._part(plan, pair, failure)
            raise

    def _part(self, plan: Plan, pair: Pair, failure: NodeFailure) -> None:
        """Settles a failure of both together, which proves nothing against either.

        A prefill node that restarts makes all decode nodes fail, whose breakers would leave nobody. Each may still
        serve this request with another, and the decode node by itself.
        """
        failure.counts = False
        pair.decode.fail(failure)
        plan.failed(pair.decode.candidate, failure)
        plan.release(pair.decode.candidate)
        self._parted.setdefault(plan, set()).add(pair.nodes)

    async def _prefill(self, plan: Plan, pair: Pair, protocol: Disaggregation) -> Handoff:
        """The prefill node's part, settled; its failure is its own, not the decode node's."""
        candidate = pair.prefill.candidate
        call = self._asking.call(plan, candidate)
        node = PrefillNode(candidate.node.spec.url)
        try:
            response = await self._asking.send(plan, pair.prefill, protocol.prefill(call, node).outgoing)
            handoff = protocol.parse_prefill(call, node, await _whole(response))
            if handoff.leaks:
                self._on_leak(candidate.node)
        except NodeFailure as failure:
            if isinstance(failure, PrefillBroken):
                self._links.later(candidate.node, failure.abandon)
            self._blame_prefill(plan, pair, failure)
            raise
        except HearthError:
            pair.prefill.refuse()
            raise
        pair.prefill.succeed()
        return handoff

    async def _both(self, plan: Plan, pair: Pair, protocol: Disaggregation) -> Reply:
        """Asks both nodes at once. The prefill node's own answer is read and thrown away."""
        prefill = pair.nodes[0]
        node = PrefillNode(prefill.spec.url, await self._links.bootstrap_port(prefill))
        first = protocol.prefill(self._asking.call(plan, pair.prefill.candidate), node)
        call = self._asking.call(plan, pair.decode.candidate)
        reading = asyncio.create_task(self._read_away(plan, pair, first.outgoing), name="prefill")
        reading.add_done_callback(_heard)
        asking = asyncio.create_task(self._together(plan, pair, protocol.decode(call, first.handoff)), name="decode")
        try:
            done, _ = await asyncio.wait((reading, asking), return_when=asyncio.FIRST_COMPLETED)
            if reading in done and not asking.done():
                reading.result()  # raises when the prefill node failed: the decode node would wait for ever
            reply = await asking
        except BaseException:
            for task in (asking, reading):
                task.cancel()
            await asyncio.gather(asking, reading, return_exceptions=True)
            raise
        reply.owns(reading)
        return reply

    async def _read_away(self, plan: Plan, pair: Pair, outgoing: Outgoing) -> None:
        try:
            await _whole(await self._asking.send(plan, pair.prefill, outgoing))
        except NodeFailure as failure:
            self._blame_prefill(plan, pair, failure)
            raise
        except HearthError:
            pair.prefill.refuse()
            raise
        else:
            pair.prefill.succeed()
        finally:
            pair.prefill.abandon()  # does nothing after an outcome

    def _blame_prefill(self, plan: Plan, pair: Pair, failure: NodeFailure) -> None:
        pair.prefill.fail(failure)
        if not plan.committed:
            plan.failed(pair.prefill.candidate, failure)
            pair.decode.abandon()
            plan.release(pair.decode.candidate)

    def _did_its_part(self, plan: Plan, pair: Pair) -> bool:
        """Whether the prefill node may be asked again for this request."""
        return all(candidate is not pair.prefill.candidate for candidate, _ in plan.failures)

    def _hold(self, pair: Pair, handoff: Handoff) -> None:
        if handoff.session is not None:
            self._links.held.setdefault(pair.nodes, set()).add(handoff.session)

    def _let_go(self, pair: Pair, handoff: Handoff | None) -> None:
        held = self._links.held.get(pair.nodes)
        if held is not None and handoff is not None and handoff.session is not None:
            held.discard(handoff.session)
            if not held:
                del self._links.held[pair.nodes]


def _unparted_first(candidates: list[Candidate], parted: set[Node]) -> list[list[Candidate]]:
    """Those that have failed with nobody, and then the others."""
    groups = [[each for each in candidates if (each.node in parted) is late] for late in (False, True)]
    return [group for group in groups if group]


def _heard(task: asyncio.Task[None]) -> None:
    """Takes note of a failure that comes when the answer has begun, and no longer matters."""
    if not task.cancelled():
        task.exception()


async def _whole(response: NodeResponse) -> bytes:
    """An answer in one document."""
    parts, size = [], 0
    try:
        while data := await response.read():
            parts.append(data)
            size += len(data)
            if size > _PREFILL_BYTES:
                raise NodeFailure(Failure.MALFORMED, "the prefill node sent an answer of more than 16 MiB")
    finally:
        response.close()
    return b"".join(parts)
