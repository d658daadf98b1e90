"""`python -m app usage`: as a process, and, as a start takes its time, in this one too."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from app.commands.usage import main
from app.domain import Period
from app.ledger.keys import KeyBook
from app.ledger.span import period_span
from app.ledger.store import Store
from app.ledger.tables import requests, spend
from app.settings import Settings
from tests.system.gateway_process import ROOT
from tests.system.usage_rows import KNOWN_REQUESTS, KNOWN_SPEND, fill

NOVEMBER = ("--since", "2026-11-01", "--until", "2026-11-30")


class Done(NamedTuple):
    status: int
    out: str
    err: str


async def usage(url: str, folder: Path, *words: str, **settings: str) -> Done:
    ours = {name.upper() for name in Settings.model_fields}
    kept = {name: value for name, value in os.environ.items() if name.upper() not in ours}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app",
        "usage",
        *words,
        env={**kept, "PYTHONPATH": str(ROOT), "DATABASE_URL": url, "LOCAL_NODES": "[]", **settings},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Done(process.returncode, out.decode(), err.decode())


async def known(url: str) -> None:
    """Makes a ledger with the known rows."""
    async with Store(url) as store:
        await fill(store, {requests: KNOWN_REQUESTS, spend: KNOWN_SPEND})


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'hearth.db'}"


def cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


async def test_csv_has_the_known_sums(database_url: str, tmp_path: Path) -> None:
    await known(database_url)

    done = await usage(database_url, tmp_path, *NOVEMBER, "--by", "tier", "--csv")

    assert (done.status, done.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done.out, newline="")))
    assert [(row["tier"], row["requests"], row["cost_usd"], row["saved_usd"]) for row in rows] == [
        ("cloud", "2", "0.015700", "0.000000"),
        ("local", "4", "0.000025", "0.000875"),
    ]


async def test_a_table_ends_with_what_was_saved_and_what_is_left(sqlite: str, tmp_path: Path) -> None:
    # Half of the budget is spent now, in whatever month the test runs.
    now = time.time_ns() // 1_000_000
    async with Store(sqlite) as store:
        key, _ = await KeyBook(store).create("laptop", {})
        rows = [{**row, "at": now, "key": key.id} for row in KNOWN_REQUESTS]
        await fill(store, {requests: rows, spend: [{**row, "at": now} for row in KNOWN_SPEND]})
    cloud = {"CLOUD_API_KEY": "sk-test-of-usage", "CLOUD_BUDGET_USD": "0.0314", "CLOUD_MODEL": "gpt-4o-mini"}

    done = await usage(sqlite, tmp_path, "--since", "day", "--by", "key,node", **cloud)

    assert (done.status, done.err) == (0, "")
    head, *lines, blank, last = done.out.splitlines()
    assert cells(head)[:3] == ["key", "node", "requests"]
    assert ["laptop", "attic", "2"] in [cells(line)[:3] for line in lines]
    assert ["k3", "openai", "0"] in [cells(line)[:3] for line in lines]
    assert cells(lines[-1])[:2] == ["total", "6"]
    assert blank == ""
    assert "local nodes saved $0.000875 against the cloud's price, and $0.015725 was spent." in last
    assert "Of this month's budget of $0.031400, $0.015700 (50%) is spent or reserved" in last
    resets = time.strftime("%Y-%m-%d", time.gmtime(period_span(Period.MONTH, now).until / 1000))
    assert last.endswith(f"it begins anew on {resets}.")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """Runs it in this process."""
    monkeypatch.chdir(tmp_path)

    def run(url: str, *words: str) -> Done:
        monkeypatch.setenv("DATABASE_URL", url)
        monkeypatch.setenv("LOCAL_NODES", "[]")
        status = main(words)
        return Done(status, *capsys.readouterr())

    return run


def test_a_model_name_cannot_steer_the_terminal(sqlite: str, here: Callable[..., Done]) -> None:
    async def named() -> None:
        async with Store(sqlite) as store:
            await fill(store, {requests: [{**row, "model": "\x1b[2Jm"} for row in KNOWN_REQUESTS]})

    asyncio.run(named())

    done = here(sqlite, *NOVEMBER, "--by", "model")

    assert "?[2Jm" in done.out
    assert "\x1b" not in done.out


def test_an_empty_ledger_is_shown_as_such(sqlite: str, here: Callable[..., Done]) -> None:
    table, document = here(sqlite), here(sqlite, "--since", "7d", "--json")

    assert table.status == document.status == 0
    assert "local nodes saved $0.000000" in table.out
    assert "No CLOUD_BUDGET_USD is set." in table.out
    assert json.loads(document.out)["lines"] == []


def test_a_lost_spend_is_listed_and_reconciled(database_url: str, here: Callable[..., Done]) -> None:
    asyncio.run(known(database_url))

    listed = here(database_url, "lost")
    settled = here(database_url, "reconcile", "r8-1", "--cost-usd", "0.0123")
    again = here(database_url, "reconcile", "r8-1", "--cost-usd", "0.0123")

    lost = ["r8-1", "2026-11-10", "k3", "small", "openai", "gpt-4o-mini", "$0.009000"]
    assert cells(listed.out.splitlines()[1]) == lost
    assert (settled.status, settled.err) == (0, "r8-1 did cost $0.012300; $0.009000 was reserved\n")
    assert again.status == 2
    assert "`python -m app usage lost` lists them" in again.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--since", "yesterday"), "hearth: --since: 'yesterday' is not a day (2026-11-01)"),
        (("--until", "2026-13-01"), "hearth: --until: '2026-13-01' is not a day"),
        (("--by", "day,hour"), "hearth: --by: 'hour' is not one of day, key"),
        (("--csv", "--json"), "hearth: --csv and --json exclude each other"),
        (("reconcile", "r1-1", "--cost-usd", "-1"), "hearth: --cost-usd: "),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    sqlite: str, here: Callable[..., Done], words: tuple[str, ...], told: str
) -> None:
    done = here(sqlite, *words)

    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(told)
    assert done.err.count("\n") == 1


def test_without_a_ledger_it_says_so(here: Callable[..., Done]) -> None:
    done = here("off")

    assert done.status == 2
    assert "DATABASE_URL is off" in done.err
