"""The routes that are not hot: models, health, readiness, metrics, admin. FastAPI serves and documents them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from app.errors import HearthError, InvalidRequest, MethodNotAllowed, NotFound
from app.fronts.admin import admins
from app.fronts.asgi import headers_of
from app.fronts.auth import Doors
from app.fronts.models import Models
from app.fronts.openai_wire import error_document, error_headers
from app.fronts.openapi import errors
from app.fronts.ops import node_view, readiness
from app.routing.registry import Registry


def control_routes(
    registry: Registry,
    models: Models,
    doors: Doors,
    render_metrics: Callable[[], Awaitable[bytes]],
    metrics_type: bytes,
) -> APIRouter:
    def client(request: Request) -> None:
        doors.check_client(headers_of(request.scope))

    router = APIRouter()

    for_clients: dict[str, Any] = {"tags": ["models"], "dependencies": [Depends(client)]}
    for_admins: dict[str, Any] = {"dependencies": [admins(doors)], "responses": errors(401, 403)}

    @router.get("/v1/models", summary="List what can be asked for", responses=errors(401), **for_clients)
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": models.all()}

    @router.get("/v1/models/{name:path}", summary="Show one model", responses=errors(401, 404), **for_clients)
    async def show_model(name: str) -> dict[str, Any]:
        return models.one(name)

    @router.get("/health", tags=["operations"], summary="Is Hearth alive?")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    not_ready: dict[int | str, Any] = {503: {"description": "No, and `reason` says why."}}

    @router.get("/ready", tags=["operations"], summary="Can a request be served now?", responses=not_ready)
    async def ready() -> JSONResponse:
        able, reason = readiness(registry)
        return JSONResponse({"ready": able, "reason": reason}, 200 if able else 503)

    @router.get(
        "/metrics", tags=["operations"], summary="Prometheus metrics", response_class=PlainTextResponse, **for_admins
    )
    async def metrics() -> Response:
        return Response(await render_metrics(), headers={"content-type": metrics_type.decode()})

    @router.get("/admin/nodes", tags=["admin"], summary="Every node and its state", **for_admins)
    async def nodes() -> dict[str, Any]:
        return {"nodes": [node_view(node) for node in registry]}

    return router


def render_errors(app: FastAPI) -> None:
    """Gives every error of FastAPI's own routes OpenAI's form."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HearthError)
        return _json(error)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return _json(NotFound(f"there is no {request.method} {request.url.path} here; /docs lists the routes"))
        if error.status_code == 405:
            return _json(MethodNotAllowed(f"{request.method} is not allowed here"), error.headers)
        return _json(_with_status(HearthError(str(error.detail)), error.status_code), error.headers)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        return _json(InvalidRequest("the request does not fit this route; /docs shows what it takes"))

    app.add_exception_handler(HearthError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def _json(error: HearthError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    ours = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JSONResponse(error_document(error), error.status, headers={**ours, **(headers or {})})


def _with_status(error: HearthError, status: int) -> HearthError:
    error.status = status
    return error
