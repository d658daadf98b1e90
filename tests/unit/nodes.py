"""Nodes for tests that need no network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.domain import ModelInfo, NodeSpec, NodeState
from app.errors import NodeFailure
from app.providers.base import Answer, Call, Health, Kind, Outgoing, Probe
from app.routing.breaker import Breaker
from app.routing.registry import Candidate, Node


def _translate(call: Call) -> Outgoing:
    raise AssertionError("nothing is sent in these tests")


def _answer(call: Call) -> Answer:
    raise AssertionError("nothing is answered in these tests")


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> NodeFailure:
    raise AssertionError("nothing is refused in these tests")


def kind(*, tags: bool = False) -> Kind:
    probe = Probe("/health", "/v1/models", lambda status, document: Health(NodeState.HEALTHY), lambda document: [])
    return Kind("fake", "Fake", _translate, _answer, _refusal, probe, names_have_tags=tags)


def node(
    name: str = "a",
    *,
    models: tuple[str, ...] = ("m",),
    tags: bool = False,
    of_kind: Kind | None = None,
    **spec: Any,
) -> Node:
    """A healthy node that lists these models."""
    made = Node(NodeSpec(f"http://{name}", name=name, **spec), Breaker(3, 15.0), of_kind or kind(tags=tags))
    made.state = NodeState.HEALTHY
    made.list_models([ModelInfo(model) for model in models])
    return made


def candidate(made: Node) -> Candidate:
    assert made.models
    return Candidate(made, next(iter(made.models)))
