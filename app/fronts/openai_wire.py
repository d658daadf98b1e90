"""OpenAI's forms: what a request must hold, and how an error looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import orjson

from app.domain import Operation
from app.errors import HearthError, InvalidRequest, NodeFailure

_MODEL_CHARACTERS = 512


def error_document(error: HearthError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_headers(error: HearthError) -> list[tuple[bytes, bytes]]:
    """What every answer with this error says besides."""
    headers = [(b"x-hearth-error-source", error.source.encode())]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_seconds))))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def error_event(failure: NodeFailure) -> bytes:
    """The end of a stream that broke after it had begun: an error that no client takes for a whole answer."""
    error = {
        "message": f"the answer was cut short: {failure.message}",
        "type": "server_error",
        "param": None,
        "code": failure.failure.value,
    }
    return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"


def refusal_event(error: HearthError) -> bytes:
    """The end of a stream for which nothing but comments was sent."""
    return b"data: " + orjson.dumps(error_document(error)) + b"\n\ndata: [DONE]\n\n"


def decode(body: bytes) -> dict[str, Any]:
    """The body as an object. Raises `InvalidRequest`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return fields


def check(operation: Operation, fields: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for what no node could serve; the rest of the fields is the node's to judge."""
    model = fields.get("model")
    if not isinstance(model, str) or not model.strip():
        raise _missing("model", "a model's name", model)
    if len(model) > _MODEL_CHARACTERS:
        raise InvalidRequest(f"'model' is longer than {_MODEL_CHARACTERS} characters", param="model")
    if not isinstance(fields.get("stream"), bool | None):
        raise InvalidRequest("'stream' must be true or false", param="stream")
    if not isinstance(fields.get("stream_options"), dict | None):
        raise InvalidRequest("'stream_options' must be an object", param="stream_options")
    _CHECKS[operation](fields)


def _check_messages(fields: Mapping[str, Any]) -> None:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise _missing("messages", "a list of messages", messages)
    if not messages:
        raise InvalidRequest("'messages' must not be empty", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{index}] must be an object", param=f"messages[{index}]")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequest(f"messages[{index}].role must be a string", param=f"messages[{index}].role")


def _check_prompt(fields: Mapping[str, Any]) -> None:
    prompt = fields.get("prompt")
    if not isinstance(prompt, str | list) or prompt == []:
        raise _missing("prompt", "a string or a list", prompt)


def _check_input(fields: Mapping[str, Any]) -> None:
    given = fields.get("input")
    if not isinstance(given, str | list) or given == []:
        raise _missing("input", "a string or a list that is not empty", given)


def _missing(param: str, wanted: str, given: object) -> InvalidRequest:
    said = "is missing" if given is None else "has the wrong type or is empty"
    return InvalidRequest(f"'{param}' {said}; it must be {wanted}", param=param)


_CHECKS: Mapping[Operation, Callable[[Mapping[str, Any]], None]] = {
    Operation.CHAT: _check_messages,
    Operation.COMPLETION: _check_prompt,
    Operation.EMBEDDING: _check_input,
}
