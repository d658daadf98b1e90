"""Passes a node's server-sent events on, and looks into those that may say more than the next piece of text. Sans-I/O.

Until content comes, every event is decoded, so that whatever goes wrong can still be tried elsewhere. After that the
bytes go through untouched, and only an event with a suspicious word in it is decoded. When a stream breaks then, what
came before is returned first: `ended` is set, and the next `feed` or `finish` raises.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from app.domain import Failure, Operation, Request, Timings, Usage
from app.errors import NodeFailure, RequestRefused
from app.providers.json_splice import sole_member
from app.providers.openai_choices import Choices, Fields, encoded, holds_content, timings_in, usage_in
from app.providers.openai_faults import event_error

MAX_EVENT_BYTES = 16 * 2**20

_JSON_EVENT_ENDS = (b"}\n\n", b"}\r\n\r\n")
_DONE = b"data: [DONE]\n\n"
_FIELDS = (b":", b"data", b"event", b"id", b"retry")  # what a line of a stream may begin with
_ANY_CALL, _NEW_CALL = b'"function"', b'"name"'  # what a piece of a tool call has in it, and its first one only
_HEAD = ("id", "object", "created", "model", "system_fingerprint")  # what all events of a stream have in common


class EventStream:
    """The stream of a chat or completion. `dropped` counts events that could not be read after content had come."""

    content_type = b"text/event-stream"

    __slots__ = (
        "_calm",
        "_choices",
        "_expected",
        "_failure",
        "_finish_mark",
        "_held",
        "_name",
        "_opening",
        "_renaming",
        "_request",
        "_usage_event",
        "_usage_mark",
        "_watched",
        "begun",
        "dropped",
        "ended",
        "finish_reason",
        "timings",
        "usage",
    )

    def __init__(self, request: Request, choices: Choices, *, both_reasoning_names: bool = False) -> None:
        self.begun = False
        self.ended = False
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self.dropped = 0
        self._request = request
        self._name = _quoted(request.model)
        self._choices = choices
        self._watched = _watched(request, both_reasoning_names)
        self._expected = _expected_choices(request)
        self._finish_mark = b'"finish_reason":"'
        self._usage_mark = b'"usage":{'
        self._renaming: tuple[bytes, bytes] | None = None
        self._held = bytearray()  # an event of which the end has not come yet
        self._calm = False  # nothing is held, and the next event most likely is just more text
        self._opening = b""  # the first event that had choices
        self._usage_event = b""
        self._failure: NodeFailure | RequestRefused | None = None

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of any length, and returns the events that they complete."""
        # Nearly all data passes here, and this is all that it costs. No such word can be part of the text of an
        # answer, as quotes are escaped there. `rfind` is twice as fast as `find`, and four times as fast as `in`.
        if (
            self._calm
            and data.endswith(_JSON_EVENT_ENDS)
            and data.rfind(b'"error"') < 0
            and data.rfind(self._finish_mark) < 0
            and data.rfind(self._usage_mark) < 0
            and not (self._watched and self._has_watched(data))
        ):
            return self._renamed(data)
        return self._feed(data)

    def finish(self) -> bytes:
        """Takes the end of the node's answer, and completes the stream when only its formal end is missing."""
        if self._failure is not None:
            raise self._failure
        if self.ended:
            return b""
        rest = self._last_event()
        if self.ended:
            return rest
        if not self.begun:
            raise self._nothing()
        if len(self._choices.finished) < self._expected:
            raise NodeFailure(Failure.CUT, "the node's answer ended before it was complete")
        self.ended = True
        return rest + self._usage_event + _DONE

    # -- from bytes to events

    def _feed(self, data: bytes) -> bytes:
        if self._failure is not None:
            raise self._failure
        if self.ended:
            return b""
        events: list[bytes] = []
        try:
            whole, start = self._completed(data), 0
            while start < len(whole) and not self.ended:
                end = self._plain_until(whole, start)
                if end > start:
                    events.append(self._renamed(whole[start:end]))
                else:
                    end = _end_of_event(whole, start)
                    events.append(self._event(whole[start:end]))
                start = end
            self._check_held()
        except (NodeFailure, RequestRefused) as failure:
            self._failure = failure
            self.ended = True
            if not (self.begun and any(events)):
                raise
        self._calm = self.begun and not (self._held or self.ended or self._choices.finished)
        return b"".join(events)

    def _completed(self, data: bytes) -> bytes:
        """What is complete, with `data` added to what was held. The rest is held."""
        if self._held:
            searched = max(0, len(self._held) - 2)
            self._held += data
            end = _end_of_events(self._held, searched)
            whole = bytes(self._held[:end])
            del self._held[:end]
        else:
            end = _end_of_events(data, 0)
            whole = data[:end]
            self._held += data[end:]
        return whole + self._superfluous()

    def _superfluous(self) -> bytes:
        """Line breaks between events, more than are needed: they are not held, lest they go down with an event."""
        if not self._held.startswith((b"\n", b"\r")):
            return b""
        count = len(self._held) - len(self._held.lstrip(b"\r\n"))
        breaks = bytes(self._held[:count])
        del self._held[:count]
        return breaks

    def _check_held(self) -> None:
        if len(self._held) > MAX_EVENT_BYTES:
            raise _malformed("an event of more than 16 MiB")
        if not self.begun and self._held[:64].lstrip().startswith(b"<"):
            raise _malformed("a web page; is the node's URL right?")

    def _last_event(self) -> bytes:
        """An event that is complete but for its blank line. A part of one is none."""
        payload = payload_of(bytes(self._held))
        if payload is None or (payload != b"[DONE]" and decoded(payload) is None):
            return b""
        event = bytes(self._held).rstrip(b"\r\n") + b"\n\n"
        self._held.clear()
        return self._event(event)

    def _nothing(self) -> Exception:
        """Why there was no content."""
        if self._opening or payload_of(bytes(self._held)) is not None:
            return NodeFailure(Failure.CUT, "the node's answer ended before its first content")
        text = bytes(self._held).strip()
        if not text or text.startswith(b":"):
            return NodeFailure(Failure.EMPTY, "the node sent an empty answer")
        return _no_stream(text)

    # -- from event to event

    def _event(self, event: bytes) -> bytes:
        if self.begun and not self._suspicious(event):
            return self._renamed(event)
        payload = payload_of(event)
        if not payload:
            return self._without_data(event)
        if payload == b"[DONE]":
            return self._done(event)
        try:
            return self._document(payload, event)
        except NodeFailure as failure:
            if failure.failure is not Failure.MALFORMED or not self.begun:
                raise
        self.dropped += 1
        return b""

    def _plain_until(self, events: bytes, start: int) -> int:
        """Where the events end that need no look, from `start` on; `start` when the first one needs it."""
        if not self.begun:
            return start
        end = len(events)
        for mark in (b'"error"', self._finish_mark, self._usage_mark, b"[DONE]", *self._watched):
            last = events.rfind(mark, start, end)
            if last >= 0:
                # Most often it is the only one, and `rfind` is so much faster that looking twice pays.
                end = last if events.rfind(mark, start, last) < 0 else events.find(mark, start, last)
        return end if end == len(events) else _end_of_events(events, start, end) or start

    def _renamed(self, events: bytes) -> bytes:
        return events if self._renaming is None else events.replace(*self._renaming)

    def _suspicious(self, event: bytes) -> bool:
        """The same as in `feed`, so that an event fares alike alone and among others."""
        return (
            event.rfind(b'"error"') >= 0
            or event.rfind(self._finish_mark) >= 0
            or event.rfind(self._usage_mark) >= 0
            or event.rstrip().endswith(b"[DONE]")
            or self._has_watched(event)
        )

    def _has_watched(self, data: bytes) -> bool:
        return any(data.rfind(word) >= 0 for word in self._watched)

    def _without_data(self, event: bytes) -> bytes:
        """A comment, or fields of the event alone; it goes through like the blank lines of some nodes."""
        if not self.begun and any(line and not line.startswith(_FIELDS) for line in event.splitlines()):
            raise _no_stream(event)
        return event

    def _done(self, event: bytes) -> bytes:
        if not self.begun:
            raise NodeFailure(Failure.EMPTY, "the node ended its answer without content")
        self.ended = True
        missing = b"" if self._choices.finished else self._finish_event()
        return missing + self._usage_event + event

    def _finish_event(self) -> bytes:
        reason = "tool_calls" if self._choices.called_tools else "stop"
        self.finish_reason = self._choices.finished[0] = reason
        delta: Fields = {"delta": {}} if self._request.operation is Operation.CHAT else {"text": ""}
        opening = decoded(payload_of(self._opening) or b"") or {}
        head = {key: opening[key] for key in _HEAD if key in opening}
        return self._encoded({**head, "choices": [{"index": 0, **delta, "finish_reason": reason}]})

    def _document(self, payload: bytes, event: bytes) -> bytes:
        document = decoded(payload)
        if document is None:
            raise _malformed("an event that is no JSON object")
        error = event_error(document, begun=self.begun)
        if error is not None:
            raise error
        self.usage = usage_in(document) or self.usage
        if "timings" in document:
            self.timings = timings_in(document)
        choices = document.get("choices")
        if not choices:
            return self._without_choices(document, event)
        if not isinstance(choices, list):
            raise _malformed("choices that are no list")
        if not self._opening:
            self._learn(event)
        changed = self._choices.repair(choices)
        self.finish_reason = self._choices.finish_reason
        self.begun = self.begun or holds_content(choices)
        if self._choices.called_tools:
            self._watch_calls()
        named = self._named(document, event)
        return self._encoded(document) if changed else named

    def _watch(self, word: bytes) -> None:
        if word not in self._watched:
            self._watched += (word,)

    def _watch_calls(self) -> None:
        """Every piece of a call has a "function" in it. Of a node that is good at it only the first ones are read."""
        new, old = (_NEW_CALL, _ANY_CALL) if self._choices.continues_calls_well else (_ANY_CALL, _NEW_CALL)
        if new not in self._watched:
            self._watched = (*(word for word in self._watched if word != old), new)

    def _without_choices(self, document: Fields, event: bytes) -> bytes:
        """Usage comes after all else, once, and only to a client that asked for it."""
        if isinstance(document.get("usage"), dict):
            if self._request.include_usage:
                self._usage_event = self._named(document, event)
            return b""
        if "choices" not in document and not self.begun:
            raise _malformed("an event without choices")
        return self._named(document, event)

    def _learn(self, event: bytes) -> None:
        """Remembers how this node writes its events."""
        self._opening = event
        if b'"choices": ' in event:
            self._finish_mark = b'"finish_reason": "'
            self._usage_mark = b'"usage": {'

    def _named(self, document: Fields, event: bytes) -> bytes:
        """The event with the name that the client knows the model by.

        The node may call it by another name than it was asked for, by its path for example.
        """
        name = document.get("model")
        if name == self._request.model or not isinstance(name, str):
            return event
        member = sole_member(event, b'"model"')
        if member is None:
            self._watch(b'"model"')
            return self._encoded(document)
        named = event[member.start : member.value] + self._name
        self._renaming = (event[member.start : member.end], named)
        return event[: member.start] + named + event[member.end :]

    def _encoded(self, document: Fields) -> bytes:
        if "model" in document:
            document["model"] = self._request.model
        return b"data: " + encoded(document) + b"\n\n"


@lru_cache(maxsize=64)
def _quoted(name: str) -> bytes:
    """One for all streams, as what orjson writes takes 4 KiB for as long as it is kept."""
    return orjson.dumps(name)


def _watched(request: Request, both_reasoning_names: bool) -> tuple[bytes, ...]:
    """More words that an event must be decoded for."""
    calls = (_ANY_CALL,) if request.fields.get("tools") else ()
    return (b'"reasoning"', *calls) if both_reasoning_names else calls


def _expected_choices(request: Request) -> int:
    """How many choices must end before the answer is whole."""
    each = request.fields.get("n")
    prompts = request.fields.get("prompt")
    several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    count = len(prompts) if several and isinstance(prompts, list) else 1
    return count * each if type(each) is int and each > 1 else count


def _end_of_events(data: bytes | bytearray, start: int, end: int | None = None) -> int:
    """Where the last complete event ends; 0 when none does. A blank line between `start` and `end` ends an event."""
    short = data.rfind(b"\n\n", start, end)
    long = data.rfind(b"\n\r\n", max(short, start), end)
    return long + 3 if long >= 0 else short + 2 if short >= 0 else 0


def _end_of_event(events: bytes, start: int) -> int:
    """Where the event that begins at `start` ends, or the superfluous line breaks that stand there."""
    bare = start
    while events[bare : bare + 1] in (b"\n", b"\r"):
        bare += 1
    if bare > start:
        return bare
    short = events.find(b"\n\n", start)
    long = events.find(b"\n\r\n", start, short + 2 if short >= 0 else None)
    return long + 3 if long >= 0 else short + 2 if short >= 0 else len(events)


def payload_of(event: bytes) -> bytes | None:
    """The data of an event; None when it has none."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2].strip()
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines).strip() if lines else None


def decoded(payload: bytes) -> Fields | None:
    """The object in an event's data; None when there is none."""
    try:
        document: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def _no_stream(text: bytes) -> Exception:
    """The error for something else than events: the node's own, when it says one in a plain document."""
    return event_error(decoded(text), begun=False) or _malformed("something that is no stream of events")


def _malformed(what: str) -> NodeFailure:
    return NodeFailure(Failure.MALFORMED, f"the node sent {what}")
