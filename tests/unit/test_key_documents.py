"""Keys as JSON: what is taken, and how it is shown."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.domain import Period, Priority
from app.errors import InvalidRequest
from app.fronts import keys
from app.fronts.auth import Doors, Keyring
from app.fronts.keys import KeyApi, view
from app.ledger.key import BUDGET_MAX, Key

API = KeyApi(None, Doors(Keyring([]), Keyring([])))


def read(**fields: Any) -> Any:
    return keys._traits(keys._read(API._new, orjson.dumps({"name": "ada", **fields})))


def key(**traits: Any) -> Key:
    given: dict[str, Any] = {
        "id": "1",
        "name": "ada",
        "hint": "hearth-abcd",
        "created_at": 0,
        "changed_at": 1,
        "expires_at": None,
        "disabled": False,
        "routes": (),
        "local_only": False,
        "budget_limit": None,
        "budget_period": Period.MONTH,
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "weight": 1,
        "priority": None,
        **traits,
    }
    return Key(**given)


def test_everything_that_can_be_chosen_is_read() -> None:
    given = read(
        routes=["qwen*"],
        local_only=True,
        budget_usd=1.5,
        budget_period="week",
        requests_per_minute=60,
        weight=2,
        priority="high",
        tokens_per_minute=1000,
        expires_at="2027-01-31T01:00:00.0005+01:00",
    )

    assert given == {
        "name": "ada",
        "routes": ["qwen*"],
        "local_only": True,
        "budget_limit": 1_500_000,
        "budget_period": Period.WEEK,
        "requests_per_minute": 60,
        "weight": 2,
        "priority": Priority.HIGH,
        "tokens_per_minute": 1000,
        "expires_at": 1_801_353_600_000,
    }


def test_what_is_left_out_is_not_null() -> None:
    assert read() == {"name": "ada"}
    assert read(budget_usd=None, expires_at=None) == {"name": "ada", "budget_limit": None, "expires_at": None}


@pytest.mark.parametrize("limit", [0, 1, 100_000, 300_000, 1_100_001, 999_999_999_999_999, BUDGET_MAX])
def test_money_is_exact_to_the_micro_dollar_both_ways(limit: int) -> None:
    shown = orjson.loads(orjson.dumps(view(key(budget_limit=limit))["budget_usd"]))

    assert read(budget_usd=shown)["budget_limit"] == limit


@pytest.mark.parametrize(
    "fields",
    [
        {"budget_usd": "1"},
        {"budget_usd": -1},
        {"budget_usd": 1e10},
        {"budget_period": "year"},
        {"expires_at": 1_801_353_600_000},
        {"expires_at": "2027-01-31"},
        {"expires_at": "2027-01-31T00:00:00"},
        {"requests_per_minute": True},
        {"weight": 0},
        {"weight": 1001},
        {"priority": "top"},
        {"requests_per_minute": 1.5},
        {"tokens_per_minute": 2**31},
        {"routes": "m"},
        {"routes": [1]},
        {"local_only": 1},
        {"digest": "0"},
        {"name": None},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_named(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(**fields)
    assert str(refused.value.param).startswith(next(iter(fields)))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"name": "\xff"}', b'{"name": "\\ud800"}'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        keys._read(API._new, body)


def test_times_are_shown_in_utc() -> None:
    shown = view(key(created_at=1_801_353_600_123, expires_at=253_402_300_799_999))

    assert shown["created_at"] == "2027-01-31T00:00:00.123Z"
    assert shown["expires_at"] == "9999-12-31T23:59:59.999Z"
