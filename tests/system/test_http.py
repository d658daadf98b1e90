"""HTTP as it is met in the wild: chunks, kept-alive and pipelined connections, large bodies, many clients at once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from app.routing.attempt import Attempt
from app.routing.plan import Plan
from app.routing.reply import Reply
from app.upstream import NodeResponse
from tests.fakes import KINDS, Behaviour, FakeOllama, FakeVLLM
from tests.system.harness import Gateway, gateway, until
from tests.system.plain_client import JSON, connected, request, send
from tests.system.reading import Answer, read

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOT = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROBED_ONCE: dict[str, Any] = {"health_check_interval": 600, "health_check_timeout": 10}
STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])


class House(NamedTuple):
    """A node that repeats what it is told and the gateway in front of it, which the tests of this file share."""

    node: FakeVLLM
    hearth: Gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    async with FakeVLLM(models=["m"], echo="{}") as node, gateway(node, **PROBED_ONCE) as hearth:
        await hearth.state("n0", "healthy")
        yield House(node, hearth)


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": text}], **fields}


# -- requests


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_body_in_chunks_reaches_the_node_as_one(house: House, size: int) -> None:
    body = b'{ "model": "m",\n "messages": [{"role": "user", "content": "h\xc3\xa4ufig \\u00fc"}],  "x": 1.0 }'
    answer = await send(house.hearth.url, request(body, chunks=size))

    assert answer.json["choices"][0]["message"]["content"] == "häufig ü"
    assert house.node.inferences[-1].body == body
    assert house.node.inferences[-1].headers["content-length"] == str(len(body))


async def test_a_client_that_waits_for_a_go_ahead_gets_it(house: House) -> None:
    data = request(saying("hi"), headers={**JSON, "expect": "100-continue"})
    head, _, body = data.partition(b"\r\n\r\n")
    async with connected(house.hearth.url) as client:
        assert (await client.ask(head + b"\r\n\r\n")).status == 100
        assert (await client.ask(body)).status == 200

        assert "expect" not in house.node.inferences[-1].headers


async def test_a_client_that_would_be_refused_gets_no_go_ahead(house: House) -> None:
    head = request(b"", headers={**JSON, "expect": "100-continue"})
    async with connected(house.hearth.url) as client:
        answer = await client.ask(head.replace(b"content-length: 0", b"content-length: 999999999"))

        assert answer.status == 413


@pytest.mark.parametrize("path", HOT)
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "GET"])
async def test_hot_routes_take_nothing_but_post(house: House, method: str, path: str) -> None:
    for prefix in ("", "/v1"):
        answer = await send(house.hearth.url, request(method=method, path=prefix + path.removeprefix("/v1")), method)

        assert answer.status == 405
        assert answer.header("allow") == "POST"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "//v1/chat/completions"])
async def test_a_chat_is_served_with_and_without_v1_and_with_slashes_too_many(house: House, path: str) -> None:
    answer = await send(house.hearth.url, request(saying("hi"), path))
    doubled = await send(house.hearth.url, request(saying("hi"), path.replace("/", "//") + "?api-version=1"))

    assert answer.json["choices"][0]["message"]["content"] == "hi"
    assert doubled.json["choices"][0]["message"]["content"] == "hi"
    assert house.node.inferences[-1].path == "/v1/chat/completions"
    assert house.node.inferences[-1].query == ""


async def test_slashes_too_many_do_not_hide_the_other_routes(house: House) -> None:
    listed = await send(house.hearth.url, request(path="//v1//models", method="GET"), "GET")
    shown = await send(house.hearth.url, request(path="/v1//models/m", method="GET"), "GET")

    assert [model["id"] for model in listed.json["data"]] == ["m"]
    assert shown.json["id"] == "m"


@pytest.mark.parametrize(
    "path", [*(path + "/" for path in HOT), "/v1//", "//evil.example/v1/models", "/v1/models/", "/admin/nodes/"]
)
@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_nothing_is_redirected(house: House, method: str, path: str) -> None:
    answer = await send(house.hearth.url, request(saying("hi"), path, method), method)

    assert answer.status in (200, 404, 405)
    assert answer.header("location") is None


# -- connections


async def test_pipelined_requests_are_answered_in_their_order(house: House) -> None:
    texts = [f"number {number}" for number in range(10)]
    async with connected(house.hearth.url) as client:
        client.write(b"".join(request(saying(text, stream=index % 2 == 1)) for index, text in enumerate(texts)))
        answers = [await client.answer() for _ in texts]

        for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            assert answer.status == 200
            if index % 2:
                assert answer.body.endswith(b"data: [DONE]\n\n")
                assert json.dumps(text.split()[1]).encode()[1:-1] in answer.body
            else:
                assert answer.json["choices"][0]["message"]["content"] == text


async def test_a_connection_is_used_again_whatever_came_before(house: House) -> None:
    good, bad = request(saying("hi")), request(b"{")
    async with connected(house.hearth.url) as client:
        rounds = (good, bad, request(saying("hi", stream=True)), request(method="GET"), request(path="/nothing"))
        statuses = [(await client.ask(data)).status for data in rounds * 5]

        assert statuses == [200, 400, 200, 405, 404] * 5


@STREAM_AND_DOCUMENT
async def test_a_client_that_wants_its_connection_closed_gets_it_closed(house: House, stream: bool) -> None:
    async with connected(house.hearth.url) as client:
        answer = await client.ask(request(saying("hi", stream=stream), headers={**JSON, "connection": "close"}))

        assert answer.status == 200
        assert await client.closed()


async def test_an_old_client_is_served_and_its_connection_closed(house: House) -> None:
    async with connected(house.hearth.url) as client:
        answer = await client.ask(request(saying("hi")).replace(b" HTTP/1.1", b" HTTP/1.0", 1))

        assert answer.status == 200
        assert answer.header("transfer-encoding") is None
        assert await client.closed()


@STREAM_AND_DOCUMENT
async def test_an_answer_has_one_framing(house: House, stream: bool) -> None:
    answer = await send(house.hearth.url, request(saying("hi", stream=stream)))

    assert answer.header("content-length") == (None if stream else str(len(answer.body)))
    assert answer.header("transfer-encoding") == ("chunked" if stream else None)
    assert answer.header("content-type") == ("text/event-stream" if stream else "application/json")
    assert answer.header("cache-control") == ("no-cache" if stream else None)


# -- to the node


async def in_turn(hearth: Gateway, count: int, *, stream: bool) -> list[Answer]:
    """So many chats, of which each is begun when the one before it has ended."""
    async with connected(hearth.url) as client:
        client.write(request(saying("hi", stream=stream)) * count)
        answers = [await client.answer() for _ in range(count)]
    return [read(httpx.Response(answer.status, headers=answer.headers, content=answer.body)) for answer in answers]


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("kind", ["ollama", "vllm"])
async def test_connections_to_a_node_are_used_again(kind: str, stream: bool) -> None:
    async with KINDS[kind](models=["m"], tokens=3) as node, gateway(node, **PROBED_ONCE) as hearth:
        probing = node.connections

        answers = await in_turn(hearth, 100, stream=stream)

        assert all(answer.whole for answer in answers)
        assert node.connections - probing <= 2
        assert len(node.inferences) == 100


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("kind", ["ollama", "vllm"])
async def test_a_connection_that_the_node_closed_meanwhile_fails_no_request(kind: str, stream: bool) -> None:
    async with KINDS[kind](models=["m"], tokens=3) as node, gateway(node, breaker_fail_max=1, **PROBED_ONCE) as hearth:
        node.behave(Behaviour.CLOSE_AFTER_ANSWER)

        answers = await in_turn(hearth, 100, stream=stream)

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-attempts"] for answer in answers} == {"1"}
        assert len(node.inferences) == 100


async def test_fifty_megabytes_pass_through_byte_for_byte() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, **PROBED_ONCE) as hearth:
        filler = b"\\u00fc \\/ 1e3 \xf0\x9f\x98\x80 " * 2_800_000
        body = b'{"n":1 ,  "messages":\t[{"role":"user","content":"' + filler + b'"}],"seed":1.50,"model":"m"}\n'
        assert len(body) > 50 * 2**20

        answer = await send(hearth.url, request(body))

        assert answer.status == 200
        assert node.inferences[0].body == body


# -- many at once


async def test_two_hundred_clients_at_once_each_get_their_own_answer() -> None:
    async with (
        FakeOllama(models=["m"], echo="{}", token_seconds=0.002) as one,
        FakeVLLM(models=["m"], echo="{}") as two,
    ):
        async with gateway(one, two, lb_strategy="least_connections", **PROBED_ONCE) as hearth:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=hearth.url, limits=limits, timeout=30) as client:

                async def ask(number: int) -> str:
                    text = f"I am number {number} of many"
                    answer = read(await client.post(HOT[0], json=saying(text, stream=number % 2 == 0)))
                    assert answer.whole
                    assert answer.text == text
                    return answer.headers["x-request-id"]

                ids = await asyncio.gather(*(ask(number) for number in range(200)))

            assert len(set(ids)) == 200
            assert len(one.inferences) + len(two.inferences) == 200
            assert one.inferences
            assert two.inferences
            assert one.open == two.open == 0
            assert await hearth.in_flight() == 0


async def test_nothing_is_left_of_requests_that_are_over() -> None:
    async with FakeOllama(models=["m"], tokens=50, token_seconds=0.001) as node, gateway(node) as hearth:
        await hearth.chat()
        tasks = len(asyncio.all_tasks())

        for stream in (True, False):
            await asyncio.gather(*(hearth.chat(stream=stream) for _ in range(20)))
        node.behave(Behaviour.CLOSE_MIDWAY)
        await asyncio.gather(*(hearth.chat(stream=True) for _ in range(20)))
        for _ in range(5):
            async with connected(hearth.url) as client:
                client.write(request(saying("hi", stream=True)))
                await client.flushed()
        await until(lambda: node.open == 0, "the node is idle")

        await until(lambda: len(asyncio.all_tasks()) <= tasks, "no task is left")
        assert await hearth.in_flight() == 0
        gc.collect()
        assert not [thing for thing in gc.get_objects() if isinstance(thing, Attempt | Plan | Reply | NodeResponse)]
