"""Several worker processes on one port, as an operator would start them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from app.telemetry.logs import Logger
from app.workers import Slot, Supervisor
from tests.fakes import FakeNode, FakeOllama, FakeVLLM
from tests.system.gateway_process import GatewayProcess, children
from tests.system.harness import node_settings, until
from tests.system.plain_client import Response, connected, request, send
from tests.system.registration import add, kept

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SLOW: Any = {"tokens": 40, "token_seconds": 0.03}
ENDLESS: Any = {"tokens": 10_000, "token_seconds": 0.05}
START_SECONDS = 30.0
STOP_SECONDS = 15.0


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Workers(GatewayProcess):
    """A gateway of several processes."""

    @property
    def pid(self) -> int:
        return self._running.pid

    async def all_serve(self, count: int, seconds: float = START_SECONDS) -> list[int]:
        """Waits until so many workers know the nodes, and returns their numbers."""

        def served() -> set[int]:
            changes = [line for line in self.lines if line["event"] == "node changed" and line["state"] == "healthy"]
            return {int(line["worker"]) for line in changes} & set(children(self.pid))

        await until(lambda: len(served()) == count, "all workers serve", seconds)
        return sorted(served())


@asynccontextmanager
async def running(
    folder: Path, url: str, *nodes: FakeNode[Any], workers: int = 2, **settings: Any
) -> AsyncIterator[tuple[Workers, list[int]]]:
    settings.setdefault("local_nodes", node_settings(*nodes))
    settings.setdefault("nodes_file", "off")
    async with Workers(folder, redis_url=url, workers=workers, health_check_interval=0.2, **settings) as hearth:
        yield hearth, await hearth.all_serve(workers)


async def streams(hearth: Workers, count: int) -> list[asyncio.Task[bytes]]:
    """The bodies of so many streamed chats, each on a connection of its own."""

    async def stream() -> bytes:
        async with connected(hearth.url) as client:
            return (await client.ask(request({**CHAT, "stream": True}))).body

    return [asyncio.create_task(stream()) for _ in range(count)]


def whole(bodies: list[bytes]) -> bool:
    return all(b"t39 " in body and body.endswith(b"data: [DONE]\n\n") for body in bodies)


def spotless(hearth: Workers) -> None:
    assert hearth.stdout == b""
    assert b"Traceback" not in hearth.stderr
    assert not [line for line in hearth.lines if line["level"] in ("error", "critical")]


async def test_workers_share_the_port_and_drain_at_the_first_signal(tmp_path: Path, valkey_url: str) -> None:
    async with (
        FakeOllama(models=["m"], **SLOW) as node,
        running(tmp_path, valkey_url, node, workers=3) as (hearth, pids),
    ):
        assert children(hearth.pid) == pids
        answers = await streams(hearth, 24)
        await node.until(lambda n: n.open == 24, 10)

        hearth.signal(signal.SIGTERM)
        for pid in pids:  # as a service manager does, which sends its signal to every process
            os.kill(pid, signal.SIGTERM)

        assert whole(await asyncio.gather(*answers))
        assert await hearth.ended(STOP_SECONDS) == 0
        assert len({line["worker"] for line in hearth.requests()}) > 1
        assert len(hearth.requests()) == 24
        assert not any(map(runs, pids))
        spotless(hearth)


async def test_a_second_signal_ends_them_at_once(tmp_path: Path, valkey_url: str) -> None:
    async with FakeOllama(models=["m"], **ENDLESS) as node, running(tmp_path, valkey_url, node) as (hearth, pids):
        async with connected(hearth.url) as client:
            client.write(request({**CHAT, "stream": True}))
            await node.until(lambda n: n.open == 1)
            hearth.signal(signal.SIGINT)
            await until(lambda: any("second signal" in line["event"] for line in hearth.lines), "it says what it does")
            await asyncio.sleep(0.2)
            assert runs(hearth.pid)

            hearth.signal(signal.SIGINT)

            await hearth.ended(3)
            assert not any(map(runs, pids))
            await node.until(lambda n: n.aborted)


async def test_a_worker_that_is_killed_is_replaced_by_one_that_knows_what_the_others_know(
    tmp_path: Path, valkey_url: str
) -> None:
    path = tmp_path / "data" / "nodes.json"
    async with (
        FakeOllama(models=["m"]) as node,
        FakeVLLM(models=["late"]) as late,
        running(tmp_path, valkey_url, node, nodes_file=path) as (hearth, pids),
    ):
        answer = await add(hearth.client, late.url, kind="vllm", models=["late"])
        assert answer.status_code == 200, answer.text

        async def known() -> bool:
            shown = [await get(hearth, "/nodes/status") for _ in range(12)]
            return all(late.url.encode() in answer.body for answer in shown)

        await until(known, "all workers know it", 2)
        await until(lambda: kept(path) == [late.url], "the file has it")
        async with asking(hearth) as (statuses, lost):
            await until(lambda: len(statuses) > 20, "requests are served")
            os.kill(pids[0], signal.SIGSTOP)
            await asyncio.sleep(0.1)  # connections come that it does not get to see
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: set(children(hearth.pid)) - set(pids), "another one has started", 2)
            assert pids[1] in await hearth.all_serve(2)
            assert await known()
            assert kept(path) == [late.url]

        assert set(statuses) == {200}
        assert lost[0] <= ASKING  # what it had begun is lost with it, and nothing else
        assert [line["worker"] for line in hearth.lines if "is replaced" in line["event"]] == [pids[0]]


ASKING = 4


async def get(hearth: Workers, path: str) -> Response:
    """Asks on a connection of its own, which any worker may get."""
    return await send(hearth.url, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(), "GET")


@asynccontextmanager
async def asking(hearth: Workers) -> AsyncIterator[tuple[list[int], list[int]]]:
    """Requests without end, each on a new connection; gives their statuses, and how many got no answer."""
    statuses, lost = [], [0]
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            try:
                statuses.append((await get(hearth, "/health")).status)
            except (OSError, asyncio.IncompleteReadError):
                lost[0] += 1
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(ask()) for _ in range(ASKING)]
    try:
        yield statuses, lost
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def test_a_worker_that_is_asked_to_end_ends_its_streams_while_another_takes_its_place(
    tmp_path: Path, valkey_url: str
) -> None:
    async with FakeOllama(models=["m"], **SLOW) as node, running(tmp_path, valkey_url, node) as (hearth, pids):
        answers = await streams(hearth, 12)
        await node.until(lambda n: n.open == 12, 10)

        os.kill(pids[0], signal.SIGTERM)

        await until(lambda: len(children(hearth.pid)) == 3, "its successor starts while it ends")
        assert whole(await asyncio.gather(*answers))
        await until(lambda: not runs(pids[0]), "it has ended")
        await hearth.all_serve(2)
        spotless(hearth)


async def test_no_worker_outlives_its_parent(tmp_path: Path, valkey_url: str) -> None:
    async with FakeOllama(models=["m"]) as node, running(tmp_path, valkey_url, node) as (hearth, pids):
        hearth.signal(signal.SIGKILL)

        await until(lambda: not any(map(runs, pids)), "they have ended", 5)


async def test_one_worker_is_one_process_and_its_port_is_taken(tmp_path: Path, valkey_url: str) -> None:
    async with Workers(tmp_path, redis_url=valkey_url, workers=1) as first:
        await first.serving()
        assert children(first.pid) == []

        async with Workers(tmp_path, redis_url=valkey_url, workers=2, port=first.port) as second:
            assert await second.ended(20) == 1
            assert second.stderr.startswith(b"hearth: PORT: ")
            assert second.stderr.count(b"\n") == 1


# -- the parent alone, with workers that are no gateways


class Log:
    """Keeps what the parent says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, event: str, **fields: Any) -> None:
        self.said.append(event)

    info = error


def supervised(log: Log, *scripts: str, starting: Callable[[], None] = lambda: None) -> tuple[int, int]:
    """Runs a parent with one worker for each script, in turn; gives its exit status and how many it started.

    `starting` is called when a worker runs that the parent does not have in its slot yet.
    """
    started = 0

    def start(index: int, listeners: list[socket.socket], channel: socket.socket) -> subprocess.Popen[bytes]:
        nonlocal started
        script = scripts[min(started, len(scripts) - 1)]
        started += 1
        worker = subprocess.Popen(["sh", "-c", script], stdin=channel.fileno(), stdout=channel.fileno())
        starting()
        return worker

    status = Supervisor([Slot(0, [])], start, cast(Logger, log)).run()
    return status, started


def test_workers_that_never_came_to_serve_end_the_whole() -> None:
    """They would only fail again and again."""
    log = Log()

    assert supervised(log, "exit 3") == (1, 1)
    assert log.said == []


def test_a_worker_that_ended_well_or_badly_is_started_again() -> None:
    log = Log()
    ends = f"printf r; kill -TERM {os.getpid()}; head -c 1 >&2"

    status, started = supervised(log, "printf r; exit 0", "printf r; kill -9 $$", ends)

    assert (status, started) == (0, 3)
    assert log.said[:2] == ["a worker ended and is replaced"] * 2


def test_a_worker_that_starts_as_the_signal_comes_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.workers.DRAIN_SECONDS", 0.1)

    status, started = supervised(
        Log(), "printf r; head -c 1 >&2", starting=lambda: os.kill(os.getpid(), signal.SIGTERM)
    )

    assert (status, started) == (0, 1)


def test_a_worker_that_does_not_end_when_told_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.workers._KILL_SECONDS", 0.1)
    monkeypatch.setattr("app.workers.DRAIN_SECONDS", 0.1)
    stubborn = f"printf r; kill -TERM {os.getpid()}; while :; do sleep 0.1; done"

    status, started = supervised(Log(), stubborn)

    assert (status, started) == (1, 1)
