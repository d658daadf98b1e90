"""What a request asks of whichever node serves it: how much to read, how much to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from app.domain import Operation, Request

if TYPE_CHECKING:
    from app.routing.work import Seat

_CHAT = Operation.CHAT  # what is asked for mostly: to look it up costs more than to compare
_WHOLE_TEXT = 4096  # characters; of longer ones the two ends and the length are compared
_END = 1024
_IMAGE_CHARACTERS = 3000  # about as many tokens as engines make of a picture


class Job:
    """One request, as scheduling sees it. `chain` and `sizes` are digests and characters, a message each."""

    __slots__ = ("chain", "characters", "limit", "num_ctx", "operation", "seat", "since", "sizes", "stream", "wait_for")

    def __init__(self, request: Request) -> None:
        self.operation = operation = request.operation
        self.stream = request.stream
        self.limit = _limit(request.fields)
        self.chain: Sequence[int] = ()
        self.sizes: Sequence[int] = ()
        self.since = 0.0  # when it began to wait; 0 = it does not
        self.seat: Seat | None = None  # where it will probably go, while it waits
        self.wait_for = 0.0  # seconds that it will take there
        self.num_ctx: int | None = None  # of its route
        if operation is _CHAT:
            self.chain, self.sizes = _chain(request.fields)
            self.characters = sum(self.sizes)
        else:
            self.limit = 0 if operation is Operation.EMBEDDING else self.limit
            self.characters = _characters(request.fields.get("prompt") or request.fields.get("input"))


def _limit(fields: Mapping[str, Any]) -> int | None:
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    return limit if type(limit) is int and limit > 0 else None


def _chain(fields: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    messages = fields.get("messages")
    chain: list[int] = []
    sizes: list[int] = []
    digest = 0
    if fields.get("tools"):
        digest = hash(orjson.dumps(fields["tools"]))  # templates put them before everything else
    if not isinstance(messages, list):
        return chain, sizes
    for message in messages:
        try:
            role, text = message["role"], message["content"]
        except (KeyError, TypeError):
            role, text = (message.get("role"), message.get("content")) if type(message) is dict else (None, None)
        if type(text) is not str:
            text, size = _other(message)
        elif (size := len(text)) > _WHOLE_TEXT:
            text = _ends(text, size)
        digest = hash((digest, role, text))
        chain.append(digest)
        sizes.append(size + 8)  # what templates add to a message
    return chain, sizes


def _other(message: Any) -> tuple[str, int]:
    """Text that stands for a message of parts, pictures or tool calls, and its size."""
    try:
        text = orjson.dumps(message).decode()
    except (TypeError, UnicodeDecodeError):
        return "", 0
    pictures = text.count('"image_url"')
    size = min(len(text), pictures * _IMAGE_CHARACTERS + 2000) if pictures else len(text)
    return _ends(text, size) if size > _WHOLE_TEXT else text, size


def _ends(text: str, size: int) -> str:
    return f"{text[:_END]}{size}{text[-_END:]}"


def _characters(text: Any) -> int:
    if isinstance(text, str):
        return len(text)
    if isinstance(text, list):
        return sum(len(each) if isinstance(each, (str, list)) else 4 for each in text)
    return 0
