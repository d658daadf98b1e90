"""Nodes that come, drain and go while Hearth runs, and that are still there after a restart.

A node that registers again is a new one: what runs on the old one settles its accounts with that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol
from urllib.parse import urlsplit

from app.domain import ModelInfo, NodeSpec, NodeState
from app.routing.node_store import NodeStore, StoredNode, StoreFull
from app.routing.registry import Node, Registry

_SAVE_AFTER_SECONDS = 0.2  # many changes at once are written once


class Watcher(Protocol):
    """Who looks after nodes."""

    def watch(self, node: Node) -> None: ...

    def forget(self, node: Node) -> None: ...


class Listener(Protocol):
    """Who hears of changes that were asked for here, and not of those that it brings itself."""

    def added(self, node: Node, listed: tuple[str, ...]) -> None: ...

    def removed(self, url: str) -> None: ...

    def drained(self, node: Node) -> None: ...


class Membership:
    """Changes who is in the registry."""

    def __init__(
        self,
        registry: Registry,
        make_node: Callable[[NodeSpec], Node],
        watcher: Watcher,
        store: NodeStore | None,
        on_trouble: Callable[[str], None],
        on_leave: Callable[[Node], None] = lambda node: None,
    ) -> None:
        self._registry = registry
        self._make_node = make_node
        self._watcher = watcher
        self._store = store
        self._on_trouble = on_trouble
        self._on_leave = on_leave
        self._added: dict[str, Node] = {}  # by URL: those that the settings do not name
        self._changed = asyncio.Event()
        self.listener: Listener | None = None

    @property
    def added(self) -> list[Node]:
        """Nodes that the settings do not name, or no longer as they are now."""
        return list(self._added.values())

    async def restore(self) -> None:
        """Takes back the nodes of the last run. They are asked before they get work."""
        if self._store is None:
            return
        for stored in await asyncio.to_thread(self._store.load):
            if self.find(stored.spec.url) is None:
                name = self._unique_name(stored.spec)
                self._join(replace(stored.spec, name=name)).latencies.extend(stored.latencies)
        for warning in self._store.warnings:
            self._on_trouble(warning)

    async def keep(self) -> None:
        """Writes changes down until it is cancelled, and then what is left of them."""
        if self._store is None:
            return
        try:
            while True:
                await self._changed.wait()
                await asyncio.sleep(_SAVE_AFTER_SECONDS)
                await self._save(self._store)
        finally:
            if self._changed.is_set():
                await self._save(self._store)

    async def _save(self, store: NodeStore) -> None:
        self._changed.clear()
        nodes = [StoredNode(node.spec, tuple(node.latencies)) for node in self._added.values()]
        writing = asyncio.create_task(self._write(store, nodes), name="nodes file")
        try:
            await asyncio.shield(writing)
        finally:
            # A thread goes on when its waiter is cancelled, and the last write must not overtake it.
            await asyncio.wait([writing])

    async def _write(self, store: NodeStore, nodes: list[StoredNode]) -> None:
        try:
            await asyncio.to_thread(store.save, nodes)
        except OSError as error:
            self._on_trouble(f"nodes could not be written to NODES_FILE: {error.strerror}")
        except StoreFull as error:
            self._on_trouble(f"nodes were not written to NODES_FILE: {error}")

    def find(self, url: str) -> Node | None:
        """The local node at this URL, however it is written."""
        wanted = same_address(url)
        return next((node for node in self._registry.local() if same_address(node.spec.url) == wanted), None)

    def add(self, spec: NodeSpec, listed: Iterable[str] = ()) -> Node:
        """Admits a node as soon as it answers. One at the same URL is replaced, with its counts and history.

        `listed` are models that it serves now; `spec.models`, where given, are those that it may ever be asked for.
        """
        listed = tuple(listed)
        node = self.take(spec, listed)
        if self.listener is not None:
            self.listener.added(node, listed)
        return node

    def remove(self, url: str) -> Node | None:
        """Forgets a node. What runs on it may end. Returns it, or None when there was none."""
        node = self.drop(url)
        if self.listener is not None:
            self.listener.removed(url)
        return node

    def drain(self, node: Node, draining: bool = True) -> None:
        """Gives a node no new requests, or gives it some again."""
        self.mark(node, draining)
        if self.listener is not None:
            self.listener.drained(node)

    # -- the same, as another replica did it: the listener, which says so, is not told

    def take(self, spec: NodeSpec, listed: Iterable[str] = ()) -> Node:
        self.drop(spec.url)
        node = self._join(replace(spec, name=self._unique_name(spec)))
        if listed:
            node.list_models(map(ModelInfo, listed))
        self._changed.set()
        return node

    def drop(self, url: str) -> Node | None:
        node = self.find(url)
        if node is None:
            return None
        node.draining = True  # nobody who holds it still may choose it
        self._watcher.forget(node)
        self._registry.remove(node)
        self._on_leave(node)
        if self._added.pop(same_address(url), None) is not None:
            self._changed.set()
        return node

    def mark(self, node: Node, draining: bool) -> None:
        node.draining = draining
        self._registry.on_change()

    def _unique_name(self, spec: NodeSpec) -> str:
        taken = {node.name for node in self._registry}
        wanted = spec.name or urlsplit(spec.url).netloc
        number, name = 1, wanted
        while name in taken:
            number += 1
            name = f"{wanted}#{number}"
        return name

    def _join(self, spec: NodeSpec) -> Node:
        node = self._make_node(spec)
        node.state, node.reason = NodeState.JOINING, "waits for its first answer"
        self._added[same_address(spec.url)] = node
        self._registry.add(node)
        self._watcher.watch(node)
        return node


def same_address(url: str) -> str:
    """What two ways of writing one URL have in common. The spelling itself is kept: some engines compare it."""
    parts = urlsplit(url.strip())
    port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
    return f"{parts.scheme.lower()}://{(parts.hostname or '').lower()}:{port}{parts.path.rstrip('/')}"
