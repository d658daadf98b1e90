"""Generations that a prefill and a decode node share, in LMDeploy's, vLLM's and SGLang's way, through the gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import pytest

from tests.fakes import Behaviour, FakeCloud, FakeLMDeploy, FakeOpenAI, FakeSGLang, FakeVLLM, Ids, On, Role
from tests.system.harness import Gateway, gateway, until
from tests.system.reading import Answer, read
from tests.system.registration import DELETED, added, in_state

AnyNode = TypeVar("AnyNode", bound=FakeOpenAI)
MAKES: Mapping[str, Callable[..., Any]] = {"lmdeploy": FakeLMDeploy, "vllm": FakeVLLM, "sglang": FakeSGLang}
TEXT = "t0 t1 t2 t3 t4 t5 t6 t7 "
KEY = "sk-cloud-key-for-tests-0001"
INITIALIZE, CONNECT, INFO = "/distserve/p2p_initialize", "/distserve/p2p_connect", "/distserve/engine_info"
DROP, FREE = "/distserve/p2p_drop_connect", "/distserve/free_cache"
PRIVATE: Mapping[str, Any] = {
    "migration_request": {"remote_engine_id": "http://127.0.0.1:9", "remote_session_id": 18},
    "with_cache": True,
    "preserve_cache": True,
    "kv_transfer_params": {"do_remote_prefill": True},
    "bootstrap_host": "10.0.0.9",
    "bootstrap_port": 9,
    "bootstrap_room": 1,
}

STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
EVERY_KIND = pytest.mark.parametrize("kind", list(MAKES))
ONE_BY_ONE = pytest.mark.parametrize("kind", ["lmdeploy", "vllm"])


@dataclass
class Farm:
    """Nodes by their part, and a gateway in front of them that knows them as p0, p1, d0, h0 and so on."""

    hearth: Gateway
    prefill: list[Any] = field(default_factory=list)
    decode: list[Any] = field(default_factory=list)
    hybrid: list[Any] = field(default_factory=list)
    cloud: FakeCloud | None = None

    async def chat(self, stream: bool = False, **fields: Any) -> Answer:
        return read(await self.hearth.chat(stream=stream, **fields))

    async def nothing_left(self) -> None:
        """Returns once the gateway and the prefill nodes are as before the first request."""
        await until(lambda: not any(node.engine.sessions for node in self.prefill), "no session is held")
        await self.idle()

    async def idle(self) -> None:
        async def no_request() -> bool:
            return await self.hearth.in_flight() == 0

        await until(no_request, "nothing is in flight")
        await until(lambda: not _work(), "no task is left over")


def _work() -> list[str]:
    names = {"link", "linking", "chore", "prefill", "decode"}
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name() in names]


@asynccontextmanager
async def farm(
    kind: str,
    prefill: int = 1,
    decode: int = 1,
    hybrid: int = 0,
    cloud: bool = False,
    prefill_spec: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Farm]:
    """A gateway that probes rarely, so that requests alone find out what happens to these nodes."""
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.HYBRID: hybrid}
    async with AsyncExitStack() as stack:
        nodes: dict[Role, list[Any]] = {role: [] for role in counts}
        specs = []
        for role, count in counts.items():
            for number in range(count):
                node = await stack.enter_async_context(MAKES[kind](models=["m"], role=role))
                nodes[role].append(node)
                name = f"{role[0]}{number}"
                more = prefill_spec if role is Role.PREFILL else None
                specs.append({"url": node.url, "kind": kind, "name": name, "role": role, **(more or {})})
        paid = await stack.enter_async_context(FakeCloud()) if cloud else None
        if paid:
            target = {"name": "c0", "endpoint": paid.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
            settings["cloud_providers"] = json.dumps([target])
        # The one probe of each node must not fail on a slow machine.
        settings = {"health_check_interval": 60, "health_check_timeout": 10, **settings}
        settings.setdefault("serving_strategy", "DistServe")
        hearth = await stack.enter_async_context(gateway(local_nodes=json.dumps(specs), **settings))
        for each in specs:
            await in_state(hearth.client, each["url"], "healthy")
        yield Farm(hearth, nodes[Role.PREFILL], nodes[Role.DECODE], nodes[Role.HYBRID], paid)


def calls(node: FakeOpenAI, path: str) -> list[Any]:
    """The bodies of all calls of that path."""
    return [request.json if request.body else None for request in node.requests if request.path == path]


def bodies(node: FakeOpenAI) -> list[dict[str, Any]]:
    return [request.json for request in node.inferences]


async def fifty(ask: Callable[[int], Any]) -> list[Any]:
    return list(await asyncio.gather(*(ask(number) for number in range(50))))


# -- all kinds: the way of a request


@EVERY_KIND
@STREAM_AND_DOCUMENT
async def test_the_two_nodes_share_the_generation_and_the_decode_node_answers(kind: str, stream: bool) -> None:
    async with farm(kind) as nodes:
        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.text == TEXT
        assert answer.headers["x-hearth-node"] == "d0"
        assert answer.headers["x-hearth-attempts"] == "1"
        assert "x-hearth-fallback" not in answer.headers
        assert (len(nodes.prefill[0].inferences), len(nodes.decode[0].inferences)) == (1, 1)
        await nodes.nothing_left()


@EVERY_KIND
async def test_completions_are_shared_too(kind: str) -> None:
    async with farm(kind) as nodes:
        answer = await nodes.hearth.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})

        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == TEXT
        assert (len(nodes.prefill[0].inferences), len(nodes.decode[0].inferences)) == (1, 1)
        await nodes.nothing_left()


@EVERY_KIND
@STREAM_AND_DOCUMENT
async def test_both_nodes_get_the_clients_request_id_and_the_fields_that_nobody_knows(kind: str, stream: bool) -> None:
    async with farm(kind) as nodes:
        await nodes.chat(stream, headers={"x-request-id": "mine-1"}, some_new_field={"a": [1]}, max_tokens=5)

        for node in (nodes.prefill[0], nodes.decode[0]):
            assert node.inferences[0].headers["x-request-id"] == "mine-1"
            assert node.inferences[0].json["some_new_field"] == {"a": [1]}
        assert nodes.decode[0].inferences[0].json["max_tokens"] == 5


@EVERY_KIND
@pytest.mark.parametrize("strategy", ["Hybrid", "DistServe"])
async def test_what_engines_tell_each_other_never_comes_from_a_client(kind: str, strategy: str) -> None:
    async with farm(kind, hybrid=1, serving_strategy=strategy) as nodes:
        answer = await nodes.chat(**PRIVATE)

        assert answer.whole
        asked = [node for node in (*nodes.prefill, *nodes.decode, *nodes.hybrid) if node.inferences]
        assert len(asked) == (1 if strategy == "Hybrid" else 2)
        for node in asked:
            body = bodies(node)[0]
            assert all(body.get(name) != value for name, value in PRIVATE.items() if value is not True)
        for node in (*nodes.decode, *nodes.hybrid):
            assert not any({"with_cache", "preserve_cache"} & body.keys() for body in bodies(node))
        for node in nodes.hybrid:
            assert not any(PRIVATE.keys() & body.keys() for body in bodies(node))


@EVERY_KIND
async def test_each_node_gets_its_own_key_and_no_other(kind: str) -> None:
    keys = {Role.PREFILL: "sk-prefill", Role.DECODE: "sk-decode"}
    async with AsyncExitStack() as stack:
        nodes = {
            role: await stack.enter_async_context(MAKES[kind](models=["m"], role=role, api_key=key))
            for role, key in keys.items()
        }
        specs = [{"url": nodes[role].url, "kind": kind, "role": role, "api_key": keys[role]} for role in nodes]
        settings = {"serving_strategy": "DistServe", "api_keys": "sk-client"}
        hearth = await stack.enter_async_context(gateway(local_nodes=json.dumps(specs), **settings))

        answer = read(await hearth.chat(headers={"authorization": "Bearer sk-client"}))

        assert answer.whole
        for role, node in nodes.items():
            assert node.seen == [f"Bearer {keys[role]}"]
            assert {request.authorization for request in node.requests} <= {f"Bearer {keys[role]}"}


@EVERY_KIND
async def test_the_model_is_listed_once(kind: str) -> None:
    async with farm(kind, prefill=2, decode=2, hybrid=1) as nodes:
        listed = (await nodes.hearth.client.get("/v1/models")).json()["data"]

        assert [model["id"] for model in listed] == ["m"]


# -- all kinds: what goes wrong


@EVERY_KIND
@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("behaviour", [Behaviour.STATUS_500, Behaviour.CLOSE_AT_ONCE, Behaviour.STATUS_503])
async def test_another_prefill_node_takes_over(kind: str, stream: bool, behaviour: Behaviour) -> None:
    async with farm(kind, prefill=2, lb_strategy="round_robin") as nodes:
        nodes.prefill[0].behave(behaviour)
        nodes.prefill[1].script.first_seconds = 0.01

        answers = [await nodes.chat(stream) for _ in range(4)]

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-node"] for answer in answers} == {"d0"}
        assert nodes.prefill[0].inferences
        assert len(nodes.prefill[1].inferences) == 4
        assert (await nodes.hearth.nodes())["d0"]["breaker"]["state"] == "closed"
        await nodes.nothing_left()


@EVERY_KIND
@STREAM_AND_DOCUMENT
async def test_another_decode_node_takes_over(kind: str, stream: bool) -> None:
    async with farm(kind, decode=2, lb_strategy="round_robin") as nodes:
        nodes.decode[0].behave(Behaviour.STATUS_500)

        answers = [await nodes.chat(stream) for _ in range(4)]

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-node"] for answer in answers} == {"d1"}
        assert nodes.decode[0].inferences
        await until(lambda: not nodes.prefill[0].open, "the prefill node is idle")
        if kind != "vllm":  # whose nodes free by themselves what nobody fetches
            await nodes.nothing_left()


@EVERY_KIND
@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("dead", ["prefill", "decode"])
async def test_a_hybrid_node_takes_over_and_then_the_cloud(kind: str, stream: bool, dead: str) -> None:
    async with farm(kind, hybrid=1, cloud=True) as nodes:
        assert (await nodes.chat(stream)).headers["x-hearth-node"] == "d0"
        for node in nodes.decode + (nodes.prefill if dead == "prefill" else []):
            node.crash()

        answer = await nodes.chat(stream)
        nodes.hybrid[0].crash()
        last = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-node"] == "h0"
        assert last.whole
        assert last.headers["x-hearth-tier"] == "cloud"
        if kind != "vllm" or dead == "prefill":
            nodes.prefill = [] if dead == "prefill" else nodes.prefill
            await nodes.nothing_left()


@EVERY_KIND
async def test_a_stream_that_breaks_after_content_goes_on_with_a_node_that_is_whole(kind: str) -> None:
    async with farm(kind, hybrid=1) as nodes:
        nodes.decode[0].behave(Behaviour.RESET_MIDWAY)

        answer = await nodes.chat(stream=True)

        assert answer.whole
        assert answer.text == "".join(f"t{number} " for number in range(8))
        assert len(nodes.hybrid[0].inferences) == 1
        await nodes.nothing_left()


@EVERY_KIND
async def test_a_stream_that_breaks_after_content_ends_with_an_error(kind: str) -> None:
    async with farm(kind, hybrid=1, continuation="off") as nodes:
        nodes.decode[0].behave(Behaviour.RESET_MIDWAY)

        answer = await nodes.chat(stream=True)

        assert answer.status == 200
        assert answer.text
        assert answer.error is not None
        assert answer.done
        assert not nodes.hybrid[0].inferences
        await nodes.nothing_left()


@EVERY_KIND
@STREAM_AND_DOCUMENT
async def test_a_client_that_leaves_before_content_frees_both_nodes(kind: str, stream: bool) -> None:
    async with farm(kind) as nodes:
        nodes.decode[0].script.first_seconds = 30
        asking = asyncio.create_task(nodes.chat(stream))
        await until(lambda: nodes.decode[0].open, "the decode node is at work")
        await until(lambda: kind == "sglang" or not nodes.prefill[0].open, "prefill is over")

        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

        await nodes.nothing_left()
        await until(lambda: nodes.decode[0].aborted, "the decode node has been told")


@EVERY_KIND
async def test_a_client_that_leaves_during_prefill_stops_it(kind: str) -> None:
    async with farm(kind) as nodes:
        nodes.prefill[0].behave(Behaviour.HANG)
        asking = asyncio.create_task(nodes.chat())
        await until(lambda: nodes.prefill[0].open, "the prefill node is at work")

        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

        await until(lambda: nodes.prefill[0].aborted, "the prefill node has been told")
        await nodes.idle()


@EVERY_KIND
async def test_full_prefill_nodes_leave_requests_to_others(kind: str) -> None:
    async with farm(kind, hybrid=1, prefill_spec={"max_concurrency": 1}, first_token_timeout=0.5) as nodes:
        nodes.prefill[0].behave(Behaviour.HANG)
        asking = [asyncio.create_task(nodes.chat())]
        await until(lambda: nodes.prefill[0].open, "the prefill node is full")
        asking += [asyncio.create_task(nodes.chat()) for _ in range(5)]

        answers = await asyncio.gather(*asking)

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-node"] for answer in answers} <= {"d0", "h0"}
        await nodes.idle()


@ONE_BY_ONE
@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("behaviour", [Behaviour.STATUS_500, Behaviour.GARBAGE, Behaviour.HANG, Behaviour.ERROR_FIRST])
async def test_a_decode_node_alone_answers_when_no_prefill_node_can(
    kind: str, stream: bool, behaviour: Behaviour
) -> None:
    async with farm(kind, first_token_timeout=0.5) as nodes:
        nodes.prefill[0].behave(behaviour)

        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.text == TEXT
        assert answer.headers["x-hearth-node"] == "d0"
        assert answer.headers["x-hearth-attempts"] == "2"
        assert not PRIVATE.keys() & bodies(nodes.decode[0])[0].keys()
        await nodes.idle()


@ONE_BY_ONE
@STREAM_AND_DOCUMENT
async def test_prefill_that_comes_to_nothing_ends_in_a_plain_request(kind: str, stream: bool) -> None:
    async with farm(kind) as nodes:
        nodes.decode[0].behave(Behaviour.STATUS_500, times=1)

        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-fallback"] == "server_error"
        assert PRIVATE.keys() & bodies(nodes.decode[0])[0].keys()
        assert not PRIVATE.keys() & bodies(nodes.decode[0])[1].keys()
        assert (await nodes.hearth.nodes())["d0"]["breaker"]["state"] == "closed"


@EVERY_KIND
async def test_decode_nodes_are_not_blamed_for_a_prefill_node_that_forgets(kind: str) -> None:
    async with farm(kind, prefill=2, decode=1, hybrid=1, breaker_fail_max=1) as nodes:
        nodes.decode[0].behave(Behaviour.STATUS_500, times=1)

        answer = await nodes.chat()

        assert answer.whole
        assert (await nodes.hearth.nodes())["d0"]["breaker"]["state"] == "closed"


@ONE_BY_ONE
@STREAM_AND_DOCUMENT
async def test_decode_nodes_serve_alone_where_there_is_no_prefill_node(kind: str, stream: bool) -> None:
    async with farm(kind, prefill=0) as nodes:
        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.text == TEXT
        assert not PRIVATE.keys() & bodies(nodes.decode[0])[0].keys()


@EVERY_KIND
@STREAM_AND_DOCUMENT
async def test_prefill_nodes_never_serve_alone(kind: str, stream: bool) -> None:
    async with farm(kind, decode=0, hybrid=1) as nodes:
        answer = await nodes.chat(stream)
        nodes.hybrid[0].behave(Behaviour.STATUS_500)
        failed = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-node"] == "h0"
        assert failed.status == 502
        assert not nodes.prefill[0].inferences


# -- LMDeploy: links


async def test_lmdeploy_engines_are_introduced_in_order_and_once() -> None:
    async with farm("lmdeploy") as nodes:
        prefill, decode = nodes.prefill[0], nodes.decode[0]

        answers = await fifty(lambda number: nodes.chat(stream=number % 2 == 0))

        assert all(answer.whole for answer in answers)
        for node, other in ((prefill, decode), (decode, prefill)):
            assert [r.path for r in node.requests if "/distserve/" in r.path] == [INFO, INITIALIZE, CONNECT]
            [initialize], [connect] = calls(node, INITIALIZE), calls(node, CONNECT)
            assert (initialize["local_engine_id"], initialize["remote_engine_id"]) == (node.url, other.url)
            assert connect["remote_engine_id"] == other.url
            assert initialize["local_engine_config"] == node.engine.info()
            assert (initialize["protocol"], initialize["rdma_config"]) == (2, {"with_gdr": True, "link_type": 2})
        linked = max(r.ended_at for node in (prefill, decode) for r in node.requests if r.path == CONNECT)
        assert linked <= min(request.at for request in decode.inferences)
        await nodes.nothing_left()
        assert not prefill.engine.freed


async def test_both_ends_are_asked_at_once_while_prefill_runs() -> None:
    async with farm("lmdeploy") as nodes:
        for node in (*nodes.prefill, *nodes.decode):
            node.behave(Behaviour.DRIP, on=On.PROBES, seconds=0.001)
        nodes.prefill[0].script.first_seconds = 0.2

        assert (await nodes.chat()).whole

        prefill, decode = (
            next(r for r in node.requests if r.path == INITIALIZE) for node in (nodes.prefill[0], nodes.decode[0])
        )
        assert prefill.ended_at is not None
        assert decode.ended_at is not None
        assert prefill.at < decode.ended_at
        assert decode.at < prefill.ended_at
        assert nodes.prefill[0].inferences[0].at < prefill.ended_at


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("restarts", ["prefill", "decode"])
async def test_an_engine_that_restarts_is_introduced_anew_once_and_no_request_fails(
    restarts: str, stream: bool
) -> None:
    async with farm("lmdeploy") as nodes:
        assert (await nodes.chat(stream)).whole
        getattr(nodes, restarts)[0].restart()

        answers = [await nodes.chat(stream) for _ in range(5)]

        assert all(answer.whole for answer in answers)
        assert [nodes.prefill[0].engine.initialized, nodes.decode[0].engine.initialized] == [2, 2]
        assert {answer.headers["x-hearth-attempts"] for answer in answers[1:]} == {"1"}
        assert len(nodes.prefill[0].inferences) == 6
        await nodes.nothing_left()


@pytest.mark.parametrize("restarts", ["prefill", "decode"])
async def test_fifty_requests_at_once_after_a_restart_make_one_handshake(restarts: str) -> None:
    async with farm("lmdeploy", breaker_fail_max=3) as nodes:
        assert (await nodes.chat()).whole
        getattr(nodes, restarts)[0].restart()

        answers = await fifty(lambda number: nodes.chat(stream=number % 2 == 0))
        last = await nodes.chat()

        assert all(answer.whole for answer in answers)
        assert last.headers["x-hearth-attempts"] == "1"
        assert [nodes.prefill[0].engine.initialized, nodes.decode[0].engine.initialized] == [2, 2]
        await nodes.nothing_left()


async def test_a_restart_that_probes_have_seen_costs_no_attempt() -> None:
    async with farm("lmdeploy", health_check_interval=0.1, health_check_timeout=1) as nodes:
        assert (await nodes.chat()).whole
        nodes.prefill[0].crash()
        await nodes.hearth.state("p0", "down")
        nodes.prefill[0].restart()
        await nodes.hearth.state("p0", "healthy")

        answer = await nodes.chat()

        assert answer.whole
        assert answer.headers["x-hearth-attempts"] == "1"
        assert nodes.prefill[0].engine.initialized == 2


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_an_engine_that_registers_again_is_introduced_anew(role: Role) -> None:
    async with farm("lmdeploy") as nodes:
        assert (await nodes.chat()).whole
        node = (nodes.prefill if role is Role.PREFILL else nodes.decode)[0]
        node.restart()
        await added(nodes.hearth.client, node.url, models=["m"], role=2 if role is Role.PREFILL else 3)

        answer = await nodes.chat()

        assert answer.whole
        assert answer.headers["x-hearth-attempts"] == "1"
        assert [nodes.prefill[0].engine.initialized, nodes.decode[0].engine.initialized] == [2, 2]
        await nodes.nothing_left()


async def test_a_late_goodbye_does_not_undo_the_new_link() -> None:
    async with farm("lmdeploy") as nodes:
        prefill, decode = nodes.prefill[0], nodes.decode[0]
        assert (await nodes.chat()).whole
        decode.behave(Behaviour.HANG, times=1)
        asking = asyncio.create_task(nodes.chat())
        await until(lambda: decode.open, "a session is held")
        # It is freed before the goodbye, and slowly.
        prefill.behave(Behaviour.DRIP, on=On.PROBES, times=1, seconds=0.003)
        await added(nodes.hearth.client, decode.url, models=["m"], role=3)

        answers = [await nodes.chat()]
        await until(lambda: calls(prefill, DROP), "the goodbye has come")
        answers.append(await nodes.chat())

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-attempts"] for answer in answers} == {"1"}
        assert prefill.engine.initialized == 2
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("size", ["tp_size", "block_size"])
async def test_engines_that_do_not_fit_are_not_linked(size: str, stream: bool) -> None:
    async with farm("lmdeploy") as nodes:
        setattr(nodes.decode[0].engine, size, 2)

        answers = [await nodes.chat(stream) for _ in range(3)]

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-node"] for answer in answers} == {"d0"}
        assert nodes.decode[0].engine.initialized == 0
        assert len(calls(nodes.decode[0], INFO)) == 1
        assert len(nodes.prefill[0].inferences) == 1
        assert {node["breaker"]["state"] for node in (await nodes.hearth.nodes()).values()} == {"closed"}
        await nodes.nothing_left()
        assert nodes.prefill[0].engine.freed


@pytest.mark.parametrize("odd", ["prefill", "decode"])
async def test_engines_that_do_not_fit_are_paired_with_others(odd: str) -> None:
    async with farm("lmdeploy", prefill=2, decode=2, lb_strategy="round_robin") as nodes:
        getattr(nodes, odd)[0].engine.block_size = 32

        answers = [await nodes.chat() for _ in range(8)]

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-attempts"] for answer in answers[3:]} == {"1"}
        decoded = [body for node in nodes.decode for body in bodies(node)]
        assert all("migration_request" in body for body in decoded)
        await nodes.nothing_left()


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_link_that_fails_frees_the_cache_and_the_decode_node_does_all(side: str, stream: bool) -> None:
    async with farm("lmdeploy") as nodes:
        getattr(nodes, side)[0].behave(Behaviour.STATUS_500, on=On.PROBES, times=3)

        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-node"] == "d0"
        assert "migration_request" not in bodies(nodes.decode[0])[0]
        await nodes.nothing_left()
        assert len(nodes.prefill[0].engine.freed) == 1


async def test_a_handshake_that_fails_once_is_made_again() -> None:
    async with farm("lmdeploy") as nodes:
        nodes.decode[0].behave(Behaviour.STATUS_500, on=On.PROBES, times=1)

        answer = await nodes.chat()

        assert answer.whole
        assert answer.headers["x-hearth-attempts"] == "1"
        assert "migration_request" in bodies(nodes.decode[0])[0]


async def test_a_decode_node_that_is_removed_during_the_handshake_fails_no_request() -> None:
    async with farm("lmdeploy", hybrid=1) as nodes:
        nodes.decode[0].behave(Behaviour.HANG, on=On.PROBES, times=1)
        asking = asyncio.create_task(nodes.chat())
        await until(lambda: nodes.prefill[0].engine.sessions, "the request waits for the link")

        gone = await nodes.hearth.client.post("/nodes/remove", json={"url": nodes.decode[0].url})
        answer = await asking

        assert gone.text == DELETED
        assert answer.whole
        assert answer.headers["x-hearth-node"] == "h0"
        await nodes.nothing_left()


async def test_removing_a_decode_node_undoes_its_links_and_frees_what_it_was_to_fetch() -> None:
    async with farm("lmdeploy", hybrid=1) as nodes:
        prefill, decode = nodes.prefill[0], nodes.decode[0]
        assert (await nodes.chat()).whole
        decode.behave(Behaviour.HANG)
        asking = asyncio.create_task(nodes.chat())
        await until(lambda: decode.open, "the decode node has the request")
        [held] = prefill.engine.sessions

        await nodes.hearth.client.post("/nodes/remove", json={"url": decode.url})

        await until(lambda: calls(prefill, DROP) and calls(decode, DROP), "both are told")
        assert calls(prefill, DROP) == [{"engine_id": prefill.url, "remote_engine_id": decode.url}]
        assert calls(decode, DROP) == [{"engine_id": decode.url, "remote_engine_id": prefill.url}]
        assert calls(prefill, FREE) == [{"remote_engine_id": prefill.url, "remote_session_id": held}]
        paths = [request.path for request in prefill.requests]
        assert paths.index(FREE) < paths.index(DROP)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await nodes.nothing_left()


async def test_connection_warmup_links_every_pair() -> None:
    async with farm("lmdeploy", prefill=2, decode=3) as nodes:
        answer = await nodes.hearth.client.post("/distserve/connection_warmup")
        chats = await fifty(lambda number: nodes.chat())

        assert (answer.status_code, answer.json()) == (200, {"SUCCESS": True})
        assert [node.engine.connected for node in nodes.prefill] == [3, 3]
        assert [node.engine.connected for node in nodes.decode] == [2, 2, 2]
        assert all(chat.whole for chat in chats)


async def test_connection_warmup_names_all_that_failed() -> None:
    async with farm("lmdeploy", decode=3) as nodes:
        nodes.decode[0].engine.block_size = 32
        nodes.decode[1].crash()

        answer = await nodes.hearth.client.post("/distserve/connection_warmup")

        assert answer.status_code == 502
        message = answer.json()["error"]["message"]
        assert nodes.decode[0].url in message
        assert nodes.decode[1].url in message
        assert nodes.decode[2].url not in message
        assert nodes.decode[2].engine.connected == 1


# -- LMDeploy: sessions


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize(
    ("ids", "names_session", "session"),
    [
        (Ids.SESSION, False, 17),
        (Ids.ASKED, False, -1),
        (Ids.RANDOM, False, -1),
        (Ids.ASKED, True, 17),
        (Ids.RANDOM, True, 17),
    ],
)
async def test_the_decode_node_is_told_which_cache_to_fetch(
    ids: Ids, names_session: bool, session: int, stream: bool
) -> None:
    async with farm("lmdeploy") as nodes:
        prefill, decode = nodes.prefill[0], nodes.decode[0]
        prefill.engine.ids, prefill.engine.names_session = ids, names_session

        answer = await nodes.chat(stream, max_tokens=6)

        assert answer.whole
        [asked], [migrated] = bodies(prefill), bodies(decode)
        assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
        assert asked["with_cache"] is asked["preserve_cache"] is True
        assert migrated.pop("migration_request") == {
            "protocol": 2,
            "remote_engine_id": prefill.url,
            "remote_session_id": session,
            "remote_token_id": 19384 + 17,
            "remote_block_ids": [412],
            "is_dummy_prefill": False,
        }
        assert (migrated["max_tokens"], migrated["stream"]) == (6, stream)
        assert not {"with_cache", "preserve_cache", "max_completion_tokens"} & migrated.keys()
        assert not prefill.engine.freed


@pytest.mark.parametrize("ids", [Ids.ASKED, Ids.RANDOM])
async def test_fifty_completions_at_once_fail_none_although_none_has_an_id(ids: Ids) -> None:
    async with farm("lmdeploy", prefill=2, decode=2) as nodes:
        for node in nodes.prefill:
            node.engine.ids = ids

        async def complete(number: int) -> httpx.Response:
            body = {"model": "m", "prompt": f"hi {number}", "stream": number % 2 == 0}
            return await nodes.hearth.client.post("/v1/completions", json=body)

        answers = await fifty(complete)

        assert Counter(answer.status_code for answer in answers) == {200: 50}
        decoded = [body for node in nodes.decode for body in bodies(node)]
        assert [body["migration_request"]["remote_session_id"] for body in decoded] == [-1] * 50


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize(
    "behaviour", [Behaviour.STATUS_500, Behaviour.STATUS_503, Behaviour.HANG, Behaviour.CLOSE_AT_ONCE, Behaviour.EMPTY]
)
async def test_a_decode_node_that_fails_before_content_leaves_no_session(behaviour: Behaviour, stream: bool) -> None:
    async with farm("lmdeploy", hybrid=1, first_token_timeout=0.5) as nodes:
        nodes.decode[0].behave(behaviour)

        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-node"] == "h0"
        await until(lambda: nodes.prefill[0].engine.freed, "the cache is freed")
        assert nodes.prefill[0].engine.freed == [17]
        await nodes.nothing_left()


@STREAM_AND_DOCUMENT
async def test_a_decode_node_that_is_down_costs_an_attempt_and_no_session(stream: bool) -> None:
    async with farm("lmdeploy", decode=2, lb_strategy="round_robin") as nodes:
        assert all([(await nodes.chat(stream)).whole for _ in range(2)])
        nodes.decode[0].crash()

        answers = [await nodes.chat(stream) for _ in range(4)]

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-node"] for answer in answers} == {"d1"}
        assert answers[-1].headers["x-hearth-attempts"] == "1"
        await nodes.nothing_left()
        assert nodes.prefill[0].engine.freed


async def test_a_cache_that_could_not_be_freed_is_freed_by_gc() -> None:
    async with farm("lmdeploy") as nodes:
        prefill = nodes.prefill[0]
        assert (await nodes.chat()).whole
        prefill.behave(Behaviour.STATUS_500, on=On.PROBES)
        nodes.decode[0].behave(Behaviour.STATUS_500, times=1)
        assert (await nodes.chat()).whole
        await until(lambda: calls(prefill, FREE), "it was tried")
        await nodes.idle()

        failing = (await nodes.hearth.client.post("/distserve/gc")).json()
        prefill.recover()
        freeing = (await nodes.hearth.client.post("/distserve/gc")).json()
        nothing = (await nodes.hearth.client.post("/distserve/gc")).json()

        assert failing == {"SUCCESS": False, "left": 1}
        assert freeing == nothing == {"SUCCESS": True, "left": 0}
        assert len(prefill.engine.freed) == 1
        await nodes.nothing_left()


async def test_a_prefill_answer_without_blocks_is_freed_and_never_sent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with farm("lmdeploy", prefill=2, lb_strategy="round_robin") as nodes:
        broken = nodes.prefill[0]
        monkeypatch.setattr(broken.engine, "_cache_members", lambda request, body, session: {"id": str(session.id)})

        answers = [await nodes.chat() for _ in range(2)]

        assert all(answer.whole for answer in answers)
        assert broken.inferences
        assert {body["migration_request"]["remote_engine_id"] for body in bodies(nodes.decode[0])} == {
            nodes.prefill[1].url
        }
        await nodes.nothing_left()
        assert broken.engine.freed


async def test_an_answer_of_one_token_needs_one_node() -> None:
    async with farm("lmdeploy") as nodes:
        answer = await nodes.chat(max_tokens=1)

        assert answer.whole
        assert not nodes.prefill[0].inferences
        assert "migration_request" not in bodies(nodes.decode[0])[0]


async def test_a_model_that_stops_with_its_first_token_leaves_no_session() -> None:
    async with farm("lmdeploy") as nodes:
        for node in (*nodes.prefill, *nodes.decode):
            node.script.tokens = 1

        answer = await nodes.chat()

        assert answer.whole
        assert "migration_request" not in bodies(nodes.decode[0])[0]
        await nodes.nothing_left()
        assert nodes.prefill[0].engine.freed == [17]


@STREAM_AND_DOCUMENT
async def test_several_answers_are_refused_and_nobody_is_asked(stream: bool) -> None:
    async with farm("lmdeploy", hybrid=1) as nodes:
        answer = await nodes.hearth.chat(n=2, stream=stream)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"
        assert not [node for node in (*nodes.prefill, *nodes.decode, *nodes.hybrid) if node.inferences]
        await nodes.idle()


@STREAM_AND_DOCUMENT
async def test_dummy_prefill_asks_no_prefill_node_for_anything(stream: bool) -> None:
    async with farm("lmdeploy", dummy_prefill=True) as nodes:
        answer = await nodes.chat(stream)

        assert answer.whole
        assert bodies(nodes.decode[0])[0]["migration_request"] == {
            "protocol": 2,
            "remote_engine_id": "dummy:dummy",
            "remote_session_id": 0,
            "remote_token_id": 0,
            "remote_block_ids": [],
            "is_dummy_prefill": True,
        }
        assert not nodes.prefill[0].inferences
        assert not calls(nodes.prefill[0], INFO)
        await nodes.nothing_left()


# -- vLLM


@STREAM_AND_DOCUMENT
async def test_vllm_gets_the_transfer_params_whole_and_the_clients_own_limits_back(stream: bool) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    async with farm("vllm") as nodes:
        answer = await nodes.chat(stream, min_tokens=3, max_tokens=6, max_completion_tokens=6, **more)

        assert answer.whole
        assert answer.usage is not None
        [asked], [decoded] = bodies(nodes.prefill[0]), bodies(nodes.decode[0])
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
        assert not {"min_tokens", "stream_options"} & asked.keys()
        assert (decoded["min_tokens"], decoded["max_tokens"], decoded["max_completion_tokens"]) == (3, 6, 6)
        relayed = decoded["kv_transfer_params"]
        assert relayed["remote_engine_id"] == nodes.prefill[0].engine.engine_id
        assert relayed.keys() >= {"remote_request_id", "remote_host", "remote_port", "remote_block_ids", "tp_size"}
        assert nodes.prefill[0].engine.fetched == 1
        await nodes.nothing_left()


@STREAM_AND_DOCUMENT
async def test_vllm_requests_whose_cache_is_gone_are_served_plainly(stream: bool) -> None:
    async with farm("vllm", breaker_fail_max=1) as nodes:
        nodes.prefill[0].engine.hold_seconds = 0.0

        answers = [await nodes.chat(stream) for _ in range(3)]

        assert all(answer.whole for answer in answers)
        assert {node["breaker"]["state"] for node in (await nodes.hearth.nodes()).values()} == {"closed"}


# -- SGLang


@STREAM_AND_DOCUMENT
async def test_sglang_nodes_are_asked_at_once_and_meet_in_a_room_of_their_own(stream: bool) -> None:
    async with farm("sglang") as nodes:
        prefill, decode = nodes.prefill[0], nodes.decode[0]

        answers = await fifty(lambda number: nodes.chat(stream))

        assert all(answer.whole for answer in answers)
        rooms = {body["bootstrap_room"] for body in bodies(decode)}
        assert len(rooms) == 50
        assert {body["bootstrap_room"] for body in bodies(prefill)} == rooms
        assert {body["bootstrap_port"] for body in bodies(decode)} == {prefill.port}
        assert (prefill.engine.met, decode.engine.met) == (50, 50)
        await nodes.nothing_left()


async def test_sglang_gets_a_fresh_room_for_each_try() -> None:
    async with farm("sglang", decode=2) as nodes:
        for node in nodes.decode:
            node.behave(Behaviour.STATUS_500, times=1)
        nodes.hearth.client.timeout = httpx.Timeout(20)

        answer = await nodes.chat()

        rooms = [body["bootstrap_room"] for body in bodies(nodes.prefill[0])]
        assert len(rooms) == len(set(rooms)) == 2
        assert answer.status == 502
        await nodes.nothing_left()


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("behaviour", [Behaviour.STATUS_500, Behaviour.CLOSE_AT_ONCE])
async def test_sglang_decode_does_not_wait_for_a_prefill_node_that_failed(behaviour: Behaviour, stream: bool) -> None:
    async with farm("sglang", hybrid=1) as nodes:
        nodes.prefill[0].behave(behaviour)
        nodes.decode[0].engine.room_seconds = nodes.prefill[0].engine.room_seconds = 30
        began = time.monotonic()

        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-node"] == "h0"
        assert time.monotonic() - began < 3
        await until(lambda: nodes.decode[0].aborted or not nodes.decode[0].inferences, "decode was ended")
        assert (await nodes.hearth.nodes())["d0"]["breaker"]["state"] == "closed"


@STREAM_AND_DOCUMENT
async def test_sglang_prefill_is_ended_when_decode_fails(stream: bool) -> None:
    async with farm("sglang", hybrid=1) as nodes:
        nodes.decode[0].behave(Behaviour.STATUS_500)
        nodes.prefill[0].engine.room_seconds = 30

        answer = await nodes.chat(stream)

        assert answer.whole
        assert answer.headers["x-hearth-node"] == "h0"
        await nodes.nothing_left()
        assert (await nodes.hearth.nodes())["p0"]["breaker"]["state"] == "closed"


@STREAM_AND_DOCUMENT
async def test_sglang_decode_nodes_do_nothing_alone(stream: bool) -> None:
    async with farm("sglang") as nodes:
        nodes.prefill[0].behave(Behaviour.STATUS_500)

        answer = await nodes.chat(stream)

        assert answer.status == 502
        assert all("bootstrap_room" in body for body in bodies(nodes.decode[0]))
        await nodes.idle()


# -- who is not concerned


async def test_embeddings_and_models_of_hybrid_nodes_alone_are_untouched() -> None:
    async with farm("vllm") as nodes, FakeVLLM(models=["e"]) as other:
        await added(nodes.hearth.client, other.url, kind="vllm", models=["e"])

        vectors = await nodes.hearth.client.post("/v1/embeddings", json={"model": "e", "input": "hi"})
        answer = await nodes.chat(model="e")

        assert vectors.status_code == 200
        assert answer.whole
        assert [request.path for request in other.inferences] == ["/v1/embeddings", "/v1/chat/completions"]
        assert not [node for node in (*nodes.prefill, *nodes.decode) if node.inferences]


@EVERY_KIND
@STREAM_AND_DOCUMENT
async def test_without_roles_distserve_is_hybrid(kind: str, stream: bool) -> None:
    async with farm(kind, prefill=0, decode=0, hybrid=2) as nodes:
        nodes.hybrid[0].behave(Behaviour.STATUS_500)

        answers = [await nodes.chat(stream) for _ in range(3)]

        assert all(answer.whole for answer in answers)
        assert {answer.headers["x-hearth-node"] for answer in answers} == {"h1"}


# -- load


@EVERY_KIND
async def test_an_engine_that_restarts_and_one_that_dies_fail_none_of_fifty_requests(kind: str) -> None:
    async with farm(kind, prefill=2, decode=2, health_check_interval=0.5, health_check_timeout=1) as nodes:
        for node in (*nodes.prefill, *nodes.decode):
            node.script.first_seconds = 0.1
        dying, restarting = nodes.decode[1], nodes.prefill[0]
        dying.script.first_seconds = 30  # so that nothing of it has begun when it dies

        async def one(number: int) -> Answer:
            await asyncio.sleep(number * 0.01)
            return await nodes.chat(stream=number % 2 == 0)

        asking = asyncio.gather(*(one(number) for number in range(50)))
        await until(lambda: restarting.open >= 3, "the one is in the middle of it")
        restarting.restart()
        await until(lambda: dying.open >= 3, "so is the other")
        dying.crash()
        answers = await asking

        assert [answer.error for answer in answers if not answer.whole] == []
        assert {answer.headers["x-hearth-node"] for answer in answers} == {"d0"}
        await nodes.idle()
        assert not any(node.engine.leaked() for node in nodes.prefill)
        if kind != "vllm":  # whose nodes free by themselves what nobody fetches
            await nodes.nothing_left()
        assert [node.open for node in (*nodes.prefill, *nodes.decode)] == [0, 0, 0, 0]


async def test_a_cache_that_nobody_can_free_is_counted_and_told_once() -> None:
    async with (
        FakeLMDeploy(["m"], role="prefill", ids=Ids.RANDOM) as prefill,
        FakeLMDeploy(["m"], role="decode") as decode,
    ):
        nodes = [
            {"url": prefill.url, "kind": "lmdeploy", "name": "p", "role": "prefill"},
            {"url": decode.url, "kind": "lmdeploy", "name": "d", "role": "decode"},
        ]
        async with gateway(local_nodes=json.dumps(nodes), serving_strategy="DistServe") as hearth:
            for _ in range(2):
                assert (await hearth.chat()).status_code == 200

            metrics = (await hearth.client.get("/metrics")).text
            assert 'hearth_leaked_prefill_sessions_total{node="p"} 2.0' in metrics
            assert len([line for line in hearth.lines.all if "never frees" in line["event"]]) == 1
