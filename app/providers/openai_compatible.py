"""Makes a kind of node out of what is particular to it, for all the kinds that speak OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from app.domain import ModelInfo, NodeState
from app.providers.base import Health, Kind, Prefix, Probe, Signature
from app.providers.openai_faults import refusal
from app.providers.openai_to_openai import Requests, Traits, answer

MODELS_PATH = "/v1/models"

# Where the engines and clouds say how much fits into a model's context; what holds now comes before what may hold.
_CONTEXT_FIELDS = ("max_model_len", "loaded_context_length", "context_length", "context_window", "max_context_length")


def compatible(
    name: str,
    title: str,
    probe: Probe,
    *,
    traits: Traits | None = None,
    signatures: tuple[Signature, ...] = (),
    cloud: bool = False,
    prefix: Callable[[str], Prefix | None] = lambda url: None,
    continues_prompts: bool = False,
) -> Kind:
    """The kind. Without `traits` it is to be spoken to as OpenAI itself."""
    traits = traits or Traits()
    return Kind(
        name=name,
        title=title,
        translate=Requests(traits).translate,
        answer=partial(answer, traits=traits),
        refusal=refusal,
        probe=probe,
        signatures=signatures,
        cloud=cloud,
        prefix=prefix,
        continues_prompts=continues_prompts,
    )


# -- health


def health(status: int, document: Any) -> Health:
    """For a path that answers 200 when all is well, and whose body says nothing."""
    if status == 200:
        return Health(NodeState.HEALTHY)
    if status in (401, 403):
        return Health(NodeState.DOWN, f"its health check refused the key ({status}); check the node's api_key")
    return Health(NodeState.DOWN, f"its health check answered {status}")


def health_of_list(status: int, document: Any) -> Health:
    """For a node whose list of models is the only thing that can be asked for without cost.

    A node without such a list can still be of use, when the operator says which models it serves.
    """
    if status in (404, 405):
        return Health(NodeState.HEALTHY, "it lists no models; name them in the node's models")
    if status in (401, 403):
        return Health(
            NodeState.DOWN,
            f"it refused the key ({status}); check the node's api_key, "
            "or set its health_check to false if the key may only not list models",
        )
    if status == 429:
        return Health(NodeState.HEALTHY, "it limits how often its models may be listed")
    if status != 200:
        return Health(NodeState.DOWN, f"its list of models answered {status}")
    if not isinstance(_rows(document), list):
        return Health(NodeState.DOWN, "it answered with something else than a list of models")
    return Health(NodeState.HEALTHY)


# -- models


def models(document: Any) -> list[ModelInfo]:
    """The models of an OpenAI list, each once."""
    rows = _rows(document)
    if not isinstance(rows, list):
        raise ValueError("no list of models")
    names = {row["id"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"]}
    return [ModelInfo(name, context_length=context_length(row)) for name, row in names.items()]


def _rows(document: Any) -> Any:
    """The members of a list of models; some clouds send it without an object around it."""
    return document.get("data") if isinstance(document, dict) else document


def context_length(row: dict[str, Any]) -> int | None:
    """In tokens; None when the node does not say."""
    meta = row.get("meta")
    current = meta.get("n_ctx") if isinstance(meta, dict) else None  # llama.cpp
    return next((value for value in (current, *map(row.get, _CONTEXT_FIELDS)) if positive(value)), None)


def positive(value: Any) -> bool:
    return type(value) is int and value > 0


# -- recognition


def lists_models(status: int, document: Any) -> bool:
    return status == 200 and isinstance(document, dict) and isinstance(document.get("data"), list)


def owned_by(owner: str) -> Signature:
    """A list of models that all belong to the engine itself, as some engines have it."""

    def matches(status: int, document: Any) -> bool:
        return bool(owners(status, document)) and owners(status, document) == {owner}

    return Signature(MODELS_PATH, matches)


def owners(status: int, document: Any) -> set[Any]:
    """The owners of the models in a list; none when it is no such list."""
    if not lists_models(status, document):
        return set()
    return {row.get("owned_by") if isinstance(row, dict) else None for row in document["data"]}


def answers_with(path: str, holds: Callable[[dict[str, Any]], bool]) -> Signature:
    """A path that answers with an object in which something holds."""

    def matches(status: int, document: Any) -> bool:
        return status == 200 and isinstance(document, dict) and holds(document)

    return Signature(path, matches)
