"""Fake engines that share generations do what they say, spoken to as the gateway speaks to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from app.domain import Operation, Request
from app.providers.base import Call, Outgoing
from app.providers.disaggregation import disaggregations
from app.providers.disaggregation.base import Disaggregation, Handoff, Migration, NodeRequest, PrefillNode, Side
from tests.fakes import FakeLMDeploy, FakeOpenAI, FakeSGLang, FakeVLLM, Ids, NodeProcess, Role

TABLE = disaggregations(Migration())
LMDEPLOY, VLLM, SGLANG = TABLE["lmdeploy"], TABLE["vllm"], TABLE["sglang"]
Status = tuple[int, str]


def call(operation: Operation = Operation.CHAT, words: str = "hi", **fields: Any) -> Call:
    chat = operation is Operation.CHAT
    given = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    text = orjson.dumps({"model": "model", **given, **fields})
    return Call(Request("r1", operation, "model", text, orjson.loads(text), bool(fields.get("stream"))), "model")


class Gateway:
    """The least that a gateway does between two nodes."""

    def __init__(self, http: aiohttp.ClientSession, pairs: Disaggregation, prefill_url: str, decode_url: str) -> None:
        self.http = http
        self.pairs = pairs
        self.urls = {Side.PREFILL: prefill_url, Side.DECODE: decode_url}

    @property
    def node(self) -> PrefillNode:
        url = self.urls[Side.PREFILL]
        return PrefillNode(url, int(url.rpartition(":")[2]))

    async def ask(self, request: NodeRequest) -> bytes:
        url = self.urls[request.side] + request.path
        async with self.http.request(request.method, url, data=request.body) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def link(self) -> None:
        steps = self.pairs.link_steps(self.urls[Side.PREFILL], self.urls[Side.DECODE])
        assert steps is not None
        batch = next(steps)
        while True:
            replies = await asyncio.gather(*map(self.ask, batch))
            try:
                batch = steps.send(replies)
            except StopIteration:
                return

    async def send(self, side: Side, outgoing: Outgoing) -> Status:
        async with self.http.post(self.urls[side] + outgoing.path, data=outgoing.body) as response:
            return response.status, await response.text()

    async def prefill(self, asked: Call) -> Handoff:
        status, text = await self.send(Side.PREFILL, self.pairs.prefill(asked, self.node).outgoing)
        assert status == 200, text
        return self.pairs.parse_prefill(asked, self.node, text.encode())

    async def decode(self, asked: Call, handoff: Handoff | None) -> Status:
        return await self.send(Side.DECODE, self.pairs.decode(asked, handoff))

    async def generate(self, asked: Call) -> Status:
        return await self.decode(asked, await self.prefill(asked))

    async def at_once(self, asked: Call) -> tuple[Status, Status]:
        outgoing, handoff = self.pairs.prefill(asked, self.node)
        decoding = self.pairs.decode(asked, handoff)
        return await asyncio.gather(self.send(Side.PREFILL, outgoing), self.send(Side.DECODE, decoding))


@asynccontextmanager
async def between(pairs: Disaggregation, prefill: FakeOpenAI, decode: FakeOpenAI) -> AsyncIterator[Gateway]:
    # A restart resets idle connections, on which a client would fail once before it connects again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http, prefill, decode:
        yield Gateway(http, pairs, prefill.url, decode.url)


def said(answer: Status) -> str:
    status, text = answer
    assert status == 200, text
    choice = json.loads(text)["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


# -- LMDeploy


def lmdeploys(**options: Any) -> tuple[FakeLMDeploy, FakeLMDeploy]:
    prefill = FakeLMDeploy(role=Role.PREFILL, text="p0 p1 p2", **options)
    return prefill, FakeLMDeploy(role=Role.DECODE, text="d0 d1 d2")


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
async def test_decode_goes_on_from_the_prefill_engines_token_and_frees_it(operation: Operation, stream: bool) -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        handoff = await gateway.prefill(call(operation))
        held = list(prefill.engine.sessions)
        status, text = await gateway.decode(call(operation, stream=stream), handoff)

    assert status == 200
    assert held == [handoff.session] == [17]
    assert prefill.engine.sessions == {}
    assert prefill.engine.leaked() == []
    if stream:
        assert [word in text for word in ("p0", "d0", " d1", " d2")] == [True, False, True, True]
    else:
        assert said((status, text)) == "p0 d1 d2"


async def test_links_are_counted() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        await gateway.link()

    assert [(node.engine.initialized, node.engine.connected) for node in (prefill, decode)] == [(2, 2), (2, 2)]
    assert prefill.inferences == decode.inferences == []


@pytest.mark.parametrize(
    ("ids", "names_session", "chat", "completion"),
    [
        (Ids.SESSION, False, 17, 18),
        (Ids.ASKED, False, None, None),
        (Ids.RANDOM, False, None, None),
        (Ids.RANDOM, True, 17, 18),
    ],
)
async def test_every_versions_ids_and_what_they_leak(
    ids: Ids, names_session: bool, chat: int | None, completion: int | None
) -> None:
    prefill, decode = lmdeploys(ids=ids, names_session=names_session)
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        handoffs = [await gateway.prefill(call(operation)) for operation in (Operation.CHAT, Operation.COMPLETION)]
        answers = [await gateway.decode(call(), handoffs[0]), await gateway.decode(call(), handoffs[1])]

    assert [handoff.session for handoff in handoffs] == [chat, completion]
    assert list(map(said, answers)) == ["p0 d1 d2", "p0 d1 d2"]
    assert prefill.engine.leaked() == ([] if chat else [17, 18])


async def test_free_cache_frees_what_was_abandoned_and_always_says_success() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        free = LMDEPLOY.abandon(await gateway.prefill(call()))
        assert free is not None
        replies = [await gateway.ask(free), await gateway.ask(free)]

    assert replies == [b'{"status":"SUCCESS"}'] * 2
    assert prefill.engine.freed == [17, 17]
    assert prefill.engine.sessions == {}


async def test_engine_that_prefills_says_one_token_whatever_is_asked() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        answer = await gateway.send(Side.PREFILL, LMDEPLOY.decode(call(max_tokens=9), None))

    assert said(answer) == "p0"
    assert prefill.engine.sessions == {}


async def test_engine_that_decodes_serves_ordinary_requests() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        assert said(await gateway.decode(call(), None)) == "d0 d1 d2"


@pytest.mark.parametrize("restarted", [Side.PREFILL, Side.DECODE])
async def test_restart_of_either_engine_breaks_the_link_until_it_is_made_anew(restarted: Side) -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        {Side.PREFILL: prefill, Side.DECODE: decode}[restarted].restart()
        status, text = await gateway.generate(call())
        await gateway.link()
        answer = await gateway.generate(call())

    assert status == 500
    assert "no connection" in text or "not registered" in text
    assert said(answer) == "p0 d1 d2"


async def test_restart_forgets_sessions() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        handoff = await gateway.prefill(call())
        prefill.restart()
        await gateway.link()
        status, text = await gateway.decode(call(), handoff)

    assert (status, prefill.engine.sessions) == (500, {})
    assert "something else" in text


async def test_without_a_link_there_is_no_migration_and_the_session_stays() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        status, _ = await gateway.generate(call())
        after = await gateway.decode(call(), None)

    assert status == 500
    assert list(prefill.engine.sessions) == [17]
    assert prefill.engine.leaked() == []
    assert said(after) == "d0 d1 d2"


async def test_link_that_was_dropped_is_gone() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        handoff = await gateway.prefill(call())
        for batch in LMDEPLOY.drop_steps(prefill.url, decode.url, [17]):
            await asyncio.gather(*map(gateway.ask, batch))
        status, _ = await gateway.decode(call(), handoff)

    assert status == 500
    assert (prefill.engine.dropped, decode.engine.dropped, prefill.engine.freed) == (1, 1, [17])


async def test_wrong_list_of_blocks_ends_the_decode_engines_loop() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        handoff = await gateway.prefill(call(words="word " * 100))
        answers = [await gateway.decode(call(words="short"), handoff), await gateway.decode(call(), None)]
        async with gateway.http.get(decode.url + "/health") as health:
            state = health.status
        decode.restart()
        after = await gateway.decode(call(), None)

    assert [status for status, _ in answers] == [500, 500]
    assert state == 503
    assert said(after) == "d0 d1 d2"


async def test_long_prompts_have_several_blocks() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        handoff = await gateway.prefill(call(words="word " * 150))
        answer = await gateway.decode(call(words="word " * 150), handoff)

    assert b'"remote_block_ids":[412,413,414]' in handoff.member
    assert said(answer) == "p0 d1 d2"


async def test_many_generations_at_once_do_not_mix() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        await gateway.link()
        answers = await asyncio.gather(*(gateway.generate(call()) for _ in range(20)))

    assert {said(answer) for answer in answers} == {"p0 d1 d2"}
    assert prefill.engine.sessions == {}


async def test_dummy_prefill_needs_no_prefill_node() -> None:
    pairs = disaggregations(Migration(dummy_prefill=True))["lmdeploy"]
    prefill, decode = lmdeploys()
    async with between(pairs, prefill, decode) as gateway:
        assert said(await gateway.decode(call(), pairs.skipped)) == "d0 d1 d2"


async def test_handshake_is_checked_by_the_engines() -> None:
    prefill, decode = lmdeploys()
    async with between(LMDEPLOY, prefill, decode) as gateway:
        bodies: list[dict[str, Any]] = [{}, {"local_engine_id": prefill.url, "local_engine_config": {"tp_size": 1}}]
        statuses = []
        for body in bodies:
            async with gateway.http.post(prefill.url + "/distserve/p2p_initialize", json=body) as response:
                statuses.append(response.status)
        async with gateway.http.get(prefill.url + "/distserve/elsewhere") as response:
            statuses.append(response.status)

    assert statuses == [422, 422, 404]


async def test_engine_without_a_role_answers_as_any_other() -> None:
    async with FakeLMDeploy() as node, aiohttp.ClientSession() as http:
        async with http.post(node.url + "/v1/chat/completions", data=call().request.body) as response:
            document = await response.json()

    assert document["id"].startswith("chatcmpl-")
    assert "cache_block_ids" not in document


# -- vLLM


def vllms(**options: Any) -> tuple[FakeVLLM, FakeVLLM]:
    return FakeVLLM(role=Role.PREFILL, text="p0 p1 p2", **options), FakeVLLM(role=Role.DECODE, text="d0 d1 d2")


async def test_vllm_decode_fetches_the_blocks_and_says_its_own_first_token() -> None:
    prefill, decode = vllms()
    async with between(VLLM, prefill, decode) as gateway:
        handoff = await gateway.prefill(call())
        held = len(prefill.engine.sessions)
        answer = await gateway.decode(call(), handoff)
        again, text = await gateway.decode(call(), handoff)

    assert held == 1
    assert said(answer) == "d0 d1 d2"
    assert (prefill.engine.fetched, len(prefill.engine.sessions)) == (1, 0)
    assert again == 500
    assert "no such blocks" in text


async def test_vllm_frees_by_itself_what_nobody_fetches() -> None:
    prefill, decode = vllms(hold_seconds=0.05)
    async with between(VLLM, prefill, decode) as gateway:
        handoff = await gateway.prefill(call())
        await prefill.until(lambda node: not prefill.engine.sessions)
        status, _ = await gateway.decode(call(), handoff)

    assert status == 500


async def test_vllm_that_restarted_knows_no_blocks() -> None:
    prefill, decode = vllms()
    async with between(VLLM, prefill, decode) as gateway:
        handoff = await gateway.prefill(call())
        prefill.restart()
        status, _ = await gateway.decode(call(), handoff)
        after = await gateway.decode(call(), None)

    assert status == 500
    assert said(after) == "d0 d1 d2"


async def test_vllm_that_is_gone_cannot_be_fetched_from() -> None:
    prefill, decode = vllms()
    async with between(VLLM, prefill, decode) as gateway:
        handoff = await gateway.prefill(call())
        prefill.crash()
        status, text = await gateway.decode(call(), handoff)

    assert status == 500
    assert "cannot reach" in text


async def test_vllm_keeps_nothing_when_the_model_stopped_at_once() -> None:
    prefill, decode = vllms()
    prefill.script.text = "p0"
    async with between(VLLM, prefill, decode) as gateway:
        handoff = await gateway.prefill(call())

    assert handoff.finished
    assert prefill.engine.sessions == {}


async def test_vllm_refuses_params_that_lack_something() -> None:
    prefill, decode = vllms()
    async with between(VLLM, prefill, decode) as gateway:
        status, text = await gateway.decode(call(), Handoff("", b'"kv_transfer_params":{"do_remote_prefill":true}'))

    assert status == 500
    assert "remote_host" in text


# -- SGLang


def sglangs(**options: Any) -> tuple[FakeSGLang, FakeSGLang]:
    prefill = FakeSGLang(role=Role.PREFILL, text="p0 p1 p2", **options)
    return prefill, FakeSGLang(role=Role.DECODE, text="d0 d1 d2")


async def test_sglang_engines_meet_in_a_room() -> None:
    prefill, decode = sglangs()
    async with between(SGLANG, prefill, decode) as gateway:
        answers = await asyncio.gather(*(gateway.at_once(call()) for _ in range(10)))

    assert {said(of_prefill) for of_prefill, _ in answers} == {"p0"}
    assert {said(of_decode) for _, of_decode in answers} == {"p0 d1 d2"}
    assert (prefill.engine.met, decode.engine.met, prefill.engine.sessions) == (10, 10, {})


@pytest.mark.parametrize("first", list(Side))
async def test_sglang_engine_that_comes_first_waits_for_the_other(first: Side) -> None:
    prefill, decode = sglangs()
    second = Side.DECODE if first is Side.PREFILL else Side.PREFILL
    async with between(SGLANG, prefill, decode) as gateway:
        outgoing, _ = SGLANG.prefill(call(), gateway.node)
        waiting = asyncio.create_task(gateway.send(first, outgoing))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        statuses = [(await gateway.send(second, outgoing))[0], (await waiting)[0]]

    assert statuses == [200, 200]


async def test_sglang_engine_that_is_left_alone_gives_up() -> None:
    prefill, decode = sglangs(room_seconds=0.05)
    async with between(SGLANG, prefill, decode) as gateway:
        outgoing, _ = SGLANG.prefill(call(), gateway.node)
        statuses = [(await gateway.send(side, outgoing))[0] for side in Side]

    assert statuses == [500, 500]
    assert (prefill.engine.missed, decode.engine.missed, prefill.engine.sessions) == (1, 1, {})


async def test_sglang_prefill_whose_client_left_empties_its_room() -> None:
    prefill, decode = sglangs()
    async with between(SGLANG, prefill, decode) as gateway:
        outgoing, _ = SGLANG.prefill(call(), gateway.node)
        waiting = asyncio.create_task(gateway.send(Side.PREFILL, outgoing))
        await prefill.until(lambda node: prefill.engine.sessions)
        waiting.cancel()
        await prefill.until(lambda node: not prefill.engine.sessions)


@pytest.mark.parametrize("side", list(Side))
async def test_sglang_with_a_role_serves_no_ordinary_request(side: Side) -> None:
    prefill, decode = sglangs()
    async with between(SGLANG, prefill, decode) as gateway:
        status, _ = await gateway.send(side, SGLANG.decode(call(), None))

    assert status == 400


async def test_sglang_batch_meets_in_all_its_rooms_and_tells_its_port() -> None:
    prefill, decode = sglangs()
    async with between(SGLANG, prefill, decode) as gateway:
        batch = await gateway.at_once(call(Operation.COMPLETION, n=3))
        async with gateway.http.get(prefill.url + "/server_info") as response:
            info = await response.json()

    assert said(batch[1]) == "p0 d1 d2"
    assert (info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == ("prefill", prefill.port)


# -- processes


@pytest.mark.parametrize("kind", sorted(TABLE))
async def test_processes_share_generations_as_well(kind: str) -> None:
    async with (
        NodeProcess(kind, role="prefill", text="p0 p1") as prefill,
        NodeProcess(kind, role="decode", text="d0 d1") as decode,
        aiohttp.ClientSession() as http,
    ):
        gateway = Gateway(http, TABLE[kind], prefill.url, decode.url)
        if kind == "lmdeploy":
            await gateway.link()
        if kind == "sglang":
            _, answer = await gateway.at_once(call())
        else:
            answer = await gateway.generate(call())
        async with http.get(prefill.url + "/_fake/state") as response:
            state = await response.json()

    assert said(answer) == ("d0 d1" if kind == "vllm" else "p0 d1")
    assert state["sessions"] == 0
