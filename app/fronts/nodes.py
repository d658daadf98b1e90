"""LMDeploy's API for nodes: engines register here by themselves, and operators add, drain and remove them.

The paths, the bodies and the texts of success are those of `lmdeploy serve proxy`. Failures have a real status here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from app import proxy_config
from app.domain import NodeSpec, Role
from app.errors import Forbidden, HearthError, InvalidRequest, NodeFailure, NotFound
from app.fronts.admin import refusals
from app.fronts.asgi import headers_of
from app.fronts.auth import Doors
from app.fronts.openai_wire import decode
from app.fronts.openapi import errors
from app.networks import Network, admitted
from app.routing.links import Links
from app.routing.membership import Membership
from app.routing.registry import Node, Registry
from app.setting_values import web_url

ReadSpec = Callable[[object], NodeSpec]  # raises ValueError
Discover = Callable[[NodeSpec], Awaitable[Sequence[str]]]  # raises HearthError
Terminate = Callable[[NodeSpec], Awaitable[bool]]

_ROLE_NUMBERS = {role: number for number, role in proxy_config.ROLES.items()}
_ANYWHERE = ("0.0.0.0", "::", "localhost", "127.0.0.1", "::1")
_LOOPBACKS = ("127.0.0.1", "::1")
_RESOLVE_SECONDS = 2.0
_BODY_BYTES = 64 * 1024
_REFUSALS = {404: "There is no node at this URL.", 502: "The node could not be asked, or did not do it."}
_OWN_KEYS = ("name", "kind", "api_key", "weight", "max_concurrency", "vram_gb", "num_ctx")
# Not read here, but kept.
_OPERATORS_KEYS = ("speed", "preload", "price", "retries", "health_check", "tls_verify", "ca_file", "prefix")

_NODE = {
    "type": "object",
    "required": ["url"],
    "properties": {"url": {"type": "string", "examples": ["http://192.168.1.20:23333"]}},
}
_NAMES_A_NODE: dict[str, Any] = {"openapi_extra": {"requestBody": {"content": {"application/json": {"schema": _NODE}}}}}


class NodeApi:
    """The node routes. `networks` are those that a URL given at run time may point into."""

    def __init__(
        self,
        *,
        registry: Registry,
        membership: Membership,
        doors: Doors,
        open_to_all: bool,
        networks: Sequence[Network],
        peer_address: bool,
        read_spec: ReadSpec,
        discover: Discover,
        terminate: Terminate,
        links: Links,
    ) -> None:
        self._registry = registry
        self._membership = membership
        self._doors = doors
        self._open_to_all = open_to_all
        self._networks = networks
        self._peer_address = peer_address
        self._read_spec = read_spec
        self._discover = discover
        self._terminate = terminate
        self._links = links

    def routers(self) -> tuple[APIRouter, APIRouter]:
        shared: dict[str, Any] = {"tags": ["nodes"], "dependencies": [Depends(self._admit)]}
        shared["responses"] = {**errors(400), **refusals(_REFUSALS, 404, 502)}
        router = APIRouter(prefix="/nodes", **shared)
        drained: dict[str, Any] = {"status_code": 202, "responses": {200: {"description": "It has no requests left."}}}
        router.get("/status", summary="Every node, by URL")(self.status)
        router.post("/add", summary="Add a node, or replace the one at this URL", **_NAMES_A_NODE)(self.add)
        router.post("/remove", summary="Forget a node", **_NAMES_A_NODE)(self.remove)
        router.post("/drain", summary="Give a node no new requests", **_NAMES_A_NODE, **drained)(self.drain)
        router.post("/terminate", summary="Forget a node and end its engine", **_NAMES_A_NODE)(self.terminate)
        router.get("/terminate_all", summary="Forget all nodes and end their engines")(self.terminate_all)
        pairs = APIRouter(prefix="/distserve", **shared)
        pairs.post("/connection_warmup", summary="Link every prefill node with every decode node")(self.warm_up)
        pairs.post("/gc", summary="Free what is left on prefill nodes of generations that failed")(self.collect)
        return router, pairs

    async def status(self) -> dict[str, Any]:
        return {node.spec.url: _status(node) for node in self._registry.local()}

    async def add(self, request: Request) -> JSONResponse:
        body = await _body(request)
        spec = await self._spec(body, request)
        # What the node lists now is not written down as its models: it may list others later.
        listed = () if spec.models else await self._discover(spec)
        self._membership.add(spec, listed)
        return JSONResponse("Added successfully")

    async def remove(self, request: Request) -> JSONResponse:
        self._membership.remove(await _url(request))
        return JSONResponse("Deleted successfully")

    async def drain(self, request: Request) -> JSONResponse:
        body = await _body(request)
        node = self._known(_url_in(body))
        self._membership.drain(node, body.get("drain", True) is not False)
        idle = node.in_flight_everywhere == 0
        state = ("drained" if idle else "draining") if node.draining else node.state.value
        done = idle or not node.draining
        return JSONResponse(
            {"url": node.spec.url, "state": state, "in_flight": node.in_flight_everywhere}, 200 if done else 202
        )

    async def terminate(self, request: Request) -> JSONResponse:
        node = self._known(await _url(request))
        self._membership.remove(node.spec.url)
        if not await self._terminate(node.spec):
            raise _BadGateway(f"Failed to terminate node {node.spec.url}")
        return JSONResponse("Terminated successfully")

    async def terminate_all(self) -> JSONResponse:
        specs = [node.spec for node in self._registry.local()]
        for spec in specs:
            self._membership.remove(spec.url)
        ended = await asyncio.gather(*(self._terminate(spec) for spec in specs))
        if not all(ended):
            raise _BadGateway("Failed to terminate all nodes")
        return JSONResponse("All nodes terminated successfully")

    async def warm_up(self) -> dict[str, bool]:
        sides = [
            [node for node in self._registry.local() if node.spec.role is role and node.kind is not None]
            for role in (Role.PREFILL, Role.DECODE)
        ]
        pairs = [(prefill, decode) for prefill in sides[0] for decode in sides[1] if prefill.kind is decode.kind]
        try:
            await self._links.warm_up(pairs)
        except NodeFailure as failure:
            raise _BadGateway(f"not every pair could be linked: {failure.message}") from failure
        return {"SUCCESS": True}

    async def collect(self) -> dict[str, Any]:
        left = await self._links.tidy()
        return {"SUCCESS": left == 0, "left": left}

    def _admit(self, request: Request) -> None:
        """Engines that register by themselves send no key: NODES_OPEN lets them in."""
        headers = headers_of(request.scope)
        if self._open_to_all:
            self._doors.check_engine(headers)
        else:
            self._doors.check_admin(request.scope, headers)

    def _known(self, url: str) -> Node:
        node = self._membership.find(url)
        if node is None:
            raise NotFound(f"there is no node {url[:200]}; GET /nodes/status lists them")
        return node

    async def _spec(self, body: Mapping[str, Any], request: Request) -> NodeSpec:
        status = body.get("status") or {}
        if not isinstance(status, dict):
            raise InvalidRequest("'status' must be an object", param="status")
        url = _url_in(body)
        if self._peer_address:
            url = _reachable(url, request.client.host if request.client else "")
        told = {key: status[key] for key in ("models", "role", "speed") if status.get(key) is not None}
        own = {key: body[key] for key in _OWN_KEYS if body.get(key) is not None}
        try:
            if "role" in told:
                told["role"] = proxy_config.role(told["role"])
            spec = self._read_spec({"url": url, **told, **own})
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        await self._check_network(spec.url)
        return self._with_earlier(spec, told.keys() | own.keys())

    def _with_earlier(self, spec: NodeSpec, given: Set[str]) -> NodeSpec:
        """An engine that starts again knows nothing of its key, its limits and its speed: those were an operator's."""
        earlier = self._membership.find(spec.url)
        if earlier is None:
            return spec
        kept = (key for key in (*_OWN_KEYS, *_OPERATORS_KEYS) if key not in given)
        return replace(spec, **{key: getattr(earlier.spec, key) for key in kept})

    async def _check_network(self, url: str) -> None:
        """Raises `Forbidden` unless every address of the node lies in an allowed network."""
        host = urlsplit(url).hostname or ""
        if not all(admitted(address, self._networks) for address in await _addresses(host)):
            raise Forbidden(f"{host} lies in no network that nodes may be added from; see NODES_NETWORKS")


class _BadGateway(HearthError):
    status = 502
    code = "node_failed"


async def _addresses(host: str) -> list[str]:
    try:
        return [str(ipaddress.ip_address(host))]
    except ValueError:
        pass
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise InvalidRequest(f"the name {host} cannot be resolved", param="url") from error
    return [str(entry[4][0]).partition("%")[0] for entry in found]


def _reachable(url: str, peer: str) -> str:
    """The URL with the caller's address, where an engine calls itself by one that only its own machine can use."""
    parts = urlsplit(url)
    if parts.hostname not in _ANYWHERE or not peer or (peer in _LOOPBACKS and parts.hostname in _LOOPBACKS):
        return url
    host = f"[{peer}]" if ":" in peer else peer
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit(parts._replace(netloc=host + port))


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the body; {} when there is none. No content type is asked for."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _BODY_BYTES:
            raise InvalidRequest("the body is too long for a node")
    return decode(data) if data.strip() else {}


async def _url(request: Request) -> str:
    """The node's URL, from the body or, as LMDeploy's documentation has it, from the query."""
    given = request.query_params.get("node_url")
    return _checked(given) if given else _url_in(await _body(request))


def _url_in(body: Mapping[str, Any]) -> str:
    url = body.get("url")
    if not isinstance(url, str) or not url:
        raise InvalidRequest("'url' is missing; it must be the node's URL", param="url")
    return _checked(url)


def _checked(url: str) -> str:
    try:
        return web_url(url)
    except ValueError as error:
        raise InvalidRequest(f"url: {error}", param="url") from error


def _status(node: Node) -> dict[str, Any]:
    """What LMDeploy shows of a node, and why it gets requests or none."""
    return {
        "role": _ROLE_NUMBERS[node.spec.role],
        "models": list(node.models or node.spec.models),
        "unfinished": node.in_flight_everywhere,
        "latency": [round(seconds, 6) for seconds in node.latencies],
        "speed": node.spec.speed,
        "state": "draining" if node.draining else node.state.value,
        "reason": node.reason,
    }
