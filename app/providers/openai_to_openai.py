"""Passes OpenAI requests and answers on to nodes that speak OpenAI's API too. Sans-I/O.

What the client sent reaches the node byte for byte, unknown fields and all. Only what the node would choke on, what
could turn it against others, and the model's name are changed; nothing is added but the wish for a stream's usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from app.domain import Operation
from app.errors import InvalidRequest
from app.providers.base import Answer, Call, Outgoing
from app.providers.json_splice import sole_member
from app.providers.openai_choices import Choices
from app.providers.openai_document import Embeddings, Generation
from app.providers.openai_stream import EventStream

# Never a client's business: where a request goes and with which key, and the private talk of nodes that share a
# generation. An engine that finds the latter hands its cache out, or fetches another's.
PRIVATE_FIELDS: Final = frozenset(
    {
        "api_base",
        "api_key",
        "base_url",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "custom_llm_provider",
        "kv_transfer_params",
        "migration_request",
        "preserve_cache",
        "with_cache",
    }
)

PATHS: Final = {
    Operation.CHAT: "/v1/chat/completions",
    Operation.COMPLETION: "/v1/completions",
    Operation.EMBEDDING: "/v1/embeddings",
}

_REQUIRED = frozenset({"model", "messages", "prompt", "input"})
_NEW_LIMIT, _OLD_LIMIT = "max_completion_tokens", "max_tokens"
_LIMITS = frozenset({_NEW_LIMIT, _OLD_LIMIT})
_ASK_USAGE = b'"stream_options":{"include_usage":true}'
_GONE: Final = object()


@dataclass(frozen=True, slots=True)
class Traits:
    """Where a kind of node differs from OpenAI's own API."""

    usage_on_request: bool = True  # it takes stream_options {"include_usage": true}
    takes_null: bool = True  # a null is to it what an absent field is
    dropped: frozenset[str] = frozenset()  # fields that it refuses, and that change nothing in the answer
    refused_defaults: Mapping[str, object] = field(default_factory=dict)  # fields that it refuses even at this value
    old_limit: bool = False  # it knows max_tokens only
    new_limit_models: re.Pattern[str] | None = None  # models that refuse max_tokens
    finish_reasons: Mapping[str, str] = field(default_factory=dict)  # its reasons, where they are not OpenAI's
    calls_end_with_stop: bool = False  # it says "stop" after tool calls too


class Requests:
    """Writes a client's requests for one kind of node."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits
        self._removed = PRIVATE_FIELDS | traits.dropped
        self._watched = self._removed | traits.refused_defaults.keys() | {"tool_choice"}
        if traits.old_limit:
            self._watched |= {_NEW_LIMIT}
        if traits.new_limit_models is not None:
            self._watched |= {_OLD_LIMIT}

    def translate(self, call: Call) -> Outgoing:
        """The request for the node. Its body is the client's own, the very object, when nothing has to change."""
        request = call.request
        body = request.body
        path = PATHS[request.operation]
        if changes := self._changes(call):
            return Outgoing(path, _rewritten(call, changes))
        if call.model != request.model:
            body = _renamed(call)
        if self._asks_usage(call) and "stream_options" not in request.fields:
            start = body.index(b"{") + 1
            body = body[:start] + _ASK_USAGE + b"," + body[start:]
        return Outgoing(path, body)

    def _asks_usage(self, call: Call) -> bool:
        return call.request.stream and self._traits.usage_on_request

    def _changes(self, call: Call) -> dict[str, Any]:
        """New values of top-level fields."""
        fields = call.request.fields
        changes = self._repairs(call)
        if self._asks_usage(call) and (changes or "stream_options" in fields):
            changes.update(_usage_options(fields))
        return changes

    def _repairs(self, call: Call) -> dict[str, Any]:
        """Those for which the node would refuse the request. The two tests come first as most requests end there."""
        fields = call.request.fields
        nulls = not self._traits.takes_null and None in fields.values()
        if not nulls and self._watched.isdisjoint(fields) and call.output_limit is None:
            return {}
        changes = {name: _GONE for name, value in fields.items() if self._unwanted(name, value, fields)}
        changes.update(self._limit(call))
        return changes

    def _unwanted(self, name: str, value: Any, fields: Mapping[str, Any]) -> bool:
        if value is None:
            return name in self._removed or not (self._traits.takes_null or name in _REQUIRED)
        if name == "tool_choice" and not fields.get("tools"):
            return True
        refused = self._traits.refused_defaults
        return name in self._removed or (name in refused and refused[name] == value)

    def _limit(self, call: Call) -> dict[str, Any]:
        """The token limit under the name that the node knows. Of two limits, max_completion_tokens holds."""
        fields = call.request.fields
        name = self._limit_name(call.model)
        if call.output_limit is not None and not any(fields.get(limit) for limit in _LIMITS):
            return {**dict.fromkeys(_LIMITS & fields.keys(), _GONE), name or _OLD_LIMIT: call.output_limit}
        if name is None or _LIMITS.isdisjoint(fields) or _LIMITS & fields.keys() == {name}:
            return {}
        given = (fields.get(_NEW_LIMIT), fields.get(_OLD_LIMIT))
        limit = next((value for value in given if value is not None), _GONE)
        return {**dict.fromkeys(_LIMITS, _GONE), name: limit}

    def _limit_name(self, model: str) -> str | None:
        """None when the node knows both."""
        if self._traits.old_limit:
            return _OLD_LIMIT
        models = self._traits.new_limit_models
        return _NEW_LIMIT if models is not None and models.search(model) else None


def _usage_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the node count, with the client's other options kept. Options of a wrong form are left to the node."""
    options = fields.get("stream_options")
    if options is None:
        return {"stream_options": {"include_usage": True}}
    if not isinstance(options, dict) or options.get("include_usage") is True:
        return {}
    return {"stream_options": {**options, "include_usage": True}}


def _renamed(call: Call) -> bytes:
    """The client's body with the node's name for the model spliced in, when it is clear where that belongs."""
    body = call.request.body
    member = sole_member(body, b'"model"')
    if member is None or orjson.loads(body[member.value : member.end]) != call.request.model:
        return _rewritten(call, {})
    return body[: member.value] + orjson.dumps(call.model) + body[member.end :]


def _rewritten(call: Call, changes: Mapping[str, Any]) -> bytes:
    """The body encoded anew. Raises `InvalidRequest` when it is nested too deeply for that."""
    request = call.request
    try:
        if holds_giant(request.fields.values()):
            fields = json.loads(request.body)
            _apply(fields, call.model, changes)
            return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        fields = dict(request.fields)
        _apply(fields, call.model, changes)
        return orjson.dumps(fields)
    except (TypeError, RecursionError) as error:
        raise InvalidRequest("the request body is nested too deeply") from error


def _apply(fields: dict[str, Any], model: str, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is _GONE:
            fields.pop(name, None)
        else:
            fields[name] = value
    fields["model"] = model


def holds_giant(values: Iterable[Any]) -> bool:
    """Whether a number is so large that it may have been an integer which orjson could not hold, and rounded."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, float) and abs(value) >= 2**63:
            return True
    return False


def answer(call: Call, traits: Traits) -> Answer:
    """Reads the node's answer to one call."""
    request = call.request
    if request.operation is Operation.EMBEDDING:
        return Embeddings(request)
    choices = Choices(
        traits.finish_reasons,
        calls_end_with_stop=traits.calls_end_with_stop,
        both_reasoning_names=call.reasoning_content,
    )
    if not request.stream:
        return Generation(request, choices)
    return EventStream(request, choices, both_reasoning_names=call.reasoning_content)
