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
_VARIED_LEAST: Final = 8  # different characters: rules, tables and counting have fewer, and repeat themselves
_TELLING_LEAST: Final = 16  # characters, where the words stand where no writer puts them
_LONG_LEAST: Final = 32  # characters, elsewhere
_TOKENS_LEAST: Final = 8  # of a rest, where a limit ends it
_STOPS: Final = ".!?"
_PAUSES: Final = ".!?,;:)"
_EVENTS: Final = re.compile(rb".*?(?:\n\r?\n|$)", re.DOTALL)
_DONE: Final = b"data: [DONE]\n\n"


def not_continued(why: str) -> NodeFailure:
    """For a node that does not go on with what another one began, which is no breakage."""
    return NodeFailure(Failure.NOT_CONTINUED, why, counts=False)


class BeganAnew(NodeFailure):
    """The node said the same again instead of going on. Asked for the whole answer, it may say all of it."""

    def __init__(self) -> None:
        super().__init__(Failure.NOT_CONTINUED, "it began the answer anew instead of going on with it", counts=False)


class AnotherAnswer(NodeFailure):
    """Asked for the whole answer again, the node said something else. It may go on with this one all the same."""

    def __init__(self) -> None:
        super().__init__(Failure.NOT_CONTINUED, "it gave another answer", counts=False)


def tells_little(written: Written, left: int | None) -> bool:
    """Whether so little was said, or may be (in tokens), that nobody could see whether a node says it again."""
    if not written.begins:
        return False  # the answer begins anew anyhow
    if left is not None and left <= _TOKENS_LEAST:
        return True
    return len(written.start) < _LONG_LEAST and not Joint(written.text, written.start).can_tell()


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

    With `whole` the node was asked for the whole answer again. `limit` is how many tokens it was allowed.
    """

    content_type = b"text/event-stream"

    __slots__ = (
        *("_answer", "_before", "_chat", "_head", "_joint", "_limit", "_pieces", "_unread"),
        *("begun", "dropped", "ended", "finish_reason", "timings", "usage"),
    )

    def __init__(
        self,
        answer: Answer,
        operation: Operation,
        written: Written,
        *,
        whole: bool = False,
        limit: int | None = None,
    ) -> None:
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
        self._limit = limit
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
            cut = choice.get("finish_reason") == "length" or self._limit_reached
            held = self._joint.end(cut=cut)
            self._check_count(cut)
        self.begun = self.begun or self._joint.done
        if not held:
            return b""
        piece = {"delta": {"content": held}} if self._chat else {"text": held}
        return _event({**document, **self._head, "choices": [{"index": 0, **piece, "finish_reason": None}]})

    @property
    def _limit_reached(self) -> bool:
        usage = self._answer.usage
        return usage is not None and self._limit is not None and usage.completion_tokens >= self._limit

    def _check_count(self, cut: bool) -> None:
        """A node that wrote the whole text again, rather than show what it was told, used up its limit with that.

        Where it tells no count, one that was `cut` is taken to have done so: what is left of the client's limit shows.
        """
        if not self._joint.repeated:
            return
        usage = self._answer.usage
        if cut if usage is None else usage.completion_tokens > self._pieces + self._before // 2:
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
    the node repeats it. One that begins anew is a `NodeFailure`.

    A text may well repeat itself, and must not lose that. So words said twice are dropped as the node's only when

    - they stand where no writer puts them: right behind a full stop or another word, without white space, or from the
      middle of a word on;
    - they are many, varied, and kept apart by white space, so that white space would stand before them too;
    - and neither the text nor what the node says has them twice.

    What is less sure, but begins as the whole text does, is said to be begun anew, which loses nothing: the node may be
    asked for all, and that shows whether the text does repeat itself. All else is taken for the text's own, at the risk
    that a few characters come twice.
    """

    __slots__ = ("_compared", "_held", "_lead", "_opening", "_start", "_tells", "_trail", "_untold", "done", "repeated")

    def __init__(self, text: str, start: str) -> None:
        self.done = False
        self.repeated = False  # the whole text was
        self._compared = False
        self._held = ""
        self._start = start
        self._opening = start.lstrip()
        self._lead = start[: len(start) - len(self._opening)]
        self._tells: bool | None = None
        self._trail = start[len(start.rstrip()) :]
        self._untold = text[len(start) :]

    def add(self, text: str) -> str:
        """What of the text so far can be said now. Raises `NodeFailure`."""
        if self.done:
            return text
        self._held += text
        if not self._compare(over=False, cut=False) or not self._held.strip():
            return ""
        return self._said()

    def end(self, *, cut: bool = False) -> str:
        """What is held, as nothing comes that it could be compared with. Raises `NodeFailure`.

        `cut`: the node would have said more.
        """
        if self.done:
            return ""
        self._compare(over=True, cut=cut)
        return self._said()

    def _said(self) -> str:
        self.done = True
        return self._spaced(self._held)

    def _compare(self, *, over: bool, cut: bool) -> bool:
        """Drops what repeats the text; False when that is not clear yet. Raises `BeganAnew`."""
        if self._compared:
            return True
        core = self._held.lstrip()
        repeated = self._beginning(core, over, cut) if core else None
        if repeated == 0:
            repeated = self._ending(core, over)
        if repeated is None and not over:
            return False
        if repeated:
            self._held = core[repeated:]
        self._compared = True
        return True

    def _between(self, core: str) -> str:
        """The white space between the text, as the node was told it, and what it says."""
        return self._trail + self._held[: len(self._held) - len(core)]

    def _beginning(self, core: str, over: bool, cut: bool) -> int | None:
        """How many characters are the whole text again; None when that is not clear yet. Raises `BeganAnew`."""
        opening, between = self._opening, self._between(core)
        same = _alike(core, opening)
        if same == 0 or between not in ("", self._lead) or not self.can_tell():
            return 0
        jars = not between and _jars(self._start[-1], core[0])
        if same < len(opening):
            return self._part(core, same, jars, over, cut)
        again = _again(core[same:], between + opening, over)
        if again is None:
            return None
        if again:
            return 0
        if not (jars and _telling(opening)):
            raise BeganAnew
        self.repeated = True
        return same

    def _part(self, core: str, same: int, jars: bool, over: bool, cut: bool) -> int | None:
        """As `_beginning`, when so many characters are the same so far, which is not the whole text."""
        said_more = same < len(core)
        if not (said_more or over):
            return None
        least = _TELLING_LEAST if (jars or cut) and not said_more else _LONG_LEAST
        if cut and jars and not said_more:
            least = 0  # the limit was what is left of the client's, so that it came no further
        piece = core[:same].rstrip()
        if len(piece) >= least and _varied(piece) and self._opening.count(piece) == 1:
            raise BeganAnew
        return 0

    def can_tell(self) -> bool:
        """Whether the text is varied, and not one piece some times over, which may well go on with that piece."""
        if self._tells is None:
            pieces = {self._opening, self._lead + self._opening}
            self._tells = _varied(self._opening) and not any(map(_repeats, pieces))
        return self._tells

    def _ending(self, core: str, over: bool) -> int | None:
        """How many characters are the end of the text again; None when that is not clear yet."""
        for end in self._ends(core):
            if core.startswith(end):
                again = _again(core[len(end) :], end, over)
                if again is None:
                    return None
                if not again:
                    return len(end)
            elif end.startswith(core) and not over:
                return None
        return 0

    def _ends(self, core: str) -> list[str]:
        """The ends of the text that begin as this does, where no writer would say them again; the longest first."""
        start, between, first = self._start, self._between(core), core[:_TELLING_LEAST]
        if "\n" in first or not start:
            return []  # a line that ends as the one before it, and comes again
        ends = []
        place = start.find(first, max(1, len(start) - _TAIL))
        while 0 <= place <= len(start) - _TELLING_LEAST:
            before = start[place - 1]
            if between:
                odd = between == " " and start[-1] in _STOPS and before.isalpha() and first[0].islower()
            else:
                odd = before != start[-1] and _jars(start[-1], first[0])
            if odd and _telling(start[place:]):
                ends.append(start[place:])
            place = start.find(first, place + 1)
            if place >= 0 and len(first) == _TELLING_LEAST:
                return []  # what stands there twice may well come a third time
        return ends

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
            raise AnotherAnswer
        self.done = True
        return self._held[len(self._text) :]

    def end(self, *, cut: bool = False) -> str:
        """Raises `NodeFailure` where the answer is shorter than what the client has."""
        if not self.done and self._held != self._text:
            raise AnotherAnswer
        self.done = True
        return ""


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


def _varied(text: str) -> bool:
    """Whether it has so many different characters that they are not the same by chance."""
    return len(set(text)) >= _VARIED_LEAST


def _telling(text: str) -> bool:
    """Whether it is so long, varied, and made of words, that nobody would say it again with nothing between."""
    return len(text) >= _TELLING_LEAST and _varied(text) and len(text.split(maxsplit=1)) > 1


def _repeats(text: str) -> bool:
    """Whether it is one piece some times over."""
    return (text + text).find(text, 1) < len(text)


def _again(more: str, piece: str, over: bool) -> bool | None:
    """Whether `more` begins with the piece too, behind which it comes; None when that is not clear yet.

    Of an answer that is over, so much as there is counts.
    """
    first = piece[:_TELLING_LEAST]
    if more.startswith(first):
        return True
    if not first.startswith(more):
        return False
    return bool(more) if over else None


def _jars(last: str, first: str) -> bool:
    """Whether no writer puts these characters side by side. A comma may stand before a small letter: `f(a,b)`."""
    return (first.isalpha() and last in _STOPS) or (first.isupper() and (last in _PAUSES or last.isalpha()))
