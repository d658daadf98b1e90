"""What a client has of a stream, how another node is asked for the rest, and how the two meet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.domain import Failure, NodeSpec, Operation, Usage
from app.errors import NodeFailure
from app.providers import KINDS, prefix
from app.providers.base import Answer, Call
from app.providers.seam import BeganAnew, Joint, Repetition, Seam, length_reached, tells_little, total
from app.providers.written import KEPT_BYTES_MAX, Sent, Written
from tests.unit.openai_events import DONE, ROLE, call, chunk, event, text, usage_chunk

NDJSON_KIND = "ollama"
WORDS = ["Once", " upon", " a", " time,", " there", " was", " a", " hearth", "\n\n", "It", " burned", "."]


def read(*sent: bytes, operation: Operation = Operation.CHAT) -> Written:
    written = Written(operation)
    for events in sent:
        written.read(events)
    return written


def said(*words: str) -> Written:
    return read(*(event(text(word)) for word in words))


# -- what was sent


def test_what_was_sent_is_read_as_one_text_with_its_head() -> None:
    written = read(event(ROLE) + event(text("Hello")), b": a comment\n\n" + event(text(" wörld ")))

    assert written.text == "Hello wörld "
    assert written.start == "Hello wörld"  # templates cut white space off
    assert written.plain
    assert not written.finished
    assert written.tokens == 2
    assert written.head == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_767_323_045,
        "model": "m",
    }


@pytest.mark.parametrize(
    "sent",
    [
        event(chunk({"tool_calls": [{"index": 0, "function": {"name": "f"}}]})),
        event(chunk({"function_call": {"name": "f"}})),
        event(chunk({"content": "a"}, index=1)),
        event({**chunk(), "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{}]}}]}),
        event(chunk({"refusal": "no"})),
        event(chunk({"content": [{"type": "text"}]})),
        b"data: not JSON\n\n",
        b"data: {}\n\n",
    ],
)
def test_more_than_one_plain_text_is_not_plain(sent: bytes) -> None:
    assert not read(event(text("a")) + sent).plain


def test_thoughts_are_read_under_both_names() -> None:
    written = read(event(chunk({"reasoning": "hm"})) + event(chunk({"content": "", "reasoning_content": ", yes"})))

    assert written.reasoning == "hm, yes"
    assert not written.begins


def test_a_completion_keeps_the_white_space_at_its_end() -> None:
    written = read(event({"choices": [{"index": 0, "text": "a \n"}]}), operation=Operation.COMPLETION)

    assert (written.text, written.start) == ("a \n", "a \n")


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["a", " b", " c"], 3),
        (["a", " b", "\n\n"], 2),  # what the next node is not told it writes again
        (["x" * 40, "y" * 40], 20),  # several tokens in one event
    ],
)
def test_tokens_are_counted_by_events(words: Sequence[str], tokens: int) -> None:
    assert said(*words).tokens == tokens


def test_tokens_that_the_node_counted_are_better() -> None:
    written = said("a", " b")
    written.usage = Usage(7, 5)

    assert written.tokens == 5


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_all_that_was_sent_can_be_read_again(spaced: bool, end: bytes) -> None:
    events = [event(text(f"word{number}" * (number % 3)), spaced=spaced, end=end) for number in range(2000)]
    sent = Sent(events[0])
    for each in events[1:]:
        sent.add(each)

    assert b"".join(sent.pieces()) == b"".join(events)


def test_a_long_stream_takes_little_more_than_its_text() -> None:
    sent = Sent(event(ROLE))
    for number in range(20_000):
        sent.add(event(text(f" w{number}")))

    assert sent.size < 20_000 * 8 + 16 * 1024
    assert not sent.lost


def test_what_is_too_long_is_not_kept() -> None:
    noise = Random(1)
    sent = Sent(event(ROLE))
    while not sent.lost:
        sent.add(event(text(noise.randbytes(8000).hex())))

    for _ in range(10):
        sent.add(event(text("x" * 8000)))

    assert sent.size < KEPT_BYTES_MAX / 8


# -- who may go on


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 2},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"format": "json"},
        {"grammar": "root ::= 'a'"},
        {"guided_json": {}, "structured_outputs": {"json": {}}},
        {"tools": [{}], "tool_choice": "required"},
        {"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"functions": [{}], "function_call": {"name": "f"}},
        {"modalities": ["text", "audio"], "audio": {"voice": "a"}},
    ],
)
def test_nobody_goes_on_with_more_than_plain_text(fields: dict[str, Any]) -> None:
    assert prefix.why_not(call(stream=True, **fields).request)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1, "logprobs": False, "response_format": {"type": "text"}},
        {"tools": [{}]},
        {"tools": [{}], "tool_choice": "auto"},
        {"tool_choice": "required"},  # of no tools
    ],
)
def test_somebody_may_go_on_with_plain_text(fields: dict[str, Any]) -> None:
    assert prefix.why_not(call(stream=True, **fields).request) is None


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [1, 2]}, False),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "best_of": 2}, False),
        ({"prompt": "a", "logprobs": 0}, False),
        ({"prompt": "a", "suffix": "z"}, True),
    ],
)
def test_a_completion_is_gone_on_with_when_it_is_one_text(fields: dict[str, Any], fits: bool) -> None:
    request = call(operation=Operation.COMPLETION, stream=True, **fields).request

    assert (prefix.why_not(request) is None) == fits


CHATS = {"ollama", "vllm", "sglang", "lmdeploy", "llamacpp"}
PROMPTS = CHATS | {"tgi", "lmstudio"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_that_go_on(kind: str) -> None:
    spec = NodeSpec(url="http://a:1")

    assert prefix.goes_on(KINDS[kind], spec, Operation.CHAT) == (kind in CHATS)
    assert prefix.goes_on(KINDS[kind], spec, Operation.COMPLETION) == (kind in PROMPTS)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://api.mistral.ai/v1", {"prefix": True}),
        ("https://api.deepseek.com/beta", {"prefix": True}),
        ("https://api.deepseek.com/v1", None),
        ("https://api.moonshot.cn/v1", {"partial": True}),
        ("https://api.groq.com/openai/v1", {}),
        ("https://api.openai.com/v1", None),
    ],
)
def test_clouds_go_on_where_they_document_it(url: str, message: dict[str, Any] | None) -> None:
    known = prefix.prefix_of(KINDS["cloud"], NodeSpec(url=url))

    assert (None if known is None else dict(known.message)) == message


def test_an_operator_may_know_better() -> None:
    able = NodeSpec(url="http://a:1", prefix="continue_final_message")
    unable = NodeSpec(url="http://a:1", prefix="off")

    assert prefix.goes_on(KINDS["generic"], able, Operation.CHAT)
    assert not prefix.goes_on(KINDS["vllm"], unable, Operation.CHAT)


# -- what they are asked

BEGUN = said("Hello", " there", " ")


def asked(kind: str, written: Written = BEGUN, *, merges: bool = False, **fields: Any) -> dict[str, Any]:
    """What a node of the kind gets for the rest of a chat."""
    client = call(stream=True, **fields).request
    how = prefix.prefix_of(KINDS[kind], NodeSpec(url="http://a:1"))
    request = prefix.going_on(client, written, merges=merges, prefix=how)
    body: dict[str, Any] = orjson.loads(KINDS[kind].translate(Call(request, "m", goes_on=True)).body)
    return body


@pytest.mark.parametrize("kind", sorted(CHATS))
def test_a_node_gets_the_text_as_the_start_of_its_answer(kind: str) -> None:
    body = asked(kind)

    assert body["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello there"}]
    flags = (body.get("continue_final_message"), body.get("add_generation_prompt"))
    assert flags == ((None, None) if kind == "ollama" else (True, False))


@pytest.mark.parametrize(
    ("kind", "names", "kwargs"),
    [
        ("ollama", {"thinking"}, None),
        ("vllm", {"reasoning", "reasoning_content"}, None),
        ("sglang", set(), {"enable_thinking": False, "thinking": False}),
        ("lmdeploy", set(), {"enable_thinking": False, "thinking": False}),
        ("llamacpp", set(), {"enable_thinking": False}),
    ],
)
def test_a_node_does_not_think_again(kind: str, names: set[str], kwargs: Any) -> None:
    body = asked(kind, read(event(chunk({"reasoning": "hm"})) + event(text("Yes"))))

    last = body["messages"][-1]
    assert {name: last[name] for name in last if name not in ("role", "content")} == dict.fromkeys(names, "hm")
    assert body.get("chat_template_kwargs") == kwargs
    assert body.get("think") is (False if kind == "ollama" else None)


def test_an_effort_does_not_make_ollama_think_again() -> None:
    assert asked("ollama", reasoning_effort="high")["think"] is False


def test_what_the_client_tells_the_template_stays() -> None:
    body = asked("llamacpp", chat_template_kwargs={"style": "short", "enable_thinking": True})

    assert body["chat_template_kwargs"] == {"style": "short", "enable_thinking": False}


@pytest.mark.parametrize(
    ("kind", "fields", "then"),
    [
        ("vllm", {"max_tokens": 10}, {"max_tokens": 8}),
        ("vllm", {"max_completion_tokens": 10, "max_tokens": 99}, {"max_completion_tokens": 8, "max_tokens": 97}),
        ("vllm", {"max_tokens": 10, "min_tokens": 5}, {"max_tokens": 8, "min_tokens": 3}),
        ("lmdeploy", {"max_completion_tokens": 10}, {"max_tokens": 8}),
        ("ollama", {"max_tokens": 10}, {"options": {"num_predict": 8}}),
        ("ollama", {"options": {"num_predict": 10}}, {"options": {"num_predict": 8}}),
    ],
)
def test_the_limit_shrinks_by_what_was_written(kind: str, fields: dict[str, Any], then: dict[str, Any]) -> None:
    body = asked(kind, said("Hello", " there"), **fields)

    assert {name: body.get(name) for name in then} == then


@pytest.mark.parametrize(
    ("fields", "left"), [({}, None), ({"max_tokens": 5}, 3), ({"max_tokens": 9, "max_completion_tokens": 2}, 0)]
)
def test_what_is_left_of_the_limit(fields: dict[str, Any], left: int | None) -> None:
    assert prefix.tokens_left(call(stream=True, **fields).request, 2) == left


@pytest.mark.parametrize(("kind", "merges"), [("ollama", True), ("llamacpp", True), ("vllm", None)])
def test_an_answer_may_be_the_rest_of_the_clients_own_last_message(kind: str, merges: bool | None) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    client = call(stream=True, messages=messages).request
    how = prefix.prefix_of(KINDS[kind], NodeSpec(url="http://a:1"))

    assert prefix.opens_last_message(client, how) is merges
    assert asked(kind, said("llo"), merges=True, messages=messages)["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
    ]


def test_white_space_alone_is_nothing_to_go_on_with() -> None:
    body = asked("vllm", said("\n"))

    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert "continue_final_message" not in body


@pytest.mark.parametrize(
    ("kind", "fields", "then"),
    [
        ("vllm", {}, {"prompt": "Once upon"}),
        ("ollama", {}, {"prompt": "Once upon", "raw": True}),
        ("ollama", {"suffix": "end"}, {"prompt": "Once upon", "suffix": "end"}),
    ],
)
def test_a_completion_goes_on_where_its_prompt_ends(kind: str, fields: dict[str, Any], then: dict[str, Any]) -> None:
    written = read(event({"choices": [{"index": 0, "text": " upon"}]}), operation=Operation.COMPLETION)
    client = call(operation=Operation.COMPLETION, stream=True, prompt=["Once"], **fields).request

    request = prefix.going_on(client, written, merges=False)

    body = orjson.loads(KINDS[kind].translate(Call(request, "m", goes_on=True)).body)
    assert {name: body.get(name) for name in ("prompt", "raw", "suffix") if name in body} == then


def test_numbers_that_are_too_long_for_json_stay_as_they_were() -> None:
    body = (
        b'{"model":"m","stream":true,"seed":123456789012345678901234567890,"messages":[{"role":"user","content":"hi"}]}'
    )

    request = prefix.going_on(call(stream=True, body=body).request, BEGUN, merges=False)

    assert b"123456789012345678901234567890" in request.body


def test_the_clients_request_is_not_changed() -> None:
    client = call(stream=True, max_tokens=10, options={"num_predict": 3}).request
    before = orjson.dumps(client.fields)

    prefix.going_on(client, BEGUN, merges=False, prefix=prefix.VLLM)

    assert orjson.dumps(client.fields) == before


# -- where texts meet

STORY = "The lamp was lit before the kettle sang, and nobody spoke of the road."


@pytest.mark.parametrize(
    ("text", "rest", "then"),
    [
        ("Hello", [" there"], " there"),
        ("Hello", ["there"], "there"),
        ("Hello ", [" there"], "there"),
        ("Hello\n\n", ["\n\n", "there"], "there"),
        ("Hello\n\n", ["\n", "there"], "there"),
        ("Hello\n\n", [" there"], "there"),
        ("if x:\n", ["\n    return"], "    return"),
        ("if x:\n    ", ["\n  ", "  return"], "return"),
        ("Hello ", ["\nthere"], "\nthere"),
        ("Hello ", [" ", " "], " "),
        ("ha ha", [" ha", " ha"], " ha ha"),
        ("1, 2, 1, 2, 1, 2, 1, 2, 1, 2,", [" 1, 2, 1, 2, 1, 2, 1, 2, 1, 2,", " 3"], " 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 3"),
        (STORY, [STORY[:30], STORY[30:], " So"], " So"),  # all of it
        (STORY, [STORY, " So"], " So"),
        (STORY, [STORY + " So"], " So"),
        (STORY, [" " + STORY[-20:-5], STORY[-5:], " So"], " So"),  # its end
        (STORY, [STORY[-16:] + " So"], " So"),
        (STORY, [STORY[-9:], " So"], STORY[-9:] + " So"),  # too short to tell
        (STORY + "\n", [STORY[-20:], "\nSo"], "So"),
        (STORY, ["The lamp was out."], "The lamp was out."),
        (STORY, ["The lamp"], "The lamp"),
    ],
)
def test_the_rest_of_a_text_says_nothing_twice(text: str, rest: list[str], then: str) -> None:
    joint = Joint(text, text.rstrip())

    out = "".join([joint.add(piece) for piece in rest]) + joint.end()

    assert out == then
    assert joint.done


def test_a_refrain_is_no_repetition() -> None:
    line = "Happy birthday to you, my dear."
    joint = Joint(f"{line} {line}", f"{line} {line}")

    out = joint.add(f" {line}") + joint.add(" Amen.")

    assert out == f" {line} Amen."


def test_an_answer_that_begins_anew_is_none_to_go_on_with() -> None:
    joint = Joint(STORY, STORY)

    with pytest.raises(NodeFailure) as failed:
        joint.add(STORY[:40] + "or so they say")

    assert failed.value.failure is Failure.NOT_CONTINUED
    assert not failed.value.counts


class Met(NamedTuple):
    """What a client has in the end, and whether the node was said to begin anew, and asked for all then."""

    text: str
    anew: bool


def met(whole: str, at: int, rest: str | None = None, *, chat: bool = True, step: int = 3, cut: bool = False) -> Met:
    """What becomes of a text that broke off there, when a node says `rest`; what is missing, unless given."""
    begun = whole[:at]
    told = begun.rstrip() if chat else begun
    rest = whole[len(told) :] if rest is None else rest
    pieces = [rest[place : place + step] for place in range(0, len(rest), step)]
    joint = Joint(begun, told)
    try:
        return Met(begun + "".join([joint.add(piece) for piece in pieces]) + joint.end(cut=cut), anew=False)
    except BeganAnew:
        return Met(begun + Repetition(begun).add(whole), anew=True)


PIECES = [
    *(
        "a",
        "ab",
        "a \nb",
        "ha ",
        "1",
        "1234",
        "\U0001f525",
        "\U0001f525\u00e9 ",
        "| --- ",
        "=-",
        "\n",
    ),
    *("cous", "1, 2, ", "no, no, no! ", "\u4f60\u597d\uff01", "row row row your boat, ", "Once upon a time. "),
    *(
        "The quick brown fox jumps over the lazy dog.\n",
        "> Happy birthday to you, my dear,\n\n",
        "- [ ] Check the valve\n",
    ),
    *(
        "    self.assertEqual(first, second)\n",
        "</div>\n</section>\n",
        "| one | two | three |\n",
        "print('hello world')\n",
    ),
    *('{"name": "Alice Smith", "age": 7}, ', "if x:\n    return compute(x)\n\n", "\tcall _subroutine_1\n"),
]
AROUND = [
    ("", ""),
    ("", "The end."),
    ("Sure, here you go:\n\n", "\n\nThat was it."),
    ("It says: ", "and so on"),
    ("```\n", "```"),
]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("piece", PIECES)
def test_a_text_that_repeats_itself_loses_nothing_wherever_it_breaks_off(piece: str, chat: bool) -> None:
    for before, after in AROUND:
        for times in (2, 3, 5):
            whole = before + piece * times + after
            for at in range(len(whole) + 1):
                assert met(whole, at, chat=chat, step=1 + at % 7) == (whole, False), (at, whole)


# No full stops and capitals: with few letters, a stop or a word might really come right before the same words again.
@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abcdefghij\u00e9\u597d1|{-; \n", min_size=1, max_size=40), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    separator=st.sampled_from([" ", "\n", "\n\n", ", ", "\n- "]),
    at=st.integers(0, 400),
    chat=st.booleans(),
    step=st.integers(1, 50),
)
def test_whatever_a_text_repeats_the_client_gets_it(
    pieces: list[str], order: list[int], separator: str, at: int, chat: bool, step: int
) -> None:
    whole = separator.join(pieces[number % len(pieces)] for number in order)

    assert met(whole, at % (len(whole) + 1), chat=chat, step=step).text == whole


@pytest.mark.parametrize("step", [1, 4, 999])
@pytest.mark.parametrize("lead", ["", " ", "\n\n"])
def test_a_node_that_says_all_again_is_known_wherever_the_text_broke_off(lead: str, step: int) -> None:
    whole = lead + STORY
    for at in range(len(lead) + (9 if not lead else 32), len(whole) - 1):
        assert met(whole, at, whole, step=step).text == whole
        assert met(whole, at, STORY, step=step).text == whole


def test_of_a_text_too_short_to_tell_a_node_doubles_a_few_characters_at_most() -> None:
    for at in range(1, 9):
        assert met(STORY, at, STORY).text in (STORY, STORY[:at] + STORY, STORY[:at].rstrip() + STORY)


@pytest.mark.parametrize("more", [0, 1, 3, 8, 12, 20, 40])
def test_a_limit_that_ends_an_answer_begun_anew_hides_it_only_for_some_characters(more: int) -> None:
    for at in range(more + 1, len(STORY)):
        then = met(STORY, at, STORY[:more], cut=True)

        assert then.anew or len(then.text) <= at + 9
        assert then.text.startswith(STORY[:at])


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("...\nThe lamp was lit before", "The lamp was lit before the kettle sang"),  # the line is begun again
        ("so the lamp was lit before.", " e lamp was lit before. So"),  # inside a word
        ("so the lamp was lit before.", "e lamp was lit before. So"),
    ],
)
def test_an_end_that_is_said_again_is_known_where_it_does_not_read_on(begun: str, rest: str) -> None:
    place = begun.index(rest.lstrip()[:16])
    whole = begun + rest.lstrip()[len(begun) - place :]

    assert met(whole, len(begun), rest, step=2) == (whole, False)


@pytest.mark.parametrize(
    "said", ["cous", "CouscousX", "deadbeef01234567", "\u6211\u4eec\u90fd\u662f\u597d\u670b\u53cb\u5440\uff0c"]
)
def test_what_white_space_does_not_keep_apart_is_never_dropped(said: str) -> None:
    """Where it could be either, the node is asked for all, which shows it."""
    for whole in (said * 2, said * 2 + "!", f"So: {said}{said}"):
        for at in range(len(whole) + 1):
            assert met(whole, at).text == whole


MILK = "No milk today at home."
LAMP = "The lamp was lit before the kettle sang"


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        (MILK, MILK + MILK),  # the node says it twice, too
        (MILK, MILK + "No mil"),
        (MILK + MILK, MILK),
        (MILK + MILK, MILK + MILK),
        (f"So: {MILK}", MILK + MILK),
        (f"A: {MILK} B: {MILK}", f"{MILK} C"),
        (f"{LAMP}. So: {LAMP}, and on", f"{LAMP}; and so"),
        ("To be or", "To be or not"),  # few characters
        ("let Bar\nx = new Foo.", "Bar\nx = new Foo.Bar;"),  # a line that ends as the one before, and comes again
        ("So: Abcdefghijklmnopq.", "Abcdefghijklmnopq. So"),  # no white space
        ("(as Bob Smith said,", "as Bob Smith said,"),
    ],
)
def test_words_that_a_writer_may_have_said_twice_are_kept(begun: str, rest: str) -> None:
    assert met(begun + rest, len(begun), step=2) == (begun + rest, False)


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("Abcdefghijklmnopq.", "Abcdefghijklmnopq. So"),
        (STORY, STORY[:20]),
        (STORY, LAMP + " again"),
        (LAMP.lower(), LAMP.lower() + ". So"),
        ("see the old lamp", "see the old lamp of"),  # a word may go on
    ],
)
def test_an_answer_that_may_have_begun_anew_is_asked_for_as_a_whole(begun: str, rest: str) -> None:
    assert met(begun + rest, len(begun), rest) == (begun + rest, True)


@pytest.mark.parametrize(
    ("begun", "little"),
    [
        ("t0 t1 t2 ", True),
        ("ha ha", True),
        ("Sure", True),
        ("", False),  # nothing to go on with: the answer begins anew anyhow
        (" \n", False),
        ("Once upon a time", False),
        ("- - - - - - - - - - - - - - - - - - ", False),
        (STORY, False),
    ],
)
def test_few_characters_tell_nothing_of_a_node_that_says_them(begun: str, little: bool) -> None:
    assert tells_little(read(event(text(begun))), None) is little


@pytest.mark.parametrize(("left", "little"), [(1, True), (8, True), (9, False), (None, False)])
def test_few_tokens_tell_nothing_of_a_node_that_may_say_no_more(left: int | None, little: bool) -> None:
    assert tells_little(read(event(text(STORY))), left) is little


@given(st.data(), st.sampled_from([STORY, STORY + " More.", STORY + "\n"]))
def test_of_a_whole_answer_only_what_is_new_is_said(data: st.DataObject, whole: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    joint = Repetition(STORY)

    out = "".join(joint.add(whole[begin:end]) for begin, end in pairwise([0, *cuts, len(whole)])) + joint.end()

    assert STORY + out == whole


@pytest.mark.parametrize("whole", [STORY[:-1], "Another story", STORY[:40] + "!" + STORY[40:], ""])
def test_a_whole_answer_that_is_another_is_not_believed(whole: str) -> None:
    joint = Repetition(STORY)

    with pytest.raises(NodeFailure, match="another answer"):
        assert joint.add(whole) + joint.end() == "never"


# -- where streams meet


def seam(written: Written, kind: str = "vllm", **asked: Any) -> Seam:
    asked.setdefault("stream", True)
    answer = KINDS[kind].answer(call(**asked))
    return Seam(answer, Operation.CHAT, written)


def documents(events: bytes) -> list[dict[str, Any]]:
    datas = [line[6:] for line in events.splitlines() if line.startswith(b"data: ")]
    return [orjson.loads(data) for data in datas if data != b"[DONE]"]


def test_the_rest_of_a_stream_has_the_id_of_its_beginning() -> None:
    written = said("Hello")
    written.head["id"], written.head["created"] = "chatcmpl-0", 1
    rest = event(ROLE) + event(text(" there")) + event(chunk(finish="stop")) + DONE

    out = documents(seam(written).feed(rest))

    assert {(each["id"], each["created"], each["model"]) for each in out} == {("chatcmpl-0", 1, "m")}
    assert [each["choices"][0]["delta"] for each in out] == [{"content": " there"}, {}]


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": {"cached_tokens": 8}}])
def test_tokens_of_all_parts_are_added_up(details: dict[str, Any]) -> None:
    counts = {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17, **details}
    rest = event(text(" c")) + event(chunk(finish="stop")) + event(usage_chunk(counts)) + DONE
    joined = seam(said("a", " b"), include_usage=True)

    out = documents(joined.feed(rest))

    assert out[-1]["usage"] == {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}
    assert joined.usage == Usage(12, 5, 8 if details else 0)  # its own
    assert total(2, Usage(12, 5, 8)) == Usage(10, 7, 8)


def test_the_end_alone_may_be_missing() -> None:
    joined = seam(said("Hello"))

    out = joined.feed(event(ROLE) + event(chunk(finish="stop")) + DONE)

    assert [each["choices"][0]["finish_reason"] for each in documents(out)] == ["stop"]
    assert out.endswith(DONE)


@pytest.mark.parametrize(
    ("finish", "counts", "anew"),
    [
        ("stop", None, False),
        ("length", None, True),  # the limit may have been used up by what the client has
        ("length", 1, False),  # a node that shows what it was told, and counts what it wrote
        ("length", 20, True),
        ("stop", 20, True),
    ],
)
def test_a_text_said_again_within_the_limit_is_no_end(finish: str, counts: int | None, anew: bool) -> None:
    joined = seam(said(*re.findall(r" ?\S+", STORY)))
    first = documents(joined.feed(event(text(STORY)) + event(text(" So"))))
    usage = {"prompt_tokens": 20, "completion_tokens": counts, "total_tokens": 20 + (counts or 0)}
    end = event(chunk(finish=finish)) + (event(usage_chunk(usage)) if counts else b"") + DONE

    with pytest.raises(BeganAnew) if anew else nullcontext():
        joined.feed(end)

    assert [each["choices"][0]["delta"] for each in first] == [{"content": " So"}]
    assert joined.ended


def test_text_that_is_held_comes_before_the_end() -> None:
    joined = seam(said(STORY))
    first = joined.feed(event(text(STORY[:10])))

    out = documents(joined.feed(event(chunk(finish="stop")) + DONE))

    assert first == b""
    assert [each["choices"][0]["delta"] for each in out] == [{"content": STORY[:10]}, {}]


def test_tool_calls_may_come_after_the_text() -> None:
    piece = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    joined = seam(said("Let me see."), tools=[{}])

    out = documents(
        joined.feed(event(text(" So:")) + event(chunk({"tool_calls": [piece]})) + event(chunk(finish="stop")))
    )

    assert [each["choices"][0]["delta"] for each in out][:2] == [{"content": " So:"}, {"tool_calls": [piece]}]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_node_that_thinks_again_does_not_go_on(name: str) -> None:
    with pytest.raises(NodeFailure) as failed:
        seam(said("Hello")).feed(event(ROLE) + event(chunk({name: "hm"})))

    assert failed.value.failure is Failure.NOT_CONTINUED


def test_an_event_that_cannot_be_read_is_left_out() -> None:
    joined = seam(said("Hello"))

    out = joined.feed(event(text(" a"))) + joined.feed(b"data: {broken}\n\n") + joined.feed(event(text(" b")))

    assert [each["choices"][0]["delta"]["content"] for each in documents(out)] == [" a", " b"]
    assert joined.dropped == 1


def test_a_limit_that_is_used_up_ends_the_stream() -> None:
    written = said("a", " b")

    out = length_reached(Operation.CHAT, written, Usage(4, 2))

    end, usage = documents(out)
    assert (end["id"], end["choices"][0]["finish_reason"]) == ("chatcmpl-1", "length")
    assert usage["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert out.endswith(DONE)
    assert len(documents(length_reached(Operation.CHAT, written, None))) == 1


# -- cut at any byte


class Cut(NamedTuple):
    """A stream that broke: what its client has, as bytes."""

    out: bytes
    broken: bool


def wire(kind: str, words: Sequence[str], operation: Operation) -> bytes:
    """What a node of the kind writes to say these words."""
    if kind == NDJSON_KIND:
        key = "message" if operation is Operation.CHAT else "response"
        lines: list[dict[str, Any]] = [
            {"model": "m", key: {"role": "assistant", "content": word} if key == "message" else word, "done": False}
            for word in words
        ]
        end = {"content": ""} if key == "message" else ""
        lines.append({"model": "m", key: end, "done": True, "done_reason": "stop", "eval_count": len(words)})
        return b"".join(orjson.dumps(line) + b"\n" for line in lines)
    if operation is Operation.CHAT:
        pieces = [ROLE, *map(text, words), chunk(finish="stop")]
    else:
        pieces = [{**chunk(), "choices": [{"index": 0, "text": word}]} for word in words]
        pieces.append({**chunk(), "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    return b"".join(map(event, pieces)) + DONE


def relayed(answer: Answer, data: bytes, cuts: Sequence[int]) -> Cut:
    """What a client gets of these bytes, which come in pieces."""
    out, places = b"", [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for start, end in pairwise(places):
            out += answer.feed(data[start:end]) if end > start else b""
            if answer.ended:
                break
        out += answer.finish()
    except NodeFailure:
        return Cut(out, broken=True)
    return Cut(out, broken=False)


def answer_of(kind: str, operation: Operation) -> Answer:
    prompt: dict[str, Any] = {} if operation is Operation.CHAT else {"prompt": "p"}
    return KINDS[kind].answer(call(operation=operation, stream=True, **prompt))


def spoken(events: bytes, operation: Operation) -> str:
    choices = [choice for each in documents(events) for choice in each["choices"]]
    if operation is Operation.COMPLETION:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# Few letters, so that nothing is so telling that it could be taken for a repetition.
words_of_few_letters = st.lists(st.text("ab \n\u00e9\U0001f525", min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    words=words_of_few_letters,
    kinds=st.lists(st.sampled_from(["vllm", "ollama", "llamacpp"]), min_size=1, max_size=4),
    operation=st.sampled_from([Operation.CHAT, Operation.COMPLETION]),
    ends=st.lists(st.integers(0, 4000), min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 4000), max_size=6),
)
@example(words=["a \nb", "a \nb"], kinds=["vllm"] * 3, operation=Operation.CHAT, ends=[0, 0, 378, 0], cuts=[])
def test_a_stream_that_dies_anywhere_and_goes_on_is_the_whole_text(
    words: list[str], kinds: list[str], operation: Operation, ends: list[int], cuts: list[int]
) -> None:
    """Nodes that honour the start of an answer, each of which dies at any byte but the last, which never does."""
    whole, client = "".join(words), b""
    for number, kind in enumerate([*kinds, "vllm"]):
        written = read(client, operation=operation)
        if written.finished:
            break
        told = written.start
        rest = words if not told else [whole[len(told) :][place : place + 3] for place in range(0, len(whole), 3)]
        data = wire(kind, [word for word in rest if word], operation)
        answer = answer_of(kind, operation)
        joined: Answer = Seam(answer, operation, written) if client else answer
        if number < len(kinds):
            data = data[: ends[number] % (len(data) + 1)]
        part = relayed(joined, data, cuts)
        if joined.begun:
            client += part.out
        assert client.count(b"data: ") == client.count(b"\n\n"), "whole events only"

    assert spoken(client, operation) == whole
    assert len({each["id"] for each in documents(client)}) == 1
    assert sum(bool(each["choices"][0].get("finish_reason")) for each in documents(client) if each["choices"]) == 1
    assert client.endswith(DONE)
