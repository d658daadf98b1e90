"""A node that answers at once, so that what is measured is the gateway: Ollama's native API and the OpenAI API.

    python -m benchmarks.node [--tokens 64] [--pace-ms 20]

Prints the port that it listens on as its first line. Every answer is the same text, `t0 t1 t2 …`, so that a client can
tell whether a piece was lost or changed on the way. All answers are made before the first request arrives. With
`--pace-ms` a stream takes that long for each token, as a real engine does; without, it comes as fast as it can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

import httptools
import orjson
import uvloop

MODEL = "bench"
PROMPT_TOKENS = 7
CREATED = 1_700_000_000
CREATED_AT = "2023-11-14T22:13:20.000000Z"
BURST = 16  # events that leave together when there is no pace


def tokens(count: int) -> list[str]:
    """The pieces of every answer."""
    return [f"t{number} " for number in range(count)]


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed answer: its head, an HTTP chunk for each token, and its end without and with usage."""

    head: bytes
    pieces: tuple[bytes, ...]
    end: bytes
    end_with_usage: bytes


@dataclass(frozen=True, slots=True)
class Answers:
    """All that one dialect answers to a chat request."""

    document: bytes
    stream: Stream


def response(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def stream_head(content_type: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % content_type


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_HTTP_CHUNK = b"0\r\n\r\n"


def openai_answers(count: int) -> Answers:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": count, "total_tokens": PROMPT_TOKENS + count}
    shared = {"id": "chatcmpl-bench", "created": CREATED, "model": MODEL}
    message = {"role": "assistant", "content": "".join(tokens(count))}
    document = shared | {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return http_chunk(sse(shared | {"object": "chat.completion.chunk", "choices": choices} | more))

    def choice(delta: dict[str, str], finish_reason: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "finish_reason": finish_reason}]

    finish = event(choice({}, "stop"))
    done = http_chunk(b"data: [DONE]\n\n") + LAST_HTTP_CHUNK
    stream = Stream(
        head=stream_head(b"text/event-stream"),
        pieces=tuple(event(choice({"role": "assistant", "content": token}, None)) for token in tokens(count)),
        end=finish + done,
        end_with_usage=finish + event([], usage=usage) + done,
    )
    return Answers(response(orjson.dumps(document)), stream)


def sse(event: dict[str, Any]) -> bytes:
    # Written as engines in Python write it, with spaces: some gateways' shortcuts depend on it.
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def ollama_answers(count: int) -> Answers:
    shared = {"model": MODEL, "created_at": CREATED_AT}
    counts = {
        "done": True,
        "done_reason": "stop",
        "total_duration": 500_000_000,
        "load_duration": 1_000_000,
        "prompt_eval_count": PROMPT_TOKENS,
        "prompt_eval_duration": 2_000_000,
        "eval_count": count,
        "eval_duration": 400_000_000,
    }

    def message(content: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": content}}

    def line(value: dict[str, Any]) -> bytes:
        return http_chunk(orjson.dumps(value) + b"\n")

    end = line(shared | message("") | counts) + LAST_HTTP_CHUNK
    stream = Stream(
        head=stream_head(b"application/x-ndjson"),
        pieces=tuple(line(shared | message(token) | {"done": False}) for token in tokens(count)),
        end=end,
        end_with_usage=end,
    )
    return Answers(response(orjson.dumps(shared | message("".join(tokens(count))) | counts)), stream)


def listings() -> dict[str, bytes]:
    """The answers to probes: path to body."""
    model = {"name": MODEL, "model": MODEL, "modified_at": CREATED_AT, "size": 10**9, "digest": "0" * 64}
    details = {"format": "gguf", "family": "llama", "parameter_size": "3B", "quantization_level": "Q4_K_M"}
    loaded = model | {"size_vram": 10**9, "expires_at": "2099-01-01T00:00:00Z", "details": details}
    card = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "bench", "max_model_len": 8192}
    show = {"details": details, "model_info": {"general.architecture": "llama"}, "capabilities": ["completion"]}
    values: dict[str, Any] = {
        "/health": {"status": "ok"},
        "/version": {"version": "0.32.0"},
        "/api/version": {"version": "0.13.0"},
        "/api/tags": {"models": [model | {"details": details}]},
        "/api/ps": {"models": [loaded]},
        "/api/show": show,
        "/v1/models": {"object": "list", "data": [card]},
    }
    return {path: response(orjson.dumps(value)) for path, value in values.items()}


NOT_FOUND = response(b'{"error":{"message":"no such path"}}', b"404 Not Found")


@dataclass(frozen=True, slots=True)
class Script:
    """What the node answers, made once and shared by all connections."""

    listings: dict[str, bytes]
    chats: dict[str, Answers]
    pace_seconds: float

    @classmethod
    def of(cls, count: int, pace_seconds: float) -> Script:
        chats = {"/api/chat": ollama_answers(count), "/v1/chat/completions": openai_answers(count)}
        return cls(listings(), chats, pace_seconds)


class Connection(asyncio.Protocol):
    """One client connection. Requests on it are answered one after the other."""

    transport: asyncio.Transport

    def __init__(self, script: Script) -> None:
        self.script = script
        self.streaming: asyncio.Task[None] | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.path = ""
        self.body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's class, but do not inherit from it.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.streaming:
            self.streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        path, body = self.path.partition("?")[0], bytes(self.body)
        self.path, self.body = "", bytearray()
        if path in self.script.chats:
            self.chat(self.script.chats[path], orjson.loads(body), native=path.startswith("/api/"))
        else:
            self.transport.write(self.script.listings.get(path, NOT_FOUND))

    def chat(self, answers: Answers, request: dict[str, Any], *, native: bool) -> None:
        if not request.get("stream", native):  # Ollama streams unless it is told not to
            self.transport.write(answers.document)
            return
        usage = bool((request.get("stream_options") or {}).get("include_usage"))
        self.streaming = asyncio.get_running_loop().create_task(self.write_stream(answers.stream, usage))

    async def write_stream(self, stream: Stream, usage: bool) -> None:
        pace = self.script.pace_seconds
        self.transport.write(stream.head)
        for number, piece in enumerate(stream.pieces, start=1):
            self.transport.write(piece)
            if pace:
                await asyncio.sleep(pace)
            elif number % BURST == 0:
                await asyncio.sleep(0)
        self.transport.write(stream.end_with_usage if usage else stream.end)


async def serve(script: Script, announce: Callable[[int], None]) -> None:
    """Serves until SIGTERM or SIGINT; tells `announce` the port."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = await loop.create_server(lambda: Connection(script), "127.0.0.1", 0, backlog=4096)
    announce(server.sockets[0].getsockname()[1])
    await stopped.wait()
    server.close()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine on the loop that all parts of the benchmark use."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    options = parser.parse_args()
    run(serve(Script.of(options.tokens, options.pace_ms / 1000), lambda port: print(port, flush=True)))
