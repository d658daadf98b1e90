"""The table of kinds: what tells them apart, and how their probes are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from app.domain import LoadedModel, ModelInfo, NodeState
from app.providers import KINDS, detect_order
from app.providers.base import Kind

OPENAI_KINDS = sorted(name for name in KINDS if name != "ollama")


def listed(*rows: Mapping[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [dict(row) for row in rows]}


def row(owner: str, name: str = "m", **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1, "owned_by": owner, **more}


LLAMACPP_PROPS = {
    "default_generation_settings": {"params": {"seed": 4294967295}, "n_ctx": 2048},
    "total_slots": 4,
    "model_alias": "gemma",
    "is_sleeping": False,
}
TGI_INFO = {
    "model_id": "org/m",
    "max_total_tokens": 4096,
    "max_input_tokens": 4095,
    "router": "text-generation-router",
    "version": "3.3.6",
    "docker_label": "sha-1",
}
LMSTUDIO_MODELS = listed(
    {"id": "a", "type": "llm", "state": "loaded", "max_context_length": 32768, "loaded_context_length": 4096},
    {"id": "b", "type": "embeddings", "state": "not-loaded", "max_context_length": 2048},
)
SGLANG_INFO = {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1}

# What each kind of node answers to GET, as far as detection may ask; everything else is 404.
NODES: dict[str, dict[str, tuple[int, Any]]] = {
    "vllm": {"/v1/models": (200, listed(row("vllm"), row("vllm", "lora"))), "/version": (200, {"version": "0.32.0"})},
    "sglang": {"/v1/models": (200, listed(row("sglang"))), "/server_info": (200, SGLANG_INFO)},
    "lmdeploy": {"/v1/models": (200, listed(row("lmdeploy"))), "/health": (200, {"status": "healthy"})},
    "tgi": {"/v1/models": (200, listed(row("org/m", "org/m"))), "/info": (200, TGI_INFO)},
    "llamacpp": {
        "/v1/models": (200, listed(row("llamacpp"))),
        "/props": (503, {"error": {"message": "Loading model"}}),
    },
    "lmstudio": {"/v1/models": (200, listed(row("organization_owner"))), "/api/v0/models": (200, LMSTUDIO_MODELS)},
    "ollama": {
        "/v1/models": (200, listed(row("library"))),
        "/api/version": (200, {"version": "0.13.0"}),
        "/api/tags": (200, {"models": []}),
    },
    "transformers": {"/v1/models": (200, listed(row("Qwen", "Qwen/Qwen3-0.6B"))), "/health": (200, {"status": "ok"})},
    "generic": {"/v1/models": (200, listed(row("someone"), row("sglang", "other")))},
}


def recognised(answers: Mapping[str, tuple[int, Any]], otherwise: tuple[int, Any] = (404, None)) -> str | None:
    """The first kind all of whose signatures match, as the prober looks for it."""
    for kind in detect_order():
        if kind.signatures and all(sign.matches(*answers.get(sign.path, otherwise)) for sign in kind.signatures):
            return kind.name
    return None


@pytest.mark.parametrize("kind", NODES)
def test_node_is_recognised_by_what_only_its_kind_answers(kind: str) -> None:
    assert recognised(NODES[kind]) == kind


@pytest.mark.parametrize("kind", NODES)
def test_node_that_answers_every_path_is_recognised_all_the_same(kind: str) -> None:
    # LM Studio answers 200 everywhere, and so do nodes for practice and many proxies.
    everything: list[Any] = [{"status": "ok"}, {"error": "Unexpected endpoint"}, [], None, "ok"]
    for anything in everything:
        assert recognised(NODES[kind], (200, anything)) == kind


def test_node_that_imitates_several_kinds_is_taken_for_none_of_them_by_mistake() -> None:
    imitation = {
        "/v1/models": (200, listed(row("mock"))),
        "/version": (200, {"status": "ok"}),
        "/get_server_info": (200, SGLANG_INFO),
        "/server_info": (200, SGLANG_INFO),
    }

    assert recognised(imitation, (200, {"status": "ok"})) == "generic"


@pytest.mark.parametrize("answer", [(200, {}), (200, {"data": None}), (401, {"error": "key"}), (500, None), (200, "x")])
def test_node_that_lists_no_models_is_not_recognised(answer: tuple[int, Any]) -> None:
    assert recognised({}, answer) is None


def test_empty_list_says_nothing_of_the_kind() -> None:
    assert recognised({"/v1/models": (200, listed())}) == "generic"
    assert recognised({"/v1/models": (200, {"data": ["x", None]})}) == "generic"


def test_models_of_the_hub_are_known_by_their_account() -> None:
    for other in (row("m", "m"), row("Qwen", "org/m"), row("Qwen", "Qwen/m", max_model_len=1)):
        assert recognised({"/v1/models": (200, listed(row("Qwen", "Qwen/m"), other))}) == "generic"


def test_every_kind_can_be_recognised_but_the_cloud() -> None:
    assert {kind.name for kind in detect_order()} == KINDS.keys() - {"cloud"}
    assert all(kind.signatures for kind in detect_order())
    assert detect_order()[-1] is KINDS["generic"]


def test_the_table_is_keyed_by_name() -> None:
    assert all(name == kind.name and kind.title for name, kind in KINDS.items())
    assert [name for name, kind in KINDS.items() if kind.cloud] == ["cloud"]


# -- health


@pytest.mark.parametrize("kind", OPENAI_KINDS)
def test_good_answer_to_the_health_probe_is_healthy(kind: str) -> None:
    probe = KINDS[kind].probe
    document = listed(row("x")) if probe.health_path == "/v1/models" else None

    assert probe.health(200, document).state is NodeState.HEALTHY


@pytest.mark.parametrize("kind", OPENAI_KINDS)
@pytest.mark.parametrize("status", [401, 403])
def test_refused_key_is_down_and_says_so(kind: str, status: int) -> None:
    health = KINDS[kind].probe.health(status, {"error": "sk-abc"})

    assert health.state is NodeState.DOWN
    assert "key" in health.reason
    assert "sk-" not in health.reason


@pytest.mark.parametrize("kind", OPENAI_KINDS)
@pytest.mark.parametrize("status", [500, 502, 302])
def test_bad_answer_to_the_health_probe_is_down_and_says_why(kind: str, status: int) -> None:
    health = KINDS[kind].probe.health(status, None)

    assert health.state is NodeState.DOWN
    assert str(status) in health.reason


@pytest.mark.parametrize(
    ("status", "document", "state"),
    [
        (200, {"status": "healthy"}, NodeState.HEALTHY),
        (200, {"status": "sleeping", "message": "x"}, NodeState.SLEEPING),
        (503, {"status": "initializing"}, NodeState.LOADING),
        (503, {"status": "unhealthy"}, NodeState.DOWN),
        (200, None, NodeState.HEALTHY),
        (200, {"status": 7}, NodeState.HEALTHY),
        (503, None, NodeState.DOWN),
        (500, {"status": "healthy"}, NodeState.DOWN),
    ],
)
def test_lmdeploy_tells_its_state(status: int, document: Any, state: NodeState) -> None:
    assert KINDS["lmdeploy"].probe.health(status, document).state is state


def test_llamacpp_that_loads_its_model_is_loading() -> None:
    loading = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}

    assert KINDS["llamacpp"].probe.health(503, loading).state is NodeState.LOADING


@pytest.mark.parametrize("kind", ["vllm", "tgi"])
def test_engine_that_calls_itself_unhealthy_is_down(kind: str) -> None:
    assert KINDS[kind].probe.health(503, None).state is NodeState.DOWN


@pytest.mark.parametrize("kind", ["generic", "cloud", "lmstudio"])
@pytest.mark.parametrize("status", [404, 405])
def test_node_without_a_list_of_models_is_reachable(kind: str, status: int) -> None:
    assert KINDS[kind].probe.health(status, None).state is NodeState.HEALTHY


@pytest.mark.parametrize("document", [None, {"error": "Unexpected endpoint"}, {"data": "x"}])
def test_something_else_in_place_of_the_list_is_down(document: Any) -> None:
    assert KINDS["generic"].probe.health(200, document).state is NodeState.DOWN


def test_old_transformers_without_a_health_check_is_healthy() -> None:
    assert KINDS["transformers"].probe.health(404, {"detail": "Not Found"}).state is NodeState.HEALTHY


# -- models


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({"max_model_len": 4096}, 4096),
        ({"meta": {"n_ctx": 2048, "n_ctx_train": 32768}}, 2048),
        ({"meta": None, "context_window": 8192}, 8192),
        ({"context_length": 8192, "max_context_length": 1}, 8192),
        ({"max_model_len": 0, "context_length": True}, None),
        ({"max_model_len": None}, None),
        ({}, None),
    ],
)
def test_context_length_is_read_wherever_a_node_puts_it(more: dict[str, Any], size: int | None) -> None:
    assert KINDS["vllm"].probe.models(listed(row("vllm", **more))) == [ModelInfo("m", context_length=size)]


def test_models_are_listed_once_and_rows_without_a_name_are_skipped() -> None:
    document = listed(row("x", "a"), row("x", "b"), row("x", "a"), {"id": None}, {"id": ""}, {})

    assert [model.name for model in KINDS["generic"].probe.models(document)] == ["a", "b"]


def test_list_without_an_object_around_it_is_read_too() -> None:
    assert KINDS["cloud"].probe.models([{"id": "a"}, "x"]) == [ModelInfo("a")]


@pytest.mark.parametrize("kind", OPENAI_KINDS)
@pytest.mark.parametrize("document", [None, {}, {"data": None}, "x", {"error": "x"}])
def test_other_document_is_no_list_of_models(kind: str, document: Any) -> None:
    with pytest.raises(ValueError, match="no "):
        KINDS[kind].probe.models(document)


def test_tgi_serves_the_one_model_of_its_info() -> None:
    assert KINDS["tgi"].probe.models(TGI_INFO) == [ModelInfo("org/m", context_length=4096)]


# -- what is in memory


def loaded(kind: Kind, document: Any) -> list[LoadedModel]:
    assert kind.probe.loaded is not None
    return kind.probe.loaded(document)


def test_llamacpp_that_sleeps_has_no_model_in_memory() -> None:
    llamacpp = KINDS["llamacpp"]

    assert loaded(llamacpp, LLAMACPP_PROPS) == [LoadedModel("gemma", context_length=2048)]
    assert loaded(llamacpp, {**LLAMACPP_PROPS, "is_sleeping": True}) == []


@pytest.mark.parametrize("document", [None, {}, {"model_alias": None}, {**LLAMACPP_PROPS, "role": "router"}])
def test_llamacpp_in_front_of_others_does_not_know_what_they_have_in_memory(document: Any) -> None:
    with pytest.raises(ValueError, match="one model"):
        loaded(KINDS["llamacpp"], document)


def test_lmstudio_tells_what_is_in_memory() -> None:
    lmstudio = KINDS["lmstudio"]

    assert loaded(lmstudio, LMSTUDIO_MODELS) == [LoadedModel("a", context_length=4096)]
    with pytest.raises(ValueError, match="state"):
        loaded(lmstudio, {"error": "Unexpected endpoint or method. (GET /api/v0/models)"})


# -- probes cost nothing


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_probes_ask_for_nothing_that_makes_an_engine_work(kind: Kind) -> None:
    paths = {kind.probe.health_path, kind.probe.models_path, *(sign.path for sign in kind.signatures)}

    assert not any("generate" in path or "completion" in path for path in paths)
    # An idle SGLang generates a token for every GET /health.
    assert kind.name != "sglang" or "/health" not in paths
