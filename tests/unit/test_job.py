"""What scheduling reads from a request: digests and sizes of its messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Operation, Request
from app.routing.job import Job

TEXTS = st.sampled_from(["", "a", "b", "a" * 5000, "a" * 5001])
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=2)
ROLES = st.sampled_from(["user", "assistant"])
MESSAGES = st.lists(
    st.one_of(
        st.tuples(ROLES, st.one_of(TEXTS, PARTS)).map(lambda both: {"role": both[0], "content": both[1]}),
        PARTS.map(lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}),
        PARTS.map(lambda calls: {"role": "assistant", "tool_calls": calls}),
    ),
    max_size=4,
)


def _job(messages: list[Any], **fields: Any) -> Job:
    return Job(Request("r", Operation.CHAT, "m", b"", {"messages": messages, **fields}))


@given(MESSAGES, MESSAGES)
def test_equal_beginnings_have_equal_digests_and_others_have_not(one: list[Any], other: list[Any]) -> None:
    for place, (mine, yours) in enumerate(zip(_job(one).chain, _job(other).chain, strict=False)):
        assert (mine == yours) == (one[: place + 1] == other[: place + 1])


def test_tools_come_before_all_messages() -> None:
    hello = {"role": "user", "content": "hello"}

    assert _job([hello]).chain != _job([hello], tools=[{"type": "function"}]).chain


def test_a_long_text_is_told_by_its_ends_and_its_length() -> None:
    def digest(text: str) -> int:
        return _job([{"role": "user", "content": text}]).chain[0]

    text = "x" * 10_000
    assert digest(text) == digest("x" * 10_000)
    assert len({digest(each) for each in (text, "y" + text[1:], text[:-1] + "y", text + "x")}) == 4


@pytest.mark.parametrize("message", ["hello", None, 7, ["role", "content"], {}, {"content": "hello"}, {"role": "user"}])
def test_what_is_no_message_has_a_digest_too(message: Any) -> None:
    job = _job([message, {"role": "user", "content": "hello"}])

    assert len(job.chain) == len(job.sizes) == 2
    assert job.characters == sum(job.sizes)


def test_a_picture_counts_as_much_as_engines_make_of_it() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}

    assert _job([{"role": "user", "content": [picture]}]).characters < 10_000
