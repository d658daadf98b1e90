"""Keys stay where they belong, and nobody gets further than they may."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from app.settings import Settings
from app.start import announce
from app.telemetry.logs import make_logger
from tests.fakes import KINDS, Behaviour, FakeCloud, FakeGeneric, FakeNode, FakeOllama, FakeOpenAI, FakeVLLM, On
from tests.fakes.flavours import VLLM
from tests.system.gateway_process import GatewayProcess
from tests.system.harness import Lines, gateway, node_settings, until
from tests.system.plain_client import JSON, connected, request, send
from tests.system.reading import read

LOCAL_KINDS = [name for name in KINDS if name != "cloud"]
CLIENT_KEYS = ("sk-client-alpha-1111111111", "plainclientkeybeta2222222222")
ADMIN_KEY = "sk-admin-gamma-3333333333"
NODE_KEY = "nodekeydelta4444444444"
CLOUD_KEY = "sk-cloud-epsilon-5555555555"
STRANGER = "sk-stranger-zeta-6666666666"
SECRETS = (*CLIENT_KEYS, ADMIN_KEY, NODE_KEY, CLOUD_KEY, STRANGER)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM_AND_DOCUMENT = pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def node_with_key(node: FakeNode[Any], key: str = NODE_KEY, **more: Any) -> dict[str, Any]:
    return {"url": node.url, "name": "keyed", "api_key": key, **more}


def clouds(cloud: FakeCloud, key: str = CLOUD_KEY, **more: Any) -> str:
    entry = {"name": "cloud", "endpoint": cloud.url + "/v1", "api_key": key, "model": "gpt-4o-mini"}
    return json.dumps([{**entry, **more}])


def traces_of(secret: str) -> Iterator[str]:
    """The secret, and its ends as those show it who half hide it."""
    yield secret
    yield secret[:12]
    yield secret[-8:]


# -- keys


@pytest.mark.parametrize("key", [*CLIENT_KEYS, ADMIN_KEY])
async def test_every_key_opens_in_either_header_and_a_wrong_one_does_not(key: str) -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(node, api_keys=",".join(CLIENT_KEYS), admin_keys=ADMIN_KEY) as hearth:
            for path in ("/v1/chat/completions", "/chat/completions"):
                for headers in (bearer(key), {"x-api-key": key}, {"authorization": f"bearer  {key}"}):
                    assert (await hearth.client.post(path, json=CHAT, headers=headers)).status_code == 200
                for headers in ({}, bearer(STRANGER), bearer(key[:-1]), bearer(key.upper()), {"x-api-key": STRANGER}):
                    assert (await hearth.client.post(path, json=CHAT, headers=headers)).status_code == 401
            assert (await hearth.client.get("/v1/models")).status_code == 401
            assert (await hearth.client.get("/v1/models/m")).status_code == 401
            assert (await hearth.client.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_no_key_is_shown_anywhere() -> None:
    async with (
        FakeVLLM(models=["m"], api_key=NODE_KEY) as node,
        FakeVLLM(models=["m"], api_key="not-the-same") as refusing,
        FakeCloud(api_key="sk-not-the-same") as cloud,
    ):
        nodes = [
            node_with_key(node, kind="vllm"),
            {**node_with_key(refusing, kind="vllm", models=["m"]), "name": "two"},
        ]
        settings = {
            "local_nodes": json.dumps(nodes),
            "cloud_providers": clouds(cloud),
            "api_keys": ",".join(CLIENT_KEYS),
            "admin_keys": ADMIN_KEY,
        }
        async with gateway(**settings) as hearth:
            answers = [
                await hearth.chat(headers=headers, stream=stream)
                for headers in (
                    bearer(CLIENT_KEYS[0]),
                    {"x-api-key": CLIENT_KEYS[1]},
                    bearer(STRANGER),
                    bearer(ADMIN_KEY),
                )
                for stream in (True, False)
            ]
            for behaviour in (Behaviour.STATUS_401, Behaviour.STATUS_500, Behaviour.HTML, Behaviour.CLOSE_MIDWAY):
                node.behave(behaviour)
                for model in ("m", "gpt-4o-mini", CLIENT_KEYS[0]):
                    answers.append(await hearth.chat(model, headers=bearer(CLIENT_KEYS[0]), stream=True))
            answers += [
                await hearth.client.get(path, headers=bearer(ADMIN_KEY))
                for path in ("/metrics", "/admin/nodes", "/v1/models", "/ready", "/openapi.json", "/health")
            ]
            answers.append(await hearth.client.get("/admin/nodes", headers=bearer(STRANGER)))
            answers.append(await hearth.client.get(f"/{STRANGER}", headers=bearer(STRANGER)))
            assert {answer.status_code for answer in answers} >= {200, 401, 404, 502}

            shown = json.dumps(hearth.lines.all)
            told = "".join(f"{answer.headers}{answer.text}" for answer in answers[:-1])
            for secret in SECRETS:
                for trace in traces_of(secret):
                    assert trace not in shown
            for secret in (ADMIN_KEY, NODE_KEY, CLOUD_KEY, CLIENT_KEYS[1]):
                for trace in traces_of(secret):
                    assert trace not in told


@STREAM_AND_DOCUMENT
async def test_a_cloud_that_repeats_its_key_in_an_error_is_not_quoted(stream: bool) -> None:
    async with FakeOllama(models=["other"]) as local, FakeCloud(api_key=CLOUD_KEY) as cloud:
        async with gateway(local, cloud_providers=clouds(cloud), health_check_interval=60) as hearth:
            cloud.engine.api_key = "sk-another"

            answer = await hearth.chat("gpt-4o-mini", stream=stream)

            assert cloud.seen == [f"Bearer {CLOUD_KEY}"]
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "node_auth"
            for trace in (*traces_of(CLOUD_KEY), CLOUD_KEY[:8], CLOUD_KEY[-4:]):
                assert trace not in answer.text
                assert trace not in json.dumps(hearth.lines.all)


# -- what a node gets to see


CURIOUS = {
    **bearer(CLIENT_KEYS[0]),
    "x-api-key": CLIENT_KEYS[0],
    "api-key": CLIENT_KEYS[0],
    "proxy-authorization": "Basic c2VjcmV0",
    "cookie": "session=secret",
    "origin": "https://chat.example.org",
    "referer": "https://chat.example.org/private",
    "user-agent": "a-client/1.0",
    "x-forwarded-for": "192.0.2.7",
    "x-forwarded-host": "chat.example.org",
    "x-forwarded-proto": "https",
    "x-real-ip": "192.0.2.7",
    "forwarded": "for=192.0.2.7",
    "via": "1.1 proxy",
    "openai-organization": "org-secret",
    "openai-project": "proj-secret",
    "x-stainless-os": "Linux",
    "accept": "text/html",
    "accept-encoding": "gzip, br",
    "accept-language": "de-CH",
    "te": "trailers",
    "trailer": "x-checksum",
    "keep-alive": "timeout=5",
    "x-hearth-local-only": "true",
    "x-mine": "private",
}
# All that ever reaches a node, besides its own key.
PASSED = {"host", "accept", "content-type", "content-length", "accept-encoding", "user-agent", "x-request-id"}


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("kind", LOCAL_KINDS)
async def test_a_node_sees_its_own_key_and_nothing_of_the_clients_headers(kind: str, stream: bool) -> None:
    async with KINDS[kind](models=["m"]) as node:
        nodes = json.dumps([node_with_key(node, kind=kind)])
        async with gateway(local_nodes=nodes, api_keys=CLIENT_KEYS[0]) as hearth:
            answer = await hearth.chat(stream=stream, headers=CURIOUS)

            assert answer.status_code == 200
            sent = node.inferences[0].headers
            assert set(sent) == PASSED | {"authorization"}
            assert sent["authorization"] == f"Bearer {NODE_KEY}"
            assert sent["host"] == f"127.0.0.1:{node.port}"
            assert sent["user-agent"].startswith("hearth/")
            assert sent["accept-encoding"] == "identity"
            assert sent["accept"] == "*/*"


async def test_traces_go_on_to_the_node_and_nothing_else() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        traced = {"traceparent": trace, "tracestate": "a=1", "x-request-id": "mine-1"}
        await hearth.chat(headers={**CURIOUS, **traced})

        sent = node.inferences[0].headers
        assert (sent["traceparent"], sent["tracestate"], sent["x-request-id"]) == (trace, "a=1", "mine-1")
        assert set(sent) == PASSED | {"traceparent", "tracestate"}


@pytest.mark.parametrize("kind", ["ollama", "vllm", None])
async def test_a_nodes_key_goes_to_that_node_alone_when_it_is_probed_too(kind: str | None) -> None:
    async with KINDS[kind or "vllm"](models=["m"]) as keyed, FakeOllama(models=["m"]) as other:
        nodes = [node_with_key(keyed, kind=kind), {"url": other.url, "name": "other"}]
        async with gateway(local_nodes=json.dumps(nodes), lb_strategy="round_robin") as hearth:
            await hearth.state("keyed", "healthy")
            await hearth.state("other", "healthy")
            for _ in range(4):
                assert (await hearth.chat(headers=bearer(STRANGER))).status_code == 200

            assert {request.authorization for request in keyed.requests} == {f"Bearer {NODE_KEY}"}
            assert {request.authorization for request in other.requests} == {None}
            assert keyed.inferences
            assert other.inferences
            assert {request.method for request in keyed.requests if request not in keyed.inferences} == {"GET"}


@STREAM_AND_DOCUMENT
async def test_no_redirect_of_a_node_is_followed(stream: bool) -> None:
    async with FakeVLLM(models=["m"]) as node, FakeVLLM(models=["m"]) as elsewhere:
        nodes = json.dumps([node_with_key(node, kind="vllm", models=["m"])])
        async with gateway(local_nodes=nodes) as hearth:
            for on in (On.INFERENCE, On.ALL):
                node.behave(Behaviour.REDIRECT_302, on=on, location=elsewhere.url + "/v1/chat/completions")
                answer = await hearth.chat(stream=stream)
                assert answer.status_code in (502, 503)
                assert elsewhere.url not in answer.text
            await hearth.state("keyed", "down")

            assert not elsewhere.requests


@pytest.mark.parametrize("kind", LOCAL_KINDS)
async def test_a_client_cannot_say_where_its_request_goes(kind: str) -> None:
    async with KINDS[kind](models=["m"]) as node, FakeGeneric(models=["m"]) as trap:
        async with gateway(node) as hearth:
            wishes = {"api_base": trap.url, "base_url": trap.url, "api_key": "sk-mine", "custom_llm_provider": "openai"}
            headers = {"host": f"127.0.0.1:{trap.port}", "x-forwarded-host": f"127.0.0.1:{trap.port}"}
            for stream in (True, False):
                assert read(await hearth.chat(stream=stream, headers=headers, **wishes)).whole
            absolute = await send(hearth.url, request(CHAT, trap.url + "/v1/chat/completions"))

            assert absolute.status in (200, 404)
            assert not trap.requests
            assert all(wishes.keys().isdisjoint(sent.json) for sent in node.inferences)


@pytest.mark.parametrize("said", [["true", "false"], ["false", "true"], ["TRUE"], ["1"], ["yes"], ["on"]], ids=str)
async def test_one_wish_for_privacy_among_several_is_enough(said: list[str]) -> None:
    async with FakeOllama(models=["m"]) as local, FakeCloud(api_key=CLOUD_KEY) as cloud:
        async with gateway(local, cloud_providers=clouds(cloud)) as hearth:
            local.behave(Behaviour.STATUS_500)
            headers = [*JSON.items(), *(("X-Hearth-Local-Only", word) for word in said)]

            assert (await send(hearth.url, request(CHAT, headers=headers))).status == 502
            assert not cloud.inferences


async def test_a_trace_of_foreign_characters_neither_breaks_the_request_nor_its_head() -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:
        for value in ("ä", "\xff\xfe", "x" * 4000, "a\tb", ""):
            answer = await send(hearth.url, request(CHAT, headers=[*JSON.items(), ("traceparent", value)]))

            assert answer.status == 200
            assert set(node.inferences[-1].headers) <= PASSED | {"traceparent"}


# -- what a client gets to see


ANSWERED = {"date", "server", "content-type", "content-length", "x-request-id"}
SERVED = {"x-hearth-node", "x-hearth-tier", "x-hearth-attempts", "x-hearth-model", "x-hearth-queue-ms"}
STREAMED = {"transfer-encoding", "cache-control", "x-accel-buffering"}
TALKATIVE = {
    "server": "engine/1.0",
    "set-cookie": "engine=secret",
    "x-powered-by": "engine",
    "keep-alive": "timeout=5",
    "x-engine-key": NODE_KEY,
    "access-control-allow-origin": "*",
    "location": "http://127.0.0.1:1/",
    "x-hearth-node": "somebody-else",
    "x-request-id": "the-nodes-own",
}


@STREAM_AND_DOCUMENT
async def test_no_header_of_a_node_reaches_the_client(stream: bool) -> None:
    async with FakeOpenAI(models=["m"], flavour=replace(VLLM, headers=TALKATIVE)) as node:
        async with gateway(local_nodes=json.dumps([{"url": node.url, "kind": "vllm", "name": "n0"}])) as hearth:
            answer = await send(hearth.url, request({**CHAT, "stream": stream}))

            names = [name for name, _ in answer.headers]
            assert len(names) == len(set(names))
            assert set(names) == (ANSWERED - {"content-length"} | STREAMED if stream else ANSWERED) | SERVED
            assert answer.header("x-hearth-node") == "n0"
            assert not set(TALKATIVE.values()) & {value for _, value in answer.headers}


HOSTILE_NAMES = [
    "m\r\nset-cookie: evil=1",
    "m\nx-evil: 1\n\n<script>",
    "m\x00zero",
    "m\x0b\x1b[31mred",
    "m\x7f",
    "模型",
    "m\u2028\u0085line",
    "ü" * 500,
]


@STREAM_AND_DOCUMENT
@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
async def test_no_name_of_a_model_breaks_out_of_its_header(name: str, stream: bool) -> None:
    async with FakeVLLM(models=[name]) as node, gateway(node) as hearth:
        answer = await send(hearth.url, request({**CHAT, "model": name, "stream": stream}))

        assert answer.status == 200
        assert {header for header, _ in answer.headers} <= ANSWERED | SERVED | STREAMED
        assert all(value.isascii() and value.isprintable() for _, value in answer.headers)
        assert name not in (await hearth.client.get("/metrics")).text
        assert node.inferences[0].json["model"] == name


GOOD_IDS = ["a", "req_0123456789", "0af7651916cd43dd8448eb211c80319c", "a.b:c/d+e=f-g_h", "x" * 128]
BAD_IDS = ["", " ", "a b", "x" * 129, "ä", "a;b", '"a"', "<script>", "a\tb", "{}", "%0d%0ax: y"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/nothing"])
async def test_a_sane_request_id_is_kept_and_another_one_replaced(path: str) -> None:
    async with FakeVLLM(models=["m"]) as node, gateway(node) as hearth:

        async def id_for(*given: tuple[str, str]) -> str | None:
            method = "POST" if "chat" in path else "GET"
            answer = await send(hearth.url, request(CHAT, path, method, [*JSON.items(), *given]))
            return answer.header("x-request-id")

        kept = [await id_for(("x-request-id", given)) for given in GOOD_IDS]
        made = [await id_for(("x-request-id", given)) for given in BAD_IDS] + [await id_for(), await id_for()]

        assert kept == GOOD_IDS
        assert len(set(made)) == len(made)
        assert all(each and each.isalnum() and each.isascii() for each in made)
        if node.inferences:
            assert [sent.headers["x-request-id"] for sent in node.inferences] == kept + made
            assert [line["id"] for line in hearth.lines.requests()] == kept + made


# -- browsers


PAGE = "https://chat.example.org"
OTHER_PAGE = "https://evil.example"
ROUTES = {"/v1/chat/completions": "POST", "/chat/completions": "POST", "/v1/models": "GET", "/health": "GET"}


def preflight(origin: str, method: str, headers: str = "authorization,content-type") -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}


@pytest.mark.parametrize("path", list(ROUTES))
async def test_a_page_that_is_allowed_may_ask_with_a_key(path: str) -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(node, api_keys=CLIENT_KEYS[0], cors_origins=f"{PAGE},http://localhost:3000") as hearth:
            asked = preflight(PAGE, ROUTES[path])
            before = await send(hearth.url, request(b"", path, "OPTIONS", asked))
            local = await send(
                hearth.url, request(b"", path, "OPTIONS", {**asked, "access-control-request-private-network": "true"})
            )
            headers = {**JSON, **bearer(CLIENT_KEYS[0]), "origin": PAGE}
            answer = await send(hearth.url, request(CHAT, path, ROUTES[path], headers))

            assert before.status in (200, 204)
            assert before.header("access-control-allow-origin") == PAGE
            assert "authorization" in (before.header("access-control-allow-headers") or "").lower()
            assert ROUTES[path] in (before.header("access-control-allow-methods") or "")
            assert local.header("access-control-allow-private-network") == "true"
            assert answer.status == 200
            assert answer.header("access-control-allow-origin") == PAGE
            assert "x-hearth-node" in (answer.header("access-control-expose-headers") or "")
            assert answer.header("access-control-allow-credentials") is None


@pytest.mark.parametrize("path", list(ROUTES))
async def test_a_page_that_is_not_allowed_learns_nothing(path: str) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, cors_origins=PAGE) as hearth:
        before = await send(hearth.url, request(b"", path, "OPTIONS", preflight(OTHER_PAGE, ROUTES[path])))
        answer = await send(hearth.url, request(CHAT, path, ROUTES[path], {**JSON, "origin": OTHER_PAGE}))

        assert before.status == 400
        assert before.header("access-control-allow-origin") is None
        assert answer.header("access-control-allow-origin") is None


async def test_a_page_that_is_allowed_can_read_errors_and_streams_too() -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(node, api_keys=CLIENT_KEYS[0], cors_origins=PAGE) as hearth:
            allowed = {**JSON, "origin": PAGE, **bearer(CLIENT_KEYS[0])}
            answers = [
                await send(hearth.url, request({**CHAT, "stream": True}, headers=allowed)),
                await send(hearth.url, request(b"{", headers=allowed)),
                await send(hearth.url, request(CHAT, headers={**JSON, "origin": PAGE})),
                await send(hearth.url, request(CHAT, "/nothing", headers=allowed)),
                await send(hearth.url, request(b"", "/v1/models", "GET", {"origin": PAGE})),
            ]

            assert [answer.status for answer in answers] == [200, 400, 401, 404, 401]
            assert {answer.header("access-control-allow-origin") for answer in answers} == {PAGE}


async def test_without_cors_origins_no_page_may_ask() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        for path, method in ROUTES.items():
            before = await send(hearth.url, request(b"", path, "OPTIONS", preflight(PAGE, method)))
            assert before.status == 405
            assert before.header("access-control-allow-origin") is None


@pytest.mark.parametrize("type_", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_a_page_cannot_ask_without_asking_whether_it_may(type_: str | None) -> None:
    """What a browser sends to anybody without a preflight: these types, or none when it is given a Blob without one."""
    headers = {"origin": OTHER_PAGE} if type_ is None else {"origin": OTHER_PAGE, "content-type": type_}
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        answer = await send(hearth.url, request(CHAT, headers=headers))

        assert answer.status == 415
        assert not node.inferences


# -- who may manage


MANAGED = ["/admin/nodes", "/metrics"]
BEHIND_A_PROXY = [
    {"x-forwarded-for": "192.0.2.7"},
    {"x-forwarded-for": "127.0.0.1"},
    {"x-forwarded-for": ""},
    {"forwarded": "for=127.0.0.1"},
    {"x-real-ip": "127.0.0.1"},
    {"x-forwarded-host": "hearth.example.org"},
    {"x-forwarded-proto": "https"},
    {"via": "1.1 proxy"},
]


@pytest.mark.parametrize("path", MANAGED)
async def test_without_admin_keys_only_this_machine_may_manage(path: str) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, api_keys=CLIENT_KEYS[0]) as hearth:
        assert (await hearth.client.get(path)).status_code == 200
        for headers in BEHIND_A_PROXY:
            answer = await hearth.client.get(path, headers={**headers, **bearer(CLIENT_KEYS[0])})
            assert answer.status_code == 403, headers
            assert answer.json()["error"]["type"] == "permission_error"
            assert node.url not in answer.text


ON_ANOTHERS_BEHALF: list[dict[str, str]] = [
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    {"sec-fetch-site": "same-site"},
    {"origin": OTHER_PAGE},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec-fetch-site": "same-origin"},
    {"host": "evil.example"},
    {"host": "localhost.evil.example"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "[::1"},
]
ON_OUR_OWN: list[dict[str, str]] = [
    {"sec-fetch-site": "none"},
    {"sec-fetch-site": "same-origin", "host": "localhost:8000", "origin": "http://localhost:8000"},
    {"host": "127.0.0.1:8000"},
    {"host": "[::1]:8000"},
    {"host": "LOCALHOST"},
]


@pytest.mark.parametrize("path", MANAGED)
async def test_no_page_from_elsewhere_manages_through_a_browser_on_this_machine(path: str) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node, cors_origins="*") as hearth:
        for headers in ON_ANOTHERS_BEHALF:
            answer = await hearth.client.get(path, headers=headers)
            assert answer.status_code == 403, headers
            assert node.url not in answer.text
        for headers in ON_OUR_OWN:
            assert (await hearth.client.get(path, headers=headers)).status_code == 200, headers


@pytest.mark.parametrize("open_", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize(("method", "path"), [("GET", "/nodes/terminate_all"), ("POST", "/nodes/add")])
async def test_no_page_ends_an_engine_or_puts_another_in_its_place(method: str, path: str, open_: bool) -> None:
    async with FakeVLLM(models=["m"]) as node, FakeVLLM(models=["m"]) as trap:
        async with gateway(node, nodes_open=open_) as hearth:
            # Where engines may come from other machines, any name may be Hearth's own.
            for headers in ON_ANOTHERS_BEHALF if not open_ else ON_ANOTHERS_BEHALF[:5]:
                answer = await hearth.client.request(method, path, headers=headers, json={"url": trap.url})
                assert answer.status_code == 403, headers

            assert not trap.requests
            assert (await hearth.chat()).headers["x-hearth-node"] == "n0"


@pytest.mark.parametrize("path", MANAGED)
async def test_with_admin_keys_nothing_else_opens(path: str) -> None:
    async with FakeOllama(models=["m"]) as node:
        async with gateway(node, api_keys=CLIENT_KEYS[0], admin_keys=ADMIN_KEY) as hearth:
            for headers in ({}, bearer(STRANGER), bearer(CLIENT_KEYS[0]), bearer(ADMIN_KEY[:-1])):
                answer = await hearth.client.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert node.url not in answer.text
            for more in (
                {},
                {"x-api-key": ADMIN_KEY},
                {"via": "1.1 proxy"},
                {"origin": OTHER_PAGE, "host": "h.example"},
            ):
                headers = {**bearer(ADMIN_KEY), **more}
                assert (await hearth.client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize(("host", "keys", "warned"), [("0.0.0.0", "", 1), ("0.0.0.0", "k", 0), ("127.0.0.1", "", 0)])
def test_an_open_door_to_the_network_is_warned_of(host: str, keys: str, warned: int) -> None:
    lines = Lines()
    settings = Settings(_env_file=None, host=host, api_keys=keys, local_nodes="[]", log_format="json")

    announce(settings, make_logger(lines, "INFO", "json"))

    warnings = [line["event"] for line in lines.all if line["level"] == "warning"]
    assert len([text for text in warnings if "API_KEYS is not set" in text and host in text]) == warned


# -- TLS


async def test_tls_is_served_with_the_operators_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in certificate.cert_chain_pems:
        part.write_to_path(tmp_path / "cert.pem", append=True)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with FakeOllama(models=["m"]) as node:
        async with GatewayProcess(
            tmp_path,
            verify=trusting,
            local_nodes=node_settings(node),
            ssl_certfile=tmp_path / "cert.pem",
            ssl_keyfile=tmp_path / "key.pem",
        ) as hearth:
            await hearth.ready()

            answer = read(await hearth.client.post("/v1/chat/completions", json={**CHAT, "stream": True}))

            assert answer.whole
            async with connected(hearth.url) as plain:
                plain.write(request(CHAT))
                assert await plain.closed()
            async with httpx.AsyncClient() as doubting:
                with pytest.raises(httpx.ConnectError, match="certificate"):
                    await doubting.get(hearth.url)
            await until(lambda: hearth.lines, "its first line has come through the pipe")
            assert hearth.lines[0]["url"] == hearth.url
            assert b"Traceback" not in hearth.stderr
