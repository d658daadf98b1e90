"""The app's front door: hot routes go straight from the server to their endpoints, all others through FastAPI."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.fronts.asgi import headers_of, request_id

_SLASHES = re.compile("/{2,}")


class FrontDoor(FastAPI):
    """A FastAPI app with a short way in for raw endpoints.

    Starlette's and FastAPI's layers and the search for a route cost about as much as all of Hearth's own work on a
    request. They stay in place for every other path, and for hot paths below a `root_path`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._hot: dict[str, ASGIApp] = {}

    def add_hot_route(self, path: str, endpoint: ASGIApp) -> None:
        """Serves every method on exactly this path; the endpoint answers for its own errors."""
        self._hot[path] = endpoint
        self.router.routes.append(Route(path, endpoint, include_in_schema=False))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            endpoint = self._hot.get(path)
            if endpoint is None and "//" in path:
                # Some clients join base_url and path with one slash too many.
                scope["path"] = path = _SLASHES.sub("/", path)
                endpoint = self._hot.get(path)
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
            send = _identified(scope, send)
        await super().__call__(scope, receive, send)


def _identified(scope: Scope, send: Send) -> Send:
    """Gives the answer the request's id, unless it brings one."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            if not any(name == b"x-request-id" for name, _ in headers):
                known = request_id(headers_of(scope).get(b"x-request-id"))
                message = {**message, "headers": [*headers, (b"x-request-id", known.encode())]}
        await send(message)

    return sending
