"""What a client has of a stream so far: kept at next to no cost, and read only when its node dies. Sans-I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

import orjson

from app.domain import Operation, Usage

KEPT_BYTES_MAX: Final = 2**20

_PACKED_AT: Final = 16 * 1024  # bytes
_HEAD: Final = ("id", "object", "created", "model", "system_fingerprint")
_PLAIN: Final = frozenset({"role", "content", "reasoning", "reasoning_content"})
_TOKEN_CHARACTERS: Final = 4
_TOKEN_CHARACTERS_MOST: Final = 10  # on average; events with more have several tokens each

Fields = dict[str, Any]


class Sent:
    """The events that went to the client. Adding costs a copy, and 0.3 us an event where a long stream is packed.

    Events are so much alike that hardly more than their texts is left then. `lost` is set when even that was too much:
    nobody can go on with the answer.
    """

    __slots__ = ("_kept", "_recent", "_size", "lost")

    def __init__(self, events: bytes) -> None:
        self.lost = False
        self._recent = bytearray(events)
        self._kept: list[bytes] = []
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._size + len(self._recent)

    def add(self, events: bytes) -> None:
        self._recent += events
        if len(self._recent) > _PACKED_AT:
            self._pack()

    def pieces(self) -> Iterator[bytes]:
        """All events in their order, some at a time."""
        for packed in self._kept:
            yield zlib.decompress(packed)
        yield bytes(self._recent)

    def _pack(self) -> None:
        if not self.lost:
            packed = zlib.compress(self._recent, 1)
            self._kept.append(packed)
            self._size += len(packed)
            if self._size > KEPT_BYTES_MAX:
                self.lost = True
                self._kept.clear()
                self._size = 0
        self._recent.clear()


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
