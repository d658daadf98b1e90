"""What real llama.cpp servers say of themselves, and what Hearth makes of it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.prefixes import Load, Turn, measure
from tests.engine.conftest import MODEL, SLOTS, Engine, Hearth, serving, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SHORT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 1500, "stream": True}


def _engines(hearth: Hearth) -> list[dict[str, Any]]:
    return [node["engine"] or {} for node in hearth.nodes()]


def _ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=SHORT, timeout=60)


def test_slots_are_known_before_anybody_has_asked(hearth: Hearth) -> None:
    wait_for(lambda: [engine.get("slots") for engine in _engines(hearth)] == [SLOTS, SLOTS], 10, "the slots")


def test_a_server_that_others_keep_busy_is_avoided(hearth: Hearth, engines: list[Engine]) -> None:
    with ThreadPoolExecutor(8) as many:
        served = {answer.headers["x-hearth-node"] for answer in many.map(_ask, [hearth.url] * 8)}
    assert len(served) == 2, "both are in use, so that both are looked at"

    with _used_by_another_program(engines[0]):
        wait_for(lambda: _engines(hearth)[0].get("foreign") == SLOTS, 10, "the other program's requests")
        busy = hearth.nodes()[0]["name"]
        nodes = [_ask(hearth.url).headers["x-hearth-node"] for _ in range(6)]

    assert busy not in nodes
    wait_for(lambda: _engines(hearth)[0].get("foreign") == 0, 10, "that it is over")


@contextlib.contextmanager
def _used_by_another_program(engine: Engine) -> Iterator[None]:
    """All of its slots."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60))
        for _ in range(SLOTS):
            stack.enter_context(client.stream("POST", f"{engine.url}/v1/chat/completions", json=LONG))
        yield


def test_a_server_that_may_sleep_does(installed: None, tmp_path: Path) -> None:
    """Its /metrics and /slots would keep it awake."""
    engine = Engine(tmp_path / "engine.txt", options=("--sleep-idle-seconds", "2"))
    engine.start()
    try:
        with serving([{"url": engine.url, "kind": "llamacpp"}], tmp_path / "hearth.txt") as hearth:
            wait_for(lambda: hearth.nodes()[0]["loaded"] == {}, 20, "the server's sleep")

            assert _ask(hearth.url).status_code == 200
    finally:
        engine.stop()


def test_conversations_go_on_where_their_beginning_is(installed: None) -> None:
    """Servers with no more room for conversations than they have slots, which together hold all of them once."""
    load = Load(talks=6, turns=5, history=600, question=40, think=1.0)

    ours, theirs = (
        measure(policy, load, 4, ["--cache-ram", "0"]) for policy in ("shortest_expected_delay", "round_robin")
    )

    assert _cached(ours) > 0.85
    assert _cached(theirs) < 0.7
    # Most of what round_robin reads was read before, on the other server: measured at a tenth.
    assert _first_token(ours) <= 0.5 * _first_token(theirs)


def _cached(turns: list[Turn]) -> float:
    """Of the prompts after each conversation's first one."""
    later = [turn for turn in turns if turn.number]
    return sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)


def _first_token(turns: list[Turn]) -> float:
    return statistics.median(turn.first_token for turn in turns)
