"""Looks at what Hearth keeps and shares, and at prices. Each part is imported only where it is used."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.doctor.facts import LedgerFacts, RedisFacts, Unpriced
from app.domain import NodeSpec
from app.errors import LedgerUnavailable
from app.routing.registry import cloud_name
from app.settings import Settings

_LEDGER_SECONDS = 6.0
_REDIS_SECONDS = 3.0
_REDIS_ANSWER_SECONDS = 2.0


async def look_at_ledger(url: str | None) -> LedgerFacts | None:
    """None when there is none. Nothing is made or changed."""
    if url is None:
        return None
    from app.ledger.inspection import inspect, place

    try:
        name, path = place(url)
    except LedgerUnavailable as error:
        return LedgerFacts("the ledger", trouble=error.message)
    if path is not None:
        writable = is_writable(path.parent) and (not path.exists() or os.access(path, os.W_OK))
        if not writable or not path.exists():
            return LedgerFacts(name, folder=str(path.parent), writable=writable, exists=path.exists())
    try:
        async with asyncio.timeout(_LEDGER_SECONDS):
            found = await inspect(url)
    except LedgerUnavailable as error:
        return LedgerFacts(name, trouble=error.message)
    except TimeoutError:
        return LedgerFacts(name, trouble=f"{name} does not answer in time")
    return LedgerFacts(
        name,
        folder=str(path.parent) if path else None,
        revision=found.revision,
        head=found.head,
        lost=found.lost,
        lost_micro_dollars=found.lost_micro_dollars,
    )


async def look_at_redis(url: str | None) -> RedisFacts | None:
    """None when nothing is shared."""
    if url is None:
        return None
    from app.sharing.link import Link, LinkDown

    told: list[str] = []
    link = Link(url, lambda _, **fields: told.append(str(fields.get("reason", ""))), _REDIS_ANSWER_SECONDS)
    try:
        async with asyncio.timeout(_REDIS_SECONDS), link:
            info = _info(await link.call("INFO"))
    except (LinkDown, ValueError) as error:
        why = next((reason for reason in told if reason), str(error))
        return RedisFacts(link.server, trouble=why.removeprefix(f"{link.server}: "))
    except TimeoutError:
        return RedisFacts(link.server, trouble="it does not answer in time")
    return RedisFacts(
        link.server,
        version=info.get("valkey_version") or info.get("redis_version", ""),
        eviction=info.get("maxmemory_policy", ""),
        limited=info.get("maxmemory", "0") != "0",
    )


async def unpriced(settings: Settings) -> list[Unpriced]:
    """What a budget covers although nobody knows its price."""
    wanted = list(dict.fromkeys(_priced(settings)))
    if not wanted:
        return []
    from app.ledger.prices import PriceBook

    book = PriceBook(settings.cloud_prices)
    return [Unpriced(spec.name, model) for spec, model in wanted if await book.find(spec, model) is None]


def _priced(settings: Settings) -> Iterator[tuple[NodeSpec, str]]:
    """Each cloud target's models that cost something which counts."""
    gateway = settings.cloud_budget() is not None
    for spec in settings.cloud_specs():
        default = cloud_name(spec, None)
        if default and (gateway or spec.budget):
            yield spec, default
        for route in settings.routes_config():
            model = cloud_name(spec, route.cloud)
            if model and route.may_leave and "*" not in model and (gateway or spec.budget or route.budget):
                yield spec, model


def unwritable(places: Iterable[tuple[str, Path | None]]) -> list[tuple[str, str]]:
    """Of settings and the files that they name, those whose folder cannot be written."""
    return [(name, str(path.parent)) for name, path in places if path is not None and not is_writable(path.parent)]


def is_writable(folder: Path) -> bool:
    """Also when it must be made first."""
    there = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _info(answer: Any) -> dict[str, str]:
    """Redis's INFO: lines of `name:value`."""
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in pairs if colon}
