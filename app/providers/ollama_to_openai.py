"""Turns Ollama's answers into OpenAI's: NDJSON lines into server-sent events, and documents into documents. Sans-I/O.

A stream counts as complete only after its line with `"done": true`; Ollama may end one without, and without an error.
When a stream breaks, what came before it is returned first: `ended` is then set, and the next `feed` or `finish`
raises.
"""

from __future__ import annotations

import json
import random
import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import orjson

from app.domain import Failure, Operation, Timings, Usage
from app.errors import NodeFailure, RequestRefused
from app.providers.base import Answer, Call
from app.providers.ollama_errors import complaint
from app.providers.openai_to_ollama import wants_function_call

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_DOCUMENT_BYTES = 128 * 1024 * 1024
_FRACTION = ".,0123456789"

Fields = dict[str, Any]


def answer(call: Call) -> Answer:
    """Reads the node's answer to one call."""
    request = call.request
    if request.operation is Operation.EMBEDDING:
        return _Embeddings(call)
    dialect = _Chat(call) if request.operation is Operation.CHAT else _Completion()
    return _Stream(call, dialect) if request.stream else _Generation(call, dialect)


# -- reading what the node sent


class _Part(NamedTuple):
    """What one line adds to the answer; a document is one whole part."""

    content: str
    thinking: str
    calls: list[Fields]
    logprobs: list[Fields]

    @property
    def holds_content(self) -> bool:
        return bool(self.content or self.thinking or self.calls)

    @property
    def empty(self) -> bool:
        return not (self.holds_content or self.logprobs)


def _malformed(what: str) -> NodeFailure:
    return NodeFailure(Failure.MALFORMED, f"the node sent {what}")


def _cut() -> NodeFailure:
    return NodeFailure(Failure.CUT, "the node's answer ended before it was complete")


def _decoded(data: bytes, *, last: bool = False) -> Fields:
    """The JSON object in `data`. `last` says that the node's answer ended here, perhaps in the middle of it."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if last and data.lstrip().startswith(b"{"):
            raise _cut() from error
        raise _malformed("something that is not JSON") from error
    if type(fields) is not dict:
        raise _malformed("JSON that is no object")
    return fields


def _raise_error(fields: Fields, *, begun: bool) -> None:
    """Raises the error that a line holds. Once there was content, the request cannot have been wrong."""
    if not fields.get("error"):
        return
    said = complaint(fields)
    if said.blames_request and not begun:
        raise said.refusal()
    raise NodeFailure(Failure.ERROR_EVENT, said.text or "the node reported an error without saying which")


def _text(fields: Fields, key: str) -> str:
    text = fields.get(key)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise _malformed(f"a {key} that is no text")
    return text


def _logprobs(fields: Fields) -> list[Fields]:
    logprobs = fields.get("logprobs")
    if not logprobs:
        return []
    if not isinstance(logprobs, list) or not all(isinstance(entry, dict) for entry in logprobs):
        raise _malformed("logprobs that are no list of objects")
    return logprobs


def _count(fields: Fields, key: str) -> int:
    count = fields.get(key) or 0  # Ollama leaves out counts that are zero
    if type(count) is not int:
        raise _malformed(f"a {key} that is no number")
    return count


def _usage(fields: Fields) -> Usage | None:
    """The counts, or None when the node gave none at all: they are unknown then, rather than zero."""
    if fields.get("prompt_eval_count") is None and fields.get("eval_count") is None:
        return None
    return Usage(
        _count(fields, "prompt_eval_count"),
        _count(fields, "eval_count"),
        _count(fields, "prompt_eval_cached_count"),
    )


def _timings(fields: Fields) -> Timings | None:
    """What the node says that it took, in nanoseconds; zeros are left out."""
    load = _seconds(fields.get("load_duration"))
    prefill = _seconds(fields.get("prompt_eval_duration"))
    decode = _seconds(fields.get("eval_duration"))
    if load is None and prefill is None and decode is None:
        return None
    # Newer versions say how much of the prompt they had. They leave out a zero, as older ones do all of it.
    cached = _count(fields, "prompt_eval_cached_count") or None
    read = None if cached is None else max(0, _count(fields, "prompt_eval_count") - cached)
    return Timings(load, prefill, decode, read, cached)


def _seconds(nanoseconds: Any) -> float | None:
    return nanoseconds / 1e9 if type(nanoseconds) is int and nanoseconds > 0 else None


def _usage_object(usage: Usage | None, fields: Fields) -> Fields:
    usage = usage or Usage(0, 0)
    counts: Fields = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if "prompt_eval_cached_count" in fields:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return counts


def _finish_reason(fields: Fields, calls: str) -> str:
    """OpenAI's reason for the end. `calls` is the reason when tools were called, else ""."""
    reason = _text(fields, "done_reason")
    if reason in ("", "stop", "load", "unload"):  # old nodes give none, and loading is no reason of OpenAI's
        return calls or "stop"
    return reason


def _created(fields: Fields) -> int:
    """Unix seconds of `created_at`, or of now when the node gives no sensible time."""
    given = fields.get("created_at")
    # All answers of a second share what is before the fraction, and to read a date takes long.
    seconds = _unix_seconds(given[:19], given[19:].lstrip(_FRACTION)) if type(given) is str else 0
    return seconds if seconds > 0 else int(time.time())


@lru_cache(maxsize=64)
def _unix_seconds(to_the_second: str, zone: str) -> int:
    """0 for what is no time."""
    try:
        return int(datetime.fromisoformat(to_the_second + zone).timestamp())
    except (ValueError, OverflowError):
        return 0


class _ToolCalls:
    """Numbers the tool calls of one answer, and sees to it that no two have the same id.

    The node's own index is of no use: many nodes give 0 to every call, and clients then glue the arguments together.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def read(self, line: bytes) -> list[Fields]:
        """The tool calls in a line, in OpenAI's form."""
        try:
            # Numbers stay in the node's own text: read as a number, a long integer or 1.0 would not come out the same.
            fields = json.loads(line, parse_int=orjson.Fragment, parse_float=orjson.Fragment)
            return [self._call(call) for call in fields["message"]["tool_calls"]]
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _malformed("tool calls of an unknown form") from error

    def _call(self, call: Fields) -> Fields:
        function = call["function"]
        name = function["name"]
        if not isinstance(name, str):
            raise TypeError(name)
        arguments = _arguments_text(function.get("arguments"))
        index = len(self._ids)
        return {
            "id": self._new_id(call.get("id")),
            "index": index,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _new_id(self, given: Any) -> str:
        usable = isinstance(given, str) and given and given not in self._ids
        new = given if usable else f"call_{random.getrandbits(96):024x}"
        self._ids.add(new)
        return new


def _arguments_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    if arguments is not None and not isinstance(arguments, dict):
        raise TypeError(arguments)
    return orjson.dumps(arguments or {}).decode()


# -- the two forms of a generated answer


class _Dialect(Protocol):
    """How the answers of one operation look. One object per answer, as it remembers what was said."""

    key: str  # where a line has its content
    id_prefix: str
    chunk: str  # the `object` of a stream's events
    document: str

    def quick(self, fields: Fields) -> bytes | None:
        """The JSON of `choices` for a line with nothing but text, as nearly all are; None for the others."""
        ...

    def part(self, fields: Fields, line: bytes) -> _Part: ...

    def finish_reason(self, fields: Fields) -> str: ...

    def choices(self, part: _Part) -> list[Fields]:
        """The `choices[0]` of each event that a line becomes."""
        ...

    def last_choices(self, part: _Part, reason: str) -> list[Fields]:
        """The same for the last line."""
        ...

    def whole_choice(self, part: _Part, reason: str) -> Fields:
        """The `choices[0]` of a document."""
        ...


class _Chat:
    key = "message"
    id_prefix = "chatcmpl-"
    chunk = "chat.completion.chunk"
    document = "chat.completion"

    def __init__(self, call: Call) -> None:
        self._calls = _ToolCalls()
        self._both_names = call.reasoning_content
        self._old_functions = wants_function_call(call.request.fields)
        self._role: Fields = {"role": "assistant"}  # for the first event only

    def quick(self, fields: Fields) -> bytes | None:
        message = fields.get("message")
        if type(message) is not dict or fields.get("done") is not False or "error" in fields or "logprobs" in fields:
            return None
        content = message.get("content")
        if type(content) is not str or "tool_calls" in message:
            return None
        if "thinking" not in message:
            return b'[{"index":0,"delta":{"content":' + orjson.dumps(content) + b'},"finish_reason":null}]'
        thinking = message["thinking"]
        return self._quick_thought(thinking) if type(thinking) is str and thinking and not content else None

    def _quick_thought(self, thinking: str) -> bytes:
        text = orjson.dumps(thinking)
        other = b',"reasoning_content":' + text if self._both_names else b""
        return b'[{"index":0,"delta":{"content":"","reasoning":' + text + other + b'},"finish_reason":null}]'

    def part(self, fields: Fields, line: bytes) -> _Part:
        message = fields.get("message", {})
        if type(message) is not dict:
            raise _malformed("a message that is no object")
        calls = self._calls.read(line) if message.get("tool_calls") else []
        return _Part(_text(message, "content"), _text(message, "thinking"), calls, _logprobs(fields))

    def finish_reason(self, fields: Fields) -> str:
        called = "function_call" if self._old_functions else "tool_calls"
        return _finish_reason(fields, called if self._calls else "")

    def choices(self, part: _Part) -> list[Fields]:
        content = {"content": part.content, **self._called(part)}
        if part.thinking and (part.content or part.calls):
            thought = self._choice(self._reasoning(part), None, part.logprobs)
            return [thought, self._choice(content, None, [])]
        return [self._choice({**content, **self._reasoning(part)}, None, part.logprobs)]

    def last_choices(self, part: _Part, reason: str) -> list[Fields]:
        rest = self.choices(part) if self._role or not part.empty else []
        return [*rest, self._choice({}, reason, [])]

    def whole_choice(self, part: _Part, reason: str) -> Fields:
        message: Fields = {"role": "assistant", "content": part.content}
        if part.thinking or part.calls:
            message |= self._reasoning(part) | self._called(part)
        choice: Fields = {"index": 0, "message": message, "finish_reason": reason}
        return choice | _chat_logprobs(part.logprobs) if part.logprobs else choice

    def _choice(self, delta: Fields, reason: str | None, logprobs: list[Fields]) -> Fields:
        role, self._role = self._role, {}
        return {"index": 0, "delta": {**role, **delta}, "finish_reason": reason, **_chat_logprobs(logprobs)}

    def _reasoning(self, part: _Part) -> Fields:
        if not part.thinking:
            return {}
        other = {"reasoning_content": part.thinking} if self._both_names else {}
        return {"reasoning": part.thinking, **other}

    def _called(self, part: _Part) -> Fields:
        if not part.calls:
            return {}
        if not self._old_functions:
            return {"tool_calls": part.calls}
        first = part.calls[0]  # the old form knows only one call
        return {"function_call": first["function"]} if first["index"] == 0 else {}


def _chat_logprobs(logprobs: list[Fields]) -> Fields:
    return {"logprobs": {"content": logprobs}} if logprobs else {}


class _Completion:
    key = "response"
    id_prefix = "cmpl-"
    chunk = document = "text_completion"

    def __init__(self) -> None:
        self._offset = 0  # of the next token in the text

    def quick(self, fields: Fields) -> bytes | None:
        if fields.get("done") is not False or "error" in fields or "logprobs" in fields or "thinking" in fields:
            return None
        text = fields.get("response")
        if type(text) is not str:
            return None
        return b'[{"index":0,"text":' + orjson.dumps(text) + b',"finish_reason":null}]'

    def part(self, fields: Fields, line: bytes) -> _Part:
        return _Part(_text(fields, "response"), _text(fields, "thinking"), [], _logprobs(fields))

    def finish_reason(self, fields: Fields) -> str:
        return _finish_reason(fields, "")

    def choices(self, part: _Part) -> list[Fields]:
        return [self._choice(part, None)]

    def last_choices(self, part: _Part, reason: str) -> list[Fields]:
        return [self._choice(part, reason)]

    def whole_choice(self, part: _Part, reason: str) -> Fields:
        return self._choice(part, reason)

    def _choice(self, part: _Part, reason: str | None) -> Fields:
        choice: Fields = {"index": 0, "text": part.content, "finish_reason": reason}
        if part.thinking:
            # OpenAI has no field for it here, but without one a thinking model would seem to hang.
            choice["reasoning"] = part.thinking
        if part.logprobs:
            choice["logprobs"] = self._old_logprobs(part.logprobs)
        return choice

    def _old_logprobs(self, entries: list[Fields]) -> Fields:
        """The four lists that completions have in place of a list of objects."""
        tokens = [_text(entry, "token") for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.get("logprob") for entry in entries],
            "top_logprobs": [_alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }


def _alternatives(entry: Fields) -> Fields:
    try:
        return {_text(other, "token"): other.get("logprob") for other in entry.get("top_logprobs") or ()}
    except (AttributeError, TypeError) as error:
        raise _malformed("logprobs of an unknown form") from error


def _header(call: Call, dialect: _Dialect, kind: str, fields: Fields) -> Fields:
    """What a document and every event of a stream begin with."""
    return {
        "id": dialect.id_prefix + f"{random.getrandbits(96):024x}",
        "object": kind,
        "created": _created(fields),
        "model": call.request.model,  # the name that the client asked for
        "system_fingerprint": "fp_ollama",
    }


# -- streams


class _Stream:
    """One event per line, except for the first and last ones and those with more than text."""

    content_type = b"text/event-stream"

    def __init__(self, call: Call, dialect: _Dialect) -> None:
        self.begun = False
        self.ended = False
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self._call = call
        self._dialect = dialect
        self._held = bytearray()  # a line of which the end has not come yet
        self._failure: NodeFailure | RequestRefused | None = None
        self._start = b""  # what all events begin with, once the first line has come

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes of any length. Returns b"" after the last line, whatever still comes."""
        if self._failure is not None:
            raise self._failure
        if self.ended:
            return b""
        events: list[bytes] = []
        try:
            self._read(data, events)
        except (NodeFailure, RequestRefused) as failure:
            self._failure = failure
            self.ended = True
            if not any(events):
                raise
        return b"".join(events)

    def finish(self) -> bytes:
        """Reads a last line that came without a line break. Raises when the node's answer is not complete."""
        if self._failure is not None:
            raise self._failure
        if self.ended:
            return b""
        line = bytes(self._held).strip()
        if not line:
            raise _cut() if self._start else NodeFailure(Failure.EMPTY, "the node sent an empty answer")
        events = self._closer_look(_decoded(line, last=True), line)
        if not self.ended:
            raise _cut()
        return events

    def _read(self, data: bytes, events: list[bytes]) -> None:
        *lines, rest = data.split(b"\n")
        if lines and self._held:
            lines[0] = bytes(self._held) + lines[0]
            self._held.clear()
        for line in lines:
            events.append(self._events(line))
            if self.ended:
                return
        self._held += rest
        _check_length(self._held)

    def _events(self, line: bytes) -> bytes:
        if not line or line.isspace():
            return b""
        _check_length(line)
        fields = _decoded(line)
        choices = self._dialect.quick(fields) if self.begun else None
        if choices is None:
            return self._closer_look(fields, line)
        return self._start + choices + b"}\n\n"

    def _closer_look(self, fields: Fields, line: bytes) -> bytes:
        """The events of a line of any kind."""
        _raise_error(fields, begun=self.begun)
        done = fields.get("done") or False
        if type(done) is not bool or (self._dialect.key not in fields and not done):
            raise _malformed("a line of an unknown form")
        part = self._dialect.part(fields, line)
        if not self._start:
            self._open(fields)
        if done:
            return self._last_events(part, fields)
        self.begun = self.begun or part.holds_content
        return self._rendered(self._dialect.choices(part))

    def _open(self, fields: Fields) -> None:
        """Writes once what is the same in all events: encoding it again for every one costs more than all the rest."""
        header = orjson.dumps(_header(self._call, self._dialect, self._dialect.chunk, fields))
        self._start = b"data: " + header[:-1] + b',"choices":'

    def _rendered(self, choices: list[Fields]) -> bytes:
        return b"".join(self._start + orjson.dumps([choice]) + b"}\n\n" for choice in choices)

    def _last_events(self, part: _Part, fields: Fields) -> bytes:
        self.finish_reason = self._dialect.finish_reason(fields)
        self.usage = _usage(fields)
        self.timings = _timings(fields)
        events = self._rendered(self._dialect.last_choices(part, self.finish_reason))
        if self._call.request.include_usage:
            events += self._start + b'[],"usage":' + orjson.dumps(_usage_object(self.usage, fields)) + b"}\n\n"
        self.begun = self.ended = True
        return events + b"data: [DONE]\n\n"


def _check_length(line: bytes | bytearray) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise _malformed("a line of more than 16 MiB")


# -- documents


class _Document:
    """An answer in one piece, collected until it is whole."""

    content_type = b"application/json"

    def __init__(self, call: Call) -> None:
        self.begun = False
        self.ended = False
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self._call = call
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        """Keeps the bytes; the client gets nothing before `finish`."""
        self._size += len(data)
        if self._size > MAX_DOCUMENT_BYTES:
            raise _malformed("an answer of more than 128 MiB")
        self._parts.append(data)
        return b""

    def finish(self) -> bytes:
        """The whole document for the client."""
        body = b"".join(self._parts)
        self._parts.clear()
        if not body.strip():
            raise NodeFailure(Failure.EMPTY, "the node sent an empty answer")
        fields = _decoded(body, last=True)
        _raise_error(fields, begun=False)
        document = orjson.dumps(self._document(fields, body))
        self.begun = self.ended = True
        return document

    def _document(self, fields: Fields, body: bytes) -> Fields:
        raise NotImplementedError


class _Generation(_Document):
    """A chat or completion."""

    def __init__(self, call: Call, dialect: _Dialect) -> None:
        super().__init__(call)
        self._dialect = dialect

    def _document(self, fields: Fields, body: bytes) -> Fields:
        if self._dialect.key not in fields:
            raise _malformed(f"an answer without a {self._dialect.key}")
        if fields.get("done") is not True:
            # So ends a generation that Ollama broke off because the model repeated itself, among others.
            raise _cut()
        part = self._dialect.part(fields, body)
        self.usage = _usage(fields)
        self.timings = _timings(fields)
        self.finish_reason = self._dialect.finish_reason(fields)
        document = _header(self._call, self._dialect, self._dialect.document, fields)
        document["choices"] = [self._dialect.whole_choice(part, self.finish_reason)]
        document["usage"] = _usage_object(self.usage, fields)
        return document


class _Embeddings(_Document):
    def _document(self, fields: Fields, body: bytes) -> Fields:
        vectors = fields.get("embeddings")
        if not isinstance(vectors, list) or len(vectors) != _input_count(self._call.request.fields):
            raise _malformed("another number of embeddings than there were inputs")
        encode = _encoder(self._call.request.fields)
        data = [
            {"object": "embedding", "embedding": encode(vector), "index": index} for index, vector in enumerate(vectors)
        ]
        self.usage = _usage(fields)
        tokens = self.usage.prompt_tokens if self.usage else 0
        return {
            "object": "list",
            "data": data,
            "model": self._call.request.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _input_count(fields: Mapping[str, Any]) -> int:
    texts = fields.get("input")
    return len(texts) if isinstance(texts, list) else 1


def _encoder(fields: Mapping[str, Any]) -> Any:
    wanted = fields.get("encoding_format")
    return _base64_vector if isinstance(wanted, str) and wanted.lower() == "base64" else _float_vector


def _packed(vector: Any) -> array[float]:
    """The vector as 32-bit floats, which also sees to it, fast, that they are all numbers."""
    try:
        packed = array("f", vector) if isinstance(vector, list) else None
    except (TypeError, OverflowError):
        packed = None
    if not packed:
        raise _malformed("an embedding that is empty or no list of numbers")
    return packed


def _float_vector(vector: Any) -> Any:
    _packed(vector)
    return vector


def _base64_vector(vector: Any) -> str:
    packed = _packed(vector)
    if sys.byteorder == "big":
        packed.byteswap()
    return b64encode(packed).decode()
