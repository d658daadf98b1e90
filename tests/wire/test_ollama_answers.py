"""Ollama's answers become OpenAI's, however the bytes are cut, and broken ones never look complete."""

from __future__ import annotations

import base64
import json
import re
import struct
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Failure, Timings, Usage
from app.errors import NodeFailure, RequestRefused
from app.providers import ollama_to_openai
from app.providers.ollama import KIND
from tests.wire.ollama_calls import Json, Run, call, chat, line, run, vectors

VECTORS = vectors("ollama_answers")
DOCUMENTS = {
    name: vector
    for name, vector in VECTORS.items()
    if vector["kind"] == "response" and vector["input"]["native_status"] == 200
}
STREAMS = {
    name: vector
    for name, vector in VECTORS.items()
    if vector["kind"] == "stream" and "native_status" not in vector["input"]
}
DONE = line(done=True)
STREAMED = call(chat(stream=True))


def native_bytes(vector: Json) -> list[bytes]:
    """What the node sends in a vector, read by read."""
    source = vector["input"]
    if "native_raw_chunks" in source:
        return [base64.b64decode(chunk) for chunk in source["native_raw_chunks"]]
    if "native_lines" in source:
        return [json.dumps(fields, ensure_ascii=False).encode() + b"\n" for fields in source["native_lines"]]
    return [json.dumps(source["native_body"], ensure_ascii=False).encode()]


def replay(name: str) -> Run:
    vector = VECTORS[name]
    request = vector["input"]["request"]
    return run(call(request["body"], request["path"]), native_bytes(vector))


def assert_same(actual: Any, expected: Any, bound: dict[str, Any]) -> None:
    """Compares with a vector's value. A placeholder means the same all over the vector, and two never mean the same."""
    if isinstance(expected, str) and expected.startswith("$"):
        if expected == "$NOW":
            assert isinstance(actual, int)
            return
        assert isinstance(actual, str)
        assert actual
        assert bound.setdefault(expected, actual) == actual
        assert list(bound.values()).count(actual) == 1
    elif isinstance(expected, dict):
        assert set(actual) == set(expected)
        for key in expected:
            if key == "arguments":
                assert json.loads(actual[key]) == json.loads(expected[key])
            else:
                assert_same(actual[key], expected[key], bound)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, bound)
    else:
        assert actual == expected


# -- the vectors


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not DOCUMENTS[name]["quirk"]])
def test_document_vector_holds(name: str) -> None:
    vector = DOCUMENTS[name]
    done = replay(name)

    assert done.error is None
    assert done.answer.content_type == vector["expected"]["content_type"].encode()
    assert_same(done.document, vector["expected"]["body"], {})


BROKEN = {"gw_stream_error_mid": Failure.ERROR_EVENT, "gw_stream_eof_without_done": Failure.CUT}


@pytest.mark.parametrize("name", [name for name in STREAMS if not STREAMS[name]["quirk"] and name not in BROKEN])
def test_stream_vector_holds(name: str) -> None:
    vector = STREAMS[name]
    done = replay(name)

    assert done.error is None
    assert done.answer.content_type == vector["expected"]["content_type"].encode()
    assert_same(done.events, [event["data"] for event in vector["expected"]["events"]], {})


@pytest.mark.parametrize("name", BROKEN)
def test_broken_stream_vector_holds_up_to_the_error(name: str) -> None:
    *whole, last = (event["data"] for event in VECTORS[name]["expected"]["events"])
    done = replay(name)

    assert_same(done.events, whole, {})
    assert isinstance(done.error, NodeFailure)
    assert done.error.failure is BROKEN[name]
    if BROKEN[name] is Failure.ERROR_EVENT:  # the text of the other is the gateway's own
        assert done.error.message == last["error"]["message"]


# What Hearth does where Ollama has a quirk.
INSTEAD: dict[str, Callable[[Run], bool]] = {
    "resp_tool_call_without_id": lambda done: bool(done.document["choices"][0]["message"]["tool_calls"][0]["id"]),
    "resp_tool_args_big_int": lambda done: '{\\"n\\":9007199254740993,\\"x\\":1.0}' in done.output.decode(),
    "resp_done_reason_missing": lambda done: done.document["choices"][0]["finish_reason"] == "stop",
    "resp_done_reason_load": lambda done: done.document["choices"][0]["finish_reason"] == "stop",
    "resp_done_reason_unload": lambda done: done.document["choices"][0]["finish_reason"] == "stop",
    "resp_cmpl_thinking_dropped": lambda done: done.document["choices"][0]["reasoning"] == "2+2",
    "resp_cmpl_logprobs_dropped": lambda done: done.document["choices"][0]["logprobs"]["tokens"] == ["Hi"],
    "resp_cmpl_load": lambda done: done.document["choices"][0]["finish_reason"] == "stop",
    "stream_two_tool_calls_same_index": lambda done: indexes(done) == [0, 1],
    "stream_load_single_json": lambda done: done.choices[-1]["finish_reason"] == "stop",
    "stream_error_mid_ollama_quirk": lambda done: failure_of(done) is Failure.ERROR_EVENT,
    "stream_eof_without_done": lambda done: failure_of(done) is Failure.CUT,
    "stream_cmpl_usage": lambda done: [bool(event.get("usage")) for event in done.events[:-1]] == [False, False, True],
}


def indexes(done: Run) -> list[int]:
    return [made["index"] for delta in done.deltas for made in delta.get("tool_calls", [])]


def failure_of(done: Run) -> Failure:
    assert isinstance(done.error, NodeFailure)
    return done.error.failure


@pytest.mark.parametrize("name", [name for name, vector in VECTORS.items() if vector["quirk"]])
def test_quirk_is_not_copied(name: str) -> None:
    assert INSTEAD[name](replay(name))


def test_numbers_in_arguments_keep_their_text() -> None:
    name = "gw_resp_tool_args_raw_numbers"
    expected = VECTORS[name]["expected"]["body"]["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert replay(name).document["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == expected


# -- cutting


@given(st.sampled_from(sorted(STREAMS)), st.data())
def test_any_split_gives_the_same_output(name: str, data: st.DataObject) -> None:
    vector = STREAMS[name]
    request = vector["input"]["request"]
    made = call(request["body"], request["path"])
    whole = b"".join(native_bytes(vector))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))

    pieces = [whole[start:end] for start, end in pairwise([0, *cuts, len(whole)])]

    assert outcome(run(made, pieces)) == outcome(run(made, [whole]))


def outcome(done: Run) -> Any:
    return done.output, str(done.error), type(done.error), done.answer.usage, done.answer.finish_reason


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["é", "🔥", "\u2028", "\n"])


def thought(content: str, thinking: str) -> bytes:
    return line(content, thinking=thinking) if thinking else line(content)


@given(st.lists(st.tuples(texts, texts), max_size=8), st.data())
def test_every_text_arrives_whole(parts: list[tuple[str, str]], data: st.DataObject) -> None:
    lines = [thought(content, thinking) for content, thinking in parts]
    whole = b"".join([*lines, DONE])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))

    done = run(STREAMED, [whole[start:end] for start, end in pairwise([0, *cuts, len(whole)])])

    assert done.error is None
    assert "".join(delta.get("content", "") for delta in done.deltas) == "".join(content for content, _ in parts)
    assert "".join(delta.get("reasoning", "") for delta in done.deltas) == "".join(thinking for _, thinking in parts)
    assert [choice["finish_reason"] for choice in done.choices][-1] == "stop"
    assert done.events[-1] == "[DONE]"
    assert [delta.get("role") for delta in done.deltas] == ["assistant"] + [None] * (len(done.deltas) - 1)


@given(st.lists(st.tuples(texts, texts), max_size=8), st.booleans())
def test_quick_way_says_what_the_careful_one_says(parts: list[tuple[str, str]], both_names: bool) -> None:
    # A null of logprobs means nothing, but keeps a line from the quick way.
    made = call(chat(stream=True), reasoning_content=both_names)
    quick = [thought(content, thinking) for content, thinking in parts]
    careful = [text.replace(b',"done":', b',"logprobs":null,"done":') for text in quick]

    assert run(made, [*quick, DONE]).output == run(made, [*careful, DONE]).output


@pytest.mark.parametrize("name", [name for name in STREAMS if name not in BROKEN and not STREAMS[name]["quirk"]])
def test_stream_cut_anywhere_never_looks_complete(name: str) -> None:
    vector = STREAMS[name]
    request = vector["input"]["request"]
    made = call(request["body"], request["path"])
    whole = b"".join(native_bytes(vector)).rstrip()

    for length in range(len(whole)):
        done = run(made, [whole[:length]])

        assert failure_of(done) is (Failure.CUT if whole[:length].strip() else Failure.EMPTY)
        assert done.answer.finish_reason is None
        assert b"[DONE]" not in done.output
        assert re.search(rb'"finish_reason":"', done.output) is None


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if not DOCUMENTS[name]["quirk"]])
def test_document_cut_anywhere_is_an_error(name: str) -> None:
    vector = DOCUMENTS[name]
    request = vector["input"]["request"]
    made = call(request["body"], request["path"])
    [whole] = native_bytes(vector)

    for length in range(len(whole)):
        done = run(made, [whole[:length]])

        assert failure_of(done) is (Failure.CUT if length else Failure.EMPTY)
        assert (done.output, done.answer.begun) == (b"", False)


@given(st.lists(st.binary(max_size=30) | st.sampled_from([line("a"), b"{}\n", b"[]\n", b"\xff\n", DONE]), max_size=8))
def test_garbage_never_breaks_the_reader(pieces: list[bytes]) -> None:
    for made in (STREAMED, call(chat()), call({"model": "m", "input": "x"}, "/v1/embeddings")):
        done = run(made, pieces)  # anything but our own two exceptions would come out here
        assert (done.error is None) == done.output.endswith((b"[DONE]\n\n", b"}"))


# -- when an answer has begun and ended


@pytest.mark.parametrize(
    "first",
    [
        line("Hi"),
        line(" "),
        line(thinking="hm"),
        line(tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
        DONE,
    ],
    ids=["text", "blank text", "reasoning", "tool call", "end"],
)
def test_answer_begins_with_content(first: bytes) -> None:
    answer = KIND.answer(STREAMED)
    assert answer.feed(line())
    assert not answer.begun
    assert answer.feed(first)
    assert answer.begun


def test_logprobs_alone_are_no_content() -> None:
    answer = KIND.answer(STREAMED)
    answer.feed(line(logprobs=[{"token": "<x>", "logprob": -1.5}]))
    assert not answer.begun


def test_stream_ends_with_its_last_line() -> None:
    answer = KIND.answer(STREAMED)
    assert answer.feed(line("Hi") + DONE + b"<html>garbage\n")
    assert answer.ended
    assert (answer.feed(line("more")), answer.finish()) == (b"", b"")


def test_usage_and_reason_are_known_at_the_end() -> None:
    for made, pieces in ((STREAMED, [line("Hi"), DONE]), (call(chat()), [line("Hi", done=True)])):
        done = run(made, pieces)
        assert (done.answer.usage, done.answer.finish_reason, done.answer.ended) == (Usage(11, 7), "stop", True)


def test_usage_without_counts_is_unknown_and_rendered_as_zero() -> None:
    end = line("Hi", done=True, prompt_eval_count=None, eval_count=None)
    done = run(call(chat()), [end])
    assert done.answer.usage is None
    assert done.document["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_cached_tokens_are_told(stream: bool) -> None:
    made = call(chat(stream=stream, stream_options={"include_usage": True}))
    done = run(made, [line("Hi", done=True, prompt_eval_cached_count=8)])
    usage = done.events[-2]["usage"] if stream else done.document["usage"]

    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert done.answer.usage == Usage(11, 7, 8)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("cached", "told"), [(8, (3, 8)), (None, (None, None)), (0, (None, None))])
def test_what_was_read_is_told_where_the_node_says_what_it_had(
    stream: bool, cached: int | None, told: tuple[int | None, int | None]
) -> None:
    durations = {"prompt_eval_duration": 500_000_000, "eval_duration": 2_000_000_000}
    done = run(call(chat(stream=stream)), [line("Hi", done=True, prompt_eval_cached_count=cached, **durations)])

    assert done.answer.timings == Timings(None, 0.5, 2.0, *told)


# -- what an answer holds


@pytest.mark.parametrize("stream", [True, False])
def test_answer_bears_the_name_that_the_client_asked_for(stream: bool) -> None:
    made = call(chat(model="fast", stream=stream), node_model="llama3.2:latest")
    done = run(made, [line("Hi", done=True)])
    heads = [event for event in done.events if event != "[DONE]"] if stream else [done.document]
    assert {head["model"] for head in heads} == {"fast"}


def test_ids_are_long_and_never_the_same() -> None:
    ids = set()
    for _ in range(100):
        answer = KIND.answer(STREAMED)
        event = json.loads(answer.feed(line("Hi"))[6:])
        ids.add(event["id"])
    assert len(ids) == 100
    assert all(re.fullmatch(r"chatcmpl-[0-9a-z]{24,}", given) for given in ids)


@pytest.mark.parametrize("created_at", [None, 5, "soon", "", "0001-01-01T00:00:00Z"])
def test_time_that_makes_no_sense_becomes_now(created_at: Any) -> None:
    done = run(call(chat()), [line("Hi", done=True, created_at=created_at)])
    assert abs(done.document["created"] - time.time()) < 60


def test_created_is_the_first_lines_in_all_events() -> None:
    done = run(STREAMED, [line("Hi"), line("x", created_at="2027-01-01T00:00:00Z", logprobs=[]), DONE])
    assert {event["created"] for event in done.events if event != "[DONE]"} == {1767323045}


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_has_its_second_name_on_request(stream: bool) -> None:
    pieces = [line("4", thinking="2+2", done=True)] if not stream else [line(), line(thinking="2+2"), line("4"), DONE]
    made = call(chat(stream=stream), reasoning_content=True)
    done = run(made, pieces)
    holders = done.deltas if stream else [done.document["choices"][0]["message"]]
    [holder] = [holder for holder in holders if "reasoning" in holder]

    assert (holder["reasoning"], holder["reasoning_content"]) == ("2+2", "2+2")


def tool_call(name: str, index: int = 0, **more: Any) -> Json:
    return {"function": {"index": index, "name": name, "arguments": {}}, **more}


@pytest.mark.parametrize("stream", [True, False])
def test_parallel_tool_calls_are_numbered_and_told_apart(stream: bool) -> None:
    # All with index 0, and two with the same id: clients would glue their arguments together.
    calls = [tool_call("a", id="call_x"), tool_call("b", id="call_x"), tool_call("c", id=""), tool_call("d")]
    pieces = [line(tool_calls=[made]) for made in calls] + [DONE] if stream else [line(tool_calls=calls, done=True)]
    done = run(call(chat(stream=stream)), pieces)
    holders = done.deltas if stream else [done.document["choices"][0]["message"]]
    made = [made for holder in holders for made in holder.get("tool_calls", [])]

    assert [(one["index"], one["function"]["name"]) for one in made] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert made[0]["id"] == "call_x"
    assert len({one["id"] for one in made}) == 4
    assert all(one["id"].startswith("call_") for one in made)
    assert done.answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("number", ["123456789012345678901234567890", "-9007199254740993", "1.0", "1e5", "0.10"])
def test_numbers_of_any_length_keep_their_text(number: str, stream: bool) -> None:
    text = line(tool_calls=[{"function": {"name": "f", "arguments": {"n": "N", "deep": [{"m": "N"}]}}}], done=True)
    done = run(call(chat(stream=stream)), [text.replace(b'"N"', number.encode())])
    holder = done.deltas[0] if stream else done.document["choices"][0]["message"]

    assert holder["tool_calls"][0]["function"]["arguments"] == f'{{"n":{number},"deep":[{{"m":{number}}}]}}'


@pytest.mark.parametrize(
    ("arguments", "text"), [(None, "{}"), ("", "{}"), ('{"a":1}', '{"a":1}'), ({}, "{}"), ({"a": "é"}, '{"a":"é"}')]
)
def test_arguments_of_other_forms_become_text(arguments: Any, text: str) -> None:
    made = {"function": {"name": "f", "arguments": arguments}}
    done = run(call(chat()), [line(tool_calls=[made], done=True)])
    assert done.document["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("reason", ["stop", "", "load", "unload"])
def test_tool_calls_of_an_earlier_line_decide_the_reason(reason: str) -> None:
    done = run(STREAMED, [line(tool_calls=[tool_call("a")]), line("ok"), line(done=True, done_reason=reason)])
    assert done.choices[-1]["finish_reason"] == "tool_calls"


def test_reasons_that_openai_does_not_know_are_passed_on() -> None:
    assert run(STREAMED, [line("a"), line(done=True, done_reason="odd")]).choices[-1]["finish_reason"] == "odd"


@pytest.mark.parametrize("stream", [True, False])
def test_old_functions_are_answered_in_their_own_form(stream: bool) -> None:
    made = call(chat(functions=[{"name": "a"}], stream=stream))
    done = run(made, [line(tool_calls=[tool_call("a"), tool_call("b", 1)], done=True)])
    choices = done.choices if stream else done.document["choices"]
    holder = choices[0]["delta" if stream else "message"]

    assert holder["function_call"] == {"name": "a", "arguments": "{}"}
    assert "tool_calls" not in holder
    assert choices[-1]["finish_reason"] == "function_call"


def test_usage_event_comes_only_on_request() -> None:
    assert all("usage" not in event for event in run(STREAMED, [line("a"), DONE]).events)


# -- completions


def completion(text: str = "", *, done: bool = False, **more: Any) -> bytes:
    fields = {"model": "m", "created_at": "2026-01-02T03:04:05Z", "response": text, "done": done, **more}
    return json.dumps(fields).encode() + b"\n"


def test_completion_streams_its_reasoning() -> None:
    made = call({"model": "m", "prompt": "x", "stream": True}, "/v1/completions")
    done = run(made, [completion(thinking="2+2"), completion("4"), completion(done=True)])
    assert [(choice["text"], choice.get("reasoning")) for choice in done.choices] == [
        ("", "2+2"),
        ("4", None),
        ("", None),
    ]
    assert done.choices[-1]["finish_reason"] == "stop"


def test_completion_has_logprobs_in_four_lists() -> None:
    first = {"token": "He", "logprob": -0.5, "top_logprobs": [{"token": "He", "logprob": -0.5}]}
    second = {"token": "y", "logprob": -0.1}
    made = call({"model": "m", "prompt": "x", "logprobs": 1, "stream": True}, "/v1/completions")
    done = run(made, [completion("He", logprobs=[first]), completion("y", logprobs=[second]), completion(done=True)])

    assert done.choices[0]["logprobs"] == {
        "tokens": ["He"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"He": -0.5}],
        "text_offset": [0],
    }
    assert done.choices[1]["logprobs"]["text_offset"] == [2]


# -- embeddings


def embedded(vectors: Any, fields: Json | None = None) -> Run:
    body = json.dumps({"model": "m", "embeddings": vectors, "prompt_eval_count": 4}).encode()
    return run(call({"model": "e", "input": ["a", "b"], **(fields or {})}, "/v1/embeddings"), [body])


def test_embeddings_are_floats_or_little_endian_base64() -> None:
    vectors = [[0.5, -0.25], [1, 0]]
    assert [entry["embedding"] for entry in embedded(vectors).document["data"]] == vectors

    for name in ("base64", "Base64"):
        data = embedded(vectors, {"encoding_format": name}).document["data"]
        assert [struct.unpack("<2f", base64.b64decode(entry["embedding"])) for entry in data] == [(0.5, -0.25), (1, 0)]


def test_embeddings_count_their_prompt() -> None:
    done = embedded([[1.0], [2.0]])
    assert done.answer.usage == Usage(4, 0)
    assert done.document["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize(
    "vectors",
    [None, [], [[1.0]], [[1.0], [1.0], [1.0]], [[1.0], []], [[1.0], ["a"]], [[1.0], [None]], [[1.0], 5], {"a": 1}],
)
def test_embeddings_that_do_not_fit_the_inputs_are_malformed(vectors: Any, encoding: str) -> None:
    assert failure_of(embedded(vectors, {"encoding_format": encoding})) is Failure.MALFORMED


# -- broken answers


@pytest.mark.parametrize(
    "bad",
    [
        b"<html>502 Bad Gateway</html>\n",
        b"data: {}\n",
        b"[]\n",
        b"null\n",
        b'"text"\n',
        b"{}\n",
        b'{"status":"pulling"}\n',
        b'{"message":{"content":"\xff"},"done":false}\n',
        b'{"message":{"content":"a"},"done":false}}\n',
        b'{"message":"a","done":false}\n',
        b'{"message":null,"done":false}\n',
        b'{"message":{"content":5},"done":false}\n',
        b'{"message":{"content":["a"]},"done":false}\n',
        b'{"message":{"content":"a","thinking":5},"done":false}\n',
        b'{"message":{"content":"a"},"done":"no"}\n',
        b'{"message":{"content":"a"},"done":false,"logprobs":5}\n',
        b'{"message":{"content":"","tool_calls":"f"},"done":false}\n',
        b'{"message":{"content":"","tool_calls":[{}]},"done":false}\n',
        b'{"message":{"content":"","tool_calls":[{"function":{"name":5}}]},"done":false}\n',
        b'{"message":{"content":"","tool_calls":[{"function":{"name":"f","arguments":[1]}}]},"done":false}\n',
        b'{"message":{"content":""},"done":true,"eval_count":"7"}\n',
        b'{"message":{"content":""},"done":true,"done_reason":5}\n',
        b'{"message":{"content":"","tool_calls":[{"function":{"name":"f","arguments":{"a":%s}}}]},"done":false}\n'
        % (b"[" * 900 + b"]" * 900),
    ],
)
def test_lines_of_another_form_are_malformed(bad: bytes) -> None:
    assert failure_of(run(STREAMED, [bad])) is Failure.MALFORMED

    after = run(STREAMED, [line("Hi"), bad, DONE])
    assert failure_of(after) is Failure.MALFORMED
    assert after.deltas == [{"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"", Failure.EMPTY),
        (b" \n", Failure.EMPTY),
        (b"<html></html>", Failure.MALFORMED),
        (b"[]", Failure.MALFORMED),
        (b'{"done":true}', Failure.MALFORMED),
        (b'{"message":{"content":"a"}}', Failure.CUT),
        (b'{"message":{"content":"a"},"done":false}', Failure.CUT),
        (b'{"message":[],"done":true}', Failure.MALFORMED),
        (b'{"error":"boom"}', Failure.ERROR_EVENT),
        (line("a") + DONE, Failure.CUT),
    ],
)
def test_documents_of_another_form_are_failures(body: bytes, failure: Failure) -> None:
    assert failure_of(run(call(chat()), [body])) is failure


def test_last_line_may_lack_its_message() -> None:
    # The first versions of Ollama sent none there.
    assert run(STREAMED, [line("Hi"), b'{"done":true}']).error is None


ENTIRELY_WRONG = "request (302 tokens) exceeds the available context size (256 tokens), try increasing it"
WRAPPED = json.dumps({"error": {"code": 400, "message": ENTIRELY_WRONG, "type": "exceed_context_size_error"}})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", [ENTIRELY_WRONG, WRAPPED])
def test_prompt_too_long_is_the_clients_to_mend(text: str, stream: bool) -> None:
    done = run(call(chat(stream=stream)), [json.dumps({"error": text}).encode()])

    assert isinstance(done.error, RequestRefused)
    assert (done.error.status, done.error.code) == (400, "context_length_exceeded")
    assert (done.error.message, done.error.param) == (ENTIRELY_WRONG, "messages")


@pytest.mark.parametrize("first", [b"", line()], ids=["at once", "after an empty line"])
def test_error_before_content_is_raised(first: bytes) -> None:
    done = run(STREAMED, [first, b'{"error":"model runner has unexpectedly stopped"}\n'])
    assert failure_of(done) is Failure.ERROR_EVENT
    assert not done.answer.begun


def test_after_content_the_request_cannot_have_been_wrong() -> None:
    done = run(STREAMED, [line("Hi"), json.dumps({"error": WRAPPED}).encode() + b"\n"])
    assert failure_of(done) is Failure.ERROR_EVENT
    assert str(done.error) == ENTIRELY_WRONG


def test_content_before_a_break_in_the_same_read_is_not_lost() -> None:
    answer = KIND.answer(STREAMED)
    assert b'"Hel"' in answer.feed(line("Hel") + b'{"error":"boom"}\n' + line("lo"))
    assert answer.ended

    with pytest.raises(NodeFailure, match="boom"):
        answer.feed(DONE)
    with pytest.raises(NodeFailure, match="boom"):
        answer.finish()


def test_long_lines_are_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    text = line("x" * 300)
    for limit, whole in ((len(text) - 1, True), (len(text) - 2, False)):
        monkeypatch.setattr(ollama_to_openai, "MAX_LINE_BYTES", limit)
        for pieces in ([text + DONE], [text[:250], text[250:], DONE], [bytes([byte]) for byte in text + DONE]):
            done = run(STREAMED, pieces)
            assert done.error is None if whole else failure_of(done) is Failure.MALFORMED


def test_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama_to_openai, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(ollama_to_openai, "MAX_DOCUMENT_BYTES", 100)
    for made in (STREAMED, call(chat())):
        answer = KIND.answer(made)
        assert [answer.feed(b"{") for _ in range(100)] == [b""] * 100
        with pytest.raises(NodeFailure) as caught:
            answer.feed(b"{")
        assert caught.value.failure is Failure.MALFORMED


def test_megabytes_in_one_line_are_fine() -> None:
    text = "x" * 10_000_000
    data = line(text) + DONE
    done = run(STREAMED, [data[start : start + 65536] for start in range(0, len(data), 65536)])
    assert done.deltas[0]["content"] == text


def test_errors_of_nodes_are_told_in_at_most_a_thousand_characters() -> None:
    done = run(STREAMED, [json.dumps({"error": "e" * 5000}).encode() + b"\n"])
    assert isinstance(done.error, NodeFailure)
    assert len(done.error.message) == 1000
