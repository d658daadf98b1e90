"""How much each caller may ask for in a minute. Nothing here waits: counts are this process's, and others' come later.

Each limit is a bucket of one minute's amount that runs out evenly, kept as the time at which it will be empty. With a
link, what this process let through is published about ten times a second, and what others let through is added to its
own buckets. So N replicas that are asked in the same tenth of a second may let through N times what is left of a
limit; what is too much is paid back at once after that, as the buckets are then over full: in the long run the
limit holds for all together. While the link is down, each replica has the whole limit for itself.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

import orjson

from app.domain import Rate

if TYPE_CHECKING:
    from app.sharing.link import Link

_MINUTE = 60.0
_ROUNDING_SECONDS = 1e-5
_CALLERS = 10_000
_PUBLISH_SECONDS = 0.1
_CHANNEL = "hearth:limits"
_REQUESTS, _TOKENS = (
    b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n" % ((of,) * 3)
    for of in (b"requests", b"tokens")
)
_BOTH = _REQUESTS + _TOKENS


class Verdict(NamedTuple):
    """Whether a request may go on, and how its caller stands now. A limit that is None does not exist.

    `reset` is when nothing counts any more; `retry_after_seconds` is 0 when allowed.
    """

    allowed: bool
    retry_after_seconds: float = 0.0
    why: str = ""  # "requests" or "tokens" when it is not allowed
    limit_requests: int | None = None
    reset_requests_seconds: float = 0.0
    limit_tokens: int | None = None
    reset_tokens_seconds: float = 0.0

    @property
    def remaining_requests(self) -> int:
        return _remaining(self.limit_requests, self.reset_requests_seconds)

    @property
    def remaining_tokens(self) -> int:
        return _remaining(self.limit_tokens, self.reset_tokens_seconds)

    def header_lines(self) -> bytes:
        """The `x-ratelimit-*` headers, in OpenAI's form, each with its line break."""
        _, _, _, requests, requests_seconds, tokens, tokens_seconds = self
        if requests is None:
            return b"" if tokens is None else _TOKENS % _figures(tokens, tokens_seconds)
        if tokens is None:
            return _REQUESTS % _figures(requests, requests_seconds)
        return _BOTH % (_figures(requests, requests_seconds) + _figures(tokens, tokens_seconds))


FREE = Verdict(True)


class _Buckets:
    """One caller's two buckets, by when they will be empty, and what was taken since it was last published."""

    __slots__ = ("rate", "requests_empty_at", "requests_taken", "tokens_empty_at", "tokens_taken")

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.requests_empty_at = 0.0
        self.tokens_empty_at = 0.0
        self.requests_taken = 0
        self.tokens_taken = 0


class Limits:
    """Rate limits by caller. `clock` gives seconds that only grow.

    With a link it is opened and closed with `async with`, after its link.
    """

    def __init__(self, link: Link | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._callers: dict[str, _Buckets] = {}
        self._taken: dict[str, _Buckets] = {}  # of whom there is something to publish
        self._me = secrets.token_hex(8)
        self._publishing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._link is not None:
            self._link.subscribe(_CHANNEL, self.merge)
            self._publishing = asyncio.create_task(self._publish())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)

    def take(self, caller_id: str, rate: Rate, tokens: int) -> Verdict:
        """Counts one request of about so many tokens, or none of it when a limit is reached."""
        per_request, per_token = rate
        if per_request is None and per_token is None:
            return FREE
        now = self._clock()
        buckets = self._callers.get(caller_id) or self._add(caller_id, rate)
        buckets.rate = rate
        requests = buckets.requests_empty_at - now if buckets.requests_empty_at > now else 0.0
        level = buckets.tokens_empty_at - now if buckets.tokens_empty_at > now else 0.0
        if per_request is not None:
            wait = requests + _MINUTE / per_request - _MINUTE if per_request > 0 else _MINUTE
            if wait > _ROUNDING_SECONDS:
                return Verdict(False, wait, "requests", per_request, requests, per_token, level)
        if per_token is not None:
            # What is larger than the bucket goes when the bucket is empty.
            needed = tokens if tokens < per_token else per_token
            wait = level + needed * _MINUTE / per_token - _MINUTE if per_token > 0 else _MINUTE
            if wait > _ROUNDING_SECONDS:
                return Verdict(False, wait, "tokens", per_request, requests, per_token, level)
            level += tokens * _MINUTE / per_token
            buckets.tokens_empty_at = now + level
        if per_request is not None:
            requests += _MINUTE / per_request
            buckets.requests_empty_at = now + requests
        if self._link is not None:
            buckets.requests_taken += 1
            buckets.tokens_taken += tokens
            self._taken[caller_id] = buckets
        return Verdict(True, 0.0, "", per_request, requests, per_token, level)

    def settle(self, caller_id: str, rate: Rate, token_difference: int) -> None:
        """Corrects a request that was taken: it came to so many tokens more, or fewer when it is negative."""
        if not token_difference or not rate.tokens_per_minute:
            return
        buckets = self._callers.get(caller_id) or self._add(caller_id, rate)
        _correct(buckets, rate.tokens_per_minute, token_difference, self._clock())
        if self._link is not None:
            buckets.tokens_taken += token_difference
            self._taken[caller_id] = buckets

    def publication(self) -> bytes | None:
        """What was taken since it was last asked, for others to merge; None when that is nothing."""
        if not self._taken:
            return None
        taken, self._taken = self._taken, {}
        rows = []
        for caller_id, buckets in taken.items():
            rows.append([caller_id, *buckets.rate, buckets.requests_taken, buckets.tokens_taken])
            buckets.requests_taken = buckets.tokens_taken = 0
        return orjson.dumps({"from": self._me, "taken": rows})

    def merge(self, message: bytes) -> None:
        """Adds what another replica published; its own comes back too, and is left out."""
        said = orjson.loads(message)
        if said["from"] == self._me:
            return
        now = self._clock()
        for caller_id, per_request, per_token, requests, tokens in said["taken"]:
            rate = Rate(per_request, per_token)
            buckets = self._callers.get(caller_id) or self._add(caller_id, rate)
            if per_request and requests:
                buckets.requests_empty_at = max(buckets.requests_empty_at, now) + requests * _MINUTE / per_request
            if per_token and tokens:
                _correct(buckets, per_token, tokens, now)

    def _add(self, caller_id: str, rate: Rate) -> _Buckets:
        if len(self._callers) >= _CALLERS:
            # The one who came first is the likeliest to have empty buckets; who has not begins anew.
            del self._callers[next(iter(self._callers))]
        buckets = self._callers[caller_id] = _Buckets(rate)
        return buckets

    async def _publish(self) -> None:
        from app.sharing.link import LinkDown

        assert self._link is not None
        while True:
            await asyncio.sleep(_PUBLISH_SECONDS)
            message = self.publication()
            if message is None:
                continue
            try:
                await self._link.publish(_CHANNEL, message)
            except LinkDown:
                continue  # each has its own limits now; the link has told of it


def _correct(buckets: _Buckets, per_token: int, difference: int, now: float) -> None:
    begin = max(buckets.tokens_empty_at, now) if difference > 0 else buckets.tokens_empty_at
    buckets.tokens_empty_at = begin + difference * _MINUTE / per_token


def _remaining(limit: int | None, level_seconds: float) -> int:
    left = int((_MINUTE - level_seconds) * (limit or 0) / _MINUTE + 1e-6)
    return left if left > 0 else 0


def _figures(limit: int, reset: float) -> tuple[int, int, bytes]:
    """The limit, what remains of it, and when nothing counts any more."""
    ms = math.ceil(reset * 1000 - 1e-6)
    when = b"%dms" % ms if 0 < ms < 1000 else duration(reset).encode()
    return limit, _remaining(limit, reset), when


def duration(seconds: float) -> str:
    """As OpenAI writes it: `0s`, `120ms`, `1s`, `1.5s`, `6m0s`. Rounded up, never to less than there is."""
    ms = math.ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{ms}ms" if ms > 0 else "0s"
    minutes, rest = divmod(ms, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text
