"""Any of several workers tells of all, and what was once told stays true when one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.fakes import FakeOllama
from tests.system.gateway_process import children
from tests.system.harness import until
from tests.system.metrics_gateway import Scraped, parsed
from tests.system.plain_client import request, send
from tests.system.test_workers import CHAT, START_SECONDS, Workers, get, running, streams, whole

WORKERS = 4
STALE_SECONDS = 2.0


async def scraped(hearth: Workers) -> Scraped:
    """By any worker."""
    return parsed((await get(hearth, "/metrics")).body.decode())


async def chats(hearth: Workers, count: int) -> None:
    answers = await asyncio.gather(*(send(hearth.url, request(CHAT)) for _ in range(count)))
    assert [answer.status for answer in answers] == [200] * count


async def told_by_all(hearth: Workers, name: str, value: float, **labels: str) -> None:
    """Waits until whoever is asked tells of so many, soon."""

    async def so() -> bool:
        return {(await scraped(hearth)).sum(name, **labels) for _ in range(3 * WORKERS)} == {value}

    await until(so, f"{name} is {value} to all", STALE_SECONDS + 8)


async def test_any_worker_tells_of_all_and_counts_go_on_when_one_is_killed(tmp_path: Path, valkey_url: str) -> None:
    async with (
        FakeOllama(models=["m"], tokens=40, token_seconds=0.05) as node,
        running(tmp_path, valkey_url, node, workers=WORKERS) as (hearth, pids),
    ):
        bodies = await streams(hearth, 12)
        await node.until(lambda n: n.open == 12, 10)
        await told_by_all(hearth, "hearth_in_flight", 12, node="n0")
        assert whole(await asyncio.gather(*bodies))
        await told_by_all(hearth, "hearth_requests_total", 12, outcome="ok")
        await told_by_all(hearth, "hearth_time_per_output_token_seconds_count", 12)
        served = [int(line["worker"]) for line in hearth.requests()]
        victim = max(set(served), key=served.count)
        seen: list[float] = []
        killed = asyncio.Event()
        watching = asyncio.create_task(_watch(hearth, seen, killed))

        os.kill(victim, signal.SIGKILL)

        await until(lambda: set(children(hearth.pid)) - set(pids), "another one has started", START_SECONDS)
        await hearth.all_serve(WORKERS)
        killed.set()
        await watching
        assert set(seen) == {12.0}
        node.engine.script.token_seconds = 0.0
        await chats(hearth, 8)
        await told_by_all(hearth, "hearth_requests_total", 20, outcome="ok")
        now = await scraped(hearth)
        assert now.sum("hearth_in_flight") == 0
        assert now.sum("hearth_tokens_total", direction="completion") == 20 * 40
        assert now.sum("hearth_replicas") >= WORKERS
        assert now.sum("hearth_process_resident_memory_bytes") > WORKERS * 20_000_000
        assert now.sum("hearth_node_state", state="healthy") == 1


async def _watch(hearth: Workers, seen: list[float], over: asyncio.Event) -> None:
    while not over.is_set():
        try:
            seen.append((await scraped(hearth)).sum("hearth_requests_total", outcome="ok"))
        except (OSError, asyncio.IncompleteReadError):  # it was the killed one's
            await asyncio.sleep(0.01)
