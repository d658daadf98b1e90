"""Single values as people write them: times, numbers, lists, URLs, keys.

Each reader takes text, or what YAML or JSON made of it, and returns the value or raises ValueError. Its message shows
what was written, unless that may be a secret, and says what is allowed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_UP, Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

_SHOWN_CHARACTERS = 60
_DOLLARS_MAX = 1_000_000_000  # their micro-dollars fit into 64 bits, and many of them do
_TIME = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s|m|min|h)?", re.IGNORECASE)
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_HOST = re.compile(r"[\w.:%-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"(sk-)?(change[-_ ]?me|replace[-_ ]?me|your[-_ ].*|<.*>|x{3,}|\*+|.*\.\.\.|todo|placeholder|example)",
    re.IGNORECASE,
)


def shown(value: object) -> str:
    """The value as a message shows it: on one line, and cut when long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the empty string when nothing is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def text(value: object) -> str:
    """Printable text on one line, without blanks around it."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not text; put it in quotes")
    stripped = value.strip()
    if not stripped or not stripped.isprintable():
        raise ValueError(f"{shown(value)} is not text on one line")
    return stripped


def number(value: object, *, above: float | None = None, at_least: float | None = None) -> float:
    """A finite number within the limit."""
    wanted = "a number" + (f" above {above:g}" if above is not None else "")
    wanted += f" of at least {at_least:g}" if at_least is not None else ""
    try:
        parsed = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    too_low = (above is not None and parsed <= above) or (at_least is not None and parsed < at_least)
    if not math.isfinite(parsed) or too_low:
        raise ValueError(f"{shown(value)} is not {wanted}")
    return parsed


def positive(value: object) -> float:
    """A number above 0."""
    return number(value, above=0)


def whole(value: object, *, at_least: int, at_most: int | None = None, hint: str = "") -> int:
    """A whole number within the limits. `hint` is said in addition when it is not."""
    limits = f"from {at_least} to {at_most}" if at_most is not None else f"of at least {at_least}"
    try:
        parsed = number(value, at_least=at_least)
    except ValueError:
        parsed = math.nan
    if not parsed.is_integer() or (at_most is not None and parsed > at_most):
        raise ValueError(f"{shown(value)} is not a whole number {limits}" + (f"; {hint}" if hint else ""))
    return int(parsed)


def dollars(value: object) -> float:
    """A number of dollars."""
    parsed = number(value, at_least=0)
    if parsed > _DOLLARS_MAX:
        raise ValueError(f"{shown(value)} is more dollars than {_DOLLARS_MAX}")
    return parsed


def micro_dollars(value: object) -> int:
    """Whole micro-dollars of what `dollars` reads; the least is 1, so that only 0 is nothing."""
    written = Decimal(repr(dollars(value)))  # its shortest decimal form, which is what was written
    return int((written * 1_000_000).to_integral_value(ROUND_UP))


def share(value: object) -> float:
    """A part of a whole: above 0, and 1 at most."""
    parsed = positive(value)
    if parsed > 1:
        raise ValueError(f"{shown(value)} is not a share such as 0.8, of 1 at most")
    return parsed


def shares(value: object) -> tuple[float, ...]:
    """A list of shares, each once and the smallest first."""
    return tuple(sorted({share(entry) for entry in entries(value)}))


def seconds(value: object) -> float:
    """A time above 0: a number of seconds, or one with a unit (500ms, 30s, 10m, 2h)."""
    match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if match is None:
            return positive(value)
        return positive(float(match[1]) * _UNIT_SECONDS[(match[2] or "s").lower()])
    except ValueError:
        raise ValueError(f"{shown(value)} is not a time above 0; write seconds (90) or 500ms, 30s, 10m, 2h") from None


def seconds_or_never(value: object) -> float:
    """A time as `seconds` reads it, or 0 for never, which may also be written as off."""
    if value is False or value in (0, "0") or (isinstance(value, str) and value.strip().lower() == "off"):
        return 0.0
    return seconds(value)


def choice(value: object, allowed: Sequence[str], aliases: Mapping[str, str] | None = None) -> str:
    """One of `allowed`, in any case and with `-` for `_`."""
    wanted = value.strip().lower().replace("-", "_") if isinstance(value, str) else ""
    wanted = (aliases or {}).get(wanted, wanted)
    for option in allowed:
        if option.lower() == wanted:
            return option
    raise ValueError(f"{shown(value)} is not one of {', '.join(allowed)}{did_you_mean(wanted, allowed)}")


def flag(value: object) -> bool:
    """A yes or no in any of the usual forms."""
    if is_flag(value):
        return str(value).strip().lower() in _TRUE
    raise ValueError(f"{shown(value)} is not true or false (also 1/0, yes/no, on/off)")


def is_flag(value: object) -> bool:
    """Whether `flag` would take it."""
    return str(value).strip().lower() in (*_TRUE, *_FALSE)


def from_json(document: str) -> Any:
    """The decoded JSON. Neither shown when it is broken, for it may hold keys, nor taken when a key is given twice."""
    try:
        return json.loads(document, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("is not valid JSON: too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice")
    return found


def entries(value: object) -> list[Any]:
    """A list: from YAML, as JSON, or as text with commas. An object alone is a list of one; empty parts are dropped."""
    if isinstance(value, str):
        stripped = value.strip()
        value = from_json(stripped) if stripped.startswith(("[", "{")) else re.split(r"[,\s]+", stripped)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"is not a list: write a JSON list, or values with commas between them, not a {_type(value)}")
    return [entry for entry in value if entry not in ("", None)]


def texts(value: object) -> tuple[str, ...]:
    """A list of texts, as `entries` reads it."""
    return tuple(text(entry) for entry in entries(value))


def secret(value: object) -> str:
    """A key: printable ASCII without blanks, as it must fit into a header, and no placeholder. Never shown."""
    if not isinstance(value, str):
        raise ValueError("the key is not text; put it in quotes")
    stripped = value.strip()
    if not stripped or not stripped.isascii() or not stripped.isprintable() or " " in stripped:
        raise ValueError("the key is not printable ASCII text without blanks")
    if _PLACEHOLDER.fullmatch(stripped):
        raise ValueError("the key is a placeholder; use a real one")
    return stripped


def secrets(value: object) -> tuple[str, ...]:
    """A list of keys, each once."""
    return tuple(dict.fromkeys(numbered("key", secret, entries(value))))


def numbered(noun: str, read: Callable[[Any], T], values: Iterable[Any]) -> list[T]:
    """What `read` makes of each value; its complaints say which one it was: `node 2: ...`."""
    result = []
    for position, value in enumerate(values, 1):
        try:
            result.append(read(value))
        except ValueError as error:
            raise ValueError(f"{noun} {position}: {error}") from None
    return result


def web_url(value: object) -> str:
    """An http(s) URL without user name, query or trailing slash; its scheme and host in lower case."""
    written = text(value)
    safe = _shown_url(written)
    try:
        parts = urlsplit(written)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError(f"{safe} is not a URL: its host or port is wrong") from None
    if parts.scheme not in ("http", "https"):
        example = f"http://{written}" if "://" not in written and "@" not in written else "http://localhost:11434"
        raise ValueError(f"{safe} is not an http:// or https:// URL, such as {example}")
    if "@" in parts.netloc:
        raise ValueError(f"{safe} holds a user name or password; remove it; keys have a place of their own")
    if not _HOST.fullmatch(host) or port == 0:
        raise ValueError(f"{safe} is not a URL: its host or port is wrong")
    if "?" in written or "#" in written:
        raise ValueError(f"{safe} must end before the ? or #")
    netloc = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{netloc}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"


def _shown_url(written: str) -> str:
    """Passwords stand before an @, and keys in a query."""
    start, at, rest = written.rpartition("@")
    visible = f"...@{rest}" if at else start + rest
    return shown(re.split(r"[?#]", visible, maxsplit=1)[0])


def origin(value: object) -> str:
    """A web origin, `null`, or `*` for all."""
    written = text(value).rstrip("/")
    if written in ("*", "null") or _ORIGIN.fullmatch(written):
        return written.lower()
    raise ValueError(f"{shown(value)} is not an origin such as https://chat.example.org, nor * for all")


def host(value: object) -> str:
    """An address to listen on: a name or an IP address, without scheme or port."""
    written = text(value)
    bare = written.removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(bare) or (bare.count(":") == 1):
        raise ValueError(f"{shown(value)} is not an address to listen on, such as 127.0.0.1 or 0.0.0.0, without a port")
    return bare


def file(value: object) -> Path:
    """A file that is there."""
    path = value if isinstance(value, Path) else Path(text(value)).expanduser()
    if not os.path.isfile(path):  # unlike Path.is_file, it is False for a folder that may not be read
        raise ValueError(f"{shown(str(path))} is no file that exists")
    return path


def _type(value: object) -> str:
    return {int: "number", float: "number", bool: "true or false"}.get(type(value), type(value).__name__)
