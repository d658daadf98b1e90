"""OpenAI requests become Ollama's native ones."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.providers.ollama import KIND
from tests.wire.ollama_calls import OPERATIONS, Json, call, chat, native, vectors

VECTORS = vectors("ollama_requests")
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n and so on").decode()
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
CALLED: Json = {"role": "assistant", "content": None, "tool_calls": []}

# Texts of Go's decoder, or with Go's names for types. Only status and type are compared.
GO_TEXTS = {
    "chat_seed_float_rejected",
    "chat_max_tokens_string_rejected",
    "chat_tools_bad_property_rejected",
    "chat_tool_args_object_type_rejected",
    "chat_content_number_rejected",
    "chat_messages_empty_rejected",
    "chat_messages_missing_rejected",
    "cmpl_stop_non_string_rejected",
    "cmpl_prompt_list_rejected",
}

# Where Hearth differs from what a vector shows, on purpose: (native body without model and stream, or a refused param).
HI = [{"role": "user", "content": "Hi"}]
PARIS = {"id": "call_abc123", "function": {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}}
DIFFERENT: dict[str, Json | str] = {
    # Null is absent, and absent stays absent: the 1 that Ollama puts would override the model author's value.
    "chat_null_optionals": {"messages": HI},
    # Without its schema there is nothing to constrain the answer by, and free text is not what was asked for.
    "chat_response_format_schema_missing": "response_format.json_schema.schema",
    # Templates walk over the properties, where Ollama would put a null.
    "chat_tools_without_parameters": {
        "messages": HI,
        "tools": [
            {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}
        ],
    },
    # The context size is the operator's: a client that varies it would have the model loaded anew each time.
    "gw_extensions_forwarded": {"messages": HI, "options": {"top_k": 20, "temperature": 0.3}, "keep_alive": "1h"},
    # From here on: quirks of Ollama's.
    "chat_developer_role_passthrough": {"messages": [{"role": "system", "content": "Be brief."}, *HI]},
    "chat_stop_list_drops_non_strings": "stop",
    "chat_stop_empty_list": {"messages": HI},
    "chat_max_completion_tokens_ignored": {"messages": HI, "options": {"num_predict": 128}},
    "chat_reasoning_object_empty_masks_effort": {"messages": HI, "think": "high"},
    "chat_ignored_fields": "n",
    "chat_ollama_extensions_ignored": {
        "messages": HI,
        "keep_alive": "1h",
        "think": False,
        "format": "json",
        "truncate": False,
    },
    "chat_assistant_null_content_no_calls_rejected": {"messages": [*HI, {"role": "assistant", "content": ""}]},
    "chat_tool_args_empty_string_rejected": {
        "messages": [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "function": {"index": 0, "name": "f", "arguments": {}}}],
            }
        ]
    },
    "chat_content_parts_two_texts": {"messages": [{"role": "user", "content": "a\n\nb"}]},
    "chat_content_empty_list_drops_message": {"messages": [*HI, {"role": "user", "content": ""}]},
    "chat_tool_content_parts_lose_ids": {
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [PARIS]},
            {"role": "tool", "content": "18C", "tool_call_id": "call_abc123", "tool_name": "get_weather"},
        ]
    },
    "chat_parts_calls_attach_to_previous": {
        "messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [PARIS]}]
    },
    "cmpl_top_p_zero_becomes_one": {"prompt": "x", "options": {"top_p": 0}},
    "cmpl_ignored_fields": "n",
    "emb_token_list": "input",
}


def refused(fields: Json, path: str = "/v1/chat/completions", **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        KIND.translate(call(fields, path, **more))
    return caught.value


def as_decoded(body: Json) -> Json:
    """A native body as Ollama's decoder takes it, so that two that mean the same compare equal."""
    body = {key: value for key, value in body.items() if value is not None}
    # Ollama writes these three empty strings and two zeros for what the client left out. Hearth leaves them out too,
    # which for the penalties is not the same: the model author's own values then hold.
    for key in ("suffix", "system", "template"):
        if body.get(key) == "":
            del body[key]
    options = {key: value for key, value in body.pop("options", {}).items() if value is not None}
    for key in ("frequency_penalty", "presence_penalty"):
        if options.get(key) == 0:
            del options[key]
    if options:
        body["options"] = options
    if "tools" in body:
        body["tools"] = [_decoded_tool(tool) for tool in body["tools"]]
    return body


def _decoded_tool(tool: Json) -> Json:
    function = {key: tool["function"][key] for key in ("name", "description", "parameters") if key in tool["function"]}
    function["parameters"] = {
        key: value
        for key, value in _decoded_property(function["parameters"]).items()
        if key in ("type", "$defs", "items", "required", "properties")
    }
    return {"type": tool["type"], "function": function}


def _decoded_property(schema: Json) -> Json:
    kept = ("type", "description", "enum", "items", "properties", "required", "anyOf", "$defs")
    schema = {key: value for key, value in schema.items() if key in kept}
    if "properties" in schema:
        schema["properties"] = {name: _decoded_property(inner) for name, inner in schema["properties"].items()}
    return schema


@pytest.mark.parametrize("name", [name for name in VECTORS if name not in DIFFERENT and not VECTORS[name]["quirk"]])
def test_vector_holds(name: str) -> None:
    vector = VECTORS[name]
    request, expected = vector["input"], vector["expected"]
    fields = request["body"]

    if "status" in expected:
        error = refused(fields, request["path"])
        assert (error.status, error.type) == (expected["status"], expected["body"]["error"]["type"])
        if name not in GO_TEXTS:
            # Hearth adds to some of Ollama's words what to do.
            assert error.message.startswith(expected["body"]["error"]["message"])
        if vector["basis"] == "gateway":
            assert (error.param, error.code) == (expected["body"]["error"]["param"], expected["body"]["error"]["code"])
    else:
        outgoing = KIND.translate(call(fields, request["path"]))
        assert outgoing.path == expected["native_path"]
        assert as_decoded(json.loads(outgoing.body)) == as_decoded(expected["native_body"])


@pytest.mark.parametrize("name", DIFFERENT)
def test_behaviour_that_is_not_copied(name: str) -> None:
    request, expected = VECTORS[name]["input"], DIFFERENT[name]

    if isinstance(expected, str):
        assert refused(request["body"], request["path"]).param == expected
    else:
        body = native(call(request["body"], request["path"]))
        assert (body.pop("model"), body.pop("stream")) == (request["body"]["model"], False)
        assert body == expected


def test_every_quirk_has_an_answer() -> None:
    quirks = {name for name, vector in VECTORS.items() if vector["quirk"]}
    # Shown by gw_content_parts_merged, which has the same text and image in one message.
    assert quirks - set(DIFFERENT) == {"chat_content_parts_text_image"}


@pytest.mark.parametrize("name", VECTORS)
def test_request_is_never_changed(name: str) -> None:
    request = vectors("ollama_requests")[name]["input"]  # read anew, as no other test has had it
    made = call(request["body"], request["path"], num_ctx=4096, capabilities=["tools"])
    before = copy.deepcopy(made)

    with contextlib.suppress(InvalidRequest):
        KIND.translate(made)

    assert made == before


# -- the whole request


def test_node_is_asked_by_its_own_name() -> None:
    assert native(call(chat(model="fast"), node_model="llama3.2:latest"))["model"] == "llama3.2:latest"


def test_absent_sampling_fields_stay_absent() -> None:
    assert native(call(chat())) == {"model": "llama3.2", "messages": HI, "stream": False}


@pytest.mark.parametrize("path", OPERATIONS)
def test_operator_sets_the_context_size(path: str) -> None:
    fields = chat(prompt="x", input="x", num_ctx=99, options={"num_ctx": 77, "num_gpu": 0, "num_thread": 1})
    assert native(call(fields, path, num_ctx=8192))["options"] == {"num_ctx": 8192}


def test_openai_fields_win_over_extensions() -> None:
    fields = chat(
        options={"temperature": 2, "top_k": 1, "num_predict": 1, "seed": None, "stop": ["a"]},
        temperature=0,
        top_k=5,
        num_predict=2,
        max_tokens=3,
        stop="b",
    )
    assert native(call(fields))["options"] == {"temperature": 0, "top_k": 5, "num_predict": 3, "stop": ["b"]}


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("top_k", "top_k"),
        ("min_p", "min_p"),
        ("typical_p", "typical_p"),
        ("repeat_penalty", "repeat_penalty"),
        ("repetition_penalty", "repeat_penalty"),
        ("repeat_last_n", "repeat_last_n"),
        ("num_keep", "num_keep"),
        ("num_predict", "num_predict"),
    ],
)
def test_sampling_extensions_become_options(field: str, option: str) -> None:
    assert native(call(chat(**{field: 1})))["options"] == {option: 1}


@pytest.mark.parametrize("path", OPERATIONS)
def test_keep_alive_and_truncate_go_to_the_top(path: str) -> None:
    body = native(call(chat(prompt="x", input="x", keep_alive=-1, truncate=False), path))
    assert (body["keep_alive"], body["truncate"]) == (-1, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", []),
        ("seed", "1"),
        ("seed", True),
        ("max_tokens", 1.0),
        ("max_completion_tokens", "9"),
        ("frequency_penalty", "0"),
        ("presence_penalty", {}),
        ("top_k", 0.5),
        ("min_p", "0.1"),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", ["a", None]),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("n", "2"),
        ("n", 0),
        ("response_format", "json"),
        ("reasoning_effort", 1),
        ("reasoning", "high"),
        ("think", "very"),
        ("think", 1),
        ("format", "yaml"),
        ("format", []),
        ("keep_alive", True),
        ("truncate", "no"),
        ("options", []),
        ("tools", {}),
        ("tools", "none"),
        ("tool_choice", 5),
        ("tool_choice", "maybe"),
        ("tool_choice", {"type": "function"}),
        ("functions", "f"),
    ],
)
def test_wrong_types_are_refused_by_name(field: str, value: Any) -> None:
    error = refused(chat(**{field: value}))
    assert (error.status, error.param) == (400, field)
    assert field in error.message


def test_null_is_the_same_as_absent() -> None:
    nothing = dict.fromkeys(
        [
            *("n", "stop", "tools", "tool_choice", "functions", "function_call", "response_format", "reasoning"),
            *("reasoning_effort", "think", "format", "keep_alive", "truncate", "options", "logprobs", "top_k"),
        ]
    )
    assert native(call(chat(**nothing))) == native(call(chat()))


def test_empty_stop_texts_are_left_out() -> None:
    # Every text contains the empty one: the model would stop at once.
    assert native(call(chat(stop=["", "END"])))["options"] == {"stop": ["END"]}
    assert "options" not in native(call(chat(stop="")))


def test_request_nested_deeper_than_can_be_written_is_refused() -> None:
    schema: Json = {}
    for _ in range(900):
        schema = {"items": schema}

    assert "nested" in refused(chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})).message
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert "nested" in refused(chat(tools=[tool])).message


@pytest.mark.parametrize("model", ["gpt-oss:120b-cloud", "gpt-oss:cloud", "GPT-OSS:Cloud", "x:y:cloud"])
def test_local_only_request_never_reaches_ollamas_cloud(model: str) -> None:
    # Ollama sends these names on to ollama.com, whatever tier the node is in.
    error = refused(chat(model=model), local_only=True)
    assert (error.param, error.code) == ("model", "local_only")
    assert native(call(chat(model=model)))["model"] == model


@pytest.mark.parametrize("model", ["llama3.2", "my-cloud", "x:y-cloudy", "cloud/x:1b"])
def test_local_models_serve_local_only_requests(model: str) -> None:
    assert native(call(chat(model=model), local_only=True))["model"] == model


# -- thinking


@pytest.mark.parametrize(
    ("effort", "think"),
    [
        ("none", False),
        ("minimal", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "high"),
        ("xhigh", "max"),
        ("ultra", "max"),
        ("max", "max"),
    ],
)
def test_reasoning_effort_becomes_think(effort: str, think: bool | str) -> None:
    assert native(call(chat(reasoning_effort=effort)))["think"] == think
    assert native(call(chat(reasoning={"effort": effort}, reasoning_effort="low")))["think"] == think


def test_model_that_cannot_think_is_not_asked_to() -> None:
    asked = chat(reasoning_effort="high")
    assert "think" not in native(call(asked, capabilities=["completion"]))
    assert native(call(asked, capabilities=["thinking"]))["think"] == "high"
    assert native(call(asked, capabilities=None))["think"] == "high"


def test_thinking_can_be_switched_off_on_any_model() -> None:
    assert native(call(chat(reasoning_effort="none"), capabilities=["completion"]))["think"] is False
    assert native(call(chat(think=False)))["think"] is False


def test_reasoning_effort_wins_over_think() -> None:
    assert native(call(chat(think=True, reasoning_effort="low")))["think"] == "low"


# -- tools


def function(tool: Json) -> Json:
    return {"type": "function", "function": tool}


def offered(fields: Json) -> list[str]:
    return [tool["function"]["name"] for tool in native(call(fields)).get("tools", [])]


@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_all_tools_are_offered(choice: str | None) -> None:
    assert offered(chat(tools=[function(WEATHER), function(TIME)], tool_choice=choice)) == ["get_weather", "get_time"]


def test_named_tool_must_be_among_the_tools() -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    assert refused(chat(tools=[function(WEATHER)], tool_choice=choice)).param == "tool_choice"


def test_old_functions_become_tools() -> None:
    fields = chat(functions=[WEATHER, TIME])
    assert native(call(fields))["tools"] == [function(WEATHER), function(TIME)]
    assert offered({**fields, "function_call": "none"}) == []
    assert offered({**fields, "function_call": {"name": "get_time"}}) == ["get_time"]


def test_old_function_history_becomes_tool_history() -> None:
    body = native(
        call(
            chat(
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}},
                {"role": "function", "name": "f", "content": "done"},
            )
        )
    )
    assert body["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "done", "tool_name": "f"},
    ]


@pytest.mark.parametrize(
    "tool",
    [
        "get_weather",
        {"type": "web_search"},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": 5}},
        {"type": "custom", "custom": {"name": "x"}},
    ],
)
def test_tools_that_are_no_functions_are_refused(tool: Any) -> None:
    assert refused(chat(tools=[function(TIME), tool])).param == "tools[1]"


@pytest.mark.parametrize(
    "parameters",
    [
        [],
        {"type": ["object", "null"]},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": {"properties": {"b": True}}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, False]}}},
    ],
)
def test_schemas_that_ollama_cannot_read_are_refused(parameters: Any) -> None:
    error = refused(chat(tools=[function({"name": "f", "parameters": parameters})]))
    assert error.param is not None
    assert error.param.startswith("tools[0].parameters")


def test_parallel_calls_and_their_results_keep_their_names() -> None:
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(["a", "b", "a"])
    ]
    results = [{"role": "tool", "tool_call_id": f"c{index}", "content": "x"} for index in (2, 0, 1)]

    messages = native(call(chat({**CALLED, "tool_calls": calls}, *results)))["messages"]

    assert [made["function"]["index"] for made in messages[0]["tool_calls"]] == [0, 1, 2]
    assert [message["tool_name"] for message in messages[1:]] == ["a", "a", "b"]


def test_id_used_again_means_the_latest_call_before_the_result() -> None:
    # Some servers count from call_0 in every turn.
    def turn(name: str) -> list[Json]:
        made = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return [{**CALLED, "tool_calls": [made]}, {"role": "tool", "tool_call_id": "call_0", "content": "x"}]

    messages = native(call(chat(*turn("a"), *turn("b"))))["messages"]

    assert [message["tool_name"] for message in messages if message["role"] == "tool"] == ["a", "b"]


def with_arguments(text: Any) -> Json:
    return chat({**CALLED, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": text}}]})


@pytest.mark.parametrize(
    "text",
    ['{"n":123456789012345678901234567890,"m":-9007199254740993}', '{"x":1.0,"y":1e300,"z":0.10000000000000000001}'],
)
def test_numbers_in_arguments_keep_their_text(text: str) -> None:
    assert text.encode() in KIND.translate(call(with_arguments(text))).body


@pytest.mark.parametrize("text", ["", " \n", "null", None])
def test_blank_arguments_are_an_empty_object(text: str | None) -> None:
    assert native(call(with_arguments(text)))["messages"][0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("text", ["{", '{"a":1}}', '{"a":1},"role":"system"', "[1]", '"a"', "5", "{'a': 1}", "NaN"])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    # They are spliced into the body as they are, so that nothing else may get through.
    assert refused(with_arguments(text)).param == "messages[0].tool_calls[0].function.arguments"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans())
def test_any_arguments_arrive_as_they_were(arguments: Json, indented: bool) -> None:
    text = json.dumps(arguments, indent=2 if indented else None)
    body = native(call(with_arguments(text)))
    assert body["messages"][0]["tool_calls"][0]["function"]["arguments"] == arguments


# -- messages


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1]"),
        ({"role": "user", "content": {"a": 1}}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, "messages[1].content[0]"),
        ({"role": "assistant", "content": "x", "reasoning": 5}, "messages[1].reasoning"),
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": 5}]}, "messages[1].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "messages[1].tool_call_id"),
    ],
)
def test_broken_messages_are_refused_by_place(message: Any, param: str) -> None:
    assert refused(chat(HI[0], message)).param == param


@pytest.mark.parametrize("role", ["developer", "Developer"])
def test_developer_messages_become_system(role: str) -> None:
    assert native(call(chat({"role": role, "content": "x"})))["messages"][0]["role"] == "system"


def test_empty_reasoning_leaves_room_for_reasoning_content() -> None:
    message = {"role": "assistant", "content": "4", "reasoning": "", "reasoning_content": "2+2"}
    assert native(call(chat(message)))["messages"][0]["thinking"] == "2+2"


def image(url: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


def test_images_keep_their_order_and_lose_their_prefix() -> None:
    other = base64.b64encode(b"another").decode()
    parts = [
        image(f"data:image/png;base64,{PNG}"),
        {"type": "text", "text": "a"},
        image(f"data:image/webp;base64,{other}"),
    ]
    assert native(call(chat({"role": "user", "content": parts})))["messages"] == [
        {"role": "user", "content": "a", "images": [PNG, other]}
    ]


def test_base64_may_have_line_breaks() -> None:
    broken = "\r\n".join([PNG[:8], PNG[8:]])
    body = native(call(chat({"role": "user", "content": [image(f"data:image/png;base64,{broken}")]})))
    assert body["messages"][0]["images"] == [PNG]


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/a.png",
        "HTTP://example.com/a.png",
        f"data:image/svg+xml;base64,{PNG}",
        f"data:image/png,{PNG}",
        f"data:image/png;charset=utf-8;base64,{PNG}",
        PNG,
        "",
        "data:image/png;base64,",
        "data:image/png;base64,AAA",
        "data:image/png;base64,A===",
        "data:image/png;base64,=AAA",
        "data:image/png;base64,AA=A",
        "data:image/png;base64,AAA-",
        "data:image/png;base64,AAAé",
        "file:///etc/passwd",
    ],
)
def test_images_that_ollama_cannot_read_are_refused(url: str) -> None:
    error = refused(chat({"role": "user", "content": [image(url)]}))
    assert error.param == "messages[0].content[0].image_url"


@given(st.binary(min_size=1, max_size=60))
def test_all_base64_is_accepted(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    body = native(call(chat({"role": "user", "content": [image(f"data:;base64,{encoded}")]})))
    assert base64.b64decode(body["messages"][0]["images"][0]) == data


# -- response formats


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "grammar"}, "response_format.type"),
        ({"type": 5}, "response_format.type"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
    ],
)
def test_response_formats_that_cannot_hold_are_refused(wanted: Json, param: str) -> None:
    assert refused(chat(response_format=wanted)).param == param


def test_response_format_wins_over_format() -> None:
    assert "format" not in native(call(chat(response_format={"type": "text"}, format="json")))


# -- completions and embeddings


def test_completion_takes_one_prompt_in_a_list() -> None:
    fields = {"model": "m", "prompt": ["a"], "suffix": ""}
    assert native(call(fields, "/v1/completions")) == {"model": "m", "prompt": "a", "stream": False}


@pytest.mark.parametrize("prompt", [None, [], [1, 2], [[1]], 5, ["a", "b"]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert refused({"model": "m", "prompt": prompt}, "/v1/completions").param == "prompt"


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("best_of", 2), ("n", 2), ("logprobs", 21)])
def test_completion_options_that_ollama_has_not_are_refused(field: str, value: Any) -> None:
    assert refused({"model": "m", "prompt": "x", field: value}, "/v1/completions").param == field


def test_completion_can_think_and_have_a_format() -> None:
    fields = {"model": "m", "prompt": "x", "reasoning_effort": "none", "response_format": {"type": "json_object"}}
    body = native(call(fields, "/v1/completions"))
    assert (body["think"], body["format"]) == (False, "json")


@pytest.mark.parametrize("texts", [None, [], 5, {}, [1, 2], [[1, 2]], ["a", 1], [None]])
def test_embeddings_of_anything_but_text_are_refused(texts: Any) -> None:
    assert refused({"model": "m", "input": texts}, "/v1/embeddings").param == "input"


@pytest.mark.parametrize("value", [0, -1, 1.5, "64"])
def test_dimensions_are_a_positive_number(value: Any) -> None:
    assert refused({"model": "m", "input": "x", "dimensions": value}, "/v1/embeddings").param == "dimensions"


@pytest.mark.parametrize("value", ["float", "Float", "BASE64"])
def test_encoding_format_may_have_any_case(value: str) -> None:
    fields = {"model": "m", "input": ["", "a"], "encoding_format": value}
    assert native(call(fields, "/v1/embeddings")) == {"model": "m", "input": ["", "a"]}


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("messages", "tools", "tool_choice", "functions", "stop", "response_format", "reasoning", "think"),
                *("format", "options", "prompt", "input", "n", "logprobs", "top_logprobs", "max_tokens"),
            ]
        ),
        json_values,
    ),
    st.sampled_from(list(OPERATIONS)),
)
def test_no_body_breaks_the_translator(fields: Json, path: str) -> None:
    # What the client sends is either translated or refused; anything else would be an error of ours.
    fields = orjson.loads(json.dumps({"model": "m", **fields}))

    with contextlib.suppress(InvalidRequest):
        assert json.loads(KIND.translate(call(fields, path)).body)["model"] == "m"
