"""What the admin routes share: who may use them, how their bodies are read, how their refusals are documented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Depends, Request

from app.errors import HearthError, InvalidRequest
from app.fronts.asgi import ClientGone, headers_of, read_body
from app.fronts.auth import Doors
from app.fronts.openapi import errors


class LedgerOff(HearthError):
    """What was asked for is kept in the ledger, and there is none."""

    status = 409
    type = "invalid_request_error"
    code = "ledger_off"


def admins(doors: Doors) -> Any:
    """A dependency that lets admins in alone."""

    def admit(request: Request) -> None:
        doors.check_admin(request.scope, headers_of(request.scope))

    return Depends(admit)


async def body_of(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes. Raises `BodyTooLarge`, and `InvalidRequest` when it does not come whole.

    Not left to FastAPI, which reads bodies of any size, and before it asks who sent them.
    """
    try:
        return await read_body(request.receive, headers_of(request.scope).get(b"content-length"), limit)
    except ClientGone as error:
        raise InvalidRequest("the client left before its request was whole") from error


def refusals(texts: Mapping[int, str], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """How a route's refusals look: an admin route's own, and those of `statuses` with what they mean here."""
    content = errors(401)[401]
    return {**errors(401, 403), **{status: {**content, "description": texts[status]} for status in statuses}}
