"""A client that keeps so many chat requests going at a time, checks every reply to its last word, and reports.

    python -m benchmarks.load --url http://127.0.0.1:8000/v1/chat/completions --concurrency 32 --requests 900 [--stream]

Prints one line of JSON: a `Report`. A reply that is not exactly what the benchmark's node says counts as bad: a faster
gateway that loses a token is not faster.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson

from benchmarks.node import MODEL, run, tokens

FIRST_TOKEN = tokens(1)[0].encode()


class WrongReply(Exception):
    """The reply is not what the node said."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask, how often, and how much at a time."""

    url: str
    concurrency: int
    requests: int
    stream: bool = False
    tokens: int = 64
    prompt_characters: int = 1000
    timeout_seconds: float = 60.0

    @property
    def payload(self) -> bytes:
        """The whole HTTP request, the same every time."""
        target = urlsplit(self.url)
        messages = [
            {"role": "system", "content": "x" * self.prompt_characters},
            {"role": "user", "content": "Say what you always say."},
        ]
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0.1, "stream": self.stream}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        encoded = orjson.dumps(body)
        head = (
            f"POST {target.path} HTTP/1.1\r\nhost: {target.netloc}\r\nauthorization: Bearer sk-bench\r\n"
            f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
        )
        return head.encode() + encoded


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, and when its parts came on the clock of `time.perf_counter`."""

    status: int
    body: bytes
    sent_at: float
    first_at: float  # the first token's arrival
    ended_at: float


@dataclass(slots=True)
class Meter:
    """How many answers have begun and not ended, and how many of them there were at most."""

    open: int = 0
    peak: int = 0

    def begin(self) -> None:
        self.open += 1
        self.peak = max(self.peak, self.open)

    def end(self) -> None:
        self.open -= 1


class Connection(asyncio.Protocol):
    """A connection that is kept open, with one request on it at a time."""

    transport: asyncio.Transport

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.waiting: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's class, but do not inherit from it.
        self.transport = cast(asyncio.Transport, transport)

    async def ask(self, payload: bytes) -> Reply:
        """Sends, and returns once the whole reply is there. Raises ConnectionError when it is cut off."""
        self.parser = httptools.HttpResponseParser(self)
        self.body = bytearray()
        self.first_at = 0.0
        self.waiting = asyncio.get_running_loop().create_future()
        sent_at = time.perf_counter()
        self.transport.write(payload)
        try:
            await self.waiting
        finally:
            if self.first_at:
                self.meter.end()
        ended_at = time.perf_counter()
        return Reply(self.parser.get_status_code(), bytes(self.body), sent_at, self.first_at or ended_at, ended_at)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"not HTTP: {error}"))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(exc or ConnectionError("closed in the middle of a reply"))

    def fail(self, error: Exception) -> None:
        if self.waiting and not self.waiting.done():
            self.waiting.set_exception(error)

    def on_body(self, body: bytes) -> None:
        self.body += body
        if not self.first_at and FIRST_TOKEN in self.body:
            self.first_at = time.perf_counter()
            self.meter.begin()

    def on_message_complete(self) -> None:
        if self.waiting and not self.waiting.done():
            self.waiting.set_result(None)


def check(reply: Reply, *, stream: bool, count: int) -> int:
    """Returns how many events carried the answer; raises WrongReply unless it is complete and unchanged."""
    if reply.status != 200:
        raise WrongReply(f"status {reply.status}: {reply.body[:120]!r}")
    text, finish_reason, completion_tokens, events = read_stream(reply.body) if stream else read_document(reply.body)
    if text != "".join(tokens(count)):
        raise WrongReply(f"{len(text)} characters of text instead of {len(''.join(tokens(count)))}")
    if finish_reason != "stop":
        raise WrongReply(f"finish_reason {finish_reason}")
    if completion_tokens != count:
        raise WrongReply(f"usage says {completion_tokens} tokens instead of {count}")
    return events


def read_document(body: bytes) -> tuple[str, str | None, int, int]:
    document = orjson.loads(body)
    choice = document["choices"][0]
    return choice["message"]["content"], choice["finish_reason"], document["usage"]["completion_tokens"], 1


def read_stream(body: bytes) -> tuple[str, str | None, int, int]:
    text, finish_reason, completion_tokens, events = "", None, 0, 0
    for event in stream_events(body):
        events += 1
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
        completion_tokens = (event.get("usage") or {}).get("completion_tokens", completion_tokens)
    return text, finish_reason, completion_tokens, events


def stream_events(body: bytes) -> Iterator[dict[str, Any]]:
    """The JSON of every event; raises WrongReply when the stream does not close with [DONE]."""
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    if not lines or lines[-1] != b"[DONE]":
        raise WrongReply("no [DONE]")
    for line in lines[:-1]:
        yield orjson.loads(line)


def percentile_ms(seconds: list[float], share: float) -> float | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000, 3)


@dataclass(slots=True)
class Report:
    """What a load came to. Times are in milliseconds and of good replies only."""

    good: int = 0
    bad: int = 0
    first_error: str | None = None
    seconds: float = 0.0
    events: int = 0
    open_peak: int = 0
    first_p50_ms: float | None = None
    first_p99_ms: float | None = None
    total_p50_ms: float | None = None
    total_p99_ms: float | None = None


@dataclass(slots=True)
class Run:
    """A load being carried out."""

    load: Load
    payload: bytes
    left: int
    meter: Meter = field(default_factory=Meter)
    report: Report = field(default_factory=Report)
    firsts: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    async def worker(self) -> None:
        connection: Connection | None = None
        while self.left > 0:
            self.left -= 1
            try:
                if connection is None or connection.transport.is_closing():
                    connection = await self.connect()
                reply = await asyncio.wait_for(connection.ask(self.payload), self.load.timeout_seconds)
                self.count(reply)
            except (OSError, TimeoutError, WrongReply, LookupError, orjson.JSONDecodeError) as error:
                self.report.bad += 1
                self.report.first_error = self.report.first_error or f"{type(error).__name__}: {error}"[:200]
                if connection:
                    connection.transport.abort()
                await asyncio.sleep(0.01)  # a gateway that refuses everything should not be flooded
        if connection:
            connection.transport.abort()

    async def connect(self) -> Connection:
        target = urlsplit(self.load.url)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self.meter), target.hostname or "127.0.0.1", target.port or 80
        )
        return connection

    def count(self, reply: Reply) -> None:
        self.report.events += check(reply, stream=self.load.stream, count=self.load.tokens)
        self.report.good += 1
        self.firsts.append(reply.first_at - reply.sent_at)
        self.totals.append(reply.ended_at - reply.sent_at)

    async def carry_out(self) -> Report:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.concurrency):
                group.create_task(self.worker())
        report = self.report
        report.seconds = round(time.perf_counter() - began, 3)
        report.open_peak = self.meter.peak
        report.first_p50_ms, report.first_p99_ms = (percentile_ms(self.firsts, share) for share in (0.5, 0.99))
        report.total_p50_ms, report.total_p99_ms = (percentile_ms(self.totals, share) for share in (0.5, 0.99))
        return report


def arguments() -> Load:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    return Load(options.url, options.concurrency, options.requests, options.stream, options.tokens)


if __name__ == "__main__":
    load = arguments()
    print(orjson.dumps(asdict(run(Run(load, load.payload, load.requests).carry_out()))).decode())
