"""What the doctor says of facts; none is gathered here."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import __version__
from app.doctor.facts import Elsewhere, LedgerFacts, MachineFacts, PlaceFacts, PortFacts, RedisFacts, Trouble, Unpriced
from app.doctor.findings import Code, Finding, Level, cleaned, document, good, wrong
from app.doctor.judge_machine import judge_ledger, judge_machine, judge_port, judge_redis
from app.doctor.judge_models import judge_models
from app.doctor.judge_places import judge_clocks, judge_cloud, judge_node, judge_prices
from app.doctor.judge_preload import judge_preload
from app.domain import LoadedModel, ModelInfo, NodeSpec, NodeState
from app.providers.base import Health
from app.routing.route_spec import RouteSpec

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"
UP = Health(NodeState.HEALTHY)
FAR = "http://gpu1:11434"
NEAR = "http://localhost:11434"
GIB = 2**30


def _spec(url: str = FAR, name: str = "gpu1", **more: Any) -> NodeSpec:
    return NodeSpec(url, name=name, **more)


def _ollama(name: str = "gpu1", *models: str | ModelInfo, **more: Any) -> PlaceFacts:
    spec = {key: more.pop(key) for key in ("num_ctx", "vram_gb", "models_said", "preload") if key in more}
    said = spec.pop("models_said", ())
    listed = tuple(ModelInfo(model) if isinstance(model, str) else model for model in models or ("m:latest",))
    return PlaceFacts(
        _spec(f"http://{name}:11434", name, models=said, **spec), answered="ollama", health=UP, models=listed, **more
    )


def _vllm(name: str, *models: ModelInfo) -> PlaceFacts:
    return PlaceFacts(_spec(f"http://{name}:8000", name), answered="vllm", health=UP, models=models)


def _bad(findings: list[Finding]) -> list[tuple[Level, Code]]:
    return [(finding.level, finding.code) for finding in findings if finding.level is not Level.GOOD]


W, X = Level.WARNING, Level.WRONG

TROUBLES: list[tuple[str, PlaceFacts, Code, str]] = [
    ("ollama bound to loopback", PlaceFacts(_spec(), Trouble.REFUSED), Code.REFUSED, "OLLAMA_HOST=0.0.0.0"),
    ("not started", PlaceFacts(_spec(NEAR), Trouble.REFUSED), Code.REFUSED, "ollama serve"),
    (
        "localhost in a container",
        PlaceFacts(_spec(NEAR), Trouble.REFUSED, in_container=True),
        Code.REFUSED,
        "host.docker.internal",
    ),
    (
        "wrong port",
        PlaceFacts(_spec("http://gpu1:1"), Trouble.REFUSED, elsewhere=[Elsewhere(FAR, "Ollama")]),
        Code.REFUSED,
        f"set its url to {FAR} (Ollama",
    ),
    ("no such name", PlaceFacts(_spec(), Trouble.UNRESOLVED), Code.UNRESOLVED, "spelling"),
    (
        "docker's name on linux",
        PlaceFacts(_spec("http://host.docker.internal:1"), Trouble.UNRESOLVED),
        Code.UNRESOLVED,
        "host-gateway",
    ),
    ("firewall", PlaceFacts(_spec(), Trouble.NO_CONNECTION), Code.NO_CONNECTION, "firewalls"),
    ("hangs", PlaceFacts(_spec(), Trouble.SLOW), Code.SLOW, "server is doing"),
    ("no http", PlaceFacts(_spec(), Trouble.NO_HTTP), Code.NO_HTTP, "port"),
    (
        "tls asked without",
        PlaceFacts(_spec(), Trouble.NO_HTTP, other_scheme=True),
        Code.TLS_WANTED,
        "https://gpu1:11434",
    ),
    (
        "plain asked with tls",
        PlaceFacts(_spec("https://gpu1:11434"), Trouble.TLS_NONE, other_scheme=True),
        Code.TLS_NONE,
        FAR,
    ),
    ("no tls at all", PlaceFacts(_spec("https://gpu1:1"), Trouble.TLS_NONE), Code.TLS_NONE, "port"),
    ("own authority", PlaceFacts(_spec(), Trouble.TLS_UNTRUSTED, "self-signed"), Code.TLS_UNTRUSTED, "ca_file"),
    ("expired", PlaceFacts(_spec(), Trouble.TLS_OUT_OF_DATE), Code.TLS_OUT_OF_DATE, "renew"),
    ("other name", PlaceFacts(_spec(), Trouble.TLS_OTHER_NAME), Code.TLS_OTHER_NAME, "name"),
    ("no ca file", PlaceFacts(_spec(), Trouble.CA_FILE, "its ca_file x cannot be read"), Code.CA_FILE, "PEM"),
    ("itself", PlaceFacts(_spec(), answered="generic", hearth="1.0"), Code.IS_HEARTH, "engine"),
    ("key", PlaceFacts(_spec(api_key="k"), key_refused=True), Code.KEY_REFUSED, "right one"),
    ("no key", PlaceFacts(_spec(), key_refused=True), Code.KEY_REFUSED, "set the node's api_key"),
    ("redirect", PlaceFacts(_spec(), redirect="https://gpu1"), Code.REDIRECTED, "https://gpu1"),
    ("tls that answers 400", PlaceFacts(_spec(), other_scheme=True), Code.TLS_WANTED, "https://"),
    ("something else", PlaceFacts(_spec()), Code.UNKNOWN_KIND, "port"),
    ("no ollama", PlaceFacts(_spec(kind="ollama"), answered="vllm", health=UP), Code.OTHER_KIND, "kind to vllm"),
    ("no vllm", PlaceFacts(_spec(kind="vllm"), answered="ollama", health=UP), Code.OTHER_KIND, "kind to ollama"),
    (
        "unhealthy",
        PlaceFacts(_spec(), answered="vllm", health=Health(NodeState.DOWN, "answered 500")),
        Code.UNHEALTHY,
        "log",
    ),
    ("no list", PlaceFacts(_spec(), answered="vllm", health=UP, models_status=404), Code.NO_MODELS, "models"),
    ("empty", PlaceFacts(_spec(), answered="ollama", health=UP, models=()), Code.NO_MODELS, "ollama pull"),
]


@pytest.mark.parametrize(("facts", "code", "remedy"), [row[1:] for row in TROUBLES], ids=[row[0] for row in TROUBLES])
def test_what_keeps_a_node_from_serving_is_wrong_and_has_a_remedy(facts: PlaceFacts, code: Code, remedy: str) -> None:
    findings = judge_node(facts)

    assert [(finding.level, finding.code) for finding in findings] == [(X, code)]
    assert remedy in findings[0].remedy


@pytest.mark.parametrize(
    ("said", "answered"), [("generic", "vllm"), ("vllm", "vllm"), (None, "tgi")], ids=["generic", "same", "found"]
)
def test_a_node_that_serves_is_good(said: str | None, answered: str) -> None:
    facts = PlaceFacts(_spec(kind=said), answered=answered, health=UP, models=(ModelInfo("m"),))

    assert [finding.code for finding in judge_node(facts)] == [Code.NODE]


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (PlaceFacts(_spec(), answered="lmdeploy", health=Health(NodeState.SLEEPING, "sleeps")), Code.NOT_READY),
        (
            PlaceFacts(_spec(kind="sglang"), answered="vllm", health=UP, models=(ModelInfo("m"),)),
            Code.OTHER_KIND,
        ),
        (
            PlaceFacts(_spec(kind="generic"), answered="ollama", health=UP, models=(ModelInfo("m"),)),
            Code.OTHER_KIND,
        ),
    ],
)
def test_what_works_but_is_hardly_meant_is_a_warning(facts: PlaceFacts, code: Code) -> None:
    assert _bad(judge_node(facts)) == [(W, code)]


def test_a_node_that_is_never_probed_is_left_alone() -> None:
    assert [finding.code for finding in judge_node(PlaceFacts(_spec(health_check=False)))] == [Code.NODE_SKIPPED]


# -- models


def _models(*nodes: PlaceFacts, routes: tuple[RouteSpec, ...] = (), has_cloud: bool = False) -> list[Finding]:
    return judge_models(nodes, routes, has_cloud=has_cloud)


ROUTE = RouteSpec("gpt", local="m")
UNPROBED = PlaceFacts(_spec(name="quiet", health_check=False))  # what it has, nobody knows
DECLARED = PlaceFacts(_spec(name="said", health_check=False, models=("other",)))


@pytest.mark.parametrize(
    ("nodes", "routes", "has_cloud", "expected"),
    [
        ([_ollama("a", "m:latest"), _ollama("b", "m:latest")], [ROUTE], False, []),
        ([_ollama("a", "M:latest")], [ROUTE], False, []),  # neither case nor :latest makes a difference
        ([_ollama("a", "x:1b")], [ROUTE], False, [(X, Code.MODEL_MISSING)]),
        ([_ollama("a", "x:1b")], [ROUTE], True, [(W, Code.MODEL_MISSING)]),
        ([_ollama("a", "x:1b")], [replace(ROUTE, local_only=True)], True, [(X, Code.MODEL_MISSING)]),
        ([_ollama("a", "x:1b"), PlaceFacts(_spec(), Trouble.REFUSED)], [ROUTE], False, [(W, Code.MODEL_MISSING)]),
        ([_ollama("a", "x:1b"), UNPROBED], [ROUTE], False, [(W, Code.MODEL_MISSING)]),
        ([_ollama("a", "x:1b"), DECLARED], [ROUTE], False, [(X, Code.MODEL_MISSING)]),
        ([PlaceFacts(_spec(), Trouble.REFUSED), DECLARED], [ROUTE], False, [(W, Code.MODEL_MISSING)]),
        ([DECLARED], [ROUTE], False, [(X, Code.MODEL_MISSING)]),
        ([_ollama("a", "m:8b")], [ROUTE], False, [(X, Code.MODEL_NAMED_DIFFERENTLY)]),
        ([_ollama("a", "m:latest"), _vllm("b", ModelInfo("o/x"))], [ROUTE], False, [(W, Code.MODEL_MISSING_THERE)]),
        (
            [_ollama("a", "m:latest"), _vllm("b", ModelInfo("acme/M"))],
            [ROUTE],
            False,
            [(W, Code.MODEL_NAMED_DIFFERENTLY)],
        ),
        ([_ollama("a", "m:latest", "y:1b"), _ollama("b", "m:latest")], [], False, [(W, Code.MODEL_MISSING_THERE)]),
        ([_ollama("a", "m:latest", "y:1b"), _ollama("b", models_said=("m",))], [], False, []),
        ([_ollama("a", "m:latest"), _vllm("b", ModelInfo("x"))], [], False, []),
        ([_ollama("a", models_said=("gone",))], [], False, [(X, Code.MODEL_DECLARED_ONLY)]),
        ([_ollama("a")], [RouteSpec("cheap", cloud="gpt-4o-mini")], False, []),  # for the cloud alone
        ([_ollama("a")], [RouteSpec("*", local="m")], False, []),
        ([PlaceFacts(_spec(), Trouble.REFUSED)], [ROUTE], False, []),  # nothing is known
    ],
)
def test_models_are_where_the_map_says(
    nodes: list[PlaceFacts], routes: list[RouteSpec], has_cloud: bool, expected: list[tuple[Level, Code]]
) -> None:
    assert _bad(_models(*nodes, routes=tuple(routes), has_cloud=has_cloud)) == expected


def _in_memory(size: int | None, vram: int | None = GIB) -> tuple[LoadedModel, ...]:
    return (LoadedModel("m:latest", vram, size),)


@pytest.mark.parametrize(
    ("nodes", "routes", "expected"),
    [
        ([_ollama("a", ModelInfo("m", digest="1")), _ollama("b", ModelInfo("m", digest="1"))], [], []),
        (
            [_ollama("a", ModelInfo("m", digest="1")), _ollama("b", ModelInfo("m:latest", digest="2"))],
            [],
            [(W, Code.MODEL_DIFFERS)],
        ),
        ([_ollama("a", num_ctx=8192), _ollama("b", num_ctx=8192)], [], []),
        ([_ollama("a", num_ctx=8192), _ollama("b", num_ctx=4096)], [], [(W, Code.CONTEXT_DIFFERS)]),
        ([_ollama("a", num_ctx=8192), _ollama("b", num_ctx=4096)], [replace(ROUTE, num_ctx=9999)], []),
        (
            [_vllm("a", ModelInfo("m", context_length=8192)), _vllm("b", ModelInfo("m", context_length=4096))],
            [],
            [(W, Code.CONTEXT_DIFFERS)],
        ),
        ([_ollama("a", loaded=_in_memory(4096))], [], [(W, Code.CONTEXT_SMALL)]),
        ([_ollama("a", loaded=_in_memory(32768))], [], []),
        ([_ollama("a", loaded=_in_memory(4096), num_ctx=4096)], [], []),
        ([_ollama("a", loaded=_in_memory(4096), num_ctx=8192)], [], [(W, Code.CONTEXT_CHANGES)]),
        (
            [_ollama("a")],
            [replace(ROUTE, num_ctx=1), RouteSpec("b", local="m:latest", num_ctx=2)],
            [(W, Code.CONTEXT_CHANGES)],
        ),
        ([_ollama("a", loaded=_in_memory(None, 9 * GIB), vram_gb=8)], [], [(W, Code.VRAM_HINT)]),
        ([_ollama("a", loaded=_in_memory(None, 7 * GIB), vram_gb=8)], [], []),
        ([_ollama("a", loaded=_in_memory(None, 0))], [], [(W, Code.ON_CPU)]),
    ],
)
def test_models_are_the_same_everywhere(
    nodes: list[PlaceFacts], routes: list[RouteSpec], expected: list[tuple[Level, Code]]
) -> None:
    assert _bad(_models(*nodes, routes=tuple(routes))) == expected


# -- clocks


@pytest.mark.parametrize(
    ("aheads", "about"),
    [
        ([0.0, 2.0, -3.0, None], []),
        ([0.0, 40.0], ["node n1"]),
        ([61.0, 60.0, 60.5], ["this machine"]),
        ([61.0], ["node n0"]),  # who of the two is right, nobody knows
        ([90.0, -90.0], ["node n0", "node n1"]),
    ],
)
def test_a_clock_that_is_off_is_named(aheads: list[float | None], about: list[str]) -> None:
    places = [PlaceFacts(_spec(name=f"n{n}"), clock_ahead_seconds=ahead) for n, ahead in enumerate(aheads)]

    assert [finding.about for finding in judge_clocks(places)] == about


def test_this_machine_is_behind_where_others_are_ahead() -> None:
    places = [PlaceFacts(_spec(name=name), clock_ahead_seconds=60.0) for name in "ab"]

    assert "60 s behind" in judge_clocks(places)[0].message


# -- the cloud

CLOUD = NodeSpec("https://api.test/v1", name="api.test", tier=1, api_key="sk-1", default_model="big")
LISTS = PlaceFacts(CLOUD, answered="cloud", models_status=200, models=(ModelInfo("big"), ModelInfo("models/small")))


@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        (LISTS, ["small"], []),
        (LISTS, ["smal"], [(W, Code.CLOUD_MODEL)]),
        (replace(LISTS, spec=replace(CLOUD, default_model="bug")), [], [(X, Code.CLOUD_MODEL)]),
        (replace(LISTS, key_refused=True, models=None), [], [(X, Code.KEY_REFUSED)]),
        (replace(LISTS, models=None, models_status=404, v1_lists=True), [], [(X, Code.CLOUD_ENDPOINT)]),
        (replace(LISTS, models=None, models_status=404), [], [(W, Code.CLOUD_ENDPOINT)]),
        (replace(LISTS, models=None, models_status=500), [], [(W, Code.CLOUD_STATUS)]),
        (PlaceFacts(CLOUD, Trouble.UNRESOLVED), [], [(X, Code.UNRESOLVED)]),
    ],
)
def test_the_cloud_is_judged(facts: PlaceFacts, wanted: list[str], expected: list[tuple[Level, Code]]) -> None:
    assert _bad(judge_cloud(facts, wanted)) == expected


def test_a_price_that_a_budget_needs_is_missed() -> None:
    (finding,) = judge_prices([Unpriced("api.test", "big")])

    assert (finding.level, finding.code) == (X, Code.PRICE_UNKNOWN)
    assert "CLOUD_PRICES" in finding.remedy


# -- what is kept and shared, the port, the machine

LEDGER = LedgerFacts("sqlite:///x", revision="0001", head="0001")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (None, []),
        (LEDGER, []),
        (replace(LEDGER, revision=None), []),
        (replace(LEDGER, head="0002"), []),
        (replace(LEDGER, revision="0002"), [(X, Code.LEDGER_NEWER)]),
        (replace(LEDGER, trouble="refused"), [(X, Code.LEDGER_UNREACHABLE)]),
        (replace(LEDGER, folder="/x", writable=False), [(X, Code.NOT_WRITABLE)]),
        (replace(LEDGER, lost=2, lost_micro_dollars=1_500_000), [(W, Code.LEDGER_LOST)]),
    ],
)
def test_the_ledger_is_judged(facts: LedgerFacts | None, expected: list[tuple[Level, Code]]) -> None:
    assert _bad(judge_ledger(facts)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (None, []),
        (RedisFacts("redis://x", version="8.0.1", eviction="allkeys-lru"), []),
        (RedisFacts("redis://x", trouble="refused"), [(X, Code.REDIS_UNREACHABLE)]),
        (RedisFacts("redis://x", version="5.0.14"), [(W, Code.REDIS_OLD)]),
        (RedisFacts("redis://x", version="8.0", eviction="allkeys-lru", limited=True), [(W, Code.REDIS_EVICTS)]),
    ],
)
def test_redis_is_judged(facts: RedisFacts | None, expected: list[tuple[Level, Code]]) -> None:
    assert _bad(judge_redis(facts)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (PortFacts("127.0.0.1", 8000), []),
        (PortFacts("127.0.0.1", 8000, "taken", __version__), []),
        (PortFacts("127.0.0.1", 8000, "taken", "0.0.1"), [(W, Code.HEARTH_RUNS)]),
        (PortFacts("127.0.0.1", 8000, "taken"), [(X, Code.PORT_TAKEN)]),
        (PortFacts("127.0.0.1", 80, "permission denied"), [(X, Code.PORT_REFUSED)]),
        (PortFacts("127.0.0.1", 8000, certificate_trouble="no PEM"), [(X, Code.OWN_CERTIFICATE)]),
    ],
)
def test_the_port_is_judged(facts: PortFacts, expected: list[tuple[Level, Code]]) -> None:
    assert _bad(judge_port(facts)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"python": (3, 10, 1)}, [(X, Code.PYTHON)]),
        ({"workers": 3}, [(W, Code.WORKERS)]),
        ({"open_files": 256}, [(W, Code.FILES)]),
        ({"unwritable": [("NODES_FILE", "/x")]}, [(X, Code.NOT_WRITABLE)]),
    ],
)
def test_the_machine_is_judged(change: dict[str, Any], expected: list[tuple[Level, Code]]) -> None:
    facts = replace(MachineFacts((3, 11, 7), cpus=2, workers=1, open_files=4096), **change)

    assert _bad(judge_machine(facts)) == expected


# -- findings themselves


def test_a_key_that_a_node_repeats_is_not_shown() -> None:
    finding = cleaned(wrong(Code.UNHEALTHY, "node \x1b[2Jx", "it said sk-secret!", "not sk-secret"), ["sk-secret", ""])

    assert finding == wrong(Code.UNHEALTHY, "node ?[2Jx", "it said ***!", "not ***")


def test_a_program_sees_at_once_whether_anything_is_wrong() -> None:
    fine, broken = document([good(Code.LEDGER, "l", "m")], "1"), document([wrong(Code.LEDGER, "l", "m", "r")], "1")

    assert (fine["ok"], broken["ok"]) == (True, False)
    assert broken["counts"] == {"good": 0, "warning": 0, "wrong": 1}
    assert broken["findings"] == [{"level": "wrong", "code": "ledger", "about": "l", "message": "m", "remedy": "r"}]


def test_every_finding_is_explained() -> None:
    explained = DOCS.read_text("utf-8")

    assert not [code.value for code in Code if f"`{code.value}`" not in explained]


# -- models to load beforehand


def _big(name: str) -> ModelInfo:
    return ModelInfo(name, size_bytes=6 * GIB)


@pytest.mark.parametrize(
    ("nodes", "models", "said"),
    [
        ([_ollama("a", "m:latest"), _ollama("b")], ["m"], []),
        ([_ollama("a", "m:latest")], ["alias"], []),
        ([_ollama("a", "m:latest")], ["other"], ["which no node has"]),
        ([_ollama("a", "m:latest"), PlaceFacts(_spec(), Trouble.REFUSED)], ["other"], []),
        ([_ollama("a", "m:latest", preload=("m",))], [], []),
        ([_ollama("a", "m:latest", preload=("other",))], [], ["which it does not have"]),
        ([_ollama("a", _big("m"), _big("n"), preload=("m", "n"), vram_gb=8)], [], ["12.0 GiB of models"]),
        ([_ollama("a", _big("m"), _big("n"), preload=("m", "n"), vram_gb=12)], [], []),
    ],
)
def test_models_that_cannot_be_loaded_beforehand_are_named(
    nodes: list[PlaceFacts], models: list[str], said: list[str]
) -> None:
    found = judge_preload(nodes, models, (RouteSpec("alias", local="m"),))

    assert [finding.code for finding in found] == [Code.PRELOAD] * len(said)
    assert all(part in finding.message for part, finding in zip(said, found, strict=True))


def test_a_node_that_loads_nothing_on_demand_needs_no_preload() -> None:
    node = _vllm("a", ModelInfo("m"))
    node = dataclasses.replace(node, spec=dataclasses.replace(node.spec, preload=("m",)))

    assert "loads nothing on demand" in judge_preload([node], [], ())[0].message
