"""How much fits into a context, as far as nodes and settings say; and how long a prompt is at least."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from app.domain import LoadedModel, ModelInfo, Operation, Request
from app.routing.windows import least_tokens, window
from tests.unit import nodes


@pytest.mark.parametrize(
    ("most", "loaded", "node_ctx", "route_ctx", "takes", "room"),
    [
        (None, None, None, None, True, None),
        (8192, None, None, None, True, 8192),
        (8192, 4096, None, None, True, 4096),
        (8192, 4096, 2048, None, True, 2048),
        (8192, 4096, 2048, 1024, True, 1024),
        (8192, 4096, 16384, None, True, 8192),  # nobody gives more than the model was made for
        (None, None, 2048, None, True, 2048),
        (8192, 4096, 2048, 1024, False, 4096),  # a kind that cannot be told keeps the context it began with
        (8192, None, 2048, None, False, 8192),
    ],
)
def test_the_context_in_use_is_what_is_asked_for_or_else_what_is_loaded(
    most: int | None, loaded: int | None, node_ctx: int | None, route_ctx: int | None, takes: bool, room: int | None
) -> None:
    node = nodes.node(num_ctx=node_ctx)
    node.kind = replace(nodes.kind(), takes_num_ctx=takes)
    node.models = {"m": ModelInfo("m", context_length=most)}
    node.loaded = {"m": LoadedModel("m", context_length=loaded)} if loaded else None

    assert window(nodes.candidate(node), route_ctx) == room


def _request(operation: Operation, **fields: Any) -> Request:
    return Request("1", operation, "m", orjson.dumps(fields), fields)


@pytest.mark.parametrize(
    ("operation", "fields", "tokens"),
    [
        (Operation.CHAT, {"messages": [{"content": "a" * 80}, {"content": "b" * 16}]}, 12),
        (Operation.CHAT, {"messages": [{"content": [{"type": "text", "text": "a" * 80}, {"type": "x"}, "y"]}]}, 10),
        (Operation.CHAT, {"messages": [{"content": None}, {}, "odd", {"content": 5}]}, 0),
        (Operation.COMPLETION, {"prompt": "a" * 80}, 10),
        (Operation.COMPLETION, {"prompt": ["a" * 80, "b" * 160]}, 20),
        (Operation.COMPLETION, {"prompt": [1, 2, 3]}, 3),
        (Operation.COMPLETION, {}, 0),
        (Operation.EMBEDDING, {"input": ["a" * 80] * 100}, 10),
        (Operation.EMBEDDING, {"input": [[1, 2], [1, 2, 3]]}, 3),
        (Operation.EMBEDDING, {"input": []}, 0),
    ],
)
def test_a_prompt_has_at_least_so_many_tokens(operation: Operation, fields: dict[str, Any], tokens: int) -> None:
    assert least_tokens(_request(operation, **fields)) == tokens
