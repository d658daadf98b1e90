"""How many tokens a request may have, where nobody has counted them.

Nothing here is exact. `*_at_most` err upwards, for what is reserved; the estimator errs to both sides, for what is
written down when an answer ended without its usage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.domain import Operation, Request, Usage

_TEXTS = ("messages", "prompt", "input", "suffix")
_SCHEMAS = ("tools", "functions", "response_format")  # models read these as JSON
_UNSEEN = ("type", "role")
_IMAGES = frozenset({"image_url", "input_image"})
_ATTACHMENTS = frozenset({"input_audio", "audio_url", "file", "input_file", "video_url"})
_MESSAGE_TOKENS = 8  # what a chat template puts around a message
_IMAGE_TOKENS, _IMAGE_TOKENS_MOST = 1_000, 3_000
# A second of sound has 10 to 30 tokens, and 5,300 characters of base64 at 32 kbit/s.
_ATTACHMENT_CHARACTERS, _ATTACHMENT_CHARACTERS_LEAST = 256, 64
_BYTES, _BYTES_LEAST = 4.0, 2  # of text per token
_CHOICES_MAX = 1_000
_LIMIT_MAX = 10_000_000  # no model writes more, and what a client writes may not grow into any sum of money

_UNKNOWN = (_BYTES, 0)  # bytes per token, and answers seen
_MODELS_MAX = 1_000
_WEIGHT = 0.2
_PROMPT_TOKENS_LEAST = 32  # below, templates weigh more than text
_FIRST, _EVERY = 8, 16  # answers to learn from: the first few, then one of so many
_RATIO_LEAST, _RATIO_MOST = 0.5, 16.0


@dataclass(slots=True)
class _Size:
    """What a request consists of."""

    messages: int = 0
    text_bytes: int = 0
    tokens: int = 0  # prompts may come as tokens
    images: int = 0
    attachments: int = 0
    attachment_characters: int = 0

    @property
    def text_alone(self) -> bool:
        return not (self.tokens or self.images or self.attachments)


def prompt_at_most(request: Request) -> int:
    """Tokens that the prompt will hardly exceed."""
    size = _size(request)
    attached = size.attachments * _IMAGE_TOKENS_MOST + size.attachment_characters // _ATTACHMENT_CHARACTERS_LEAST
    text = -(-size.text_bytes // _BYTES_LEAST)
    return text + size.tokens + size.images * _IMAGE_TOKENS_MOST + attached + (size.messages + 1) * _MESSAGE_TOKENS


def completion_at_most(request: Request, default: int) -> int:
    """Tokens that all answers to the request may have together, where one without a limit has `default` at most."""
    if request.operation is Operation.EMBEDDING:
        return 0
    fields = request.fields
    limits = [fields.get("max_completion_tokens"), fields.get("max_tokens")]
    limit = max((_whole(each, _LIMIT_MAX) for each in limits if each is not None), default=0) or default
    # The best of so many is found by writing them all.
    choices = max(_whole(fields.get("n"), _CHOICES_MAX), _whole(fields.get("best_of"), _CHOICES_MAX), 1)
    return limit * choices * _prompts(request)


def _prompts(request: Request) -> int:
    """How many prompts a completion has: a list of texts or of lists of tokens has several."""
    prompt = request.fields.get("prompt")
    if request.operation is not Operation.COMPLETION or not isinstance(prompt, list) or not prompt:
        return 1
    return 1 if isinstance(prompt[0], int) else len(prompt)


def _whole(value: object, most: int) -> int:
    """0 for what is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        return 0
    return int(min(value, most))


class TokenEstimator:
    """Learns, from answers that were counted, how many bytes of text a token of each model has."""

    def __init__(self) -> None:
        self._ratios: dict[str, tuple[float, int]] = {}  # bytes per token, and how many answers were seen

    def learn(self, request: Request, usage: Usage) -> None:
        """Takes note of an answer's count, if it is one to learn from. Cheap for the others."""
        model = request.model
        ratio, seen = self._ratios.get(model, _UNKNOWN)
        if usage.prompt_tokens >= _PROMPT_TOKENS_LEAST and (seen < _FIRST or seen % _EVERY == 0):
            size = _size(request)
            if size.text_alone and size.text_bytes:
                measured = size.text_bytes / max(usage.prompt_tokens - size.messages * _MESSAGE_TOKENS, 1)
                measured = min(max(measured, _RATIO_LEAST), _RATIO_MOST)
                ratio = measured if seen == 0 else ratio + _WEIGHT * (measured - ratio)
        elif not seen:
            return
        if not seen and model not in self._ratios and len(self._ratios) >= _MODELS_MAX:
            del self._ratios[next(iter(self._ratios))]
        self._ratios[model] = ratio, seen + 1

    def estimate_prompt(self, request: Request) -> int:
        """About how many tokens the prompt has."""
        size = _size(request)
        attached = size.attachments * _IMAGE_TOKENS + size.attachment_characters // _ATTACHMENT_CHARACTERS
        text = self.estimate_text(request.model, size.text_bytes)
        return text + size.tokens + size.images * _IMAGE_TOKENS + attached + size.messages * _MESSAGE_TOKENS

    def estimate_text(self, model: str, text_bytes: int) -> int:
        """About how many tokens so many bytes of text are; a model that is not known has 4 bytes a token."""
        return round(text_bytes / self._ratios.get(model, _UNKNOWN)[0])


def _size(request: Request) -> _Size:
    size = _Size()
    messages = request.fields.get("messages")
    if isinstance(messages, list):
        size.messages = len(messages)
    # A list, not recursion: bodies may be nested deeper than Python's stack.
    waiting: list[Any] = [request.fields[name] for name in _TEXTS if name in request.fields]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size.text_bytes += _bytes(value)
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            for key, part in value.items():
                if key in _IMAGES:
                    size.images += 1
                elif key in _ATTACHMENTS:
                    _attach(size, part)
                elif isinstance(part, str):
                    size.text_bytes += _bytes(part) if key not in _UNSEEN else 0
                elif isinstance(part, (dict, list)):
                    waiting.append(part)
        elif isinstance(value, int) and not isinstance(value, bool):
            size.tokens += 1
    size.text_bytes += sum(_json_bytes(request.fields[name]) for name in _SCHEMAS if name in request.fields)
    return size


def _json_bytes(document: object) -> int:
    """About how long the document is as JSON."""
    length = 0
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            length += _bytes(value) + 3
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            length += sum(map(_bytes, value)) + 5 * len(value)
            waiting += value.values()
        else:
            length += 6
    return length


def _attach(size: _Size, part: object) -> None:
    size.attachments += 1
    values = part.values() if isinstance(part, dict) else (part,)
    size.attachment_characters += sum(len(value) for value in values if isinstance(value, str))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
