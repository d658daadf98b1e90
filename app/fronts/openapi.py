"""Documents the raw inference routes, which FastAPI cannot see into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_STRING: dict[str, Any] = {"type": "string"}
_MODEL = {
    "type": "string",
    "minLength": 1,
    "maxLength": 512,
    "pattern": r"[^\s\x1c-\x1f\x85]",  # what is blank to Python, and not to JSON Schema, is said by name
    "description": "One of GET /v1/models.",
}
_STREAM = {"type": ["boolean", "null"], "description": "Send the answer as server-sent events as it is made."}
_STREAM_OPTIONS = {
    "type": ["object", "null"],
    "properties": {"include_usage": {"type": ["boolean", "null"], "description": "Send a last chunk with usage."}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string", "minLength": 1}, "content": {}},
    "examples": [{"role": "user", "content": "Hi"}],
}
LOCAL_ONLY = {
    "name": "X-Hearth-Local-Only",
    "in": "header",
    "description": "`true` keeps this request on local nodes, whatever happens.",
    "schema": {"type": "string", "pattern": "^(true|false|1|0|yes|no|on|off)$", "examples": ["true"]},
}
PRIORITY = {
    "name": "X-Hearth-Priority",
    "in": "header",
    "description": (
        "Where requests wait for a node: `low` stands behind others. Nothing raises a request above the class of its "
        "key or name."
    ),
    "schema": {"type": "string", "enum": ["high", "normal", "low"]},
}
_ANSWER_HEADERS = {
    "X-Hearth-Queue-Ms": {
        "description": (
            "How many milliseconds the request waited for a free node; 0 = not at all. Missing, with all that names "
            "the node, where a stream was kept alive before its answer: then it is in a comment before the first event"
        ),
        "schema": {"type": "integer", "minimum": 0},
    }
}

_ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "Answer a conversation",
        {
            "required": ["model", "messages"],
            "properties": {
                "model": _MODEL,
                "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
                "stream": _STREAM,
                "stream_options": _STREAM_OPTIONS,
            },
        },
    ),
    "/v1/completions": (
        "Continue a text",
        {
            "required": ["model", "prompt"],
            "properties": {
                "model": _MODEL,
                "prompt": {"oneOf": [_STRING, {"type": "array", "minItems": 1}]},
                "stream": _STREAM,
                "stream_options": _STREAM_OPTIONS,
            },
        },
    ),
    "/v1/embeddings": (
        "Turn texts into vectors",
        {
            "required": ["model", "input"],
            "properties": {"model": _MODEL, "input": {"oneOf": [_STRING, {"type": "array", "minItems": 1}]}},
        },
    ),
}

ANY_REQUEST = {"type": "object", "anyOf": [{"additionalProperties": True, **body} for _, body in _ROUTES.values()]}

_ANSWER = (
    "The answer. A stream that was kept alive (KEEP_ALIVE_AFTER) has this status from its first comment on; if it "
    "fails then, its only event is an error as in the answers below, before `[DONE]`."
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ERRORS = {
    "400": "The request is wrong; `error.message` says how to mend it.",
    "401": "The API key is missing or wrong.",
    "403": "The request may not be served where it would have to be, or this is not for everybody.",
    "404": "No node serves the model.",
    "405": "Use POST.",
    "413": "The body is too large.",
    "415": "The body is not `application/json`.",
    "422": "A node could not make sense of the request.",
    "429": "Every node is at its limit, and the request got no place in the queue; see `Retry-After`.",
    "502": "Every node that was tried failed.",
    "503": "No node can serve now; see `Retry-After`.",
    "504": "No node answered in time.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """How a route's answers with these statuses look."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _ERRORS[str(status)], "content": content} for status in statuses}


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """An `openapi` method for the app that adds the inference routes to what FastAPI knows."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schema.setdefault("components", {}).setdefault("schemas", {})["Error"] = _ERROR
            _forget_validation(schema)
            schema["paths"] |= {path: {"post": _operation(path)} for path in _ROUTES}
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi


def _forget_validation(schema: dict[str, Any]) -> None:
    """FastAPI promises a 422 of its own for every route with parameters; ours are plain text, and never wrong."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)


def _operation(path: str) -> dict[str, Any]:
    summary, body = _ROUTES[path]
    event = {"type": "object", "required": ["data"], "properties": {"data": _STRING}}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"itemSchema": event}}
    refusals = {str(status): response for status, response in errors(*map(int, _ERRORS)).items()}
    return {
        "summary": summary,
        "operationId": path.removeprefix("/v1/").replace("/", "_"),
        "tags": ["inference"],
        "description": "OpenAI's request and answer; every field beyond these goes to the node as it is. A stream "
        "whose node dies goes on with another one where that can be done, and a comment after `[DONE]` then names it; "
        "else it ends with an event `error`.",
        "parameters": [LOCAL_ONLY, PRIORITY],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"type": "object", "additionalProperties": True, **body}}},
        },
        "responses": {
            "200": {"description": _ANSWER, "headers": _ANSWER_HEADERS, "content": answer},
            **refusals,
        },
    }
