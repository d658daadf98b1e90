"""vLLM nodes."""

from __future__ import annotations

from app.providers import prefix
from app.providers.base import Probe
from app.providers.engine_load import metrics
from app.providers.openai_compatible import MODELS_PATH, answers_with, compatible, health, models, owned_by
from app.providers.openai_to_openai import Traits

KIND = compatible(
    "vllm",
    "vLLM",
    Probe(
        health_path="/health",
        models_path=MODELS_PATH,
        health=health,
        models=models,
        gauges=(
            metrics(
                running="vllm:num_requests_running",
                waiting="vllm:num_requests_waiting",
                cache_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the older name
            ),
        ),
    ),
    # A null in place of an optional field has crashed the engine, or been refused.
    traits=Traits(takes_null=False),
    signatures=(
        owned_by("vllm"),
        answers_with("/version", lambda document: isinstance(document.get("version"), str)),
    ),
    prefix=lambda url: prefix.VLLM,
    continues_prompts=True,
)
