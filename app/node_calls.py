"""The rare calls to nodes beside requests and probes: handshakes, discovery, termination. The client is httpx."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.domain import Failure, NodeSpec
from app.errors import HearthError, NodeFailure
from app.lean_httpx import httpx
from app.node_clients import Clients, why_no_tls
from app.providers.urls import join
from app.routing.registry import Node
from app.tls import Trust, UnusableCaFile

_CALL_SECONDS = 10.0
_DISCOVERY_SECONDS = 5.0
_TERMINATE_SECONDS = 5.0
_ANSWER_BYTES = 8 * 2**20


class NodeUnfit(HearthError):
    """A node that was to be added did not say what it serves."""

    status = 502
    code = "node_failed"

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class NodeCalls:
    """Open it inside the running loop."""

    def __init__(self, trust: Trust) -> None:
        self._clients = Clients(trust, seconds=_CALL_SECONDS, keep=64)

    async def __aenter__(self) -> NodeCalls:
        await self._clients.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._clients.__aexit__(*exc_info)

    async def call(self, node: Node, method: str, path: str, body: bytes | None) -> bytes:
        """The body of an answer of status 200. Raises `NodeFailure`."""
        try:
            status, answer = await self._ask(node.spec, method, path, body, _CALL_SECONDS)
        except httpx.TimeoutException as error:
            raise NodeFailure(Failure.CONNECT_TIMEOUT, f"no answer from {path} in time") from error
        except UnusableCaFile as error:
            raise NodeFailure(Failure.CONNECT, str(error), sent=False) from error
        except httpx.ConnectError as error:
            reason = why_no_tls(error) or f"no connection for {path}"
            raise NodeFailure(Failure.CONNECT, reason, sent=False) from error
        except httpx.HTTPError as error:
            raise NodeFailure(Failure.DISCONNECTED, f"{path} was not answered ({type(error).__name__})") from error
        if status != httpx.codes.OK:
            raise NodeFailure(Failure.SERVER_ERROR, f"{path} answered {status}", status=status)
        return answer

    async def discover(self, spec: NodeSpec) -> Sequence[str]:
        """The names of the models that a node lists. Raises `NodeUnfit`; nothing is guessed."""
        try:
            status, answer = await self._ask(spec, "GET", "/v1/models", None, _DISCOVERY_SECONDS)
        except httpx.TimeoutException as error:
            raise NodeUnfit(f"{spec.url} did not list its models within {_DISCOVERY_SECONDS:g} s", 504) from error
        except UnusableCaFile as error:
            raise NodeUnfit(f"{spec.url} cannot be asked: {error}") from error
        except httpx.HTTPError as error:
            reason = why_no_tls(error)
            raise NodeUnfit(f"{spec.url} cannot be reached{_because(reason)}") from error
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise NodeUnfit(f"{spec.url} wants a key to list its models; give its 'api_key' or its 'models'", 400)
        names = _names(answer) if status == httpx.codes.OK else []
        if not names:
            raise NodeUnfit(f"{spec.url} lists no models (status {status}); give its 'models'")
        return names

    async def terminate(self, spec: NodeSpec) -> bool:
        """Asks an engine to end itself; False when it does not."""
        try:
            status, _ = await self._ask(spec, "GET", "/terminate", None, _TERMINATE_SECONDS)
        except (httpx.HTTPError, UnusableCaFile):
            return False
        return status == httpx.codes.OK

    async def _ask(
        self, spec: NodeSpec, method: str, path: str, body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        client = await self._clients.of(spec)
        headers = {"accept": "application/json", "host": urlsplit(spec.url).netloc}
        if spec.api_key:
            headers["authorization"] = f"Bearer {spec.api_key}"
        if body is not None:
            headers["content-type"] = "application/json"
        url = join(spec.url, path)
        try:
            async with (
                asyncio.timeout(seconds),  # httpx limits each read alone, so that a node could go on for ever
                client.stream(method, url, content=body, headers=headers, timeout=seconds) as response,
            ):
                answer = b""
                async for part in response.aiter_bytes():
                    answer += part
                    if len(answer) > _ANSWER_BYTES:
                        raise httpx.ReadError("endless answer")
                return response.status_code, answer
        except TimeoutError as error:
            raise httpx.ReadTimeout("no whole answer in time") from error


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else "; is it up, and the URL right?"


def _names(answer: bytes) -> list[str]:
    try:
        document: Any = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return []
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        return []
    return [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
