"""Any other node that speaks OpenAI's API."""

from __future__ import annotations

from app.providers.base import Probe, Signature
from app.providers.openai_compatible import MODELS_PATH, compatible, health_of_list, lists_models, models
from app.providers.openai_to_openai import Traits

KIND = compatible(
    "generic",
    "OpenAI-compatible",
    Probe(health_path=MODELS_PATH, models_path=MODELS_PATH, health=health_of_list, models=models),
    # Some servers refuse fields that they do not know, stream_options among them.
    traits=Traits(usage_on_request=False),
    signatures=(Signature(MODELS_PATH, lists_models),),
)
