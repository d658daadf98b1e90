"""What there is to say of models that are to be loaded beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.doctor.facts import PlaceFacts
from app.doctor.findings import Code, Finding, warning
from app.domain import GIB, ModelInfo
from app.providers import KINDS
from app.routing.names import canonical, matches
from app.routing.route_spec import RouteSpec


def judge_preload(nodes: Sequence[PlaceFacts], models: Sequence[str], routes: Sequence[RouteSpec]) -> list[Finding]:
    """Of the local nodes that answer and list their models. `models` are those of PRELOAD."""
    listing = [node for node in nodes if node.models is not None]
    found: list[Finding] = []
    if listing and len(listing) == len(nodes):
        found += _nowhere(listing, models, routes)
    for node in listing:
        found += [*_lacking(node, routes), *_too_much(node, routes)]
    return found


def _nowhere(nodes: Sequence[PlaceFacts], models: Sequence[str], routes: Sequence[RouteSpec]) -> Iterator[Finding]:
    for name in models:
        holders = [node for node in nodes if _model(node, name, routes) is not None]
        if not holders:
            message = f"PRELOAD names '{name}', which no node has"
            yield warning(Code.PRELOAD, f"model {name}", message, "fetch it on a node, or take it out of PRELOAD")


def _lacking(node: PlaceFacts, routes: Sequence[RouteSpec]) -> Iterator[Finding]:
    kind = KINDS.get(node.answered or node.spec.kind or "")
    for name in node.spec.preload:
        if _model(node, name, routes) is None:
            message = f"its preload names '{name}', which it does not have"
            yield warning(Code.PRELOAD, node.about, message, "fetch it there, or take it out of the node's preload")
    if node.spec.preload and kind is not None and kind.load is None:
        message = f"it has a preload, and {kind.title} loads nothing on demand"
        yield warning(Code.PRELOAD, node.about, message, "take it out; what it serves is up to how it was started")


def _too_much(node: PlaceFacts, routes: Sequence[RouteSpec]) -> Iterator[Finding]:
    models = [model for name in node.spec.preload if (model := _model(node, name, routes)) is not None]
    size = sum(model.size_bytes or 0 for model in models)
    if node.spec.vram_gb and size > node.spec.vram_gb * GIB:
        message = f"its preload has {size / GIB:.1f} GiB of models, and vram_gb says {node.spec.vram_gb:g}"
        yield warning(Code.PRELOAD, node.about, message, "name fewer models: those that do not fit are not loaded")


def _model(node: PlaceFacts, name: str, routes: Sequence[RouteSpec]) -> ModelInfo | None:
    """What the node has under the name, or under the one that MODEL_MAP makes of it."""
    route = next((route for route in routes if route.pattern == name), None)
    route = route or next((route for route in routes if matches(route.pattern, name)), None)
    local = name if route is None else route.local_for(name)
    if local is None:
        return None
    return next((model for model in node.models or () if _key(model.name) == _key(local)), None)


def _key(name: str) -> str:
    return canonical(name) or name.lower()
