"""Which node gets a request, and how many at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from demo.httpd import Exchange, deliver, json_answer
from tests.fakes import Behaviour, FakeCloud, FakeOllama, FakeVLLM, Model, On
from tests.system.harness import Gateway, gateway, kind_of, node_settings, until
from tests.system.reading import read
from tests.system.scripted import DONE, SSE, RawClient, ScriptedNode, chunk, local_nodes

KEY = "sk-cloud-key-for-tests-0001"
DOCUMENT = {"model": "m", "choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])


@pytest.fixture(autouse=True)
def _metrics_are_always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.metrics._CACHE_SECONDS", 0)


def _cloud(cloud: FakeCloud) -> dict[str, Any]:
    return {
        "cloud_providers": json.dumps(
            [{"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}]
        )
    }


def _with(nodes: list[FakeVLLM], each: list[dict[str, Any]]) -> str:
    """LOCAL_NODES with settings of its own for each node."""
    entries = [
        {"url": node.url, "kind": kind_of(node), "name": f"n{index}", **own}
        for index, (node, own) in enumerate(zip(nodes, each, strict=True))
    ]
    return json.dumps(entries)


@asynccontextmanager
async def _three(**options: Any) -> AsyncIterator[list[FakeVLLM]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeVLLM(models=["m"], **options)) for _ in range(3)]


def _loads(nodes: list[FakeVLLM]) -> list[int]:
    return [len(node.inferences) for node in nodes]


@asynccontextmanager
async def _held(hearth: Gateway, count: int) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """So many requests that nobody waits for. They begin one after the other."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(hearth.chat(stream=True)))
        await asyncio.sleep(0)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- spread


@pytest.mark.parametrize("strategy", ["least_connections", "round_robin", "weighted"])
async def test_idle_equal_nodes_get_equal_shares(strategy: str) -> None:
    async with _three() as nodes, gateway(*nodes, lb_strategy=strategy) as hearth:
        for _ in range(30):
            await hearth.chat()

        assert _loads(nodes) == [10, 10, 10]


async def test_running_requests_spread_evenly() -> None:
    async with _three(first_seconds=30) as nodes, gateway(*nodes, lb_strategy="least_connections") as hearth:
        async with _held(hearth, 30):
            await until(lambda: sum(node.open for node in nodes) == 30, "all have begun")

            assert [node.open for node in nodes] == [10, 10, 10]


async def test_three_chats_begin_at_once_on_three_free_nodes() -> None:
    async with _three(first_seconds=0.3) as nodes, gateway(*nodes, lb_strategy="least_connections") as hearth:
        await asyncio.gather(*(hearth.chat() for _ in range(3)))

        assert _loads(nodes) == [1, 1, 1]
        begun = [node.inferences[0].at for node in nodes]
        assert max(begun) - min(begun) < 0.1


async def test_two_models_on_the_same_nodes_share_one_count() -> None:
    async with (
        FakeVLLM(models=["a", "b"], first_seconds=30) as one,
        FakeVLLM(models=["a", "b"], first_seconds=30) as two,
        gateway(one, two, lb_strategy="least_connections") as hearth,
    ):
        asking = [asyncio.create_task(hearth.chat(model)) for model in ("a", "b")]

        await until(lambda: one.open == two.open == 1, "one each")

        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize("strategy", ["least_connections", "weighted"])
async def test_a_node_of_three_times_the_weight_gets_three_times_the_work(strategy: str) -> None:
    async with (
        FakeVLLM(models=["m"], first_seconds=30) as big,
        FakeVLLM(models=["m"], first_seconds=30) as small,
        gateway(local_nodes=_with([big, small], [{"weight": 3}, {"weight": 1}]), lb_strategy=strategy) as hearth,
    ):
        async with _held(hearth, 40):
            await until(lambda: big.open + small.open == 40, "all have begun")

            assert (big.open, small.open) == (30, 10)


async def test_a_recovered_node_takes_work_at_once() -> None:
    async with FakeVLLM(models=["m"]) as steady, FakeVLLM(models=["m"]) as back:
        async with gateway(steady, back, lb_strategy="least_connections") as hearth:
            back.behave(Behaviour.REFUSE)
            await hearth.state("n1", "down")
            for _ in range(6):
                await hearth.chat()

            back.recover()
            await hearth.state("n1", "healthy")
            for _ in range(2):
                await hearth.chat()

            assert back.inferences


async def test_a_long_answer_of_a_recovered_node_keeps_no_others_away_from_it() -> None:
    async with FakeVLLM(models=["m"], tokens=1000, token_seconds=0.02) as node:
        async with gateway(node, breaker_fail_max=1, breaker_reset_timeout=0.1, health_check_interval=60) as hearth:
            node.behave(Behaviour.STATUS_500, times=1)
            await hearth.chat()
            await asyncio.sleep(0.2)

            async with RawClient(hearth.url) as client:
                await client.ask()
                await client.read_until(b"t1 ")

                assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"


# -- counts


async def test_counts_are_exact_through_clients_that_leave_and_nodes_that_come_and_go() -> None:
    async with _three(tokens=20, token_seconds=0.01) as nodes:
        async with gateway(*nodes, breaker_reset_timeout=0.1, idle_timeout=2) as hearth:
            counts: list[int] = []

            async def watch() -> None:
                while True:
                    counts.extend(node["in_flight"] for node in (await hearth.nodes()).values())
                    await asyncio.sleep(0.02)

            async def ask(number: int) -> None:
                await asyncio.sleep(number * 0.01)
                if number % 3:
                    await hearth.chat(stream=bool(number % 2))
                    return
                async with RawClient(hearth.url) as client:
                    await client.ask()
                    await client.reader.read(1)

            async def flap() -> None:
                for node in nodes * 2:
                    node.crash()
                    await asyncio.sleep(0.05)
                    node.recover()
                    await asyncio.sleep(0.05)

            watching = asyncio.create_task(watch())
            await asyncio.gather(flap(), *(ask(number) for number in range(60)))
            await until(lambda: _all_idle(hearth), "all is settled")
            watching.cancel()

            assert min(counts) >= 0
            assert max(counts) > 1


async def _all_idle(hearth: Gateway) -> bool:
    return await hearth.in_flight() == 0


# -- limits


@STREAM_AND_DOCUMENT
async def test_a_limit_holds_until_the_last_byte(stream: bool) -> None:
    async with FakeVLLM(models=["m"], tokens=5, token_seconds=0.005) as node:
        async with gateway(local_nodes=node_settings(node, max_concurrency=3)) as hearth:
            answers = await asyncio.gather(*(hearth.chat(stream=stream) for _ in range(24)))

            assert all(read(answer).whole for answer in answers)
            assert node.peak == 3


async def test_the_slot_of_a_stream_is_free_only_when_the_stream_has_ended() -> None:
    first_may_end = asyncio.Event()

    async def write(exchange: Exchange) -> None:
        exchange.head(200, SSE)
        exchange.body(chunk("a"))
        await first_may_end.wait()
        exchange.body(chunk(finish="stop") + DONE)
        exchange.end()

    async with ScriptedNode(write) as node, gateway(local_nodes=local_nodes(node, max_concurrency=1)) as hearth:
        async with RawClient(hearth.url) as first, RawClient(hearth.url) as second:
            await first.ask()
            await first.read_until(b'"a"')
            await second.ask()
            await until(lambda: _waiting(hearth, 1), "the second waits")
            assert len(node.inferences) == 1

            first_may_end.set()
            await first.read_until(DONE)

            await second.read_until(DONE)


async def _waiting(hearth: Gateway, count: int) -> bool:
    metrics = (await hearth.client.get("/metrics")).text
    return f"hearth_waiting {count}.0" in metrics


async def test_two_names_for_one_model_share_the_nodes_limit() -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.02) as node:
        settings = {"local_nodes": node_settings(node, max_concurrency=1), "model_map": '{"a": "m", "b": "m"}'}
        async with gateway(**settings) as hearth:
            await asyncio.gather(*(hearth.chat(model) for model in ("a", "b", "m") * 3))

            assert node.peak == 1
            assert len(node.inferences) == 9


async def test_who_waits_is_served_in_the_order_of_coming() -> None:
    holder_may_end = asyncio.Event()

    async def write(exchange: Exchange) -> None:
        await holder_may_end.wait()
        await deliver(exchange, json_answer(DOCUMENT))

    async with ScriptedNode(write) as node:
        async with gateway(local_nodes=local_nodes(node, max_concurrency=1)) as hearth:
            asking = []
            for number in range(12):
                message = [{"role": "user", "content": str(number)}]
                asking.append(asyncio.create_task(hearth.chat(messages=message)))
                await until(partial(_waiting, hearth, number), "it waits")
            holder_may_end.set()
            await asyncio.gather(*asking)

            served = [int(request.json["messages"][0]["content"]) for request in node.inferences]
            assert served == list(range(12))


async def test_a_full_queue_is_told_at_once_and_when_to_come_back() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node:
        settings = {"local_nodes": node_settings(node, max_concurrency=1), "queue_size": 2}
        async with gateway(**settings) as hearth, _held(hearth, 3):
            await until(lambda: _waiting(hearth, 2), "two wait")

            answer = await hearth.chat()

            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-hearth-error-source"] == "gateway"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert len(node.inferences) == 1
            await until(hearth.lines.requests, "the request is logged")
            assert hearth.lines.requests()[0]["outcome"] == "failed", "the request was not wrong"


async def test_waiting_ends_with_a_time_to_come_back() -> None:
    async with FakeVLLM(models=["m"], tokens=1000, token_seconds=0.02) as node:
        settings = {"local_nodes": node_settings(node, max_concurrency=1), "queue_timeout": 0.3}
        async with gateway(**settings) as hearth, RawClient(hearth.url) as client:
            await client.ask()
            await client.read_until(b"t0 ")

            answer = await hearth.chat()

            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1


@STREAM_AND_DOCUMENT
async def test_the_cloud_helps_when_the_local_nodes_stay_full(stream: bool) -> None:
    async with FakeVLLM(models=["m"], tokens=1000, token_seconds=0.02) as node, FakeCloud() as cloud:
        settings = {"local_nodes": node_settings(node, max_concurrency=1), "queue_timeout": 0.3}
        async with gateway(**settings, **_cloud(cloud)) as hearth, RawClient(hearth.url) as client:
            await client.ask()
            await client.read_until(b"t0 ")

            answer = await hearth.chat(stream=stream)
            private = await hearth.chat(stream=stream, headers={"x-hearth-local-only": "true"})

            assert read(answer).whole
            assert answer.headers["x-hearth-tier"] == "cloud"
            assert answer.headers["x-hearth-fallback"] == "overloaded"
            assert private.status_code == 429
            assert len(cloud.inferences) == 1


async def test_who_waits_for_a_node_that_dies_is_not_left_waiting() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node:
        settings = {"local_nodes": node_settings(node, max_concurrency=1), "breaker_fail_max": 2}
        async with gateway(**settings) as hearth:
            asking = [asyncio.create_task(hearth.chat()) for _ in range(8)]
            await until(lambda: _waiting(hearth, 7), "seven wait")

            node.crash()
            async with asyncio.timeout(5):
                answers = await asyncio.gather(*asking)

            assert {answer.status_code for answer in answers} == {502, 503}


async def test_who_waits_for_a_node_that_dies_goes_to_one_that_lives() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as dying, FakeVLLM(models=["m"], first_seconds=0.1) as other:
        async with gateway(local_nodes=node_settings(dying, other, max_concurrency=1)) as hearth:
            asking = [asyncio.create_task(hearth.chat()) for _ in range(8)]
            await dying.until(lambda node: node.open == 1)

            dying.crash()

            assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_who_waits_goes_to_a_node_that_comes_back() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as full, FakeVLLM(models=["m"]) as back:
        back.behave(Behaviour.REFUSE)
        async with gateway(local_nodes=node_settings(full, back, max_concurrency=1)) as hearth, _held(hearth, 1):
            await full.until(lambda node: node.open == 1)
            await hearth.state("n1", "down")
            waiting = asyncio.create_task(hearth.chat())
            await until(lambda: _waiting(hearth, 1), "it waits")

            back.recover()

            assert (await waiting).headers["x-hearth-node"] == "n1"


async def test_a_second_complaint_of_being_busy_does_not_shorten_the_first() -> None:
    async with FakeVLLM(models=["m"]) as busy, FakeVLLM(models=["m"], first_seconds=30) as other:
        async with gateway(busy, other, lb_strategy="round_robin") as hearth:
            busy.behave(Behaviour.STATUS_429, times=1, seconds=20)
            busy.behave(Behaviour.STATUS_429, times=1, seconds=1)
            async with _held(hearth, 1):
                await other.until(lambda node: node.open == 1)
            busy.behave(Behaviour.STATUS_503)
            other.behave(Behaviour.STATUS_500)
            await hearth.chat()

            assert (await hearth.nodes())["n0"]["busy_seconds"] > 15


# -- models and their names


async def test_a_model_is_asked_for_only_where_it_is() -> None:
    async with FakeVLLM(models=["a"]) as without, FakeVLLM(models=["b"]) as having:
        async with gateway(without, having, lb_strategy="round_robin") as hearth:
            answers = [await hearth.chat("b") for _ in range(6)]
            unknown = await hearth.chat("c")

            assert {answer.status_code for answer in answers} == {200}
            assert not without.inferences
            assert len(having.inferences) == 6
            assert unknown.status_code == 404
            assert unknown.json()["error"]["code"] == "model_not_found"


async def test_a_model_that_a_node_has_lost_keeps_no_other_from_it() -> None:
    async with FakeVLLM(models=["a", "b"]) as node:
        async with gateway(node, breaker_fail_max=1, health_check_interval=60) as hearth:
            node.engine.models.remove("a")

            assert [(await hearth.chat(model)).status_code for model in ("a", "b", "a", "b")] == [404, 200, 404, 200]


async def test_a_node_with_the_model_in_memory_comes_first() -> None:
    async with FakeOllama(models=["m"]) as cold, FakeOllama(models=["m"]) as warm:
        async with httpx.AsyncClient() as operator:
            await operator.post(warm.url + "/api/generate", json={"model": "m"})
        warm.inferences.clear()
        async with gateway(cold, warm, lb_strategy="least_connections") as hearth:
            for _ in range(4):
                await hearth.chat()

            assert not cold.inferences
            assert len(warm.inferences) == 4


async def test_one_context_size_for_all_clients_loads_a_model_once() -> None:
    async with FakeOllama(models=["m"]) as node:
        route = {"m": {"local": "m", "num_ctx": 8192}, "n": {"local": "m:latest", "num_ctx": 8192}}
        async with gateway(node, model_map=json.dumps(route)) as hearth:
            for model, more in (("m", {}), ("n", {"max_tokens": 3}), ("m", {"stream": True}), ("m:latest", {})):
                assert (await hearth.chat(model, **more)).status_code == 200

            assert node.engine.loads == [("m:latest", 8192)]


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("asked", ["fast", "gpt-4o-mini-2024", "M", "m:latest"])
async def test_each_node_is_asked_by_its_own_name_and_the_client_answered_by_its(asked: str, stream: bool) -> None:
    routes = json.dumps({"fast": "m", "gpt-*": {"local": "m"}})
    async with FakeOllama(models=["m"]) as ollama, FakeOllama(models=[Model("M:latest")]) as other:
        async with gateway(ollama, other, model_map=routes, lb_strategy="round_robin") as hearth:
            answers = [await hearth.chat(asked, stream=stream) for _ in range(2)]

            assert [node.inferences[0].json["model"] for node in (ollama, other)] == ["m:latest", "M:latest"]
            assert {answer.headers["x-hearth-model"] for answer in answers} == {"m:latest", "M:latest"}
            for answer in answers:
                said = read(answer).events if stream else [answer.json()]
                assert {document["model"] for document in said} == {asked}


@STREAM_AND_DOCUMENT
async def test_an_alias_hides_the_nodes_own_name_on_nodes_that_pass_answers_through(stream: bool) -> None:
    async with FakeVLLM(models=["org/model-7b"]) as node:
        async with gateway(node, model_map='{"fast": "org/model-7b"}') as hearth:
            answer = await hearth.chat(
                "fast", stream=stream, stream_options={"include_usage": True} if stream else None
            )

            assert node.inferences[0].json["model"] == "org/model-7b"
            assert "org/model-7b" not in answer.text
            assert read(answer).whole


@pytest.mark.parametrize("name", ["fast", "org/model-7b", "llama3.2:latest", "llama3.2"])
async def test_a_model_of_any_name_can_be_listed_and_shown(name: str) -> None:
    async with FakeVLLM(models=["org/model-7b"]) as one, FakeOllama(models=["llama3.2"]) as two:
        async with gateway(one, two, model_map='{"fast": "org/model-7b"}') as hearth:
            shown = await hearth.client.get(f"/v1/models/{name}")
            unknown = await hearth.client.get("/v1/models/org/model-8b")

            listed = [card["id"] for card in (await hearth.client.get("/v1/models")).json()["data"]]
            assert listed == ["fast", "llama3.2:latest", "org/model-7b"]
            assert shown.json()["id"] == name
            assert unknown.status_code == 404
            assert "org/model-7b" in unknown.json()["error"]["message"]


async def test_a_model_called_like_a_node_is_a_model() -> None:
    async with FakeVLLM(models=["other"]) as namesake, FakeVLLM(models=["n0"]) as having:
        async with gateway(namesake, having) as hearth:
            answers = [await hearth.chat("n0") for _ in range(4)]

            assert {answer.headers["x-hearth-node"] for answer in answers} == {"n1"}
            assert not namesake.inferences


@pytest.mark.parametrize("behaviour", [Behaviour.STATUS_500, Behaviour.HANG])
async def test_probes_that_fail_take_no_slot(behaviour: Behaviour) -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(local_nodes=node_settings(node, max_concurrency=1), health_check_timeout=0.2) as hearth:
            began = time.monotonic()
            node.behave(behaviour, on=On.PROBES)
            await hearth.state("n0", "down")

            assert await hearth.in_flight() == 0
            assert time.monotonic() - began < 5


async def test_random_choice_follows_the_weights() -> None:
    async with FakeVLLM(models=["m"]) as big, FakeVLLM(models=["m"]) as small:
        async with gateway(
            local_nodes=_with([big, small], [{"weight": 9}, {"weight": 1}]), lb_strategy="random"
        ) as hearth:
            served = Counter([(await hearth.chat()).headers["x-hearth-node"] for _ in range(60)])

            assert served["n0"] > served["n1"]
            assert served.total() == 60
