"""The metrics of a gateway that has served requests of all kinds: what boards, alerts and documentation are held to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes import Behaviour, FakeOllama, FakeVLLM
from tests.fakes.billing import BillingCloud
from tests.system.harness import Gateway, gateway, node_settings, until
from tests.system.money import MODEL, bearer, paid
from tests.system.scripted import RawClient

ADMIN = "boss"


class Sample(NamedTuple):
    """One line."""

    name: str
    labels: dict[str, str]
    value: float


class Scraped(NamedTuple):
    """What `/metrics` said."""

    kinds: dict[str, str]  # of each family, by the name that documentation has
    texts: dict[str, str]
    samples: list[Sample]

    def sum(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def labels(self, name: str) -> set[str]:
        """Of all samples of this name."""
        return {label for sample in self.samples if sample.name == name for label in sample.labels}

    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


def parsed(text: str) -> Scraped:
    found = Scraped({}, {}, [])
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        found.kinds[name], found.texts[name] = family.type, family.documentation
        found.samples.extend(Sample(s.name, dict(s.labels), s.value) for s in family.samples)
    return found


async def scrape(hearth: Gateway) -> Scraped:
    answer = await hearth.client.get("/metrics", headers=bearer(ADMIN))
    assert answer.status_code == 200, answer.text
    return parsed(answer.text)


async def all_kinds(folder: Path, redis_url: str) -> Scraped:
    """Serves requests of all kinds, and scrapes."""
    async with (
        FakeOllama(models=["m", "second"], tokens=6, token_seconds=0.01) as ollama,
        FakeVLLM(models=["m", "narrow"], tokens=6, token_seconds=0.02) as vllm,
        BillingCloud(tokens=5) as cloud,
    ):
        settings: dict[str, Any] = paid(
            cloud,
            cloud_budget_usd=1,
            model_map={
                "far": {"cloud": MODEL},
                "poor": {"cloud": MODEL, "budget_usd": 0},
                "m": {"local": "m", "cloud": MODEL},
                "tight": {"local": "narrow", "local_only": True, "queue_size": 1},
            },
        )
        nodes = node_settings(ollama, vllm, vram_gb=24, max_concurrency=2)
        async with gateway(
            local_nodes=nodes,
            lb_strategy="round_robin",
            admin_keys=ADMIN,
            database_url=f"sqlite:///{folder / 'hearth.db'}",
            redis_url=redis_url,
            **settings,
        ) as hearth:
            await _serve(hearth, ollama, vllm, cloud)
            return await scrape(hearth)


async def _serve(hearth: Gateway, ollama: FakeOllama, vllm: FakeVLLM, cloud: BillingCloud) -> None:
    made = await hearth.client.post(
        "/admin/keys", json={"name": "ada", "budget_usd": 1, "requests_per_minute": 60}, headers=bearer(ADMIN)
    )
    slow = await hearth.client.post(
        "/admin/keys", json={"name": "bob", "requests_per_minute": 1}, headers=bearer(ADMIN)
    )
    assert (made.status_code, slow.status_code) == (201, 201), made.text + slow.text
    ada, bob = (bearer(answer.json()["secret"]) for answer in (made, slow))
    for stream in (True, False):
        for _ in range(3):
            assert (await hearth.chat(stream=stream, headers=ada)).status_code == 200
    assert (await hearth.chat("far", stream=True, headers=ada)).status_code == 200
    cloud.engine.cached_tokens, cloud.engine.tells_usage = 1, True
    assert (await hearth.chat("far", headers=ada)).status_code == 200
    cloud.engine.tells_usage = False
    assert (await hearth.chat("far", stream=True, headers=ada)).status_code == 200
    assert (await hearth.chat("poor", headers=ada)).status_code == 429
    assert (await hearth.chat("nowhere", headers=ada)).status_code == 404
    assert [(await hearth.chat("narrow", headers=bob)).status_code for _ in range(2)] == [200, 429]
    queued = await asyncio.gather(*(hearth.chat("narrow", headers=ada) for _ in range(5)))
    assert [answer.status_code for answer in queued] == [200] * 5
    crowd = await asyncio.gather(*(hearth.chat("tight", headers=ada) for _ in range(4)))
    assert sorted(answer.status_code for answer in crowd) == [200, 200, 200, 429]
    vllm.behave(Behaviour.CLOSE_MIDWAY, times=1)
    assert (await hearth.chat("narrow", stream=True, headers=ada)).status_code == 200  # nobody else could go on
    await _fail(hearth, vllm, cloud, ada)
    async with RawClient(hearth.url) as client:
        await client.send(b"{}")  # without a key
    await until(lambda: len(hearth.lines.requests()) == 27, "all requests are counted")
    await until(lambda: ollama.open == vllm.open == cloud.open == 0, "nothing runs")


async def _fail(hearth: Gateway, vllm: FakeVLLM, cloud: BillingCloud, key: dict[str, str]) -> None:
    cloud.engine.tells_usage = True
    vllm.behave(Behaviour.STATUS_500)
    broken = await hearth.chat("narrow", headers={**key, "x-hearth-local-only": "true"})
    assert broken.status_code == 502, broken.text
    for _ in range(2):  # one of them meets the broken node first
        assert (await hearth.chat("m", headers=key)).status_code == 200
