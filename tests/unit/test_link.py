"""The link to Redis or Valkey: what it answers, and how it takes a server that goes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from app.sharing.link import Link, LinkDown, Script
from tests.servers import Valkey
from tests.system.gateway_process import free_port
from tests.system.harness import until
from tests.unit.meters import linked

DOUBLE = Script("return {KEYS[1], ARGV[1] * 2}")


async def test_commands_pipelines_and_scripts_answer_alike(valkey_url: str) -> None:
    async with linked(valkey_url) as link:
        assert await link.call("HSET", "h", "a", 1) == 1
        assert await link.call("HGETALL", "h") == [b"a", b"1"]
        assert await link.pipeline([["HGETALL", "h"], ["GET", "none"]]) == [[b"a", b"1"], None]
        assert await link.pipeline([]) == []
        assert await link.script(DOUBLE, ["k"], [21]) == [b"k", 42]
        assert await link.script(DOUBLE, ["k"], [4]) == [b"k", 8]


async def test_a_server_that_has_not_seen_a_script_is_sent_it(valkey_url: str) -> None:
    async with linked(valkey_url) as link:
        await link.call("SCRIPT", "FLUSH")
        assert await link.script(DOUBLE, ["k"], [1]) == [b"k", 2]
        await link.call("SCRIPT", "FLUSH")
        assert await link.scripts(DOUBLE, [(["k"], [1]), (["l"], [2])]) == [[b"k", 2], [b"l", 4]]


async def test_a_server_that_is_down_fails_every_call_at_once_and_is_told_once() -> None:
    said: list[str] = []
    async with linked(f"redis://:secret@127.0.0.1:{free_port()}", said) as link:
        begin = time.monotonic()
        for _ in range(100):
            with pytest.raises(LinkDown) as caught:
                await link.call("GET", "a")

        assert time.monotonic() - begin < 1
        assert not link.up
        assert len(said) == 1
        assert "secret" not in str(caught.value) + link.server


async def test_a_server_that_comes_back_is_used_again(valkey: Valkey) -> None:
    said: list[str] = []
    heard: list[bytes] = []
    changes: list[bool] = []
    async with linked(valkey.url, said) as link:
        link.on_change.append(changes.append)
        link.subscribe("news", heard.append)
        valkey.kill()
        with pytest.raises(LinkDown):
            await link.call("GET", "a")
        await until(lambda: not link.up, "the link is down")
        valkey.start()
        await until(lambda: link.up, "the link is up")

        async def arrives() -> bool:
            await link.publish("news", b"hello")
            return b"hello" in heard

        await until(arrives, "messages arrive again")
        assert changes == [False, True]
        assert len(said) == 2


async def test_a_handler_that_fails_hears_what_comes_later_and_is_told_of_once(valkey_url: str) -> None:
    said: list[str] = []
    heard: list[bytes] = []

    def handle(message: bytes) -> None:
        heard.append(message)
        raise ValueError("it is no number")

    async with linked(valkey_url, said) as link:
        for channel in ("news", "more"):
            link.subscribe(channel, handle)

        async def arrive() -> bool:
            for channel in ("news", "more"):
                await link.publish(channel, channel.encode())
            return heard.count(b"news") > 1 and heard.count(b"more") > 1

        await until(arrive, "messages arrive")
        assert said == ["another replica speaks in a way that is not understood"] * 2


async def test_a_server_that_hangs_costs_the_timeout_and_then_nothing(valkey: Valkey) -> None:
    async with Link(valkey.url, lambda *_, **__: None, timeout_seconds=0.2) as link:
        valkey.pause()
        begin = time.monotonic()
        with pytest.raises(LinkDown, match="did not answer"):
            await link.call("GET", "a")
        assert time.monotonic() - begin < 1
        await until(lambda: not link.up, "the link is down")
        valkey.resume()

        await until(lambda: link.up, "the link is up")


async def test_those_who_wait_for_their_turn_do_not_wait_for_a_server_that_has_gone(valkey: Valkey) -> None:
    async with Link(valkey.url, lambda *_, **__: None, timeout_seconds=0.2) as link:
        valkey.pause()
        begin = time.monotonic()

        answers = await asyncio.gather(*(link.call("GET", "a") for _ in range(400)), return_exceptions=True)

        assert all(isinstance(answer, LinkDown) for answer in answers)
        assert time.monotonic() - begin < 3  # and not 400 / 16 timeouts
        valkey.resume()


async def test_a_command_that_is_refused_says_why_and_leaves_the_link_up(valkey_url: str) -> None:
    said: list[str] = []
    async with linked(valkey_url, said) as link:
        await link.call("SET", "text", "a")

        for _ in range(3):
            with pytest.raises(LinkDown, match="refused a command"):
                await link.call("INCR", "text")

        assert link.up
        assert said == ["the shared state refused a command"]


async def test_a_unix_socket_and_a_password_work(tmp_path: Path) -> None:
    class Guarded(Valkey):
        def _command(self):  # type: ignore[no-untyped-def]
            return [*super()._command(), "--unixsocket", tmp_path / "v", "--requirepass", "secret"]

        def _ready(self) -> bool:
            return (tmp_path / "v").exists()

    with Guarded():
        async with linked(f"unix://:secret@{tmp_path}/v?db=1") as link:
            assert await link.call("PING") == b"PONG"
        said: list[str] = []
        async with linked(f"unix://{tmp_path}/v", said) as link:
            assert not link.up
            assert said


async def test_an_address_that_is_none_is_an_error_without_its_password() -> None:
    with pytest.raises(ValueError, match="is no address of Redis") as caught:
        async with linked("http://:secret@127.0.0.1"):
            pass

    assert "secret" not in str(caught.value)
