"""SGLang nodes."""

from __future__ import annotations

from app.providers.base import Probe
from app.providers.openai_compatible import MODELS_PATH, compatible, health_of_list, models, owned_by

KIND = compatible(
    "sglang",
    "SGLang",
    # Not /health: there an idle engine generates a token by default.
    Probe(health_path=MODELS_PATH, models_path=MODELS_PATH, health=health_of_list, models=models),
    signatures=(owned_by("sglang"),),
)
