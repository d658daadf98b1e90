"""Notice of a client that left, or that reads so slowly that it counts as gone."""

from __future__ import annotations

import asyncio

from app.fronts.asgi import ClientWatch, Message, WatchStarts

FOR_EVER = 30.0


class Client:
    """Leaves when it is told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def _work(watch: ClientWatch, *, slow_to_end: bool = False) -> bool:
    """Whether it came to its end."""
    with watch:
        try:
            await asyncio.sleep(FOR_EVER)
        finally:
            if slow_to_end:
                await asyncio.sleep(0.05)
        return True
    return False


def _soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_the_work_ends_when_the_client_leaves() -> None:
    client = Client()
    watch = ClientWatch(client.receive, WatchStarts())
    client.gone.set()

    async with asyncio.timeout(5):
        assert not await _work(watch)
    assert watch.gone


async def test_what_ends_well_before_is_left_alone() -> None:
    watch = ClientWatch(Client().receive, WatchStarts())
    with watch:
        watch.ends_at(_soon(0.01))
    await asyncio.sleep(0.1)

    assert not watch.gone


async def test_the_work_ends_at_its_deadline_known_from_the_start() -> None:
    watch = ClientWatch(Client().receive, WatchStarts())
    watch.ends_at(_soon(0.06))

    async with asyncio.timeout(5):
        assert not await _work(watch)
    assert watch.gone


async def test_the_work_ends_at_a_deadline_told_while_it_is_watched() -> None:
    watch = ClientWatch(Client().receive, WatchStarts())
    work = asyncio.create_task(_work(watch))
    await asyncio.sleep(0.08)
    watch.ends_at(_soon(0.01))

    async with asyncio.timeout(5):
        assert not await work
    assert watch.gone


async def test_a_client_that_leaves_after_the_deadline_ends_nothing_twice() -> None:
    client = Client()
    watch = ClientWatch(client.receive, WatchStarts())
    watch.ends_at(_soon(0.05))
    work = asyncio.create_task(_work(watch, slow_to_end=True))
    await asyncio.sleep(0.07)
    client.gone.set()

    async with asyncio.timeout(5):
        assert not await work
    assert not work.cancelled()


async def test_the_deadline_holds_when_all_is_said_but_not_read() -> None:
    watch = ClientWatch(Client().receive, WatchStarts())
    watch.ends_at(_soon(0.05))
    watch.done()

    async with asyncio.timeout(5):
        assert not await _work(watch)
