"""OpenAI's list of models: everything that can be asked for, each once, with where it is served."""

from __future__ import annotations

from typing import Any

from app.domain import NodeState
from app.errors import ModelNotFound
from app.routing.names import canonical, close_names
from app.routing.registry import Node, Registry
from app.routing.routes import Routes


class Models:
    """The union over local nodes, routes and cloud targets."""

    def __init__(self, registry: Registry, routes: Routes, created: int) -> None:
        self._registry = registry
        self._routes = routes
        self._created = created  # Unix seconds; the same for all, so that lists compare equal

    def all(self) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for node in self._registry:
            for name in _names(node):
                key = (canonical(name) if node.kind is not None and node.kind.names_have_tags else None) or name
                card = found.setdefault(key, self._card(name, node.kind.name if node.kind else "hearth"))
                card["hearth"]["cloud" if node.cloud else "nodes"].append(_place(node))
        for name in self._routes.mapped_names():
            found.setdefault(name, self._card(name, "hearth"))["hearth"]["route"] = True
        return sorted(found.values(), key=lambda card: card["id"])

    def one(self, name: str) -> dict[str, Any]:
        """Raises `ModelNotFound`."""
        cards = {card["id"]: card for card in self.all()}
        card = cards.get(name) or next((c for i, c in cards.items() if _same(i, name)), None)
        if card is None:
            close = close_names(name, set(cards))
            raise ModelNotFound(
                f"no model of that name; did you mean {', '.join(close)}?" if close else "no model of that name",
                param="model",
            )
        return card | {"id": name}

    def _card(self, name: str, owner: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": owner,
            "hearth": {"nodes": [], "cloud": [], "route": False},
        }


def _names(node: Node) -> list[str]:
    """A cloud target with a list of its own offers only what it names there."""
    if not node.cloud:
        return list(node.models or ())
    allowed = [name for name in node.spec.models if "*" not in name]
    listed = [name for name in node.models or () if node.cloud_name(name)]
    default = [node.spec.default_model] if node.spec.default_model else []
    return list(dict.fromkeys(default + allowed + listed))


def _place(node: Node) -> dict[str, Any]:
    return {"node": node.name, "available": node.state is NodeState.HEALTHY and not node.draining}


def _same(listed: str, name: str) -> bool:
    key = canonical(name)
    return key is not None and canonical(listed) == key
