"""Every row of docs/failures.md, tried out."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

import app as app_package
from app.domain import Failure
from app.errors import HearthError
from app.settings import Settings
from demo.httpd import Exchange, deliver, json_answer
from tests.fakes import KINDS, Behaviour, FakeCloud, FakeNode, FakeVLLM, On
from tests.fakes.billing import BillingCloud
from tests.system.harness import Gateway, gateway, until
from tests.system.money import paid
from tests.system.reading import Answer, read
from tests.system.scripted import DONE, SSE, RawClient, ScriptedNode, Write, chunk, event, local_nodes, says

PAGE = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
KEY = "sk-cloud-key-for-tests-0001"
MODELS = ["m", "alone"]
STAY_LOCAL = {"x-hearth-local-only": "true"}

Row = Mapping[str, str]


@cache
def _tables() -> Mapping[str, list[Row]]:
    """The page's tables by their headings."""
    found: dict[str, list[Row]] = {}
    heading = ""
    names: list[str] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            heading, names = line[3:], []
        elif line.startswith("|") and not names:
            names = cells
        elif line.startswith("|") and not set(line) <= set("|-"):
            found.setdefault(heading, []).append(dict(zip(names, cells, strict=True)))
    return found


def _causes(heading: str) -> list[str]:
    return [row["cause"] for row in _tables()[heading]]


def _row(heading: str, cause: str) -> Row:
    return next(row for row in _tables()[heading] if row["cause"] == cause)


def _code(row: Row) -> str | None:
    """The code; None where the page leaves it open."""
    code = re.fullmatch("`(.*)`", row["code"])
    return code[1] if code else None


# -- before the first content

BEFORE = "Before the first content"
SHORT = {"first_token_timeout": 0.3}
Scenario = Behaviour | Write


def _error(status: int, **error: Any) -> Write:
    async def write(exchange: Exchange) -> None:
        await deliver(exchange, json_answer({"error": error}, status))

    return write


BEFORE_CONTENT: Mapping[str, Scenario] = {
    "nobody listens, or no way leads there": Behaviour.REFUSE,
    "the node closes the connection before it answers": Behaviour.CLOSE_AT_ONCE,
    "no content within `FIRST_TOKEN_TIMEOUT`": Behaviour.HANG,
    "500 and most other 5xx": Behaviour.STATUS_500,
    "501, as the node was started without this ability": _error(501, message="not supported"),
    "408, 409, 425": Behaviour.STATUS_408,
    "429, 503 or 529, as the node is busy": Behaviour.STATUS_503,
    "401, 403 or 407, as the node refuses its key": Behaviour.STATUS_401,
    "402, or 429 as the node's account has no credit": _error(429, message="pay", code="insufficient_quota"),
    "404, as the node has the model no more": Behaviour.STATUS_404,
    "400, 413, 422 and other 4xx: the request is wrong": _error(422, message="no", code="of_the_node"),
    "the prompt does not fit into the model's context": _error(
        400, message="This model's maximum context length is 10 tokens. However, you requested 20 tokens."
    ),
    "a redirect": Behaviour.REDIRECT_302,
    "status 200 and nothing else": Behaviour.EMPTY,
    "status 200 and a web page, or other nonsense": Behaviour.HTML,
    "status 200 and an error in place of content": Behaviour.ERROR_FIRST,
    "status 200 and an error that blames the request": says(event(error="too long", error_type="validation")),
    "the answer breaks off before its first content": says(chunk("", role="assistant")),
}
ELSEWHERE = {
    "no connection within `CONNECT_TIMEOUT`",
    "the request takes longer than `REQUEST_TIMEOUT`",
    "the client leaves",
}
STREAMS_ONLY = {
    "status 200 and an error that blames the request",
    "the answer breaks off before its first content",
}


def test_every_cause_before_content_is_tried_out() -> None:
    assert set(_causes(BEFORE)) == BEFORE_CONTENT.keys() | ELSEWHERE


@asynccontextmanager
async def _bad(scenario: Scenario) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """The URL of a node that is well at first, and what makes it bad."""
    if isinstance(scenario, Behaviour):
        async with FakeVLLM(models=MODELS) as node:
            yield node.url, lambda: node.behave(scenario)
    else:
        async with ScriptedNode(scenario) as scripted:
            yield scripted.url, lambda: None


@asynccontextmanager
async def _preferred(url: str, sibling: FakeVLLM, cloud: FakeCloud, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway that asks the node at `url` first, for the model `alone` no other local one, and then the cloud."""
    nodes = [
        {"url": url, "kind": "vllm", "name": "bad", "weight": 100, "models": MODELS},
        {"url": sibling.url, "kind": "vllm", "name": "sibling"},
    ]
    entry = {"name": "cloud", "endpoint": cloud.url + "/v1", "api_key": KEY, "model": "gpt-4o-mini"}
    settings = {
        "local_nodes": json.dumps(nodes),
        "cloud_providers": json.dumps([entry]),
        "lb_strategy": "least_connections",
        "health_check_interval": 60,
        "breaker_fail_max": 3,
        "max_attempts": 2,
        **SHORT,
        **settings,
    }
    async with gateway(**settings) as hearth:
        yield hearth


async def _holds(row: Row, hearth: Gateway, stream: bool) -> None:
    """Asks three times: with another local node there, with the cloud, and with nobody else."""
    with_sibling = await hearth.chat("m", stream=stream, headers=STAY_LOCAL)
    with_cloud = await hearth.chat("alone", stream=stream)
    alone = await hearth.chat("alone", stream=stream, headers=STAY_LOCAL)

    _sees(row, alone)
    for answer, tried, served_by in (
        (with_cloud, row["cloud?"], "cloud"),
        (with_sibling, row["next node?"], "sibling"),
    ):
        if tried == "yes":
            assert read(answer).whole
            assert answer.headers["x-hearth-node"] == served_by
            assert answer.headers["x-hearth-fallback"] == _code(row)
        else:
            _sees(row, answer)
            assert answer.headers["x-hearth-node"] == "bad"
    state = (await hearth.nodes())["bad"]["breaker"]["state"]
    assert state == ("open" if row["counts?"] == "yes" else "closed")


def _sees(row: Row, answer: httpx.Response) -> None:
    statuses = [int(status) for status in re.findall(r"\b\d{3}\b", row["the client sees"])] or [422]
    assert answer.status_code in statuses
    assert answer.headers["x-hearth-error-source"] == "node"
    assert ("retry-after" in answer.headers) == ("`Retry-After`" in row["the client sees"])
    error = answer.json()["error"]
    assert error["message"]
    assert error["code"] == (_code(row) or error["code"])


@pytest.mark.parametrize(
    ("cause", "stream"),
    [(cause, stream) for cause in BEFORE_CONTENT for stream in (True, False) if stream or cause not in STREAMS_ONLY],
)
async def test_a_failure_before_content_goes_as_the_page_says(cause: str, stream: bool) -> None:
    async with (
        _bad(BEFORE_CONTENT[cause]) as (url, turn),
        FakeVLLM(models=["m"]) as sibling,
        FakeCloud() as cloud,
        _preferred(url, sibling, cloud) as hearth,
    ):
        turn()

        await _holds(_row(BEFORE, cause), hearth, stream)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ignores who knocks at a full door")
async def test_a_node_that_lets_nobody_in_goes_as_the_page_says() -> None:
    async with FakeVLLM(models=MODELS) as node, FakeVLLM(models=["m"]) as sibling, FakeCloud() as cloud:
        async with _preferred(node.url, sibling, cloud, connect_timeout=0.2) as hearth:
            await node.stop()
            with socket.socket() as full, socket.socket() as inside, socket.socket() as waiting:
                full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                full.bind(("127.0.0.1", node.port))
                full.listen(0)
                for client in (inside, waiting):
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", node.port))

                await _holds(_row(BEFORE, "no connection within `CONNECT_TIMEOUT`"), hearth, stream=True)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_a_request_whose_time_is_up_goes_as_the_page_says(stream: bool) -> None:
    async with (
        _bad(Behaviour.HANG) as (url, turn),
        FakeVLLM(models=["m"]) as sibling,
        FakeCloud() as cloud,
        _preferred(url, sibling, cloud, request_timeout=0.2, first_token_timeout=5) as hearth,
    ):
        turn()

        await _holds(_row(BEFORE, "the request takes longer than `REQUEST_TIMEOUT`"), hearth, stream)


@pytest.mark.parametrize("status", [b"", b"{}", b"<html>"])
async def test_a_nodes_refusal_without_a_word_becomes_an_error_with_one(status: bytes) -> None:
    async with ScriptedNode(says(status, status=400, headers={})) as node, gateway(local_nodes=local_nodes(node)) as h:
        answer = await h.chat()

        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


# -- after it

AFTER = "After the first content"
AFTER_CONTENT: Mapping[str, Write | bytes] = {
    "the node closes the connection, or ends without saying that it is done": b"",
    "the node sends nothing for `IDLE_TIMEOUT`": b"nothing",
    "the node sends an error": event(error={"message": "out of memory", "type": "server_error"}),
    "the request takes longer than `REQUEST_TIMEOUT`": b"more and more",
}


def test_every_cause_after_content_is_tried_out() -> None:
    assert set(_causes(AFTER)) == AFTER_CONTENT.keys() | {"the client leaves"}


@pytest.mark.parametrize("continuation", ["off", "local"])
@pytest.mark.parametrize("cause", AFTER_CONTENT)
async def test_a_failure_after_content_goes_as_the_page_says(cause: str, continuation: str) -> None:
    row, then = _row(AFTER, cause), AFTER_CONTENT[cause]
    seen = asyncio.Event()

    async def write(exchange: Exchange) -> None:
        exchange.head(200, SSE)
        exchange.body(chunk("a"))
        await seen.wait()
        while then == b"more and more":
            exchange.body(chunk("a"))
            await asyncio.sleep(0.02)
        if then == b"nothing":
            await asyncio.sleep(30)
        assert isinstance(then, bytes)
        exchange.body(then)
        exchange.end()

    settings = {"idle_timeout": 0.3, "request_timeout": 0.8, "breaker_fail_max": 1, "health_check_interval": 60}
    async with (
        ScriptedNode(write) as node,
        FakeVLLM(models=["m"], text="aaaa") as sibling,
        gateway(local_nodes=_weighted(node.url, sibling.url), continuation=continuation, **settings) as hearth,
        RawClient(hearth.url) as client,
    ):
        await client.ask()
        got = await client.read_until(b'"a"')
        seen.set()
        answer = _parsed(got + await client.read_until(DONE))

        if row["goes on?"] == "yes" and continuation == "local":
            assert answer.whole
            assert answer.text == "aaaa"
        else:
            assert answer.error
            assert answer.error["code"] == _code(row)
            assert not answer.finish_reasons
            assert set(answer.text) == {"a"}
            assert not sibling.inferences
        state = (await hearth.nodes())["n0"]["breaker"]["state"]
        assert state == ("open" if row["counts?"] == "yes" else "closed")


def _weighted(url: str, sibling: str) -> str:
    common = {"kind": "vllm", "models": ["m"]}
    return json.dumps([{"url": url, "name": "n0", "weight": 100, **common}, {"url": sibling, "name": "n1", **common}])


def _parsed(wire: bytes) -> Answer:
    """What a client makes of a stream that it got in chunks."""
    _, _, rest = wire.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return read(httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body))


@pytest.mark.parametrize("heading", [BEFORE, AFTER])
async def test_a_client_that_leaves_goes_as_the_page_says(heading: str) -> None:
    row = _row(heading, "the client leaves")
    slow = {"first_seconds": 30.0} if heading == BEFORE else {"tokens": 1000, "token_seconds": 0.02}
    async with FakeVLLM(models=["m"]) as node, FakeVLLM(models=["m"]) as sibling:
        for name, value in slow.items():
            setattr(node.script, name, value)
        async with gateway(local_nodes=_weighted(node.url, sibling.url), breaker_fail_max=1) as hearth:
            async with RawClient(hearth.url) as client:
                await client.ask()
                await node.until(lambda n: n.open == 1)
                if heading == AFTER:
                    await client.read_until(b"t1 ")
            await node.until(lambda n: n.open == 0)

            assert row["counts?"] == "no"
            assert (await hearth.nodes())["n0"]["breaker"]["state"] == "closed"
            assert not sibling.inferences


# -- by Hearth itself

OWN = "What Hearth answers itself"
GOOD = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
FAR = GOOD.replace(b'"m"', b'"far"')
JSON = {"content-type": "application/json"}
LEDGER = "hearth.db"  # in the folder of the test
KEPT = {"database_url": f"sqlite:///{LEDGER}"}
BUDGET = {"cloud_budget_usd": 1, **KEPT}
Ask = Callable[[Gateway, FakeVLLM], Awaitable[httpx.Response]]


@asynccontextmanager
async def _held(hearth: Gateway, node: FakeVLLM) -> AsyncIterator[None]:
    node.script.tokens, node.script.token_seconds = 1000, 0.02
    async with RawClient(hearth.url) as client:
        await client.ask()
        await client.read_until(b"t0 ")
        yield


async def _post(hearth: Gateway, node: FakeVLLM, body: bytes = GOOD, **headers: str) -> httpx.Response:
    wire = {name.replace("_", "-"): value for name, value in headers.items()}
    return await hearth.client.post("/v1/chat/completions", content=body, headers=JSON | wire)


async def _get(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    return await hearth.client.get("/v1/chat/completions")


def _twice(body: bytes, **headers: str) -> Ask:
    async def ask(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
        assert (await _post(hearth, node, body, **headers)).status_code == 200
        return await _post(hearth, node, body, **headers)

    return ask


async def _when_full(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    async with _held(hearth, node):
        node.inferences.clear()
        return await _post(hearth, node)


async def _when_the_queue_is_full(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    async with _held(hearth, node), RawClient(hearth.url) as waiting:
        node.inferences.clear()
        await waiting.ask()

        async def full() -> bool:
            told = await hearth.client.post("/admin/explain", content=GOOD, headers=JSON)
            return bool(told.json()["queue"]["waiting"])

        await until(full, "one waits")
        return await _post(hearth, node)


async def _when_down(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    node.behave(Behaviour.REFUSE)
    await hearth.state("n0", "down")
    return await _post(hearth, node)


async def _far(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    return await _post(hearth, node, FAR)


async def _with_a_key_for_another(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    made = await hearth.client.post("/admin/keys", json={"name": "ada", "routes": ["other"]})
    return await _post(hearth, node, authorization=f"Bearer {made.json()['secret']}")


async def _with_a_full_disk(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    with closing(sqlite3.connect(LEDGER)) as ledger:
        ledger.execute("CREATE TRIGGER full BEFORE INSERT ON spend BEGIN SELECT RAISE(FAIL, 'disk full'); END")
    return await _post(hearth, node, FAR)


async def _when_closing(hearth: Gateway, node: FakeVLLM) -> httpx.Response:
    hearth.app.state.phase.closing = True
    return await _post(hearth, node)


OWN_ANSWERS: Mapping[str, tuple[dict[str, Any], Ask]] = {
    "the body is no JSON object": ({}, lambda h, n: _post(h, n, b"[]")),
    "a required field is missing or wrong": ({}, lambda h, n: _post(h, n, b'{"model":"m"}')),
    "the API key is missing or wrong": ({"api_keys": "sk-some-key-0001"}, _post),
    "only the cloud could serve the request, and it must stay local": (
        {},
        lambda h, n: _post(h, n, FAR, x_hearth_local_only="true"),
    ),
    "nobody serves a model of that name": ({}, lambda h, n: _post(h, n, GOOD.replace(b'"m"', b'"nowhere"'))),
    "the method is not POST": ({}, _get),
    "the body is larger than `MAX_BODY_MB`": (
        {"max_body_mb": 0.001},
        lambda h, n: _post(h, n, GOOD + b" " * 2000),
    ),
    "the body is not declared as JSON": ({}, lambda h, n: _post(h, n, content_type="text/plain")),
    "every node is full, for as long as a request may wait": ({"queue_timeout": 0.2}, _when_full),
    "every node is full, and too many requests wait already": ({"queue_size": 1}, _when_the_queue_is_full),
    "no node that serves the model is up": ({}, _when_down),
    "Hearth is shutting down": ({}, _when_closing),
    "the API key may not ask for this model": (KEPT, _with_a_key_for_another),
    "the API key has asked for more than it may in a minute": (
        {"api_keys": "sk-some-key-0001", "requests_per_minute": 1},
        _twice(GOOD, authorization="Bearer sk-some-key-0001"),
    ),
    "only the cloud is left, and a budget is spent": ({**BUDGET, "cloud_budget_usd": 0}, _far),
    "only the cloud is left, and has been asked for as much as it allows in a minute": (
        {**BUDGET, "shared": {"requests_per_minute": 1}},
        _twice(FAR),
    ),
    "only the cloud is left, there is a budget, and nobody knows the model's price": (
        {**BUDGET, "cloud_prices": {}, "model_map": {"far": {"cloud": "a-model-without-a-price"}}},
        _far,
    ),
    "only the cloud is left, and the ledger cannot be written": (BUDGET, _with_a_full_disk),
    "only the cloud is left, and Redis is out of reach": (
        {**BUDGET, "redis_url": "redis://127.0.0.1:1"},
        _far,
    ),
}
SERVED_BEFORE = {cause: 1 for cause in OWN_ANSWERS if "in a minute" in cause}


def test_every_answer_of_hearths_own_is_tried_out() -> None:
    assert set(_causes(OWN)) == OWN_ANSWERS.keys()


@pytest.mark.parametrize("cause", OWN_ANSWERS)
async def test_an_answer_of_hearths_own_is_as_the_page_says(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row, (settings, ask) = _row(OWN, cause), OWN_ANSWERS[cause]
    async with FakeVLLM(models=["m"]) as node, BillingCloud() as cloud:
        nodes = json.dumps([{"url": node.url, "kind": "vllm", "name": "n0", "max_concurrency": 1}])
        if cause.startswith("only the cloud"):
            settings = paid(cloud, **settings)
        async with gateway(local_nodes=nodes, health_check_interval=0.1, **settings) as hearth:
            answer = await ask(hearth, node)

            assert answer.status_code == int(row["status"])
            assert answer.json()["error"]["code"] == _code(row)
            assert answer.headers["x-hearth-error-source"] == "gateway"
            assert ("retry-after" in answer.headers) == (row["`Retry-After`?"] == "yes")
            assert len(node.inferences) + len(cloud.inferences) == SERVED_BEFORE.get(cause, 0)


def test_every_code_stands_on_the_page() -> None:
    app = Path(app_package.__file__).parent
    written = {code for path in app.rglob("*.py") for code in re.findall(r"\bcode=\"(\w+)\"", path.read_text())}
    codes = {kind.code for kind in _kinds(HearthError)} | {failure.value for failure in Failure} | written

    assert {code for code in codes if code and f"`{code}`" not in PAGE.read_text()} == set()


def _kinds(error: type[HearthError]) -> list[type[HearthError]]:
    return [error, *(each for below in error.__subclasses__() for each in _kinds(below))]


# -- probes

PROBES = "What probes mean"
PROBED: Mapping[str, Callable[[FakeNode[Any]], None]] = {
    "200 from the health check, and a list of models": lambda node: None,
    "500 from the health check": lambda node: node.behave(Behaviour.STATUS_500, on=On.PROBES),
    "503 from the health check": lambda node: node.behave(Behaviour.STATUS_503, on=On.PROBES),
    "400 for the list of models": lambda node: node.behave(Behaviour.STATUS_400, on=On.PROBES),
    "401 for the list of models": lambda node: setattr(node.engine, "api_key", "sk-another-key-0001"),
    "404 for the list of models": lambda node: node.behave(Behaviour.STATUS_404, on=On.PROBES),
    "404 for the list of models, which the node's `models` names": lambda node: node.behave(
        Behaviour.STATUS_404, on=On.PROBES
    ),
    "429 for the list of models": lambda node: node.behave(Behaviour.STATUS_429, on=On.PROBES),
    "a redirect": lambda node: node.behave(Behaviour.REDIRECT_302, on=On.PROBES),
    "no answer in time": lambda node: node.behave(Behaviour.HANG, on=On.PROBES),
    "another server's answer": lambda node: node.behave(Behaviour.HTML, on=On.PROBES),
}


@pytest.mark.parametrize("row", _tables()[PROBES], ids=lambda row: f"{row['kind']}: {row['a probe finds']}")
async def test_a_probe_means_what_the_page_says(row: Row) -> None:
    kind = row["kind"].strip("`")
    async with KINDS[kind](models=["m"]) as node:
        PROBED[row["a probe finds"]](node)
        named = {"models": ["m"]} if "`models`" in row["a probe finds"] else {}
        nodes = json.dumps([{"url": node.url, "kind": kind, "name": "n0", **named}])
        async with gateway(local_nodes=nodes, health_check_interval=0.05, health_check_timeout=0.2) as hearth:
            await until(lambda: len(node.requests) >= 4, "it is probed several times")

            assert (await hearth.nodes())["n0"]["state"] == row["state"]
            assert not node.inferences


def test_all_settings_that_the_page_names_exist() -> None:
    known = {name.upper() for name in Settings.model_fields}
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", PAGE.read_text()))

    assert named
    assert named <= known
