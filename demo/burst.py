"""Shows what the gateway is for: a burst of requests while nodes die. What `make demo` calls.

Everything is a process of its own on loopback, the cloud included, so nothing leaves this machine and nothing costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
REAL_ENGINE = ROOT / "scripts" / "real-engine.sh"
REQUESTS = 24
AT_ONCE = 8
FIRST_DEATH, ALL_DEATHS = REQUESTS // 3, 2 * REQUESTS // 3  # after so many requests have ended
TOKENS = 24
DEATH_DELAY_SECONDS = 0.15  # so that a death strikes amid answers, and not between them
TEXT = "".join(f"t{number} " for number in range(TOKENS))
CLOUD_MODEL, CLOUD_KEY = "cloud-model", "demo-cloud-key"
RUN_SECONDS = 90.0
START_SECONDS = 30.0
REQUEST_SECONDS = 20.0
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "SYSTEMROOT")
COLUMNS = (
    ("request", 9),
    ("served by", 27),
    ("attempts", 10),
    ("why not the first", 19),
    ("outcome", 18),
    ("first token", 13),
    ("text right", 0),
)


@dataclass(slots=True)
class Node:
    """An upstream server of the demo."""

    name: str
    url: str
    process: asyncio.subprocess.Process
    exact: bool = True  # its text is known

    def kill(self) -> None:
        """Ends it as the kernel ends a process that ran out of memory: without a last word."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)


@dataclass(slots=True)
class Result:
    """What became of one request, as its client saw it."""

    number: int
    outcome: str = "lost"
    headers: Mapping[str, str] = field(default_factory=dict)
    first_ms: float | None = None
    text: str = ""
    ended: bool = False  # with [DONE]
    error: str | None = None  # from an error event
    right: bool = False  # it is the text that the nodes say

    @property
    def node(self) -> str:
        return self.headers.get("x-hearth-node", "-")

    @property
    def tier(self) -> str:
        return self.headers.get("x-hearth-tier", "-")

    @property
    def attempts(self) -> str:
        return self.headers.get("x-hearth-attempts", "-")

    @property
    def row(self) -> tuple[str, ...]:
        first = f"{self.first_ms:.0f} ms" if self.first_ms is not None else "-"
        served_by = f"{self.node} ({self.tier})"
        why = self.headers.get("x-hearth-fallback", "")
        return (f"#{self.number}", served_by, self.attempts, why, self.outcome, first, "yes" if self.right else "no")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a fake node is. They differ, so that their answers do not end together."""

    first_seconds: float
    token_seconds: float


FAKES: Mapping[str, Pace] = {"ollama": Pace(0.1, 0.025), "vllm": Pace(0.2, 0.015), "llamacpp": Pace(0.3, 0.02)}
CLOUD_PACE = Pace(0.4, 0.01)


async def start_fake(name: str, kind: str, pace: Pace, stack: AsyncExitStack, *options: str) -> Node:
    """Starts a fake node; it ends with this process, however this process ends."""
    speed = (f"--tokens={TOKENS}", f"--first-seconds={pace.first_seconds}", f"--token-seconds={pace.token_seconds}")
    command = (sys.executable, "-m", "tests.fakes", kind, "--until-stdin-closes", *speed, *options)
    process = await stack.enter_async_context(running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT))
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
    return Node(name, json.loads(line)["url"], process)


async def start_real(name: str, stack: AsyncExitStack) -> Node:
    """Starts a real llama.cpp server with a small model."""
    port = free_port()
    command = (str(REAL_ENGINE), ".engine", str(port))
    environment = {**os.environ, "FOREGROUND": "1"}
    quiet = subprocess.DEVNULL
    process = await stack.enter_async_context(running(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet))
    node = Node(name, f"http://127.0.0.1:{port}", process, exact=False)
    await answering(f"{node.url}/health")
    return node


async def start_nodes(engine: str, stack: AsyncExitStack) -> tuple[str, list[Node]]:
    """The model that all nodes serve, and three nodes."""
    if engine == "fake":
        model = "demo"
        return model, [
            await start_fake(f"{kind}-{place}", kind, pace, stack, f"--models={model}")
            for place, (kind, pace) in enumerate(FAKES.items(), 1)
        ]
    print("Real llama.cpp servers: the first run installs one, which takes a minute or two.", flush=True)
    model = "gemma-3-270m"
    install = await asyncio.create_subprocess_exec(
        str(REAL_ENGINE), ".engine", cwd=ROOT, env={**os.environ, "INSTALL_ONLY": "1"}
    )
    if await install.wait():
        sys.exit("The real engine could not be installed; `make demo` without ENGINE=real needs none.")
    real = [await start_real(f"real-{place}", stack) for place in (1, 2)]
    return model, [*real, await start_fake("fake-3", "vllm", FAKES["vllm"], stack, f"--models={model}")]


async def start_gateway(nodes: Sequence[Node], cloud: Node, stack: AsyncExitStack) -> str:
    """Returns the gateway's URL once it answers."""
    port = free_port()
    # An empty folder, and none of the caller's settings: the demo is the same on every machine.
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-demo-"))
    settings = {
        "LOCAL_NODES": json.dumps([{"name": node.name, "url": node.url} for node in nodes]),
        "CLOUD_ENDPOINT": f"{cloud.url}/v1",
        "CLOUD_API_KEY": CLOUD_KEY,
        "CLOUD_MODEL": CLOUD_MODEL,
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "LB_STRATEGY": "least_connections",
        "LOG_LEVEL": "ERROR",
        "PYTHONPATH": str(ROOT),
    }
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    command = (sys.executable, "-m", "app", "serve")
    await stack.enter_async_context(running(command, cwd=folder, env=kept | settings))
    url = f"http://127.0.0.1:{port}"
    await answering(f"{url}/v1/models", until=[node.name for node in nodes])
    return url


@asynccontextmanager
async def running(command: Sequence[str], **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child process that is gone, and reaped, at the end of the block.

    In a session of its own it gets no Ctrl-C from the terminal beside the signal that ends it in good order.
    """
    process = await asyncio.create_subprocess_exec(
        *command, **options, start_new_session=True, preexec_fn=_end_with_parent
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 5)
        except TimeoutError:
            process.kill()
            await process.wait()


def _end_with_parent() -> None:
    """Has the kernel end this child when its parent is killed and can do it no more. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def answering(url: str, until: Sequence[str] = ()) -> None:
    """Returns once this URL answers 200, with all these words in it. Exits when it takes too long."""
    deadline = time.monotonic() + START_SECONDS
    async with httpx.AsyncClient(trust_env=False, timeout=2) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get(url)
                if answer.status_code == 200 and all(word in answer.text for word in until):
                    return
            await asyncio.sleep(0.05)
    sys.exit(f"No answer from {url} in {START_SECONDS:.0f} s.")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


class Burst:
    """Sends the requests, kills the nodes in between, and prints each result as it comes."""

    def __init__(self, url: str, model: str, nodes: Sequence[Node]) -> None:
        self.results: list[Result] = []
        self._url = f"{url}/v1/chat/completions"
        self._model = model
        self._nodes = nodes
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._inexact = {node.name for node in nodes if not node.exact}

    async def run(self) -> None:
        print_row(tuple(title for title, _ in COLUMNS))
        async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_SECONDS) as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill_after(FIRST_DEATH, self._nodes[:1]))
            tasks.create_task(self._kill_after(ALL_DEATHS, self._nodes[1:]))
            for number in range(1, REQUESTS + 1):
                tasks.create_task(self._ask(client, number))

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        async with self._gate:
            result = Result(number)
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._stream(client, result)
            except (httpx.HTTPError, TimeoutError) as error:
                result.error = type(error).__name__
            result.outcome = self._outcome(result)
        self.results.append(result)
        print_row(result.row)

    async def _stream(self, client: httpx.AsyncClient, result: Result) -> None:
        message = {"role": "user", "content": f"Request {result.number}: count to {TOKENS}."}
        body = {"model": self._model, "messages": [message], "stream": True, "max_tokens": TOKENS}
        sent = time.monotonic()
        async with client.stream("POST", self._url, json=body) as answer:
            result.headers = answer.headers
            if answer.status_code != 200:
                result.outcome = f"status {answer.status_code}"
                return
            async for line in answer.aiter_lines():
                read_line(line, result)
                if result.text and result.first_ms is None:
                    result.first_ms = (time.monotonic() - sent) * 1000

    def _outcome(self, result: Result) -> str:
        if result.outcome.startswith("status"):
            return result.outcome
        if result.error is not None and result.text:
            return "cut, and said so"
        if not result.ended or result.error is not None:
            return "lost"
        result.right = result.text == TEXT or (result.node in self._inexact and result.text != "")
        return "complete" if result.right else "wrong text"

    async def _kill_after(self, count: int, nodes: Sequence[Node]) -> None:
        while len(self.results) < count:  # noqa: ASYNC110, a few looks do not deserve a condition variable
            await asyncio.sleep(0.01)
        await asyncio.sleep(DEATH_DELAY_SECONDS)
        for node in nodes:
            node.kill()
        print(f"--- kill -9 {', '.join(node.name for node in nodes)}", flush=True)


def read_line(line: str, result: Result) -> None:
    """Takes one line of the event stream into the result."""
    data = line.removeprefix("data: ")
    if data == line:
        return
    if data == "[DONE]":
        result.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        result.error = str(event["error"].get("message", "error"))
    for choice in event.get("choices", ()):
        result.text += choice["delta"].get("content") or ""


def print_row(cells: Sequence[str]) -> None:
    print("".join(cell.ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)).rstrip(), flush=True)


def summary(results: Sequence[Result]) -> str:
    """One line on the whole burst."""
    outcomes = Counter(result.outcome for result in results)
    tiers = Counter(result.tier for result in results if result.outcome == "complete")
    rescued = sum(result.outcome == "complete" and result.attempts not in ("-", "1") for result in results)
    said = [f"{outcomes.pop('complete', 0)} of {len(results)} answers complete"]
    said.append(f"{tiers['local']} from local nodes and {tiers['cloud']} from the cloud")
    said.append(f"{rescued} of them tried elsewhere first, unseen by the client")
    said += [f"{count} {outcome}" for outcome, count in sorted(outcomes.items())]
    return "; ".join(said) + "."


async def demonstrate(engine: str) -> bool:
    """Runs the demo; returns whether every request ended in one of the ways that it should."""
    async with AsyncExitStack() as stack:
        model, nodes = await start_nodes(engine, stack)
        paid = (f"--models={CLOUD_MODEL}", f"--api-key={CLOUD_KEY}")
        cloud = await start_fake("cloud", "cloud", CLOUD_PACE, stack, *paid)
        url = await start_gateway(nodes, cloud, stack)
        print(f"{REQUESTS} streams, {AT_ONCE} at once, through {url} to {', '.join(node.name for node in nodes)}.\n")
        burst = Burst(url, model, nodes)
        async with asyncio.timeout(RUN_SECONDS):
            await burst.run()
        print(f"\n{summary(burst.results)}")
        return all(result.outcome in ("complete", "cut, and said so") for result in burst.results)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.burst", description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=("fake", "real"), default="fake", help="real: two llama.cpp servers")
    try:
        return 0 if asyncio.run(demonstrate(parser.parse_args().engine)) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
