"""The admin routes for money: what was used, what is left of the budgets, and spends that nobody settled."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.domain import MICRO_DOLLARS
from app.errors import InvalidRequest, NotFound
from app.fronts.admin import LedgerOff, admins, body_of, refusals
from app.fronts.auth import Doors
from app.fronts.openai_wire import decode
from app.fronts.openapi import errors
from app.ledger.report import (
    FILTERS,
    LARGEST_COST_USD,
    Books,
    Dimension,
    LostSpend,
    Query,
    Report,
    budget_document,
    dimensions,
    document,
    lost_document,
    table,
)
from app.ledger.span import SINCE_WORDS, span
from app.setting_values import micro_dollars
from app.sharing.meter import Account
from app.sharing.periods import now_ms

# Hears of a lost spend that is settled now, so that the meter may hear of it too.
OnReconciled = Callable[[LostSpend], None]

_FORMATS = ("json", "csv")
_TIERS = ("local", "cloud")
_TEXT_CHARACTERS = 512
_BODY_BYTES = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIMENSION = "|".join(Dimension)
_ATTACHMENT = {"content-disposition": 'attachment; filename="hearth-usage.csv"'}
_COST: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": LARGEST_COST_USD, "examples": [0.0123]}


def _parameter(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": {"type": "string", **schema}}


def _filter(dimension: Dimension) -> dict[str, Any]:
    if dimension is Dimension.TIER:
        return _parameter(dimension, "Only this tier.", enum=list(_TIERS))
    return _parameter(dimension, f"Only this {dimension}.", maxLength=_TEXT_CHARACTERS, pattern=r"^[^\x00-\x1f\x7f]*$")


_SINCE: dict[str, Any] = {
    "anyOf": [{"format": "date"}, {"pattern": "^[1-9][0-9]{0,3}d$"}, {"enum": ["month", "week", "day"]}],
    "examples": ["2026-11-01", "7d"],
}
_PARAMETERS = [
    _parameter(
        "since", f"{SINCE_WORDS}. This month's first day if it is left out. Days begin at midnight UTC.", **_SINCE
    ),
    _parameter("until", "The last day, included; today if it is left out.", format="date", examples=["2026-11-30"]),
    _parameter("by", "What to group by.", pattern=f"^(({_DIMENSION})(,({_DIMENSION}))*)?$", examples=["day,key"]),
    _parameter("format", "The answer's form.", enum=list(_FORMATS)),
    *map(_filter, FILTERS),
]
_NAMES = frozenset(parameter["name"] for parameter in _PARAMETERS)
_SETTLED = {"type": "object", "required": ["cost_usd"], "properties": {"cost_usd": _COST}}
_RECONCILE = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SETTLED}}}}
_REFUSALS = {
    404: "There is no lost spend with this id.",
    409: "There is no ledger.",
    503: "The ledger's database cannot be asked now.",
}


class UsageApi:
    """The routes under `/admin/usage`, and `/admin/budgets`.

    `books` is None where there is no ledger. `accounts` are the settings' budgets: the keys' are in the ledger. `clock`
    is in milliseconds since 1970.
    """

    def __init__(
        self,
        *,
        doors: Doors,
        books: Books | None,
        accounts: Sequence[Account],
        on_reconciled: OnReconciled | None = None,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._doors = doors
        self._maybe_books = books
        self._accounts = accounts
        self._on_reconciled = on_reconciled
        self._clock = clock

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[admins(self._doors)])
        add, none = router.add_api_route, refusals(_REFUSALS, 409, 503)
        wrong = {**none, **errors(400)}
        usage = {**wrong, 200: {"content": {"text/csv": {"schema": {"type": "string"}}}}}
        parameters = {"parameters": _PARAMETERS}
        add(
            "/usage",
            self.usage,
            summary="What was used, spent and saved, in groups",
            responses=usage,
            openapi_extra=parameters,
        )
        add("/usage/lost", self.lost, summary="Spends whose process died before it settled them", responses=none)
        add(
            "/usage/{spend_id}/reconcile",
            self.reconcile,
            methods=["POST"],
            summary="Say what a lost spend did cost",
            responses={**wrong, **refusals(_REFUSALS, 404), **errors(413)},
            openapi_extra=_RECONCILE,
        )
        add("/budgets", self.budgets, summary="Every budget and what is left of it", responses=none)
        return router

    async def usage(self, request: Request) -> Response:
        given = _given(request)
        form = _one_of(given.pop("format", "json"), _FORMATS, "format")
        report = await self._books.usage(_query(given, self._clock()))
        # Ten thousand lines take a while: not on the loop.
        if form == "csv":
            content = await asyncio.to_thread(_csv, report)
            cut = {"x-hearth-cut": "true"} if report.cut else {}
            return Response(content, media_type="text/csv", headers={**_ATTACHMENT, **cut})
        return Response(await asyncio.to_thread(_json, report), media_type="application/json")

    async def lost(self) -> dict[str, Any]:
        return {"lost": [lost_document(lost) for lost in await self._books.lost()]}

    async def reconcile(self, spend_id: str, request: Request) -> JSONResponse:
        cost = micro_dollars(await _cost_usd(request))
        # Control characters are in no id, and some are no text to PostgreSQL.
        lost = None if _CONTROL.search(spend_id) else await self._books.reconcile(spend_id, cost)
        if lost is None:
            raise NotFound("there is no lost spend with this id; GET /admin/usage/lost lists them")
        if self._on_reconciled is not None:
            self._on_reconciled(lost)
        return JSONResponse({"id": lost.id, "state": "settled", "cost_usd": cost / MICRO_DOLLARS})

    async def budgets(self) -> dict[str, Any]:
        states = await self._books.budgets(self._accounts, self._clock())
        return {"budgets": [budget_document(state) for state in states]}

    @property
    def _books(self) -> Books:
        if self._maybe_books is None:
            raise LedgerOff("usage is kept in the ledger, and DATABASE_URL is off; set it")
        return self._maybe_books


def _json(report: Report) -> bytes:
    return orjson.dumps(document(report))


def _csv(report: Report) -> bytes:
    return "".join(table(report)).encode()


def _given(request: Request) -> dict[str, str]:
    """The parameters, each at most once. Raises `InvalidRequest`: a filter with a misspelt name would show too much."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in _NAMES:
            raise InvalidRequest(
                f"'{name[:100]}' is not a parameter; there are {', '.join(sorted(_NAMES))}", param=name
            )
        if name in given:
            raise InvalidRequest(f"'{name}' is there twice", param=name)
        if len(value) > _TEXT_CHARACTERS or _CONTROL.search(value):
            raise InvalidRequest(f"'{name}' is too long or holds control characters", param=name)
        given[name] = value
    return given


def _query(given: dict[str, str], now_ms: int) -> Query:
    try:
        when = span(given.get("since"), given.get("until"), now_ms)
        by = dimensions(given.get("by", Dimension.DAY.value))
    except ValueError as error:
        message, name = error.args
        raise InvalidRequest(f"'{name}': {message}", param=name) from error
    if "tier" in given:
        _one_of(given["tier"], _TIERS, "tier")
    return Query(when, by, {dimension: given[dimension] for dimension in FILTERS if dimension in given})


def _one_of(value: str, allowed: Iterable[str], name: str) -> str:
    if value not in allowed:
        raise InvalidRequest(f"'{name}' must be one of {', '.join(allowed)}", param=name)
    return value


async def _cost_usd(request: Request) -> float:
    cost = decode(await body_of(request, _BODY_BYTES)).get("cost_usd")
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost <= LARGEST_COST_USD:
        raise InvalidRequest(f"'cost_usd' must be a number from 0 to {LARGEST_COST_USD}, in dollars", param="cost_usd")
    return cost
