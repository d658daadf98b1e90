"""How the doctor's findings and the live table look. rich is imported when something is drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from app.commands.nodes import reason_of, state_of
from app.commands.printable import one_line
from app.commands.running import figure
from app.domain import GIB

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from app.doctor.findings import Finding

_WIDE_CHARACTERS = 1000
_FRAME_CHARACTERS = 80  # where there is no terminal
_FRAME_REQUESTS = 10  # where there is no terminal
_STYLES = {"good": "green", "warning": "yellow", "wrong": "bold red"}
_HEADINGS = {"good": "Good", "warning": "Warnings", "wrong": "Wrong"}
_STATES = {"healthy": "green", "down": "bold red", "loading": "yellow", "sleeping": "yellow", "draining": "yellow"}


# -- the doctor


def print_findings(findings: Sequence[Finding]) -> None:
    """What is good, what is doubtful and what is wrong: the worst comes last, where it is seen."""
    console = _console(None if sys.stdout.isatty() else _WIDE_CHARACTERS)
    for level, heading in _HEADINGS.items():
        group = [finding for finding in findings if finding.level == level]
        if group:
            console.print(_line(heading, "bold"))
            for finding in group:
                _print_finding(console, finding, _STYLES[level])
            console.print()
    counts = {level: sum(finding.level == level for finding in findings) for level in _HEADINGS}
    console.print(_line(_verdict(counts["warning"], counts["wrong"]), "bold"))


def _print_finding(console: Console, finding: Finding, style: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    text = Text()
    text.append(one_line(finding.about), style)
    text.append(f": {one_line(finding.message)}")
    console.print(Padding(text, (0, 0, 0, 2), expand=False))
    if finding.remedy:
        console.print(Padding(Text(f"-> {one_line(finding.remedy)}"), (0, 0, 0, 5), expand=False))


def _verdict(warnings: int, wrongs: int) -> str:
    doubts = f"{warnings} warning{'s' * (warnings != 1)}"
    return f"{wrongs} wrong, {doubts}." if wrongs else f"Nothing is wrong, {doubts}."


# -- the live table


def print_frame(url: str, snapshot: Mapping[str, Any]) -> None:
    """One frame, and no more."""
    console = _console(None if sys.stdout.isatty() else _FRAME_CHARACTERS)
    console.print(_frame(url, snapshot, "", _FRAME_REQUESTS))


@contextmanager
def live() -> Iterator[Callable[[str, Mapping[str, Any], str], None]]:
    """A function that shows a snapshot, and trouble, on a screen of its own until the block ends."""
    from rich.live import Live

    console = _console(None)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as screen:

        def show(url: str, snapshot: Mapping[str, Any], trouble: str) -> None:
            room = console.size.height - len(snapshot.get("nodes") or ()) - 8
            screen.update(_frame(url, snapshot, trouble, max(1, room)), refresh=True)

        yield show


def _frame(url: str, snapshot: Mapping[str, Any], trouble: str, most_requests: int) -> RenderableType:
    from rich.console import Group

    parts: list[RenderableType] = [_line(line) for line in _summary(url, snapshot)]
    if trouble:
        parts.append(_line(trouble, "bold red"))
    parts += [_line(""), _nodes(snapshot.get("nodes") or ())]
    requests = (snapshot.get("requests") or [])[:most_requests]
    if requests:
        parts += [_line(""), _requests(requests)]
    return Group(*parts)


def _summary(url: str, snapshot: Mapping[str, Any]) -> Iterator[str]:
    replicas = len(snapshot.get("replicas") or ())
    yield "  ".join(
        [
            f"Hearth {snapshot.get('version', '?')}",
            url,
            f"up {_duration(figure(snapshot, 'uptime_seconds'))}",
            *([f"{replicas} replicas"] if replicas > 1 else []),
            f"{figure(snapshot, 'in_flight'):.0f} in flight",
            f"{figure(snapshot, 'queue'):.0f} queued",
        ]
    )
    minute = snapshot.get("minute") or {}
    first = minute.get("first_content_ms") or {}
    share = minute.get("local_share")
    yield "  ".join(
        [
            f"last minute: {figure(minute, 'requests_per_second'):g} requests/s",
            f"{figure(minute, 'tokens_per_second'):g} tokens/s",
            f"{figure(minute, 'failed'):.0f} failed",
            *([] if share is None else [f"{share:.0%} local"]),
        ]
    )
    ttft = f"TTFT {_ms(first.get('p50'))} (p95 {_ms(first.get('p95'))})"
    yield "  ".join([ttft, *_money(snapshot.get("money") or {})])


def _money(money: Mapping[str, Any]) -> Iterator[str]:
    if "spent_usd" in money:
        budget = money.get("budget") or {}
        limit = figure(budget, "limit_usd")
        of = f" of ${limit:.2f}" if limit else ""
        spent, saved = figure(money, "spent_usd"), figure(money, "saved_usd")
        yield f"this {money.get('period', 'month')}: ${spent:.2f}{of} spent, ${saved:.2f} saved"


def _nodes(nodes: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(("node", 3), ("state", 2), ("load", 0), ("in memory, or why not", 5))
    for node in nodes:
        limit = node.get("max_concurrency")
        load = f"{figure(node, 'in_flight') + figure(node, 'others_in_flight'):.0f}{f'/{limit}' if limit else ''}"
        state = state_of(node)
        cloud = "" if node.get("tier") == "local" else f" ({node.get('tier')})"
        table.add_row(
            _line(f"{node.get('name', '?')}{cloud}"),
            _line(state, _STATES.get(state, "")),
            _line(load),
            _line(reason_of(node) or _memory(node)),
        )
    return table


def _memory(node: Mapping[str, Any]) -> str:
    loaded = node.get("loaded") or []
    names = ", ".join(str(model.get("name", "?")) for model in loaded)
    used, room = figure(node, "vram_bytes") / GIB, figure(node, "vram_gb")
    size = f"{used:.1f}{f'/{room:g}' if room else ''} GiB " if used else ""
    return f"{size}{names}"


def _requests(requests: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(("time", 0), ("model", 4), ("served by", 3), ("why", 4), ("TTFT", 0), ("whole", 0))
    for request in requests:
        failed = request.get("outcome") != "ok"
        table.add_row(
            _line(time.strftime("%H:%M:%S", time.localtime(figure(request, "at") / 1000))),
            _line(request.get("asked") or "?"),
            _line(request.get("node") or "-"),
            _line(_why(request), "red" if failed else ""),
            _line(_ms(request.get("first_content_ms"))),
            _line(_ms(request.get("ms"))),
        )
    return table


def _why(request: Mapping[str, Any]) -> str:
    if request.get("outcome") != "ok":
        return str(request.get("code") or request.get("outcome") or "?")
    fallback = request.get("fallback")
    return f"after {str(fallback).replace('_', ' ')}" if fallback else str(request.get("why") or "")


# -- how all of it is drawn


def _table(*columns: tuple[str, int]) -> Table:
    """Rows of one line each. Columns with a share of 0 are as wide as they need."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for header, share in columns:
        table.add_column(header, no_wrap=True, overflow="ellipsis", ratio=share or None)
    return table


def _line(text: object, style: str = "") -> Text:
    from rich.text import Text

    return Text(one_line(text), style, no_wrap=True, overflow="ellipsis")


def _console(width: int | None) -> Console:
    from rich.console import Console

    return Console(width=width, highlight=False)


def _ms(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
