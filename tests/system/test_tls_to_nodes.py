"""Nodes behind TLS: whose certificates are believed, node by node, and what is said about those that are not."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.domain import NodeSpec
from app.node_calls import NodeCalls, NodeUnfit
from app.tls import Trust, UnusableCaFile
from tests.fakes import FakeVLLM
from tests.system.harness import gateway
from tests.system.reading import read


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _behind_tls(node: FakeVLLM, authority: trustme.CA, name: str = "127.0.0.1") -> AsyncIterator[str]:
    """The URL of a proxy in front of the node that ends TLS, with a certificate for `name`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    running: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", node.port)
            await asyncio.gather(_pipe(reader, inner_writer), _pipe(inner_reader, writer))
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            running.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _file(authority: trustme.CA, path: Path) -> str:
    authority.cert_pem.write_to_path(path)
    return str(path)


def _node(url: str, name: str = "n0", **more: Any) -> dict[str, Any]:
    return {"url": url, "kind": "vllm", "name": name, "models": ["m"], **more}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_each_node_is_trusted_in_its_own_way(tmp_path: Path, stream: bool) -> None:
    mine, yours = trustme.CA(), trustme.CA()
    async with (
        FakeVLLM(models=["a"]) as first,
        FakeVLLM(models=["b"]) as second,
        FakeVLLM(models=["c"]) as third,
        _behind_tls(first, mine) as first_url,
        _behind_tls(second, yours) as second_url,
        _behind_tls(third, trustme.CA(), "elsewhere.test") as third_url,
    ):
        nodes = [
            _node(first_url, "n0", ca_file=_file(mine, tmp_path / "mine.pem"), models=["a"]),
            _node(second_url, "n1", ca_file=_file(yours, tmp_path / "yours.pem"), models=["b"]),
            _node(third_url, "n2", tls_verify=False, models=["c"]),
        ]
        async with gateway(local_nodes=json.dumps(nodes)) as hearth:
            answers = [read(await hearth.chat(model, stream=stream)) for model in "abc"]

            assert all(answer.whole for answer in answers)
            assert {node["state"] for node in (await hearth.nodes()).values()} == {"healthy"}


async def test_trust_in_one_node_is_none_in_another(tmp_path: Path) -> None:
    mine = trustme.CA()
    async with (
        FakeVLLM(models=["m"]) as node,
        _behind_tls(node, mine) as trusted,
        _behind_tls(node, trustme.CA()) as other,
    ):
        nodes = [
            _node(trusted, "n0", ca_file=_file(mine, tmp_path / "mine.pem"), models=["a"]),
            _node(other, "n1", ca_file=str(tmp_path / "mine.pem")),
            _node(other, "n2"),
            _node(other.replace("127.0.0.1", "localhost"), "n3", tls_verify=False, models=["a"]),
        ]
        async with gateway(local_nodes=json.dumps(nodes), breaker_fail_max=0) as hearth:
            await hearth.state("n1", "down")
            await hearth.state("n2", "down")

            assert (await hearth.chat()).status_code == 503
            assert not node.inferences


@pytest.mark.parametrize("settings", [{}, {"health_check": False}], ids=["probe", "request"])
async def test_an_unknown_authority_is_named_with_the_setting_that_helps(settings: dict[str, Any]) -> None:
    async with FakeVLLM(models=["m"]) as node, _behind_tls(node, trustme.CA()) as url:
        async with gateway(local_nodes=json.dumps([_node(url, **settings)])) as hearth:
            if not settings:
                await hearth.state("n0", "down")

            message = (await hearth.chat()).json()["error"]["message"]

            assert "its TLS certificate was not accepted: unable to get local issuer certificate" in message
            assert "ca_file" in message
            assert "SSL_CERT_FILE" in message


@pytest.mark.parametrize("settings", [{}, {"health_check": False}], ids=["probe", "request"])
async def test_a_certificate_for_another_name_is_told_as_such(tmp_path: Path, settings: dict[str, Any]) -> None:
    authority = trustme.CA()
    async with FakeVLLM(models=["m"]) as node, _behind_tls(node, authority, "elsewhere.test") as url:
        spec = _node(url, ca_file=_file(authority, tmp_path / "ca.pem"), **settings)
        async with gateway(local_nodes=json.dumps([spec])) as hearth:
            if not settings:
                await hearth.state("n0", "down")

            message = (await hearth.chat()).json()["error"]["message"]

            assert "its TLS certificate was not accepted: IP address mismatch" in message
            assert "use a name that it holds in the node's url" in message


@pytest.mark.parametrize("settings", [{}, {"health_check": False}], ids=["probe", "request"])
async def test_a_node_without_tls_at_an_https_url_is_told_as_such(settings: dict[str, Any]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        spec = _node(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", **settings)
        async with gateway(local_nodes=json.dumps([spec])) as hearth:
            if not settings:
                await hearth.state("n0", "down")

            assert "it does not speak TLS there" in (await hearth.chat()).json()["error"]["message"]


@pytest.mark.parametrize("settings", [{}, {"health_check": False}], ids=["probe", "request"])
async def test_a_ca_file_without_certificates_is_named(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("no certificate")
    async with FakeVLLM(models=["m"]) as node, _behind_tls(node, trustme.CA()) as url:
        async with gateway(local_nodes=json.dumps([_node(url, ca_file=str(path), **settings)])) as hearth:
            if not settings:
                await hearth.state("n0", "down")

            message = (await hearth.chat()).json()["error"]["message"]

            assert f"its ca_file {path} holds no certificates in PEM form" in message


async def test_a_ca_file_that_appears_later_is_used_then(tmp_path: Path) -> None:
    trust, path = Trust(), tmp_path / "ca.pem"
    spec = NodeSpec("https://node.test", ca_file=str(path))

    with pytest.raises(UnusableCaFile, match="cannot be read: no such file"):
        await trust.context(spec)
    _file(trustme.CA(), path)

    assert (await trust.context(spec)).cert_store_stats()["x509_ca"] == 1
    assert await trust.context(spec) is await trust.context(spec)


async def test_ssl_cert_file_is_heeded_by_probes_and_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    monkeypatch.setenv("SSL_CERT_FILE", _file(authority, tmp_path / "ca.pem"))
    async with FakeVLLM(models=["m"]) as node, _behind_tls(node, authority) as url:
        async with gateway(local_nodes=json.dumps([_node(url)])) as hearth:
            await hearth.state("n0", "healthy")

            assert (await hearth.chat()).status_code == 200


async def test_a_node_that_is_added_is_asked_for_its_models_with_the_trust_of_its_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with FakeVLLM(models=["m"]) as node, _behind_tls(node, authority) as url, NodeCalls(Trust()) as calls:
        trusting = NodeSpec(url, ca_file=_file(authority, tmp_path / "ca.pem"))

        assert await calls.discover(trusting) == ["m"]
        with pytest.raises(NodeUnfit, match="certificate was not accepted"):
            await calls.discover(NodeSpec(url))
