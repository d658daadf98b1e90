"""Calls, runs and vectors that the tests of the Ollama translators share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.domain import Operation, Request
from app.errors import NodeFailure, RequestRefused
from app.providers.base import Answer, Call
from app.providers.ollama import KIND

Json = dict[str, Any]

VECTORS = Path(__file__).parent / "vectors"

OPERATIONS = {
    "/v1/chat/completions": Operation.CHAT,
    "/v1/completions": Operation.COMPLETION,
    "/v1/embeddings": Operation.EMBEDDING,
}


def vectors(name: str) -> dict[str, Json]:
    """The vectors of a file by their names.

    `basis` is "ollama" for what Ollama's own OpenAI layer was seen to do, "gateway" for what a gateway should do;
    `quirk` marks behaviour of Ollama's that a gateway should not copy.
    """
    return {vector["name"]: vector for vector in json.loads((VECTORS / f"{name}.json").read_text("utf-8"))}


def call(
    fields: Json,
    path: str = "/v1/chat/completions",
    *,
    num_ctx: int | None = None,
    capabilities: Iterable[str] | None = None,
    reasoning_content: bool = False,
    local_only: bool = False,
    node_model: str | None = None,
) -> Call:
    """A call as the front and the dispatcher would make it of a client's body."""
    options = fields.get("stream_options") or {}
    request = Request(
        id="req-1",
        operation=OPERATIONS[path],
        model=fields.get("model", ""),
        body=json.dumps(fields).encode(),
        fields=fields,
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        local_only=local_only,
    )
    return Call(
        request=request,
        model=fields.get("model", "") if node_model is None else node_model,
        num_ctx=num_ctx,
        capabilities=None if capabilities is None else frozenset(capabilities),
        reasoning_content=reasoning_content,
    )


def chat(*messages: Json, **fields: Any) -> Json:
    """A chat body. Without messages it holds one from the user."""
    return {"model": "llama3.2", "messages": list(messages) or [{"role": "user", "content": "Hi"}], **fields}


def native(made: Call) -> Json:
    """The native body that a call becomes."""
    body: Json = json.loads(KIND.translate(made).body)
    return body


def line(content: str = "", *, done: bool = False, **more: Any) -> bytes:
    """One line of a native chat stream. Keyword arguments named after message keys go into the message."""
    message = {"role": "assistant", "content": content}
    message.update({key: more.pop(key) for key in ("thinking", "tool_calls") if key in more})
    fields = {"model": "llama3.2", "created_at": "2026-01-02T03:04:05.123456789Z", "message": message, "done": done}
    if done:
        fields |= {"done_reason": "stop", "prompt_eval_count": 11, "eval_count": 7}
    return json.dumps({**fields, **more}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Run:
    """What came of feeding an answer, with its random ids replaced."""

    output: bytes
    error: NodeFailure | RequestRefused | None
    answer: Answer

    @property
    def events(self) -> list[Any]:
        """The data of the server-sent events; `[DONE]` stays text."""
        texts = self.output.decode().split("\n\n")
        assert texts.pop() == "", "the output does not end with a whole event"
        assert all(text.startswith("data: ") for text in texts)
        return [text[6:] if text == "data: [DONE]" else json.loads(text[6:]) for text in texts]

    @property
    def document(self) -> Json:
        """The one JSON document."""
        document: Json = json.loads(self.output)
        return document

    @property
    def choices(self) -> list[Json]:
        """The first choice of each event that has one."""
        return [event["choices"][0] for event in self.events if event != "[DONE]" and event["choices"]]

    @property
    def deltas(self) -> list[Json]:
        """The delta of each event that has one."""
        return [choice["delta"] for choice in self.choices]


def run(made: Call, pieces: Iterable[bytes]) -> Run:
    """Feeds the pieces and ends the answer as the relay does: no more is read once it has ended."""
    answer = KIND.answer(made)
    output, error = b"", None
    try:
        for piece in pieces:
            output += answer.feed(piece)
            if answer.ended:
                break
        output += answer.finish()
    except (NodeFailure, RequestRefused) as raised:
        error = raised
    return Run(_without_random_ids(output), error, answer)


def _without_random_ids(output: bytes) -> bytes:
    """Numbers the ids in the order of their first use, so that two runs can be compared."""
    seen: dict[bytes, bytes] = {}

    def numbered(match: re.Match[bytes]) -> bytes:
        return seen.setdefault(match[0], b"%s-%d" % (match[1], len(seen)))

    return re.sub(rb"\b(chatcmpl-|cmpl-|call_)[0-9a-f]{24}\b", numbered, output)
