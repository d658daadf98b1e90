"""What a client has of a stream so far: kept at next to no cost, and read only when its node dies. Sans-I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import orjson

from app.domain import Operation, Usage

KEPT_BYTES_MAX: Final = 2**20

_SQUEEZED_AT: Final = 16 * 1024  # bytes
_BETWEEN: Final = b"\0"  # stands for what is alike between two texts; no JSON holds it
_HEAD: Final = ("id", "object", "created", "model", "system_fingerprint")
_PLAIN: Final = frozenset({"role", "content", "reasoning", "reasoning_content"})
_TOKEN_CHARACTERS: Final = 4
_TOKEN_CHARACTERS_MOST: Final = 10  # on average; events with more have several tokens each

Fields = dict[str, Any]
T = TypeVar("T", str, bytes)


class Sent:
    """The events that went to the client. Adding costs a copy; of long streams only the texts are kept.

    `lost` is set when they were too many: nobody can go on with the answer then.
    """

    __slots__ = ("_kept", "_recent", "_size", "lost")

    def __init__(self, events: bytes) -> None:
        self.lost = False
        self._recent = bytearray(events)
        self._kept: list[tuple[bytes, bytes]] = []  # squeezed events, and what was between their texts
        self._size = 0

    def add(self, events: bytes) -> None:
        self._recent += events
        if len(self._recent) > _SQUEEZED_AT:
            self._squeeze()

    def pieces(self) -> Iterator[bytes]:
        """All events in their order, some at a time."""
        for squeezed, between in self._kept:
            yield squeezed.replace(_BETWEEN, between) if between else squeezed
        yield bytes(self._recent)

    def _squeeze(self) -> None:
        if self.lost:
            self._recent.clear()
            return
        between = _between(self._recent)
        squeezed = bytes(self._recent.replace(between, _BETWEEN) if between else self._recent)
        self._size += len(squeezed)
        self._recent.clear()
        self._kept.append((squeezed, between))
        if self._size > KEPT_BYTES_MAX:
            self.lost = True
            self._kept.clear()


def _between(events: bytearray) -> bytes:
    """What stands between two texts of the stream's last events; b"" when that cannot be told."""
    if _BETWEEN in events:
        return b""
    last = events.rsplit(b"\n\n", 3)
    if len(last) < 4 or last[3]:
        return b""
    one, other = bytes(last[1]), bytes(last[2])
    head = one[: alike(one, other)]
    tail = one[len(one) - alike(one[::-1], other[::-1]) :]
    head = head[: head.rfind(b':"') + 2] if b':"' in head else b""
    tail = tail[tail.find(b'"}') :] if b'"}' in tail else b""
    return tail + b"\n\n" + head if head and tail else b""


def alike(one: T, other: T) -> int:
    """How many members both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


class Written:
    """What the events say. `plain` is False when they hold more than one text, so that nobody can go on with it."""

    def __init__(self, operation: Operation) -> None:
        self.plain = True
        self.finished = False
        self.head: Fields = {}  # what all events of the stream have in common, as the client knows it
        self.usage: Usage | None = None  # where the last node counted as it went; of all parts together
        self._chat = operation is Operation.CHAT
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._events = 0  # with text

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    @property
    def start(self) -> str:
        """The text as a node is told it. Of a chat without white space at the end: many templates cut that off."""
        return self.text.rstrip() if self._chat else self.text

    @property
    def begins(self) -> bool:
        """Whether there is anything to go on with; else the answer may as well begin anew."""
        return bool(self.start)

    @property
    def tokens(self) -> int:
        """Tokens that a node is told: as counted, else one for each event, unless those are too long for that.

        White space that it is not told it will write, and count, again.
        """
        again = 0
        if self._chat:
            again = next((place for place, text in enumerate(reversed(self._texts)) if text.strip()), 0)
        if self.usage is not None and self.usage.completion_tokens:
            return max(0, self.usage.completion_tokens - again)
        characters = sum(map(len, self._texts)) + sum(map(len, self._thoughts))
        if characters > _TOKEN_CHARACTERS_MOST * self._events:
            return -(-characters // _TOKEN_CHARACTERS)
        return self._events - again

    def read(self, events: bytes) -> None:
        """Takes the next whole events."""
        for line in events.splitlines():
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def _take(self, payload: bytes) -> None:
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.plain = False
            return
        choices = document.get("choices") if isinstance(document, dict) else None
        if not isinstance(choices, list):
            self.plain = False
            return
        if not self.head:
            self.head = {key: document[key] for key in _HEAD if key in document}
        for choice in choices:
            self._choose(choice)

    def _choose(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0 or choice.get("logprobs"):
            self.plain = False
            return
        self.finished = self.finished or bool(choice.get("finish_reason"))
        delta = choice.get("delta") if self._chat else {"content": choice.get("text"), "reasoning": thoughts(choice)}
        if not isinstance(delta, dict) or any(value for key, value in delta.items() if key not in _PLAIN):
            self.plain = False
            return
        text, thought = delta.get("content") or "", thoughts(delta)
        if not isinstance(text, str):
            self.plain = False
            return
        self._events += bool(text or thought)
        if text:
            self._texts.append(text)
        if thought:
            self._thoughts.append(thought)


def thoughts(holder: Fields) -> str:
    """The reasoning in a piece of an answer, which has two names."""
    thought = holder.get("reasoning") or holder.get("reasoning_content")
    return thought if isinstance(thought, str) else ""
