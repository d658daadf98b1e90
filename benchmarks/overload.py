"""Ten times as many requests as the nodes can serve, from two keys, one of which asks nine times as often.

Run: python -m benchmarks.overload [--seconds 60] [--times 10] [--queue-size 200] [--queue-timeout 8]

Requests leave at a steady pace, whatever becomes of those before. Each must be answered: with a whole stream, or with a
429 that says when to come back. `fair` is how far the keys' shares are apart, of those that were served while both
waited. Ends with 1 when a request was lost, or anything is stuck at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.node import MODEL
from benchmarks.processes import (
    PROJECT,
    Processors,
    allow_many_sockets,
    cpu_seconds,
    free_port,
    node,
    resident_mib,
    started,
    wait_until_ready,
)

GREEDY, MODEST = "sk-greedy-key-0001", "sk-modest-key-0001"
NODES, PLACES = 2, 4
TOKENS, PACE_MS = 20, 20
PATIENCE_SECONDS = 60.0  # of a client: longer than any wait that is allowed
_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
_MEMORY_LOOKS = 6
_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Times are seconds since the first one was sent."""

    key: str
    sent_at: float
    ended_at: float
    status: int  # 0 = it was lost
    whole: bool = False
    retry_after: int | None = None
    queue_ms: int | None = None


@dataclass(slots=True)
class Report:
    """All answers."""

    seconds: float
    answers: list[Answer] = field(default_factory=list)

    def lost(self) -> list[Answer]:
        """Those that were neither answered whole nor told when to come back."""
        return [
            answer
            for answer in self.answers
            if not ((answer.status == 200 and answer.whole) or (answer.status == 429 and answer.retry_after))
        ]

    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 429]

    def served(self, key: str, since: float = 0.0, until: float = float("inf")) -> int:
        """Whole answers to the key that ended within these times."""
        return sum(each.whole for each in self.answers if each.key == key and since <= each.ended_at < until)

    def apart(self) -> float:
        """How far what the two keys got is apart, while both have many who wait, as a share of their mean."""
        since, until = self.seconds / 6, self.seconds
        greedy, modest = (self.served(key, since, until) for key in (GREEDY, MODEST))
        return abs(greedy - modest) / max(1, (greedy + modest) / 2)


async def overload(url: str, per_second: float, seconds: float, share: float = 0.9, model: str = MODEL) -> Report:
    """Asks so often, and for a `share` of the requests with the greedy key; returns when all are answered."""
    report, began = Report(seconds), time.perf_counter()
    lots = random.Random(1)
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(PATIENCE_SECONDS)
        ) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(int(per_second * seconds)):
            await asyncio.sleep(began + number / per_second - time.perf_counter())
            key = GREEDY if lots.random() < share else MODEST
            tasks.create_task(_ask(client, url, key, model, began, report))
    return report


async def _ask(client: aiohttp.ClientSession, url: str, key: str, model: str, began: float, report: Report) -> None:
    sent_at = time.perf_counter() - began
    body, status, retry_after, queue_ms = b"", 0, None, None
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with client.post(
            f"{url}/v1/chat/completions",
            json={**_BODY, "model": model},
            headers={"authorization": f"Bearer {key}"},
        ) as answer:
            body = await answer.read()
            status = answer.status
            retry_after, queue_ms = (answer.headers.get(name) for name in ("retry-after", "x-hearth-queue-ms"))
    report.answers.append(
        Answer(
            key,
            sent_at,
            time.perf_counter() - began,
            status,
            status == 200 and body.endswith(_END) and b'"error"' not in body,
            None if retry_after is None else int(retry_after),
            None if queue_ms is None else int(queue_ms),
        )
    )


async def stuck(url: str) -> float:
    """Requests that the gateway believes to be at work or waiting."""
    async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(("hearth_in_flight{", "hearth_waiting"))
    )


@contextlib.contextmanager
def _gateway(cpu: int, folder: Path, nodes: list[str], options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    port = free_port()
    declared = [
        {"url": url, "kind": "vllm", "name": f"n{number}", "max_concurrency": PLACES}
        for number, url in enumerate(nodes)
    ]
    variables = {
        "LOCAL_NODES": json.dumps(declared),
        "API_KEYS": f"{GREEDY},{MODEST}",
        "PORT": str(port),
        "QUEUE_SIZE": str(options.queue_size),
        "QUEUE_TIMEOUT": str(options.queue_timeout),
        "DATABASE_URL": "sqlite:///hearth.db",
        "NODES_FILE": "off",
        "LOG_LEVEL": "WARNING",
        "PYTHONPATH": str(PROJECT),
    }
    with (
        (folder / "output.txt").open("ab") as output,
        started([sys.executable, "-m", "app", "serve"], cpu, output, variables, folder) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/ready", process, 30)
        yield url, process.pid


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0, help="the load, against what the nodes can do")
    parser.add_argument("--queue-size", type=int, default=200)
    parser.add_argument("--queue-timeout", type=float, default=8.0)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    allow_many_sockets()
    cpus = Processors.available()
    capacity = NODES * PLACES / (TOKENS * PACE_MS / 1000)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-overload-")))
        nodes = [stack.enter_context(node(cpus.others, TOKENS, PACE_MS)) for _ in range(NODES)]
        url, pid = stack.enter_context(_gateway(cpus.gateway, folder, nodes, options))
        # What a first load leaves behind is no leak.
        asyncio.run(overload(url, capacity * options.times, min(10.0, options.seconds)))
        cpu = cpu_seconds(pid)
        with _Memory(pid, options.seconds / _MEMORY_LOOKS) as memory:
            report = asyncio.run(overload(url, capacity * options.times, options.seconds))
        used = cpu_seconds(pid) - cpu
        left = asyncio.run(stuck(url))
    _show(report, capacity, memory.mib, used, left)
    return int(bool(report.lost() or left))


class _Memory:
    """The memory of a process tree, from time to time while this is entered, and at its end."""

    def __init__(self, pid: int, every_seconds: float) -> None:
        self.mib: list[float] = []
        self._pid, self._every_seconds = pid, every_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        self.mib.append(resident_mib(self._pid))
        while not self._over.wait(self._every_seconds):
            self.mib.append(resident_mib(self._pid))
        self.mib.append(resident_mib(self._pid))

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _show(report: Report, capacity: float, mib: list[float], used: float, left: float) -> None:
    sent, refused = len(report.answers), report.refused()
    told = [answer.retry_after for answer in refused if answer.retry_after]
    waited = [answer.queue_ms / 1000 for answer in report.answers if answer.whole and answer.queue_ms is not None]
    at_once = sum(answer.ended_at - answer.sent_at < 0.5 for answer in refused)
    print(
        f"{sent} requests in {report.seconds:g} s, {sent / report.seconds / capacity:.1f} times the {capacity:g} a "
        f"second that the nodes can do\n"
        f"served {report.served(GREEDY)} + {report.served(MODEST)}; the keys are {report.apart():.1%} apart\n"
        f"refused {len(refused)}, {at_once} of them within half a second; "
        f"Retry-After {_spread(told)} s; those who were served had waited {_spread(waited)} s\n"
        f"lost {len(report.lost())}, stuck {left:g}\n"
        f"memory {', '.join(f'{each:.1f}' for each in mib)} MiB, from before to after\n"
        f"{used / sent * 1e6:.0f} us CPU a request"
    )


def _spread(values: list[float] | list[int]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[0]:.3g} to {ordered[-1]:.3g}, half within {statistics.median(ordered):.3g}"


if __name__ == "__main__":
    sys.exit(main())
