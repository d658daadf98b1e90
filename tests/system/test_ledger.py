"""The ledger on its databases: what is written stays, once, whatever dies."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, select, text

from app.domain import Outcome
from app.errors import LedgerRefused, LedgerUnavailable
from app.ledger import migrations
from app.ledger.rows import Batch, RequestRow, Settlement, SpendRow
from app.ledger.store import Store
from app.ledger.tables import keys, metadata, requests, spend
from tests.fakes.process import ROOT
from tests.system.ledger_rows import NOON, request_row, settlement, spend_row


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    async with Store(database_url) as store:
        yield store


async def rows(store: Store, table: Any) -> list[dict[str, Any]]:
    async with store.connect() as connection:
        found = await connection.execute(select(table).order_by(table.c.id))
        return [dict(row) for row in found.mappings()]


def test_rows_have_the_columns_of_their_tables() -> None:
    """They are written by position."""
    assert list(RequestRow._fields) == requests.c.keys()
    assert list(SpendRow._fields) == [column.name for column in spend.c if column.name in SpendRow._fields]
    assert set(Settlement._fields) < set(spend.c.keys())


async def test_a_request_is_kept_as_it_was(store: Store) -> None:
    row = request_row(first_content_ms=None, estimated=True, tokens_in=2**40, route="名前", operation="chat")
    await store.write(Batch(requests=[row]))

    assert await rows(store, requests) == [row._asdict()]


async def test_rows_written_twice_are_there_once(store: Store) -> None:
    """Whoever does not hear of a commit writes again."""
    batch = Batch([request_row()], [spend_row()], [settlement()])
    await store.write(batch)
    await store.write(batch._replace(requests=[request_row(cost=9), request_row("r2")]))

    assert [row["cost"] for row in await rows(store, requests)] == [0, 0]
    assert [(row["state"], row["cost"]) for row in await rows(store, spend)] == [("settled", 70)]


async def test_an_attempt_is_opened_and_settled(store: Store) -> None:
    await store.write(Batch(opened=[spend_row("a"), spend_row("b")]))
    known = settlement("a", estimated=True, outcome=Outcome.ABANDONED)
    await store.write(Batch(settled=[known, settlement("unknown")]))

    settled, opened = await rows(store, spend)
    assert settled == spend_row("a")._asdict() | settlement("a")._asdict() | {
        "state": "settled",
        "estimated": True,
        "outcome": "abandoned",
    }
    assert opened == spend_row("b")._asdict() | {
        "state": "open",
        "cost": None,
        "tokens_in": 0,
        "tokens_out": 0,
        "tokens_cached": 0,
        "estimated": False,
        "outcome": "",
        "settled_at": None,
    }


async def test_the_first_settlement_counts(store: Store) -> None:
    await store.write(Batch(opened=[spend_row()], settled=[settlement(cost=3), settlement(cost=4)]))
    await store.write(Batch(settled=[settlement(cost=5)]))

    assert (await store.spent("gateway", NOON)).settled == 3


@pytest.mark.parametrize(
    ("scope", "settled", "open_"),
    [
        ("gateway", 7, {"d": 500}),
        ("key:anna", 1, {"d": 500}),
        ("route:gpt:mini", 2, {}),
        ("provider:azure", 4, {}),
        ("key:nobody", 0, {}),
    ],
)
async def test_spent_is_told_by_scope(store: Store, scope: str, settled: int, open_: dict[str, int]) -> None:
    await store.write(
        Batch(
            opened=[
                spend_row("before", at=NOON - 1),
                spend_row("b", route="gpt:mini"),
                spend_row("c", node="azure"),
                spend_row("d", key="anna"),
                spend_row("a", key="anna", reserved=1, instance="dead"),
            ]
        )
    )
    await store.write(Batch(settled=[settlement("b", 2), settlement("c", 4)]))
    await store.lose_open(["one"], NOON + 1)

    assert await store.spent(scope, NOON) == (settled, open_)


async def test_what_dead_processes_left_open_counts_as_reserved(store: Store) -> None:
    await store.write(Batch(opened=[spend_row("a", instance="dead"), spend_row("b", instance="alive")]))
    await store.write(Batch(opened=[spend_row("c", instance="dead", at=NOON + 5), spend_row("d", instance="dead")]))
    await store.write(Batch(settled=[settlement("d")]))

    assert await store.lose_open(["alive", "new"], NOON + 5) == 1
    assert [row["state"] for row in await rows(store, spend)] == ["lost", "open", "open", "settled"]
    assert await store.spent("gateway", NOON) == (570, {"b": 500, "c": 500})


@pytest.mark.parametrize("alive", [None, []])
async def test_a_process_on_its_own_gives_up_all_that_is_older(store: Store, alive: list[str] | None) -> None:
    await store.write(Batch(opened=[spend_row("a"), spend_row("b", at=NOON + 1)]))

    assert await store.lose_open(alive, NOON + 1) == 1


async def test_a_lost_attempt_takes_its_late_settlement(store: Store) -> None:
    """A process was only thought dead."""
    await store.write(Batch(opened=[spend_row()]))
    await store.lose_open(None, NOON + 1)
    await store.write(Batch(settled=[settlement(cost=70)]))

    assert await store.spent("gateway", NOON) == (70, {})


async def test_an_operator_corrects_what_was_lost_and_nothing_else(store: Store) -> None:
    await store.write(Batch(opened=[spend_row("a"), spend_row("b", at=NOON + 9)]))
    await store.lose_open(None, NOON + 1)

    assert await store.reconcile("a", 12)
    assert not await store.reconcile("a", 13)
    assert not await store.reconcile("b", 13)
    assert not await store.reconcile("unknown", 13)
    assert await store.spent("gateway", NOON) == (12, {"b": 500})


async def test_refused_values_leave_nothing_behind(store: Store) -> None:
    with pytest.raises(LedgerRefused):
        await store.write(Batch([request_row("a"), request_row("b", cost=2**63)], [spend_row()]))

    assert not await rows(store, requests)
    assert not await rows(store, spend)


@pytest.mark.parametrize("name", ["x" * 600, "a\0b", "a\ud800b"])
async def test_names_that_clients_make_up_are_kept_as_far_as_they_can_be(store: Store, name: str) -> None:
    """Neither a row nor a reservation is lost by them."""
    await store.write(Batch([request_row("a"), request_row("b", model=name)], [spend_row(model=name)]))

    assert [row["id"] for row in await rows(store, requests)] == ["a", "b"]
    assert (await rows(store, spend))[0]["model"][:1] == name[:1]


async def test_a_broken_rule_is_told_to_whoever_set_it(store: Store) -> None:
    from sqlalchemy.exc import IntegrityError

    key = {"id": "1", "name": "n", "digest": "d", "hint": "h", "created_at": 1, "changed_at": 1, "routes": ["a*"]}
    async with store.begin() as connection:
        await connection.execute(keys.insert(), key)
    with pytest.raises(IntegrityError):
        async with store.begin() as connection:
            await connection.execute(keys.insert(), key | {"id": "2"})

    assert [row["routes"] for row in await rows(store, keys)] == [["a*"]]


async def test_writers_that_read_first_wait_for_each_other(store: Store) -> None:
    """On SQLite, a transaction that began with reading could only fail."""
    await store.write(Batch(opened=[spend_row(reserved=0)]))

    async def raise_by_one() -> None:
        async with store.begin() as connection:
            # PostgreSQL must be told that the row will be changed.
            value = (await connection.scalars(select(spend.c.reserved).with_for_update())).one()
            await asyncio.sleep(0)
            await connection.execute(spend.update().values(reserved=value + 1))

    await asyncio.gather(*(raise_by_one() for _ in range(8)))

    assert (await store.spent("gateway", 0)).open == {"r1-1": 8}


async def test_cancelled_reads_and_writes_leave_no_connection_behind(store: Store) -> None:
    for turn in range(12):
        task = asyncio.create_task(store.write(Batch([request_row(f"{turn}-{n}") for n in range(50)])))
        await asyncio.sleep(0.0005 * turn)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(5):
        await store.write(Batch(requests=[request_row("last")]))

    written = [row["id"].partition("-")[0] for row in await rows(store, requests)]
    assert "last" in written
    assert all(written.count(turn) == 50 for turn in set(written) - {"last"})


async def test_a_closed_store_says_so(database_url: str) -> None:
    store = Store(database_url)
    async with store:
        pass

    with pytest.raises(LedgerUnavailable, match="closed"):
        await store.spent("gateway", 0)


# The migrations


@pytest.mark.parametrize("build", [migrations.make, migrations.migrate])
async def test_new_tables_and_migrated_ones_are_the_same(
    database_url: str, build: Callable[[Connection], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def difference(connection: Connection) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        return list(compare_metadata(context, metadata))

    monkeypatch.setattr("app.ledger.store.upgrade", build)
    async with Store(database_url) as store, store.connect() as connection:
        assert await connection.run_sync(migrations.revision_of) == migrations.HEAD
        assert await connection.run_sync(difference) == []


async def test_migrations_find_nothing_to_do_in_new_tables(store: Store) -> None:
    async with store.begin() as connection:
        await connection.run_sync(migrations.migrate)
        assert await connection.run_sync(migrations.revision_of) == migrations.HEAD


def test_the_last_migration_is_the_one_that_starts_look_for() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))

    assert scripts.get_heads() == [migrations.HEAD]


async def test_tables_of_a_newer_version_are_left_alone(database_url: str) -> None:
    async with Store(database_url) as store, store.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(LedgerUnavailable, match=r"newer Hearth .* 9999"):
        await Store(database_url).open()


async def test_a_failed_migration_leaves_nothing_behind(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE half (n INTEGER)"))
        raise migrations.NewerTables("half")

    monkeypatch.setattr("app.ledger.store.upgrade", half)
    with pytest.raises(LedgerUnavailable):
        await Store(database_url).open()
    monkeypatch.undo()

    async with Store(database_url) as store:
        with pytest.raises(LedgerUnavailable):
            async with store.connect() as connection:
                await connection.execute(text("SELECT * FROM half"))


async def test_many_may_open_a_new_database_at_once(database_url: str) -> None:
    stores = [Store(database_url) for _ in range(5)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.write(Batch(requests=[request_row(str(n))])) for n, store in enumerate(stores)))

    assert len(await rows(stores[0], requests)) == 5
    await asyncio.gather(*(store.close() for store in stores))


class Process:
    """A Python process that uses the ledger; its code speaks by printing, and listens by input()."""

    def __init__(self, url: str, code: str) -> None:
        body = "\n".join(f"    {line}" for line in code.strip().splitlines())
        self._code = (
            "import asyncio, sys\nfrom app.ledger.rows import Batch\n"
            "from app.ledger.store import Store\nfrom tests.system.ledger_rows import *\n"
            f"async def main(url):\n{body}\nprint('ready', flush=True)\ninput()\nasyncio.run(main({url!r}))\n"
        )

    async def __aenter__(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", self._code, stdin=PIPE, stdout=PIPE, cwd=ROOT
        )
        return self._process

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


async def _said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_processes_may_open_a_new_database_at_once(database_url: str) -> None:
    code = "async with Store(url) as store: print(await store.spent('gateway', 0), flush=True)"
    async with Process(database_url, code) as one, Process(database_url, code) as two:
        assert [await _said(one), await _said(two)] == ["ready", "ready"]
        ends = await asyncio.gather(one.communicate(b"\n"), two.communicate(b"\n"))

    assert [out.decode().strip() for out, _ in ends] == ["Spent(settled=0, open={})"] * 2
    assert [one.returncode, two.returncode] == [0, 0]


async def test_what_was_opened_survives_a_killed_process(database_url: str) -> None:
    code = """
async with Store(url) as store:
    number = 0
    while True:
        await store.write(Batch(opened=[spend_row(f"s{number}", instance="killed")]))
        print(number, flush=True)
        number += 1
"""
    async with Process(database_url, code) as process:
        assert await _said(process) == "ready"
        assert process.stdin is not None
        process.stdin.write(b"\n")
        for _ in range(20):
            await _said(process)
        process.kill()
        out, _ = await process.communicate()
    told = [int(line) for line in out.decode().split("\n")[:-1]] or [19]

    async with Store(database_url) as store:
        spent = await store.spent("gateway", NOON)
        lost = await store.lose_open([], NOON + 1)
        after = await store.spent("gateway", NOON)
    assert set(spent.open) >= {f"s{number}" for number in range(told[-1] + 1)}
    assert lost == len(spent.open)
    assert after == (lost * 500, {})


# What users write


async def test_sqlite_makes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with Store("sqlite:///./data/deep/hearth.db") as store:
        name = store.name

    assert (tmp_path / "data" / "deep" / "hearth.db").exists()
    assert name == "sqlite:///./data/deep/hearth.db"


async def test_sqlite_keeps_a_log_ahead_so_that_readers_do_not_wait(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'hearth.db'}"
    async with Store(url) as writer, Store(url) as reader, writer.begin() as connection:
        await connection.execute(requests.insert(), request_row()._asdict())
        async with asyncio.timeout(1):
            seen = await rows(reader, requests)

    assert seen == []
    with sqlite3.connect(tmp_path / "hearth.db") as plain:
        assert plain.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    plain.close()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg", "POSTGRES"])
async def test_postgres_is_known_by_all_its_names(postgres_url: str, scheme: str) -> None:
    async with Store(postgres_url.replace("postgresql", scheme, 1)) as store:
        assert await store.spent("gateway", 0) == (0, {})


@pytest.mark.parametrize("parent", ["a file", "missing rights"])
async def test_a_file_that_cannot_be_made_is_told_in_one_line(tmp_path: Path, parent: str) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "missing rights").mkdir()
    (tmp_path / "missing rights" / "hearth.db").mkdir()

    with pytest.raises(LedgerUnavailable, match=r"^DATABASE_URL: .* cannot be ") as caught:
        await Store(f"sqlite:///{tmp_path / parent / 'hearth.db'}").open()
    assert "\n" not in caught.value.message


async def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database at all, but longer than a header would be\n" * 20)

    with pytest.raises(LedgerUnavailable, match="not a database"):
        await Store(f"sqlite:///{tmp_path / 'notes.txt'}").open()


async def test_a_refused_login_is_told_without_the_password(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    url = urlunsplit(parts._replace(netloc="locked:hunter2@" + parts.netloc.rpartition("@")[2]))

    with pytest.raises(LedgerUnavailable, match=r"^DATABASE_URL: postgresql://.* cannot be opened: ") as caught:
        await Store(url).open()
    assert "hunter2" not in repr(caught.value)
    assert "locked" in caught.value.message


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://hearth:hunter2@127.0.0.1:1/hearth",
        "postgresql://hearth:hunter2@nowhere.invalid/hearth",
        "postgresql://hearth:hunt/er2@127.0.0.1/hearth",
        "postgresql://hearth:1/hunter2@127.0.0.1/hearth",
        "postgresql://[hunter2/hearth",
        "postgresql://hearth:hunt@er2@127.0.0.1:1/hearth",
        "postgresql://127.0.0.1:1/hearth?password=hunter2",
        "postgresql://127.0.0.1:hunter2/hearth",
        "mysql://hearth:hunter2@127.0.0.1/hearth",
        "sqlite:///:memory:",
        "sqlite://",
    ],
)
async def test_urls_that_lead_nowhere_are_told_without_the_password(url: str) -> None:
    with pytest.raises(LedgerUnavailable, match=r"^DATABASE_URL: ") as caught:
        await Store(url).open()
    assert not [part for part in ("hunter2", "hunt", "er2") if part in caught.value.message]
    assert "\n" not in caught.value.message


async def test_a_database_that_comes_back_is_used_again(postgres: Any) -> None:
    async with Store(postgres.url) as store:
        await store.write(Batch(requests=[request_row("a")]))
        await asyncio.to_thread(postgres.kill)
        with pytest.raises(LedgerUnavailable):
            await store.write(Batch(requests=[request_row("b")]))
        await asyncio.to_thread(postgres.start)

        await store.write(Batch(requests=[request_row("c")]))
        assert [row["id"] for row in await rows(store, requests)] == ["a", "c"]


# Against a model

_IDS = st.sampled_from(["a", "b", "c"])
_STEPS = st.one_of(
    st.tuples(st.just("open"), _IDS, st.integers(0, 9)),
    st.tuples(st.just("settle"), _IDS, st.integers(0, 9)),
    st.tuples(st.just("lose"), _IDS, st.just(0)),
    st.tuples(st.just("reconcile"), _IDS, st.integers(0, 9)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(_STEPS, max_size=12))
async def test_spent_is_what_a_simple_model_says(store: Store, steps: list[tuple[str, str, int]]) -> None:
    async with store.begin() as connection:
        await connection.execute(spend.delete())
    model: dict[str, tuple[str, int]] = {}
    for what, id, amount in steps:
        state, held = model.get(id, ("", 0))
        if what == "open":
            await store.write(Batch(opened=[spend_row(id, reserved=amount, instance=id)]))
            model.setdefault(id, ("open", amount))
        elif what == "settle":
            await store.write(Batch(settled=[settlement(id, amount)]))
            if state in ("open", "lost"):
                model[id] = ("settled", amount)
        elif what == "lose":
            await store.lose_open({"a", "b", "c"} - {id}, NOON + 1)
            if state == "open":
                model[id] = ("lost", held)
        elif await store.reconcile(id, amount):
            assert state == "lost"
            model[id] = ("settled", amount)

    open_ = {id: amount for id, (state, amount) in model.items() if state == "open"}
    assert await store.spent("gateway", 0) == (sum(amount for _, amount in model.values()) - sum(open_.values()), open_)
