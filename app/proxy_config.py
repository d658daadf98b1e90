"""LMDeploy's `proxy_config.json`, so that nodes which its proxy knew need not register again: they do so only once.

It holds an object: each key is a node's URL, each value its status, as JSON within a string or plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from app.domain import Role
from app.setting_values import from_json, positive, shown

ROLES = {1: Role.HYBRID, 2: Role.PREFILL, 3: Role.DECODE}


def recognised(document: object) -> bool:
    """Whether the document may be such a file. An empty one is what is left when all nodes were removed."""
    return isinstance(document, Mapping) and all(key.startswith(("http://", "https://")) for key in document)


def node_entry(url: str, value: object, warn: Callable[[str], None]) -> dict[str, Any]:
    """The node as LOCAL_NODES would have it, and its `latencies`. Raises ValueError.

    `unfinished` is left out: requests do not survive a restart.
    """
    status = from_json(value) if isinstance(value, str) else value
    if not isinstance(status, Mapping):
        raise ValueError("its status is not an object")
    if "models" in status and not isinstance(status["models"], list):
        # LMDeploy wrote null for a node that refused to list its models, and could not start again with that.
        raise ValueError(f"models: {shown(status['models'])} is not a list")
    return {
        "url": url,
        "models": status.get("models", []),
        "role": role(status.get("role", 1)),
        "speed": _speed(status.get("speed"), warn),
        "latencies": status.get("latency", []),
    }


def role(value: object) -> Role:
    """LMDeploy's number for a role, or its name."""
    written = str(value).strip().lower()
    for number, found in ROLES.items():
        if not isinstance(value, bool) and written in (str(number), found):
            return found
    raise ValueError(f"role: {shown(value)} is not 1 (hybrid), 2 (prefill) or 3 (decode)")


def _speed(value: object, warn: Callable[[str], None]) -> float | None:
    if value is None:
        return None
    try:
        return positive(value)
    except ValueError as error:
        warn(f"speed: {error}; it counts as unknown")
        return None
