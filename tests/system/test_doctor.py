"""The doctor looks at fake nodes on real ports, as operators have set them up wrongly."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import trustme

from app import __version__
from app.doctor.checkup import examine
from app.doctor.findings import Finding, Level
from app.ledger.rows import Batch, SpendRow
from app.ledger.store import Store
from app.settings import Settings
from tests.fakes import Behaviour, FakeCloud, FakeNode, FakeOllama, FakeVLLM, Model, On
from tests.system.gateway_process import free_port
from tests.system.harness import gateway
from tests.system.test_command_line import Shell

Facts = dict[str, Any]


async def _examine(usual_ports: tuple[int, ...] = (), **settings: Any) -> list[Finding]:
    given = {"database_url": "off", "nodes_file": "off", "local_nodes": "[]", "port": 0, **settings}
    return await examine(Settings(_env_file=None, **given), in_container=False, usual_ports=usual_ports)


def _bad(findings: list[Finding]) -> dict[str, str]:
    """Each code that is not good, with message and remedy."""
    bad = [finding for finding in findings if finding.level is not Level.GOOD]
    return {finding.code.value: f"{finding.about}: {finding.message} -> {finding.remedy}" for finding in bad}


def _nodes(*nodes: FakeNode[Any] | str, **more: Any) -> str:
    urls = [node if isinstance(node, str) else node.url for node in nodes]
    return json.dumps([{"url": url, "name": f"n{index}", **more} for index, url in enumerate(urls)])


class _Requantised(Model):
    """Another model under the same name."""

    @property
    def digest(self) -> str:
        return "f" * 64


@asynccontextmanager
async def _closed() -> AsyncIterator[Facts]:
    yield {"local_nodes": _nodes(f"http://127.0.0.1:{free_port()}")}


@asynccontextmanager
async def _nameless() -> AsyncIterator[Facts]:
    yield {"local_nodes": _nodes("http://gpu1.invalid:11434")}


@asynccontextmanager
async def _wrong_port() -> AsyncIterator[Facts]:
    async with FakeOllama() as node:
        yield {"local_nodes": _nodes(f"http://127.0.0.1:{free_port()}"), "usual_ports": (node.port,)}


@asynccontextmanager
async def _wrong_kind() -> AsyncIterator[Facts]:
    async with FakeVLLM() as node:
        yield {"local_nodes": _nodes(node, kind="ollama")}


@asynccontextmanager
async def _hearth_itself() -> AsyncIterator[Facts]:
    async with gateway() as hearth:
        yield {"local_nodes": _nodes(hearth.url)}


@asynccontextmanager
async def _key(key: str | None = "sk-wrong-one") -> AsyncIterator[Facts]:
    async with FakeVLLM(api_key="sk-right-one") as node:
        yield {"local_nodes": _nodes(node, **({"api_key": key} if key else {}))}


@asynccontextmanager
async def _no_engine(head: str = "404 Not Found") -> AsyncIterator[Facts]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(f"HTTP/1.1 {head}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield {"local_nodes": _nodes(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")}


@asynccontextmanager
async def _tls(scheme: str) -> AsyncIterator[Facts]:
    """A server whose certificate nobody here trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield {"local_nodes": _nodes(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}")}


@asynccontextmanager
async def _plain_asked_with_tls() -> AsyncIterator[Facts]:
    async with FakeVLLM() as node:
        yield {"local_nodes": _nodes(node.url.replace("http:", "https:"))}


@asynccontextmanager
async def _missing_there() -> AsyncIterator[Facts]:
    async with FakeOllama(models=["m", "x"]) as first, FakeOllama(models=["x"]) as second:
        yield {"local_nodes": _nodes(first, second), "model_map": '{"gpt": "m"}'}


@asynccontextmanager
async def _small_context() -> AsyncIterator[Facts]:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        await hearth.chat("m")
        yield {"local_nodes": _nodes(node)}


@asynccontextmanager
async def _other_digest() -> AsyncIterator[Facts]:
    async with FakeOllama(models=["m"]) as first, FakeOllama(models=[_Requantised("m")]) as second:
        yield {"local_nodes": _nodes(first, second)}


@asynccontextmanager
async def _cloud(path: str = "/v1", **settings: Any) -> AsyncIterator[Facts]:
    async with FakeCloud(models=["big"], api_key="sk-cloud-key") as cloud:
        yield {"cloud_endpoint": cloud.url + path, "cloud_api_key": "sk-cloud-key", "cloud_model": "big", **settings}


@asynccontextmanager
async def _budget(folder: Path) -> AsyncIterator[Facts]:
    async with _cloud(cloud_budget_usd="5", database_url=f"sqlite:///{folder}/hearth.db") as facts:
        yield facts


@asynccontextmanager
async def _taken() -> AsyncIterator[Facts]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield {"port": listener.getsockname()[1]}


@asynccontextmanager
async def _no_redis() -> AsyncIterator[Facts]:
    yield {"redis_url": f"redis://:hidden-word@127.0.0.1:{free_port()}"}


@asynccontextmanager
async def _no_database() -> AsyncIterator[Facts]:
    yield {"database_url": f"postgresql://hearth:hidden-word@127.0.0.1:{free_port()}/hearth"}


@asynccontextmanager
async def _unwritable(folder: Path) -> AsyncIterator[Facts]:
    (folder / "file").write_text("in the way")
    yield {"database_url": f"sqlite:///{folder}/file/hearth.db"}


SITUATIONS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "closed port": (lambda _: _closed(), "connection_refused", "start the server"),
    "unknown name": (lambda _: _nameless(), "name_unresolved", "gpu1.invalid"),
    "wrong port": (lambda _: _wrong_port(), "connection_refused", "(Ollama answers there)"),
    "wrong kind": (lambda _: _wrong_kind(), "other_kind", "set its kind to vllm"),
    "hearth itself": (lambda _: _hearth_itself(), "is_hearth", __version__),
    "wrong key": (lambda _: _key(), "key_refused", "refuses the key"),
    "no key": (lambda _: _key(None), "key_refused", "none is set"),
    "no engine": (lambda _: _no_engine(), "unknown_kind", "port"),
    "redirect": (lambda _: _no_engine("301 Moved\r\nlocation: https://gpu1/x"), "redirected", "url to https://gpu1"),
    "untrusted": (lambda _: _tls("https"), "tls_untrusted", "ca_file"),
    "tls asked without": (lambda _: _tls("http"), "tls_wanted", "https://127.0.0.1"),
    "plain asked with tls": (lambda _: _plain_asked_with_tls(), "tls_none", "http://127.0.0.1"),
    "model on one node": (lambda _: _missing_there(), "model_missing_there", "fetch it on n1: ollama pull m"),
    "small context": (lambda _: _small_context(), "context_small", "4096"),
    "other digest": (lambda _: _other_digest(), "model_differs", "ollama pull"),
    "cloud key": (lambda _: _cloud(cloud_api_key="sk-old-key"), "key_refused", "CLOUD_API_KEY"),
    "cloud model": (lambda _: _cloud(cloud_model="bug"), "cloud_model", "'bug'"),
    "cloud without /v1": (lambda _: _cloud("/v1/x"), "cloud_endpoint", "CLOUD_ENDPOINT"),
    "price unknown": (_budget, "price_unknown", "CLOUD_PRICES"),
    "port taken": (lambda _: _taken(), "port_taken", "PORT"),
    "no redis": (lambda _: _no_redis(), "redis_unreachable", "REDIS_URL"),
    "no database": (lambda _: _no_database(), "ledger_unreachable", "DATABASE_URL"),
    "unwritable": (_unwritable, "not_writable", "DATABASE_URL"),
}


@pytest.mark.parametrize(("made", "code", "words"), SITUATIONS.values(), ids=SITUATIONS.keys())
async def test_what_is_wrong_is_found_and_nothing_else(
    made: Callable[[Path], Any], code: str, words: str, tmp_path: Path
) -> None:
    async with made(tmp_path) as facts:
        bad = _bad(await _examine(**facts))

    bad.pop("no_nodes", None)
    assert list(bad) == [code]
    assert words in bad[code]
    assert not [secret for secret in ("sk-", "hidden-word") if secret in bad[code]]


async def test_nothing_is_wrong_where_all_is_well_and_nothing_costs_anything(tmp_path: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/new/hearth.db"
    async with FakeOllama(models=["m"]) as first, FakeVLLM(models=["m"]) as second, _cloud() as cloud:
        nodes = _nodes(first, second)
        findings = await _examine(local_nodes=nodes, model_map='{"gpt": "m"}', database_url=ledger, **cloud)

    assert not _bad(findings)
    assert not first.inferences + second.inferences
    assert {request.method for request in first.requests + second.requests} == {"GET"}
    assert not first.engine.loads
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("models", "missed"), [(["gpt-*"], 0), (["un*", "gpt-*"], 1)])
async def test_a_price_is_missed_only_of_a_model_that_may_be_asked_for(
    models: list[str], missed: int, tmp_path: Path
) -> None:
    provider = {"name": "here", "api_key": "sk-cloud-key", "models": models, "budget_usd": 5}
    ledger = f"sqlite:///{tmp_path}/hearth.db"
    async with FakeCloud(models=["gpt-4o-mini"], api_key="sk-cloud-key") as cloud:
        providers = json.dumps([{**provider, "endpoint": cloud.url + "/v1"}])
        findings = await _examine(
            cloud_providers=providers, model_map='{"x": {"cloud": "unheard"}}', database_url=ledger
        )

    assert sum(finding.code == "price_unknown" for finding in findings) == missed


async def test_a_clock_is_compared_by_the_date_of_answers() -> None:
    ahead = formatdate(time.time() + 3600, usegmt=True)
    async with FakeVLLM() as node, _no_engine(f"404 Not Found\r\ndate: {ahead}") as facts:
        bad = _bad(await _examine(local_nodes=_nodes(node, json.loads(facts["local_nodes"])[0]["url"])))

    assert "node n1: its clock is 3600 s ahead" in bad["clock"] or "3599 s ahead" in bad["clock"]


async def test_a_key_goes_to_its_own_node_alone() -> None:
    async with FakeVLLM() as neighbour:
        nodes = _nodes(f"http://127.0.0.1:{free_port()}", api_key="sk-node-key")
        bad = _bad(await _examine((neighbour.port,), local_nodes=nodes))

    assert neighbour.url in bad["connection_refused"]
    assert [request.authorization for request in neighbour.requests if request.authorization] == []


async def test_a_key_that_a_node_repeats_stays_hidden_and_a_placeholder_hides_nothing() -> None:
    async with FakeVLLM(models=["sk-node-key-1"]) as first, FakeOllama(models=["m"]) as second:
        nodes = [{"url": first.url, "api_key": "sk-node-key-1"}, {"url": second.url, "api_key": "Ollama"}]
        said = str(await _examine(local_nodes=json.dumps(nodes), model_map='{"gpt": "sk-node-key"}'))

    assert "did you mean '***'" in said
    assert "sk-node-key-1" not in said
    assert "Ollama answers" in said


async def test_nodes_that_hang_do_not_keep_anybody_waiting() -> None:
    async with FakeOllama() as first, FakeVLLM() as second, FakeOllama() as third:
        for node in (first, second, third):
            node.behave(Behaviour.HANG, on=On.ALL)
        began = time.monotonic()
        findings = await _examine(local_nodes=_nodes(first, second, third))

    assert time.monotonic() - began < 10
    assert [finding.code for finding in findings if finding.level is Level.WRONG] == ["no_answer_in_time"] * 3


async def test_a_ledger_is_looked_at_and_not_touched(tmp_path: Path, database_url: str) -> None:
    empty = await _examine(database_url=database_url)
    async with Store(database_url) as store:
        row = SpendRow("r-1", "r", 1, "dead", "", "gpt", "openai", "gpt-4o", 2_500_000)
        await store.write(Batch(opened=[row]))
        await store.lose_open(None, 2)
    used = await _examine(database_url=database_url)

    assert "tables are made at the first start" in str(empty)
    assert "$2.50" in _bad(used)["ledger_lost_spends"]


async def test_redis_is_reached(valkey_url: str) -> None:
    findings = await _examine(redis_url=valkey_url)

    assert [finding.level for finding in findings if finding.code == "redis"] == [Level.GOOD]


async def test_the_exit_status_says_whether_anything_is_wrong(tmp_path: Path) -> None:
    async with FakeVLLM(api_key="sk-node-key") as node:
        hearth = Shell(tmp_path, LOCAL_NODES=_nodes(node, api_key="sk-node-key"), PORT=str(free_port()))
        fine = await hearth("doctor", "--json")
        hearth.environment["LOCAL_NODES"] = _nodes(node, api_key="sk-other-key")
        broken = await hearth("doctor")

    document = json.loads(fine.out)
    assert (fine.status, document["ok"], document["counts"]["wrong"]) == (0, True, 0)
    assert broken.status == 1
    assert "node n0: it refuses the key" in broken.out
    assert "-> set the node's api_key" in broken.out
    assert "sk-" not in fine.out + broken.out
    assert fine.err + broken.err == ""


async def test_a_wrong_setting_is_the_first_and_only_finding(tmp_path: Path) -> None:
    done = await Shell(tmp_path, PORT="many", PYTHONPROFILEIMPORTTIME="1")("doctor", "--json")

    imported = {line.rpartition("|")[2].strip() for line in done.err.splitlines()}
    (finding,) = json.loads(done.out)["findings"]
    assert (done.status, finding["code"]) == (1, "settings_wrong")
    assert "PORT" in finding["message"]
    assert not {"httpx", "sqlalchemy", "rich.table"} & imported
