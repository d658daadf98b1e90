"""Requests that are wrong get an error that says so, in OpenAI's form, and no node hears of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from tests.fakes import KINDS, FakeNode, FakeOllama
from tests.system.harness import Gateway, gateway, until
from tests.system.plain_client import JSON, Response, connected, request, send

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOCAL_KINDS = [name for name in KINDS if name != "cloud"]
KEY = "sk-a-known-key-0001"
LIMIT_BYTES = 2**20
PROBED_ONCE: dict[str, Any] = {"health_check_interval": 600, "health_check_timeout": 10}
CHAT, COMPLETION, EMBEDDING = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER = {"role": "user", "content": "hi"}
GOOD: Mapping[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETION: {"model": "m", "prompt": "hi"},
    EMBEDDING: {"model": "m", "input": "hi"},
}
GONE = object()


class House(NamedTuple):
    """A node and the gateway in front of it, which the tests of this file share."""

    node: FakeNode[Any]
    hearth: Gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LOCAL_KINDS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    async with KINDS[request.param](models=["m"]) as node:
        async with gateway(node, api_keys=KEY, max_body_mb=LIMIT_BYTES / 2**20, **PROBED_ONCE) as hearth:
            await hearth.state("n0", "healthy")
            yield House(node, hearth)


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    with undisturbed(shared):
        yield shared


@contextmanager
def undisturbed(house: House, case: str = "") -> Iterator[None]:
    """Sees to it that no node hears of what is sent, and that Hearth itself does not fail. A failure names the case."""
    house.node.inferences.clear()
    try:
        yield
        assert not house.node.inferences
        assert not [line for line in house.hearth.lines.all if line["event"] == "bug"]
    except Exception as error:
        if case:
            error.add_note(f"the case: {case}")
        raise


@dataclass(frozen=True)
class Bad:
    """A request that is wrong, and what is to be said of it."""

    status: int = 400
    fields: Mapping[str, Any] = field(default_factory=dict)  # on top of a good request's
    body: bytes | None = None  # instead of them
    path: str = CHAT
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: int = 0
    param: str | None = None
    code: str | None = None

    def bytes(self, stream: bool | None = None) -> bytes:
        fields = {**GOOD.get(self.path, {}), **self.fields}
        if stream is not None:
            fields["stream"] = stream
        wanted = {name: value for name, value in fields.items() if value is not GONE}
        body: object = wanted if self.body is None else self.body
        headers = {**JSON, "authorization": f"Bearer {KEY}", **self.headers}
        return request(body, self.path, self.method, headers, chunks=self.chunks)


def check(answer: Response, bad: Bad) -> None:
    """That the answer is an error in the one form that all clients know."""
    assert answer.status == bad.status, answer.body
    assert answer.header("content-type") == "application/json"
    assert answer.header("x-request-id")
    assert answer.header("x-hearth-error-source") == "gateway"
    assert set(answer.json) == {"error"}
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(error["message"]) > 10
    assert isinstance(error["type"], str)
    if bad.param:
        assert error["param"] == bad.param
    if bad.code:
        assert error["code"] == bad.code
    if bad.status == 405:
        assert answer.header("allow")
    if bad.status == 401:
        assert answer.header("www-authenticate") == "Bearer"


def nested(levels: int) -> bytes:
    return (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"metadata":' + b"[" * levels + b"]" * levels + b"}"
    )


NOT_JSON = {
    "nothing": b"",
    "blanks": b" \r\n ",
    "a word": b"hello",
    "half an object": b'{"model": "m", "messages": [',
    "two objects": b'{"model": "m"}{"model": "m"}',
    "a trailing comma": b'{"model": "m",}',
    "single quotes": b"{'model': 'm'}",
    "a form": b"model=m&messages=hi",
    "NaN": b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
    "infinity": b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": -Infinity}',
    "invalid UTF-8": b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "cut UTF-8": b'{"model": "m", "messages": [{"role": "user", "content": "\xf0\x9f\x98"}]}',
    "a lone surrogate": rb'{"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}',
    "a surrogate in UTF-8": b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\xbd"}]}',
    "UTF-16": '{"model": "m"}'.encode("utf-16"),
    "a raw control character": b'{"model": "m", "messages": [{"role": "user", "content": "a\x00b"}]}',
    "10,000 levels": nested(10_000),
    "a million levels": b"[" * 1_000_000,
    "a list": b"[]",
    "a string": b'"hi"',
    "a number": b"1",
    "null": b"null",
}
WRONG_FIELDS: Mapping[str, Bad] = {
    "no model": Bad(fields={"model": GONE}, param="model"),
    "model null": Bad(fields={"model": None}, param="model"),
    "model empty": Bad(fields={"model": ""}, param="model"),
    "model blank": Bad(fields={"model": " \t"}, param="model"),
    "model a number": Bad(fields={"model": 7}, param="model"),
    "model a list": Bad(fields={"model": ["m"]}, param="model"),
    "model of 10,000 characters": Bad(fields={"model": "m" * 10_000}, param="model"),
    "unknown model": Bad(404, {"model": "nobody-has-this"}, param="model", code="model_not_found"),
    "model with a line break": Bad(404, {"model": "m\r\nx-evil: 1"}, code="model_not_found"),
    "model with a zero": Bad(404, {"model": "m\x00"}, code="model_not_found"),
    "no messages": Bad(fields={"messages": GONE}, param="messages"),
    "messages null": Bad(fields={"messages": None}, param="messages"),
    "messages empty": Bad(fields={"messages": []}, param="messages"),
    "messages a string": Bad(fields={"messages": "hi"}, param="messages"),
    "messages an object": Bad(fields={"messages": USER}, param="messages"),
    "a message that is a string": Bad(fields={"messages": [USER, "hi"]}, param="messages[1]"),
    "a message that is null": Bad(fields={"messages": [None]}, param="messages[0]"),
    "a message without a role": Bad(fields={"messages": [{"content": "hi"}]}, param="messages[0].role"),
    "a role that is a number": Bad(fields={"messages": [USER, {"role": 1}]}, param="messages[1].role"),
    "an empty role": Bad(fields={"messages": [{"role": "", "content": "hi"}]}, param="messages[0].role"),
    "stream_options a string": Bad(fields={"stream_options": "include_usage"}, param="stream_options"),
    "no prompt": Bad(fields={"prompt": GONE}, path=COMPLETION, param="prompt"),
    "prompt a number": Bad(fields={"prompt": 5}, path=COMPLETION, param="prompt"),
    "prompt an object": Bad(fields={"prompt": {"text": "hi"}}, path=COMPLETION, param="prompt"),
    "prompt an empty list": Bad(fields={"prompt": []}, path=COMPLETION, param="prompt"),
    "completion without a model": Bad(fields={"model": GONE}, path=COMPLETION, param="model"),
}
WRONG_EMBEDDINGS: Mapping[str, Bad] = {
    "no input": Bad(fields={"input": GONE}, path=EMBEDDING, param="input"),
    "input a number": Bad(fields={"input": 5}, path=EMBEDDING, param="input"),
    "input an empty list": Bad(fields={"input": []}, path=EMBEDDING, param="input"),
    "embedding without a model": Bad(fields={"model": GONE}, path=EMBEDDING, param="model"),
    "embedding with an unknown model": Bad(404, {"model": "x"}, path=EMBEDDING, code="model_not_found"),
}
_NO_BOOLEANS: tuple[Any, ...] = ("true", 1, [], {})
WRONG_STREAM = {
    f"{path.rpartition('/')[2]}: stream {value!r}": Bad(fields={"stream": value}, path=path, param="stream")
    for path in (CHAT, COMPLETION)
    for value in _NO_BOOLEANS
}
WRONG_HTTP: Mapping[str, Bad] = {
    "too large": Bad(413, body=b" " * (LIMIT_BYTES + 1), code="body_too_large"),
    "too large in chunks": Bad(413, body=b" " * (LIMIT_BYTES + 1), chunks=65_536, code="body_too_large"),
    "too large in tiny chunks": Bad(413, body=b" " * (LIMIT_BYTES + 1), chunks=100, code="body_too_large"),
    "plain text": Bad(415, headers={"content-type": "text/plain"}, code="unsupported_media_type"),
    "a form": Bad(415, headers={"content-type": "application/x-www-form-urlencoded"}),
    "a form of parts": Bad(415, headers={"content-type": "multipart/form-data; boundary=x"}),
    "an empty type": Bad(415, headers={"content-type": ""}),
    "gzip": Bad(415, headers={"content-encoding": "gzip"}, code="unsupported_media_type"),
    "brotli": Bad(415, headers={"content-encoding": "br"}, code="unsupported_media_type"),
    "an unknown key": Bad(401, headers={"authorization": "Bearer sk-unknown"}, code="invalid_api_key"),
    "half a key": Bad(401, headers={"authorization": f"Bearer {KEY[:-1]}"}, code="invalid_api_key"),
    "more than a key": Bad(401, headers={"authorization": f"Bearer {KEY}x"}, code="invalid_api_key"),
    "an empty key": Bad(401, headers={"authorization": "Bearer "}, code="invalid_api_key"),
    "a scheme alone": Bad(401, headers={"authorization": "Bearer"}, code="invalid_api_key"),
    "another scheme": Bad(401, headers={"authorization": f"Basic {KEY}"}, code="invalid_api_key"),
    "a key without a scheme": Bad(401, headers={"authorization": KEY}, code="invalid_api_key"),
    "a key that is no ASCII": Bad(401, headers={"authorization": "Bearer sk-ä"}, code="invalid_api_key"),
    "an unclear wish for privacy": Bad(400, headers={"x-hearth-local-only": "maybe"}),
    "an empty wish for privacy": Bad(400, headers={"x-hearth-local-only": ""}),
    **{f"{method} chat": Bad(405, method=method, code="method_not_allowed") for method in ("GET", "PUT", "DELETE")},
    "PATCH completions": Bad(405, method="PATCH", path=COMPLETION, code="method_not_allowed"),
    "GET embeddings": Bad(405, method="GET", path=EMBEDDING, code="method_not_allowed"),
    "POST models": Bad(405, path="/v1/models", code="method_not_allowed"),
    "an unknown path": Bad(404, path="/v1/nothing", code="not_found"),
    "a path below": Bad(404, path=CHAT + "/1", code="not_found"),
    "a trailing slash": Bad(404, path=CHAT + "/", code="not_found"),
    "capitals": Bad(404, path="/V1/Chat/Completions", code="not_found"),
    "two levels up": Bad(404, path="/v1/../admin/nodes", code="not_found"),
}


async def refused(house: House, cases: Mapping[str, Bad], stream: bool | None = None) -> None:
    """That each of these is."""
    for case, bad in cases.items():
        with undisturbed(house, case):
            check(await send(house.hearth.url, bad.bytes(stream)), bad)


@pytest.mark.parametrize("path", list(GOOD), ids=lambda path: path.rpartition("/")[2])
async def test_what_is_no_json_object_is_refused(house: House, path: str) -> None:
    await refused(house, {case: Bad(body=body, path=path, code="invalid_json") for case, body in NOT_JSON.items()})


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_wrong_fields_are_named(house: House, stream: bool) -> None:
    await refused(house, WRONG_FIELDS, stream)


async def test_wrong_embeddings_and_wishes_to_stream_are_named(house: House) -> None:
    await refused(house, {**WRONG_EMBEDDINGS, **WRONG_STREAM})


async def test_wrong_http_is_refused(house: House) -> None:
    await refused(house, WRONG_HTTP)


async def test_a_head_request_is_refused_without_a_body(house: House) -> None:
    async with connected(house.hearth.url) as client:
        answer = await client.ask(Bad(method="HEAD").bytes(), "HEAD")

        assert answer.status == 405
        assert (await client.ask(Bad(method="PUT").bytes())).status == 405


# What the HTTP parser itself refuses never becomes a request: no form of error can be promised, but for the status.
SMUGGLED = {
    "length and chunks": [("content-length", "5"), ("transfer-encoding", "chunked")],
    "chunks and length": [("transfer-encoding", "chunked"), ("content-length", "5")],
    "two lengths": [("content-length", "5"), ("content-length", "6")],
    "a negative length": [("content-length", "-5")],
    "a length that is no number": [("content-length", "five")],
    "a length with a plus": [("content-length", "+5")],
    "chunks that are not last": [("transfer-encoding", "chunked, identity")],
    "a blank before the colon": [("content-length ", "5")],
}


async def test_a_request_of_unclear_length_is_refused_and_its_connection_closed(house: House) -> None:
    for case, lengths in SMUGGLED.items():
        lines = ["POST /v1/chat/completions HTTP/1.1", "host: h", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in (("authorization", f"Bearer {KEY}"), *lengths)]
        hidden = Bad().bytes()
        with undisturbed(house, case):
            async with connected(house.hearth.url) as client:
                answer = await client.ask("\r\n".join([*lines, "", "0\r\n\r\n"]).encode() + hidden)

                assert answer.status in (400, 501)
                assert await client.closed()


@pytest.mark.parametrize("how", ["finish", "leave"])
async def test_a_client_that_leaves_in_the_middle_of_its_request_is_forgotten(house: House, how: str) -> None:
    before = len(house.hearth.lines.requests())
    async with connected(house.hearth.url) as client:
        await client.ask(Bad(415, headers={"content-type": "text/plain"}).bytes())  # so that the connection is accepted
        client.write(Bad().bytes()[:-10])
        await client.flushed()
        client.finish() if how == "finish" else client.leave()
        await until(lambda: len(house.hearth.lines.requests()) == before + 2, "both requests are logged")

    assert house.hearth.lines.requests()[-1]["outcome"] == "abandoned"


# -- Ollama: what its native API cannot do, or would choke on


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def saying(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def picture(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


IMAGE = "messages[0].content[0].image_url"
NOT_ON_OLLAMA: Mapping[str, Bad] = {
    "two answers": Bad(fields={"n": 2}, param="n", code="unsupported_value"),
    "no answers": Bad(fields={"n": 0}, param="n"),
    "an image by its address": Bad(fields=saying(picture("https://example.org/cat.png")), param=IMAGE),
    "an image by a local path": Bad(fields=saying(picture("file:///etc/passwd")), param=IMAGE),
    "a GIF": Bad(fields=saying(picture("data:image/gif;base64,R0lGODlhAQABAAAAACw=")), param=IMAGE),
    "an image that is no base64": Bad(fields=saying(picture("data:image/png;base64,!!!!")), param=IMAGE),
    "an image of half a base64": Bad(fields=saying(picture(f"data:image/png;base64,{PIXEL[:-3]}")), param=IMAGE),
    "an image without base64": Bad(fields=saying(picture("data:image/png,hello")), param=IMAGE),
    "an empty image": Bad(fields=saying(picture("")), param=IMAGE),
    "an image that is a number": Bad(fields=saying(picture(5)), param="messages[0].content[0]"),
    "an unknown part": Bad(fields=saying({"type": "smell", "smell": "rose"}), param="messages[0].content[0]"),
    "content that is a number": Bad(fields={"messages": [{"role": "user", "content": 5}]}, param="messages[0].content"),
    "a warm temperature": Bad(fields={"temperature": "warm"}, param="temperature"),
    "a seed that is a fraction": Bad(fields={"seed": 1.5}, param="seed"),
    "a stop that is a number": Bad(fields={"stop": 5}, param="stop"),
    "too many probabilities": Bad(fields={"logprobs": True, "top_logprobs": 21}, param="top_logprobs"),
    "an unknown format": Bad(fields={"response_format": {"type": "xml"}}, param="response_format.type"),
    "a schema without a schema": Bad(
        fields={"response_format": {"type": "json_schema"}}, param="response_format.json_schema.schema"
    ),
    "an unknown effort": Bad(fields={"reasoning_effort": "heroic"}, param="reasoning_effort"),
    "a tool without a name": Bad(fields={"tools": [{"type": "function", "function": {}}]}, param="tools[0]"),
    "tools that are no list": Bad(fields={"tools": {}}, param="tools"),
    "a schema of 500 levels": Bad(
        body=b'{"model":"m","messages":[{"role":"user"}],"format":' + b'{"a":' * 500 + b"1" + b"}" * 501
    ),
    "an echo": Bad(fields={"echo": True}, path=COMPLETION, param="echo"),
    "the best of two": Bad(fields={"best_of": 2}, path=COMPLETION, param="best_of"),
    "two prompts": Bad(fields={"prompt": ["a", "b"]}, path=COMPLETION, param="prompt"),
    "a prompt of tokens": Bad(fields={"prompt": [1, 2, 3]}, path=COMPLETION, param="prompt"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_ollama() -> AsyncIterator[House]:
    async with FakeOllama(models=["m"]) as node, gateway(node, api_keys=KEY, **PROBED_ONCE) as hearth:
        await hearth.state("n0", "healthy")
        yield House(node, hearth)


@pytest.fixture
def ollama(shared_ollama: House) -> Iterator[House]:
    with undisturbed(shared_ollama):
        yield shared_ollama


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
async def test_what_ollama_cannot_do_is_refused(ollama: House, stream: bool) -> None:
    await refused(ollama, NOT_ON_OLLAMA, stream)


@pytest.mark.parametrize("given", [[[1, 2], [3]], [1, 2], ["a", 1], [["a"]], [None]], ids=str)
async def test_only_texts_are_embedded_on_ollama(ollama: House, given: Any) -> None:
    bad = Bad(fields={"input": given}, path=EMBEDDING, param="input")
    check(await send(ollama.hearth.url, bad.bytes()), bad)


async def test_an_unknown_encoding_of_embeddings_is_refused_for_ollama(ollama: House) -> None:
    bad = Bad(fields={"encoding_format": "hex"}, path=EMBEDDING, param="encoding_format")
    check(await send(ollama.hearth.url, bad.bytes()), bad)


# -- and what is not wrong


@pytest.mark.parametrize("kind", ["ollama", "vllm"])
@pytest.mark.parametrize("chunks", [0, 2**20], ids=["length", "chunks"])
async def test_a_body_just_below_the_limit_is_served(kind: str, chunks: int) -> None:
    async with KINDS[kind](models=["m"]) as node, gateway(node, **PROBED_ONCE) as hearth:
        text = "x" * (60 * 2**20)
        body = json.dumps({**GOOD[CHAT], "messages": [{"role": "user", "content": text}]}).encode()

        answer = await send(hearth.url, request(body, chunks=chunks))

        assert answer.status == 200
        assert node.inferences[0].json["messages"][0]["content"] == text


@pytest.mark.parametrize("type_", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json", None])
async def test_every_way_to_say_json_is_understood(type_: str | None) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        headers = {} if type_ is None else {"content-type": type_}

        assert (await send(hearth.url, request(GOOD[CHAT], headers=headers))).status == 200
