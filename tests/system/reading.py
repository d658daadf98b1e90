"""Reads what a client of the OpenAI API gets, as strictly as an SDK would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Answer:
    """What came over the wire."""

    status: int
    headers: httpx.Headers
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """A client takes this for a complete answer."""
        return self.status == 200 and self.error is None and bool(self.finish_reasons) and self.done


def read(response: httpx.Response) -> Answer:
    """A stream or a document, by its content type. Fails on anything that is no valid event or JSON."""
    answer = Answer(response.status_code, response.headers)
    if response.headers["content-type"].startswith("text/event-stream"):
        _read_stream(response.content, answer)
    else:
        _take(answer, response.json(), "message")
        answer.done = True
    return answer


def _read_stream(body: bytes, answer: Answer) -> None:
    for event in body.decode().replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].strip() for line in event.splitlines() if line.startswith("data:"))
        if data == "[DONE]":
            assert not answer.done, "two [DONE]"
            answer.done = True
        elif data:
            assert not answer.done, "an event after [DONE]"
            document = json.loads(data)
            answer.events.append(document)
            _take(answer, document, "delta")


def _take(answer: Answer, document: dict[str, Any], part: str) -> None:
    answer.error = document.get("error") or answer.error
    answer.usage = document.get("usage") or answer.usage
    for choice in document.get("choices", []):
        answer.text += (choice.get(part) or {}).get("content") or ""
        if choice.get("finish_reason"):
            answer.finish_reasons.append(choice["finish_reason"])
