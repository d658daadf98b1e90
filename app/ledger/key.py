"""An API key that was made at run time, as everybody but the database sees it. Knows no SQLAlchemy."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

from app.domain import WEIGHT_MAX, Budget, Caller, Period, Priority, Rate
from app.errors import HearthError, InvalidRequest, NotFound

NAME_CHARACTERS_MAX = 64
PATTERNS_MAX = 100
PATTERN_CHARACTERS_MAX = 512
BUDGET_MAX = 10**15  # micro-dollars: a thousand million dollars, exact as a number of JSON's too
PER_MINUTE_MAX = 2**31 - 1
TIME_MAX = 253_402_300_799_999  # the last millisecond of the year 9999, the last that dates can be written of

MICRO_DOLLARS = 1_000_000  # in a dollar
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_PREFIX = "hearth-"
_SECRET_BYTES = 32
_HINT_CHARACTERS = len(_PREFIX) + 4
_ID_BYTES = 8
_ID = re.compile(r"[0-9a-f]{16}")


class Traits(TypedDict, total=False):
    """What of a key may be chosen and changed; what is left out stays as it is."""

    name: str
    disabled: bool
    expires_at: int | None  # milliseconds since 1970; None = never
    routes: Sequence[str]  # patterns of model names; empty = all
    local_only: bool
    budget_limit: int | None  # micro-dollars; None = any amount
    budget_period: Period
    requests_per_minute: int | None
    tokens_per_minute: int | None
    weight: int  # turns at a time where its requests and others' wait
    priority: Priority | None  # None = its routes'


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secret. Times are milliseconds since 1970."""

    id: str
    name: str
    hint: str  # the secret's first characters
    created_at: int
    changed_at: int
    expires_at: int | None
    disabled: bool
    routes: tuple[str, ...]
    local_only: bool
    budget_limit: int | None
    budget_period: Period
    requests_per_minute: int | None
    tokens_per_minute: int | None
    weight: int
    priority: Priority | None

    def caller(self) -> Caller:
        """Who asks with this key."""
        rate = Rate(self.requests_per_minute, self.tokens_per_minute)
        return Caller(
            id=self.id,
            name=self.name,
            routes=self.routes,
            local_only=self.local_only,
            budget=None if self.budget_limit is None else Budget(self.budget_limit, self.budget_period),
            rate=rate if any(rate) else None,
            weight=self.weight,
            priority=self.priority,
        )

    def expired(self, now: int) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class KeyNotFound(NotFound):
    code = "key_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no API key '{name[:NAME_CHARACTERS_MAX]}'; the list of keys shows names and ids")


class KeyNameTaken(HearthError):
    status = 409
    type = "invalid_request_error"
    code = "key_name_taken"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is an API key named '{name}' already; choose another name, or rotate it", param="name")


def new_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> str:
    """What is kept of a secret: its SHA-256 in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def hint(secret: str) -> str:
    return secret[:_HINT_CHARACTERS]


def document(key: Key) -> dict[str, Any]:
    """A key as JSON shows it: money in dollars, times in ISO 8601 and UTC."""
    return {
        "id": key.id,
        "name": key.name,
        "hint": key.hint,
        "created_at": _written(key.created_at),
        "changed_at": _written(key.changed_at),
        "expires_at": None if key.expires_at is None else _written(key.expires_at),
        "disabled": key.disabled,
        "routes": list(key.routes),
        "local_only": key.local_only,
        # Exact: up to the largest budget no two micro-dollars share a number.
        "budget_usd": None if key.budget_limit is None else key.budget_limit / MICRO_DOLLARS,
        "budget_period": key.budget_period.value,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "weight": key.weight,
        "priority": None if key.priority is None else key.priority.value,
    }


def check(traits: Traits, now: int) -> None:
    """Raises `InvalidRequest`, which names the trait that cannot be."""
    if "name" in traits:
        _check_name(traits["name"])
    _check_patterns(traits.get("routes", ()))
    expires_at = traits.get("expires_at")
    if expires_at is not None and not now < expires_at <= TIME_MAX:
        raise InvalidRequest("a key must expire in the future; to end one now, disable it", param="expires_at")
    _check_amount("budget_limit", traits.get("budget_limit"), 0, BUDGET_MAX)
    _check_amount("requests_per_minute", traits.get("requests_per_minute"), 1, PER_MINUTE_MAX)
    _check_amount("tokens_per_minute", traits.get("tokens_per_minute"), 1, PER_MINUTE_MAX)
    _check_amount("weight", traits.get("weight"), 1, WEIGHT_MAX)


def _check_name(name: str) -> None:
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
        raise InvalidRequest(
            f"a key's name is 1 to {NAME_CHARACTERS_MAX} printable characters without spaces around them", param="name"
        )
    if _ID.fullmatch(name):
        raise InvalidRequest("a key's name must not look like an id", param="name")


def _check_patterns(patterns: Sequence[str]) -> None:
    if len(patterns) > PATTERNS_MAX:
        raise InvalidRequest(f"a key may have {PATTERNS_MAX} routes at most", param="routes")
    for pattern in patterns:
        if not pattern or len(pattern) > PATTERN_CHARACTERS_MAX or not pattern.isprintable():
            raise InvalidRequest(
                f"a route is a model's name of 1 to {PATTERN_CHARACTERS_MAX} printable characters, in which * stands "
                "for any",
                param="routes",
            )


def _check_amount(name: str, amount: int | None, at_least: int, at_most: int) -> None:
    if amount is not None and not at_least <= amount <= at_most:
        raise InvalidRequest(f"{name} must be from {at_least} to {at_most}", param=name)


def _written(ms: int) -> str:
    return (EPOCH + timedelta(milliseconds=ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
