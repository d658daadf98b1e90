"""What a requested name means."""

from __future__ import annotations

import pytest

from app.domain import ModelInfo, NodeSpec, Operation, Request
from app.errors import ModelNotFound
from app.routing.breaker import Breaker
from app.routing.gate import cloud_refusal
from app.routing.registry import Node, Registry
from app.routing.route_spec import RouteSpec
from app.routing.routes import Route, Routes
from tests.unit.nodes import kind, node


def _cloud(*, listed: tuple[str, ...] | None = (), default: str | None = None, models: tuple[str, ...] = ()) -> Node:
    spec = NodeSpec("http://c", name="c", tier=1, default_model=default, models=models)
    made = Node(spec, Breaker(3, 15.0), kind())
    if listed is not None:
        made.list_models([ModelInfo(name) for name in listed])
    return made


def _routes(*nodes: Node, specs: tuple[RouteSpec, ...] = ()) -> Routes:
    return Routes(specs, Registry(nodes))


def test_a_name_that_a_node_lists_is_asked_for_as_it_is() -> None:
    assert _routes(node(models=("m",))).resolve("m") == Route("direct", local="m")


def test_an_entry_of_the_map_wins_over_what_nodes_list() -> None:
    spec = RouteSpec("m", local="llama", cloud="gpt", num_ctx=8192)

    route = _routes(node(models=("m", "llama")), specs=(spec,)).resolve("m")

    assert (route.name, route.local, route.cloud, route.num_ctx) == ("m", "llama", "gpt", 8192)


def test_an_exact_entry_wins_over_an_earlier_wildcard() -> None:
    specs = (RouteSpec("gpt-*", local="small"), RouteSpec("gpt-5", local="big"))
    routes = _routes(node(models=("small", "big")), specs=specs)

    assert routes.resolve("gpt-5").local == "big"
    assert routes.resolve("gpt-4").local == "small"


def test_a_wildcard_route_is_one_label_whatever_clients_ask() -> None:
    routes = _routes(node(), specs=(RouteSpec("gpt-*", local="m"),))

    assert {routes.resolve(f"gpt-{n}").name for n in range(5)} == {"gpt-*"}


def test_an_entry_without_names_only_marks_the_name() -> None:
    route = _routes(node(), specs=(RouteSpec("m", local_only=True),)).resolve("m")

    assert (route.local, route.local_only) == ("m", True)


def test_a_name_that_only_the_cloud_has_goes_there() -> None:
    routes = _routes(node(), _cloud(listed=("gpt-5",)))

    assert routes.resolve("gpt-5") == Route("direct", local=None, cloud="gpt-5")


def test_a_name_that_nobody_has_is_not_found_and_close_ones_are_named() -> None:
    with pytest.raises(ModelNotFound) as error:
        _routes(node(models=("llama3.2:latest",)), _cloud(listed=("gpt-5",))).resolve("lama3.2")

    assert "llama3.2:latest" in error.value.message
    assert error.value.code == "model_not_found"


def test_a_cloud_that_may_not_be_asked_for_a_name_does_not_make_it_known() -> None:
    with pytest.raises(ModelNotFound):
        _routes(node(), _cloud(listed=None, models=("gpt-*",))).resolve("claude")


def test_no_name_is_unknown_while_a_node_was_never_reached() -> None:
    unreached = Node(NodeSpec("http://b", name="b"), Breaker(3, 15.0), kind())

    assert _routes(node(), unreached).resolve("x") == Route("direct", local="x")


def test_a_name_nobody_lists_is_tried_at_a_cloud_that_lists_nothing() -> None:
    assert _routes(node(), _cloud(listed=None)).resolve("x").cloud == "x"


@pytest.mark.parametrize(
    ("request_local", "route"),
    [
        (True, Route("r", local="m")),
        (False, Route("r", local="m", local_only=True)),
        (False, Route("r", local="m", cloud_allowed=False)),
    ],
)
def test_what_must_stay_local_does_not_pass_the_gate(request_local: bool, route: Route) -> None:
    request = Request("1", Operation.CHAT, "m", b"", {}, local_only=request_local)

    assert cloud_refusal(request, route)
    assert cloud_refusal(Request("1", Operation.CHAT, "m", b"", {}), Route("r", local="m")) is None
