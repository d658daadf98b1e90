"""Several replicas with one Valkey: what one learns, all know soon."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import redis.asyncio

from app.routing.registry import Node
from app.sharing.counts import places
from app.sharing.fleet import CHANNEL
from demo.httpd import Exchange
from tests.fakes import Behaviour, FakeNode, FakeOllama, FakeVLLM, On
from tests.servers import Valkey
from tests.system.harness import Gateway, gateway, until
from tests.system.registration import HeldNode, add, added, in_state, kept, status
from tests.system.scripted import DONE, SSE, ScriptedNode, chunk
from tests.unit.nodes import node as plain_node

SOON_SECONDS = 1.0
CONVERGED_SECONDS = 5.0


@asynccontextmanager
async def replicas(count: int, url: str, *nodes: FakeNode[Any], **settings: Any) -> AsyncIterator[list[Gateway]]:
    """So many gateways that know of each other. They ask nodes in a way that a test can rely on."""
    settings.setdefault("lb_strategy", "least_connections")
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(gateway(*nodes, redis_url=url, **settings)) for _ in range(count)]
        await acquainted(found)
        yield found


async def acquainted(found: list[Gateway]) -> None:
    """Returns once all have heard of each other."""
    for each in found:
        await until(lambda each=each: len(each.app.state.fleet.peers) == len(found) - 1, "all have heard of each other")  # type: ignore[misc]


async def everywhere(
    found: list[Gateway], holds: Callable[[Gateway], Awaitable[bool]], what: str, seconds: float = SOON_SECONDS
) -> None:
    async def all_hold() -> bool:
        return all([await holds(each) for each in found])

    await until(all_hold, f"everywhere: {what}", seconds)


async def urls(hearth: Gateway) -> set[str]:
    return set(await status(hearth.client))


def knows(*wanted: str) -> Callable[[Gateway], Awaitable[bool]]:
    async def exactly(hearth: Gateway) -> bool:
        return await urls(hearth) == set(wanted)

    return exactly


def view(name: str, field: str, wanted: Any) -> Callable[[Gateway], Awaitable[bool]]:
    async def so(hearth: Gateway) -> bool:
        node = (await hearth.nodes()).get(name, {})
        return bool((node["breaker"]["state"] if field == "breaker" else node.get(field)) == wanted)

    return so


# -- run-time nodes


async def test_a_node_that_registers_with_one_is_served_and_removed_by_all(valkey_url: str) -> None:
    async with FakeVLLM(models=["m"]) as node, replicas(3, valkey_url) as found:
        await added(found[0].client, node.url, kind="vllm", models=["m"], max_concurrency=7)
        await everywhere(found, knows(node.url), "it is there")
        for each in found:
            await in_state(each.client, node.url, "healthy")
            assert (await each.chat()).status_code == 200
            assert [shown["max_concurrency"] for shown in (await each.nodes()).values()] == [7]

        await found[2].client.post("/nodes/remove", json={"url": node.url})

        await everywhere(found, knows(), "it is gone")


async def test_draining_begins_and_ends_on_all(valkey_url: str) -> None:
    async with FakeOllama(models=["m"]) as node, replicas(2, valkey_url, node) as found:
        one, two = found
        await one.client.post("/nodes/drain", json={"url": node.url})
        await everywhere(found, view("n0", "draining", True), "it drains")
        assert (await two.chat()).status_code == 503

        await two.client.post("/nodes/drain", json={"url": node.url, "drain": False})

        await everywhere(found, view("n0", "draining", False), "it works again")


async def test_drained_means_that_no_replica_has_requests_on_it(valkey_url: str) -> None:
    async with HeldNode() as node, replicas(2, valkey_url) as found:
        one, two = found
        await added(one.client, node.url, kind="vllm", models=["m"])
        await in_state(two.client, node.url, "healthy")
        running = asyncio.create_task(two.chat(stream=True))

        async def drained() -> int:
            return (await one.client.post("/nodes/drain", json={"url": node.url})).status_code

        async def seen() -> bool:
            return (await drained()) == 202

        await until(seen, "the other one's request counts")
        node.release.set()
        await running

        async def done() -> bool:
            return (await drained()) == 200

        await until(done, "it is drained")


async def test_a_new_replica_learns_what_the_others_know(valkey_url: str) -> None:
    async with (
        FakeOllama(models=["m"]) as declared,
        FakeVLLM(models=["m"]) as late,
        replicas(1, valkey_url, declared) as found,
    ):
        await added(found[0].client, late.url, kind="vllm", models=["m"])
        await found[0].client.post("/nodes/drain", json={"url": late.url})
        await found[0].client.post("/nodes/remove", json={"url": declared.url})
        await until(lambda: stored(valkey_url, 2), "both are written down")

        async with gateway(declared, redis_url=valkey_url) as new:
            shown = await status(new.client)

            assert set(shown) == {late.url}
            assert shown[late.url]["state"] == "draining"


async def stored(url: str, count: int) -> bool:
    async with redis.asyncio.Redis.from_url(url) as client:
        return bool(await client.hlen("{hearth}:nodes") == count)


async def test_what_was_done_to_a_node_of_the_settings_ends_with_the_last_replica(valkey_url: str) -> None:
    async with FakeOllama(models=["m"]) as declared, FakeVLLM(models=["m"]) as late:
        async with replicas(1, valkey_url, declared) as found:
            await added(found[0].client, late.url, kind="vllm", models=["m"])
            await found[0].client.post("/nodes/remove", json={"url": declared.url})
            await until(lambda: stored(valkey_url, 2), "both are written down")

        async with gateway(declared, redis_url=valkey_url) as again:
            assert await urls(again) == {declared.url, late.url}


async def test_a_node_that_registers_again_is_a_new_one_everywhere(valkey_url: str) -> None:
    async with FakeVLLM(models=["m"]) as node, replicas(2, valkey_url, breaker_fail_max=1) as found:
        await added(found[0].client, node.url, name="n", kind="vllm", models=["m"])
        await everywhere(found, knows(node.url), "it is there")
        for each in found:
            await in_state(each.client, node.url, "healthy")
        node.behave(Behaviour.STATUS_500, on=On.INFERENCE)
        await found[0].chat()
        await everywhere(found, view("n", "breaker", "open"), "it is left alone")
        node.behave(Behaviour.OK)

        await add(found[1].client, node.url, name="n", kind="vllm", models=["m"])

        await everywhere(found, view("n", "breaker", "closed"), "it begins anew")
        await everywhere(found, view("n", "state", "healthy"), "it is up", CONVERGED_SECONDS)
        await asyncio.gather(*(each.chat() for each in found))
        await everywhere(found, view("n", "breaker", "closed"), "it stays so")


async def test_nodes_of_the_file_reach_all_and_the_file_gets_those_of_others(valkey_url: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with FakeVLLM(models=["m"]) as old, FakeVLLM(models=["m"]) as new:
        path.write_text(json.dumps({"version": 1, "nodes": [{"url": old.url, "kind": "vllm", "latencies": [0.5]}]}))
        async with (
            gateway(redis_url=valkey_url, nodes_file=str(path)) as keeping,
            gateway(redis_url=valkey_url) as other,
        ):
            await everywhere([keeping, other], knows(old.url), "the file's node is there")
            assert (await status(keeping.client))[old.url]["latency"] == [0.5]

            await added(other.client, new.url, kind="vllm", models=["m"])

            await until(lambda: set(kept(path)) == {old.url, new.url}, "the file has both")


async def test_a_node_that_was_removed_is_not_brought_back_by_an_old_file(valkey_url: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with FakeVLLM(models=["m"]) as node, replicas(1, valkey_url) as found:
        await added(found[0].client, node.url, kind="vllm", models=["m"])
        await found[0].client.post("/nodes/remove", json={"url": node.url})
        await until(lambda: stored(valkey_url, 1), "the removal is written down")
        path.write_text(json.dumps({"version": 1, "nodes": [{"url": node.url, "kind": "vllm"}]}))

        async with gateway(redis_url=valkey_url, nodes_file=str(path)) as late:
            assert await urls(late) == set()


async def test_an_entry_that_another_version_wrote_is_left_as_it_is(valkey_url: str) -> None:
    """Or all replicas would write, and hear of what they wrote, without end."""
    async with FakeVLLM(models=["m"]) as node, replicas(2, valkey_url) as found:
        await added(found[0].client, node.url, kind="vllm", models=["m"])
        await everywhere(found, knows(node.url), "it is there")
        async with redis.asyncio.Redis.from_url(valkey_url) as client:
            [(url, data)] = (await client.hgetall("{hearth}:nodes")).items()
            entry = json.loads(data)
            newer = json.dumps({**entry, "at": entry["at"] + 60_000, "unknown": 1}).encode()
            await client.hset("{hearth}:nodes", url, newer)
            await client.set("{hearth}:nodes:version", "newer 1")
            for each in found:
                await each.app.state.fleet._roster.read()

            written = [await each.app.state.fleet._roster.write() for each in found]

            assert written == [False, False]
            assert await client.get("{hearth}:nodes:version") == b"newer 1"
            assert await client.hget("{hearth}:nodes", url) == newer


# -- requests in flight


async def test_a_node_is_full_when_all_replicas_together_fill_it(valkey_url: str) -> None:
    async with HeldNode() as node:
        nodes = json.dumps([{"url": node.url, "kind": "vllm", "name": "n0", "models": ["m"], "max_concurrency": 2}])
        async with replicas(2, valkey_url, local_nodes=nodes) as found:
            one, two = found
            for each in found:
                await each.state("n0", "healthy")
            first = [asyncio.create_task(one.chat(stream=True)) for _ in range(2)]
            await everywhere([two], view("n0", "others_in_flight", 2), "it is full")
            waits = asyncio.create_task(two.chat(stream=True))
            await until(lambda: waiting(two), "it waits")
            assert node.open == 2

            node.release.set()

            assert [answer.status_code for answer in await asyncio.gather(*first, waits)] == [200] * 3
            assert len(node.inferences) == 3
            await everywhere(found, view("n0", "others_in_flight", 0), "nothing is left")


async def test_a_node_that_one_replica_tries_out_is_no_idle_one_to_another(valkey_url: str) -> None:
    async with FakeOllama(models=["m"]) as first, FakeOllama(models=["m"], load_seconds=1.0) as second:
        local_nodes = json.dumps(
            [
                {"url": node.url, "kind": "ollama", "name": name, "weight": weight}
                for node, name, weight in ((first, "best", 2), (second, "empty", 1))
            ]
        )
        settings = {"lb_strategy": "shortest_expected_delay", "health_check_interval": 0.1}
        async with replicas(2, valkey_url, local_nodes=local_nodes, **settings) as found:
            one, two = found
            for name in ("best", "empty"):
                await one.state(name, "healthy")

            assert (await one.chat(model="m")).status_code == 200

            await everywhere([two], view("empty", "others_in_flight", 1), "the other one knows")
            assert not second.engine.loads
            await everywhere([two], view("empty", "others_in_flight", 0), "the trial is over", CONVERGED_SECONDS)
            assert second.engine.loads


async def waiting(hearth: Gateway) -> bool:
    text = (await hearth.client.get("/metrics")).text
    return any(line.startswith("hearth_waiting") and line.endswith(" 1.0") for line in text.splitlines())


async def test_a_replica_that_falls_silent_is_forgotten_and_those_who_wait_go_on(valkey_url: str) -> None:
    async with FakeVLLM(models=["m"]) as node:
        nodes = json.dumps([{"url": node.url, "kind": "vllm", "name": "n0", "models": ["m"], "max_concurrency": 2}])
        async with replicas(1, valkey_url, local_nodes=nodes) as found:
            await found[0].state("n0", "healthy")
            place = next(iter(places([plain_node("n0")]))).replace("http://n0:80", node.url)
            async with redis.asyncio.Redis.from_url(valkey_url) as client:
                await client.publish(CHANNEL, json.dumps(["killed", "all", [{place: 2}, {}]]))
            await everywhere(found, view("n0", "others_in_flight", 2), "it is full")

            answer = await found[0].chat()

            assert answer.status_code == 200
            assert found[0].app.state.fleet.peers == set()


async def test_words_that_nobody_understands_are_told_once_and_do_no_harm(valkey_url: str) -> None:
    async with FakeOllama(models=["m"]) as node, replicas(2, valkey_url, node) as found:
        async with redis.asyncio.Redis.from_url(valkey_url) as client:
            for words in (b"\xff", b"[]", b"7", b'["x","all",5]', b'["x","counts",[1]]', b'["x","breakers",{"n":3}]'):
                await client.publish(CHANNEL, words)
            await client.hset("{hearth}:nodes", mapping={"x": "rubbish", "y": '{"url": 5}'})

            await added(found[0].client, (await urls(found[0])).pop(), kind="ollama", name="again")

        await everywhere(found, view("again", "state", "healthy"), "they still talk")
        troubles = [line for line in found[0].lines.all if "understood" in line["event"]]
        assert len(troubles) == 1


# -- breakers


async def test_a_node_that_fails_for_one_is_left_alone_by_all_until_it_works_for_one(valkey_url: str) -> None:
    settings: Any = {"breaker_fail_max": 2, "breaker_reset_timeout": 0.5, "lb_strategy": "round_robin"}
    async with FakeVLLM(models=["m"]) as bad, FakeVLLM(models=["m"]) as good:
        async with replicas(3, valkey_url, bad, good, **settings) as found:
            bad.behave(Behaviour.STATUS_500, on=On.INFERENCE)
            for _ in range(4):
                assert (await found[0].chat()).status_code == 200
            await everywhere(found, view("n0", "breaker", "open"), "it is left alone")
            assert (await found[1].nodes())["n0"]["breaker"]["reason"]
            bad.behave(Behaviour.OK)

            async def mended() -> bool:
                await found[1].chat()
                return await view("n0", "breaker", "closed")(found[1])

            await until(mended, "one has found it to work")
            await everywhere(found, view("n0", "breaker", "closed"), "all ask it again")
            changes = [line for each in found for line in each.lines.all if line["event"] == "breaker changed"]
            assert Counter(line["state"] for line in changes)["open"] == 3


# -- how evenly replicas choose


class BusyNode(ScriptedNode):
    """Takes a random time for each answer."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__(self._answer)
        self._seconds = seconds

    async def _answer(self, exchange: Exchange) -> None:
        await asyncio.sleep(self._seconds())
        exchange.head(200, SSE)
        exchange.body(chunk("a") + chunk(finish="stop") + DONE)
        exchange.end()


async def mean_spread(found: list[Gateway], nodes: list[BusyNode], count: int, seconds: float) -> float:
    """Of so many requests at any time, dealt out over the replicas: most less fewest on any node, on average."""
    over = asyncio.Event()

    async def ask(hearth: Gateway) -> None:
        while not over.is_set():
            assert (await hearth.chat(stream=True)).status_code == 200

    asking = [asyncio.create_task(ask(found[number % len(found)])) for number in range(count)]
    await until(lambda: sum(node.open for node in nodes) > 0.8 * count, "the load is there")
    samples = []
    for _ in range(int(seconds / 0.01)):
        await asyncio.sleep(0.01)
        samples.append(max(node.open for node in nodes) - min(node.open for node in nodes))
    over.set()
    await asyncio.gather(*asking)
    return fmean(samples)


async def test_replicas_spread_requests_about_as_evenly_as_one_does(valkey_url: str) -> None:
    lot = random.Random(7)
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(BusyNode(lambda: lot.uniform(0.3, 0.9))) for _ in range(4)]
        told = [
            {"url": node.url, "kind": "vllm", "name": f"n{number}", "models": ["m"]}
            for number, node in enumerate(nodes)
        ]
        settings: Any = {"local_nodes": json.dumps(told), "lb_strategy": "least_connections"}
        async with gateway(**settings) as alone, replicas(2, valkey_url, **settings) as found:
            await ready([alone, *found])
            single = await mean_spread([alone], nodes, 20, 2.0)

            spread = await mean_spread(found, nodes, 20, 2.0)

        assert spread <= single + 1


async def test_each_replica_begins_with_nodes_in_an_order_of_its_own(valkey_url: str) -> None:
    """Or the first request of every one would meet at the same node."""
    told = json.dumps([{"url": f"http://127.0.0.1:{port}", "kind": "vllm"} for port in range(1, 40)])
    async with replicas(2, valkey_url, local_nodes=told) as found:
        orders = [[node.name for node in sorted(each.app.state.fleet._nodes, key=_picked)] for each in found]

    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def _picked(node: Node) -> int:
    return node.picked


async def ready(found: list[Gateway]) -> None:
    for each in found:
        for name in await each.nodes():
            await each.state(name, "healthy")


# -- who is alive


async def test_the_living_are_known_once_signs_of_life_were_kept_for_long_enough(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sharing.presence._LIFETIME_MS", 1500)
    async with replicas(2, valkey_url) as found:
        one, two = (each.app.state.fleet for each in found)
        assert await one.alive() is None

        async def both() -> bool:
            return bool(await one.alive() == {one.instance_id, two.instance_id})

        await until(both, "both are alive")
    async with redis.asyncio.Redis.from_url(valkey_url) as client:
        assert await client.zcard("{hearth}:alive") == 0


# -- without the server


async def test_a_server_that_goes_and_comes_back_costs_no_local_request_and_state_converges(valkey: Valkey) -> None:
    async with (
        FakeVLLM(models=["m"]) as bad,
        FakeVLLM(models=["m"]) as good,
        FakeVLLM(models=["late"]) as late,
        replicas(2, valkey.url, bad, good, breaker_fail_max=1, breaker_reset_timeout=60) as found,
    ):
        one, two = found
        async with load(found) as answers:
            await asyncio.to_thread(valkey.kill)
            for each in found:
                await until(lambda each=each: alone(each) == 1, "it says that it is alone")  # type: ignore[misc]
            await added(one.client, late.url, kind="vllm", models=["late"])
            bad.behave(Behaviour.STATUS_500, on=On.INFERENCE)
            await until_open(one)
            assert await urls(two) == {bad.url, good.url}
            await until(lambda: not one.app.state.fleet.peers, "the other is forgotten")
            assert (await one.nodes())["n1"]["others_in_flight"] == 0
            assert await one.app.state.fleet.alive() is None

            await asyncio.to_thread(valkey.start)

            await everywhere(found, knows(bad.url, good.url, late.url), "all nodes", CONVERGED_SECONDS)
            await everywhere(found, view("n0", "breaker", "open"), "breakers", CONVERGED_SECONDS)
            await acquainted(found)
        assert len(answers) > 20
        assert set(answers) == {200}
        assert [alone(each) for each in found] == [1, 1]


def alone(hearth: Gateway) -> int:
    return sum("goes on alone" in line["event"] for line in hearth.lines.all)


async def until_open(hearth: Gateway) -> None:
    await everywhere([hearth], view("n0", "breaker", "open"), "it is left alone")


@asynccontextmanager
async def load(found: list[Gateway]) -> AsyncIterator[list[int]]:
    """Requests to each gateway, one after another, until the block ends; gives their statuses."""
    answers: list[int] = []
    over = asyncio.Event()

    async def ask(hearth: Gateway) -> None:
        while not over.is_set():
            answers.append((await hearth.chat()).status_code)
            await asyncio.sleep(0.02)

    asking = [asyncio.create_task(ask(each)) for each in found]
    try:
        yield answers
    finally:
        over.set()
        await asyncio.gather(*asking)


async def test_it_starts_without_the_server_and_joins_when_that_comes(valkey: Valkey) -> None:
    await asyncio.to_thread(valkey.stop)
    async with FakeOllama(models=["m"]) as node, FakeVLLM(models=["late"]) as late:
        async with gateway(node, redis_url=valkey.url) as one, gateway(node, redis_url=valkey.url) as two:
            await added(one.client, late.url, kind="vllm", models=["late"])
            assert (await one.chat()).status_code == 200
            assert await urls(two) == {node.url}

            await asyncio.to_thread(valkey.start)

            await everywhere([one, two], knows(node.url, late.url), "both nodes", CONVERGED_SECONDS)
            await acquainted([one, two])
