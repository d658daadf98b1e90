"""What the workers of one parent have counted, in memory that they share, so that any of them can tell of all.

Each worker has a place of its own, which its parent gives to another one when it has ended: that one counts on from
there. So nothing that was once shown is lost when a worker is killed, and it takes no server.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

_HALF_BYTES = 16 * 2**20  # only what is written takes memory
_PLACE_BYTES = 2 * _HALF_BYTES
_HEADER = struct.Struct("<QdQ")  # sequence, when (monotonic seconds, the same for all processes), bytes of content
_CHECK = struct.Struct("<I")  # the CRC of header and content: a killed process may have written half of either
_HEAD_BYTES = _HEADER.size + _CHECK.size
_FRESH_SECONDS = 3.5


class Slate(NamedTuple):
    """What one worker wrote last. One that is not `fresh` has ended, or hangs."""

    content: bytes
    fresh: bool


def open_slates() -> int:
    """A handle of the memory, for the parent to hand down."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hearth-metrics")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Slates:
    """The memory as one worker sees it, which writes in its place alone."""

    def __init__(self, handle: int, place: int) -> None:
        self._handle = handle
        self._place = place
        self._sequence = 0
        before = self._latest(place)
        if before is not None:
            self._sequence = before[0]

    def inherited(self) -> bytes:
        """What this place's last worker wrote, before the first `write`."""
        latest = self._latest(self._place)
        return b"" if latest is None else latest[2]

    def write(self, content: bytes) -> None:
        """Replaces what is in this worker's place. Raises OSError when there is no memory."""
        if len(content) > _HALF_BYTES - _HEAD_BYTES:
            raise OSError(f"the metrics of one worker have {len(content)} bytes, which are too many")
        self._sequence += 1
        header = _HEADER.pack(self._sequence, time.monotonic(), len(content))
        check = _CHECK.pack(zlib.crc32(content, zlib.crc32(header)))
        # The other half stays whole if this process is killed in the middle of it.
        os.pwrite(self._handle, header + check + content, _offset(self._place, self._sequence % 2))

    def others(self) -> Iterator[Slate]:
        """What other workers wrote last, also those that have ended."""
        now = time.monotonic()
        for place in range(-(-os.fstat(self._handle).st_size // _PLACE_BYTES)):
            latest = None if place == self._place else self._latest(place)
            if latest is not None:
                yield Slate(latest[2], now - latest[1] < _FRESH_SECONDS)

    def _latest(self, place: int) -> tuple[int, float, bytes] | None:
        halves = [half for half in (self._read(place, 0), self._read(place, 1)) if half is not None]
        return max(halves, default=None)

    def _read(self, place: int, half: int) -> tuple[int, float, bytes] | None:
        offset = _offset(place, half)
        head = os.pread(self._handle, _HEAD_BYTES, offset)
        if len(head) < _HEAD_BYTES:
            return None
        header, check = head[: _HEADER.size], head[_HEADER.size :]
        sequence, at, length = _HEADER.unpack(header)
        content = os.pread(self._handle, min(length, _HALF_BYTES), offset + _HEAD_BYTES)
        if not sequence or _CHECK.pack(zlib.crc32(content, zlib.crc32(header))) != check:
            return None
        return sequence, at, content


def _offset(place: int, half: int) -> int:
    return place * _PLACE_BYTES + half * _HALF_BYTES
