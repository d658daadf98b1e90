"""What the cloud costs, and who may still ask it: one gateway, in front of a cloud that keeps bills of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.ledger.rows import Batch
from app.ledger.store import Store
from tests.fakes import Behaviour, FakeOllama
from tests.fakes.billing import BillingCloud
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.ledger_rows import spend_row
from tests.system.money import MODEL, Books, bearer, code, counted, paid
from tests.system.scripted import RawClient
from tests.system.test_replicas import acquainted

STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
HOUR_SECONDS = 3600
LONG: Any = {"messages": [{"role": "user", "content": "extraordinarily characteristic considerations"}]}


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(f"sqlite:///{tmp_path / 'hearth.db'}")


@asynccontextmanager
async def hearth_with(
    books: Books, *clouds: BillingCloud, local: FakeOllama | None = None, **settings: Any
) -> AsyncIterator[Gateway]:
    nodes = node_settings(local) if local else "[]"
    settings = {"local_nodes": nodes, "admin_keys": "boss", **paid(*clouds, **settings)}
    async with gateway(database_url=books.url, **settings) as hearth:
        yield hearth


async def far(hearth: Gateway, **fields: Any) -> Any:
    return await hearth.chat(model="far", **{**LONG, **fields})


async def key(hearth: Gateway, name: str, **traits: Any) -> dict[str, str]:
    """A new key, as the header that shows it."""
    answer = await hearth.client.post("/admin/keys", json={"name": name, **traits}, headers=bearer("boss"))
    assert answer.status_code == 201, answer.text
    return bearer(answer.json()["secret"])


def troubles(hearth: Gateway, word: str) -> list[dict[str, Any]]:
    return [line for line in hearth.lines.all if word in line["event"]]


# -- what an attempt comes to


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("cached", [0, 2])
async def test_an_answer_costs_what_its_usage_says(books: Books, stream: bool, cached: int) -> None:
    async with BillingCloud(tokens=5) as cloud, hearth_with(books, cloud, cloud_budget_usd=1) as hearth:
        cloud.engine.cached_tokens = cached

        assert (await far(hearth, stream=stream)).status_code == 200

        row, (bill,) = await books.one(), cloud.bills
        (request,) = await books.written(1)
        assert row["cost"] == request["cost"] == bill.micro_dollars() > 0
        assert (row["tokens_in"], row["tokens_out"], row["tokens_cached"]) == (3, 5, cached)
        assert (row["state"], row["outcome"], row["estimated"]) == ("settled", "ok", False)
        assert row["reserved"] > row["cost"]
        assert (row["route"], row["node"], row["model"]) == ("far", "c0", MODEL)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "one two three"}), ("/v1/embeddings", {"input": ["one two", "three"]})],
    ids=["completion", "embedding"],
)
async def test_every_operation_is_paid_for(books: Books, path: str, body: dict[str, Any]) -> None:
    async with BillingCloud() as cloud, hearth_with(books, cloud, cloud_budget_usd=1) as hearth:
        answer = await hearth.client.post(path, json={"model": "far", **body})

        assert answer.status_code == 200
        row = await books.one()
        assert row["cost"] == cloud.charged() > 0
        assert row["reserved"] >= row["cost"]
        assert not row["estimated"]


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        (Behaviour.STATUS_400, "refused"),
        (Behaviour.STATUS_401, "failed"),
        (Behaviour.STATUS_404, "failed"),
        (Behaviour.STATUS_500, "failed"),
        (Behaviour.REFUSE, "failed"),
        (Behaviour.RESET_AT_ACCEPT, "failed"),
    ],
)
async def test_errors_cost_nothing(books: Books, behaviour: Behaviour, outcome: str, stream: bool) -> None:
    async with (
        BillingCloud() as cloud,
        hearth_with(books, cloud, cloud_budget_usd=1, max_attempts=1, health_check_interval=60) as hearth,
    ):
        cloud.behave(behaviour)

        assert (await far(hearth, stream=stream)).status_code >= 400

        row = await books.one()
        assert cloud.charged() == 0
        if behaviour is not Behaviour.RESET_AT_ACCEPT:  # who cannot know whether it was heard reckons that it was
            assert (row["cost"], row["outcome"], row["estimated"]) == (0, outcome, False)
        assert row["state"] == "settled"


@pytest.mark.parametrize("behaviour", [Behaviour.CLOSE_MIDWAY, Behaviour.RESET_MIDWAY, Behaviour.ERROR_MIDWAY])
async def test_a_stream_that_is_cut_costs_what_had_come(books: Books, behaviour: Behaviour) -> None:
    async with BillingCloud(tokens=9) as cloud, hearth_with(books, cloud, cloud_budget_usd=1) as hearth:
        cloud.behave(behaviour, after=4)

        await far(hearth, stream=True)

        row, (bill,) = await books.one(), cloud.bills
        assert row["estimated"]
        assert row["outcome"] == "failed"
        assert bill.completion <= row["tokens_out"] <= bill.completion + 2
        assert bill.micro_dollars() <= row["cost"] < row["reserved"]


async def test_a_document_that_is_cut_costs_its_reservation(books: Books) -> None:
    async with (
        BillingCloud(tokens=9) as cloud,
        hearth_with(books, cloud, cloud_budget_usd=1, max_attempts=1) as hearth,
    ):
        cloud.behave(Behaviour.CLOSE_MIDWAY)

        assert (await far(hearth, max_tokens=20)).status_code == 502

        row = await books.one()
        assert row["estimated"]
        assert row["cost"] == row["reserved"] >= cloud.charged() > 0


@STREAM_AND_DOCUMENT
async def test_an_answer_without_usage_is_estimated(books: Books, stream: bool) -> None:
    async with BillingCloud(tokens=9) as cloud, hearth_with(books, cloud, cloud_budget_usd=1) as hearth:
        cloud.engine.tells_usage = False

        assert (await far(hearth, stream=stream, max_tokens=20)).status_code == 200

        row = await books.one()
        (request,) = await books.written(1)
        assert row["estimated"]
        assert request["estimated"]
        assert cloud.charged() <= row["cost"] <= row["reserved"]


@pytest.mark.parametrize("before", ["first byte", "end", "document"])
async def test_a_client_that_leaves_pays_for_what_was_begun(books: Books, before: str) -> None:
    stream = before != "document"
    script: Any = {"first_seconds": 60} if before == "first byte" else {"tokens": 500, "token_seconds": 0.02}
    async with BillingCloud(**script) as cloud, hearth_with(books, cloud, cloud_budget_usd=1) as hearth:
        async with RawClient(hearth.url) as client:
            await client.ask(model="far", stream=stream, max_tokens=600, **LONG)
            await cloud.until(lambda c: c.bills)
            if before == "end":
                await client.read_until(b"t3 ")
        await cloud.until(lambda c: c.aborted)

        row, (bill,) = await books.one(), cloud.bills
        (request,) = await books.written(1)
        assert (row["outcome"], row["estimated"]) == ("abandoned", True)
        assert request["cost"] == row["cost"] >= (bill.micro_dollars() if stream else row["reserved"])
        assert (row["cost"] < row["reserved"]) == stream


@pytest.mark.parametrize(("model", "name"), [(MODEL, "max_tokens"), ("o3-mini", "max_completion_tokens")])
@STREAM_AND_DOCUMENT
async def test_an_answer_has_a_limit_where_a_budget_applies(books: Books, model: str, name: str, stream: bool) -> None:
    routes = {"far": {"cloud": model, "budget_usd": 1}, "free": {"cloud": model}}
    async with (
        BillingCloud(models=[model], tokens=9) as cloud,
        hearth_with(books, cloud, model_map=routes, cloud_max_tokens=7) as hearth,
    ):
        answers = [
            await far(hearth, stream=stream),
            await far(hearth, stream=stream, max_tokens=5),
            await hearth.chat("free", stream=stream),
        ]

        assert [answer.status_code for answer in answers] == [200] * 3
        assert [bill.limits for bill in cloud.bills] == [{name: 7}, {name: 5}, {}]
        assert counted(await books.closed(3)) == cloud.charged()


async def test_without_a_price_a_budget_cannot_be_kept(books: Books) -> None:
    async with (
        BillingCloud(models=["nobody-knows"]) as cloud,
        hearth_with(
            books,
            cloud,
            cloud_prices={},
            model_map={"far": {"cloud": "nobody-knows", "budget_usd": 1}, "free": {"cloud": "nobody-knows"}},
        ) as hearth,
    ):
        refused, served = await far(hearth), await hearth.chat("free")

        assert (refused.status_code, code(refused)) == (429, "price_unknown")
        assert "CLOUD_PRICES" in refused.json()["error"]["message"]
        assert served.status_code == 200
        assert (await books.one())["cost"] == 0


# -- budgets, each alone


def limited(scope: str, limit: float) -> dict[str, Any]:
    """Settings with one budget, but for a key's."""
    settings: dict[str, dict[str, Any]] = {
        "gateway": {"cloud_budget_usd": limit},
        "route": {"model_map": {"far": {"cloud": MODEL, "budget_usd": limit}, "other": {"cloud": MODEL}}},
        "provider": {"c0": {"budget_usd": limit}},
        "key": {},
    }
    return settings[scope]


@pytest.mark.parametrize("scope", ["gateway", "route", "provider", "key"])
@STREAM_AND_DOCUMENT
async def test_a_spent_budget_closes_the_cloud_and_nothing_else(books: Books, scope: str, stream: bool) -> None:
    async with (
        BillingCloud(tokens=8) as cloud,
        FakeOllama(models=["m"]) as local,
        hearth_with(books, cloud, local=local, **limited(scope, 0.002)) as hearth,
    ):
        ada = await key(hearth, "ada", **({"budget_usd": 0.002} if scope == "key" else {}))
        bob = await key(hearth, "bob")

        answers = [await far(hearth, stream=stream, max_tokens=8, headers=ada) for _ in range(5)]

        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert code(answers[-1]) == "budget_exceeded"
        assert int(answers[-1].headers["retry-after"]) > 1
        assert cloud.charged() <= 2000 + max(bill.micro_dollars() for bill in cloud.bills)
        assert counted(await books.closed(3)) == cloud.charged()
        assert (await hearth.chat(stream=stream, headers=ada)).status_code == 200
        if scope == "route":
            assert (await hearth.chat("other", headers=ada)).status_code == 200
        if scope == "key":
            assert (await far(hearth, headers=bob)).status_code == 200


@STREAM_AND_DOCUMENT
async def test_each_target_of_a_fallback_is_paid_from_its_own_budget(books: Books, stream: bool) -> None:
    async with BillingCloud(tokens=8) as first, BillingCloud(tokens=8) as second:
        budgets: Any = {"c0": {"budget_usd": 0.0015}, "c1": {"budget_usd": 0.0015}}
        async with hearth_with(books, first, second, cloud_budget_usd=1, **budgets) as hearth:
            answers = [await far(hearth, stream=stream, max_tokens=8) for _ in range(5)]

        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 429]
        assert [answer.headers.get("x-hearth-node") for answer in answers[:4]] == ["c0", "c0", "c1", "c1"]
        assert code(answers[-1]) == "budget_exceeded"
        rows = await books.closed(4)
        for name, cloud in (("c0", first), ("c1", second)):
            assert counted([row for row in rows if row["node"] == name]) == cloud.charged()


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("counted_in", ["memory", "valkey"])
async def test_a_target_that_fails_gives_its_reservation_back(
    books: Books, stream: bool, counted_in: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("valkey_url") if counted_in == "valkey" else None
    async with (
        BillingCloud(tokens=8) as first,
        BillingCloud(tokens=8) as second,
        # Two reservations of 8 tokens do not go into it, so that the second one shows that the first is given back.
        hearth_with(books, first, second, cloud_budget_usd=0.0008, redis_url=url) as hearth,
    ):
        first.behave(Behaviour.STATUS_503)

        answer = await far(hearth, stream=stream, max_tokens=8)

        assert (answer.status_code, answer.headers["x-hearth-node"]) == (200, "c1")
        failed, served = await books.closed(2)
        assert (failed["node"], failed["cost"], failed["outcome"]) == ("c0", 0, "failed")
        assert (served["node"], served["cost"]) == ("c1", second.charged())
        assert failed["reserved"] == served["reserved"] > 800
        assert failed["request"] == served["request"]
        (row,) = await books.written(1)
        assert row["cost"] == second.charged()
        assert first.charged() == 0


@STREAM_AND_DOCUMENT
async def test_the_cloud_is_paid_only_when_local_nodes_fail(books: Books, stream: bool) -> None:
    async with (
        BillingCloud(tokens=8) as cloud,
        FakeOllama(models=["m"]) as local,
        hearth_with(books, cloud, local=local, model_map={"m": {"local": "m", "cloud": MODEL}}) as hearth,
    ):
        assert (await hearth.chat(stream=stream)).headers["x-hearth-tier"] == "local"
        local.behave(Behaviour.STATUS_500)
        assert (await hearth.chat(stream=stream)).headers["x-hearth-tier"] == "cloud"

        assert (await books.one())["cost"] == cloud.charged()
        at_home, away = await books.written(2)
        assert (at_home["cost"], at_home["tier"]) == (0, 0)
        assert at_home["saved"] > 0
        assert (away["cost"], away["saved"], away["fallback"]) == (cloud.charged(), 0, "server_error")


@pytest.mark.parametrize("pattern", ["m", "m*", "*"])
async def test_local_nodes_save_what_the_route_names_in_the_cloud(books: Books, pattern: str) -> None:
    """Also where the cloud was never asked for it, and it is not the cloud's default."""
    route: Any = {pattern: {"local": "m", "cloud": "gpt-4o"}}
    async with (
        BillingCloud() as cloud,
        FakeOllama(models=["m"]) as local,
        hearth_with(books, cloud, local=local, model_map=route) as hearth,
    ):
        assert (await hearth.chat()).headers["x-hearth-tier"] == "local"

        (row,) = await books.written(1)
        assert row["saved"] > 0
        assert not cloud.inferences


# -- keys


@STREAM_AND_DOCUMENT
async def test_what_a_key_may_not_do_costs_nothing(books: Books, stream: bool) -> None:
    async with BillingCloud() as cloud, hearth_with(books, cloud) as hearth:
        at_home = await key(hearth, "at home", local_only=True)
        elsewhere = await key(hearth, "elsewhere", routes=["near*"])
        hurried = await key(hearth, "hurried", expires_at="2099-01-01T00:00:00Z")
        async with Store(books.url) as store, store.begin() as connection:
            await connection.exec_driver_sql(
                "UPDATE keys SET expires_at = 1, changed_at = changed_at + 1 WHERE name = 'hurried'"
            )

        async def expired() -> bool:
            return bool((await far(hearth, headers=hurried, stream=stream)).status_code == 401)

        refusals = [await far(hearth, headers=headers, stream=stream) for headers in (at_home, elsewhere)]
        await until(expired, "its time is over")

        found = [(answer.status_code, code(answer)) for answer in refusals]
        assert found == [(403, "local_only"), (403, "route_not_allowed")]
        rows = await books.spends()
        assert {row["key"] for row in rows} <= {(await _keys(hearth))["hurried"]}
        assert len(cloud.inferences) == len(rows)


async def _keys(hearth: Gateway) -> dict[str, str]:
    answer = await hearth.client.get("/admin/keys", headers=bearer("boss"))
    return {each["name"]: each["id"] for each in answer.json()["keys"]}


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("what", ["requests", "tokens"])
async def test_a_key_is_held_to_its_limit(books: Books, stream: bool, what: str) -> None:
    limit = {"requests": 2, "tokens": 80}[what]
    async with BillingCloud(tokens=40) as cloud, hearth_with(books, cloud) as hearth:
        ada = await key(hearth, "ada", **{f"{what}_per_minute": limit})

        answers = [await far(hearth, stream=stream, headers=ada) for _ in range(3)]

        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert code(answers[-1]) == "rate_limit_exceeded"
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        for answer in answers:
            assert answer.headers[f"x-ratelimit-limit-{what}"] == str(limit)
            assert f"x-ratelimit-remaining-{what}" in answer.headers
            assert f"x-ratelimit-reset-{what}" in answer.headers
        assert len(cloud.inferences) == 2


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("what", ["requests", "tokens"])
async def test_a_provider_is_asked_no_more_than_it_allows(books: Books, stream: bool, what: str) -> None:
    limit = {"requests": 2, "tokens": 150}[what]
    async with BillingCloud(tokens=40) as first, BillingCloud() as second, FakeOllama(models=["m"]) as local:
        rate: Any = {"c0": {f"{what}_per_minute": limit}}
        async with hearth_with(books, first, second, local=local, **rate) as hearth:
            answers = [await far(hearth, stream=stream, max_tokens=40) for _ in range(4)]

            assert [answer.headers["x-hearth-node"] for answer in answers] == ["c0", "c0", "c1", "c1"]
            assert len(first.inferences) == 2
            assert (await hearth.chat(stream=stream)).status_code == 200

        rate["c0"][f"{what}_per_minute"] = 1
        async with hearth_with(books, first, **rate) as hearth:
            alone = [await far(hearth, stream=stream, max_tokens=40) for _ in range(2)]

        assert (alone[0].status_code, alone[1].status_code, code(alone[1])) == (200, 429, "rate_limit_exceeded")
        assert 1 <= int(alone[1].headers["retry-after"]) <= 60 * 60


# -- what is told


async def test_each_share_of_a_budget_is_told_once(books: Books) -> None:
    async with (
        BillingCloud(tokens=8) as cloud,
        hearth_with(books, cloud, cloud_budget_usd=0.01, budget_warn_at="0.5,0.8") as hearth,
    ):
        while (await far(hearth, max_tokens=8)).status_code == 200:
            pass

        assert [line["share"] for line in troubles(hearth, "a share of a cloud budget is spent")] == [0.5, 0.8]
        (spent,) = [line for line in hearth.lines.all if line["event"] == "a cloud budget is spent"]
        assert spent["budget"] == "gateway"
        assert spent["spent_usd"] >= spent["limit_usd"] == 0.01
        assert {line["level"] for line in troubles(hearth, "cloud budget")} == {"warning"}


async def test_shares_are_told_once_by_all_replicas_together(books: Books, valkey_url: str) -> None:
    settings: Any = {"cloud_budget_usd": 0.01, "budget_warn_at": "0.5,0.8", "redis_url": valkey_url}
    async with BillingCloud(tokens=8) as cloud:
        async with hearth_with(books, cloud, **settings) as one, hearth_with(books, cloud, **settings) as two:
            await acquainted([one, two])
            answers = [await far(hearth, max_tokens=8) for _ in range(8) for hearth in (one, two)]

            def told() -> Counter[Any]:
                lines = troubles(one, "cloud budget is spent") + troubles(two, "cloud budget is spent")
                return Counter(line["share"] for line in lines)

            await until(lambda: len(told()) == 3, "all shares are told")

    assert set(told().values()) == {1}
    assert answers[-1].status_code == 429
    assert counted(await books.closed(len(cloud.bills))) == cloud.charged()
    assert cloud.charged() <= 10_000 + 2 * max(bill.micro_dollars() for bill in cloud.bills)


# -- the ledger


async def test_without_the_ledger_the_cloud_is_closed_and_local_nodes_go_on(postgres: Any) -> None:
    books = Books(postgres.url)
    async with (
        BillingCloud(tokens=8) as cloud,
        FakeOllama(models=["m"]) as local,
        hearth_with(books, cloud, local=local, cloud_budget_usd=1) as hearth,
    ):
        assert (await far(hearth)).status_code == 200
        await books.one()
        await asyncio.to_thread(postgres.kill)

        away, at_home = await far(hearth), await hearth.chat()

        assert (away.status_code, code(away)) == (503, "ledger_unavailable")
        assert "retry-after" in away.headers
        assert at_home.status_code == 200
        assert len(cloud.bills) == 1

        await asyncio.to_thread(postgres.start)

        async def back() -> bool:
            return bool((await far(hearth)).status_code == 200)

        await until(back, "the cloud is open again")
        assert counted(await books.closed(len(cloud.bills))) == cloud.charged()


async def test_a_ledger_that_goes_before_the_first_request_closes_the_cloud_too(postgres: Any) -> None:
    async with (
        BillingCloud() as cloud,
        hearth_with(Books(postgres.url), cloud, cloud_budget_usd=1) as hearth,
    ):
        await asyncio.to_thread(postgres.kill)

        away = await far(hearth)

        assert (away.status_code, code(away)) == (503, "ledger_unavailable")
        assert "retry-after" in away.headers
        assert not cloud.bills


async def test_a_ledger_that_cannot_be_written_closes_the_cloud(books: Books) -> None:
    async with (
        BillingCloud(tokens=8) as cloud,
        FakeOllama(models=["m"]) as local,
        hearth_with(books, cloud, local=local, cloud_budget_usd=1) as hearth,
    ):
        async with Store(books.url) as store, store.begin() as connection:
            await connection.exec_driver_sql(
                "CREATE TRIGGER full BEFORE INSERT ON spend BEGIN SELECT RAISE(FAIL, 'disk full'); END"
            )

        away, at_home = await far(hearth), await hearth.chat()

        assert (away.status_code, code(away)) == (503, "ledger_unavailable")
        assert at_home.status_code == 200
        assert not cloud.bills


# -- processes that died


@pytest.mark.parametrize("counted_in", ["memory", "valkey"])
@pytest.mark.parametrize("told", ["gateway", "ledger"])
async def test_what_a_dead_process_left_open_counts_until_somebody_knows_better(
    books: Books, counted_in: str, told: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.treasury._LOOK_FOR_LOST_SECONDS", 0.1)
    url = request.getfixturevalue("valkey_url") if counted_in == "valkey" else None
    async with BillingCloud(tokens=8) as cloud:
        async with hearth_with(books, cloud, cloud_budget_usd=0.01) as hearth:
            assert (await far(hearth, max_tokens=8)).status_code == 200
        spent = (await books.one())["at"]
        async with Store(books.url) as store:
            await store.write(Batch(opened=[spend_row("dead-1", at=spent, instance="dead", reserved=9_900, node="c0")]))

            if counted_in == "valkey":
                await store.lose_open(None, spent + 1)

        async with hearth_with(books, cloud, cloud_budget_usd=0.01, redis_url=url) as hearth:
            (lost,) = [row for row in await books.spends() if row["state"] == "lost"]
            assert (lost["id"], lost["cost"]) == ("dead-1", 9_900)
            assert code(await far(hearth, max_tokens=8)) == "budget_exceeded"
            if told == "gateway":
                path = "/admin/usage/dead-1/reconcile"
                mended = await hearth.client.post(path, json={"cost_usd": 0.001}, headers=bearer("boss"))
                assert mended.status_code == 200, mended.text
            else:  # as the command line does it
                async with Store(books.url) as store:
                    assert await store.reconcile("dead-1", 1_000)

            async def served() -> bool:
                return bool((await far(hearth, max_tokens=8)).status_code == 200)

            await until(served, "there is room again", 5)


async def test_what_a_dead_replica_left_open_is_lost_while_others_live(
    books: Books, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sharing.presence._LIFETIME_MS", 1500)
    monkeypatch.setattr("app.treasury._LOST_AFTER_MS", 1000)
    monkeypatch.setattr("app.treasury._LOOK_FOR_LOST_SECONDS", 0.1)
    script: Any = {"tokens": 10_000, "token_seconds": 0.05}
    async with BillingCloud(**script) as cloud:
        async with (
            hearth_with(books, cloud, cloud_budget_usd=1, redis_url=valkey_url) as hearth,
            RawClient(hearth.url) as client,
        ):
            await client.ask(model="far", max_tokens=2000)
            await client.read_until(b"t1 ")
            (alive,) = await books.spends()
            async with Store(books.url) as store:
                dead = spend_row("dead-1", at=alive["at"], instance="dead", reserved=990, node="c0")
                await store.write(Batch(opened=[dead]))

            async def lost() -> bool:
                return any(row["state"] == "lost" for row in await books.spends())

            await until(lost, "it is given up")
            states = {row["id"]: (row["state"], row["cost"]) for row in await books.spends()}

        assert states == {"dead-1": ("lost", 990), alive["id"]: ("open", None)}
