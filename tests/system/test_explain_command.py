"""`python -m app explain`, in this process, as a start takes its time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.commands.explain import main
from app.settings import Settings
from tests.fakes import FakeOllama
from tests.system.harness import Gateway, gateway, until


@pytest.fixture
async def hearth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADMIN_KEYS", "boss")
    async with FakeOllama(models=["m"]) as node, FakeOllama(models=["other"]) as other:
        async with gateway(node, other, admin_keys="boss", model_map='{"alias": "m"}') as running:
            headers = {"authorization": "Bearer boss"}

            async def seen() -> bool:
                nodes = (await running.client.get("/admin/nodes", headers=headers)).json()["nodes"]
                return all(each["state"] == "healthy" for each in nodes)

            await until(seen, "both nodes are seen")
            yield running


async def _explain(hearth: Gateway, *words: str) -> int:
    return await asyncio.to_thread(main, [*words, "--url", hearth.url])


async def test_a_table_says_who_would_be_asked_and_why_not(hearth: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    status = await _explain(hearth, "--model", "alias")
    shown = capsys.readouterr().out

    lines = {line.split()[1]: line for line in shown.splitlines() if line[:1] in ("1", "-")}
    assert status == 0
    assert "the route alias" in shown
    assert lines["n0"].startswith("1")
    assert "m:latest" in lines["n0"]
    assert "it does not list m" in lines["n1"]
    assert "no cloud target is configured; set CLOUD_API_KEY" in shown


async def test_json_is_what_the_gateway_said(hearth: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    status = await _explain(hearth, "--model", "m", "--prompt-tokens", "5000", "--local-only", "--json")
    document = json.loads(capsys.readouterr().out)

    assert status == 0
    assert [step["node"] for step in document["order"]] == ["n0"]
    assert document["cloud"]["why"] == "the request is local only"


async def test_a_body_from_a_file_is_explained(
    hearth: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"model": "nobody", "input": "hi"}')

    status = await _explain(hearth, "--file", str(body))

    assert status == 0
    assert "404 model_not_found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "m", "--key", "ann"], "there is no such key"),
        (["--model", "m", "--admin-key", "wrong"], "the API key is not valid; give --admin-key"),
        ([], "give --model NAME"),
        (["--file", "nowhere.json"], "cannot be read"),
        (["--file", "x", "--model", "m"], "leave out --model"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    hearth: Gateway, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    status = await _explain(hearth, *words)
    error = capsys.readouterr().err

    assert status == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "nonsense"])
def test_a_gateway_that_is_not_there_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--model", "m", "--url", url])

    assert status == 2
    assert "gateway" in capsys.readouterr().err


class _Greedy(BaseHTTPRequestHandler):
    """Says of every request that it lacks a key, and keeps those that it is shown."""

    def do_POST(self) -> None:
        assert isinstance(self.server, _Stranger)
        self.server.keys.append(self.headers["authorization"])
        self.rfile.read(int(self.headers["content-length"]))
        body = rb'{"error": {"message": "the API key is missing\u001b[2J"}}'
        self.send_response(401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """It has nothing to say."""


class _Stranger(HTTPServer):
    """Another machine, as far as commands know: no name of this one leads there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.2", 0), _Greedy)
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.2:{self.server_port}"


@pytest.fixture
def stranger() -> Iterator[_Stranger]:
    with _Stranger() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def boss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process in an empty folder, where the settings hold nothing but an admin key."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEARTH_ADMIN_KEY", *(field.upper() for field in Settings.model_fields)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ADMIN_KEYS", "boss")


@pytest.mark.usefixtures("boss")
def test_the_settings_keys_go_to_this_machine_alone(stranger: _Stranger, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--model", "m", "--url", stranger.url])

    assert status == 2
    assert "give --admin-key" in capsys.readouterr().err
    assert stranger.keys == [None]


@pytest.mark.usefixtures("boss")
def test_what_a_server_says_cannot_steer_the_terminal(stranger: _Stranger, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "m", "--url", stranger.url])

    assert "the API key is missing?[2J" in capsys.readouterr().err


@pytest.mark.usefixtures("boss")
def test_a_key_that_is_given_goes_where_it_is_said_to_go(stranger: _Stranger) -> None:
    status = main(["--model", "m", "--url", stranger.url, "--admin-key", "mine"])

    assert status == 2
    assert stranger.keys == ["Bearer mine"]


async def test_the_settings_say_where_the_gateway_is(
    hearth: Gateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORT", hearth.url.rpartition(":")[2])

    status = await asyncio.to_thread(main, ["--model", "m"])

    assert status == 0
    assert "n0" in capsys.readouterr().out


async def test_a_body_that_is_too_large_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway says so, and closes the connection, long before it has all of it."""
    monkeypatch.chdir(tmp_path)
    body = tmp_path / "body.json"
    body.write_bytes(b'{"model": "m", "input": "' + b"x" * 2**23 + b'"}')
    async with gateway(max_body_mb=1) as small:
        status = await _explain(small, "--file", str(body))

    assert status == 2
    assert "raise MAX_BODY_MB" in capsys.readouterr().err
