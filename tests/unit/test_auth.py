"""Who may ask, and who may manage."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import Forbidden, Unauthorized
from app.fronts.auth import Doors, Keyring, token_of

LOCAL: dict[str, Any] = {"client": ("127.0.0.1", 5)}
REMOTE: dict[str, Any] = {"client": ("192.0.2.7", 5)}


def _doors(api: list[str] | None = None, admin: list[str] | None = None) -> Doors:
    return Doors(Keyring(api or []), Keyring(admin or []))


def _bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def test_without_keys_everybody_may_ask() -> None:
    _doors().check_client({})


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
