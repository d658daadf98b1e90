"""What a worker wrote last is there for all, whole, also when it was killed in the middle of writing more."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from app.telemetry.slates import Slate, Slates, open_slates
from app.workers import Places


@pytest.fixture
def handle() -> Iterator[int]:
    handle = open_slates()
    yield handle
    os.close(handle)


def test_each_sees_what_the_others_wrote_last(handle: int) -> None:
    one, two, three = (Slates(handle, place) for place in range(3))
    one.write(b"old")
    one.write(b"new")
    three.write(b"")

    assert list(two.others()) == [Slate(b"new", True), Slate(b"", True)]
    assert list(one.others()) == [Slate(b"", True)]
    assert one.inherited() == b"new"


def test_a_successor_goes_on_in_the_same_place(handle: int) -> None:
    first, other = Slates(handle, 0), Slates(handle, 1)
    for content in (b"1", b"2", b"3"):
        first.write(content)

    second = Slates(handle, 0)
    inherited = second.inherited()
    second.write(b"4")

    assert inherited == b"3"
    assert list(other.others()) == [Slate(b"4", True)]


@pytest.mark.parametrize("written", range(0, 80, 7))
def test_a_write_that_was_cut_changes_nothing(handle: int, written: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dying, other = Slates(handle, 0), Slates(handle, 1)
    dying.write(b"a" * 60)
    dying.write(b"b" * 60)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: write(handle, data[:written], offset))

    dying.write(b"c" * 60)

    assert list(other.others()) == [Slate(b"b" * 60, True)]
    assert Slates(handle, 0).inherited() == b"b" * 60


def test_who_has_not_written_for_a_while_is_not_fresh(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Slates(handle, 0).write(b"x")
    monkeypatch.setattr("app.telemetry.slates._FRESH_SECONDS", 0)

    assert list(Slates(handle, 1).others()) == [Slate(b"x", False)]


def test_what_is_too_much_is_refused(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.slates._HALF_BYTES", 40)

    with pytest.raises(OSError, match="too many"):
        Slates(handle, 0).write(b"x" * 40)


def test_a_place_is_given_again_when_its_worker_has_ended() -> None:
    places = Places()
    workers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        for place, worker in enumerate(workers):
            assert places.free() == place
            places.take(place, worker)
        assert places.free() == 3

        workers[1].kill()
        workers[1].wait()

        assert places.free() == 1
        places.take(1, workers[0])
        assert places.free() == 3
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
