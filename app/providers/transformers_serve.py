"""Nodes that run `transformers serve`."""

from __future__ import annotations

from typing import Any

from app.domain import NodeState
from app.providers.base import Health, Probe, Signature
from app.providers.openai_compatible import MODELS_PATH, compatible, health, lists_models, models
from app.providers.openai_to_openai import Traits


def _health(status: int, document: Any) -> Health:
    """The first versions have no health check, but answer."""
    return Health(NodeState.HEALTHY) if status == 404 else health(status, document)


def _owned_by_hub_account(status: int, document: Any) -> bool:
    """Every model is called `account/name`, as on the Hub, and belongs to that account. Only small lists are this."""
    if not lists_models(status, document) or not document["data"]:
        return False
    return all(_hub_row(row) for row in document["data"])


def _hub_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str) or row.keys() - _ROW_FIELDS:
        return False
    account, slash, _ = row["id"].partition("/")
    return bool(slash) and row.get("owned_by") == account


_ROW_FIELDS = {"id", "object", "created", "owned_by"}

# It answers 422 to every field that it does not honour, whatever the value. Those are left out that would change
# nothing; what would have changed the answer is sent, so that the client hears that this node cannot do it.
_TRAITS = Traits(
    usage_on_request=False,
    old_limit=True,
    dropped=frozenset(
        {"metadata", "parallel_tool_calls", "prediction", "service_tier", "store", "stream_options", "user"}
    ),
    refused_defaults={
        "logprobs": False,
        "n": 1,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
    },
)

KIND = compatible(
    "transformers",
    "Transformers serve",
    Probe(health_path="/health", models_path=MODELS_PATH, health=_health, models=models),
    traits=_TRAITS,
    signatures=(Signature(MODELS_PATH, _owned_by_hub_account),),
)
