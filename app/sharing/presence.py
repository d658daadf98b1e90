"""Who is there: each replica leaves a sign of life in Redis every second.

Times are the server's, so that replicas' clocks need not agree.
"""

from __future__ import annotations

import os
import secrets
import socket

from app.sharing.link import PREFIX, Link, LinkDown, Script

ALIVE_SECONDS = 10.0  # how long a sign of life counts

_ALIVE = f"{PREFIX}alive"
_SINCE = f"{PREFIX}alive:since"
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_BEAT = Script(
    _NOW
    + """
local first = redis.call('ZCOUNT', KEYS[1], now - ARGV[2], '+inf') == 0
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('SET', KEYS[2], now, 'NX')
return first and 1 or 0
"""
)
_ASK = Script(
    _NOW
    + """
local since = redis.call('GET', KEYS[2])
if not since or now - since < tonumber(ARGV[1]) then return false end
return redis.call('ZRANGEBYSCORE', KEYS[1], now - ARGV[1], '+inf')
"""
)
_LIFETIME_MS = int(ALIVE_SECONDS * 1000)


def new_instance_id() -> str:
    """A name for this process that no other has, before or after; at most 32 characters, safe for logs."""
    # Host and number are not enough: the first process of a container has the same ones after each start.
    return f"{socket.gethostname()[:16]}-{os.getpid()}-{secrets.token_hex(3)}"


class Presence:
    """This process's sign of life, and those of others."""

    def __init__(self, link: Link, instance_id: str) -> None:
        self._link = link
        self._instance_id = instance_id

    async def beat(self) -> bool:
        """Leaves a sign of life. True when there was no other one, not even an older one of ours."""
        return bool(await self._link.script(_BEAT, [_ALIVE, _SINCE], [self._instance_id, _LIFETIME_MS]))

    async def leave(self) -> None:
        await self._link.call("ZREM", _ALIVE, self._instance_id)

    async def alive(self) -> frozenset[str] | None:
        """Who has given a sign of life in the last 10 s; None when nobody can say.

        That is so while the server is out of reach, and until signs of life have been kept for long enough: after it
        came back empty, those that live have not all been heard of.
        """
        try:
            found = await self._link.script(_ASK, [_ALIVE, _SINCE], [_LIFETIME_MS])
        except LinkDown:
            return None
        return None if found is None else frozenset(name.decode() for name in found)
