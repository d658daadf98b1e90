"""Who may ask, and who may manage."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain import ANYBODY, Caller, Rate
from app.errors import Forbidden, Unauthorized
from app.fronts.auth import Doors, Keyring, check_route, digest_of, token_of

LOCAL: dict[str, Any] = {"client": ("127.0.0.1", 5)}
REMOTE: dict[str, Any] = {"client": ("192.0.2.7", 5)}


def _doors(api: list[str] | None = None, admin: list[str] | None = None) -> Doors:
    return Doors(Keyring(api or []), Keyring(admin or []))


def _bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


class Book:
    """Keys made at run time: `good` is valid, `old` has expired."""

    def __init__(self, required: bool = True) -> None:
        self.required = required

    def caller_of(self, digest: bytes) -> Caller | None:
        if digest == digest_of(b"old"):
            raise Unauthorized("this API key has expired")
        return Caller("1", "ada") if digest == digest_of(b"good") else None


def test_without_keys_everybody_may_ask() -> None:
    assert _doors().check_client({}) is ANYBODY
    assert Doors(Keyring([]), Keyring(["admin"]), Book(required=False)).check_client({}) is ANYBODY


def test_a_key_that_was_made_closes_the_door_to_those_without() -> None:
    doors = Doors(Keyring([]), Keyring([]), Book())

    assert doors.check_client(_bearer("good")) == Caller("1", "ada")
    for headers in ({}, _bearer("bad")):
        with pytest.raises(Unauthorized):
            doors.check_client(headers)


def test_only_of_a_known_key_it_is_said_why_it_is_refused() -> None:
    doors = Doors(Keyring(["one"]), Keyring([]), Book())

    with pytest.raises(Unauthorized, match="has expired"):
        doors.check_client(_bearer("old"))
    with pytest.raises(Unauthorized, match="is not valid"):
        doors.check_client(_bearer("bad"))


def test_callers_are_told_apart_by_the_start_of_their_digest() -> None:
    rate = Rate(10, None)
    doors = Doors(Keyring(["one", "two"], rate=rate), Keyring(["boss"], "admin", "ADMIN_KEYS"), Book())

    # The SHA-256 of "one" and of "boss".
    assert doors.check_client(_bearer("one")) == Caller("env:7692c3ad", "API_KEYS", rate=rate)
    assert doors.check_client(_bearer("two")).id != "env:7692c3ad"
    assert doors.check_client(_bearer("boss")) == Caller("admin:" + digest_of(b"boss").hex()[:8], "ADMIN_KEYS")
    assert doors.check_client(_bearer("good")).id == "1"


@pytest.mark.parametrize(
    ("routes", "model", "allowed"),
    [
        ((), "any", True),
        (("qwen*", "m"), "m", True),
        (("qwen*", "m"), "Qwen3:8b", True),
        (("qwen*", "m"), "m2", False),
        (("qwen*",), "", False),
    ],
)
def test_a_key_may_ask_for_its_routes_only(routes: tuple[str, ...], model: str, allowed: bool) -> None:
    caller = Caller("1", routes=routes)

    if allowed:
        check_route(caller, model)
        return
    with pytest.raises(Forbidden) as error:
        check_route(caller, model)
    assert error.value.code == "route_not_allowed"
    assert "qwen*" in error.value.message


@pytest.mark.parametrize("key", ["one", "two"])
def test_any_of_the_keys_opens(key: str) -> None:
    _doors(["one", "two"]).check_client(_bearer(key))


@pytest.mark.parametrize(
    "headers", [{}, _bearer("three"), _bearer(""), {b"authorization": b"Basic b25l"}, {b"x-api-key": b"three"}]
)
def test_other_keys_and_none_are_refused_and_not_repeated(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Unauthorized) as error:
        _doors(["one"]).check_client(headers)
    assert "three" not in error.value.message


def test_a_key_may_come_in_either_header() -> None:
    assert token_of({b"x-api-key": b"k"}) == b"k"
    assert token_of({b"authorization": b"bearer k"}) == b"k"


def test_an_admin_key_may_also_ask_but_no_client_key_may_manage() -> None:
    doors = _doors(["client"], ["admin"])

    doors.check_client(_bearer("admin"))
    doors.check_admin(REMOTE, _bearer("admin"))
    with pytest.raises(Unauthorized):
        doors.check_admin(LOCAL, _bearer("client"))


def test_without_admin_keys_only_this_machine_may_manage() -> None:
    _doors().check_admin(LOCAL, {})
    for scope, headers in (
        (REMOTE, {}),
        (LOCAL, {b"x-forwarded-for": b"192.0.2.7"}),
        ({"client": None}, {}),
        ({"client": ("unix", 0)}, {}),
    ):
        with pytest.raises(Forbidden):
            _doors().check_admin(scope, headers)
