"""Joins the rest of an answer, from another node, to what the client has of it. Sans-I/O.

The client is to see one stream: one id, no text twice, and the tokens of all parts added up.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from app.domain import Failure, Operation, Timings, Usage
from app.errors import NodeFailure
from app.providers.base import Answer
from app.providers.openai_stream import decoded, payload_of
from app.providers.written import Fields, Written, thoughts

_TAIL: Final = 256  # characters at the end of the text, of which a node might repeat some
_REPEATED_LEAST: Final = 16  # characters; less may well be meant
_ANEW_LEAST: Final = 32
_ALL_LEAST: Final = 16  # characters, where a node said nothing else
_ALL_LEAST_CUT: Final = 4  # and was stopped by its limit
_DISTINCT_SHORT: Final = 4  # different ones in a whole text that is shorter
_DISTINCT_LEAST: Final = 8  # different ones among these: rules, tables and counting repeat themselves
_EVENTS: Final = re.compile(rb".*?(?:\n\r?\n|$)", re.DOTALL)
_DONE: Final = b"data: [DONE]\n\n"


def not_continued(why: str) -> NodeFailure:
    """For a node that does not go on with what another one began, which is no breakage."""
    return NodeFailure(Failure.NOT_CONTINUED, why, counts=False)


class BeganAnew(NodeFailure):
    """The node said the same again instead of going on. Asked for the whole answer, it may say all of it."""

    def __init__(self) -> None:
        super().__init__(Failure.NOT_CONTINUED, "it began the answer anew instead of going on with it", counts=False)


def length_reached(operation: Operation, written: Written, usage: Usage | None) -> bytes:
    """The end of a stream of which the client's limit is used up already. With `usage` the client wants to see it."""
    delta: Fields = {"delta": {}} if operation is Operation.CHAT else {"text": ""}
    end = _event({**written.head, "choices": [{"index": 0, **delta, "finish_reason": "length"}]})
    if usage is not None:
        end += _event({**written.head, "choices": [], "usage": _counts({}, usage)})
    return end + _DONE


def total(written: int, usage: Usage) -> Usage:
    """What all parts took together: the last prompt had the first one in it, and the text that was written before."""
    prompt = max(0, usage.prompt_tokens - written)
    return Usage(prompt, written + usage.completion_tokens, min(usage.cached_tokens, prompt))


class Seam:
    """The rest of an answer, as the client is to see it. `usage` is this part's own.

    With `whole` the node was asked for the whole answer again.
    """

    content_type = b"text/event-stream"

    __slots__ = (
        *("_answer", "_before", "_chat", "_head", "_joint", "_pieces", "_unread"),
        *("begun", "dropped", "ended", "finish_reason", "timings", "usage"),
    )

    def __init__(self, answer: Answer, operation: Operation, written: Written, *, whole: bool = False) -> None:
        self.begun = False
        self.ended = False
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.dropped = 0  # events that could not be read
        self._answer = answer
        self._chat = operation is Operation.CHAT
        self._head = written.head
        self._before = 0 if whole else written.tokens  # that are no part of what the node counts
        self._joint: Joint | Repetition = Repetition(written.text) if whole else Joint(written.text, written.start)
        self._pieces = 0  # of text that are new
        self._unread = 0

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes from the node. What may be a repetition is held until that is clear."""
        try:
            return self._joined(self._answer.feed(data))
        finally:
            self._look()

    def finish(self) -> bytes:
        try:
            out = self._joined(self._answer.finish())
        finally:
            self._look()
        self.begun = self.ended = True
        return out

    def _look(self) -> None:
        answer = self._answer
        self.ended = answer.ended
        self.usage, self.timings, self.finish_reason = answer.usage, answer.timings, answer.finish_reason
        self.dropped = self._unread + int(getattr(answer, "dropped", 0))

    def _joined(self, events: bytes) -> bytes:
        return b"".join(self._one(event) for event in _EVENTS.findall(events) if event)

    def _one(self, event: bytes) -> bytes:
        payload = payload_of(event)
        if not payload or payload == b"[DONE]":
            return event
        document = decoded(payload)
        if document is None:
            self._unread += 1
            return b""
        choices = document.get("choices") or []
        before = b"".join(self._choice(document, choice) for choice in choices)
        if isinstance(document.get("usage"), dict):
            document["usage"] = _counts(document["usage"], self._sum(document["usage"]))
        if choices and not any(map(_says, choices)):
            return before
        document.update(self._head)
        return before + _event(document)

    def _choice(self, document: Fields, choice: Fields) -> bytes:
        """Puts one choice right; returns what must come before it: text that was held."""
        holder = choice.get("delta") if self._chat else choice
        if not isinstance(holder, dict):
            return b""
        if thoughts(holder):
            raise not_continued("it began to think anew instead of going on with the answer")
        key = "content" if self._chat else "text"
        holder.pop("role", None)
        text = holder.get(key)
        held = ""
        if isinstance(text, str) and text:
            holder[key] = self._joint.add(text)
            self._pieces += bool(holder[key])
        if choice.get("finish_reason") or holder.get("tool_calls") or holder.get("function_call"):
            held = self._joint.end(cut=choice.get("finish_reason") == "length")
            self._check_count()
        self.begun = self.begun or self._joint.done
        if not held:
            return b""
        piece = {"delta": {"content": held}} if self._chat else {"text": held}
        return _event({**document, **self._head, "choices": [{"index": 0, **piece, "finish_reason": None}]})

    def _check_count(self) -> None:
        """A node that wrote the whole text again, rather than show what it was told, used up its limit with that."""
        usage = self._answer.usage
        if self._joint.repeated and usage and usage.completion_tokens > self._pieces + self._before // 2:
            raise BeganAnew

    def _sum(self, counts: Fields) -> Usage:
        given = (counts.get("prompt_tokens"), counts.get("completion_tokens"))
        return total(self._before, Usage(*(each if type(each) is int else 0 for each in given)))


def _says(choice: Fields) -> bool:
    """Whether anything is left of it."""
    delta = choice.get("delta")
    holder = delta if isinstance(delta, dict) else {"text": choice.get("text")}
    return bool(choice.get("finish_reason")) or any(holder.values())


def _counts(counts: Fields, usage: Usage) -> Fields:
    """The usage object with other sums. What it says of the prompt's parts is the last prompt's, and goes."""
    kept = {key: value for key, value in counts.items() if key not in ("prompt_tokens_details",)}
    return {
        **kept,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _event(document: Any) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


class Joint:
    """Joins two texts: `text`, of which the node was told `start`, and what it says after that.

    The white space at the end that the node was not told is not said twice. Nor is the whole text, or its end, where
    a node repeats it. One that begins anew is a `NodeFailure`.
    """

    __slots__ = ("_compared", "_held", "_start", "_tail", "_tells", "_untold", "done", "repeated")

    def __init__(self, text: str, start: str) -> None:
        self.done = False
        self.repeated = False  # the whole text was
        self._compared = False
        self._held = ""
        self._start = start.lstrip()
        self._tail = start[-_TAIL:]
        self._tells = len(self._start) >= _REPEATED_LEAST or len(set(self._start)) >= _DISTINCT_SHORT
        self._untold = text[len(start) :]

    def add(self, text: str) -> str:
        """What of the text so far can be said now. Raises `NodeFailure`."""
        if self.done:
            return text
        self._held += text
        if not self._compared and self._undecided(self._held.lstrip()):
            return ""
        self._compare()
        return self.end() if self._held.strip() else ""

    def end(self, *, cut: bool = False) -> str:
        """What is held, as nothing comes that it could be compared with. Raises `NodeFailure`.

        `cut`: the node would have said more.
        """
        if self.done:
            return ""
        core, least = self._held.strip(), _ALL_LEAST_CUT if cut else _ALL_LEAST
        if not self._compared and least <= len(core) < len(self._start) and self._start.startswith(core):
            raise BeganAnew  # its limit was what is left of the client's, so that it came no further
        self._compare()
        self.done = True
        return self._spaced(self._held)

    def _compare(self) -> None:
        """Drops what repeats the text."""
        core = self._held.lstrip()
        if not self._compared and (repeated := self._repeated(core)):
            self._held = core[repeated:]
        self._compared = True

    def _undecided(self, core: str) -> bool:
        """Whether it may still turn out to repeat something."""
        if not core:
            return True
        if self._tells and len(core) < len(self._start) and self._start.startswith(core):
            return True
        return any(len(end) > len(core) and end.startswith(core) for end in self._ends(core))

    def _ends(self, core: str) -> list[str]:
        """The ends of the text that begin as this does, if they are long enough to tell."""
        first = core[:_REPEATED_LEAST]
        place = self._tail.find(first) if first else -1
        if place < 0 or (len(first) == _REPEATED_LEAST and self._tail.find(first, place + 1) >= 0):
            return []  # what stands there twice may well come a third time
        ends = []
        while 0 <= place <= len(self._tail) - _REPEATED_LEAST:
            ends.append(self._tail[place:])
            place = self._tail.find(first, place + 1)
        return ends

    def _repeated(self, core: str) -> int:
        """How many characters at the beginning the client has already."""
        start = self._start
        same = _alike(core, start)
        if same == len(start) and _telling(start):
            self.repeated = True
            return same
        if same == len(start) and self._tells and len(start) < _REPEATED_LEAST:
            raise BeganAnew  # so few words may be meant: asked for the whole answer, it shows whether they were
        piece = core[:same].rstrip()
        if len(core) > same and len(piece) >= _ANEW_LEAST and _telling(piece) and start.count(piece) == 1:
            raise BeganAnew
        return max((len(end) for end in self._ends(core) if core.startswith(end) and _telling(end)), default=0)

    def _spaced(self, text: str) -> str:
        """Without the white space that stands there already."""
        said, left = self._untold, text
        while said and left and said[0] == left[0]:
            said, left = said[1:], left[1:]
        if said and self._untold:
            spaces = left[: len(left) - len(left.lstrip())]
            return left if "\n" in spaces else left[len(spaces) :]
        return left


class Repetition:
    """What a node says that was asked for the whole answer, less the `text` that the client has of it."""

    __slots__ = ("_held", "_text", "done")

    repeated = False

    def __init__(self, text: str) -> None:
        self.done = False
        self._held = ""
        self._text = text

    def add(self, text: str) -> str:
        """What is new. Raises `NodeFailure` where it says something else."""
        if self.done:
            return text
        self._held += text
        if len(self._held) <= len(self._text) and self._text.startswith(self._held):
            return ""
        if not self._held.startswith(self._text):
            raise not_continued("it gave another answer")
        self.done = True
        return self._held[len(self._text) :]

    def end(self, *, cut: bool = False) -> str:
        """Raises `NodeFailure` where the answer is shorter than what the client has."""
        if not self.done and self._held != self._text:
            raise not_continued("it gave another answer")
        self.done = True
        return ""


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


def _telling(text: str) -> bool:
    """Whether it is so much, and so varied, that nobody would say it twice in a row."""
    return len(text) >= _REPEATED_LEAST and len(set(text)) >= _DISTINCT_LEAST
