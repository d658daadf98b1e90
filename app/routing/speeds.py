"""How fast nodes are: learned from what they did, and guessed from what they are before that.

Everything is seconds per token, or seconds per load: sums and comparisons need no division then. Old samples fade, a
few per cent with each new one, so that a node which changes is seen as it is after some tens of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log
from typing import NamedTuple

_KEEP = 0.93  # what is left of a sample's weight after each newer one
# What samples count for together when the node has not been asked for long.
_OLD_SAMPLES = 0.05
_OLD_TOKENS = 5.0
_LEAST_PREFILL_TOKENS = 48  # below, the time to the first token says nothing about the speed
_LEAST_DECODE_TOKENS = 6

# Crowding: how much each other stream on the node slows one down, as a share of its speed alone.
CROWDING = 0.06
_CROWDING_WEIGHT = 12.0  # of that guess, against samples
_CROWDING_MAX = 1.0

# Guesses for a node and model of which nothing is known: a machine whose memory gives about 300 GB/s.
_BYTES_PER_SECOND = 300e9
_LOADED_BYTES_PER_SECOND = 2e9
_START_SECONDS = 1.0  # of an engine, beside what it reads
_DECODE_SECONDS = 1 / 40
_PREFILL_SHARE = 1 / 25  # of the time that a token takes to be generated
_LOAD_SECONDS = 8.0
_HOPE = 0.85
_HERE = 3.0  # times that what this node showed counts for what others did
_LOAD_SHARE = 0.7  # at least, of a load and the reading after it


class Ratio:
    """Seconds per unit, each sample weighing as much as it has units."""

    __slots__ = ("_seconds", "_units")

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        self._units = self._units * _KEEP + units
        self._seconds = self._seconds * _KEEP + seconds

    @property
    def known(self) -> bool:
        return self._units > 0

    def age(self) -> None:
        """It is long ago: the next sample counts for far more than all before."""
        if self._units > _OLD_TOKENS:
            self._units, self._seconds = _OLD_TOKENS, self.value * _OLD_TOKENS

    @property
    def value(self) -> float:
        """Seconds per unit. Ask only when `known`."""
        return self._seconds / self._units


class Decode:
    """Seconds per token alone on the node, and the share that each other stream adds.

    A line through samples of (other streams, seconds per token), drawn towards the usual slope while they are few or
    all alike.
    """

    __slots__ = ("_line", "_weight", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._line: tuple[float, float] | None = None
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, seconds: float, others: float) -> None:
        self._line = None
        self._weight = self._weight * _KEEP + 1
        self._x = self._x * _KEEP + others
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + others * others
        self._xy = self._xy * _KEEP + others * seconds

    def age(self) -> None:
        """It is long ago: the next sample counts for far more than all before."""
        keep = min(1.0, _OLD_SAMPLES / self._weight) if self._weight else 1.0
        self._weight, self._x, self._y = self._weight * keep, self._x * keep, self._y * keep
        self._xx, self._xy = self._xx * keep, self._xy * keep

    @property
    def known(self) -> bool:
        return self._weight > 0

    def line(self) -> tuple[float, float]:
        """Seconds per token alone, and the share of them that each other stream adds. Ask only when `known`."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> tuple[float, float]:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = max(0.0, self._xx - self._weight * mean_x * mean_x)
        joint = self._xy - self._weight * mean_x * mean_y
        guess = mean_y * CROWDING / (1 + CROWDING * mean_x)
        slope = (joint + _CROWDING_WEIGHT * guess) / (spread + _CROWDING_WEIGHT)
        slope = min(max(slope, 0.0), mean_y / max(1.0, mean_x))
        alone = max(mean_y - slope * mean_x, mean_y / (1 + _CROWDING_MAX * mean_x))
        return alone, min(slope / alone, _CROWDING_MAX)


class Speed:
    """What one node has shown with one model."""

    __slots__ = ("_load_and_read", "decode", "load", "prefill")

    def __init__(self) -> None:
        self.prefill = Ratio()
        self.decode = Decode()
        self.load = Ratio()
        self._load_and_read: tuple[float, float] | None = None

    @property
    def known(self) -> int:
        """How many of the three are: guesses for other nodes become better with each."""
        return self.prefill.known + self.decode.known + self.load.known

    def prefilled(self, tokens: float, seconds: float) -> None:
        """`tokens` are those that had to be read, without a cached prefix."""
        if tokens >= _LEAST_PREFILL_TOKENS and seconds > 0:
            self.prefill.add(tokens, seconds)
            if self._load_and_read is not None:
                first, self._load_and_read = self._load_and_read, None
                self.load = Ratio()
                self.loaded_and_read(*first)

    def loaded_and_read(self, tokens: float, seconds: float, guess: float = 0.0) -> None:
        """A load and the reading after it took so long together; `guess` is the second's share in seconds.

        While nothing is known of how fast the node reads, the load is what the guess leaves; that is corrected later.
        """
        if self.prefill.known:
            self.loaded(seconds - tokens * self.prefill.value)
        else:
            self._load_and_read = (tokens, seconds)
            self.loaded(max(seconds - guess, _LOAD_SHARE * seconds))

    def decoded(self, tokens: int, seconds: float, others: float) -> None:
        """`others` is how many other streams ran meanwhile, on average."""
        if tokens >= _LEAST_DECODE_TOKENS and seconds > 0:
            self.decode.add(seconds / tokens, others)

    def age(self) -> None:
        self.prefill.age()
        self.decode.age()

    def loaded(self, seconds: float) -> None:
        if seconds > 0:
            self.load.add(1, seconds)


class Known(NamedTuple):
    """A speed that a node showed with some model, for guesses about others. `power` is what its operator says of it."""

    seconds: float
    power: float
    size: float  # the model's bytes; 0 = unknown


def decode_guess(size: float, power: float) -> float:
    """Seconds per token of a node that nobody has asked yet."""
    seconds = size / _BYTES_PER_SECOND if size else _DECODE_SECONDS
    return min(max(seconds, 1 / 250), 1 / 4) / power


def prefill_guess(size: float, power: float) -> float:
    return decode_guess(size, power) * _PREFILL_SHARE


def load_guess(size: float) -> float:
    return min(_START_SECONDS + size / _LOADED_BYTES_PER_SECOND, 120.0) if size else _LOAD_SECONDS


def from_others(other_nodes: Iterable[Known], same_node: Iterable[Known], power: float, size: float) -> float | None:
    """A guess from what other nodes showed with any model, and this node with other models; None without any.

    What the node showed counts for more: nodes differ more than models of one size do. A node that has shown nothing is
    taken to be a little better than others, or nobody would ever find out.
    """
    total = weight = 0.0
    ratio = _size_ratio
    elsewhere = [
        log(each.seconds * ratio(size, each.size) * each.power / power) for each in other_nodes if each.seconds > 0
    ]
    here = [log(each.seconds * ratio(size, each.size)) for each in same_node if each.seconds > 0]
    if elsewhere:
        total, weight = total + sum(elsewhere) / len(elsewhere), weight + 1
    if here:
        total, weight = total + _HERE * sum(here) / len(here), weight + _HERE
    if not weight:
        return None
    return exp(total / weight) * (1.0 if here else _HOPE)


def _size_ratio(size: float, other: float) -> float:
    return size / other if size and other else 1.0
