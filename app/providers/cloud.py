"""Clouds that speak OpenAI's API, OpenAI itself first of all. Never found by probing: the operator names them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from app.providers.base import Prefix, Probe
from app.providers.openai_compatible import MODELS_PATH, compatible, health_of_list, models
from app.providers.openai_to_openai import Traits
from app.providers.prefix import PREFIXES

# OpenAI's reasoning models, also under the names that resellers give them, such as `openai/o3-mini`.
_REASONING = re.compile(r"(^|/)(o[1-9]\d*|gpt-([5-9]|\d\d+))([.:@-]|$)", re.I)

# Providers that document how an answer is gone on with; DeepSeek does so below this path alone.
_PREFIXES = {
    "api.mistral.ai": "prefix",
    "api.deepseek.com/beta": "prefix",
    "api.moonshot.ai": "partial",
    "api.moonshot.cn": "partial",
    "api.groq.com": "last",
}


def _prefix(url: str) -> Prefix | None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    name = _PREFIXES.get(host) or _PREFIXES.get(f"{host}/{parts.path.strip('/').partition('/')[0]}")
    return None if name is None else PREFIXES[name]


KIND = compatible(
    "cloud",
    "Cloud",
    Probe(health_path=MODELS_PATH, models_path=MODELS_PATH, health=health_of_list, models=models),
    traits=Traits(new_limit_models=_REASONING),
    cloud=True,
    prefix=_prefix,
)
