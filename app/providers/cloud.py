"""Clouds that speak OpenAI's API, OpenAI itself first of all. Never found by probing: the operator names them."""

from __future__ import annotations

import re

from app.providers.base import Probe
from app.providers.openai_compatible import MODELS_PATH, compatible, health_of_list, models
from app.providers.openai_to_openai import Traits

# OpenAI's reasoning models, also under the names that resellers give them, such as `openai/o3-mini`.
_REASONING = re.compile(r"(^|/)(o[1-9]\d*|gpt-([5-9]|\d\d+))([.:@-]|$)", re.I)

KIND = compatible(
    "cloud",
    "Cloud",
    Probe(health_path=MODELS_PATH, models_path=MODELS_PATH, health=health_of_list, models=models),
    traits=Traits(new_limit_models=_REASONING),
    cloud=True,
)
