"""Traces, as a receiver gets them: a span for every request and every attempt, and engines' own spans below."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from demo.httpd import Exchange, deliver, json_answer
from tests.fakes import Behaviour, FakeCloud, FakeNode, FakeOllama, FakeVLLM
from tests.fakes.receiver import CLIENT, SERVER, FakeReceiver, Told
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.scripted import DONE, RawClient, ScriptedNode, chunk, local_nodes, says

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=abc"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00", "tracestate": "vendor=abc"}
PROMPT = "PROMPT-9f3e-my-secret-diagnosis"
STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])


@pytest.fixture(autouse=True)
def _spans_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def _traced(
    receiver: FakeReceiver | str, *nodes: FakeNode[Any], **settings: Any
) -> AbstractAsyncContextManager[Gateway]:
    url = receiver if isinstance(receiver, str) else receiver.url
    return gateway(*nodes, otel_exporter_otlp_endpoint=url, lb_strategy="round_robin", **settings)


async def _spans(receiver: FakeReceiver, requests: int = 1) -> tuple[Told, list[Told]]:
    """The last request's span and those of all attempts."""
    await until(lambda: len(receiver.of(SERVER)) >= requests, "the spans arrive")
    return receiver.of(SERVER)[-1], receiver.of(CLIENT)


def _parent(node: FakeNode[Any]) -> tuple[str, str, bool]:
    """What a node was told last: trace, span, and whether it is recorded."""
    version, trace, span, flags = node.inferences[-1].headers["traceparent"].split("-")
    assert version == "00"
    return trace, span, bool(int(flags, 16) & 1)


@STREAM_AND_DOCUMENT
async def test_a_request_is_a_span_with_its_attempt_below(stream: bool) -> None:
    async with FakeReceiver() as receiver, FakeOllama(models=["m"], tokens=4) as node:
        async with _traced(receiver, node) as hearth:
            answer = await hearth.chat(stream=stream, temperature=0.5, max_tokens=9, headers={"x-request-id": "mine-1"})

            whole, (attempt,) = await _spans(receiver)
        assert answer.status_code == 200
        assert whole.name == "POST /v1/chat/completions"
        assert whole.parent == ""
        assert (attempt.trace, attempt.parent) == (whole.trace, whole.id)
        assert whole.began <= attempt.began <= attempt.ended <= whole.ended
        assert not whole.failed
        assert not attempt.failed
        assert whole.attributes == {
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "url.path": "/v1/chat/completions",
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.request.stream": stream,
            "hearth.request.id": "mine-1",
            "hearth.route": "direct",
            "hearth.node": "n0",
            "hearth.tier": "local",
            "hearth.candidates": 1,
            "hearth.attempts": 1,
            "hearth.queue_ms": 0.0,
            "hearth.outcome": "ok",
        }
        assert attempt.name == "chat m:latest"
        assert 0 < attempt.attributes.pop("gen_ai.response.time_to_first_chunk") < 5
        assert attempt.attributes == {
            "server.address": "127.0.0.1",
            "server.port": node.port,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "ollama",
            "gen_ai.request.model": "m:latest",
            "gen_ai.request.stream": stream,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.max_tokens": 9,
            "gen_ai.usage.input_tokens": 1,
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.response.finish_reasons": ["stop"],
            "hearth.node": "n0",
            "hearth.tier": "local",
            "hearth.attempt": 1,
            "hearth.outcome": "ok",
        }
        for span in (whole, attempt):
            assert span.began <= span.events["first content"] <= span.ended
        assert receiver.resource["service.name"] == "hearth"


@STREAM_AND_DOCUMENT
async def test_a_clock_that_is_set_back_puts_no_span_out_of_order(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_back = itertools.count(time.time_ns(), -1_000_000_000).__next__
    monkeypatch.setattr("time.time_ns", set_back)
    monkeypatch.setattr("opentelemetry.sdk.trace.time_ns", set_back)
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as bad, FakeVLLM(models=["m"]) as good:
        async with _traced(receiver, bad, good) as hearth:
            bad.behave(Behaviour.STATUS_500)
            await hearth.chat(stream=stream)

            whole, (first, second) = await _spans(receiver)
        content = (whole.events["first content"], second.events["first content"])
        assert whole.began <= first.began <= first.ended <= second.began <= min(content)
        assert max(content) <= second.ended <= whole.ended


@STREAM_AND_DOCUMENT
async def test_a_failover_is_a_span_for_each_attempt(stream: bool) -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as bad, FakeVLLM(models=["m"]) as good:
        async with _traced(receiver, bad, good) as hearth:
            bad.behave(Behaviour.STATUS_500)
            await hearth.chat(stream=stream)

            whole, (first, second) = await _spans(receiver)
        assert [span.parent for span in (first, second)] == [whole.id, whole.id]
        assert (first.failed, first.message) == (True, "it answered 500")
        assert first.attributes["error.type"] == first.attributes["hearth.failure"] == "server_error"
        assert (first.attributes["hearth.node"], first.attributes["hearth.attempt"]) == ("n0", 1)
        assert not {"first content", "gen_ai.usage.input_tokens", "hearth.fallback"} & {
            *first.events,
            *first.attributes,
        }
        assert (second.failed, second.attributes["hearth.fallback"]) == (False, "server_error")
        assert (second.attributes["hearth.node"], second.attributes["hearth.attempt"]) == ("n1", 2)
        assert (whole.failed, whole.attributes["hearth.attempts"]) == (False, 2)
        assert _parent(bad) == (whole.trace, first.id, True)
        assert _parent(good) == (whole.trace, second.id, True)


async def test_the_clients_trace_goes_on_through_hearth() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        await hearth.chat(headers=SAMPLED)

        whole, (attempt,) = await _spans(receiver)
        assert (whole.trace, whole.parent, whole.state) == (TRACE, CALLER, "vendor=abc")
        assert _parent(node) == (TRACE, attempt.id, True)
        assert node.inferences[-1].headers["tracestate"] == "vendor=abc"
        assert hearth.lines.requests()[-1]["trace_id"] == TRACE


async def test_a_request_that_its_client_does_not_record_is_not_recorded() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node:
        async with _traced(receiver, node) as hearth:
            assert (await hearth.chat(headers=NOT_SAMPLED)).status_code == 200
        trace, span, recorded = _parent(node)

        assert (trace, span, recorded) == (TRACE, CALLER, False)
        assert node.inferences[-1].headers["tracestate"] == "vendor=abc"
        assert not receiver.spans
        assert hearth.lines.requests()[-1]["trace_id"] == TRACE


async def test_of_new_traces_a_share_is_recorded() -> None:
    sampler = {"otel_traces_sampler": "traceidratio", "otel_traces_sampler_arg": 0.25}
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node:
        async with _traced(receiver, node, **sampler) as hearth:
            for _ in range(60):
                await hearth.chat()

        lines = hearth.lines.requests()
        assert 0 < len(receiver.of(SERVER)) < 60
        assert {span.trace for span in receiver.spans} < {line["trace_id"] for line in lines}
        assert len({line["trace_id"] for line in lines}) == 60


async def test_a_traceparent_that_is_not_valid_begins_a_new_trace() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        await hearth.chat(headers={"traceparent": f"00-{'0' * 32}-{CALLER}-01"})

        whole, (attempt,) = await _spans(receiver)
        assert int(whole.trace, 16)
        assert whole.parent == ""
        assert _parent(node) == (whole.trace, attempt.id, True)


async def test_the_clouds_span_says_who_it_is_and_why_it_was_asked() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, FakeCloud() as cloud:
        entry = {
            "name": "c0",
            "endpoint": cloud.url + "/v1",
            "api_key": "sk-cloud-key-for-tests-0001",
            "model": "gpt-4o-mini",
        }
        async with _traced(receiver, node, cloud_providers=json.dumps([entry])) as hearth:
            await hearth.state("c0", "healthy")
            node.behave(Behaviour.STATUS_500)
            await hearth.chat()

            whole, (_, attempt) = await _spans(receiver)
        assert attempt.name == "chat gpt-4o-mini"
        assert attempt.attributes["gen_ai.provider.name"] == "127.0.0.1"
        assert (attempt.attributes["hearth.tier"], whole.attributes["hearth.tier"]) == ("cloud", "cloud")
        assert whole.attributes["hearth.fallback"] == "server_error"
        assert _parent(cloud) == (whole.trace, attempt.id, True)
        assert "sk-cloud" not in repr(receiver.spans)


@STREAM_AND_DOCUMENT
async def test_a_request_that_nobody_could_serve_is_an_error(stream: bool) -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        node.behave(Behaviour.STATUS_500)
        await hearth.chat(stream=stream)

        whole, (attempt,) = await _spans(receiver)
        assert whole.failed
        assert attempt.failed
        assert whole.attributes["http.response.status_code"] == 502
        assert whole.attributes["error.type"] == "server_error"
        assert whole.attributes["hearth.outcome"] == "failed"


@pytest.mark.parametrize(
    ("fields", "attempts", "kind"),
    [({"model": "nowhere"}, 0, "model_not_found"), ({"temperature": "hot"}, 1, "400")],
    ids=["unknown-model", "by-the-node"],
)
async def test_a_request_that_was_wrong_is_no_error_of_hearths(fields: Any, attempts: int, kind: str) -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        if attempts:
            node.behave(Behaviour.STATUS_400)
        answer = await hearth.chat(**fields)

        whole, below = await _spans(receiver)
        assert not whole.failed
        assert whole.attributes["http.response.status_code"] == answer.status_code
        assert whole.attributes["error.type"].startswith(kind) or attempts
        assert [(span.failed, span.attributes["hearth.outcome"]) for span in below] == [(True, "refused")] * attempts


async def test_a_stream_cut_after_content_is_an_error_below_a_200() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        node.behave(Behaviour.CLOSE_MIDWAY)
        await hearth.chat(stream=True)

        whole, (attempt,) = await _spans(receiver)
        assert whole.attributes["http.response.status_code"] == 200
        assert (whole.failed, whole.attributes["error.type"]) == (True, "cut")
        assert (attempt.failed, attempt.attributes["hearth.failure"]) == (True, "cut")
        assert "first content" in attempt.events


async def test_a_client_that_left_is_no_error() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"], first_seconds=30) as node:
        async with _traced(receiver, node) as hearth:
            async with RawClient(hearth.url) as client:
                await client.ask()
                await node.until(lambda n: n.open == 1)

            whole, (attempt,) = await _spans(receiver)
        assert [span.attributes["hearth.outcome"] for span in (whole, attempt)] == ["abandoned", "abandoned"]
        assert not whole.failed
        assert not attempt.failed
        assert "http.response.status_code" not in whole.attributes


async def test_waiting_for_a_place_is_told() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"], first_seconds=0.2) as node:
        async with _traced(receiver, local_nodes=node_settings(node, max_concurrency=1)) as hearth:
            await asyncio.gather(hearth.chat(), hearth.chat())
            await _spans(receiver, 2)

        assert sorted(span.attributes["hearth.queue_ms"] > 100 for span in receiver.of(SERVER)) == [False, True]


async def test_embeddings_are_traced_too() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        await hearth.client.post("/v1/embeddings", json={"model": "m", "input": "hi"})

        whole, (attempt,) = await _spans(receiver)
        assert whole.name == "POST /v1/embeddings"
        assert attempt.attributes["gen_ai.operation.name"] == "embeddings"


# -- privacy


async def _repeats(exchange: Exchange) -> None:
    """Says again what it was asked: as an answer, or in the error that the request's id names."""
    words = exchange.request.json["messages"][-1]["content"]
    status = int(exchange.request.headers["x-request-id"])
    if status == 200:
        await says(*map(chunk, [words, words]), chunk(finish="stop"), DONE)(exchange)
    else:
        await deliver(exchange, json_answer({"error": {"message": f"cannot do this: {words}"}}, status))


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500])
async def test_no_prompt_or_answer_stands_in_spans(status: int) -> None:
    async with FakeReceiver() as receiver, ScriptedNode(_repeats) as node:
        async with _traced(receiver, local_nodes=local_nodes(node), max_attempts=1) as hearth:
            words = [{"role": "user", "content": PROMPT}]
            answer = await hearth.chat(stream=True, messages=words, headers={"x-request-id": str(status)})

            await _spans(receiver)
        assert PROMPT in answer.text
        assert len(receiver.spans) == 2
        assert not [request for request in receiver.requests if PROMPT.encode() in request.body]
        assert "gen_ai.input.messages" not in repr(receiver.spans)


async def test_prompts_stand_in_spans_where_the_operator_wants_them() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}, picture]},
    ]
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node:
        async with _traced(receiver, node, trace_prompts=True) as hearth:
            await hearth.chat(messages=messages)

            whole, (attempt,) = await _spans(receiver)
        assert PROMPT not in repr(whole)
        assert json.loads(attempt.attributes["gen_ai.input.messages"]) == [
            {"role": "system", "parts": [{"type": "text", "content": "Be short."}]},
            {"role": "user", "parts": [{"type": "text", "content": PROMPT}, {"type": "image_url"}]},
        ]


# -- the receiver


async def test_the_receiver_gets_its_headers_and_the_services_name() -> None:
    settings = {"otel_exporter_otlp_headers": "x-api-key=abc,x-team=a%20b", "otel_service_name": "hearth-lab"}
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node:
        async with _traced(receiver, node, **settings) as hearth:
            await hearth.chat()
            await _spans(receiver)

        headers = receiver.requests[0].headers
        assert (headers["x-api-key"], headers["x-team"]) == ("abc", "a b")
        assert receiver.resource["service.name"] == "hearth-lab"
        assert receiver.resource["service.instance.id"]


async def test_what_is_left_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node:
        async with _traced(receiver, node) as hearth:
            await hearth.chat()
            assert not receiver.spans

        assert len(receiver.spans) == 2


async def test_a_receiver_that_is_down_is_told_once_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReceiver() as gone:
        url = gone.url
    async with FakeVLLM(models=["m"]) as node:
        async with _traced(url, node) as hearth:
            for _ in range(20):
                assert (await hearth.chat()).status_code == 200
            await until(lambda: _troubles(hearth), "the trouble is told")
            for _ in range(20):
                assert (await hearth.chat()).status_code == 200
                await asyncio.sleep(0.01)
            began = time.monotonic()

        assert time.monotonic() - began < 5
        (trouble,) = _troubles(hearth)
        assert (trouble["level"], trouble["receiver"]) == ("warning", url)
        assert trouble["reason"]
        assert "id" not in trouble
        assert max(line["ms"] for line in hearth.lines.requests()) < 1000
        assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_receiver_that_refuses_and_then_takes_is_told_twice() -> None:
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node, _traced(receiver, node) as hearth:
        receiver.status = 403
        for _ in range(3):
            await hearth.chat()
            await until(lambda: _troubles(hearth), "the trouble is told")
        receiver.status = 200
        await hearth.chat()
        await until(lambda: len(_troubles(hearth)) == 2, "its end is told")

        assert [line["event"].split(",")[0] for line in _troubles(hearth)] == [
            "traces cannot be sent",
            "traces can be sent again",
        ]
        assert receiver.spans


async def test_a_receiver_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.traces._FLUSH_SECONDS", 0.2)
    async with FakeReceiver() as receiver, FakeVLLM(models=["m"]) as node:
        receiver.silent = True
        async with _traced(receiver, node) as hearth:
            await hearth.chat()
            await until(lambda: receiver.requests, "spans are sent")
            assert (await hearth.chat()).status_code == 200
            began = time.monotonic()

        assert time.monotonic() - began < 3


def _troubles(hearth: Gateway) -> list[dict[str, Any]]:
    return [line for line in hearth.lines.all if line["event"].startswith("traces can")]


# -- without a receiver


async def test_without_a_receiver_the_clients_trace_is_passed_on_as_it_is() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        await hearth.chat(headers=SAMPLED)

        sent = node.inferences[-1].headers
        assert {name: sent[name] for name in SAMPLED} == SAMPLED
        assert hearth.lines.requests()[-1]["trace_id"] == TRACE


async def test_without_a_trace_nodes_hear_of_none_and_lines_neither() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        await hearth.chat()

        assert "traceparent" not in node.inferences[-1].headers
        assert "trace_id" not in hearth.lines.requests()[-1]


def test_without_a_receiver_nothing_of_it_is_imported() -> None:
    code = (
        "import sys; from app.main import create_app; from app.settings import Settings\n"
        "create_app(Settings(_env_file=None, nodes_file='off'))\n"
        "print([name for name in ('opentelemetry.sdk', 'requests', 'google.protobuf', 'redis') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=sys.path[0] or ".")

    assert done.stdout.strip() == b"[]"


# -- lines of a request


async def test_what_a_request_causes_is_logged_with_its_ids() -> None:
    async with FakeVLLM(models=["m"]) as bad, FakeVLLM(models=["m"]) as good:
        async with gateway(
            bad, good, lb_strategy="round_robin", breaker_fail_max=1, health_check_interval=60
        ) as hearth:
            bad.behave(Behaviour.STATUS_500)
            await hearth.chat(headers={"x-request-id": "mine-1", **SAMPLED})

        (changed,) = [line for line in hearth.lines.all if line["event"] == "breaker changed"]
        assert (changed["id"], changed["trace_id"]) == ("mine-1", TRACE)


async def test_advice_is_logged_with_the_ids_of_the_request_that_led_to_it() -> None:
    async with FakeVLLM(models=["m"]) as node:
        named = json.dumps([{"url": node.url, "kind": "vllm", "name": "n0", "models": ["m", "other"]}])
        async with gateway(local_nodes=named) as hearth:
            await hearth.chat("other", headers={"x-request-id": "mine-2", **SAMPLED})

        (advice,) = [line for line in hearth.lines.all if line.get("named_in")]
        assert (advice["id"], advice["trace_id"]) == ("mine-2", TRACE)


async def test_lines_of_no_request_have_no_ids() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        await hearth.chat(headers=SAMPLED)
        node.behave(Behaviour.REFUSE)
        await hearth.chat(headers=SAMPLED)
        await hearth.state("n0", "down")

        changes = [line for line in hearth.lines.all if line["event"] == "node changed"]
        assert changes
        assert not [line for line in changes if {"id", "trace_id"} & line.keys()]
