"""OpenAI's own SDK, sync and async, gets from Hearth what it would get from OpenAI, whatever stands behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AsyncStream, OpenAI, Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from demo.script import embedding
from tests.fakes import Behaviour, Delta, FakeCloud, FakeOllama, FakeVLLM, Model, Script, ToolCall
from tests.system.harness import Gateway, gateway

SECONDS = 30.0
PROBED_ONCE = {"health_check_interval": 600, "health_check_timeout": 10}
KEY = "sk-the-clients-own-key"
HI: list[Any] = [{"role": "user", "content": "hi"}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ONE_CALL = (ToolCall("weather", {"city": "Zürich"}),)
TWO_CALLS = (ToolCall("weather", {"city": "Zürich"}), ToolCall("weather", {"city": "Bern"}))

Node = FakeOllama | FakeVLLM

pytestmark = pytest.mark.asyncio(loop_scope="module")


class City(BaseModel):
    """What the model is to answer with."""

    name: str
    people: int


class Client(Protocol):
    """One of the SDK's clients.

    `do` gives it to `what`, and returns what came of it: of a stream all its events, which also go into `seen`.
    """

    async def do(self, what: Callable[[Any], Any], seen: list[Any] | None = None) -> Any: ...

    async def begun(self, what: Callable[[Any], Any], enough: int) -> list[Any]:
        """Takes so many events of a stream and closes it."""
        ...

    async def gathered(self, **request: Any) -> Any:
        """A streamed chat, put together by the SDK's own hands."""
        ...

    async def close(self) -> None: ...


class SyncClient:
    def __init__(self, url: str, **options: Any) -> None:
        self._client = OpenAI(base_url=url, **options)

    async def do(self, what: Callable[[Any], Any], seen: list[Any] | None = None) -> Any:
        events = [] if seen is None else seen

        def run() -> Any:
            result = what(self._client)
            if not isinstance(result, Stream):
                return result
            events.extend(result)
            return events

        return await asyncio.to_thread(run)

    async def begun(self, what: Callable[[Any], Any], enough: int) -> list[Any]:
        def run() -> list[Any]:
            with what(self._client) as stream:
                return [event for _, event in zip(range(enough), stream, strict=False)]

        return await asyncio.to_thread(run)

    async def gathered(self, **request: Any) -> Any:
        def run() -> ChatCompletion:
            with self._client.chat.completions.stream(**request) as stream:
                return stream.get_final_completion()

        return await asyncio.to_thread(run)

    async def close(self) -> None:
        self._client.close()


class AsyncClient:
    def __init__(self, url: str, **options: Any) -> None:
        self._client = AsyncOpenAI(base_url=url, **options)

    async def do(self, what: Callable[[Any], Any], seen: list[Any] | None = None) -> Any:
        events = [] if seen is None else seen
        result = await what(self._client)
        if not isinstance(result, AsyncStream):
            return result
        async for event in result:
            events.append(event)
        return events

    async def begun(self, what: Callable[[Any], Any], enough: int) -> list[Any]:
        events: list[Any] = []
        async with await what(self._client) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == enough:
                    break
        return events

    async def gathered(self, **request: Any) -> Any:
        async with self._client.chat.completions.stream(**request) as stream:
            return await stream.get_final_completion()

    async def close(self) -> None:
        await self._client.close()


CLIENTS: dict[str, Callable[..., Client]] = {"sync": SyncClient, "async": AsyncClient}


@asynccontextmanager
async def client_of(hearth: Gateway, sdk: str, prefix: str = "/v1", **options: Any) -> AsyncIterator[Client]:
    """The SDK's retries are off, so that every answer is Hearth's first."""
    client = CLIENTS[sdk](hearth.url + prefix, **{"api_key": KEY, "max_retries": 0, "timeout": SECONDS, **options})
    try:
        yield client
    finally:
        await client.close()


MODELS = ["m", "hf.co/org/some-model:Q4_K_M", "llama3.2:3b", "org/model"]
THINKER = Model("m:latest", capabilities=("completion", "tools", "thinking"))


class House(NamedTuple):
    """A node and the gateway in front of it, which the tests of this file share."""

    node: Node
    hearth: Gateway
    native: bool  # the node speaks no OpenAI


# Ollama is translated for, vLLM's answers pass through.
@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ollama", "vllm"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    native = request.param == "ollama"
    node: Node = FakeOllama(models=[THINKER, *MODELS[1:]]) if native else FakeVLLM(models=MODELS)
    settings: dict[str, Any] = {"max_attempts": 1, "breaker_fail_max": 0, "max_body_mb": 1, **PROBED_ONCE}
    async with node, gateway(node, **settings) as hearth:
        await hearth.state("n0", "healthy")
        yield House(node, hearth, native)


@pytest.fixture
def native(house: House) -> bool:
    return house.native


@pytest.fixture
def node(house: House) -> Iterator[Node]:
    """The node, fresh: it says `script`'s default and remembers nothing."""
    house.node.engine.script = Script()
    house.node.inferences.clear()
    yield house.node
    house.node.recover()


@pytest.fixture(params=list(CLIENTS))
def sdk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def client(house: House, node: Node, sdk: str) -> AsyncIterator[Client]:
    async with client_of(house.hearth, sdk) as client:
        yield client


def ask(**fields: Any) -> Callable[[Any], Any]:
    return lambda client: client.chat.completions.create(**{"model": "m", "messages": HI, **fields})


def _retrieve(name: str, client: Any) -> Any:
    return client.models.retrieve(name)


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


# -- chat


async def test_a_chat_is_answered(client: Client, node: Node) -> None:
    node.script.text = "Grüezi, how are you? 😀"
    answer = await client.do(ask())

    assert isinstance(answer, ChatCompletion)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.created > 1_500_000_000
    assert answer.model == "m"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Grüezi, how are you? 😀"
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens == 6
    assert answer._request_id


async def test_a_stream_has_one_id_one_role_and_one_end(client: Client, node: Node) -> None:
    node.script.text = "Grüezi, how are you? 😀"
    chunks = await client.do(ask(stream=True))

    assert text_of(chunks) == "Grüezi, how are you? 😀"
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk.model for chunk in chunks} == {"m"}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(chunk.choices[0].delta.role for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]


@pytest.mark.parametrize("wanted", [True, False])
async def test_usage_ends_a_stream_when_it_was_asked_for_and_only_then(
    client: Client, node: Node, wanted: bool
) -> None:
    node.script.tokens = 5
    chunks = await client.do(ask(stream=True, stream_options={"include_usage": wanted}))

    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [wanted]
    if wanted:
        assert chunks[-1].choices == []
        assert chunks[-1].usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
            "prompt_tokens": 1,
            "completion_tokens": 5,
            "total_tokens": 6,
        }
    else:
        assert all(chunk.choices for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_a_token_limit_shows_as_the_reason_of_the_end(client: Client, node: Node, stream: bool) -> None:
    node.script.tokens = 50
    answer = await client.do(ask(stream=stream, max_completion_tokens=3))

    assert (answer[-1] if stream else answer).choices[0].finish_reason == "length"
    assert (text_of(answer) if stream else answer.choices[0].message.content) == "t0 t1 t2 "


async def test_the_base_url_works_without_v1_too(house: House, node: Node) -> None:
    node.script.text = "hello"
    async with client_of(house.hearth, "async", prefix="") as client:
        assert text_of(await client.do(ask(stream=True))) == "hello"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_reasoning_comes_beside_the_answer(client: Client, node: Node, stream: bool) -> None:
    node.script.deltas = [Delta(reasoning="Let me "), Delta(reasoning="think."), Delta("Four"), Delta(".")]
    more = {"reasoning_effort": "low", "extra_headers": {"x-hearth-reasoning-content": "true"}}
    result = await client.do(ask(stream=stream, **more))

    said = [chunk.choices[0].delta for chunk in result] if stream else [result.choices[0].message]
    assert "".join(part.content or "" for part in said) == "Four."
    for name in ("reasoning", "reasoning_content"):
        assert "".join((part.model_extra or {}).get(name) or "" for part in said) == "Let me think."


async def test_an_image_reaches_the_node_in_its_own_form(client: Client, node: Node, native: bool) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    await client.do(ask(messages=[{"role": "user", "content": parts}]))

    sent = node.inferences[0].json["messages"][0]
    if native:
        assert sent == {"role": "user", "content": "What is it?", "images": [PIXEL]}
    else:
        assert sent["content"] == parts


async def test_log_probabilities_are_asked_for_in_the_nodes_own_words(client: Client, node: Node) -> None:
    await client.do(ask(logprobs=True, top_logprobs=2))

    assert node.inferences[0].json["logprobs"] is True
    assert node.inferences[0].json["top_logprobs"] == 2


async def test_fields_that_openai_does_not_know_reach_the_node(client: Client, node: Node, native: bool) -> None:
    await client.do(ask(extra_body={"top_k": 7}))

    sent = node.inferences[0].json
    assert (sent["options"] if native else sent)["top_k"] == 7


# -- tools and schemas


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize("calls", [ONE_CALL, TWO_CALLS], ids=["one", "parallel"])
async def test_tool_calls_come_whole_and_apart(
    client: Client, node: Node, stream: bool, calls: tuple[ToolCall, ...]
) -> None:
    node.script.deltas = [Delta(tool_calls=(call,)) for call in calls]
    request = {"model": "m", "messages": HI, "tools": [WEATHER], "parallel_tool_calls": True}
    answer = await (client.gathered(**request) if stream else client.do(ask(**request)))

    made = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.type for call in made] == ["function"] * len(calls)
    assert [call.function.name for call in made] == [call.name for call in calls]
    assert [json.loads(call.function.arguments) for call in made] == [call.arguments for call in calls]
    assert len({call.id for call in made}) == len(calls)
    assert node.inferences[0].json["tools"][0]["function"]["name"] == "weather"


async def test_a_tools_result_goes_back_to_the_node(client: Client, node: Node, native: bool) -> None:
    node.script.deltas = [Delta(tool_calls=TWO_CALLS)]
    first = (await client.do(ask(tools=[WEATHER]))).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls]
    node.script.deltas = [Delta("Sunny in both.")]
    answer = await client.do(ask(messages=[*HI, first, *results], tools=[WEATHER]))

    sent = node.inferences[1].json["messages"]
    assert answer.choices[0].message.content == "Sunny in both."
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert [message["content"] for message in sent[2:]] == ["sunny", "sunny"]
    arguments = [call["function"]["arguments"] for call in sent[1]["tool_calls"]]
    if native:
        assert arguments == [{"city": "Zürich"}, {"city": "Bern"}]
        assert [message["tool_name"] for message in sent[2:]] == ["weather", "weather"]
    else:
        assert [json.loads(text) for text in arguments] == [{"city": "Zürich"}, {"city": "Bern"}]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_an_answer_to_a_schema_is_parsed(client: Client, node: Node, native: bool, stream: bool) -> None:
    node.script.text = '{"name": "Zürich", "people": 443037}'
    request: dict[str, Any] = {"model": "m", "messages": HI, "response_format": City}
    answer = await (client.gathered(**request) if stream else client.do(lambda c: c.chat.completions.parse(**request)))

    assert answer.choices[0].message.parsed == City(name="Zürich", people=443037)
    sent = node.inferences[0].json
    schema = sent["format"] if native else sent["response_format"]["json_schema"]["schema"]
    assert set(schema["properties"]) == {"name", "people"}


# -- completions, embeddings, models


async def test_a_text_is_completed(client: Client, node: Node) -> None:
    node.script.text = "there was a king"
    answer = await client.do(lambda c: c.completions.create(model="m", prompt="Once upon a time"))
    chunks = await client.do(lambda c: c.completions.create(model="m", prompt="Once upon a time", stream=True))

    assert answer.object == "text_completion"
    assert answer.model == "m"
    assert answer.choices[0].text == "there was a king"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 4
    assert "".join(chunk.choices[0].text for chunk in chunks) == "there was a king"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str)
async def test_embeddings_keep_the_order_of_their_texts(client: Client, node: Node, encoding: dict[str, str]) -> None:
    texts = [f"text number {number}" for number in range(20)]
    answer = await client.do(lambda c: c.embeddings.create(model="m", input=texts, **encoding))

    assert answer.model == "m"
    assert [entry.index for entry in answer.data] == list(range(20))
    for text, entry in zip(texts, answer.data, strict=True):
        # The SDK unpacks base64 by itself, but for those who asked for it in so many words.
        vector = entry.embedding
        if encoding.get("encoding_format") != "base64":
            assert vector == pytest.approx(embedding(text, 8), abs=1e-6)
        else:
            assert isinstance(vector, str)
    assert len({str(entry.embedding) for entry in answer.data}) == 20
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 60


async def test_one_text_gives_one_embedding(client: Client, node: Node) -> None:
    answer = await client.do(lambda c: c.embeddings.create(model="m", input="hello", dimensions=4))

    assert [len(entry.embedding) for entry in answer.data] == [4]


async def test_models_are_listed_and_found_by_any_name(client: Client, node: Node) -> None:
    listed = (await client.do(lambda c: c.models.list())).data
    shown = [await client.do(partial(_retrieve, model.id)) for model in listed]

    # Ollama says org/model:latest; both names mean the same.
    assert {model.id.removesuffix(":latest") for model in listed} == set(MODELS)
    assert {model.object for model in listed} == {"model"}
    assert shown == listed
    assert (await client.do(lambda c: c.models.retrieve("org/model"))).id == "org/model"


async def test_every_listed_model_can_be_asked_for(client: Client, node: Node) -> None:
    for model in (await client.do(lambda c: c.models.list())).data:
        assert (await client.do(ask(model=model.id))).model == model.id


# -- errors


@dataclass(frozen=True)
class Wrong:
    """A request that goes wrong, or the node's fault that makes it so, and what the SDK is to raise."""

    error: type[openai.APIStatusError]
    status: int
    request: dict[str, Any] = field(default_factory=dict)
    behaviour: Behaviour = Behaviour.OK


WRONG = {
    "no messages": Wrong(openai.BadRequestError, 400, {"messages": []}),
    "the node refuses": Wrong(openai.BadRequestError, 400, behaviour=Behaviour.STATUS_400),
    "no such model": Wrong(openai.NotFoundError, 404, {"model": "x"}),
    "too large": Wrong(openai.APIStatusError, 413, {"user": "u" * 2**20}),
    "busy": Wrong(openai.RateLimitError, 429, behaviour=Behaviour.STATUS_429),
    "broken": Wrong(openai.InternalServerError, 502, behaviour=Behaviour.STATUS_500),
    "full": Wrong(openai.InternalServerError, 503, behaviour=Behaviour.STATUS_503),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize("case", list(WRONG))
async def test_errors_are_the_sdks_own_exceptions(client: Client, node: Node, stream: bool, case: str) -> None:
    wrong = WRONG[case]
    node.behave(wrong.behaviour)
    with pytest.raises(wrong.error) as caught:
        await client.do(ask(stream=stream, **wrong.request))

    assert caught.value.status_code == wrong.status
    assert caught.value.request_id
    assert caught.value.type
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_a_wrong_key_and_a_silent_node_are_the_sdks_own_exceptions(sdk: str, stream: bool) -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(node, api_keys="sk-of-somebody-else-0001", first_token_timeout=0.2) as hearth:
            async with client_of(hearth, sdk) as stranger:
                with pytest.raises(openai.AuthenticationError) as unknown:
                    await stranger.do(ask(stream=stream))
            node.behave(Behaviour.HANG)
            async with client_of(hearth, sdk, api_key="sk-of-somebody-else-0001") as client:
                with pytest.raises(openai.InternalServerError) as silent:
                    await client.do(ask(stream=stream))

            assert unknown.value.code == "invalid_api_key"
            assert KEY not in str(unknown.value)
            assert silent.value.status_code == 504
            assert silent.value.code == "first_token_timeout"


async def test_what_may_not_leave_is_a_denied_permission(sdk: str) -> None:
    async with FakeOllama(models=["m"]) as node, FakeCloud() as cloud:
        clouds = [{"endpoint": cloud.url + "/v1", "api_key": "sk-cloud-key-for-tests-0001", "model": "gpt-4o-mini"}]
        async with gateway(node, cloud_providers=json.dumps(clouds)) as hearth, client_of(hearth, sdk) as client:
            with pytest.raises(openai.PermissionDeniedError) as caught:
                await client.do(ask(model="gpt-4o-mini", extra_headers={"x-hearth-local-only": "true"}))

            assert caught.value.code == "local_only"
            assert not cloud.inferences


async def test_an_unknown_model_and_an_unknown_route_are_not_found(client: Client, node: Node) -> None:
    with pytest.raises(openai.NotFoundError) as model:
        await client.do(lambda c: c.models.retrieve("nobody/has:this"))
    with pytest.raises(openai.NotFoundError) as route:
        await client.do(lambda c: c.responses.create(model="m", input="hi"))

    assert model.value.code == "model_not_found"
    assert route.value.code == "not_found"


async def test_the_sdks_own_retry_waits_as_long_as_it_is_told(sdk: str) -> None:
    async with FakeOllama(models=["m"], text="hello") as node, gateway(node, max_attempts=1) as hearth:
        node.behave(Behaviour.STATUS_429, times=1, seconds=1)
        async with client_of(hearth, sdk, max_retries=1) as client:
            answer = await client.do(ask())

            assert answer.choices[0].message.content == "hello"
            first, second = node.inferences
            assert second.at - first.at >= 1


@pytest.mark.parametrize("behaviour", [Behaviour.CLOSE_MIDWAY, Behaviour.RESET_MIDWAY, Behaviour.ERROR_MIDWAY])
async def test_a_stream_that_is_cut_raises_instead_of_ending(client: Client, node: Node, behaviour: Behaviour) -> None:
    # A pause before each token, so that the first ones are on their way when the cut is seen.
    node.script.token_seconds = 0.05
    node.behave(behaviour, after=3)
    seen: list[ChatCompletionChunk] = []
    with pytest.raises(openai.APIError, match="cut short") as caught:
        await client.do(ask(stream=True), seen)

    assert not isinstance(caught.value, openai.APIStatusError | openai.APIConnectionError)
    assert caught.value.code
    assert text_of(seen) == "t0 t1 t2 "
    assert not any(chunk.choices[0].finish_reason for chunk in seen)


async def test_a_stream_that_is_closed_halfway_frees_the_node(house: House, client: Client, node: Node) -> None:
    node.script.tokens, node.script.token_seconds = 1000, 0.02
    chunks = await client.begun(ask(stream=True), 4)
    await node.until(lambda n: n.aborted)

    assert text_of(chunks).startswith("t0 ")
    assert node.open == 0
    assert await house.hearth.in_flight() == 0
