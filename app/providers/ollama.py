"""Ollama nodes, spoken to through their native API."""

from __future__ import annotations

from typing import Any

from app.domain import LoadedModel, ModelInfo, NodeState
from app.providers import prefix
from app.providers.base import Health, Kind, Probe, Signature
from app.providers.ollama_errors import refusal
from app.providers.ollama_to_openai import answer
from app.providers.openai_to_ollama import load, translate


def _health(status: int, document: Any) -> Health:
    if _is_version(status, document):
        return Health(NodeState.HEALTHY)
    if status == 200:
        return Health(NodeState.DOWN, "GET /api/version did not answer as Ollama does")
    if status in (401, 403):
        return Health(NodeState.DOWN, f"GET /api/version answered {status}; check the node's api_key")
    return Health(NodeState.DOWN, f"GET /api/version answered {status}")


def _is_version(status: int, document: Any) -> bool:
    return status == 200 and isinstance(document, dict) and isinstance(document.get("version"), str)


def _is_tags(status: int, document: Any) -> bool:
    # llama.cpp answers here too, and adds its OpenAI list under `data`.
    return status == 200 and isinstance(document, dict) and "models" in document and "data" not in document


def _models(document: Any) -> list[ModelInfo]:
    """The installed models. Those of a remote host are left out: prompts for them would leave the user's own nodes."""
    return [_model(entry) for entry in _entries(document) if not entry.get("remote_host")]


def _model(entry: dict[str, Any]) -> ModelInfo:
    capabilities = entry.get("capabilities")
    details = entry.get("details")
    return ModelInfo(
        name=_name(entry),
        capabilities=_names(capabilities) if isinstance(capabilities, list) else None,
        context_length=_positive(details.get("context_length")) if isinstance(details, dict) else None,
        digest=entry["digest"] if isinstance(entry.get("digest"), str) and entry["digest"] else None,
        size_bytes=_positive(entry.get("size")),
    )


def _loaded(document: Any) -> list[LoadedModel]:
    """The models in memory. One that is still loading is not listed; a crashed one is, until its next request."""
    return [
        LoadedModel(_name(entry), _count(entry.get("size_vram")), _positive(entry.get("context_length")))
        for entry in _entries(document)
    ]


def _entries(document: Any) -> list[dict[str, Any]]:
    if not isinstance(document, dict) or "models" not in document:
        raise ValueError("no list of models")
    entries = document["models"] or []  # an empty list is null on some versions
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("the models are no list of objects")
    return entries


def _name(entry: dict[str, Any]) -> str:
    name = entry.get("name") or entry.get("model")
    if not isinstance(name, str):
        raise ValueError("a model without a name")
    return name


def _names(values: list[Any]) -> frozenset[str]:
    return frozenset(value for value in values if isinstance(value, str))


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _positive(value: Any) -> int | None:
    return _count(value) or None


KIND = Kind(
    name="ollama",
    title="Ollama",
    translate=translate,
    answer=answer,
    refusal=refusal,
    probe=Probe(
        health_path="/api/version",
        models_path="/api/tags",
        health=_health,
        models=_models,
        loaded_path="/api/ps",
        loaded=_loaded,
    ),
    load=load,
    # A node is Ollama when both hold: other servers have one of the two.
    signatures=(Signature("/api/version", _is_version), Signature("/api/tags", _is_tags)),
    takes_num_ctx=True,
    prefix=lambda url: prefix.OLLAMA,
    continues_prompts=True,
    names_have_tags=True,
)
