"""Puts the parts together. The only module that knows all of them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from fastapi import APIRouter, FastAPI
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
from app.fronts.keep_alive import KeepAlive
from app.fronts.keys import KeyApi
from app.fronts.models import Models
from app.fronts.nodes import NodeApi
from app.fronts.openai import Inference
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
from app.routing.continuation import Where
from app.routing.dispatch import Dispatcher
from app.routing.ended import Report
from app.routing.explain import Explainer
from app.routing.forecast import Forecast
from app.routing.links import Links
from app.routing.loads import Loads
from app.routing.membership import Membership
from app.routing.node_store import NodeStore
from app.routing.pairs import Pairs
from app.routing.policies import POLICIES, Policy
from app.routing.policies.shortest_expected_delay import ShortestExpectedDelay
from app.routing.preload import Preload
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
    *(f"x-hearth-{name}" for name in ("node", "tier", "attempts", "fallback", "model", "queue-ms", "error-source")),
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


class Parts:
    """All that one gateway consists of, put together and not opened yet."""

    def __init__(self, settings: Settings, sink: LineSink, slates: Slates | None) -> None:
        self.settings = settings
        self.instance_id = new_instance_id()
        self.log = log = make_logger(sink, settings.log_level, settings.log_format)
        self.phase = Phase()
        self.traces = _traces(settings, self.instance_id, log)
        self.policy = POLICIES[settings.lb_strategy]()
        self.admission = Admission(chooser=self.policy if self.policy.schedules else None)
        self.registry = Registry([_node(spec, settings, log) for spec in _specs(settings)], self._changed)
        self.routes = Routes(settings.routes_config(), self.registry)
        self.metrics = Metrics(self.registry, self.admission, slates, log.warning)
        line = make_request_line(sink, settings.log_level, settings.log_format)
        self.reporter = Reporter(log, line, settings.lb_strategy)
        self.ring = Ring(settings.lb_strategy, has_cloud=bool(settings.cloud_specs()))
        self._know_nodes()
        self._share()
        self._keep_books()
        self._dispatch()
        self._guard()

    def _changed(self) -> None:
        """A node came, went or changed."""
        self.admission.changed()
        self.preload.changed()

    def _know_nodes(self) -> None:
        settings, log = self.settings, self.log
        trust = Trust()
        self.prober = Prober(
            self.registry,
            detect_order(),
            interval_seconds=settings.health_check_interval,
            timeout_seconds=settings.health_check_timeout,
            log=log,
            trust=trust,
        )
        self.upstream = Upstream(f"hearth/{__version__}", settings.connect_timeout, trust)
        self.calls = NodeCalls(trust)
        self.links = Links(self.calls, disaggregations(_migration(settings)))
        nodes_path = settings.nodes_path()
        self.membership = Membership(
            self.registry,
            make_node=lambda spec: _node(spec, settings, log),
            watcher=self.prober,
            store=NodeStore(nodes_path) if nodes_path else None,
            on_trouble=log.warning,
            on_leave=self._forget,
        )

    def _forget(self, node: Node) -> None:
        self.links.drop(node)
        self.policy.dropped(node)

    def _share(self) -> None:
        settings, log = self.settings, self.log
        self.link = Link(settings.redis_url.get_secret_value(), log.warning) if settings.redis_url else None
        self.limits = Limits(self.link)
        self.fleet: Fleet | None = None
        if self.link is not None:
            self.fleet = Fleet(
                self.link,
                self.registry,
                self.membership,
                self.instance_id,
                declared=settings.local_node_specs(),
                on_freed=self.admission.freed,
                on_trouble=log.warning,
            )
            self.metrics.add(sharing_gauges(self.link, self.peers))

    def peers(self) -> Set[str]:
        """The other replicas."""
        return self.fleet.peers if self.fleet else frozenset()

    def _keep_books(self) -> None:
        self.estimator = TokenEstimator()
        self.treasury = _treasury(
            self.settings,
            registry=self.registry,
            routes=self.routes,
            link=self.link,
            instance=self.instance_id,
            alive=self.fleet.alive if self.fleet else None,
            estimator=self.estimator,
            on_trouble=self.log.warning,
            on_figures=self.metrics.counts.booked,
            on_saved=self.metrics.counts.saved,
        )
        if self.treasury is not None:
            self.metrics.add_source(self.treasury.funds())
        self.money = Money(self.treasury.books, self.treasury.accounts) if self.treasury else None

    def _dispatch(self) -> None:
        settings = self.settings
        self.choice = Choice(
            self.policy,
            self.admission,
            self.metrics.counts,
            settings.queue_seconds(),
            purse=self.treasury.purse if self.treasury else None,
            spill_after_ms=settings.spill_after_ms,
            queue_size=settings.queue_size,
        )
        asking = Asking(self.upstream, Timeouts(settings.first_token_timeout, settings.idle_timeout))
        self.loads = _loads(self.policy, asking, self.prober, self.reporter)
        self.preloads = self.loads or Loads(asking, Forecast(), self.reporter.not_loaded)
        self.preload = Preload(
            settings.preload, self.registry, self.routes, self.preloads.forecast, self.preloads.start
        )
        pairs = None
        if settings.serving_strategy == "DistServe":
            pairs = Pairs(self.choice, asking, self.links, _leaks(self.metrics.counts, self.log))
        self.dispatcher = Dispatcher(
            registry=self.registry,
            routes=self.routes,
            choice=self.choice,
            asking=asking,
            retry=Retry(settings.max_attempts),
            request_seconds=settings.request_timeout,
            pairs=pairs,
            loads=self.loads,
            continuation=Where(settings.continuation),
            suspect=self.prober.suspect,
            on_missing=self.reporter.advice.missing,
        )

    def _guard(self) -> None:
        settings = self.settings
        self.sessions = Sessions(_plain(settings.admin_keys)) if settings.admin_keys else None
        self.doors = Doors(
            Keyring(settings.api_keys, rate=settings.default_rate()),
            Keyring(_plain(settings.admin_keys), "admin", "ADMIN_KEYS"),
            self.treasury.keys if self.treasury else None,
            self.sessions,
        )


def create_app(
    settings: Settings, sink: LineSink | None = None, *, keeps_nodes: bool = True, slates: Slates | None = None
) -> FastAPI:
    """The whole gateway as an ASGI app. Opens nothing before its lifespan begins.

    Of several processes with one nodes file only one `keeps_nodes`; the others read it. Their metrics meet in `slates`.
    """
    parts = Parts(settings, sink or open_writer(), slates)
    app = FrontDoor(
        title="Hearth",
        version=__version__,
        description="A local-first LLM gateway: one OpenAI base_url in front of your own nodes, the cloud last.",
        lifespan=_lifespan(parts, keeps_nodes),
        redirect_slashes=False,
        telemetry=_TELEMETRY_OFF,
    )
    app.state.phase = parts.phase
    app.state.instance_id = parts.instance_id
    app.state.fleet = parts.fleet
    for router in (*_routers(parts), *_node_routers(parts)):
        app.include_router(router)
    _add_inference(app, parts)
    render_errors(app)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **_cors(settings))
    app.openapi = documented(app)  # type: ignore[method-assign]
    return app


def _routers(parts: Parts) -> Iterator[APIRouter]:
    """What is not hot: models, operations, administration."""
    doors, registry, treasury = parts.doors, parts.registry, parts.treasury
    models = Models(registry, parts.routes, int(time.time()))
    yield control_routes(registry, models, doors, parts.metrics.render, CONTENT_TYPE)
    yield KeyApi(treasury.keys if treasury else None, doors).router()
    yield UsageApi(
        doors=doors,
        books=treasury.books if treasury else None,
        accounts=treasury.accounts if treasury else (),
        on_reconciled=treasury.reconciled if treasury else None,
    ).router()
    yield RequestApi(parts.ring, doors).router()
    explainer = Explainer(
        registry=registry,
        dispatcher=parts.dispatcher,
        choice=parts.choice,
        policy=parts.settings.lb_strategy,
        max_attempts=parts.settings.max_attempts,
    )
    callers = treasury.keys.callers if treasury else tuple[Caller, ...]
    yield ExplainApi(explainer, doors, callers, _body_bytes(parts.settings)).router()
    snapshots = Snapshots(
        About(__version__, parts.instance_id, parts.settings.lb_strategy, time.monotonic()),
        registry=registry,
        admission=parts.admission,
        ring=parts.ring,
        money=parts.money,
        peers=parts.peers,
        closing=lambda: parts.phase.closing,
        on_trouble=parts.log.error,
    )
    yield Dashboard(snapshots, doors, parts.sessions, registry, parts.membership).router()


def _node_routers(parts: Parts) -> Iterable[APIRouter]:
    settings = parts.settings
    return NodeApi(
        registry=parts.registry,
        membership=parts.membership,
        doors=parts.doors,
        open_to_all=settings.nodes_open,
        networks=settings.nodes_networks,
        peer_address=settings.nodes_peer_address,
        read_spec=local_node,
        discover=parts.calls.discover,
        terminate=parts.calls.terminate,
        links=parts.links,
    ).routers()


def _add_inference(app: FrontDoor, parts: Parts) -> None:
    """The hot routes."""
    turnstile = Turnstile(parts.limits, parts.estimator.estimate_prompt)
    reports: list[Report] = [parts.metrics.counts, parts.reporter, parts.ring]
    if parts.treasury is not None:
        reports.append(parts.treasury.bookkeeper)
    if parts.traces is not None:
        reports.append(parts.traces)
    for path, operation in _ROUTES.items():
        endpoint = Inference(
            operation,
            dispatcher=parts.dispatcher,
            doors=parts.doors,
            reports=reports,
            on_bug=parts.reporter.bug,
            max_body_bytes=_body_bytes(parts.settings),
            closing=lambda: parts.phase.closing,
            turnstile=turnstile,
            begin_span=parts.traces.begin if parts.traces else None,
            keep_alive=_keep_alive(parts.settings),
        )
        # People write base_url with and without /v1. A redirect would lose the body.
        for prefix in ("/v1", ""):
            app.add_hot_route(prefix + path, _with_cors(endpoint, parts.settings))


def _lifespan(parts: Parts, keeps_nodes: bool) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in (
                parts.upstream,
                parts.calls,
                parts.traces,
                parts.link,
                parts.limits,
                parts.treasury,
                parts.metrics,
            ):
                if part is not None:
                    await stack.enter_async_context(part)
            if parts.money is not None:
                stack.push_async_callback(parts.money.close)  # it asks the treasury's books
            await parts.membership.restore()
            background = [asyncio.create_task(parts.prober.run(), name="probes")]
            if keeps_nodes:
                background.append(asyncio.create_task(parts.membership.keep(), name="node store"))
                background.append(asyncio.create_task(parts.preload.run(), name="preload"))
            if parts.fleet is not None:
                await parts.fleet.start()
                background.append(asyncio.create_task(parts.fleet.run(), name="fleet"))
            # A moment for the first look at the nodes, so that the first request finds them; they need not be up.
            with suppress(TimeoutError):
                await asyncio.wait_for(parts.prober.first_round.wait(), _FIRST_PROBES_SECONDS)
            _quiet_gc()
            try:
                yield
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await parts.links.close()
                await parts.preloads.close()

    return lifespan


def _loads(policy: Policy, asking: Asking, prober: Prober, reporter: Reporter) -> Loads | None:
    """For a policy that forecasts: what it starts by itself, and whom it asks what is in a node's memory."""
    if not isinstance(policy, ShortestExpectedDelay):
        return None
    loads = Loads(asking, policy.forecast, reporter.not_loaded)
    policy.start_load = loads.start
    policy.forecast.on_look = prober.suspect
    return loads


def _keep_alive(settings: Settings) -> KeepAlive | None:
    rules = [spec.queue.keep_alive_seconds or 0.0 for spec in settings.routes_config()]
    on = [seconds for seconds in (settings.keep_alive_after, *rules) if seconds]
    return KeepAlive(settings.keep_alive_after, min(on)) if on else None


def _quiet_gc() -> None:
    """What lives for ever is not looked at again. Measured: a tenth to a quarter less CPU, and no long pauses."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def _body_bytes(settings: Settings) -> int:
    return int(settings.max_body_mb * 2**20)


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
