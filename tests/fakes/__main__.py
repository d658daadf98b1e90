"""Runs a fake node: python -m tests.fakes KIND [options]. Prints {"url": …} as one line once it listens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from typing import Any

from demo.practice_node import stopped
from tests.fakes.behaviour import Behaviour
from tests.fakes.distserve import Ids
from tests.fakes.kinds import KINDS
from tests.fakes.openai import State
from tests.fakes.sharing import Role


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--models", help="comma-separated names")
    parser.add_argument("--port", type=int, default=0, help="0, the default, is a free one")
    parser.add_argument("--slots", type=int, help="requests served at a time")
    parser.add_argument("--queue", type=int, help="requests that may wait for a slot")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--text")
    parser.add_argument("--echo", help="a format that takes the user's words, such as 'You said: {}'")
    parser.add_argument("--first-seconds", type=float)
    parser.add_argument("--token-seconds", type=float)
    parser.add_argument("--load-seconds", type=float, help="ollama: a cold start")
    parser.add_argument("--api-key", help="all but ollama")
    parser.add_argument("--state", type=State, choices=list(State), help="all but ollama")
    parser.add_argument("--role", type=Role, choices=list(Role), help="lmdeploy, vllm and sglang")
    parser.add_argument("--ids", type=Ids, choices=list(Ids), help="lmdeploy: what answers have as their id")
    parser.add_argument("--hold-seconds", type=float, help="vllm: how long a cache waits to be fetched")
    parser.add_argument("--room-seconds", type=float, help="sglang: how long one engine waits for the other")
    parser.add_argument("--behaviour", type=Behaviour, choices=list(Behaviour), default=Behaviour.OK)
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when the parent process does")
    return parser.parse_args()


def node_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What goes to the class of the kind: the options that were given."""
    own = {"kind", "behaviour", "until_stdin_closes"}
    options = {name: value for name, value in vars(arguments).items() if name not in own and value is not None}
    if "models" in options:
        options["models"] = options["models"].split(",")
    return options


async def run(arguments: argparse.Namespace) -> None:
    async with KINDS[arguments.kind](**node_options(arguments)) as node:
        node.behave(arguments.behaviour)
        print(json.dumps({"url": node.url}), flush=True)
        await stopped(arguments.until_stdin_closes)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parse()))
