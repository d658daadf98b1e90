"""Sessions of admins in a browser, for whom a page cannot show a key with every request.

A session is a cookie that is signed with what the admin keys give, so that every worker and replica accepts it, also
after a restart, and so that changing ADMIN_KEYS ends all sessions. It is good for requests of our own pages alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from app.fronts.asgi import Scope

SECONDS = 12 * 3600

_NAME = "hearth_session"
_SALT = b"hearth: sessions of admins"
_MOST_CLOSED = 10_000
_MOST_CHARACTERS = 4096


class Sessions:
    """`now` gives seconds since 1970."""

    def __init__(self, admin_keys: Iterable[str], now: Callable[[], float] = time.time) -> None:
        self._material = b"".join(sorted(hashlib.sha256(key.encode()).digest() for key in admin_keys))
        self._now = now
        self._secret = b""
        self._closed: dict[str, int] = {}  # id -> when it would have ended

    def open(self) -> str:
        """A new session's token. The first takes some dozen milliseconds: call it in a thread."""
        head = f"{int(self._now()) + SECONDS}.{secrets.token_hex(16)}"
        return f"{head}.{self._signature(head)}"

    def holds(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the request is one of our own pages in a session that is open."""
        token = _token_of(headers)
        if token is None or not _is_ours(headers):
            return False
        head, _, signature = token.rpartition(".")
        ends, _, session = head.partition(".")
        if not ends.isdecimal() or int(ends) <= self._now() or session in self._closed:
            return False
        return hmac.compare_digest(signature, self._signature(head))

    def close(self, headers: Mapping[bytes, bytes]) -> None:
        """Ends the request's session, in this process; the others rely on the browser to forget the cookie."""
        if not self.holds(headers):
            return
        ends, session, _ = (_token_of(headers) or "").split(".")
        self._closed = {name: when for name, when in self._closed.items() if when > self._now()}
        if len(self._closed) < _MOST_CLOSED:
            self._closed[session] = int(ends)

    def _signature(self, head: str) -> str:
        if not self._secret:
            # Slow on purpose: who has stolen a cookie must not be able to try out keys.
            self._secret = hashlib.scrypt(self._material, salt=_SALT, n=2**14, r=8, p=1, dklen=32)
        return hmac.new(self._secret, head.encode(), hashlib.sha256).hexdigest()


def cookie(token: str, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
    """The Set-Cookie value that begins a session; with an empty token that which ends it."""
    secure = scope.get("scheme") == "https" or headers.get(b"x-forwarded-proto", b"").strip().lower() == b"https"
    age = SECONDS if token else 0
    return f"{_NAME}={token}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")


def _token_of(headers: Mapping[bytes, bytes]) -> str | None:
    given = headers.get(b"cookie", b"")
    if len(given) > _MOST_CHARACTERS or not given.isascii():
        return None
    for part in given.decode().split(";"):
        name, _, value = part.strip().partition("=")
        if name == _NAME and value.count(".") == 2:
            return value
    return None


def _is_ours(headers: Mapping[bytes, bytes]) -> bool:
    """Whether one of our own pages asks. A browser adds the cookie to what other pages of the same site send too."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:  # a browser says so itself; behind a reverse proxy, Host may be another than Origin
        return site in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host")
