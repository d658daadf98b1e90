"""LMDeploy nodes: its api_server."""

from __future__ import annotations

from typing import Any

from app.domain import NodeState
from app.providers import prefix
from app.providers.base import Health, Probe
from app.providers.engine_load import metrics
from app.providers.openai_compatible import MODELS_PATH, compatible, health, models, owned_by
from app.providers.openai_to_openai import Traits

_STATES = {
    "healthy": Health(NodeState.HEALTHY),
    # It answers 200 then too, but refuses all work.
    "sleeping": Health(NodeState.SLEEPING, "its engine sleeps until somebody calls /wakeup"),
    "initializing": Health(NodeState.LOADING, "its engine is starting"),
    "unhealthy": Health(NodeState.DOWN, "its engine is not healthy"),
}


def _health(status: int, document: Any) -> Health:
    """Old versions answer without a body."""
    state = document.get("status") if isinstance(document, dict) else None
    known = _STATES.get(state) if isinstance(state, str) else None
    return known if known is not None and status in (200, 503) else health(status, document)


KIND = compatible(
    "lmdeploy",
    "LMDeploy",
    Probe(
        health_path="/health",
        models_path=MODELS_PATH,
        health=_health,
        models=models,
        gauges=(
            metrics(
                running="lmdeploy:num_requests_running",
                waiting="lmdeploy:num_requests_waiting",
                cache_used=("lmdeploy:gpu_cache_usage_perc",),
            ),
        ),
    ),
    traits=Traits(old_limit=True),  # old versions; new ones know max_tokens as well
    signatures=(owned_by("lmdeploy"),),
    prefix=lambda url: prefix.LMDEPLOY,
    continues_prompts=True,
)
