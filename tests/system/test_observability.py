"""What an operator can see: one line for every request, headers that say who served, and counters that are true."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from demo.httpd import Exchange, deliver, json_answer
from tests.fakes import Behaviour, FakeCloud, FakeOllama, FakeVLLM, On
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.reading import read
from tests.system.scripted import DONE, SSE, RawClient, ScriptedNode, chunk, event, local_nodes

KEY = "sk-cloud-key-for-tests-0001"
PROMPT = "PROMPT-9f3e-my-secret-diagnosis"
ANSWER = "ANSWER-7a1c-take-two-pills"
STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])


@pytest.fixture(autouse=True)
def _metrics_are_always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.metrics._CACHE_SECONDS", 0)


def _cloud(cloud: FakeCloud) -> dict[str, Any]:
    entry = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
    return {"cloud_providers": json.dumps([entry])}


async def _line(hearth: Gateway, count: int = 1) -> dict[str, Any]:
    """The last of so many lines; fails when there are more."""
    await until(lambda: len(hearth.lines.requests()) >= count, "the request is logged")
    assert len(hearth.lines.requests()) == count
    return hearth.lines.requests()[-1]


async def _samples(hearth: Gateway) -> dict[str, float]:
    """All metrics by their name with labels."""
    text = (await hearth.client.get("/metrics")).text
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    }


def _sum(samples: Mapping[str, float], name: str, **labels: str) -> float:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] == name and all(label in sample for label in wanted)
    )


# -- one line


@STREAM_AND_DOCUMENT
async def test_a_success_is_one_line_with_everything(stream: bool) -> None:
    async with FakeOllama(models=["m"], tokens=4) as node, gateway(node) as hearth:
        answer = await hearth.chat(stream=stream, headers={"x-request-id": "mine-1"})

        line = await _line(hearth)
        assert answer.headers["x-request-id"] == "mine-1"
        assert line | {"ms": 0, "first_content_ms": 0, "timestamp": "", "attempts": []} == {
            "event": "request",
            "level": "info",
            "timestamp": "",
            "id": "mine-1",
            "operation": "chat",
            "outcome": "ok",
            "ms": 0,
            "first_content_ms": 0,
            "route": "direct",
            "asked": "m",
            "stream": stream,
            "node": "n0",
            "tier": "local",
            "model": "m:latest",
            "why": "only candidate",
            "attempts": [],
            "tokens_in": 1,
            "tokens_out": 4,
            "finish_reason": "stop",
        }
        assert [attempt["outcome"] for attempt in line["attempts"]] == ["ok"]
        assert 0 < line["first_content_ms"] <= line["ms"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*Z", line["timestamp"])


@STREAM_AND_DOCUMENT
async def test_a_failover_is_one_line_that_tells_of_each_attempt(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as bad, FakeVLLM(models=["m"]) as good:
        async with gateway(bad, good, lb_strategy="round_robin") as hearth:
            bad.behave(Behaviour.STATUS_500)
            await hearth.chat(stream=stream)

            line = await _line(hearth)
            assert line["outcome"] == "ok"
            assert line["level"] == "info"
            assert line["fallback"] == "server_error"
            assert [(a["node"], a["outcome"], a.get("failure")) for a in line["attempts"]] == [
                ("n0", "failed", "server_error"),
                ("n1", "ok", None),
            ]
            assert line["attempts"][0]["message"] == "it answered 500"
            assert line["why"] == "only candidate"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "m"}, 400, None),
        ({"model": "nowhere", "messages": [{"role": "user", "content": "x"}]}, 404, "model_not_found"),
        ({"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}, 400, None),
    ],
    ids=["by-the-gateway", "unknown-model", "by-the-node"],
)
async def test_a_refusal_is_one_line(body: dict[str, Any], status: int, code: str | None) -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        if "temperature" in body:
            node.behave(Behaviour.STATUS_400)
        assert (await hearth.client.post("/v1/chat/completions", json=body)).status_code == status

        line = await _line(hearth)
        assert (line["outcome"], line["level"], line["status"], line["code"]) == ("refused", "info", status, code)
        assert ("node" in line) == ("temperature" in body)


@STREAM_AND_DOCUMENT
async def test_a_failure_is_one_line_that_warns(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        node.behave(Behaviour.STATUS_500)
        await hearth.chat(stream=stream)

        line = await _line(hearth)
        assert (line["outcome"], line["level"], line["status"]) == ("failed", "warning", 502)
        assert line["code"] == "server_error"
        assert "n0: server error: it answered 500" in line["error"]


async def test_a_stream_cut_after_content_is_one_line_that_warns() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        node.behave(Behaviour.CLOSE_MIDWAY)
        assert read(await hearth.chat(stream=True)).error

        line = await _line(hearth)
        assert (line["outcome"], line["level"], line["code"]) == ("failed", "warning", "cut")
        assert [attempt["outcome"] for attempt in line["attempts"]] == ["failed"]


async def test_a_client_that_left_is_one_line_and_neither_success_nor_failure() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node, gateway(node) as hearth:
        async with RawClient(hearth.url) as client:
            await client.ask()
            await node.until(lambda n: n.open == 1)

        line = await _line(hearth)
        assert (line["outcome"], line["level"]) == ("abandoned", "info")
        assert [attempt["outcome"] for attempt in line["attempts"]] == ["abandoned"]
        samples = await _samples(hearth)
        assert _sum(samples, "hearth_requests_total") == _sum(samples, "hearth_requests_total", outcome="abandoned")


async def test_waiting_for_a_place_is_told() -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.2) as node:
        async with gateway(local_nodes=node_settings(node, max_concurrency=1)) as hearth:
            await asyncio.gather(hearth.chat(), hearth.chat())

            await _line(hearth, 2)
            waits = [line.get("queued_ms", 0) for line in hearth.lines.requests()]
            assert min(waits) == 0
            assert max(waits) > 100


async def test_a_node_that_keeps_failing_is_one_short_line_per_request_and_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, health_check_interval=0.1) as hearth:
        node.behave(Behaviour.REFUSE)
        for _ in range(20):
            await hearth.chat()
        await hearth.state("n0", "down")
        for _ in range(20):
            await hearth.chat()

        await _line(hearth, 40)
        others = Counter(line["event"] for line in hearth.lines.all if line["event"] != "request")
        assert others["node changed"] == 2
        assert others["breaker changed"] < 10
        assert others.total() < 15
        assert max(len(json.dumps(line)) for line in hearth.lines.all) < 1000
        assert "Traceback" not in json.dumps(hearth.lines.all)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- who served


@STREAM_AND_DOCUMENT
async def test_an_answer_says_who_gave_it(stream: bool) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, model_map='{"fast": "m"}') as hearth:
        headers = (await hearth.chat("fast", stream=stream)).headers

        assert {name: headers[name] for name in headers if name.startswith("x-hearth")} == {
            "x-hearth-node": "n0",
            "x-hearth-tier": "local",
            "x-hearth-attempts": "1",
            "x-hearth-model": "m:latest",
            "x-hearth-queue-ms": "0",
        }
        assert headers["x-request-id"]


@STREAM_AND_DOCUMENT
async def test_the_reason_of_a_fallback_is_that_of_the_last_one(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as a, FakeVLLM(models=["m"]) as b, FakeCloud() as cloud:
        async with gateway(a, b, lb_strategy="round_robin", **_cloud(cloud)) as hearth:
            a.behave(Behaviour.STATUS_500)
            b.behave(Behaviour.EMPTY)

            headers = (await hearth.chat(stream=stream)).headers

            assert headers["x-hearth-node"] == "c0"
            assert headers["x-hearth-tier"] == "cloud"
            assert headers["x-hearth-attempts"] == "3"
            assert headers["x-hearth-fallback"] == "empty_answer"
            assert headers["x-hearth-model"] == "gpt-4o-mini"
            assert (await _line(hearth))["fallback"] == "empty_answer"


@STREAM_AND_DOCUMENT
async def test_an_error_says_who_was_asked_last(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as a, FakeVLLM(models=["m"]) as b:
        async with gateway(a, b, lb_strategy="round_robin") as hearth:
            a.behave(Behaviour.STATUS_500)
            b.behave(Behaviour.HTML)

            answer = await hearth.chat(stream=stream, headers={"x-request-id": "mine-2"})

            assert answer.status_code == 502
            assert answer.headers["x-request-id"] == "mine-2"
            assert answer.headers["x-hearth-node"] == "n1"
            assert answer.headers["x-hearth-attempts"] == "2"
            assert answer.headers["x-hearth-error-source"] == "node"


async def test_only_the_cloud_left_is_told_as_such() -> None:
    async with FakeVLLM(models=["m"]) as node, FakeCloud() as cloud:
        async with gateway(node, health_check_interval=0.1, **_cloud(cloud)) as hearth:
            node.behave(Behaviour.REFUSE)
            await hearth.state("n0", "down")

            headers = (await hearth.chat()).headers

            assert headers["x-hearth-tier"] == "cloud"
            assert headers["x-hearth-attempts"] == "1"
            assert headers["x-hearth-fallback"] == "no_local_node"


# -- metrics


async def test_counters_equal_what_happened() -> None:
    async with FakeVLLM(models=["m"], tokens=5) as a, FakeVLLM(models=["m"], tokens=5) as b:
        async with gateway(a, b, lb_strategy="round_robin", health_check_interval=60, continuation="off") as hearth:
            for stream in (True, False, True):
                await hearth.chat(stream=stream)  # 3 successes: a, b, a
            b.behave(Behaviour.STATUS_500, times=1)
            await hearth.chat()  # fails on b, succeeds on a
            b.behave(Behaviour.STATUS_400, times=1)
            await hearth.chat()  # refused by b
            await hearth.chat("nowhere")  # refused, nobody asked
            a.behave(Behaviour.CLOSE_MIDWAY, times=1)
            await hearth.chat(stream=True)  # cut on a
            b.script.first_seconds = 30
            async with RawClient(hearth.url) as client:  # leaves b
                await client.ask()
                await b.until(lambda node: node.open == 1)
            await _line(hearth, 8)

            samples = await _samples(hearth)

            assert {
                outcome: _sum(samples, "hearth_requests_total", outcome=outcome)
                for outcome in ("ok", "refused", "failed", "abandoned")
            } == {"ok": 4, "refused": 2, "failed": 1, "abandoned": 1}
            assert {
                (node, outcome): _sum(samples, "hearth_attempts_total", node=node, outcome=outcome)
                for node in ("n0", "n1")
                for outcome in ("ok", "refused", "failed", "abandoned")
            } == {
                ("n0", "ok"): 3,
                ("n0", "refused"): 0,
                ("n0", "failed"): 1,
                ("n0", "abandoned"): 0,
                ("n1", "ok"): 1,
                ("n1", "refused"): 1,
                ("n1", "failed"): 1,
                ("n1", "abandoned"): 1,
            }
            assert _sum(samples, "hearth_fallbacks_total") == _sum(
                samples, "hearth_fallbacks_total", reason="server_error"
            )
            assert _sum(samples, "hearth_fallbacks_total") == 1
            assert _sum(samples, "hearth_tokens_total", direction="completion") == 4 * 5
            assert _sum(samples, "hearth_time_to_first_token_seconds_count") == 5
            assert _sum(samples, "hearth_in_flight") == 0
            assert _sum(samples, "hearth_waiting") == 0


async def test_the_first_token_and_the_whole_answer_are_timed_apart() -> None:
    async with FakeVLLM(models=["m"], tokens=10, token_seconds=0.03) as node, gateway(node) as hearth:
        await hearth.chat(stream=True)
        await _line(hearth)

        samples = await _samples(hearth)
        first = _sum(samples, "hearth_time_to_first_token_seconds_sum")
        assert _sum(samples, "hearth_request_seconds_sum") - first > 9 * 0.03 * 0.9
        line = await _line(hearth)
        assert line["ms"] - line["first_content_ms"] > 9 * 30 * 0.9


async def test_what_clients_make_up_becomes_no_label() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, model_map='{"gpt-*": "m"}') as hearth:
        await hearth.chat("gpt-0")
        await hearth.chat("x")
        await hearth.client.get("/nowhere")
        await hearth.client.get("/v1/chat/completions")
        before = set(await _samples(hearth))

        for number in range(250):
            await hearth.chat(f"gpt-{number}")
            await hearth.chat(f"made-up-{number}")
        for number in range(50):
            await hearth.client.get(f"/made-up/{number}.php")
            await hearth.client.get(f"/v1/models/made-up-{number}")
            await hearth.client.request("BREW", f"/v1/chat/completions?made-up={number}")

        assert set(await _samples(hearth)) == before
        assert "made-up" not in (await hearth.client.get("/metrics")).text


# -- privacy


async def _answers(exchange: Exchange) -> None:
    """Fails in every way that repeats what was asked, and succeeds in the end."""
    words = exchange.request.json["messages"][-1]["content"]
    said = {"error": {"message": f"cannot do this: {words}", "type": "server_error", "code": None}}
    match exchange.request.headers["x-request-id"]:
        case "s500" | "s503" | "s429" | "s400" | "s404" | "s401" | "s302" as status:
            await deliver(exchange, json_answer(said, int(status[1:])))
        case "error-first":
            exchange.head(200, SSE)
            exchange.body(event(**said))
            exchange.end()
        case "error-midway":
            exchange.head(200, SSE)
            exchange.body(chunk(ANSWER))
            await exchange.drain()
            await asyncio.sleep(0.05)
            exchange.body(event(**said))
            exchange.end()
        case "garbage":
            exchange.head(200, SSE)
            exchange.body(f"{words}\n\n{words}".encode())
            exchange.end()
        case _:
            exchange.head(200, SSE)
            exchange.body(chunk(ANSWER) + chunk(finish="stop") + DONE)
            exchange.end()


async def test_no_word_of_a_prompt_or_an_answer_is_logged_counted_or_shown_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    ways = ["s500", "s503", "s429", "s400", "s404", "s401", "s302", "error-first", "error-midway", "garbage", "good"]
    settings = {"log_level": "DEBUG", "breaker_fail_max": 1, "max_attempts": 1, "health_check_interval": 60}
    async with ScriptedNode(_answers) as node, gateway(local_nodes=local_nodes(node), **settings) as hearth:
        told = []
        for way in ways:
            message = [{"role": "user", "content": PROMPT}]
            answer = await hearth.chat(messages=message, stream=True, headers={"x-request-id": way})
            told.append(answer.text)
        await _line(hearth, len(ways))
        shown = (await hearth.client.get("/admin/nodes")).text + (await hearth.client.get("/metrics")).text
        shown += (await hearth.client.get("/ready")).text + (await hearth.client.get("/v1/models")).text

        # The client itself may hear what the node said of its request; this shows that there was something to hide.
        assert sum(PROMPT in text for text in told) >= 5
        assert sum(ANSWER in text for text in told) == 2
        logged = json.dumps(hearth.lines.all) + "".join(
            record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
        )
        for secret in (PROMPT, ANSWER):
            assert secret not in logged
            assert secret not in shown


async def test_another_client_does_not_hear_what_a_node_said_of_a_request() -> None:
    async with ScriptedNode(_answers) as node:
        settings = {"breaker_fail_max": 1, "max_attempts": 1, "health_check_interval": 60}
        async with gateway(local_nodes=local_nodes(node, max_concurrency=1), **settings) as hearth:
            first = await hearth.chat(messages=[{"role": "user", "content": PROMPT}], headers={"x-request-id": "s500"})
            assert PROMPT in first.text
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "open"

            second = await hearth.chat(headers={"x-request-id": "s500"})

            assert second.status_code == 502
            assert PROMPT not in second.text


@pytest.mark.parametrize("on", [On.ALL, On.INFERENCE])
async def test_a_broken_node_says_so_in_metrics(on: On) -> None:
    async with FakeVLLM(models=["m"]) as node:
        async with gateway(node, breaker_fail_max=1, health_check_interval=0.1) as hearth:
            node.behave(Behaviour.STATUS_500, on=on)
            await hearth.chat()
            if on is On.ALL:
                await hearth.state("n0", "down")

            samples = await _samples(hearth)
            assert _sum(samples, "hearth_breaker_open", node="n0") == 1
            assert _sum(samples, "hearth_node_state", node="n0", state="down") == (on is On.ALL)
            assert _sum(samples, "hearth_node_state", node="n0") == 1
