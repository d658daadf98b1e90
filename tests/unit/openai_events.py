"""Streams and calls for the tests of nodes that speak OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from app.domain import Operation, Request, Usage
from app.errors import NodeFailure, RequestRefused
from app.providers.base import Answer, Call

DONE = b"data: [DONE]\n\n"
COUNTS = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}

CHAT: Mapping[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def call(
    model: str = "m",
    *,
    node_model: str | None = None,
    operation: Operation = Operation.CHAT,
    stream: bool = False,
    include_usage: bool = False,
    body: bytes | None = None,
    reasoning_content: bool = False,
    **fields: Any,
) -> Call:
    """A call whose client sent `fields`, or exactly `body`."""
    if body is None:
        prompt = CHAT if operation is Operation.CHAT else {}
        flags = {"stream": True} if stream else {}
        body = orjson.dumps({"model": model, **prompt, **flags, **fields})
    request = Request(
        id="r1",
        operation=operation,
        model=model,
        body=body,
        fields=orjson.loads(body),
        stream=stream,
        include_usage=include_usage,
    )
    return Call(request, node_model or model, reasoning_content=reasoning_content)


def event(document: Any, *, spaced: bool = False, end: bytes = b"\n\n", name: str = "") -> bytes:
    text = orjson.dumps(document)
    if spaced:
        # As Python's json writes it; the documents of these tests have no colon or comma in a text.
        text = text.replace(b":", b": ").replace(b",", b", ")
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + text + end


def chunk(
    delta: Mapping[str, Any] | None = None,
    finish: str | None = None,
    *,
    model: str = "m",
    index: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """An event of a chat stream, decoded."""
    choice = {"index": index, "delta": dict(delta or {}), "logprobs": None, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_767_323_045, "model": model}
    return {**head, "choices": [choice], **more}


def text(content: str, **more: Any) -> dict[str, Any]:
    return chunk({"content": content}, **more)


def usage_chunk(counts: Mapping[str, Any] = COUNTS, model: str = "m") -> dict[str, Any]:
    return {**chunk(model=model), "choices": [], "usage": dict(counts)}


def tool_piece(
    index: int | None = 0, identity: str | None = None, name: str | None = None, arguments: str = ""
) -> dict[str, Any]:
    """One entry of a delta's `tool_calls`; None leaves a field out."""
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    place = {} if index is None else {"index": index}
    who = {} if identity is None else {"id": identity, "type": "function"}
    return {**place, **who, "function": function}


ROLE = chunk({"role": "assistant", "content": ""})
WHOLE = event(ROLE) + event(text("Hello")) + event(text(" wörld 🌍")) + event(chunk(finish="stop")) + DONE


@dataclass
class Result:
    """What came of an answer."""

    out: bytes
    failure: NodeFailure | RequestRefused | None
    begun: bool
    usage: Usage | None
    finish_reason: str | None

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The decoded events, without [DONE]."""
        datas = [line[6:] for line in self.out.splitlines() if line.startswith(b"data: ")]
        return [orjson.loads(data) for data in datas if data not in (b"[DONE]", b"")]

    @property
    def finishes(self) -> list[str]:
        return [
            choice["finish_reason"]
            for document in self.documents
            for choice in document.get("choices", ())
            if choice.get("finish_reason")
        ]


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def run(answer: Answer, *data: bytes) -> Result:
    """Feeds the data as a relay would: until the answer has ended, and then its end."""
    out, failure = b"", None
    try:
        for part in data:
            out += answer.feed(part)
            if answer.ended:
                break
        out += answer.finish()
    except (NodeFailure, RequestRefused) as error:
        failure = error
    return Result(out, failure, answer.begun, answer.usage, answer.finish_reason)
