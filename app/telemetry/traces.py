"""Traces: a span for every request and every attempt, sent to a receiver of OTLP over HTTP. The only module that knows
OpenTelemetry; it is imported only where there is a receiver.

Spans are sent by a thread, in small batches. Whatever becomes of the receiver, requests do not wait for it: spans that
it does not take in time are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from app.domain import MICRO_DOLLARS, AttemptRecord, Operation, Outcome, Request, tier_name
from app.request_ids import trace_of
from app.routing.ended import Ended
from app.routing.registry import Candidate, Node
from app.routing.spans import AttemptSpan, Forwarded
from app.routing.trail import UNROUTED, Trail
from app.telemetry import semconv
from app.telemetry.prompts import input_messages

_FLUSH_SECONDS = 2.0  # for what is left at the end
_BATCH_SPANS = 32  # encoded in one go: 3 ms, in which the event loop waits (512, the default: 40 ms, 5 at a time)
_NAME_CHARACTERS = 100  # of names that clients choose
_REASON_CHARACTERS = 300
_PATH = "/v1/traces"

_Attributes = dict[str, Any]

SAMPLERS: Mapping[str, Callable[[float], Sampler]] = {
    "always_on": lambda share: ALWAYS_ON,
    "always_off": lambda share: ALWAYS_OFF,
    "traceidratio": TraceIdRatioBased,
    "parentbased_always_on": lambda share: ParentBased(ALWAYS_ON),
    "parentbased_always_off": lambda share: ParentBased(ALWAYS_OFF),
    "parentbased_traceidratio": lambda share: ParentBased(TraceIdRatioBased(share)),
}


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where traces go, and which. `headers` are as in OTEL_EXPORTER_OTLP_HEADERS: `name=value,name=value`.

    All else that OpenTelemetry has variables for it reads from the environment by itself.
    """

    endpoint: str
    headers: str = ""
    service: str = "hearth"
    version: str = ""
    instance: str = ""
    sampler: str = "parentbased_always_on"
    share: float = 1.0  # of traces, for samplers that take one
    prompts: bool = False


class Traces:
    """Begins the span of each request, and as one of the reports ends it. Used with `async with`, while requests run.

    `on_trouble` hears once when the receiver cannot be reached, and when it can be again; from other threads too.
    """

    def __init__(self, receiver: Receiver, on_trouble: Callable[..., None]) -> None:
        self._receiver = receiver
        self._on_trouble = on_trouble
        self._clients_decide = receiver.sampler.startswith("parentbased")
        self._propagator = TraceContextTextMapPropagator()
        self._tracer: Tracer | None = None
        self._exporter: _Exporter | None = None
        self._processor: BatchSpanProcessor | None = None

    async def __aenter__(self) -> Self:
        receiver = self._receiver
        self._exporter = _Exporter(receiver, self._on_trouble)
        batch = None if "OTEL_BSP_MAX_EXPORT_BATCH_SIZE" in os.environ else _BATCH_SPANS
        self._processor = BatchSpanProcessor(self._exporter, max_export_batch_size=batch)
        provider = TracerProvider(
            SAMPLERS[receiver.sampler](receiver.share),
            Resource.create(
                {
                    "service.name": receiver.service,
                    "service.version": receiver.version,
                    "service.instance.id": receiver.instance,
                }
            ),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("hearth", receiver.version)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends what is left, for as long as that may take at most."""
        self._tracer = None
        processor, exporter = self._processor, self._exporter
        if processor is None or exporter is None:
            return
        exporter.closing = True
        ending = threading.Thread(target=processor.shutdown, name="last traces", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _FLUSH_SECONDS)
        exporter.shutdown()
        if not ending.is_alive():
            exporter.unhook()

    def begin(self, headers: Mapping[bytes, bytes], operation: Operation, path: str) -> _RequestSpan | None:
        """A request's span, below the client's own where it names one.

        None where the client's trace is not recorded and decides: its headers then go to nodes as they are.
        """
        if self._tracer is None:
            return None
        parent = None
        if b"traceparent" in headers:
            if self._clients_decide and _is_unrecorded(headers[b"traceparent"]):
                return None
            carrier = {"traceparent": headers[b"traceparent"].decode("latin-1")}
            if b"tracestate" in headers:
                carrier["tracestate"] = headers[b"tracestate"].decode("latin-1")
            parent = self._propagator.extract(carrier)
        clock = _Clock()
        attributes = {semconv.OPERATION: semconv.OPERATIONS[operation]}
        span = self._tracer.start_span(f"POST {path}", parent, SpanKind.SERVER, attributes, start_time=clock.now())
        return _RequestSpan(self._tracer, span, clock, path, self._receiver.prompts)

    def __call__(self, ended: Ended) -> None:
        """Ends the request's span."""
        span = ended.trail.span
        if isinstance(span, _RequestSpan) and span.recorded:
            span.end(ended)


class _Clock:
    """One request's time, in nanoseconds since 1970: the wall clock is asked once, and may be set meanwhile. What comes
    later is later here, in all spans of the request.
    """

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = time.time_ns() - time.perf_counter_ns()

    def now(self) -> int:
        return self._offset + time.perf_counter_ns()

    def at(self, seconds: float) -> int:
        """`seconds` as `perf_counter` gives them."""
        return self._offset + int(seconds * 1e9)


class _RequestSpan:
    """The span of one request. One that is not recorded still has its trace's id, which nodes hear of."""

    __slots__ = ("_clock", "_context", "_path", "_prompts", "_span", "_tracer", "attempts", "forwarded", "trace_id")

    def __init__(self, tracer: Tracer, span: Span, clock: _Clock, path: str, prompts: bool) -> None:
        context = span.get_span_context()
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._path = path
        self._prompts = prompts
        self._context = set_span_in_context(span) if span.is_recording() else None
        self.attempts = 0
        self.trace_id = f"{context.trace_id:032x}" if context.is_valid else ""
        self.forwarded: Forwarded | None = None

    @property
    def recorded(self) -> bool:
        return self._context is not None

    def attempt(self, candidate: Candidate, request: Request) -> AttemptSpan | None:
        self.attempts += 1
        if self._context is None:
            if self.forwarded is None and self.trace_id:
                self.forwarded = _forwarded(request, self._span.get_span_context())
            return None
        operation = semconv.OPERATIONS[request.operation]
        node = candidate.node
        provider, address, port = _whereabouts(node)
        attributes: _Attributes = {
            semconv.OPERATION: operation,
            semconv.PROVIDER: provider,
            semconv.REQUEST_MODEL: candidate.model,
            semconv.REQUEST_STREAM: request.stream,
            semconv.SERVER_ADDRESS: address,
            semconv.SERVER_PORT: port,
            semconv.NODE: node.name,
            semconv.TIER: tier_name(node.spec.tier),
            semconv.ATTEMPT: self.attempts,
        }
        for field, name in semconv.ASKED_FOR:
            value = request.fields.get(field)
            if type(value) in (int, float):
                attributes[name] = value
        if self._prompts:
            attributes[semconv.INPUT_MESSAGES] = input_messages(request)
        began = self._clock.now()
        span = self._tracer.start_span(
            f"{operation} {candidate.model}", self._context, SpanKind.CLIENT, attributes, start_time=began
        )
        return _AttemptSpan(span, self._clock, began, _forwarded(request, span.get_span_context()))

    def end(self, ended: Ended) -> None:
        span, request, trail = self._span, ended.request, ended.trail
        attributes: _Attributes = {
            semconv.METHOD: "POST",
            semconv.PATH: self._path,
            semconv.REQUEST_ID: ended.id,
            semconv.OUTCOME: ended.outcome.value,
            semconv.ROUTE: trail.route or UNROUTED,
            semconv.ATTEMPTS: self.attempts,
            semconv.QUEUE_MS: round(trail.queued_seconds * 1000, 1),
        }
        if request is not None:
            attributes[semconv.REQUEST_MODEL] = request.model[:_NAME_CHARACTERS]
            attributes[semconv.REQUEST_STREAM] = request.stream
            if request.caller.id:
                attributes[semconv.KEY] = request.caller.id
        if trail.node:
            attributes[semconv.NODE] = trail.node
            attributes[semconv.TIER] = tier_name(trail.tier)
            attributes[semconv.CANDIDATES] = trail.candidates
        if trail.fallback:
            attributes[semconv.FALLBACK] = str(trail.fallback)
        if trail.cloud_refusal:
            attributes[semconv.CLOUD_REFUSAL] = trail.cloud_refusal
        if trail.cost:
            attributes[semconv.COST_USD] = trail.cost / MICRO_DOLLARS
        if trail.first_content is not None:
            span.add_event(semconv.FIRST_CONTENT, timestamp=self._clock.at(trail.first_content))
        if ended.status is not None:
            attributes[semconv.STATUS_CODE] = ended.status
        if ended.error is not None:
            attributes[semconv.ERROR_TYPE] = ended.code or str(ended.status)
        if ended.outcome is Outcome.FAILED:
            # What a client did wrong is no error of this side.
            span.set_status(Status(StatusCode.ERROR, ended.said))
        span.set_attributes(attributes)
        span.end(self._clock.now())


class _AttemptSpan:
    """The span of one attempt. Its node's own spans hang below it."""

    __slots__ = ("_began", "_clock", "_first_seconds", "_span", "forwarded")

    def __init__(self, span: Span, clock: _Clock, began: int, forwarded: Forwarded) -> None:
        self._span = span
        self._clock = clock
        self._began = began
        self._first_seconds: float | None = None
        self.forwarded = forwarded

    def answering(self) -> None:
        now = self._clock.now()
        self._first_seconds = (now - self._began) / 1e9
        self._span.add_event(semconv.FIRST_CONTENT, timestamp=now)

    def settle(self, record: AttemptRecord, trail: Trail) -> None:
        span = self._span
        attributes: _Attributes = {semconv.OUTCOME: record.outcome.value}
        if self._first_seconds is not None:
            attributes[semconv.FIRST_CHUNK_SECONDS] = self._first_seconds
        if trail.node == record.node:
            if trail.usage is not None:
                attributes[semconv.INPUT_TOKENS] = trail.usage.prompt_tokens
                attributes[semconv.OUTPUT_TOKENS] = trail.usage.completion_tokens
                if trail.usage.cached_tokens:
                    attributes[semconv.CACHED_TOKENS] = trail.usage.cached_tokens
            if trail.finish_reason:
                attributes[semconv.FINISH_REASONS] = (trail.finish_reason,)
            if trail.fallback:
                attributes[semconv.FALLBACK] = str(trail.fallback)
        if record.failure is not None:
            attributes[semconv.FAILURE] = attributes[semconv.ERROR_TYPE] = record.failure.value
            span.set_status(Status(StatusCode.ERROR, record.message))
        elif record.outcome is Outcome.REFUSED:
            attributes[semconv.ERROR_TYPE] = record.outcome.value
            span.set_status(Status(StatusCode.ERROR, "the node refused the request"))
        span.set_attributes(attributes)
        span.end(self._clock.now())


class _Exporter(SpanExporter):
    """Sends batches, and tells once when that begins to fail, and when it works again.

    OpenTelemetry's own loggers would warn of every batch and every try.
    """

    def __init__(self, receiver: Receiver, on_trouble: Callable[..., None]) -> None:
        self.closing = False
        self._on_trouble = on_trouble
        self._where = receiver.endpoint
        self._troubled = False
        self._shut = False
        self._ear = _Ear(self._heard)
        self._inner = OTLPSpanExporter(receiver.endpoint.removesuffix(_PATH) + _PATH, headers=_headers(receiver))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS and self._troubled:
            self._troubled = False
            self._on_trouble("traces can be sent again", receiver=self._where)
        elif result is not SpanExportResult.SUCCESS:
            self._heard("")
        return result

    def shutdown(self) -> None:
        if not self._shut:
            self._shut = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def unhook(self) -> None:
        self._ear.take_off()

    def _heard(self, reason: str) -> None:
        if not self._troubled and not self.closing:
            self._troubled = True
            self._on_trouble(
                "traces cannot be sent, and those of this time are lost; see OTEL_EXPORTER_OTLP_ENDPOINT",
                receiver=self._where,
                reason=reason[:_REASON_CHARACTERS],
            )


class _Ear(logging.Handler):
    """Hears what OpenTelemetry logs, in the place of those who write logs."""

    def __init__(self, on_warning: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._on_warning = on_warning
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._on_warning(record.getMessage())

    def take_off(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = not self._logger.handlers


def _is_unrecorded(traceparent: bytes) -> bool:
    """Asked before all else, as it costs a twentieth of what OpenTelemetry needs to find out the same."""
    return bool(trace_of(traceparent)) and not int(traceparent[53:55], 16) & 1


def _headers(receiver: Receiver) -> Mapping[str, str] | None:
    """None = what the environment says."""
    return parse_env_headers(receiver.headers, liberal=True) or None


def _forwarded(request: Request, context: SpanContext) -> Forwarded:
    """What the node is told: the request's id, and this span as the one above its own."""
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    if context.trace_state:
        return (("x-request-id", request.id), ("traceparent", parent), ("tracestate", context.trace_state.to_header()))
    return (("x-request-id", request.id), ("traceparent", parent))


def _whereabouts(node: Node) -> tuple[str, str, int]:
    """Provider, host and port."""
    address, port = _address(node.spec.url)
    provider = node.known_kind.name
    return (semconv.PROVIDERS.get(address, address) if node.cloud else provider), address, port


@lru_cache(maxsize=1024)
def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
