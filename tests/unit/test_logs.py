"""Log lines: no secret gets into them in any form, and those of a request say so."""

from __future__ import annotations

import contextvars
import json
import logging

import orjson
import pytest

from app.request_ids import CURRENT, RequestIds, trace_of
from app.telemetry.logs import LineSink, StandardBridge, make_logger, make_request_line

HEARTH_KEY = "hearth-" + "Ab3_-x9Z" * 5 + "Qw1"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class _Lines(LineSink):
    def __init__(self) -> None:
        self.text = ""

    def write(self, line: bytes) -> None:
        self.text += line.decode() + "\n"


SECRETS = [
    ("Authorization: Bearer abcDEF123.-_~+/=", "abcDEF123"),
    ("authorization: bearer abcdef123456", "abcdef123456"),
    ("AUTHORIZATION: BEARER ABCDEF123456", "ABCDEF123456"),
    ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNz"),
    ('{"authorization": "Basic dXNlcjpwYXNzd29yZA=="}', "dXNlcjpwYXNz"),
    ("Authorization: rawsecret99", "rawsecret99"),
    ("incorrect key sk-proj-abc_DEF-123456", "abc_DEF"),
    ("incorrect key sk-ant-api03-abcdef", "api03"),
    ("'sk-or-v1-0123456789abcdef'", "0123456789abcdef"),
    (f"the key {HEARTH_KEY} is not known", HEARTH_KEY[7:]),
    ("x-api-key: plainsecret", "plainsecret"),
    ("X-API-KEY=plainsecret", "plainsecret"),
    ('{"api_key": "plainsecret", "a": 1}', "plainsecret"),
    ("https://host/path?api_key=plainsecret&b=1", "plainsecret"),
    ("{'apikey': 'plainsecret'}", "plainsecret"),
    ("redis://:p4ssw0rd@localhost:6379/0", "p4ssw0rd"),
    ("rediss://default:p4ss@w0rd@localhost:6379", "w0rd"),
    ("postgresql+asyncpg://hearth:p4ss:w0rd@db/hearth", "p4ss"),
    ("http://token99@localhost:8080/v1", "token99"),
]
HARMLESS = [
    "task-llama-3-8b-instruct",
    "disk-full-error",
    "hearth-worker-3 at http://10.0.0.7:11434/v1",
    "CLOUD_API_KEY is not set",
    "API keys stay as they were last read: no connection",
    "rate limit for key 3fa9; mail ops@example.org",
    "the bearer of this",
]


def _written(form: str, say: str, **fields: object) -> str:
    lines = _Lines()
    make_logger(lines, "DEBUG", form).warning(say, **fields)
    return lines.text


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_no_form_of_secret_is_written(text: str, secret: str, form: str) -> None:
    written = [
        _written(form, text),
        _written(form, "failed", reason=text),
        _written(form, "failed", reasons=[{"of": [text]}]),
        _written(form, "failed", document=json.dumps({"body": text})),
    ]

    for line in written:
        assert secret not in line
        assert "[hidden]" in line


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_no_form_of_secret_is_written_in_the_line_of_a_request(text: str, secret: str) -> None:
    lines = _Lines()

    make_request_line(lines, "INFO", "json")("info", {"id": text, "attempts": [{"message": text}]})

    assert secret not in lines.text
    assert orjson.loads(lines.text)["event"] == "request"


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_no_form_of_secret_is_written_that_a_library_logs(text: str, secret: str) -> None:
    lines = _Lines()
    record = logging.LogRecord("library", logging.ERROR, "", 0, "failed: %s", (text,), None)

    StandardBridge(make_logger(lines, "INFO", "json")).emit(record)

    assert secret not in lines.text
    assert orjson.loads(lines.text)["logger"] == "library"


@pytest.mark.parametrize("name", ["api_key", "x-api-key", "Authorization", "set_cookie", "client_secret", "password"])
def test_what_is_called_a_secret_is_not_written(name: str) -> None:
    assert "innocent" not in _written("json", "said", **{name: "innocent"})


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_resembles_a_secret_is_written(text: str) -> None:
    assert orjson.loads(_written("json", text, reason=text))["reason"] == text


def _line_of_a_request(ids: RequestIds, **fields: str) -> dict[str, str]:
    lines = _Lines()

    def say() -> None:
        CURRENT.set(ids)
        make_logger(lines, "INFO", "json").warning("said", **fields)

    contextvars.Context().run(say)
    line: dict[str, str] = orjson.loads(lines.text)
    return line


def test_a_line_that_belongs_to_a_request_has_its_ids() -> None:
    line = _line_of_a_request(RequestIds("r1", TRACE))

    assert (line["id"], line["trace_id"]) == ("r1", TRACE)


def test_a_line_of_a_request_without_a_trace_has_no_trace() -> None:
    assert "trace_id" not in _line_of_a_request(RequestIds("r1", ""))


def test_a_line_keeps_the_id_that_it_was_given() -> None:
    assert _line_of_a_request(RequestIds("r1", ""), id="own")["id"] == "own"


def test_a_line_of_no_request_has_no_id() -> None:
    assert not {"id", "trace_id"} & orjson.loads(_written("json", "said")).keys()


@pytest.mark.parametrize(
    ("header", "trace"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331-00", TRACE),
        (f"cc-{TRACE}-b7ad6b7169203331-01-what-comes-later", TRACE),
        (f"ff-{TRACE}-b7ad6b7169203331-01", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-b7ad6b7169203331", ""),
        ("00-1-2-01", ""),
        ("", ""),
    ],
)
def test_only_a_valid_traceparent_names_a_trace(header: str, trace: str) -> None:
    assert trace_of(header.encode()) == trace
