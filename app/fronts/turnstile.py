"""How much a caller may ask for in a minute: counted on the way in, corrected on the way out."""

from __future__ import annotations

from collections.abc import Callable

from app.domain import Rate, Request, Usage
from app.sharing.limits import Limits

_SMALL_BYTES = 16 * 1024
_BYTES = 4  # a token has about so many
_NONE = Usage(0, 0)


class Turnstile:
    """Lets requests in. `estimate` guesses a prompt's tokens before anybody has counted them."""

    def __init__(self, limits: Limits, estimate: Callable[[Request], int]) -> None:
        self._limits = limits
        self._estimate = estimate

    def enter(self, request: Request, caller_id: str, rate: Rate) -> tuple[int, bytes]:
        """The tokens that were counted for it, and headers for the client, as lines. Raises `RateLimited`."""
        _, per_token = rate
        tokens = 0
        if per_token is not None:
            size = len(request.body)
            # Of a small body its length tells enough.
            tokens = size // _BYTES if size < _SMALL_BYTES else self._estimate(request)
        return tokens, self._limits.take(caller_id, rate, tokens)

    def leave(self, caller_id: str, rate: Rate, counted: int, usage: Usage | None) -> None:
        """Corrects the count by what the request came to; one that took nothing gives its tokens back."""
        prompt, completion, _ = usage or _NONE
        self._limits.settle(caller_id, rate, prompt + completion - counted)
