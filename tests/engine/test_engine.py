"""Hearth in front of real llama.cpp servers. Slow, and told apart by a marker: `make test-engine`.

The model was never taught to chat, so nothing is said about its text; its length is fixed by max_tokens and ignore_eos.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam, ChatCompletionUserMessageParam

from tests.engine.conftest import MODEL, Engine, Hearth, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

QUESTION: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "What do you see?"}]
FIXED_LENGTH = {"ignore_eos": True}  # llama.cpp's own: goes on to max_tokens whatever the model would like
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def client(hearth: Hearth) -> openai.OpenAI:
    """Without the SDK's own retries: those of the gateway are what is tested."""
    return openai.OpenAI(base_url=hearth.base_url, api_key="unused", max_retries=0, timeout=120)


@asynccontextmanager
async def async_client(hearth: Hearth) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=hearth.base_url, api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


def test_nodes_are_seen_as_what_they_are(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        names = [model.id for model in openai_client.models.list()]

    assert [node["kind"] for node in hearth.nodes()] == ["llamacpp", "llamacpp"]
    assert names == [MODEL]


def test_chat(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        answer = openai_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=12, extra_body=FIXED_LENGTH
        )

    assert answer.model == MODEL
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


async def test_async_chat(hearth: Hearth) -> None:
    async with async_client(hearth) as openai_client:
        answer = await openai_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=12, extra_body=FIXED_LENGTH
        )

    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_stream_with_usage(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        chunks = list(
            openai_client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=FIXED_LENGTH,
            )
        )

    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) >= 6
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].choices == []


def test_stream_without_usage_gets_no_usage(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        chunks = list(
            openai_client.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=4, stream=True, extra_body=FIXED_LENGTH
            )
        )

    assert all(chunk.choices for chunk in chunks)  # the usage chunk has none; Hearth asked for it, the client did not


def test_completion(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        answer = openai_client.completions.create(
            model=MODEL, prompt="a b c d", max_tokens=6, temperature=0, extra_body=FIXED_LENGTH
        )

    assert answer.choices[0].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_embeddings(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        answer = openai_client.embeddings.create(model=MODEL, input=["an oven", "a hearth"], encoding_format="float")

    assert [item.index for item in answer.data] == [0, 1]
    assert len(answer.data[0].embedding) == 640


def test_request_with_tools(hearth: Hearth) -> None:
    with client(hearth) as openai_client:
        answer = openai_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=8, tools=[WEATHER], tool_choice="auto"
        )

    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_wrong_request_is_the_clients_mistake(hearth: Hearth) -> None:
    """The engine alone can know this one: the prompt is longer than its context. No node is blamed for it."""
    with client(hearth) as openai_client, pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9000}], max_tokens=4
        )

    assert "context" in refused.value.message
    assert refused.value.response.headers["x-hearth-attempts"] == "1"
    assert hearth.states() == ["healthy", "healthy"]


def test_unknown_model_is_not_found(hearth: Hearth) -> None:
    with client(hearth) as openai_client, pytest.raises(openai.NotFoundError) as refused:
        openai_client.chat.completions.create(model="gemma-3-271m", messages=QUESTION)

    assert MODEL in refused.value.message


def test_client_that_leaves_frees_the_engine(hearth: Hearth, engines: list[Engine]) -> None:
    with (
        client(hearth) as openai_client,
        openai_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=1500, stream=True, extra_body=FIXED_LENGTH
        ) as stream,
    ):
        next(iter(stream))
        assert sum(engine.busy_slots for engine in engines) == 1

    wait_for(lambda: sum(engine.busy_slots for engine in engines) == 0, 3, "a free slot; all tokens would take 20 s")
    wait_for(lambda: hearth.in_flight() == 0, 2, "an idle gateway")


@dataclass
class Tally:
    """How requests ended."""

    documents: int = 0
    whole_streams: int = 0
    cut_streams: int = 0  # had begun, then ended with an error event
    unanswered: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.documents + self.whole_streams + self.cut_streams + len(self.unanswered)


async def ask_for_document(openai_client: openai.AsyncOpenAI, tally: Tally) -> None:
    try:
        answer = await openai_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=24, extra_body=FIXED_LENGTH
        )
    except openai.APIError as error:
        tally.unanswered.append(f"document: {error}")
        return
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    tally.documents += 1


async def ask_for_stream(openai_client: openai.AsyncOpenAI, tally: Tally) -> None:
    """A stream is whole with its finish reason; without one it must end with an error, never as if it were complete."""
    begun = finished = False
    try:
        async with await openai_client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=24, stream=True, extra_body=FIXED_LENGTH
        ) as stream:
            async for chunk in stream:
                begun = True
                finished = finished or chunk.choices[0].finish_reason == "length"
        assert finished, "a stream ended without a finish reason and without an error"
        tally.whole_streams += 1
    except openai.APIError as error:
        if begun:
            tally.cut_streams += 1
        else:
            tally.unanswered.append(f"stream: {error}")


async def test_every_request_is_answered_when_a_node_dies_under_load(hearth: Hearth, engines: list[Engine]) -> None:
    """40 requests, 8 at a time, half of them streams; one of two engines is killed after a quarter of them."""
    tally = Tally()
    eight = asyncio.Semaphore(8)
    quarter_done = asyncio.Event()

    async def ask(openai_client: openai.AsyncOpenAI, number: int) -> None:
        async with eight:
            await (ask_for_stream if number % 2 else ask_for_document)(openai_client, tally)
        if tally.done >= 10:
            quarter_done.set()

    async with async_client(hearth) as openai_client, asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(ask(openai_client, number))
        await quarter_done.wait()
        engines[0].kill()

    assert tally.unanswered == []
    assert tally.documents == 20  # nothing of a document is sent before all of it is there, so each could be retried
    assert tally.whole_streams == 20  # those that had begun went on with the other engine
    assert tally.cut_streams == 0
    wait_for(lambda: hearth.in_flight() == 0, 2, "an idle gateway")
    wait_for(lambda: hearth.states() == ["down", "healthy"], 20, "the dead node to be seen")


def test_node_that_comes_back_is_used_again(hearth: Hearth, engines: list[Engine]) -> None:
    engines[0].kill()
    wait_for(lambda: hearth.states() == ["down", "healthy"], 20, "the dead node to be seen")
    engines[0].start()
    wait_for(lambda: hearth.states() == ["healthy", "healthy"], 20, "the node to be seen again")

    def served(number: int) -> str:
        messages = [{"role": "user", "content": f"{number}: how do you do?"}]
        answer = httpx.post(
            f"{hearth.base_url}/chat/completions",
            json={"model": MODEL, "messages": messages, "max_tokens": 16},
            timeout=60,
        )
        return answer.headers["x-hearth-node"]

    with ThreadPoolExecutor(12) as at_once:  # one after the other, they would go where such a prompt was read before
        names = set(at_once.map(served, range(12)))

    assert names == {node["name"] for node in hearth.nodes()}
