"""API keys that are made at run time: kept in the ledger as digests, looked up in memory.

A key that another process has made or changed is known here after `REFRESH_SECONDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import RowMapping, Select, case, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from app.domain import Caller, Period, Priority
from app.errors import LedgerUnavailable, Unauthorized
from app.ledger import key as values
from app.ledger.engines import AsyncConnection
from app.ledger.key import Key, KeyNameTaken, KeyNotFound, Traits
from app.ledger.store import Store
from app.ledger.tables import keys
from app.sharing.periods import now_ms

REFRESH_SECONDS = 2.0
_ROWS_AT_ONCE = 200  # between them others have their turn

_DEFAULTS: Traits = {
    "disabled": False,
    "expires_at": None,
    "routes": (),
    "local_only": False,
    "budget_limit": None,
    "budget_period": Period.MONTH,
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "weight": 1,
    "priority": None,
}


class _Known(NamedTuple):
    """What a look-up needs of a key."""

    caller: Caller
    expires_at: int | None
    disabled: bool


class _State(NamedTuple):
    """Tells whether the table has changed. Every change raises the sum, whatever the clocks of those who make it."""

    keys: int
    changes: int


class KeyBook:
    """The keys of one ledger. Every method that asks it raises `LedgerUnavailable` when it is away.

    Before the first `refresh` it admits nobody, and a key is required.
    """

    def __init__(
        self,
        store: Store,
        *,
        on_trouble: Callable[[str], None] = lambda message: None,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._store = store
        self._on_trouble = on_trouble
        self._clock = clock
        # Whether there is a key, so that nobody may ask without one. A disabled key counts too: to disable the last one
        # must not open the gateway to everybody.
        self.required = True
        self._known: Mapping[bytes, _Known] = {}
        self._state: _State | None = None
        self._reading = asyncio.Lock()

    def caller_of(self, digest: bytes) -> Caller | None:
        """Whose key has this SHA-256. Raises `Unauthorized` for a known key that has expired or is disabled."""
        known = self._known.get(digest)
        if known is None:
            return None
        if known.disabled:
            raise Unauthorized("this API key is disabled")
        if known.expires_at is not None and known.expires_at <= self._clock():
            raise Unauthorized("this API key has expired")
        return known.caller

    def callers(self) -> Sequence[Caller]:
        """Whoever may ask with a key, as last read; those whose key is disabled or has expired too."""
        return [known.caller for known in self._known.values()]

    async def create(self, name: str, traits: Traits | None = None) -> tuple[Key, str]:
        """A new key, and its secret, which is kept nowhere. Raises `InvalidRequest` or `KeyNameTaken`."""
        secret = values.new_secret()
        now = self._clock()
        chosen: Traits = {**_DEFAULTS, **(traits or {}), "name": name}
        values.check(chosen, now)
        id = values.new_id()
        row = {"id": id, "created_at": now, "changed_at": now, **_secret_columns(secret), **_columns(chosen)}
        try:
            async with self._store.begin() as connection:
                await connection.execute(insert(keys).values(row))
        except IntegrityError as error:
            raise KeyNameTaken(name) from error
        await self._reload()
        return await self.get(id), secret

    async def list(self) -> list[Key]:
        """All keys, the oldest first."""
        async with self._store.connect() as connection:
            rows = await connection.execute(select(keys).order_by(keys.c.created_at, keys.c.id))
            return [_key(row) for row in rows.mappings()]

    async def get(self, name: str) -> Key:
        """The key of this name or id. Raises `KeyNotFound`."""
        async with self._store.connect() as connection:
            return _key(await _row(connection, name))

    async def change(self, name: str, traits: Traits) -> Key:
        """Changes what is given. Raises `KeyNotFound`, `InvalidRequest` or `KeyNameTaken`."""
        values.check(traits, self._clock())
        return await self._update(name, _columns(traits))

    async def disable(self, name: str) -> Key:
        return await self._update(name, {"disabled": True})

    async def enable(self, name: str) -> Key:
        return await self._update(name, {"disabled": False})

    async def rotate(self, name: str) -> tuple[Key, str]:
        """A new secret for the key. The old one is refused from now on; all else stays. Raises `KeyNotFound`."""
        secret = values.new_secret()
        return await self._update(name, _secret_columns(secret)), secret

    async def refresh(self) -> bool:
        """Reads the keys if they have changed, and says whether they had."""
        async with self._store.connect() as connection:
            count, changes = (await connection.execute(_STATE)).one()
        if _State(int(count), int(changes)) == self._state:
            return False
        await self._reload()
        return True

    async def run(self) -> None:
        """Keeps up with what other processes do, until it is cancelled. While the ledger is away, the keys stay."""
        away = False
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
                away = False
            except LedgerUnavailable as error:
                if not away:
                    self._on_trouble(f"API keys stay as they were last read: {error.message}")
                away = True

    async def _update(self, name: str, columns: Mapping[str, Any]) -> Key:
        now = self._clock()
        changed_at = case((keys.c.changed_at < now, now), else_=keys.c.changed_at + 1)
        try:
            async with self._store.begin() as connection:
                id = (await _row(connection, name))["id"]
                change = update(keys).where(keys.c.id == id)
                await connection.execute(change.values(**columns, changed_at=changed_at))
                row = await _row(connection, id)
        except IntegrityError as error:
            raise KeyNameTaken(str(columns.get("name"))) from error
        await self._reload()
        return _key(row)

    async def _reload(self) -> None:
        # One at a time, or an older look could come last.
        async with self._reading:
            known: dict[bytes, _Known] = {}
            changes = 0
            async with self._store.connect() as connection:
                result = await connection.stream(select(keys))
                async for rows in result.mappings().partitions(_ROWS_AT_ONCE):
                    for row in rows:
                        key = _key(row)
                        changes += key.changed_at
                        known[bytes.fromhex(row["digest"])] = _Known(key.caller(), key.expires_at, key.disabled)
            self._known = known
            self.required = bool(known)
            self._state = _State(len(known), changes)


_STATE: Select[int, int] = select(func.count(), func.coalesce(func.sum(keys.c.changed_at), 0)).select_from(keys)


async def _row(connection: AsyncConnection, name: str) -> RowMapping:
    if not name.isprintable():  # which not every database takes
        raise KeyNotFound(name)
    # No name looks like an id, so that there is one at most.
    found = await connection.execute(select(keys).where(or_(keys.c.id == name, keys.c.name == name)))
    row = found.mappings().first()
    if row is None:
        raise KeyNotFound(name)
    return row


def _key(row: RowMapping) -> Key:
    return Key(
        id=row["id"],
        name=row["name"],
        hint=row["hint"],
        created_at=row["created_at"],
        changed_at=row["changed_at"],
        expires_at=row["expires_at"],
        disabled=row["disabled"],
        routes=tuple(row["routes"]),
        local_only=row["local_only"],
        budget_limit=row["budget_limit"],
        budget_period=Period(row["budget_period"] or Period.MONTH),
        requests_per_minute=row["requests_per_minute"],
        tokens_per_minute=row["tokens_per_minute"],
        weight=row["weight"] or 1,
        priority=Priority(row["priority"]) if row["priority"] else None,
    )


def _columns(traits: Traits) -> dict[str, Any]:
    columns: dict[str, Any] = dict(traits)
    if "routes" in columns:
        columns["routes"] = list(columns["routes"])
    if "budget_period" in columns:
        columns["budget_period"] = str(columns["budget_period"])
    if columns.get("priority") is not None:
        columns["priority"] = str(columns["priority"])
    return columns


def _secret_columns(secret: str) -> dict[str, str]:
    return {"digest": values.digest(secret), "hint": values.hint(secret)}
