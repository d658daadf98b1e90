"""Ollama's native API without a model behind it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from demo.engine import Edit, unchanged
from demo.httpd import Answer, Part, PartKind, Received, encode, text_answer
from demo.script import Delta, Reply, Script, ToolCall, count_tokens, embedding

VERSION = "0.32.15"
JSON = {"content-type": "application/json; charset=utf-8"}
NDJSON = {"content-type": "application/x-ndjson"}
DEFAULT_CONTEXT = 4096
DEFAULT_KEEP_ALIVE_SECONDS = 300.0
FOREVER_SECONDS = 292 * 365 * 86400.0  # the longest duration that Go can hold
THINK_WORDS = ("low", "medium", "high", "max")
INFERENCE_PATHS = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
# Control characters that a browser could read as code are escaped by Go's JSON encoder, even inside strings.
GO_ESCAPES = {
    b"<": b"\\u003c",
    b">": b"\\u003e",
    b"&": b"\\u0026",
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
}

FLOAT_OPTIONS = frozenset(
    {"temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}
)
INT_OPTIONS = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "num_predict"}
    | {"seed", "top_k", "repeat_last_n"}
)

ERRORS = {
    400: "invalid request",
    401: "unauthorized",
    404: "model not found",
    408: "request timed out",
    429: "too many concurrent requests",
    500: "model runner has unexpectedly stopped, this may be due to resource limitations or an internal error, "
    "check ollama server logs for details",
    503: "server busy, please try again.  maximum pending requests exceeded",
}


class Refusal(Exception):
    """A request that Ollama answers with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Model:
    """An installed model, as /api/tags lists it."""

    name: str
    capabilities: tuple[str, ...] = ("completion", "tools")
    size: int = 2_019_393_189
    vram: int | None = None  # None: all of it is on the GPU
    family: str = "llama"
    parameter_size: str = "3.2B"
    quantization: str = "Q4_K_M"
    context_length: int = 131_072
    dimensions: int = 8
    modified_at: str = "2026-01-02T03:04:05.123456789Z"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.family,
            "families": [self.family],
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization,
        }


@dataclass(slots=True)
class Loaded:
    """A model in memory."""

    num_ctx: int
    keep_seconds: float
    expires: float  # monotonic


class Ollama:
    """Answers as Ollama does. `loads` lists each load of a model into memory, with its context size."""

    busy_status = 503

    def __init__(
        self,
        models: Iterable[str | Model] = ("llama3.2:latest",),
        script: Script | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        self.script = script or Script()
        self.load_seconds = load_seconds
        self.goes_on = True  # with a last message of the assistant; some models' templates close it instead
        self.models: dict[str, Model] = {}
        self.loaded: dict[str, Loaded] = {}
        self.loads: list[tuple[str, int]] = []
        self._loading = asyncio.Lock()
        for model in models:
            self.install(model)
        self._routes: dict[str, dict[str, Callable[[Any, Edit], Awaitable[Answer]]]] = {
            "/": {"GET": self._root, "HEAD": self._root},
            "/api/version": {"GET": self._version, "HEAD": self._version},
            "/api/status": {"GET": self._status},
            "/api/tags": {"GET": self._tags, "HEAD": self._tags},
            "/api/ps": {"GET": self._ps},
            "/v1/models": {"GET": self._openai_models},
            "/api/show": {"POST": self._show},
            "/api/chat": {"POST": self._chat},
            "/api/generate": {"POST": self._generate},
            "/api/embed": {"POST": self._embed},
            "/api/embeddings": {"POST": self._embeddings},
        }

    def install(self, model: str | Model) -> None:
        """Adds a model, as a pull does."""
        model = Model(canonical(model)) if isinstance(model, str) else model
        self.models[model.name.lower()] = model

    def remove(self, name: str) -> None:
        """Deletes a model from disk and memory."""
        del self.models[canonical(name).lower()]
        self.loaded.pop(canonical(name).lower(), None)

    def infers(self, request: Received) -> bool:
        return request.path in INFERENCE_PATHS

    async def answer(self, request: Received, edit: Edit = unchanged) -> Answer:
        if not _host_allowed(request.headers) or not _origin_allowed(request.headers):
            return Answer(status=403)
        methods = self._routes.get(request.path)
        if methods is None:
            return text_answer("404 page not found", 404)
        handler = methods.get(request.method)
        if handler is None:
            return text_answer("405 method not allowed", 405)
        try:
            body = _decode(request) if request.method == "POST" else None
            return await handler(body, edit)
        except Refusal as refusal:
            return self.error(refusal.status, refusal.message)

    def error(self, status: int, message: str | None = None) -> Answer:
        return document({"error": message or ERRORS.get(status, f"error {status}")}, status)

    def missing(self, model: str) -> Answer:
        return self.error(404, f"model '{model}' not found")

    def error_parts(self, message: str) -> tuple[Part, ...]:
        text = f"an error was encountered while running the model: {message}"
        return (Part(line({"error": text}), PartKind.ERROR),)

    async def _root(self, body: Any, edit: Edit) -> Answer:
        return text_answer("Ollama is running")

    async def _version(self, body: Any, edit: Edit) -> Answer:
        return document({"version": VERSION})

    async def _status(self, body: Any, edit: Edit) -> Answer:
        return document({"cloud": {"disabled": False, "source": "none"}})

    async def _tags(self, body: Any, edit: Edit) -> Answer:
        newest_first = sorted(self.models.values(), key=lambda model: model.modified_at, reverse=True)
        return document({"models": [_tag(model) for model in newest_first]})

    async def _ps(self, body: Any, edit: Edit) -> Answer:
        self._expire()
        longest_first = sorted(self.loaded.items(), key=lambda item: item[1].expires, reverse=True)
        return document({"models": [_running(self.models[key], loaded) for key, loaded in longest_first]})

    async def _openai_models(self, body: Any, edit: Edit) -> Answer:
        created = 1_767_323_045
        cards = [
            {"id": model.name, "object": "model", "created": created, "owned_by": "library"}
            for model in self.models.values()
        ]
        return document({"object": "list", "data": cards or None})

    async def _show(self, body: Mapping[str, Any], edit: Edit) -> Answer:
        name = str(body.get("model") or body.get("name") or "")
        if not name:
            raise Refusal(400, "model is required")
        return document(_shown(self._find(name)))

    async def _chat(self, body: Mapping[str, Any], edit: Edit) -> Answer:
        if not body.get("model"):
            raise Refusal(400, "model is required")
        messages = _checked_messages(body.get("messages"))
        model = self._ready_for(body, "chat")
        await self._load(model, body)
        if not messages:
            return document(self._idle_line(body, model, {"message": {"role": "assistant", "content": ""}}))
        words = next((message["content"] for message in reversed(messages) if message["role"] == "user"), "")
        prompt = sum(count_tokens(message["content"]) for message in messages)
        last = messages[-1]
        start = last["content"] if last["role"] == "assistant" and self.goes_on else ""
        return self._render(body, edit(self._reply(body, words, prompt, start)), _chat_payload)

    async def _generate(self, body: Mapping[str, Any], edit: Edit) -> Answer:
        prompt = body.get("prompt") or ""
        _expect(prompt, str, "GenerateRequest.prompt", "string")
        model = self._ready_for(body, "generate")
        if body.get("suffix") and "insert" not in model.capabilities:
            raise Refusal(400, f"{_full(model.name)} does not support insert")
        await self._load(model, body)
        if not prompt:
            return document(self._idle_line(body, model, {"response": ""}))
        # Where there is a template, the prompt is what a user says, whatever it ends with.
        start = self.script.begun_in(prompt) if body.get("raw") else ""
        reply = edit(self._reply(body, prompt, count_tokens(prompt), start))
        last = {} if body.get("raw") else {"context": list(range(1, reply.prompt_tokens + reply.completion_tokens + 1))}
        return self._render(body, reply, _generate_payload, last)

    async def _embed(self, body: Mapping[str, Any], edit: Edit) -> Answer:
        texts = _embed_inputs(body.get("input"))
        model = self._find(str(body.get("model") or ""), 'model "{}" not found, try pulling it first')
        _check_options(body)
        await self._load(model, body)
        dimensions = min(body.get("dimensions") or model.dimensions, model.dimensions)
        out = {
            "model": body["model"],
            "embeddings": [embedding(text, dimensions) for text in texts],
            "total_duration": 14_143_917,
            "load_duration": 1_019_500,
            "prompt_eval_count": sum(map(count_tokens, texts)),
        }
        return document(_without_zeros(out), wait_seconds=self.script.first_seconds)

    async def _embeddings(self, body: Mapping[str, Any], edit: Edit) -> Answer:
        if not body.get("model"):
            raise Refusal(400, "model is required")
        model = self._find(body["model"], 'model "{}" not found, try pulling it first')
        await self._load(model, body)
        prompt = body.get("prompt") or ""
        return document({"embedding": embedding(prompt, model.dimensions) if prompt else []})

    def _find(self, name: str, missing: str = "model '{}' not found") -> Model:
        if name and not NAME.fullmatch(name.strip()):
            raise Refusal(400, "invalid model name")
        model = self.models.get(canonical(name).lower())
        if model is None:
            raise Refusal(404, missing.format(name))
        return model

    def _ready_for(self, body: Mapping[str, Any], work: str) -> Model:
        """The model that was asked for, once all that the request wants of it is known to be possible."""
        think = body.get("think")
        if think is not None and not isinstance(think, bool) and think not in THINK_WORDS:
            raise Refusal(
                400,
                f'invalid think value: {json.dumps(think)} (must be "high", "medium", "low", "max", true, or false)',
            )
        _check_images(body.get("images"))
        _check_format(body.get("format"))
        model = self._find(str(body.get("model") or ""))
        if "completion" not in model.capabilities:
            raise Refusal(400, f'"{body["model"]}" does not support {work}')
        if body.get("tools") and "tools" not in model.capabilities:
            raise Refusal(400, f"{_full(model.name)} does not support tools")
        if think and "thinking" not in model.capabilities:
            raise Refusal(400, f'"{body["model"]}" does not support thinking')
        _check_options(body)
        return model

    async def _load(self, model: Model, body: Mapping[str, Any]) -> None:
        """Loads the model when it is not in memory with this context size.

        One load at a time, and one whose client leaves comes to nothing: the task that runs it is cancelled.
        """
        keep_seconds = _keep_alive_seconds(body.get("keep_alive"))
        key, wanted = model.name.lower(), (body.get("options") or {}).get("num_ctx")
        async with self._loading:
            self._expire()
            loaded = self.loaded.get(key)
            if loaded is None or (wanted is not None and wanted != loaded.num_ctx):
                await asyncio.sleep(self.load_seconds)
                loaded = Loaded(int(wanted or DEFAULT_CONTEXT), DEFAULT_KEEP_ALIVE_SECONDS, 0.0)
                self.loaded[key] = loaded
                self.loads.append((model.name, loaded.num_ctx))
        if keep_seconds is not None:
            loaded.keep_seconds = keep_seconds
        loaded.expires = time.monotonic() + loaded.keep_seconds

    def _expire(self) -> None:
        now = time.monotonic()
        self.loaded = {key: loaded for key, loaded in self.loaded.items() if loaded.expires > now}

    def _idle_line(self, body: Mapping[str, Any], model: Model, payload: dict[str, Any]) -> dict[str, Any]:
        """The single line that answers a request without words: the model was loaded, or unloaded."""
        unload = _keep_alive_seconds(body.get("keep_alive")) == 0
        self._expire()
        return {**_line_start(body), **payload, "done": True, "done_reason": "unload" if unload else "load"}

    def _reply(self, body: Mapping[str, Any], words: str, prompt_tokens: int, start: str = "") -> Reply:
        limit = (body.get("options") or {}).get("num_predict")
        reply = self.script.reply(words, prompt_tokens, limit, start=start, thinks=not start)
        if body.get("think") is False:
            spoken = tuple(delta for delta in reply.deltas if delta.content or delta.tool_calls)
            return Reply(spoken, prompt_tokens, reply.finish, True, reply.first_seconds, reply.token_seconds)
        return reply

    def _render(
        self,
        body: Mapping[str, Any],
        reply: Reply,
        payload: Callable[[Delta], dict[str, Any]],
        last: Mapping[str, Any] | None = None,
    ) -> Answer:
        end = {**_ending(reply), **(last or {}), **_counts(reply)} if reply.ended else {"done": False}
        if body.get("stream") is False:
            whole = Delta(reply.content, reply.reasoning, reply.tool_calls)
            return document({**_line_start(body), **payload(whole), **end}, wait_seconds=reply.seconds)
        parts = [
            Part(line({**_line_start(body), **payload(delta), "done": False}), PartKind.DELTA, reply.wait_before(place))
            for place, delta in enumerate(reply.numbered)
        ]
        if reply.ended:
            parts.append(Part(line({**_line_start(body), **payload(Delta()), **end}), PartKind.END))
        return Answer(tuple(parts), 200, NDJSON, stream=True)


NAME = re.compile(r"(?:[\w.-]+(?::\d+)?/)?(?:[\w-][\w-]*/)?\w[\w.-]*(?::\w[\w.-]*)?", re.ASCII)


def canonical(name: str) -> str:
    """The name as /api/tags shows it: without the default host and namespace, always with a tag."""
    name = name.strip().removeprefix("registry.ollama.ai/").removeprefix("library/")
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _full(name: str) -> str:
    return f"registry.ollama.ai/library/{name}"


def document(value: Any, status: int = 200, wait_seconds: float = 0.0) -> Answer:
    return Answer((Part(_go(value), wait_seconds=wait_seconds),), status, JSON)


def line(value: Any) -> bytes:
    return _go(value) + b"\n"


def _go(value: Any) -> bytes:
    data = encode(value)
    for character, escape in GO_ESCAPES.items():
        data = data.replace(character, escape)
    return data


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "789Z")


def _line_start(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": body.get("model"), "created_at": _now()}


def _chat_payload(delta: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": delta.content}
    if delta.reasoning:
        message["thinking"] = delta.reasoning
    if delta.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
    return {"message": message}


def _generate_payload(delta: Delta) -> dict[str, Any]:
    payload: dict[str, Any] = {"response": delta.content}
    if delta.reasoning:
        payload["thinking"] = delta.reasoning
    return payload


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": call.arguments}
    return {"id": call.id, "function": function} if call.id else {"function": function}


def _ending(reply: Reply) -> dict[str, Any]:
    return {"done": True, "done_reason": reply.finish} if reply.finish else {"done": True}


def _counts(reply: Reply) -> dict[str, Any]:
    spent = int(reply.seconds * 1e9)
    return _without_zeros(
        {
            "total_duration": spent + 1_500_000,
            "load_duration": 1_019_500,
            "prompt_eval_count": reply.prompt_tokens,
            "prompt_eval_duration": 480_500,
            "eval_count": reply.completion_tokens,
            "eval_duration": spent,
        }
    )


def _without_zeros(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Go's omitempty: Ollama leaves out counts that are zero."""
    return {name: value for name, value in fields.items() if value != 0}


def _tag(model: Model) -> dict[str, Any]:
    details = model.details | {"context_length": model.context_length, "embedding_length": model.dimensions}
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": model.modified_at,
        "size": model.size,
        "digest": model.digest,
        "details": details,
        "capabilities": list(model.capabilities),
    }


def _running(model: Model, loaded: Loaded) -> dict[str, Any]:
    left = min(loaded.expires - time.monotonic(), FOREVER_SECONDS)
    return {
        "name": model.name,
        "model": model.name,
        "size": model.size,
        "digest": model.digest,
        "details": model.details,
        "expires_at": (datetime.now(UTC) + timedelta(seconds=left)).isoformat(),
        "size_vram": model.size if model.vram is None else model.vram,
        "context_length": loaded.num_ctx,
    }


def _shown(model: Model) -> dict[str, Any]:
    family = model.family
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": "{{ .Prompt }}",
        "details": model.details,
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": 3_212_749_888,
            f"{family}.context_length": model.context_length,
            f"{family}.block_count": 28,
            f"{family}.embedding_length": model.dimensions,
            f"{family}.attention.head_count": 24,
            f"{family}.attention.head_count_kv": 8,
        },
        "capabilities": list(model.capabilities),
        "modified_at": model.modified_at,
    }


def _decode(request: Received) -> Mapping[str, Any]:
    if not request.body:
        raise Refusal(400, "missing request body")
    try:
        body = request.json
    except ValueError:
        raise Refusal(400, "invalid character 'x' looking for beginning of value") from None
    _expect(body, dict, "Request", "api.Request")
    found: Mapping[str, Any] = body
    return found


GO_NAMES: Mapping[type, str] = {
    list: "array",
    str: "string",
    dict: "object",
    bool: "bool",
    int: "number",
    float: "number",
}


def _expect(value: Any, kind: type, where: str, go_type: str) -> None:
    """Refuses a value of another type with the words of Go's decoder."""
    if not isinstance(value, kind):
        found = GO_NAMES.get(type(value), "null")
        raise Refusal(400, f"json: cannot unmarshal {found} into Go struct field {where} of type {go_type}")


def _checked_messages(messages: Any) -> list[dict[str, str]]:
    """The role and text of each message; Ollama takes no lists of parts, data URLs or arguments in a string."""
    _expect(messages if messages is not None else [], list, "ChatRequest.messages", "[]api.Message")
    checked = []
    for message in messages or []:
        _expect(message, dict, "ChatRequest.messages", "api.Message")
        content = message.get("content") or ""
        _expect(content, str, "Alias.content", "string")
        _check_images(message.get("images"))
        for call in message.get("tool_calls") or []:
            arguments = (call.get("function") or {}).get("arguments") or {}
            _expect(arguments, dict, "ToolCallFunction.arguments", "api.ToolCallFunctionArguments")
        checked.append({"role": str(message.get("role", "")).lower(), "content": content})
    return checked


def _check_images(images: Any) -> None:
    for image in images or []:
        _expect(image, str, "Alias.images", "[]api.ImageData")
        try:
            base64.b64decode(image, validate=True)
        except binascii.Error:
            bad = next(
                (place for place, letter in enumerate(image) if not re.match(r"[A-Za-z0-9+/=]", letter)), len(image)
            )
            raise Refusal(400, f"illegal base64 data at input byte {bad}") from None


def _check_format(wanted: Any) -> None:
    if wanted not in (None, "", "json") and not isinstance(wanted, dict):
        raise Refusal(500, f'invalid format: {json.dumps(wanted)}; expected "json" or a valid JSON Schema object')


def _check_options(body: Mapping[str, Any]) -> None:
    options = body.get("options") or {}
    _expect(options, dict, "ChatRequest.options", "map[string]interface {}")
    for name, value in options.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in FLOAT_OPTIONS and value is not None and not number:
            raise Refusal(500, f'option "{name}" must be of type float32')
        if name in INT_OPTIONS and value is not None and not number:
            raise Refusal(500, f'option "{name}" must be of type integer')
        if name == "stop" and value is not None and not isinstance(value, list):
            raise Refusal(500, 'option "stop" must be of type array')


def _embed_inputs(value: Any) -> list[str]:
    if value is None or value == "":
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refusal(400, "invalid input type")
    return texts


GO_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def _keep_alive_seconds(value: Any) -> float | None:
    """None when the request leaves the setting as it is."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refusal(400, f"invalid keep_alive: {json.dumps(value)}")
    seconds = _duration_seconds(value) if isinstance(value, str) else float(value)
    return FOREVER_SECONDS if seconds < 0 else seconds


def _duration_seconds(text: str) -> float:
    if text.lstrip("+-") == "0":
        return 0.0
    if not re.fullmatch(r"[+-]?(?:\d+(?:\.\d+)?(?:ms|s|m|h))+", text):
        problem = "missing unit in" if re.fullmatch(r"[+-]?[\d.]+", text) else "invalid"
        raise Refusal(400, f'time: {problem} duration "{text}"')
    pieces = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    seconds = sum(float(number) * GO_UNITS[unit] for number, unit in pieces)
    return -seconds if text.startswith("-") else seconds


def _host_allowed(headers: Mapping[str, str]) -> bool:
    """Ollama on loopback answers only to names that cannot be someone else's."""
    name = urlsplit(f"//{headers.get('host', '')}").hostname or "localhost"
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith((".localhost", ".local", ".internal"))
    return address.is_loopback or address.is_private or address.is_unspecified


def _origin_allowed(headers: Mapping[str, str]) -> bool:
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).hostname in ("localhost", "127.0.0.1", "0.0.0.0")
