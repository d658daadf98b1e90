"""What a requested model name means: which model to ask the local nodes for, and which the cloud."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from app.domain import NO_RULES, Budget, QueueRules
from app.errors import ModelNotFound
from app.routing.names import close_names, matches
from app.routing.registry import Registry
from app.routing.route_spec import RouteSpec

DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Route:
    """Per tier, the name to ask for. `name` is safe as a metric's label: never a client's string."""

    name: str
    local: str | None  # None = no local node is asked
    cloud: str | None = None  # None = each cloud target's own default
    cloud_allowed: bool = True
    local_only: bool = False
    num_ctx: int | None = None
    spill_after_ms: float | None = None
    budget: Budget | None = None  # for its cloud requests
    queue: QueueRules = NO_RULES


class Routes:
    """The operator's MODEL_MAP first, then what the nodes and the cloud list."""

    def __init__(self, specs: Sequence[RouteSpec], registry: Registry) -> None:
        self._specs = specs
        self._registry = registry

    def resolve(self, name: str) -> Route:
        """Raises `ModelNotFound`, which lists close names, when nothing can serve the name."""
        spec = self._mapped(name) if self._specs else None
        if spec is not None:
            return _from_spec(spec, name)
        if self._registry.serving(name):
            return _direct(name)
        if self._cloud_lists(name):
            return Route(DIRECT, local=None, cloud=name)
        if self._registry.unlisted():
            # A node that was never reached may have it: no reason to call the name unknown.
            return _direct(name)
        if self._cloud_list_unknown():
            return Route(DIRECT, local=None, cloud=name)
        raise self._not_found(name)

    def mapped_names(self) -> list[str]:
        """Names of MODEL_MAP that are no patterns."""
        return [spec.pattern for spec in self._specs if "*" not in spec.pattern]

    def cloud_names(self) -> set[str]:
        """The models that MODEL_MAP asks the cloud for by name."""
        return {spec.cloud for spec in self._specs if spec.cloud}

    def _mapped(self, name: str) -> RouteSpec | None:
        exact = next((spec for spec in self._specs if spec.pattern == name), None)
        return exact or next((spec for spec in self._specs if matches(spec.pattern, name)), None)

    def _cloud_lists(self, name: str) -> bool:
        return any(
            node.cloud_name(name)
            and (name == node.spec.default_model or node.spec.models or name in (node.models or ()))
            for node in self._registry.cloud()
        )

    def _cloud_list_unknown(self) -> bool:
        return any(node.models is None and not node.spec.models for node in self._registry.cloud())

    def _not_found(self, name: str) -> ModelNotFound:
        known = self._registry.known_models() | set(self.mapped_names()) | set(self._cloud_models())
        close = close_names(name, known)
        hint = f"did you mean {', '.join(close)}?" if close else "GET /v1/models lists what can be asked for"
        if not any(self._registry):
            hint = "no node is configured: set LOCAL_NODES"
        return ModelNotFound(f"no node serves the model '{_shown(name)}'; {hint}", param="model")

    def _cloud_models(self) -> Iterable[str]:
        for node in self._registry.cloud():
            yield from (node.models or ())
            if node.spec.default_model:
                yield node.spec.default_model


@lru_cache(maxsize=256)
def _direct(name: str) -> Route:
    return Route(DIRECT, local=name)


def _from_spec(spec: RouteSpec, asked: str) -> Route:
    return Route(
        spec.pattern,
        local=spec.local_for(asked),
        cloud=spec.cloud,
        cloud_allowed=not spec.cloud_off,
        local_only=spec.local_only,
        num_ctx=spec.num_ctx,
        spill_after_ms=spec.spill_after_ms,
        budget=spec.budget,
        queue=spec.queue,
    )


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "..."
