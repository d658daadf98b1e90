"""The kinds of nodes: a table, and the order in which an unknown node is compared with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.providers import (
    cloud,
    generic,
    llamacpp,
    lmdeploy,
    lmstudio,
    ollama,
    sglang,
    tgi,
    transformers_serve,
    vllm,
)
from app.providers.base import Kind

# From those that nothing else resembles to the one that all resemble.
_BY_SIGNATURE = (
    vllm.KIND,
    sglang.KIND,
    lmdeploy.KIND,
    tgi.KIND,
    llamacpp.KIND,
    lmstudio.KIND,
    ollama.KIND,
    transformers_serve.KIND,
    generic.KIND,
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (*_BY_SIGNATURE, cloud.KIND)}


def detect_order() -> Sequence[Kind]:
    """The kinds that a node can be recognised as, in the order in which to try them."""
    return _BY_SIGNATURE
