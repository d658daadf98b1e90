"""Engines that speak OpenAI's API, without a model. What differs between them is data: see `flavours`."""

from __future__ import annotations

import base64
import itertools
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from demo.engine import Edit, unchanged
from demo.httpd import Answer, Part, PartKind, Received, encode, json_answer
from demo.script import STOP, Delta, Reply, Script, ToolCall, count_tokens, embedding
from tests.fakes import prefill

SSE = {"content-type": "text/event-stream; charset=utf-8"}
DONE = Part(b"data: [DONE]\n\n", PartKind.END)
CREATED = 1_767_323_045
DIMENSIONS = 8
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ARGUMENT_PIECE = 8  # characters of a call's arguments that come in one chunk


class State(StrEnum):
    """What the engine says of itself."""

    READY = "ready"
    LOADING = "loading"
    SLEEPING = "sleeping"
    UNHEALTHY = "unhealthy"


class Refusal(Exception):
    """A request that the engine answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Flavour:
    """What is particular to one engine's OpenAI API."""

    name: str
    owned_by: Callable[[str], str]  # from the model's name
    error: Callable[[int, str], Any]  # the body of an error, from its status and message
    error_event: Callable[[str], bytes]  # what it writes into a stream when it fails
    unknown: Callable[[Received], Answer]  # its answer on a path that it does not have
    missing: str | None = None  # its message for a model that it does not have; None = it ignores the name
    missing_status: int = 404
    gets: Mapping[str, Callable[[OpenAI], Answer]] = field(default_factory=dict)
    card: Callable[[str], dict[str, Any]] = lambda name: {}  # more fields of a model in /v1/models
    headers: Mapping[str, str] = field(default_factory=lambda: {"server": "uvicorn"})
    opening: Mapping[str, Any] | None = field(
        default_factory=lambda: {"role": "assistant", "content": ""}
    )  # first delta
    role_in_every_delta: bool = False
    reasoning_key: str = "reasoning_content"
    head_first: bool = True
    done: bool = True  # a stream ends with [DONE]
    done_after_error: bool = True
    usage_with_finish: bool = False  # usage comes with the finish reason, asked for or not
    usage_null: bool = False  # other chunks carry `usage: null` when usage was asked for
    ending: Callable[[Reply], dict[str, Any]] = lambda reply: {}  # more fields of the document and of the finish chunk
    embeds: bool = True
    base64: bool = True
    refused_fields: frozenset[str] = frozenset()
    answers_while_loading: frozenset[str] = frozenset({"/v1/models"})
    echoes_request_id: bool = False
    busy_status: int = 503
    prefill: Callable[[Mapping[str, Any], bool], prefill.Start] = prefill.never  # how it goes on with an answer


class OpenAI:
    """Answers as the engine of one flavour does. `calls` and the token counts are what an invoice would say."""

    def __init__(
        self,
        flavour: Flavour,
        models: Iterable[str] = ("model",),
        script: Script | None = None,
        api_key: str | None = None,
    ) -> None:
        self.flavour = flavour
        self.models = list(models)
        self.script = script or Script()
        self.api_key = api_key
        self.state = State.READY
        self.cached_tokens = 0  # of each prompt
        self.refused_fields = flavour.refused_fields
        self.port = 0  # of its node
        self.busy: Callable[[], int] = lambda: 0  # how many requests are being served
        self.calls = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._ids = itertools.count(1)

    @property
    def busy_status(self) -> int:
        return self.flavour.busy_status

    def restart(self) -> None:
        """Becomes a new process, which forgets what it held. The counts go on, as they are the tests'."""

    def controls(self) -> Mapping[str, Callable[[Received], Awaitable[Answer]]]:
        """What other engines may ask of it, by name."""
        return {}

    def details(self) -> dict[str, Any]:
        """What there is to say of its state beside the node's."""
        return {}

    def infers(self, request: Received) -> bool:
        return request.path in (CHAT, COMPLETIONS, EMBEDDINGS)

    async def answer(self, request: Received, edit: Edit = unchanged) -> Answer:
        try:
            self._check_key(request)
            return self._routed(request, edit)
        except Refusal as refusal:
            return self.error(refusal.status, refusal.message)

    def error(self, status: int, message: str | None = None) -> Answer:
        text = message or MESSAGES.get(status, f"error {status}")
        return json_answer(self.flavour.error(status, text), status, self.flavour.headers)

    def missing(self, model: str) -> Answer:
        return self.error(404, (self.flavour.missing or "The model `{}` does not exist.").format(model))

    def error_parts(self, message: str) -> tuple[Part, ...]:
        event = Part(self.flavour.error_event(message), PartKind.ERROR)
        return (event, DONE) if self.flavour.done and self.flavour.done_after_error else (event,)

    def json(self, value: Any, status: int = 200) -> Answer:
        """A document with this engine's headers."""
        return json_answer(value, status, self.flavour.headers)

    def empty(self, status: int = 200) -> Answer:
        return Answer(status=status, headers=self.flavour.headers)

    def _routed(self, request: Received, edit: Edit) -> Answer:
        path = request.path
        if (
            self.state is State.LOADING
            and path not in self.flavour.answers_while_loading
            and path not in self.flavour.gets
        ):
            raise Refusal(503, "Loading model")
        if request.method in ("GET", "HEAD"):
            return self._got(request)
        if request.method != "POST" or not self._offers(path):
            return self.flavour.unknown(request)
        return self._inferred(request, edit)

    def _got(self, request: Received) -> Answer:
        if request.path == "/v1/models":
            return self.json({**MODEL_LIST, "data": [self._card(name) for name in self.models]})
        special = self.flavour.gets.get(request.path)
        return special(self) if special else self.flavour.unknown(request)

    def _card(self, name: str) -> dict[str, Any]:
        owner = self.flavour.owned_by(name)
        return {"id": name, "object": "model", "created": CREATED, "owned_by": owner, **self.flavour.card(name)}

    def _offers(self, path: str) -> bool:
        return path in (CHAT, COMPLETIONS) or (path == EMBEDDINGS and self.flavour.embeds)

    def _check_key(self, request: Received) -> None:
        if self.api_key is None or not request.path.startswith("/v1"):
            return
        scheme, _, key = (request.authorization or "").partition(" ")
        if not key:
            raise Refusal(401, "You didn't provide an API key. Put it into an Authorization header: Bearer YOUR_KEY.")
        if scheme.lower() != "bearer" or key != self.api_key:
            raise Refusal(401, f"Incorrect API key provided: {half_hidden(key)}.")

    def _inferred(self, request: Received, edit: Edit) -> Answer:
        body = decoded(request)
        refused = self.refused_fields & body.keys()
        if refused:
            raise Refusal(422, f"Unsupported fields in the request: {refused}")
        model = self._model(body)
        self.calls += 1
        request_id = self._request_id(request)
        if request.path == EMBEDDINGS:
            return self._embedded(body, model)
        chat = request.path == CHAT
        words, prompt_tokens = _chat_words(body) if chat else _prompt_words(body)
        reply = edit(self._reply(body, chat, words, prompt_tokens))
        self.prompt_tokens += reply.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        writer = ChatWriter if chat else CompletionWriter
        return writer(self.flavour, reply, model, request_id, self.cached_tokens, body).answer()

    def _reply(self, body: Mapping[str, Any], chat: bool, words: str, prompt_tokens: int) -> Reply:
        limit = _limit(body)
        if not chat:
            return self.script.reply(words, prompt_tokens, limit, start=self.script.begun_in(words))
        switched_off = (body.get("chat_template_kwargs") or {}).get("enable_thinking") is False
        try:
            start = self.flavour.prefill(body, self.script.thinks and not switched_off)
        except prefill.Refused as refused:
            raise Refusal(400, str(refused)) from None
        thinks = start.thinks if start.text else not switched_off
        return self.script.reply(words, prompt_tokens, limit, start=start.text, thinks=thinks)

    def _model(self, body: Mapping[str, Any]) -> str:
        name = body.get("model")
        if self.flavour.missing is not None and name not in self.models:
            raise Refusal(self.flavour.missing_status, self.flavour.missing.format(name))
        return str(name or self.models[0])

    def _request_id(self, request: Received) -> str:
        asked = request.headers.get("x-request-id") if self.flavour.echoes_request_id else None
        return asked or f"{next(self._ids):08x}"

    def _embedded(self, body: Mapping[str, Any], model: str) -> Answer:
        texts = _embedding_inputs(body.get("input"))
        dimensions = min(body.get("dimensions") or DIMENSIONS, DIMENSIONS)
        vectors: list[Any] = [embedding(text, dimensions) for text in texts]
        if body.get("encoding_format") == "base64" and self.flavour.base64:
            vectors = [packed(vector) for vector in vectors]
        data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)]
        tokens = sum(map(count_tokens, texts))
        self.prompt_tokens += tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return self.json({"object": "list", "data": data, "model": model, "usage": usage})


MODEL_LIST: Mapping[str, Any] = {"object": "list"}
MESSAGES = {
    400: "the request is not valid",
    401: "Unauthorized",
    404: "The model does not exist.",
    408: "Request timed out",
    429: "Rate limit reached",
    500: "Internal server error",
    503: "The engine is overloaded, try again later",
    529: "Overloaded",
}


class ChatWriter:
    """Writes one reply down as a chat completion, in one document or in chunks."""

    prefix = "chatcmpl-"
    document_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, flavour: Flavour, reply: Reply, model: str, request_id: str, cached_tokens: int, body: Mapping[str, Any]
    ) -> None:
        self.flavour = flavour
        self.reply = reply
        self.cached_tokens = cached_tokens
        self.streams = bool(body.get("stream"))
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        kind = self.chunk_object if self.streams else self.document_object
        self.common = {"id": self.prefix + request_id, "object": kind, "created": int(time.time()), "model": model}

    def answer(self) -> Answer:
        if self.streams:
            return Answer(self._stream(), 200, {**self.flavour.headers, **SSE}, True, self.flavour.head_first)
        body = {**self.common, "choices": [self.choice()], "usage": self._usage(), **self.flavour.ending(self.reply)}
        headers = {**self.flavour.headers, "content-type": "application/json"}
        return Answer((Part(encode(body), wait_seconds=self.reply.seconds),), 200, headers)

    def choice(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.reply.content or (None if self.reply.tool_calls else ""),
        }
        if self.reply.reasoning:
            message[self.flavour.reasoning_key] = self.reply.reasoning
        if self.reply.tool_calls:
            message["tool_calls"] = [{k: v for k, v in _call(c).items() if k != "index"} for c in self.reply.tool_calls]
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish()}

    def opening(self) -> dict[str, Any] | None:
        """The delta of a first chunk without content, where the engine sends one."""
        return None if self.flavour.opening is None else {"delta": self.flavour.opening}

    def payloads(self, delta: Delta, first: bool) -> Iterable[dict[str, Any]]:
        """The chunks for one delta: the arguments of a tool call come in pieces."""
        role = {"role": "assistant"} if self._names_role(first) else {}
        if delta.reasoning:
            yield {"delta": {**role, self.flavour.reasoning_key: delta.reasoning}}
        if delta.content or not (delta.reasoning or delta.tool_calls):
            yield {"delta": {**role, "content": delta.content}}
        for call in delta.tool_calls:
            for piece in _call_pieces(call):
                yield {"delta": {**role, "tool_calls": [piece]}}

    def _names_role(self, first: bool) -> bool:
        return self.flavour.role_in_every_delta or (first and self.flavour.opening is None)

    def closing(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""} if self.flavour.role_in_every_delta else {}}

    def _stream(self) -> tuple[Part, ...]:
        parts = list(self._contents())
        if self.reply.finish is not None:
            usage = {"usage": self._usage()} if self.flavour.usage_with_finish else {}
            ending = {**usage, **self.flavour.ending(self.reply)}
            parts.append(Part(self._chunk(self.closing(), self._finish(), ending), PartKind.FINISH))
        if self.wants_usage and not self.flavour.usage_with_finish:
            parts.append(Part(event({**self.common, "choices": [], "usage": self._usage()}), PartKind.USAGE))
        if self.flavour.done and self.reply.ended:
            parts.append(DONE)
        return tuple(parts)

    def _contents(self) -> Iterable[Part]:
        opening = self.opening()
        if opening is not None:
            yield Part(self._chunk(opening), PartKind.ROLE, self.reply.first_seconds)
        for place, delta in enumerate(self.reply.numbered):
            # The opening chunk leaves together with the first token, so it has waited for both.
            wait = 0.0 if place == 0 and opening is not None else self.reply.wait_before(place)
            for payload in self.payloads(delta, place == 0):
                yield Part(self._chunk(payload), PartKind.DELTA, wait)
                wait = 0.0

    def _chunk(
        self, payload: Mapping[str, Any], finish: str | None = None, more: Mapping[str, Any] | None = None
    ) -> bytes:
        null = {"usage": None} if self.flavour.usage_null and self.wants_usage else {}
        choice = {"index": 0, **payload, "logprobs": None, "finish_reason": finish}
        return event({**self.common, "choices": [choice], **null, **(more or {})})

    def _finish(self) -> str | None:
        return "tool_calls" if self.reply.finish == STOP and self.reply.tool_calls else self.reply.finish

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.reply.prompt_tokens, self.reply.completion_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": min(self.cached_tokens, prompt)}
        return usage


class CompletionWriter(ChatWriter):
    """Writes one reply down as a text completion."""

    prefix = "cmpl-"
    document_object = chunk_object = "text_completion"

    def choice(self) -> dict[str, Any]:
        return {"index": 0, "text": self.reply.content, "logprobs": None, "finish_reason": self.reply.finish}

    def opening(self) -> dict[str, Any] | None:
        return None

    def payloads(self, delta: Delta, first: bool) -> Iterable[dict[str, Any]]:
        yield {"text": delta.content}

    def closing(self) -> dict[str, Any]:
        return {"text": ""}


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


def half_hidden(key: str) -> str:
    """A key as OpenAI repeats it in its error: the ends are readable."""
    return f"{key[:8]}{'*' * max(0, len(key) - 12)}{key[-4:]}"


def packed(vector: Iterable[float]) -> str:
    """A vector as base64 of little-endian float32."""
    return base64.b64encode(b"".join(struct.pack("<f", value) for value in vector)).decode()


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": encode(call.arguments).decode()}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _call_pieces(call: ToolCall) -> Iterable[dict[str, Any]]:
    """A call as engines stream it: its name, then its arguments bit by bit."""
    whole = _call(call)
    arguments = whole["function"]["arguments"]
    yield {**whole, "function": {"name": call.name, "arguments": ""}}
    for start in range(0, len(arguments), ARGUMENT_PIECE):
        yield {"index": call.index, "function": {"arguments": arguments[start : start + ARGUMENT_PIECE]}}


def decoded(request: Received) -> Mapping[str, Any]:
    """The body of a request for inference; raises `Refusal` when it is no JSON object."""
    try:
        body = request.json
    except ValueError:
        raise Refusal(400, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not a JSON object")
    return body


def prompt_tokens(path: str, body: Mapping[str, Any]) -> int:
    """How many tokens the prompt of a chat or completion has."""
    return (_chat_words(body) if path == CHAT else _prompt_words(body))[1]


def _limit(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            return int(body[name])
    return None


def _chat_words(body: Mapping[str, Any]) -> tuple[str, int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages: a list with at least one message is required")
    texts = [(message.get("role"), _text(message.get("content"))) for message in messages]
    words = next((text for role, text in reversed(texts) if role == "user"), "")
    return words, sum(count_tokens(text) for _, text in texts)


def _prompt_words(body: Mapping[str, Any]) -> tuple[str, int]:
    prompt = body.get("prompt")
    if prompt is None:
        raise Refusal(400, "prompt: required")
    text = " ".join(map(str, prompt)) if isinstance(prompt, list) else str(prompt)
    return text, count_tokens(text)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if part.get("type") == "text")
    return content or ""


def _embedding_inputs(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise Refusal(400, "input: a string or a list with at least one member is required")
    if all(isinstance(item, int) for item in value):
        return [" ".join(map(str, value))]
    return [" ".join(map(str, item)) if isinstance(item, list) else str(item) for item in value]
