"""The command line's flags: each setting's name with dashes, and those that `lmdeploy serve proxy` has."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from app.setting_values import did_you_mean, is_flag, shown

SSL = "ssl"  # a flag without a setting: it demands a certificate, which settings name
_ALIASES = {
    "server_name": "host",
    "server_port": "port",
    "routing_strategy": "lb_strategy",
    "strategy": "lb_strategy",  # what LMDeploy called it until 0.8
}


def read(
    argv: Sequence[str], settings: Collection[str], *, switches: Collection[str], lists: Collection[str]
) -> dict[str, str]:
    """What each flag sets: `--port 9000` or `--port=9000`; the last one wins. Raises ValueError.

    `switches` need no value, but may have one (`--ssl no`). `lists` take all values up to the next flag.
    """
    found = {}
    rest = deque(argv)
    while rest:
        flag, equals, value = rest.popleft().partition("=")
        name = _setting(flag, settings)
        if name in lists:
            value = ",".join(filter(None, (value, *_until_next_flag(rest))))
        elif not equals and (name in switches or name == SSL):
            value = rest.popleft() if rest and is_flag(rest[0]) else "true"
        elif not equals:
            value = _value(flag, rest)
        found[name] = value
    return found


def _setting(flag: str, settings: Collection[str]) -> str:
    written = flag.removeprefix("--").lower().replace("-", "_")
    name = _ALIASES.get(written, written)
    if flag.startswith("--") and (name in settings or name == SSL):
        return name
    known = [f"--{name.replace('_', '-')}" for name in (*settings, *_ALIASES, SSL)]
    raise ValueError(f"{shown(flag)} is not a flag{did_you_mean(flag, known)}")


def _value(flag: str, rest: deque[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise ValueError(f"{flag} needs a value")
    return rest.popleft()


def _until_next_flag(rest: deque[str]) -> list[str]:
    taken = []
    while rest and not rest[0].startswith("--"):
        taken.append(rest.popleft())
    return taken
