"""What fake engines that share a generation have in common: their role, and how they speak to each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from demo.engine import Edit
from demo.httpd import Answer, Part, Received, encode, json_answer
from demo.script import LENGTH, Delta, Reply
from tests.fakes.openai import Refusal

PEER = "/_fake/"  # engines speak over sockets of their own, which nobody but them sees
PEER_SECONDS = 5.0

Control = Callable[[Received], Awaitable[Answer]]


class Role(StrEnum):
    """What part of a generation an engine was started for."""

    HYBRID = "hybrid"
    PREFILL = "prefill"
    DECODE = "decode"


async def peer(url: str, action: str, body: Any) -> Any:
    """Asks another engine; raises `Refusal` when it does not answer, or says no."""
    try:
        async with asyncio.timeout(PEER_SECONDS):
            status, text = await _post(url, PEER + action, encode(body))
    except (OSError, TimeoutError, ValueError) as error:
        raise Refusal(500, f"cannot reach the engine at {url}") from error
    document = json.loads(text)
    if status != 200:
        raise Refusal(500, document["error"])
    return document


def peer_refusal(message: str) -> Answer:
    return json_answer({"error": message}, 409)


async def _post(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.transport.abort()
    begin, _, text = answer.partition(b"\r\n\r\n")
    return int(begin.split(b" ", 2)[1]), text


def one_token(edit: Edit) -> Edit:
    """What an engine says that was started for prefill, whatever limit was asked for."""

    def edited(reply: Reply) -> Reply:
        reply = edit(reply)
        return reply if len(reply.deltas) <= 1 else replace(reply, deltas=reply.deltas[:1], finish=LENGTH)

    return edited


def begun_with(token: str, edit: Edit) -> Edit:
    """What an engine says that was given its first token."""

    def edited(reply: Reply) -> Reply:
        reply = edit(reply)
        return replace(reply, deltas=(Delta(token), *reply.deltas[1:]))

    return edited


def with_members(answer: Answer, members: dict[str, Any]) -> Answer:
    """A document with more members at its top."""
    document = {**json.loads(answer.body), **members}
    return replace(answer, parts=(Part(encode(document), wait_seconds=answer.wait_seconds),))


class Remembered:
    """An edit that remembers what the engine said in the end; None when it said nothing."""

    def __init__(self, edit: Edit) -> None:
        self.reply: Reply | None = None
        self._edit = edit

    def __call__(self, reply: Reply) -> Reply:
        self.reply = self._edit(reply)
        return self.reply

    @property
    def first(self) -> str:
        return self.reply.deltas[0].content if self.reply and self.reply.deltas else ""
