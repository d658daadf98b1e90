"""HTTP clients for the control plane, probes and calls: one for each way in which nodes are trusted."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Self
from urllib.parse import urlsplit

from app.domain import NodeSpec
from app.lean_httpx import httpx
from app.tls import Trust, nothing_trusted, trouble


class Clients:
    """Open it inside the running loop. `keep` bounds the connections that each client keeps; None = any number."""

    def __init__(self, trust: Trust, *, seconds: float, keep: int | None = None) -> None:
        self._trust = trust
        self._timeout = httpx.Timeout(seconds)
        self._limits = httpx.Limits(max_keepalive_connections=keep, keepalive_expiry=3.5)
        self._clients: dict[ssl.SSLContext | None, httpx.AsyncClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        while self._clients:
            await self._clients.popitem()[1].aclose()

    async def of(self, spec: NodeSpec) -> httpx.AsyncClient:
        """The client for this node. Raises `UnusableCaFile`."""
        context = await self._trust.context(spec) if urlsplit(spec.url).scheme == "https" else None
        client = self._clients.get(context)
        if client is None:
            # httpx by itself would trust certifi's certificates alone, not the system's nor SSL_CERT_FILE's.
            verify = context or nothing_trusted()
            client = httpx.AsyncClient(limits=self._limits, timeout=self._timeout, verify=verify, trust_env=False)
            self._clients[context] = client
        return client


def why_no_tls(error: BaseException) -> str | None:
    """What was wrong with TLS, and which setting helps; None when a connection failed for another reason."""
    return next((why for cause in causes(error) if (why := trouble(cause))), None)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it: httpx hides causes below layers of its own, and may have tried several ways."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from causes(inner)
        error = error.__cause__ or error.__context__
