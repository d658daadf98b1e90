"""What `/metrics` says is complete, documented and true, and to ask for it holds up nobody."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from app.domain import LoadedModel, ModelInfo
from app.routing.registry import Registry
from tests.fakes import FakeVLLM
from tests.fakes.billing import BillingCloud
from tests.system.harness import Gateway, gateway, until
from tests.system.metrics_gateway import Scraped, all_kinds, parsed
from tests.system.money import bearer, paid
from tests.system.plain_client import send
from tests.system.promql import Query, read_query
from tests.system.scripted import RawClient

ROOT = Path(__file__).parents[2]
DOCUMENTED = re.compile(r"^\| `(hearth_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
BY_SCRAPING = {"job", "instance"}  # labels that Prometheus adds


@pytest.fixture(scope="module")
def scraped(valkey_server_url: str) -> Scraped:
    """Everything that a gateway says which has met all there is."""
    with redis.Redis.from_url(valkey_server_url) as client:
        client.flushdb()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(all_kinds(Path(folder), valkey_server_url))


def test_it_is_true_of_requests(scraped: Scraped) -> None:
    total = "hearth_requests_total"
    assert scraped.sum(total) == 27
    assert scraped.sum(total, outcome="ok", tier="local", route="m") == 8
    assert scraped.sum(total, outcome="ok", tier="cloud", route="far", node="c0") == 3
    assert scraped.sum(total, outcome="refused", route="unrouted") == 3
    assert scraped.sum(total, outcome="failed", node="n1") == 2
    assert scraped.sum("hearth_continuations_total", outcome="nobody") == 1
    assert scraped.sum(total, fallback="server_error", node="n0") == scraped.sum("hearth_fallbacks_total") >= 1
    assert scraped.sum("hearth_attempts_total", outcome="failed", failure="server_error", node="n1") >= 2
    assert scraped.sum("hearth_rate_limited_total") == 1
    assert scraped.sum("hearth_spending_refused_total", code="budget_exceeded") == 1


def test_it_is_true_of_times(scraped: Scraped) -> None:
    counts = {"hearth_time_to_first_token_seconds": 21, "hearth_request_seconds": 21}
    assert {name: scraped.sum(f"{name}_count") for name in counts} == counts
    assert (
        scraped.sum("hearth_time_per_output_token_seconds_sum", node="n0")
        / (scraped.sum("hearth_time_per_output_token_seconds_count", node="n0"))
        > 0.005
    )
    assert 2 <= scraped.sum("hearth_queue_seconds_count") <= 4
    assert scraped.sum("hearth_queue_refused_total", route="tight", reason="full") == 1
    assert scraped.sum("hearth_event_loop_lag_seconds_count") > 0


def test_it_is_true_of_tokens_and_money(scraped: Scraped) -> None:
    assert scraped.sum("hearth_tokens_total", node="c0", direction="completion") == 10
    assert scraped.sum("hearth_tokens_total", node="c0", direction="cached") == 1
    assert 5 <= scraped.sum("hearth_estimated_tokens_total", node="c0", direction="completion") <= 10
    spent = scraped.sum("hearth_spend_dollars_total", node="c0")
    assert round(spent, 6) == spent > 0
    assert scraped.sum("hearth_saved_dollars_total") > 0
    assert scraped.sum("hearth_budget_limit_dollars", scope="gateway", period="month") == 1
    assert 0 < scraped.sum("hearth_budget_left_dollars", scope="gateway") <= 1
    keys = [s.labels["scope"] for s in scraped.samples if s.labels.get("scope", "").startswith("key:")]
    assert len(set(keys)) == 1
    assert scraped.sum("hearth_ledger_up") == 1
    assert scraped.sum("hearth_reservations_open") == scraped.sum("hearth_ledger_rows_dropped_total") == 0


def test_it_is_true_of_nodes(scraped: Scraped) -> None:
    assert scraped.sum("hearth_node_state", state="healthy") == 3
    assert scraped.sum("hearth_breaker_state") == 3
    assert scraped.sum("hearth_node_info", node="n0", kind="ollama", tier="local") == 1
    assert scraped.sum("hearth_node_loaded_models", node="n0") == 1
    assert scraped.sum("hearth_model_vram_bytes", model="m:latest") == scraped.sum("hearth_node_vram_used_bytes") > 0
    assert scraped.sum("hearth_node_vram_bytes", node="n1") == 24 * 2**30
    assert scraped.sum("hearth_in_flight") == scraped.sum("hearth_waiting") == 0
    assert scraped.sum("hearth_shared_state_up") == scraped.sum("hearth_replicas") == 1
    assert scraped.sum("hearth_process_resident_memory_bytes") > 10_000_000


def test_every_metric_is_documented_as_it_is(scraped: Scraped) -> None:
    rows = DOCUMENTED.findall((ROOT / "docs" / "metrics.md").read_text())
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, *_ in rows}

    assert len(documented) == len(rows)
    assert {name: kind for name, (kind, _) in documented.items()} == scraped.kinds
    for name, kind, labels, _, text in rows:
        shown = scraped.labels(f"{name}_count" if kind == "histogram" else name)
        assert text.startswith(scraped.texts[name])
        assert shown in (documented[name][1], set()), (name, labels)
    assert {name for name in scraped.kinds if not _shown(scraped, name)} == {"hearth_leaked_prefill_sessions_total"}


def _shown(scraped: Scraped, name: str) -> bool:
    return bool({name, f"{name}_count"} & scraped.names())


def test_no_client_can_make_up_a_label(scraped: Scraped) -> None:
    values = {value for sample in scraped.samples for value in sample.labels.values()}

    assert "nowhere" not in values


# -- the board and the alerts


def _board() -> dict[str, Any]:
    return dict(json.loads((ROOT / "deploy" / "grafana" / "hearth.json").read_text()))


def _board_queries() -> Iterator[tuple[str, str, Iterable[str]]]:
    """Title, query, and the labels that its legend names."""
    for panel in _board()["panels"]:
        for target in panel.get("targets", ()):
            legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
            yield f"{panel['title']} {target['refId']}", target["expr"], legend


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "deploy" / "prometheus" / "hearth.rules.yml").read_text())["groups"]
    return list(group["rules"])


def _rule_queries() -> Iterator[tuple[str, str, Iterable[str]]]:
    for rule in _rules():
        yield rule["alert"], rule["expr"], re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])


@pytest.mark.parametrize(
    ("query", "named"),
    [pytest.param(query, named, id=title) for title, query, named in (*_board_queries(), *_rule_queries())],
)
def test_boards_and_alerts_ask_for_what_there_is(scraped: Scraped, query: str, named: list[str]) -> None:
    read = read_query(query)

    assert read.selectors
    for selector in read.selectors:
        if selector.metric == "up":
            continue
        assert selector.metric in scraped.names(), f"there is no {selector.metric}"
        labels = scraped.labels(selector.metric)
        assert set(selector.matchers) <= labels | BY_SCRAPING
        known = {label: value for label, value in selector.matchers.items() if label not in BY_SCRAPING}
        assert any(
            sample.name == selector.metric and known.items() <= sample.labels.items() for sample in scraped.samples
        ), f"{selector} has no samples"
    available = _all_labels(read, scraped)
    assert read.grouped <= available
    assert set(named) <= (read.grouped or available)


def _all_labels(query: Query, scraped: Scraped) -> set[str]:
    return set.union(BY_SCRAPING, *(scraped.labels(selector.metric) for selector in query.selectors))


def test_the_board_can_be_imported() -> None:
    board = _board()
    ids = [panel["id"] for panel in board["panels"]]

    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    places = [_cells(panel["gridPos"]) for panel in board["panels"]]
    assert len(set().union(*places)) == sum(map(len, places)), "panels overlap"
    assert board["templating"]["list"][1]["query"] == "label_values(hearth_build_info, job)"


def _cells(place: Mapping[str, int]) -> set[tuple[int, int]]:
    return {
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    }


def test_what_the_prometheus_example_names_is_there() -> None:
    folder = ROOT / "deploy" / "prometheus"
    config = yaml.safe_load((folder / "prometheus.yml").read_text())

    assert all((folder / name).exists() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    assert 'up{job="' + job["job_name"] + '"}' in _rules()[0]["expr"]


@pytest.mark.parametrize(
    "query",
    [
        "sum by (node (hearth_in_flight)",
        "sum(hearth_in_flight",
        'hearth_in_flight{node="a"',
        "hearth_in_flight{node=a}",
        "average(hearth_in_flight)",
        "hearth_in_flight[5 m]",
        "rate(hearth_requests_total)",
        "hearth_in_flight hearth_waiting",
        "sum(hearth_in_flight) /",
        "",
    ],
)
def test_what_is_no_query_is_noticed(query: str) -> None:
    with pytest.raises(ValueError):
        read_query(query)


# -- budgets


async def test_the_metrics_of_keys_stay_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.funds._KEYS", 2)
    async with BillingCloud() as cloud:
        settings = paid(cloud, local_nodes="[]", admin_keys="boss", database_url=f"sqlite:///{tmp_path}/hearth.db")
        async with gateway(**settings) as hearth:
            for number in range(4):
                traits = {"name": f"key-{number}", "budget_usd": number + 1}
                await hearth.client.post("/admin/keys", json=traits, headers=bearer("boss"))
            found = parsed((await hearth.client.get("/metrics", headers=bearer("boss"))).text)

    limits = {s.labels["scope"]: s.value for s in found.samples if s.name == "hearth_budget_limit_dollars"}
    assert len(limits) == 3
    assert sum(limits.values()) == 1 + 2 + 3 + 4
    assert found.sum("hearth_budget_left_dollars") == 10
    assert "key:other" in limits


# -- what a scrape costs others

NODES, MODELS = 20, 50
EVENTS = 100
LATE_SECONDS = 0.005


async def _gaps(hearth: Gateway, pace_seconds: float) -> list[float]:
    """How late each event of a stream comes, in seconds, in rising order."""
    async with RawClient(hearth.url) as client:
        await client.ask()
        await client.read_until(b"data: ")
        times = []
        for _ in range(EVENTS):
            await client.read_until(b"data: ")
            times.append(time.perf_counter())
    return sorted(after - before - pace_seconds for before, after in pairwise(times))


async def _scraped_while(hearth: Gateway, pace_seconds: float) -> list[float]:
    over = asyncio.Event()
    scrapes = 0

    async def again_and_again() -> None:
        nonlocal scrapes
        while not over.is_set():
            answer = await send(hearth.url, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n", "GET")
            assert answer.body.count(b"\n") > NODES * MODELS
            scrapes += 1

    scraping = asyncio.create_task(again_and_again())
    try:
        gaps = await _gaps(hearth, pace_seconds)
    finally:
        over.set()
        await scraping
    assert scrapes >= 5
    return gaps


async def test_a_scrape_delays_no_event_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even when it never ends. Where the thread that writes it does not rest, half of the events are 8 ms late."""
    monkeypatch.setattr("app.telemetry.metrics._CACHE_SECONDS", 0)
    registries: list[Registry] = []

    def registry(*parts: Any) -> Registry:
        registries.append(Registry(*parts))
        return registries[0]

    monkeypatch.setattr("app.main.Registry", registry)
    pace = 0.004
    async with FakeVLLM(models=["m"], tokens=100_000, token_seconds=pace) as node:
        names = [{"url": node.url, "kind": "vllm", "name": "n0"}]
        names += [{"url": f"http://127.0.0.1:1/{i}", "kind": "ollama", "name": f"gpu-{i}"} for i in range(NODES - 1)]
        async with gateway(local_nodes=json.dumps(names), health_check_interval=3600) as hearth:
            await until(lambda: len(hearth.lines.all) >= NODES, "all nodes were looked at")
            _load(registries[0])

            calm = await _gaps(hearth, pace)
            scraped = await _scraped_while(hearth, pace)

    def shown(gaps: list[float]) -> float:
        return gaps[len(gaps) * 3 // 4]

    assert shown(scraped) - max(0.0, shown(calm)) < LATE_SECONDS


def _load(registry: Registry) -> None:
    """Has all nodes list and hold many models."""
    names = [f"model-{number}:latest" for number in range(MODELS)]
    for node in registry:
        if node.name != "n0":
            node.list_models([ModelInfo(name) for name in names])
            node.loaded = {name: LoadedModel(name, 2**30) for name in names}
