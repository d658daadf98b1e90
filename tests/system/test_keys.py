"""API keys that are made at run time, on real databases."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from sqlalchemy import text

from app.domain import Budget, Caller, Period, Priority, Rate
from app.errors import InvalidRequest, LedgerUnavailable, Unauthorized
from app.fronts.auth import digest_of
from app.ledger import keys, tables
from app.ledger.key import KeyNameTaken, KeyNotFound, Traits
from app.ledger.keys import KeyBook
from app.ledger.store import Store
from tests.servers import Postgres
from tests.system.harness import until

NOON = 1_800_000_000_000
HOUR = 3_600_000


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def book(database_url: str, clock: Clock) -> AsyncIterator[KeyBook]:
    async with Store(database_url) as store:
        yield KeyBook(store, clock=clock)


def caller(book: KeyBook, secret: str) -> Caller | None:
    return book.caller_of(digest_of(secret.encode()))


async def test_a_new_key_is_known_at_once_with_all_its_traits(book: KeyBook) -> None:
    traits: Traits = {
        "routes": ["qwen*", "m"],
        "local_only": True,
        "budget_limit": 2_000_001,
        "budget_period": Period.WEEK,
        "requests_per_minute": 60,
        "expires_at": NOON + HOUR,
    }

    key, secret = await book.create("ada", traits)

    budget, rate = Budget(2_000_001, Period.WEEK), Rate(60, None)
    assert caller(book, secret) == Caller(key.id, "ada", ("qwen*", "m"), True, budget, rate)
    assert await book.list() == [key]
    assert (await book.get("ada"), await book.get(key.id)) == (key, key)
    assert (key.created_at, key.expires_at, key.disabled) == (NOON, NOON + HOUR, False)


async def test_a_secret_has_256_random_bits_and_only_its_digest_and_first_characters_are_kept(
    database_url: str,
) -> None:
    async with Store(database_url) as store:
        _, secret = await KeyBook(store).create("ada")
        async with store.connect() as connection:
            row = (await connection.execute(tables.keys.select())).one()

    assert secret.startswith("hearth-")
    assert len(secret) == len("hearth-") + 43
    assert row.digest == hashlib.sha256(secret.encode()).hexdigest()
    assert row.hint == secret[:11]
    assert secret not in str(row)


async def test_without_keys_none_is_needed_and_a_disabled_one_still_closes_the_door(book: KeyBook) -> None:
    assert book.required  # before it has looked

    await book.refresh()
    assert not book.required

    await book.create("ada")
    await book.disable("ada")
    assert book.required


async def test_a_rotated_key_keeps_all_but_its_secret(book: KeyBook) -> None:
    key, old = await book.create("ada", {"routes": ["m"]})

    rotated, new = await book.rotate("ada")

    assert caller(book, old) is None
    assert caller(book, new) == Caller(key.id, "ada", ("m",))
    assert rotated.hint == new[:11]
    assert rotated.changed_at > key.changed_at


async def test_a_disabled_key_says_so_until_it_is_enabled(book: KeyBook) -> None:
    _, secret = await book.create("ada")

    await book.disable("ada")
    with pytest.raises(Unauthorized, match="is disabled"):
        caller(book, secret)

    await book.enable("ada")
    assert caller(book, secret)


async def test_a_key_expires_on_its_millisecond(book: KeyBook, clock: Clock) -> None:
    _, secret = await book.create("ada", {"expires_at": NOON + HOUR})

    clock.now = NOON + HOUR - 1
    assert caller(book, secret)
    clock.now += 1
    with pytest.raises(Unauthorized, match="has expired"):
        caller(book, secret)


async def test_a_change_touches_only_what_it_names(book: KeyBook) -> None:
    key, secret = await book.create("ada", {"budget_limit": 5, "tokens_per_minute": 7})

    changed = await book.change(key.id, {"name": "grace", "budget_limit": 6})

    found = caller(book, secret)
    assert (changed.name, changed.budget_limit, changed.tokens_per_minute) == ("grace", 6, 7)
    assert found == Caller(key.id, "grace", budget=Budget(6), rate=Rate(None, 7))
    assert (await book.change("grace", {"budget_limit": None})).budget_limit is None


@pytest.mark.parametrize(
    "traits",
    [
        {"name": ""},
        {"name": " a"},
        {"name": "a\n"},
        {"name": "a" * 65},
        {"name": "0123456789abcdef"},
        {"routes": [""]},
        {"routes": ["m"] * 101},
        {"expires_at": NOON},
        {"budget_limit": -1},
        {"requests_per_minute": 0},
        {"weight": 0},
        {"tokens_per_minute": 2**60},
    ],
    ids=str,
)
async def test_traits_that_cannot_be_are_refused_and_named(traits: Traits, book: KeyBook) -> None:
    await book.create("ada")

    with pytest.raises(InvalidRequest) as refused:
        await book.change("ada", traits)
    with pytest.raises(InvalidRequest):
        await book.create(traits.get("name", "eve"), traits)

    assert refused.value.param in traits
    assert [key.name for key in await book.list()] == ["ada"]


async def test_names_are_unique_and_unknown_ones_are_said(book: KeyBook) -> None:
    await book.create("ada")
    await book.create("grace")

    with pytest.raises(KeyNameTaken):
        await book.create("ada")
    with pytest.raises(KeyNameTaken):
        await book.change("grace", {"name": "ada"})
    with pytest.raises(KeyNotFound):
        await book.rotate("eve")


async def test_what_another_process_changes_is_known_soon(
    database_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REFRESH_SECONDS", 0.02)
    async with Store(database_url) as store, Store(database_url) as other_store:
        book, other = KeyBook(store, clock=clock), KeyBook(other_store, clock=clock)
        await book.refresh()
        keeping = asyncio.create_task(book.run())

        key, secret = await other.create("ada")
        await until(lambda: caller(book, secret), "the key is known")
        # In the same millisecond, which no clock tells apart.
        await other.change("ada", {"local_only": True})
        await until(lambda: caller(book, secret) == Caller(key.id, "ada", local_only=True), "the change is known")
        await other.rotate("ada")
        await until(lambda: caller(book, secret) is None, "the old secret is refused")

        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping


async def test_while_the_ledger_is_away_the_known_keys_stay(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REFRESH_SECONDS", 0.02)
    troubles: list[str] = []
    async with Store(postgres.url) as store:
        book = KeyBook(store, on_trouble=troubles.append)
        _, secret = await book.create("ada")
        keeping = asyncio.create_task(book.run())

        postgres.kill()
        await until(lambda: troubles, "it says so")
        assert caller(book, secret)
        with pytest.raises(LedgerUnavailable):
            await book.disable("ada")

        await asyncio.to_thread(postgres.start)  # meanwhile it looks again and again
        await until(lambda: _disabled(book), "it is there again")
        with pytest.raises(Unauthorized):
            caller(book, secret)

        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    assert len(troubles) == 1
    assert secret not in troubles[0]


async def _disabled(book: KeyBook) -> bool:
    try:
        return (await book.disable("ada")).disabled
    except LedgerUnavailable:
        return False


async def test_keys_are_read_again_only_when_they_have_changed(book: KeyBook) -> None:
    await book.create("ada")

    assert not await book.refresh()


async def test_many_keys_are_all_known(book: KeyBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_ROWS_AT_ONCE", 2)

    secrets = [(await book.create(f"key {number}"))[1] for number in range(5)]

    assert all(caller(book, secret) for secret in secrets)


async def test_keys_made_at_the_same_time_are_all_known(book: KeyBook) -> None:
    made = await asyncio.gather(*(book.create(f"key {number}") for number in range(8)))

    assert all(caller(book, secret) for _, secret in made)


async def test_keys_from_before_turns_were_fair_have_one_turn_each(database_url: str) -> None:
    async with Store(database_url) as store:
        _, secret = await KeyBook(store).create("old")
        async with store.begin() as connection:
            for column in ("weight", "priority"):
                await connection.execute(text(f"ALTER TABLE keys DROP COLUMN {column}"))
            await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))

    async with Store(database_url) as store:
        book = KeyBook(store)
        await book.refresh()
        found = caller(book, secret)
        _, new = await book.create("new", {"weight": 3, "priority": Priority.HIGH})

        assert found is not None
        assert (found.weight, found.priority) == (1, None)
        assert caller(book, new) == Caller((await book.get("new")).id, "new", weight=3, priority=Priority.HIGH)
