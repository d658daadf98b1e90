"""What a node that has no model says. Knows no wire format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the node makes. Without an index it has its place in the answer; without an id, one made up."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What the node adds to its answer in one step."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer before it has a wire format."""

    deltas: tuple[Delta, ...]
    prompt_tokens: int
    finish: str | None = STOP
    ended: bool = True  # False: the node stops without saying that it is done
    first_seconds: float = 0.0  # until the first delta
    token_seconds: float = 0.0  # between deltas

    @property
    def completion_tokens(self) -> int:
        return len(self.deltas)

    @property
    def content(self) -> str:
        return "".join(delta.content for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(call for delta in self.numbered for call in delta.tool_calls)

    @property
    def numbered(self) -> tuple[Delta, ...]:
        """The deltas, with an id and an index in every tool call that had none."""
        numbered, count = [], 0
        for delta in self.deltas:
            calls = tuple(_numbered(call, count + place) for place, call in enumerate(delta.tool_calls))
            count += len(calls)
            numbered.append(replace(delta, tool_calls=calls))
        return tuple(numbered)

    @property
    def seconds(self) -> float:
        """How long the whole answer takes."""
        return self.first_seconds + self.token_seconds * max(0, len(self.deltas) - 1)

    def wait_before(self, position: int) -> float:
        """Seconds before the delta at this position, from 0."""
        return self.token_seconds if position else self.first_seconds


def _numbered(call: ToolCall, place: int) -> ToolCall:
    made_up = f"call_{place:08d}"
    return replace(
        call,
        id=made_up if call.id is None else call.id,
        index=place if call.index is None else call.index,
    )


class ScriptOptions(TypedDict, total=False):
    """The fields of Script, for those who pass them on."""

    tokens: int
    text: str | None
    echo: str | None
    deltas: Sequence[Delta] | None
    finish: str | None
    first_seconds: float
    token_seconds: float


@dataclass(slots=True)
class Script:
    """What a node answers: `deltas`, else `text` in words, else `echo`, else the tokens "t0 t1 …".

    It may be changed at any time, for the answers that begin after that.
    """

    tokens: int = 8
    text: str | None = None
    echo: str | None = None  # a format that takes the user's last words, such as "You said: {}"
    deltas: Sequence[Delta] | None = None
    finish: str | None = STOP
    first_seconds: float = 0.0
    token_seconds: float = 0.0

    @property
    def thinks(self) -> bool:
        """Whether there are thoughts before the answer."""
        return any(delta.reasoning for delta in self.deltas or ())

    def begun_in(self, prompt: str) -> str:
        """How much of its answer stands at the end of the prompt already."""
        whole = "".join(delta.content for delta in self._deltas(prompt))
        return next((whole[:end] for end in range(len(whole), 0, -1) if prompt.endswith(whole[:end])), "")

    def reply(
        self, words: str, prompt_tokens: int, limit: int | None = None, *, start: str = "", thinks: bool = True
    ) -> Reply:
        """The answer to these words, cut at `limit` deltas as a model is cut at its token limit.

        What it has said of it already is its `start`, if the answer begins with that at all.
        """
        deltas = _after(self._deltas(words), start, thinks)
        finish = self.finish
        if limit is not None and 0 <= limit < len(deltas):
            deltas, finish = deltas[:limit], LENGTH
        return Reply(deltas, prompt_tokens, finish, first_seconds=self.first_seconds, token_seconds=self.token_seconds)

    def _deltas(self, words: str) -> tuple[Delta, ...]:
        if self.deltas is not None:
            return tuple(self.deltas)
        if self.text is not None:
            return in_words(self.text)
        if self.echo is not None:
            return in_words(self.echo.format(words))
        return tuple(Delta(f"t{number} ") for number in range(self.tokens))


def _after(deltas: tuple[Delta, ...], start: str, thinks: bool) -> tuple[Delta, ...]:
    """The rest of an answer, without what was said, and without the thoughts if it does not think."""
    if not "".join(delta.content for delta in deltas).startswith(start):
        start = ""
    left, rest = len(start), []
    for delta in deltas:
        content, left = delta.content[left:], max(0, left - len(delta.content))
        reasoning = delta.reasoning if thinks else ""
        if content or reasoning or delta.tool_calls or not (start or delta.reasoning):
            rest.append(Delta(content, reasoning, delta.tool_calls))
    return tuple(rest)


def in_words(text: str) -> tuple[Delta, ...]:
    """A text as a model gives it: a word with the space before it at a time."""
    return tuple(Delta(piece) for piece in re.findall(r"\s*\S+|\s+$", text))


def count_tokens(text: str) -> int:
    """Words stand for tokens here."""
    return len(text.split())


def embedding(text: str, dimensions: int) -> list[float]:
    """A vector of length 1 that depends on nothing but the text."""
    seed = sum((place + 1) * byte for place, byte in enumerate(text.encode()))
    raw = [((seed * (place + 3) * 2654435761) % 1009) - 504 + 0.5 for place in range(dimensions)]
    norm = sum(value * value for value in raw) ** 0.5
    return [round(value / norm, 6) for value in raw]
