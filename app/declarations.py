"""What operators declare: local nodes, cloud providers and routes. Turns their JSON or YAML into specs.

Readers raise ValueError; the message names the entry and the key, and shows no key of an API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from app.domain import LOCAL_TIER, WEIGHT_MAX, Budget, NodeSpec, Period, Price, Priority, QueueRules, Rate, Role
from app.routing.route_spec import RouteSpec
from app.setting_values import (
    choice,
    did_you_mean,
    entries,
    file,
    flag,
    from_json,
    micro_dollars,
    numbered,
    positive,
    seconds,
    seconds_or_never,
    secret,
    shown,
    text,
    texts,
    web_url,
    whole,
)

PREFIXES = ("last", "continue_final_message", "prefix", "partial", "off")
LOCAL_KINDS = ("ollama", "vllm", "tgi", "lmdeploy", "llamacpp", "sglang", "transformers", "lmstudio", "generic")
CLOUD_KIND = "cloud"

_NAME_CHARACTERS = 64
_KIND_ALIASES = {"openai": "generic", "openaicompatible": "generic"}

Readers = Mapping[str, Callable[[Any], Any]]


@dataclass(frozen=True, slots=True)
class CloudProvider:
    """An entry of CLOUD_PROVIDERS. Its key is given here, or by the name of the variable that holds it."""

    endpoint: str
    name: str = ""
    api_key: str = field(default="", repr=False)
    api_key_env: str | None = None
    model: str | None = None
    models: tuple[str, ...] = ()
    price: Price | None = None
    budget: Budget | None = None
    rate: Rate | None = None
    health_check: bool = True
    tls_verify: bool = True
    ca_file: str | None = None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of API_KEYS, and what it means where its requests and others' wait."""

    secret: str = field(repr=False)
    weight: int = 1
    priority: Priority | None = None


def api_keys(value: object) -> tuple[ApiKey, ...]:
    """Reads API_KEYS, each key once."""
    found = numbered("key", _api_key, entries(value))
    return tuple({each.secret: each for each in found}.values())


def local_nodes(value: object) -> tuple[NodeSpec, ...]:
    """Reads LOCAL_NODES. Every node has a name, and no two the same."""
    return named(numbered("node", local_node, entries(value)))


def cloud_providers(value: object) -> tuple[CloudProvider, ...]:
    """Reads CLOUD_PROVIDERS, without looking keys up."""
    return tuple(numbered("provider", _cloud_provider, entries(value)))


def model_map(value: object) -> tuple[RouteSpec, ...]:
    """Reads MODEL_MAP; the order is kept, as the first pattern that matches decides."""
    if isinstance(value, str):
        value = from_json(value)
    if not isinstance(value, Mapping):
        raise ValueError('is not an object such as {"gpt-4o": "llama3.2"}')
    return tuple(_route(pattern, target) for pattern, target in value.items())


def prices(value: object) -> tuple[tuple[str, Price], ...]:
    """Reads CLOUD_PRICES: patterns of model names with their price; the order is kept, as the first match decides."""
    if isinstance(value, str):
        value = from_json(value)
    if not isinstance(value, Mapping):
        raise ValueError('is not an object such as {"gpt-5*": {"input": 1.25, "output": 10}}')
    return tuple(_priced(pattern, price) for pattern, price in value.items())


def cloud_nodes(
    first: CloudProvider | None,
    others: Iterable[CloudProvider],
    lookup: Callable[[str], str | None],
    local: Iterable[NodeSpec],
) -> tuple[NodeSpec, ...]:
    """The cloud targets in the order in which they are tried. `lookup` reads a variable that holds a key."""
    specs = [] if first is None else [_cloud_spec(first, first.api_key)]
    specs += numbered("provider", lambda provider: _cloud_spec(provider, _key(provider, lookup)), others)
    tiered = [replace(spec, tier=LOCAL_TIER + place) for place, spec in enumerate(specs, 1)]
    return named(tiered, taken=[node.name for node in local])


def _key(provider: CloudProvider, lookup: Callable[[str], str | None]) -> str:
    if provider.api_key_env is None:
        if not provider.api_key:
            raise ValueError(f"{provider.endpoint} has no api_key and no api_key_env; a cloud target needs a key")
        return provider.api_key
    value = lookup(provider.api_key_env)
    if not value:
        raise ValueError(f"api_key_env: the variable {provider.api_key_env} is not set")
    try:
        return secret(value)
    except ValueError as error:
        raise ValueError(f"api_key_env: {provider.api_key_env}: {error}") from None


def _cloud_spec(provider: CloudProvider, key: str) -> NodeSpec:
    return NodeSpec(
        url=provider.endpoint,
        kind=CLOUD_KIND,
        name=provider.name,
        models=provider.models,
        api_key=key,
        default_model=provider.model,
        price=provider.price,
        budget=provider.budget,
        rate=provider.rate,
        health_check=provider.health_check,
        tls_verify=provider.tls_verify,
        ca_file=provider.ca_file,
        prefix=provider.prefix,
    )


def named(specs: list[NodeSpec], taken: Iterable[str] = ()) -> tuple[NodeSpec, ...]:
    """Gives the nameless their host and port as name, with a number where that is `taken`."""
    names = set(taken)
    for spec in specs:
        if spec.name and spec.name in names:
            raise ValueError(f"the name {shown(spec.name)} is used twice; each node needs its own")
        names.add(spec.name)
    result = []
    for spec in specs:
        if not spec.name:
            spec = replace(spec, name=_free_name(urlsplit(spec.url).netloc, names))
            names.add(spec.name)
        result.append(spec)
    return tuple(result)


def _free_name(base: str, names: set[str]) -> str:
    name, number = base, 1
    while name in names:
        number += 1
        name = f"{base}#{number}"
    return name


def _node_name(value: object) -> str:
    """Names go into headers, logs and metrics."""
    name = text(value)
    if not name.isascii() or len(name) > _NAME_CHARACTERS:
        raise ValueError(f"{shown(value)} is not a name of at most {_NAME_CHARACTERS} ASCII characters")
    return name


def _kind(value: object) -> str:
    """`llama.cpp`, `lm-studio` and the like are spelt in many ways."""
    try:
        return choice(re.sub(r"[\s._-]", "", text(value)), LOCAL_KINDS, _KIND_ALIASES)
    except ValueError:
        raise ValueError(f"{shown(value)} is not one of {', '.join(LOCAL_KINDS)}") from None


def _prefix(value: object) -> str:
    return "off" if value is False else choice(value, PREFIXES)  # YAML reads off as false


def _role(value: object) -> Role:
    return Role(choice(value, [role.value for role in Role]))


def _cloud_name(value: object) -> str | None:
    """A model's name; None for false, which means no cloud."""
    if value is False:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is neither a model's name nor false, which means no cloud")
    return _model_name(value)


def _model_name(value: object) -> str:
    name = text(value)
    if "*" in name:
        raise ValueError(f"{shown(value)} holds a *, which only the requested name may hold")
    return name


def _price(value: object) -> Price:
    """Dollars per million tokens: an object, or one number for every token."""
    if not isinstance(value, Mapping):
        return Price(micro_dollars(value), micro_dollars(value))
    values = _read(value, _PRICE_READERS)
    for key in ("input", "output"):
        if key not in values:
            raise ValueError(f"has no {key}, in dollars per million tokens")
    price = Price(**values)
    if price.cached_input is not None and price.cached_input > price.input:
        raise ValueError("cached_input is more than input")
    return price


def _priced(pattern: object, price: object) -> tuple[str, Price]:
    try:
        return text(pattern), _price(price)
    except ValueError as error:
        raise ValueError(f"{shown(pattern)}: {error}") from None


def _period(value: object) -> Period:
    return Period(choice(value, [period.value for period in Period]))


def _ca_file(value: object) -> str:
    return str(file(value))


def _priority(value: object) -> Priority:
    return Priority(choice(value, [priority.value for priority in Priority]))


_at_least_one = partial(whole, at_least=1, hint="leave it out for none")

_PRICE_READERS: Readers = {
    "input": micro_dollars,
    "output": micro_dollars,
    "cached_input": micro_dollars,
}
_CONNECTION_READERS: Readers = {
    "health_check": flag,
    "tls_verify": flag,
    "ca_file": _ca_file,
    "prefix": _prefix,
}
_BUDGET_READERS: Readers = {
    "budget_usd": micro_dollars,
    "budget_period": _period,
}
_NODE_READERS: Readers = {
    "url": web_url,
    "kind": _kind,
    "name": _node_name,
    "models": texts,
    "api_key": secret,
    "weight": positive,
    "speed": positive,
    "max_concurrency": _at_least_one,
    "vram_gb": positive,
    "num_ctx": _at_least_one,
    "preload": texts,
    "role": _role,
    "price": _price,
    "retries": partial(whole, at_least=0),
    **_CONNECTION_READERS,
}
_PROVIDER_READERS: Readers = {
    "name": _node_name,
    "endpoint": web_url,
    "api_key": secret,
    "api_key_env": text,
    "model": _model_name,
    "models": texts,
    "price": _price,
    **_BUDGET_READERS,
    "requests_per_minute": _at_least_one,
    "tokens_per_minute": _at_least_one,
    **_CONNECTION_READERS,
}
_KEY_READERS: Readers = {
    "key": secret,
    "weight": partial(whole, at_least=1, at_most=WEIGHT_MAX),
    "priority": _priority,
}
_QUEUE_READERS: Readers = {
    "queue_size": partial(whole, at_least=1),
    "queue_timeout": seconds,
    "priority": _priority,
    "keep_alive_after": seconds_or_never,
}
_ROUTE_READERS: Readers = {
    "local": _model_name,
    "cloud": _cloud_name,
    "local_only": flag,
    "num_ctx": _at_least_one,
    "spill_after_ms": positive,
    **_QUEUE_READERS,
    **_BUDGET_READERS,
}


def _read(entry: Mapping[Any, Any], readers: Readers) -> dict[str, Any]:
    """Reads an object key by key. A key with null is as good as absent."""
    values = {}
    for key, value in entry.items():
        if key not in readers:
            hint = did_you_mean(str(key), readers) or f"; the keys are {', '.join(readers)}"
            raise ValueError(f"unknown key {shown(key)}{hint}")
        if value is not None:
            try:
                values[key] = readers[key](value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    return values


def local_node(entry: object) -> NodeSpec:
    """Reads one entry of LOCAL_NODES. It may be nameless still."""
    if isinstance(entry, str):
        return NodeSpec(url=web_url(entry))
    if not isinstance(entry, Mapping):
        raise ValueError(f"{shown(entry)} is neither a URL nor an object with a url")
    values = _read(entry, _NODE_READERS)
    if "url" not in values:
        raise ValueError("has no url")
    _check_trust(values)
    if values.get("health_check") is False and not (values.get("kind") and values.get("models")):
        raise ValueError("health_check false needs kind and models, as nobody asks the node for them")
    return NodeSpec(**values)


def _cloud_provider(entry: object) -> CloudProvider:
    if not isinstance(entry, Mapping):
        raise ValueError("is not an object with endpoint and api_key or api_key_env")
    values = _read(entry, _PROVIDER_READERS)
    if "endpoint" not in values:
        raise ValueError("has no endpoint")
    if "api_key" in values and "api_key_env" in values:
        raise ValueError("has both api_key and api_key_env; give one")
    _check_trust(values)
    rate = Rate(values.pop("requests_per_minute", None), values.pop("tokens_per_minute", None))
    return CloudProvider(**_with_budget(values), rate=rate if any(rate) else None)


def _api_key(entry: object) -> ApiKey:
    if isinstance(entry, ApiKey):
        return entry
    if not isinstance(entry, Mapping):
        return ApiKey(secret(entry))
    if not _KEY_READERS.keys() >= entry.keys():  # not shown: it may be the secret
        raise ValueError(f"has something else than {', '.join(_KEY_READERS)}")
    values = _read(entry, _KEY_READERS)
    if "key" not in values:
        raise ValueError("has no key")
    return ApiKey(values.pop("key"), **values)


def _check_trust(values: Mapping[str, Any]) -> None:
    if "ca_file" in values and not values.get("tls_verify", True):
        raise ValueError("ca_file is not read while tls_verify is false; remove one of them")


def _with_budget(values: dict[str, Any]) -> dict[str, Any]:
    """With `budget` for what was written of it."""
    limit, period = values.pop("budget_usd", None), values.pop("budget_period", None)
    if limit is None and period is not None:
        raise ValueError("has a budget_period and no budget_usd")
    return values if limit is None else {**values, "budget": Budget(limit, period or Period.MONTH)}


def _route(pattern: object, target: object) -> RouteSpec:
    try:
        name = text(pattern)
        if isinstance(target, Mapping):
            return _detailed_route(name, target)
        if isinstance(target, str):
            return RouteSpec(name, local=_model_name(target))
        raise ValueError(f"{shown(target)} is neither a model's name nor an object with {', '.join(_ROUTE_READERS)}")
    except ValueError as error:
        raise ValueError(f"{shown(pattern)}: {error}") from None


def _detailed_route(name: str, target: Mapping[Any, Any]) -> RouteSpec:
    values = _with_budget(_read(target, _ROUTE_READERS))
    waiting = [values.pop(key, None) for key in _QUEUE_READERS]
    cloud_off = "cloud" in target and values.get("cloud") is None
    route = RouteSpec(name, **values, cloud_off=cloud_off, queue=QueueRules(*waiting))
    if route.local_only and route.cloud is not None:
        raise ValueError("local_only excludes a cloud model; remove one of them")
    return route
