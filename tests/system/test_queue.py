"""Requests that wait for a node: who is served next, who is told to come back, and what their clients see meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from benchmarks.overload import GREEDY, MODEST, overload, stuck
from tests.fakes import Behaviour, FakeCloud, FakeOllama, FakeVLLM
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.scripted import DONE, RawClient, ScriptedNode, chunk, local_nodes, says, whole

STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
ONE_PLACE = {"max_concurrency": 1}


async def _waiting(hearth: Gateway, count: int) -> None:
    async def so_many() -> bool:
        return bool((await _queue(hearth))["waiting"] == count)

    await until(so_many, f"{count} wait")


async def _queue(hearth: Gateway, **headers: str) -> dict[str, Any]:
    """What would be the queue for one more request. Unlike metrics it is never a second old."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    told = await hearth.client.post("/admin/explain", json=body, headers=headers)
    assert told.status_code == 200, told.text
    return dict(told.json()["queue"])


@asynccontextmanager
async def _held(node: FakeVLLM, **settings: Any) -> AsyncIterator[tuple[Gateway, RawClient]]:
    """A gateway whose only place is taken by a client that leaves at the end, or before."""
    async with gateway(local_nodes=node_settings(node, **ONE_PLACE), **settings) as hearth:
        async with RawClient(hearth.url) as holder:
            await holder.ask()
            await node.until(lambda n: n.open == 1)
            yield hearth, holder


async def test_a_client_that_leaves_frees_its_place_in_the_queue() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node, _held(node, queue_size=1) as (hearth, _):
        async with RawClient(hearth.url) as leaving, RawClient(hearth.url) as staying:
            await leaving.ask()
            await _waiting(hearth, 1)
            assert (await hearth.chat()).status_code == 429

            leaving.leave()
            await _waiting(hearth, 0)
            await staying.ask()

            await _waiting(hearth, 1)


async def test_when_to_come_back_is_when_those_ahead_have_had_their_turn() -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.25) as node:
        settings = {"local_nodes": node_settings(node, **ONE_PLACE), "queue_size": 20}
        async with gateway(**settings) as hearth:
            asking = [asyncio.create_task(hearth.chat()) for _ in range(20)]
            await node.until(lambda n: n.served >= 6, 10)
            began = time.monotonic()
            served = node.served
            asking += [asyncio.create_task(hearth.chat()) for _ in range(12)]
            refused = await _first_refused(asking)
            await node.until(lambda n: n.served >= served + 8, 10)
            seconds = (time.monotonic() - began) / 8 * 20  # for as many as there were ahead of it

            assert int(refused.headers["retry-after"]) == pytest.approx(seconds, rel=0.5)
            assert seconds > 4
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def _first_refused(tasks: list[asyncio.Task[httpx.Response]]) -> httpx.Response:
    for task in asyncio.as_completed(tasks):
        answer = await task
        if answer.status_code == 429:
            return answer
    raise AssertionError("all were served")


@STREAM_AND_DOCUMENT
async def test_an_answer_says_how_long_it_was_waited_for(stream: bool) -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.2) as node:
        async with gateway(local_nodes=node_settings(node, **ONE_PLACE)) as hearth:
            first, second = await asyncio.gather(hearth.chat(stream=stream), hearth.chat(stream=stream))

            waited = sorted(int(answer.headers["x-hearth-queue-ms"]) for answer in (first, second))
            assert waited[0] == 0
            assert waited[1] == pytest.approx(250, abs=200)


async def test_one_whose_turn_would_come_too_late_goes_to_the_cloud_or_is_told_at_once() -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.1) as node, FakeCloud() as cloud:
        clouds = [{"endpoint": cloud.url + "/v1", "api_key": "sk-cloud-key-for-tests-0001", "model": "gpt-4o-mini"}]
        route = {"m": {"local": "m", "queue_timeout": "1s"}, "patient": "m"}
        settings = {"local_nodes": node_settings(node, **ONE_PLACE), "model_map": json.dumps(route)}
        async with gateway(**settings, cloud_providers=json.dumps(clouds)) as hearth:
            private = {"x-hearth-local-only": "true"}
            crowd = [asyncio.create_task(hearth.chat(headers=private)) for _ in range(40)]
            await node.until(lambda n: n.served >= 6, 10)
            began = time.monotonic()

            helped, refused = await asyncio.gather(hearth.chat(), hearth.chat(headers=private))

            assert time.monotonic() - began < 0.8
            assert (helped.status_code, helped.headers["x-hearth-tier"]) == (200, "cloud")
            assert helped.headers["x-hearth-fallback"] == "overloaded"
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["x-hearth-queue-ms"] == "0"
            statuses = [answer.status_code for answer in await asyncio.gather(*crowd)]
            assert set(statuses) == {200, 429}

            async def counted() -> bool:
                counter = 'hearth_queue_refused_total{reason="hopeless",route="m"}'
                return counter in (await hearth.client.get("/metrics")).text

            await until(counted, "those without hope are counted")


# -- whose turn it is


async def test_a_key_of_more_weight_has_more_turns_and_a_low_class_comes_last() -> None:
    keys = [{"key": "sk-heavy-0001", "weight": 3}, "sk-light-0001", {"key": "sk-later-0001", "priority": "low"}]
    async with FakeVLLM(models=["m"], first_seconds=0.01) as node:
        settings = {"local_nodes": node_settings(node, **ONE_PLACE), "api_keys": json.dumps(keys)}
        async with gateway(**settings) as hearth:
            node.script.first_seconds = 0.5
            holding = asyncio.create_task(_asked(hearth, "sk-light-0001", "holder"))
            await node.until(lambda n: n.open == 1)
            node.script.first_seconds = 0.0
            asking = []
            for name in ("later", "light", "heavy"):
                asking += [asyncio.create_task(_asked(hearth, f"sk-{name}-0001", name)) for _ in range(6)]
            await _waiting(hearth, 18)

            await asyncio.gather(holding, *asking)

            order = [request.json["messages"][0]["content"] for request in node.inferences][1:]
            assert order[:8].count("heavy") == 6
            assert set(order[:8]) == {"heavy", "light"}
            assert 0 < order[8:14].count("later") <= 3, "one turn of eight at least"


async def test_a_request_may_stand_back_and_not_push_forward() -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.01) as node:
        async with gateway(local_nodes=node_settings(node, **ONE_PLACE)) as hearth:
            node.script.first_seconds = 0.5
            holding = asyncio.create_task(hearth.chat())
            await node.until(lambda n: n.open == 1)
            node.script.first_seconds = 0.0
            asking = []
            for number, said in enumerate(("low", "normal", "high")):
                headers = {"x-hearth-priority": said}
                message = [{"role": "user", "content": said}]
                asking.append(asyncio.create_task(hearth.chat(messages=message, headers=headers)))
                await _waiting(hearth, number + 1)
            wrong = await hearth.chat(headers={"x-hearth-priority": "urgent"})
            await asyncio.gather(holding, *asking)

            order = [request.json["messages"][0]["content"] for request in node.inferences][1:]
            assert order == ["normal", "high", "low"]
            assert wrong.status_code == 400
            assert "high, normal, low" in wrong.json()["error"]["message"]


async def _asked(hearth: Gateway, key: str, said: str) -> None:
    messages = [{"role": "user", "content": said}]
    answer = await hearth.chat(messages=messages, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


async def test_explain_says_that_a_request_would_wait_and_for_how_long() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node, _held(node) as (hearth, _):
        async with RawClient(hearth.url) as waiting:
            await waiting.ask()
            await _waiting(hearth, 1)

            queue = await _queue(hearth, **{"x-hearth-priority": "low"})

            assert queue["waits"]
            assert (queue["priority"], queue["waiting"], queue["ahead"], queue["size"]) == ("low", 1, 1, 1000)
            assert queue["seconds_at_most"] == 600


async def test_no_request_is_lost_under_ten_times_the_load() -> None:
    async with (
        FakeVLLM(models=["m"], tokens=2, first_seconds=0.1) as a,
        FakeVLLM(models=["m"], tokens=2, first_seconds=0.1) as b,
    ):
        settings = {"local_nodes": node_settings(a, b, **ONE_PLACE), "api_keys": f"{GREEDY},{MODEST}"}
        async with gateway(**settings, queue_size=30, queue_timeout=1.2, log_level="WARNING") as hearth:
            report = await overload(hearth.url, 150, 4.0, model="m")

            assert not report.lost()
            assert len(report.answers) == 600
            assert len(report.refused()) > 300
            assert report.apart() < 0.25  # of some two dozen each: `python -m benchmarks.overload` counts more
            assert max(answer.ended_at - answer.sent_at for answer in report.answers) < 4
            await until(lambda: a.open == b.open == 0, "the nodes are idle")
            assert await stuck(hearth.url) == 0


# -- streams that are kept alive


async def _late(*pieces: bytes, seconds: float) -> ScriptedNode:
    write = says(*pieces)

    async def later(exchange: Any) -> None:
        await asyncio.sleep(seconds)
        await write(exchange)

    return ScriptedNode(later)


def _chunks(data: bytes) -> bytes:
    """The body, without HTTP's chunks."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def _plain_parser(body: bytes) -> Iterator[bytes]:
    """The data of events as older clients see them: whatever stands between two blank lines is one."""
    for block in body.split(b"\n\n"):
        lines = [line for line in block.split(b"\n") if line and not line.startswith(b":")]
        if block:
            yield b"\n".join(line.removeprefix(b"data:").strip() for line in lines)


async def test_a_stream_without_an_answer_is_kept_alive_by_comment_lines() -> None:
    node = await _late(whole(("a", "b")), seconds=0.6)
    async with node, gateway(local_nodes=local_nodes(node), keep_alive_after=0.2) as hearth:
        async with RawClient(hearth.url) as client:
            await client.ask()
            head = await client.read_until(b": waiting\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert b"content-type: text/event-stream" in head
            assert b"x-request-id: " in head
            assert b"x-hearth" not in head
            body = _chunks(head + await client.read_until(b"0\r\n\r\n"))

    comments, _, events = body.partition(b"data: ")
    lines = comments.splitlines()
    assert 2 <= lines.count(b": waiting") <= 3
    assert (
        lines[-1] == b": x-hearth-node=n0 x-hearth-tier=local x-hearth-attempts=1 x-hearth-model=m x-hearth-queue-ms=0"
    )
    assert all(line.startswith(b": ") for line in lines), "no blank line, no id"
    assert b":" not in {line[:1] for line in events.splitlines()}, "no comment in or between events"
    data = list(_plain_parser(body))
    assert [json.loads(each)["choices"][0]["delta"].get("content") for each in data[:-1]] == ["a", "b", None]
    assert data[-1] == b"[DONE]"


@pytest.mark.parametrize("waits", [True, False], ids=["in the queue", "on the node"])
async def test_the_sdk_reads_a_stream_that_was_kept_alive(waits: bool) -> None:
    async with FakeOllama(models=["m"], first_seconds=0.5) as node:
        nodes = node_settings(node, **ONE_PLACE)
        async with gateway(local_nodes=nodes, keep_alive_after=0.1) as hearth:
            if waits:
                holding = asyncio.create_task(hearth.chat())
                await node.until(lambda n: n.open == 1)
            async with openai.AsyncOpenAI(base_url=hearth.url + "/v1", api_key="k", max_retries=0) as client:
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                said = [piece.choices[0].delta.content or "" async for piece in stream]

            assert "".join(said).startswith("t0 ")
            if waits:
                assert (await holding).status_code == 200
            await until(lambda: hearth.lines.requests()[-1]["stream"], "it is logged")
            assert hearth.lines.requests()[-1]["outcome"] == "ok"


async def test_failover_goes_on_behind_keep_alives() -> None:
    async with FakeVLLM(models=["m"]) as broken, FakeVLLM(models=["m"], first_seconds=0.2) as other:
        settings = {"first_token_timeout": 1.0, "keep_alive_after": 0.1, "lb_strategy": "round_robin"}
        async with gateway(broken, other, **settings) as hearth:
            broken.behave(Behaviour.HANG)
            answers = [await hearth.chat(stream=True) for _ in range(2)]

            assert all(answer.text.endswith(DONE.decode()) for answer in answers)
            assert all('"error"' not in answer.text for answer in answers)
            assert any("x-hearth-fallback=first_token_timeout" in answer.text for answer in answers)


async def test_what_fails_behind_keep_alives_is_told_in_the_stream() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, first_token_timeout=0.3, keep_alive_after=0.1) as hearth:
        node.behave(Behaviour.HANG)
        answer = await hearth.chat(stream=True)
        async with openai.AsyncOpenAI(base_url=hearth.url + "/v1", api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            with pytest.raises(openai.APIError, match="every node"):
                async for _ in stream:
                    pass

        assert answer.status_code == 200
        error, done = list(_plain_parser(answer.content))
        assert json.loads(error)["error"]["code"] == "first_token_timeout"
        assert done == b"[DONE]"
        assert "x-hearth-error-source=node" in answer.text
        await until(lambda: len(hearth.lines.requests()) == 2, "both are logged")
        assert {line["outcome"] for line in hearth.lines.requests()} == {"failed"}
        assert await hearth.in_flight() == 0


async def test_a_full_queue_behind_keep_alives_says_when_to_come_back() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node:
        async with _held(node, queue_timeout=0.3, keep_alive_after=0.1) as (hearth, _):
            answer = await hearth.chat(stream=True)

            assert answer.status_code == 200
            assert json.loads(next(_plain_parser(answer.content)))["error"]["code"] == "overloaded"
            assert "retry-after=" in answer.text


async def test_a_client_that_leaves_while_it_is_kept_alive_frees_everything() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node:
        async with _held(node, keep_alive_after=0.05) as (hearth, _), RawClient(hearth.url) as leaving:
            await leaving.ask()
            await leaving.read_until(b": waiting\n")

            leaving.leave()

            await _waiting(hearth, 0)
            await until(hearth.lines.requests, "it is logged")
            assert hearth.lines.requests()[0]["outcome"] == "abandoned"


async def test_a_route_says_for_itself_whether_its_streams_are_kept_alive() -> None:
    route = {"soon": {"local": "m", "keep_alive_after": "100ms"}, "never": {"local": "m", "keep_alive_after": 0}}
    node = await _late(whole(("a",)), seconds=0.5)
    async with node, gateway(local_nodes=local_nodes(node), model_map=json.dumps(route), keep_alive_after=20) as hearth:
        soon, never, other = await asyncio.gather(*(hearth.chat(name, stream=True) for name in ("soon", "never", "m")))

        assert soon.text.startswith(": waiting\n")
        assert ": " not in {line[:2] for answer in (never, other) for line in answer.text.splitlines()}
        assert never.headers["x-hearth-node"] == "n0"


async def test_only_streams_are_kept_alive() -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.4) as node, gateway(node, keep_alive_after=0.1) as hearth:
        answer = await hearth.chat()

        assert answer.json()["choices"][0]["message"]["content"]


async def test_nothing_is_sent_before_an_answer_unless_that_is_wanted() -> None:
    node = await _late(chunk("a"), chunk(finish="stop"), DONE, seconds=0.3)
    async with node, gateway(local_nodes=local_nodes(node)) as hearth:
        answer = await hearth.chat(stream=True)

        assert answer.text.startswith("data: ")
        assert answer.headers["x-hearth-queue-ms"] == "0"
