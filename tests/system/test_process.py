"""Real processes: how Hearth starts, what it says when it cannot, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import Behaviour, FakeOllama, On
from tests.system.gateway_process import GatewayProcess
from tests.system.harness import node_settings, until
from tests.system.plain_client import PlainClient, connected, request
from tests.system.reading import read

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
SLOW: Any = {"tokens": 40, "token_seconds": 0.03}
UNHURRIED = {"health_check_interval": 0.1, "health_check_timeout": 30}
AT_ONCE_SECONDS = 3.0


@asynccontextmanager
async def running(folder: Path, node: FakeOllama, **settings: Any) -> AsyncIterator[GatewayProcess]:
    async with GatewayProcess(folder, local_nodes=node_settings(node), **settings) as hearth:
        await hearth.ready()
        yield hearth


async def streaming(hearth: GatewayProcess, client: PlainClient) -> None:
    """Returns once a streamed chat has begun to come."""
    client.write(request({**CHAT, "stream": True}))
    await asyncio.wait_for(client.reader.readuntil(b"t1 "), 5)


async def refuses(hearth: GatewayProcess) -> bool:
    try:
        async with connected(hearth.url):
            return False
    except ConnectionRefusedError:
        return True


def spotless(hearth: GatewayProcess) -> None:
    """That all that was said is log lines, and none of them an error."""
    assert hearth.stdout == b""
    assert not [line for line in hearth.lines if line["level"] in ("error", "critical")]
    assert b"Traceback" not in hearth.stderr


# -- start


def uvicorn(port: int) -> tuple[str, ...]:
    return ("-m", "uvicorn", "app.main:app", "--port", str(port), "--log-level", "warning")


@pytest.mark.parametrize("command", [None, uvicorn], ids=["serve", "uvicorn"])
async def test_it_starts_by_its_own_command_and_under_uvicorn(command: Any, tmp_path: Path) -> None:
    async with FakeOllama(models=["m"]) as node:
        async with GatewayProcess(tmp_path, command=command, local_nodes=node_settings(node)) as hearth:
            await hearth.ready()

            answer = await hearth.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            hearth.signal(signal.SIGTERM)
            await hearth.ended()

            assert read(answer).whole
            spotless(hearth)


async def test_it_starts_in_an_empty_folder_without_nodes_and_leaves_nothing_there(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, local_nodes="[]") as hearth:
        await hearth.serving()

        refused = await hearth.client.post("/v1/chat/completions", json=CHAT)

        assert (await hearth.client.get("/v1/models")).json() == {"object": "list", "data": []}
        assert (await hearth.client.get("/ready")).status_code == 503
        assert refused.status_code == 404
        assert "LOCAL_NODES" in refused.json()["error"]["message"]
        assert not os.listdir(tmp_path)
        assert hearth.stdout == b""


async def test_flags_win_over_the_environment_and_that_over_the_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("API_KEYS=from-the-file\nLB_STRATEGY=weighted\nMAX_ATTEMPTS=7\n")
    async with GatewayProcess(tmp_path, "--lb-strategy", "random", lb_strategy="round_robin") as hearth:
        await hearth.serving()

        known = await hearth.client.get("/v1/models", headers={"authorization": "Bearer from-the-file"})
        await until(lambda: hearth.lines, "its first line has come through the pipe")

        assert known.status_code == 200
        assert (await hearth.client.get("/v1/models")).status_code == 401
        assert hearth.lines[0]["strategy"] == "random"


BAD: dict[str, tuple[str, Any]] = {
    "PORT": ("port", "many"),
    "LB_STRATEGY": ("lb_strategy", "best"),
    "LOCAL_NODES": ("local_nodes", '[{"url": "ftp://x"}]'),
    "MODEL_MAP": ("model_map", "{"),
    "REQUEST_TIMEOUT": ("request_timeout", "-1"),
    "SSL_CERTFILE": ("ssl_certfile", "nowhere.pem"),
}


@pytest.mark.parametrize("name", list(BAD))
async def test_a_bad_setting_is_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    setting, value = BAD[name]
    async with GatewayProcess(tmp_path, command=None, **{setting: value}) as hearth:
        assert await hearth.ended(10) == 2

        assert hearth.stdout == b""
        assert hearth.stderr.count(b"\n") == 1
        assert hearth.stderr.startswith(b"hearth: ")
        assert name.encode() in hearth.stderr


async def test_a_bad_setting_stops_uvicorn_too_and_is_named(tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, command=uvicorn, lb_strategy="best") as hearth:
        assert await hearth.ended(10) != 0

        assert b"LB_STRATEGY" in hearth.stderr


@pytest.mark.parametrize("flags", [["--prot", "9000"], ["--port"], ["9000"]], ids=" ".join)
async def test_a_wrong_flag_is_one_line(flags: list[str], tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, *flags) as hearth:
        assert await hearth.ended(10) == 2

        assert hearth.stderr.count(b"\n") == 1
        assert b"Traceback" not in hearth.stderr


async def test_a_port_in_use_is_said_and_ends_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with GatewayProcess(tmp_path, port=port) as hearth:
            assert await hearth.ended(10) == 1

            assert hearth.stderr.decode() == (
                f"hearth: PORT: {port} on 127.0.0.1 is in use; set another, or stop what uses it\n"
            )


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], []], ids=str)
async def test_its_command_line_explains_itself(arguments: list[str], tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path, command=lambda port: ("-m", "app", *arguments)) as hearth:
        status = await hearth.ended(10)

        assert status == (0 if arguments else 2)
        assert b"hearth" in hearth.stdout if "--version" in arguments else b"usage" in hearth.stdout + hearth.stderr


# -- the end


@SIGNALS
async def test_idle_it_ends_at_once_and_well(number: signal.Signals, tmp_path: Path) -> None:
    async with FakeOllama(models=["m"]) as node, running(tmp_path, node) as hearth:
        assert (await hearth.client.post("/v1/chat/completions", json=CHAT)).status_code == 200

        began = time.monotonic()
        hearth.signal(number)

        assert await hearth.ended() == 0
        assert time.monotonic() - began < AT_ONCE_SECONDS
        spotless(hearth)


@SIGNALS
async def test_streams_under_way_come_to_their_end_and_nobody_else_gets_in(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with FakeOllama(models=["m"], **SLOW) as node, running(tmp_path, node) as hearth:
        async with connected(hearth.url) as busy, connected(hearth.url) as kept:
            assert (await kept.ask(request(b"{"))).status == 400
            kept.write(request({**CHAT, "stream": True}))
            await streaming(hearth, busy)
            await node.until(lambda n: n.open == 2)

            hearth.signal(number)
            await until(lambda: refuses(hearth), "nobody else gets in")
            assert node.open == 2
            rest = await asyncio.wait_for(busy.reader.read(-1), 10)

            assert b"t39 " in rest
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert await hearth.ended() == 0
            assert [line["outcome"] for line in hearth.requests()] == ["refused", "ok", "ok"]
            spotless(hearth)


async def test_a_request_on_a_kept_connection_is_told_to_come_back(tmp_path: Path) -> None:
    async with FakeOllama(models=["m"], **SLOW) as node, running(tmp_path, node) as hearth:
        async with connected(hearth.url) as client:
            # Sent together: the second is read when the first is answered, by which time Hearth is ending.
            client.write(request({**CHAT, "stream": True}) + request(CHAT))
            await node.until(lambda n: n.open == 1)
            hearth.signal(signal.SIGTERM)
            first, second = await client.answer(), await client.answer()

            assert first.body.endswith(b"data: [DONE]\n\n")
            assert second.status == 503
            assert second.header("retry-after")
            assert second.json["error"]["code"] == "shutting_down"
            assert await client.closed()
            assert await hearth.ended() == 0
            assert len(node.inferences) == 1


@SIGNALS
async def test_a_second_signal_ends_it_at_once(number: signal.Signals, tmp_path: Path) -> None:
    async with FakeOllama(models=["m"], tokens=10_000, token_seconds=0.05) as node, running(tmp_path, node) as hearth:
        async with connected(hearth.url) as client:
            await streaming(hearth, client)
            hearth.signal(number)
            await until(lambda: any("second signal" in line["event"] for line in hearth.lines), "it says what it does")

            began = time.monotonic()
            hearth.signal(number)
            await hearth.ended()

            assert time.monotonic() - began < AT_ONCE_SECONDS
            await node.until(lambda n: n.aborted)
            assert b"Traceback" not in hearth.stderr


async def test_it_does_not_outlive_a_node_that_hangs(tmp_path: Path) -> None:
    """Probes and connections that are under way hold up no end."""
    async with FakeOllama(models=["m"]) as node, running(tmp_path, node, **UNHURRIED) as hearth:
        node.behave(Behaviour.HANG, on=On.ALL)
        asked = len(node.requests)
        await node.until(lambda n: len(n.requests) > asked, 15)

        hearth.signal(signal.SIGTERM)

        assert await hearth.ended() == 0
        spotless(hearth)


# -- what it says


async def test_every_request_is_one_line_of_json(tmp_path: Path) -> None:
    async with FakeOllama(models=["m"]) as node, running(tmp_path, node) as hearth:
        for number in range(3):
            headers = {"x-request-id": f"request-{number}"}
            await hearth.client.post("/v1/chat/completions", json={**CHAT, "stream": number == 1}, headers=headers)
        await hearth.client.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
        await hearth.client.post("/v1/embeddings", json={"model": "m", "input": "hi"})
        await until(lambda: len(hearth.requests()) == 5, "all are logged")

        lines = hearth.requests()
        assert [line["outcome"] for line in lines] == ["ok", "ok", "ok", "refused", "ok"]
        assert [line["id"] for line in lines[:3]] == ["request-0", "request-1", "request-2"]
        assert [line["operation"] for line in lines] == ["chat"] * 4 + ["embedding"]
        assert all(line["timestamp"].endswith("Z") for line in hearth.lines)
        assert lines[0]["node"] == "n0"
        assert lines[0]["tokens_out"] == 8
        assert lines[3]["status"] == 400
        spotless(hearth)


async def test_its_metrics_are_prometheus_and_carry_its_name(tmp_path: Path) -> None:
    async with FakeOllama(models=["m"]) as node, running(tmp_path, node) as hearth:
        for stream in (True, False):
            await hearth.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})

        answer = await hearth.client.get("/metrics")
        families = list(text_string_to_metric_families(answer.text))
        samples = [sample for family in families for sample in family.samples]

        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert all(family.name.startswith("hearth_") for family in families)
        assert all(family.documentation for family in families)
        served = [s for s in samples if s.name == "hearth_requests_total" and s.labels["outcome"] == "ok"]
        assert sum(sample.value for sample in served) == 2
        assert {sample.labels["node"] for sample in served} == {"n0"}
        assert [s.value for s in samples if s.name == "hearth_in_flight"] == [0]


async def test_started_for_a_terminal_it_can_also_be_read_by_people(tmp_path: Path) -> None:
    async with FakeOllama(models=["m"]) as node, running(tmp_path, node, log_format="console") as hearth:
        await hearth.client.post("/v1/chat/completions", json=CHAT)
        await until(lambda: b"request" in hearth.stderr, "the request is logged")

        with pytest.raises(json.JSONDecodeError):
            _ = hearth.lines
        assert b"Traceback" not in hearth.stderr
