"""What the dashboard's page asks of the gateway, and who may."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from tests.fakes import FakeCloud, FakeOllama
from tests.system.harness import Gateway, gateway, until

KEY = "an-admin-key"
BEARER = {"authorization": f"Bearer {KEY}"}
ELSEWHERE = [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}]


async def _session(hearth: Gateway) -> dict[str, Any]:
    return dict((await hearth.client.get("/dashboard/session")).json())


async def _log_in(hearth: Gateway, key: str = KEY) -> httpx.Response:
    return await hearth.client.post("/dashboard/session", json={"key": key})


async def test_the_page_has_a_strict_policy_and_is_not_sent_twice() -> None:
    async with gateway() as hearth:
        page = await hearth.client.get("/dashboard")
        again = await hearth.client.get("/dashboard", headers={"if-none-match": page.headers["etag"]})

        assert "default-src 'self';" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert (again.status_code, again.content) == (304, b"")


async def test_its_files_have_their_types_and_no_other_file_is_served() -> None:
    async with gateway() as hearth:
        types = {"app.js": "text/javascript", "style.css": "text/css", "icon.svg": "image/svg+xml"}
        for name, kind in types.items():
            assert (await hearth.client.get(f"/dashboard/{name}")).headers["content-type"].startswith(kind)
        for name in ("main.py", "..%2fmain.py", "%2e%2e/main.py", "nothing.js", "__init__.py"):
            assert (await hearth.client.get(f"/dashboard/{name}")).status_code == 404


async def test_people_find_it() -> None:
    async with gateway() as hearth:
        for path in ("/", "/dashboard/"):
            answer = await hearth.client.get(path, follow_redirects=True)

            assert answer.url.path == "/dashboard"
            assert "<title>Hearth</title>" in answer.text


async def test_events_are_snapshots_every_second() -> None:
    async with FakeOllama(["m"]) as node, gateway(node) as hearth:
        seen: list[dict[str, Any]] = []
        async with hearth.client.stream("GET", "/admin/events") as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    seen.append(orjson.loads(line.removeprefix("data: ")))
                    if len(seen) == 1:
                        await hearth.chat("m")
                    if seen[-1]["seq"]:
                        break

        assert seen[0]["whole"]
        assert seen[-1]["requests"][0]["node"] == "n0"
        assert seen[-1]["nodes"][0]["state"] == "healthy"


async def test_a_viewer_who_leaves_is_forgotten() -> None:
    async with gateway() as hearth:
        async with hearth.client.stream("GET", "/admin/events") as stream:
            await anext(stream.aiter_lines())
            assert _producers() == 1

        await until(lambda: _producers() == 0, "nothing is made when nobody looks")


def _producers() -> int:
    return sum(task.get_name() == "snapshots" for task in asyncio.all_tasks())


async def test_a_node_is_drained_and_enabled_by_name() -> None:
    async with FakeOllama(["m"]) as node, FakeCloud() as cloud:
        async with gateway(
            node, cloud_endpoint=f"{cloud.url}/v1", cloud_api_key="sk-cloud-key-for-tests-0001"
        ) as hearth:
            drained = await hearth.client.post("/admin/nodes/n0/drain")
            state = (await hearth.nodes())["n0"]["draining"]
            await hearth.client.post("/admin/nodes/n0/enable")
            (name,) = [name for name in await hearth.nodes() if name != "n0"]

            assert drained.json() == {"name": "n0", "draining": True, "in_flight": 0}
            assert state
            assert not (await hearth.nodes())["n0"]["draining"]
            for unknown in ("other", name):  # whether the cloud is used is a matter of settings
                assert (await hearth.client.post(f"/admin/nodes/{unknown}/drain")).status_code == 404


@pytest.mark.parametrize("headers", ELSEWHERE)
async def test_without_keys_pages_from_elsewhere_may_do_nothing(headers: dict[str, str]) -> None:
    async with FakeOllama(["m"]) as node, gateway(node) as hearth:
        for method, path in [
            ("POST", "/admin/nodes/n0/drain"),
            ("GET", "/admin/snapshot"),
            ("GET", "/admin/events"),
        ]:
            assert (await hearth.client.request(method, path, headers=headers)).status_code == 403
        told = (await hearth.client.get("/dashboard/session", headers=headers)).json()

        assert (told["may"], told["login"]) == (False, False)
        assert "ADMIN_KEYS" in told["reason"]
        assert (await _log_in(hearth)).status_code == 404


async def test_with_keys_a_session_is_as_good_as_a_key() -> None:
    async with FakeOllama(["m"]) as node, gateway(node, admin_keys=KEY) as hearth:
        before = await _session(hearth)
        refused = await _log_in(hearth, "wrong")
        nothing = await hearth.client.get("/admin/snapshot")
        done = await _log_in(hearth)

        assert (before["may"], before["login"]) == (False, True)
        assert (refused.status_code, nothing.status_code, done.status_code) == (401, 401, 204)
        assert "set-cookie" not in refused.headers
        assert await _session(hearth) == {"may": True, "login": False, "session": True, "reason": ""}
        assert (await hearth.client.get("/admin/snapshot")).status_code == 200
        assert (await hearth.client.post("/admin/nodes/n0/drain")).status_code == 200


@pytest.mark.parametrize("headers", ELSEWHERE)
async def test_a_session_is_of_no_use_to_other_pages(headers: dict[str, str]) -> None:
    async with FakeOllama(["m"]) as node, gateway(node, admin_keys=KEY) as hearth:
        await _log_in(hearth)

        assert (await hearth.client.post("/admin/nodes/n0/drain", headers=headers)).status_code == 401
        assert (await hearth.client.get("/admin/snapshot", headers=headers)).status_code == 401


async def test_a_session_opens_no_door_for_clients() -> None:
    async with FakeOllama(["m"]) as node, gateway(node, admin_keys=KEY, api_keys="client-key") as hearth:
        await _log_in(hearth)

        assert (await hearth.chat("m")).status_code == 401


async def test_logging_out_ends_the_session_even_for_who_kept_the_cookie() -> None:
    async with gateway(admin_keys=KEY) as hearth:
        await _log_in(hearth)
        kept = dict(hearth.client.cookies)
        await hearth.client.delete("/dashboard/session")
        hearth.client.cookies.update(kept)

        assert (await hearth.client.get("/admin/snapshot")).status_code == 401


async def test_what_can_be_no_key_is_refused() -> None:
    async with gateway(admin_keys=KEY) as hearth:
        for body in (b"", b"[]", b"{}", b'{"key": 1}', b'{"key": ""}'):
            assert (await hearth.client.post("/dashboard/session", content=body)).status_code == 400
        assert (await _log_in(hearth, "schlüssel\n🔥")).status_code == 401


async def test_a_wrong_key_beside_a_session_counts() -> None:
    async with gateway(admin_keys=KEY) as hearth:
        await _log_in(hearth)

        assert (await hearth.client.get("/admin/snapshot", headers={"x-api-key": "wrong"})).status_code == 401
        assert (await hearth.client.get("/admin/snapshot", headers=BEARER)).status_code == 200
