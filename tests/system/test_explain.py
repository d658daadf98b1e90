"""What is said of a request before it is made holds when it is made."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from app.routing.policies import POLICIES
from tests.fakes import Behaviour, FakeCloud, FakeOllama, On
from tests.system.harness import Gateway, gateway, until

KEY = "sk-cloud-key-for-tests-0001"
FAR = {"far": {"cloud": "gpt-4o-mini"}}
LONG = [{"role": "user", "content": "word " * 2000}]  # 10,000 characters: 1,250 tokens at least

Document = dict[str, Any]


class Site(NamedTuple):
    """A gateway in front of two local nodes, of which the first is preferred, and a cloud."""

    hearth: Gateway
    first: FakeOllama
    second: FakeOllama
    cloud: FakeCloud

    async def explain(self, body: Document, local_only: bool = False) -> Document:
        answer = await self.hearth.client.post("/admin/explain", json=body, headers=_headers(local_only))
        assert answer.status_code == 200, answer.text
        document: Document = answer.json()
        return document

    async def happened(self, body: Document, local_only: bool = False) -> Document:
        """What became of it in earnest."""
        headers = _headers(local_only) | {"x-request-id": "mine"}
        await self.hearth.client.post("/v1/chat/completions", json=body, headers=headers)
        record: Document = (await self.hearth.client.get("/admin/requests/mine")).json()
        return record


Prepare = Callable[[Site], Awaitable[None]]


class Situation(NamedTuple):
    """`nodes` are settings of the two local nodes; `tier` and `order` are what is expected, None = nobody is asked.

    `codes` are what must be said: by node, why it is dropped or what else is remarked of it.
    """

    order: list[str]
    codes: Mapping[str, str] = {}
    error: str | None = None
    cloud: str = ""  # part of why the cloud may (not) be used
    settings: Mapping[str, Any] = {}
    nodes: tuple[Document, Document] = ({}, {})
    models: tuple[str, str] = ("m", "m")
    prepare: Prepare | None = None
    body: Mapping[str, Any] = {}
    local_only: bool = False


def _headers(local_only: bool) -> dict[str, str]:
    return {"x-hearth-local-only": "true"} if local_only else {}


async def _down(site: Site) -> None:
    site.first.behave(Behaviour.REFUSE)
    await site.hearth.state("n0", "down")


async def _all_down(site: Site) -> None:
    await _down(site)
    site.second.behave(Behaviour.REFUSE)
    await site.hearth.state("n1", "down")


async def _broken(site: Site) -> None:
    """The breaker of the first node opens, although probes say that it is up."""
    site.first.behave(Behaviour.STATUS_500, on=On.INFERENCE)
    await site.hearth.chat()
    site.first.behave(Behaviour.OK)


async def _busy(site: Site) -> None:
    site.first.behave(Behaviour.STATUS_429, on=On.INFERENCE)
    await site.hearth.chat()
    site.first.behave(Behaviour.OK)


async def _drained(site: Site) -> None:
    answer = await site.hearth.client.post("/nodes/drain", json={"url": site.first.url})
    assert answer.status_code == 200


async def _warm(site: Site) -> None:
    async with httpx.AsyncClient() as operator:
        await operator.post(site.second.url + "/api/generate", json={"model": "m"})

    async def known() -> bool:
        return bool((await site.hearth.nodes())["n1"]["loaded"])

    await until(known, "n1 is known to have the model in memory")


BY_LOT = {"random", "min_expected_latency", "min_observed_latency", "shortest_expected_delay"}
CLOUD = {"model_map": json.dumps(FAR)}
SITUATIONS = {
    "cold model": Situation(
        ["n1", "n0", "c0"], {"n0": "cold"}, prepare=_warm, nodes=({"weight": 1}, {}), settings={"max_attempts": 4}
    ),
    "node down": Situation(["n1", "c0"], {"n0": "down"}, prepare=_down),
    "every node down": Situation(["c0"], {"n0": "down", "n1": "down"}, cloud="when no local node", prepare=_all_down),
    "breaker open": Situation(["n1", "c0"], {"n0": "breaker_open"}, prepare=_broken),
    "busy": Situation(["n1", "n0", "c0"], {"n0": "busy"}, prepare=_busy),
    "model absent": Situation(["n1", "c0"], {"n0": "model_absent"}, models=("other", "m")),
    "local only": Situation(
        [],
        {"c0": "cloud_refused"},
        "no_node_available",
        "the request is local only",
        prepare=_all_down,
        local_only=True,
    ),
    "a route that is local only": Situation(
        ["n0", "n1"],
        {"c0": "cloud_refused"},
        cloud="the route private is local only",
        settings={"model_map": json.dumps({"private": {"local": "m", "local_only": True}})},
        body={"model": "private"},
    ),
    "budget spent": Situation(
        [],
        {"c0": "budget_exceeded", "n0": "cloud_only"},
        "budget_exceeded",
        "the cloud budget of this gateway is spent: $0",
        settings={**CLOUD, "cloud_budget_usd": 0, "cloud_prices": '{"*": {"input": 1, "output": 2}}'},
        body={"model": "far"},
    ),
    "price unknown": Situation(
        [],
        {"c0": "price_unknown"},
        "price_unknown",
        "set its price in CLOUD_PRICES",
        settings={"cloud_budget_usd": 5, "model_map": '{"far": {"cloud": "nobody-knows-me"}}'},
        body={"model": "far"},
    ),
    "cloud key missing": Situation(
        [],
        {"n0": "down"},
        "no_node_available",
        "set CLOUD_API_KEY",
        prepare=_all_down,
        settings={"cloud_providers": ""},
    ),
    "drained": Situation(["n1", "c0"], {"n0": "draining"}, prepare=_drained),
    "context too long": Situation(
        ["n1", "c0", "n0"],
        {"n0": "context_too_small"},
        nodes=({"num_ctx": 300}, {}),
        body={"messages": LONG},
    ),
    "alias": Situation(
        ["n0", "n1", "c0"],
        settings={"model_map": json.dumps({"gpt-4o": {"local": "m", "cloud": "gpt-4o-mini"}})},
        body={"model": "gpt-4o"},
    ),
    "alias of the cloud": Situation(["c0"], {"n0": "cloud_only"}, settings=CLOUD, body={"model": "far"}),
    "unknown model": Situation([], error="model_not_found", body={"model": "mm"}, settings={"cloud_providers": ""}),
    "context that nobody has tried": Situation(["n0"], settings={"max_attempts": 1}, codes={"n1": "not_reached"}),
}


@pytest.fixture(params=SITUATIONS)
def situation(request: pytest.FixtureRequest) -> Situation:
    return SITUATIONS[request.param]


async def _in(situation: Situation, folder: Path, check: Callable[[Site, Document], Awaitable[None]]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **situation.body}
    async with (
        FakeOllama(models=[situation.models[0]]) as first,
        FakeOllama(models=[situation.models[1]]) as second,
        FakeCloud(models=["gpt-4o-mini", "nobody-knows-me"], api_key=KEY) as cloud,
    ):
        specs = [
            {"url": node.url, "kind": "ollama", "name": f"n{place}", "weight": weight, **more}
            for place, (node, weight, more) in enumerate(zip((first, second), (1.5, 1), situation.nodes, strict=True))
        ]
        target = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
        settings: Document = {
            "local_nodes": json.dumps(specs),
            "cloud_providers": json.dumps([target]),
            "breaker_fail_max": 1,
            "health_check_interval": 0.1,
            "database_url": f"sqlite:///{folder / 'hearth.db'}",
            **situation.settings,
        }
        settings = {name: value for name, value in settings.items() if value != ""}
        async with gateway(**settings) as hearth:
            site = Site(hearth, first, second, cloud)
            for name in ("n0", "n1"):
                await hearth.state(name, "healthy")
            if situation.prepare is not None:
                await situation.prepare(site)
            await check(site, body)


def _codes(document: Document) -> dict[str, set[str]]:
    return {
        node["name"]: {reason["code"] for reason in (*node["dropped"], *node["remarks"])} for node in document["nodes"]
    }


async def test_what_is_explained_is_what_happens(situation: Situation, tmp_path: Path) -> None:
    async def check(site: Site, body: Document) -> None:
        before = await site.explain(body, situation.local_only)
        after = await site.happened(body, situation.local_only)

        assert [step["node"] for step in before["order"]] == situation.order
        assert [attempt["node"] for attempt in after["attempts"]] == situation.order[:1]
        for name, code in situation.codes.items():
            assert code in _codes(before)[name]
        if situation.order:
            first = before["order"][0]
            told = ("node", "tier", "model", "candidates", "fallback")
            assert {name: first[name] for name in told} == {name: after[name] for name in told}
            assert before["error"] is None
        else:
            assert before["error"]["code"] == after["code"] == situation.error
            assert before["error"]["status"] == after["status"]
        assert (before["route"] or {"name": "unrouted"})["name"] == after["route"]
        if situation.cloud:
            assert situation.cloud in before["cloud"]["why"]
        if situation.cloud and not before["cloud"]["allowed"]:
            assert after["cloud"]["why"] == before["cloud"]["why"]

    await _in(situation, tmp_path, check)


async def test_nodes_that_fail_are_tried_in_the_order_that_was_explained(situation: Situation, tmp_path: Path) -> None:
    async def check(site: Site, body: Document) -> None:
        for node in (site.first, site.second, site.cloud):
            if node.fault.behaviour is Behaviour.OK:
                node.behave(Behaviour.STATUS_500, on=On.INFERENCE)

        before = await site.explain(body, situation.local_only)
        after = await site.happened(body, situation.local_only)

        assert [attempt["node"] for attempt in after["attempts"]] == [step["node"] for step in before["order"]]

    await _in(situation, tmp_path, check)


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - BY_LOT))
async def test_explaining_changes_nothing(policy: str) -> None:
    """A policy that goes in turn must not lose its place, and no count may move."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with FakeOllama(models=["m"]) as a, FakeOllama(models=["m"]) as b, FakeOllama(models=["m"]) as c:
        async with gateway(a, b, c, lb_strategy=policy, health_check_interval=60) as hearth:
            site = Site(hearth, a, b, FakeCloud())
            served = []
            for _ in range(5):
                before = [await site.explain(body) for _ in range(3)]
                after = await site.happened(body)
                served.append((before[0]["order"][0]["node"], after["node"]))

                assert before[1:] == before[:-1]
                assert await hearth.in_flight() == 0
            assert all(first == second for first, second in served)
            assert len(a.inferences) + len(b.inferences) + len(c.inferences) == 5


async def test_a_full_node_is_waited_for() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with FakeOllama(models=["m"], token_seconds=0.2, tokens=50) as node:
        spec = json.dumps([{"url": node.url, "kind": "ollama", "name": "n0", "max_concurrency": 1}])
        async with gateway(local_nodes=spec, first_token_timeout=3) as hearth:
            site = Site(hearth, node, node, FakeCloud())
            await hearth.state("n0", "healthy")
            async with hearth.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                assert stream.status_code == 200
                document = await site.explain(body)

            assert document["order"][0]["waits_seconds_at_most"] == 3
            assert "full" in _codes(document)["n0"]
            assert document["error"] is None


async def test_the_cloud_is_asked_when_full_nodes_stay_full() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    async with FakeOllama(models=["m"], token_seconds=0.2, tokens=50) as node, FakeCloud(api_key=KEY) as cloud:
        spec = json.dumps([{"url": node.url, "kind": "ollama", "name": "n0", "max_concurrency": 1}])
        target = json.dumps([{"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}])
        async with gateway(local_nodes=spec, cloud_providers=target, queue_timeout=0.2) as hearth:
            site = Site(hearth, node, node, cloud)
            await hearth.state("n0", "healthy")
            async with hearth.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
                assert stream.status_code == 200
                before, after = await site.explain(body), await site.happened(body)

            assert [(step["node"], step["fallback"]) for step in before["order"]] == [
                ("n0", None),
                ("c0", "overloaded"),
            ]
            assert (after["node"], after["fallback"]) == ("c0", "overloaded")


async def test_budgets_are_shown_with_what_is_spent(tmp_path: Path) -> None:
    async with FakeCloud(api_key=KEY) as cloud:
        target = {"name": "c0", "endpoint": cloud.url + "/v1", "api_key": KEY, "budget_usd": 5, "price": 1}
        settings = {"cloud_providers": json.dumps([target]), "cloud_budget_usd": 0.25, "model_map": json.dumps(FAR)}
        async with gateway(database_url=f"sqlite:///{tmp_path / 'hearth.db'}", local_nodes="[]", **settings) as hearth:
            site = Site(hearth, FakeOllama(), FakeOllama(), cloud)
            document = await site.explain({"model": "far", "messages": LONG, "max_tokens": 100})

            shown = document["cloud"]["targets"][0]
            assert {each["scope"]: each["limit_usd"] for each in shown["budgets"]} == {
                "gateway": 0.25,
                "provider:c0": 5,
            }
            assert [each["spent_usd"] for each in shown["budgets"]] == [0, 0]
            assert shown["price_at_most_usd"] > 0
            assert document["cloud"]["allowed"]
            assert not cloud.inferences


async def test_a_key_is_looked_at_as_its_owner_would_be(tmp_path: Path) -> None:
    async with FakeOllama(models=["m", "other"]) as node:
        async with gateway(node, database_url=f"sqlite:///{tmp_path / 'hearth.db'}") as hearth:
            await hearth.client.post("/admin/keys", json={"name": "ann", "local_only": True, "routes": ["m"]})
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            await hearth.state("n0", "healthy")

            allowed = (await hearth.client.post("/admin/explain?key=ann", json=body)).json()
            refused = (await hearth.client.post("/admin/explain?key=ann", json={**body, "model": "other"})).json()
            unknown = await hearth.client.post("/admin/explain?key=bob", json=body)

            assert allowed["cloud"]["why"] == "the API key is local only"
            assert allowed["error"] is None
            assert refused["error"]["code"] == "route_not_allowed"
            assert refused["order"] == []
            assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("fields", "operation"),
    [({"prompt": "hi"}, "completion"), ({"input": "hi"}, "embedding"), ({"prompt": 1, "input": "hi"}, "embedding")],
)
async def test_the_operation_is_told_by_the_fields(fields: Document, operation: str) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        answer = await hearth.client.post("/admin/explain", json={"model": "m", **fields})

        assert answer.json()["operation"] == operation


async def test_only_admins_see_requests_and_explanations() -> None:
    async with gateway(local_nodes="[]", admin_keys="boss") as hearth:
        answers = [
            await hearth.client.get("/admin/requests"),
            await hearth.client.get("/admin/requests/1"),
            await hearth.client.post("/admin/explain", json={"model": "m", "messages": []}),
        ]

        assert [answer.status_code for answer in answers] == [401, 401, 401]


async def test_requests_are_listed_by_what_became_of_them() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        await hearth.state("n0", "healthy")
        for model in ("m", "nobody", "m"):
            await hearth.chat(model)

        async def listed(query: str) -> list[int]:
            answer = await hearth.client.get("/admin/requests" + query)
            return [record["seq"] for record in answer.json()["requests"]]

        assert await listed("") == [3, 2, 1]
        assert await listed("?limit=1") == [3]
        assert await listed("?outcome=ok") == [3, 1]
        assert await listed("?outcome=refused") == [2]
        assert await listed("?node=n0&tier=local&route=direct") == [3, 1]
        assert await listed("?key=ann") == []


async def test_a_misspelt_filter_is_refused() -> None:
    async with gateway(local_nodes="[]") as hearth:
        listed = await hearth.client.get("/admin/requests?outcom=ok")
        explained = await hearth.client.post("/admin/explain?kee=ann", json={"model": "m", "input": "hi"})

        assert (listed.status_code, explained.status_code) == (400, 400)
        assert "'outcom'" in listed.json()["error"]["message"]


async def test_a_request_that_is_forgotten_is_no_more_found() -> None:
    async with gateway(local_nodes="[]") as hearth:
        answer = await hearth.client.get("/admin/requests/long-ago")

        assert answer.status_code == 404
        assert "only the latest ones" in answer.json()["error"]["message"]


async def test_what_is_remembered_holds_no_words_of_client_or_node() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, api_keys="sk-client-key-0001") as hearth:
        await hearth.state("n0", "healthy")
        node.behave(Behaviour.STATUS_500, on=On.INFERENCE, message="you said tulip")
        headers = {"authorization": "Bearer sk-client-key-0001"}
        await hearth.chat(messages=[{"role": "user", "content": "tulip"}], headers=headers)

        found = (await hearth.client.get("/admin/requests")).text

        assert '"n0"' in found
        assert "tulip" not in found
        assert "sk-client" not in found
