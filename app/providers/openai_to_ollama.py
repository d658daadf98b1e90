"""Turns OpenAI requests into Ollama's native ones. Sans-I/O, and the client's fields are never changed.

Native, because Ollama's own `/v1` loses things: `max_completion_tokens`, `tool_choice`, `keep_alive`, errors in the
middle of a stream. Fields that the client left out stay out, so that the model author's defaults hold. What cannot be
done is an `InvalidRequest`, and then nothing is sent.

`tool_choice: "required"` and a named function cannot be enforced on Ollama: all tools, or only the named one, are
offered, and the model may still answer with text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from app.domain import Operation
from app.errors import InvalidRequest
from app.providers.base import Call, Outgoing

Fields = Mapping[str, Any]


def translate(call: Call) -> Outgoing:
    """The native request for a call. Raises `InvalidRequest` for what Ollama cannot do or could not read."""
    if call.request.local_only and _served_by_ollama_cloud(call.model):
        raise InvalidRequest(
            f"{call.model} runs in Ollama's cloud, and this request must stay local; ask for a local model",
            param="model",
            code="local_only",
        )
    path, build = _OPERATIONS[call.request.operation]
    try:
        return Outgoing(path, orjson.dumps(build(call)))
    except TypeError as error:
        # What came from JSON can always be written again, unless it is nested deeper than orjson writes (254).
        raise InvalidRequest("the request is nested too deeply") from error


def load(model: str, operation: Operation, num_ctx: int | None) -> Outgoing:
    """The request that only loads a model: one with nothing in it. It must have the options that requests have."""
    path, _ = _OPERATIONS[operation]
    # A server that would generate something all the same is to stop at once.
    options = {"num_predict": 1} if num_ctx is None else {"num_predict": 1, "num_ctx": num_ctx}
    return Outgoing(path, orjson.dumps({"model": model, **_NOTHING[operation], "options": options}))


def wants_function_call(fields: Fields) -> bool:
    """Whether the client uses the old `functions`, and so expects `function_call` in the answer."""
    return bool(fields.get("functions")) and not fields.get("tools")


def _chat(call: Call) -> dict[str, Any]:
    fields = call.request.fields
    if call.num_ctx is None and _PLAIN.issuperset(fields):
        return _plain_chat(call)
    _check_one_answer(fields)
    return _present(
        model=call.model,
        messages=_messages(fields),
        tools=_tools(fields) or None,
        logprobs=_field(fields, "logprobs", BOOLEAN),
        top_logprobs=_top_logprobs(fields, "top_logprobs"),
        **_generation(call),
    )


def _plain_chat(call: Call) -> dict[str, Any]:
    """The same for a request without anything rare, as most are, in a quarter of the time."""
    fields = call.request.fields
    body: dict[str, Any] = {"model": call.model, "messages": _messages(fields), "stream": call.request.stream}
    if sampling := _sampling(fields):
        body["options"] = sampling
    return body


def _completion(call: Call) -> dict[str, Any]:
    fields = call.request.fields
    _check_one_answer(fields)
    _check_completion(fields)
    top_logprobs = _top_logprobs(fields, "logprobs")
    return _present(
        model=call.model,
        prompt=_prompt(fields),
        suffix=_field(fields, "suffix", STRING) or None,
        raw=_raw(call),
        logprobs=None if top_logprobs is None else True,
        top_logprobs=top_logprobs,
        **_generation(call),
    )


def _raw(call: Call) -> bool | None:
    """Without its template, a model goes on where the prompt ends; with it, it would answer its own words.

    The template that fills a gap before a suffix goes on by its nature.
    """
    return True if call.goes_on and not call.request.fields.get("suffix") else None


def _embedding(call: Call) -> dict[str, Any]:
    fields = call.request.fields
    _check_encoding_format(fields)
    return _present(
        model=call.model,
        input=_input(fields),
        dimensions=_dimensions(fields),
        options=_options(call, {}) or None,
        keep_alive=_field(fields, "keep_alive", DURATION),
        truncate=_field(fields, "truncate", BOOLEAN),
    )


_OPERATIONS: dict[Operation, tuple[str, Callable[[Call], dict[str, Any]]]] = {
    Operation.CHAT: ("/api/chat", _chat),
    Operation.COMPLETION: ("/api/generate", _completion),
    Operation.EMBEDDING: ("/api/embed", _embedding),
}


_NOTHING: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"messages": [], "stream": False},
    Operation.COMPLETION: {"prompt": "", "stream": False},
    Operation.EMBEDDING: {"input": ""},
}


def _generation(call: Call) -> dict[str, Any]:
    """What chat and completion share."""
    fields = call.request.fields
    return {
        "stream": call.request.stream,  # always said: without it Ollama streams
        "format": _format(fields),
        "think": _think(call),
        "options": _options(call, _sampling(fields)) or None,
        "keep_alive": _field(fields, "keep_alive", DURATION),
        "truncate": _field(fields, "truncate", BOOLEAN),
    }


def _served_by_ollama_cloud(model: str) -> bool:
    # Ollama sends `name:cloud` and `name:tag-cloud` on to ollama.com, whatever is installed.
    tag = model.rpartition(":")[2].strip().lower() if ":" in model else ""
    return tag == "cloud" or tag.endswith("-cloud")


# -- fields and their types


class _Type(NamedTuple):
    classes: tuple[type, ...]
    title: str


STRING = _Type((str,), "a string")
INTEGER = _Type((int,), "an integer")
NUMBER = _Type((int, float), "a number")
BOOLEAN = _Type((bool,), "true or false")
OBJECT = _Type((dict,), "an object")
LIST = _Type((list,), "a list")
DURATION = _Type((int, float, str), 'a number of seconds or a duration such as "10m"')


def _field(fields: Fields, key: str, type_: _Type, within: str = "") -> Any:
    """One optional field. Null is the same as absent; another type than the wanted one is refused."""
    value = fields.get(key)
    if value is None:
        return None
    # Not isinstance: JSON's true is no number.
    if type(value) in type_.classes:
        return value
    raise _must_be(within + key, type_.title)


def _must_be(param: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {wanted}", param=param)


def _unsupported(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="unsupported_value")


def _present(**body: Any) -> dict[str, Any]:
    """The body without the keys that have no value."""
    return {key: value for key, value in body.items() if value is not None}


# -- sampling and other options


class _Option(NamedTuple):
    field: str
    option: str
    type: _Type


# Later rows win. OpenAI's own fields come last, so that they win over the extensions.
_OPTIONS = (
    _Option("top_k", "top_k", INTEGER),
    _Option("min_p", "min_p", NUMBER),
    _Option("typical_p", "typical_p", NUMBER),
    _Option("repetition_penalty", "repeat_penalty", NUMBER),  # vLLM's name for it
    _Option("repeat_penalty", "repeat_penalty", NUMBER),
    _Option("repeat_last_n", "repeat_last_n", INTEGER),
    _Option("num_keep", "num_keep", INTEGER),
    _Option("num_predict", "num_predict", INTEGER),
    _Option("temperature", "temperature", NUMBER),
    _Option("top_p", "top_p", NUMBER),
    _Option("seed", "seed", INTEGER),
    _Option("frequency_penalty", "frequency_penalty", NUMBER),
    _Option("presence_penalty", "presence_penalty", NUMBER),
    _Option("max_tokens", "num_predict", INTEGER),
    _Option("max_completion_tokens", "num_predict", INTEGER),  # OpenAI deprecated max_tokens in its favour
)

_OPTION_FIELDS = frozenset(option.field for option in _OPTIONS)

# Fields that mean nothing else to Ollama than that.
_PLAIN = frozenset({"model", "messages", "stream", "stream_options", "user", "stop"}) | _OPTION_FIELDS

# Another value of one of these makes Ollama load the model anew, which stops everyone else who uses it.
_LOAD_OPTIONS = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "draft_num_predict"}
)


def _options(call: Call, sampling: dict[str, Any]) -> dict[str, Any]:
    """The client's own `options`, then its sampling fields, then the operator's context size."""
    given = _field(call.request.fields, "options", OBJECT)
    if not given and call.num_ctx is None:
        return sampling
    given = given or {}
    options = {key: value for key, value in given.items() if value is not None and key not in _LOAD_OPTIONS}
    options.update(sampling)
    if call.num_ctx is not None:
        options["num_ctx"] = call.num_ctx
    return options


def _sampling(fields: Fields) -> dict[str, Any]:
    sampling = {} if _OPTION_FIELDS.isdisjoint(fields) else _given_options(fields)
    if "stop" in fields and (stop := _stop(fields)):
        sampling["stop"] = stop
    return sampling


def _given_options(fields: Fields) -> dict[str, Any]:
    options = {}
    for row in _OPTIONS:
        if row.field in fields and (value := _field(fields, row.field, row.type)) is not None:
            options[row.option] = value
    return options


def _stop(fields: Fields) -> list[str]:
    stop = fields.get("stop")
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _must_be("stop", "a string or a list of strings")
    # Every text contains the empty one, so that it would stop the model at once.
    return [text for text in texts if text]


def _check_one_answer(fields: Fields) -> None:
    count = _field(fields, "n", INTEGER)
    if count is not None and count > 1:
        raise _unsupported("n > 1 is not supported", "n")
    if count is not None and count < 1:
        raise _must_be("n", "1")


def _top_logprobs(fields: Fields, key: str) -> int | None:
    count: int | None = _field(fields, key, INTEGER)
    if count is not None and not 0 <= count <= 20:
        raise InvalidRequest(f"{key} must be between 0 and 20", param=key)
    return count


def _format(fields: Fields) -> Any:
    """Ollama's `format`: "json", a JSON Schema, or None for free text."""
    wanted = _field(fields, "response_format", OBJECT)
    if wanted is None:
        return _native_format(fields)
    name = _field(wanted, "type", STRING, "response_format.")
    match (name or "").strip().lower():
        case "text":
            return None
        case "json_object":
            return "json"
        case "json_schema":
            return _schema(wanted)
    raise InvalidRequest("response_format.type must be text, json_object or json_schema", param="response_format.type")


def _schema(wanted: Fields) -> Any:
    holder = _field(wanted, "json_schema", OBJECT, "response_format.") or {}
    schema = _field(holder, "schema", OBJECT, "response_format.json_schema.")
    if schema is None:
        # Ollama answers with free text then, which is the one thing that the client did not want.
        raise _must_be("response_format.json_schema.schema", "a JSON Schema object")
    return schema


def _native_format(fields: Fields) -> Any:
    value = fields.get("format")
    if value in (None, "", "json") or isinstance(value, dict):
        return value or None
    raise _must_be("format", '"json" or a JSON Schema object')


_EFFORTS: dict[str, bool | str] = {
    "none": False,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "ultra": "max",
    "max": "max",
}


def _think(call: Call) -> bool | str | None:
    """How much to think; None leaves it to the model.

    A model that cannot think gets no wish to think: Ollama would refuse the request, OpenAI's clients send the effort
    whatever the model.
    """
    wish = _thinking_wish(call.request.fields)
    able = call.capabilities is None or "thinking" in call.capabilities
    return wish if able or not wish else None


def _thinking_wish(fields: Fields) -> bool | str | None:
    reasoning = _field(fields, "reasoning", OBJECT) or {}
    effort = _field(reasoning, "effort", STRING, "reasoning.") or _field(fields, "reasoning_effort", STRING)
    if not effort:
        return _native_think(fields)
    if effort not in _EFFORTS:
        raise InvalidRequest(
            f'invalid reasoning value: "{effort[:40]}" (must be "minimal", "low", "medium", "high", "xhigh", "ultra", '
            '"max", or "none")',
            param="reasoning.effort" if reasoning.get("effort") else "reasoning_effort",
        )
    return _EFFORTS[effort]


def _native_think(fields: Fields) -> bool | str | None:
    think = fields.get("think")
    if (
        think is None
        or isinstance(think, bool)
        or (isinstance(think, str) and think in {"low", "medium", "high", "max"})
    ):
        return think
    raise _must_be("think", "true, false, low, medium, high or max")


# -- tools


def _tools(fields: Fields) -> list[Any]:
    """The tools to offer, after `tool_choice`."""
    if wants_function_call(fields):
        functions = _field(fields, "functions", LIST)
        tools = [_tool({"function": function}, f"functions[{index}]") for index, function in enumerate(functions)]
        return _chosen(tools, fields.get("function_call"), "function_call")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(_field(fields, "tools", LIST) or [])]
    return _chosen(tools, fields.get("tool_choice"), "tool_choice")


def _tool(tool: Any, param: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{param} must be a function with a name; Ollama knows no other tools", param=param)
    parameters = _field(function, "parameters", OBJECT, f"{param}.")
    if parameters is None:
        # Left out, templates would see a null where they walk over the properties.
        function = {**function, "parameters": {"type": "object", "properties": {}}}
    else:
        _check_parameters(parameters, f"{param}.parameters")
    return {"type": "function", **tool, "function": function}


def _check_parameters(parameters: dict[str, Any], param: str) -> None:
    """Refuses what Ollama's decoder cannot read: a list of types at the top, and true or false as a schema.

    Walks with a list instead of calling itself, because the client decides how deep it goes.
    """
    _field(parameters, "type", STRING, f"{param}.")
    unseen = [parameters]
    while unseen:
        schema = unseen.pop()
        properties = _field(schema, "properties", OBJECT, f"{param}.") or {}
        choices = _field(schema, "anyOf", LIST, f"{param}.") or []
        for inner in (*properties.values(), *choices):
            if not isinstance(inner, dict):
                raise InvalidRequest(f"{param}: every property must be described by an object", param=param)
            unseen.append(inner)


def _chosen(tools: list[Any], choice: Any, param: str) -> list[Any]:
    if choice is None or choice in ("auto", "required"):
        return tools
    if choice == "none":
        return []  # the one reliable way to forbid calls
    name = _choice_name(choice)
    if name is None:
        raise _must_be(param, "none, auto, required or a named function")
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise InvalidRequest(f"{param} names {name[:80]}, which is not among the tools", param=param)
    return named


def _choice_name(choice: Any) -> str | None:
    holder = choice.get("function", choice) if isinstance(choice, dict) else None
    name = holder.get("name") if isinstance(holder, dict) else None
    return name if isinstance(name, str) else None


# -- messages


_COMMON_ROLES = ("user", "assistant", "system")


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _must_be("messages", "a list with at least one message")
    names: dict[str, str] = {}  # of the functions called so far, by the call's id
    return [
        message if _is_plain(message) else _message(message, f"messages[{index}]", names)
        for index, message in enumerate(messages)
    ]


def _is_plain(message: Any) -> bool:
    """Whether it is a native message already, as most are: a text from one of the roles that both sides know."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") in _COMMON_ROLES
    )


def _message(message: Any, param: str, names: dict[str, str]) -> dict[str, Any]:
    """One native message for one of OpenAI's, so that templates that want alternating roles keep working."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _must_be(param, "an object with a role")
    within = f"{param}."
    content, images = _content(message.get("content"), f"{within}content")
    return _present(
        role=_role(message["role"]),
        content=content,
        images=images or None,
        thinking=_thinking(message, within),
        tool_calls=_tool_calls(message, within, names) or None,
        **_tool_result(message, within, names),
    )


def _role(role: str) -> str:
    # Most templates know neither of OpenAI's two, and would drop the message.
    return {"developer": "system", "function": "tool"}.get(role.lower(), role)


def _thinking(message: Fields, within: str) -> str | None:
    thinking = _field(message, "reasoning", STRING, within) or _field(message, "reasoning_content", STRING, within)
    return thinking or None


def _tool_result(message: Fields, within: str, names: Mapping[str, str]) -> dict[str, str | None]:
    """Which call a tool message answers. Many templates print the name, which OpenAI's clients leave out."""
    if message["role"].lower() not in ("tool", "function"):
        return {}
    call_id = _field(message, "tool_call_id", STRING, within) or None
    name = _field(message, "name", STRING, within) or (names.get(call_id) if call_id else None)
    return {"tool_call_id": call_id, "tool_name": name}


def _tool_calls(message: Fields, within: str, names: dict[str, str]) -> list[dict[str, Any]]:
    calls = _field(message, "tool_calls", LIST, within) or []
    old = _field(message, "function_call", OBJECT, within)
    if old and not calls:
        return [{"function": _called(old, 0, f"{within}function_call")}]
    return [_tool_call(call, index, f"{within}tool_calls[{index}]", names) for index, call in enumerate(calls)]


def _tool_call(call: Any, index: int, param: str, names: dict[str, str]) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _must_be(param, "an object")
    call_id = _field(call, "id", STRING, f"{param}.") or None
    function = _called(call.get("function"), index, f"{param}.function")
    if call_id:
        names[call_id] = function["name"]
    return _present(id=call_id, function=function)


def _called(function: Any, index: int, param: str) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _must_be(param, "an object with a name")
    arguments = _field(function, "arguments", STRING, f"{param}.") or ""
    return {"index": index, "name": function["name"], "arguments": _arguments(arguments, f"{param}.arguments")}


def _arguments(text: str, param: str) -> Any:
    """The arguments as an object, in the client's own text: decoded and written again, long integers would change."""
    if text.strip() in ("", "null"):
        return {}  # clients send these for calls without arguments
    try:
        decoded = orjson.loads(text)
    except orjson.JSONDecodeError:
        decoded = None
    if not isinstance(decoded, dict):
        raise InvalidRequest("invalid tool call arguments: they must be the text of a JSON object", param=param)
    return orjson.Fragment(text)


# -- content


def _content(content: Any, param: str) -> tuple[str, list[str]]:
    """A message's text, its parts joined by blank lines, and its images and sounds as bare base64."""
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, list):
        raise InvalidRequest(f"invalid message content type: {param} must be a string or a list of parts", param=param)
    texts: list[str] = []
    images: list[str] = []
    for index, part in enumerate(content):
        _take_part(part, f"{param}[{index}]", texts, images)
    return "\n\n".join(texts), images


def _take_part(part: Any, param: str, texts: list[str], images: list[str]) -> None:
    match part:
        case {"type": "text", "text": str(text)}:
            texts.append(text)
        case {"type": "image_url", "image_url": str(url) | {"url": str(url)}}:
            images.append(_image(url, f"{param}.image_url"))
        case {"type": "input_audio", "input_audio": {"data": str(data)}}:
            images.append(_base64(data, "invalid message format: the audio is no base64", f"{param}.input_audio"))
        case _:
            raise InvalidRequest(
                f"invalid message format: {param} must be a text, image_url or input_audio part", param=param
            )


_IMAGE_TYPES = frozenset({"", "image/jpeg", "image/jpg", "image/png", "image/webp"})


def _image(url: str, param: str) -> str:
    if url[:8].lower().startswith(("http://", "https://")):
        raise _unsupported(
            "image URLs are not currently supported, please use base64 encoded data instead", param=param
        )
    head, comma, data = url.partition(",")
    scheme, _, rest = head.partition(":")
    media_type, _, encoding = rest.partition(";")
    if not comma or scheme.lower() != "data" or encoding != "base64" or media_type.lower() not in _IMAGE_TYPES:
        raise InvalidRequest(
            "invalid image input: it must be a data URL with a JPEG, PNG or WebP image in base64", param=param
        )
    return _base64(data, "invalid image input: the data is no base64", param)


_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def _base64(data: str, complaint: str, param: str) -> str:
    """The data without line breaks, checked by its letters: decoding costs four times as much, for megabytes."""
    if "\n" in data:
        data = data.replace("\r", "").replace("\n", "")
    encoded = data.encode()
    padding = encoded.translate(None, _BASE64)
    if not data or len(data) % 4 or padding not in (b"", b"=", b"==") or not encoded.endswith(padding):
        raise InvalidRequest(complaint, param=param)
    return data


# -- completions and embeddings


def _check_completion(fields: Fields) -> None:
    if _field(fields, "echo", BOOLEAN):
        raise _unsupported("echo is not supported", "echo")
    if (_field(fields, "best_of", INTEGER) or 1) > 1:
        raise _unsupported("best_of > 1 is not supported", "best_of")


def _prompt(fields: Fields) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise _unsupported("prompt must be one string; several prompts and token arrays are not supported", "prompt")
    return prompt


def _input(fields: Fields) -> str | list[str]:
    texts = fields.get("input")
    if texts is None or texts == []:
        raise InvalidRequest("invalid input: it must be a string or a list of strings", param="input")
    if texts == "":
        return [""]  # a bare "" would only load the model
    if isinstance(texts, str) or (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        return texts
    raise _unsupported("input must be a string or an array of strings; token arrays are not supported", "input")


def _dimensions(fields: Fields) -> int | None:
    dimensions: int | None = _field(fields, "dimensions", INTEGER)
    if dimensions is not None and dimensions < 1:
        raise _must_be("dimensions", "1 or more")
    return dimensions


def _check_encoding_format(fields: Fields) -> None:
    encoding = _field(fields, "encoding_format", STRING)
    if encoding is not None and encoding.lower() not in ("float", "base64"):
        raise InvalidRequest(
            f"Invalid value for 'encoding_format' = {encoding[:40]}. Supported values: ['float', 'base64'].",
            param="encoding_format",
        )
