"""llama.cpp nodes: its llama-server."""

from __future__ import annotations

from typing import Any

from app.domain import EngineLoad, LoadedModel, NodeState
from app.providers import prefix
from app.providers.base import Gauge, Health, Probe
from app.providers.engine_load import document, metrics, positive_count, slots_alone
from app.providers.openai_compatible import MODELS_PATH, compatible, health, models, owned_by, positive


def _health(status: int, document: Any) -> Health:
    """A server that sleeps counts as healthy, as it wakes by itself for the next request."""
    if status == 503:
        return Health(NodeState.LOADING, "it is loading its model")
    return health(status, document)


def _loaded(document: Any) -> list[LoadedModel]:
    """The model, unless the server has put it out of memory to sleep."""
    alias = document.get("model_alias") if isinstance(document, dict) else None
    if not isinstance(alias, str) or document.get("role") == "router":
        raise ValueError("no properties of a server with one model")
    if document.get("is_sleeping") is True:
        return []
    settings = document.get("default_generation_settings")
    size = settings.get("n_ctx") if isinstance(settings, dict) else None
    return [LoadedModel(alias, context_length=size if positive(size) else None)]


def _slots_of_properties(body: bytes) -> EngineLoad:
    properties = document(body)
    return slots_alone(positive_count(properties.get("total_slots")) if isinstance(properties, dict) else None)


def _slots(body: bytes) -> EngineLoad:
    """How many slots there are, and how many are at work. Old servers show prompts here, which nobody reads."""
    rows = document(body)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError("no list of slots")
    return EngineLoad(running=sum(row.get("is_processing") is True for row in rows), slots=len(rows))


KIND = compatible(
    "llamacpp",
    "llama.cpp",
    Probe(
        health_path="/health",
        models_path=MODELS_PATH,
        health=_health,
        models=models,
        loaded_path="/props",
        loaded=_loaded,
        gauges=(
            Gauge("/props", _slots_of_properties, frozenset({"slots"}), constant=True),
            # Off unless the server was started with --metrics; /slots knows nothing of those who wait.
            metrics(
                running="llamacpp:requests_processing",
                waiting="llamacpp:requests_deferred",
                cache_used=("llamacpp:kv_cache_usage_ratio",),
                stirs=True,
            ),
            Gauge("/slots", _slots, frozenset({"running", "slots"}), stirs=True),
        ),
    ),
    signatures=(owned_by("llamacpp"),),  # /props says more, but not while the model is loading
    prefix=lambda url: prefix.LLAMACPP,
    continues_prompts=True,
)
