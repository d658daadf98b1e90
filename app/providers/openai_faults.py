"""What engines that speak OpenAI's API mean by their errors: is the request wrong, or the node? Sans-I/O.

They agree on neither the shape nor the words, so that all known ones are understood here, whatever the kind.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from app.domain import Failure
from app.errors import NodeFailure, RequestRefused

MESSAGE_CHARACTERS = 1000
OVERFLOW_CODE = "context_length_exceeded"

_REASON_CHARACTERS = 300  # of a node's message in the reason for a failure, several of which may go into one error
_RETRY_AFTER_SECONDS_MAX = 24 * 3600.0
_REFUSED_KEY = "the node did not accept its key; check the node's api_key"
_NO_CREDIT = "the account behind the node's api_key has no credit or quota left"

# The texts of vLLM, SGLang, TGI, LMDeploy, llama.cpp, LM Studio, Ollama and the larger clouds.
_OVERFLOW = re.compile(
    r"maximum (context|model|prompt) length"
    r"|(exceeds?|(longer|greater|larger) than|too (long|large) for) ((the|this|model|model's|available|maximum) )*"
    r"context (length|size|window|limit)"
    r"|`inputs` (tokens \+ `max_new_tokens` must be|must have less than)"
    r"|inputs tokens \+ max_new_tokens must be"
    r"|context[ _](length|window|size)[ _]exceeded"
    r"|context the overflows"
    r"|prompt is too long"
    r"|(input )?token count .{0,40}exceeds the (maximum|model)"
    r"|reduce the length of the (messages|prompt|input)",
    re.I,
)
_ABOUT_KEY = re.compile(
    r"\b(incorrect|invalid|missing|expired|revoked)\b.{0,20}\bapi[ _-]?key\b"
    r"|\bapi[ _-]?key\b.{0,40}\b(incorrect|invalid|missing|expired|revoked|not valid|not found)\b",
    re.I,
)
_KEY_CODES = frozenset({"invalid_api_key", "authentication_error", "permission_error"})
_CREDIT_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached", "insufficient_credits"})
_MISSING_CODES = frozenset({"model_not_found"})
_BUSY_CODES = frozenset({"overloaded", "overloaded_error", "server_overloaded", "unavailable_error"})
_REQUEST_TYPES = frozenset({"invalid_request_error", "badrequesterror", "validation", "template_error", "tool_error"})
_REQUEST_STATUSES = frozenset({400, 413, 422})
# 424 is how TGI reports a generation that failed, 499 how some engines report one that was cancelled: by somebody
# else, as nobody reads the answer once our own client has left.
_NODE_STATUSES = frozenset({408, 409, 424, 425, 499})
_NOT_COUNTED = frozenset({499, 501})  # 501: the engine was started without this ability; it is not broken


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as a node put it. The message is at most 1,000 characters long."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None
    status: int | None = None  # that the error itself names, which is not always that of the answer

    @property
    def overflow(self) -> bool:
        """The prompt does not fit into the model's context."""
        if self.code == OVERFLOW_CODE or self.type == "exceed_context_size_error":
            return True
        return _OVERFLOW.search(self.message) is not None

    @property
    def about_key(self) -> bool:
        """The node refused Hearth's own key, whatever the status says."""
        return self._is_one_of(_KEY_CODES) or _ABOUT_KEY.search(self.message) is not None

    @property
    def about_credit(self) -> bool:
        return self._is_one_of(_CREDIT_CODES)

    @property
    def about_model(self) -> bool:
        return self._is_one_of(_MISSING_CODES)

    @property
    def busy(self) -> bool:
        return self._is_one_of(_BUSY_CODES)

    @property
    def blames_request(self) -> bool:
        """For an error without an HTTP status of its own: every node would refuse the request for this."""
        if self.overflow:
            return True
        if self.status is not None:
            return self.status in _REQUEST_STATUSES
        return (self.type or "").lower() in _REQUEST_TYPES

    def reason(self, otherwise: str) -> str:
        """The node's words, short enough to stand among others."""
        return self.message[:_REASON_CHARACTERS] or otherwise

    def _is_one_of(self, codes: frozenset[str]) -> bool:
        return self.code in codes or self.type in codes


def fault_in(document: Any) -> Fault | None:
    """The error that a decoded document or event holds; None when it holds none."""
    if isinstance(document, list) and len(document) == 1:
        document = document[0]  # Google wraps its errors so
    if not isinstance(document, dict):
        return None
    error = document.get("error")
    if error:
        return _wrapped(error, document)
    if document.get("object") == "error":
        return _fault(document)
    if "choices" in document or "data" in document:
        return None
    if "error_code" in document or "detail" in document or isinstance(document.get("message"), str):
        return _fault(document)
    return None


def event_error(document: Any, *, begun: bool) -> Exception | None:
    """The exception for an error in an answer with status 200. Once there was content, the request was not wrong."""
    fault = fault_in(document)
    if fault is None:
        return None
    if fault.about_key:
        return NodeFailure(Failure.AUTH, _REFUSED_KEY, status=fault.status)
    if fault.blames_request and not begun:
        status = fault.status or (422 if fault.type == "validation" else 400)
        return _refused(fault, status)
    busy = fault.busy or fault.status in (429, 503, 529)
    reason = fault.reason("the node reported an error without saying which")
    return NodeFailure(Failure.ERROR_EVENT, reason, status=fault.status, counts=not busy)


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """The exception for an answer whose status is not 200: `RequestRefused` when the request was wrong.

    An account without credit counts like a refused key: no retry helps before its owner acts, so that the breaker
    may keep requests away. The node's words about keys stay out: they may repeat the key.
    """
    fault = _read(body)
    match status:
        case 401 | 403 | 407:
            return NodeFailure(Failure.AUTH, _REFUSED_KEY, status=status)
        case 402:
            return NodeFailure(Failure.AUTH, _NO_CREDIT, status=status)
        case 429 if fault.about_credit:
            return NodeFailure(Failure.AUTH, _NO_CREDIT, status=status)
        case 429 | 503 | 529:
            return _busy(fault, status, headers)
        case 400 if fault.about_key:
            return NodeFailure(Failure.AUTH, _REFUSED_KEY, status=status)
    if fault.overflow and status >= 400:
        return _refused(fault, status if status < 500 else 400)
    if status in (404, 405) or (400 <= status < 500 and fault.about_model):
        reason = fault.reason(f"the node answered {status}: it has not this model or path")
        return NodeFailure(Failure.MODEL_MISSING, reason, status=status)
    if 400 <= status < 500 and status not in _NODE_STATUSES:
        return _refused(fault, status)
    if status >= 500 and fault.busy:
        return _busy(fault, status, headers)
    return _broken(fault, status)


def _busy(fault: Fault, status: int, headers: Mapping[str, str]) -> NodeFailure:
    wait = retry_after_seconds(headers, time.time())
    reason = fault.reason(f"the node answered {status}")
    return NodeFailure(Failure.BUSY, reason, status=status, retry_after_seconds=wait)


def _broken(fault: Fault, status: int) -> NodeFailure:
    if status < 400:
        place = "a redirect; set the node's URL to where it leads" if status >= 300 else f"status {status}"
        return NodeFailure(Failure.MALFORMED, f"the node answered with {place}", status=status)
    reason = fault.reason(f"the node answered {status} without saying why")
    return NodeFailure(Failure.SERVER_ERROR, reason, status=status, counts=status not in _NOT_COUNTED)


def _refused(fault: Fault, status: int) -> RequestRefused:
    return RequestRefused(
        fault.message or f"the node refused the request with status {status}",
        status=status,
        type=fault.type,
        param=fault.param,
        code=OVERFLOW_CODE if fault.overflow else fault.code,
    )


# -- reading


def _read(body: bytes) -> Fault:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Fault(_plain_text(body))
    return fault_in(document) or Fault(_text(document))


def _plain_text(body: bytes) -> str:
    """A body that is no JSON. Of a web page, which a proxy in front of the node sends, nothing is worth repeating."""
    text = body[: 4 * MESSAGE_CHARACTERS].decode("utf-8", "replace").strip()
    return "" if text.startswith("<") else text[:MESSAGE_CHARACTERS]


def _wrapped(error: Any, document: Mapping[str, Any]) -> Fault:
    if isinstance(error, dict):
        return _fault(error)
    if isinstance(error, str):
        return _fault({**document, "message": error})
    return _fault(document)  # LMDeploy's proxy: {"error": true, "status": ..., "message": ...}


def _fault(fields: Mapping[str, Any]) -> Fault:
    return Fault(
        _message(fields),
        type=_first_text(fields, "type", "error_type"),
        param=_first_text(fields, "param"),
        code=_code(fields.get("code")),
        status=_status(fields),
    )


def _message(fields: Mapping[str, Any]) -> str:
    text = _first_text(fields, "message", "text", "msg")
    if text is None:
        text = _detail(fields.get("detail"))
    return text.strip()[:MESSAGE_CHARACTERS]


def _detail(detail: Any) -> str:
    """FastAPI's `detail`: a text, or a list of what is wrong where. What the client sent is not repeated."""
    if isinstance(detail, list):
        return "; ".join(_complaint(entry) for entry in detail[:5] if isinstance(entry, dict))
    if isinstance(detail, dict):
        return _text(detail.get("message") or detail.get("error"))
    return _text(detail)


def _complaint(entry: Mapping[str, Any]) -> str:
    place = entry.get("loc")
    where = ".".join(map(str, place)) + ": " if isinstance(place, list) and place else ""
    return where + _text(entry.get("msg"))


def _text(value: Any) -> str:
    return value.strip()[:MESSAGE_CHARACTERS] if isinstance(value, str) else ""


def _first_text(fields: Mapping[str, Any], *names: str) -> str | None:
    return next((value for name in names if isinstance(value := fields.get(name), str) and value), None)


def _code(value: Any) -> str | None:
    """A code in words. Many engines repeat the status here, which says nothing more."""
    return value if isinstance(value, str) and value and not value.isdigit() else None


def _status(fields: Mapping[str, Any]) -> int | None:
    for name in ("code", "status", "http_status_code", "status_code"):
        value = fields.get(name)
        if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdigit():
            value = int(value)
        if type(value) is int and 400 <= value < 600:
            return value
    return None


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """How long the node asks to wait, by `retry-after-ms` or by `retry-after`: a number or a date. `now`: Unix time."""
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return _sensible(milliseconds / 1000)
    value = headers.get("retry-after", "")
    seconds = _number(value)
    if seconds is not None:
        return _sensible(seconds)
    until = _unix_time(value)
    if until is None:
        return None
    # The node counts by its own clock, which it shows in `date`.
    return _sensible(until - (_unix_time(headers.get("date", "")) or now))


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _unix_time(value: str) -> float | None:
    try:
        return parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _sensible(seconds: float) -> float:
    return min(max(seconds, 0.0), _RETRY_AFTER_SECONDS_MAX)
