"""The connection to Redis or Valkey, which replicas share. The only module that knows redis-py.

redis-py is imported when a link opens, so that a gateway on its own never loads it. Nothing here waits for a server
that is known to be down: every call fails at once with `LinkDown`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

# Everything that replicas share lies under it. The braces put all keys into one slot of a cluster, so that one script
# may touch any of them.
PREFIX = "{hearth}:"

_PING_SECONDS = 0.5
_PINGS = 2  # in a row may stay unanswered: a busy process is late itself now and then
_CONNECTIONS = 16
_SILENCE_SECONDS = 5.0  # until a subscription asks whether its connection is alive

Handler = Callable[[bytes], None]


class LinkDown(Exception):
    """The shared state is out of reach, or refused a command. The message shows no password."""


class Script:
    """A Lua script. Its name on the server is the SHA-1 of its text."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Link:
    """One process's connections to the server at `url`: `redis://`, `rediss://` or `unix://`.

    Opened and closed with `async with`; a server that is down then is no error. `on_trouble` gets a message and fields
    once when the server goes out of reach, once when it is back, when it refuses a command, as a full one does, and
    when a message is not understood, once for each channel. `on_change` are called with the new `up`.
    Answers are bytes, whole numbers, None and lists of them, whatever the command.
    """

    def __init__(self, url: str, on_trouble: Callable[..., None], timeout_seconds: float = 0.3) -> None:
        self._url = url
        self._on_trouble = on_trouble
        self._timeout_seconds = timeout_seconds
        self.server = _without_secrets(url)
        self.up = False
        self.on_change: list[Callable[[bool], None]] = []
        self._told = True  # whoever is down before the first ping is told, too
        self._refused = ""  # what was told of last: the same is told once
        self._doubt = asyncio.Event()
        self._handlers: dict[str, Handler] = {}
        self._garbled: set[str] = set()  # channels on which something was not understood
        self._tasks: set[asyncio.Task[None]] = set()
        self._client: Redis | None = None
        # redis-py's own pool lets whoever comes last go first.
        self._turns = asyncio.Semaphore(_CONNECTIONS)

    async def __aenter__(self) -> Self:
        self._client = self._connect(_CONNECTIONS + 1)  # one is for pings
        await self._look()
        self._own(self.run())
        for channel in self._handlers:
            self._own(self._listen(channel))
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client, self._client = self._client, None
        self.up = False
        if client is not None:
            await client.aclose()

    async def run(self) -> None:
        """Watches the server until it is cancelled; the link starts it itself."""
        while True:
            self._doubt.clear()
            try:
                async with asyncio.timeout(_PING_SECONDS):
                    await self._doubt.wait()
            except TimeoutError:
                pass
            else:
                # Many calls may fail in the same moment, and a server that refuses connections does so at once.
                await asyncio.sleep(0.01)
            await self._look()

    async def call(self, *command: Any) -> Any:
        """One command's answer. Raises LinkDown."""
        async with self._asking() as client:
            return await _ask(client, *command)

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """The answers to commands sent together, in order; they are no transaction. Raises LinkDown if one fails."""
        if not commands:
            return []
        async with self._asking() as client:
            return await _ask_all(client, commands)

    async def script(self, script: Script, keys: Sequence[Any], args: Sequence[Any] = ()) -> Any:
        """What the script returns. A server that has not seen it yet is sent its text. Raises LinkDown.

        It may have run although LinkDown is raised: the answer may be what was lost.
        """
        from redis.exceptions import NoScriptError

        async with self._asking() as client:
            try:
                return await _ask(client, "EVALSHA", script.sha, len(keys), *keys, *args)
            except NoScriptError:
                return await _ask(client, "EVAL", script.text, len(keys), *keys, *args)

    async def scripts(self, script: Script, calls: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[Any]:
        """What the script returns for each of these keys and arguments, in one round trip. Raises LinkDown.

        Some may have run although LinkDown is raised.
        """
        from redis.exceptions import NoScriptError

        commands = [("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls]
        async with self._asking() as client:
            try:
                return await _ask_all(client, commands)
            except NoScriptError:
                await _ask(client, "SCRIPT", "LOAD", script.text)
                return await _ask_all(client, commands)

    async def publish(self, channel: str, message: bytes) -> None:
        """Sends the message to whoever listens now. Raises LinkDown."""
        await self.call("PUBLISH", channel, message)

    def subscribe(self, channel: str, handler: Handler) -> None:
        """Calls the handler with every message from now on; what is sent while the link is down is lost.

        A channel has one handler. What it raises is told of, as another version may send what it does not understand.
        """
        if channel in self._handlers:
            raise ValueError(f"{channel} has a handler already")
        self._handlers[channel] = handler
        if self._client is not None:
            self._own(self._listen(channel))

    def _connect(self, connections: int) -> Redis:
        from redis.asyncio import ConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        try:
            pool = ConnectionPool.from_url(
                self._url,
                max_connections=connections,
                socket_timeout=None,  # `_asking` bounds the whole call
                socket_connect_timeout=None,
                **({} if self._url.startswith("unix:") else {"socket_keepalive": True}),
                retry=Retry(NoBackoff(), 0),  # trying again is its callers' business
                protocol=2,
                driver_info=None,
            )
        except ValueError as error:
            raise ValueError(f"{self.server!r} is no address of Redis: redis://, rediss:// or unix://") from error
        client = Redis.from_pool(pool)
        client.response_callbacks.clear()  # answers look the same in a script, a pipeline and alone
        return client

    def _own(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[Redis]:
        if self.up:
            async with self._turns:
                # It may have gone while others had their turn.
                if self.up and self._client is not None:
                    async with self._in_time():
                        yield self._client
                    return
        raise LinkDown(f"{self.server} cannot be reached")

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Bounds a talk with the server, and turns what goes wrong into LinkDown."""
        from redis.exceptions import ConnectionError, RedisError

        try:
            async with asyncio.timeout(self._timeout_seconds):
                yield
        except TimeoutError as error:
            self._doubt.set()
            raise LinkDown(f"{self.server} did not answer within {self._timeout_seconds} s") from error
        except (ConnectionError, OSError) as error:
            self._doubt.set()
            raise LinkDown(f"{self.server}: {error}") from error
        except RedisError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._on_trouble("the shared state refused a command", reason=self._refused)
            raise LinkDown(f"{self.server} refused a command: {error}") from error

    async def _look(self) -> None:
        """Pings, and says what changed."""
        assert self._client is not None
        reason = ""
        for _ in range(_PINGS):
            try:
                async with self._in_time():
                    await _ask(self._client, "PING")
            except LinkDown as error:
                reason = str(error)
                if isinstance(error.__cause__, TimeoutError):
                    continue
            else:
                reason = ""
            break
        self._set(not reason, reason)

    def _set(self, up: bool, reason: str) -> None:
        changed, self.up = up != self.up, up
        if changed or (self._told and not up):
            if not up:
                self._on_trouble("the shared state cannot be reached: this process goes on alone", reason=reason)
            elif not self._told:
                self._on_trouble("the shared state can be reached again", server=self.server)
        self._told = up
        if changed:
            for listener in self.on_change:
                listener(up)

    async def _listen(self, channel: str) -> None:
        """Hands on what is published, over a connection of its own, until it is cancelled."""
        client = self._connect(1)
        try:
            while True:
                if self.up:
                    try:
                        await self._hear(client, channel)
                    except LinkDown:
                        self._doubt.set()
                await asyncio.sleep(0.05)
        finally:
            await client.aclose()

    async def _hear(self, client: Redis, channel: str) -> None:
        """Reads until the connection ends. Raises LinkDown when it does, or when it has been silent for too long."""
        loop = asyncio.get_running_loop()
        pubsub = client.pubsub()
        try:
            async with self._in_time():
                await pubsub.subscribe(channel)
            heard = asked = loop.time()
            while True:
                async with self._read():
                    message = await pubsub.get_message(timeout=_SILENCE_SECONDS)
                if message is not None:
                    heard = loop.time()
                    if message["type"] == "message":
                        self._hand_on(channel, message["data"])
                    continue
                if asked > heard:
                    raise LinkDown(f"{self.server} has gone silent")
                async with self._in_time():
                    await pubsub.ping()
                asked = loop.time()
        finally:
            await _close(pubsub)

    def _hand_on(self, channel: str, message: bytes) -> None:
        try:
            self._handlers[channel](message)
        except Exception as error:  # what is not understood may fail anywhere, and those that come later still count
            if channel not in self._garbled:
                self._garbled.add(channel)
                reason = f"{channel}: {error!r}"
                self._on_trouble("another replica speaks in a way that is not understood", reason=reason)

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[None]:
        """As `_in_time`, without a bound: silence is no fault."""
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            raise LinkDown(f"{self.server}: {error}") from error


async def _ask(client: Redis, *command: Any) -> Any:
    return await client.execute_command(*command)  # type: ignore[no-untyped-call]


async def _ask_all(client: Redis, commands: Sequence[Sequence[Any]]) -> list[Any]:
    pipe = client.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    answers: list[Any] = await pipe.execute()
    return answers


async def _close(pubsub: PubSub) -> None:
    await pubsub.aclose()  # type: ignore[no-untyped-call]


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
