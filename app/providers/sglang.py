"""SGLang nodes."""

from __future__ import annotations

from typing import Any

from app.domain import EngineLoad
from app.providers import prefix
from app.providers.base import Gauge, Probe
from app.providers.engine_load import document, metrics, positive_count, slots_alone
from app.providers.openai_compatible import MODELS_PATH, compatible, health_of_list, models, owned_by


def _slots(body: bytes) -> EngineLoad:
    """What the schedulers hold to, else what the operator set."""
    info = document(body)
    if not isinstance(info, dict):
        raise ValueError("no object")
    states = info.get("internal_states")
    each = [_most(state) for state in states] if isinstance(states, list) else []
    known = [count for count in each if count is not None]
    return slots_alone(sum(known) if known else positive_count(info.get("max_running_requests")))


def _most(state: Any) -> int | None:
    return positive_count(state.get("effective_max_running_requests_per_dp")) if isinstance(state, dict) else None


KIND = compatible(
    "sglang",
    "SGLang",
    # Not /health: there an idle engine generates a token by default.
    Probe(
        health_path=MODELS_PATH,
        models_path=MODELS_PATH,
        health=health_of_list,
        models=models,
        gauges=(
            Gauge("/server_info", _slots, frozenset({"slots"}), constant=True),
            Gauge("/get_server_info", _slots, frozenset({"slots"}), constant=True),  # the older name
            # Off unless the server was started with --enable-metrics.
            metrics(
                running="sglang:num_running_reqs", waiting="sglang:num_queue_reqs", cache_used=("sglang:token_usage",)
            ),
        ),
    ),
    signatures=(owned_by("sglang"),),
    prefix=lambda url: prefix.SGLANG,
    continues_prompts=True,
)
