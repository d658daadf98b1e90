"""What Ollama's error statuses mean, and how its probes are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.domain import Failure, LoadedModel, ModelInfo, NodeState
from app.errors import NodeFailure, RequestRefused
from app.providers.ollama import KIND
from tests.wire.ollama_calls import Json, vectors


def refusal(status: int, body: Any = b"", **headers: str) -> Exception:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return KIND.refusal(status, {key.replace("_", "-"): value for key, value in headers.items()}, data)


def failure(status: int, body: Any = b"", **headers: str) -> NodeFailure:
    error = refusal(status, body, **headers)
    assert isinstance(error, NodeFailure)
    assert error.status == status
    assert error.message
    return error


def refused(status: int, body: Any = b"") -> RequestRefused:
    error = refusal(status, body)
    assert isinstance(error, RequestRefused)
    assert error.message
    return error


def status_vectors() -> dict[str, Json]:
    found = vectors("ollama_answers")
    return {name: vector for name, vector in found.items() if vector["input"].get("native_status", 200) != 200}


STATUSES = status_vectors()
FAILURES = {
    "resp_err_404": Failure.MODEL_MISSING,
    "gw_resp_err_404": Failure.MODEL_MISSING,
    "resp_err_500": Failure.SERVER_ERROR,
    "stream_error_before_first_line": Failure.SERVER_ERROR,
    "gw_resp_err_non_json": Failure.SERVER_ERROR,
    "resp_err_499": Failure.SERVER_ERROR,
    "resp_err_503": Failure.BUSY,
    "gw_resp_err_503_type": Failure.BUSY,
    "resp_err_remote_status_shape": Failure.BUSY,
    "resp_err_401_signin": Failure.AUTH,
}


@pytest.mark.parametrize("name", STATUSES)
def test_status_vector_holds(name: str) -> None:
    source, expected = STATUSES[name]["input"], STATUSES[name]["expected"]["body"]["error"]
    body = source["native_lines"][0] if "native_lines" in source else source["native_body"]
    error = refusal(source["native_status"], body.encode() if isinstance(body, str) else body)

    if name in FAILURES:
        assert isinstance(error, NodeFailure)
        assert (error.failure, error.status) == (FAILURES[name], source["native_status"])
        assert error.message == expected["message"] or error.failure is Failure.AUTH
    else:
        assert isinstance(error, RequestRefused)
        assert (error.status, error.message, error.type) == (400, expected["message"], expected["type"])
        if STATUSES[name]["basis"] == "gateway":
            assert (error.param, error.code) == (expected["param"], expected["code"])


@pytest.mark.parametrize("status", [429, 503])
def test_busy_node_says_when_to_come_back(status: int) -> None:
    error = failure(status, {"error": "server busy"}, retry_after="7")
    assert (error.failure, error.retry_after_seconds, error.counts) == (Failure.BUSY, 7.0, False)


@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5", "inf", "Wed, 21 Oct 2026 07:28:00 GMT", "9" * 400, "²"])
def test_other_waiting_times_are_not_known(value: str) -> None:
    assert failure(503, retry_after=value).retry_after_seconds is None


@pytest.mark.parametrize("text", ["model 'x' not found", 'model "x" not found, try pulling it first'])
def test_missing_model_is_no_breakage(text: str) -> None:
    error = failure(404, {"error": text})
    assert (error.failure, error.counts) == (Failure.MODEL_MISSING, False)


@pytest.mark.parametrize("status", [404, 405])
def test_missing_path_means_that_the_node_is_another_server(status: int) -> None:
    error = failure(status, b"404 page not found")
    assert (error.failure, error.counts) == (Failure.SERVER_ERROR, True)
    assert "Ollama" in error.message


@pytest.mark.parametrize(
    "text",
    [
        'do embedding request: Post "http://127.0.0.1:1/embedding": EOF',
        "error reading embed response: unexpected EOF",
        "unexpected server status: 1",
        "llama-server process no longer running: exit status 2",
    ],
)
def test_broken_runner_behind_embeddings_is_no_fault_of_the_request(text: str) -> None:
    assert failure(400, {"error": text}).failure is Failure.SERVER_ERROR


@pytest.mark.parametrize("text", ["invalid input type", "model is required", '"x" does not support chat'])
def test_bad_request_is_the_clients(text: str) -> None:
    error = refused(400, {"error": text})
    assert (error.status, error.message, error.code, error.source) == (400, text, None, "node")


@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("the input length exceeds the context length", "input"),
        ("the prompt is longer than the context length currently available to the model", "messages"),
        ("request (302 tokens) exceeds the available context size (256 tokens), try increasing it", "messages"),
    ],
)
def test_prompt_too_long_is_named(text: str, param: str, status: int) -> None:
    error = refused(status, {"error": text})
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)


@pytest.mark.parametrize(
    "text", ['option "temperature" must be of type float32', "invalid format: expected a JSON Schema"]
)
def test_bad_options_answered_with_500_are_the_clients(text: str) -> None:
    assert refused(500, {"error": text}).status == 400


def test_bad_request_of_the_engine_behind_the_node_is_the_clients() -> None:
    wrapped = json.dumps({"error": {"code": 400, "message": "no such role", "type": "invalid_request_error"}})
    assert refused(500, {"error": wrapped}).message == "no such role"
    assert failure(500, {"error": wrapped.replace("400", "500")}).message == "no such role"


@pytest.mark.parametrize(
    "text",
    [
        "llama-server process has terminated: exit status 2",
        "model requires more system memory (9 GiB) than is available (4 GiB)",
        "timed out waiting for llama-server to start",
    ],
)
def test_load_failures_are_the_nodes(text: str) -> None:
    error = failure(500, {"error": text})
    assert (error.failure, error.message, error.counts) == (Failure.SERVER_ERROR, text, True)


@pytest.mark.parametrize("status", [401, 403])
def test_words_of_a_node_that_refuses_access_are_not_shown(status: int) -> None:
    error = failure(status, {"error": "invalid key sk-secret", "signin_url": "https://ollama.com/connect?key=k"})
    assert error.failure is Failure.AUTH
    assert "secret" not in error.message
    assert "connect" not in error.message


def test_cloud_that_refuses_says_nothing_of_the_nodes_own_models() -> None:
    assert failure(401, {"error": "unauthorized", "signin_url": "https://ollama.com/x"}).counts is False
    assert failure(403, {"error": "ollama cloud is disabled: remote model is unavailable"}).counts is False
    assert failure(401, {"error": "unauthorized"}).counts is True
    assert failure(403).counts is True


@pytest.mark.parametrize("status", [408, 409, 425, 499])
def test_statuses_of_circumstance_are_tried_elsewhere(status: int) -> None:
    assert failure(status, {"error": "request canceled"}).failure is Failure.SERVER_ERROR


@pytest.mark.parametrize("status", [402, 413, 415, 422])
def test_other_client_errors_keep_their_status(status: int) -> None:
    assert refused(status, {"error": "no"}).status == status


@pytest.mark.parametrize("status", [204, 301, 307])
def test_statuses_that_are_no_answer_are_malformed(status: int) -> None:
    assert failure(status).failure is Failure.MALFORMED


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"upstream connect error", "upstream connect error"),
        (b"<html><body>502</body></html>", "the node answered 502 without saying why"),
        (b"", "the node answered 502 without saying why"),
        (b"{}", "the node answered 502 without saying why"),
        (b"[1]", "the node answered 502 without saying why"),
        (b'{"error":5}', "the node answered 502 without saying why"),
        (b'{"error":{"message":"m"}}', "m"),
        (b'{"message":"m"}', "m"),
        (b'"text"', "text"),
        (b'{"error":"{\\"a\\":1}"}', '{"a":1}'),
        (b"\xff\xfe broken", "\ufffd\ufffd broken"),
    ],
)
def test_bodies_of_any_form_are_read(body: bytes, text: str) -> None:
    assert failure(502, body).message == text


@pytest.mark.parametrize("body", [b"x" * 5000, json.dumps({"error": "x" * 5000}).encode()])
def test_messages_are_bounded(body: bytes) -> None:
    assert len(failure(500, body).message) == 1000
    assert len(refused(400, body).message) == 1000


def test_cancelled_request_is_not_held_against_the_node() -> None:
    assert failure(499, {"error": "request canceled"}).counts is False


# -- probes


def test_version_means_healthy() -> None:
    assert KIND.probe.health_path == "/api/version"
    assert KIND.probe.health(200, {"version": "0.32.15"}).state is NodeState.HEALTHY


@pytest.mark.parametrize(
    ("status", "document"),
    [(200, None), (200, {}), (200, {"version": 1}), (200, []), (401, None), (404, None), (500, {}), (503, None)],
)
def test_anything_else_is_down_and_says_why(status: int, document: Any) -> None:
    health = KIND.probe.health(status, document)
    assert health.state is NodeState.DOWN
    assert "/api/version" in health.reason


def test_tags_list_the_models() -> None:
    full = {
        "name": "qwen3:8b",
        "model": "qwen3:8b",
        "size": 5_000_000_000,
        "digest": "500a",
        "details": {"family": "qwen3", "context_length": 40960},
        "capabilities": ["completion", "tools", "thinking"],
    }
    assert KIND.probe.models_path == "/api/tags"
    assert KIND.probe.models({"models": [full, {"model": "old:latest", "details": None}]}) == [
        ModelInfo("qwen3:8b", frozenset({"completion", "tools", "thinking"}), 40960, "500a", 5_000_000_000),
        ModelInfo("old:latest"),
    ]


def test_models_of_a_remote_host_are_not_the_nodes() -> None:
    remote = {"name": "gpt-oss:120b-cloud", "remote_host": "https://ollama.com:443", "remote_model": "gpt-oss:120b"}
    assert KIND.probe.models({"models": [remote, {"name": "a:latest", "remote_host": ""}]}) == [ModelInfo("a:latest")]


def test_ps_lists_the_loaded_models() -> None:
    entry = {
        "name": "a:latest",
        "size": 9,
        "size_vram": 0,
        "context_length": 4096,
        "expires_at": "2318-01-01T00:00:00Z",
    }
    assert KIND.probe.loaded_path == "/api/ps"
    assert KIND.probe.loaded is not None
    assert KIND.probe.loaded({"models": [entry, {"name": "b:1b"}]}) == [
        LoadedModel("a:latest", vram_bytes=0, context_length=4096),
        LoadedModel("b:1b"),
    ]
    assert KIND.probe.loaded({"models": None}) == []


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        "x",
        {"data": []},
        {"models": {"a": 1}},
        {"models": ["a"]},
        {"models": [{}]},
        {"models": [{"name": 5}]},
    ],
)
def test_other_documents_are_no_lists_of_models(document: Any) -> None:
    assert KIND.probe.loaded is not None
    for parse in (KIND.probe.models, KIND.probe.loaded):
        with pytest.raises(ValueError, match="model"):
            parse(document)


def matches(answers: dict[str, tuple[int, Any]]) -> bool:
    return all(signature.matches(*answers.get(signature.path, (404, None))) for signature in KIND.signatures)


@pytest.mark.parametrize(
    ("answers", "ollama"),
    [
        ({"/api/version": (200, {"version": "0.32.15"}), "/api/tags": (200, {"models": []})}, True),
        ({"/api/version": (200, {"version": "0.32.15"})}, False),
        ({"/api/version": (500, {"version": "0.32.15"}), "/api/tags": (200, {"models": []})}, False),
        ({"/api/version": (200, {"version": 5}), "/api/tags": (200, {"models": []})}, False),
        # llama.cpp, behind a proxy that answers for the other path
        (
            {
                "/api/version": (200, {"version": "1"}),
                "/api/tags": (200, {"models": [], "object": "list", "data": []}),
            },
            False,
        ),
        ({}, False),
    ],
)
def test_ollama_is_told_from_others(answers: dict[str, tuple[int, Any]], ollama: bool) -> None:
    assert matches(answers) is ollama
