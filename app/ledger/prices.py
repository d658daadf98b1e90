"""What a model costs at a node: the operator's figures, and the list of genai-prices. The only module that knows
genai-prices, and only its data: nothing is ever fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING

from app.domain import LOCAL_TIER, MICRO_DOLLARS, NodeSpec, Price
from app.ledger.tariffs import FREE, Step, Tariff, flat
from app.routing.names import matches

if TYPE_CHECKING:
    from genai_prices.data_snapshot import DataSnapshot
    from genai_prices.types import ModelInfo, ModelPrice, TieredPrices

__all__ = ["FREE", "PriceBook", "Tariff"]

_KNOWN_MAX = 4096
_NAME_CHARACTERS = 256  # names come from clients, and the list holds regular expressions
_FREE_ENDING = ":free"
_GOOGLES_PREFIX = "models/"
_TOKENS = ("input_mtok", "output_mtok", "cache_read_mtok")
_FEE = "requests_kcount"
_MICRO = Decimal(MICRO_DOLLARS)

# When it applies (at a moment in UTC), and the tariff: the first that applies holds. Some change at a date or by night.
_Listed = Sequence[tuple[Callable[[datetime], bool], Tariff | None]]


class PriceBook:
    """Knows prices by node and model. `overrides` are the operator's: patterns of names, of which the first decides."""

    def __init__(
        self, overrides: Sequence[tuple[str, Price]] = (), *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._overrides = [(pattern, flat(price)) for pattern, price in overrides]
        self._now = now
        self._list: DataSnapshot | None = None
        self._known: dict[tuple[str, str], _Listed] = {}
        self._flat: dict[Price, Tariff] = {}

    async def load(self, nodes: Iterable[NodeSpec] = ()) -> None:
        """Reads the list. Before the first request, as it holds the loop up for some milliseconds.

        What the `nodes` name is looked up at once.
        """
        await asyncio.to_thread(self._load)
        for node in nodes:
            for model in {node.default_model or "", *node.models}:
                await self.find(node, model)

    async def find(self, node: NodeSpec, model: str) -> Tariff | None:
        """What the model costs there now; None when nobody knows. Quick but for a model's first time."""
        if self._settled(node) is None and (node.url, model) not in self._known:
            listed = await asyncio.to_thread(self._look_up, node.url, model)
            if len(self._known) >= _KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[node.url, model] = listed
        return self.known(node, model)

    def known(self, node: NodeSpec, model: str) -> Tariff | None:
        """As `find`, without waiting: None for a cloud model that was not found before, too."""
        settled = self._settled(node)
        if settled is not None:
            return settled
        listed = self._known.get((node.url, model), ())
        if len(listed) == 1:
            return listed[0][1]
        now = self._now()
        return next((tariff for applies, tariff in listed if applies(now)), None)

    def _settled(self, node: NodeSpec) -> Tariff | None:
        """What it costs whatever the model."""
        if node.price is not None:
            found = self._flat.get(node.price)
            return found if found is not None else self._flat.setdefault(node.price, flat(node.price))
        return FREE if node.tier == LOCAL_TIER else None

    def _load(self) -> DataSnapshot:
        # Not the package's own entry, which would take a list that its updater had fetched.
        from genai_prices.data import providers
        from genai_prices.data_snapshot import DataSnapshot

        if self._list is None:
            self._list = DataSnapshot(providers=providers, from_auto_update=False)
        return self._list

    def _look_up(self, url: str, model: str) -> _Listed:
        for pattern, tariff in self._overrides:
            if matches(pattern, model):
                return [(_always, tariff)]
        name = model.lower().removeprefix(_GOOGLES_PREFIX)
        if len(name) > _NAME_CHARACTERS:
            return [(_always, None)]
        snapshot = self._load()
        try:
            # By the provider first: the snapshot itself would remember every name that was ever asked for.
            provider = snapshot.find_provider(None, None, url)
        except LookupError:
            return [(_always, None)]
        found = provider.find_model(name, all_providers=snapshot.providers)
        return [(_always, None)] if found is None else _listed(found, name)


def _always(_: datetime) -> bool:
    return True


def _listed(model: ModelInfo, name: str) -> _Listed:
    """In the list the last price that applies holds, and else the first."""
    if not isinstance(model.prices, list):
        return [(_always, _tariff(model.prices, name))]
    conditional = [
        (each.constraint.active if each.constraint is not None else _always, _tariff(each.prices, name))
        for each in reversed(model.prices)
    ]
    return [*conditional, (_always, conditional[-1][1])] if conditional else [(_always, None)]


def _tariff(prices: ModelPrice, name: str) -> Tariff | None:
    """None where tokens have no price: such a model is charged by the hour or the page, or its price is missing."""
    given: dict[str, Decimal | TieredPrices] = {key: value for key, value in vars(prices).items() if value is not None}
    if "input_mtok" not in given:
        return FREE if not given and name.endswith(_FREE_ENDING) else None
    starts = {tier.start for key in _TOKENS for tier in getattr(given.get(key), "tiers", ())}
    fee = _micro(_at(given[_FEE], 0) / 1000) if _FEE in given else 0
    return Tariff([_step(given, above) for above in (-1, *sorted(starts))], fee)


def _step(given: dict[str, Decimal | TieredPrices], above: int) -> Step:
    """The prices of a prompt that is just longer than `above`. Embeddings have no price for output."""
    prompt = above + 1
    read = _micro(_at(given["input_mtok"], prompt))
    output = _micro(_at(given["output_mtok"], prompt)) if "output_mtok" in given else 0
    cached = _micro(_at(given["cache_read_mtok"], prompt)) if "cache_read_mtok" in given else read
    return Step(above, read, output, min(cached, read))


def _at(price: Decimal | TieredPrices, prompt_tokens: int) -> Decimal:
    if isinstance(price, Decimal):
        return price
    reached = [tier.price for tier in price.tiers if prompt_tokens > tier.start]
    return reached[-1] if reached else price.base


def _micro(dollars: Decimal) -> int:
    return int((dollars * _MICRO).to_integral_value(ROUND_CEILING))
