"""Which node probably still has which beginnings of conversations in its cache.

A conversation is a chain of digests, one a message, each of everything up to that message. Per model one table says
for a digest which nodes hold it, as bits of an integer, so that looking a request up costs the same however many nodes
there are. Each node's own list bounds what it is believed to hold, least recently used first.

Memory: an entry takes about 250 bytes in both tables, and there are at most `ENTRIES` of them for each node and model:
1 MB for each node and model at most. Nothing of a message itself is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

ENTRIES = 4096  # of one node and model
_CHARACTERS = 800_000  # that a node is believed to cache of a model until it shows otherwise
_CHARACTERS_LEAST = 8_000
_SHRINK, _GROW = 0.7, 1.1


class Held:
    """What one node holds of one model: digest → characters of its last message, least recently used first."""

    __slots__ = ("bit", "entries", "limit", "size")

    def __init__(self, number: int) -> None:
        self.bit = 1 << number
        self.entries: dict[int, int] = {}
        self.size = 0
        self.limit = _CHARACTERS

    def missed(self) -> None:
        """It did not have what it was believed to have: its cache is smaller than that."""
        self.limit = max(_CHARACTERS_LEAST, int(min(self.limit, self.size) * _SHRINK))

    def had(self) -> None:
        """It had what it was believed to have: perhaps it holds more than that."""
        self.limit = min(_CHARACTERS, int(self.limit * _GROW))


class Prefixes:
    """All nodes' beginnings of one model's conversations."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def look_up(self, chain: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """(nodes' bits, characters that those nodes hold of this conversation), for nodes that hold any."""
        found = []
        alive = -1
        for place, holders in enumerate(map(self._holders.get, chain)):
            if holders != alive:
                still = holders & alive if holders else 0
                if place and still != alive:
                    found.append((alive & ~still, sum(sizes[:place])))
                if not still:
                    return found
                alive = still
        if chain:
            found.append((alive, sum(sizes)))
        return found

    def learn(self, held: Held, chain: Sequence[int], sizes: Sequence[int]) -> None:
        """The node has read this conversation."""
        entries, holders, bit = held.entries, self._holders, held.bit
        # From the end, so that a beginning that many share is the last to go.
        for place in range(len(chain) - 1, -1, -1):
            digest = chain[place]
            size = entries.pop(digest, None)
            if size is None:
                size = sizes[place]
                held.size += size
                holders[digest] = holders.get(digest, 0) | bit
            entries[digest] = size
        while entries and (held.size > held.limit or len(entries) > ENTRIES):
            self._drop(held, next(iter(entries)))

    def forget(self, held: Held) -> None:
        """The node has lost all."""
        for digest in list(held.entries):
            self._drop(held, digest)

    def _drop(self, held: Held, digest: int) -> None:
        held.size -= held.entries.pop(digest)
        left = self._holders.get(digest, 0) & ~held.bit
        if left:
            self._holders[digest] = left
        else:
            self._holders.pop(digest, None)
