"""What a cached beginning of a conversation is worth: time to the first token on two real llama.cpp servers.

Run: python -m benchmarks.prefixes [--policies shortest_expected_delay,round_robin] [--rounds 3] [--talks 6] [--turns 6]
     [--slots 4] [--history 900] [--question 60] [--think 1.0] [-- LLAMA-SERVER OPTION...]

Several people talk at the same time. Each has a long conversation behind them, asks, reads the answer, thinks, and asks
again with everything that was said so far. An engine that still holds that beginning reads the new words only; any
other reads all of it. In every round each policy gets two fresh engines, with a processor and a thread each, and a
fresh Hearth; policies take turns, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.processes import PROJECT, Processors, free_port, started, wait_until_ready

SCRIPT = PROJECT / "scripts" / "real-engine.sh"
HOME = PROJECT / ".engine"
MODEL = "gemma-3-270m"
ANSWER_TOKENS = 12
CONTEXT = 4096  # tokens of a slot
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story"),
    *("fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "house"),
)


class Turn(NamedTuple):
    """One question and its answer. Times are in seconds."""

    talk: int
    number: int
    node: str
    first_token: float
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Load:
    """Who talks, and how much. `history` and `question` are in words."""

    talks: int = 6
    turns: int = 6
    history: int = 900
    question: int = 60
    think: float = 1.0  # seconds, on average
    seed: int = 1


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


async def converse(base_url: str, load: Load) -> list[Turn]:
    """Every turn of all talks, which run at the same time."""
    limits = httpx.Limits(max_connections=load.talks)
    async with httpx.AsyncClient(base_url=base_url, timeout=300, limits=limits) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_talk(client, load, number)) for number in range(load.talks)]
    return [turn for task in tasks for turn in task.result()]


async def _talk(client: httpx.AsyncClient, load: Load, number: int) -> list[Turn]:
    rng = random.Random(load.seed * 1000 + number)
    messages = [
        {"role": "system", "content": words(rng, 20)},
        {"role": "user", "content": words(rng, load.history // 2)},
        {"role": "assistant", "content": words(rng, load.history // 2)},
    ]
    turns = []
    for place in range(load.turns):
        await asyncio.sleep(rng.expovariate(1 / load.think))
        messages.append({"role": "user", "content": words(rng, load.question)})
        answer = await ask(client, messages)
        turns.append(Turn(number, place, answer.node, answer.first_token, answer.prompt_tokens, answer.cached_tokens))
        messages.append({"role": "assistant", "content": answer.text})
    return turns


class Answer(NamedTuple):
    """What came of one request."""

    text: str
    node: str
    first_token: float
    prompt_tokens: int
    cached_tokens: int


async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]]) -> Answer:
    """Raises whatever goes wrong: an answer that is not whole says nothing of its speed."""
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                first = first or time.perf_counter() - began
                text += piece
        node = response.headers.get("x-hearth-node", "")
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return Answer(text, node, first, usage["prompt_tokens"], cached)


# -- engines and gateway


@contextlib.contextmanager
def engine(folder: Path, cpu: int, slots: int, options: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a fresh llama.cpp server with one thread on one processor."""
    port = free_port()
    command = [str(SCRIPT), str(HOME), str(port), str(slots), str(slots * CONTEXT), *options]
    with (
        (folder / f"engine-{port}.log").open("wb") as log,
        started(command, cpu, log, {"FOREGROUND": "1", "THREADS": "1"}) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/health", process, 60)
        _until_healthy(url, 60)
        yield url


@contextlib.contextmanager
def hearth(
    folder: Path, cpu: int, policy: str, nodes: Sequence[str], variables: dict[str, str] | None = None
) -> Iterator[str]:
    """The URL of a fresh Hearth in front of these."""
    port = free_port()
    settings = {
        "LOCAL_NODES": json.dumps([{"url": url, "name": f"n{place}"} for place, url in enumerate(nodes)]),
        "LB_STRATEGY": policy,
        "PORT": str(port),
        "DATABASE_URL": "off",
        "DISABLE_CACHE_STATUS": "true",
        "PYTHONPATH": str(PROJECT),
    }
    with (
        (folder / f"hearth-{port}.log").open("wb") as log,
        started([sys.executable, "-m", "app", "serve"], cpu, log, settings | (variables or {}), folder) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/health", process, 30)
        _until_healthy(url, 30)
        yield url


def _until_healthy(url: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} is not healthy after {seconds:.0f} s")
        time.sleep(0.1)


def measure(policy: str, load: Load, slots: int, options: Sequence[str] = ()) -> list[Turn]:
    """All turns with fresh engines and a fresh gateway."""
    processors = Processors.available()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        nodes = [
            stack.enter_context(engine(folder, cpu, slots, options)) for cpu in (processors.gateway, processors.others)
        ]
        url = stack.enter_context(hearth(folder, processors.others, policy, nodes))
        return asyncio.run(converse(url, load))


# -- the table


def row(policy: str, turns: Sequence[Turn]) -> str:
    """Of all turns but each talk's first, which nobody has read before."""
    later = [turn for turn in turns if turn.number]
    firsts = sorted(turn.first_token for turn in later)
    cached = sum(turn.cached_tokens for turn in later) / max(1, sum(turn.prompt_tokens for turn in later))
    moved = _moves(turns)
    every = sorted(turn.first_token for turn in turns)
    figures = (
        f"{statistics.median(every):.2f}",
        f"{statistics.median(firsts):.2f}",
        f"{firsts[int(0.95 * len(firsts))]:.2f}",
        f"{cached:.0%}",
        f"{moved} of {len(later)}",
    )
    return f"| {policy} | {' | '.join(figures)} |"


def _moves(turns: Sequence[Turn]) -> int:
    """How often a talk went on at another node."""
    last: dict[int, str] = {}
    moved = 0
    for turn in sorted(turns, key=lambda turn: (turn.talk, turn.number)):
        moved += last.get(turn.talk, turn.node) != turn.node
        last[turn.talk] = turn.node
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policies", default="shortest_expected_delay,round_robin")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4)
    defaults = Load()
    for name in ("talks", "turns", "history", "question"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--think", type=float, default=defaults.think)
    parser.add_argument("--out", type=Path, help="a file for every single turn, as JSON lines")
    parser.add_argument("options", nargs="*", help="for llama-server, after --")
    given = parser.parse_args()
    subprocess.run([SCRIPT, HOME], check=True, env=os.environ | {"INSTALL_ONLY": "1"})
    policies = given.policies.split(",")
    results: dict[str, list[Turn]] = {policy: [] for policy in policies}
    for place in range(given.rounds):
        for policy in policies if place % 2 else reversed(policies):
            load = Load(given.talks, given.turns, given.history, given.question, given.think, seed=place + 1)
            turns = measure(policy, load, given.slots, given.options)
            results[policy] += [turn._replace(talk=turn.talk + place * given.talks) for turn in turns]
            print(f"round {place + 1}: {row(policy, turns)}", file=sys.stderr, flush=True)
    print("| policy | TTFT p50 s | from 2nd turn p50 s | p95 s | prompt cached | moved |\n|---|---|---|---|---|---|")
    for policy, turns in results.items():
        print(row(policy, turns))
    if given.out:
        given.out.write_text(
            "".join(
                json.dumps({"policy": policy, **turn._asdict()}) + "\n"
                for policy, turns in results.items()
                for turn in turns
            )
        )


if __name__ == "__main__":
    main()
