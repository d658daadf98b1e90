"""The fakes do what they say: a test that relies on a lying fake proves nothing."""

import asyncio
import base64
import gzip
import json
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from demo.httpd import BadRequest, RequestParser
from tests.fakes import (
    KINDS,
    Behaviour,
    Delta,
    FakeCloud,
    FakeGeneric,
    FakeLlamaCpp,
    FakeLMDeploy,
    FakeLMStudio,
    FakeNode,
    FakeOllama,
    FakeOpenAI,
    FakeSGLang,
    FakeTGI,
    FakeTransformers,
    FakeVLLM,
    Model,
    NodeProcess,
    On,
    Stage,
    State,
    ToolCall,
    stage,
)

USER = [{"role": "user", "content": "hi there"}]
OPENAI_KINDS = sorted(kind for kind in KINDS if kind != "ollama")


@dataclass(frozen=True)
class Raw:
    """What came over a bare connection, and how it ended: "fin", "rst", "refused", or "open" when it did not."""

    data: bytes
    end: str

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[2]


ENOUGH_BYTES = 20_000


async def raw(node: FakeNode[Any], request: bytes, until: bytes | None = None, idle_seconds: float = 0.1) -> Raw:
    """Sends bytes and reads to the end of the connection.

    With `until`, only until that was seen and nothing more came for a while.
    """
    data = b""
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(request)
        while len(data) < ENOUGH_BYTES:
            limit = idle_seconds if until is not None and until in data else 5
            piece = await asyncio.wait_for(reader.read(1 << 20), limit)
            if not piece:
                return Raw(data, "fin")
            data += piece
        return Raw(data, "open")
    except TimeoutError:
        return Raw(data, "open")
    except ConnectionRefusedError:
        return Raw(data, "refused")
    except ConnectionResetError:
        return Raw(data, "rst")
    finally:
        if writer is not None:
            writer.transport.abort()


def ollama_chat(stream: bool = True, keep: bool = False) -> bytes:
    return post("/api/chat", {"model": "m", "messages": USER, "stream": stream}, keep)


def openai_chat(stream: bool = True, **more: Any) -> bytes:
    return post("/v1/chat/completions", {"model": "m", "messages": USER, "stream": stream, **more})


def post(path: str, body: Any, keep: bool = False) -> bytes:
    data = json.dumps(body).encode()
    connection = "keep-alive" if keep else "close"
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {connection}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def unchunked(body: bytes) -> bytes:
    """Joins whole chunks; what does not read as a chunk ends it."""
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size, 16)
        out, body = out + rest[:count], rest[count + 2 :]
    return out


def events(text: str) -> list[Any]:
    """The JSON of each server-sent event, without [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def asked(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, str]:
    async with http.post(url, json=body, headers=headers) as response:
        return response.status, await response.text()


async def got(http: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with http.get(url) as response:
        return response.status, await response.text()


# The HTTP server


CHUNKED = b"POST /x?q=1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
COUNTED = b"POST /y HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"


def found(*pieces: bytes) -> list[tuple[str, str, str, bytes]]:
    parser, requests = RequestParser(), []
    for piece in pieces:
        parser.feed(piece)
        while (request := parser.next()) is not None:
            requests.append((request.method, request.path, request.query, request.body))
    return requests


def test_requests_are_found_wherever_the_bytes_are_cut() -> None:
    whole = CHUNKED + COUNTED

    by_cut = {cut: found(whole[:cut], whole[cut:]) for cut in range(len(whole))}

    assert by_cut == {cut: [("POST", "/x", "q=1", b"abcde"), ("POST", "/y", "", b"hi")] for cut in range(len(whole))}


@pytest.mark.parametrize(
    "head",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_nonsense_is_refused(head: bytes) -> None:
    parser = RequestParser()
    parser.feed(head)

    with pytest.raises(BadRequest):
        parser.next()


async def test_a_connection_serves_many_requests() -> None:
    async with FakeOllama() as node:
        three = b"GET / HTTP/1.1\r\n\r\nHEAD / HTTP/1.1\r\n\r\nGET /api/version HTTP/1.1\r\n\r\n"
        answer = await raw(node, three, until=b'"version"')

    assert answer.data.count(b"HTTP/1.1 200 OK") == 3
    assert answer.data.count(b"Ollama is running") == 1  # none for HEAD
    assert answer.end == "open"
    assert node.connections == 1


async def test_connection_close_is_honoured() -> None:
    async with FakeOllama() as node:
        answer = await raw(node, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")

    assert answer.end == "fin"


async def test_what_arrived_is_remembered(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"]) as node:
        await asked(http, f"{node.url}/api/chat", {"model": "m", "messages": USER}, Authorization="Bearer x", X_Y="z")
        await got(http, f"{node.url}/api/tags?a=b")

    chat, tags = node.requests
    assert (chat.method, chat.path, chat.json["model"], chat.headers["x_y"]) == ("POST", "/api/chat", "m", "z")
    assert (tags.path, tags.query, tags.body) == ("/api/tags", "a=b", b"")
    assert node.inferences == [chat]
    assert node.seen == ["Bearer x"]
    assert (node.open, node.peak, node.served, node.aborted) == (0, 1, 1, [])


async def test_a_client_that_leaves_is_noticed(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"], tokens=100, token_seconds=0.05) as node:
        async with http.post(f"{node.url}/api/chat", json={"model": "m", "messages": USER}) as response:
            await response.content.readany()
            assert node.open == 1
            response.close()
        await node.until(lambda node: node.aborted)

    assert node.open == 0
    assert node.aborted[0].aborted_at is not None
    assert node.served == 0


async def test_slots_bound_what_is_served_and_the_queue_what_waits(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM(["m"], slots=1, queue=1, first_seconds=0.1) as node:
        url, body = f"{node.url}/v1/chat/completions", {"model": "m", "messages": USER}
        answers = await asyncio.gather(*(asked(http, url, body) for _ in range(3)))

    assert sorted(status for status, _ in answers) == [200, 200, 503]
    assert node.peak == 2


async def test_a_node_that_stops_is_no_client_that_left(http: aiohttp.ClientSession) -> None:
    node = FakeOllama(["m"])
    await node.start()
    node.behave(Behaviour.HANG)
    request = asyncio.create_task(raw(node, ollama_chat()))
    await node.until(lambda node: node.open)

    await node.stop()

    assert (await request).data == b""
    assert (node.open, node.aborted) == (0, [])


# Ollama


async def test_ollama_streams_lines(http: aiohttp.ClientSession) -> None:
    body = {"model": "M:latest", "messages": USER}
    async with FakeOllama(["m"], tokens=3) as node, http.post(f"{node.url}/api/chat", json=body) as response:
        text = await response.text()

    found = lines(text)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [line["message"]["content"] for line in found] == ["t0 ", "t1 ", "t2 ", ""]
    assert [line["done"] for line in found] == [False, False, False, True]
    assert {line["model"] for line in found} == {"M:latest"}
    assert (found[-1]["done_reason"], found[-1]["prompt_eval_count"], found[-1]["eval_count"]) == ("stop", 2, 3)


async def test_ollama_answers_in_one_document(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"], echo="You said: {}") as node:
        _, text = await asked(http, f"{node.url}/api/chat", {"model": "m", "messages": USER, "stream": False})
        _, other = await asked(http, f"{node.url}/api/generate", {"model": "m", "prompt": "a <b>", "stream": False})

    assert json.loads(text)["message"] == {"role": "assistant", "content": "You said: hi there"}
    assert json.loads(other)["response"] == "You said: a <b>"
    assert "\\u003cb\\u003e" in other  # as Go writes it


async def test_ollama_thinks_and_calls_tools(http: aiohttp.ClientSession) -> None:
    calls = (ToolCall("a", {"x": 1}), ToolCall("b", {"y": 2}))
    deltas = [Delta(reasoning="hm"), Delta(tool_calls=calls)]
    async with FakeOllama(["m"], deltas=deltas) as node:
        _, text = await asked(http, f"{node.url}/api/chat", {"model": "m", "messages": USER, "tools": [{}]})
        _, quiet = await asked(http, f"{node.url}/api/chat", {"model": "m", "messages": USER, "think": False})

    thought, called, _ = lines(text)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert called["message"]["tool_calls"] == [
        {"id": "call_00000000", "function": {"index": 0, "name": "a", "arguments": {"x": 1}}},
        {"id": "call_00000001", "function": {"index": 1, "name": "b", "arguments": {"y": 2}}},
    ]
    assert "thinking" not in quiet


async def test_ollama_stops_at_the_token_limit(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "messages": USER, "stream": False, "options": {"num_predict": 2}}
    async with FakeOllama(["m"]) as node:
        _, text = await asked(http, f"{node.url}/api/chat", body)

    assert json.loads(text)["message"]["content"] == "t0 t1 "
    assert json.loads(text)["done_reason"] == "length"


async def test_ollama_loads_and_unloads(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"]) as node:
        _, loaded = await asked(http, f"{node.url}/api/chat", {"model": "m", "messages": [], "options": {"num_ctx": 9}})
        _, running = await got(http, f"{node.url}/api/ps")
        _, again = await asked(http, f"{node.url}/api/generate", {"model": "m", "options": {"num_ctx": 8}})
        _, gone = await asked(http, f"{node.url}/api/chat", {"model": "m", "keep_alive": 0})
        _, none = await got(http, f"{node.url}/api/ps")

    assert [json.loads(text)["done_reason"] for text in (loaded, again, gone)] == ["load", "load", "unload"]
    assert json.loads(running)["models"][0]["context_length"] == 9
    assert json.loads(none) == {"models": []}
    assert node.engine.loads == [("m:latest", 9), ("m:latest", 8)]


async def test_ollama_drops_a_load_whose_client_left() -> None:
    async with FakeOllama(["m"], load_seconds=5) as node:
        await raw(node, ollama_chat(), until=b"", idle_seconds=0.05)
        await node.until(lambda node: node.aborted)

        assert node.engine.loaded == {}


async def test_ollama_lists_its_models(http: aiohttp.ClientSession) -> None:
    models: list[str | Model] = ["a", Model("b:1b", ("embedding",), modified_at="2026-02-01T00:00:00Z")]
    async with FakeOllama(models) as node:
        _, tags = await got(http, f"{node.url}/api/tags")
        _, shown = await asked(http, f"{node.url}/api/show", {"model": "b:1b"})
        _, version = await got(http, f"{node.url}/api/version")

    assert [model["name"] for model in json.loads(tags)["models"]] == ["b:1b", "a:latest"]
    assert json.loads(shown)["capabilities"] == ["embedding"]
    assert json.loads(version)["version"].startswith("0.")


CHAT: dict[str, Any] = {"model": "m", "messages": USER}
LIST_CONTENT = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
DATA_URL = {"role": "user", "content": "", "images": ["data:image/png;base64,AA"]}
STRING_ARGUMENTS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}
FULL = "registry.ollama.ai/library"
WRONG: list[tuple[str, Any, int, str]] = [
    ("/api/chat", {"messages": USER}, 400, "model is required"),
    ("/api/chat", {"model": "x", "messages": USER}, 404, "model 'x' not found"),
    ("/api/generate", {"model": "", "prompt": "a"}, 404, "model '' not found"),
    ("/api/embed", {"model": "x", "input": "a"}, 404, 'model "x" not found, try pulling it first'),
    ("/api/chat", {"model": "my model", "messages": USER}, 400, "invalid model name"),
    ("/api/chat", [], 400, "json: cannot unmarshal array into Go"),
    ("/api/chat", {"model": "m", "messages": [LIST_CONTENT]}, 400, "json: cannot unmarshal array"),
    ("/api/chat", {"model": "m", "messages": [DATA_URL]}, 400, "illegal base64 data at input byte 4"),
    ("/api/chat", {"model": "m", "messages": [STRING_ARGUMENTS]}, 400, "json: cannot unmarshal string"),
    ("/api/chat", CHAT | {"think": "very"}, 400, "invalid think value"),
    ("/api/chat", CHAT | {"think": True}, 400, '"m" does not support thinking'),
    ("/api/chat", CHAT | {"model": "e"}, 400, '"e" does not support chat'),
    ("/api/chat", CHAT | {"model": "plain", "tools": [{}]}, 400, f"{FULL}/plain:latest does not support tools"),
    ("/api/chat", CHAT | {"keep_alive": "3600"}, 400, 'time: missing unit in duration "3600"'),
    ("/api/chat", CHAT | {"keep_alive": True}, 400, "invalid keep_alive"),
    ("/api/chat", CHAT | {"options": {"temperature": "hot"}}, 500, 'option "temperature" must be of type float32'),
    ("/api/chat", CHAT | {"options": {"stop": "x"}}, 500, 'option "stop" must be of type array'),
    ("/api/embed", {"model": "m", "input": [1, 2]}, 400, "invalid input type"),
    ("/api/generate", {"model": "m", "prompt": "a", "suffix": "b"}, 400, f"{FULL}/m:latest does not support insert"),
]


@pytest.mark.parametrize(("path", "body", "status", "error"), WRONG)
async def test_ollama_refuses_what_a_real_one_refuses(
    http: aiohttp.ClientSession, path: str, body: Any, status: int, error: str
) -> None:
    async with FakeOllama(["m", Model("e:latest", ("embedding",)), Model("plain:latest", ("completion",))]) as node:
        found, text = await asked(http, node.url + path, body)

    assert found == status
    assert json.loads(text)["error"].startswith(error)


END = b"\r\nConnection: close\r\n\r\n"


async def test_ollama_has_its_own_404_405_and_403(http: aiohttp.ClientSession) -> None:
    async with FakeOllama() as node:
        assert await got(http, f"{node.url}/v1/chat") == (404, "404 page not found")
        assert await got(http, f"{node.url}/api/chat") == (405, "405 method not allowed")
        for header in (b"Origin: http://evil.example", b"Host: evil.example"):
            assert (await raw(node, b"GET /api/tags HTTP/1.1\r\n" + header + END)).status == 403
        for header in (b"Origin: http://localhost:3000", b"Host: 10.0.0.1:11434", b"Host: box.local"):
            assert (await raw(node, b"GET /api/tags HTTP/1.1\r\n" + header + END)).status == 200


async def test_ollama_embeds(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"]) as node:
        _, two = await asked(http, f"{node.url}/api/embed", {"model": "m", "input": ["a", "b c"]})
        _, none = await asked(http, f"{node.url}/api/embed", {"model": "m", "input": ""})
        _, short = await asked(http, f"{node.url}/api/embed", {"model": "m", "input": "a", "dimensions": 3})
        _, old = await asked(http, f"{node.url}/api/embeddings", {"model": "m", "prompt": "a"})

    first, second = json.loads(two)["embeddings"]
    assert first != second
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-4)
    assert json.loads(two)["prompt_eval_count"] == 3
    assert json.loads(none)["embeddings"] == []
    assert len(json.loads(short)["embeddings"][0]) == 3
    assert json.loads(old)["embedding"] == first


# OpenAI's API


def fake(kind: str, **options: Any) -> FakeOpenAI:
    node = KINDS[kind](["org/m", "m"], **({"api_key": None} if kind == "cloud" else {}), **options)
    assert isinstance(node, FakeOpenAI)
    return node


@pytest.mark.parametrize("kind", OPENAI_KINDS)
async def test_every_kind_answers_in_one_document(http: aiohttp.ClientSession, kind: str) -> None:
    async with fake(kind, tokens=2) as node:
        status, text = await asked(http, f"{node.url}/v1/chat/completions", {"model": "m", "messages": USER})
        _, models = await got(http, f"{node.url}/v1/models")

    answer = json.loads(text)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "t0 t1 "}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert [model["id"] for model in json.loads(models)["data"]] == ["org/m", "m"]


@pytest.mark.parametrize("kind", OPENAI_KINDS)
async def test_every_kind_streams(http: aiohttp.ClientSession, kind: str) -> None:
    body = {"model": "m", "messages": USER, "stream": True}
    async with fake(kind, tokens=2) as node:
        status, text = await asked(http, f"{node.url}/v1/chat/completions", body)

    chunks = events(text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert status == 200
    assert "".join(delta.get("content") or "" for delta in deltas) == "t0 t1 "
    assert deltas[0]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert ("[DONE]" in text) == (kind != "transformers")
    assert ("usage" in chunks[-1]) == (kind == "transformers")
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("kind", [kind for kind in OPENAI_KINDS if kind != "transformers"])
async def test_usage_comes_when_it_is_asked_for(http: aiohttp.ClientSession, kind: str) -> None:
    body = {"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    async with fake(kind, tokens=2) as node:
        _, text = await asked(http, f"{node.url}/v1/chat/completions", body)

    *_, finish, last = events(text)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 4
    assert ("usage" in finish) == (kind in ("tgi", "cloud"))  # null there


async def test_first_chunks_differ(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "messages": USER, "stream": True}
    first: dict[str, Any] = {}
    for kind in OPENAI_KINDS:
        async with fake(kind) as node:
            _, text = await asked(http, f"{node.url}/v1/chat/completions", body)
            first[kind] = events(text)[0]["choices"][0]["delta"]

    assert first["llamacpp"] == {"role": "assistant", "content": None}
    assert first["vllm"] == {"role": "assistant", "content": ""}
    assert first["transformers"] == {"role": "assistant"}
    assert first["tgi"] == {"role": "assistant", "content": "t0 "}


async def test_tool_calls_and_reasoning_come_in_pieces(http: aiohttp.ClientSession) -> None:
    calls = (ToolCall("a", {"city": "Paris"}), ToolCall("b", {}))
    body = {"model": "m", "messages": USER}
    async with FakeVLLM(["m"], deltas=[Delta(reasoning="hm"), Delta(tool_calls=calls)]) as node:
        _, whole = await asked(http, f"{node.url}/v1/chat/completions", body)
        _, text = await asked(http, f"{node.url}/v1/chat/completions", body | {"stream": True})

    choice = json.loads(whole)["choices"][0]
    pieces = [call for chunk in events(text) for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"city":"Paris"}'}
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1, 1]
    assert "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == 0) == '{"city":"Paris"}'
    assert [piece["id"] for piece in pieces if "id" in piece] == ["call_00000000", "call_00000001"]


async def test_text_completions(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "prompt": "once upon", "max_tokens": 1}
    async with FakeGeneric(["m"]) as node:
        _, whole = await asked(http, f"{node.url}/v1/completions", body)
        _, text = await asked(http, f"{node.url}/v1/completions", body | {"stream": True})

    assert json.loads(whole)["choices"][0]["text"] == "t0 "
    assert json.loads(whole)["choices"][0]["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in events(text)) == "t0 "


async def test_embeddings_in_both_encodings(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "input": ["a", "b"]}
    async with FakeVLLM(["m"]) as node, FakeLMStudio(["m"]) as other:
        _, plain = await asked(http, f"{node.url}/v1/embeddings", body)
        _, coded = await asked(http, f"{node.url}/v1/embeddings", body | {"encoding_format": "base64"})
        _, ignored = await asked(http, f"{other.url}/v1/embeddings", body | {"encoding_format": "base64"})

    vector = json.loads(plain)["data"][1]["embedding"]
    unpacked = struct.unpack("<8f", base64.b64decode(json.loads(coded)["data"][1]["embedding"]))
    assert unpacked == pytest.approx(vector)
    assert json.loads(ignored)["data"][1]["embedding"] == vector


ERROR_SHAPES: list[tuple[type[FakeOpenAI], Any]] = [
    (FakeVLLM, {"error": {"message": "x", "type": "NotFoundError", "param": None, "code": 404}}),
    (FakeTGI, {"error": "x", "error_type": "not_found"}),
    (FakeLMDeploy, {"object": "error", "message": "x", "type": "not_found_error", "param": None, "code": 404}),
    (FakeLlamaCpp, {"error": {"code": 404, "message": "x", "type": "not_found_error"}}),
    (FakeSGLang, {"object": "error", "message": "x", "type": "NotFoundError", "param": None, "code": 404}),
    (FakeTransformers, {"detail": "x"}),
    (FakeCloud, {"error": {"message": "x", "type": "invalid_request_error", "param": None, "code": "model_not_found"}}),
]


@pytest.mark.parametrize(("kind", "body"), ERROR_SHAPES)
def test_errors_have_the_shape_of_the_engine(kind: type[FakeOpenAI], body: Any) -> None:
    answer = kind().engine.error(404, "x")

    assert answer.status == 404
    assert json.loads(answer.body) == body


async def test_health_differs_with_the_engine_and_its_state(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM() as vllm, FakeLMDeploy() as lmdeploy, FakeLlamaCpp(state=State.LOADING) as llamacpp:
        assert await got(http, f"{vllm.url}/health") == (200, "")
        assert await got(http, f"{lmdeploy.url}/health") == (200, '{"status":"healthy"}')
        status, text = await got(http, f"{llamacpp.url}/health")
        assert (status, json.loads(text)["error"]["message"]) == (503, "Loading model")
        status, _ = await asked(http, f"{llamacpp.url}/v1/chat/completions", {"messages": USER})
        assert status == 503

        vllm.engine.state = lmdeploy.engine.state = State.UNHEALTHY
        llamacpp.engine.state = State.READY

        assert await got(http, f"{vllm.url}/health") == (503, "")
        assert await got(http, f"{lmdeploy.url}/health") == (503, '{"status":"unhealthy"}')
        assert await got(http, f"{llamacpp.url}/health") == (200, '{"status":"ok"}')


SIGNS: list[tuple[type[FakeOpenAI], str, str]] = [
    (FakeVLLM, "/version", "version"),
    (FakeVLLM, "/load", "server_load"),
    (FakeTGI, "/info", "max_total_tokens"),
    (FakeLlamaCpp, "/props", "total_slots"),
    (FakeSGLang, "/get_model_info", "model_path"),
    (FakeSGLang, "/server_info", "served_model_name"),
    (FakeLMStudio, "/api/v0/models", "data"),
]


@pytest.mark.parametrize(("kind", "path", "key"), SIGNS)
async def test_kinds_can_be_told_apart(
    http: aiohttp.ClientSession, kind: type[FakeOpenAI], path: str, key: str
) -> None:
    async with kind() as node:
        status, text = await got(http, node.url + path)

    assert status == 200
    assert key in json.loads(text)


async def test_lm_studio_says_200_to_what_it_does_not_have(http: aiohttp.ClientSession) -> None:
    async with FakeLMStudio() as node:
        status, text = await got(http, f"{node.url}/health")

    assert (status, json.loads(text)["error"]) == (200, "Unexpected endpoint or method. (GET /health)")


async def test_llamacpp_shows_its_busy_slots(http: aiohttp.ClientSession) -> None:
    async with FakeLlamaCpp(["m"]) as node:
        node.behave(Behaviour.HANG)
        hanging = asyncio.create_task(raw(node, openai_chat()))
        await node.until(lambda node: node.open)
        _, text = await got(http, f"{node.url}/slots")
        hanging.cancel()

    assert [slot["is_processing"] for slot in json.loads(text)] == [True, False, False, False]


async def test_the_cloud_wants_its_key_and_counts(http: aiohttp.ClientSession) -> None:
    body = {"model": "gpt-4o-mini", "messages": USER}
    async with FakeCloud(api_key="sk-right-key-0123456789", tokens=5) as node:
        url = f"{node.url}/v1/chat/completions"
        none, _ = await asked(http, url, body)
        wrong, text = await asked(http, url, body, Authorization="Bearer sk-wrong-key-9876543210")
        right, _ = await asked(http, url, body, Authorization="Bearer sk-right-key-0123456789")

    assert (none, wrong, right) == (401, 401, 200)
    assert "sk-wrong***********3210" in json.loads(text)["error"]["message"]
    assert (node.engine.calls, node.engine.prompt_tokens, node.engine.completion_tokens) == (1, 2, 5)


async def test_transformers_refuses_fields_that_it_does_not_honour(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "messages": USER, "stream_options": {}}
    async with FakeTransformers(["m"]) as node:
        refused, _ = await asked(http, f"{node.url}/v1/chat/completions", body)
        node.engine.refused_fields = frozenset()
        taken, _ = await asked(http, f"{node.url}/v1/chat/completions", body)

    assert (refused, taken) == (422, 200)


# Misbehaviour


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("make", [FakeOllama, FakeVLLM, FakeTransformers])
@pytest.mark.parametrize("behaviour", Behaviour)
async def test_after_any_behaviour_the_node_recovers(
    make: type[FakeOllama | FakeOpenAI], behaviour: Behaviour, stream: bool
) -> None:
    request = ollama_chat(stream) if make is FakeOllama else openai_chat(stream)
    async with make(["m"], tokens=3) as node:
        healthy = await raw(node, request)
        node.behave(behaviour, size=1000)
        await raw(node, request, until=b"", idle_seconds=0.02)
        node.recover()
        again = await raw(node, request)

        assert len(again.data) == len(healthy.data)
        await node.until(lambda node: node.open == 0)


# How each connection ends, and what its bytes hold: for a stream of four tokens from Ollama.
ENDS: dict[Behaviour, tuple[str, str]] = {
    Behaviour.OK: ("open", '"done":true'),
    Behaviour.REFUSE: ("refused", ""),
    Behaviour.RESET_AT_ACCEPT: ("rst", ""),
    Behaviour.HANG: ("open", ""),
    Behaviour.HANG_AFTER_HEAD: ("open", "chunked\r\n\r\n"),
    Behaviour.HANG_MIDWAY: ("open", "t1 "),
    Behaviour.CLOSE_AT_ONCE: ("fin", ""),
    Behaviour.CLOSE_MIDWAY: ("fin", "t1 "),
    Behaviour.RESET_MIDWAY: ("rst", "t1 "),
    Behaviour.CLOSE_AFTER_ANSWER: ("fin", "0\r\n\r\n"),
    Behaviour.STATUS_400: ("open", " 400 "),
    Behaviour.STATUS_401: ("open", " 401 "),
    Behaviour.STATUS_404: ("open", "model 'm' not found"),
    Behaviour.STATUS_408: ("open", " 408 "),
    Behaviour.STATUS_429: ("open", "retry-after: 1\r\n"),
    Behaviour.STATUS_500: ("open", "model runner has unexpectedly stopped"),
    Behaviour.STATUS_503: ("open", "server busy, please try again.  maximum"),
    Behaviour.STATUS_529: ("open", " 529 "),
    Behaviour.REDIRECT_302: ("open", "location: /elsewhere"),
    Behaviour.CONTINUE_100: ("open", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"),
    Behaviour.SWITCH_101: ("fin", " 101 "),
    Behaviour.HTML: ("open", "<html>"),
    Behaviour.EMPTY: ("open", "chunked\r\n\r\n0\r\n\r\n"),
    Behaviour.GARBAGE: ("open", "\x80\x81"),
    Behaviour.TRUNCATED_JSON: ("open", "\r\n0\r\n\r\n"),
    Behaviour.GZIP: ("open", "content-encoding: gzip"),
    Behaviour.LENGTH_TOO_LONG: ("fin", '"done":true'),
    Behaviour.LENGTH_TOO_SHORT: ("open", "content-length: "),
    Behaviour.HALF_CHUNK: ("fin", "t1 "),
    Behaviour.BAD_CHUNK_SIZE: ("fin", "\r\nzz\r\n"),
    Behaviour.ENDLESS_HEAD: ("open", "x-filler: "),
    Behaviour.ERROR_FIRST: ("open", '{"error":"an error was encountered'),
    Behaviour.ERROR_MIDWAY: ("open", '{"error":"an error was encountered'),
    Behaviour.NO_TERMINATOR: ("open", "t3 "),
    Behaviour.NO_FINISH_REASON: ("open", '"done":true,"total_duration"'),
    Behaviour.HUGE_LINE: ("open", "x" * 5000),
    Behaviour.DUPLICATE_USAGE: ("open", '"eval_count":4}'),
    Behaviour.TOOL_INDEX_ZERO: ("open", '"index":0,"name":"tool_2"'),
    Behaviour.COMMENTS: ("open", "\r\n\n{"),
    Behaviour.CRLF: ("open", "}\r\n\r\n"),
    Behaviour.DRIP: ("open", '"done":true'),
    Behaviour.SPLIT_CHARACTERS: ("open", '"done":true'),
    Behaviour.ONE_WRITE: ("open", '"done":true'),
}
HOLDS_NO_END = {behaviour for behaviour in Behaviour if stage(behaviour, stream=True, ollama=True) is not Stage.ALL} - {
    Behaviour.LENGTH_TOO_SHORT
}


@pytest.mark.parametrize("behaviour", Behaviour)
async def test_a_behaviour_looks_as_it_is_called(behaviour: Behaviour) -> None:
    end, holds = ENDS[behaviour]
    async with FakeOllama(["m"], tokens=4) as node:
        node.behave(behaviour, size=5000)
        answer = await raw(node, ollama_chat(keep=True), until=holds.encode("latin-1"))

    text = answer.data.decode("latin-1")
    assert answer.end == end
    assert holds in text
    if behaviour in HOLDS_NO_END:
        assert '"done":true' not in text


@pytest.mark.parametrize("at", [0, 1, 17, 200, 390])
@pytest.mark.parametrize(("behaviour", "end"), [(Behaviour.RESET_MIDWAY, "rst"), (Behaviour.CLOSE_MIDWAY, "fin")])
async def test_an_answer_can_be_cut_at_any_byte(behaviour: Behaviour, end: str, at: int) -> None:
    async with FakeOllama(["m"], tokens=4) as node:
        node.behave(behaviour, at=at)
        answer = await raw(node, ollama_chat())

    assert (len(answer.data), answer.end) == (at, end)


async def test_after_sets_how_much_comes_before_the_fault() -> None:
    async with FakeVLLM(["m"], tokens=9) as node:
        node.behave(Behaviour.ERROR_MIDWAY, after=5, message="boom")
        answer = await raw(node, openai_chat())

    *deltas, error = events(unchunked(answer.body).decode())
    assert [delta["choices"][0]["delta"]["content"] for delta in deltas] == ["", "t0 ", "t1 ", "t2 ", "t3 ", "t4 "]
    assert error["error"]["message"] == "boom"


async def test_gzip_holds_the_whole_answer() -> None:
    async with FakeVLLM(["m"], tokens=2) as node:
        node.behave(Behaviour.GZIP)
        answer = await raw(node, openai_chat())

    assert gzip.decompress(unchunked(answer.body)).endswith(b"data: [DONE]\n\n")


async def test_characters_are_split_between_writes() -> None:
    async with FakeVLLM(["m"], text="Grüße, 世界") as node:
        node.behave(Behaviour.SPLIT_CHARACTERS, seconds=0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(openai_chat())
        pieces: list[bytes] = []
        while b"[DONE]" not in b"".join(pieces):
            pieces.append(await reader.read(4096))
        writer.close()

    inside = [piece for piece in pieces if piece[-1] >= 0xC0]
    assert len(inside) == 4  # ü, ß, 世, 界


async def test_a_dripping_node_sends_a_byte_at_a_time() -> None:
    async with FakeOllama(["m"], tokens=1) as node:
        node.behave(Behaviour.DRIP, seconds=0.001)
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(ollama_chat())
        sizes = [len(await reader.read(4096)) for _ in range(50)]
        writer.close()

    assert max(sizes) <= 3


async def test_usage_can_come_twice() -> None:
    async with FakeVLLM(["m"]) as node:
        node.behave(Behaviour.DUPLICATE_USAGE)
        answer = await raw(node, openai_chat(stream_options={"include_usage": True}))

    assert answer.data.count(b'"usage":{') == 2


async def test_a_wrong_request_stays_wrong_whatever_the_behaviour(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"]) as node:
        node.behave(Behaviour.CLOSE_MIDWAY)
        status, _ = await asked(http, f"{node.url}/api/chat", {"model": "other", "messages": USER})

    assert status == 404


async def test_behaviours_for_some_requests_queue_up() -> None:
    async with FakeOllama(["m"]) as node:
        node.behave(Behaviour.STATUS_500)
        node.behave(Behaviour.STATUS_503, times=2)
        node.behave(Behaviour.STATUS_429, times=1)
        found = [(await raw(node, ollama_chat())).status for _ in range(5)]

    assert found == [503, 503, 429, 500, 500]


async def test_probes_are_spared_unless_told_otherwise(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"]) as node:
        node.behave(Behaviour.STATUS_503)
        assert (await got(http, f"{node.url}/api/tags"))[0] == 200

        node.behave(Behaviour.STATUS_500, on=On.PROBES)
        assert (await got(http, f"{node.url}/api/tags"))[0] == 500
        assert (await raw(node, ollama_chat())).status == 200

        node.behave(Behaviour.STATUS_500, on=On.ALL)
        assert (await got(http, f"{node.url}/api/tags"))[0] == 500
        assert (await raw(node, ollama_chat())).status == 500


async def test_a_node_that_refuses_keeps_its_port() -> None:
    async with FakeOllama(["m"]) as node:
        port = node.port
        node.behave(Behaviour.REFUSE)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

        node.recover()

        assert (await raw(node, ollama_chat())).status == 200
        assert node.port == port


async def test_a_node_may_be_down_from_the_start() -> None:
    node = FakeOllama(["m"])
    node.behave(Behaviour.REFUSE)
    async with node:
        assert (await raw(node, ollama_chat())).end == "refused"

        node.recover()

        assert (await raw(node, ollama_chat())).status == 200


async def test_a_refusing_node_drops_idle_connections_but_ends_its_answers(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"], tokens=3, token_seconds=0.03) as node:
        reader, idle = await asyncio.open_connection("127.0.0.1", node.port)
        request = asyncio.create_task(raw(node, ollama_chat()))
        await node.until(lambda node: node.open)

        node.behave(Behaviour.REFUSE)

        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert b'"done":true' in (await request).data
        idle.close()


async def test_a_crash_resets_what_runs(http: aiohttp.ClientSession) -> None:
    async with FakeOllama(["m"], tokens=99, token_seconds=0.03) as node:
        request = asyncio.create_task(raw(node, ollama_chat()))
        await node.until(lambda node: node.open)

        node.crash()

        assert (await request).end == "rst"
        assert (await raw(node, ollama_chat())).end == "refused"
        assert node.aborted == []


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not run there")
def test_the_fakes_run_on_uvloop_as_well() -> None:
    import uvloop

    async def ends() -> list[str]:
        async with FakeOllama(["m"], tokens=4) as node:
            node.behave(Behaviour.RESET_MIDWAY, times=1)
            found = [(await raw(node, ollama_chat())).end for _ in range(2)]
            node.crash()
            found.append((await raw(node, ollama_chat())).end)
            node.recover()
            return [*found, (await raw(node, ollama_chat())).end]

    assert uvloop.run(ends()) == ["rst", "fin", "refused", "fin"]


def test_refusals_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="times"):
        FakeOllama().behave(Behaviour.REFUSE, times=1)


@pytest.mark.parametrize("stream", [True, False])
def test_every_behaviour_has_a_stage(stream: bool) -> None:
    found = {stage(behaviour, stream=stream, ollama=True) for behaviour in Behaviour}

    assert found == ({Stage.NOTHING, Stage.SOME, Stage.ALL} if stream else {Stage.NOTHING, Stage.ALL})


# Processes


async def test_a_process_serves_dies_and_comes_back(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "messages": USER, "stream": False}
    async with NodeProcess("ollama", models="m,other", tokens=2) as node:
        url = node.url
        _, text = await asked(http, f"{url}/api/chat", body)
        status = await node.kill()
        with pytest.raises(aiohttp.ClientConnectionError):
            await asked(http, f"{url}/api/chat", body)
        await node.start()
        _, again = await asked(http, f"{node.url}/api/chat", body)

    assert json.loads(text)["message"] == json.loads(again)["message"] == {"role": "assistant", "content": "t0 t1 "}
    assert status == -signal.SIGKILL
    assert node.url == url
    assert not node.alive


async def test_a_process_is_told_over_http_how_to_behave(http: aiohttp.ClientSession) -> None:
    async with NodeProcess("cloud", api_key="secret") as node:
        settings = {"behaviour": "status_503", "times": 1, "on": "all", "script": {"text": "well said"}}
        await asked(http, f"{node.url}/_fake/behave", settings)
        busy, _ = await asked(http, f"{node.url}/v1/chat/completions", {})
        body = {"model": "gpt-4o-mini", "messages": USER}
        _, text = await asked(http, f"{node.url}/v1/chat/completions", body, Authorization="Bearer secret")
        bad, _ = await asked(http, f"{node.url}/_fake/behave", {"behaviour": "sing"})
        _, state = await got(http, f"{node.url}/_fake/state")
        _, requests = await got(http, f"{node.url}/_fake/requests")

    assert (busy, bad) == (503, 400)
    assert json.loads(text)["choices"][0]["message"]["content"] == "well said"
    assert json.loads(state)["served"] == 2
    assert json.loads(requests)[1]["headers"]["authorization"] == "Bearer secret"


async def test_a_process_ends_with_the_one_that_started_it() -> None:
    async with NodeProcess("ollama") as node:
        process = node._process
        assert process is not None
        assert process.stdin is not None

        process.stdin.close()

        assert await asyncio.wait_for(process.wait(), 5) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_a_process_that_cannot_start_says_so() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        await NodeProcess("no-such-kind").start()
