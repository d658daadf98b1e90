"""What workers write, and which sockets they have."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from app.ports import PortTaken, check_port, close, listen
from app.workers import WholeLines


@pytest.fixture
def pipe() -> Iterator[tuple[int, WholeLines]]:
    with ExitStack() as stack:
        read, write = os.pipe()
        stack.callback(os.close, read)
        yield read, WholeLines(stack.enter_context(os.fdopen(write, "wb", 0)), "7")


def test_every_line_says_who_wrote_it(pipe: tuple[int, WholeLines]) -> None:
    read, lines = pipe
    data = b'{"event":"one"}\nplain words\n'

    assert lines.write(data) == len(data)
    assert os.read(read, 1000) == b'{"worker":"7","event":"one"}\n[7] plain words\n'


def test_writes_are_no_longer_than_what_a_pipe_keeps_together(
    pipe: tuple[int, WholeLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = pipe
    written: list[bytes] = []

    def write(handle: int, data: bytes) -> int:
        written.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", write)
    data = b"".join(b'{"n":"%b"}\n' % (b"x" * length) for length in range(1, 400))
    lines.write(data)

    assert len(written) > 1
    assert all(len(part) <= 4096 and part.endswith(b"\n") for part in written)
    assert b"".join(written).replace(b'"worker":"7",', b"") == data


def test_a_port_that_somebody_has_is_taken() -> None:
    held = listen("127.0.0.1", 0, shared=False)
    port = held[0].getsockname()[1]
    try:
        with pytest.raises(PortTaken, match=str(port)):
            check_port("127.0.0.1", port)
        with pytest.raises(PortTaken, match=str(port)):
            listen("127.0.0.1", port, shared=True)
    finally:
        close(held)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not deal connections out")
def test_shared_sockets_share_a_port() -> None:
    one = listen("127.0.0.1", 0, shared=True)
    two = listen("127.0.0.1", one[0].getsockname()[1], shared=True)
    try:
        assert one[0].getsockname() == two[0].getsockname()
        assert one[0].proto == socket.IPPROTO_TCP
    finally:
        close([*one, *two])
