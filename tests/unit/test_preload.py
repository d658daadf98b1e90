"""Which models are loaded before anybody asks for them, and when."""

from __future__ import annotations

from typing import Any

import pytest

from app.domain import GIB, LoadedModel, ModelInfo, NodeSpec, NodeState, Operation, Outcome
from app.providers import KINDS
from app.providers.base import Health
from app.routing.breaker import Breaker
from app.routing.forecast import Forecast
from app.routing.job import Job
from app.routing.preload import Preload
from app.routing.registry import Candidate, Node, Registry
from app.routing.route_spec import RouteSpec
from app.routing.routes import Routes
from tests.unit.test_shortest_expected_delay import Clock, job

UP, DOWN = Health(NodeState.HEALTHY), Health(NodeState.DOWN)
MODELS = ("a", "b", "c")


class House:
    """Nodes that serve all models, and what was loaded on them. A load is over at once, unless told otherwise."""

    def __init__(self, *specs: dict[str, Any], models: tuple[str, ...] = (), kind: str = "ollama") -> None:
        self.clock = Clock()
        self.forecast = Forecast(self.clock)
        self.nodes = [
            Node(NodeSpec(f"http://n{place}", name=f"n{place}", **spec), Breaker(3, 15.0), KINDS[kind])
            for place, spec in enumerate(specs)
        ]
        self.registry = Registry(self.nodes)
        routes = Routes((RouteSpec("alias", local="b", num_ctx=4096),), self.registry)
        self.preload = Preload(models, self.registry, routes, self.forecast, self.start)
        self.loads: list[tuple[str, str]] = []
        self.jobs: list[Job] = []
        self.slow = False

    def start(self, candidate: Candidate, job: Job) -> None:
        self.loads.append((candidate.node.name, candidate.model))
        self.jobs.append(job)
        seat, loading = self.forecast.load_begins(candidate)
        if not self.slow:
            self.forecast.load_ended(seat, loading, 2.0)

    def see(self, *loaded: tuple[str, ...], capabilities: frozenset[str] | None = None) -> None:
        """Every node answers a probe; of each the models that are in its memory."""
        infos = [ModelInfo(name, capabilities, size_bytes=5 * GIB) for name in MODELS]
        for node, there in zip(self.nodes, loaded, strict=True):
            self.registry.observe(node, UP, infos, {name: LoadedModel(name, 5 * GIB) for name in there})

    def look(self) -> list[tuple[str, str]]:
        """What is loaded now."""
        self.loads.clear()
        self.preload.look()
        return list(self.loads)


def test_a_model_is_loaded_once_on_one_node() -> None:
    house = House({}, {}, models=("a",))
    house.see((), ())

    assert [model for _, model in house.look()] == ["a"]
    assert house.look() == []


def test_it_goes_to_the_best_node() -> None:
    house = House({"speed": 1}, {"speed": 8}, models=("a",))
    house.see((), ())

    assert house.look() == [("n1", "a")]


def test_it_goes_where_nothing_has_to_leave() -> None:
    house = House({"speed": 8}, {"speed": 1}, models=("a",))
    house.see(("b",), ())

    assert house.look() == [("n1", "a")]


def test_a_model_that_is_there_is_left_alone() -> None:
    house = House({}, {}, models=("a",))
    house.see((), ("a",))

    assert house.look() == []


def test_nobody_is_asked_before_all_nodes_were_looked_at() -> None:
    """One that was not may have the model already."""
    house = House({}, {}, models=("a",))
    house.registry.observe(house.nodes[0], UP, [ModelInfo("a")], {})
    assert house.look() == []

    house.registry.observe(house.nodes[1], DOWN)
    assert house.look() == [("n0", "a")]


def test_what_a_node_is_to_have_is_loaded_there() -> None:
    house = House({"speed": 8}, {"preload": ("a", "alias")})
    house.see((), ())

    first, second = house.look(), house.look()

    assert first + second == [("n1", "a"), ("n1", "b")]
    assert house.jobs[-1].num_ctx == 4096


def test_one_after_the_other() -> None:
    house = House({"preload": ("a", "b"), "vram_gb": 24})
    house.slow = True
    house.see(())

    assert house.look() == [("n0", "a")]
    assert house.look() == []


def test_a_node_that_comes_back_gets_its_models_again() -> None:
    house = House({"preload": ("a",)})
    house.see(())
    house.look()

    house.registry.observe(house.nodes[0], DOWN)
    house.see(())

    assert house.look() == [("n0", "a")]


def test_what_was_driven_out_later_is_not_loaded_again() -> None:
    house = House({"preload": ("a",)})
    house.see(())
    house.look()
    house.see(("a",))
    house.see(("b",))

    assert house.look() == []


def test_another_node_takes_over_from_one_that_is_down() -> None:
    house = House({"speed": 8}, {}, models=("a",))
    house.see((), ())
    assert house.look() == [("n0", "a")]

    house.registry.observe(house.nodes[0], DOWN)

    assert house.look() == [("n1", "a")]


# -- never thrash


def ask(house: House, place: int, model: str) -> None:
    """A request is served."""
    candidate, request = Candidate(house.nodes[place], model), job()
    house.forecast.seat(candidate).demand.asked(house.clock.now)
    house.forecast.ended(house.forecast.placed(candidate, request), Outcome.OK, None, None)


@pytest.mark.parametrize("spec", [{}, {"vram_gb": 8}], ids=["room unknown", "no room"])
def test_a_model_that_is_asked_for_is_not_driven_out(spec: dict[str, Any]) -> None:
    house = House({"preload": ("a",), **spec})
    house.see(("b",))
    ask(house, 0, "b")
    assert house.look() == []

    house.clock.now += 300

    assert house.look() == [("n0", "a")]


def test_where_there_is_room_it_does_not_matter_who_is_asked_for() -> None:
    house = House({"preload": ("a",), "vram_gb": 12})
    house.see(("b",))
    ask(house, 0, "b")

    assert house.look() == [("n0", "a")]


def test_a_model_of_which_nothing_is_known_is_not_driven_out() -> None:
    """Other programs may use it."""
    house = House({"preload": ("a",), "vram_gb": 8})
    house.see(("b",))
    assert house.look() == []

    house.see(())
    assert house.look() == [("n0", "a")]


def test_models_of_the_list_do_not_drive_each_other_out() -> None:
    house = House({"preload": ("a", "b", "c"), "vram_gb": 11})
    house.see(())

    first = house.look()
    house.see(("a", "b"))

    assert first == [("n0", "a"), ("n0", "b")]
    assert house.look() == []


def test_a_node_at_work_is_not_made_to_drive_a_model_out() -> None:
    house = House({"preload": ("a",)})
    house.see(("b",))
    house.nodes[0].in_flight = 1
    assert house.look() == []

    house.nodes[0].in_flight = 0
    assert house.look() == [("n0", "a")]


@pytest.mark.parametrize("why", ["down", "draining", "unknown model", "no loads on demand"])
def test_what_cannot_be_loaded_is_not_tried(why: str) -> None:
    kind = "lmstudio" if why == "no loads on demand" else "ollama"
    house = House({}, models=("a" if why != "unknown model" else "d", "alias"), kind=kind)
    house.see(("b",))
    if why == "down":
        house.registry.observe(house.nodes[0], DOWN)
    house.nodes[0].draining = why == "draining"

    assert house.look() == []


def test_a_model_for_embeddings_is_loaded_as_one() -> None:
    house = House({}, models=("a",))
    house.see((), capabilities=frozenset({"embedding"}))

    house.look()

    assert house.jobs[0].operation is Operation.EMBEDDING
