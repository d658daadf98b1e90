"""Streams whose node dies after they have begun: another node goes on, and the client sees one answer."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes import KINDS, Behaviour, Delta, FakeCloud, FakeLMDeploy, FakeNode, FakeVLLM, NodeProcess, ToolCall
from tests.fakes import prefill as prefills
from tests.fakes.billing import BillingCloud
from tests.fakes.flavours import VLLM
from tests.system.harness import Gateway, gateway, kind_of, until
from tests.system.money import Books, paid
from tests.system.reading import Answer, read
from tests.system.scripted import RawClient

STORY = (
    "Once upon a time, there was a hearth: it burned\n\nall night, and nobody \u00e9ver \U0001f525 knew why. The end."
)
TOKENS = 20  # of the story
KNOWN = ["ollama", "vllm", "sglang", "lmdeploy", "llamacpp"]
USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
CUTS = [Behaviour.CLOSE_MIDWAY, Behaviour.RESET_MIDWAY, Behaviour.ERROR_MIDWAY, Behaviour.HANG_MIDWAY]


def pair(one: str = "vllm", other: str = "vllm", **options: Any) -> tuple[FakeNode[Any], FakeNode[Any]]:
    """Two nodes that tell the story."""
    options = {"models": ["m"], "text": STORY, **options}
    return KINDS[one](**options), KINDS[other](**options)


def in_order(*nodes: FakeNode[Any], **settings: Any) -> dict[str, Any]:
    """Settings for these nodes, n0, n1, ..., of which the first that may be asked is.

    What `settings` has under a node's name is part of its entry.
    """
    weights = [100.0 ** (len(nodes) - index) for index in range(len(nodes))]
    entries: list[dict[str, Any]] = [
        {"url": node.url, "kind": kind_of(node), "name": f"n{index}", "weight": weights[index], "models": ["m"]}
        for index, node in enumerate(nodes)
    ]
    for entry in entries:
        entry.update(settings.pop(str(entry["name"]), {}))
    quiet = {"lb_strategy": "least_connections", "health_check_interval": 60, "breaker_fail_max": 10_000}
    return {"local_nodes": json.dumps(entries), **quiet, **settings}


async def tell(hearth: Gateway, **fields: Any) -> Answer:
    return read(await hearth.chat(stream=True, **fields))


async def metric(hearth: Gateway, outcome: str) -> float:
    text = (await hearth.client.get("/metrics", headers={"accept": "text/plain"})).text
    wanted = f'hearth_continuations_total{{outcome="{outcome}"}} '
    return next((float(line[len(wanted) :]) for line in text.splitlines() if line.startswith(wanted)), 0.0)


# -- who goes on, and how


@pytest.mark.parametrize(("one", "other"), [(one, one) for one in KNOWN] + [("ollama", "vllm"), ("vllm", "ollama")])
async def test_another_node_goes_on(one: str, other: str) -> None:
    first, second = pair(one, other)
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=7)

        answer = await tell(hearth, max_tokens=50, **USAGE)

        assert answer.whole
        assert answer.text == STORY
        assert answer.finish_reasons == ["stop"]
        assert len({(each["id"], each["created"], each["model"]) for each in answer.events}) == 1
        assert answer.usage == {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": 1 + TOKENS}
        (rest,) = (request.json for request in second.inferences)
        assert rest["messages"][-1]["content"].startswith("Once upon a time,")
        assert (rest.get("max_tokens") or rest["options"]["num_predict"]) in (50 - 7, 50 - 6)
        roles = [choice["delta"].get("role") for each in answer.events for choice in each["choices"]]
        assert roles.count("assistant") == 1


@pytest.mark.parametrize(("one", "other"), [("vllm", "ollama"), ("ollama", "vllm"), ("llamacpp", "sglang")])
async def test_a_stream_may_die_at_any_byte(one: str, other: str) -> None:
    first, second = pair(one, other)
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.OK)
        size = len((await hearth.chat(stream=True)).content) if one != "ollama" else 3000

        for at in range(1, size, 97):
            first.behave(Behaviour.CLOSE_MIDWAY, at=at)
            answer = await tell(hearth)
            assert answer.whole, (at, answer.error)
            assert answer.text == STORY, at
            assert len({each["id"] for each in answer.events}) == 1

        assert await metric(hearth, "continued") > 10
        assert await metric(hearth, "nobody") == 0


@pytest.mark.parametrize("line", ["- [ ] Check the valve\n", "a \nb", "The quick brown fox jumps over the lazy dog. "])
async def test_a_text_that_repeats_itself_keeps_all_of_it(line: str) -> None:
    first, second = pair("ollama", "vllm", text=line * 3)
    async with first, second, gateway(**in_order(first, second)) as hearth:
        for after in range(1, 16):
            first.behave(Behaviour.CLOSE_MIDWAY, after=after)

            answer = await tell(hearth)

            assert answer.whole
            assert answer.text == line * 3, after
        assert await metric(hearth, "continued") > 0


@pytest.mark.parametrize("behaviour", CUTS)
async def test_every_way_to_die_is_gone_on_from(behaviour: Behaviour) -> None:
    first, second = pair()
    async with first, second, gateway(**in_order(first, second, idle_timeout=0.2)) as hearth:
        first.behave(behaviour, after=5)

        answer = await tell(hearth)

        assert answer.whole
        assert answer.text == STORY
        await first.until(lambda node: node.open == 0)
        assert await hearth.in_flight() == 0


async def test_two_nodes_may_die_in_one_stream() -> None:
    (first, second), (third, _) = pair("vllm", "ollama"), pair("llamacpp")
    async with first, second, third, gateway(**in_order(first, second, third)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY, after=4)
        second.behave(Behaviour.RESET_MIDWAY, after=3)

        response = await hearth.chat(stream=True, headers={"x-request-id": "r-1"}, **USAGE)

        answer = read(response)
        assert answer.whole
        assert answer.text == STORY
        assert answer.usage == {"prompt_tokens": 1, "completion_tokens": TOKENS, "total_tokens": 1 + TOKENS}
        assert len({each["id"] for each in answer.events}) == 1
        assert await metric(hearth, "continued") == 2
        (line,) = hearth.lines.requests()
        assert [(each["node"], each["outcome"]) for each in line["attempts"]] == [
            ("n0", "failed"),
            ("n1", "failed"),
            ("n2", "ok"),
        ]
        assert (line["outcome"], line["continued"], line["node"], line["tokens_out"]) == ("ok", 2, "n2", TOKENS)
        shown = (await hearth.client.get("/admin/requests/r-1")).json()
        assert (shown["continued"], len(shown["attempts"])) == (2, 3)


async def test_a_comment_after_the_end_names_the_last_node() -> None:
    first, second = pair()
    async with first, second, gateway(**in_order(first, second)) as hearth:
        whole = await hearth.chat(stream=True)
        first.behave(Behaviour.CLOSE_MIDWAY)

        response = await hearth.chat(stream=True)

        facts = ": x-hearth-continued=1 x-hearth-node=n1 x-hearth-tier=local x-hearth-attempts=2 x-hearth-model=m"
        assert response.headers["x-hearth-node"] == "n0"
        assert response.text.endswith(f"\n\ndata: [DONE]\n\n{facts} x-hearth-queue-ms=0\n")
        assert "x-hearth" not in whole.text


async def test_a_completion_goes_on_too() -> None:
    for one, other in (("vllm", "ollama"), ("ollama", "vllm"), ("tgi", "lmstudio")):
        first, second = pair(one, other)
        async with first, second, gateway(**in_order(first, second)) as hearth:
            first.behave(Behaviour.CLOSE_MIDWAY, after=5)

            body = {"model": "m", "prompt": "Tell me a story. ", "stream": True, "max_tokens": 40}
            response = await hearth.client.post("/v1/completions", json=body)

            answer = read(response)
            assert answer.whole
            assert "".join(choice["text"] for each in answer.events for choice in each["choices"]) == STORY
            assert second.inferences[0].json["prompt"] == "Tell me a story. Once upon a time, there"


async def test_thoughts_that_are_over_are_no_hindrance() -> None:
    deltas = [Delta(reasoning="Hm."), *(Delta(word) for word in ("Yes", ", it", " is", "."))]
    for one, other in (("ollama", "vllm"), ("vllm", "sglang"), ("sglang", "llamacpp"), ("llamacpp", "lmdeploy")):
        first, second = pair(one, other, deltas=deltas)
        if one == "ollama":
            first.engine.models["m:latest"] = replace(
                first.engine.models["m:latest"], capabilities=("completion", "thinking")
            )
        async with first, second, gateway(**in_order(first, second)) as hearth:
            first.behave(Behaviour.CLOSE_MIDWAY, after=3)

            answer = await tell(hearth)

            assert answer.whole, (one, other)
            assert answer.text == "Yes, it is."


# -- who does not


@pytest.mark.parametrize("settings", [{"continuation": "off"}, {"max_attempts": 1}])
async def test_a_stream_ends_with_an_error_where_nobody_may_go_on(settings: dict[str, Any]) -> None:
    first, second = pair()
    async with first, second, gateway(**in_order(first, second, **settings)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY)

        answer = await tell(hearth)

        assert answer.error
        assert answer.error["code"] == "cut"
        assert not answer.finish_reasons
        assert not second.inferences


async def test_a_lone_node_is_not_asked_again() -> None:
    first, _ = pair()
    async with first, gateway(**in_order(first)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY, times=1)

        answer = await tell(hearth)

        assert answer.error
        assert answer.error["code"] == "cut"
        assert answer.done
        assert len(first.inferences) == 1
        assert await metric(hearth, "nobody") == 1


async def test_a_node_that_nobody_replaced_is_still_of_use() -> None:
    """Its answer was read to the end, so that its connection is used again: for one request at a time."""
    first, _ = pair("ollama", token_seconds=0.005)
    async with first, gateway(**in_order(first)) as hearth:
        first.behave(Behaviour.NO_TERMINATOR, times=1)
        assert (await tell(hearth)).error

        answers = await asyncio.gather(*(tell(hearth) for _ in range(4)))

        assert [answer.text for answer in answers] == [STORY] * 4


@pytest.mark.parametrize("other", ["generic", "tgi", "lmstudio", "transformers", "cloud"])
async def test_a_kind_that_does_not_know_how_is_not_asked(other: str) -> None:
    first, second = pair("vllm", other if other != "cloud" else "generic")
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY)

        answer = await tell(hearth)

        assert answer.error
        assert not second.inferences
        assert len(hearth.lines.requests()[0]["attempts"]) == 1


CALL = ToolCall("weather", {"city": "a long name of a city"})


@pytest.mark.parametrize(
    ("options", "fields", "after"),
    [
        ({"deltas": [Delta("Wait."), Delta(tool_calls=(CALL,))]}, {"tools": [{"type": "function"}]}, 3),
        ({"deltas": [Delta(reasoning="Hm."), Delta(reasoning=" Well."), Delta("Yes")]}, {}, 1),
        ({}, {"tools": [{"type": "function"}], "tool_choice": "required"}, 3),
        ({}, {"response_format": {"type": "json_object"}}, 3),
        ({}, {"logprobs": True}, 3),
        ({}, {"n": 2}, 3),
    ],
    ids=["a call", "thoughts", "a forced call", "json", "logprobs", "n"],
)
async def test_more_than_text_ends_with_an_error(options: dict[str, Any], fields: dict[str, Any], after: int) -> None:
    first, second = pair(**options)
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY, after=after)

        answer = await tell(hearth, **fields)

        assert answer.error
        assert answer.error["code"] == "cut"
        assert not answer.finish_reasons
        assert not second.inferences
        assert await metric(hearth, "unfit") == 1


async def test_a_node_that_refuses_or_begins_anew_is_passed_over() -> None:
    """Neither is held against it: it serves other requests well."""
    first, refusing = pair()
    anew, good = pair()
    anew.engine.flavour = replace(VLLM, prefill=prefills.never)
    async with (
        first,
        refusing,
        anew,
        good,
        gateway(**in_order(first, refusing, anew, good, breaker_fail_max=1)) as hearth,
    ):
        first.behave(Behaviour.CLOSE_MIDWAY, after=12)
        refusing.behave(Behaviour.STATUS_400)
        anew.script.text = STORY[:40] + "and so on."

        answer = await tell(hearth)

        assert answer.whole
        assert answer.text == STORY
        (line,) = hearth.lines.requests()
        assert [each["outcome"] for each in line["attempts"]] == ["failed", "refused", "failed", "failed", "ok"]
        assert [each["failure"] for each in line["attempts"][2:4]] == ["not_continued"] * 2
        assert "anew" in line["attempts"][2]["message"]
        assert "another answer" in line["attempts"][3]["message"]
        states = {name: node["breaker"]["state"] for name, node in (await hearth.nodes()).items()}
        assert (states["n0"], states["n1"], states["n2"]) == ("open", "closed", "closed")


@pytest.mark.parametrize("after", [2, 3, 4, 8, 12, 17])
async def test_a_node_that_only_ever_begins_anew_is_asked_for_the_whole_answer(after: int) -> None:
    first, anew = pair("ollama", "ollama")
    async with first, anew, gateway(**in_order(first, anew)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=after)
        anew.engine.goes_on = False

        answer = await tell(hearth, max_tokens=TOKENS, **USAGE)

        assert answer.whole
        assert answer.text == STORY
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == TOKENS
        assert json.loads(anew.inferences[-1].body)["options"]["num_predict"] == TOKENS
        assert await metric(hearth, "nobody") == await hearth.in_flight() == 0


@pytest.mark.parametrize("after", [6, 12])
async def test_attempts_are_not_used_up_by_nodes_that_all_begin_anew(after: int) -> None:
    nodes = [*pair("ollama", "ollama"), *pair("ollama", "ollama")]
    first, *others = nodes
    async with first, others[0], others[1], others[2], gateway(**in_order(*nodes)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=after)
        for node in others:
            node.engine.goes_on = False

        answer = await tell(hearth)

        assert answer.whole
        assert answer.text == STORY
        assert [len(node.inferences) for node in nodes] == [1, 2, 0, 0]


COUNT = " ".join(f"t{number}" for number in range(40))


@pytest.mark.parametrize("other", ["ollama", "vllm"])
async def test_a_node_that_begins_anew_is_known_wherever_the_text_and_the_limit_end(other: str) -> None:
    """Few words tell nothing, said or left to say: then the whole answer is asked for first."""
    first, anew = pair("ollama", other, text=COUNT)
    async with first, anew, gateway(**in_order(first, anew)) as hearth:
        if other == "ollama":
            anew.engine.goes_on = False
        else:
            anew.engine.flavour = replace(VLLM, prefill=prefills.never)
        for after in range(1, 40):
            first.behave(Behaviour.RESET_MIDWAY, after=after)

            answer = await tell(hearth, max_tokens=40)

            assert answer.whole, after
            assert answer.text == COUNT, after
        assert await metric(hearth, "nobody") == 0


async def test_a_node_that_does_not_know_how_to_go_on_may_say_all_again() -> None:
    first, generic = pair("ollama", "generic")
    async with first, generic, gateway(**in_order(first, generic)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=1)

        answer = await tell(hearth)

        assert answer.whole
        assert answer.text == STORY


async def test_a_node_that_has_another_answer_goes_on_with_the_few_words_that_were_said() -> None:
    first, other = pair()

    def in_another_mood(body: Mapping[str, Any], thinking: bool) -> prefills.Start:
        start = prefills.when_flagged(body, thinking)
        other.script.text = STORY if start.text else "One day, all was well."
        return start

    other.engine.flavour = replace(VLLM, prefill=in_another_mood)
    async with first, other, gateway(**in_order(first, other)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=1)

        answer = await tell(hearth)

        assert answer.whole
        assert answer.text == STORY
        assert ["continue_final_message" in each.json for each in other.inferences] == [False, True]
        assert await metric(hearth, "nobody") == await hearth.in_flight() == 0


async def test_a_node_that_begins_another_answer_is_not_believed() -> None:
    first, anew = pair("ollama", "ollama")
    async with first, anew, gateway(**in_order(first, anew)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=17)
        anew.engine.goes_on = False
        anew.script.text = STORY[:60] + " and so it went on and on, and nobody knew why or wanted to"

        answer = await tell(hearth, max_tokens=TOKENS)

        assert not answer.whole
        assert STORY.startswith(answer.text)
        assert await metric(hearth, "nobody") == 1


async def test_a_limit_that_is_used_up_ends_the_stream_with_length() -> None:
    first, second = pair()
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY, after=6)

        answer = await tell(hearth, max_tokens=6, **USAGE)

        assert answer.whole
        assert answer.finish_reasons == ["length"]
        assert answer.text == "Once upon a time, there was"
        assert answer.usage
        assert answer.usage["completion_tokens"] == 6
        assert not second.inferences
        assert await metric(hearth, "length") == 1


async def test_a_client_that_leaves_meanwhile_frees_the_second_node() -> None:
    first, second = pair()
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY)
        second.behave(Behaviour.HANG)
        async with RawClient(hearth.url) as client:
            await client.ask()
            await second.until(lambda node: node.open == 1)

        await second.until(lambda node: node.open == 0)
        await until(hearth.lines.requests, "the line of the request")
        (line,) = hearth.lines.requests()
        assert [each["outcome"] for each in line["attempts"]] == ["failed", "abandoned"]
        assert line["outcome"] == "abandoned"
        assert await hearth.in_flight() == 0


async def test_the_rest_waits_for_a_free_place() -> None:
    first, second = pair(token_seconds=0.01)
    async with first, second, gateway(**in_order(first, second, n1={"max_concurrency": 1})) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY, after=3)

        answers = await asyncio.gather(*(tell(hearth) for _ in range(6)))

        assert [answer.text for answer in answers] == [STORY] * 6
        assert second.peak == 1
        assert await hearth.in_flight() == 0


# -- the cloud


def cloudy(cloud: FakeCloud, **settings: Any) -> dict[str, Any]:
    entry = {"name": "c0", "endpoint": f"{cloud.url}/v1", "api_key": cloud.engine.api_key, "model": "gpt-4o-mini"}
    return {"cloud_providers": json.dumps([{**entry, "prefix": "prefix"}]), **settings}


@pytest.mark.parametrize(
    ("settings", "headers", "goes_on"),
    [
        ({"continuation": "all"}, {}, True),
        ({"continuation": "all"}, {"x-hearth-local-only": "true"}, False),
        ({"continuation": "local"}, {}, False),
        ({}, {}, False),
    ],
)
async def test_the_cloud_goes_on_only_when_it_is_told_to(
    settings: dict[str, Any], headers: dict[str, str], goes_on: bool
) -> None:
    first, _ = pair()
    async with first, FakeCloud(text=STORY) as cloud, gateway(**in_order(first, **cloudy(cloud, **settings))) as hearth:
        first.behave(Behaviour.CLOSE_MIDWAY, after=5)

        answer = await tell(hearth, headers=headers)

        assert answer.whole == goes_on
        assert len(cloud.inferences) == goes_on
        if goes_on:
            assert answer.text == STORY
            assert cloud.inferences[0].json["messages"][-1]["prefix"] is True
            assert {each["model"] for each in answer.events} == {"m"}


async def test_a_part_that_nobody_counted_is_paid_for_what_it_was(tmp_path: Path) -> None:
    books = Books(f"sqlite:///{tmp_path / 'hearth.db'}")
    async with BillingCloud(text=STORY) as first, BillingCloud(text=STORY) as second:
        second.engine.tells_usage = False
        money = paid(first, second, shared={"prefix": "prefix"}, cloud_budget_usd=1, continuation="all")
        async with gateway(local_nodes="[]", database_url=books.url, **money) as hearth:
            first.behave(Behaviour.CLOSE_MIDWAY, after=12)

            assert (await tell(hearth, model="far")).text == STORY

            begun, ended = await books.closed(2)
            assert 12 <= begun["tokens_out"] <= 13
            assert TOKENS - 12 <= ended["tokens_out"] <= TOKENS - 12 + 2


async def test_every_part_in_the_cloud_is_paid_by_itself(tmp_path: Path) -> None:
    books = Books(f"sqlite:///{tmp_path / 'hearth.db'}")
    async with BillingCloud(text=STORY) as first, BillingCloud(text=STORY) as second:
        money = paid(first, second, shared={"prefix": "prefix"}, cloud_budget_usd=1, continuation="all")
        async with gateway(local_nodes="[]", database_url=books.url, **money) as hearth:
            first.behave(Behaviour.CLOSE_MIDWAY, after=8)

            answer = await tell(hearth, model="far", **USAGE)

            assert answer.text == STORY
            begun, ended = await books.closed(2)
            (request,) = await books.written(1)
            assert (begun["outcome"], begun["estimated"], ended["outcome"], ended["estimated"]) == (
                "failed",
                1,
                "ok",
                0,
            )
            assert 8 <= begun["tokens_out"] <= 9
            assert (ended["tokens_in"], ended["tokens_out"]) == (1 + 8, TOKENS - 8)
            assert request["cost"] == begun["cost"] + ended["cost"]
            assert (request["tokens_in"], request["tokens_out"]) == (1, TOKENS)


# -- real clients, real deaths


async def test_a_client_of_the_sdk_reads_on_when_a_process_is_killed() -> None:
    options = {"models": "m", "text": STORY, "token_seconds": 0.02}
    async with NodeProcess("llamacpp", **options) as victim, NodeProcess("ollama", **options) as sibling:
        entries = [
            {"url": victim.url, "kind": "llamacpp", "name": "n0", "weight": 100, "models": ["m"]},
            {"url": sibling.url, "kind": "ollama", "name": "n1", "models": ["m"]},
        ]
        settings = {"local_nodes": json.dumps(entries), "lb_strategy": "least_connections"}
        async with gateway(**settings) as hearth:
            client = openai.AsyncOpenAI(base_url=f"{hearth.url}/v1", api_key="unused", max_retries=0)
            async with client:
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True, **USAGE
                )
                text, ids, usage, count = "", set(), None, 0
                async for chunk in stream:
                    ids.add(chunk.id)
                    usage = chunk.usage or usage
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    count += 1
                    if count == 6:
                        await victim.kill(signal.SIGKILL)

            assert text == STORY
            assert len(ids) == 1
            assert usage is not None
            assert usage.completion_tokens == TOKENS
            (line,) = hearth.lines.requests()
            assert (line["outcome"], line["continued"]) == ("ok", 1)


async def test_the_sdk_reads_streams_of_many_deaths_to_the_end() -> None:
    first, second = pair("llamacpp", "vllm")
    async with first, second, gateway(**in_order(first, second)) as hearth:
        first.behave(Behaviour.RESET_MIDWAY, after=4)
        url = f"{hearth.url}/v1"

        def texts() -> list[str]:
            with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
                return [
                    "".join(
                        choice.delta.content or ""
                        for chunk in client.chat.completions.create(
                            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                        )
                        for choice in chunk.choices
                    )
                    for _ in range(5)
                ]

        assert await asyncio.to_thread(texts) == [STORY] * 5


async def test_a_pair_of_nodes_goes_on_too() -> None:
    """A prefill and a decode node share the rest of the answer, as they do any other."""
    common: dict[str, Any] = {"models": ["m"], "text": STORY}
    async with (
        FakeLMDeploy(role="prefill", **common) as prefill,
        FakeLMDeploy(role="decode", **common) as first,
        FakeLMDeploy(role="decode", **common) as second,
    ):
        roles = {"n0": {"role": "prefill"}, "n1": {"role": "decode"}, "n2": {"role": "decode"}}
        settings = in_order(prefill, first, second, serving_strategy="DistServe", **roles)
        async with gateway(**settings) as hearth:
            first.behave(Behaviour.CLOSE_MIDWAY, after=6)

            answer = await tell(hearth)

            assert answer.whole
            assert answer.text == STORY
            assert len(prefill.inferences) == 2
            assert await hearth.in_flight() == 0


async def test_many_streams_go_on_at_once() -> None:
    first, second = pair("vllm", "ollama", token_seconds=0.005)
    async with first, second, gateway(**in_order(first, second, max_attempts=2)) as hearth:
        asking = [asyncio.create_task(tell(hearth)) for _ in range(30)]
        await first.until(lambda node: node.open == 30)
        first.crash()

        answers = await asyncio.gather(*asking)

        assert [answer.text for answer in answers] == [STORY] * 30
        assert all(answer.whole for answer in answers)
        assert await hearth.in_flight() == 0


async def test_a_fake_that_must_be_told_to_go_on_begins_anew_otherwise() -> None:
    """The fakes are as strict as the engines: without this, the tests above would prove nothing."""
    async with FakeVLLM(models=["m"], text=STORY) as node, httpx.AsyncClient(base_url=node.url) as client:
        start = {"role": "assistant", "content": "Once upon"}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}, start]}

        plain = await client.post("/v1/chat/completions", json=body)
        both = await client.post("/v1/chat/completions", json={**body, "continue_final_message": True})
        flags = {"continue_final_message": True, "add_generation_prompt": False}
        told = await client.post("/v1/chat/completions", json={**body, **flags})

        assert plain.json()["choices"][0]["message"]["content"] == STORY
        assert both.status_code == 400
        assert told.json()["choices"][0]["message"]["content"] == STORY.removeprefix("Once upon")
