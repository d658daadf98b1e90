"""What a gateway adds to a request: processor time, latency and memory, of Hearth and its peers side by side.

    python -m benchmarks.overhead [--rounds 3] [--cases small,latency,stream,paced,open] [--only nginx,hearth-openai]

Prints a table in Markdown. The method, and how to read the figures: README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gateways import Gateway, Launch, installed
from benchmarks.load import Report
from benchmarks.processes import (
    NotReady,
    Processors,
    allow_many_sockets,
    cpu_seconds,
    free_port,
    node,
    resident_mib,
    started,
    wait_until_ready,
)

NODES = 2
SETTLE_SECONDS = 1.0  # lets first probes and start-up work end before anything is counted


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load."""

    name: str
    what: str
    concurrency: int
    requests: int
    stream: bool = False
    tokens: int = 64
    pace_ms: float = 0.0


CASES = {
    case.name: case
    for case in (
        Case("small", "whole answers, 32 at a time", 32, 3000),
        Case("latency", "whole answers, one at a time", 1, 1000),
        Case("stream", "16 streams at a time, as fast as they go", 16, 400, stream=True),
        Case("paced", "200 streams at a time, 20 ms a token", 200, 400, stream=True, pace_ms=20),
        Case("open", "1,000 streams open at once", 1000, 1000, stream=True, tokens=16, pace_ms=500),
    )
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What one gateway came to in one round of one case."""

    report: Report
    cpu_seconds: float | None  # None: there was no gateway
    resident_mib: float | None  # the most that was seen

    @property
    def us_per_request(self) -> float | None:
        return None if self.cpu_seconds is None else self.cpu_seconds / max(1, self.report.good) * 1e6

    @property
    def us_per_event(self) -> float | None:
        return None if self.cpu_seconds is None else self.cpu_seconds / max(1, self.report.events) * 1e6


class Memory:
    """The most memory that a process tree had while this was open; a tree that is None has none."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self.most = 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        while self.pid is not None and not self.over.wait(0.2):
            self.most = max(self.most, resident_mib(self.pid))

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things run: processors, and a folder for logs and configuration."""

    processors: Processors
    folder: Path

    def measure(self, gateway: Gateway, case: Case) -> Figures:
        """One round: fresh nodes, a fresh gateway, a warm-up, then the load. Raises NotReady."""
        with contextlib.ExitStack() as stack:
            nodes = [stack.enter_context(node(self.processors.others, case.tokens, case.pace_ms)) for _ in range(NODES)]
            base, pid = nodes[0], None
            if gateway.launch:
                base, pid = stack.enter_context(self.gateway(gateway, gateway.launch, nodes))
            url = f"{base}/v1/chat/completions"
            self.warm_up(url, case, gateway)
            with Memory(pid) as memory:
                before = cpu_seconds(pid) if pid else 0.0
                report = self.load(url, case, max(case.concurrency, int(case.requests * gateway.share)))
                used = cpu_seconds(pid) - before if pid else None
            return Figures(report, used, memory.most if pid else None)

    @contextlib.contextmanager
    def gateway(
        self, gateway: Gateway, launch: Callable[[Path, int, Sequence[str]], Launch], nodes: Sequence[str]
    ) -> Iterator[tuple[str, int]]:
        """The gateway's URL and process, once it is ready."""
        folder = self.folder / gateway.name
        folder.mkdir(exist_ok=True)
        port = free_port()
        how = launch(folder, port, nodes)
        with (
            (folder / "output.txt").open("ab") as output,
            started(how.command, self.processors.gateway, output, how.variables, folder) as process,
        ):
            base = f"http://127.0.0.1:{port}"
            wait_until_ready(base + gateway.ready_path, process, gateway.ready_seconds)
            time.sleep(SETTLE_SECONDS)
            yield base, process.pid

    def warm_up(self, url: str, case: Case, gateway: Gateway) -> None:
        """A little of the same load; raises NotReady when the gateway cannot even do that."""
        # With a pace all at once, as one wave takes as long as one request.
        requests, concurrency = (20, 20) if case.pace_ms else (max(4, int(200 * gateway.share)), 4)
        report = self.load(url, dataclasses.replace(case, concurrency=concurrency), requests)
        if report.bad:
            raise NotReady(f"{report.bad} bad replies in the warm-up: {report.first_error}")

    def load(self, url: str, case: Case, requests: int) -> Report:
        """Runs the client as a process of its own beside the nodes."""
        options = ["--concurrency", str(case.concurrency), "--requests", str(requests), "--tokens", str(case.tokens)]
        command = [sys.executable, "-m", "benchmarks.load", "--url", url, *options, *["--stream"] * case.stream]
        with started(command, self.processors.others, subprocess.PIPE) as process:
            assert process.stdout
            return Report(**json.loads(process.stdout.read()))


Results = dict[str, dict[str, list[Figures]]]  # case, gateway, rounds


def measure_all(bench: Bench, gateways: Sequence[Gateway], cases: Sequence[Case], rounds: int) -> Results:
    """Every round measures every gateway once, so that what else the machine does hits all of them alike."""
    results: Results = {case.name: {gateway.name: [] for gateway in gateways} for case in cases}
    for case in cases:
        for number in range(1, rounds + 1):
            for gateway in gateways:
                print(f"{case.name} {number}/{rounds} {gateway.name}", file=sys.stderr, flush=True)
                try:
                    results[case.name][gateway.name].append(bench.measure(gateway, case))
                except NotReady as error:
                    print(f"  {error}; see {bench.folder / gateway.name}", file=sys.stderr, flush=True)
    return results


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of the table."""

    case: str
    title: str
    of: Callable[[Figures], float | None]
    digits: int


COLUMNS = (
    Column("small", "small: µs CPU / request", lambda f: f.us_per_request, 0),
    Column("latency", "latency: p50 ms", lambda f: f.report.total_p50_ms, 2),
    Column("latency", "p99 ms", lambda f: f.report.total_p99_ms, 2),
    Column("stream", "stream: µs CPU / event", lambda f: f.us_per_event, 1),
    Column("paced", "paced: µs CPU / event", lambda f: f.us_per_event, 1),
    Column("open", "open: MiB", lambda f: f.resident_mib, 0),
    Column("open", "at once", lambda f: f.report.open_peak, 0),
)


def median(figures: Sequence[Figures], column: Column) -> str:
    values = [value for value in map(column.of, figures) if value is not None]
    return f"{statistics.median(values):,.{column.digits}f}" if values else ""


def table(results: Results, gateways: Sequence[Gateway]) -> list[str]:
    """Lines of Markdown: a row for each gateway, with the medians of its rounds."""
    columns = [column for column in COLUMNS if column.case in results]
    titles = ["gateway", *(column.title for column in columns), "bad replies"]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "--:|" * (len(titles) - 1)]
    for gateway in gateways:
        cells = [median(results[column.case][gateway.name], column) for column in columns]
        rounds = [figures for case in results.values() for figures in case[gateway.name]]
        bad = sum(figures.report.bad for figures in rounds)
        name = f"{gateway.name} {gateway.version}" if gateway.version else gateway.name
        lines.append("| " + " | ".join([name, *cells, f"{bad} of {bad + sum(f.report.good for f in rounds)}"]) + " |")
    return lines


def complete(results: Results, gateways: Sequence[Gateway], rounds: int) -> bool:
    """Whether these gateways got through every round without a bad reply."""
    measured = [case[gateway.name] for case in results.values() for gateway in gateways]
    return all(len(figures) == rounds and not any(one.report.bad for one in figures) for figures in measured)


def conditions(processors: Processors, rounds: int, cases: Sequence[Case]) -> list[str]:
    """What the figures depend on."""
    return [
        f"Measured on {datetime.now(UTC):%Y-%m-%d}: {processor_model()}, {os.cpu_count()} processors; "
        f"{platform.system()} {platform.release()}; Python {platform.python_version()}; medians of {rounds} rounds. "
        f"The gateway alone on processor {processors.gateway}; {NODES} nodes and the client on {processors.others}.",
        "",
        *(f"- {case.name}: {case.what}; {case.tokens} tokens an answer" for case in cases),
        "",
    ]


def processor_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help="which to run, separated by commas")
    parser.add_argument("--only", default="", help="names of gateways, separated by commas; all without it")
    parser.add_argument("--requests", type=int, help="per case, instead of the case's own number (for a quick look)")
    parser.add_argument("--out", type=Path, help="a file for all figures of all rounds, as JSON")
    return parser.parse_args()


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"--cases {unknown[0]}: there are {', '.join(CASES)}")
    cases = [CASES[name] for name in names]
    return [dataclasses.replace(case, requests=options.requests) for case in cases] if options.requests else cases


def chosen_gateways(options: argparse.Namespace) -> list[Gateway]:
    gateways = {gateway.name: gateway for gateway in installed()}
    names = options.only.split(",") if options.only else list(gateways)
    if unknown := [name for name in names if name not in gateways]:
        raise SystemExit(f"--only {unknown[0]}: on this machine there are {', '.join(gateways)}")
    return [gateways[name] for name in names]


def main() -> int:
    options = arguments()
    cases, gateways = chosen_cases(options), chosen_gateways(options)
    allow_many_sockets()
    processors = Processors.available()
    bench = Bench(processors, Path(tempfile.mkdtemp(prefix="hearth-bench-")))
    results = measure_all(bench, gateways, cases, options.rounds)
    print("\n".join(conditions(processors, options.rounds, cases) + table(results, gateways)))
    if options.out:
        options.out.write_text(json.dumps(results, default=dataclasses.asdict, indent=1))
    if complete(results, gateways, options.rounds):
        shutil.rmtree(bench.folder)  # else its logs tell why
    # What a peer does under these loads is its own affair; the table shows it.
    return int(not complete(results, [gateway for gateway in gateways if gateway.ours], options.rounds))


if __name__ == "__main__":
    sys.exit(main())
