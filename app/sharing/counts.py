"""How many requests each replica has in flight on each node. Plain counting; `fleet.py` sends and receives.

A load that goes on without a request counts as one, so that no other replica takes the node for an idle one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from app.routing.membership import same_address
from app.routing.registry import Node

SILENT_SECONDS = 3.0  # until a replica is forgotten that says nothing

_MAX_REPLICAS = 1024


class Peer:
    """What another replica last said."""

    __slots__ = ("counts", "heard")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.heard = 0.0  # monotonic seconds


class Counts:
    """Tells `Node.others_in_flight` what other replicas say. Nodes go by their place, as names may differ.

    `on_freed` hears of every node on which others have given places back.
    """

    def __init__(self, on_freed: Callable[[Node], None]) -> None:
        self._on_freed = on_freed
        self._peers: dict[str, Peer] = {}
        self._told: dict[str, int] = {}  # without the zeros
        self.places: dict[str, Node] = {}

    @property
    def peers(self) -> Set[str]:
        """The replicas that were heard of in the last seconds."""
        return self._peers.keys()

    def place(self, nodes: Iterable[Node]) -> None:
        """Takes the nodes that there are now."""
        self.places = places(nodes)
        for place in self.places:
            self._sum(place)

    def changes(self) -> dict[str, int]:
        """Our own counts that others do not know yet."""
        now = self.all()
        changed = {place: count for place, count in now.items() if count != self._told.get(place, 0)}
        changed |= {place: 0 for place in self._told if place not in now}
        return changed

    def all(self) -> dict[str, int]:
        return {place: _in_flight(node) for place, node in self.places.items()}

    def told(self, counts: Mapping[str, int]) -> None:
        """Others have been sent these."""
        self._told = {place: count for place, count in {**self._told, **counts}.items() if count}

    def hear(self, replica: str, counts: Mapping[str, int], now: float, *, whole: bool) -> None:
        """Takes another replica's counts: all that it has, or those that have changed."""
        peer = self._peers.get(replica)
        if peer is None:
            if len(self._peers) >= _MAX_REPLICAS:
                return
            peer = self._peers[replica] = Peer()
        before = peer.counts
        peer.heard = now
        peer.counts = dict(counts) if whole else {**before, **counts}
        for place in before.keys() | counts.keys():
            self._sum(place)

    def forget(self, replica: str) -> None:
        peer = self._peers.pop(replica, None)
        for place in peer.counts if peer else ():
            self._sum(place)

    def forget_silent(self, now: float) -> None:
        for replica in [name for name, peer in self._peers.items() if now - peer.heard > SILENT_SECONDS]:
            self.forget(replica)

    def _sum(self, place: str) -> None:
        node = self.places.get(place)
        if node is None:
            return
        before = node.others_in_flight
        node.others_in_flight = sum(peer.counts.get(place, 0) for peer in self._peers.values())
        if node.others_in_flight < before:
            self._on_freed(node)


def _in_flight(node: Node) -> int:
    return node.in_flight + (0 if node.work is None else node.work.loads_alone)


def places(nodes: Iterable[Node]) -> dict[str, Node]:
    """Nodes by what names them on every replica: tier and URL, and which one it is where a URL is listed twice."""
    found: dict[str, Node] = {}
    for node in nodes:
        place = base = f"{node.spec.tier} {same_address(node.spec.url)}"
        number = 1
        while place in found:
            number += 1
            place = f"{base} {number}"
        found[place] = node
    return found
