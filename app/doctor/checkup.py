"""The whole examination: everything is looked at at once, and then judged."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from urllib.parse import urlsplit

from app.doctor.calls import GET_SECONDS
from app.doctor.facts import PlaceFacts, Unpriced
from app.doctor.findings import Code, Finding, cleaned, good, warning
from app.doctor.judge_machine import judge_ledger, judge_machine, judge_port, judge_redis
from app.doctor.judge_models import judge_models
from app.doctor.judge_places import judge_clocks, judge_cloud, judge_node, judge_prices
from app.doctor.judge_preload import judge_preload
from app.doctor.machine import look_at_machine, look_at_port
from app.doctor.places import USUAL_PORTS, Visitor
from app.doctor.stores import look_at_ledger, look_at_redis, unpriced
from app.domain import NodeSpec
from app.node_clients import Clients
from app.settings import Settings
from app.tls import Trust

_AT_ONCE = 128  # places that are looked at
_SHORT, _LONG = 8, 16  # characters of a secret with a digit in it, and of one without


async def examine(
    settings: Settings, *, in_container: bool | None = None, usual_ports: Sequence[int] = USUAL_PORTS
) -> list[Finding]:
    """All findings, in the order in which people read them. Takes ten seconds at most, and costs nothing."""
    async with Clients(Trust(), seconds=GET_SECONDS) as clients:
        visitor = Visitor(clients, in_container=in_container, usual_ports=usual_ports)
        turns = asyncio.Semaphore(_AT_ONCE)

        async def visit(look: Callable[[NodeSpec], Awaitable[PlaceFacts]], spec: NodeSpec) -> PlaceFacts:
            async with turns:
                return await look(spec)

        nodes, clouds, ledger, redis, port, prices = await asyncio.gather(
            asyncio.gather(*(visit(visitor.node, spec) for spec in settings.local_node_specs())),
            asyncio.gather(*(visit(visitor.cloud, spec) for spec in settings.cloud_specs())),
            look_at_ledger(settings.database()),
            look_at_redis(settings.redis()),
            look_at_port(settings, clients),
            unpriced(settings),
        )
    found = [
        *_settings(settings),
        *_nodes(settings, nodes),
        *_clouds(settings, clouds, prices),
        *judge_clocks([*nodes, *clouds]),
        *judge_ledger(ledger),
        *judge_redis(redis),
        *judge_port(port),
        *judge_machine(look_at_machine(settings)),
    ]
    secrets = _secrets(settings)
    return [cleaned(finding, secrets) for finding in found]


def _settings(settings: Settings) -> Iterator[Finding]:
    yield good(Code.SETTINGS, "settings", "all can be read")
    remedy = "change it, if it is not meant so; .env.example explains every setting"
    for doubt in settings.warnings:
        yield warning(Code.SETTINGS_DOUBTFUL, "settings", doubt, remedy)


def _nodes(settings: Settings, nodes: Sequence[PlaceFacts]) -> Iterator[Finding]:
    if not nodes:
        yield warning(
            Code.NO_NODES, "LOCAL_NODES", "there is no local node", "set LOCAL_NODES, or add nodes at run time"
        )
    for facts in nodes:
        yield from judge_node(facts)
    yield from judge_models(nodes, settings.routes_config(), has_cloud=bool(settings.cloud_specs()))
    yield from judge_preload(nodes, settings.preload, settings.routes_config())


def _clouds(settings: Settings, clouds: Sequence[PlaceFacts], prices: Sequence[Unpriced]) -> Iterator[Finding]:
    routes = [route for route in settings.routes_config() if route.may_leave]
    wanted = list(dict.fromkeys(route.cloud for route in routes if route.cloud and "*" not in route.cloud))
    if not clouds:
        yield from _no_cloud(settings, wanted)
    for facts in clouds:
        # Of several clouds another one may be meant.
        yield from judge_cloud(facts, wanted if len(clouds) == 1 else ())
    yield from judge_prices(prices)


def _no_cloud(settings: Settings, wanted: Sequence[str]) -> Iterator[Finding]:
    if wanted:
        message = f"MODEL_MAP names cloud models ({wanted[0]}), and there is no key: the cloud is not used"
        remedy = "set CLOUD_API_KEY, or take the cloud's names out of MODEL_MAP"
        yield warning(Code.CLOUD_KEY_MISSING, "cloud", message, remedy)
    else:
        yield good(Code.CLOUD, "cloud", "none: every request stays on your own nodes")
    if settings.cloud_budget() is not None:
        message = "a budget is set, and there is no cloud that could spend it"
        yield warning(Code.BUDGET_IDLE, "cloud", message, "set CLOUD_API_KEY, or unset CLOUD_BUDGET_USD")


def _secrets(settings: Settings) -> list[str]:
    """What is hidden, should a node say it again. Not what only stands for a key, such as `ollama` or `EMPTY`."""
    nodes = (*settings.local_node_specs(), *settings.cloud_specs())
    keys = [key.secret for key in settings.api_keys] + [key.get_secret_value() for key in settings.admin_keys]
    passwords = [_password(url) for url in (settings.database(), settings.redis())]
    secrets = [*(node.api_key for node in nodes), *keys, *passwords]
    return [each for each in secrets if len(each) >= _LONG or (len(each) >= _SHORT and re.search(r"\d", each))]


def _password(url: str | None) -> str:
    try:
        return urlsplit(url or "").password or ""
    except ValueError:
        return ""
