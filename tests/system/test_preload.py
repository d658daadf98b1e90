"""Models that are in memory before anybody asks for them."""

from __future__ import annotations

import pytest

from tests.fakes import Behaviour, FakeOllama
from tests.system.harness import gateway, node_settings, until


@pytest.mark.parametrize("strategy", ["shortest_expected_delay", "round_robin"])
async def test_a_model_is_loaded_at_the_start_and_on_one_node(strategy: str) -> None:
    async with FakeOllama(models=["m", "n"]) as one, FakeOllama(models=["m", "n"]) as two:
        async with gateway(one, two, preload="m", lb_strategy=strategy, health_check_interval=0.05):
            await until(lambda: one.engine.loads or two.engine.loads, "it is loaded")
            seen = len(one.requests) + len(two.requests)
            await until(lambda: len(one.requests) + len(two.requests) > seen + 12, "all are probed again")

            assert len(one.engine.loads) + len(two.engine.loads) == 1
            assert {*one.engine.loaded, *two.engine.loaded} == {"m:latest"}


async def test_a_node_that_comes_back_gets_its_model_again() -> None:
    async with FakeOllama(models=["m", "n"]) as node:
        settings = {"local_nodes": node_settings(node, preload=["n"]), "health_check_interval": 0.05}
        async with gateway(**settings) as hearth:
            await until(lambda: node.engine.loaded, "it is loaded")
            node.behave(Behaviour.REFUSE)
            await hearth.state("n0", "down")
            node.engine.loaded.clear()
            node.recover()

            await until(lambda: node.engine.loaded, "it is loaded again")

            assert [*node.engine.loaded] == ["n:latest"]
            assert (await hearth.nodes())["n0"]["preload"] == ["n"]


async def test_a_load_that_fails_is_told_once() -> None:
    async with FakeOllama(models=["m"]) as node:
        node.behave(Behaviour.STATUS_500)
        async with gateway(node, preload="m", health_check_interval=0.05) as hearth:

            def told() -> list[object]:
                return [line["model"] for line in hearth.lines.all if line["event"] == "model not loaded"]

            await until(told, "it is told")
            seen = len(node.requests)
            await until(lambda: len(node.requests) > seen + 9, "it is probed again")

            assert told() == ["m:latest"]
