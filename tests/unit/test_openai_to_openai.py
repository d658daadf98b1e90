"""How a node's OpenAI answers reach the client: untouched as far as possible, and never complete by mistake."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.domain import Failure, Operation, Timings, Usage
from app.errors import NodeFailure, RequestRefused
from app.providers import KINDS, openai_document, openai_stream
from tests.unit.openai_events import (
    COUNTS,
    DONE,
    ROLE,
    WHOLE,
    Result,
    call,
    chunk,
    event,
    pieces,
    run,
    text,
    tool_piece,
    usage_chunk,
)

OPENAI_KINDS = sorted(name for name in KINDS if name != "ollama")
FINISH = event(chunk(finish="stop"))


def stream(*data: bytes, kind: str = "vllm", **asked: Any) -> Result:
    return run(KINDS[kind].answer(call(stream=True, **asked)), *data)


def document(body: Any, kind: str = "vllm", **asked: Any) -> Result:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return run(KINDS[kind].answer(call(**asked)), data)


def failed(result: Result) -> NodeFailure:
    assert isinstance(result.failure, NodeFailure)
    return result.failure


def refused(result: Result) -> RequestRefused:
    assert isinstance(result.failure, RequestRefused)
    return result.failure


# -- streams that go through


@pytest.mark.parametrize("kind", OPENAI_KINDS)
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_good_stream_goes_through_byte_for_byte(kind: str, end: bytes) -> None:
    data = WHOLE.replace(b"\n\n", end)

    result = stream(data, kind=kind)

    assert result.failure is None
    assert result.out == data
    assert (result.begun, result.finish_reason) == (True, "stop")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_it_does_not_matter_where_the_bytes_are_divided(end: bytes) -> None:
    data = WHOLE.replace(DONE, event(usage_chunk()) + DONE).replace(b"\n\n", end)
    whole = stream(data)

    assert whole.failure is None
    for cut in range(len(data)):
        assert stream(data[:cut], data[cut:]) == whole
    assert stream(*pieces(data, range(len(data)))) == whole


@pytest.mark.parametrize("spaced", [False, True])
def test_end_is_noticed_when_every_event_comes_on_its_own(spaced: bool) -> None:
    events = [event(part, spaced=spaced) for part in (text("a"), text("b"), chunk(finish="length"), usage_chunk())]

    result = stream(*events)

    assert result.failure is None
    assert (result.finish_reason, result.usage) == ("length", Usage(7, 3))
    assert result.out == b"".join(events[:3]) + DONE


def test_comments_and_other_fields_go_through_byte_for_byte() -> None:
    noise = b": ping\n\nid: 5\nevent: chunk\nretry: 10\n" + event(text("a")) + b":\n\ndata: \n\n"
    data = noise + event(text("b"), name="message") + b"event: ping\n\n\n\n" + FINISH + DONE

    result = stream(data)

    assert result.failure is None
    assert result.out == data


@pytest.mark.parametrize("size", [600_000, 10_000_000])
def test_long_event_goes_through_byte_for_byte(size: int) -> None:
    data = event(text("x" * size)) + event(text("y" * size)) + FINISH + DONE

    result = stream(*pieces(data, range(0, len(data), 65_536)))

    assert result.failure is None
    assert result.out == data


def test_words_that_raise_suspicion_are_harmless_in_a_text() -> None:
    words = ['"error"', "error", '{"error": {"message": "x"}}', "[DONE]", "data: [DONE]\n\n", '"finish_reason":"stop"']
    words += ["usage", '"usage":{', "model", '"model":"m2"', "finish_reason", '"tool_calls"', '"function"', "\\", '\\"']
    data = b"".join(event(text(word)) for word in words) + FINISH + DONE

    whole = stream(data, tools=[{}])

    assert whole.failure is None
    assert whole.out == data
    assert whole.finishes == ["stop"]


def test_only_whole_events_are_given_out() -> None:
    answer = KINDS["vllm"].answer(call(stream=True))
    first, second, third = event(text("a")), event(text("b")), event(text("c"))
    parts = [first + second[:20], second[20:-1], second[-1:], third[:20], third[20:]]

    given_out = [answer.feed(part) for part in parts]

    assert given_out == [first, b"", second, b"", third]


def test_events_before_the_first_content_are_returned_but_do_not_begin_the_answer() -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    assert answer.feed(b": hi\n\n" + event(ROLE)) == b": hi\n\n" + event(ROLE)
    assert not answer.begun
    assert answer.feed(event(text("a"))) == event(text("a"))
    assert answer.begun


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning": "x"},
        {"reasoning_content": "x"},
        {"tool_calls": [tool_piece(0, "a", "f")]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
    ],
)
def test_content_of_any_sort_begins_the_answer(delta: dict[str, Any]) -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    answer.feed(event(chunk(delta)))

    assert answer.begun


def test_text_or_the_end_begins_the_answer() -> None:
    for document in ({"choices": [{"index": 0, "text": "x"}]}, chunk(finish="length")):
        answer = KINDS["vllm"].answer(call(operation=Operation.COMPLETION, stream=True))

        answer.feed(event(document))

        assert answer.begun


def test_chunk_without_choices_that_says_nothing_of_usage_goes_through() -> None:
    filters = event({**chunk(), "choices": [], "prompt_filter_results": []})

    result = stream(filters + WHOLE)

    assert result.out == filters + WHOLE


# -- the model's name


@pytest.mark.parametrize("spaced", [False, True])
def test_client_reads_the_name_that_it_asked_for(spaced: bool) -> None:
    chunks = [ROLE, text("a"), text("b"), chunk(finish="stop")]
    data = b"".join(event({**part, "model": "node"}, spaced=spaced) for part in chunks) + DONE
    space = b" " if spaced else b""

    result = stream(data, model='al"ias', node_model="node")

    assert result.out == data.replace(b'"model":' + space + b'"node"', b'"model":' + space + rb'"al\"ias"')


def test_name_that_nobody_asked_for_is_replaced_too() -> None:
    data = WHOLE.replace(b'"model":"m"', b'"model":"/models/m.gguf"')

    assert stream(data).out == WHOLE


def test_node_may_change_its_name_for_the_model_on_the_way() -> None:
    data = event(text("a", model="x")) + event(chunk({"content": "b"}, "stop", model="y")) + DONE

    assert stream(data).out == data.replace(b'"x"', b'"m"').replace(b'"y"', b'"m"')


def test_name_is_replaced_when_it_is_not_clear_where() -> None:
    extra = {"meta": {"model": "node"}}
    data = b"".join(event({**text(word, model="node"), **extra}) for word in "ab") + FINISH + DONE

    result = stream(data)

    assert [part["model"] for part in result.documents] == ["m", "m", "m"]
    assert result.documents[1]["meta"] == extra["meta"]


def test_name_in_the_text_stays() -> None:
    data = event(text('"model":"node"', model="node")) + event(text("x", model="node")) + FINISH + DONE

    result = stream(data)

    assert result.documents[0]["choices"][0]["delta"]["content"] == '"model":"node"'


# -- usage


@pytest.mark.parametrize("spaced", [False, True])
def test_usage_is_counted_but_not_shown_to_a_client_that_did_not_ask(spaced: bool) -> None:
    data = [event(part, spaced=spaced) for part in (text("a"), chunk(finish="stop"), usage_chunk())]

    result = stream(b"".join(data) + DONE)

    assert result.out == data[0] + data[1] + DONE
    assert result.usage == Usage(7, 3)


def test_client_that_asked_gets_the_usage_byte_for_byte() -> None:
    data = event(text("a")) + FINISH + event(usage_chunk()) + DONE

    result = stream(data, include_usage=True)

    assert result.out == data


def test_usage_is_shown_once_and_last_however_often_the_node_tells_it() -> None:
    early = usage_chunk({**COUNTS, "completion_tokens": 1})
    data = event(text("a")) + event(early) + event(text("b")) + FINISH + event(usage_chunk()) + DONE

    result = stream(data, include_usage=True)

    assert result.out == event(text("a")) + event(text("b")) + FINISH + event(usage_chunk()) + DONE
    assert result.usage == Usage(7, 3)


def test_usage_beside_the_last_content_is_counted_and_goes_through() -> None:
    data = event(text("a", usage=None)) + event(chunk(finish="stop", usage=COUNTS)) + DONE

    result = stream(data)

    assert result.out == data
    assert result.usage == Usage(7, 3)


def test_usage_counts_that_come_with_every_event_are_kept_to_the_end() -> None:
    counted = {**COUNTS, "completion_tokens": 1}

    result = stream(event(text("a")), event(text("b", usage=counted)), FINISH, DONE)

    assert result.usage == Usage(7, 1)


def test_usage_is_not_made_up() -> None:
    result = stream(WHOLE, include_usage=True)

    assert result.out == WHOLE
    assert result.usage is None


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 4}}, 4),
        ({"prompt_tokens_details": None}, 0),
        ({"prompt_cache_hit_tokens": 5}, 5),
        ({"prompt_tokens_details": {"cached_tokens": 400}}, 7),
    ],
)
def test_cached_tokens_are_a_part_of_the_prompt(details: dict[str, Any], cached: int) -> None:
    result = stream(event(text("a")) + FINISH + event(usage_chunk({**COUNTS, **details})) + DONE)

    assert result.usage == Usage(7, 3, cached)


@pytest.mark.parametrize("counts", [{}, {"prompt_tokens": "7"}, {"prompt_tokens": None, "total_tokens": 3}])
def test_usage_without_counts_is_unknown_rather_than_zero(counts: dict[str, Any]) -> None:
    assert stream(event(text("a")) + FINISH + event(usage_chunk(counts)) + DONE).usage is None


# -- the end


TIMINGS = {"cache_n": 33, "prompt_n": 5, "prompt_ms": 47.5, "predicted_n": 4, "predicted_ms": 75.0}


@pytest.mark.parametrize(
    ("told", "timings"),
    [
        (TIMINGS, Timings(None, 0.0475, 0.075, 5, 33)),
        ({"prompt_ms": 100, "predicted_ms": 200, "prompt_n": "many"}, Timings(None, 0.1, 0.2)),
        ({"prompt_n": 5}, None),
        ("soon", None),
    ],
)
def test_what_llamacpp_says_of_its_speed_is_read(told: Any, timings: Timings | None) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    streamed, whole = (KINDS["llamacpp"].answer(call(stream=stream)) for stream in (True, False))

    run(streamed, event(text("Hi")) + FINISH + event({**usage_chunk(), "timings": told}) + DONE)
    run(whole, orjson.dumps({"model": "m", "choices": [choice], "timings": told}))

    assert streamed.timings == whole.timings == timings


def test_missing_done_is_added() -> None:
    result = stream(WHOLE.removesuffix(DONE))

    assert result.failure is None
    assert result.out == WHOLE


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n"])
def test_done_without_its_blank_line_counts(tail: bytes) -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    result = run(answer, WHOLE.removesuffix(DONE) + tail)

    assert result.failure is None
    assert result.documents == stream(WHOLE).documents
    assert result.out.count(b"[DONE]") == 1
    assert result.out.endswith(b"\n\n")
    assert answer.ended


def test_missing_finish_reason_is_added_before_done() -> None:
    result = stream(event(text("a")) + DONE)

    assert result.finishes == ["stop"]
    assert result.finish_reason == "stop"
    assert result.out.endswith(b'"finish_reason":"stop"}]}\n\n' + DONE)
    assert result.documents[1].keys() == {"id", "object", "created", "model", "choices"}


def test_missing_finish_reason_of_a_completion_is_added_in_its_form() -> None:
    first = {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a"}]}

    result = stream(event(first) + DONE, operation=Operation.COMPLETION, prompt="p")

    assert result.documents[1] == {
        "id": "c",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "", "finish_reason": "stop"}],
    }


def test_missing_finish_reason_after_tool_calls_says_so() -> None:
    data = event(chunk({"tool_calls": [tool_piece(0, "a", "f")]})) + event(usage_chunk()) + DONE

    result = stream(data, include_usage=True)

    assert result.finishes == ["tool_calls"]
    assert result.out.endswith(event(usage_chunk()) + DONE)


def test_node_is_not_listened_to_after_done() -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    assert answer.feed(WHOLE + event(text("more"))) == WHOLE
    assert answer.ended
    assert answer.feed(event(text("more"))) == b""
    assert answer.finish() == b""


@pytest.mark.parametrize("kind", OPENAI_KINDS)
def test_stream_cut_at_any_byte_never_looks_complete(kind: str) -> None:
    finish = event(chunk({"content": "!"}, finish="stop"))
    data = event(ROLE) + event(text("Hello")) + event(text("wörld 🌍")) + finish + event(usage_chunk()) + DONE
    end = data.index(finish) + len(finish.rstrip())

    for cut in range(len(data)):
        result = stream(data[:cut], kind=kind, include_usage=True)
        if cut < end:
            assert isinstance(result.failure, NodeFailure)
            assert b"[DONE]" not in result.out
            assert result.finishes == []
        else:
            assert result.failure is None
            assert result.finishes == ["stop"]
            assert result.out.endswith(DONE)


def test_answer_with_several_choices_is_complete_only_with_all_of_them() -> None:
    one, two = event(chunk({"content": "a"}, finish="stop")), event(chunk({"content": "b"}, "stop", index=1))

    assert failed(stream(one, n=2)).failure is Failure.CUT
    assert stream(one + two, n=2).out == one + two + DONE
    assert failed(stream(one, operation=Operation.COMPLETION, prompt=["p", "q"])).failure is Failure.CUT
    assert stream(one, operation=Operation.COMPLETION, prompt=[1, 2]).out == one + DONE


def test_done_ends_an_answer_of_several_choices_too() -> None:
    one = event(chunk({"content": "a"}, finish="stop"))

    assert stream(one + DONE, n=2).out == one + DONE


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (b"", Failure.EMPTY),
        (b"\n\n", Failure.EMPTY),
        (b": ping\n\n: ping\n\n", Failure.EMPTY),
        (b": ping\n", Failure.EMPTY),
        (DONE, Failure.EMPTY),
        (event(ROLE) + DONE, Failure.EMPTY),
        (event(ROLE), Failure.CUT),
        (event(text("a"))[:-20], Failure.CUT),
        (event(text("a")), Failure.CUT),
        (event(text("a")) + b'{"error_code":10402,"text":"Failed"}\n', Failure.CUT),
        (b"<!DOCTYPE html><html>\n\n</html>", Failure.MALFORMED),
        (b"  <html>", Failure.MALFORMED),
        (b"upstream timed out\n\n", Failure.MALFORMED),
        (b'{"id":"x","choices":[{"message":{"content":"x"}}]}', Failure.MALFORMED),
        (b"data: nonsense\n\n", Failure.MALFORMED),
        (b"data: 7\n\n", Failure.MALFORMED),
        (b"data: {}\n\n", Failure.MALFORMED),
        (event({"id": "x"}), Failure.MALFORMED),
        (event({"choices": "x"}), Failure.MALFORMED),
        (event({"choices": ["x"]}), Failure.MALFORMED),
        (event(chunk({"tool_calls": "x"})), Failure.MALFORMED),
    ],
)
def test_answer_that_is_none_is_tried_elsewhere(data: bytes, failure: Failure) -> None:
    result = stream(data)

    assert failed(result).failure is failure
    assert b"[DONE]" not in result.out


def test_web_page_is_noticed_before_it_ends() -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    with pytest.raises(NodeFailure, match="web page"):
        answer.feed(b"<!doctype html>\n<title>nginx</title>")


@pytest.mark.parametrize("begun", [b"", event(text("a"))])
def test_event_without_end_is_not_held_for_ever(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_stream, "MAX_EVENT_BYTES", 100)

    result = stream(begun, b"data: " + b"x" * 90, b"x" * 10)

    assert failed(result).failure is Failure.MALFORMED
    assert result.out == begun


# -- errors in a stream


def test_error_before_content_can_be_tried_elsewhere() -> None:
    error = {"error": {"message": "CUDA out of memory", "type": "InternalServerError", "code": 500}}

    failure = failed(stream(event(ROLE) + event(error)))

    assert (failure.failure, failure.status, failure.counts) == (Failure.ERROR_EVENT, 500, True)
    assert failure.message == "CUDA out of memory"


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": None}},
        {"error": {"message": "bad", "type": "BadRequestError", "param": "n", "code": 400}},
        {"error": {"object": "error", "message": "bad", "type": "invalid_request_error", "param": "n", "code": 400}},
        {"object": "error", "message": "bad", "type": "BadRequestError", "param": "n", "code": 400},
        [{"error": {"message": "bad", "code": 400, "status": "INVALID_ARGUMENT", "param": "n"}}],
    ],
)
def test_error_that_blames_the_request_goes_to_the_client(error: Any) -> None:
    result = refused(stream(event(error))) if isinstance(error, dict) else refused(document(error))

    assert (result.message, result.status, result.param, result.code) == ("bad", 400, "n", None)


def test_validation_error_of_tgi_with_status_200_goes_to_the_client() -> None:
    error = {"error": "Input validation error: `temperature` must be strictly positive", "error_type": "validation"}

    result = refused(stream(event(error), kind="tgi"))

    assert result.status == 422
    assert "temperature" in result.message


def test_context_overflow_has_one_code_in_a_stream_too() -> None:
    error = {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 9"}

    assert refused(stream(event(error), kind="tgi")).code == "context_length_exceeded"


def test_plain_error_document_in_place_of_a_stream_is_understood() -> None:
    assert refused(stream(b'{"error":{"message":"bad","code":400}}')).message == "bad"
    assert failed(stream(b'{"error_code":10402,"text":"Failed to get response"}\n')).failure is Failure.ERROR_EVENT


def test_busy_node_that_says_so_in_an_event_is_not_broken() -> None:
    failure = failed(stream(event({"error": "Model is overloaded", "error_type": "overloaded"})))

    assert (failure.failure, failure.counts) == (Failure.ERROR_EVENT, False)


def test_error_about_the_key_never_repeats_it() -> None:
    error = {"error": {"message": "Incorrect API key provided: sk-abc123.", "code": "invalid_api_key"}}

    failure = failed(stream(event(error)))

    assert failure.failure is Failure.AUTH
    assert "sk-" not in failure.message


@pytest.mark.parametrize(
    "error",
    [
        event({"error": {"message": "boom", "type": "invalid_request_error", "code": 400}}),
        event({"error": {"message": "boom"}}, name="error"),
        event({"error": "boom", "error_type": "generation"}),
        event({"error": True, "status": 500, "message": "boom"}),
        event({**chunk(finish="error"), "error": {"message": "boom"}}),
    ],
)
def test_error_after_content_fails_the_stream_after_what_came_before(error: bytes) -> None:
    good = event(text("a")) + event(text("b"))

    together, apart = stream(good + error + DONE), stream(good, error, DONE)

    for result in (together, apart):
        assert result.out == good
        assert failed(result).failure is Failure.ERROR_EVENT
        assert failed(result).message == "boom"


def test_broken_stream_says_that_it_has_ended_and_raises_at_the_next_call() -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    assert answer.feed(event(text("a")) + event({"error": "boom"})) == event(text("a"))

    assert answer.ended
    with pytest.raises(NodeFailure, match="boom"):
        answer.feed(event(text("b")))
    with pytest.raises(NodeFailure, match="boom"):
        answer.finish()


def test_error_that_comes_alone_is_raised_at_once() -> None:
    answer = KINDS["vllm"].answer(call(stream=True))
    answer.feed(event(text("a")))

    with pytest.raises(NodeFailure, match="boom"):
        answer.feed(event({"error": "boom"}))


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_node_that_gives_up_has_not_finished(reason: str) -> None:
    result = stream(event(text("a")) + event(chunk(finish=reason)) + DONE)

    assert failed(result).failure is Failure.ERROR_EVENT
    assert result.finishes == []


@pytest.mark.parametrize(
    "broken",
    [
        b'data: {"error": nonsense\n\n',
        b'data: ["error"]\n\n',
        event({"choices": "error"}),
        event({"choices": ["error"]}),
        event(chunk({"tool_calls": "error"})),
    ],
)
def test_one_unreadable_event_does_not_end_a_stream_that_goes_on(broken: bytes) -> None:
    answer = KINDS["vllm"].answer(call(stream=True))

    result = run(answer, event(text("a")) + broken + event(text("b")) + FINISH + DONE)

    assert result.failure is None
    assert result.out == event(text("a")) + event(text("b")) + FINISH + DONE
    assert getattr(answer, "dropped") == 1  # noqa: B009


# -- reasons


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        ("tgi", "eos_token", "stop"),
        ("tgi", "stop_sequence", "stop"),
        ("tgi", "length", "length"),
        ("vllm", "length", "length"),
        ("vllm", "content_filter", "content_filter"),
    ],
)
def test_reasons_are_openais(kind: str, theirs: str, ours: str) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": theirs}

    streamed = stream(event(text("a")) + event(chunk(finish=theirs)) + DONE, kind=kind)
    whole = document({"choices": [choice]}, kind=kind)

    assert streamed.finishes == [ours]
    assert orjson.loads(whole.out)["choices"][0]["finish_reason"] == ours
    assert streamed.finish_reason == whole.finish_reason == ours


@pytest.mark.parametrize(("kind", "reason"), [("tgi", "tool_calls"), ("vllm", "stop")])
def test_stop_after_tool_calls_is_corrected_for_the_kind_that_says_it_always(kind: str, reason: str) -> None:
    data = event(chunk({"tool_calls": [tool_piece(0, "a", "f", "{}")]})) + FINISH + DONE

    assert stream(data, kind=kind, tools=[{}]).finishes == [reason]


# -- tool calls


def tool_stream(*deltas: Sequence[Any], **asked: Any) -> list[tuple[Any, str]]:
    """The index and the arguments or name of every piece, as the client gets them."""
    events = [event(chunk({"tool_calls": list(delta)})) for delta in deltas]
    result = stream(event(ROLE), *events, event(chunk(finish="tool_calls")) + DONE, **asked)
    assert result.failure is None
    calls = [call for part in result.documents for call in part["choices"][0]["delta"].get("tool_calls", ())]
    return [(call.get("index"), call["function"].get("name") or call["function"]["arguments"]) for call in calls]


PARALLEL = [(0, "f"), (0, "{1"), (0, "}1"), (1, "g"), (1, "{2"), (1, "}2")]


def test_good_tool_calls_go_through_byte_for_byte() -> None:
    deltas = [[tool_piece(0, "a", "f")], [tool_piece(0, None, None, "{}")], [tool_piece(1, "b", "g", "{}")]]
    data = event(text("x")) + b"".join(event(chunk({"tool_calls": delta})) for delta in deltas) + FINISH + DONE

    assert stream(data, tools=[{}]).out == data


@pytest.mark.parametrize("asked", [{"tools": [{}]}, {}])
@pytest.mark.parametrize("given", [0, None])
def test_parallel_calls_are_numbered_when_the_node_does_not(given: int | None, asked: dict[str, Any]) -> None:
    calls = [
        [tool_piece(given, "a", "f")],
        [tool_piece(given, None, None, "{1")],
        [tool_piece(given, None, None, "}1")],
        [tool_piece(given, "b", "g")],
        [tool_piece(given, "b", None, "{2")],
        [tool_piece(given, None, None, "}2")],
    ]

    assert tool_stream(*calls, **asked) == PARALLEL


def test_whole_calls_in_one_delta_are_numbered() -> None:
    assert tool_stream([tool_piece(0, "a", "f"), tool_piece(0, "b", "g")]) == [(0, "f"), (1, "g")]
    assert tool_stream([tool_piece(None, None, "f"), tool_piece(None, None, "g")]) == [(0, "f"), (1, "g")]


def test_numbers_begin_at_zero() -> None:
    assert tool_stream([tool_piece(1, "a", "f")], [tool_piece(2, "b", "g")]) == [(0, "f"), (1, "g")]


def test_interleaved_pieces_stay_with_their_calls() -> None:
    calls = [[tool_piece(0, "a", "f")], [tool_piece(1, "b", "g")], [tool_piece(0, None, None, "{1")]]

    assert tool_stream(*calls, tools=[{}]) == [(0, "f"), (1, "g"), (0, "{1")]


@pytest.mark.parametrize("asked", [{"tools": [{}]}, {}])
def test_node_that_numbers_its_second_call_wrong_is_put_right_from_there(asked: dict[str, Any]) -> None:
    calls = [
        [tool_piece(0, "a", "f")],
        [tool_piece(0, None, None, "{1")],
        [tool_piece(0, None, None, "}1")],
        [tool_piece(0, "b", "g")],
        [tool_piece(0, None, None, "{2")],
        [tool_piece(0, None, None, "}2")],
    ]

    assert tool_stream(*calls, **asked) == PARALLEL


def test_pieces_of_a_call_that_has_begun_well_are_passed_on_unread() -> None:
    good = [event(chunk({"tool_calls": [tool_piece(0, "a", "f")]})), event(chunk({"tool_calls": [tool_piece(0)]}))]
    odd = b'data: {"tool_calls" : [{"function": nonsense\n\n'

    result = stream(*good, odd, FINISH, DONE, tools=[{}])

    assert result.out == b"".join(good) + odd + FINISH + DONE


def test_new_id_for_every_piece_does_not_tear_a_call_apart() -> None:
    calls = [[tool_piece(0, "a", "f")], [tool_piece(0, "b", None, "{1")], [tool_piece(0, "c", None, "}1")]]

    assert tool_stream(*calls, tools=[{}]) == [(0, "f"), (0, "{1"), (0, "}1")]


def test_call_without_a_list_and_arguments_that_are_no_text_are_put_right() -> None:
    bare = {"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}}
    choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [bare]}, "finish_reason": "stop"}

    streamed = stream(event(chunk({"tool_calls": bare})) + FINISH + DONE, kind="tgi")
    whole = orjson.loads(document({"choices": [choice]}, kind="tgi").out)

    assert streamed.documents[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] == '{"x":1}'
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"x":1}'
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


# -- reasoning


def test_reasoning_is_given_under_both_names_when_that_is_wanted() -> None:
    data = event(chunk({"reasoning": "a"})) + event(chunk({"reasoning": "b"})) + event(text("c")) + FINISH + DONE

    result = stream(data, reasoning_content=True)

    deltas = [part["choices"][0]["delta"] for part in result.documents]
    assert deltas[:2] == [{"reasoning": word, "reasoning_content": word} for word in "ab"]
    assert stream(data).out == data


def test_reasoning_of_a_document_is_given_under_both_names_when_that_is_wanted() -> None:
    choice = {"message": {"content": "x", "reasoning": "r"}, "finish_reason": "stop"}

    message = orjson.loads(document({"choices": [choice]}, reasoning_content=True).out)["choices"][0]["message"]

    assert message == {"content": "x", "reasoning": "r", "reasoning_content": "r"}


# -- any stream, cut anywhere

words = st.sampled_from(
    [
        "a",
        " the",
        "wörld",
        "🌍",
        "\n",
        "\r\n\r\n",
        '"error"',
        "error",
        "[DONE]",
        '"usage":{',
        "usage",
        '"model":"m"',
        "\\",
    ]
) | st.text(max_size=5)
contents = words.map(lambda word: {"content": word})
reasonings = words.map(lambda word: {"reasoning": word})
tool_calls = st.builds(
    lambda *piece: {"tool_calls": [tool_piece(*piece)]},
    st.sampled_from([0, 1, None]),
    st.sampled_from(["a", "b", None]),
    st.sampled_from(["f", None]),
    st.sampled_from(["", "{", "}"]),
)
deltas = st.one_of(contents, contents, reasonings, tool_calls, st.just({"role": "assistant", "content": None}))
noise = st.sampled_from(
    [b": ping\n\n", b"\n", b"event: x\nid: 1\n", b"data: \n\n", b'data: {"error": x\n\n', b":\r\n\r\n"]
)
errors = st.sampled_from([{"error": "boom"}, {"error": {"message": "bad", "code": 400}}, chunk(finish="abort")])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """A stream in the order in which engines send it, cut or broken at times."""
    model = draw(st.sampled_from(["m", "node"]))
    spaced = draw(st.booleans())
    end = draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    null: dict[str, Any] = draw(st.sampled_from([{}, {"usage": None}]))
    parts: list[Any] = [chunk(delta, **null) for delta in draw(st.lists(deltas, max_size=8))]
    parts += draw(st.sampled_from([[], [chunk(finish="stop", **null)], [chunk(finish="eos_token", usage=COUNTS)]]))
    parts += draw(st.sampled_from([[], [usage_chunk()], [usage_chunk(), usage_chunk()]]))
    for error in draw(st.lists(errors, max_size=1)):
        parts.insert(draw(st.integers(0, len(parts))), error)
    events = [event({**part, "model": model}, spaced=False, end=end) for part in parts]
    if spaced:
        events = [part.replace(b'":', b'": ').replace(b',"', b', "') for part in events]
    for between in draw(st.lists(noise, max_size=2)):
        events.insert(draw(st.integers(0, len(events))), between)
    return b"".join(events) + draw(st.sampled_from([DONE, b"", b"data: [DONE]"]))


@given(
    data=streams(),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
    kind=st.sampled_from(OPENAI_KINDS),
    include_usage=st.booleans(),
    tools=st.sampled_from([None, [{}]]),
)
@example(data=WHOLE, cuts=list(range(len(WHOLE))), kind="tgi", include_usage=True, tools=None)
def test_any_split_gives_the_same_answer(
    data: bytes, cuts: list[int], kind: str, include_usage: bool, tools: Any
) -> None:
    asked = {"kind": kind, "include_usage": include_usage, "tools": tools}

    one = stream(data, **asked)
    events = [place + 2 for place in range(len(data)) if data.startswith(b"\n\n", place)]
    for several in (stream(*pieces(data, cuts), **asked), stream(*pieces(data, events), **asked)):
        assert type(one.failure) is type(several.failure)
        assert str(one.failure) == str(several.failure)
        assert one.begun == several.begun
        if one.begun:
            # Before that nothing reaches the client.
            assert one.out == several.out
        assert (one.usage, one.finish_reason) == (several.usage, several.finish_reason)


@given(data=streams(), kind=st.sampled_from(OPENAI_KINDS), include_usage=st.booleans())
def test_whatever_comes_the_client_gets_whole_events_and_one_end(data: bytes, kind: str, include_usage: bool) -> None:
    result = stream(data, kind=kind, include_usage=include_usage)

    if result.failure is None:
        assert result.out.count(b"data: [DONE]") == 1
        assert result.out.rstrip().endswith(b"data: [DONE]")
        assert len(result.finishes) == 1
        assert all(part["model"] == "m" for part in result.documents)
        shown = [part for part in result.documents if part["choices"] == []]
        assert len(shown) <= int(include_usage)
    else:
        assert b"\ndata: [DONE]" not in result.out


# -- documents

ANSWER: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": COUNTS,
}


@pytest.mark.parametrize("kind", OPENAI_KINDS)
def test_good_document_goes_through_byte_for_byte(kind: str) -> None:
    body = b'{ "model" : "m", "big":123456789012345678901234567890,"choices":[{"message":{},"finish_reason":"stop"}]}\n'

    result = document(body, kind=kind)

    assert result.out == body
    assert result.begun


def test_document_is_given_out_only_when_whole() -> None:
    answer = KINDS["vllm"].answer(call())
    body = orjson.dumps(ANSWER)

    assert answer.feed(body[:9]) == answer.feed(body[9:]) == b""
    assert not answer.begun
    assert answer.finish() == body
    assert answer.usage == Usage(7, 3)


def test_a_choice_of_a_document_without_a_finish_reason_gets_one() -> None:
    plain = {"index": 0, "message": {"content": "x"}, "finish_reason": None}
    calling = {"index": 1, "message": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}

    result = document({**ANSWER, "choices": [plain, calling]})

    assert [choice["finish_reason"] for choice in orjson.loads(result.out)["choices"]] == ["stop", "tool_calls"]
    assert result.finish_reason == "stop"


def test_only_the_name_of_the_model_changes_in_a_document() -> None:
    choices = b'[{"message":{"content":"\\"model\\""},"finish_reason":"stop"}]'
    body = b'{ "model" : "/models/m.gguf", "choices":' + choices + b',"x":1.0}'

    assert document(body).out == body.replace(b"/models/m.gguf", b"m")


def test_name_in_a_document_is_replaced_when_it_is_not_clear_where() -> None:
    body = {**ANSWER, "model": "node", "meta": {"model": "node"}}

    result = orjson.loads(document(body).out)

    assert (result["model"], result["meta"]["model"]) == ("m", "node")


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"", Failure.EMPTY),
        (b" \n", Failure.EMPTY),
        (orjson.dumps(ANSWER)[:-1], Failure.MALFORMED),
        (b"<html></html>", Failure.MALFORMED),
        (b"[]", Failure.MALFORMED),
        (b"7", Failure.MALFORMED),
        ({}, Failure.MALFORMED),
        ({"status": "Instance sch error, cannot find available p_url"}, Failure.MALFORMED),
        ({**ANSWER, "choices": None}, Failure.MALFORMED),
        ({**ANSWER, "choices": ["x"]}, Failure.MALFORMED),
        ({**ANSWER, "choices": []}, Failure.EMPTY),
        ({"error": "Unexpected endpoint or method."}, Failure.ERROR_EVENT),
        ({"error_code": 10402, "text": "Failed to get response after a period of time"}, Failure.ERROR_EVENT),
        ({**ANSWER, "choices": [{"message": {}, "finish_reason": "abort"}]}, Failure.ERROR_EVENT),
    ],
)
def test_document_that_is_no_answer_is_tried_elsewhere(body: Any, failure: Failure) -> None:
    result = document(body)

    assert failed(result).failure is failure
    assert not result.begun


def test_error_document_that_blames_the_request_goes_to_the_client() -> None:
    body = {"message": "bad", "type": "invalid_request_error", "code": 400, "param": "n", "object": "error"}

    assert refused(document(body)).message == "bad"


def test_document_without_end_is_not_collected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_document, "MAX_DOCUMENT_BYTES", 100)
    answer = KINDS["vllm"].answer(call())
    answer.feed(b"x" * 100)

    with pytest.raises(NodeFailure, match="64 MiB"):
        answer.feed(b"x")


def test_answer_too_deep_to_be_rewritten_is_malformed() -> None:
    body = b'{"model":"x","y":{"model":"x"},"choices":[{"message":{}}],"z":' + b"[" * 300 + b"]" * 300 + b"}"

    assert failed(document(body)).failure is Failure.MALFORMED


# -- embeddings

VECTOR = [0.5, -1.25, 3.0]
PACKED = base64.b64encode(struct.pack("<3f", *VECTOR)).decode()


def embeddings(*vectors: Any, input: Any = "x", **asked: Any) -> Result:
    data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    body = {"object": "list", "data": data, "model": "node", "usage": usage}
    return document(body, operation=Operation.EMBEDDING, input=input, **asked)


def vectors_of(result: Result) -> list[Any]:
    assert result.failure is None
    return [entry["embedding"] for entry in orjson.loads(result.out)["data"]]


@pytest.mark.parametrize("given", [VECTOR, PACKED])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, VECTOR), ({"encoding_format": "float"}, VECTOR), ({"encoding_format": "base64"}, PACKED)],
)
def test_embedding_comes_in_the_format_that_was_asked_for(given: Any, asked: dict[str, Any], expected: Any) -> None:
    result = embeddings(given, **asked)

    assert vectors_of(result) == [expected]
    assert orjson.loads(result.out)["model"] == "m"
    assert result.usage == Usage(4, 0)


def test_embedding_in_the_right_format_goes_through_byte_for_byte() -> None:
    body = b'{"data":[{"embedding":[0.1000,1]}],"model":"node"}'

    result = document(body, operation=Operation.EMBEDDING, input="x")

    assert result.out == body.replace(b'"node"', b'"m"')


@pytest.mark.parametrize("asked", [{"encoding_format": "bytes"}, {"embed_dtype": "float16"}])
def test_embedding_of_another_form_is_left_alone(asked: dict[str, Any]) -> None:
    assert vectors_of(embeddings(PACKED, **asked)) == [PACKED]


@pytest.mark.parametrize(
    ("input", "count"),
    [("x", 1), (["x", "y"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2)],
)
def test_every_input_has_its_embedding(input: Any, count: int) -> None:
    assert vectors_of(embeddings(*[VECTOR] * count, input=input)) == [VECTOR] * count
    assert failed(embeddings(*[VECTOR] * (count + 1), input=input)).failure is Failure.MALFORMED


@pytest.mark.parametrize("vectors", [(), ([],), ("",), (None,)])
def test_embedding_with_nothing_in_it_is_a_failure(vectors: Sequence[Any]) -> None:
    assert failed(embeddings(*vectors)).failure is Failure.EMPTY


@pytest.mark.parametrize(("vector", "asked"), [("nonsense!", {}), ("YWJj", {}), (["x"], {"encoding_format": "base64"})])
def test_embedding_that_is_no_vector_is_malformed(vector: Any, asked: dict[str, Any]) -> None:
    assert failed(embeddings(vector, **asked)).failure is Failure.MALFORMED


def test_answer_without_data_is_no_embedding() -> None:
    assert failed(document(ANSWER, operation=Operation.EMBEDDING, input="x")).failure is Failure.MALFORMED
