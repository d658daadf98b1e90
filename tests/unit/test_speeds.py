"""What is believed of a node's speed."""

from __future__ import annotations

import pytest

from app.routing.demand import Demand
from app.routing.slots import Slots
from app.routing.speeds import Decode, Known, Speed, decode_guess, from_others


def test_a_speed_follows_the_node_within_tens_of_requests() -> None:
    speed = Speed()
    for _ in range(50):
        speed.prefilled(1000, 1.0)
    for _ in range(40):
        speed.prefilled(1000, 4.0)

    assert speed.prefill.value == pytest.approx(0.004, rel=0.1)


def test_a_short_prompt_says_nothing_of_the_speed() -> None:
    speed = Speed()
    speed.prefilled(10, 3.0)

    assert not speed.prefill.known


def test_how_streams_slow_each_other_down_is_learned() -> None:
    decode = Decode()
    for turn in range(200):
        others = turn % 5
        decode.add(0.02 * (1 + 0.3 * others), others)

    alone, crowding = decode.line()

    assert alone == pytest.approx(0.02, rel=0.15)
    assert 0.15 < crowding < 0.35  # drawn towards the usual


def test_one_sample_in_a_crowd_is_not_taken_for_the_speed_alone() -> None:
    decode = Decode()
    decode.add(0.03, 4)

    assert decode.line()[0] < 0.03


def test_what_a_node_showed_counts_more_than_what_others_did() -> None:
    guess = from_others([Known(0.1, 1, 0)], [Known(0.01, 1, 0)], 1, 0)

    assert guess is not None
    assert guess < 0.03


def test_a_larger_model_is_taken_to_be_slower() -> None:
    assert decode_guess(40e9, 1) > decode_guess(4e9, 1)
    assert from_others([], [Known(0.01, 1, 4e9)], 1, 8e9) == pytest.approx(0.02)


def test_slots_grow_as_answers_run_side_by_side() -> None:
    slots = Slots(careful=True)
    first = slots.limit()
    slots.ran(4)

    assert first < 4
    assert slots.limit() == 8


def test_a_request_that_waits_for_another_shows_the_limit() -> None:
    slots = Slots(careful=True)
    slots.ran(3)
    slots.met()

    assert slots.limit() == 3


def test_a_limit_is_tried_again_after_a_while_and_less_often_in_vain() -> None:
    slots = Slots(careful=True)
    slots.ran(3)
    slots.met()
    tries = []
    for request in range(200):
        slots.placed()
        if slots.limit() > 3:
            tries.append(request)
            slots.met()

    assert tries
    assert tries[1] - tries[0] > tries[0]


def test_an_engine_that_batches_is_not_held_back() -> None:
    assert Slots(careful=False).limit() > 1000


def test_a_limit_is_only_what_clients_allow_at_most() -> None:
    demand = Demand(0.0)
    for _ in range(30):
        demand.answered(100, 1000)

    assert demand.length(1000) == pytest.approx(100, rel=0.2)
    assert demand.length(10) <= 10


def test_demand_is_forgotten() -> None:
    demand = Demand(0.0)
    for second in range(60):
        demand.asked(float(second))

    assert demand.rate(60.0) == pytest.approx(1.0, rel=0.2)
    assert demand.rate(600.0) < 0.01
