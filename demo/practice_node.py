"""A node to practise with: speaks Ollama's API, has no model, and says what you said.

python -m demo.practice_node --port 11500
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence

from demo.httpd import Exchange, Server, deliver
from demo.ollama import Model, Ollama
from demo.script import Script

MODEL = "practice"
WORD_SECONDS = 0.03
ECHO = "You said: {}"


def practice_engine(word_seconds: float = WORD_SECONDS) -> Ollama:
    """An Ollama with one small model, which answers with the user's words."""
    model = Model(f"{MODEL}:latest", ("completion", "embedding"), size=1, parameter_size="0B", context_length=4096)
    return Ollama([model], Script(echo=ECHO, first_seconds=word_seconds, token_seconds=word_seconds))


async def serve(port: int, until_stdin_closes: bool) -> None:
    """Serves until SIGINT or SIGTERM, or until whoever holds the other end of stdin is gone.

    Prints its URL as a line of JSON once it listens, and closes its output then.
    """
    engine = practice_engine()

    async def answer(exchange: Exchange) -> None:
        await deliver(exchange, await engine.answer(exchange.request))

    async with Server(answer, port) as server:
        print(json.dumps({"url": server.url, "model": MODEL}), flush=True)
        close_output()
        await stopped(until_stdin_closes)


def close_output() -> None:
    """Lets a reader of the output see its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


async def stopped(until_stdin_closes: bool) -> None:
    """Returns on SIGINT or SIGTERM, or at the end of stdin when asked to watch it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_closes:
        # The kernel closes the parent's end of the pipe however the parent dies, by SIGKILL as well.
        loop.add_reader(sys.stdin.fileno(), _stop_at_end, sys.stdin.fileno(), stop)
    await stop.wait()
    if until_stdin_closes:
        loop.remove_reader(sys.stdin.fileno())


def _stop_at_end(descriptor: int, stop: asyncio.Event) -> None:
    if not os.read(descriptor, 1024):
        stop.set()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.practice_node", description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0, the default, is a free one")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when the parent process does")
    parser.add_argument("--detach", action="store_true", help="go on as a process that is no child of the caller's")
    options = parser.parse_args(arguments)
    if options.detach and os.fork():
        # Whoever started this process may become another program, which would never reap it.
        os._exit(0)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.port, options.until_stdin_closes))


if __name__ == "__main__":
    main()
