"""Real llama.cpp servers with a small model, and Hearth as a process in front of them.

Everything that is started here ends here, by its own process id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "scripts" / "real-engine.sh"
HOME = PROJECT / ".engine"
MODEL = "gemma-3-270m"
SLOTS = 4  # requests that one engine serves at a time


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(truth: Callable[[], bool], seconds: float, what: str) -> None:
    """Returns once `truth` holds; fails when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=2).status_code == 200
    return False


def end(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Engine:
    """A real llama.cpp server at an address that stays the same when it is started again."""

    log: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def busy_slots(self) -> int:
        return sum(slot["is_processing"] for slot in httpx.get(f"{self.url}/slots", timeout=5).json())

    def start(self) -> None:
        """Starts it if it does not run, and returns once it is ready."""
        if self.process is None or self.process.poll() is not None:
            options = [str(HOME), str(self.port), str(SLOTS), "8192", "--embeddings", "--pooling", "mean"]
            options += self.options
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    [SCRIPT, *options],
                    env=os.environ | {"FOREGROUND": "1", "THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        wait_for(lambda: answers(f"{self.url}/health"), 60, f"an engine; see {self.log}")

    def kill(self) -> None:
        """As when the machine's memory runs out: at once, in the middle of whatever it does."""
        self.stop(signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process:
            end(self.process, number)


@pytest.fixture(scope="session")
def installed() -> None:
    """The engine and its model below .engine; one process installs, others wait for it."""
    HOME.mkdir(exist_ok=True)
    with (HOME / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [SCRIPT, HOME], check=False, env=os.environ | {"INSTALL_ONLY": "1"}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def running(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    logs = tmp_path_factory.mktemp("engines")
    engines = [Engine(logs / f"{number}.txt") for number in (1, 2)]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture
def engines(running: list[Engine]) -> list[Engine]:
    """Two engines that serve MODEL. A test may kill them; the next one gets them running again."""
    for engine in running:
        engine.start()
    return running


@dataclass(frozen=True)
class Hearth:
    """The gateway as a process."""

    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def nodes(self) -> list[dict[str, Any]]:
        """What /admin/nodes says of each node, in the order of LOCAL_NODES."""
        nodes: list[dict[str, Any]] = httpx.get(f"{self.url}/admin/nodes", timeout=5).json()["nodes"]
        return nodes

    def states(self) -> list[str]:
        return [node["state"] for node in self.nodes()]

    def in_flight(self) -> int:
        return sum(node["in_flight"] for node in self.nodes())


@contextlib.contextmanager
def serving(nodes: list[dict[str, str]], log: Path) -> Iterator[Hearth]:
    """`python -m app serve` in front of these nodes, all of them healthy."""
    port = free_port()
    variables = {
        "LOCAL_NODES": json.dumps(nodes),
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "HEALTH_CHECK_INTERVAL": "1",
        "MAX_ATTEMPTS": "3",
        "PYTHONPATH": str(PROJECT),
    }
    command = [sys.executable, "-m", "app", "serve"]
    with log.open("wb") as output:
        # Started elsewhere, so that a .env in the checkout says nothing here.
        process = subprocess.Popen(
            command, cwd=log.parent, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    hearth = Hearth(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: answers(f"{hearth.url}/health"), 20, f"Hearth; see {log}")
        wait_for(lambda: set(hearth.states()) == {"healthy"}, 20, "healthy nodes")
        yield hearth
    finally:
        end(process)


@pytest.fixture(params=["llamacpp", None], ids=["kind given", "kind found"])
def hearth(request: pytest.FixtureRequest, engines: list[Engine], tmp_path: Path) -> Iterator[Hearth]:
    """Hearth in front of both engines, once told what they are and once left to find out."""
    kind = {"kind": request.param} if request.param else {}
    with serving([{"url": engine.url} | kind for engine in engines], tmp_path / "hearth.txt") as gateway:
        yield gateway
