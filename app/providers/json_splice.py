"""Changes a string value in JSON text without decoding it, so that all the rest stays the same, byte for byte."""

from __future__ import annotations

import re
from typing import NamedTuple

_VALUE = re.compile(rb'\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")?')


class Member(NamedTuple):
    """Where a member of an object lies in the text: its key from `start`, its string value from `value` to `end`."""

    start: int
    value: int
    end: int


def sole_member(text: bytes, key: bytes) -> Member | None:
    """The only member with this key (given with its quotes) at any depth, when its value is a string.

    A key cannot be found in the middle of a string: there the quotes around it are escaped.
    """
    found = None
    position = text.find(key)
    while position >= 0:
        after = position + len(key)
        match = _VALUE.match(text, after)
        # After a backslash it is the end of a longer key.
        if match is not None and text[position - 1 : position] != b"\\":
            if found is not None or match.group(1) is None:
                return None
            found = Member(position, match.start(1), match.end(1))
        position = text.find(key, after)
    return found
