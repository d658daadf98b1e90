"""What is asked of a model: how often, how long its answers are, how its text turns into tokens."""

from __future__ import annotations

from math import exp

from app.routing.prefixes import Prefixes

_WINDOW_SECONDS = 60.0
_FIRST_WINDOW = 10.0
_AHEAD_MAX = 30.0
_TOKENS = 250.0  # of an answer, until some have been seen
_LIMIT_SHARE = 0.5  # of its limit that an answer uses, until some have been seen
_TOKENS_PER_CHARACTER = 0.25
_LEARN = 0.1
_LEARN_SOON = 0.5  # the first samples say more than the guess


class Demand:
    """Of one model, over all nodes."""

    __slots__ = (
        "_asked",
        "_at",
        "_began",
        "_lengths",
        "_limited",
        "_share",
        "_tokens",
        "prefixes",
        "regret",
        "regret_at",
        "tokens_per_character",
    )

    def __init__(self, now: float) -> None:
        self.prefixes = Prefixes()
        self.tokens_per_character = _TOKENS_PER_CHARACTER
        self.regret = 0.0  # seconds lost because it is not loaded where it would be better
        self.regret_at = now
        self._asked = 0.0
        self._at = self._began = now
        self._tokens, self._lengths = _TOKENS, 0
        self._share, self._limited = _LIMIT_SHARE, 0

    def asked(self, now: float) -> None:
        self._asked = self._asked * exp((self._at - now) / _WINDOW_SECONDS) + 1
        self._at = now

    def rate(self, now: float) -> float:
        """Requests a second, lately."""
        age = max(_FIRST_WINDOW, now - self._began)
        seen = _WINDOW_SECONDS * (1 - exp(-age / _WINDOW_SECONDS))
        return self._asked * exp((self._at - now) / _WINDOW_SECONDS) / seen

    def ahead(self, now: float, seconds: float) -> float:
        """Requests to expect in that time: as the rate says, but no more than lately came."""
        lately = self._asked * exp((self._at - now) / _WINDOW_SECONDS)
        return min(self.rate(now) * seconds, lately, _AHEAD_MAX)

    def length(self, limit: int | None) -> float:
        """Tokens that an answer with this limit will probably have."""
        if limit is None:
            return self._tokens
        return max(1.0, limit * self._share)

    def answered(self, tokens: int, limit: int | None) -> None:
        if limit is None:
            self._lengths += 1
            self._tokens += (tokens - self._tokens) * max(_LEARN, _LEARN_SOON / self._lengths)
        else:
            self._limited += 1
            self._share += (min(1.0, tokens / limit) - self._share) * max(_LEARN, _LEARN_SOON / self._limited)

    def read(self, characters: int, tokens: int) -> None:
        """The node counted so many tokens in a prompt."""
        if characters >= 200 and tokens > 0:
            ratio = min(2.0, max(0.05, tokens / characters))
            self.tokens_per_character += (ratio - self.tokens_per_character) * _LEARN
