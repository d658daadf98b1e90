"""What replicas tell each other: requests in flight on each node, breakers, and nodes that come and go at run time.

All of it happens in the background. Requests are never held up: they see what others last said. Counts that changed are
sent every 50 ms, and all that a replica knows once a second, so that a message that is lost does no harm.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from typing import Any

import orjson

from app.domain import NodeSpec
from app.routing.membership import Membership
from app.routing.registry import Node, Registry
from app.sharing.counts import Counts
from app.sharing.link import PREFIX, Link, LinkDown
from app.sharing.periods import now_ms
from app.sharing.presence import Presence
from app.sharing.roster import Roster
from app.sharing.transitions import Transitions

CHANNEL = f"{PREFIX}fleet"

_TICK_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_JITTER = 0.1


class Fleet:
    """This process as one of many. Create it before the nodes file is read, and `start` it after.

    `declared` are the nodes of the settings. `on_freed` hears of nodes on which other replicas gave places back;
    `on_trouble` gets a message and fields, once for each kind of trouble until that is over.
    """

    def __init__(
        self,
        link: Link,
        registry: Registry,
        membership: Membership,
        instance_id: str,
        *,
        declared: Iterable[NodeSpec],
        on_freed: Callable[[Node], None],
        on_trouble: Callable[..., None],
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        self.instance_id = instance_id
        self._link = link
        self._registry = registry
        self._on_trouble = on_trouble
        self._wake = asyncio.Event()
        self._counts = Counts(on_freed)
        self._transitions = Transitions(instance_id, now_ms, self._wake.set)
        self._roster = Roster(link, membership, declared, instance_id, now_ms, self._wake.set)
        self._presence = Presence(link, instance_id)
        self._nodes: list[Node] = []
        self._joined = False
        self._roster_changed = True
        self._beat_due = 0.0
        self._refused = False
        link.subscribe(CHANNEL, self._hear)
        link.on_change.append(self._link_changed)

    @property
    def peers(self) -> Set[str]:
        """The other replicas that were heard of in the last 3 s."""
        return self._counts.peers

    async def alive(self) -> frozenset[str] | None:
        """Every replica that is alive, with this one; None when nobody can say. See `Presence.alive`."""
        return await self._presence.alive()

    async def start(self) -> None:
        """Takes the nodes that other replicas know, if they can be asked."""
        self._roster.restored()
        self._place()
        with suppress(LinkDown):
            await self._beat()
        self._place()

    async def run(self) -> None:
        """Tells and learns until it is cancelled, and then says goodbye."""
        try:
            while True:
                await self._tick()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_SECONDS):
                        await self._wake.wait()
        except Exception as error:
            # Nobody waits for this task before the end.
            self._on_trouble("this process shares nothing with others any more", reason=repr(error))
            raise
        finally:
            with suppress(LinkDown):
                await self._say("bye", None)
                await self._presence.leave()

    async def _tick(self) -> None:
        self._wake.clear()
        self._place()
        now = time.monotonic()
        self._counts.forget_silent(now)
        if not self._link.up:
            return
        try:
            if now >= self._beat_due:
                await self._beat()
                self._beat_due = now + _BEAT_SECONDS * random.uniform(1 - _JITTER, 1)
            else:
                await self._tell_changes()
            self._refused = False
        except LinkDown as error:
            # The link says itself when it goes down; a server that refuses commands is another matter.
            if self._link.up and not self._refused:
                self._refused = True
                self._on_trouble("replicas could not be told what happens here", reason=str(error))

    async def _beat(self) -> None:
        """Everything that others may have missed, and everything that we may have missed."""
        first = await self._presence.beat()
        if first and not self._joined:
            await self._roster.begin()
        self._joined = True
        await self._sync_roster(read=self._roster_changed or await self._roster.stale())
        counts = self._counts.all()
        await self._say("all", [{p: n for p, n in counts.items() if n}, self._transitions.all()])
        self._counts.told(counts)

    async def _tell_changes(self) -> None:
        transitions = self._transitions.changes()
        if transitions:
            await self._say("breakers", transitions)
        await self._sync_roster(read=self._roster_changed)
        counts = self._counts.changes()
        if counts:
            await self._say("counts", counts)
            self._counts.told(counts)

    async def _sync_roster(self, *, read: bool) -> None:
        if read:
            self._roster_changed = False
            await self._roster.read()
            self._place()
        if await self._roster.write():
            await self._say("nodes", None)

    async def _say(self, what: str, content: Any) -> None:
        await self._link.publish(CHANNEL, orjson.dumps([self.instance_id, what, content], default=list))

    def _hear(self, message: bytes) -> None:
        replica, what, content = orjson.loads(message)
        if replica != self.instance_id:
            self._take(replica, what, content)

    def _take(self, replica: str, what: str, content: Any) -> None:
        now = time.monotonic()
        if replica not in self._counts.peers and what != "bye":
            self._beat_due = 0.0  # it is new here, and knows nothing of us
            self._wake.set()
        if what == "counts":
            self._counts.hear(replica, content, now, whole=False)
        elif what == "all":
            counts, transitions = content
            self._counts.hear(replica, counts, now, whole=True)
            self._transitions.hear(transitions, self._roster.since)
        elif what == "breakers":
            self._transitions.hear(content, self._roster.since)
        elif what == "nodes":
            self._roster_changed = True
            self._wake.set()
        elif what == "bye":
            self._counts.forget(replica)

    def _link_changed(self, up: bool) -> None:
        if up:
            self._beat_due = 0.0
            self._roster_changed = True
            self._wake.set()

    def _place(self) -> None:
        nodes = list(self._registry)
        if nodes != self._nodes:
            _shuffle([node for node in nodes if node not in self._nodes])
            self._nodes = nodes
            self._counts.place(nodes)
            self._transitions.place(self._counts.places)


def _shuffle(nodes: list[Node]) -> None:
    """Puts nodes that were never chosen into an order of this process's own, or all replicas would begin with one."""
    new = [node for node in nodes if node.picked == 0]
    for node, turn in zip(new, random.sample(range(-len(new), 0), len(new)), strict=True):
        node.picked = turn
