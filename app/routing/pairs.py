"""Generations that a prefill and a decode node share: which two, in what order, and what is done when one fails.

Whatever fails before the client has seen content leaves nothing behind on the prefill node.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from app.domain import Failure, Operation
from app.errors import HearthError, NodeFailure
from app.providers.base import Outgoing
from app.providers.disaggregation.base import Disaggregation, Handoff, PrefillBroken, PrefillNode
from app.routing.asking import Asking
from app.routing.attempt import Attempt
from app.routing.choice import Choice
from app.routing.links import Links
from app.routing.plan import Plan
from app.routing.registry import Node
from app.routing.reply import Reply
from app.upstream import NodeResponse

_PREFILL_BYTES = 16 * 2**20


class Pair(NamedTuple):
    """Two attempts that belong together."""

    prefill: Attempt
    decode: Attempt

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.prefill.candidate.node, self.decode.candidate.node


class Pairs:
    """Chooses pairs, and asks them."""

    def __init__(self, choice: Choice, asking: Asking, links: Links) -> None:
        self._choice = choice
        self._asking = asking
        self._links = links

    def serves_alone(self, node: Node) -> bool:
        protocol = self._links.protocol(node)
        return protocol is not None and protocol.plain_decode_allowed

    async def next(self, plan: Plan) -> Pair | None:
        """Takes a place on both nodes of the best pair; None when there is none for this request."""
        if plan.request.operation is Operation.EMBEDDING:
            return None
        for prefills, decodes in plan.pairs():
            prefill = await self._choice.among(plan, prefills)
            if prefill is None:
                continue
            try:
                decode = await self._choice.among(plan, plan.open(decodes))
            except BaseException:
                prefill.abandon()
                raise
            if decode is not None:
                plan.trail.tried -= 1  # two nodes, but one try
                return Pair(prefill, decode)
            prefill.abandon()
            plan.release(prefill.candidate)
        return None

    async def ask(self, plan: Plan, pair: Pair) -> Reply:
        """The decode node's answer, which has begun. Raises as `Asking.ask` does."""
        protocol = self._links.protocol(pair.nodes[0])
        assert protocol is not None, "the plan pairs only nodes whose kinds can"
        try:
            call = self._asking.call(plan, pair.decode.candidate)
            protocol.refuse(call)
            if not protocol.splits(call):
                pair.prefill.abandon()
                return await self._asking.ask(plan, pair.decode, protocol.decode(call, None))
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
        link = asyncio.ensure_future(self._links.ensure(prefill, decode))
        handoff: Handoff | None = None
        try:
            handoff = protocol.skipped or await self._prefill(plan, pair, protocol)
            self._hold(pair, handoff)
            if protocol.skipped is None:
                await link
            call = self._asking.call(plan, pair.decode.candidate)
            useful = None if handoff.finished else handoff
            reply = await self._asking.ask(plan, pair.decode, protocol.decode(call, useful))
        except NodeFailure:
            self._links.forget(prefill, decode)
            raise
        finally:
            link.cancel()
            await asyncio.gather(link, return_exceptions=True)
            if handoff is not None and (handoff.finished or not plan.committed):
                self._links.later(prefill, protocol.abandon(handoff))
            self._let_go(pair, handoff)
        return reply

    async def _prefill(self, plan: Plan, pair: Pair, protocol: Disaggregation) -> Handoff:
        """The prefill node's part, settled; its failure is its own, not the decode node's."""
        candidate = pair.prefill.candidate
        call = self._asking.call(plan, candidate)
        node = PrefillNode(candidate.node.spec.url)
        try:
            response = await self._asking.send(plan, candidate, protocol.prefill(call, node).outgoing)
            handoff = protocol.parse_prefill(call, node, await _whole(response))
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
        asking = asyncio.create_task(self._asking.ask(plan, pair.decode, protocol.decode(call, first.handoff)))
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
            await _whole(await self._asking.send(plan, pair.prefill.candidate, outgoing))
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
