"""What operators say of single nodes: how often they are asked again, and whether they are probed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.declarations import local_node
from tests.fakes import Behaviour, FakeCloud, FakeOllama, FakeVLLM, On
from tests.system.harness import Gateway, gateway, until
from tests.system.reading import read
from tests.system.scripted import DONE, RawClient, ScriptedNode, chunk, local_nodes, says, whole

STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
KEY = "sk-cloud-key-for-tests-0001"
QUIET = {"lb_strategy": "least_connections", "health_check_interval": 60}


def _nodes(first: FakeVLLM, second: FakeVLLM, **more: Any) -> str:
    """Both nodes, the first one preferred and with these settings."""
    return json.dumps(
        [
            {"url": first.url, "kind": "vllm", "name": "n0", "models": ["m"], "weight": 100, **more},
            {"url": second.url, "kind": "vllm", "name": "n1", "models": ["m"]},
        ]
    )


def _asked(hearth: Gateway) -> list[str]:
    return [attempt["node"] for attempt in hearth.lines.requests()[-1]["attempts"]]


# -- retries


@STREAM_AND_DOCUMENT
async def test_a_node_with_retries_is_asked_again_before_the_next_one(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        settings = {**QUIET, "lb_strategy": "round_robin"}
        async with gateway(local_nodes=_nodes(first, second, retries=2), **settings) as hearth:
            first.behave(Behaviour.CLOSE_AT_ONCE, times=2)

            answer = await hearth.chat(stream=stream)

            assert read(answer).whole
            assert answer.headers["x-hearth-node"] == "n0"
            assert answer.headers["x-hearth-attempts"] == "3"
            assert "x-hearth-fallback" not in answer.headers
            assert not second.inferences
            assert await hearth.in_flight() == 0


@STREAM_AND_DOCUMENT
async def test_a_node_is_asked_again_only_as_often_as_its_retries_say(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        async with gateway(local_nodes=_nodes(first, second, retries=1), breaker_fail_max=9, **QUIET) as hearth:
            first.behave(Behaviour.REFUSE)

            answer = await hearth.chat(stream=stream)

            assert read(answer).whole
            assert answer.headers["x-hearth-fallback"] == "connect_error"
            assert _asked(hearth) == ["n0", "n0", "n1"]


@pytest.mark.parametrize(
    ("behaviour", "asked"),
    [(Behaviour.STATUS_500, 1), (Behaviour.STATUS_503, 1), (Behaviour.EMPTY, 1), (Behaviour.CLOSE_AT_ONCE, 3)],
)
async def test_only_a_request_that_was_not_heard_is_repeated(behaviour: Behaviour, asked: int) -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        async with gateway(local_nodes=_nodes(first, second, retries=2), breaker_fail_max=9, **QUIET) as hearth:
            first.behave(behaviour)

            assert read(await hearth.chat()).whole
            assert len(first.inferences) == asked


async def test_a_node_without_retries_is_asked_once() -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        async with gateway(local_nodes=_nodes(first, second), **QUIET) as hearth:
            first.behave(Behaviour.CLOSE_AT_ONCE)

            assert read(await hearth.chat()).whole
            assert _asked(hearth) == ["n0", "n1"]


async def test_the_breaker_ends_retries() -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        async with gateway(local_nodes=_nodes(first, second, retries=3), breaker_fail_max=2, **QUIET) as hearth:
            first.behave(Behaviour.CLOSE_AT_ONCE)

            assert read(await hearth.chat()).whole
            assert _asked(hearth) == ["n0", "n0", "n1"]
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "open"


async def test_retries_count_as_attempts() -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        settings = {"max_attempts": 2, "breaker_fail_max": 9, **QUIET}
        async with gateway(local_nodes=_nodes(first, second, retries=5), **settings) as hearth:
            first.behave(Behaviour.CLOSE_AT_ONCE)

            answer = await hearth.chat()

            assert answer.status_code == 502
            assert _asked(hearth) == ["n0", "n0"]
            assert not second.inferences


# -- health_check


@STREAM_AND_DOCUMENT
async def test_a_node_that_may_not_be_probed_is_up_from_the_start(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as node:
        spec = {"url": node.url, "kind": "vllm", "name": "n0", "models": ["m"], "health_check": False}
        async with gateway(local_nodes=json.dumps([spec]), health_check_interval=0.05) as hearth:
            answer = read(await hearth.chat(stream=stream))

            assert answer.whole
            assert [request.method for request in node.requests] == ["POST"]
            told = (await hearth.nodes())["n0"]
            assert (told["state"], told["reason"]) == ("healthy", "not probed, as its health_check is off")
            assert (await hearth.client.get("/ready")).status_code == 200


async def test_only_failures_speak_against_a_node_that_is_not_probed() -> None:
    async with FakeVLLM(models=["m"]) as first, FakeVLLM(models=["m"]) as second:
        nodes = _nodes(first, second, health_check=False)
        async with gateway(local_nodes=nodes, breaker_fail_max=1, **QUIET) as hearth:
            first.behave(Behaviour.REFUSE)

            answers = [await hearth.chat() for _ in range(3)]

            assert [answer.headers["x-hearth-attempts"] for answer in answers] == ["2", "1", "1"]
            told = (await hearth.nodes())["n0"]
            assert (told["state"], told["breaker"]["state"]) == ("healthy", "open")


@pytest.mark.parametrize("entry", [{"kind": "vllm"}, {"models": ["m"]}, {}])
def test_a_node_that_nobody_asks_must_be_described(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="health_check false needs kind and models"):
        local_node({"url": "http://gpu:8000", "health_check": False, **entry})


def _cloud(cloud: FakeCloud, **more: Any) -> dict[str, Any]:
    entry = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini", **more}
    return {"cloud_providers": json.dumps([entry]), "local_nodes": "[]"}


@pytest.mark.parametrize("behaviour", [Behaviour.STATUS_404, Behaviour.STATUS_429])
async def test_a_cloud_that_lists_no_models_is_up(behaviour: Behaviour) -> None:
    async with FakeCloud() as cloud:
        cloud.behave(behaviour, on=On.PROBES)
        async with gateway(**_cloud(cloud)) as hearth:
            await hearth.state("c0", "healthy")

            assert (await hearth.chat("gpt-4o-mini")).status_code == 200


async def test_a_cloud_that_refuses_the_key_for_its_list_is_down_unless_it_is_not_probed() -> None:
    async with FakeCloud() as cloud:
        cloud.behave(Behaviour.STATUS_401, on=On.PROBES)
        async with gateway(**_cloud(cloud)) as probing, gateway(**_cloud(cloud, health_check=False)) as trusting:
            await probing.state("c0", "down")

            assert "set its health_check to false" in (await probing.nodes())["c0"]["reason"]
            assert (await probing.chat("gpt-4o-mini")).status_code == 503
            assert (await trusting.chat("gpt-4o-mini")).status_code == 200


# -- warnings about settings


def _warnings(hearth: Gateway, word: str) -> list[dict[str, Any]]:
    return [line for line in hearth.lines.all if line["level"] == "warning" and word in line["event"]]


async def test_a_model_that_a_node_lists_and_does_not_have_is_warned_of_once() -> None:
    async with FakeVLLM(models=["m", "other"]) as node, FakeVLLM(models=["m", "other"]) as sibling:
        nodes = json.dumps(
            [
                {"url": node.url, "kind": "vllm", "name": "n0", "weight": 100},
                {"url": sibling.url, "kind": "vllm", "name": "n1"},
            ]
        )
        async with gateway(local_nodes=nodes, **QUIET) as hearth:
            node.behave(Behaviour.STATUS_404)

            answers = [await hearth.chat(model) for model in ("m", "m", "other")]

            assert [answer.headers["x-hearth-node"] for answer in answers] == ["n1"] * 3
            told = [(w["node"], w["model"], w["named_in"]) for w in _warnings(hearth, "does not have the model")]
            assert told == [("n0", "m", "the node's own list"), ("n0", "other", "the node's own list")]


async def test_a_cloud_model_of_the_settings_that_does_not_exist_is_warned_of() -> None:
    async with FakeCloud() as cloud:
        route = json.dumps({"mine": {"cloud": "gpt-4o-mni"}})
        async with gateway(**_cloud(cloud), model_map=route) as hearth:
            cloud.behave(Behaviour.STATUS_404)

            answers = [await hearth.chat(model) for model in ("mine", "gpt-4o-mini", "nonsense")]

            assert {answer.status_code for answer in answers} == {404}
            told = [(w["model"], w["named_in"]) for w in _warnings(hearth, "does not have the model")]
            assert told == [("gpt-4o-mni", "MODEL_MAP"), ("gpt-4o-mini", "the cloud target's model")]


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("where", ["node", "route"])
async def test_a_prompt_that_fills_the_context_is_warned_of_once(where: str, stream: bool) -> None:
    async with FakeOllama(models=["m"]) as node:
        spec = {"url": node.url, "kind": "ollama", "name": "n0", **({"num_ctx": 300} if where == "node" else {})}
        route = {"m": {"local": "m", "num_ctx": 300}} if where == "route" else {}
        async with gateway(local_nodes=json.dumps([spec]), model_map=json.dumps(route)) as hearth:
            for words in (290, 400, 400):
                message = {"role": "user", "content": "word " * words}
                assert (await hearth.chat(stream=stream, messages=[message])).status_code == 200
            await until(lambda: len(hearth.lines.requests()) == 3, "all are logged")

            lines = hearth.lines.requests()
            assert [line.get("context_filled") for line in lines] == [None, 300, 300]
            warnings = _warnings(hearth, "filled the whole context")
            assert [(w["node"], w["model"], w["context"]) for w in warnings] == [("n0", "m:latest", 300)]
            assert "raise num_ctx" in warnings[0]["event"]


# -- what else the log tells


async def test_events_that_could_not_be_read_are_counted_in_the_log() -> None:
    broken = b'data: {"choices":[{"finish_reason":"st\n\n'
    pieces = (chunk("a"), broken, chunk("b"), broken, chunk(finish="stop"), DONE)
    async with ScriptedNode(says(*pieces)) as odd, ScriptedNode(says(whole("ab"))) as sound:
        async with gateway(local_nodes=local_nodes(odd)) as first, gateway(local_nodes=local_nodes(sound)) as second:
            for hearth in (first, second):
                assert (await hearth.chat(stream=True)).status_code == 200
                await until(hearth.lines.requests, "it is logged")

            assert first.lines.requests()[0]["dropped_events"] == 2
            assert "dropped_events" not in second.lines.requests()[0]


@STREAM_AND_DOCUMENT
async def test_a_request_that_hearth_cuts_at_its_end_is_not_said_to_be_left_by_its_client(stream: bool) -> None:
    async with FakeVLLM(models=["m"], tokens=1000, token_seconds=0.05) as node:
        async with gateway(node) as hearth:
            client = RawClient(hearth.url)
            await client.ask(stream=stream)
            await node.until(lambda n: n.open == 1)
        client.leave()

        line = hearth.lines.requests()[0]
        assert (line["outcome"], line["code"]) == ("failed", "shutting_down")
        assert [attempt["outcome"] for attempt in line["attempts"]] == ["abandoned"]
        await node.until(lambda n: n.open == 0)
