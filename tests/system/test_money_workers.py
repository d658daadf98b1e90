"""Several workers with one budget, any of which may die: nothing that the cloud charges is ever missing."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeOllama
from tests.fakes.billing import BillingCloud
from tests.servers import Valkey
from tests.system.gateway_process import ROOT, GatewayProcess, children
from tests.system.harness import node_settings, until
from tests.system.money import Books, Row, counted, paid
from tests.system.plain_client import Response, request, send
from tests.system.test_workers import Workers, runs

pytestmark = pytest.mark.timeout(180)  # processes that start take their time on a busy machine

WORKERS = 4
AT_ONCE = 200
START_SECONDS = 60.0
STOP_SECONDS = 20.0
PATIENT_SECONDS = 20
CONVERGED_SECONDS = 5.0


@asynccontextmanager
async def working(
    folder: Path, cloud: BillingCloud, local: FakeOllama, *, url: str, database_url: str, **settings: Any
) -> AsyncIterator[Workers]:
    """A gateway of several processes, all of which serve."""
    settings = {
        "local_nodes": node_settings(local),
        "nodes_file": "off",
        "workers": WORKERS,
        "health_check_timeout": PATIENT_SECONDS,  # the node shares its process with all the clients
        "connect_timeout": PATIENT_SECONDS,
        **paid(cloud, **settings),
    }
    async with Workers(folder, redis_url=url, database_url=database_url, **settings) as hearth:
        await hearth.all_serve(int(settings["workers"]), START_SECONDS)
        try:
            yield hearth
        except BaseException:
            print(hearth.stderr.decode()[-6000:])
            raise


async def ask(hearth: GatewayProcess, model: str, **fields: Any) -> Response:
    """A chat on a connection of its own, which any worker may get."""
    body = {"model": model, "messages": [{"role": "user", "content": "so many words"}], **fields}
    return await send(hearth.url, request(body))


async def at_once(asks: Iterable[Callable[[], Awaitable[Response]]]) -> list[Response]:
    """All the answers, of which so many are waited for at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(ask: Callable[[], Awaitable[Response]]) -> Response:
        async with places:
            return await ask()

    return await asyncio.gather(*map(one, asks))


async def test_parallel_requests_overspend_by_no_more_than_one_for_each_worker(
    tmp_path: Path, valkey_url: str, database_url: str
) -> None:
    books = Books(database_url)
    async with (
        BillingCloud() as cloud,
        FakeOllama(models=["m"]) as local,
        working(tmp_path, cloud, local, url=valkey_url, database_url=database_url, cloud_budget_usd=1) as hearth,
    ):
        cloud.engine.cached_tokens = 1
        cloud.script.tokens = 1000

        def asked(number: int) -> Callable[[], Awaitable[Response]]:
            limit = 10 + number % 21  # about 2,000 micro-dollars each
            return lambda: ask(hearth, "far", stream=number % 2 == 0, max_tokens=limit)

        def most() -> int:
            return max(bill.micro_dollars() for bill in cloud.bills)

        async def spent() -> bool:
            """What is reserved for others counts until they are settled, so that some may fall free after a refusal."""
            answers.append(await ask(hearth, "far", max_tokens=10))
            return answers[-1].status == 429 and cloud.charged() >= 1_000_000 - most()

        answers = await at_once(asked(number) for number in range(1000))
        await until(spent, "no other request fits the budget")
        last = answers[-1]
        at_home = await at_once([lambda: ask(hearth, "m")] * 40)

        assert {answer.status for answer in at_home} == {200}, at_home[0].body
        assert Counter(answer.status for answer in answers).keys() == {200, 429}
        assert (last.status, last.json["error"]["code"]) == (429, "budget_exceeded")
        assert int(last.header("retry-after") or 0) >= 1
        rows = await books.closed(len(cloud.bills))
        assert 1_000_000 - most() <= cloud.charged() <= 1_000_000 + WORKERS * most()
        assert counted(rows) == cloud.charged()
        assert sum(answer.status == 200 for answer in answers) == len(rows)
        assert len({row["instance"] for row in rows}) == WORKERS


# -- processes that are killed


class Killing:
    """Streams without end to a gateway whose workers are killed."""

    def __init__(self, hearth: GatewayProcess) -> None:
        self.answered = 0
        self.broken = 0
        self._hearth = hearth
        self._over = False
        self._asked = 0

    @asynccontextmanager
    async def load(self, at_once: int) -> AsyncIterator[None]:
        asking = [asyncio.create_task(self._ask()) for _ in range(at_once)]
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*asking)

    async def _ask(self) -> None:
        while not self._over:
            self._asked += 1
            try:
                # Each asks for a model of its own, by which the cloud's bill and the ledger's row are known.
                answer = await ask(self._hearth, f"far-{self._asked}", stream=self._asked % 4 != 0, max_tokens=20)
                # A busy machine may hold the server up for longer than it is waited for; the cloud is closed then.
                assert answer.status == 200 or answer.json["error"]["code"] == "sharing_unavailable", answer.body
                self.answered += answer.status == 200
            except (OSError, asyncio.IncompleteReadError):
                self.broken += 1
                await asyncio.sleep(0.02)


def open_rows(path: Path) -> list[tuple[str, int]]:
    """The open spends: the model, and the process that has it."""
    with sqlite3.connect(path) as ledger:
        rows = ledger.execute("SELECT model, instance FROM spend WHERE state = 'open'").fetchall()
    ledger.close()
    return [(model, int(instance.rsplit("-", 2)[1])) for model, instance in rows]


async def kill_one_in_mid_stream(hearth: Workers, cloud: BillingCloud, path: Path) -> None:
    """Kills a worker whose request the cloud is answering."""

    def busy() -> list[int]:
        alive = children(hearth.pid)
        answering = {bill.model for bill in cloud.bills if bill.completion}
        return [pid for model, pid in open_rows(path) if pid in alive and model in answering] if len(alive) > 1 else []

    await until(busy, "a worker serves a stream", 20)
    pid = busy()[0]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not runs(pid), "it is dead")


def paid_for(rows: list[Row], cloud: BillingCloud) -> None:
    """Fails unless each request that the cloud charges for is in the ledger, exactly or at its reservation."""
    by_model = {row["model"]: row for row in rows}
    for bill in cloud.bills:
        row = by_model[bill.model]
        if row["state"] == "settled" and not row["estimated"]:
            assert row["cost"] == bill.micro_dollars()
        else:
            assert (row["cost"] if row["state"] == "settled" else row["reserved"]) >= bill.micro_dollars()
    assert counted(rows) >= cloud.charged()


async def test_killed_workers_leave_nothing_unaccounted_and_nothing_stuck(tmp_path: Path, valkey_url: str) -> None:
    path = tmp_path / "hearth.db"
    books = Books(f"sqlite:///{path}")
    names = [f"far-{number}" for number in range(20_000)]
    mine: Any = {"c0": {"models": ["far-*"]}, "model_map": {}, "database_url": books.url}
    async with BillingCloud(names, tokens=20, token_seconds=0.01) as cloud, FakeOllama(models=["m"]) as local:
        async with working(tmp_path, cloud, local, url=valkey_url, cloud_budget_usd=100, **mine) as hearth:
            killing = Killing(hearth)
            async with killing.load(12):
                for _ in range(20):
                    await kill_one_in_mid_stream(hearth, cloud, path)
                # Workers may die faster than any of their streams can end.
                await until(lambda: killing.answered, "streams are answered again", START_SECONDS)
            await hearth.all_serve(WORKERS, START_SECONDS)

            assert killing.broken >= 20
            assert {(await ask(hearth, "m")).status for _ in range(8)} == {200}
            assert {(await ask(hearth, "far-0", max_tokens=2)).status} == {200}
            await until(lambda: idle(hearth), "nothing is in flight", 5)
            hearth.signal(signal.SIGTERM)
            assert await hearth.ended(STOP_SECONDS) == 0
        rows = await books.spends()
        paid_for(rows, cloud)
        spent = counted(rows)
        assert {row["state"] for row in rows} <= {"settled", "lost", "open"}
        unsettled = [row for row in rows if row["state"] != "settled"]
        assert len(unsettled) >= 20

        alone = {**paid(cloud, cloud_budget_usd=spent / 1e6, **mine), "admin_keys": "boss"}
        async with GatewayProcess(tmp_path, **alone) as single:
            await single.serving()

            refused = await ask(single, "far-19999", max_tokens=2)
            assert (refused.status, refused.json["error"]["code"]) == (429, "budget_exceeded")
            rows = await books.spends()
            assert {row["id"] for row in rows if row["state"] == "lost"} == {row["id"] for row in unsettled}
            assert counted(rows) == spent
            assert not open_rows(path)

            listed = await usage(tmp_path, books, "lost")
            assert all(row["id"] in listed for row in unsettled)
            await usage(tmp_path, books, "reconcile", unsettled[0]["id"], "--cost-usd", "0")

            async def served() -> bool:
                return (await ask(single, "far-19999", max_tokens=2)).status == 200

            await until(served, "the gateway hears that there is room again")


async def idle(hearth: GatewayProcess) -> bool:
    """Whether the nodes are idle, by what several workers say."""
    shown = []
    for _ in range(8):
        answer = await send(hearth.url, b"GET /admin/nodes HTTP/1.1\r\nhost: localhost\r\n\r\n", "GET")
        shown += [node["in_flight"] + node["others_in_flight"] for node in answer.json["nodes"]]
    return not any(shown)


async def usage(folder: Path, books: Books, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app", "usage", *words),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DATABASE_URL": books.url, "LOCAL_NODES": "[]", "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


# -- the server that workers share is killed


@pytest.mark.parametrize("policy", ["closed", "local"])
async def test_without_the_shared_server_local_requests_go_on_and_the_cloud_follows_its_policy(
    tmp_path: Path, valkey: Valkey, policy: str
) -> None:
    books = Books(f"sqlite:///{tmp_path / 'hearth.db'}")
    settings: Any = {"cloud_budget_usd": 0.05, "sharing_failure": policy, "workers": 2}
    async with (
        BillingCloud(tokens=4) as cloud,
        FakeOllama(models=["m"]) as local,
        working(tmp_path, cloud, local, url=valkey.url, database_url=books.url, **settings) as hearth,
    ):
        async with load(hearth) as (at_home, away):
            await until(lambda: away.count(200) >= 5, "the cloud serves")
            await asyncio.to_thread(valkey.kill)
            await until(lambda: alone(hearth) == 2, "both say that they are alone")
            before = len(away)
            await until(lambda: len(away) > before + 10, "the cloud was asked for without the server")
            during = set(away[before + 2 :])

            await asyncio.to_thread(valkey.start)

            await until(lambda: away[-3:] == [200] * 3, "the cloud is open again", CONVERGED_SECONDS)
            await until(lambda: 429 in away, "the budget is spent", 20)

        assert len(at_home) > 40
        assert set(at_home) == {200}
        assert during == ({503} if policy == "closed" else {200})
        rows = await books.closed(len(cloud.bills))
        assert counted(rows) == cloud.charged()
        assert cloud.charged() <= 50_000 + 2 * max(bill.micro_dollars() for bill in cloud.bills)


def alone(hearth: GatewayProcess) -> int:
    return sum("goes on alone" in line["event"] for line in hearth.lines)


@asynccontextmanager
async def load(hearth: GatewayProcess) -> AsyncIterator[tuple[list[int], list[int]]]:
    """Requests without end; gives the statuses of local ones and of those for the cloud."""
    at_home: list[int] = []
    away: list[int] = []
    over = asyncio.Event()

    async def asking(model: str, statuses: list[int]) -> None:
        while not over.is_set():
            statuses.append((await ask(hearth, model, max_tokens=4)).status)
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(asking(*each)) for each in (("m", at_home), ("m", at_home), ("far", away))]
    try:
        yield at_home, away
    finally:
        over.set()
        await asyncio.gather(*tasks)
