"""Looks at a node or a cloud target: GET requests alone, no inference, no model load, and never for long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.doctor.calls import Answer, Caller, NoAnswer, resolve, speaks_tls
from app.doctor.facts import Elsewhere, PlaceFacts, Trouble
from app.domain import LOCAL_TIER, LoadedModel, NodeSpec, NodeState
from app.node_clients import Clients
from app.providers import KINDS, detect_order
from app.providers.base import Kind

USUAL_PORTS = (11434, 8000, 23333, 8080, 30000, 1234)  # Ollama, vLLM, LMDeploy, llama.cpp and TGI, SGLang, LM Studio

_LOOK_SECONDS = 5.0
_NEIGHBOUR_SECONDS = 2.0
_SCHEME_SECONDS = 2.0
_REFUSED_STATUS = (401, 403)
_LOOPBACKS = ("localhost", "127.0.0.1", "::1")
_CONTAINERS_HOST = "host.docker.internal"
_IDENTITY_PATH = "/openapi.json"  # of a Hearth: it names title and version
_TITLE = "Hearth"
_ANYTHING = "generic"  # the kind that all others resemble


class Visitor:
    """Looks at places, each with a key that goes there alone."""

    def __init__(
        self, clients: Clients, *, in_container: bool | None = None, usual_ports: Sequence[int] = USUAL_PORTS
    ) -> None:
        self._clients = clients
        self._in_container = Path("/.dockerenv").exists() if in_container is None else in_container
        self._usual_ports = usual_ports

    async def node(self, spec: NodeSpec) -> PlaceFacts:
        """A local node. One that may not be probed is not asked anything."""
        if not spec.health_check:
            return PlaceFacts(spec)
        facts = await self._bounded(spec)
        if _is_elsewhere(facts):
            facts = replace(facts, elsewhere=await self._neighbours(spec))
        return replace(facts, in_container=self._in_container)

    async def cloud(self, spec: NodeSpec) -> PlaceFacts:
        """A cloud target, asked for its list of models."""
        return await self._bounded(spec)

    async def _bounded(self, spec: NodeSpec) -> PlaceFacts:
        caller = Caller(self._clients, spec)
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await resolve(spec.url)
                look = self._look_at_node if spec.tier == LOCAL_TIER else self._look_at_cloud
                facts = await look(caller, spec)
        except NoAnswer as none:
            facts = PlaceFacts(spec, none.trouble, none.detail)
        except TimeoutError:
            facts = PlaceFacts(spec, Trouble.SLOW)
        facts = replace(facts, clock_ahead_seconds=caller.clock_ahead_seconds)
        if _may_be_of_other_scheme(facts):
            with suppress(TimeoutError):
                async with asyncio.timeout(_SCHEME_SECONDS):
                    facts = replace(facts, other_scheme=await self._answers_otherwise(spec))
        return facts

    async def _look_at_node(self, caller: Caller, spec: NodeSpec) -> PlaceFacts:
        kind = await _recognised(caller)
        answers = await caller.get("/v1/models")
        facts = PlaceFacts(
            spec,
            answered=kind.name if kind else None,
            hearth=await hearth_version(caller) if kind is None or kind.name == _ANYTHING else None,
            redirect=answers.redirect,
            key_refused=answers.status in _REFUSED_STATUS,
        )
        # What the operator says decides how it is spoken to, unless that is no use at all.
        said = KINDS.get(spec.kind or "")
        kind = said if said and (kind is None or kind.name == _ANYTHING) else kind
        return facts if kind is None or facts.hearth else await _examined(caller, facts, kind)

    async def _look_at_cloud(self, caller: Caller, spec: NodeSpec) -> PlaceFacts:
        kind = KINDS[spec.kind or "cloud"]
        answer = await caller.get(kind.probe.models_path)
        facts = PlaceFacts(
            spec,
            answered=kind.name,
            redirect=answer.redirect,
            key_refused=answer.status in _REFUSED_STATUS,
            models_status=answer.status,
            models=_models(kind, answer),
        )
        if facts.models is None and not facts.key_refused and not spec.url.endswith("/v1"):
            below = await caller.get_at(f"{spec.url}/v1/models")
            facts = replace(facts, v1_lists=below.status in _REFUSED_STATUS or _models(kind, below) is not None)
        return facts

    async def _answers_otherwise(self, spec: NodeSpec) -> bool:
        """Over TLS where http is given, or without where https is; the key does not go there."""
        if spec.url.startswith("http://"):
            return await speaks_tls(spec.url)
        plain = NodeSpec("http://" + spec.url.removeprefix("https://"))
        if urlsplit(spec.url).port is None:
            return False
        try:
            await Caller(self._clients, plain).get("/v1/models")
        except NoAnswer:
            return False
        return True

    async def _neighbours(self, spec: NodeSpec) -> list[Elsewhere]:
        """Engines on the usual ports of the same host, and on the container's host; they get no key."""
        parts = urlsplit(spec.url)
        host = parts.hostname or ""
        places = [(host, port) for port in self._usual_ports if port != parts.port]
        if self._in_container and host in _LOOPBACKS:
            places += [(_CONTAINERS_HOST, port) for port in {parts.port or 80, *self._usual_ports}]
        found = await asyncio.gather(*(self._neighbour(host, port) for host, port in places))
        return [each for each in found if each is not None]

    async def _neighbour(self, host: str, port: int) -> Elsewhere | None:
        written = f"[{host}]" if ":" in host else host
        spec = NodeSpec(f"http://{written}:{port}")
        try:
            async with asyncio.timeout(_NEIGHBOUR_SECONDS):
                await resolve(spec.url)
                kind = await _recognised(Caller(self._clients, spec))
        except (NoAnswer, TimeoutError):
            return None
        # Any web server may resemble the last kind, Hearth itself among them.
        return Elsewhere(spec.url, kind.title) if kind is not None and kind.name != _ANYTHING else None


async def hearth_version(caller: Caller) -> str | None:
    """The version of the Hearth that answers; None when it is something else. Raises `NoAnswer`."""
    document = (await caller.get(_IDENTITY_PATH)).document
    info: Any = document.get("info") if isinstance(document, Mapping) else None
    if not isinstance(info, Mapping) or info.get("title") != _TITLE:
        return None
    return str(info.get("version"))[:40]


async def _recognised(caller: Caller) -> Kind | None:
    """What it is, by what only such a kind answers. Raises `NoAnswer`."""
    for kind in detect_order():
        for sign in kind.signatures:
            answer = await caller.get(sign.path)
            if not sign.matches(answer.status, answer.document):
                break
        else:
            if kind.signatures:
                return kind
    return None


async def _examined(caller: Caller, facts: PlaceFacts, kind: Kind) -> PlaceFacts:
    """Its health, its models, and what is in memory."""
    probe = kind.probe
    alive = await caller.get(probe.health_path)
    health = probe.health(alive.status, alive.document)
    refused = facts.key_refused or alive.status in _REFUSED_STATUS
    if health.state is not NodeState.HEALTHY:
        return replace(facts, health=health, key_refused=refused)
    listed = await caller.get(probe.models_path)
    return replace(
        facts,
        health=health,
        key_refused=refused or listed.status in _REFUSED_STATUS,
        models_status=listed.status,
        models=_models(kind, listed),
        loaded=await _loaded(caller, kind),
    )


def _models(kind: Kind, answer: Answer) -> Any:
    if answer.status != 200:
        return None
    try:
        return tuple(kind.probe.models(answer.document))
    except ValueError:
        return None


async def _loaded(caller: Caller, kind: Kind) -> tuple[LoadedModel, ...] | None:
    if kind.probe.loaded_path is None or kind.probe.loaded is None:
        return None
    try:
        answer = await caller.get(kind.probe.loaded_path)
        return tuple(kind.probe.loaded(answer.document)) if answer.status == 200 else None
    except (NoAnswer, ValueError):
        return None  # slow while a model loads, which is no fault


def _may_be_of_other_scheme(facts: PlaceFacts) -> bool:
    """Servers without TLS may wait for ever for a request, and those with it answer others in many ways."""
    if facts.spec.url.startswith("https://"):
        return facts.trouble in (Trouble.TLS_NONE, Trouble.NO_CONNECTION)
    return facts.trouble is Trouble.NO_HTTP or (
        facts.trouble is None and facts.answered is None and not facts.key_refused
    )


def _is_elsewhere(facts: PlaceFacts) -> bool:
    """Whether the address is probably not the one that was meant."""
    if facts.trouble is not None:
        return facts.trouble in (Trouble.REFUSED, Trouble.NO_HTTP)
    return facts.hearth is not None or (facts.answered is None and not facts.key_refused and not facts.redirect)
