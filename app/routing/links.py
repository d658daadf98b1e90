"""Links between prefill and decode nodes: built once for each pair, by whoever needs it first, and built anew when
either node has come back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Protocol

from app.domain import Failure
from app.errors import NodeFailure
from app.providers.disaggregation.base import Disaggregation, NodeRequest, Side
from app.routing.registry import Node

_LINK_SECONDS = 30.0
_TRIES = 3
_PAUSE_SECONDS = 0.2

Key = tuple[Node, int, Node, int]  # the two nodes, each with its incarnation


class NodeCaller(Protocol):
    """Makes the calls beside those that generate."""

    async def call(self, node: Node, method: str, path: str, body: bytes | None) -> bytes:
        """The body of an answer of status 200. Raises `NodeFailure`."""
        ...


class Links:
    """All links of the gateway, and the calls that tidy up after generations that came to nothing."""

    def __init__(self, caller: NodeCaller, protocols: Mapping[str, Disaggregation]) -> None:
        self._caller = caller
        self._protocols = protocols
        self._links: dict[Key, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._left_over: list[tuple[Node, NodeRequest]] = []
        self._ports: dict[tuple[Node, int], int | None] = {}
        self.held: dict[tuple[Node, Node], set[int]] = {}  # sessions on a prefill node that a decode node is to fetch

    def protocol(self, node: Node) -> Disaggregation | None:
        """How nodes of this kind share generations; None when they do not."""
        return None if node.kind is None else self._protocols.get(node.kind.name)

    async def bootstrap_port(self, node: Node) -> int | None:
        """Where SGLang's engines meet at this prefill node; None when it does not say, and has the usual port."""
        key = (node, node.incarnation)
        if key not in self._ports:
            try:
                answer = await self._caller.call(node, "GET", "/server_info", None)
            except NodeFailure:
                return None
            self._ports = {kept: port for kept, port in self._ports.items() if kept[0] is not node}
            self._ports[key] = _bootstrap_port(answer)
        return self._ports[key]

    async def ensure(self, prefill: Node, decode: Node) -> None:
        """Returns once the two are linked. Raises `NodeFailure`. One handshake serves all who wait for it."""
        key = (prefill, prefill.incarnation, decode, decode.incarnation)
        link = self._links.get(key)
        if link is None:
            self.forget(prefill, decode)
            link = self._links[key] = asyncio.create_task(self._build(prefill, decode), name="link")
            link.add_done_callback(lambda done: self._built(key, done))
        await asyncio.shield(link)

    def forget(self, prefill: Node, decode: Node) -> None:
        """The next generation of the two begins with a new handshake."""
        for key in [key for key in self._links if key[0] is prefill and key[2] is decode and self._links[key].done()]:
            del self._links[key]

    def drop(self, node: Node) -> None:
        """Undoes the links of a node that goes."""
        for key in [key for key in self._links if node in (key[0], key[2])]:
            self._links.pop(key).cancel()
            self._chore(self._drop(key[0], key[2]))

    def later(self, node: Node, request: NodeRequest | None) -> None:
        """Makes a call that nobody waits for, and keeps it for `tidy` when it fails."""
        if request is not None:
            self._chore(self._free(node, request))

    async def warm_up(self, pairs: Iterable[tuple[Node, Node]]) -> None:
        """Links all these pairs at once. Raises the first `NodeFailure`."""
        await asyncio.gather(*(self.ensure(prefill, decode) for prefill, decode in pairs))

    async def tidy(self) -> int:
        """Makes the calls again that failed; returns how many still do."""
        left, self._left_over = self._left_over, []
        await asyncio.gather(*(self._free(node, request) for node, request in left))
        return len(self._left_over)

    async def close(self) -> None:
        """Ends what is under way; what frees a node's memory may take a second."""
        links = list(self._links.values())
        for link in links:
            link.cancel()
        if self._chores:
            await asyncio.wait(self._chores, timeout=1)
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*links, *self._chores, return_exceptions=True)

    def _built(self, key: Key, link: asyncio.Task[None]) -> None:
        """A link that failed is not kept: the next who needs it tries again."""
        if (link.cancelled() or link.exception() is not None) and self._links.get(key) is link:
            del self._links[key]

    async def _build(self, prefill: Node, decode: Node) -> None:
        for number in range(_TRIES):
            try:
                async with asyncio.timeout(_LINK_SECONDS):
                    return await self._shake_hands(prefill, decode)
            except TimeoutError as error:
                raise NodeFailure(Failure.CONNECT_TIMEOUT, "the link was not built in time", counts=False) from error
            except NodeFailure as failure:
                # Nodes that do not fit together will not fit better the next time.
                if not failure.counts or number == _TRIES - 1:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS * 2**number)
        return None

    async def _shake_hands(self, prefill: Node, decode: Node) -> None:
        protocol = self.protocol(prefill)
        steps = protocol.link_steps(prefill.spec.url, decode.spec.url) if protocol else None
        if steps is None:
            return
        try:
            requests = next(steps)
            while True:
                requests = steps.send(await self._all(prefill, decode, requests))
        except StopIteration:
            pass

    async def _all(self, prefill: Node, decode: Node, requests: Sequence[NodeRequest]) -> list[bytes]:
        sides = {Side.PREFILL: prefill, Side.DECODE: decode}
        return await asyncio.gather(*(self._call(sides[request.side], request) for request in requests))

    async def _call(self, node: Node, request: NodeRequest) -> bytes:
        return await self._caller.call(node, request.method, request.path, request.body)

    async def _drop(self, prefill: Node, decode: Node) -> None:
        protocol = self.protocol(prefill)
        if protocol is None:
            return
        sessions = self.held.pop((prefill, decode), set())
        for batch in protocol.drop_steps(prefill.spec.url, decode.spec.url, sessions):
            sides = {Side.PREFILL: prefill, Side.DECODE: decode}
            await asyncio.gather(*(self._call(sides[each.side], each) for each in batch), return_exceptions=True)

    async def _free(self, node: Node, request: NodeRequest) -> None:
        try:
            await self._call(node, request)
        except NodeFailure:
            self._left_over.append((node, request))

    def _chore(self, work: Coroutine[None, None, None]) -> None:
        chore = asyncio.create_task(work, name="chore")
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)


def _bootstrap_port(answer: bytes) -> int | None:
    try:
        port = json.loads(answer)["disaggregation_bootstrap_port"]
    except (ValueError, TypeError, KeyError):
        return None
    return port if isinstance(port, int) else None
