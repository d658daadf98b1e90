"""Sessions of admins in a browser."""

from __future__ import annotations

import pytest

from app.fronts.sessions import SECONDS, Sessions, cookie

HOST = {b"host": b"hearth.lan:8000"}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def _shown(token: str, **headers: str) -> dict[bytes, bytes]:
    more = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return {**HOST, b"cookie": f"theme=dark; hearth_session={token}; x=1".encode(), **more}


def test_a_session_holds_until_it_is_over() -> None:
    clock = Clock()
    sessions = Sessions(["key"], clock)
    token = sessions.open()

    assert sessions.holds(_shown(token))
    clock.now += SECONDS
    assert not sessions.holds(_shown(token))


def test_every_worker_with_the_same_keys_accepts_it() -> None:
    token = Sessions(["one", "two"]).open()

    assert Sessions(["two", "one"]).holds(_shown(token))
    assert not Sessions(["one"]).holds(_shown(token))
    assert not Sessions(["onetwo"]).holds(_shown(token))


@pytest.mark.parametrize("place", [0, 5, 20, -1])
def test_nobody_can_make_or_prolong_one(place: int) -> None:
    sessions = Sessions(["key"])
    token = sessions.open()
    changed = list(token)
    changed[place] = "1" if changed[place] != "1" else "2"

    assert not sessions.holds(_shown("".join(changed)))


@pytest.mark.parametrize("token", ["", "a.b.c", "9999999999..", "9999999999.x", "²..", "." * 5000, "9" * 3000 + ".a.b"])
def test_nonsense_is_no_session(token: str) -> None:
    assert not Sessions(["key"]).holds(_shown(token))


def test_two_sessions_differ() -> None:
    sessions = Sessions(["key"])

    assert sessions.open() != sessions.open()


def test_logging_out_ends_this_session_and_no_other() -> None:
    sessions = Sessions(["key"])
    one, other = sessions.open(), sessions.open()
    sessions.close(_shown(one))

    assert not sessions.holds(_shown(one))
    assert sessions.holds(_shown(other))


@pytest.mark.parametrize(
    ("headers", "ours"),
    [
        ({}, True),
        ({"sec_fetch_site": "same-origin"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"sec_fetch_site": "same-site"}, False),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"origin": "http://hearth.lan:8000"}, True),
        ({"origin": "http://hearth.lan:9000"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://hearth.example", "sec_fetch_site": "same-origin"}, True),  # a proxy has changed Host
    ],
)
def test_only_our_own_pages_may_use_it(headers: dict[str, str], ours: bool) -> None:
    sessions = Sessions(["key"])

    assert sessions.holds(_shown(sessions.open(), **headers)) is ours


@pytest.mark.parametrize(
    ("scheme", "headers", "secure"),
    [("https", {}, True), ("http", {b"x-forwarded-proto": b"https"}, True), ("http", {}, False)],
)
def test_the_cookie_is_for_the_server_alone(scheme: str, headers: dict[bytes, bytes], secure: bool) -> None:
    value = cookie("token", {"scheme": scheme}, headers)

    assert {"HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={SECONDS}"} <= set(value.split("; "))
    assert value.endswith("; Secure") is secure
