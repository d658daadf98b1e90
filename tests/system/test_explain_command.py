"""`python -m app explain`, in this process, as a start takes its time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.commands.explain import main
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
