"""How the live table gathers and draws snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from app.commands.frames import print_frame
from app.commands.nodes import reason_of, state_of
from app.commands.running import Unreachable
from app.commands.terminal import Refused, print_table
from app.commands.top import Picture, follow

NODE: dict[str, Any] = {
    "name": "gpu1",
    "tier": "local",
    "state": "healthy",
    "draining": False,
    "breaker": {"state": "closed", "reason": None},
    "in_flight": 2,
    "max_concurrency": 4,
    "vram_bytes": 3 * 2**30,
    "vram_gb": 24,
    "loaded": [{"name": "qwen3:8b"}],
}
REQUEST: dict[str, Any] = {
    "at": 0,
    "asked": "gpt-4o",
    "node": "gpu1",
    "outcome": "ok",
    "why": "only candidate",
    "first_content_ms": 120.4,
    "ms": 12_000,
}
SNAPSHOT: dict[str, Any] = {
    "version": "1.0",
    "uptime_seconds": 7300,
    "replicas": ["a", "b"],
    "in_flight": 2,
    "queue": 1,
    "nodes": [NODE, {**NODE, "name": "gpu2", "state": "down", "reason": "connection refused"}],
    "requests": [REQUEST, {**REQUEST, "outcome": "failed", "code": "no_node", "node": None}],
    "minute": {"requests_per_second": 2.5, "local_share": 0.93, "first_content_ms": {"p50": 80, "p95": 400}},
    "money": {"period": "month", "spent_usd": 1.5, "saved_usd": 9, "budget": {"limit_usd": 10}},
    "whole": True,
}


def _frame(snapshot: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_frame("http://127.0.0.1:8000", snapshot)
    return capsys.readouterr().out.splitlines()


def test_a_frame_shows_nodes_load_speed_money_and_who_served(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _frame(SNAPSHOT, capsys)

    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "up 2 h" in text
    assert "93% local" in text
    assert "TTFT 80 ms (p95 400 ms)" in text
    assert "$1.50 of $10.00 spent, $9.00 saved" in text
    assert next(line for line in lines if line.startswith("gpu1")).split() == [
        *("gpu1", "healthy", "2/4", "3.0/24", "GiB", "qwen3:8b")
    ]
    assert "connection refused" in next(line for line in lines if line.startswith("gpu2"))
    assert "only candidate" in lines[-2]
    assert "no_node" in lines[-1]


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {**SNAPSHOT, "requests": [{**REQUEST, "asked": "\x1b[2Jm"}], "nodes": [{**NODE, "name": "\x1b]0;x\x07"}]}

    assert "\x1b" not in "\n".join(_frame(hostile, capsys))


def test_a_cell_of_a_table_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "number"], [["\x1b[2Jm", 3]])

    assert capsys.readouterr().out.splitlines()[1].split() == ["?[2Jm", "3"]


def test_a_frame_of_an_unknown_version_is_drawn_as_far_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Hearth ?" in _frame({"nodes": [{}], "requests": [{}]}, capsys)[0]


def test_requests_of_earlier_snapshots_stay_until_a_whole_one_comes() -> None:
    picture = Picture({"seq": 2, "requests": [{"seq": 2}, {"seq": 1}]})
    picture.take({"whole": False, "seq": 3, "requests": [{"seq": 3}]})
    after_a_part = picture.snapshot["requests"]
    picture.take({"whole": True, "seq": 1, "requests": [{"seq": 1}]})

    assert (after_a_part, picture.snapshot["requests"]) == ([{"seq": 3}, {"seq": 2}, {"seq": 1}], [{"seq": 1}])


def test_a_request_that_comes_twice_is_shown_once() -> None:
    picture = Picture({"whole": True, "seq": 2, "requests": [{"seq": 2}, {"seq": 1}]})
    picture.take({"whole": False, "seq": 3, "requests": [{"seq": 3}, {"seq": 2}]})

    assert picture.snapshot["requests"] == [{"seq": 3}, {"seq": 2}, {"seq": 1}]


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        ({}, "healthy", ""),
        ({"draining": True}, "draining", ""),
        ({"breaker": {"state": "half_open", "reason": "3 failures"}}, "breaker half open", "3 failures"),
        ({"state": "down", "reason": "refused"}, "down", "refused"),
        ({"busy_seconds": 4.6}, "healthy", "busy for 5 s"),
    ],
)
def test_a_node_is_called_by_what_keeps_requests_away(change: dict[str, Any], state: str, reason: str) -> None:
    node = {**NODE, **change}

    assert (state_of(node), reason_of(node)) == (state, reason)


class _Scripted:
    """A gateway whose streams end in this way, one after the other."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = list(ends)

    def events(self) -> Any:
        yield {"at": 1}
        if end := self._ends.pop(0):
            raise end


def test_a_gateway_that_comes_back_is_followed_again() -> None:
    given: list[Any] = []
    waited: list[float] = []

    def ended(seconds: float) -> bool:
        waited.append(seconds)
        return sum(map(bool, waited)) == 3

    follow(_Scripted(None, Unreachable("gone"), None), given.append, ended)  # type: ignore[arg-type]

    assert [each if isinstance(each, dict) else str(each) for each in given] == [
        {"at": 1},
        {"at": 1},
        "gone",
        {"at": 1},
    ]


def test_a_gateway_that_refuses_is_not_asked_again() -> None:
    given: list[Any] = []

    follow(_Scripted(Refused("wants a key")), given.append, lambda seconds: False)  # type: ignore[arg-type]

    assert str(given[-1]) == "wants a key"
