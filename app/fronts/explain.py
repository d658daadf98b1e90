"""The admin routes that say why: what would become of a request, and what became of the latest ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, Query, Request

from app.errors import NotFound
from app.fronts.asgi import headers_of
from app.fronts.auth import Doors
from app.fronts.openapi import errors

_LATEST = 50
_LATEST_MAX = 1000
_TEXT_CHARACTERS = 512

Text = Annotated[str | None, Query(max_length=_TEXT_CHARACTERS)]


class Remembered(Protocol):
    """One request that is over."""

    def document(self) -> dict[str, Any]: ...


class Memory(Protocol):
    """Who remembers the latest requests of this process."""

    def latest(self, count: int) -> Sequence[Remembered]: ...

    def get(self, request_id: str) -> Remembered | None: ...


class RequestApi:
    """The routes under `/admin/requests`."""

    def __init__(self, memory: Memory, doors: Doors) -> None:
        self._memory = memory
        self._doors = doors

    def router(self) -> APIRouter:
        admit: Callable[[Request], None] = self._admit
        router = APIRouter(
            prefix="/admin", tags=["admin"], dependencies=[Depends(admit)], responses=errors(400, 401, 403)
        )
        gone = errors(404)
        gone[404]["description"] = "No request with this id is remembered (any more)."
        router.get("/requests", summary="What became of the latest requests, the newest first")(self.latest)
        router.get("/requests/{request_id:path}", summary="What became of one request", responses=gone)(self.one)
        return router

    async def latest(
        self,
        limit: Annotated[int, Query(ge=1, le=_LATEST_MAX)] = _LATEST,
        outcome: Literal["ok", "refused", "failed", "abandoned"] | None = None,
        tier: Literal["local", "cloud"] | None = None,
        node: Text = None,
        route: Text = None,
        key: Text = None,
    ) -> dict[str, Any]:
        """`node` is the one that was asked last, `key` the caller's id or name."""
        wanted = {"outcome": outcome, "tier": tier, "node": node, "route": route}
        asked = {name: value for name, value in wanted.items() if value is not None}
        found = (document for document in self._documents() if _is_like(document, asked, key))
        return {"requests": list(islice(found, limit))}

    async def one(self, request_id: str) -> dict[str, Any]:
        record = self._memory.get(request_id)
        if record is None:
            raise NotFound(
                "no request with this id is remembered: only the latest ones are, each by the process that served it; "
                "the log has a line of every request"
            )
        return record.document()

    def _documents(self) -> Iterator[dict[str, Any]]:
        return (record.document() for record in self._memory.latest(_LATEST_MAX))

    def _admit(self, request: Request) -> None:
        self._doors.check_admin(request.scope, headers_of(request.scope))


def _is_like(document: dict[str, Any], asked: dict[str, str], key: str | None) -> bool:
    if any(document[name] != value for name, value in asked.items()):
        return False
    return key is None or (document["key"] is not None and key in document["key"].values())
