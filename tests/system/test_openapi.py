"""What /openapi.json promises holds, whatever is sent."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from app.main import create_app
from app.settings import Settings
from tests.fakes import FakeOllama
from tests.system.gateway_process import GatewayProcess
from tests.system.harness import Lines, node_settings

DOCUMENT = create_app(Settings(_env_file=None, local_nodes="[]"), Lines()).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
Case = schemathesis.Case[Any]

HOT = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
MANAGEMENT = "^/(nodes/|distserve/|admin/keys)"
AS_DOCUMENTED: Any = [status_code_conformance, content_type_conformance, response_schema_conformance]
WHATEVER = settings(
    max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(tmp_path_factory)


@pytest.fixture(scope="module")
def managed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Another one, whose node is not missed, and where a key may come to be needed."""
    yield from _served(tmp_path_factory, database_url="sqlite:///hearth.db")


def _served(tmp_path_factory: pytest.TempPathFactory, **settings: Any) -> Iterator[str]:
    """A gateway in front of an Ollama.

    Not in this thread, which waits for the answers, nor in this process, where Hypothesis rules over `random`.
    """
    started: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        end = asyncio.Event()
        folder = tmp_path_factory.mktemp("hearth")
        async with FakeOllama(models=["m"], tokens=2) as node:
            async with GatewayProcess(folder, local_nodes=node_settings(node), **settings) as hearth:
                await hearth.ready()
                started.put((hearth.url, asyncio.get_running_loop(), end))
                await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    served, loop, end = started.get(timeout=50)
    yield served
    loop.call_soon_threadsafe(end.set)
    thread.join(10)
    assert not thread.is_alive()


# The routes that end or replace nodes, and those that make keys, would leave the others nothing to answer with.
@SCHEMA.exclude(path_regex=MANAGEMENT).parametrize()
@WHATEVER
def test_answers_are_as_documented(case: Case, url: str) -> None:
    case.call_and_validate(base_url=url)


@SCHEMA.include(path_regex=MANAGEMENT).parametrize()
@WHATEVER
def test_answers_of_management_are_as_documented(case: Case, managed_url: str) -> None:
    case.call_and_validate(base_url=managed_url, checks=AS_DOCUMENTED)


@SCHEMA.include(path=HOT).parametrize()
@WHATEVER
def test_answers_for_a_model_that_there_is_are_as_documented(case: Case, url: str) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "m"
    case.call_and_validate(base_url=url, checks=[not_a_server_error, *AS_DOCUMENTED])


def test_the_documentation_loads(url: str) -> None:
    page = httpx.get(url + "/docs")
    document = httpx.get(url + "/openapi.json").json()

    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text
    assert document == DOCUMENT


@pytest.mark.parametrize("path", HOT)
def test_inference_routes_are_documented(path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]

    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert "model" in body["required"]
    assert {"200", "400", "401", "404", "413", "415", "429", "502", "503", "504"} <= set(operation["responses"])
    assert operation["summary"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/metrics", "/admin/nodes", "/admin/keys"])
def test_all_other_routes_are_documented(path: str) -> None:
    assert DOCUMENT["paths"][path]["get"]["summary"]
