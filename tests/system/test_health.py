"""What Hearth believes of its nodes, how it finds out without costing them anything, and that it acts on it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from tests.fakes import (
    KINDS,
    Behaviour,
    FakeCloud,
    FakeLlamaCpp,
    FakeLMDeploy,
    FakeNode,
    FakeOllama,
    FakeOpenAI,
    FakeVLLM,
    On,
    State,
)
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.reading import read
from tests.system.scripted import RawClient

LOCAL_KINDS = [name for name in KINDS if name != "cloud"]
KEY = "sk-cloud-key-for-tests-0001"
PROBE_PATHS: Mapping[str, set[str]] = {
    "ollama": {"/api/version", "/api/tags", "/api/ps"},
    "vllm": {"/health", "/v1/models", "/metrics"},
    "tgi": {"/health", "/info", "/metrics"},
    "lmdeploy": {"/health", "/v1/models", "/metrics"},
    "llamacpp": {"/health", "/v1/models", "/props"},  # its /slots and /metrics would keep it from sleeping
    "sglang": {"/v1/models", "/server_info", "/metrics"},  # its /health generates a token
    "transformers": {"/health", "/v1/models"},
    "lmstudio": {"/v1/models", "/api/v0/models"},
    "generic": {"/v1/models"},
}


def _model(kind: str) -> str:
    return "org/m" if kind == "transformers" else "m"


def _changes(hearth: Gateway, name: str = "n0") -> list[str]:
    """The states that a node went through after its first."""
    changes = [line for line in hearth.lines.all if line["event"] == "node changed" and line["node"] == name]
    return [line["state"] for line in changes if line["before"] != "unknown"]


def _asked(node: FakeNode[Any], path: str) -> int:
    return sum(request.path == path for request in node.requests)


async def _probes(node: FakeNode[Any], count: int) -> None:
    """Waits for so many more requests of probes."""
    enough = len(node.requests) + count
    await until(lambda: len(node.requests) >= enough, "it is probed")


# -- probes cost nothing


@pytest.mark.parametrize("kind", LOCAL_KINDS)
async def test_probes_are_cheap_gets_on_known_paths(kind: str) -> None:
    async with KINDS[kind](models=[_model(kind)]) as node, gateway(node, health_check_interval=0.05) as hearth:
        await _probes(node, 8)

        assert {request.method for request in node.requests} == {"GET"}
        assert {request.path for request in node.requests} == PROBE_PATHS[kind]
        assert not node.inferences
        if isinstance(node, FakeOllama):
            assert not node.engine.loads
        assert (await hearth.nodes())["n0"]["state"] == "healthy"


async def test_every_kind_is_recognised_without_inference() -> None:
    fakes = {kind: KINDS[kind](models=[_model(kind) + "-" + kind]) for kind in LOCAL_KINDS}
    for fake in fakes.values():
        await fake.start()
    try:
        nodes = [{"url": fake.url, "name": kind} for kind, fake in fakes.items()]
        async with gateway(local_nodes=json.dumps(nodes), health_check_interval=0.1) as hearth:
            await until(lambda: _all_healthy(hearth), "all are recognised")
            assert not [fake for fake in fakes.values() if fake.inferences]

            shown = await hearth.nodes()
            served = {kind: await hearth.chat(_model(kind) + "-" + kind, stream=True) for kind in LOCAL_KINDS}

            assert {name: node["kind"] for name, node in shown.items()} == {kind: kind for kind in LOCAL_KINDS}
            assert {kind: answer.headers["x-hearth-node"] for kind, answer in served.items()} == {
                kind: kind for kind in LOCAL_KINDS
            }
            assert all(read(answer).whole for answer in served.values())
    finally:
        for fake in fakes.values():
            await fake.stop()


async def _all_healthy(hearth: Gateway) -> bool:
    return {node["state"] for node in (await hearth.nodes()).values()} == {"healthy"}


async def test_a_node_of_unknown_kind_is_recognised_when_it_comes_up() -> None:
    async with FakeOllama(models=["m"]) as node:
        node.behave(Behaviour.REFUSE)
        async with gateway(local_nodes=node.url, health_check_interval=0.1) as hearth:
            assert (await hearth.chat()).status_code == 503

            node.recover()
            await until(lambda: _all_healthy(hearth), "it is recognised")

            assert (await hearth.chat()).status_code == 200


async def test_a_server_that_is_no_node_is_told_as_such() -> None:
    async with FakeOllama(models=["m"]) as node:
        node.behave(Behaviour.HTML, on=On.ALL)
        async with gateway(local_nodes=node.url, health_check_interval=0.1) as hearth:
            shown = next(iter((await hearth.nodes()).values()))

            assert shown["state"] == "down"
            assert shown["kind"] is None
            assert "set its kind" in shown["reason"]


# -- up and down


async def test_one_bad_probe_changes_nothing() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, health_check_interval=0.1) as hearth:
        await hearth.state("n0", "healthy")

        node.behave(Behaviour.STATUS_500, times=1, on=On.PROBES)
        await _probes(node, 8)

        assert not _changes(hearth)


async def test_a_node_goes_down_after_two_bad_probes_and_comes_back_after_two_good_ones() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, health_check_interval=0.1) as hearth:
        await hearth.state("n0", "healthy")

        node.behave(Behaviour.STATUS_500, on=On.PROBES)
        bad = len(node.requests)
        await hearth.state("n0", "down")
        bad = len(node.requests) - bad
        good = len(node.requests)
        node.recover()
        await hearth.state("n0", "healthy")
        good = len(node.requests) - good

        assert bad >= 2
        assert good >= 4  # each good one asks for health and models
        assert _changes(hearth) == ["down", "healthy"]


async def test_a_node_that_flaps_is_not_carried_along() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, health_check_interval=0.02) as hearth:
        await hearth.state("n0", "healthy")
        for _ in range(4):
            node.behave(Behaviour.STATUS_500, times=1, on=On.PROBES)
            node.behave(Behaviour.OK, times=2, on=On.PROBES)

        await _probes(node, 14)

        assert not _changes(hearth)


async def test_a_node_that_hangs_delays_neither_requests_nor_news_of_others() -> None:
    async with FakeVLLM(models=["m"]) as hanging, FakeVLLM(models=["m"]) as other:
        settings = {"health_check_interval": 0.1, "health_check_timeout": 0.3}
        async with gateway(hanging, other, **settings) as hearth:
            await hearth.state("n1", "healthy")
            hanging.behave(Behaviour.HANG, on=On.PROBES)
            await _probes(hanging, 1)
            probed, began = len(other.requests), time.monotonic()

            assert (await hearth.client.get("/v1/models")).status_code == 200
            assert time.monotonic() - began < 0.2
            await hearth.state("n0", "down")

            assert (await hearth.nodes())["n0"]["reason"] == "does not answer probes in time"
            assert len(other.requests) - probed >= 4
            assert {(await hearth.chat()).headers["x-hearth-node"] for _ in range(4)} == {"n1"}


async def test_a_node_at_work_that_is_slow_to_answer_probes_is_given_more_time() -> None:
    async with FakeVLLM(models=["m"], tokens=10_000, token_seconds=0.02) as node:
        settings = {"health_check_interval": 0.05, "health_check_timeout": 0.5}
        async with gateway(node, **settings) as hearth, RawClient(hearth.url) as client:
            await client.ask()
            await client.read_until(b"t0 ")
            node.behave(Behaviour.HANG, on=On.PROBES)

            await _probes(node, 3)  # of which two have failed by then: enough for an idle node
            assert (await hearth.nodes())["n0"]["state"] == "healthy"
            await hearth.state("n0", "down")

            assert node.open == 1, "its stream goes on"
            await client.reader.read(65536)
            await client.read_until(b" ")


async def test_a_request_that_finds_nobody_there_has_the_node_looked_at_at_once() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node, health_check_interval=60) as hearth:
        node.behave(Behaviour.REFUSE)

        await hearth.chat()

        await hearth.state("n0", "down")


async def test_a_node_is_asked_again_and_again_what_a_load_has_left_in_its_memory() -> None:
    async with (
        FakeOllama(models=["m", "other"], load_seconds=0.9) as node,
        gateway(node, health_check_interval=60) as hearth,
    ):
        await hearth.chat("m")
        asked = _asked(node, "/api/ps")
        loading = asyncio.create_task(hearth.chat("other"))

        await until(lambda: _asked(node, "/api/ps") >= asked + 4 or loading.done(), "it is asked what is in memory")

        assert not loading.done()
        await loading


# -- what is shown is what is done


@pytest.mark.parametrize("make", [FakeVLLM, FakeLMDeploy, FakeLlamaCpp])
async def test_a_node_gets_requests_exactly_while_it_is_shown_as_able(make: type[FakeOpenAI]) -> None:
    async with make(models=["m"]) as node, make(models=["m"]) as steady:
        settings = {"health_check_interval": 0.05, "breaker_reset_timeout": 60, "breaker_fail_max": 1}
        async with gateway(node, steady, lb_strategy="round_robin", **settings) as hearth:

            async def gets_requests() -> bool:
                before = len(node.inferences)
                for _ in range(4):
                    assert (await hearth.chat()).status_code == 200
                return len(node.inferences) > before

            for state, shown in {
                State.READY: "healthy",
                State.LOADING: "loading" if make is FakeLlamaCpp else "down",
                State.UNHEALTHY: "healthy" if make is FakeLlamaCpp else "down",
                State.SLEEPING: "sleeping" if make is FakeLMDeploy else "healthy",
            }.items():
                node.engine.state = state
                await hearth.state("n0", shown)
                assert await gets_requests() == (shown == "healthy"), state
            node.engine.state = State.READY
            await hearth.state("n0", "healthy")
            node.behave(Behaviour.STATUS_500)
            await gets_requests()
            node.recover()

            view = (await hearth.nodes())["n0"]
            assert (view["state"], view["breaker"]["state"]) == ("healthy", "open")
            assert view["breaker"]["reason"] == "it answered 500"
            assert not await gets_requests()


async def test_a_node_that_loads_gets_no_request_unless_it_is_alone() -> None:
    async with FakeLlamaCpp(models=["m"]) as loading, FakeLlamaCpp(models=["m"]) as ready:
        async with gateway(loading, ready, lb_strategy="round_robin", health_check_interval=0.05) as hearth:
            loading.engine.state = State.LOADING
            await hearth.state("n0", "loading")
            assert (await hearth.nodes())["n0"]["reason"] == "it is loading its model"
            for _ in range(4):
                await hearth.chat()
            assert not loading.inferences

            ready.behave(Behaviour.REFUSE)
            await hearth.state("n1", "down")
            await hearth.chat()

            assert loading.inferences


async def test_a_node_that_is_loading_when_hearth_starts_is_used_as_soon_as_it_is_ready() -> None:
    async with FakeLlamaCpp(models=["m"], state=State.LOADING) as node:
        async with gateway(node, health_check_interval=0.05) as hearth:
            early = await hearth.chat()
            node.engine.state = State.READY
            await hearth.state("n0", "healthy")

            assert early.status_code == 503
            assert "loading" in early.json()["error"]["message"]
            assert early.headers["retry-after"]
            assert (await hearth.chat()).status_code == 200


async def test_a_node_that_sleeps_gets_nothing_even_alone_and_holds_up_nobody() -> None:
    async with FakeLMDeploy(models=["m"], state=State.SLEEPING) as node:
        async with gateway(local_nodes=node_settings(node, models=["m"]), health_check_interval=0.05) as hearth:
            await hearth.state("n0", "sleeping")
            asked = len(node.requests)
            began = time.monotonic()
            listed = await hearth.client.get("/v1/models")
            answer = await hearth.chat()

            assert time.monotonic() - began < 0.5
            assert listed.json()["data"][0]["hearth"]["nodes"] == [{"node": "n0", "available": False}]
            assert answer.status_code == 503
            assert "sleeps" in answer.json()["error"]["message"]
            assert not node.inferences
            assert {request.path for request in node.requests[asked:]} <= {"/health"}, "nobody wakes it"


# -- reasons in plain words


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour.REFUSE, "connection refused"),
        (Behaviour.HANG, "does not answer probes in time"),
        (Behaviour.CLOSE_AT_ONCE, "does not answer as an HTTP server does"),
        (Behaviour.STATUS_500, "its health check answered 500"),
        (Behaviour.STATUS_503, "its health check answered 503"),
        (Behaviour.STATUS_401, "check the node's api_key"),
        (Behaviour.REDIRECT_302, "its health check answered 302"),
        (Behaviour.ENDLESS_HEAD, "does not answer"),
    ],
)
async def test_the_reason_for_a_node_being_down_is_told_wherever_somebody_looks(
    behaviour: Behaviour, reason: str
) -> None:
    async with FakeVLLM(models=["m"]) as node:
        node.behave(behaviour, on=On.ALL)
        async with gateway(node, health_check_interval=0.1, health_check_timeout=0.3) as hearth:
            await hearth.state("n0", "down")

            assert reason in (await hearth.nodes())["n0"]["reason"]
            assert reason in (await hearth.client.get("/ready")).json()["reason"]
            refused = await hearth.chat()
            assert refused.status_code == 503
            assert reason in refused.json()["error"]["message"]
            assert "Error" not in reason


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_a_probe_that_is_redirected_is_not_followed(path: str) -> None:
    async with FakeVLLM(models=["m"]) as node, FakeVLLM(models=["m"]) as elsewhere:
        node.behave(Behaviour.REDIRECT_302, on=On.ALL, location=elsewhere.url + path)
        async with gateway(node, health_check_interval=0.1) as hearth:
            await _probes(node, 3)

            assert not elsewhere.requests
            assert (await hearth.nodes())["n0"]["state"] == "down"


@pytest.mark.parametrize("key", ["", "sk-wrong-key-0001"])
async def test_a_node_that_refuses_its_key_when_probed_says_so(key: str) -> None:
    own = {"api_key": key} if key else {}
    async with FakeVLLM(models=["m"], api_key="sk-right-key-0001") as node:
        async with gateway(local_nodes=node_settings(node, **own), health_check_interval=0.1) as hearth:
            await hearth.state("n0", "down")

            shown = await hearth.client.get("/admin/nodes")
            assert "api_key" in shown.json()["nodes"][0]["reason"]
            assert "sk-" not in shown.text


async def test_a_name_that_cannot_be_resolved_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    _resolve(monkeypatch, None)
    nodes = json.dumps([{"url": "http://gpu-box.test:11434", "kind": "ollama", "name": "n0", "models": ["m"]}])
    async with gateway(local_nodes=nodes, health_check_interval=0.1) as hearth:
        await hearth.state("n0", "down")

        assert (await hearth.nodes())["n0"]["reason"] == "its name could not be resolved"
        assert (await hearth.chat()).status_code == 503


async def test_a_name_whose_first_address_is_dead_is_reached_by_the_next_one_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeVLLM(models=["m"]) as node:
        # As localhost is on many machines: IPv6 first, where nobody listens.
        _resolve(monkeypatch, node.port)
        nodes = json.dumps([{"url": f"http://gpu-box.test:{node.port}", "kind": "vllm", "name": "n0"}])
        async with gateway(local_nodes=nodes) as hearth:
            await hearth.state("n0", "healthy")
            began = time.monotonic()

            assert (await hearth.chat()).status_code == 200
            assert time.monotonic() - began < 1
            assert node.inferences[0].headers["host"] == f"gpu-box.test:{node.port}"


async def test_a_certificate_that_nobody_trusts_is_told_as_such() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        node = {"url": f"https://127.0.0.1:{port}", "kind": "vllm", "name": "n0", "models": ["m"]}
        async with gateway(local_nodes=json.dumps([node]), health_check_interval=0.1) as hearth:
            await hearth.state("n0", "down")

            assert "its TLS certificate was not accepted" in (await hearth.nodes())["n0"]["reason"]


async def test_localhost_inside_a_container_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.probes.Path", lambda path: SimpleNamespace(exists=lambda: path == "/.dockerenv"))
    async with FakeVLLM(models=["m"]) as node:
        node.behave(Behaviour.REFUSE)
        async with gateway(node, health_check_interval=0.1) as hearth:
            await hearth.state("n0", "down")

            assert "host.docker.internal" in (await hearth.nodes())["n0"]["reason"]


def _resolve(monkeypatch: pytest.MonkeyPatch, port: int | None) -> None:
    """Resolves gpu-box.test to both loopback addresses, or not at all, and asks no name server."""
    real = socket.getaddrinfo

    def resolve(host: Any, *more: Any, **options: Any) -> Any:
        if host not in ("gpu-box.test", b"gpu-box.test"):
            return real(host, *more, **options)
        if port is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(socket.AF_INET6, *stream, ("::1", port, 0, 0)), (socket.AF_INET, *stream, ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


# -- what a node serves


async def test_a_model_that_is_pulled_or_removed_is_noticed() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, health_check_interval=0.05) as hearth:
        assert (await hearth.chat("new")).status_code == 404

        node.engine.install("new")
        await until(lambda: _serves(hearth, "new:latest"), "the new model is listed")
        assert (await hearth.chat("new")).status_code == 200
        node.engine.remove("m")
        await until(lambda: _serves_not(hearth, "m:latest"), "the old model is not listed")

        gone = await hearth.chat("m")
        assert gone.status_code == 404
        assert len(node.inferences) == 1


async def _serves(hearth: Gateway, name: str) -> bool:
    return name in (await hearth.nodes())["n0"]["models"]


async def _serves_not(hearth: Gateway, name: str) -> bool:
    return not await _serves(hearth, name)


async def test_a_node_without_any_model_is_up_but_not_ready() -> None:
    async with FakeOllama(models=[]) as node, gateway(node) as hearth:
        ready = await hearth.client.get("/ready")

        assert (await hearth.nodes())["n0"]["state"] == "healthy"
        assert ready.status_code == 503
        assert "lists no models" in ready.json()["reason"]


async def test_a_list_of_models_that_cannot_be_read_for_once_forgets_nothing() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, health_check_interval=0.05) as hearth:
        for _ in range(3):
            node.behave(Behaviour.GARBAGE, times=1, on=On.PROBES)
            node.behave(Behaviour.OK, times=3, on=On.PROBES)
        probing = asyncio.create_task(_probes(node, 12))
        while not probing.done():
            assert (await hearth.chat()).status_code == 200

        assert not _changes(hearth)


@pytest.mark.parametrize("status", [Behaviour.STATUS_404, Behaviour.STATUS_429])
async def test_a_cloud_that_lists_no_models_is_not_taken_as_down_for_it(status: Behaviour) -> None:
    async with FakeOllama(models=["m"]) as local, FakeCloud() as cloud:
        cloud.behave(status, on=On.PROBES)
        entry = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
        async with gateway(local, cloud_providers=json.dumps([entry]), health_check_interval=0.1) as hearth:
            await _probes(cloud, 3)
            local.behave(Behaviour.STATUS_500)

            answer = await hearth.chat()

            assert answer.status_code == 200
            assert answer.headers["x-hearth-node"] == "c0"
            assert cloud.engine.calls == 1
