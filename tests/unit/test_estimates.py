"""Guesses at tokens that nobody counted."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Operation, Request, Usage
from app.ledger import estimates
from app.ledger.estimates import TokenEstimator, completion_at_most, prompt_at_most

CHAT, COMPLETION, EMBEDDING = Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING
DATA = "data:image/png;base64," + "A" * 100_000


def request(operation: Operation = CHAT, model: str = "m", **fields: Any) -> Request:
    return Request("r", operation, model, b"", fields)


def chat(*contents: object, **fields: Any) -> Request:
    return request(messages=[{"role": "user", "content": content} for content in contents], **fields)


def parts(*written: dict[str, Any]) -> Request:
    return chat([{"type": "text", "text": "what is this?"}, *written])


# Prompts


def test_text_has_four_bytes_a_token_until_better_is_known() -> None:
    assert TokenEstimator().estimate_prompt(chat("x" * 4000)) == 1000 + 8
    assert prompt_at_most(chat("x" * 4000)) == 2000 + 16


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "x" * 400}, 100),
        ({"prompt": ["x" * 400, "x" * 400]}, 200),
        ({"prompt": [1, 2, 3]}, 3),
        ({"prompt": [[1, 2, 3], [4]], "suffix": "x" * 40}, 14),
        ({"input": ["é" * 200]}, 100),
        ({"input": "日本" * 20}, 30),
        ({"prompt": None, "input": 5.5, "messages": "x" * 40, "seed": 7, "user": "x" * 400}, 10),
        ({}, 0),
    ],
)
def test_every_form_of_a_prompt_is_counted(fields: dict[str, Any], tokens: int) -> None:
    assert TokenEstimator().estimate_prompt(request(COMPLETION, **fields)) == tokens


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "high"}},
        {"type": "input_image", "image_url": DATA},
    ],
)
def test_an_image_counts_the_same_whatever_its_bytes(part: dict[str, Any]) -> None:
    without = TokenEstimator().estimate_prompt(parts())

    assert TokenEstimator().estimate_prompt(parts(part)) == without + 1000
    assert prompt_at_most(parts(part, part)) == prompt_at_most(parts()) + 6000


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "A" * 64_000, "format": "mp3"}},
        {"type": "file", "file": {"file_data": "A" * 64_003}},
        {"type": "video_url", "video_url": "A" * 64_003},
    ],
)
def test_what_is_attached_is_not_counted_as_text(part: dict[str, Any]) -> None:
    assert TokenEstimator().estimate_prompt(parts(part)) == TokenEstimator().estimate_prompt(parts()) + 1250
    assert prompt_at_most(parts(part)) == prompt_at_most(parts()) + 4000


def test_tools_are_read_as_json() -> None:
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": {"city": {"minLength": 1}}}},
    }
    with_tools = prompt_at_most(chat("hi", tools=[tool]))

    assert with_tools - prompt_at_most(chat("hi")) >= len(str(tool)) // 2 - 5


def test_what_was_called_before_is_part_of_the_prompt() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "x" * 400}}]}

    assert TokenEstimator().estimate_prompt(request(messages=[called])) >= 100 + 8


def test_a_deep_document_is_no_trouble() -> None:
    deep: Any = "x" * 40
    for _ in range(5000):
        deep = {"a": [deep]}

    assert prompt_at_most(chat("hi", tools=deep)) > 5000
    assert prompt_at_most(chat([deep])) >= 20


def test_long_bodies_take_no_time() -> None:
    long = chat(*["some words that a user may have written " * 5] * 1000)
    begin = time.perf_counter()
    prompt_at_most(long)

    assert time.perf_counter() - begin < 0.05


@given(st.text(max_size=200))
def test_the_bound_is_above_the_guess(text: str) -> None:
    assert prompt_at_most(chat(text)) > TokenEstimator().estimate_prompt(chat(text))


# Answers


@pytest.mark.parametrize(
    ("operation", "fields", "tokens"),
    [
        (CHAT, {}, 8192),
        (CHAT, {"max_tokens": 100}, 100),
        (CHAT, {"max_completion_tokens": 100}, 100),
        (CHAT, {"max_completion_tokens": 50, "max_tokens": 100}, 100),
        (CHAT, {"max_tokens": None, "n": None}, 8192),
        (CHAT, {"max_tokens": 0}, 8192),
        (CHAT, {"max_tokens": -1}, 8192),
        (CHAT, {"max_tokens": True, "n": "many"}, 8192),
        (CHAT, {"max_tokens": 100, "n": 3}, 300),
        (CHAT, {"n": 2}, 16_384),
        (CHAT, {"max_tokens": 10**40}, 10_000_000),
        (CHAT, {"max_tokens": 100, "prompt": ["a", "b"]}, 100),
        (COMPLETION, {"max_tokens": 100, "n": 2, "best_of": 5, "prompt": "a"}, 500),
        (COMPLETION, {"max_tokens": 100, "n": 2, "prompt": ["a", "b", "c"]}, 600),
        (COMPLETION, {"max_tokens": 100, "prompt": [1, 2, 3]}, 100),
        (COMPLETION, {"max_tokens": 100, "prompt": [[1, 2], [3]]}, 200),
        (COMPLETION, {"max_tokens": 100, "prompt": []}, 100),
        (EMBEDDING, {"input": "a"}, 0),
    ],
)
def test_answers_have_a_longest_length(operation: Operation, fields: dict[str, Any], tokens: int) -> None:
    assert completion_at_most(request(operation, **fields), 8192) == tokens


# Learning


def test_a_models_ratio_is_learnt_from_its_answers() -> None:
    estimator = TokenEstimator()
    asked = chat("x" * 2000)
    for _ in range(5):
        estimator.learn(asked, Usage(1008, 5))

    assert estimator.estimate_prompt(asked) == 1008
    assert estimator.estimate_text("m", 2000) == 1000
    assert estimator.estimate_text("another", 2000) == 500


def test_one_odd_answer_moves_the_ratio_little() -> None:
    estimator = TokenEstimator()
    asked = chat("x" * 4000)
    estimator.learn(asked, Usage(1008, 5))
    estimator.learn(asked, Usage(508, 5))

    assert estimator.estimate_text("m", 4000) == round(4000 / 4.8)


@pytest.mark.parametrize(
    ("asked", "usage"),
    [
        (chat("hi"), Usage(20, 5)),
        (chat("hi"), Usage(0, 0)),
        (parts({"type": "image_url", "image_url": {"url": DATA}}), Usage(2000, 5)),
        (request(COMPLETION, prompt=[1] * 100), Usage(100, 5)),
        (request(), Usage(100, 5)),
    ],
)
def test_answers_that_teach_nothing_are_passed_over(asked: Request, usage: Usage) -> None:
    estimator = TokenEstimator()
    for _ in range(20):
        estimator.learn(asked, usage)

    assert estimator.estimate_text("m", 4000) == 1000


@given(st.integers(1, 10**7))
def test_a_foolish_count_does_no_harm(tokens: int) -> None:
    estimator = TokenEstimator()
    estimator.learn(chat("x" * 1000), Usage(tokens, 5))

    assert 1000 / 16 - 1 <= estimator.estimate_text("m", 1000) <= 2000


def test_most_answers_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning costs as much as the request is long."""
    weigh = Mock(wraps=estimates._size)
    monkeypatch.setattr(estimates, "_size", weigh)
    estimator = TokenEstimator()
    for _ in range(160):
        estimator.learn(chat("x" * 400), Usage(108, 5))

    assert weigh.call_count == 8 + 160 // 16 - 1


def test_models_that_clients_invent_do_not_pile_up() -> None:
    estimator = TokenEstimator()
    for number in range(1500):
        estimator.learn(chat("x" * 400, model=f"m{number}"), Usage(200, 5))

    assert len(estimator._ratios) == 1000
