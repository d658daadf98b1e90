"""For whoever runs Hearth: is it alive, can it serve, what does it count, what does it know of its nodes."""

from __future__ import annotations

from typing import Any

from app.domain import NodeState, tier_name
from app.routing.registry import Node, Registry


def readiness(registry: Registry) -> tuple[bool, str]:
    """Whether any request could be served, and if not, why."""
    nodes = list(registry)
    if any(node.state is NodeState.HEALTHY and not node.draining and (node.cloud or node.models) for node in nodes):
        return True, "ready"
    if not nodes:
        return False, "no node is configured; set LOCAL_NODES"
    return False, "; ".join(f"{node.name}: {node.state.value}, {_reason(node)}" for node in nodes)


def node_view(node: Node) -> dict[str, Any]:
    """What is known of a node now, without its key."""
    return {
        "name": node.name,
        "url": node.spec.url,
        "kind": node.kind.name if node.kind else None,
        "tier": tier_name(node.spec.tier),
        "state": node.state,
        "reason": node.reason,
        "draining": node.draining,
        "breaker": {"state": node.breaker.state, "reason": node.breaker.reason},
        "busy_seconds": round(node.busy_seconds(), 1),
        "in_flight": node.in_flight,
        "others_in_flight": node.others_in_flight,
        "engine": None if node.engine is None else {**node.engine._asdict(), "foreign": node.foreign},
        "max_concurrency": node.spec.max_concurrency,
        "weight": node.spec.weight,
        "preload": list(node.spec.preload),
        "models": sorted(node.models) if node.models is not None else None,
        "loaded": {name: _loaded(node, name) for name in node.loaded} if node.loaded is not None else None,
    }


def _loaded(node: Node, name: str) -> dict[str, Any]:
    model = (node.loaded or {})[name]
    return {"vram_bytes": model.vram_bytes, "context_length": model.context_length}


def _reason(node: Node) -> str:
    return node.reason or ("lists no models" if not node.models else "draining")
