"""When two model names mean the same: Ollama's names, wildcards, and names that were meant.

Ollama's grammar is `[host[:port]/][namespace/]model[:tag]`; what is left out has a default, case does not matter, and
`:cloud` or `-cloud` at the end sends the request on to ollama.com.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

CLOSE_NAMES_MAX = 3
_COMPARED_CHARACTERS = 100  # names come from clients, and comparing costs the square of their length
_COMPARED_NAMES = 200
_WILDCARD = "*"
_CLOUD_ENDING = "-cloud"

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")


class Source(StrEnum):
    """Where a name says that its model runs."""

    UNSPECIFIED = "unspecified"
    LOCAL = "local"
    CLOUD = "cloud"


@dataclass(frozen=True, slots=True)
class OllamaName:
    """A model's name with all its parts, in the case in which it was written."""

    host: str
    namespace: str
    model: str
    tag: str
    source: Source = Source.UNSPECIFIED

    @property
    def full(self) -> str:
        """Every part, without what says where it runs."""
        return f"{self.host}/{self.namespace}/{self.model}:{self.tag}"

    @property
    def display(self) -> str:
        """As Ollama lists it: without default host and namespace, always with the tag."""
        short = f"{self.model}:{self.tag}"
        if self.host.lower() != DEFAULT_HOST:
            return self.full
        return short if self.namespace.lower() == DEFAULT_NAMESPACE else f"{self.namespace}/{short}"


def parse(name: str) -> OllamaName | None:
    """The parts of a name as Ollama reads it; None when Ollama would refuse it."""
    split = split_source(name)
    if split is None:
        return None
    rest, source = split
    tag = DEFAULT_TAG
    if rest.rfind(":") > rest.rfind("/"):
        rest, _, tag = rest.rpartition(":")
    path, slash, model = rest.rpartition("/")
    host, namespace = _host_and_namespace(path) if slash else (DEFAULT_HOST, DEFAULT_NAMESPACE)
    valid = (
        _HOST.fullmatch(host) and _NAMESPACE.fullmatch(namespace) and _PART.fullmatch(model) and _PART.fullmatch(tag)
    )
    return OllamaName(host, namespace, model, tag, source) if valid else None


def _host_and_namespace(path: str) -> tuple[str, str]:
    host, slash, namespace = path.rpartition("/")
    return (host.rpartition("://")[2] if slash else DEFAULT_HOST), namespace


def split_source(name: str) -> tuple[str, Source] | None:
    """The name without its ending `:cloud`, `-cloud` or `:local`, and what that said; None when there are two."""
    name = name.strip()
    base, source = _cut_source(name)
    if source is not Source.UNSPECIFIED and _cut_source(base)[1] is not Source.UNSPECIFIED:
        return None
    return base, source


def _cut_source(name: str) -> tuple[str, Source]:
    base, colon, ending = name.rpartition(":")
    if not colon or "/" in ending:
        return name, Source.UNSPECIFIED
    match ending.strip().lower():
        case Source.CLOUD.value:
            return base, Source.CLOUD
        case Source.LOCAL.value:
            return base, Source.LOCAL
        case lowered if lowered.endswith(_CLOUD_ENDING):
            return name[: -len(_CLOUD_ENDING)], Source.CLOUD
    return name, Source.UNSPECIFIED


def canonical(name: str) -> str | None:
    """`host/namespace/model:tag` in lower case, equal for names that mean the same model; None for no Ollama name.

    A cloud name keeps `-cloud` at the end: whoever asks for the local model must not be given the one that leaves
    the house.
    """
    parsed = parse(name)
    if parsed is None:
        return None
    return parsed.full.lower() + (_CLOUD_ENDING if parsed.source is Source.CLOUD else "")


def display(name: str) -> str | None:
    """The name as Ollama lists it, or None for no Ollama name."""
    parsed = parse(name)
    return None if parsed is None else parsed.display


def matches(pattern: str, name: str) -> bool:
    """Whether the name is the pattern, in which `*` stands for any characters or none. Case does not matter."""
    pattern, name = pattern.lower(), name.lower()
    if _WILDCARD not in pattern:
        return pattern == name
    # Not a regular expression: with several wildcards its time would grow with a power of the name's length.
    first, *middle, last = pattern.split(_WILDCARD)
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    position, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return True


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that may have been meant: those that only go on longer, then those spelt alike."""
    asked = name.strip().lower()[:_COMPARED_CHARACTERS]
    if not asked:
        return []
    by_lower = {known_name.lower(): known_name for known_name in sorted(known)}
    longer = sorted((other for other in by_lower if other.startswith(asked)), key=len)
    alike = get_close_matches(asked, list(by_lower)[:_COMPARED_NAMES], n=CLOSE_NAMES_MAX)
    return [by_lower[found] for found in dict.fromkeys([*longer, *alike])][:CLOSE_NAMES_MAX]
