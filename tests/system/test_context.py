"""Prompts that are too long for some nodes' context, and not for others'."""

from __future__ import annotations

import json
from typing import Any

import pytest

from demo.httpd import Exchange, deliver, json_answer
from tests.fakes import Behaviour, FakeCloud, FakeOllama
from tests.system.harness import gateway
from tests.system.reading import read
from tests.system.scripted import ScriptedNode

STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
KEY = "sk-cloud-key-for-tests-0001"
LONG = [{"role": "user", "content": "word " * 2000}]  # 10,000 characters: 1,250 tokens at least
PICTURE = "data:image/png;base64," + "iVBORw0KGgo" * 2000


async def _too_long(exchange: Exchange) -> None:
    error = {"code": 400, "message": "request exceeds the available context size", "type": "exceed_context_size_error"}
    await deliver(exchange, json_answer({"error": error}, 400))


def _nodes(*nodes: tuple[Any, dict[str, Any]]) -> dict[str, Any]:
    """Settings for these Ollama nodes, of which earlier ones are preferred."""
    specs = [
        {"url": node.url, "kind": "ollama", "name": f"n{place}", "weight": 100.0 ** (len(nodes) - place), **more}
        for place, (node, more) in enumerate(nodes)
    ]
    return {
        "local_nodes": json.dumps(specs),
        "lb_strategy": "least_connections",
        "health_check_interval": 60,
        "breaker_fail_max": 1,
    }


# -- when a node says so


@STREAM_AND_DOCUMENT
async def test_a_prompt_too_long_for_one_node_goes_to_one_with_a_larger_context(stream: bool) -> None:
    async with ScriptedNode(_too_long) as small, FakeOllama(models=["m"]) as large:
        async with gateway(**_nodes((small, {"num_ctx": 300}), (large, {}))) as hearth:
            answer = await hearth.chat(stream=stream)

            assert read(answer).whole
            assert answer.headers["x-hearth-node"] == "n1"
            assert answer.headers["x-hearth-attempts"] == "2"
            assert answer.headers["x-hearth-fallback"] == "context_length_exceeded"
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"


@STREAM_AND_DOCUMENT
async def test_a_prompt_too_long_for_one_node_is_not_tried_on_smaller_ones(stream: bool) -> None:
    async with ScriptedNode(_too_long) as first, FakeOllama(models=["m"]) as second, FakeCloud() as cloud:
        settings = _nodes((first, {"num_ctx": 300}), (second, {"num_ctx": 300}))
        entry = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
        async with gateway(**settings, cloud_providers=json.dumps([entry])) as hearth:
            answer = await hearth.chat(stream=stream)

            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert answer.json()["error"]["message"] == "request exceeds the available context size"
            assert answer.headers["x-hearth-error-source"] == "node"
            assert not second.inferences
            assert not cloud.inferences
            assert hearth.lines.requests()[0]["outcome"] == "refused"


async def test_the_first_cause_stands_when_larger_nodes_fail_too() -> None:
    async with ScriptedNode(_too_long) as small, FakeOllama(models=["m"]) as large:
        large.behave(Behaviour.STATUS_500)
        async with gateway(**_nodes((small, {"num_ctx": 300}), (large, {}))) as hearth:
            answer = await hearth.chat()

            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert "nodes with a larger context failed (n1: server error" in answer.json()["error"]["message"]


async def test_a_smaller_sibling_does_not_hide_why_the_larger_one_failed() -> None:
    async with FakeOllama(models=["m"]) as large, ScriptedNode(_too_long) as small:
        large.behave(Behaviour.STATUS_500)
        async with gateway(**_nodes((large, {}), (small, {"num_ctx": 300}))) as hearth:
            answer = await hearth.chat()

            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "server_error"
            assert "n0: server error" in answer.json()["error"]["message"]
            assert "n1: context length exceeded" in answer.json()["error"]["message"]


async def test_a_larger_node_that_was_only_busy_is_waited_for() -> None:
    async with FakeOllama(models=["m"]) as large, ScriptedNode(_too_long) as small:
        large.behave(Behaviour.STATUS_503, times=1)
        async with gateway(**_nodes((large, {}), (small, {"num_ctx": 300}))) as hearth:
            answer = await hearth.chat()

            assert answer.status_code == 200
            assert len(large.inferences) == 2
            assert len(small.inferences) == 1


# -- when an estimate says so


@STREAM_AND_DOCUMENT
async def test_a_long_prompt_is_not_given_to_a_small_context_while_there_is_a_larger_one(stream: bool) -> None:
    async with FakeOllama(models=["m"]) as small, FakeOllama(models=["m"]) as large:
        async with gateway(**_nodes((small, {"num_ctx": 512}), (large, {}))) as hearth:
            long = await hearth.chat(stream=stream, messages=LONG)
            short = await hearth.chat(stream=stream)

            assert long.headers["x-hearth-node"] == "n1"
            assert long.headers["x-hearth-attempts"] == "1"
            assert short.headers["x-hearth-node"] == "n0"


async def test_the_route_decides_how_large_the_context_is() -> None:
    async with FakeOllama(models=["m"]) as first, FakeOllama(models=["m"]) as second:
        settings = _nodes((first, {"num_ctx": 512}), (second, {}))
        async with gateway(**settings, model_map='{"m": {"local": "m", "num_ctx": 8192}}') as hearth:
            assert (await hearth.chat(messages=LONG)).headers["x-hearth-node"] == "n0"


@pytest.mark.parametrize("cloud_first", [True, False], ids=["cloud allowed", "local only"])
async def test_a_context_that_is_surely_too_small_comes_after_the_cloud_but_is_asked(cloud_first: bool) -> None:
    """The node counts, and Hearth only estimates: nobody is refused for an estimate."""
    async with FakeOllama(models=["m"]) as small, FakeCloud() as cloud:
        entry = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
        settings = _nodes((small, {"num_ctx": 512}))
        async with gateway(**settings, cloud_providers=json.dumps([entry])) as hearth:
            headers = {} if cloud_first else {"x-hearth-local-only": "true"}

            answer = await hearth.chat(messages=LONG, headers=headers)

            assert answer.status_code == 200
            assert answer.headers["x-hearth-node"] == ("c0" if cloud_first else "n0")


async def test_a_small_context_is_asked_after_all_larger_ones_have_failed() -> None:
    async with FakeOllama(models=["m"]) as small, FakeOllama(models=["m"]) as large:
        large.behave(Behaviour.STATUS_500)
        async with gateway(**_nodes((small, {"num_ctx": 512}), (large, {}))) as hearth:
            answer = await hearth.chat(messages=LONG)

            assert answer.headers["x-hearth-node"] == "n0"
            assert answer.headers["x-hearth-fallback"] == "server_error"


async def test_a_picture_is_no_long_prompt() -> None:
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    async with FakeOllama(models=["m"]) as small, FakeOllama(models=["m"]) as large:
        async with gateway(**_nodes((small, {"num_ctx": 512}), (large, {}))) as hearth:
            answer = await hearth.chat(messages=[{"role": "user", "content": content}])

            assert answer.headers["x-hearth-node"] == "n0"


async def test_many_short_inputs_are_no_long_one() -> None:
    async with FakeOllama(models=["m"]) as small, FakeOllama(models=["m"]) as large:
        async with gateway(**_nodes((small, {"num_ctx": 512}), (large, {}))) as hearth:
            body = {"model": "m", "input": ["word " * 20] * 100}

            answer = await hearth.client.post("/v1/embeddings", json=body)

            assert answer.headers["x-hearth-node"] == "n0"
