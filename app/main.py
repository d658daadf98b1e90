"""Puts the parts together. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from pydantic import SecretStr
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app import __version__
from app.domain import NodeSpec, Operation
from app.fronts.auth import Doors, Keyring
from app.fronts.control import control_routes, render_errors
from app.fronts.door import FrontDoor
from app.fronts.models import Models
from app.fronts.openai import Inference
from app.fronts.openapi import documented
from app.probes import Prober
from app.providers import KINDS, detect_order
from app.routing.admission import Admission
from app.routing.asking import Asking, Timeouts
from app.routing.breaker import Breaker
from app.routing.choice import Choice
from app.routing.dispatch import Dispatcher
from app.routing.policies import POLICIES
from app.routing.registry import Node, Registry
from app.routing.retry import Retry
from app.routing.routes import Routes
from app.settings import Settings, load_settings
from app.telemetry.logs import LineSink, Logger, make_logger, make_request_line, open_writer
from app.telemetry.metrics import CONTENT_TYPE, Metrics
from app.telemetry.report import Reporter
from app.upstream import Upstream

_FIRST_PROBES_SECONDS = 1.0
_TELEMETRY_OFF: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}
_EXPOSED_HEADERS = [
    "x-request-id",
    *(f"x-hearth-{name}" for name in ("node", "tier", "attempts", "fallback", "model", "error-source")),
    "retry-after",
]
_ROUTES = {
    "/chat/completions": Operation.CHAT,
    "/completions": Operation.COMPLETION,
    "/embeddings": Operation.EMBEDDING,
}


@dataclass(slots=True)
class Phase:
    """Where in its life the process is."""

    closing: bool = False


def create_app(settings: Settings, sink: LineSink | None = None) -> FastAPI:
    """The whole gateway as an ASGI app. Opens nothing before its lifespan begins."""
    sink = sink or open_writer()
    log = make_logger(sink, settings.log_level, settings.log_format)
    phase = Phase()
    admission = Admission()
    registry = Registry([_node(spec, settings, log) for spec in _specs(settings)], admission.changed)
    routes = Routes(settings.routes_config(), registry)
    prober = Prober(
        registry,
        detect_order(),
        interval_seconds=settings.health_check_interval,
        timeout_seconds=settings.health_check_timeout,
        log=log,
    )
    metrics = Metrics(registry, admission)
    line = make_request_line(sink, settings.log_level, settings.log_format)
    reporter = Reporter(log, line, metrics, settings.lb_strategy)
    upstream = Upstream(f"hearth/{__version__}", settings.connect_timeout)
    choice = Choice(POLICIES[settings.lb_strategy](), admission, metrics, settings.first_token_timeout)
    timeouts = Timeouts(settings.first_token_timeout, settings.idle_timeout)
    dispatcher = Dispatcher(
        registry=registry,
        routes=routes,
        choice=choice,
        asking=Asking(upstream, timeouts),
        retry=Retry(settings.max_attempts),
        request_seconds=settings.request_timeout,
        suspect=prober.suspect,
    )
    doors = Doors(_keyring(settings.api_keys), _keyring(settings.admin_keys))
    app = FrontDoor(
        title="Hearth",
        version=__version__,
        description="A local-first LLM gateway: one OpenAI base_url in front of your own nodes, the cloud last.",
        lifespan=_lifespan(upstream, prober),
        redirect_slashes=False,
        telemetry=_TELEMETRY_OFF,
    )
    app.state.phase = phase
    models = Models(registry, routes, int(time.time()))
    app.include_router(control_routes(registry, models, doors, metrics.render, CONTENT_TYPE))
    for path, operation in _ROUTES.items():
        endpoint = Inference(
            operation,
            dispatcher=dispatcher,
            doors=doors,
            report=reporter,
            on_bug=reporter.bug,
            max_body_bytes=int(settings.max_body_mb * 2**20),
            closing=lambda: phase.closing,
        )
        # People write base_url with and without /v1. A redirect would lose the body.
        for prefix in ("/v1", ""):
            app.add_hot_route(prefix + path, _with_cors(endpoint, settings))
    render_errors(app)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **_cors(settings))
    app.openapi = documented(app)  # type: ignore[method-assign]
    return app


def _lifespan(upstream: Upstream, prober: Prober) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with upstream:
            probing = asyncio.create_task(prober.run(), name="probes")
            # A moment for the first look at the nodes, so that the first request finds them; they need not be up.
            with suppress(TimeoutError):
                await asyncio.wait_for(prober.first_round.wait(), _FIRST_PROBES_SECONDS)
            _quiet_gc()
            try:
                yield
            finally:
                probing.cancel()
                with suppress(asyncio.CancelledError):
                    await probing

    return lifespan


def _quiet_gc() -> None:
    """What lives for ever is not looked at again. Measured: a tenth to a quarter less CPU, and no long pauses."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def _specs(settings: Settings) -> tuple[NodeSpec, ...]:
    return settings.local_node_specs() + settings.cloud_specs()


def _node(spec: NodeSpec, settings: Settings, log: Logger) -> Node:
    def changed(old: str, new: str) -> None:
        log.warning("breaker changed", node=spec.name, before=old, state=new)

    breaker = Breaker(settings.breaker_fail_max, settings.breaker_reset_timeout, on_change=changed)
    return Node(spec, breaker, KINDS[spec.kind] if spec.kind else None)


def _keyring(keys: tuple[SecretStr, ...]) -> Keyring:
    return Keyring(key.get_secret_value() for key in keys)


def _with_cors(endpoint: ASGIApp, settings: Settings) -> ASGIApp:
    return CORSMiddleware(endpoint, **_cors(settings)) if settings.cors_origins else endpoint


def _cors(settings: Settings) -> dict[str, Any]:
    return {
        "allow_origins": list(settings.cors_origins),
        "allow_methods": ["GET", "POST", "OPTIONS"],
        "allow_headers": ["*"],
        "expose_headers": _EXPOSED_HEADERS,
        "allow_private_network": True,  # the page is on the internet, Hearth most likely at home
    }


def __getattr__(name: str) -> FastAPI:
    """Makes `uvicorn app.main:app` work without building anything at import."""
    if name == "app":
        return create_app(load_settings())
    raise AttributeError(name)
