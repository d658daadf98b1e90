"""The dashboard: its page, sessions for it, what it shows, and its buttons."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from app.errors import Forbidden, InvalidRequest, NotFound, Unauthorized
from app.fronts.admin import admins, body_of, refusals
from app.fronts.asgi import ClientWatch, Receive, Scope, Send, WatchStarts, headers_of
from app.fronts.auth import Doors
from app.fronts.openai_wire import decode
from app.fronts.sessions import Sessions, cookie
from app.routing.membership import Membership
from app.routing.registry import Node, Registry

_FILES = Path(__file__).parents[1] / "dashboard"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_STREAM_SECONDS = 3600.0  # then the browser comes again, and shows anew that it may
_BODY_BYTES = 4096
_REFUSALS = {404: "There is no local node of this name."}


class Snapshots(Protocol):
    """What the gateway does now, as JSON."""

    async def now(self) -> bytes: ...

    def viewer(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]: ...


class _File(NamedTuple):
    content: bytes
    headers: Mapping[str, str]


class Dashboard:
    """The routes of the dashboard. `sessions` is None where there are no admin keys."""

    def __init__(
        self,
        snapshots: Snapshots,
        doors: Doors,
        sessions: Sessions | None,
        registry: Registry,
        membership: Membership,
    ) -> None:
        self._snapshots = snapshots
        self._doors = doors
        self._sessions = sessions
        self._registry = registry
        self._membership = membership
        self._files: Mapping[str, _File] = {}

    def router(self) -> APIRouter:
        router = APIRouter()
        page: dict[str, Any] = {"include_in_schema": False}
        router.get("/", **page)(_to("dashboard"))
        router.get("/dashboard/", **page)(_to("../dashboard"))
        router.get("/dashboard", **page)(self.page)
        router.get("/dashboard/session", **page)(self.session)
        router.post("/dashboard/session", **page)(self.log_in)
        router.delete("/dashboard/session", **page)(self.log_out)
        router.get("/dashboard/{name}", **page)(self.file)
        admin: dict[str, Any] = {"tags": ["admin"], "dependencies": [admins(self._doors)]}
        what = "What the gateway does now"
        router.get("/admin/snapshot", summary=what, responses=refusals({}), **admin)(self.snapshot)
        # A stream without an end is nothing that a schema could describe.
        router.get("/admin/events", include_in_schema=False, **admin)(self.events)
        for word, summary in (("drain", "Give a node no new requests"), ("enable", "Give a node requests again")):
            path, told = f"/admin/nodes/{{name:path}}/{word}", refusals(_REFUSALS, 404)
            router.post(path, summary=summary, responses=told, **admin)(self._marking(word == "drain"))
        return router

    # -- the page

    async def page(self, request: Request) -> Response:
        return await self._file(_INDEX, request)

    async def file(self, name: str, request: Request) -> Response:
        return await self._file(name, request)

    async def _file(self, name: str, request: Request) -> Response:
        if not self._files:
            self._files = await asyncio.to_thread(_read_files)
        found = self._files.get(name)
        if found is None:
            raise NotFound(f"the dashboard has no file '{name[:100]}'")
        if request.headers.get("if-none-match") == found.headers["etag"]:
            return Response(status_code=304, headers=found.headers)
        return Response(found.content, headers=found.headers)

    # -- who may see it

    async def session(self, request: Request) -> JSONResponse:
        """Whether the browser may see the dashboard, and what it can do if not."""
        headers = headers_of(request.scope)
        told = {"may": True, "login": False, "session": False, "reason": ""}
        try:
            self._doors.check_admin(request.scope, headers)
            told["session"] = self._sessions is not None and self._sessions.holds(headers)
        except Unauthorized:
            told |= {"may": False, "login": True}
        except Forbidden as error:
            told |= {"may": False, "reason": error.message}
        return JSONResponse(told, headers={"cache-control": "no-store"})

    async def log_in(self, request: Request) -> Response:
        key = await _key(request)
        # Only the key counts here, not from where it comes: whoever has one may also send it with every request.
        if self._sessions is None:
            raise NotFound("there are no sessions, as ADMIN_KEYS is not set")
        self._doors.check_admin(request.scope, {b"authorization": b"Bearer " + key.encode()})
        token = await asyncio.to_thread(self._sessions.open)
        return _with_cookie(cookie(token, request.scope, headers_of(request.scope)))

    async def log_out(self, request: Request) -> Response:
        headers = headers_of(request.scope)
        if self._sessions is not None:
            self._sessions.close(headers)
        return _with_cookie(cookie("", request.scope, headers))

    # -- what it shows

    async def snapshot(self) -> Response:
        return Response(
            await self._snapshots.now(), media_type="application/json", headers={"cache-control": "no-store"}
        )

    async def events(self) -> Response:
        return _Events(self._snapshots)

    # -- its buttons

    def _marking(self, draining: bool) -> Callable[[str], Any]:
        async def mark(name: str) -> dict[str, Any]:
            node = self._local(name)
            self._membership.drain(node, draining)
            return {"name": node.name, "draining": node.draining, "in_flight": node.in_flight_everywhere}

        mark.__name__ = "drain_node" if draining else "enable_node"
        return mark

    def _local(self, name: str) -> Node:
        node = next((node for node in self._registry.local() if node.name == name), None)
        if node is None:
            raise NotFound(f"there is no local node '{name[:100]}'; GET /admin/nodes lists them")
        return node


class _Events(Response):
    """Snapshots as server-sent events, until the viewer leaves or the process ends."""

    def __init__(self, snapshots: Snapshots) -> None:
        super().__init__()
        self._snapshots = snapshots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ClientWatch(receive, WatchStarts()) as watch:
            async with self._snapshots.viewer() as viewer:
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                await self._send_all(viewer, send)
            watch.done()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, viewer: AsyncIterator[bytes], send: Send) -> None:
        end = asyncio.get_running_loop().time() + _STREAM_SECONDS
        async for snapshot in viewer:
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % snapshot, "more_body": True})
            if asyncio.get_running_loop().time() > end:
                return


def _to(path: str) -> Callable[[], Awaitable[Response]]:
    async def redirect() -> Response:
        return RedirectResponse(path, 307)

    return redirect


def _read_files() -> dict[str, _File]:
    return {path.name: _file(path) for path in _FILES.iterdir() if path.suffix in _TYPES}


def _file(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return _File(content, {**_PAGE_HEADERS, "content-type": _TYPES[path.suffix], "etag": etag})


def _with_cookie(value: str) -> Response:
    return Response(status_code=204, headers={"set-cookie": value, "cache-control": "no-store"})


async def _key(request: Request) -> str:
    key = decode(await body_of(request, _BODY_BYTES)).get("key")
    if not isinstance(key, str) or not key:
        raise InvalidRequest("'key' is missing; it must be one of ADMIN_KEYS", param="key")
    return key
