"""The command line in real processes, with and without a gateway that runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from app.cli import main
from app.domain import Budget, Caller, Period, Rate
from app.fronts.auth import digest_of
from app.ledger.keys import KeyBook
from app.ledger.store import Store
from app.settings import Settings
from tests.system.gateway_process import ROOT

SECONDS = 30


class Done(NamedTuple):
    status: int
    out: str
    err: str


class Shell:
    """Runs `python -m app` in a folder, with no setting but `variables`."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        ours = {name.upper() for name in Settings.model_fields}
        kept = {name: value for name, value in os.environ.items() if name.upper() not in ours}
        self.environment = {**kept, "PYTHONPATH": str(ROOT), **variables}

    async def __call__(self, *words: str) -> Done:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "app", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env=self.environment,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Done(process.returncode, out.decode(), err.decode())


async def test_keys_are_managed_without_a_gateway(tmp_path: Path, database_url: str) -> None:
    hearth = Shell(tmp_path, DATABASE_URL=database_url)

    traits = ("--route", "qwen*", "--route", "m", "--budget-usd", "0.1", "--budget-period", "day", "--expires", "30d")
    created = await hearth("keys", "create", "[ada]", *traits, "--requests-per-minute", "60")
    rotated = await hearth("keys", "rotate", "[ada]")
    async with Store(database_url) as store:
        book = KeyBook(store)
        await book.refresh()
        key = await book.get("[ada]")

    old, new = created.out.strip(), rotated.out.strip()
    assert (created.status, rotated.status) == (0, 0)
    assert old.startswith("hearth-")
    assert old not in created.err
    assert book.caller_of(digest_of(old.encode())) is None
    caller = book.caller_of(digest_of(new.encode()))
    assert caller == Caller(key.id, "[ada]", ("qwen*", "m"), False, Budget(100_000, Period.DAY), Rate(60, None))
    assert key.expires_at == pytest.approx(key.created_at + 30 * 86_400_000, abs=60_000)


async def test_keys_are_listed_without_starting_a_server(tmp_path: Path) -> None:
    hearth = Shell(tmp_path, PYTHONPROFILEIMPORTTIME="1")

    done = await hearth("keys", "list", "--json")

    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    assert (done.status, json.loads(done.out)) == (0, {"keys": []})
    assert "sqlalchemy" in imported
    assert not {"fastapi", "uvicorn", "redis", "genai_prices", "app.main"} & imported


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process in an empty folder and with no setting."""
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("keys", "keys --help"),
        ("keys craete", "'create'"),
        ("keys create", "keys --help"),
        ("keys create a b", "keys --help"),
        ("keys create a --expires soon", "--expires"),
        ("keys create a --expires 2020-01-01", "in the future"),
        ("keys create a --budget-usd -1", "--budget-usd"),
        ("keys create a --budget-period year", "'month'"),
        ("keys create a --weight 0", "weight"),
        ("keys create a --priority top", "'high'"),
        ("keys create a --tokens-per-minute 0", "tokens_per_minute"),
        ("keys rotate nobody", "nobody"),
    ],
)
def test_a_mistake_is_said_in_a_line_and_ends_with_status_2(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(words.split())

    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.startswith("hearth: ")
    assert said.err.count("\n") == 1
    assert hint in said.err


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("DATABASE_URL", "off", "DATABASE_URL"),
        ("PORT", "many", "PORT"),
        ("DATABASE_URL", "postgresql://hearth:pa55word@127.0.0.1:1/x", "127.0.0.1:1/x"),
        ("DATABASE_URL", "sqlite:////proc/hearth/x.db", "/proc/hearth"),
    ],
)
def test_a_ledger_that_cannot_be_had_is_one_line(
    variable: str, value: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)

    status = main(["keys", "list"])

    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert said.err.startswith("hearth: ")
    assert said.err.count("\n") == 1
    assert hint in said.err
    assert "pa55word" not in said.err


@pytest.mark.usefixtures("alone")
def test_keys_are_shown_as_a_table_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "[ada]", "--budget-usd", "0.1", "--budget-period", "day"]) == 0
    secret = capsys.readouterr().out.strip()
    assert main(["keys", "create", "grace", "--local-only", "--route", "a b*"]) == 0
    assert main(["keys", "disable", "grace"]) == 0
    capsys.readouterr()

    assert main(["keys", "list"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert main(["keys", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["keys"]

    assert "[ada]" in table[1]
    assert "$0.1 a day" in table[1]
    assert "disabled" in table[2]
    assert [key["name"] for key in shown] == ["[ada]", "grace"]
    assert [key["disabled"] for key in shown] == [False, True]
    assert secret not in str(table) + str(shown)

    assert main(["keys", "enable", "grace"]) == 0
    assert main(["keys", "list", "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["keys"][1]["disabled"]


async def test_an_unknown_command_is_said_with_what_there_is(tmp_path: Path) -> None:
    done = await Shell(tmp_path)("kees")

    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("hearth: 'kees' is not a command; did you mean 'keys'?\n")
    assert "serve" in done.err


async def test_help_costs_no_more_than_it_says(tmp_path: Path) -> None:
    """What takes long to import is imported by the command that needs it."""
    hearth = Shell(tmp_path, PYTHONPROFILEIMPORTTIME="1")

    for words, absent in ((("--help",), "typer"), (("keys", "--help"), "pydantic_settings"), (("--version",), "typer")):
        done = await hearth(*words)

        imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
        assert done.status == 0
        assert "app.cli" in imported
        assert not {absent, "sqlalchemy", "fastapi", "uvicorn"} & imported
    assert not os.listdir(tmp_path)
