"""Nodes that come, drain and go while Hearth runs, over the API that LMDeploy's proxy has."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.routing.node_store import NodeStore, StoredNode
from tests.fakes import KINDS, Behaviour, FakeLMDeploy, FakeOllama, FakeOpenAI, FakeVLLM, On, State, flavours
from tests.system.gateway_process import GatewayProcess
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.reading import Answer, read
from tests.system.registration import ADDED, DELETED, HeldNode, add, added, in_state, kept, registers, status

ADMIN = "sk-admin-key-for-tests-0001"
CLIENT = "sk-client-key-for-tests-0001"
NOWHERE = "http://127.0.0.1:1"
ROUTES = [
    ("GET", "/nodes/status"),
    ("POST", "/nodes/add"),
    ("POST", "/nodes/remove"),
    ("POST", "/nodes/drain"),
    ("POST", "/nodes/terminate"),
    ("GET", "/nodes/terminate_all"),
    ("POST", "/distserve/connection_warmup"),
    ("POST", "/distserve/gc"),
]
NAMING = ("/nodes/add", "/nodes/drain", "/nodes/terminate")
UNLISTING = {
    Behaviour.REFUSE: 502,
    Behaviour.RESET_AT_ACCEPT: 502,
    Behaviour.CLOSE_AT_ONCE: 502,
    Behaviour.STATUS_401: 400,
    Behaviour.STATUS_404: 502,
    Behaviour.STATUS_500: 502,
    Behaviour.REDIRECT_302: 502,
    Behaviour.HTML: 502,
    Behaviour.EMPTY: 502,
    Behaviour.GARBAGE: 502,
    Behaviour.TRUNCATED_JSON: 502,
    Behaviour.HANG: 504,
    Behaviour.HANG_AFTER_HEAD: 504,
    Behaviour.DRIP: 504,
}
TERMINABLE = replace(flavours.LMDEPLOY, gets={**flavours.LMDEPLOY.gets, "/terminate": lambda engine: engine.empty()})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def chat(hearth: Gateway, count: int = 1, **fields: Any) -> list[Answer]:
    """So many streamed chats at once, read to their end."""
    return [read(each) for each in await asyncio.gather(*(hearth.chat(stream=True, **fields) for _ in range(count)))]


@asynccontextmanager
async def streaming(hearth: Gateway, node: HeldNode, count: int) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """So many chats that run on the node, which is the only one now, until it is released."""
    await added(hearth.client, node.url, models=["m"], kind="vllm")
    running = [asyncio.create_task(hearth.chat(stream=True)) for _ in range(count)]
    await until(lambda: node.open == count, "all have begun")
    try:
        yield running
    finally:
        node.release.set()
        await asyncio.gather(*running, return_exceptions=True)


# -- what is answered


async def test_success_is_told_in_lmdeploys_words() -> None:
    async with FakeOpenAI(["m"], flavour=TERMINABLE) as node, gateway() as hearth:
        answers = [
            await add(hearth.client, node.url),
            await hearth.client.post("/nodes/remove", json={"url": node.url}),
            await add(hearth.client, node.url, models=["m"]),
            await hearth.client.post("/nodes/terminate", json={"url": node.url}),
            await add(hearth.client, node.url, models=["m"]),
            await hearth.client.get("/nodes/terminate_all"),
        ]

        assert [answer.text for answer in answers] == [
            '"Added successfully"',
            '"Deleted successfully"',
            '"Added successfully"',
            '"Terminated successfully"',
            '"Added successfully"',
            '"All nodes terminated successfully"',
        ]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
        assert await status(hearth.client) == {}


async def test_status_shows_what_lmdeploy_shows_and_why_a_node_gets_nothing() -> None:
    async with FakeVLLM(["m", "lora"]) as node, gateway() as hearth:
        await added(hearth.client, node.url, speed=12)
        before = await status(hearth.client)
        for _ in range(20):
            await hearth.chat()
        shown = (await status(hearth.client))[node.url]
        node.behave(Behaviour.REFUSE)
        await in_state(hearth.client, node.url, "down")
        down = (await status(hearth.client))[node.url]

        assert before == {
            node.url: {
                "role": 1,
                "models": ["m", "lora"],
                "unfinished": 0,
                "latency": [],
                "speed": 12,
                "state": "healthy",
                "reason": "",
            }
        }
        assert len(shown["latency"]) == 15
        assert all(0 < seconds < 5 for seconds in shown["latency"])
        assert "refused" in down["reason"]


async def test_roles_are_numbers_and_may_be_given_by_name() -> None:
    roles = {1: 1, 2: 2, 3: 3, "2": 2, "Prefill": 2, "decode": 3, "HYBRID": 1, None: 1}
    async with gateway() as hearth:
        shown = {}
        for role in roles:
            assert (await add(hearth.client, NOWHERE, models=["m"], role=role)).text == ADDED
            shown[role] = (await status(hearth.client))[NOWHERE]["role"]

        assert shown == roles


async def test_a_node_is_removed_in_the_old_way_and_in_the_new() -> None:
    async with FakeVLLM(["m"]) as node, gateway() as hearth:
        ways: list[tuple[str, dict[str, Any]]] = [
            ("/nodes/remove", {"content": json.dumps({"url": node.url})}),
            ("/nodes/remove", {"params": {"node_url": node.url}}),
            ("/nodes/remove", {"params": {"node_url": node.url}, "data": {"not": "json"}}),
            ("/nodes/remove", {"json": {"url": f" {node.url.upper()}/ "}}),
            ("//nodes//remove", {"json": {"url": node.url}}),
        ]
        for path, how in ways:
            await added(hearth.client, node.url)

            answer = await hearth.client.post(hearth.url + path, **how)

            assert (answer.status_code, answer.text) == (200, DELETED)
            assert await status(hearth.client) == {}
            assert (await hearth.chat()).status_code in (404, 503)


async def test_removing_a_node_that_is_not_there_is_no_failure() -> None:
    async with gateway() as hearth:
        answer = await hearth.client.post("/nodes/remove", json={"url": NOWHERE})

        assert (answer.status_code, answer.text) == (200, DELETED)


async def test_slashes_may_be_doubled_and_a_content_type_is_not_asked_for() -> None:
    body = json.dumps({"url": NOWHERE, "status": {"models": ["m"]}})
    async with gateway() as hearth:
        for path in ("//nodes/add", "/nodes//add", "///nodes///add"):
            for headers in ({"content-type": "application/json; charset=utf-8"}, {"content-type": "text/plain"}, {}):
                answer = await hearth.client.post(hearth.url + path, content=body, headers=headers)

                assert (answer.status_code, answer.text) == (200, ADDED)
        assert list(await status(hearth.client)) == [NOWHERE]


async def test_two_spellings_are_one_node() -> None:
    async with gateway() as hearth:
        for url in ("http://localhost:1", "HTTP://LocalHost:1/", "http://localhost:1//"):
            await add(hearth.client, url, models=[url])

            nodes = await status(hearth.client)
            assert [node["models"] for node in nodes.values()] == [[url]]


async def test_nodes_without_a_name_are_called_by_their_address() -> None:
    async with gateway() as hearth, FakeVLLM(["m"]) as one, FakeVLLM(["m"]) as two:
        for _ in range(2):
            await added(hearth.client, one.url, models=["m"])
            await added(hearth.client, two.url, name="mine")

        assert set(await hearth.nodes()) == {one.url.removeprefix("http://"), "mine"}
        assert (await hearth.chat()).headers["x-hearth-node"] in await hearth.nodes()


# -- what is refused


async def test_a_body_that_names_no_node_is_a_bad_request() -> None:
    nameless = [b"", b"{", b"[]", b'"http://127.0.0.1:1"', b'{"status": {}}', b'{"url": 5}', b'{"url": null}', b"\xff"]
    long = b'{"url": "http://127.0.0.1:1", "pad": "' + b"x" * 70_000 + b'"}'
    async with gateway() as hearth:
        bodies = [*((path, body) for path in NAMING for body in (*nameless, long))]
        for path, body in (*bodies, ("/nodes/add", b'{"url": "http://127.0.0.1:1", "status": ["m"]}')):
            answer = await hearth.client.post(path, content=body)

            assert answer.status_code == 400, (path, body[:50])
            assert error_of(answer)["message"]
        assert await status(hearth.client) == {}


async def test_a_url_that_is_none_or_holds_credentials_is_refused() -> None:
    urls = [
        "file:///etc/passwd",
        "ftp://127.0.0.1",
        "unix:/run/docker.sock",
        "127.0.0.1:8000",
        "http://",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:port",
        "http://[",
        "http://[::1",
        "http://user:secret-in-url@127.0.0.1:1",
        "http://user:secret-in-url@0.0.0.0:1",
        "http://127.0.0.1:1/?key=secret-in-url",
        "http://127.0.0.1:1\r\nx: y",
        "http://a\u0000b",
        f"http://{'a' * 70}.example",
        f"http://{'a' * 300}",
        " ",
    ]
    async with gateway() as hearth:
        for url in urls:
            answer = await add(hearth.client, url, models=["m"])

            assert answer.status_code == 400, url
            assert "secret-in-url" not in answer.text + json.dumps(hearth.lines.all)
        assert await status(hearth.client) == {}


async def test_a_url_that_is_none_belongs_to_no_node() -> None:
    async with gateway() as hearth:
        await add(hearth.client, NOWHERE, models=["m"])
        for path in ("/nodes/remove", "/nodes/drain", "/nodes/terminate"):
            for url in ("http://[", "http://127.0.0.1:port", "http://127.0.0.1:99999", "nonsense"):
                answer = await hearth.client.post(path, json={"url": url})

                assert answer.status_code == 400, (path, url)
        assert list(await status(hearth.client)) == [NOWHERE]


async def test_a_value_that_no_node_can_have_is_named() -> None:
    values: dict[str, list[Any]] = {
        "role": [7, 0, "boss", True, [1]],
        "speed": [0, -1, "fast", [1], True],
        "models": [[{"id": "m"}], 5],
        "kind": ["toaster", "cloud", 1],
        "weight": [0, "heavy"],
        "max_concurrency": [0, 1.5],
        "api_key": ["two words", 5],
        "name": [["n"], "n" * 65],
    }
    async with gateway() as hearth:
        for field, value in ((field, value) for field, each in values.items() for value in each):
            answer = await add(hearth.client, NOWHERE, **{"models": ["m"], field: value})

            assert answer.status_code == 400, (field, value)
            assert error_of(answer)["message"].startswith(field)
        assert await status(hearth.client) == {}


async def test_a_node_that_is_not_there_is_not_found() -> None:
    async with gateway() as hearth:
        for path in ("/nodes/drain", "/nodes/terminate"):
            answer = await hearth.client.post(path, json={"url": NOWHERE})

            assert answer.status_code == 404
            assert NOWHERE in error_of(answer)["message"]


async def test_a_node_that_does_not_list_its_models_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.node_calls._DISCOVERY_SECONDS", 0.4)
    async with AsyncExitStack() as stack:
        nodes = {each: await stack.enter_async_context(FakeVLLM(["m"])) for each in UNLISTING}
        healthy = await stack.enter_async_context(FakeVLLM(["m"]))
        hearth = await stack.enter_async_context(gateway(healthy))
        for behaviour, node in nodes.items():
            node.behave(behaviour, on=On.ALL, seconds=0.01 if behaviour is Behaviour.DRIP else None)

        answers = dict(
            zip(nodes, await asyncio.gather(*(add(hearth.client, n.url) for n in nodes.values())), strict=True)
        )

        assert {behaviour: answer.status_code for behaviour, answer in answers.items()} == UNLISTING
        assert all(nodes[each].url in error_of(answer)["message"] for each, answer in answers.items())
        assert [each for each, answer in answers.items() if "api_key" in answer.text] == [Behaviour.STATUS_401]
        assert list(await status(hearth.client)) == [healthy.url]
        assert (await hearth.chat()).status_code == 200


async def test_a_node_with_a_key_is_added_with_it_and_the_key_is_not_shown() -> None:
    async with FakeVLLM(["m"], api_key="sk-of-the-node-0001") as node, gateway() as hearth:
        wrong = await add(hearth.client, node.url, api_key="sk-of-another-0001")
        await added(hearth.client, node.url, api_key="sk-of-the-node-0001")

        assert wrong.status_code == 400
        assert (await hearth.chat()).status_code == 200
        shown = [(await hearth.client.get(path)).text for path in ("/nodes/status", "/admin/nodes", "/metrics")]
        assert "sk-of-" not in "".join(shown) + wrong.text + json.dumps(hearth.lines.all)


# -- who may


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_an_admin_key_is_asked_for_where_there_is_one() -> None:
    async with gateway(admin_keys=ADMIN, api_keys=CLIENT) as hearth:
        for method, path in ROUTES:
            for headers in ({}, _bearer(CLIENT), _bearer(ADMIN[:-1]), {"x-forwarded-for": "127.0.0.1"}):
                assert (await hearth.client.request(method, path, headers=headers)).status_code == 401, path

            assert (await hearth.client.request(method, path, headers=_bearer(ADMIN))).status_code in (200, 400), path


async def test_nodes_open_lets_engines_in_that_send_no_key() -> None:
    async with gateway(admin_keys=ADMIN, nodes_open=True) as hearth:
        for method, path in ROUTES:
            for headers in ({}, {"x-forwarded-for": "10.0.0.9"}):
                assert (await hearth.client.request(method, path, headers=headers)).status_code in (200, 400), path

        assert (await hearth.client.get("/admin/nodes")).status_code == 401


async def test_without_admin_keys_only_this_machine_itself_may() -> None:
    async with gateway() as hearth:
        for method, path in ROUTES:
            assert (await hearth.client.request(method, path)).status_code in (200, 400), path
            for header in ("x-forwarded-for", "forwarded", "x-real-ip"):
                answer = await hearth.client.request(method, path, headers={header: "127.0.0.1"})

                assert answer.status_code == 403
                assert "ADMIN_KEYS" in error_of(answer)["message"]


# -- where a node may be


@pytest.mark.parametrize("networks", [None, '["0.0.0.0/0", "::/0"]'], ids=["usual networks", "all networks"])
async def test_where_machines_get_their_credentials_is_never_a_node(networks: str | None) -> None:
    urls = [
        "http://169.254.169.254",
        "http://169.254.169.254:80/latest/meta-data",
        "http://2852039166",  # the same, as one number
        "http://0xa9fea9fe",
        "http://0251.0376.0251.0376",
        "http://[::ffff:169.254.169.254]",
        "http://[fd00:ec2::254]",
        "http://[fe80::1]",
        "http://100.100.100.200",
    ]
    async with gateway(**({"nodes_networks": networks} if networks else {})) as hearth:
        for url in urls:
            assert (await add(hearth.client, url, models=["m"])).status_code == 403, url
        assert await status(hearth.client) == {}


async def test_a_public_address_is_no_node_unless_it_is_allowed() -> None:
    async with gateway() as hearth:
        for url in ("http://8.8.8.8", "http://[2001:4860:4860::8888]:8000", "http://[::ffff:8.8.8.8]"):
            answer = await add(hearth.client, url, models=["m"])

            assert answer.status_code == 403
            assert "NODES_NETWORKS" in error_of(answer)["message"]
        assert await status(hearth.client) == {}


async def test_a_name_is_judged_by_every_address_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "metadata.example": ["169.254.169.254"],
        "public.example": ["8.8.8.8"],
        "mixed.example": ["127.0.0.1", "8.8.8.8"],
        "mapped.example": ["::ffff:8.8.8.8"],
        "nobody.example": [],
    }
    resolve = socket.getaddrinfo

    def resolving(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host not in names:
            return resolve(host, port, *rest, **more)
        if not names[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolving)
    async with gateway() as hearth:
        answers = {name: await add(hearth.client, f"http://{name}:1", models=["m"]) for name in names}

        assert {name: answer.status_code for name, answer in answers.items()} == {
            name: 403 if addresses else 400 for name, addresses in names.items()
        }
        assert all(name in error_of(answer)["message"] for name, answer in answers.items())
        assert await status(hearth.client) == {}


async def test_a_refused_address_is_never_contacted() -> None:
    async with FakeVLLM(["m"]) as node, gateway(nodes_networks="10.0.0.0/8") as hearth:
        answers = [await add(hearth.client, node.url), await add(hearth.client, node.url, models=["m"])]

        assert {answer.status_code for answer in answers} == {403}
        assert node.connections == 0


@pytest.mark.parametrize("models", [["m"], []], ids=["models given", "asked for its models"])
async def test_a_redirect_of_a_node_is_not_followed(models: list[str]) -> None:
    async with FakeVLLM(["m"]) as node, FakeVLLM(["m"]) as inner, gateway() as hearth:
        node.behave(Behaviour.REDIRECT_302, on=On.ALL, location=inner.url + "/v1/models")

        answer = await add(hearth.client, node.url, models=models, kind="vllm")
        await node.until(lambda n: n.requests)
        chats = [await hearth.chat() for _ in range(2)]

        assert answer.status_code == (200 if models else 502)
        assert all(chat.status_code >= 400 for chat in chats)
        assert inner.connections == 0


async def _post_from(hearth: Gateway, source: str, url: str) -> httpx.Response:
    transport = httpx.AsyncHTTPTransport(local_address=source)
    async with httpx.AsyncClient(base_url=hearth.url, transport=transport) as client:
        return await add(client, url, models=["m"])


async def test_an_engine_that_calls_itself_anywhere_is_reached_where_it_called_from() -> None:
    async with gateway() as hearth:
        for port, host in enumerate(("0.0.0.0", "localhost", "127.0.0.1", "[::]", "[::1]", "127.0.0.3"), 1):
            assert (await _post_from(hearth, "127.0.0.2", f"http://{host}:{port}")).text == ADDED

        assert list(await status(hearth.client)) == [
            *(f"http://127.0.0.2:{port}" for port in range(1, 6)),
            "http://127.0.0.3:6",
        ]


async def test_the_callers_address_is_not_taken_when_that_is_off() -> None:
    async with gateway(nodes_peer_address=False) as hearth:
        for host in ("0.0.0.0", "localhost", "127.0.0.1"):
            assert (await _post_from(hearth, "127.0.0.2", f"http://{host}:1")).text == ADDED

            assert f"http://{host}:1" in await status(hearth.client)


# -- how a node joins


@pytest.mark.parametrize("given", [True, False], ids=["kind given", "kind found"])
async def test_every_kind_of_node_can_be_added(given: bool) -> None:
    kinds = [kind for kind in KINDS if kind != "cloud"]
    async with AsyncExitStack() as stack:
        nodes: dict[str, FakeOllama | FakeOpenAI] = {}
        for kind in kinds:
            nodes[kind] = await stack.enter_async_context(KINDS[kind](models=[f"org/{kind}-model"]))
        hearth = await stack.enter_async_context(gateway())
        for kind, node in nodes.items():
            await added(hearth.client, node.url, name=kind, **({"kind": kind} if given else {}))

        answers = {kind: await hearth.chat(f"org/{kind}-model", stream=True) for kind in kinds}

        assert {name: node["kind"] for name, node in (await hearth.nodes()).items()} == {kind: kind for kind in kinds}
        assert {kind: answer.headers["x-hearth-node"] for kind, answer in answers.items()} == {k: k for k in kinds}
        assert all(read(answer).whole for answer in answers.values())


@pytest.mark.parametrize("before", [Behaviour.REFUSE, Behaviour.HANG])
async def test_an_engine_may_register_before_it_listens(before: Behaviour) -> None:
    async with FakeLMDeploy(["m"]) as engine, FakeLMDeploy(["m"]) as other, gateway(other) as hearth:
        engine.behave(before, on=On.ALL)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            answer = await registers(hearth.client, engine.port, "m")
            took.append(time.perf_counter() - began)
            assert (answer.status_code, answer.text) == (200, ADDED)
        joining = (await status(hearth.client))[engine.url]
        meanwhile = await chat(hearth, 6)

        assert min(took) < 0.2
        assert (joining["state"], joining["models"]) == ("joining", ["m"])
        assert all(answer.whole and answer.headers["x-hearth-attempts"] == "1" for answer in meanwhile)
        assert not engine.inferences

        engine.engine.state = State.UNHEALTHY  # it listens, but its model is still being loaded
        engine.recover()
        seen = len(engine.requests)
        await engine.until(lambda n: len(n.requests) > seen + 2, 10)
        assert (await status(hearth.client))[engine.url]["state"] == "joining"
        assert not engine.inferences

        engine.engine.state = State.READY
        await in_state(hearth.client, engine.url, "healthy")
        await chat(hearth, 6)
        assert engine.inferences


async def test_a_node_that_joins_alone_is_not_asked_before_it_is_healthy() -> None:
    async with FakeLMDeploy(["m"]) as engine, gateway() as hearth:
        engine.engine.state = State.UNHEALTHY
        await registers(hearth.client, engine.port, "m")

        answer = await hearth.chat()

        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert not engine.inferences


async def test_a_node_that_recovers_comes_back_by_itself() -> None:
    async with FakeVLLM(["m"]) as node, gateway() as hearth:
        await added(hearth.client, node.url)
        node.crash()
        await in_state(hearth.client, node.url, "down")

        node.recover()
        await in_state(hearth.client, node.url, "healthy")

        assert (await hearth.chat()).status_code == 200


async def test_a_registration_again_under_load_leaves_no_count_behind() -> None:
    async with HeldNode() as node, gateway() as hearth:
        counts: list[int] = []

        async def count() -> int:
            counts.append((await status(hearth.client))[node.url]["unfinished"])
            return counts[-1]

        async with streaming(hearth, node, 8) as running:
            assert await count() == 8
            for _ in range(3):
                await added(hearth.client, node.url, models=["m"], kind="vllm")
                assert await count() == 0
                running.append(asyncio.create_task(hearth.chat(stream=True)))
                await until(lambda: node.open == len(running), "it has begun")
                assert await count() == 1
            node.release.set()
            while not all(task.done() for task in running):
                await count()

        assert all(read(task.result()).whole for task in running)
        assert min(counts) == await count() == 0
        assert await hearth.in_flight() == 0


async def test_an_engine_that_registers_again_keeps_what_the_operator_said_of_it() -> None:
    async with FakeLMDeploy(["m", "lora"], api_key="sk-of-the-node-0001") as engine:
        known = {"name": "big", "kind": "lmdeploy", "api_key": "sk-of-the-node-0001", "max_concurrency": 3, "speed": 7}
        declared = json.dumps([{"url": engine.url, **known}])
        async with gateway(local_nodes=declared) as hearth:
            for _ in range(2):
                await registers(hearth.client, engine.port, "m")
                await in_state(hearth.client, engine.url, "healthy")

            (node,) = (await hearth.nodes()).values()
            assert (node["name"], node["max_concurrency"], node["models"]) == ("big", 3, ["m"])
            assert (await status(hearth.client))[engine.url]["speed"] == 7
            assert (await hearth.chat()).status_code == 200


async def test_hanging_additions_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.node_calls._DISCOVERY_SECONDS", 30)
    async with FakeVLLM(["a"]) as hanging, FakeVLLM(["m"]) as node, gateway(node) as hearth:
        hanging.behave(Behaviour.HANG, on=On.ALL)
        adding = [asyncio.create_task(add(hearth.client, hanging.url)) for _ in range(20)]
        await hanging.until(lambda n: len(n.requests) == 20, 10)
        took = []
        for _ in range(3):
            began = time.perf_counter()
            models = await hearth.client.get("/v1/models")
            shown = await hearth.client.get("/nodes/status")
            chatted = await hearth.chat()
            took.append(time.perf_counter() - began)
            assert {models.status_code, shown.status_code, chatted.status_code} == {200}

        hanging.crash()
        answers = await asyncio.gather(*adding)

        assert min(took) < 0.5
        assert {answer.status_code for answer in answers} == {502}


# -- how a node leaves


async def test_a_drained_node_ends_its_work_and_gets_no_more() -> None:
    async with HeldNode() as node, FakeVLLM(["m"]) as other, gateway() as hearth:
        async with streaming(hearth, node, 2) as running:
            await added(hearth.client, other.url)

            answer = await hearth.client.post("/nodes/drain", json={"url": node.url})
            assert answer.status_code == 202
            assert answer.json() == {"url": node.url, "state": "draining", "in_flight": 2}
            assert (await status(hearth.client))[node.url]["state"] == "draining"
            meanwhile = await chat(hearth, 8)
            node.release.set()
            ended = [read(await task) for task in running]
            answer = await hearth.client.post("/nodes/drain", json={"url": node.url})

        assert all(each.whole for each in (*meanwhile, *ended))
        assert len(node.inferences) == 2
        assert answer.status_code == 200
        assert answer.json() == {"url": node.url, "state": "drained", "in_flight": 0}

        answer = await hearth.client.post("/nodes/drain", json={"url": node.url, "drain": False})
        await hearth.client.post("/nodes/drain", json={"url": other.url})
        again = await chat(hearth, 8)
        assert (answer.status_code, answer.json()["state"]) == (200, "healthy")
        assert all(each.whole for each in again)
        assert len(node.inferences) == 10


async def test_the_only_node_drained_says_that_nobody_is_left() -> None:
    async with FakeVLLM(["m"]) as node, gateway(node) as hearth:
        await hearth.client.post("/nodes/drain", json={"url": node.url})

        answer = await hearth.chat()

        assert answer.status_code == 503
        assert "drain" in error_of(answer)["message"]
        assert (await hearth.client.get("/ready")).status_code == 503
        assert not node.inferences


async def test_what_runs_on_a_node_that_is_removed_comes_to_its_end() -> None:
    async with HeldNode() as node, FakeVLLM(["m"]) as other, gateway() as hearth:
        async with streaming(hearth, node, 4) as running:
            await added(hearth.client, other.url)

            await hearth.client.post("/nodes/remove", json={"url": node.url})
            meanwhile = await chat(hearth, 4)
            node.release.set()
            ended = [read(await task) for task in running]

        assert all(answer.whole for answer in (*ended, *meanwhile))
        assert len(node.inferences) == 4
        assert list(await status(hearth.client)) == [other.url]


async def _waits(hearth: Gateway) -> bool:
    return "hearth_waiting 1.0" in (await hearth.client.get("/metrics")).text


async def test_a_request_that_waits_for_a_node_goes_elsewhere_when_that_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.telemetry.metrics._CACHE_SECONDS", 0)
    async with HeldNode() as full, FakeVLLM(["m"]) as other, gateway() as hearth:
        async with streaming(hearth, full, 1) as running:
            await added(hearth.client, full.url, max_concurrency=1)
            running.append(asyncio.create_task(hearth.chat(stream=True)))
            await until(lambda: full.open == 2, "it is full")
            waiting = asyncio.create_task(hearth.chat())
            await until(lambda: _waits(hearth), "it waits")
            await added(hearth.client, other.url)
            await hearth.client.post("/nodes/remove", json={"url": full.url})

            assert (await waiting).status_code == 200
            assert len(full.inferences) == 2


async def test_terminate_ends_the_engine_and_forgets_it() -> None:
    async with FakeOpenAI(["m"], flavour=TERMINABLE, api_key="sk-of-the-node-0001") as node, gateway() as hearth:
        await added(hearth.client, node.url, api_key="sk-of-the-node-0001")

        answer = await hearth.client.post("/nodes/terminate", json={"url": node.url})

        assert (answer.status_code, answer.text) == (200, '"Terminated successfully"')
        asked = [request for request in node.requests if request.path == "/terminate"]
        assert [(request.method, request.authorization) for request in asked] == [("GET", "Bearer sk-of-the-node-0001")]
        assert await status(hearth.client) == {}


async def test_an_engine_that_will_not_end_is_forgotten_but_that_is_said() -> None:
    async with FakeLMDeploy(["m"]) as stubborn, FakeOpenAI(["m"], flavour=TERMINABLE) as node, gateway() as hearth:
        await added(hearth.client, stubborn.url)
        one = await hearth.client.post("/nodes/terminate", json={"url": stubborn.url})
        left = await status(hearth.client)
        await added(hearth.client, stubborn.url)
        await added(hearth.client, node.url)
        every = await hearth.client.get("/nodes/terminate_all")

        assert one.status_code == every.status_code == 502
        assert f"Failed to terminate node {stubborn.url}" in error_of(one)["message"]
        assert error_of(every)["message"] == "Failed to terminate all nodes"
        assert left == {}
        assert "/terminate" in [request.path for request in node.requests]
        assert await status(hearth.client) == {}


# -- what survives


def _without_latency(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name != "latency"}


def _aside(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in path.parent.glob(f"{path.name}.corrupt-*")]


async def test_nodes_survive_a_restart_and_removed_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "data" / "nodes.json"
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(FakeVLLM(["m", f"m{number}"])) for number in range(6)]
        async with gateway(nodes_file=str(path)) as hearth:
            for number, node in enumerate(nodes):
                await added(hearth.client, node.url, speed=number + 1, name=f"n{number}", max_concurrency=9)
            await chat(hearth, 12)
            await hearth.client.post("/nodes/remove", json={"url": nodes[5].url})
            before = await status(hearth.client)

        async with gateway(nodes_file=str(path)) as hearth:
            for node in nodes[:5]:
                await in_state(hearth.client, node.url, "healthy")
            after = await status(hearth.client)
            shown = await hearth.nodes()

            assert list(after) == [node.url for node in nodes[:5]]
            assert {node["unfinished"] for node in after.values()} == {0}
            assert all(_without_latency(after[url]) == _without_latency(before[url]) for url in after)
            assert set(shown) == {f"n{number}" for number in range(5)}
            assert {node["max_concurrency"] for node in shown.values()} == {9}
            assert all(answer.whole for answer in await chat(hearth, 5))


async def test_a_node_that_is_added_while_the_file_is_written_is_in_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, save, begun = tmp_path / "nodes.json", NodeStore.save, threading.Event()
    written = []

    def saving(store: NodeStore, nodes: Iterable[StoredNode]) -> None:
        first = not begun.is_set()
        begun.set()
        if first:
            time.sleep(0.5)  # as a slow disk would take
        save(store, nodes)
        written.append(first)

    monkeypatch.setattr(NodeStore, "save", saving)
    async with gateway(nodes_file=str(path)) as hearth:
        await add(hearth.client, "http://127.0.0.1:1", models=["m"])
        await until(begun.is_set, "the first is being written")
        await add(hearth.client, "http://127.0.0.1:2", models=["m"])

    await until(lambda: len(written) == 2, "both writes have ended")
    assert kept(path) == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


async def test_restored_nodes_are_asked_before_they_get_work(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with FakeVLLM(["m"]) as gone, FakeVLLM(["m"]) as alive:
        async with gateway(nodes_file=str(path)) as hearth:
            await added(hearth.client, gone.url, kind="vllm")
            await added(hearth.client, alive.url, kind="vllm")
        gone.behave(Behaviour.REFUSE)

        async with gateway(nodes_file=str(path), lb_strategy="round_robin") as hearth:
            await in_state(hearth.client, alive.url, "healthy")
            answers = await chat(hearth, 6)

            assert (await status(hearth.client))[gone.url]["state"] == "joining"
            assert {answer.headers["x-hearth-attempts"] for answer in answers} == {"1"}


async def test_the_settings_win_over_what_waskept(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with FakeVLLM(["m"]) as node:
        async with gateway(nodes_file=str(path)) as hearth:
            await added(hearth.client, node.url, speed=5)

        async with gateway(nodes_file=str(path), local_nodes=node_settings(node, speed=7)) as hearth:
            shown = await status(hearth.client)

            assert [(url, each["speed"]) for url, each in shown.items()] == [(node.url, 7)]


@pytest.mark.parametrize("off", [{"nodes_file": "off"}, {"disable_cache_status": True}], ids=str)
async def test_nothing_is_kept_when_that_is_off(
    off: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"nodes_file": "nodes.json", **off}
    async with gateway(**settings) as hearth:
        await add(hearth.client, NOWHERE, models=["m"])

    async with gateway(**settings) as hearth:
        assert await status(hearth.client) == {}
    assert not os.listdir(tmp_path)


async def test_a_gateway_that_is_killed_keeps_the_node_that_was_added_a_second_ago(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with FakeVLLM(["m"]) as node, GatewayProcess(tmp_path, nodes_file=path) as hearth:
        await hearth.serving()
        answer = await add(hearth.client, node.url, api_key="sk-of-the-node-0001")
        await until(lambda: kept(path) == [node.url], "it is written", 1.0)

        hearth.signal(signal.SIGKILL)
        await hearth.ended()
        await hearth.start()
        await hearth.serving()

        assert answer.text == ADDED
        await in_state(hearth.client, node.url, "healthy")
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", [b"\x00\xff\x80", b"{", b"null", b"[]", b'{"version": 99, "nodes": []}'], ids=repr)
async def test_a_file_that_holds_no_nodes_is_kept_aside_and_hearth_starts(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(content)
    async with FakeVLLM(["m"]) as node, gateway(nodes_file=str(path)) as hearth:
        warnings = [line["event"] for line in hearth.lines.all if line["level"] == "warning"]
        await added(hearth.client, node.url)
        await until(lambda: kept(path) == [node.url], "it is written")

        assert _aside(path) == [content]
        assert any("NODES_FILE" in warning and str(path) in warning for warning in warnings)
        assert (await hearth.chat()).status_code == 200


async def test_lmdeploys_own_file_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "proxy_config.json"
    async with FakeLMDeploy(["m"]) as one, FakeLMDeploy(["m", "lora"]) as two, FakeLMDeploy(["m"]) as nulled:
        full = {"role": 1, "models": ["m"], "unfinished": 7, "latency": [0.5] * 101, "speed": None}
        prefill = {"role": 2, "models": ["m", "lora"], "unfinished": -3, "latency": [], "speed": 4}
        null: Any = {"role": 1, "models": None, "unfinished": 0, "latency": [], "speed": None}
        document = {one.url: json.dumps(full), two.url: prefill, nulled.url: json.dumps(null)}
        path.write_text(json.dumps(document, indent=2))

        async with gateway(nodes_file=str(path)) as hearth:
            await in_state(hearth.client, one.url, "healthy")
            await in_state(hearth.client, two.url, "healthy")
            shown = await status(hearth.client)
            warnings = [line["event"] for line in hearth.lines.all if line["level"] == "warning"]

            assert set(shown) == {one.url, two.url}
            assert shown[one.url]["latency"] == [0.5] * 15
            assert {node["unfinished"] for node in shown.values()} == {0}
            assert (shown[two.url]["role"], shown[two.url]["speed"]) == (2, 4)
            assert shown[two.url]["models"] == ["m", "lora"]
            assert any(nulled.url in warning for warning in warnings)
            assert (await hearth.chat()).status_code == 200


async def test_an_ollama_that_was_added_gets_models_later() -> None:
    async with FakeOllama(["m"]) as node, gateway() as hearth:
        await added(hearth.client, node.url)

        node.engine.install("new")
        await until(lambda: _lists(hearth, "new:latest"), "the new model is listed")

        assert (await hearth.chat("new")).status_code == 200


async def _lists(hearth: Gateway, model: str) -> bool:
    return model in [each["id"] for each in (await hearth.client.get("/v1/models")).json()["data"]]
