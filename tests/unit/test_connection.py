"""When a connection to a node is read, and when it is left alone for a moment."""

from __future__ import annotations

import asyncio

import pytest

from app.connection import Connection, ConnectionClosed
from tests.system.harness import until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """Stands for the socket."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True
        self.pauses = 0

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False
        self.pauses += 1

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
async def wire() -> Wire:
    return Wire()


@pytest.fixture
async def answering(wire: Wire) -> Connection:
    """One on which an answer has begun."""
    connection = Connection()
    connection.connection_made(wire)
    connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
    connection.data_received(HEAD)
    return connection


@pytest.fixture
async def connection(answering: Connection) -> Connection:
    """One on which a stream has begun, a while ago."""
    answering.moderate(fast=False)
    await asyncio.sleep(0.003)
    return answering


async def test_a_fast_stream_is_left_alone_for_a_moment_after_each_piece(connection: Connection, wire: Wire) -> None:
    connection.data_received(_chunk(b"a"))
    assert wire.reading  # the first piece is never late
    connection.data_received(_chunk(b"b"))

    assert not wire.reading
    assert await connection.read() == b"ab"
    await until(lambda: wire.reading, "it is read again")


async def test_a_piece_right_after_the_one_that_began_the_stream_is_followed_by_a_rest(
    answering: Connection, wire: Wire
) -> None:
    answering.moderate(fast=False)
    assert wire.reading
    answering.data_received(_chunk(b"a"))

    assert not wire.reading


async def test_a_stream_that_begins_with_many_events_at_once_is_left_alone_from_the_first_on(
    answering: Connection, wire: Wire
) -> None:
    answering.moderate(fast=True)

    assert not wire.reading
    await until(lambda: wire.reading, "it is read again")


async def test_pieces_that_come_one_by_one_are_read_at_once(connection: Connection, wire: Wire) -> None:
    for _ in range(5):
        connection.data_received(_chunk(b"a"))
        await asyncio.sleep(0.003)

    assert wire.pauses == 0


async def test_what_nobody_reads_stays_unread_after_the_rest(connection: Connection, wire: Wire) -> None:
    connection.data_received(_chunk(b"a"))
    connection.data_received(_chunk(b"b" * 300_000))
    await asyncio.sleep(0.005)

    assert not wire.reading
    await connection.read()
    assert wire.reading


async def test_a_document_is_read_without_a_rest(answering: Connection, wire: Wire) -> None:
    for _ in range(5):
        answering.data_received(_chunk(b"a"))

    assert wire.reading


async def test_a_connection_that_is_lost_while_it_rests_ends_its_reader(connection: Connection, wire: Wire) -> None:
    connection.data_received(_chunk(b"a"))
    connection.data_received(_chunk(b"b"))
    connection.connection_lost(None)

    assert await connection.read() == b"ab"
    with pytest.raises(ConnectionClosed):
        await connection.read()


async def test_the_next_request_on_a_connection_is_read_without_a_rest(connection: Connection, wire: Wire) -> None:
    connection.data_received(b"0\r\n\r\n")
    connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
    connection.data_received(HEAD)
    for _ in range(5):
        connection.data_received(_chunk(b"a"))

    assert wire.pauses == 0


async def test_what_follows_a_whole_answer_belongs_to_nobody(answering: Connection) -> None:
    answering.data_received(_chunk(b"a") + b"0\r\n\r\n" + HEAD + _chunk(b"another"))

    assert await answering.read() == b"a"
    assert await answering.read() == b""
    assert not answering.reusable
