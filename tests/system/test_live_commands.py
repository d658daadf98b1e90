"""`nodes` and `top` with a gateway that runs, and with one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.cli import main
from app.settings import Settings
from tests.fakes import FakeOllama
from tests.system.gateway_process import GatewayProcess, free_port
from tests.system.harness import Gateway, gateway, until
from tests.system.test_command_line import Shell

KEY = "admin-secret"


@pytest.fixture
async def hearth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HEARTH_ADMIN_KEY", KEY)
    async with FakeOllama(models=["m"]) as node, FakeOllama(models=["m"]) as other:
        async with gateway(node, other, admin_keys=KEY, lb_strategy="least_connections") as running:
            running.client.headers["authorization"] = f"Bearer {KEY}"
            await running.state("n0", "healthy")
            await running.state("n1", "healthy")
            yield running


async def _run(hearth: Gateway, *words: str) -> int:
    return await asyncio.to_thread(main, [words[0], "--url", hearth.url, *words[1:]])


async def test_nodes_are_shown_drained_and_enabled(hearth: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    drained = await _run(hearth, "nodes", "drain", "n1")
    while_drained = (await hearth.nodes())["n1"]["draining"]
    said = capsys.readouterr().out
    shown = await _run(hearth, "nodes")
    table = capsys.readouterr().out.splitlines()
    enabled = await _run(hearth, "nodes", "enable", "n1")
    capsys.readouterr()
    await _run(hearth, "nodes", "--json")
    nodes = json.loads(capsys.readouterr().out)["nodes"]

    assert (drained, shown, enabled) == (0, 0, 0)
    assert while_drained
    assert said == "n1 gets no new requests\n"
    assert [line.split()[:4] for line in table[1:]] == [
        ["n0", "local", "ollama", "healthy"],
        ["n1", "local", "ollama", "draining"],
    ]
    assert [node["draining"] for node in nodes] == [False, False]


async def test_top_prints_one_frame_where_nobody_watches(hearth: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    await hearth.chat("m", headers={"authorization": ""})
    status = await _run(hearth, "top", "--once")
    frame = capsys.readouterr().out
    await _run(hearth, "top", "--json")
    snapshot = json.loads(capsys.readouterr().out)

    assert status == 0
    assert "n0" in frame
    assert "least_connections" in frame
    assert [node["name"] for node in snapshot["nodes"]] == ["n0", "n1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nodes", "drain", "n9"), "there is no local node 'n9'"),
        (("nodes", "--key", "wrong"), "wants an admin key: the API key is not valid; give --admin-key"),
        (("top", "--once", "--key", "wrong"), "wants an admin key: the API key is not valid; give --admin-key"),
        (("nodes", "--admin-key", "wrong"), "wants an admin key: the API key is not valid; give --admin-key"),
        (("nodes", "--url", "http://127.0.0.1:9"), "python -m app serve"),
        (("top", "--url", "127.0.0.1:many"), "is not a URL"),
        (("nodes", "--url", "http://[::1"), "is not a URL"),
        (("nodes", "--url", "http://my gateway:8000"), "is not a URL"),
        (("nodes", "--url", "http://gpu..lan:8000"), "is not a URL"),
    ],
)
async def test_what_cannot_be_done_is_said_in_one_line(
    hearth: Gateway, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    status = await _run(hearth, *words)
    error = capsys.readouterr().err

    assert status == 2
    assert said in error
    assert error.count("\n") == 1


async def test_what_is_no_gateway_is_told(
    hearth: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeOllama() as node:
        status = await asyncio.to_thread(main, ["nodes", "--url", node.url])

    assert status == 2
    assert "is no Hearth" in capsys.readouterr().err


async def test_the_settings_say_where_the_gateway_is_and_give_its_key(tmp_path: Path) -> None:
    """Its certificate is for another name and of an authority that nobody trusts: it is the one of the settings."""
    authority = trustme.CA()
    issued = authority.issue_cert("hearth.test")
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    chain.write_bytes(issued.cert_chain_pems[0].bytes())
    key.write_bytes(issued.private_key_pem.bytes())
    files: dict[str, Any] = {"ssl_certfile": str(chain), "ssl_keyfile": str(key)}
    async with GatewayProcess(tmp_path, admin_keys=KEY, local_nodes="http://127.0.0.1:9", **files) as running:
        await running.serving()
        own = {name.upper(): value for name, value in files.items()}
        shell = Shell(tmp_path, PORT=str(running.port), ADMIN_KEYS=KEY, HOST="0.0.0.0", API_KEYS="x", **own)
        shown = await shell("nodes", "--json")
        examined = await shell("doctor", "--json")

    assert shown.status == 0, shown.err
    assert [node["name"] for node in json.loads(shown.out)["nodes"]] == ["127.0.0.1:9"]
    assert "hearth_runs" in [finding["code"] for finding in json.loads(examined.out)["findings"]]


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--help"),
        ("nodes", "--help"),
        ("top", "--once", "--url", "http://127.0.0.1:9", "--key", "k"),
        ("explain", "--model", "m", "--url", "http://127.0.0.1:9", "--admin-key", "k"),
    ],
)
async def test_a_command_starts_with_little(words: tuple[str, ...], tmp_path: Path) -> None:
    done = await Shell(tmp_path, PYTHONPROFILEIMPORTTIME="1")(*words)

    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    heavy = {
        "sqlalchemy",
        "fastapi",
        "uvicorn",
        "httpx",
        "aiohttp",
        "pydantic_settings",
        "app.settings",
        "app.main",
        "redis",
    }
    assert done.status == (0 if "--help" in words else 2)
    assert "typer" in imported
    assert not heavy & imported


@pytest.mark.parametrize("key", ["q", "Ctrl-C"])
async def test_the_live_table_ends_at_a_key(hearth: Gateway, tmp_path: Path, key: str) -> None:
    ours, theirs = pty.openpty()
    words = (sys.executable, "-m", "app", "top", "--url", hearth.url, "--key", KEY)
    process = await asyncio.create_subprocess_exec(
        *words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=Shell(tmp_path).environment
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    screen = b""

    def shows(what: bytes) -> bool:
        nonlocal screen
        with suppress(OSError):  # nothing is there now, or nobody any more
            screen += os.read(ours, 1 << 16)
        return what in screen

    try:
        await until(lambda: shows(b"n0"), "the table is there", 30)
        await hearth.chat("m", headers={"authorization": ""})
        await until(lambda: shows(b"least_conn"), "the new request is in it", 30)
        if key == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT)  # which a terminal makes of it
        await until(lambda: shows(b"\x1b[?1049l"), "the screen is given back", 30)
        status = await asyncio.wait_for(process.wait(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)

    assert status == 0
    assert b"Traceback" not in screen


async def test_no_gateway_at_the_usual_place_is_one_line(tmp_path: Path) -> None:
    done = await Shell(tmp_path, PORT=str(free_port()))("top")

    assert done.status == 2
    assert "start it with `python -m app serve`" in done.err
    assert done.err.count("\n") == 1
