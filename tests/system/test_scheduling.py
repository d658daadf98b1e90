"""The default policy on real sockets: models are loaded once, and those who wait go on as soon as they can."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.fakes import Behaviour, FakeCloud, FakeOllama, FakeVLLM
from tests.system.harness import gateway, node_settings, until
from tests.system.reading import read
from tests.system.scripted import RawClient

KEY = "sk-cloud-key-for-tests-0001"
UNTRIED = {"vram_gb": 0.1}  # too little for the model, so that no node is made to load it but by a request


def _loads(*nodes: FakeOllama) -> int:
    return sum(len(node.engine.loads) for node in nodes)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_a_model_is_loaded_once_however_many_wait_for_it(stream: bool) -> None:
    async with FakeOllama(models=["m"], load_seconds=0.5) as one, FakeOllama(models=["m"], load_seconds=0.5) as two:
        async with gateway(local_nodes=node_settings(one, two, **UNTRIED)) as hearth:
            answers = await asyncio.gather(*(hearth.chat(stream=stream, max_tokens=5) for _ in range(6)))

            assert all(read(answer).whole for answer in answers)
            assert _loads(one, two) == 1


async def test_a_second_empty_node_is_tried_out_once_and_is_there_when_the_first_one_dies() -> None:
    async with FakeOllama(models=["m"], load_seconds=0.2) as one, FakeOllama(models=["m"], load_seconds=0.2) as two:
        async with gateway(one, two) as hearth:
            answers = await asyncio.gather(*(hearth.chat(max_tokens=5) for _ in range(6)))
            await until(lambda: one.engine.loaded and two.engine.loaded, "both have it")
            assert all(read(answer).whole for answer in answers)
            name = (await hearth.chat(max_tokens=5)).headers["x-hearth-node"]
            first, other = (one, two) if name == "n0" else (two, one)
            first.behave(Behaviour.REFUSE)

            assert read(await hearth.chat(max_tokens=5)).whole
            assert [len(first.engine.loads), len(other.engine.loads)] == [1, 1]
            # One load for its own sake, although all six came at once.
            assert sum(b'"content"' not in each.body for each in (*one.inferences, *two.inferences)) == 1


async def test_a_model_that_a_node_refuses_is_told_in_the_log_when_no_client_asked_that_node() -> None:
    async with FakeOllama(models=["m"]) as one, FakeOllama(models=["m"]) as two:
        async with gateway(one, two) as hearth:
            for node in (one, two):
                node.behave(Behaviour.STATUS_400)

            assert (await hearth.chat()).status_code == 400

            await until(lambda: any(line["event"] == "model not loaded" for line in hearth.lines.all), "it is told")


async def test_a_load_goes_on_for_others_when_the_client_that_caused_it_leaves() -> None:
    async with FakeOllama(models=["m"], load_seconds=1.5) as one, FakeOllama(models=["m"], load_seconds=1.5) as two:
        async with gateway(local_nodes=node_settings(one, two, **UNTRIED)) as hearth:
            began = time.monotonic()
            async with RawClient(hearth.url) as first:
                await first.ask()
                await until(lambda: one.open + two.open == 1, "the first one's load is under way")
                second = asyncio.create_task(hearth.chat(max_tokens=5))
                await asyncio.sleep(1.0)
            asked = len(one.inferences) + len(two.inferences)

            answer = await second

            assert asked == 1
            assert read(answer).whole
            assert time.monotonic() - began < 2.3  # a load that began anew would end at 2.5
            assert _loads(one, two) == 1
            await until(lambda: hearth_idle(hearth), "all is settled")


async def hearth_idle(hearth: Any) -> bool:
    return bool(await hearth.in_flight() == 0)


async def test_a_load_that_nobody_else_waits_for_ends_with_its_client() -> None:
    async with FakeOllama(models=["m"], load_seconds=30) as one, FakeOllama(models=["m"], load_seconds=30) as two:
        async with gateway(local_nodes=node_settings(one, two, **UNTRIED)) as hearth:
            async with RawClient(hearth.url) as client:
                await client.ask()
                await until(lambda: one.open + two.open == 1, "the load is under way")

            await until(lambda: one.open + two.open == 0, "the node is free")
            await until(lambda: hearth_idle(hearth), "the place is free")


async def test_a_node_that_falls_free_takes_work_at_once() -> None:
    async with FakeVLLM(models=["m"], tokens=40, token_seconds=0.02) as node:
        async with gateway(local_nodes=node_settings(node, max_concurrency=1)) as hearth:
            first, second = await asyncio.gather(hearth.chat(stream=True), hearth.chat(stream=True))

            assert read(first).whole
            assert read(second).whole
            ended, begun = node.inferences[0].ended_at, node.inferences[1].at
            assert ended is not None
            assert begun - ended < 0.5


async def test_a_node_that_comes_back_takes_those_who_wait() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as busy, FakeVLLM(models=["m"]) as back:
        back.behave(Behaviour.REFUSE)
        async with gateway(local_nodes=node_settings(busy, back, max_concurrency=1)) as hearth:
            await hearth.state("n1", "down")
            stuck = asyncio.create_task(hearth.chat(max_tokens=5))
            await until(lambda: busy.open == 1, "one node is busy")
            waiting = asyncio.create_task(hearth.chat(max_tokens=5))
            await asyncio.sleep(0.1)
            assert not back.inferences

            back.recover()
            answer = await waiting

            assert read(answer).whole
            stuck.cancel()
            await asyncio.gather(stuck, return_exceptions=True)


async def test_a_prompt_goes_to_the_node_that_has_read_its_beginning() -> None:
    async with FakeVLLM(models=["m"]) as one, FakeVLLM(models=["m"]) as two:
        async with gateway(one, two) as hearth:
            talk = [{"role": "system", "content": "Be brief. " * 4000}]
            for turn in range(6):
                talk.append({"role": "user", "content": f"question {turn}"})
                answer = await hearth.chat(messages=talk)
                talk.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})

            assert sorted((len(one.inferences), len(two.inferences))) == [0, 6]


async def _spilled(after: float | None, hold: float, **more: Any) -> tuple[str, int]:
    """The tier that served a request while the only local node was busy for so long, and what the cloud was asked."""
    async with FakeVLLM(models=["m"], tokens=2, first_seconds=hold) as node, FakeCloud(models=["gpt-4o-mini"]) as cloud:
        target = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
        settings = {"spill_after_ms": after} if after is not None else {}
        async with gateway(
            local_nodes=node_settings(node, max_concurrency=1), cloud_providers=json.dumps([target]), **settings
        ) as hearth:
            first = asyncio.create_task(hearth.chat(max_tokens=5))
            await until(lambda: node.open == 1, "the node is busy")
            answer = await hearth.chat(**more)
            await first
            return answer.headers["x-hearth-tier"], len(cloud.inferences)


async def test_a_request_that_would_wait_too_long_goes_to_the_cloud() -> None:
    assert await _spilled(100, 1.0) == ("cloud", 1)


async def test_without_a_limit_it_waits() -> None:
    assert await _spilled(None, 0.5) == ("local", 0)


async def test_a_request_that_must_stay_local_waits_however_long_it_takes() -> None:
    assert await _spilled(100, 0.5, headers={"X-Hearth-Local-Only": "true"}) == ("local", 0)
