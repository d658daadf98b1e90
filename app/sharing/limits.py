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
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Self

import orjson

from app.domain import Rate
from app.errors import RateLimited

if TYPE_CHECKING:
    from app.sharing.link import Link

_MINUTE = 60.0
_FULL_SECONDS = _MINUTE + 1e-5  # for rounding
_CALLERS = 10_000
_PUBLISH_SECONDS = 0.1
_CHANNEL = "hearth:limits"
_HEADERS = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"


class _Bucket:
    """One limit of one caller, by when it will be empty, and what was taken since it was last published.

    A `limit` that is None does not exist.
    """

    __slots__ = ("_each_seconds", "_headers", "_limit", "_most_seconds", "empty_at", "taken")

    def __init__(self) -> None:
        self.empty_at = 0.0
        self.taken = 0
        self.limit(b"", None)

    def limit(self, what: bytes, limit: int | None) -> None:
        """Changes the limit; what was taken stays, and runs out in the same time."""
        self._limit = limit
        self._each_seconds = _MINUTE / limit if limit else 0.0
        self._most_seconds = _FULL_SECONDS if limit is None or limit > 0 else -1.0  # in a limit of nothing nothing fits
        self._headers = b"" if limit is None else _HEADERS % (what, limit, what, what)

    def take(self, now: float, amount: int) -> bytes | None:
        """Puts so much in and gives the headers that tell of it; None where it does not fit.

        What is larger than the bucket fits when the bucket is empty.
        """
        limit = self._limit
        if limit is None:
            return b""
        level = self.empty_at - now
        if level < 0:
            level = 0.0
        if level + (amount if amount < limit else limit) * self._each_seconds > self._most_seconds:
            return None
        return self._filled(now, limit, level + amount * self._each_seconds)

    def give_back(self, amount: int) -> None:
        """Takes out what was put in this moment."""
        self.empty_at -= amount * self._each_seconds

    def headers(self, now: float) -> bytes:
        """Those that tell of it as it is."""
        return b"" if self._limit is None else self._filled(now, self._limit, max(self.empty_at - now, 0.0))

    def _filled(self, now: float, limit: int, level: float) -> bytes:
        """Headers: the limit, what remains, and when nothing counts any more."""
        self.empty_at = now + level
        left = int((_MINUTE - level) * limit / _MINUTE + 1e-6)
        return self._headers % (left if left > 0 else 0, _duration_of(math.ceil(level * 1000 - 1e-6)))

    def correct(self, now: float, seconds: float) -> None:
        """Moves the time when it is empty; more than was known of is there from now on."""
        begin = now if seconds > 0 and now > self.empty_at else self.empty_at
        self.empty_at = begin + seconds

    def refusal(self, now: float, amount: int, what: str) -> RateLimited:
        """What the caller is told of a bucket that is full."""
        limit = self._limit or 0
        if limit > 0:
            wait = max(self.empty_at - now, 0.0) + min(amount, limit) * self._each_seconds - _MINUTE
        else:
            wait = _MINUTE
        return RateLimited(
            f"this API key may use {limit} {what} a minute; try again in {wait:.1f} s", retry_after_seconds=wait
        )


class _Standing(NamedTuple):
    """One caller's buckets."""

    rate: Rate
    requests: _Bucket
    tokens: _Bucket


class Limits:
    """Rate limits by caller. `clock` gives seconds that only grow.

    With a link it is opened and closed with `async with`, after its link.
    """

    def __init__(self, link: Link | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._callers: dict[str, _Standing] = {}
        self._taken: dict[str, _Standing] = {}  # of whom there is something to publish
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

    def take(self, caller_id: str, rate: Rate, tokens: int) -> bytes:
        """Counts one request of about so many tokens, or none of it when a limit is reached: raises `RateLimited`.

        Gives the `x-ratelimit-*` headers, in OpenAI's form, each with its line break.
        """
        standing = self._callers.get(caller_id)
        if standing is None or standing[0] is not rate:
            standing = self._add(caller_id, rate)
        _, of_requests, of_tokens = standing
        now = self._clock()
        headers = of_requests.take(now, 1)
        if headers is None:
            raise _refused(standing, now, of_requests.refusal(now, 1, "requests"))
        more = of_tokens.take(now, tokens)
        if more is None:
            of_requests.give_back(1)
            raise _refused(standing, now, of_tokens.refusal(now, tokens, "tokens"))
        if self._link is not None:
            of_requests.taken += 1
            of_tokens.taken += tokens
            self._taken[caller_id] = standing
        return headers + more

    def settle(self, caller_id: str, rate: Rate, token_difference: int) -> None:
        """Corrects a request that was taken: it came to so many tokens more, or fewer when it is negative."""
        _, per_token = rate
        if not token_difference or not per_token:
            return
        standing = self._callers.get(caller_id) or self._add(caller_id, rate)
        _, _, of_tokens = standing
        of_tokens.correct(self._clock(), token_difference * _MINUTE / per_token)
        if self._link is not None:
            of_tokens.taken += token_difference
            self._taken[caller_id] = standing

    def publication(self) -> bytes | None:
        """What was taken since it was last asked, for others to merge; None when that is nothing."""
        if not self._taken:
            return None
        taken, self._taken = self._taken, {}
        rows = []
        for caller_id, (rate, requests, tokens) in taken.items():
            rows.append([caller_id, *rate, requests.taken, tokens.taken])
            requests.taken = tokens.taken = 0
        return orjson.dumps({"from": self._me, "taken": rows})

    def merge(self, message: bytes) -> None:
        """Adds what another replica published; its own comes back too, and is left out."""
        said = orjson.loads(message)
        if said["from"] == self._me:
            return
        now = self._clock()
        for caller_id, per_request, per_token, requests, tokens in said["taken"]:
            standing = self._callers.get(caller_id) or self._add(caller_id, Rate(per_request, per_token))
            if per_request and requests:
                standing.requests.correct(now, requests * _MINUTE / per_request)
            if per_token and tokens:
                standing.tokens.correct(now, tokens * _MINUTE / per_token)

    def _add(self, caller_id: str, rate: Rate) -> _Standing:
        """A caller that is new, or has other limits than before."""
        before = self._callers.get(caller_id)
        if before is None and len(self._callers) >= _CALLERS:
            # The one who came first is the likeliest to have empty buckets; who has not begins anew.
            del self._callers[next(iter(self._callers))]
        _, requests, tokens = before or (None, _Bucket(), _Bucket())
        requests.limit(b"requests", rate.requests_per_minute)
        tokens.limit(b"tokens", rate.tokens_per_minute)
        standing = self._callers[caller_id] = _Standing(rate, requests, tokens)
        return standing

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


def _refused(standing: _Standing, now: float, error: RateLimited) -> RateLimited:
    error.header_lines = standing.requests.headers(now) + standing.tokens.headers(now)
    return error


@lru_cache(maxsize=1024)
def _duration_of(ms: int) -> bytes:
    return duration(ms / 1000).encode()


def duration(seconds: float) -> str:
    """As OpenAI writes it: `0s`, `120ms`, `1s`, `1.5s`, `6m0s`. Rounded up, never to less than there is."""
    ms = math.ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{ms}ms" if ms > 0 else "0s"
    minutes, rest = divmod(ms, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text
