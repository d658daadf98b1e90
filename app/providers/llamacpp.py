"""llama.cpp nodes: its llama-server."""

from __future__ import annotations

from typing import Any

from app.domain import LoadedModel, NodeState
from app.providers.base import Health, Probe
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
    ),
    signatures=(owned_by("llamacpp"),),  # /props says more, but not while the model is loading
)
