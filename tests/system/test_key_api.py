"""The admin API for keys, on a real port and real databases."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from app.fronts.asgi import headers_of
from app.fronts.auth import Doors, Keyring, check_route
from app.fronts.control import render_errors
from app.fronts.keys import KeyApi
from app.ledger.keys import KeyBook
from app.ledger.store import Store
from tests.system.harness import served

ADMIN = "sk-admin-key-for-tests-0001"
PAST = "2020-01-01T00:00:00Z"
FUTURE = "2999-01-01T00:00:00+01:00"
# Bodies, and what of them is wrong.
WRONG: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b"{}", "name"),
    (b'{"name": ""}', "name"),
    (b'{"name": "a\\u0000"}', "name"),
    (b'{"name": "a", "admin": true}', "admin"),
    (b'{"name": "a", "budget_usd": 1e300}', "budget_usd"),
    (b'{"name": "a", "budget_usd": NaN}', "budget_usd"),
    (b'{"name": "a", "routes": ["\\u0000"]}', "routes"),
    (b'{"name": "a", "expires_at": "%s"}' % PAST.encode(), "expires_at"),
    (b'{"name": "a", "expires_at": "9999-12-31T23:59:59-12:00"}', "expires_at"),
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Keys:
    """The routes and a client that is an admin."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def made(self, name: str = "ada", **fields: Any) -> dict[str, Any]:
        answer = await self.client.post("/admin/keys", json={"name": name, **fields})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def status(self, key: str, model: str = "m") -> int:
        """What a client of that key is answered."""
        return (await self.client.get(f"/whoami/{model}", headers=bearer(key))).status_code


@asynccontextmanager
async def serving(book: KeyBook | None) -> AsyncIterator[Keys]:
    doors = Doors(Keyring([]), Keyring([ADMIN], "admin", "ADMIN_KEYS"), book)
    app = FastAPI()
    app.include_router(KeyApi(book, doors).router())
    render_errors(app)

    @app.get("/whoami/{model}")
    def whoami(model: str, request: Request) -> str:
        caller = doors.check_client(headers_of(request.scope))
        check_route(caller, model)
        return caller.id

    async with served(app, bearer(ADMIN)) as client:
        yield Keys(client)


@pytest.fixture
async def api(database_url: str) -> AsyncIterator[Keys]:
    async with Store(database_url) as store:
        book = KeyBook(store)
        await book.refresh()
        async with serving(book) as keys:
            yield keys


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_a_key_works_as_soon_as_it_is_made_and_from_then_on_one_is_needed(api: Keys) -> None:
    assert (await api.client.get("/whoami/m", headers={"authorization": ""})).json() == ""

    made = await api.made(routes=["qwen*"])

    who = await api.client.get("/whoami/qwen3", headers=bearer(made["secret"]))
    assert who.json() == made["id"]
    assert (await api.client.get("/whoami/m", headers={"authorization": ""})).status_code == 401
    assert await api.status("hearth-" + "a" * 43) == 401
    assert await api.status(made["secret"], "other") == 403


async def test_a_key_is_shown_with_all_but_its_secret(api: Keys, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fields: dict[str, Any] = {
        "name": "ada / 1",
        "routes": ["a", "b*"],
        "local_only": True,
        "budget_usd": 0.100001,
        "budget_period": "day",
        "requests_per_minute": 3,
        "tokens_per_minute": 4,
        "weight": 5,
        "priority": "low",
        "expires_at": FUTURE,
    }
    made = await api.made(**fields)
    secret = made.pop("secret")

    shown = await api.client.get(f"/admin/keys/{made['id']}")
    listed = await api.client.get("/admin/keys")

    assert shown.json() == made
    assert listed.json() == {"keys": [made]}
    assert made.items() >= {**fields, "expires_at": "2998-12-31T23:00:00.000Z", "disabled": False}.items()
    assert made["hint"] == secret[:11]
    assert "digest" not in listed.text
    assert secret[11:] not in listed.text + shown.text + caplog.text


async def test_answers_with_a_secret_are_kept_by_nobody(api: Keys) -> None:
    made = await api.client.post("/admin/keys", json={"name": "ada"})
    rotated = await api.client.post("/admin/keys/ada/rotate")

    assert made.headers["cache-control"] == rotated.headers["cache-control"] == "no-store"
    assert rotated.status_code == 200
    assert made.json()["secret"] != rotated.json()["secret"]
    assert await api.status(made.json()["secret"]) == 401
    assert await api.status(rotated.json()["secret"]) == 200


async def test_a_key_is_changed_in_part(api: Keys) -> None:
    made = await api.made(budget_usd=2, requests_per_minute=5)
    path = f"/admin/keys/{made['id']}"

    changed = (await api.client.patch(path, json={"budget_usd": 3.5, "budget_period": "week"})).json()
    assert (changed["budget_usd"], changed["budget_period"], changed["requests_per_minute"]) == (3.5, "week", 5)

    freed = (await api.client.patch(path, json={"budget_usd": None})).json()
    assert freed["budget_usd"] is None

    disabled = await api.client.patch(path, json={"disabled": True})
    assert disabled.json()["disabled"]
    refused = await api.client.get("/whoami/m", headers=bearer(made["secret"]))
    assert error_of(refused)["code"] == "invalid_api_key"
    assert error_of(refused)["message"] == "this API key is disabled"


async def test_a_wrong_body_is_refused_and_changes_nothing(api: Keys) -> None:
    for body, param in WRONG:
        answer = await api.client.post("/admin/keys", content=body)

        assert answer.status_code == 400, body
        assert error_of(answer)["param"] == param
    assert (await api.client.get("/admin/keys")).json() == {"keys": []}


async def test_a_body_that_is_too_large_is_refused_and_a_stranger_is_told_only_that_he_is_one(api: Keys) -> None:
    body = b" " * 1_000_000

    assert (await api.client.post("/admin/keys", content=body)).status_code == 413
    assert (await api.client.post("/admin/keys", content=body, headers=bearer("other"))).status_code == 401


async def test_an_unknown_key_is_said_to_be_unknown(api: Keys) -> None:
    for name in ("nobody", "0123456789abcdef", "%00", "%ff", "a%2Fb"):
        for method, path in (("GET", ""), ("PATCH", ""), ("POST", "/rotate")):
            answer = await api.client.request(method, f"/admin/keys/{name}{path}", json={})

            assert answer.status_code == 404, name
            assert error_of(answer)["type"] == "not_found_error"


async def test_a_name_that_is_taken_is_a_conflict(api: Keys) -> None:
    await api.made("ada")
    await api.made("grace")

    again = await api.client.post("/admin/keys", json={"name": "ada"})
    renamed = await api.client.patch("/admin/keys/grace", json={"name": "ada"})

    assert (again.status_code, renamed.status_code) == (409, 409)
    assert error_of(again)["code"] == "key_name_taken"


@pytest.mark.parametrize("headers", [{"authorization": ""}, bearer("other")], ids=["none", "wrong"])
async def test_only_admins_may_see_or_change_keys(headers: dict[str, str], api: Keys) -> None:
    made = await api.made()

    for method, path in (
        ("GET", ""),
        ("POST", ""),
        ("GET", "/ada"),
        ("PATCH", "/ada"),
        ("POST", "/ada/rotate"),
    ):
        refused = await api.client.request(method, f"/admin/keys{path}", json={"name": "b"}, headers=headers)
        assert refused.status_code == 401
    assert await api.status(made["secret"]) == 200
    assert (await api.client.get("/admin/keys", headers=bearer(made["secret"]))).status_code == 401


async def test_without_a_ledger_it_says_what_to_set() -> None:
    async with serving(None) as api:
        for method, path in (("GET", ""), ("GET", "/ada"), ("POST", "/ada/rotate")):
            refused = await api.client.request(method, f"/admin/keys{path}")

            assert refused.status_code == 409
            assert "DATABASE_URL" in error_of(refused)["message"]
        assert (await api.client.get("/whoami/m")).json() == ""
