"""The admin routes for usage and budgets, on a real port."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.domain import Budget, Period
from app.errors import LedgerUnavailable
from app.fronts.auth import Doors, Keyring
from app.fronts.control import render_errors
from app.fronts.usage import UsageApi
from app.ledger.report import Books, LostSpend
from app.ledger.store import Store
from app.ledger.tables import requests, spend
from app.ledger.usage import LedgerBooks
from app.sharing.meter import GATEWAY, Account, provider_scope
from tests.system.harness import served
from tests.system.usage_rows import KNOWN_REQUESTS, KNOWN_SPEND, NOON, a_request, fill

ADMIN = "sk-admin-key-for-tests-0001"
ACCOUNTS = [Account(GATEWAY, Budget(20_000)), Account(provider_scope("azure"), Budget(500, Period.DAY))]


class Heard:
    """What the meter would hear."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def __call__(self, lost: LostSpend) -> None:
        self.all.append(lost.id)


@asynccontextmanager
async def serving(books: Books | None, heard: Heard) -> AsyncIterator[httpx.AsyncClient]:
    doors = Doors(Keyring([]), Keyring([ADMIN]))
    app = FastAPI()
    api = UsageApi(doors=doors, books=books, accounts=ACCOUNTS, on_reconciled=heard, clock=lambda: NOON)
    app.include_router(api.router())
    render_errors(app)
    async with served(app, {"authorization": f"Bearer {ADMIN}"}) as client:
        yield client


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with Store(database_url) as store:
        yield store


@pytest.fixture
async def client(store: Store, heard: Heard) -> AsyncIterator[httpx.AsyncClient]:
    """Of an admin, to a ledger with the known rows."""
    await fill(store, {requests: KNOWN_REQUESTS, spend: KNOWN_SPEND})
    async with serving(LedgerBooks(store), heard) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_usage_is_shown_by_day_and_key(client: httpx.AsyncClient) -> None:
    answer = await client.get("/admin/usage?since=2026-11-01&until=2026-11-30&by=day,key")

    shown = answer.json()
    assert (shown["since"], shown["until"], shown["by"]) == ("2026-11-01", "2026-11-30", ["day", "key"])
    assert [(line["day"], line["key"], line["cost_usd"]) for line in shown["lines"]] == [
        ("2026-11-10", "k1", 0.001),
        ("2026-11-10", "k2", 0.0),
        ("2026-11-10", "k3", 0.009),
        ("2026-11-11", "k1", 0.005025),
        ("2026-11-11", "k2", 0.0007),
    ]
    assert (shown["total"]["requests"], shown["total"]["cost_usd"], shown["cut"]) == (6, 0.015725, False)


async def test_usage_is_of_this_month_by_day_if_nothing_is_said(client: httpx.AsyncClient) -> None:
    shown = (await client.get("/admin/usage")).json()

    # Today is the tenth.
    assert (shown["since"], shown["until"], shown["by"]) == ("2026-11-01", "2026-11-10", ["day"])
    assert [line["day"] for line in shown["lines"]] == ["2026-11-10"]


async def test_usage_of_one_key_in_one_tier(client: httpx.AsyncClient) -> None:
    shown = (await client.get("/admin/usage?since=2026-11-01&until=2026-11-30&by=&key=k1&tier=local")).json()

    assert [line["requests"] for line in shown["lines"]] == [3]


async def test_csv_is_a_file_to_save(client: httpx.AsyncClient, store: Store) -> None:
    await fill(store, {requests: [a_request("r9", route="=cmd()", model='a,"b"')]})

    answer = await client.get("/admin/usage?by=route,model&format=csv")

    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == 'attachment; filename="hearth-usage.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert (rows[0]["route"], rows[0]["model"], rows[0]["requests"]) == ("'=cmd()", 'a,"b"', "1")
    assert {row["model"]: row["cost_usd"] for row in rows[1:]} == {
        "": "0.000000",
        "gpt-4o-mini": "0.010000",
        "llama3": "0.000000",
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("since=yesterday", "since"),
        ("since=2026-02-30", "since"),
        ("until=7d", "until"),
        ("since=2026-11-03&until=2026-11-02", "until"),
        ("by=day,hour", "by"),
        ("by=day,,key", "by"),
        ("format=xml", "format"),
        ("tier=1", "tier"),
        ("key=a%00b", "key"),
        ("model=" + "m" * 513, "model"),
        ("by=day&by=key", "by"),
        ("form=csv", "form"),
        ("%00=1", "\x00"),
    ],
)
async def test_a_wrong_parameter_is_named(client: httpx.AsyncClient, query: str, param: str) -> None:
    answer = await client.get(f"/admin/usage?{query}")

    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/usage"),
        ("GET", "/admin/usage/lost"),
        ("GET", "/admin/budgets"),
        ("POST", "/admin/usage/r8-1/reconcile"),
    ],
)
async def test_only_admins_see_and_change_it(client: httpx.AsyncClient, heard: Heard, method: str, path: str) -> None:
    for headers in ({"authorization": ""}, {"authorization": "Bearer sk-another"}):
        answer = await client.request(method, path, json={"cost_usd": 0}, headers=headers)

        assert answer.status_code == 401
        error_of(answer)
    assert heard.all == []


async def test_budgets_show_what_is_left_and_when_they_begin_anew(client: httpx.AsyncClient) -> None:
    gateway, azure = (await client.get("/admin/budgets")).json()["budgets"]

    assert gateway == {
        "scope": "gateway",
        "period": "month",
        "limit_usd": 0.02,
        "spent_usd": 0.0017,
        "held_usd": 0.014,
        "left_usd": 0.0043,
        "since": "2026-11-01",
        "resets": "2026-12-01",
        "resets_at": 1_796_083_200_000,
    }
    assert (azure["scope"], azure["spent_usd"], azure["left_usd"]) == ("provider:azure", 0.0003, 0.0002)


async def test_a_lost_spend_is_settled_once_and_the_meter_hears_of_it(client: httpx.AsyncClient, heard: Heard) -> None:
    (lost,) = (await client.get("/admin/usage/lost")).json()["lost"]

    first = await client.post(f"/admin/usage/{lost['id']}/reconcile", json={"cost_usd": 0.0123})
    again = await client.post(f"/admin/usage/{lost['id']}/reconcile", json={"cost_usd": 0.5})

    assert (lost["id"], lost["reserved_usd"]) == ("r8-1", 0.009)
    assert first.json() == {"id": "r8-1", "state": "settled", "cost_usd": 0.0123}
    assert (again.status_code, error_of(again)["code"]) == (404, "not_found")
    assert heard.all == ["r8-1"]
    (of_its_key,) = (await client.get("/admin/usage?since=2026-11-01&by=key&key=k3")).json()["lines"]
    assert of_its_key["cost_usd"] == 0.0123
    assert (await client.get("/admin/usage/lost")).json() == {"lost": []}


@pytest.mark.parametrize("id", ["r4-1", "r7-1", "nobody", "a%00b", "%F0%9F%94%A5"])
async def test_what_is_not_lost_cannot_be_reconciled(client: httpx.AsyncClient, heard: Heard, id: str) -> None:
    answer = await client.post(f"/admin/usage/{id}/reconcile", json={"cost_usd": 1})

    assert answer.status_code == 404
    assert "GET /admin/usage/lost" in error_of(answer)["message"]
    assert heard.all == []


@pytest.mark.parametrize("cost", ["0.1", -0.01, True, None, 1e7, [], "missing"])
async def test_a_wrong_cost_is_named(client: httpx.AsyncClient, heard: Heard, cost: Any) -> None:
    body = {} if cost == "missing" else {"cost_usd": cost}

    answer = await client.post("/admin/usage/r8-1/reconcile", json=body)

    assert (answer.status_code, error_of(answer)["param"]) == (400, "cost_usd")
    assert heard.all == []


@pytest.mark.parametrize(
    ("body", "status"), [(b"", 400), (b"[]", 400), (b'{"cost_usd": NaN}', 400), (b" " * 5000, 413)]
)
async def test_a_body_that_is_no_object_is_refused(client: httpx.AsyncClient, body: bytes, status: int) -> None:
    answer = await client.post("/admin/usage/r8-1/reconcile", content=body)

    assert answer.status_code == status
    error_of(answer)


async def test_without_a_ledger_the_answer_says_so(heard: Heard) -> None:
    async with serving(None, heard) as client:
        answers = [await client.get(path) for path in ("/admin/usage", "/admin/usage/lost", "/admin/budgets")]

    assert {(answer.status_code, error_of(answer)["code"]) for answer in answers} == {(409, "ledger_off")}


async def test_a_ledger_out_of_reach_is_a_503(tmp_path: Path, heard: Heard) -> None:
    closed = Store(f"sqlite:///{tmp_path / 'hearth.db'}")

    async with serving(LedgerBooks(closed), heard) as client:
        answer = await client.get("/admin/usage")

    assert (answer.status_code, error_of(answer)["code"]) == (503, LedgerUnavailable.code)
