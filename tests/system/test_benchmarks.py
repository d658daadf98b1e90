"""The benchmark runs, checks what it gets, and prints what its README says."""

from __future__ import annotations

import subprocess
import sys
import time

import orjson
import pytest

from benchmarks.load import Reply, WrongReply, check
from benchmarks.node import ollama_answers, openai_answers
from benchmarks.processes import PROJECT, Processors, cpu_seconds, resident_mib, started


def reply(body: bytes, status: int = 200) -> Reply:
    return Reply(status, body, 0.0, 0.0, 0.0)


def document(content: str = "t0 t1 ", finish_reason: str = "stop", completion_tokens: int = 2) -> bytes:
    choice = {"message": {"content": content}, "finish_reason": finish_reason}
    return orjson.dumps({"choices": [choice], "usage": {"completion_tokens": completion_tokens}})


def test_whole_reply_is_good() -> None:
    assert check(reply(document()), stream=False, count=2) == 1


@pytest.mark.parametrize(
    "body",
    [document(content="t0 "), document(finish_reason="length"), document(completion_tokens=3)],
    ids=["lost a token", "other end", "wrong count"],
)
def test_reply_that_differs_in_anything_is_bad(body: bytes) -> None:
    with pytest.raises(WrongReply):
        check(reply(body), stream=False, count=2)


def test_stream_that_lacks_its_end_is_bad() -> None:
    stream = openai_answers(2).stream
    events = b"".join((*stream.pieces, stream.end_with_usage))
    body = b"".join(line + b"\n" for line in events.split(b"\n") if line.startswith(b"data:"))

    assert check(reply(body), stream=True, count=2) == 4
    with pytest.raises(WrongReply):
        check(reply(body.replace(b"data: [DONE]\n", b"")), stream=True, count=2)


def test_node_ends_an_ollama_stream_with_its_counts() -> None:
    assert b'"eval_count":2' in ollama_answers(2).stream.end


def test_processor_time_of_a_process_and_its_children_is_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    both = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '''{burn}time.sleep(30)'''])\n{burn}"
    command = [sys.executable, "-c", both + "time.sleep(30)"]

    with started(command, Processors.available().others, subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 20
        while cpu_seconds(process.pid) < 0.4 and time.monotonic() < deadline:
            time.sleep(0.05)

        assert 0.4 <= cpu_seconds(process.pid) < 2
        assert resident_mib(process.pid) > 2


def test_benchmark_prints_a_row_for_each_gateway() -> None:
    options = ["--rounds", "1", "--requests", "40", "--cases", "small,stream", "--only", "hearth-openai,hearth-ollama"]
    command = [sys.executable, "-m", "benchmarks.overhead", *options]
    done = subprocess.run(command, check=False, cwd=PROJECT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| hearth-")]
    assert [row.split(" | ")[0] for row in rows] == ["| hearth-openai", "| hearth-ollama"]
    assert all("0 of 80" in row for row in rows)
