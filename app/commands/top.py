"""`python -m app top`: what the running gateway does, as it does it."""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

from app.commands import terminal
from app.commands.running import Gateway, OnlyKey, Unreachable, Url, figure, the_gateway
from app.commands.terminal import Refused

_MOST_REQUESTS = 50
_RETRY_SECONDS = 1.0
_KEYS_SECONDS = 0.1
_QUIT = ("q", "Q", "\x03", "")  # the last: there is no input any more

commands = terminal.group("What the running gateway does, live.")


def main(argv: Sequence[str]) -> int:
    return terminal.run(commands, "top", argv)


@commands.callback(invoke_without_command=True)
def top(
    url: Url = None,
    key: OnlyKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON and end.")] = False,
) -> None:
    """Watch nodes, load, speed and the last requests; q ends it."""
    gateway = the_gateway(url, key)
    first = gateway.get("/admin/snapshot")
    if as_json:
        print(json.dumps(first, indent=2))
    elif once or not sys.stdout.isatty():
        from app.commands.frames import print_frame

        print_frame(gateway.url, first)
    else:
        _watch(gateway, first)


class Picture:
    """What is shown: the latest snapshot, with the requests of those before it, the newest first."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.snapshot = first
        self.trouble = ""

    def take(self, snapshot: dict[str, Any]) -> None:
        """A snapshot that is not whole holds only what is new, and may repeat some of the whole one before it."""
        requests = list(snapshot.get("requests") or [])
        if not snapshot.get("whole", True):
            known = figure(self.snapshot, "seq")
            requests = [request for request in requests if figure(request, "seq") > known]
            requests += self.snapshot.get("requests") or []
        self.snapshot = {**snapshot, "requests": requests[:_MOST_REQUESTS]}
        self.trouble = ""


def follow(gateway: Gateway, give: Callable[[dict[str, Any] | Refused], None], ended: Callable[[float], bool]) -> None:
    """Gives snapshots, and what went wrong, until `ended` says so; it waits as many seconds for that."""
    while True:
        try:
            for snapshot in gateway.events():
                give(snapshot)
                if ended(0):
                    return
        except Refused as refused:
            give(refused)
            if not isinstance(refused, Unreachable):
                return
        if ended(_RETRY_SECONDS):
            return


def _watch(gateway: Gateway, first: dict[str, Any]) -> None:
    from app.commands.frames import live

    news: queue.SimpleQueue[dict[str, Any] | Refused] = queue.SimpleQueue()
    end = threading.Event()
    # It may wait for the network when the user has had enough, and is not waited for.
    threading.Thread(target=follow, args=(gateway, news.put, end.wait), daemon=True).start()
    picture = Picture(first)
    final: Refused | None = None
    try:
        with _interrupted(end), _keys() as pressed, live() as show:
            show(gateway.url, picture.snapshot, "")
            while pressed() not in _QUIT and not end.is_set():
                with suppress(queue.Empty):
                    while True:
                        new = news.get_nowait()
                        if isinstance(new, Refused):
                            picture.trouble = new.message
                            final = None if isinstance(new, Unreachable) else new
                        else:
                            picture.take(new)
                if final is not None:
                    break
                show(gateway.url, picture.snapshot, picture.trouble)
    finally:
        end.set()
    if final is not None:
        raise final


@contextmanager
def _interrupted(end: threading.Event) -> Iterator[None]:
    """Ctrl-C sets the event. Python's own exception may come while a frame is drawn, where it can get lost."""
    before = signal.signal(signal.SIGINT, lambda number, frame: end.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _keys() -> Iterator[Callable[[], str | None]]:
    """A function that waits a moment for a key: the key, "" at the input's end, None when there was none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import select
    import termios
    import tty

    terminal_number = sys.stdin.fileno()
    before = termios.tcgetattr(terminal_number)

    def pressed() -> str | None:
        ready, _, _ = select.select([sys.stdin], [], [], _KEYS_SECONDS)
        return sys.stdin.read(1) if ready else None

    tty.setcbreak(terminal_number)
    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal_number, termios.TCSADRAIN, before)


def _no_key() -> None:
    time.sleep(_KEYS_SECONDS)
