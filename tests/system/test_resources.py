"""What Hearth holds on to: no more after a thousand requests than after a hundred, and nothing for those who left."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from demo.httpd import Exchange
from tests.fakes import FakeOllama, FakeVLLM
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.measured import Measured, needs_proc
from tests.system.plain_client import connected, request
from tests.system.scripted import DONE, SSE, RawClient, ScriptedNode, chunk, local_nodes

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def _ask(url: str, count: int, aborted_each: int = 7) -> None:
    """So many requests over kept connections; of each `aborted_each` one client leaves in mid-answer."""

    async def some(share: int) -> None:
        while share > 0:
            async with connected(url) as client:
                for number in range(min(share, aborted_each)):
                    stream = bool(number % 2)
                    client.write(request({**CHAT, "stream": stream}))
                    if number == aborted_each - 1:
                        await client.reader.read(1)
                    else:
                        assert (await client.answer()).status == 200
            share -= aborted_each

    await asyncio.gather(*(some(count // 8) for _ in range(8)))


@needs_proc
async def test_memory_and_sockets_do_not_grow_with_traffic(tmp_path: Path) -> None:
    async with (
        FakeOllama(models=["m"]) as translated,
        FakeVLLM(models=["m"]) as passed_through,
        Measured(tmp_path, local_nodes=node_settings(translated, passed_through)) as hearth,
    ):
        await _ask(hearth.url, 600)
        memory, sockets = hearth.memory_mib(), hearth.sockets()

        await _ask(hearth.url, 1800)

        assert hearth.memory_mib() - memory < 2
        assert hearth.sockets() - sockets < 8
        await until(lambda: _idle(hearth), "all is settled")
        # Each had many; how many of them, the policy says.
        assert min(len(node.inferences) for node in (translated, passed_through)) > 200


async def _idle(hearth: Measured) -> bool:
    return await hearth.in_flight() == 0


async def test_connections_are_shared_kept_and_given_back() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, health_check_interval=60) as hearth:
        probed = node.connections
        for number in range(50):
            await hearth.chat(stream=bool(number % 2))

        assert node.connections - probed <= 2


async def test_work_for_clients_that_left_leaves_no_task_behind() -> None:
    async with FakeVLLM(models=["m"], tokens=1000, token_seconds=0.01) as node, gateway(node) as hearth:
        await hearth.chat(max_tokens=1)
        await _leave(hearth, 1)
        before = len(asyncio.all_tasks())

        await _leave(hearth, 40)

        await until(lambda: len(asyncio.all_tasks()) <= before + 2, "the tasks have ended")
        await node.until(lambda n: n.open == 0)
        assert await hearth.in_flight() == 0


async def _leave(hearth: Gateway, count: int) -> None:
    for number in range(count):
        async with RawClient(hearth.url) as client:
            await client.ask(stream=bool(number % 2))
            if number % 4 == 1:
                await client.read_until(b"t0 ")


@needs_proc
async def test_health_is_told_at_once_with_hundreds_of_streams_open(tmp_path: Path) -> None:
    streams = 300
    everyone = asyncio.Event()

    async def write(exchange: Exchange) -> None:
        exchange.head(200, SSE)
        while not everyone.is_set():
            exchange.body(chunk("x"))
            await asyncio.sleep(0.5)
        exchange.body(chunk(finish="stop") + DONE)
        exchange.end()

    async with (
        ScriptedNode(write) as node,
        Measured(tmp_path, local_nodes=local_nodes(node)) as hearth,
    ):
        clients = [asyncio.create_task(_whole_stream(hearth.url)) for _ in range(streams)]
        await until(lambda: node.open == streams, "no pool holds any of them back", 20)
        slowest = 0.0
        for _ in range(10):
            began = time.monotonic()
            assert (await hearth.client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        memory = hearth.memory_mib()
        everyone.set()
        ends = await asyncio.gather(*clients)

        assert slowest < 1
        assert memory < 120
        assert all(end.endswith(DONE) for end in ends)


async def _whole_stream(url: str) -> bytes:
    async with connected(url) as client:
        answer = await client.ask(request({**CHAT, "stream": True}))
        assert answer.status == 200
        return answer.body


async def test_a_thousand_requests_at_once_all_succeed_within_the_nodes_limit() -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(local_nodes=node_settings(node, max_concurrency=8)) as hearth:
            body = {**CHAT, "messages": [{"role": "user", "content": "x" * 2000}]}

            async def ask() -> int:
                async with connected(hearth.url) as client:
                    return (await client.ask(request(body))).status

            statuses = await asyncio.gather(*(ask() for _ in range(1000)))

            assert statuses == [200] * 1000
            assert node.peak <= 8
            assert {len(json.loads(received.body)["messages"][0]["content"]) for received in node.inferences} == {2000}
