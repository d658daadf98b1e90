"""Changes members of JSON objects, with integers of any size kept as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from app.errors import InvalidRequest
from app.providers.openai_to_openai import holds_giant

GONE: Final = object()


def edited(body: bytes, changes: Mapping[str, Any]) -> bytes:
    """A JSON object with these members put in or, where GONE, taken out.

    Raises `InvalidRequest` when it is nested too deeply to be written anew.
    """
    fields = orjson.loads(body)
    write: Callable[[Any], bytes] = orjson.dumps
    try:
        if holds_giant([fields]):
            fields, write = json.loads(body), _exactly
        for name, value in changes.items():
            if value is GONE:
                fields.pop(name, None)
            else:
                fields[name] = value
        return write(fields)
    except (TypeError, RecursionError) as error:
        raise InvalidRequest("the request body is nested too deeply") from error


def decoded(text: bytes) -> Any:
    """Raises ValueError when the text is no JSON, RecursionError when it is nested too deeply."""
    value = orjson.loads(text)
    return json.loads(text) if holds_giant([value]) else value


def encoded(value: Any) -> bytes:
    """Raises RecursionError when the value is nested too deeply."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or more depth than orjson writes
        return _exactly(value)


def _exactly(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
