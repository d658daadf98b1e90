"""Text Generation Inference nodes. Each serves one model, under whatever name it is asked for."""

from __future__ import annotations

from typing import Any

from app.domain import ModelInfo
from app.providers.base import Probe
from app.providers.engine_load import metrics
from app.providers.openai_compatible import answers_with, compatible, health, positive
from app.providers.openai_to_openai import Traits

_INFO_PATH = "/info"


def _models(document: Any) -> list[ModelInfo]:
    if not isinstance(document, dict) or not isinstance(document.get("model_id"), str):
        raise ValueError("no model_id")
    size = document.get("max_total_tokens")
    return [ModelInfo(document["model_id"], context_length=size if positive(size) else None)]


def _is_info(document: dict[str, Any]) -> bool:
    return "model_id" in document and "version" in document and bool({"router", "docker_label"} & document.keys())


KIND = compatible(
    "tgi",
    "Text Generation Inference",
    Probe(
        health_path="/health",
        models_path=_INFO_PATH,
        health=health,
        models=_models,
        # What /info calls max_concurrent_requests are requests with those that wait, so that it says nothing of slots.
        gauges=(metrics(running="tgi_batch_current_size", waiting="tgi_queue_size"),),
    ),
    traits=Traits(
        old_limit=True,
        finish_reasons={"eos_token": "stop", "stop_sequence": "stop"},
        calls_end_with_stop=True,
    ),
    signatures=(answers_with(_INFO_PATH, _is_info),),
    continues_prompts=True,
)
