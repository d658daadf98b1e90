"""What can go wrong with a node, by name, and how each of it looks on the wire."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from demo.engine import Edit, Engine, unchanged
from demo.httpd import Answer, Exchange, Part, PartKind, chunk, deliver, deliver_parts, render_head
from demo.script import Delta, Reply, ToolCall

FOREVER_SECONDS = 3600.0
HUGE_LINE_BYTES = 10 * 1024 * 1024
HTML = b"<!doctype html><html><head><title>Welcome</title></head><body><h1>It works!</h1></body></html>"
GARBAGE = bytes(range(128, 256)) * 4


class Behaviour(StrEnum):
    """How a node behaves. All but OK are faults or oddities."""

    OK = "ok"
    # The connection.
    REFUSE = "refuse"  # nobody listens
    RESET_AT_ACCEPT = "reset_at_accept"
    HANG = "hang"  # takes the request and never answers
    HANG_AFTER_HEAD = "hang_after_head"
    HANG_MIDWAY = "hang_midway"
    CLOSE_AT_ONCE = "close_at_once"  # takes the request and closes without a byte
    CLOSE_MIDWAY = "close_midway"  # FIN, at byte `at` of the answer or after `after` deltas
    RESET_MIDWAY = "reset_midway"  # RST, likewise
    CLOSE_AFTER_ANSWER = "close_after_answer"  # the whole answer, then a FIN that was not announced
    # Statuses, with a body in the engine's own shape.
    STATUS_400 = "status_400"
    STATUS_401 = "status_401"
    STATUS_404 = "status_404"
    STATUS_408 = "status_408"
    STATUS_429 = "status_429"  # with Retry-After
    STATUS_500 = "status_500"
    STATUS_503 = "status_503"
    STATUS_529 = "status_529"
    REDIRECT_302 = "redirect_302"
    CONTINUE_100 = "continue_100"  # an interim answer before the real one
    SWITCH_101 = "switch_101"
    # Bodies under status 200.
    HTML = "html"
    EMPTY = "empty"
    GARBAGE = "garbage"
    TRUNCATED_JSON = "truncated_json"  # a clean end in the middle of a document or of an event
    GZIP = "gzip"  # although nobody asked
    # Framing.
    LENGTH_TOO_LONG = "length_too_long"  # Content-Length says more than comes
    LENGTH_TOO_SHORT = "length_too_short"  # Content-Length says less than comes
    HALF_CHUNK = "half_chunk"
    BAD_CHUNK_SIZE = "bad_chunk_size"
    ENDLESS_HEAD = "endless_head"
    # The dialect.
    ERROR_FIRST = "error_first"  # status 200, and an error as the first event
    ERROR_MIDWAY = "error_midway"
    NO_TERMINATOR = "no_terminator"  # no [DONE], no done:true
    NO_FINISH_REASON = "no_finish_reason"
    HUGE_LINE = "huge_line"
    DUPLICATE_USAGE = "duplicate_usage"
    TOOL_INDEX_ZERO = "tool_index_zero"  # three tool calls, each with index 0
    COMMENTS = "comments"  # comment or blank lines between events
    CRLF = "crlf"  # lines end in CR LF
    # Delivery.
    DRIP = "drip"  # a byte at a time
    SPLIT_CHARACTERS = "split_characters"  # writes end inside multi-byte characters
    ONE_WRITE = "one_write"  # all in one piece


class Stage(StrEnum):
    """What a client has by the time that a behaviour shows."""

    NOTHING = "nothing"  # no content: another node can serve the request unseen
    SOME = "some"  # a part of the answer
    ALL = "all"  # the whole answer: the client should notice nothing


STREAM_STAGES: Mapping[Behaviour, Stage] = {
    **dict.fromkeys(Behaviour, Stage.NOTHING),
    **dict.fromkeys(
        (
            Behaviour.HANG_MIDWAY,
            Behaviour.CLOSE_MIDWAY,
            Behaviour.RESET_MIDWAY,
            Behaviour.LENGTH_TOO_SHORT,
            Behaviour.HALF_CHUNK,
            Behaviour.BAD_CHUNK_SIZE,
            Behaviour.ERROR_MIDWAY,
            Behaviour.NO_TERMINATOR,
        ),
        Stage.SOME,
    ),
    **dict.fromkeys(
        (
            Behaviour.OK,
            Behaviour.CLOSE_AFTER_ANSWER,
            Behaviour.CONTINUE_100,
            Behaviour.GZIP,
            Behaviour.LENGTH_TOO_LONG,
            Behaviour.NO_FINISH_REASON,
            Behaviour.HUGE_LINE,
            Behaviour.DUPLICATE_USAGE,
            Behaviour.TOOL_INDEX_ZERO,
            Behaviour.COMMENTS,
            Behaviour.CRLF,
            Behaviour.DRIP,
            Behaviour.SPLIT_CHARACTERS,
            Behaviour.ONE_WRITE,
        ),
        Stage.ALL,
    ),
}


def stage(behaviour: Behaviour, *, stream: bool, ollama: bool) -> Stage:
    """Where a behaviour with its default settings strikes. A document is content only when it is whole."""
    if stream:
        return STREAM_STAGES[behaviour]
    if behaviour is Behaviour.LENGTH_TOO_LONG:
        return Stage.NOTHING
    if behaviour is Behaviour.NO_TERMINATOR and not ollama:
        return Stage.ALL  # an OpenAI document has no terminator; Ollama's says done:false and is cut short
    return Stage.NOTHING if STREAM_STAGES[behaviour] is Stage.SOME else STREAM_STAGES[behaviour]


class On(StrEnum):
    """Which requests a behaviour meets. REFUSE and RESET_AT_ACCEPT meet all, since no request arrives."""

    INFERENCE = "inference"
    PROBES = "probes"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Fault:
    """A behaviour and its settings; each is used by the behaviours that it makes sense for."""

    behaviour: Behaviour = Behaviour.OK
    on: On = On.INFERENCE
    at: int | None = None  # bytes of the answer, from its status line on
    after: int | None = None  # deltas
    seconds: float | None = None  # Retry-After, or the pause between the pieces of DRIP and ENDLESS_HEAD
    size: int = HUGE_LINE_BYTES  # of HUGE_LINE
    message: str = "unexpected EOF"  # of the error events
    location: str = "/elsewhere"  # of REDIRECT_302

    @property
    def status(self) -> int | None:
        """The status of an error answer, or None."""
        return int(self.behaviour.removeprefix("status_")) if self.behaviour.startswith("status_") else None

    @property
    def deltas(self) -> int:
        """How many deltas come before it strikes."""
        if self.after is not None:
            return self.after
        return 2 if STREAM_STAGES[self.behaviour] is Stage.SOME else 0


HEALTHY = Fault()


async def misbehave(exchange: Exchange, engine: Engine, fault: Fault) -> None:
    """Answers a request in the way of this fault."""
    early = EARLY.get(fault.behaviour)
    if early is not None:
        await early(exchange, fault)
        return
    if fault.status is not None:
        await deliver(exchange, _refusal(exchange, engine, fault, fault.status))
        return
    answer = await engine.answer(exchange.request, EDITS.get(fault.behaviour, _no_edit)(fault))
    if answer.status == 200:
        answer = REWRITES.get(fault.behaviour, _no_rewrite)(answer, fault, engine)
        await WIRES.get(fault.behaviour, _healthy)(exchange, answer, fault)
    else:  # the request was wrong in itself, which no fault hides
        await deliver(exchange, answer)


def _refusal(exchange: Exchange, engine: Engine, fault: Fault, status: int) -> Answer:
    answer = engine.missing(_model(exchange)) if status == 404 else engine.error(status)
    if fault.behaviour is Behaviour.STATUS_429 or fault.seconds is not None:
        seconds = 1 if fault.seconds is None else math.ceil(fault.seconds)
        return replace(answer, headers={**answer.headers, "retry-after": str(seconds)})
    return answer


def _model(exchange: Exchange) -> str:
    try:
        return str(exchange.request.json["model"])
    except (ValueError, TypeError, KeyError):
        return ""


# Before the engine is asked.


async def _hang(exchange: Exchange, fault: Fault) -> None:
    await asyncio.sleep(FOREVER_SECONDS)


async def _close_at_once(exchange: Exchange, fault: Fault) -> None:
    exchange.close()


async def _redirect(exchange: Exchange, fault: Fault) -> None:
    await deliver(exchange, Answer(status=302, headers={"location": fault.location}))


async def _switch(exchange: Exchange, fault: Fault) -> None:
    exchange.raw(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    await exchange.drain()
    exchange.close()


async def _endless_head(exchange: Exchange, fault: Fault) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\n")
    while True:
        exchange.raw(b"x-filler: " + b"f" * 1000 + b"\r\n")
        await exchange.drain()
        await asyncio.sleep(0.01 if fault.seconds is None else fault.seconds)


Early = Callable[[Exchange, Fault], Awaitable[None]]
EARLY: Mapping[Behaviour, Early] = {
    Behaviour.HANG: _hang,
    Behaviour.CLOSE_AT_ONCE: _close_at_once,
    Behaviour.REDIRECT_302: _redirect,
    Behaviour.SWITCH_101: _switch,
    Behaviour.ENDLESS_HEAD: _endless_head,
}


# In what the model says.


def _no_edit(fault: Fault) -> Edit:
    return unchanged


def _huge(fault: Fault) -> Edit:
    def edit(reply: Reply) -> Reply:
        return replace(reply, deltas=(Delta("x" * fault.size), *reply.deltas[1:]))

    return edit


def _tools_at_zero(fault: Fault) -> Edit:
    calls = tuple(ToolCall(f"tool_{number}", {"number": number}, index=0) for number in range(3))

    def edit(reply: Reply) -> Reply:
        return replace(reply, deltas=tuple(Delta(tool_calls=(call,)) for call in calls))

    return edit


def _no_finish(fault: Fault) -> Edit:
    return lambda reply: replace(reply, finish=None)


def _no_end(fault: Fault) -> Edit:
    return lambda reply: replace(reply, ended=False)


EDITS: Mapping[Behaviour, Callable[[Fault], Edit]] = {
    Behaviour.HUGE_LINE: _huge,
    Behaviour.TOOL_INDEX_ZERO: _tools_at_zero,
    Behaviour.NO_FINISH_REASON: _no_finish,
    Behaviour.NO_TERMINATOR: _no_end,
}


# In what the engine writes.


def _no_rewrite(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    return answer


def _body(data: bytes, content_type: str | None = None) -> Callable[[Answer, Fault, Engine], Answer]:
    def rewrite(answer: Answer, fault: Fault, engine: Engine) -> Answer:
        headers = {**answer.headers, "content-type": content_type} if content_type else answer.headers
        return replace(answer, parts=(Part(data),), headers=headers)

    return rewrite


def _truncated(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    parts = list(_until_delta(answer.parts, fault.deltas + 1))
    cut = len(parts[-1].data) // 2
    return replace(answer, parts=(*parts[:-1], replace(parts[-1], data=parts[-1].data[:cut])))


def _failing(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    """Ends with the engine's error event after so many deltas; a document is nothing but an error object."""
    if not answer.stream:
        return replace(engine.error(500), status=200)
    before = () if fault.deltas == 0 else tuple(_until_delta(answer.parts, fault.deltas))
    return replace(answer, parts=(*before, *engine.error_parts(fault.message)))


def _twice_counted(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    """Says its usage twice: in two usage events, or two last lines where the dialect has no such event."""
    kinds = {part.kind for part in answer.parts}
    doubled = PartKind.END if PartKind.FINISH not in kinds else PartKind.USAGE
    parts = [copy for part in answer.parts for copy in ([part, part] if part.kind is doubled else [part])]
    return replace(answer, parts=tuple(parts)) if answer.stream else answer


def _commented(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    if not answer.stream:
        return answer
    comment = b": keep-alive\n\n" if _is_sse(answer) else b"\n"
    return replace(answer, parts=tuple(replace(part, data=comment + part.data) for part in answer.parts))


def _with_crlf(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    if not answer.stream:
        return answer
    return replace(answer, parts=tuple(replace(part, data=part.data.replace(b"\n", b"\r\n")) for part in answer.parts))


def _zipped(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    packer = zlib.compressobj(wbits=31)
    parts = [replace(p, data=packer.compress(p.data) + packer.flush(zlib.Z_SYNC_FLUSH)) for p in answer.parts]
    parts[-1] = replace(parts[-1], data=parts[-1].data + packer.flush())
    return replace(answer, parts=tuple(parts), headers={**answer.headers, "content-encoding": "gzip"})


def _joined(answer: Answer, fault: Fault, engine: Engine) -> Answer:
    return replace(answer, parts=(Part(answer.body, PartKind.DELTA, answer.wait_seconds),))


def _is_sse(answer: Answer) -> bool:
    return answer.headers.get("content-type", "").startswith("text/event-stream")


def _until_delta(parts: Iterable[Part], count: int) -> Iterable[Part]:
    """The parts up to and with the delta of this number; at least what comes before the first."""
    seen = 0
    for part in parts:
        if part.kind is not PartKind.ROLE:
            seen += 1
        if seen > count:
            return
        yield part


REWRITES: Mapping[Behaviour, Callable[[Answer, Fault, Engine], Answer]] = {
    Behaviour.HTML: _body(HTML, "text/html"),
    Behaviour.EMPTY: _body(b""),
    Behaviour.GARBAGE: _body(GARBAGE),
    Behaviour.TRUNCATED_JSON: _truncated,
    Behaviour.ERROR_FIRST: _failing,
    Behaviour.ERROR_MIDWAY: _failing,
    Behaviour.DUPLICATE_USAGE: _twice_counted,
    Behaviour.COMMENTS: _commented,
    Behaviour.CRLF: _with_crlf,
    Behaviour.GZIP: _zipped,
    Behaviour.ONE_WRITE: _joined,
}


# In how it is sent.


async def _healthy(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await deliver(exchange, answer)


async def _hang_after_head(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    exchange.head(answer.status, answer.headers, _length(answer))
    await asyncio.sleep(FOREVER_SECONDS)


async def _hang_midway(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _first_part(exchange, answer, fault)
    await asyncio.sleep(FOREVER_SECONDS)


async def _close_midway(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _first_part(exchange, answer, fault)
    exchange.close()


async def _reset_midway(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _first_part(exchange, answer, fault)
    await exchange.drain()
    exchange.reset()


async def _first_part(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    """Sends `at` bytes of the answer, or so many deltas, or half of a document."""
    if fault.at is not None:
        await _send_bytes(exchange, answer, fault.at)
    elif answer.stream:
        if answer.head_first or fault.deltas == 0:
            exchange.head(answer.status, answer.headers)
        if fault.deltas:
            await deliver_parts(exchange, answer, _until_delta(answer.parts, fault.deltas))
    else:
        exchange.head(answer.status, answer.headers, len(answer.body))
        exchange.body(answer.body[: len(answer.body) // 2])


async def _send_bytes(exchange: Exchange, answer: Answer, count: int) -> None:
    async for piece in _pieces(answer):
        exchange.raw(piece[:count])
        await exchange.drain()
        count -= len(piece)
        if count <= 0:
            return


async def _pieces(answer: Answer) -> AsyncIterator[bytes]:
    """The bytes of a healthy answer, framed, at its pace."""
    yield render_head(answer.status, answer.headers, _length(answer))
    for part in answer.parts:
        await asyncio.sleep(part.wait_seconds)
        if part.data:
            yield chunk(part.data) if answer.stream else part.data
    if answer.stream:
        yield b"0\r\n\r\n"


async def _in_writes(
    exchange: Exchange, answer: Answer, cut: Callable[[bytes], Iterable[bytes]], seconds: float
) -> None:
    async for piece in _pieces(answer):
        for write in cut(piece):
            exchange.raw(write)
            await exchange.drain()
            await asyncio.sleep(seconds)
    exchange.end()


async def _drip(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _in_writes(exchange, answer, _single_bytes, fault.seconds or 0.0)


async def _split_characters(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _in_writes(exchange, answer, _inside_characters, 0.002 if fault.seconds is None else fault.seconds)


def _single_bytes(data: bytes) -> Iterable[bytes]:
    return (data[place : place + 1] for place in range(len(data)))


def _inside_characters(data: bytes) -> Iterable[bytes]:
    """Cuts after the first byte of every character that has several."""
    start = 0
    for place, byte in enumerate(data):
        if byte >= 0xC0:
            yield data[start : place + 1]
            start = place + 1
    yield data[start:]


async def _length_too_long(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _with_length(exchange, answer, len(answer.body) + 100)
    exchange.close()


async def _length_too_short(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await _with_length(exchange, answer, len(answer.body) // 2)
    exchange.end()


async def _with_length(exchange: Exchange, answer: Answer, length: int) -> None:
    await asyncio.sleep(answer.wait_seconds)
    exchange.head(answer.status, answer.headers, length)
    exchange.body(answer.body)
    await exchange.drain()


async def _half_chunk(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    rest = await _first_chunks(exchange, answer, fault)
    exchange.raw(chunk(rest)[: len(rest) // 2])
    exchange.close()


async def _bad_chunk_size(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    rest = await _first_chunks(exchange, answer, fault)
    exchange.raw(b"zz\r\n" + rest + b"\r\n0\r\n\r\n")
    exchange.close()


async def _first_chunks(exchange: Exchange, answer: Answer, fault: Fault) -> bytes:
    """Sends the answer in chunks for so many deltas, and returns what would be the next chunk."""
    sent = tuple(_until_delta(answer.parts, fault.deltas)) if answer.stream and fault.deltas else ()
    exchange.head(answer.status, answer.headers)
    await deliver_parts(exchange, answer, sent)
    return answer.parts[len(sent)].data if len(sent) < len(answer.parts) else b"{}"


async def _continue_first(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
    await deliver(exchange, answer)


async def _close_after_answer(exchange: Exchange, answer: Answer, fault: Fault) -> None:
    await deliver(exchange, answer)
    exchange.close()


def _length(answer: Answer) -> int | None:
    return None if answer.stream else len(answer.body)


WIRES: Mapping[Behaviour, Callable[[Exchange, Answer, Fault], Awaitable[None]]] = {
    Behaviour.HANG_AFTER_HEAD: _hang_after_head,
    Behaviour.HANG_MIDWAY: _hang_midway,
    Behaviour.CLOSE_MIDWAY: _close_midway,
    Behaviour.RESET_MIDWAY: _reset_midway,
    Behaviour.CLOSE_AFTER_ANSWER: _close_after_answer,
    Behaviour.CONTINUE_100: _continue_first,
    Behaviour.LENGTH_TOO_LONG: _length_too_long,
    Behaviour.LENGTH_TOO_SHORT: _length_too_short,
    Behaviour.HALF_CHUNK: _half_chunk,
    Behaviour.BAD_CHUNK_SIZE: _bad_chunk_size,
    Behaviour.DRIP: _drip,
    Behaviour.SPLIT_CHARACTERS: _split_characters,
}
