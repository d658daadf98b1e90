"""What a client's OpenAI request looks like when it reaches a node that speaks OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Operation
from app.errors import InvalidRequest
from app.providers import KINDS
from app.providers.json_splice import sole_member
from app.providers.openai_to_openai import PRIVATE_FIELDS
from tests.unit.openai_events import call

OPENAI_KINDS = sorted(name for name in KINDS if name != "ollama")


def sent(kind: str, *args: Any, **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(KINDS[kind].translate(call(*args, **fields)).body)
    return document


@pytest.mark.parametrize("kind", OPENAI_KINDS)
def test_request_that_needs_no_change_goes_on_as_the_same_object(kind: str) -> None:
    body = b'{ "model" : "m",\t"messages":[{"role":"user","content":"\\u00fc"}], "temperature":1.0, "x-new":[1e2] }'
    asked = call(body=body)

    assert KINDS[kind].translate(asked).body is body


@pytest.mark.parametrize(
    ("operation", "path"),
    [
        (Operation.CHAT, "/v1/chat/completions"),
        (Operation.COMPLETION, "/v1/completions"),
        (Operation.EMBEDDING, "/v1/embeddings"),
    ],
)
def test_each_operation_has_its_path(operation: Operation, path: str) -> None:
    assert KINDS["vllm"].translate(call(operation=operation)).path == path


def test_only_the_name_changes_when_the_node_knows_the_model_by_another() -> None:
    body = b'{"seed":18446744073709551617, "model" :\t"m\\u0061x", "messages":[], "n" : 1.50}'
    asked = call("max", node_model='org/"x"', body=body)

    outgoing = KINDS["generic"].translate(asked)

    assert outgoing.body == body.replace(b'"m\\u0061x"', rb'"org/\"x\""')


@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role":"user","content":"the \\"model\\": \\"x\\" and \\"model"}]',
        b'[{"role":"user","content":"model"}]',
        b'[{"role":"user","a\\"model":1,"content":["model"]}]',
    ],
)
def test_the_word_model_in_other_places_does_not_matter(messages: bytes) -> None:
    body = b'{"messages":' + messages + b',"model":"m","n":1.50}'

    assert KINDS["vllm"].translate(call(node_model="k", body=body)).body == body.replace(b'"m"', b'"k"')


def test_model_at_another_depth_is_not_renamed() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"model": "m"}}}}]

    document = sent("vllm", node_model="k", tools=tools)

    assert document["model"] == "k"
    assert document["tools"] == tools


def test_model_whose_name_is_written_in_an_odd_way_is_renamed_at_its_place() -> None:
    body = b'{"\\u006dodel":"m","messages":[{"model":"z"}]}'

    document = orjson.loads(KINDS["vllm"].translate(call(node_model="k", body=body)).body)

    assert document == {"model": "k", "messages": [{"model": "z"}]}


@pytest.mark.parametrize("text", [b'{"model":7}', b'{"model":{"model":"m"}}', b'["model"]', b'{"a":"model"}', b""])
def test_member_without_a_text_or_with_a_namesake_is_not_spliced(text: bytes) -> None:
    assert sole_member(text, b'"model"') is None


def test_rewriting_keeps_integers_of_any_size() -> None:
    body = b'{"model":"m","api_key":"x","seed":123456789012345678901234567890,"messages":[{"n":-9223372036854775809}]}'

    outgoing = KINDS["vllm"].translate(call(body=body))

    expected = {"model": "m", "seed": 123456789012345678901234567890, "messages": [{"n": -9223372036854775809}]}
    assert json.loads(outgoing.body) == expected


def test_body_too_deep_to_be_rewritten_is_refused() -> None:
    body = b'{"model":"m","api_key":"x","messages":' + b"[" * 300 + b"]" * 300 + b"}"

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        KINDS["vllm"].translate(call(body=body))


@pytest.mark.parametrize("kind", OPENAI_KINDS)
def test_fields_that_could_turn_a_node_against_others_never_reach_it(kind: str) -> None:
    private = dict.fromkeys(PRIVATE_FIELDS, "http://169.254.169.254")

    document = sent(kind, temperature=0, **private)

    assert document == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def test_the_request_itself_is_never_changed() -> None:
    asked = call(node_model="k", stream=True, api_key="x", max_tokens=None, tool_choice="auto", stream_options={"a": 1})
    before = orjson.dumps(asked.request.fields)

    for kind in KINDS.values():
        kind.translate(asked)

    assert orjson.dumps(asked.request.fields) == before


# -- usage


def test_stream_is_asked_to_count_tokens_and_is_otherwise_untouched() -> None:
    body = b' {"model":"m","stream":true,"messages":[],"n":1.50}'

    outgoing = KINDS["vllm"].translate(call(stream=True, body=body))

    assert outgoing.body == body.replace(b"{", b'{"stream_options":{"include_usage":true},', 1)


def test_renaming_and_counting_are_spliced_together() -> None:
    body = b'{"model":"m","stream":true,"messages":[],"n":1.50}'

    outgoing = KINDS["vllm"].translate(call(node_model="k", stream=True, body=body))

    assert outgoing.body == b'{"stream_options":{"include_usage":true},' + body[1:].replace(b'"m"', b'"k"')


@pytest.mark.parametrize("kind", ["generic", "transformers"])
def test_nodes_that_may_refuse_it_are_not_asked_to_count(kind: str) -> None:
    assert "stream_options" not in sent(kind, stream=True)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_options_without_usage_are_completed(options: Any) -> None:
    assert sent("sglang", stream=True, stream_options=options)["stream_options"] == {"include_usage": True}


def test_other_stream_options_stay() -> None:
    options = {"include_obfuscation": False}

    document = sent("cloud", stream=True, stream_options=options)

    assert document["stream_options"] == {"include_obfuscation": False, "include_usage": True}


@pytest.mark.parametrize("options", [{"include_usage": True}, "garbage", 7])
def test_options_that_say_it_or_are_no_options_are_left_alone(options: Any) -> None:
    asked = call(stream=True, stream_options=options)

    assert KINDS["vllm"].translate(asked).body == asked.request.body


def test_document_is_never_asked_to_count() -> None:
    asked = call()

    assert KINDS["vllm"].translate(asked).body is asked.request.body


def test_wish_for_usage_survives_another_change() -> None:
    document = sent("vllm", stream=True, api_key="x")

    assert document["stream_options"] == {"include_usage": True}


# -- fields that a kind chokes on


def test_tool_choice_without_tools_is_dropped() -> None:
    assert "tool_choice" not in sent("vllm", tool_choice="auto")
    assert "tool_choice" not in sent("vllm", tool_choice="auto", tools=[])
    assert sent("vllm", tool_choice="auto", tools=[{"type": "function"}])["tool_choice"] == "auto"


def test_nulls_are_dropped_for_the_kind_that_chokes_on_them_only() -> None:
    nulls: dict[str, Any] = {"max_tokens": None, "stop": None}

    assert sent("vllm", **nulls) == sent("vllm")
    assert sent("generic", **nulls) == {**sent("generic"), **nulls}


def test_null_in_a_required_field_is_left_for_the_node_to_refuse() -> None:
    assert sent("vllm", messages=None, stop=None) == {"model": "m", "messages": None}


@pytest.mark.parametrize("kind", ["tgi", "lmdeploy", "lmstudio", "transformers"])
def test_new_name_of_the_limit_becomes_the_old_one_where_only_that_is_known(kind: str) -> None:
    document = sent(kind, max_completion_tokens=5)

    assert document["max_tokens"] == 5
    assert "max_completion_tokens" not in document


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "generic"])
def test_both_names_of_the_limit_stay_where_both_are_known(kind: str) -> None:
    asked = call(max_completion_tokens=5, max_tokens=6)

    assert KINDS[kind].translate(asked).body is asked.request.body


@pytest.mark.parametrize(("new", "old", "limit"), [(5, 6, 5), (None, 6, 6), (5, None, 5)])
def test_of_two_limits_the_new_name_holds(new: int | None, old: int | None, limit: int) -> None:
    both = {"max_completion_tokens": new, "max_tokens": old}
    base = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

    assert sent("tgi", **both) == {**base, "max_tokens": limit}
    assert sent("cloud", node_model="o3", **both) == {**base, "model": "o3", "max_completion_tokens": limit}


@pytest.mark.parametrize("model", ["o1", "o3-mini", "o4-mini-2025-04-16", "gpt-5", "gpt-5.1", "openai/gpt-5-mini"])
def test_reasoning_models_of_the_cloud_get_the_limit_under_its_new_name(model: str) -> None:
    document = sent("cloud", node_model=model, max_tokens=5)

    assert document["max_completion_tokens"] == 5
    assert "max_tokens" not in document


@pytest.mark.parametrize(
    "model", ["gpt-4o", "gpt-4.1-mini", "mistral-small", "llama-o1x", "foo-o1", "gpt-50b", "o100b"]
)
def test_other_models_of_the_cloud_get_the_limit_as_it_came(model: str) -> None:
    assert sent("cloud", node_model=model, max_tokens=5)["max_tokens"] == 5


def test_transformers_gets_no_field_that_it_refuses_and_that_means_nothing() -> None:
    hints = {"user": "u", "store": True, "metadata": {}, "n": 1, "response_format": {"type": "text"}, "logprobs": False}

    document = sent("transformers", tools=[{}], tool_choice="auto", temperature=0.5, **hints)

    assert document.keys() == {"model", "messages", "tools", "temperature"}


def test_transformers_gets_the_field_that_it_refuses_when_the_answer_depends_on_it() -> None:
    wanted = {"n": 2, "response_format": {"type": "json_object"}, "tools": [{}], "tool_choice": "required"}

    document = sent("transformers", **wanted)

    assert document.items() >= wanted.items()


# -- whatever the client sends

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    kind=st.sampled_from(OPENAI_KINDS),
    fields=st.dictionaries(st.text(max_size=8).map("x-{}".format), json_values, max_size=5),
    node_model=st.text(min_size=1),
    stream=st.booleans(),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
)
def test_unknown_fields_arrive_with_the_values_that_were_sent(
    kind: str, fields: dict[str, Any], node_model: str, stream: bool, indent: int | None, ascii_only: bool
) -> None:
    fields = {**fields, "model": "m", "stream": stream}
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only)
    asked = call(node_model=node_model, stream=stream, body=body.encode())

    document = json.loads(KINDS[kind].translate(asked).body)

    document.pop("stream_options", None)
    known = {name: value for name, value in fields.items() if value is not None or kind != "vllm"}
    assert document == {**known, "model": node_model}
