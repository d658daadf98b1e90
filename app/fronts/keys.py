"""The admin routes for API keys. A key's secret is in the answers that make it, and nowhere else."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from fastapi import APIRouter, Request, Response
from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from app.domain import MICRO_DOLLARS, WEIGHT_MAX, Period, Priority
from app.errors import InvalidRequest
from app.fronts.admin import LedgerOff, admins, body_of, refusals
from app.fronts.auth import Doors
from app.fronts.openapi import errors
from app.ledger import key as values
from app.ledger.key import Key, Traits
from app.setting_values import micro_dollars

if TYPE_CHECKING:
    from app.ledger.keys import KeyBook

T = TypeVar("T")

_BODY_BYTES = 128 * 1024  # more than all the patterns that a key may have
_DOLLARS_MAX = values.BUDGET_MAX // MICRO_DOLLARS
_STRICT = ConfigDict(strict=True, extra="forbid")
_REFUSALS = {
    400: "The body is wrong; `error.message` says how to mend it.",
    404: "There is no such key.",
    409: "There is a key of that name already, or no ledger to keep keys in.",
    503: "The ledger's database cannot be asked now.",
}

Name = Annotated[str, Field(min_length=1, max_length=values.NAME_CHARACTERS_MAX)]
Pattern = Annotated[str, Field(min_length=1, max_length=values.PATTERN_CHARACTERS_MAX)]
Routes = Annotated[
    list[Pattern],
    Field(max_length=values.PATTERNS_MAX, description="The models that it may ask for, with * for anything; [] = all."),
]
LocalOnly = Annotated[bool, Field(description="Whether its requests stay on local nodes, whatever happens.")]
Dollars = Annotated[
    float, Field(ge=0, le=_DOLLARS_MAX, allow_inf_nan=False, description="What it may spend in the cloud in a period.")
]
PeriodName = Literal["month", "week", "day"]
Weight = Annotated[
    int, Field(ge=1, le=WEIGHT_MAX, description="Turns that it has at a time, where its requests and others' wait.")
]
PriorityName = Annotated[
    Literal["high", "normal", "low"], Field(description="Who of those who wait comes first; null = as its models say.")
]
PerMinute = Annotated[int, Field(ge=1, le=values.PER_MINUTE_MAX)]
Expiry = Annotated[AwareDatetime, Field(description="From when on it is refused; null = never.")]


class _Chosen(TypedDict, total=False):
    __pydantic_config__ = _STRICT  # type: ignore[misc]

    disabled: bool
    expires_at: Expiry | None
    routes: Routes
    local_only: LocalOnly
    budget_usd: Dollars | None
    budget_period: PeriodName
    requests_per_minute: PerMinute | None
    tokens_per_minute: PerMinute | None
    weight: Weight
    priority: PriorityName | None


class NewKey(_Chosen):
    """A key to be made. Only its name is needed: it may then ask for everything, for ever."""

    name: Name


class KeyChange(_Chosen, total=False):
    """What is to change; the rest stays."""

    name: Name


class KeyView(TypedDict):
    """A key without its secret. `hint` is how the secret begins."""

    id: str
    name: str
    hint: str
    created_at: str
    changed_at: str
    expires_at: str | None
    disabled: bool
    routes: list[str]
    local_only: bool
    budget_usd: float | None
    budget_period: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    weight: int
    priority: str | None


class KeyMade(KeyView):
    """A key, and its secret, which is shown this once."""

    secret: str


class KeyList(TypedDict):
    keys: list[KeyView]


class KeyApi:
    """The routes under `/admin/keys`. `book` is None where there is no ledger."""

    def __init__(self, book: KeyBook | None, doors: Doors) -> None:
        self._maybe_book = book
        self._doors = doors
        self._new = TypeAdapter(NewKey)
        self._change = TypeAdapter(KeyChange)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/admin/keys", tags=["admin"], dependencies=[admins(self._doors)])
        add = router.add_api_route
        one, none = refusals(_REFUSALS, 404, 409, 503), refusals(_REFUSALS, 409, 503)
        add("", self.list, summary="Every API key, the oldest first", responses=none)
        add(
            "",
            self.create,
            methods=["POST"],
            status_code=201,
            summary="Make an API key",
            responses={**none, **refusals(_REFUSALS, 400), **errors(413)},
            openapi_extra=_takes(self._new),
        )
        add("/{id}", self.show, summary="One API key, by id or name", responses=one)
        add(
            "/{id}",
            self.change,
            methods=["PATCH"],
            summary="Change, disable or enable an API key",
            responses={**one, **refusals(_REFUSALS, 400), **errors(413)},
            openapi_extra=_takes(self._change),
        )
        add(
            "/{id}/rotate",
            self.rotate,
            methods=["POST"],
            summary="Give an API key a new secret; the old one is refused at once",
            responses=one,
        )
        return router

    async def list(self) -> KeyList:
        return {"keys": [view(key) for key in await self._book.list()]}

    async def create(self, request: Request, response: Response) -> KeyMade:
        traits = _traits(_read(self._new, await body_of(request, _BODY_BYTES)))
        return _made(await self._book.create(traits["name"], traits), response)

    async def show(self, id: str) -> KeyView:
        return view(await self._book.get(id))

    async def change(self, id: str, request: Request) -> KeyView:
        return view(await self._book.change(id, _traits(_read(self._change, await body_of(request, _BODY_BYTES)))))

    async def rotate(self, id: str, response: Response) -> KeyMade:
        return _made(await self._book.rotate(id), response)

    @property
    def _book(self) -> KeyBook:
        if self._maybe_book is None:
            raise LedgerOff("keys are kept in the ledger, and DATABASE_URL is off; set it, or use API_KEYS")
        return self._maybe_book


def view(key: Key) -> KeyView:
    return cast(KeyView, values.document(key))


def _made(made: tuple[Key, str], response: Response) -> KeyMade:
    key, secret = made
    response.headers["cache-control"] = "no-store"
    return {**view(key), "secret": secret}


def _traits(given: NewKey | KeyChange) -> Traits:
    traits: Any = dict(given)
    if "budget_usd" in traits:
        dollars = traits.pop("budget_usd")
        traits["budget_limit"] = None if dollars is None else micro_dollars(dollars)
    if "budget_period" in traits:
        traits["budget_period"] = Period(traits["budget_period"])
    if traits.get("priority") is not None:
        traits["priority"] = Priority(traits["priority"])
    if traits.get("expires_at") is not None:
        traits["expires_at"] = (traits["expires_at"] - values.EPOCH) // timedelta(milliseconds=1)
    chosen: Traits = traits
    return chosen


def _read(form: TypeAdapter[T], body: bytes) -> T:
    try:
        return form.validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(map(str, fault["loc"]))[:100]
        raise InvalidRequest(f"{name or 'the body'}: {fault['msg']}", param=name or None) from error


def _takes(form: TypeAdapter[Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": form.json_schema()}}}}
