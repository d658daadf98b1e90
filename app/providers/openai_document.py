"""Reads a node's answer that comes as one JSON document, and sees to it that it is what was asked for. Sans-I/O."""

from __future__ import annotations

import binascii
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from app.domain import Failure, Request, Timings, Usage
from app.errors import NodeFailure
from app.providers.json_splice import sole_member
from app.providers.openai_choices import Choices, Fields, encoded, timings_in, usage_in
from app.providers.openai_faults import event_error

MAX_DOCUMENT_BYTES = 64 * 2**20


class Document:
    """Collects the answer until it is whole; the client gets nothing before `finish`."""

    content_type = b"application/json"

    def __init__(self, request: Request) -> None:
        self.begun = False
        self.ended = False
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.finish_reason: str | None = None
        self._request = request
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> bytes:
        self._size += len(data)
        if self._size > MAX_DOCUMENT_BYTES:
            raise _malformed("an answer of more than 64 MiB")
        self._parts.append(data)
        return b""

    def finish(self) -> bytes:
        """The document as the node wrote it, but for what had to be changed in it."""
        body = b"".join(self._parts)
        self._parts.clear()
        document = _decoded(body)
        self.usage = usage_in(document)
        self.timings = timings_in(document)
        changed = self._check(document)
        self.begun = self.ended = True
        return self._encoded(document) if changed else self._named(document, body)

    def _check(self, document: Fields) -> bool:
        """Raises when the document is no answer to the request; True when something in it had to be changed."""
        raise NotImplementedError

    def _named(self, document: Fields, body: bytes) -> bytes:
        """The document with the name that the client knows the model by."""
        name = document.get("model")
        if name == self._request.model or not isinstance(name, str):
            return body
        member = sole_member(body, b'"model"')
        if member is None:
            return self._encoded(document)
        return body[: member.value] + orjson.dumps(self._request.model) + body[member.end :]

    def _encoded(self, document: Fields) -> bytes:
        if "model" in document:
            document["model"] = self._request.model
        return encoded(document)


class Generation(Document):
    """A chat or completion."""

    def __init__(self, request: Request, choices: Choices) -> None:
        super().__init__(request)
        self._choices = choices

    def _check(self, document: Fields) -> bool:
        choices = document.get("choices")
        if not isinstance(choices, list):
            raise _malformed("an answer without choices")
        if not choices:
            raise NodeFailure(Failure.EMPTY, "the node sent an answer with no choice in it")
        changed = self._choices.repair(choices)
        changed |= self._choices.finish_all(choices)
        self.finish_reason = self._choices.finish_reason
        return changed


class Embeddings(Document):
    """Embeddings, in the format that was asked for: several engines know only one."""

    def _check(self, document: Fields) -> bool:
        entries = document.get("data")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _malformed("an answer without embeddings")
        wanted = _input_count(self._request.fields.get("input"))
        if not entries or not all(entry.get("embedding") for entry in entries):
            raise NodeFailure(Failure.EMPTY, "the node sent an embedding with nothing in it")
        if wanted is not None and len(entries) != wanted:
            raise _malformed(f"{len(entries)} embeddings for {wanted} inputs")
        return _convert(entries, self._request.fields)


def _decoded(body: bytes) -> Fields:
    if not body.strip():
        raise NodeFailure(Failure.EMPTY, "the node sent an empty answer")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _malformed("something that is not JSON") from error
    failure = event_error(document, begun=False)
    if failure is not None:
        raise failure
    if not isinstance(document, dict):
        raise _malformed("JSON that is no object")
    return document


def _malformed(what: str) -> NodeFailure:
    return NodeFailure(Failure.MALFORMED, f"the node sent {what}")


# -- embeddings


def _input_count(value: Any) -> int | None:
    """How many inputs these are: a text or a list of tokens is one. None when only the node can tell."""
    if isinstance(value, str):
        return 1
    if not isinstance(value, list) or not value:
        return None
    return 1 if isinstance(value[0], int) else len(value)


def _convert(entries: list[Fields], fields: Mapping[str, Any]) -> bool:
    """Brings every embedding into the wanted format. One of another element type than float32 is left as it is."""
    if fields.get("embed_dtype") not in (None, "float32"):
        return False
    match fields.get("encoding_format"):
        case "base64":
            return _replace(entries, list, _to_base64)
        case None | "float":
            return _replace(entries, str, _to_floats)
    return False


def _replace(entries: list[Fields], form: type, convert: Callable[[Any], Any]) -> bool:
    """Converts the embeddings that have this form; False when none has."""
    others = [entry for entry in entries if isinstance(entry["embedding"], form)]
    for entry in others:
        entry["embedding"] = convert(entry["embedding"])
    return bool(others)


def _to_base64(vector: list[Any]) -> str:
    try:
        return b64encode(_little_endian(array("f", vector))).decode()
    except (TypeError, OverflowError) as error:
        raise _malformed("an embedding that is no list of numbers") from error


def _to_floats(text: str) -> list[float]:
    vector = array("f")
    try:
        vector.frombytes(b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise _malformed("an embedding that is no base64 of 32-bit floats") from error
    return _little_endian(vector).tolist()


def _little_endian(vector: array[float]) -> array[float]:
    if sys.byteorder == "big":
        vector.byteswap()
    return vector
