"""LM Studio nodes."""

from __future__ import annotations

from typing import Any

from app.domain import LoadedModel
from app.providers.base import Probe
from app.providers.openai_compatible import (
    MODELS_PATH,
    answers_with,
    compatible,
    context_length,
    health_of_list,
    models,
)
from app.providers.openai_to_openai import Traits

_NATIVE_PATH = "/api/v0/models"


def _native_rows(document: Any) -> list[dict[str, Any]]:
    """LM Studio's own list. It answers 200 on every path, so that only the form of a row proves anything."""
    rows = document.get("data") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and {"id", "state"} <= row.keys() for row in rows):
        raise ValueError("no list of models with their state")
    return rows


def _loaded(document: Any) -> list[LoadedModel]:
    rows = _native_rows(document)
    return [LoadedModel(row["id"], context_length=context_length(row)) for row in rows if row["state"] == "loaded"]


def _is_native(document: dict[str, Any]) -> bool:
    try:
        return bool(_native_rows(document))
    except ValueError:
        return False


KIND = compatible(
    "lmstudio",
    "LM Studio",
    Probe(
        health_path=MODELS_PATH,
        models_path=MODELS_PATH,
        health=health_of_list,
        models=models,
        loaded_path=_NATIVE_PATH,
        loaded=_loaded,
    ),
    traits=Traits(old_limit=True),
    signatures=(answers_with(_NATIVE_PATH, _is_native),),
    continues_prompts=True,
)
