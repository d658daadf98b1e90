"""What engines say of themselves, in what is predicted of them."""

from __future__ import annotations

from math import inf

import pytest

from app.domain import GIB, EngineLoad, LoadedModel, ModelInfo, NodeState, Outcome, Timings, Usage
from app.providers.base import Health
from app.routing.registry import Candidate, Node, Registry
from app.routing.work import Seat
from tests.unit.test_shortest_expected_delay import SYSTEM, Bench, job


def tell(bench: Bench, place: int, load: EngineLoad | None, own: int = 0) -> None:
    Registry([]).hear(bench.nodes[place], load, own)


def seat(bench: Bench, place: int, model: str = "m") -> Seat:
    return bench.policy.forecast.seat(Candidate(bench.nodes[place], model))


def room(bench: Bench, place: int) -> float:
    return seat(bench, place).work.room(seat(bench, place))


# -- slots


def test_slots_that_an_engine_names_are_used_at_once() -> None:
    bench = Bench({}, kind="llamacpp")
    tell(bench, 0, EngineLoad(slots=3))

    rooms = []
    for _ in range(3):
        rooms.append(room(bench, 0))
        bench.send(0, job())

    assert rooms == [3, 2, 1]
    assert bench.rank(job()) == []


def test_the_operators_limit_holds_where_it_is_lower() -> None:
    bench = Bench({"max_concurrency": 2}, kind="llamacpp")
    tell(bench, 0, EngineLoad(slots=4))

    assert room(bench, 0) == 2


def test_an_operators_limit_for_hearth_is_not_used_up_by_others() -> None:
    bench = Bench({"max_concurrency": 2}, kind="vllm")
    tell(bench, 0, EngineLoad(running=50))

    assert room(bench, 0) == 2


def test_without_slots_a_queue_in_the_engine_shows_how_many_there_are() -> None:
    bench = Bench({}, kind="vllm")
    seat(bench, 0)
    assert room(bench, 0) == inf

    tell(bench, 0, EngineLoad(running=8, waiting=3), own=0)
    assert room(bench, 0) <= 0

    tell(bench, 0, EngineLoad(running=3, waiting=0), own=0)
    assert room(bench, 0) == 5


def test_an_engine_that_is_out_of_room_for_caches_gets_no_more_than_run() -> None:
    bench = Bench({}, kind="sglang")
    for _ in range(12):
        bench.send(0, job())
    tell(bench, 0, EngineLoad(running=9, waiting=3, slots=64), own=12)

    assert room(bench, 0) == -3


# -- requests of others


def test_requests_of_others_take_slots() -> None:
    bench = Bench({}, {}, kind="llamacpp")
    tell(bench, 0, EngineLoad(running=2, slots=2))
    tell(bench, 1, EngineLoad(running=0, slots=2))

    assert room(bench, 0) == 0
    assert bench.rank(job())[0] == "n1"


def test_ones_own_requests_are_not_those_of_others() -> None:
    bench = Bench({}, kind="llamacpp")
    bench.send(0, job())
    tell(bench, 0, EngineLoad(running=1, slots=2), own=1)

    assert bench.nodes[0].foreign == 0
    assert room(bench, 0) == 1


def test_requests_of_others_slow_an_engine_down() -> None:
    bench = Bench({}, {}, kind="vllm")
    for place in (0, 1):
        bench.serve(place, job(), first=0.1, whole=2)
    tell(bench, 0, EngineLoad(running=12))
    tell(bench, 1, EngineLoad(running=0))

    assert {bench.rank(job())[0] for _ in range(10)} == {"n1"}


def test_the_wait_for_requests_of_others_grows_with_their_queue() -> None:
    bench = Bench({}, kind="llamacpp")
    bench.serve(0, job(), first=0.1, whole=2)
    waits = []
    for waiting in (0, 2, 8):
        tell(bench, 0, EngineLoad(running=2, waiting=waiting, slots=2))
        waits.append(bench.policy.explain(bench.candidates(), job())[0].slot)

    assert waits[0] > 0
    assert waits[1] > 1.5 * waits[0]  # two slots: each pair of those who wait takes as long again
    assert waits[2] > 3 * waits[0]


def test_an_engine_with_requests_of_others_is_looked_at_while_somebody_waits_for_it() -> None:
    bench = Bench({}, kind="llamacpp")
    looked: list[Node] = []
    bench.policy.forecast.on_look = looked.append
    tell(bench, 0, EngineLoad(running=2, slots=2))

    assert bench.rank(job()) == []
    assert looked == [bench.nodes[0]]

    tell(bench, 0, EngineLoad(running=0, slots=2))
    assert bench.rank(job()) == ["n0"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("load", [EngineLoad(running=2, waiting=9, slots=2), EngineLoad(running=2, waiting=9)])
def test_others_who_never_end_do_not_shut_hearth_out(nodes: int, load: EngineLoad) -> None:
    """Their queue in the engine takes every slot that falls free before Hearth could; or the engine counts wrongly."""
    bench = Bench(*[{}] * nodes, kind="vllm")
    bench.serve(0, job(), first=0.1, whole=2)
    for place in range(nodes):
        seat(bench, place)
        tell(bench, place, load)
    waiting = job()
    assert bench.rank(waiting) == []

    bench.clock.now += 30
    bench.policy.look_again([waiting])
    for place in range(nodes):
        tell(bench, place, load)

    assert bench.rank(waiting)


def test_the_operators_limit_holds_however_long_somebody_has_waited() -> None:
    bench = Bench({"max_concurrency": 1}, kind="llamacpp")
    bench.send(0, job())
    tell(bench, 0, EngineLoad(running=3, slots=2), own=1)
    waiting = job()
    bench.rank(waiting)

    bench.clock.now += 30
    bench.policy.look_again([waiting])

    assert bench.rank(waiting) == []


def test_an_engine_that_says_nothing_any_more_has_no_requests_of_others() -> None:
    bench = Bench({}, kind="llamacpp")
    tell(bench, 0, EngineLoad(running=2, slots=2))
    tell(bench, 0, None)

    assert bench.nodes[0].foreign == 0
    assert bench.rank(job()) == ["n0"]


# -- how fast it reads, and what it had


def read(bench: Bench, *, tokens: int, seconds: float, cached: int, took: float) -> None:
    request = job(SYSTEM)
    progress = bench.send(0, request)
    bench.clock.now += took
    progress.began()
    bench.clock.now += 1
    timings = Timings(None, seconds, 1.0, tokens, cached)
    progress.ended(Outcome.OK, Usage(tokens + cached, 50, cached), timings)
    bench.nodes[0].in_flight -= 1


def test_an_engines_own_word_on_how_fast_it_reads_counts() -> None:
    """What is measured from here has waits in it: the request may have stood in the engine's queue."""
    bench = Bench({}, kind="llamacpp")

    for _ in range(3):
        read(bench, tokens=1000, seconds=0.5, cached=0, took=20)

    assert seat(bench, 0).speed.prefill.value == pytest.approx(0.0005)


def test_a_cache_that_had_less_than_was_believed_is_smaller_than_was_believed() -> None:
    bench = Bench({}, kind="llamacpp")
    read(bench, tokens=3000, seconds=1, cached=0, took=1)
    before = seat(bench, 0).held.limit

    read(bench, tokens=2990, seconds=1, cached=10, took=1)

    assert seat(bench, 0).held.limit < before


def test_an_engine_that_leaves_out_a_zero_had_nothing() -> None:
    """As Ollama does: once it has told of a hit, no word of one is a miss."""
    bench = Bench({})
    read(bench, tokens=2000, seconds=1, cached=1000, took=1)
    before = seat(bench, 0).held.limit

    progress = bench.send(0, job(SYSTEM))
    bench.clock.now += 9
    progress.began()
    progress.ended(Outcome.OK, Usage(3000, 50), Timings(None, 3.0, 1.0))

    assert seat(bench, 0).held.limit < before
    assert seat(bench, 0).speed.prefill.value == pytest.approx(4 / 5000, rel=0.05)


def test_a_cache_that_had_what_was_believed_is_believed() -> None:
    bench = Bench({}, kind="llamacpp")
    read(bench, tokens=3000, seconds=1, cached=0, took=1)
    before = seat(bench, 0).held.limit

    read(bench, tokens=10, seconds=0.1, cached=2990, took=15)

    assert seat(bench, 0).held.limit >= before


# -- video memory


def memory(bench: Bench, **loaded: int) -> None:
    """The node says what is in its memory, in GiB."""
    node = bench.nodes[0]
    models = [ModelInfo(name, size_bytes=5 * 10**9) for name in ("m", "other", "third")]
    listed = {name: LoadedModel(name, size * GIB) for name, size in loaded.items()}
    Registry([node]).observe(node, Health(NodeState.HEALTHY), models, listed)


def chance(bench: Bench, model: str) -> float:
    there = seat(bench, 0, model)
    return there.work.chance_of_eviction(there.takes)


@pytest.mark.parametrize(("vram_gb", "expected"), [(12, 1.0), (13, 0.0)])
def test_what_fits_is_judged_by_what_the_node_says_its_models_take(vram_gb: int, expected: float) -> None:
    """The file of each has 5 GB; in memory, with its context, the first takes 8 GiB."""
    bench = Bench({"vram_gb": vram_gb}, loaded=())
    memory(bench, m=8)

    assert chance(bench, "other") == expected


def test_what_a_model_took_when_it_was_last_in_memory_is_remembered() -> None:
    bench = Bench({"vram_gb": 12}, loaded=())
    seat(bench, 0)
    memory(bench, m=8)
    memory(bench, other=5)

    assert chance(bench, "m") == 1.0


def test_a_model_that_is_still_being_loaded_takes_its_room() -> None:
    bench = Bench({"vram_gb": 12}, loaded=())
    memory(bench)
    bench.send(0, job(), "m")
    bench.send(0, job(), "other")

    assert chance(bench, "third") == 1.0
