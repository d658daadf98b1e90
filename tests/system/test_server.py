"""What the server itself bears from clients."""

from __future__ import annotations

import asyncio

import pytest

from app.server import HEAD_BYTES_MAX
from tests.fakes import FakeOllama
from tests.system.harness import gateway


@pytest.mark.parametrize("pieces", [1, 40], ids=["one header", "many headers"])
async def test_an_endless_head_is_refused_before_it_fills_the_memory(pieces: int) -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(hearth.url.rpartition(":")[2]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n")
        filler = b"f" * (4 * HEAD_BYTES_MAX // pieces)
        for number in range(pieces):
            writer.write(b"x-%d: " % number + filler + (b"\r\n" if pieces > 1 else b""))
            await asyncio.sleep(0)

        try:
            answer = await asyncio.wait_for(reader.read(), 5)
        except ConnectionResetError:  # a client that is still sending may never see the answer
            answer = b""

        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        assert not node.inferences
        writer.close()


async def test_a_long_head_within_the_bound_and_a_body_of_any_length_pass() -> None:
    async with FakeOllama(models=["m"]) as node, gateway(node) as hearth:
        answer = await hearth.chat(
            messages=[{"role": "user", "content": "x" * 4 * HEAD_BYTES_MAX}], headers={"x-long": "y" * 40_000}
        )

        assert answer.status_code == 200
