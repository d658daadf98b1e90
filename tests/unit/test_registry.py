"""What is known of nodes, and which of them serve a name."""

from __future__ import annotations

import pytest

from app.domain import ModelInfo, NodeSpec, NodeState
from app.providers.base import Health
from app.routing.breaker import Breaker
from app.routing.registry import Node, Registry
from tests.unit.nodes import kind, node

HEALTHY = Health(NodeState.HEALTHY)


def _names(registry: Registry, asked: str) -> dict[str, str]:
    return {found.node.name: found.model for found in registry.serving(asked)}


@pytest.mark.parametrize("asked", ["llama3.2", "llama3.2:latest", "LLaMA3.2", "library/llama3.2"])
def test_ollama_names_that_mean_the_same_find_the_nodes_own_name(asked: str) -> None:
    registry = Registry(
        [node("a", models=("Llama3.2:latest",), tags=True), node("b", models=("llama3.2:3b",), tags=True)]
    )

    assert _names(registry, asked) == {"a": "Llama3.2:latest"}


def test_each_node_is_asked_by_its_own_name() -> None:
    registry = Registry([node("a", models=("Qwen/Qwen3-8B",)), node("b", models=("qwen/qwen3-8b",))])

    assert _names(registry, "qwen/QWEN3-8B") == {"a": "Qwen/Qwen3-8B", "b": "qwen/qwen3-8b"}


def test_an_exact_name_wins_over_one_in_another_case() -> None:
    registry = Registry([node("a", models=("M", "m"))])

    assert _names(registry, "m") == {"a": "m"}
    assert _names(registry, "M") == {"a": "M"}


def test_other_kinds_do_not_have_ollamas_tags() -> None:
    registry = Registry([node("a", models=("llama3.2",))])

    assert _names(registry, "llama3.2:latest") == {}


def test_a_new_list_of_models_is_used_at_once() -> None:
    one = node("a", models=("old",), tags=True)
    registry = Registry([one])
    assert _names(registry, "new") == {}

    registry.observe(one, HEALTHY, [ModelInfo("new:latest")])

    assert _names(registry, "new") == {"a": "new:latest"}
    assert _names(registry, "old") == {}


def test_a_change_of_state_or_models_is_told() -> None:
    told: list[int] = []
    one = node("a")
    registry = Registry([one], lambda: told.append(1))

    registry.observe(one, HEALTHY, [ModelInfo("m")])
    assert told == []
    registry.observe(one, Health(NodeState.DOWN, "connection refused"))
    registry.observe(one, HEALTHY, [ModelInfo("m")])
    registry.observe(one, HEALTHY, [ModelInfo("n")])

    assert len(told) == 3


def test_names_from_clients_do_not_fill_the_memory() -> None:
    registry = Registry([node("a")])

    for number in range(5000):
        registry.serving(f"made-up-{number}")

    assert len(registry._serving) <= 1024


def test_a_node_of_unknown_kind_serves_nothing_yet() -> None:
    unknown = Node(NodeSpec("http://a", name="a", models=("m",)), Breaker(3, 15.0))
    registry = Registry([unknown])

    assert registry.serving("m") == ()
    assert registry.unlisted() == [unknown]
    registry.become(unknown, kind())
    assert [found.model for found in registry.serving("m")] == ["m"]


@pytest.mark.parametrize(
    ("models", "default", "wanted", "given"),
    [
        ((), None, None, None),
        ((), "gpt", None, "gpt"),
        ((), "gpt", "other", "other"),
        (("gpt*",), "gpt", "other", None),
        (("gpt*",), None, "gpt-5", "gpt-5"),
    ],
)
def test_a_cloud_target_is_asked_only_for_what_it_may_be(
    models: tuple[str, ...], default: str | None, wanted: str | None, given: str | None
) -> None:
    spec = NodeSpec("http://c", name="c", tier=1, models=models, default_model=default)

    assert Node(spec, Breaker(3, 15.0), kind()).cloud_name(wanted) == given


def test_a_node_that_is_back_is_tried_at_once() -> None:
    back = node("a")
    registry = Registry([back])
    registry.observe(back, Health(NodeState.DOWN, "refused"))
    for _ in range(3):
        permit = back.breaker.acquire()
        assert permit is not None
        permit.fail("refused")
    assert not back.breaker.would_admit()

    registry.observe(back, HEALTHY)

    assert back.breaker.would_admit()
