"""How engines go on with an answer that has begun: the last message of a chat, if it is an assistant's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

TWO_FLAGS = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."


class Refused(Exception):
    """Why the engine answers 400."""


class Start(NamedTuple):
    """The text that the answer begins with; `thinks` says that the engine thinks once more before it goes on."""

    text: str = ""
    thinks: bool = False


def never(body: Mapping[str, Any], thinking: bool) -> Start:
    """A last message of the assistant is a turn like any other, and the next one begins."""
    return Start()


def when_flagged(body: Mapping[str, Any], thinking: bool) -> Start:
    """vLLM. The template puts the thoughts that came along before the text, or an empty place for them."""
    _check_flags(body)
    return Start(_last(body)) if body.get("continue_final_message") else Start()


def after_the_prompt(body: Mapping[str, Any], thinking: bool) -> Start:
    """SGLang: the text is added to the prompt as it is, after what the template begins an answer with."""
    return Start(_last(body), thinking) if body.get("continue_final_message") else Start()


def by_itself(body: Mapping[str, Any], thinking: bool) -> Start:
    """LMDeploy: whoever ends with the assistant's words wants more of them."""
    return Start(_last(body), thinking)


def llamacpp(body: Mapping[str, Any], thinking: bool) -> Start:
    """As `by_itself`, but strict; and as old versions have it, not with a template that thinks."""
    text = _last(body)
    _check_flags(body)
    if not text:
        return Start()
    if len(body["messages"]) > 1 and body["messages"][-2].get("role") == "assistant":
        raise Refused("Cannot have 2 or more assistant messages at the end of the list.")
    if thinking:
        raise Refused("Assistant response prefill is incompatible with enable_thinking.")
    return Start(text)


def when_marked(body: Mapping[str, Any], thinking: bool) -> Start:
    """Clouds that want `prefix` with the message."""
    return Start(_last(body)) if body["messages"][-1].get("prefix") else Start()


def _check_flags(body: Mapping[str, Any]) -> None:
    if body.get("continue_final_message") and body.get("add_generation_prompt", True):
        raise Refused(TWO_FLAGS)


def _last(body: Mapping[str, Any]) -> str:
    last = body["messages"][-1]
    return str(last.get("content") or "") if last.get("role") == "assistant" else ""
