"""What Ollama means by its errors: whether the request was wrong or the node broke. Sans-I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from app.domain import Failure
from app.errors import NodeFailure, RequestRefused

MAX_TEXT_CHARACTERS = 1000

# "request (302 tokens) exceeds the available context size", "the prompt is longer than the context length ...",
# "the input length exceeds the context length".
_OVERFLOW = re.compile(r"(exceed|longer than|too (long|large)).*context (length|size|window)|exceed_context_size", re.I)
# Ollama answers 500 to these, but no other node would answer better.
_WRONG_REQUEST = re.compile(r'^option "|^invalid format\b|invalid JSON schema|failed to parse grammar', re.I)
# /api/embed answers 400 to everything that it did not foresee, a crashed runner too.
_TRANSPORT = re.compile(
    r"^(do embedding request|error reading embed response|unexpected server status|"
    r"llama-server process no longer running)",
    re.I,
)
_MODEL_MISSING = re.compile(r"\bmodel\b.*\bnot found\b", re.I)


@dataclass(frozen=True, slots=True)
class Complaint:
    """An error as a node put it."""

    text: str
    code: int | None = None  # llama-server's, when its error came wrapped in Ollama's
    sign_in: bool = False  # it concerns Ollama's cloud, not this node

    @property
    def overflow(self) -> bool:
        """The prompt does not fit into the model's context."""
        return _OVERFLOW.search(self.text) is not None

    @property
    def blames_request(self) -> bool:
        """Every node would refuse the request for this."""
        return self.overflow or self.code == 400 or _WRONG_REQUEST.search(self.text) is not None

    def refusal(self, status: int = 400) -> RequestRefused:
        """The error for the client, who has to change the request."""
        if not self.overflow:
            return RequestRefused(self.text, status=status)
        param = "input" if "input length" in self.text else "messages"
        return RequestRefused(self.text, status=status, param=param, code="context_length_exceeded")


def complaint(document: Any) -> Complaint:
    """Reads an error document, or the `error` of a line. Its text is at most 1,000 characters long."""
    if not isinstance(document, dict):
        return Complaint(_bounded(document))
    error = document.get("error")
    status = document.get("Status")
    if isinstance(status, str) and isinstance(error, str):
        # The form that errors take which came from a remote host.
        return Complaint(_bounded(f"{status}: {error}"))
    text, code = _unwrapped(error if error is not None else document.get("message"))
    return Complaint(_bounded(text), code, "signin_url" in document)


def _unwrapped(error: Any) -> tuple[Any, int | None]:
    """The text and code of an error, which may be llama-server's own JSON in a string."""
    inner = _json(error) if isinstance(error, str) else error
    if isinstance(inner, dict) and isinstance(inner.get("error"), dict):
        inner = inner["error"]
    if not isinstance(inner, dict) or not isinstance(inner.get("message"), str):
        return error, None
    code = inner.get("code")
    return inner["message"], code if isinstance(code, int) else None


def _json(text: str | bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _bounded(text: Any) -> str:
    return text.strip()[:MAX_TEXT_CHARACTERS] if isinstance(text, str) else ""


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """The exception for an answer whose status is not 200: `RequestRefused` when the request was wrong."""
    said = _read(status, body)
    match status:
        case 401 | 403:
            return _no_access(status, said)
        case 429 | 503:
            wait = _retry_after_seconds(headers)
            return NodeFailure(Failure.BUSY, said.text, status=status, retry_after_seconds=wait)
        case 404 if _MODEL_MISSING.search(said.text):
            return NodeFailure(Failure.MODEL_MISSING, said.text, status=status)
        case 404 | 405:
            # Ollama has the path, so this is another server, or one too old to have it.
            return _broken(status, f"{said.text} (is the node an up-to-date Ollama?)")
        case 408 | 409 | 425:
            return _broken(status, said.text)
        case 499:
            # "Request canceled": the caller left, says the node. Had our client left, nobody would read this; so
            # something on the way gave up, and another node may do better. No fault of the node's engine.
            return NodeFailure(Failure.SERVER_ERROR, said.text, status=status, counts=False)
        case 400 if _TRANSPORT.search(said.text):
            return _broken(status, said.text)
        case 500 if said.blames_request:
            return said.refusal()
    return said.refusal(status) if 400 <= status < 500 else _broken(status, said.text)


def _read(status: int, body: bytes) -> Complaint:
    document = _json(body)
    said = complaint(document if document is not None else _plain_text(body))
    return said if said.text else Complaint(f"the node answered {status} without saying why", sign_in=said.sign_in)


def _plain_text(body: bytes) -> str:
    """A body that is no JSON comes from a proxy in front of the node. Of an HTML page nothing is worth repeating."""
    text = body[: 4 * MAX_TEXT_CHARACTERS].decode("utf-8", "replace").strip()
    return "" if text.startswith("<") else text


def _broken(status: int, text: str) -> NodeFailure:
    failure = Failure.SERVER_ERROR if status >= 400 else Failure.MALFORMED
    return NodeFailure(failure, text, status=status)


def _no_access(status: int, said: Complaint) -> NodeFailure:
    """401 and 403 are about this node's settings, not about the request, so that another node may well serve it.

    The node's own words stay out: they may repeat the key, or hold the link that signs the node in. When only Ollama's
    cloud refuses, the node's local models still work, and the breaker is not told.
    """
    cloud = said.sign_in or "ollama cloud" in said.text.lower()
    if cloud:
        remedy = "the node may not use Ollama's cloud; sign in on the node, or ask for a local model"
    elif status == 401:
        remedy = "the node did not accept its key; check the node's api_key"
    else:
        remedy = "the node refused access; check its OLLAMA_HOST and OLLAMA_ORIGINS, and the node's api_key"
    return NodeFailure(Failure.AUTH, remedy, status=status, counts=not cloud)


def _retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Whole seconds only; a date is not worth a clock here, as Ollama itself sends no Retry-After at all."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else None
