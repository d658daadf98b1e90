"""Prometheus' text format, written in slices, so that the event loop gets its turn while a thread writes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# A thread that computes gives way only after 5 ms, by default, when the event loop wants to go on. So it rests by
# itself, and long enough for the loop to wake.
_SLICE_SECONDS = 0.0003
_REST_SECONDS = 0.0002
_LOOK_EVERY = 32  # lines, between two looks at the clock

_EXPONENT_FROM = 1_000_000

T = TypeVar("T")


class Breath:
    """Rests a thread whenever it has computed for a slice."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + _SLICE_SECONDS

    def take(self) -> None:
        """Rests if it is time to."""
        if time.perf_counter() >= self._until:
            time.sleep(_REST_SECONDS)
            self._until = time.perf_counter() + _SLICE_SECONDS

    def over(self, things: Iterable[T]) -> Iterator[T]:
        """The same things, with rests between them."""
        for index, thing in enumerate(things):
            if index % _LOOK_EVERY == 0:
                self.take()
            yield thing


def head(name: str, text: str, kind: str) -> str:
    """The two lines before a family's samples."""
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def sample_name(name: str, names: Sequence[str], values: Sequence[str]) -> str:
    """A sample's name with its labels, in the order of their names."""
    if not names:
        return name
    labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(zip(names, values, strict=True)))
    return f"{name}{{{labels}}}"


def number(value: float) -> str:
    """As Go writes it."""
    text = repr(float(value))
    if value < _EXPONENT_FROM:
        return "-Inf" if value == -math.inf else text
    if not math.isfinite(value):
        return "+Inf" if value > 0 else "NaN"
    whole, dot, rest = text.partition(".")
    if not dot or "e" in text:
        return text
    mantissa = f"{whole[0]}.{whole[1:]}{rest}".rstrip("0.")
    return f"{mantissa}e+{len(whole) - 1:02d}"


def _escaped(value: str) -> str:
    # A node may list names that are no Unicode.
    value = value.encode("utf-8", "replace").decode()
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
