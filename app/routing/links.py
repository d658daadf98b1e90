"""Links between prefill and decode nodes: built once for each pair, by whoever needs it first, and built anew when
either node has come back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakSet

from app.domain import Failure
from app.errors import NodeFailure
from app.providers.disaggregation.base import Disaggregation, LinkRefused, NodeRequest, Side
from app.routing.registry import Node

_LINK_SECONDS = 30.0
_TRIES = 3
_PAUSE_SECONDS = 0.2
_HOPELESS_SECONDS = 2.0  # how long two that could not be linked are no pair
_REFUSED_SECONDS = 30.0  # likewise when they do not fit together
_LEFT_OVER_MAX = 10_000

Key = tuple[Node, int, Node, int]  # the two nodes, each with its incarnation
Link = asyncio.Task[None]


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
        self._links: dict[Key, Link] = {}
        self._hopeless: dict[Key, float] = {}  # until when, on the monotonic clock
        self._chores: set[asyncio.Task[None]] = set()
        self._drops: dict[tuple[str, str], asyncio.Task[None]] = {}  # under way, by the URLs of the two
        self._left_over: deque[tuple[Node, int, NodeRequest]] = deque(maxlen=_LEFT_OVER_MAX)
        self._gone: WeakSet[Node] = WeakSet()
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
            except NodeFailure as failure:
                if failure.status is None:
                    return None
                answer = b""  # it has no such page, and need not be asked again
            self._ports = {kept: port for kept, port in self._ports.items() if kept[0] is not node}
            port = _bootstrap_port(answer)
            if node in self._gone:
                return port
            self._ports[key] = port
        return self._ports[key]

    async def ensure(self, prefill: Node, decode: Node) -> Link:
        """Returns once the two are linked. Raises `NodeFailure`. One handshake serves all who wait for it."""
        if prefill in self._gone or decode in self._gone:
            raise _left()
        key = _key(prefill, decode)
        link = self._links.get(key)
        if link is None:
            self._outdate(prefill, decode)
            link = self._links[key] = asyncio.create_task(self._build(prefill, decode), name="link")
            link.add_done_callback(lambda done: self._built(key, done))
        await asyncio.wait((link,))
        if link.cancelled():
            raise _left()
        link.result()
        return link

    def hopeless(self, prefill: Node, decode: Node) -> bool:
        """Whether the two could not be linked a moment ago."""
        return self._hopeless.get(_key(prefill, decode), 0.0) > time.monotonic()

    def forget(self, linking: asyncio.Task[Link]) -> None:
        """The next generation of the two begins with a new handshake, unless one has been made meanwhile."""
        if linking.done() and not linking.cancelled() and linking.exception() is None:
            used = linking.result()
            self._links = {key: link for key, link in self._links.items() if link is not used}

    def drop(self, node: Node) -> None:
        """Undoes the links of a node that goes, and forgets all about it."""
        self._gone.add(node)
        keys = [key for key in self._links if node in (key[0], key[2])]
        pairs = {(key[0], key[2]) for key in keys} | {pair for pair in self.held if node in pair}
        for key in keys:
            self._links.pop(key).cancel()
        for prefill, decode in pairs:
            self._begin_drop(prefill, decode)
        self._hopeless = {key: until for key, until in self._hopeless.items() if node not in (key[0], key[2])}
        self._ports = {key: port for key, port in self._ports.items() if key[0] is not node}
        self._left_over = deque((each for each in self._left_over if each[0] is not node), maxlen=_LEFT_OVER_MAX)

    def _begin_drop(self, prefill: Node, decode: Node) -> None:
        urls = (prefill.spec.url, decode.spec.url)
        chore = self._drops[urls] = self._chore(self._drop(prefill, decode))

        def over(done: asyncio.Task[None]) -> None:
            if self._drops.get(urls) is done:
                del self._drops[urls]

        chore.add_done_callback(over)

    def _outdate(self, prefill: Node, decode: Node) -> None:
        """Forgets the links of the two as they were before one of them came back."""
        for key in [key for key in self._links if key[0] is prefill and key[2] is decode]:
            self._links.pop(key).cancel()
        self._hopeless = {key: until for key, until in self._hopeless.items() if (key[0], key[2]) != (prefill, decode)}

    def later(self, node: Node, request: NodeRequest | None) -> None:
        """Makes a call that nobody waits for, and keeps it for `tidy` when it fails."""
        if request is not None:
            self._chore(self._free(node, request))

    async def warm_up(self, pairs: Iterable[tuple[Node, Node]]) -> None:
        """Links all these pairs at once. Raises a `NodeFailure` that names all that could not be."""
        links = await asyncio.gather(*(self.ensure(*pair) for pair in pairs), return_exceptions=True)
        failures = [link for link in links if isinstance(link, BaseException)]
        for failure in failures:
            if not isinstance(failure, NodeFailure):
                raise failure
        if failures:
            raise NodeFailure(Failure.CONNECT, "; ".join(dict.fromkeys(map(str, failures))), counts=False)

    async def tidy(self) -> int:
        """Makes the calls again that failed; returns how many still do.

        A node that has come back holds nothing from before, and may have given the numbers to others.
        """
        left = [each for each in self._left_over if each[0].incarnation == each[1]]
        self._left_over.clear()
        await asyncio.gather(*(self._free(node, request) for node, _, request in left))
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
        """A link that failed is not kept: it is tried again, but not at once."""
        failure = None if link.cancelled() else link.exception()
        if failure is not None and not {key[0], key[2]} & set(self._gone):
            seconds = _REFUSED_SECONDS if isinstance(failure, LinkRefused) else _HOPELESS_SECONDS
            self._hopeless[key] = time.monotonic() + seconds
        if (link.cancelled() or failure is not None) and self._links.get(key) is link:
            del self._links[key]

    async def _build(self, prefill: Node, decode: Node) -> None:
        drop = self._drops.get((prefill.spec.url, decode.spec.url))
        if drop is not None:  # of a node that was there before: it would undo the new link
            await asyncio.wait((drop,))
        for number in range(_TRIES):
            try:
                async with asyncio.timeout(_LINK_SECONDS):
                    return await self._shake_hands(prefill, decode)
            except TimeoutError as error:
                raise NodeFailure(Failure.CONNECT_TIMEOUT, "the link was not built in time", counts=False) from error
            except NodeFailure as failure:
                # Nodes that do not fit together, and those that are not there, will not be better in a moment.
                silent = failure.failure in (Failure.CONNECT, Failure.CONNECT_TIMEOUT)
                if silent or not failure.counts or number == _TRIES - 1:
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
        return await asyncio.gather(*(self._named_call(sides[request.side], request) for request in requests))

    async def _named_call(self, node: Node, request: NodeRequest) -> bytes:
        try:
            return await self._call(node, request)
        except NodeFailure as failure:
            message = f"{request.side} node {node.spec.url}: {failure.message}"
            raise NodeFailure(failure.failure, message, status=failure.status, sent=failure.sent) from failure

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
        incarnation = node.incarnation
        try:
            await self._call(node, request)
        except NodeFailure:
            if node not in self._gone:
                self._left_over.append((node, incarnation, request))

    def _chore(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        chore = asyncio.create_task(work, name="chore")
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)
        return chore


def _left() -> NodeFailure:
    return NodeFailure(Failure.CONNECT, "one of the two nodes left before they were linked", counts=False)


def _key(prefill: Node, decode: Node) -> Key:
    return prefill, prefill.incarnation, decode, decode.incarnation


def _bootstrap_port(answer: bytes) -> int | None:
    try:
        port = json.loads(answer)["disaggregation_bootstrap_port"]
    except (ValueError, TypeError, KeyError):
        return None
    return port if isinstance(port, int) else None
