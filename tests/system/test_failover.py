"""A sibling when a node fails, and the cloud last."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest

from tests.fakes import Behaviour, FakeCloud, FakeOllama, FakeVLLM, NodeProcess, On
from tests.system.harness import gateway, node_settings, until
from tests.system.reading import read

STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
KEY = "sk-cloud-key-for-tests-0001"


def _cloud(*clouds: FakeCloud, **more: Any) -> dict[str, Any]:
    entries = [
        {"name": f"c{index}", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini", **more}
        for index, cloud in enumerate(clouds)
    ]
    return {"cloud_providers": json.dumps(entries)}


@STREAM_AND_DOCUMENT
async def test_a_dead_node_costs_a_failover_and_then_nothing(stream: bool) -> None:
    async with FakeOllama(models=["m"]) as dead, FakeOllama(models=["m"]) as alive:
        async with gateway(dead, alive, lb_strategy="round_robin", health_check_interval=60) as hearth:
            dead.behave(Behaviour.REFUSE)

            answers = [await hearth.chat(stream=stream) for _ in range(40)]

            assert all(read(answer).whole for answer in answers)
            assert answers[0].headers["x-hearth-node"] == "n1"
            assert answers[0].headers["x-hearth-attempts"] == "2"
            assert answers[0].headers["x-hearth-fallback"] == "connect_error"
            assert answers[-1].headers["x-hearth-attempts"] == "1"


async def test_a_node_that_fails_at_once_attracts_no_load() -> None:
    async with FakeVLLM(models=["m"]) as broken, FakeVLLM(models=["m"], first_seconds=0.2) as slow:
        async with gateway(broken, slow, lb_strategy="least_connections", health_check_interval=60) as hearth:
            broken.behave(Behaviour.STATUS_500)

            async def later(number: int) -> int:
                await asyncio.sleep(number * 0.02)
                return (await hearth.chat()).status_code

            statuses = await asyncio.gather(*(later(number) for number in range(30)))

            assert set(statuses) == {200}
            assert len(broken.inferences) <= 6


@pytest.mark.parametrize("behaviour", [Behaviour.STATUS_503, Behaviour.STATUS_429, Behaviour.STATUS_529])
async def test_a_busy_node_is_asked_last_for_a_moment_but_not_taken_for_broken(behaviour: Behaviour) -> None:
    async with FakeVLLM(models=["m"]) as busy, FakeVLLM(models=["m"]) as free:
        async with gateway(busy, free, lb_strategy="round_robin") as hearth:
            busy.behave(behaviour)

            answers = [await hearth.chat() for _ in range(10)]

            assert {answer.status_code for answer in answers} == {200}
            assert len(busy.inferences) == 1
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"


@STREAM_AND_DOCUMENT
async def test_a_single_node_that_says_when_it_is_free_is_asked_again_then(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        node.behave(Behaviour.STATUS_429, times=1, seconds=1)
        began = time.monotonic()

        answer = read(await hearth.chat(stream=stream))

        assert answer.whole
        assert time.monotonic() - began >= 1
        assert len(node.inferences) == 2


async def test_a_node_that_stays_busy_gives_its_own_status_and_a_time_to_come_back() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, max_attempts=2) as hearth:
        node.behave(Behaviour.STATUS_429, seconds=1)

        answer = await hearth.chat()

        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert len(node.inferences) == 2


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("make", [FakeOllama, FakeVLLM])
async def test_a_wrong_request_is_refused_once_and_marks_no_node(
    make: type[FakeOllama] | type[FakeVLLM], stream: bool
) -> None:
    async with make(models=["m"]) as one, make(models=["m"]) as two:
        async with gateway(one, two, breaker_fail_max=1) as hearth:
            one.behave(Behaviour.STATUS_400)
            two.behave(Behaviour.STATUS_400)

            answers = [await hearth.chat(stream=stream) for _ in range(3)]

            assert {answer.status_code for answer in answers} == {400}
            assert {answer.headers["x-hearth-error-source"] for answer in answers} == {"node"}
            assert (
                sum(b'"content"' in each.body for each in (*one.inferences, *two.inferences)) == 3
            )  # others only load
            assert {node["breaker"]["state"] for node in (await hearth.nodes()).values()} == {"closed"}


async def test_attempts_are_bounded_each_node_once() -> None:
    async with FakeVLLM(models=["m"]) as a, FakeVLLM(models=["m"]) as b, FakeVLLM(models=["m"]) as c:
        async with gateway(a, b, c, max_attempts=2, breaker_fail_max=0) as hearth:
            for node in (a, b, c):
                node.behave(Behaviour.STATUS_500)

            answer = await hearth.chat()

            assert answer.status_code == 502
            assert sum(len(node.inferences) for node in (a, b, c)) == 2
            assert max(len(node.inferences) for node in (a, b, c)) == 1
            assert answer.json()["error"]["message"].count("server error:") == 2


@STREAM_AND_DOCUMENT
async def test_the_cloud_comes_after_every_local_node(stream: bool) -> None:
    async with FakeOllama(models=["m"]) as a, FakeOllama(models=["m"]) as b, FakeCloud() as cloud:
        async with gateway(a, b, **_cloud(cloud)) as hearth:
            assert (await hearth.chat(stream=stream)).headers["x-hearth-tier"] == "local"
            a.behave(Behaviour.STATUS_500)
            b.behave(Behaviour.STATUS_500)

            answer = await hearth.chat(stream=stream)

            assert read(answer).whole
            assert answer.headers["x-hearth-tier"] == "cloud"
            assert answer.headers["x-hearth-model"] == "gpt-4o-mini"
            assert answer.headers["x-hearth-attempts"] == "3"
            assert len(cloud.inferences) == 1
            assert cloud.seen == [f"Bearer {KEY}"]


async def test_clouds_are_tried_in_their_order() -> None:
    async with FakeOllama(models=["m"]) as local, FakeCloud() as first, FakeCloud() as second:
        async with gateway(local, **_cloud(first, second)) as hearth:
            local.behave(Behaviour.STATUS_500)
            assert (await hearth.chat()).headers["x-hearth-node"] == "c0"
            first.behave(Behaviour.STATUS_429, seconds=20)

            assert (await hearth.chat()).headers["x-hearth-node"] == "c1"


@pytest.mark.parametrize("how", ["header", "route"])
async def test_what_is_local_only_never_leaves_whatever_happens(how: str) -> None:
    async with FakeOllama(models=["m"]) as local, FakeCloud() as cloud:
        mapped = {"model_map": json.dumps({"m": {"local": "m", "local_only": True}})} if how == "route" else {}
        headers = {"x-hearth-local-only": "true"} if how == "header" else {}
        async with gateway(local, **_cloud(cloud), **mapped, breaker_fail_max=1) as hearth:
            for behaviour in (Behaviour.STATUS_500, Behaviour.STATUS_503, Behaviour.STATUS_404, Behaviour.REFUSE):
                local.behave(behaviour)
                answer = await hearth.chat(headers=headers)
                assert answer.status_code >= 404
                assert "local only" in answer.json()["error"]["message"]

            assert not cloud.inferences


async def test_a_cloud_model_cannot_be_had_by_a_local_only_request() -> None:
    async with FakeOllama(models=["m"]) as local, FakeCloud() as cloud, gateway(local, **_cloud(cloud)) as hearth:
        answer = await hearth.chat("gpt-4o-mini", headers={"x-hearth-local-only": "1"})

        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "local_only"
        assert not cloud.inferences


async def test_without_a_key_there_is_no_cloud() -> None:
    async with FakeOllama(models=["m"]) as local, FakeCloud() as cloud:
        async with gateway(local, cloud_endpoint=cloud.url + "/v1", cloud_model="gpt-4o-mini") as hearth:
            local.behave(Behaviour.STATUS_500)

            assert (await hearth.chat()).status_code == 502
            assert not cloud.requests


async def test_a_model_that_left_its_node_is_found_elsewhere() -> None:
    async with FakeOllama(models=["m"]) as gone, FakeOllama(models=["m"]) as has:
        async with gateway(gone, has, lb_strategy="round_robin", health_check_interval=60) as hearth:
            gone.behave(Behaviour.STATUS_404, times=1)

            answer = await hearth.chat()

            assert answer.status_code == 200
            assert answer.headers["x-hearth-fallback"] == "model_missing"
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"


@pytest.mark.parametrize("limit", ["first_token_timeout", "request_timeout"])
@STREAM_AND_DOCUMENT
async def test_a_silent_node_alone_ends_in_a_gateway_timeout_that_names_it(stream: bool, limit: str) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, **{limit: 0.3}) as hearth:
        node.behave(Behaviour.HANG)

        answer = await hearth.chat(stream=stream)

        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == limit
        await node.until(lambda n: n.open == 0)


async def test_a_slow_first_token_is_not_cut_by_the_other_limits() -> None:
    async with FakeOllama(models=["m"], load_seconds=1.0) as node:
        async with gateway(node, connect_timeout=0.2, idle_timeout=0.2) as hearth:
            assert read(await hearth.chat(stream=True)).whole
            assert len(node.inferences) == 1


async def test_a_node_that_stalls_in_mid_stream_is_cut_off_by_the_idle_limit() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, idle_timeout=0.3) as hearth:
        node.behave(Behaviour.HANG_MIDWAY)

        answer = read(await hearth.chat(stream=True))

        assert answer.error
        assert answer.error["code"] == "idle_timeout"
        assert not answer.finish_reasons
        await node.until(lambda n: n.open == 0)


async def test_the_last_node_standing_is_tried_although_it_failed() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, breaker_fail_max=1, health_check_interval=60) as hearth:
        node.behave(Behaviour.STATUS_500, times=1)
        assert (await hearth.chat()).status_code == 502
        assert (await hearth.nodes())["n0"]["breaker"]["state"] == "open"

        assert (await hearth.chat()).status_code == 200


async def test_a_hanging_node_delays_no_request_to_others() -> None:
    async with FakeOllama(models=["a"]) as hanging, FakeOllama(models=["b"]) as other:
        async with gateway(hanging, other) as hearth:
            hanging.behave(Behaviour.HANG, on=On.ALL)
            stuck = [asyncio.create_task(hearth.chat("a")) for _ in range(20)]
            await hanging.until(lambda n: n.open == 20)
            began = time.monotonic()

            answer = await hearth.chat("b")

            assert answer.status_code == 200
            assert time.monotonic() - began < 0.5
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


async def test_killing_one_node_and_hanging_another_fails_no_request() -> None:
    async with (
        NodeProcess("ollama", models="m", tokens=20, token_seconds=0.01) as victim,
        FakeOllama(models=["m"], tokens=20, token_seconds=0.01) as hanging,
        FakeOllama(models=["m"], tokens=20, token_seconds=0.01) as steady,
    ):
        nodes = json.dumps(
            [
                {"url": url, "kind": "ollama", "name": f"n{index}"}
                for index, url in enumerate((victim.url, hanging.url, steady.url))
            ]
        )
        async with gateway(local_nodes=nodes, first_token_timeout=1.5, idle_timeout=5) as hearth:
            gate, done = asyncio.Semaphore(16), 0

            async def ask(number: int) -> Any:
                nonlocal done
                async with gate:
                    answer = read(await hearth.chat(stream=number % 2 == 0))
                    done += 1
                    return answer

            asking = [asyncio.create_task(ask(number)) for number in range(200)]
            await until(lambda: done >= 50, "a quarter is done", 30)
            await victim.kill()
            hanging.behave(Behaviour.HANG)
            answers = await asyncio.gather(*asking)

            assert all(answer.whole for answer in answers), "streams that had begun went on elsewhere"
            assert Counter(answer.status for answer in answers) == {200: 200}
            assert await hearth.in_flight() == 0
            assert hanging.open == 0


async def test_a_node_killed_and_started_again_takes_work_again() -> None:
    async with NodeProcess("ollama", models="m") as node:
        nodes = json.dumps([{"url": node.url, "kind": "ollama", "name": "n0"}])
        async with gateway(local_nodes=nodes, breaker_reset_timeout=0.5) as hearth:
            await node.kill()
            await hearth.state("n0", "down")
            refused = await hearth.chat()
            assert refused.status_code == 503
            assert "connection refused" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]

            await node.start()
            await hearth.state("n0", "healthy")

            assert (await hearth.chat()).status_code == 200


async def test_the_gateway_starts_with_all_nodes_down_and_finds_them_when_they_come() -> None:
    async with FakeOllama(models=["m"]) as node:
        node.behave(Behaviour.REFUSE)
        async with gateway(local_nodes=node_settings(node)) as hearth:
            assert (await hearth.client.get("/health")).status_code == 200
            ready = await hearth.client.get("/ready")
            assert ready.status_code == 503
            assert "refused" in ready.json()["reason"]
            assert (await hearth.chat()).status_code == 503

            node.recover()
            await hearth.state("n0", "healthy")

            assert (await hearth.chat()).status_code == 200
            assert (await hearth.client.get("/ready")).status_code == 200
