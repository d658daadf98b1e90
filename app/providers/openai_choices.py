"""Puts right, in an answer's decoded choices, what some engines do in another way than OpenAI. Sans-I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.domain import Failure, Timings, Usage
from app.errors import NodeFailure

Fields = dict[str, Any]

# Reasons by which an engine says that it gave up: such an answer is not complete, whatever it looks like.
_BROKEN_OFF = frozenset({"error", "abort"})
_CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


class Choices:
    """Repairs the choices of one answer, events or document, and remembers how they ended."""

    def __init__(
        self,
        finish_reasons: Mapping[str, str],
        *,
        calls_end_with_stop: bool = False,
        both_reasoning_names: bool = False,
    ) -> None:
        self._finish_reasons = finish_reasons
        self._calls_end_with_stop = calls_end_with_stop
        self._both_reasoning_names = both_reasoning_names
        self._numbering: dict[int, _CallNumbers] = {}
        self._calls_repaired = False
        self._calls_continued = False
        self.finished: dict[int, str] = {}  # the reason by choice

    @property
    def finish_reason(self) -> str | None:
        return next(iter(self.finished.values()), None)

    @property
    def called_tools(self) -> bool:
        return bool(self._numbering)

    @property
    def continues_calls_well(self) -> bool:
        """The node has streamed a piece of a call that had begun before, and no call of it had to be repaired."""
        return self._calls_continued and not self._calls_repaired

    def repair(self, choices: list[Any]) -> bool:
        """Changes the choices in place where that is needed; False when it was not.

        Raises `NodeFailure` when the node says that it gave up, or when a choice is no object.
        """
        changed = False
        for choice in choices:
            if not isinstance(choice, dict):
                raise NodeFailure(Failure.MALFORMED, "the node sent a choice that is no object")
            changed |= self._repair(choice)
        return changed

    def finish_all(self, choices: list[Any]) -> bool:
        """Gives every choice of a whole document the reason for its end that some engines leave out."""
        open_ended = [choice for choice in choices if not choice.get("finish_reason")]
        for choice in open_ended:
            message = choice.get("message")
            called = isinstance(message, dict) and message.get("tool_calls")
            index = choice.get("index")
            reason = "tool_calls" if called else "stop"
            choice["finish_reason"] = self.finished[index if isinstance(index, int) else 0] = reason
        return bool(open_ended)

    def _repair(self, choice: Fields) -> bool:
        index = choice.get("index")
        place = index if isinstance(index, int) else 0
        changed = False
        delta, message = choice.get("delta"), choice.get("message")
        if isinstance(delta, dict):
            changed = self._repair_message(delta, place, streamed=True)
        elif isinstance(message, dict):
            changed = self._repair_message(message, place, streamed=False)
        return self._finish(choice, place) or changed

    def _repair_message(self, message: Fields, place: int, *, streamed: bool) -> bool:
        changed = False
        if self._both_reasoning_names and "reasoning_content" not in message and message.get("reasoning"):
            message["reasoning_content"] = message["reasoning"]
            changed = True
        if message.get("tool_calls"):
            changed |= self._repair_calls(message, place, streamed=streamed)
        return changed

    def _repair_calls(self, message: Fields, place: int, *, streamed: bool) -> bool:
        numbers = self._numbering.setdefault(place, _CallNumbers())
        repaired = _put_calls_right(message, numbers if streamed else None)
        self._calls_repaired |= repaired
        self._calls_continued |= not all(map(_has_name, message["tool_calls"]))
        return repaired

    def _finish(self, choice: Fields, place: int) -> bool:
        reason = choice.get("finish_reason")
        if not isinstance(reason, str) or not reason:
            return False
        if reason in _BROKEN_OFF:
            raise NodeFailure(Failure.ERROR_EVENT, f"the node broke its answer off (finish_reason {reason})")
        known = self._finish_reasons.get(reason, reason)
        if known == "stop" and self._calls_end_with_stop and place in self._numbering:
            known = "tool_calls"
        self.finished[place] = known
        choice["finish_reason"] = known
        return known != reason


class _CallNumbers:
    """Gives the tool calls of one choice the numbers 0, 1, 2, in the order in which they begin.

    Engines are known that give 0 to every call, or no number at all; clients then glue the arguments together.
    Others make up a new id for every piece of one call, so that only an id together with a name begins a call.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, int] = {}
        self._by_index: dict[int, int] = {}
        self._count = 0

    def number(self, call: Fields) -> int:
        identity, index = call.get("id"), call.get("index")
        known = self._known(identity, index, _has_name(call))
        if known is None:
            known = self._count
            self._count += 1
        if isinstance(identity, str) and identity:
            self._by_id[identity] = known
        if isinstance(index, int):
            self._by_index[index] = known
        return known

    def _known(self, identity: Any, index: Any, named: bool) -> int | None:
        """The number of the call that this is a piece of; None when a new one begins."""
        if isinstance(identity, str) and identity in self._by_id:
            return self._by_id[identity]
        begins = named and bool(identity)
        if isinstance(index, int):
            return None if begins else self._by_index.get(index)
        return None if named or not self._count else self._count - 1


def _has_name(call: Fields) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and bool(function.get("name"))


def _put_calls_right(message: Fields, numbers: _CallNumbers | None) -> bool:
    """Also undoes what old versions of TGI do: one call without a list, and arguments that are no text."""
    calls, changed = message["tool_calls"], False
    if isinstance(calls, dict):
        message["tool_calls"] = calls = [calls]
        changed = True
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise NodeFailure(Failure.MALFORMED, "the node sent tool calls of an unknown form")
    for call in calls:
        if numbers is not None and call.get("index") != (number := numbers.number(call)):
            call["index"] = number
            changed = True
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = orjson.dumps(function["arguments"]).decode()
            changed = True
    return changed


def holds_content(choices: list[Any]) -> bool:
    """Whether these choices of a stream give the client something, if only the end."""
    for choice in choices:
        if choice.get("finish_reason") or choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta.get(key) for key in _CONTENT):
            return True
    return False


def encoded(document: Fields) -> bytes:
    """The JSON of an answer that was changed. Raises `NodeFailure` when it is nested too deeply to be written."""
    try:
        return orjson.dumps(document)
    except TypeError as error:
        raise NodeFailure(Failure.MALFORMED, "the node sent an answer that is nested too deeply") from error


def usage_in(document: Fields) -> Usage | None:
    """The token counts; None when the node gives none."""
    counts = document.get("usage")
    if not isinstance(counts, dict):
        return None
    prompt, completion = _count(counts, "prompt_tokens"), _count(counts, "completion_tokens")
    if prompt is None and completion is None:
        return None
    return Usage(prompt or 0, completion or 0, min(_cached(counts), prompt or 0))


def timings_in(document: Fields) -> Timings | None:
    """What llama.cpp says of its speed, in milliseconds; None when the node says nothing."""
    told = document.get("timings")
    if not isinstance(told, dict):
        return None
    prefill, decode = _seconds(told, "prompt_ms"), _seconds(told, "predicted_ms")
    if not (prefill or decode):
        return None
    return Timings(None, prefill, decode, _count(told, "prompt_n"), _count(told, "cache_n"))


def _seconds(told: Fields, key: str) -> float | None:
    value = told.get(key)
    return value / 1000 if isinstance(value, (int, float)) and value > 0 else None


def _cached(counts: Fields) -> int:
    details = counts.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    # DeepSeek's name for it.
    return cached or _count(counts, "prompt_cache_hit_tokens") or 0


def _count(counts: Fields, key: str) -> int | None:
    value = counts.get(key)
    return value if type(value) is int and value >= 0 else None
