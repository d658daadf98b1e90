"""A receiver of traces as OTLP over HTTP has it: it decodes what comes, and remembers it."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from demo.httpd import Answer, Exchange, Received, Server, deliver

SERVER, CLIENT = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT


@dataclass(frozen=True, slots=True)
class Told:
    """A span as it was received. Ids are hexadecimal; "" = none. Times are nanoseconds since 1970."""

    name: str
    kind: int
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    events: dict[str, int]
    failed: bool
    message: str
    began: int
    ended: int
    state: str


class FakeReceiver:
    """Use with `async with`. `status` is what it answers; it takes nothing unless that is 200."""

    def __init__(self) -> None:
        self.status = 200
        self.silent = False  # takes requests, and does not answer
        self.requests: list[Received] = []
        self.spans: list[Told] = []
        self.resource: dict[str, Any] = {}
        self._server = Server(self._serve)

    @property
    def url(self) -> str:
        return self._server.url

    async def __aenter__(self) -> Self:
        self._server.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close()

    def of(self, kind: int) -> list[Told]:
        """The spans of a kind, in the order in which they began."""
        return sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.began)

    async def _serve(self, exchange: Exchange) -> None:
        self.requests.append(exchange.request)
        if self.silent:
            await asyncio.Event().wait()
        assert (exchange.request.method, exchange.request.path) == ("POST", "/v1/traces")
        if self.status == 200:
            self._take(exchange.request)
        await deliver(exchange, Answer((), self.status, {"content-type": "application/x-protobuf"}))

    def _take(self, request: Received) -> None:
        body = gzip.decompress(request.body) if request.headers.get("content-encoding") == "gzip" else request.body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {each.key: _value(each.value) for each in group.resource.attributes}
            self.spans += [_told(span) for scope in group.scope_spans for span in scope.spans]


def _told(span: Span) -> Told:
    return Told(
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        attributes={each.key: _value(each.value) for each in span.attributes},
        events={event.name: event.time_unix_nano for event in span.events},
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        message=span.status.message,
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        state=span.trace_state,
    )


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(which))
