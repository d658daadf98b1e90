"""What may be printed of texts that come from elsewhere."""

from __future__ import annotations


def one_line(value: object) -> str:
    """Text of somebody else, safe for a terminal: names may hold what would steer it."""
    return "".join(character if character.isprintable() else "?" for character in str(value))
