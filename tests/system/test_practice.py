"""`make run` on a machine with nothing set up: practice nodes, and no trace of them afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.start import OLLAMA_PORT, configured, ollama_answers
from tests.fakes import FakeGeneric, NodeProcess

ROOT = Path(__file__).resolve().parents[2]
PROC = Path("/proc")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Started:
    """A gateway that `demo.start` became."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        settings = {"LOCAL_NODES", "CONFIG_FILE", "CLOUD_API_KEY"}
        environment = {name: value for name, value in os.environ.items() if name not in settings}
        command = [sys.executable, "-m", "demo.start", "--port", self.url.rpartition(":")[2]]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        wait_until(lambda: self._knows_its_models() or self.process.poll() is not None)

    @property
    def nodes(self) -> list[str]:
        """The URLs of the practice nodes, from the environment that the gateway was given."""
        variables = (PROC / str(self.process.pid) / "environ").read_bytes().split(b"\0")
        value = next(variable for variable in variables if variable.startswith(b"LOCAL_NODES="))
        return [node["url"] for node in json.loads(value.partition(b"=")[2])]

    def _knows_its_models(self) -> bool:
        url = f"{self.url}/v1/models"
        return answers(url) and bool(httpx.get(url, trust_env=False).json()["data"])

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Sends the signal; returns the exit status and the output."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=10)
        return self.process.returncode, out, err


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    if not PROC.exists():
        pytest.skip("looks into /proc")
    if ollama_answers(OLLAMA_PORT):
        pytest.skip("this machine has an Ollama")
    gateway = Started(tmp_path)
    try:
        gateway.wait()
        yield gateway
    finally:
        gateway.process.kill()
        gateway.process.communicate()


def test_the_first_request_is_answered_without_any_settings(started: Started) -> None:
    body = {"model": "practice", "messages": [{"role": "user", "content": "hello you"}]}
    answer = httpx.post(f"{started.url}/v1/chat/completions", json=body, trust_env=False)
    status, out, _ = started.end(signal.SIGTERM)

    assert answer.json()["choices"][0]["message"]["content"] == "You said: hello you"
    assert answer.headers["x-hearth-node"].startswith("practice-")
    assert status == 0
    assert 'started two practice nodes (model "practice")' in out.splitlines()[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_practice_nodes_end_with_the_gateway(started: Started, number: signal.Signals) -> None:
    nodes = started.nodes
    assert [answers(url) for url in nodes] == [True, True]

    status, _, err = started.end(number)

    wait_until(lambda: not any(answers(url) for url in nodes))
    assert status == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "variables", "files", "expected"),
    [
        ([], {}, [], False),
        (["--port", "1"], {}, [], False),
        (["--local-nodes=http://a"], {}, [], True),
        (["--config-file", "x.yaml"], {}, [], True),
        ([], {"LOCAL_NODES": "http://a"}, [], True),
        ([], {"LOCAL_NODES": ""}, [], False),
        ([], {"CONFIG_FILE": "x.yaml"}, [], True),
        ([], {}, [".env"], True),
    ],
)
def test_whoever_named_nodes_gets_no_practice_nodes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    variables: dict[str, str],
    files: list[str],
    expected: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LOCAL_NODES", "CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in files:
        (tmp_path / name).touch()

    assert configured(arguments) is expected


async def test_an_ollama_is_found_by_its_version() -> None:
    async with NodeProcess("ollama") as ollama, NodeProcess("generic") as other:
        assert ollama_answers(ollama.port)
        assert not ollama_answers(other.port)
    assert not ollama_answers(free_port())


async def test_a_port_that_hangs_is_given_up_soon() -> None:
    async with FakeGeneric() as node:  # its loop does not run while this test blocks it
        begun = time.monotonic()
        assert not ollama_answers(node.port)

    assert time.monotonic() - begun < 2
