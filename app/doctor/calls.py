"""Asks one address without cost, and says in our own terms why it did not answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from app.doctor.facts import Trouble
from app.domain import NodeSpec
from app.lean_httpx import httpx
from app.node_clients import Clients, causes
from app.providers.urls import join
from app.tls import OTHER_NAME, OUT_OF_DATE, UnusableCaFile

GET_SECONDS = 2.5
_ANSWER_BYTES = 8 * 2**20


class Answer(NamedTuple):
    """What a GET brought. `document` is None when the body is no JSON."""

    status: int
    document: Any
    redirect: str = ""  # scheme and host


class NoAnswer(Exception):
    """There was none."""

    def __init__(self, trouble: Trouble, detail: str = "") -> None:
        super().__init__(trouble.value)
        self.trouble = trouble
        self.detail = detail


class Caller:
    """Asks one node; its key goes to this node alone. `seen` remembers answers, so that no path is asked twice."""

    def __init__(self, clients: Clients, spec: NodeSpec) -> None:
        self._clients = clients
        self._spec = spec
        self._seen: dict[str, Answer] = {}
        self.clock_ahead_seconds: float | None = None

    async def get(self, path: str) -> Answer:
        """A path below the node's URL. Raises `NoAnswer`."""
        if path not in self._seen:
            self._seen[path] = await self.get_at(join(self._spec.url, path))
        return self._seen[path]

    async def get_at(self, url: str) -> Answer:
        """A whole URL of the same host. Raises `NoAnswer`."""
        key = self._spec.api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            client = await self._clients.of(self._spec)
            asked = time.time()
            async with client.stream("GET", url, headers=headers) as response:
                ahead = _clock_ahead(response.headers.get("date"), asked, time.time())
                body = await _body(response)
        except UnusableCaFile as error:
            raise NoAnswer(Trouble.CA_FILE, str(error)) from error
        except httpx.ConnectTimeout as error:
            raise NoAnswer(Trouble.NO_CONNECTION, "no connection in time") from error
        except httpx.ConnectError as error:
            raise _not_connected(error) from error
        except httpx.TimeoutException as error:
            raise NoAnswer(Trouble.SLOW) from error
        except httpx.HTTPError as error:
            raise NoAnswer(Trouble.NO_HTTP) from error
        if self.clock_ahead_seconds is None:
            self.clock_ahead_seconds = ahead
        return Answer(response.status_code, _json(body), _origin(response))


async def resolve(url: str, seconds: float = GET_SECONDS) -> None:
    """Looks the name up. Raises `NoAnswer`.

    In a thread of its own: those of the loop are waited for at the process's end, however long a resolver takes.
    """
    host = urlsplit(url).hostname or ""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[bool] = loop.create_future()

    def tell(known: bool) -> None:
        if not found.done():
            found.set_result(known)

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            known = True
        except (OSError, UnicodeError):
            known = False
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, known)

    threading.Thread(target=look_up, daemon=True).start()
    try:
        if not await asyncio.wait_for(found, seconds):
            raise NoAnswer(Trouble.UNRESOLVED)
    except TimeoutError:
        raise NoAnswer(Trouble.UNRESOLVED, "the name server did not answer in time") from None


async def speaks_tls(url: str) -> bool:
    """Whether what listens there does, whatever its certificate. No request is sent."""
    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(GET_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


def _not_connected(error: BaseException) -> NoAnswer:
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _not_accepted(cause)
        if isinstance(cause, ssl.SSLError):
            return NoAnswer(Trouble.TLS_NONE)
        if isinstance(cause, ConnectionRefusedError):
            return NoAnswer(Trouble.REFUSED)
        if isinstance(cause, socket.gaierror):
            return NoAnswer(Trouble.UNRESOLVED)
    words = " ".join(str(cause) for cause in causes(error)).lower()
    if "refused" in words or "all connection attempts failed" in words:
        return NoAnswer(Trouble.REFUSED)
    if "unreachable" in words or "no route" in words:
        return NoAnswer(Trouble.NO_CONNECTION, "no route to it")
    return NoAnswer(Trouble.NO_CONNECTION, "the connection was broken off")


def _not_accepted(error: ssl.SSLCertVerificationError) -> NoAnswer:
    trouble = Trouble.TLS_UNTRUSTED
    if error.verify_code in OUT_OF_DATE:
        trouble = Trouble.TLS_OUT_OF_DATE
    elif error.verify_code in OTHER_NAME:
        trouble = Trouble.TLS_OTHER_NAME
    return NoAnswer(trouble, error.verify_message.rstrip("."))


async def _body(response: httpx.Response) -> bytes:
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _ANSWER_BYTES:
            raise NoAnswer(Trouble.NO_HTTP, "its answer has no end")
    return body


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _origin(response: httpx.Response) -> str:
    """Where a redirect leads; no more of it than is safe to show."""
    location = response.headers.get("location", "") if response.is_redirect else ""
    try:
        parts = urlsplit(location)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


def _clock_ahead(date: str | None, asked: float, answered: float) -> float | None:
    """How far the other clock is before ours, as far as whole seconds tell: 0 when they may agree."""
    if date is None:
        return None
    try:
        theirs = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None
    if theirs > answered:
        return theirs - answered
    return min(0.0, theirs + 1 - asked)
