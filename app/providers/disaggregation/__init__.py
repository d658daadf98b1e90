"""Generations that two nodes share: one reads the prompt, the other writes the answer. A table by kind of node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.providers.disaggregation.base import Disaggregation, Migration
from app.providers.disaggregation.lmdeploy import LMDeployPairs
from app.providers.disaggregation.sglang import SGLangPairs
from app.providers.disaggregation.vllm import VLLMPairs

_BY_KIND: Mapping[str, Callable[[Migration], Disaggregation]] = {
    "lmdeploy": LMDeployPairs,
    "vllm": lambda migration: VLLMPairs(),
    "sglang": lambda migration: SGLangPairs(),
}


def disaggregations(migration: Migration) -> Mapping[str, Disaggregation]:
    """How the nodes of each kind that can share a generation do so; a pair is always of one kind."""
    return {kind: make(migration) for kind, make in _BY_KIND.items()}
