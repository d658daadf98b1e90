"""Engines that other programs use as well, and what Hearth makes of what they say of that."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from demo.httpd import Answer, json_answer, text_answer
from tests.fakes import FakeLlamaCpp, FakeOpenAI, FakeSGLang, FakeVLLM
from tests.fakes.openai import OpenAI
from tests.system.harness import Gateway, gateway, until, used_by_others
from tests.system.reading import read

QUICK = {"health_check_interval": 0.05}


async def engine(hearth: Gateway, name: str = "n0") -> dict[str, Any]:
    return (await hearth.nodes())[name]["engine"] or {}


def with_pages(node: FakeOpenAI, **pages: Any) -> None:
    """The node answers these paths in another way; None = it does not have them."""
    flavour = node.engine.flavour
    gets = {**flavour.gets, **{f"/{name}": page for name, page in pages.items() if page is not None}}
    gets = {path: page for path, page in gets.items() if pages.get(path[1:], page) is not None}
    node.engine.flavour = dataclasses.replace(flavour, gets=gets)


async def test_a_node_that_others_use_is_avoided() -> None:
    async with FakeLlamaCpp(models=["m"], first_seconds=30) as busy, FakeLlamaCpp(models=["m"]) as idle:
        async with gateway(busy, idle, **QUICK) as hearth:
            await until(lambda: _slots(hearth), "the slots are known")
            async with used_by_others(busy, 4):
                # Hearth looks closely at a node only once it has asked it for something.
                answers = [asyncio.create_task(hearth.chat(max_tokens=5)) for _ in range(4)]
                await until(lambda: idle.inferences, "one has come to the node that is free")
                await until(lambda: _foreign(hearth, 4), "the others are seen")
                later = [await hearth.chat(max_tokens=5) for _ in range(6)]
                for task in answers:
                    task.cancel()
                await asyncio.gather(*answers, return_exceptions=True)

            assert {answer.headers["x-hearth-node"] for answer in later} == {"n1"}


async def _slots(hearth: Gateway) -> bool:
    return [node["engine"] and node["engine"]["slots"] for node in (await hearth.nodes()).values()] == [4, 4]


async def _foreign(hearth: Gateway, count: int) -> bool:
    return (await engine(hearth)).get("foreign") == count


async def test_requests_of_hearth_itself_are_told_from_those_of_others() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node, gateway(node, **QUICK) as hearth:
        async with used_by_others(node, 2):
            own = asyncio.create_task(hearth.chat(max_tokens=5))
            await until(lambda: node.open == 3, "its own is there, too")

            await until(lambda: _running(hearth, 3), "the engine has said so")

            assert await _foreign(hearth, 2)
            own.cancel()
            await asyncio.gather(own, return_exceptions=True)


async def _running(hearth: Gateway, count: int) -> bool:
    return (await engine(hearth)).get("running") == count


async def test_who_waits_for_an_engine_that_others_fill_goes_on_when_they_have_gone() -> None:
    async with FakeSGLang(models=["m"], first_seconds=1.0) as node:
        with_pages(
            node,
            server_info=lambda it: it.json({"max_running_requests": 2}),
            metrics=lambda it: text_answer(f"sglang:num_running_reqs {it.busy()}\nsglang:num_queue_reqs 0\n"),
        )
        async with gateway(node, health_check_interval=0.1) as hearth:
            async with used_by_others(node, 2):
                await until(lambda: _foreign(hearth, 2), "the others are seen")
                waiting = asyncio.create_task(hearth.chat(max_tokens=5))
                await asyncio.sleep(0.2)
                assert len(node.inferences) == 2

            assert read(await waiting).whole


async def test_explain_tells_of_them() -> None:
    async with FakeVLLM(models=["m"], first_seconds=30) as node, gateway(node, **QUICK) as hearth:
        async with used_by_others(node, 2):
            await until(lambda: _foreign(hearth, 2), "the others are seen")

            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            told = (await hearth.client.post("/admin/explain", json=body)).json()["nodes"][0]

            assert told["engine"] == {"running": 2, "waiting": 0, "slots": None, "cache_used": 0.0, "foreign": 2}
            assert "foreign" in [remark["code"] for remark in told["remarks"]]


async def _hang(node: FakeVLLM) -> None:
    """Its metrics never come, as with an engine whose event loop is at work."""
    answer = node.engine.answer

    async def slow(request: Any, *more: Any) -> Answer:
        if request.path == "/metrics":
            await asyncio.sleep(30)
        return await answer(request, *more)

    node.engine.answer = slow  # type: ignore[method-assign, assignment]


async def test_metrics_that_never_come_are_no_reason_to_call_a_node_down() -> None:
    async with FakeVLLM(models=["m"]) as node:
        await _hang(node)
        async with gateway(node, health_check_interval=0.05, health_check_timeout=0.3) as hearth:
            await until(lambda: sum(request.path == "/health" for request in node.requests) >= 5, "it is probed on")

            assert (await hearth.chat()).status_code == 200
            assert (await hearth.nodes())["n0"]["state"] == "healthy"
            assert sum(request.path == "/metrics" for request in node.requests) == 1


def _endless(it: OpenAI) -> Answer:
    return text_answer("vllm:num_requests_running 1\n" + "x" * (5 * 2**20))


@pytest.mark.parametrize(
    "page",
    [None, _endless, lambda it: it.json({"error": "off"}, 501), lambda it: json_answer([1], 200, {})],
    ids=["absent", "endless", "off", "something else"],
)
async def test_a_page_that_says_nothing_is_not_asked_for_each_time(page: Any) -> None:
    async with FakeVLLM(models=["m"]) as node:
        with_pages(node, metrics=page)
        async with gateway(node, **QUICK) as hearth:
            await until(lambda: sum(request.path == "/health" for request in node.requests) >= 6, "it is probed on")

            assert (await hearth.nodes())["n0"]["state"] == "healthy"
            assert await engine(hearth) == {}
            assert sum(request.path == "/metrics" for request in node.requests) == 1
