"""Puts the parts together. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from pydantic import SecretStr
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app import __version__
from app.declarations import local_node
from app.domain import Caller, NodeSpec, Operation
from app.fronts.auth import Doors, Keyring
from app.fronts.control import control_routes, render_errors
from app.fronts.dashboard import Dashboard
from app.fronts.door import FrontDoor
from app.fronts.explain import ExplainApi, RequestApi
from app.fronts.keys import KeyApi
from app.fronts.models import Models
from app.fronts.nodes import NodeApi
from app.fronts.openai import Inference, Report
from app.fronts.openapi import documented
from app.fronts.sessions import Sessions
from app.fronts.turnstile import Turnstile
from app.fronts.usage import UsageApi
from app.ledger.estimates import TokenEstimator
from app.node_calls import NodeCalls
from app.probes import Prober
from app.providers import KINDS, detect_order
from app.providers.disaggregation import disaggregations
from app.providers.disaggregation.base import LinkType, Migration, MigrationProtocol
from app.routing.admission import Admission
from app.routing.asking import Asking, Timeouts
from app.routing.breaker import Breaker
from app.routing.choice import Choice
from app.routing.dispatch import Dispatcher
from app.routing.explain import Explainer
from app.routing.links import Links
from app.routing.loads import Loads
from app.routing.membership import Membership
from app.routing.node_store import NodeStore
from app.routing.pairs import Pairs
from app.routing.policies import POLICIES, Policy
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.registry import Node, Registry
from app.routing.retry import Retry
from app.routing.routes import Routes
from app.settings import Settings, load_settings
from app.sharing.fleet import Fleet
from app.sharing.limits import Limits
from app.sharing.link import Link
from app.sharing.presence import new_instance_id
from app.telemetry.counts import Counts
from app.telemetry.gauges import sharing_gauges
from app.telemetry.logs import LineSink, Logger, make_logger, make_request_line, open_writer
from app.telemetry.metrics import CONTENT_TYPE, Metrics
from app.telemetry.money import Money
from app.telemetry.report import Reporter
from app.telemetry.ring import Ring
from app.telemetry.slates import Slates
from app.telemetry.snapshot import About, Snapshots
from app.tls import Trust
from app.upstream import Upstream

if TYPE_CHECKING:
    from app.telemetry.traces import Traces
    from app.treasury import Treasury

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


def create_app(
    settings: Settings, sink: LineSink | None = None, *, keeps_nodes: bool = True, slates: Slates | None = None
) -> FastAPI:
    """The whole gateway as an ASGI app. Opens nothing before its lifespan begins.

    Of several processes with one nodes file only one `keeps_nodes`; the others read it. Their metrics meet in `slates`.
    """
    instance_id = new_instance_id()
    max_body_bytes = int(settings.max_body_mb * 2**20)
    sink = sink or open_writer()
    log = make_logger(sink, settings.log_level, settings.log_format)
    phase = Phase()
    policy = POLICIES[settings.lb_strategy]()
    traces = _traces(settings, instance_id, log)
    admission = Admission(chooser=policy if policy.schedules else None)
    registry = Registry([_node(spec, settings, log) for spec in _specs(settings)], admission.changed)
    routes = Routes(settings.routes_config(), registry)
    trust = Trust()
    prober = Prober(
        registry,
        detect_order(),
        interval_seconds=settings.health_check_interval,
        timeout_seconds=settings.health_check_timeout,
        log=log,
        trust=trust,
    )
    metrics = Metrics(registry, admission, slates, log.warning)
    line = make_request_line(sink, settings.log_level, settings.log_format)
    reporter = Reporter(log, line, settings.lb_strategy)
    upstream = Upstream(f"hearth/{__version__}", settings.connect_timeout, trust)
    calls = NodeCalls(trust)
    links = Links(calls, disaggregations(_migration(settings)))
    nodes_path = settings.nodes_path()

    def leaves(node: Node) -> None:
        links.drop(node)
        policy.dropped(node)

    membership = Membership(
        registry,
        make_node=lambda spec: _node(spec, settings, log),
        watcher=prober,
        store=NodeStore(nodes_path) if nodes_path else None,
        on_trouble=log.warning,
        on_leave=leaves,
    )
    link = Link(settings.redis_url.get_secret_value(), log.warning) if settings.redis_url else None
    fleet = None
    if link is not None:
        fleet = Fleet(
            link,
            registry,
            membership,
            instance_id,
            declared=settings.local_node_specs(),
            on_freed=admission.freed,
            on_trouble=log.warning,
        )
        metrics.add(sharing_gauges(link, lambda: fleet.peers))
    estimator = TokenEstimator()
    limits = Limits(link)
    treasury = _treasury(
        settings,
        registry=registry,
        routes=routes,
        link=link,
        instance=instance_id,
        alive=fleet.alive if fleet else None,
        estimator=estimator,
        on_trouble=log.warning,
        on_row=metrics.counts.booked,
    )
    if treasury is not None:
        metrics.add_source(treasury.funds())
    choice = Choice(
        policy,
        admission,
        metrics.counts,
        settings.first_token_timeout,
        purse=treasury.purse if treasury else None,
        spill_after_ms=settings.spill_after_ms,
    )
    asking = Asking(upstream, Timeouts(settings.first_token_timeout, settings.idle_timeout))
    loads = _loads(policy, asking, prober)
    dispatcher = Dispatcher(
        registry=registry,
        routes=routes,
        choice=choice,
        asking=asking,
        retry=Retry(settings.max_attempts),
        request_seconds=settings.request_timeout,
        pairs=Pairs(choice, asking, links, _leaks(metrics.counts, log))
        if settings.serving_strategy == "DistServe"
        else None,
        loads=loads,
        suspect=prober.suspect,
        on_missing=reporter.advice.missing,
    )
    sessions = Sessions(_plain(settings.admin_keys)) if settings.admin_keys else None
    doors = Doors(
        Keyring(_plain(settings.api_keys), rate=settings.default_rate()),
        Keyring(_plain(settings.admin_keys), "admin", "ADMIN_KEYS"),
        treasury.keys if treasury else None,
        sessions,
    )
    app = FrontDoor(
        title="Hearth",
        version=__version__,
        description="A local-first LLM gateway: one OpenAI base_url in front of your own nodes, the cloud last.",
        lifespan=_lifespan(
            upstream,
            calls,
            prober,
            membership,
            links,
            loads,
            keeps_nodes,
            link,
            fleet,
            limits,
            treasury,
            metrics,
            traces,
        ),
        redirect_slashes=False,
        telemetry=_TELEMETRY_OFF,
    )
    app.state.phase = phase
    app.state.instance_id = instance_id
    app.state.fleet = fleet
    models = Models(registry, routes, int(time.time()))
    app.include_router(control_routes(registry, models, doors, metrics.render, CONTENT_TYPE))
    for router in NodeApi(
        registry=registry,
        membership=membership,
        doors=doors,
        open_to_all=settings.nodes_open,
        networks=settings.nodes_networks,
        peer_address=settings.nodes_peer_address,
        read_spec=local_node,
        discover=calls.discover,
        terminate=calls.terminate,
        links=links,
    ).routers():
        app.include_router(router)
    app.include_router(KeyApi(treasury.keys if treasury else None, doors).router())
    app.include_router(
        UsageApi(
            doors=doors,
            books=treasury.books if treasury else None,
            accounts=treasury.accounts if treasury else (),
            on_reconciled=treasury.reconciled if treasury else None,
        ).router()
    )
    ring = Ring(settings.lb_strategy, has_cloud=bool(settings.cloud_specs()))
    app.include_router(RequestApi(ring, doors).router())
    explainer = Explainer(
        registry=registry,
        dispatcher=dispatcher,
        choice=choice,
        policy=settings.lb_strategy,
        max_attempts=settings.max_attempts,
    )
    callers = treasury.keys.callers if treasury else tuple[Caller, ...]
    app.include_router(ExplainApi(explainer, doors, callers, max_body_bytes).router())
    snapshots = Snapshots(
        About(__version__, instance_id, settings.lb_strategy, time.monotonic()),
        registry=registry,
        admission=admission,
        ring=ring,
        money=Money(treasury.books, treasury.accounts) if treasury else None,
        peers=lambda: fleet.peers if fleet else (),
        closing=lambda: phase.closing,
        on_trouble=log.error,
    )
    app.include_router(Dashboard(snapshots, doors, sessions, registry, membership).router())
    turnstile = Turnstile(limits, estimator.estimate_prompt)
    reports: list[Report] = [*([treasury.bookkeeper] if treasury else []), metrics.counts, reporter, ring]
    if traces is not None:
        reports.append(traces)
    for path, operation in _ROUTES.items():
        endpoint = Inference(
            operation,
            dispatcher=dispatcher,
            doors=doors,
            reports=reports,
            on_bug=reporter.bug,
            max_body_bytes=max_body_bytes,
            closing=lambda: phase.closing,
            turnstile=turnstile,
            begin_span=traces.begin if traces else None,
        )
        # People write base_url with and without /v1. A redirect would lose the body.
        for prefix in ("/v1", ""):
            app.add_hot_route(prefix + path, _with_cors(endpoint, settings))
    render_errors(app)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **_cors(settings))
    app.openapi = documented(app)  # type: ignore[method-assign]
    return app


def _lifespan(
    upstream: Upstream,
    calls: NodeCalls,
    prober: Prober,
    membership: Membership,
    links: Links,
    loads: Loads | None,
    keeps_nodes: bool,
    link: Link | None,
    fleet: Fleet | None,
    limits: Limits,
    treasury: Treasury | None,
    metrics: Metrics,
    traces: Traces | None,
) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        stores = link or nullcontext(), treasury or nullcontext()
        async with upstream, calls, traces or nullcontext(), stores[0], limits, stores[1], metrics:
            await membership.restore()
            background = [asyncio.create_task(prober.run(), name="probes")]
            if keeps_nodes:
                background.append(asyncio.create_task(membership.keep(), name="node store"))
            if fleet is not None:
                await fleet.start()
                background.append(asyncio.create_task(fleet.run(), name="fleet"))
            # A moment for the first look at the nodes, so that the first request finds them; they need not be up.
            with suppress(TimeoutError):
                await asyncio.wait_for(prober.first_round.wait(), _FIRST_PROBES_SECONDS)
            _quiet_gc()
            try:
                yield
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await links.close()
                if loads is not None:
                    await loads.close()

    return lifespan


def _loads(policy: Policy, asking: Asking, prober: Prober) -> Loads | None:
    """For a policy that forecasts: what it starts by itself, and whom it asks what is in a node's memory."""
    if not isinstance(policy, ShortestExpectedDelay):
        return None
    loads = Loads(asking, policy.forecast)
    policy.start_load = loads.start
    policy.forecast.on_look = prober.suspect
    return loads


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


def _leaks(counts: Counts, log: Logger) -> Callable[[Node], None]:
    """Counts every leak, and says once for each node what it means."""
    told: WeakSet[Node] = WeakSet()

    def leaked(node: Node) -> None:
        counts.leak(node)
        if node not in told:
            told.add(node)
            log.warning(
                "this engine's version never frees some prefill sessions; restart it or update it", node=node.name
            )

    return leaked


def _migration(settings: Settings) -> Migration:
    return Migration(
        protocol=MigrationProtocol[settings.migration_protocol],
        link_type=LinkType[settings.link_type.upper()],
        with_gdr=not settings.disable_gdr,
        dummy_prefill=settings.dummy_prefill,
    )


def _treasury(settings: Settings, **parts: Any) -> Treasury | None:
    url = settings.database()
    if url is None:
        return None
    from app.treasury import Treasury

    return Treasury(settings, url, **parts)


def _traces(settings: Settings, instance_id: str, log: Logger) -> Traces | None:
    if settings.otel_exporter_otlp_endpoint is None:
        return None
    from app.telemetry.traces import Receiver, Traces

    headers = settings.otel_exporter_otlp_headers
    receiver = Receiver(
        settings.otel_exporter_otlp_endpoint,
        headers=headers.get_secret_value() if headers else "",
        service=settings.otel_service_name,
        version=__version__,
        instance=instance_id,
        sampler=settings.otel_traces_sampler,
        share=settings.otel_traces_sampler_arg,
        prompts=settings.trace_prompts,
    )
    return Traces(receiver, log.warning)


def _plain(keys: tuple[SecretStr, ...]) -> list[str]:
    return [key.get_secret_value() for key in keys]


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
