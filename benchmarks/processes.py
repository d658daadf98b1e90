"""Starts the parts of a benchmark, each on its own processor, and reads what the kernel says they used."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PROJECT = Path(__file__).resolve().parents[1]
PAGE_MIB = resource.getpagesize() / 2**20
# Becomes the program in argv[2:]. Before that it chooses its processor, so that no thread ever runs elsewhere, and asks
# for SIGTERM (15) when its parent dies (prctl's option 1), so that a benchmark that is killed leaves nothing behind.
PINNED = """
import ctypes, os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
ctypes.CDLL(None).prctl(1, 15)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class NotReady(Exception):
    """A process ended or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Processors:
    """Which processor each side has. The gateway is alone on its own."""

    gateway: int
    others: int

    @classmethod
    def available(cls) -> Processors:
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise SystemExit("The benchmark needs two processors: one for the gateway alone, one for the rest.")
        return cls(usable[0], usable[1])


def allow_many_sockets() -> None:
    """Lifts the limit of open files for this process and those that it starts: a stream needs two in the gateway."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_port() -> int:
    """A port of the loopback address that nobody listens on just now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(
    command: Sequence[str],
    cpu: int,
    output: int | IO[bytes],
    variables: Mapping[str, str] | None = None,
    folder: Path = PROJECT,
) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process group of its own on one processor; all of the group has ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-c", PINNED, str(cpu), *command],
        cwd=folder,
        env=os.environ | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.DEVNULL if output == subprocess.PIPE else subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


@contextlib.contextmanager
def node(cpu: int, tokens: int, pace_ms: float) -> Iterator[str]:
    """The URL of a node of `benchmarks.node`."""
    command = [sys.executable, "-m", "benchmarks.node", "--tokens", str(tokens), "--pace-ms", str(pace_ms)]
    with started(command, cpu, subprocess.PIPE) as process:
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks the group to end, waits for the process, and kills what is left of the group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Returns once `url` answers at all; raises NotReady when the process ends first or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NotReady(f"ended with {process.returncode} instead of starting")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError as answer:
            answer.close()
            return
        except OSError:
            time.sleep(0.1)
    raise NotReady(f"no answer from {url} in {seconds:.0f} s")


def tree(pid: int) -> list[int]:
    """A process and all its descendants that live now."""
    found, ahead = [], [pid]
    while ahead:
        found.append(ahead.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # ended meanwhile
                ahead += map(int, children.read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time, user and system, that the tree has used so far.

    Read from the processes' CPU clocks, which count in nanoseconds; /proc/PID/stat has ticks of ten milliseconds.
    """
    total = 0.0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += time.clock_gettime(cpu_clock(member))
    return total


def cpu_clock(pid: int) -> int:
    """The clock that clock_getcpuclockid(3) gives for a process; Python offers that call for threads only."""
    scheduler_clock = 2
    return (~pid << 3) | scheduler_clock


def resident_mib(pid: int) -> float:
    """Memory of the tree that is in RAM; pages that its processes share count for each of them."""
    total = 0.0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{member}/statm").read_text().split()[1]) * PAGE_MIB
    return total
