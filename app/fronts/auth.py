"""Who may ask. Keys are kept as digests only, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from app.errors import Forbidden, Unauthorized
from app.fronts.asgi import Scope

_FORWARDED = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)
_OUR_OWN = (b"none", b"same-origin")  # Sec-Fetch-Site of the address bar and of our own pages


class Keyring:
    """A set of keys. Empty, it admits nobody: whoever has none asks `bool(keyring)` first."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, token: bytes | None) -> bool:
        """Takes the same time for every wrong key."""
        digest = _digest(token or b"")
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and token is not None


class Doors:
    """The two questions of every request: may it ask for inference, may it manage."""

    def __init__(self, api_keys: Keyring, admin_keys: Keyring) -> None:
        self._api_keys = api_keys
        self._admin_keys = admin_keys

    def check_client(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Unauthorized` unless a key is shown; with no API_KEYS everybody may ask."""
        if not self._api_keys:
            return
        token = token_of(headers)
        # Both are always asked, so that the time tells nothing of which ring a key is on.
        if not (self._api_keys.admits(token) | self._admin_keys.admits(token)):
            raise Unauthorized(_told(token))

    def check_admin(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Unauthorized` or `Forbidden`. Without ADMIN_KEYS only this machine itself may manage."""
        if self._admin_keys:
            token = token_of(headers)
            if not self._admin_keys.admits(token):
                raise Unauthorized(_told(token))
        elif not _is_local(scope, headers):
            raise Forbidden(
                "this is open to clients on the gateway's own machine only; set ADMIN_KEYS to open it to others"
            )

    def check_engine(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `Forbidden` for a page: engines, which show no key, are no browsers."""
        if _asks_for_a_page(headers):
            raise Forbidden("pages from elsewhere may not do this")


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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
