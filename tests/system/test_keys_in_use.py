"""Keys of the ledger at a gateway that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from app.ledger.keys import KeyBook
from app.ledger.store import Store
from tests.fakes import Behaviour, FakeCloud, FakeOllama
from tests.system.harness import Gateway, gateway, until

NO_KEY = {"authorization": ""}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


async def status(hearth: Gateway, headers: dict[str, str]) -> int:
    return (await hearth.chat(headers=headers)).status_code


async def test_keys_that_are_made_elsewhere_are_asked_for_within_three_seconds(database_url: str) -> None:
    async with FakeOllama(models=["m", "other"]) as node, gateway(node, database_url=database_url) as hearth:
        assert (await hearth.chat()).status_code == 200
        async with Store(database_url) as store:
            elsewhere = KeyBook(store)
            _, secret = await elsewhere.create("ada", {"routes": ["m"]})

            async def refused() -> bool:
                return await status(hearth, NO_KEY) == 401

            await until(refused, "a key is needed", seconds=3)
            assert await status(hearth, bearer(secret)) == 200
            assert await status(hearth, bearer(secret[:-1])) == 401

            elsewhere_refused = await hearth.chat(model="other", headers=bearer(secret))
            assert (elsewhere_refused.status_code, code(elsewhere_refused)) == (403, "route_not_allowed")

            await elsewhere.disable("ada")

            async def disabled() -> bool:
                return await status(hearth, bearer(secret)) == 401

            await until(disabled, "the key is refused", seconds=3)
        assert len({request.path for request in node.inferences}) == 1
        assert secret not in str(hearth.lines.all)


async def test_keys_outlive_the_gateway_and_api_keys_go_on_working(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"database_url": f"sqlite:///{tmp_path}/hearth.db", "api_keys": "from-the-settings"}
    async with FakeOllama(models=["m"]) as node:
        async with gateway(node, **settings) as hearth:
            made = (await hearth.client.post("/admin/keys", json={"name": "ada"})).json()
        async with gateway(node, **settings) as hearth:
            found = [await status(hearth, bearer(key)) for key in (made["secret"], "from-the-settings", "other")]

    assert found == [200, 200, 401]


async def test_a_local_only_key_never_reaches_the_cloud(tmp_path: Path) -> None:
    async with FakeOllama(models=["m"]) as node, FakeCloud() as cloud:
        settings: dict[str, Any] = {
            "database_url": f"sqlite:///{tmp_path}/hearth.db",
            "cloud_api_key": cloud.engine.api_key,
            "cloud_endpoint": cloud.url + "/v1",
            "cloud_model": "gpt-4o-mini",
            "admin_keys": "boss",
        }
        async with gateway(node, **settings) as hearth:
            keys = [
                (await hearth.client.post("/admin/keys", json=fields, headers=bearer("boss"))).json()["secret"]
                for fields in ({"name": "at home", "local_only": True}, {"name": "anywhere"})
            ]
            node.behave(Behaviour.STATUS_500)

            at_home = await hearth.chat(headers=bearer(keys[0]))
            assert at_home.status_code >= 500
            assert not cloud.inferences

            assert await status(hearth, bearer(keys[1])) == 200
            assert len(cloud.inferences) == 1
