"""Which breakers are open, on any replica. Plain bookkeeping; `fleet.py` sends and receives.

Of two replicas that differ the one whose breaker changed last is right. What one has missed it learns later all the
same, since each repeats what it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from app.routing.breaker import BreakerState
from app.routing.registry import Node

_REASON_CHARACTERS = 500


class Transition(NamedTuple):
    """A breaker's last change, and where it happened. `at` is milliseconds since 1970."""

    at: int
    by: str
    open: bool
    reason: str


class Transitions:
    """The last change of each node's breaker. `on_change` hears of those that happened here."""

    def __init__(self, instance_id: str, now_ms: Callable[[], int], on_change: Callable[[], None]) -> None:
        self._instance_id = instance_id
        self._now_ms = now_ms
        self._on_change = on_change
        self._nodes: dict[str, Node] = {}
        self._last: dict[str, Transition] = {}
        self._untold: set[str] = set()

    def place(self, places: Mapping[str, Node]) -> None:
        """Takes the nodes that there are now. A node that has come back has a new breaker, and no history."""
        for place in [place for place in self._last if self._nodes.get(place) is not places.get(place)]:
            del self._last[place]
        before, self._nodes = self._nodes, dict(places)
        for place, node in places.items():
            if before.get(place) is not node:
                node.breaker.share(partial(self._changed, place, node))
                if node.breaker.state is not BreakerState.CLOSED:
                    self._changed(place, node)

    def changes(self) -> dict[str, Transition]:
        """What happened here and was not sent yet; it then counts as sent."""
        untold, self._untold = self._untold, set()
        return {place: self._last[place] for place in untold if place in self._last}

    def all(self) -> dict[str, Transition]:
        return dict(self._last)

    def hear(self, heard: Mapping[str, Any], since: Callable[[Node], int]) -> None:
        """Applies what is newer than what we know, and than the node, which is as old as `since` says."""
        for place, fields in heard.items():
            transition = Transition(*fields)
            node = self._nodes.get(place)
            if node is None or transition.at < since(node):
                continue
            last = self._last.get(place)
            if last is None or transition[:2] > last[:2]:
                self._last[place] = transition
                self._untold.discard(place)
                if transition.open:
                    node.breaker.open_from_elsewhere(transition.reason)
                else:
                    node.breaker.close_from_elsewhere()

    def _changed(self, place: str, node: Node) -> None:
        if self._nodes.get(place) is not node:
            return  # it has left
        last = self._last.get(place)
        at = self._now_ms() if last is None else max(self._now_ms(), last.at + 1)
        reason = (node.breaker.reason or "")[:_REASON_CHARACTERS]
        is_open = node.breaker.state is not BreakerState.CLOSED
        self._last[place] = Transition(at, self._instance_id, is_open, reason)
        self._untold.add(place)
        self._on_change()
