"""The admin routes that say why: what would become of a request, and what became of the latest ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal, Protocol

import orjson
from fastapi import APIRouter, Query, Request, Response

from app.domain import ANYBODY, Caller, Operation
from app.domain import Request as Asked
from app.errors import Forbidden, InvalidRequest, NotFound
from app.fronts.admin import admins, body_of, refusals
from app.fronts.asgi import headers_of
from app.fronts.auth import Doors, check_route
from app.fronts.openai import priority, said
from app.fronts.openai_wire import check, decode
from app.fronts.openapi import ANY_REQUEST, LOCAL_ONLY, PRIORITY, errors

_LATEST = 50
_LATEST_MAX = 1000
_TEXT_CHARACTERS = 512
_FILTERS = ("limit", "outcome", "tier", "node", "route", "key")
_LOCAL_ONLY_HEADER = b"x-hearth-local-only"
_FIELDS = {Operation.CHAT: "messages", Operation.COMPLETION: "prompt", Operation.EMBEDDING: "input"}
_ASKED: dict[str, Any] = {
    "parameters": [LOCAL_ONLY, PRIORITY],
    "requestBody": {"required": True, "content": {"application/json": {"schema": ANY_REQUEST}}},
}
_REFUSALS = {
    404: "There is no such key.",
    503: "The ledger's database cannot be asked for the budgets now.",
}

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
        router = APIRouter(
            prefix="/admin",
            tags=["admin"],
            dependencies=[admins(self._doors)],
            responses=errors(400, 401, 403),
        )
        gone = refusals({404: "No request with this id is remembered (any more)."}, 404)
        router.get("/requests", summary="What became of the latest requests, the newest first")(self.latest)
        router.get("/requests/{request_id:path}", summary="What became of one request", responses=gone)(self.one)
        return router

    async def latest(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=_LATEST_MAX)] = _LATEST,
        outcome: Literal["ok", "refused", "failed", "abandoned"] | None = None,
        tier: Literal["local", "cloud"] | None = None,
        node: Text = None,
        route: Text = None,
        key: Text = None,
    ) -> Response:
        """`node` is the one that was asked last, `key` the caller's id or name."""
        _check_names(request, _FILTERS)
        wanted = {"outcome": outcome, "tier": tier, "node": node, "route": route}
        asked = {name: value for name, value in wanted.items() if value is not None}
        remembered = self._memory.latest(_LATEST_MAX)
        # A thousand of them take a while: not on the loop.
        content = await asyncio.to_thread(_listed, remembered, asked, key, limit)
        return Response(content, media_type="application/json")

    async def one(self, request_id: str) -> dict[str, Any]:
        record = self._memory.get(request_id)
        if record is None:
            raise NotFound(
                "no request with this id is remembered: only the latest ones are, each by the process that served it; "
                "the log has a line of every request"
            )
        return record.document()


def _check_names(request: Request, known: Collection[str]) -> None:
    """Raises `InvalidRequest`: a filter with a misspelt name would show too much."""
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise InvalidRequest(f"there is no parameter {unknown[0][:100]!r} here; there are {', '.join(known)}")


def _listed(remembered: Sequence[Remembered], asked: dict[str, str], key: str | None, limit: int) -> bytes:
    documents = (record.document() for record in remembered)
    found = (document for document in documents if _is_like(document, asked, key))
    return orjson.dumps({"requests": list(islice(found, limit))})


def _is_like(document: dict[str, Any], asked: dict[str, str], key: str | None) -> bool:
    if any(document[name] != value for name, value in asked.items()):
        return False
    return key is None or (document["key"] is not None and key in document["key"].values())


class Explains(Protocol):
    """Who knows what would become of a request."""

    async def explain(self, request: Asked) -> dict[str, Any]:
        """Raises `LedgerUnavailable` where budgets cannot be read."""
        ...


class ExplainApi:
    """`POST /admin/explain`. `callers` are those who have a key of the ledger."""

    def __init__(
        self, explainer: Explains, doors: Doors, callers: Callable[[], Iterable[Caller]], max_body_bytes: int
    ) -> None:
        self._explainer = explainer
        self._doors = doors
        self._callers = callers
        self._max_body_bytes = max_body_bytes

    def router(self) -> APIRouter:
        responses = {**errors(400, 413), **refusals(_REFUSALS, 404, 503)}
        router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[admins(self._doors)], responses=responses)
        summary = "What would become of a request, and why"
        router.post("/explain", summary=summary, openapi_extra=_ASKED)(self.explain)
        return router

    async def explain(self, request: Request, key: Text = None) -> dict[str, Any]:
        """The body is that of the request, of whichever inference route; `key` is the id or name of who asks.

        Nothing is sent, reserved or counted. The answer is 200 whatever the request would get: that is in `error`, as
        for a model that nobody serves. Limits per minute are not looked at.
        """
        _check_names(request, ("key",))
        asked = await self._asked(request, ANYBODY if key is None else self._caller(key))
        document = await self._explainer.explain(asked)
        try:
            check_route(asked.caller, asked.model)
        except Forbidden as error:
            refused = {"status": error.status, "code": error.code, "message": error.message}
            return {**document, "order": [], "error": refused}
        return document

    async def _asked(self, request: Request, caller: Caller) -> Asked:
        body = await body_of(request, self._max_body_bytes)
        fields = decode(body)
        operation = _operation(fields)
        return Asked(
            id="explain",
            operation=operation,
            model=fields["model"],
            body=body,
            fields=fields,
            stream=fields.get("stream") is True and operation is not Operation.EMBEDDING,
            local_only=said(request.scope, headers_of(request.scope), _LOCAL_ONLY_HEADER),
            caller=caller,
            priority=priority(headers_of(request.scope)),
        )

    def _caller(self, key: str) -> Caller:
        found = next((caller for caller in self._callers() if key in (caller.id, caller.name)), None)
        if found is None:
            raise NotFound("there is no such key in the ledger; GET /admin/keys lists them")
        return found


def _operation(fields: Mapping[str, Any]) -> Operation:
    """What the body is a request for. Raises `InvalidRequest` when it is none."""
    given = [operation for operation, name in _FIELDS.items() if name in fields] or [Operation.CHAT]
    for operation in given[:-1]:
        try:
            check(operation, fields)
        except InvalidRequest:
            continue  # it may be whole as another one
        return operation
    check(given[-1], fields)
    return given[-1]
