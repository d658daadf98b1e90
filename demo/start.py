"""Starts the gateway on whatever this machine offers: what `make run` calls.

Without settings and without an Ollama, it first starts two practice nodes, so that the first request is answered.
This process becomes the gateway, so that signals and the exit status need no one to pass them on.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from demo.practice_node import MODEL

OLLAMA_PORT = 11434
PROBE_SECONDS = 0.5
LOOPBACKS = ("127.0.0.1", "::1")
PRACTICE_NODES = 2
NODE_FLAGS = ("--local-nodes", "--config-file", "--help")


def main(arguments: Sequence[str]) -> None:
    """Never returns: the gateway takes this process over."""
    if not configured(arguments) and not ollama_answers(OLLAMA_PORT):
        os.environ["LOCAL_NODES"] = json.dumps(start_practice_nodes())
        print(
            f'No Ollama at localhost:{OLLAMA_PORT}: started two practice nodes (model "{MODEL}"). '
            "Install Ollama, or set LOCAL_NODES in .env, to use your own.",
            flush=True,
        )
    os.execv(sys.executable, [sys.executable, "-m", "app", "serve", *arguments])


def configured(arguments: Sequence[str]) -> bool:
    """Whether somebody has said which nodes to use, or may have said it in a file."""
    named = any(argument.partition("=")[0] in NODE_FLAGS for argument in arguments)
    return named or Path(".env").exists() or any(os.environ.get(name) for name in ("LOCAL_NODES", "CONFIG_FILE"))


def ollama_answers(port: int) -> bool:
    """Whether something on this machine answers as an Ollama does."""
    return any(_version(host, port) is not None for host in LOOPBACKS)


def _version(host: str, port: int) -> str | None:
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/api/version")
        found = json.loads(connection.getresponse().read(4096))["version"]
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError):
        return None
    else:
        return str(found)
    finally:
        connection.close()


def start_practice_nodes() -> list[dict[str, str]]:
    """Starts them, and describes each as LOCAL_NODES wants it.

    They read from a pipe that this process, and later the gateway, holds open. Its end is theirs, whatever ends it.
    """
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        urls = [_start_practice_node(read_end) for _ in range(PRACTICE_NODES)]
    finally:
        os.close(read_end)
    return [{"name": f"practice-{place}", "kind": "ollama", "url": url} for place, url in enumerate(urls, 1)]


def _start_practice_node(stdin: int) -> str:
    """Returns its URL once it listens.

    In a session of its own it does not get the terminal's Ctrl-C, and serves until the gateway has ended its requests.
    """
    command = [sys.executable, "-m", "demo.practice_node", "--until-stdin-closes", "--detach"]
    started = subprocess.run(command, stdin=stdin, stdout=subprocess.PIPE, start_new_session=True, check=False)
    try:
        return str(json.loads(started.stdout)["url"])
    except ValueError:
        sys.exit("A practice node did not start; set LOCAL_NODES in .env to use a node of your own.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
