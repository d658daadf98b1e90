"""Who may ask. Keys are kept as digests only, and how long a look takes tells nothing of them."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Iterable, Mapping
from typing import Protocol
from urllib.parse import urlsplit

from app.declarations import ApiKey
from app.domain import ANYBODY, Caller, Rate
from app.errors import Forbidden, Unauthorized
from app.fronts.asgi import Scope
from app.routing.names import matches

_FORWARDED = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)
_OUR_OWN = (b"none", b"same-origin")  # Sec-Fetch-Site of the address bar and of our own pages


class Keyring:
    """Keys from the settings. Empty, it admits nobody: whoever has none asks `bool(keyring)` first."""

    def __init__(
        self, keys: Iterable[ApiKey | str], source: str = "env", name: str = "API_KEYS", rate: Rate | None = None
    ) -> None:
        # These keys are chosen by people, and may be short. A digest that is keyed with a secret of this process
        # cannot be aimed at, so that the time of a look-up in a dictionary tells nothing, and many keys cost nothing.
        self._blank = hashlib.blake2b(digest_size=32, key=secrets.token_bytes(32))
        self._callers = {
            self._salted(key.secret.encode()): Caller(
                id=f"{source}:{digest_of(key.secret.encode()).hex()[:8]}",
                name=name,
                rate=rate,
                weight=key.weight,
                priority=key.priority,
            )
            for key in (ApiKey(key) if isinstance(key, str) else key for key in keys)
        }

    def __bool__(self) -> bool:
        return bool(self._callers)

    def find(self, token: bytes) -> Caller | None:
        """Takes the same time for every wrong key."""
        return self._callers.get(self._salted(token)) if self._callers else None

    def _salted(self, token: bytes) -> bytes:
        salted = self._blank.copy()  # a third of what it costs to begin anew
        salted.update(token)
        return salted.digest()


class KeyBook(Protocol):
    """Keys that are made at run time."""

    @property
    def required(self) -> bool:
        """Whether there is any, so that nobody may ask without one."""
        ...

    def caller_of(self, digest: bytes) -> Caller | None:
        """Whose key has this digest. Raises `Unauthorized` for a known key that has expired or is disabled."""
        ...


class SessionBook(Protocol):
    """Sessions of admins in a browser."""

    def holds(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the request is one of our own pages in a session that is open."""
        ...


class Doors:
    """The two questions of every request: may it ask for inference, may it manage."""

    def __init__(
        self,
        api_keys: Keyring,
        admin_keys: Keyring,
        book: KeyBook | None = None,
        sessions: SessionBook | None = None,
    ) -> None:
        self._api_keys = api_keys
        self._open = not api_keys  # unless there are keys that were made
        self._admin_keys = admin_keys
        self._book = book
        self._sessions = sessions

    def check_client(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Who asks. Raises `Unauthorized` unless a key is shown; where there are none at all, everybody may ask."""
        made = self._book is not None and self._book.required
        if self._open and not made:
            return ANYBODY
        token = token_of(headers)
        if token is None:
            raise Unauthorized(_told(token))
        caller = self._made(token) if made else None
        caller = caller or self._api_keys.find(token) or self._admin_keys.find(token)
        if caller is None:
            raise Unauthorized(_told(token))
        return caller

    def _made(self, token: bytes) -> Caller | None:
        # Found by the plain digest. A guess can be aimed at no digest, so the most that a look-up's time could tell
        # is a part of one, and that finds no key of 256 random bits.
        return None if self._book is None else self._book.caller_of(digest_of(token))

    def check_admin(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Unauthorized` or `Forbidden`. Without ADMIN_KEYS only this machine itself may manage."""
        if self._admin_keys:
            token = token_of(headers)
            if token is None and self._sessions is not None and self._sessions.holds(headers):
                return
            if token is None or self._admin_keys.find(token) is None:
                raise Unauthorized(_told(token))
        elif not _is_local(scope, headers):
            raise Forbidden(
                "this is open to clients on the gateway's own machine only; set ADMIN_KEYS to open it to others"
            )

    def check_engine(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Forbidden` for a page: engines, which show no key, are no browsers."""
        if _asks_for_a_page(headers):
            raise Forbidden("pages from elsewhere may not do this")


def digest_of(token: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(token).digest()


def check_route(caller: Caller, model: str) -> None:
    """Raises `Forbidden` unless the caller's key may ask for the model."""
    if caller.routes and not any(matches(pattern, model) for pattern in caller.routes):
        raise Forbidden(
            f"this API key may not ask for '{model}', only for {', '.join(caller.routes)}", code="route_not_allowed"
        )


def token_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that the client showed, as a bearer token or as `x-api-key`."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if token and scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key")


def _told(token: bytes | None) -> str:
    if token is None:
        return "no API key was sent; send it as 'Authorization: Bearer <key>'"
    return "the API key is not valid"


def _is_local(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """A client behind a reverse proxy on this machine comes from loopback too, but is not this machine."""
    client = scope.get("client")
    if client is None or not _FORWARDED.isdisjoint(headers):
        return False
    # A page whose own name was made to lead here passes for ours in all but that name.
    host = _hostname(headers.get(b"host", b"localhost"))
    return _is_loopback(client[0]) and _is_loopback(host) and not _asks_for_a_page(headers)


def _asks_for_a_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks for a page that is not ours: it lets every page send requests to its own machine."""
    if headers.get(b"sec-fetch-site", b"none") not in _OUR_OWN:
        return True
    return b"origin" in headers and headers[b"origin"].partition(b"://")[2] != headers.get(b"host")


def _hostname(host: bytes) -> str:
    """The name in a Host header; the empty string when it is none."""
    try:
        return urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
