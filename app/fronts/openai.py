"""OpenAI's API for clients: the three inference routes as raw ASGI endpoints, and the list of models."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus

from app.domain import Operation, Outcome, Priority, Request, tier_name
from app.errors import (
    HearthError,
    InvalidRequest,
    MethodNotAllowed,
    NodeFailure,
    RateLimited,
    ShuttingDown,
    UnsupportedMediaType,
)
from app.fronts.asgi import (
    ClientGone,
    ClientWatch,
    Headers,
    Lines,
    Message,
    Receive,
    Scope,
    Send,
    WatchStarts,
    headers_of,
    lines_of,
    read_body,
    request_id,
    send_json,
)
from app.fronts.auth import Doors, check_route
from app.fronts.keep_alive import COMMENT, KeepAlive, told_late
from app.fronts.openai_wire import (
    check,
    decode,
    error_document,
    error_event,
    error_headers,
    refusal_event,
)
from app.fronts.turnstile import Turnstile
from app.request_ids import CURRENT, RequestIds, trace_of
from app.routing.dispatch import Dispatcher
from app.routing.ended import Ended, Report
from app.routing.reply import Reply
from app.routing.spans import RequestSpan
from app.routing.trail import Trail

_PASSED_ON = (b"traceparent", b"tracestate")
_PARTING_SECONDS = 1.0  # for the last words to a client whose request took too long
_TRUE = frozenset({b"true", b"1", b"yes", b"on"})
_FALSE = frozenset({b"false", b"0", b"no", b"off"})
PRIORITY = b"x-hearth-priority"
_PRIORITIES = frozenset(priority.value for priority in Priority)
_NOT_QUEUED = (b"x-hearth-queue-ms", b"0")
_STREAM_HEADERS: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_EARLY = lines_of([(b"content-type", b"text/event-stream"), *_STREAM_HEADERS])

BeginSpan = Callable[[Mapping[bytes, bytes], Operation, str], RequestSpan | None]  # headers, what is asked, path


class Inference:
    """One inference route. Streams and documents take the same way; only the last step differs."""

    def __init__(
        self,
        operation: Operation,
        *,
        dispatcher: Dispatcher,
        doors: Doors,
        reports: Sequence[Report],
        on_bug: Callable[[str, str], None],
        max_body_bytes: int,
        closing: Callable[[], bool],
        turnstile: Turnstile,
        begin_span: BeginSpan | None = None,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        """`begin_span` begins the trace of each request; None = there are no traces.

        `keep_alive` says when streams are kept alive; None = never.
        """
        self._operation = operation
        self._dispatcher = dispatcher
        self._doors = doors
        self._reports = reports
        self._on_bug = on_bug
        self._max_body_bytes = max_body_bytes
        self._closing = closing
        self._turnstile = turnstile
        self._begin_span = begin_span
        self._keep_alive = keep_alive
        self._watch_starts = WatchStarts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(headers_of(scope), send)
        self._trace(exchange, scope["path"])
        try:
            request = await self._read(scope, receive, exchange)
            with ClientWatch(receive, self._watch_starts) as watch:
                dispatching = self._dispatcher.dispatch(request, exchange.trail)
                reply = await (dispatching if self._keep_alive is None else self._kept_alive(dispatching, exchange))
                try:
                    # A client that does not read on must not hold the node for longer than a request may take.
                    watch.ends_at(reply.deadline + _PARTING_SECONDS)
                    await exchange.relay(reply, watch)
                finally:
                    reply.close()
        except HearthError as error:
            await exchange.refuse(error)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            exchange.cut(ShuttingDown())  # by the server: what the client does ends with the watch
            raise
        except Exception:
            self._on_bug(exchange.id, traceback.format_exc())
            await exchange.refuse(HearthError("Hearth itself failed; its log says why under this request's id"))
        finally:
            if exchange.limits:
                self._leave(exchange)
            ended = exchange.ended(self._operation)
            for report in self._reports:
                report(ended)

    async def _kept_alive(self, dispatching: Awaitable[Reply], exchange: _Exchange) -> Reply:
        if self._keep_alive is None or exchange.request is None or not exchange.request.stream:
            return await dispatching
        async with self._keep_alive.during(exchange.trail, exchange.keep_alive):
            return await dispatching

    def _trace(self, exchange: _Exchange, path: str) -> None:
        """Lets all that is said of the request be found together."""
        trail, headers = exchange.trail, exchange.headers
        if self._begin_span is not None:
            trail.span = self._begin_span(headers, self._operation, path)
        if trail.span is not None:
            trail.trace_id = trail.span.trace_id
        elif b"traceparent" in headers:
            trail.trace_id = trace_of(headers[b"traceparent"])
        CURRENT.set(RequestIds(exchange.id, trail.trace_id))

    async def _read(self, scope: Scope, receive: Receive, exchange: _Exchange) -> Request:
        headers = exchange.headers
        if scope["method"] != "POST":
            raise MethodNotAllowed(f"{scope['method']} is not allowed here; use POST")
        if self._closing():
            raise ShuttingDown
        caller = self._doors.check_client(headers)
        _check_media_type(headers)
        body = await read_body(receive, headers.get(b"content-length"), self._max_body_bytes)
        fields = decode(body)
        check(self._operation, fields)
        stream = fields.get("stream") is True and self._operation is not Operation.EMBEDDING
        options = fields.get("stream_options") or {}
        request = Request(
            id=exchange.id,
            operation=self._operation,
            model=fields["model"],
            body=body,
            fields=fields,
            stream=stream,
            include_usage=stream and options.get("include_usage") is True,
            local_only=said(scope, headers, b"x-hearth-local-only"),
            reasoning_content=said(scope, headers, b"x-hearth-reasoning-content"),
            caller=caller,
            priority=priority(headers) if PRIORITY in headers else None,
            forwarded=_forwarded(headers, exchange.id),
        )
        exchange.request = request
        if caller.routes:
            check_route(caller, request.model)
        rate = caller.rate
        if rate is not None:
            exchange.counted_tokens, exchange.limits = self._turnstile.enter(request, caller.id, rate)
        return request

    def _leave(self, exchange: _Exchange) -> None:
        if exchange.request is None:
            return
        caller = exchange.request.caller
        rate = caller.rate
        if rate is not None:
            self._turnstile.leave(caller.id, rate, exchange.counted_tokens, exchange.trail.usage)


class _Exchange:
    """One request and what has been answered to it so far."""

    __slots__ = (
        "_send",
        "counted_tokens",
        "error",
        "headers",
        "id",
        "limits",
        "outcome",
        "request",
        "started",
        "trail",
    )

    def __init__(self, headers: dict[bytes, bytes], send: Send) -> None:
        self.trail = Trail()
        self.headers = headers
        self.id = request_id(headers.get(b"x-request-id"))
        self.request: Request | None = None
        self.outcome = Outcome.ABANDONED  # until something else is known
        self.error: HearthError | NodeFailure | None = None
        self.started = False
        self.counted_tokens = 0  # against the caller's limit, before anybody knew
        self.limits = b""  # how the caller stands, as lines of headers
        self._send = send

    async def relay(self, reply: Reply, watch: ClientWatch) -> None:
        """Sends the answer, piece by piece as it comes."""
        send = self._send
        self.started = True
        data = reply.first
        if self.trail.kept_alive:
            data = told_late([*_server_headers(self.trail), *_late_headers(self.trail)]) + data
        else:
            await send(self._head(reply))
        try:
            while not reply.over:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if reply.complete:
                    watch.done()
                data = await reply.next()
            self.outcome = Outcome.OK
        except NodeFailure as failure:
            self.error, self.outcome = failure, Outcome.FAILED
            data = error_event(failure)
        if self.trail.turns and self.trail.continued:
            data += self._trailer()
        watch.done()
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _head(self, reply: Reply) -> Message:
        stream = self.request is not None and self.request.stream
        lines = _fixed_lines(reply.content_type, stream, *_who_served(self.trail)) + self._own_lines()
        return _start(Lines(lines, None if stream else len(reply.first)))

    async def keep_alive(self) -> None:
        """Tells the client of a stream that its answer is still to come."""
        if not self.trail.kept_alive:
            self.trail.kept_alive = True
            await self._send(_start(Lines(_EARLY + self._known_lines())))
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    def ended(self, operation: Operation) -> Ended:
        trail = self.trail
        return Ended(self.request, self.id, operation, trail, self.outcome, self.error, trail.seconds())

    def cut(self, error: HearthError) -> None:
        """Takes note that the request was ended from outside, with no chance to say so."""
        self.error, self.outcome = error, Outcome.FAILED

    async def refuse(self, error: HearthError) -> None:
        """Answers with an error, unless an answer has begun."""
        self.error = error
        wrong = error.status < HTTPStatus.INTERNAL_SERVER_ERROR and not error.blames_nodes
        self.outcome = Outcome.REFUSED if wrong else Outcome.FAILED
        if self.started:
            return
        self.started = True
        if self.trail.kept_alive:
            late = [*_server_headers(self.trail), *_late_headers(self.trail), *error_headers(error)]
            data = told_late(late) + refusal_event(error)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
            return
        if isinstance(error, RateLimited):
            self.limits = error.header_lines
        headers = [*_server_headers(self.trail), *Lines(self._own_lines()), *error_headers(error)]
        if error.status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append((b"allow", b"POST"))
        await send_json(self._send, error.status, error_document(error), headers)

    def _trailer(self) -> bytes:
        """Who wrote the end of a stream that went on elsewhere, as its headers tell of the first node alone.

        It comes after [DONE], where none reads on: some clients take the first line of a block for its data.
        """
        return told_late([(b"x-hearth-continued", b"%d" % self.trail.continued), *_server_headers(self.trail)])

    def _own_lines(self) -> bytes:
        """The headers that no other answer has."""
        if self.trail.fallback or self.trail.queued_seconds:
            return self._known_lines() + lines_of(_late_headers(self.trail))
        return self._known_lines()

    def _known_lines(self) -> bytes:
        """Those that are known before there is an answer."""
        return b"x-request-id: %b\r\n%b" % (self.id.encode(), self.limits)


def _start(headers: Lines) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _forwarded(headers: dict[bytes, bytes], request_id: str) -> tuple[tuple[str, str], ...]:
    """What a node sees of the client's headers: ids for tracing. Keys, cookies and addresses stay here."""
    if b"traceparent" not in headers:
        return (("x-request-id", request_id),)
    traced = ((name.decode(), headers[name].decode("latin-1")) for name in _PASSED_ON if name in headers)
    return (("x-request-id", request_id), *traced)


def said(scope: Scope, headers: dict[bytes, bytes], name: bytes) -> bool:
    """Whether a header says yes. Of several one is enough, as a reverse proxy may have added its own.

    Raises `InvalidRequest` for another word: whoever misspells a wish for privacy must not lose it unawares.
    """
    if name not in headers:
        return False
    said = {value.lower() for key, value in scope["headers"] if key == name}
    if not said <= _TRUE | _FALSE:
        raise InvalidRequest(f"the header {name.decode()} must be true or false")
    return not said.isdisjoint(_TRUE)


def priority(headers: dict[bytes, bytes]) -> Priority | None:
    """The class that the client is content with; None = its own. Raises `InvalidRequest` for another word."""
    if PRIORITY not in headers:
        return None
    written = headers[PRIORITY].decode("latin-1").lower()
    if written not in _PRIORITIES:
        raise InvalidRequest(f"the header x-hearth-priority must be one of {', '.join(Priority)}")
    return Priority(written)


def _check_media_type(headers: dict[bytes, bytes]) -> None:
    # A web page may send a body without a type to anybody, unasked, and so could put this machine's nodes to work.
    given = headers.get(b"content-type", b"" if b"origin" in headers else b"application/json")
    if given != b"application/json":
        media_type = given.split(b";")[0].strip().lower()
        if media_type != b"application/json" and not media_type.endswith(b"+json"):
            raise UnsupportedMediaType("send the body as 'Content-Type: application/json'")
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        raise UnsupportedMediaType("send the body without a content encoding")


def _late_headers(trail: Trail) -> Headers:
    """What no two requests to a node need have alike."""
    headers = []
    if trail.fallback:
        headers.append((b"x-hearth-fallback", trail.fallback.encode()))
    if trail.queued_seconds:
        headers.append((b"x-hearth-queue-ms", b"%d" % round(trail.queued_seconds * 1000)))
    return headers


def _server_headers(trail: Trail) -> Headers:
    """Who was asked last, if anybody, and that the request did not wait for it, if it did not."""
    if not trail.node:
        return [_NOT_QUEUED] if trail.routed and not trail.queued_seconds else []
    return _fixed_headers(*_who_served(trail))


def _who_served(trail: Trail) -> tuple[str, int, int, str, bool]:
    return trail.node, trail.tier, trail.tried, trail.model, not trail.queued_seconds


@lru_cache(maxsize=1024)
def _fixed_lines(content_type: bytes, stream: bool, *who_served: *tuple[str, int, int, str, bool]) -> bytes:
    """What many answers begin with."""
    headers = [(b"content-type", content_type), *_fixed_headers(*who_served)]
    return lines_of([*headers, *_STREAM_HEADERS] if stream else headers)


def _fixed_headers(node: str, tier: int, tried: int, model: str, at_once: bool) -> Headers:
    headers = [
        (b"x-hearth-node", _header(node)),
        (b"x-hearth-tier", tier_name(tier).encode()),
        (b"x-hearth-attempts", b"%d" % tried),
        (b"x-hearth-model", _header(model)),
    ]
    return [*headers, _NOT_QUEUED] if at_once else headers


@lru_cache(maxsize=1024)
def _header(value: str) -> bytes:
    """A header value from a configured or listed name, which may hold anything."""
    printable = value if value.isprintable() else "".join(filter(str.isprintable, value))
    return printable.encode("ascii", "backslashreplace")
