"""What a stream's client gets: every piece at once, exactly what the node said, and an end that says what happened."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from demo.httpd import Exchange
from tests.fakes import (
    KINDS,
    Behaviour,
    Delta,
    FakeGeneric,
    FakeOllama,
    FakeTransformers,
    FakeVLLM,
    ToolCall,
)
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.measured import Measured, needs_proc
from tests.system.reading import read
from tests.system.scripted import (
    DONE,
    NDJSON,
    SSE,
    RawClient,
    ScriptedNode,
    chunk,
    event,
    line,
    local_nodes,
    says,
    whole,
)

LOCAL_KINDS = [name for name in KINDS if name != "cloud"]
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


async def _stream(hearth: Gateway, **fields: Any) -> bytes:
    return (await hearth.chat(stream=True, **fields)).content


# -- at once


@pytest.mark.parametrize(
    ("kind", "headers", "piece", "end"),
    [("vllm", SSE, chunk, chunk(finish="stop") + DONE), ("ollama", NDJSON, line, line(done=True))],
    ids=["passed-through", "translated"],
)
async def test_every_piece_reaches_the_client_before_the_node_makes_the_next(
    kind: str, headers: dict[str, str], piece: Callable[[str], bytes], end: bytes
) -> None:
    pieces, seen = 50, asyncio.Semaphore(0)

    async def in_lock_step(exchange: Exchange) -> None:
        exchange.head(200, headers)
        for number in range(pieces):
            exchange.body(piece(f"<{number}>"))
            await seen.acquire()
        exchange.body(end)
        exchange.end()

    async with ScriptedNode(in_lock_step) as node, gateway(local_nodes=local_nodes(node, kind=kind)) as hearth:
        async with RawClient(hearth.url) as client, asyncio.timeout(10):
            await client.ask()
            began = time.monotonic()
            for number in range(pieces):
                await client.read_until(b"<%d>" % number)
                seen.release()
            await client.read_until(DONE)

        assert (time.monotonic() - began) / pieces < 0.05


async def test_nothing_on_the_way_is_invited_to_hold_a_stream_back() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        answer = await hearth.chat(stream=True, headers={"accept-encoding": "gzip, br"})

        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        assert "content-length" not in answer.headers


async def test_a_node_learns_nothing_of_the_client_but_its_request() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        told = {
            "traceparent": "00-1-2-01",
            "cookie": "c=1",
            "origin": "http://evil.test",
            "authorization": "Bearer sk-client-key-0001",
        }
        await hearth.chat(headers={**told, "accept-encoding": "br", "user-agent": "spy", "x-request-id": "r-1"})

        got = node.inferences[0].headers
        assert got["host"] == node.url.removeprefix("http://")
        assert got["accept-encoding"] == "identity"
        assert got["x-request-id"] == "r-1"
        assert got["traceparent"] == "00-1-2-01"
        assert got["user-agent"].startswith("hearth/")
        assert not got.keys() & {"cookie", "origin", "authorization", "x-forwarded-for"}


# -- as it was said


SPOKEN = (
    b": comment before all\n\n"
    b"event: message\nid: 1\nretry: 10\n"
    + chunk("", role="assistant")
    + b"event: message\n"
    + chunk("h\u00e4ufig \U0001f600")
    + b": ping\n\n"
    + b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk",\ndata: "created":1,"model":"m",\n'
    + b'data: "choices":[{"index":0,"delta":{"content":"in lines"},"finish_reason":null}],"x_own":[1.50,null]}\n\n'
    + chunk("<think>\u2026</think> \u2028 \"data: [DONE]\" 'error'")
    + chunk(finish="stop")
    + DONE
)


@pytest.mark.parametrize("size", [1, 7, 64, len(SPOKEN)])
async def test_a_stream_arrives_byte_for_byte_however_it_is_cut(size: int) -> None:
    pieces = [SPOKEN[start : start + size] for start in range(0, len(SPOKEN), size)]
    async with ScriptedNode(says(*pieces)) as node, gateway(local_nodes=local_nodes(node)) as hearth:
        assert await _stream(hearth) == SPOKEN


@pytest.mark.parametrize("size", [600_000, 10 * 2**20], ids=["600KB", "10MB"])
@pytest.mark.parametrize("make", [FakeOllama, FakeVLLM])
async def test_a_line_of_any_sensible_length_arrives_whole(make: type[FakeOllama] | type[FakeVLLM], size: int) -> None:
    async with make(models=["m"], tokens=1) as node, gateway(node) as hearth:
        node.behave(Behaviour.HUGE_LINE, size=size)

        answer = read(await hearth.chat(stream=True))

        assert answer.whole
        assert answer.text == "x" * size


async def test_an_event_with_no_choices_is_passed_on() -> None:
    filtered = event(id="1", object="chat.completion.chunk", model="m", choices=[], prompt_filter_results=[{"a": 1}])
    said = filtered + chunk("a") + filtered + chunk(finish="stop") + DONE
    async with ScriptedNode(says(said)) as node, gateway(local_nodes=local_nodes(node)) as hearth:
        assert await _stream(hearth) == said


async def test_one_event_that_cannot_be_read_does_not_end_a_stream_that_goes_on() -> None:
    broken = b'data: {"choices":[{"delta":{"content":"lost"},"finish_reason":"\n\n'
    said = chunk("a") + broken + chunk("b") + b'data: {"error"\n\n' + chunk(finish="stop") + DONE
    async with ScriptedNode(says(said)) as node, gateway(local_nodes=local_nodes(node)) as hearth:
        answer = read(await hearth.chat(stream=True))

        assert answer.whole
        assert answer.text == "ab"


@pytest.mark.parametrize(("reason", "told"), [("eos_token", "stop"), ("stop_sequence", "stop"), ("length", "length")])
async def test_reasons_of_text_generation_inference_become_openais(reason: str, told: str) -> None:
    said = chunk("a") + chunk(finish=reason) + DONE
    async with ScriptedNode(says(said)) as node, gateway(local_nodes=local_nodes(node, kind="tgi")) as hearth:
        assert read(await hearth.chat(stream=True)).finish_reasons == [told]


# -- usage


@pytest.mark.parametrize("kind", LOCAL_KINDS)
async def test_usage_comes_once_at_the_end_and_only_when_it_was_asked_for(kind: str) -> None:
    async with KINDS[kind](models=["m"]) as node, gateway(node) as hearth:
        unasked = read(await hearth.chat(stream=True))
        refused = read(await hearth.chat(stream=True, stream_options={"include_usage": False}))
        asked = read(await hearth.chat(stream=True, **WITH_USAGE))

        assert unasked.whole
        assert refused.whole
        assert not [event for event in unasked.events + refused.events if event["choices"] == []]
        assert asked.whole
        assert asked.usage
        if kind != "transformers":  # it counts in its last chunk, and knows no other way
            assert [event["choices"] for event in asked.events].count([]) == 1
            assert asked.events[-1]["choices"] == []


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize("kind", [name for name in LOCAL_KINDS if name not in ("generic", "transformers")])
async def test_tokens_are_counted_whether_the_client_asks_or_not(kind: str, stream: bool) -> None:
    async with KINDS[kind](models=["m"], tokens=5) as node, gateway(node) as hearth:
        await hearth.chat(stream=stream)

        await until(hearth.lines.requests, "the request is logged")
        assert hearth.lines.requests()[0]["tokens_out"] == 5


@pytest.mark.parametrize("make", [FakeGeneric, FakeTransformers])
async def test_a_node_that_refuses_stream_options_is_not_sent_them(
    make: type[FakeGeneric] | type[FakeTransformers],
) -> None:
    async with make(models=["m"]) as node, gateway(node) as hearth:
        node.engine.refused_fields |= {"stream_options"}

        assert read(await hearth.chat(stream=True)).whole


async def test_usage_said_twice_is_told_once() -> None:
    usage = event(id="1", object="chat.completion.chunk", model="m", choices=[], usage=USAGE)
    said = chunk("a") + usage + chunk(finish="stop") + usage + DONE
    async with ScriptedNode(says(said)) as node, gateway(local_nodes=local_nodes(node)) as hearth:
        assert await _stream(hearth) == chunk("a") + chunk(finish="stop") + DONE
        assert await _stream(hearth, **WITH_USAGE) == chunk("a") + chunk(finish="stop") + usage + DONE


# -- how it ends


CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("kind", ["vllm", "generic"])
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (chunk("a") + DONE, "stop"),
        (chunk("a") + chunk(finish="length"), "length"),
        (chunk(tool_calls=[CALL]) + DONE, "tool_calls"),
        (chunk("a") + chunk(finish="stop").rstrip(), "stop"),
    ],
    ids=["no-reason", "no-done", "no-reason-after-a-call", "no-last-blank-line"],
)
async def test_what_is_missing_at_a_good_end_is_added(kind: str, said: bytes, reason: str) -> None:
    async with ScriptedNode(says(said)) as node, gateway(local_nodes=local_nodes(node, kind=kind)) as hearth:
        answer = read(await hearth.chat(stream=True))

        assert answer.whole
        assert answer.finish_reasons == [reason]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("vllm", chunk("a")),
        ("vllm", chunk("a") + chunk("b")[:-30]),
        ("vllm", chunk("a") + chunk(finish="stop")[:-30]),
        ("ollama", line("a")),
        ("ollama", line("a") + line(done=True)[:-30]),
    ],
)
async def test_a_cut_stream_never_looks_complete(kind: str, said: bytes) -> None:
    headers = NDJSON if kind == "ollama" else SSE
    async with (
        ScriptedNode(says(said, headers=headers)) as node,
        gateway(local_nodes=local_nodes(node, kind=kind)) as hearth,
    ):
        answer = read(await hearth.chat(stream=True))

        assert answer.status == 200
        assert answer.text == "a"
        assert answer.error
        assert answer.error["code"] == "cut"
        assert not answer.finish_reasons
        assert hearth.lines.requests()[0]["outcome"] == "failed"


async def test_an_error_in_the_middle_of_a_tool_call_is_told_and_tried_nowhere_else() -> None:
    calls = (ToolCall("weather", {"city": "a long name of a city"}),)
    async with FakeVLLM(models=["m"], deltas=[Delta(tool_calls=calls)]) as bad, FakeVLLM(models=["m"]) as good:
        async with gateway(bad, good, lb_strategy="round_robin", health_check_interval=60) as hearth:
            bad.behave(Behaviour.ERROR_MIDWAY, after=3, message="out of memory")

            answer = read(await hearth.chat(stream=True))

            assert answer.events[0]["choices"][0]["delta"]["role"] == "assistant"
            assert any("tool_calls" in choice["delta"] for e in answer.events for choice in e.get("choices", []))
            assert answer.error
            assert "out of memory" in answer.error["message"]
            assert answer.done
            assert not answer.finish_reasons
            assert not good.inferences
            assert hearth.lines.requests()[0]["outcome"] == "failed"


async def test_a_limit_that_strikes_in_mid_stream_ends_it_at_once() -> None:
    seen = asyncio.Event()

    async def limited(exchange: Exchange) -> None:
        exchange.head(200, SSE)
        exchange.body(chunk("a"))
        await seen.wait()
        exchange.body(event(error={"message": "slow down", "type": "rate_limit_error", "code": 429}) + DONE)
        exchange.end()

    async with ScriptedNode(limited) as node:
        async with (
            gateway(local_nodes=local_nodes(node), breaker_fail_max=1) as hearth,
            RawClient(hearth.url) as client,
        ):
            await client.ask()
            await client.read_until(b'"a"')
            seen.set()

            end = await client.read_until(DONE)

            assert b"slow down" in end
            assert b'"finish_reason":"' not in end
            assert len(node.inferences) == 1
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed", "busy is not broken"


# -- clients that do not read


def _endless(total: int, written: list[int]) -> Callable[[Exchange], Awaitable[None]]:
    piece = chunk("x" * 16_000)

    async def write(exchange: Exchange) -> None:
        exchange.head(200, SSE)
        while written[0] < total:
            exchange.body(piece)
            await exchange.drain()
            written[0] += len(piece)
        exchange.body(chunk(finish="stop") + DONE)
        exchange.end()

    return write


@needs_proc
async def test_a_client_that_does_not_read_holds_the_node_back_and_costs_no_memory(tmp_path: Path) -> None:
    written, total = [0], 50 * 2**20
    async with (
        ScriptedNode(_endless(total, written)) as node,
        Measured(tmp_path, local_nodes=local_nodes(node)) as hearth,
        RawClient(hearth.url) as client,
    ):
        before = hearth.memory_mib()
        await client.ask(receive_bytes=131_072)
        await _standstill(written)

        held_back, grown = written[0], hearth.memory_mib() - before
        got = 0
        while data := await client.reader.read(2**20):
            got += len(data)
            if data.endswith(b"0\r\n\r\n"):
                break

        assert held_back < total / 2, "what the kernels' buffers take, and no more"
        assert grown < 8
        assert got > total
        assert hearth.memory_mib() - before < 12


async def _standstill(written: list[int]) -> None:
    """Waits until the node has not got rid of a byte for a while."""
    last = -1
    while last != written[0] or not last:
        last = written[0]
        await asyncio.sleep(0.3)


async def test_a_client_that_pauses_is_no_fault_of_the_node() -> None:
    written, total = [0], 20 * 2**20
    async with ScriptedNode(_endless(total, written)) as node:
        async with (
            gateway(local_nodes=local_nodes(node), idle_timeout=0.2, breaker_fail_max=1) as hearth,
            RawClient(hearth.url) as client,
        ):
            await client.ask(receive_bytes=131_072)
            await _standstill(written)

            end = await client.read_until(DONE)

            assert b'"finish_reason":"stop"' in end[-1000:]
            await until(hearth.lines.requests, "the request is logged")
            assert hearth.lines.requests()[0]["outcome"] == "ok"


async def test_a_client_that_never_reads_on_frees_the_node_when_its_time_is_up() -> None:
    written = [0]
    async with ScriptedNode(_endless(2**40, written)) as node:
        async with (
            gateway(local_nodes=local_nodes(node), request_timeout=0.5, breaker_fail_max=1) as hearth,
            RawClient(hearth.url) as client,
        ):
            await client.ask(receive_bytes=131_072)
            await until(lambda: written[0], "the node sends")

            await until(lambda: node.open == 0, "the node is free")

            assert await hearth.in_flight() == 0
            assert hearth.lines.requests()[0]["outcome"] == "abandoned"
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"


async def test_an_answer_that_came_whole_is_a_success_even_if_the_client_leaves_at_its_last_byte() -> None:
    async def lingers(exchange: Exchange) -> None:
        exchange.head(200, SSE)
        exchange.body(whole(["a"]))
        await asyncio.sleep(30)

    async with ScriptedNode(lingers) as node, gateway(local_nodes=local_nodes(node)) as hearth:
        async with RawClient(hearth.url) as client:
            await client.ask()
            await client.read_until(DONE)

        await until(hearth.lines.requests, "the request is logged")
        assert hearth.lines.requests()[0]["outcome"] == "ok"
        await until(lambda: node.open == 0, "the node is free")


async def test_what_is_set_for_a_node_holds_for_streams_and_documents() -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(local_nodes=node_settings(node, num_ctx=8192)) as hearth:
            for stream in (True, False):
                assert read(await hearth.chat(stream=stream)).whole

            assert [json.loads(request.body)["options"]["num_ctx"] for request in node.inferences] == [8192, 8192]
