"""A prompt as it stands in a span, where the operator wants it there. Bounded, and without pictures and sound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from app.domain import Request

_CHARACTERS = 32_768  # of all texts together
_MESSAGES = 1000


def input_messages(request: Request) -> str:
    """JSON in the form of `gen_ai.input.messages`: `[{"role": ..., "parts": [{"type": "text", "content": ...}]}]`."""
    left, told = _CHARACTERS, list[dict[str, Any]]()
    for role, content in _messages(request):
        if left <= 0 or len(told) == _MESSAGES:
            break
        parts = []
        for part in _parts(content):
            text = part.get("content", "")
            if text:
                part["content"] = text[:left]
                left -= len(text)
            parts.append(part)
        told.append({"role": role, "parts": parts})
    return orjson.dumps(told).decode()


def _messages(request: Request) -> Iterator[tuple[str, Any]]:
    """Role and content. Nothing is sure of a client's body but that it is JSON."""
    messages = request.fields.get("messages")
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                yield str(message.get("role", "user")), message.get("content")
        return
    for name in ("prompt", "input"):
        if name in request.fields:
            given = request.fields[name]
            for content in given if isinstance(given, list) else [given]:
                yield "user", content


def _parts(content: Any) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    if not isinstance(content, list):
        return []
    return [_part(part) for part in content if isinstance(part, dict)]


def _part(part: dict[str, Any]) -> dict[str, str]:
    """A text, or only the name of what else it is."""
    text = part.get("text")
    if isinstance(text, str):
        return {"type": "text", "content": text}
    return {"type": str(part.get("type", "unknown"))}
