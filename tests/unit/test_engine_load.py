"""What engines say of their own load, and when they are asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import EngineLoad, LoadedModel
from app.gauges import Gauges, Unanswered
from app.providers import KINDS
from app.providers.base import Gauge
from app.routing.registry import Node
from tests.unit.nodes import node as made

GAUGES = [gauge for kind in KINDS.values() for gauge in kind.probe.gauges]


def gauge(kind: str, path: str) -> Gauge:
    return next(gauge for gauge in KINDS[kind].probe.gauges if gauge.path == path)


VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a{b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a{b} c"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a{b} c"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="a{b} c"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a{b} c"} 0.5
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 12.0
"""


@pytest.mark.parametrize(
    ("kind", "path", "body", "load"),
    [
        ("vllm", "/metrics", VLLM, EngineLoad(5, 7, cache_used=0.5)),
        (
            "vllm",
            "/metrics",
            b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.75\n",
            EngineLoad(1, 0, cache_used=0.75),
        ),
        (
            "sglang",
            "/metrics",
            b'sglang:num_running_reqs{model_name="m"} 4.0\nsglang:num_queue_reqs{model_name="m"} 2.0\n'
            b'sglang:token_usage{model_name="m"} 0.28\n',
            EngineLoad(4, 2, cache_used=0.28),
        ),
        ("tgi", "/metrics", b"tgi_batch_current_size 6\ntgi_queue_size 1\n", EngineLoad(6, 1)),
        (
            "lmdeploy",
            "/metrics",
            b'lmdeploy:num_requests_running{model_name="m"} 2.0\nlmdeploy:num_requests_waiting{model_name="m"} 1.0\n'
            b'lmdeploy:gpu_cache_usage_perc{model_name="m"} 0.1\n',
            EngineLoad(2, 1, cache_used=0.1),
        ),
        ("llamacpp", "/metrics", b"llamacpp:requests_processing 4\nllamacpp:requests_deferred 3\n", EngineLoad(4, 3)),
        ("llamacpp", "/props", b'{"total_slots": 4, "model_alias": "m"}', EngineLoad(slots=4)),
        (
            "llamacpp",
            "/slots",
            b'[{"id": 0, "is_processing": true, "prompt": "secret"}, {"id": 1, "is_processing": false}]',
            EngineLoad(running=1, slots=2),
        ),
        ("sglang", "/server_info", b'{"max_running_requests": 64, "internal_states": []}', EngineLoad(slots=64)),
        (
            "sglang",
            "/get_server_info",
            b'{"max_running_requests": null, "internal_states": [{"effective_max_running_requests_per_dp": 40}, '
            b'{"effective_max_running_requests_per_dp": 40}]}',
            EngineLoad(slots=80),
        ),
    ],
)
def test_an_engine_is_understood(kind: str, path: str, body: bytes, load: EngineLoad) -> None:
    assert gauge(kind, path).read(body) == load


NONSENSE = [
    b"",
    b"<html>hello</html>",
    b"null",
    b"[]",
    b'[{"id": 0}, 1]',
    b'{"total_slots": true}',
    b'{"total_slots": -1}',
    b'{"internal_states": [1], "max_running_requests": "many"}',
    *(
        f"{name} {value}\n".encode()
        for name in (
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
            "tgi_batch_current_size",
            "lmdeploy:num_requests_running",
            "llamacpp:requests_processing",
        )
        for value in ("NaN", "+Inf", "-1", "1e300", "many")
    ),
]


def understands(each: Gauge, body: bytes) -> bool:
    try:
        each.read(body)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("body", NONSENSE)
def test_nonsense_says_nothing(body: bytes) -> None:
    assert not [each.path for each in GAUGES if understands(each, body)]


@given(st.binary(max_size=200))
def test_no_answer_does_harm(body: bytes) -> None:
    for each in GAUGES:
        try:
            each.read(body)
        except ValueError:
            continue


# -- when they are asked


class Asked:
    """Answers the questions to one llama.cpp node, and counts them. A path that is not in `pages` is not there."""

    def __init__(self, **pages: Any) -> None:
        self.pages = {f"/{name}": page for name, page in pages.items()}
        self.paths: list[str] = []
        self.now = 1000.0
        self.node: Node = made(of_kind=KINDS["llamacpp"])
        self.node.loaded = {"m": LoadedModel("m")}
        self.gauges = Gauges(1.0, clock=lambda: self.now)

    async def get(self, path: str, at_most: int) -> tuple[int, bytes]:
        self.paths.append(path)
        if path not in self.pages:
            return 501, b"{}"
        page = self.pages[path]
        if isinstance(page, Exception):
            raise page
        return 200, page if isinstance(page, bytes) else json.dumps(page).encode()

    async def read(self) -> EngineLoad | None:
        self.paths.clear()
        return await self.gauges.read(self.node, self.get)


SLOTS = [{"is_processing": True}, {"is_processing": False}]
PROCESSING = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"


async def test_what_does_not_change_is_asked_once() -> None:
    asked = Asked(props={"total_slots": 4})

    loads = [await asked.read() for _ in range(3)]

    assert loads == [EngineLoad(slots=4)] * 3
    assert asked.paths == []


async def test_it_is_asked_again_when_the_node_comes_back() -> None:
    asked = Asked(props={"total_slots": 4})
    await asked.read()
    asked.pages["/props"] = {"total_slots": 8}
    asked.node.incarnation += 1

    assert await asked.read() == EngineLoad(slots=8)


async def test_an_engine_that_would_be_kept_awake_is_left_alone_while_nobody_uses_it() -> None:
    asked = Asked(props={"total_slots": 2}, metrics=PROCESSING, slots=SLOTS)

    idle, _ = await asked.read(), asked.paths
    asked.node.picked = 1  # it has got a request
    in_use = await asked.read()
    asked.now += 61
    later = await asked.read()

    assert (idle, in_use, later) == (EngineLoad(slots=2), EngineLoad(2, 1, 2), EngineLoad(slots=2))


async def test_an_engine_that_sleeps_is_not_woken() -> None:
    asked = Asked(props={"total_slots": 2}, metrics=PROCESSING, slots=SLOTS)
    asked.node.picked, asked.node.loaded = 1, {}

    await asked.read()

    assert asked.paths == ["/props"]


async def test_a_page_that_is_not_there_is_not_asked_for_each_time() -> None:
    asked = Asked(props={"total_slots": 2}, slots=SLOTS)
    asked.node.in_flight = 1

    first, paths = await asked.read(), list(asked.paths)
    again, fewer = await asked.read(), list(asked.paths)
    asked.now += 601
    await asked.read()

    assert first == again == EngineLoad(running=1, slots=2)
    assert paths == ["/props", "/metrics", "/slots"]
    assert fewer == ["/slots"]
    assert "/metrics" in asked.paths


async def test_what_is_known_already_is_not_asked_for() -> None:
    asked = Asked(props={"total_slots": 4}, metrics=PROCESSING, slots=SLOTS)
    asked.node.in_flight = 1

    await asked.read()

    assert asked.paths == ["/props", "/metrics"]


@pytest.mark.parametrize("trouble", [Unanswered(), TimeoutError()])
async def test_a_page_that_does_not_answer_is_asked_for_again_soon(trouble: Exception) -> None:
    asked = Asked(props=trouble)

    assert await asked.read() is None
    assert await asked.read() is None
    assert asked.paths == []
    asked.now += 31
    asked.pages["/props"] = {"total_slots": 4}

    assert await asked.read() == EngineLoad(slots=4)
