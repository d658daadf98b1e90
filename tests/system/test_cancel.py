"""A client that leaves frees the node at once, wherever its request was."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.fakes import FakeOllama, FakeVLLM
from tests.system.harness import Gateway, gateway, until

# From the client's leaving to the node's seeing it.
AT_ONCE_SECONDS = 0.1


class _Client:
    """A client on a plain socket, so that its leaving is exactly one close."""

    def __init__(self, hearth: Gateway) -> None:
        self._port = int(hearth.url.rpartition(":")[2])
        self._writer: asyncio.StreamWriter | None = None
        self.reader: asyncio.StreamReader | None = None

    async def ask(self, *, stream: bool) -> None:
        body = json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()
        self.reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        lines = ("POST /v1/chat/completions HTTP/1.1", "host: h", "content-type: application/json")
        head = "\r\n".join((*lines, f"content-length: {len(body)}", "", ""))
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    def leave(self) -> float:
        assert self._writer is not None
        self._writer.transport.abort()
        return time.monotonic()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize("make", [FakeOllama, FakeVLLM])
async def test_a_client_that_leaves_before_the_first_token_frees_the_node(
    make: type[FakeOllama] | type[FakeVLLM], stream: bool
) -> None:
    async with make(models=["m"], first_seconds=30) as node, gateway(node) as hearth:
        client = _Client(hearth)
        await client.ask(stream=stream)
        await node.until(lambda n: n.open == 1)

        left = client.leave()
        await node.until(lambda n: n.aborted)

        assert (node.aborted[0].aborted_at or 0) - left < AT_ONCE_SECONDS
        assert await hearth.in_flight() == 0
        await until(hearth.lines.requests, "the request is logged")
        assert hearth.lines.requests()[0]["outcome"] == "abandoned"


@pytest.mark.parametrize("make", [FakeOllama, FakeVLLM])
async def test_a_client_that_leaves_in_mid_stream_frees_the_node(make: type[FakeOllama] | type[FakeVLLM]) -> None:
    async with make(models=["m"], tokens=1000, token_seconds=0.02) as node, gateway(node) as hearth:
        client = _Client(hearth)
        await client.ask(stream=True)
        assert client.reader is not None
        await client.reader.readuntil(b"t1 ")

        left = client.leave()
        await node.until(lambda n: n.aborted)

        assert (node.aborted[0].aborted_at or 0) - left < AT_ONCE_SECONDS
        assert await hearth.in_flight() == 0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_a_client_that_leaves_while_queued_never_reaches_a_node(stream: bool) -> None:
    async with FakeVLLM(models=["m"], first_seconds=0.5) as node:
        nodes = json.dumps([{"url": node.url, "kind": "vllm", "name": "n0", "max_concurrency": 1}])
        async with gateway(local_nodes=nodes) as hearth:
            first = asyncio.create_task(hearth.chat())
            await node.until(lambda n: n.open == 1)
            waiting = _Client(hearth)
            await waiting.ask(stream=stream)
            await asyncio.sleep(0.1)

            waiting.leave()
            assert (await first).status_code == 200
            assert (await hearth.chat()).status_code == 200

            assert len(node.inferences) == 2
            assert await hearth.in_flight() == 0


async def test_clients_that_leave_say_nothing_of_the_node() -> None:
    async with FakeOllama(models=["m"], first_seconds=30) as node, gateway(node, breaker_fail_max=2) as hearth:
        for _ in range(5):
            client = _Client(hearth)
            await client.ask(stream=True)
            await node.until(lambda n: n.open == 1)
            client.leave()
            await node.until(lambda n: n.open == 0)

        assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"


async def test_a_client_that_cancels_at_each_key_press_is_answered_soon_by_a_node_of_one_slot() -> None:
    async with FakeOllama(models=["m"], first_seconds=0.3, slots=1) as node, gateway(node) as hearth:
        for _ in range(10):
            client = _Client(hearth)
            await client.ask(stream=True)
            await asyncio.sleep(0.03)
            client.leave()
        began = time.monotonic()

        answer = await hearth.chat()

        assert answer.status_code == 200
        assert time.monotonic() - began < 2.5
