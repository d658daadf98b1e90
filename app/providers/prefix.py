"""How an answer that has begun elsewhere is gone on with: what each kind wants to be told. Sans-I/O.

The text so far stands in the request as the start of the answer: in a chat as a last message of the assistant, which
the node must leave open, and in a completion at the end of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

from app.domain import NodeSpec, Operation, Request
from app.providers.base import Kind, Prefix
from app.providers.openai_to_openai import holds_giant
from app.providers.written import Written

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "num_predict")
_KWARGS: Final = "chat_template_kwargs"
# What makes an answer more than free text. Such an answer is one piece, or a constraint on the whole of it.
_SHAPED: Final = (
    *("format", "grammar", "json_schema", "structured_outputs", "regex", "ebnf", "audio", "echo"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "structural_tag"),
)


_FLAGS: Final = {"continue_final_message": True, "add_generation_prompt": False}
_NO_THINKING: Final = {"enable_thinking": False, "thinking": False}

# What operators may say of a node.
PREFIXES: Final[Mapping[str, Prefix | None]] = {
    "last": Prefix(by_itself=True),
    "continue_final_message": Prefix(fields=_FLAGS),
    "prefix": Prefix(message={"prefix": True}),
    "partial": Prefix(message={"partial": True}),
    "off": None,
}

OLLAMA: Final = Prefix(
    by_itself=True,
    fields={"think": False, "reasoning": None, "reasoning_effort": None},
    reasoning=("reasoning",),
)
VLLM: Final = Prefix(fields=_FLAGS, reasoning=("reasoning", "reasoning_content"))
SGLANG: Final = Prefix(fields=_FLAGS, no_thinking=_NO_THINKING)
LMDEPLOY: Final = Prefix(by_itself=True, fields=_FLAGS, no_thinking=_NO_THINKING)
# Versions before it knew the flags went on by themselves, and refused to where the template can think.
LLAMACPP: Final = Prefix(by_itself=True, fields=_FLAGS, no_thinking={"enable_thinking": False}, always=True)


def prefix_of(kind: Kind, spec: NodeSpec) -> Prefix | None:
    """How this node is told to go on with a chat; None when it does not know how."""
    return kind.prefix(spec.url) if spec.prefix is None else PREFIXES[spec.prefix]


def goes_on(kind: Kind, spec: NodeSpec, operation: Operation) -> bool:
    """Whether the node can go on with an answer that another one began."""
    if operation is Operation.CHAT:
        return prefix_of(kind, spec) is not None
    return spec.prefix != "off" and (kind.continues_prompts or spec.prefix is not None)


def why_not(request: Request) -> str | None:
    """Why nobody else could go on with the answer to this request; None when somebody may."""
    fields = request.fields
    if request.operation is Operation.EMBEDDING or not request.stream:
        return "it is no stream of text"
    if _above_one(fields.get("n")) or _above_one(fields.get("best_of")):
        return "several answers were asked for"
    if _wants_logprobs(fields):
        return "logprobs were asked for"
    wanted = fields.get("response_format")
    if isinstance(wanted, Mapping) and wanted.get("type", "text") != "text":
        return "the answer has a schema"
    shaped = next((name for name in _SHAPED if fields.get(name)), None)
    if shaped is not None:
        return f"the request has {shaped}"
    if (fields.get("tools") or fields.get("functions")) and _forced(fields):
        return "the answer has to be a tool call"
    if request.operation is Operation.COMPLETION and _prompt(fields) is None:
        return "the prompt is not one text"
    return None


def _above_one(value: object) -> bool:
    return type(value) is int and value > 1


def _wants_logprobs(fields: Mapping[str, Any]) -> bool:
    logprobs = fields.get("logprobs")
    return bool(logprobs) or (type(logprobs) is int) or bool(fields.get("top_logprobs"))


def _forced(fields: Mapping[str, Any]) -> bool:
    choices = (fields.get("tool_choice"), fields.get("function_call"))
    return any(choice == "required" or isinstance(choice, Mapping) for choice in choices)


def _prompt(fields: Mapping[str, Any]) -> str | None:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


def opens_last_message(request: Request, prefix: Prefix | None) -> bool | None:
    """Whether the answer to a chat went on with the client's own last message; None where that cannot be told."""
    messages = request.fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return False
    goes_on = (prefix is not None and prefix.by_itself) or request.fields.get("continue_final_message") is True
    return True if goes_on and isinstance(last.get("content"), str) else None


def tokens_left(request: Request, written: int) -> int | None:
    """How many more tokens the client allows, after so many; None where it set no limit. May be below zero."""
    fields = request.fields
    limit = fields.get("max_completion_tokens")
    limit = fields.get("max_tokens") if limit is None else limit
    return limit - written if type(limit) is int and limit > 0 else None


def going_on(request: Request, written: Written, *, merges: bool, prefix: Prefix | None = None) -> Request:
    """The request for the rest of the answer; with `prefix` in the words of one kind, else in those of all.

    With `merges` the text is added to the client's own last message, of which it is the rest.
    """
    changes = _limits(request.fields, written.tokens)
    if request.operation is Operation.CHAT:
        changes["messages"] = _messages(request, written, merges, prefix)
        if prefix is not None and (written.begins or merges):
            changes.update(prefix.fields)
        if prefix is not None and prefix.no_thinking and (prefix.always or written.reasoning):
            changes[_KWARGS] = {**_object(request.fields, _KWARGS), **prefix.no_thinking}
    else:
        changes["prompt"] = (_prompt(request.fields) or "") + written.text
    return _replaced(request, changes)


def _messages(request: Request, written: Written, merges: bool, prefix: Prefix | None) -> list[Any]:
    messages = list(request.fields["messages"])
    if not (written.begins or merges):
        return messages
    last: dict[str, Any] = {"role": "assistant", "content": written.start}
    if merges:
        client = messages.pop()
        last = {**client, "content": client["content"] + written.start}
    if prefix is not None:
        last.update(prefix.message)
        if written.reasoning:
            last.update(dict.fromkeys(prefix.reasoning, written.reasoning))
    return [*messages, last]


def _limits(fields: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in _LIMITS:
        if type(fields.get(name)) is int and fields[name] > 0:
            changes[name] = max(1, fields[name] - tokens)
    if type(fields.get("min_tokens")) is int:
        changes["min_tokens"] = max(0, fields["min_tokens"] - tokens)
    options = _object(fields, "options")
    if type(options.get("num_predict")) is int and options["num_predict"] > 0:
        changes["options"] = {**options, "num_predict": max(1, options["num_predict"] - tokens)}
    return changes


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def _replaced(request: Request, changes: Mapping[str, Any]) -> Request:
    fields = {**request.fields, **changes}
    if holds_giant(request.fields.values()):
        body = json.dumps({**json.loads(request.body), **changes}, ensure_ascii=False).encode()
    else:
        body = orjson.dumps(fields)
    return request._replace(fields=fields, body=body)
