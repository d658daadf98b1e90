"""What is made of a node's refusal: the client's error, or the node's failure."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Failure
from app.errors import NodeFailure, RequestRefused
from app.providers import KINDS
from app.providers.openai_faults import fault_in, retry_after_seconds

refusal = KINDS["generic"].refusal


def refused(status: int, body: Any) -> RequestRefused:
    error = refusal(status, {}, body if isinstance(body, bytes) else orjson.dumps(body))
    assert isinstance(error, RequestRefused), error
    return error


def failed(status: int, body: Any = b"", headers: dict[str, str] | None = None) -> NodeFailure:
    error = refusal(status, headers or {}, body if isinstance(body, bytes) else orjson.dumps(body))
    assert isinstance(error, NodeFailure), error
    return error


@pytest.mark.parametrize(
    ("body", "type", "param", "code"),
    [
        (
            {"error": {"message": "wrong", "type": "invalid_request_error", "param": "n", "code": "bad_n"}},
            "invalid_request_error",
            "n",
            "bad_n",
        ),
        ({"error": {"message": "wrong", "type": "BadRequestError", "code": 400}}, "BadRequestError", None, None),
        (
            {"message": "wrong", "type": "invalid_request_error", "code": 400, "param": "n", "object": "error"},
            "invalid_request_error",
            "n",
            None,
        ),
        ({"error": "wrong"}, "invalid_request_error", None, None),
        ({"error": "wrong", "error_type": "validation"}, "validation", None, None),
        ({"detail": "wrong"}, "invalid_request_error", None, None),
        ({"detail": {"error": "wrong"}}, "invalid_request_error", None, None),
        (
            [{"error": {"code": 400, "message": "wrong", "status": "INVALID_ARGUMENT"}}],
            "invalid_request_error",
            None,
            None,
        ),
        (b"wrong\n", "invalid_request_error", None, None),
        (b'"wrong"', "invalid_request_error", None, None),
    ],
)
def test_wrong_request_is_told_to_the_client_in_the_nodes_words(
    body: Any, type: str, param: str | None, code: str | None
) -> None:
    error = refused(400, body)

    assert (error.message, error.status, error.type, error.param, error.code) == ("wrong", 400, type, param, code)
    assert error.source == "node"


def test_schema_error_of_fastapi_says_what_is_wrong_where_and_repeats_no_input() -> None:
    entry = {"type": "missing", "loc": ["body", "messages", 0], "msg": "Field required", "input": {"secret": "prompt"}}

    assert refused(422, {"detail": [entry, entry]}).message == "; ".join(["body.messages.0: Field required"] * 2)


@pytest.mark.parametrize("status", [400, 413, 415, 422, 431])
def test_status_of_a_wrong_request_is_kept(status: int) -> None:
    error = refused(status, b"")

    assert error.status == status
    assert str(status) in error.message


def test_long_message_is_cut() -> None:
    assert len(refused(400, {"error": {"message": "x" * 5000}}).message) == 1000
    assert len(refused(400, b"x" * 5000).message) == 1000
    assert len(failed(500, {"error": {"message": "x" * 5000}}).message) <= 300


def test_web_page_of_a_proxy_is_not_repeated() -> None:
    failure = failed(502, b"<html><body>nginx</body></html>")

    assert failure.failure is Failure.SERVER_ERROR
    assert "nginx" not in failure.message


# -- context overflow in every engine's words

OVERFLOWS = [
    (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."),
    (400, "The decoder prompt (length 5000) is longer than the maximum model length of 4096."),
    (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
    (400, "Requested token count exceeds the model's maximum context length of 4096 tokens."),
    (400, "the request exceeds the available context size, try increasing it"),
    (500, "the request exceeds the available context size. try increasing the context size or enable context shift"),
    (400, "request (302 tokens) exceeds the available context size (256 tokens), try increasing it"),
    (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 and 1000"),
    (422, "Input validation error: inputs tokens + max_new_tokens must be <= 4096"),
    (422, "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000"),
    (400, "The request exceeds the model context length."),
    (400, "Trying to keep the first 5000 tokens when context the overflows."),
    (400, "The number of tokens to keep from the initial prompt is greater than the context length."),
    (400, "the input length exceeds the context length"),
    (400, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    (400, "prompt is too long: 210000 tokens > 200000 maximum"),
    (400, "Please reduce the length of the messages or completion."),
    (413, "Prompt contains 40000 tokens, too large for model with 32768 maximum context length"),
]


@pytest.mark.parametrize(("status", "message"), OVERFLOWS)
def test_prompt_that_is_too_long_has_one_code(status: int, message: str) -> None:
    for body in ({"error": {"message": message}}, {"message": message, "object": "error"}, {"error": message}):
        error = refused(status, body)

        assert error.code == "context_length_exceeded"
        assert error.message == message
        assert error.status == (400 if status == 500 else status)


def test_prompt_that_is_too_long_is_known_by_code_or_type_too() -> None:
    by_type = {"code": 400, "message": "no", "type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}
    by_code = {"code": "context_length_exceeded", "message": "no", "type": "invalid_request_error"}

    for error in (by_type, by_code):
        assert refused(400, {"error": error}).code == "context_length_exceeded"


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens must be at least 1",
        "The model `context-size` does not exist",
        "context is required",
        "The messages exceed the maximum number of images",
        "temperature must be smaller than 2",
    ],
)
def test_other_complaints_are_no_overflow(message: str) -> None:
    assert refused(400, {"error": {"message": message}}).code is None


# -- the node's own trouble


@pytest.mark.parametrize("status", [401, 403, 407])
def test_refused_key_is_the_nodes_trouble_and_not_repeated(status: int) -> None:
    failure = failed(status, {"error": {"message": "Incorrect API key provided: sk-abc123"}})

    assert (failure.failure, failure.status, failure.counts) == (Failure.AUTH, status, True)
    assert "sk-" not in failure.message


def test_refused_key_with_status_400_is_seen_through() -> None:
    for body in (
        [{"error": {"code": 400, "message": "API key not valid. Please pass a valid API key: AIza1"}}],
        {"error": {"message": "Incorrect API key provided: xa***", "code": 400}},
        {"error": {"message": "no", "code": "invalid_api_key"}},
    ):
        failure = failed(400, body)

        assert failure.failure is Failure.AUTH
        assert "AIza" not in failure.message


def test_account_without_credit_is_no_passing_overload() -> None:
    quota = {"error": {"message": "You exceeded your current quota", "type": "insufficient_quota", "code": None}}

    for failure in (failed(429, quota, {"retry-after": "1"}), failed(402, b"Payment Required")):
        assert (failure.failure, failure.counts, failure.retry_after_seconds) == (Failure.AUTH, True, None)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}}),
        (404, {"message": "The model 'x' does not exist.", "type": "not_found_error", "code": 404, "object": "error"}),
        (404, {"detail": "Not Found"}),
        (404, b""),
        (405, b""),
        (400, {"error": {"message": "no such model", "code": "model_not_found"}}),
    ],
)
def test_missing_model_is_no_breakage(status: int, body: Any) -> None:
    failure = failed(status, body)

    assert (failure.failure, failure.status, failure.counts) == (Failure.MODEL_MISSING, status, False)
    assert failure.message


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, {"error": "Model is overloaded", "error_type": "overloaded"}),
        (429, b""),
        (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}),
        (503, {"message": "Engine is sleeping; call /wakeup", "type": "server_error", "code": 503, "object": "error"}),
        (503, b"upstream connect error"),
        (529, {"error": {"message": "Overloaded", "type": "overloaded_error"}}),
        (500, {"error": {"message": "Overloaded", "type": "overloaded_error"}}),
    ],
)
def test_busy_node_is_not_broken(status: int, body: Any) -> None:
    failure = failed(status, body)

    assert (failure.failure, failure.status, failure.counts) == (Failure.BUSY, status, False)
    assert failure.retry_after_seconds is None


@pytest.mark.parametrize("status", [408, 409, 424, 425, 500, 502, 504, 520])
def test_broken_node_counts_as_broken(status: int) -> None:
    failure = failed(status, {"error": {"message": "boom"}})

    assert (failure.failure, failure.status, failure.counts) == (Failure.SERVER_ERROR, status, True)
    assert failure.message == "boom"


@pytest.mark.parametrize("status", [499, 501])
def test_node_that_was_cancelled_or_cannot_do_it_is_not_broken(status: int) -> None:
    failure = failed(status, {"error": {"message": "This server does not support embeddings."}})

    assert (failure.failure, failure.counts) == (Failure.SERVER_ERROR, False)


@pytest.mark.parametrize("status", [201, 204, 301, 307, 308])
def test_status_that_is_neither_answer_nor_error_is_malformed(status: int) -> None:
    failure = failed(status, b"")

    assert (failure.failure, failure.status) == (Failure.MALFORMED, status)


@given(
    status=st.integers(201, 599),
    body=st.binary(max_size=80) | st.text().map(lambda text: orjson.dumps({"error": text})),
)
def test_any_refusal_is_understood_somehow(status: int, body: bytes) -> None:
    error = refusal(status, {"retry-after": "x"}, body)

    assert isinstance(error, NodeFailure | RequestRefused)
    assert error.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    ["error", "message", "code", "detail", "loc", "msg", "object", "error_code", "status", "type"]
                ),
                x,
            )
        ),
    )
)
def test_no_document_confuses_the_reader(document: Any) -> None:
    fault = fault_in(document)

    assert fault is None or isinstance(fault.message, str)


# -- how long to wait

NOW = 1_767_323_045.0


def http_date(seconds: float) -> str:
    return format_datetime(datetime.fromtimestamp(seconds, UTC), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "1e9"}, 86_400.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "7"}, 7.0),
        ({"retry-after": http_date(NOW + 20)}, 20.0),
        ({"retry-after": http_date(NOW - 20)}, 0.0),
        ({"retry-after": http_date(NOW + 3620), "date": http_date(NOW + 3600)}, 20.0),
    ],
)
def test_wait_is_what_the_node_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers, NOW) == seconds


def test_busy_node_says_how_long_it_is_busy() -> None:
    assert failed(503, b"", {"retry-after": "7"}).retry_after_seconds == 7.0
