"""What LMDeploy's own proxy gets wrong, each with what is wanted instead, on nodes that register as its engines do.

The prefill/decode scenarios are in test_disaggregation.py. At the end are LMDeploy's three strategies.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import Behaviour, FakeLMDeploy, FakeNode, On
from tests.system.gateway_process import GatewayProcess
from tests.system.harness import Gateway, gateway, until
from tests.system.reading import read
from tests.system.registration import ADDED, HeldNode, add, added, in_state, kept, registers, status
from tests.system.scripted import DONE, ScriptedNode, chunk, says

RARELY: Any = {"health_check_interval": 60}  # so that only the requests themselves can notice a dead node
LMDEPLOYS: Any = {"lb_strategy": "min_expected_latency"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def joined(client: httpx.AsyncClient, *engines: FakeLMDeploy) -> None:
    """Returns once each engine has registered and is healthy."""
    for engine in engines:
        assert (await registers(client, engine.port, *engine.engine.models)).text == ADDED
    for engine in engines:
        await in_state(client, engine.url, "healthy")


# -- dead and slow nodes


async def test_one_dead_and_one_healthy_node_fail_none_of_40_requests() -> None:
    async with FakeLMDeploy(["m"]) as dead, FakeLMDeploy(["m"]) as healthy, gateway(**RARELY, **LMDEPLOYS) as hearth:
        await joined(hearth.client, dead, healthy)
        dead.crash()

        answers = [read(await hearth.chat(stream=number % 2 == 0)) for number in range(40)]

        assert sum(not answer.whole for answer in answers) == 0


async def test_a_dead_node_beside_a_slow_one_fails_none_of_30_staggered_requests() -> None:
    async with (
        FakeLMDeploy(["m"]) as dead,
        FakeLMDeploy(["m"], first_seconds=0.6) as slow,
        gateway(**RARELY, **LMDEPLOYS) as hearth,
    ):
        await joined(hearth.client, dead, slow)
        dead.crash()

        async def later(number: int) -> httpx.Response:
            await asyncio.sleep(number * 0.02)
            return await hearth.chat(stream=number % 2 == 0)

        answers = [read(each) for each in await asyncio.gather(*(later(number) for number in range(30)))]

        assert sum(not answer.whole for answer in answers) == 0
        assert len(slow.inferences) == 30


async def test_a_dead_node_is_marked_down_within_two_probe_periods_although_another_hangs() -> None:
    period = 2.0
    async with (
        FakeLMDeploy(["m"]) as hanging,
        FakeLMDeploy(["m"]) as dead,
        FakeLMDeploy(["m"]) as healthy,
        gateway(health_check_interval=period, health_check_timeout=0.5) as hearth,
    ):
        await joined(hearth.client, hanging, dead, healthy)
        hanging.behave(Behaviour.HANG, on=On.PROBES)
        dead.crash()
        began = time.monotonic()

        await in_state(hearth.client, dead.url, "down")

        assert time.monotonic() - began < 2 * period
        await in_state(hearth.client, hanging.url, "down")
        assert (await status(hearth.client))[healthy.url]["state"] == "healthy"


# -- what is registered


async def test_a_node_that_wants_a_key_is_refused_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with FakeLMDeploy(["m"], api_key="sk-of-the-node-0001") as keyed, FakeLMDeploy(["m"]) as other:
        async with gateway(nodes_file=str(path)) as hearth:
            await joined(hearth.client, other)

            refused = await add(hearth.client, keyed.url)

            assert 400 <= refused.status_code < 500
            assert list(await status(hearth.client)) == [other.url]
            assert (await hearth.client.get("/v1/models")).status_code == 200
            assert read(await hearth.chat()).whole

        async with gateway(nodes_file=str(path)) as hearth:
            await in_state(hearth.client, other.url, "healthy")
            assert read(await hearth.chat()).whole


async def test_an_engine_that_registers_again_under_load_counts_to_zero() -> None:
    async with HeldNode() as engine, gateway(**LMDEPLOYS) as hearth:
        await added(hearth.client, engine.url, models=["m"], kind="lmdeploy")
        running = [asyncio.create_task(hearth.chat(stream=True)) for _ in range(3)]
        await until(lambda: engine.open == 3, "all have begun")

        await registers(hearth.client, engine.port, "m")
        await in_state(hearth.client, engine.url, "healthy")
        engine.release.set()
        answers = [read(await task) for task in running]

        assert all(answer.whole for answer in answers)
        assert (await status(hearth.client))[engine.url]["unfinished"] == 0


# -- what a client gets


@pytest.mark.parametrize("code", [400, 503])
async def test_an_engines_error_keeps_its_status_without_a_stream_too(code: int) -> None:
    async with FakeLMDeploy(["m"]) as engine, gateway(max_attempts=1) as hearth:
        await joined(hearth.client, engine)
        engine.behave(f"status_{code}")

        answer = await hearth.chat()

        assert answer.status_code == code
        assert answer.json()["error"]["message"]


async def test_a_connection_reset_in_mid_stream_ends_in_an_error_event_and_done() -> None:
    async with FakeLMDeploy(["m"]) as engine, gateway() as hearth:
        await joined(hearth.client, engine)
        engine.behave(Behaviour.RESET_MIDWAY)

        answer = await hearth.chat(stream=True)

        said = read(answer)
        assert (said.status, said.done, said.finish_reasons) == (200, True, [])
        assert said.text
        assert said.error
        assert answer.content.endswith(b"\n\ndata: [DONE]\n\n")


async def test_a_line_of_600_kilobytes_passes() -> None:
    async with FakeLMDeploy(["m"]) as engine, gateway() as hearth:
        await joined(hearth.client, engine)
        engine.behave(Behaviour.HUGE_LINE, size=600_000)

        answer = read(await hearth.chat(stream=True))

        assert answer.whole
        assert "x" * 600_000 in answer.text


async def test_events_of_several_lines_arrive_byte_by_byte_as_they_were_sent() -> None:
    pieces = [
        b"event: message\nid: 1\n" + chunk("a"),
        b": a comment\n\n",
        b"event: message\r\nretry: 5\r\n" + chunk("b").replace(b"\n", b"\r\n"),
        b"event: ping\ndata: {}\n\n",
        b"event: message\nid: 2\n" + chunk(finish="stop"),
        DONE,
    ]
    async with ScriptedNode(says(*pieces)) as node, gateway() as hearth:
        await added(hearth.client, node.url, models=["m"], kind="lmdeploy")

        answer = await hearth.chat(stream=True)

        assert answer.content == b"".join(pieces)


# -- what survives


NULL_MODELS = '{"role":1,"models":null,"unfinished":0,"latency":[],"speed":null}'


@pytest.mark.parametrize(
    "content",
    ['{"http://127.0.0.1:1": "{\\"role\\":1,\\"mod', json.dumps({"http://127.0.0.1:1": NULL_MODELS})],
    ids=["corrupt", "null"],
)
async def test_a_state_file_that_is_corrupt_or_holds_null_gives_a_warning_and_a_start(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "proxy_config.json"
    path.write_text(content)
    async with FakeLMDeploy(["m"]) as engine, GatewayProcess(tmp_path, nodes_file=path) as hearth:
        await hearth.serving()

        await joined(hearth.client, engine)

        assert [line for line in hearth.lines if line["level"] == "warning" and str(path) in line["event"]]
        assert b"Traceback" not in hearth.stderr
        assert (await hearth.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_restart_finds_the_same_five_nodes_with_counts_of_zero(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeLMDeploy(["m"], tokens=300, token_seconds=0.1)) for _ in "12345"]
        hearth = await stack.enter_async_context(GatewayProcess(tmp_path, nodes_file=path))
        await hearth.serving()
        await joined(hearth.client, *engines)
        before = await status(hearth.client)
        async with _cut(hearth.client, engines):
            await until(lambda: len(kept(path)) == 5, "all are written")
            hearth.signal(signal.SIGKILL)
            await hearth.ended()

        await hearth.start()
        await hearth.serving()

        for engine in engines:
            engine.script.tokens = 3
            await in_state(hearth.client, engine.url, "healthy")
        assert await status(hearth.client) == before
        assert {node["unfinished"] for node in before.values()} == {0}
        assert (await hearth.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@asynccontextmanager
async def _cut(client: httpx.AsyncClient, engines: list[FakeLMDeploy]) -> AsyncIterator[None]:
    """Ten streams that run, and that somebody will cut."""
    streams = [client.post("/v1/chat/completions", json={**CHAT, "stream": True}) for _ in range(10)]
    running = [asyncio.create_task(stream) for stream in streams]
    await until(lambda: sum(engine.open for engine in engines) == 10, "all have begun")
    yield
    results = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(result, httpx.TransportError) for result in results)


# -- strategies


@asynccontextmanager
async def _two_speeds(strategy: str, **options: Any) -> AsyncIterator[tuple[Gateway, FakeNode[Any], FakeNode[Any]]]:
    """A gateway with two nodes: one of three times the other's speed, as said to /nodes/add."""
    async with (
        FakeLMDeploy(["m"], **options) as fast,
        FakeLMDeploy(["m"], **options) as slow,
        gateway(lb_strategy=strategy) as hearth,
    ):
        await added(hearth.client, fast.url, models=["m"], speed=3)
        await added(hearth.client, slow.url, models=["m"], speed=1)
        yield hearth, fast, slow


async def test_random_gives_a_node_of_three_times_the_speed_three_times_the_work() -> None:
    async with _two_speeds("random") as (hearth, fast, slow):
        for _ in range(10):
            await asyncio.gather(*(hearth.chat() for _ in range(20)))

        assert len(fast.inferences) + len(slow.inferences) == 200
        assert 115 <= len(fast.inferences) <= 185  # 150 are expected: six standard deviations to either side


async def test_min_expected_latency_fills_nodes_by_their_speed() -> None:
    async with _two_speeds("min_expected_latency", first_seconds=30) as (hearth, fast, slow):
        running = [asyncio.create_task(hearth.chat()) for _ in range(40)]
        await until(lambda: fast.open + slow.open == 40, "all have begun")

        assert (fast.open, slow.open) == (30, 10)
        assert {node["unfinished"] for node in (await status(hearth.client)).values()} == {30, 10}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_min_observed_latency_tries_every_node_and_then_prefers_the_faster() -> None:
    async with (
        FakeLMDeploy(["m"], first_seconds=0.15) as slow,
        FakeLMDeploy(["m"]) as fast,
        gateway(lb_strategy="min_observed_latency") as hearth,
    ):
        await joined(hearth.client, slow, fast)
        for _ in range(30):
            await hearth.chat()

        assert 1 <= len(slow.inferences) <= 5
        assert len(slow.inferences) + len(fast.inferences) == 30
