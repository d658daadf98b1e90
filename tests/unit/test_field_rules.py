"""Rules that hold for whole classes of things: every number, every name in a message, every kind of failure."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from app.declarations import local_nodes, model_map
from app.domain import AttemptRecord, Failure
from app.errors import AllAttemptsFailed, Forbidden, HearthError, NodeFailure, Overloaded, RequestRefused, Unavailable
from app.routing.admission import Admission
from app.routing.attempt import Attempt
from app.routing.breaker import Breaker, BreakerState
from app.routing.registry import Candidate, Node
from app.routing.reply import Reply
from app.routing.trail import Trail
from app.settings import Settings, SettingsError, load_settings
from app.upstream import NodeResponse
from tests.unit.nodes import candidate, node

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = sorted(
    name
    for name, field in Settings.model_fields.items()
    if name in ("cloud_budget_usd", "requests_per_minute", "tokens_per_minute")
    or (isinstance(field.default, int | float) and not isinstance(field.default, bool))
)
# Names that messages may tell people to set although they are not ours, and those that are taken from LMDeploy.
OTHERS = {
    "OLLAMA_HOST",
    "OLLAMA_ORIGINS",
    "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION",
    "AIOHTTP_TIMEOUT",
    "UVICORN_LOG_LEVEL",
    "SSL_CERT_FILE",  # of OpenSSL
    "SSL_CERT_DIR",
}


# -- settings


@pytest.mark.parametrize("name", NUMBERS)
def test_zero_is_taken_as_zero_or_refused_by_name_and_never_as_the_default(name: str) -> None:
    flags, refused = [f"--{name.replace('_', '-')}", "0"], ""
    try:
        taken = getattr(load_settings(flags, env_file=None), name)
    except SettingsError as error:
        refused = error.message

    assert refused.startswith(f"{name.upper()}: '0' is not") or taken == 0


@pytest.mark.parametrize("key", ["weight", "speed", "max_concurrency", "vram_gb", "num_ctx"])
def test_zero_in_a_node_is_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"node 1: {key}: 0 is not"):
        local_nodes([{"url": "http://a", key: 0}])


def test_zero_in_a_route_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_ctx: 0 is not"):
        model_map({"a": {"num_ctx": 0}})


@pytest.mark.parametrize(
    ("written", "local"), [("false", False), ("0", False), (False, False), ("ON", True), (1, True)]
)
def test_a_routes_privacy_is_read_in_every_usual_form(written: object, local: bool) -> None:
    (route,) = model_map({"a": {"local_only": written}})

    assert route.local_only is local


def test_a_routes_privacy_in_other_words_stops_the_start() -> None:
    with pytest.raises(ValueError, match="local_only: 'enabled' is not true or false"):
        model_map({"a": {"local_only": "enabled"}})


def test_a_cold_load_and_a_long_document_fit_into_the_default_limits() -> None:
    settings = Settings(_env_file=None)

    assert settings.connect_timeout <= 5
    assert settings.first_token_timeout >= 600
    assert settings.request_timeout >= settings.first_token_timeout
    assert settings.request_timeout >= settings.idle_timeout


def _messages() -> Iterator[tuple[str, str]]:
    """Every text in the sources that has several words and is no docstring, with its file."""
    for path in sorted((ROOT / "app").rglob("*.py")):
        parts = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {part.value for part in parts if isinstance(part, ast.Expr)}
        for part in parts:
            if part in docstrings:
                continue
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                yield path.name, part.value


def test_every_setting_that_a_message_names_exists() -> None:
    known = {name.upper() for name in Settings.model_fields} | OTHERS

    named = {
        (file, name) for file, text in _messages() for name in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", text)
    }

    assert {name for _, name in named} & known, "the search finds names at all"
    assert not [(file, name) for file, name in named if name not in known]


# -- failures


@pytest.mark.parametrize("failure", list(Failure))
@pytest.mark.parametrize("status", [None, 500])
def test_what_others_are_told_of_a_failure_holds_no_word_of_a_node(failure: Failure, status: int | None) -> None:
    told_by_nodes = {
        *(Failure.BUSY, Failure.SERVER_ERROR, Failure.MODEL_MISSING, Failure.CONTEXT_TOO_SMALL, Failure.ERROR_EVENT)
    }
    summary = NodeFailure(failure, "as you said: SECRET", status=status).summary

    assert ("SECRET" in summary) == (failure not in told_by_nodes)
    if failure in told_by_nodes:
        assert summary == ("it reported an error" if status is None else "it answered 500")


@pytest.mark.parametrize("failure", list(Failure))
def test_busy_nodes_and_missing_models_are_no_breakage(failure: Failure) -> None:
    assert NodeFailure(failure, "").counts == (failure not in (Failure.BUSY, Failure.MODEL_MISSING))


@pytest.mark.parametrize(
    ("error", "nodes"),
    [
        (Unavailable("x"), True),
        (Overloaded("x"), True),
        (AllAttemptsFailed("x", logged="y", status=404, code="z"), True),
        (RequestRefused("x"), False),
        (Forbidden("x"), False),
    ],
)
def test_who_is_to_blame_does_not_follow_from_the_status(error: HearthError, nodes: bool) -> None:
    assert error.blames_nodes is nodes


def test_a_nodes_refusal_is_not_logged_in_its_words() -> None:
    assert RequestRefused("as you said: SECRET").logged == ""
    assert AllAttemptsFailed("SECRET", logged="it answered 500", status=502, code="x").logged == "it answered 500"


# -- settling


class _Nobody:
    def attempt(self, node: Node, record: AttemptRecord) -> None:
        pass


class _BrokenPipe:
    """An answer whose connection cannot even be closed."""

    at_end = False

    def close(self) -> None:
        raise OSError("already gone")


class _Words:
    content_type = b"text/event-stream"
    begun = True
    ended = False
    usage = None
    finish_reason = None


def test_a_connection_that_cannot_be_closed_frees_its_slot_all_the_same() -> None:
    only = node(max_concurrency=1)
    slot = Admission().take(candidate(only))
    assert slot is not None
    attempt = Attempt(slot, only.breaker.acquire(), Trail(), _Nobody())
    response = cast(NodeResponse, _BrokenPipe())
    reply = Reply(attempt, response, cast(Any, _Words()), Trail(), b"", over=False, deadline=0.0)

    with pytest.raises(OSError, match="already gone"):
        reply.close()

    assert only.in_flight == 0


@pytest.mark.parametrize("first", ["succeed", "refuse", "abandon"])
def test_an_attempt_settled_in_several_ways_counts_once(first: str) -> None:
    only = node(max_concurrency=2)
    admission = Admission()
    other, slot = admission.take(candidate(only)), admission.take(candidate(only))
    assert other is not None
    assert slot is not None
    trail = Trail()
    attempt = Attempt(slot, only.breaker.acquire(), trail, _Nobody())

    getattr(attempt, first)()
    attempt.fail(NodeFailure(Failure.CUT, "x"))
    attempt.abandon()

    assert only.in_flight == 1
    assert len(trail.attempts) == 1
    assert only.breaker.state is BreakerState.CLOSED


def test_the_first_words_end_a_breakers_probe() -> None:
    breaker = Breaker(1, 0.0)
    _admit(breaker).fail("broke")
    probe = _admit(breaker)
    states = [breaker.state]

    probe.answering()
    states.append(breaker.state)
    probe.fail("cut later")

    assert [*states, breaker.state] == ["half_open", "closed", "closed"]


def test_the_first_words_prove_nothing_while_the_breaker_is_closed() -> None:
    breaker = Breaker(2, 15.0)
    for _ in range(2):
        permit = _admit(breaker)
        permit.answering()
        permit.fail("cut in the middle")

    assert breaker.state is BreakerState.OPEN


def _admit(breaker: Breaker) -> Any:
    permit = breaker.acquire()
    assert permit is not None
    return permit


# -- waiting


async def test_who_waits_for_nobody_any_more_is_told() -> None:
    only = node(max_concurrency=1)
    admission = Admission()
    held = admission.take(candidate(only))
    assert held is not None
    left = [candidate(only)]
    waiting = [asyncio.create_task(admission.wait(lambda: left, 60)) for _ in range(3)]
    await asyncio.sleep(0)

    left.clear()
    admission.changed()

    assert await asyncio.gather(*waiting) == [None, None, None]
    assert admission.waiting == 0
    assert only.in_flight == 1


async def test_a_place_that_falls_free_goes_to_the_first_who_can_use_it_and_leaves_the_order() -> None:
    one, two = node("a", max_concurrency=1), node("b", max_concurrency=1)
    admission = Admission()
    on_one, on_two = admission.take(candidate(one)), admission.take(candidate(two))
    assert on_one is not None
    assert on_two is not None
    order: list[str] = []

    async def wait(name: str, *candidates: Candidate) -> None:
        slot = await admission.wait(lambda: list(candidates), 60)
        assert slot is not None
        order.append(f"{name}{slot.candidate.node.name}")

    waiting = [
        asyncio.create_task(wait("1", candidate(two))),
        asyncio.create_task(wait("2", candidate(one))),
        asyncio.create_task(wait("3", candidate(one), candidate(two))),
    ]
    await asyncio.sleep(0)
    on_one.release()
    await asyncio.sleep(0)
    on_two.release()
    await asyncio.gather(*waiting[:2])

    assert order == ["2a", "1b"]
    assert admission.waiting == 1
    waiting[2].cancel()
    await asyncio.gather(waiting[2], return_exceptions=True)
