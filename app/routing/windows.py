"""How much fits into a candidate's context, and whether a prompt is surely too long for it.

Only the node can count tokens. What is estimated here decides who is asked first, and never that nobody is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.domain import Operation, Request
from app.routing.registry import Candidate

# A prompt of this size fits everywhere: it is not looked at.
SHORT_BODY_BYTES = 4096
# English text has four characters a token, code three, Chinese one or two: with so many it is fewer tokens for sure.
_CHARACTERS_PER_TOKEN = 8
_FIELDS: Mapping[Operation, str] = {Operation.COMPLETION: "prompt", Operation.EMBEDDING: "input"}


def window(candidate: Candidate, num_ctx: int | None) -> int | None:
    """Tokens of the context that a request meets there; None when not known. `num_ctx` is the route's."""
    node, model = candidate.node, candidate.model
    loaded = node.loaded.get(model) if node.loaded else None
    used = loaded.context_length if loaded else None
    if node.kind is not None and node.kind.takes_num_ctx:
        used = num_ctx or node.spec.num_ctx or used
    info = candidate.info
    most = info.context_length if info else None
    return min(used, most) if used and most else used or most


def least_tokens(request: Request) -> int:
    """The longest prompt of the request has at least so many tokens. Images and tools are not counted."""
    fields = request.fields
    if request.operation is Operation.CHAT:
        messages = (message for message in fields["messages"] if isinstance(message, dict))
        return sum(_characters(message.get("content")) for message in messages) // _CHARACTERS_PER_TOKEN
    return _longest(fields.get(_FIELDS[request.operation]))


def _longest(value: Any) -> int:
    """Of a prompt, or of several that are served one by one; a list of numbers is a prompt in tokens."""
    if not isinstance(value, list):
        return _characters(value) // _CHARACTERS_PER_TOKEN
    if value and isinstance(value[0], int):
        return len(value)
    return max(map(_longest, value), default=0)


def _characters(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else []
    return sum(len(part["text"]) for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
