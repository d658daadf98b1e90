"""Nodes that come, drain and go at run time, on all replicas. They are kept in a Redis hash, an entry for each URL.

Of two entries for one URL the newer one holds, wherever it comes from: a replica that was cut off brings its own along
when it is back. A node's API key is in its entry if it was given one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from app.domain import NodeSpec
from app.routing.membership import Membership, same_address
from app.routing.node_store import StoredNode, node_entry, read_node
from app.routing.registry import Node
from app.sharing.link import PREFIX, Link, Script

_NODES = f"{PREFIX}nodes"
_VERSION = f"{PREFIX}nodes:version"
_MAX_ENTRIES = 2000
_REMOVED_MS = 86_400_000  # how long it is remembered that a node was removed
_RESTORED = 1  # when a node of the nodes file came: before everything else

# Keeps of each entry the newer one, and marks that something has changed. Where all were older nothing has: replicas
# that cannot read the newer one would otherwise write for ever.
_PUT = Script("""
local written = 0
for i = 2, #ARGV, 2 do
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  local new = cjson.decode(ARGV[i + 1])
  local old = held and cjson.decode(held)
  if not old or new.at > old.at or (new.at == old.at and new.by > old.by) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    written = 1
  end
end
if written == 1 then redis.call('SET', KEYS[2], ARGV[1]) end
return written
""")
# What was done to nodes of the settings holds until all replicas have ended, as it does for one.
_BEGIN = Script("""
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local entry = cjson.decode(all[i + 1])
  if entry.declared and (entry.removed or entry.node == cjson.null) then redis.call('HDEL', KEYS[1], all[i]) end
end
redis.call('SET', KEYS[2], ARGV[1])
return 1
""")


@dataclass(frozen=True, slots=True)
class Entry:
    """What holds of one URL. Times are milliseconds since 1970."""

    url: str
    at: int  # when it was changed
    by: str
    joined: int = 0  # when the node came; 0 = with the settings
    node: dict[str, Any] | None = None  # as in the nodes file; None = as in the settings
    listed: tuple[str, ...] = ()
    draining: bool = False
    removed: bool = False
    declared: bool = False  # the settings name the URL

    def newer(self, other: Entry | None) -> bool:
        return other is None or (self.at, self.by) > (other.at, other.by)


class Roster:
    """Brings a process's membership and the hash together. `on_change` hears of changes that were asked for here."""

    def __init__(
        self,
        link: Link,
        membership: Membership,
        declared: Iterable[NodeSpec],
        instance_id: str,
        now_ms: Callable[[], int],
        on_change: Callable[[], None],
    ) -> None:
        self._link = link
        self._membership = membership
        self._declared = frozenset(same_address(spec.url) for spec in declared)
        self._instance_id = instance_id
        self._now_ms = now_ms
        self._on_change = on_change
        self._entries: dict[str, Entry] = {}
        self._unsaved: set[str] = set()
        self._writes = 0
        self._version: bytes | None = None  # of the hash as we know it
        self._first_read = True
        membership.listener = self

    def restored(self) -> None:
        """Takes the nodes that the nodes file gave back. Whatever else is known of their URLs is newer."""
        for node in self._membership.added:
            if same_address(node.spec.url) not in self._entries:
                self._note(self._entry(node.spec.url, at=_RESTORED, joined=_RESTORED, node=_encoded(node)))

    def since(self, node: Node) -> int:
        """When the node came, in milliseconds since 1970; 0 = with the settings."""
        entry = self._entries.get(same_address(node.spec.url))
        return 0 if entry is None else entry.joined

    # -- what was asked for here

    def added(self, node: Node, listed: tuple[str, ...]) -> None:
        entry = self._entry(node.spec.url, node=_encoded(node), listed=listed)
        self._note(replace(entry, joined=entry.at))

    def removed(self, url: str) -> None:
        """Also for a URL that is unknown here: another replica may have got to know it a moment ago."""
        before = self._entries.get(same_address(url))
        if before is not None or len(self._entries) < _MAX_ENTRIES:
            self._note(self._entry(url, joined=before.joined if before else 0, removed=True))

    def drained(self, node: Node) -> None:
        before = self._entries.get(same_address(node.spec.url))
        entry = before or self._entry(node.spec.url)
        self._note(replace(entry, at=self._at(entry.url), by=self._instance_id, draining=node.draining))

    # -- with the server; all of these raise LinkDown

    async def begin(self) -> None:
        """For the first replica that there is."""
        await self._link.script(_BEGIN, [_NODES, _VERSION], [self._new_version()])

    async def stale(self) -> bool:
        """Whether the hash is another than the one that we know."""
        return self._version is None or await self._link.call("GET", _VERSION) != self._version

    async def read(self) -> None:
        """Takes what is newer in the hash, and notes for `write` what is newer here."""
        version, fields = await self._link.pipeline([("GET", _VERSION), ("HGETALL", _NODES)])
        decoded = {name.decode(): _decoded(data) for name, data in _pairs(fields)}
        held = {key: entry for key, entry in decoded.items() if entry is not None}
        for key, entry in held.items():
            if entry.newer(self._entries.get(key)):
                self._apply(key, entry)
        self._unsaved |= {key for key, entry in self._entries.items() if entry.newer(held.get(key))}
        self._first_read = False
        self._version = version
        await self._forget_removed()

    async def write(self) -> bool:
        """Writes down what is new here; False when nothing is, or the hash holds newer entries of another version."""
        if not self._unsaved:
            return False
        writing = {key: self._entries[key] for key in self._unsaved if key in self._entries}
        version = self._new_version()
        pairs = [part for key, entry in writing.items() for part in (key, orjson.dumps(asdict(entry)))]
        written = await self._link.script(_PUT, [_NODES, _VERSION], [version, *pairs])
        # What changed meanwhile is still to be written. The version is not ours to know: others may have written too.
        self._unsaved = {key for key in self._unsaved if self._entries.get(key) is not writing.get(key)}
        return bool(written)

    async def _forget_removed(self) -> None:
        oldest = self._now_ms() - _REMOVED_MS
        gone = [key for key, entry in self._entries.items() if entry.removed and entry.at < oldest]
        for key in gone:
            del self._entries[key]
        self._unsaved -= set(gone)
        if gone:
            await self._link.call("HDEL", _NODES, *gone)

    def _apply(self, key: str, entry: Entry) -> None:
        before = self._entries.get(key)
        self._entries[key] = entry
        self._unsaved.discard(key)
        node = self._membership.find(entry.url)
        if entry.removed:
            self._membership.drop(entry.url)
            return
        if entry.node is not None and (node is None or self._came_again(entry, before)):
            node = self._membership.take(read_node(entry.node).spec, entry.listed)
        if node is not None and node.draining is not entry.draining:
            self._membership.mark(node, entry.draining)

    def _came_again(self, entry: Entry, before: Entry | None) -> bool:
        """Whether it is a new node in the place of ours. One that the nodes file gave back is the very same."""
        if self._first_read and before is not None and before.joined == _RESTORED and before.node == entry.node:
            return False
        return entry.joined != (before.joined if before else 0)

    def _note(self, entry: Entry) -> None:
        key = same_address(entry.url)
        self._entries[key] = entry
        self._unsaved.add(key)
        self._on_change()

    def _entry(self, url: str, at: int | None = None, **fields: Any) -> Entry:
        when = self._at(url) if at is None else at
        return Entry(url, when, self._instance_id, declared=same_address(url) in self._declared, **fields)

    def _at(self, url: str) -> int:
        before = self._entries.get(same_address(url))
        return self._now_ms() if before is None else max(self._now_ms(), before.at + 1)

    def _new_version(self) -> str:
        self._writes += 1
        return f"{self._instance_id} {self._writes}"


def _encoded(node: Node) -> dict[str, Any]:
    return node_entry(StoredNode(node.spec))


def _decoded(data: bytes) -> Entry | None:
    """None for what another version of Hearth has written."""
    try:
        fields: Mapping[str, Any] = orjson.loads(data)
        entry = Entry(**{**fields, "listed": tuple(fields["listed"])})
        if entry.node is not None:
            read_node(entry.node)
    except (ValueError, TypeError, KeyError):
        return None
    return entry


def _pairs(flat: Any) -> Iterable[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
