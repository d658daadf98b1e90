"""What requests cost: the operator's figures, and the list that Hearth brings along."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from unittest.mock import Mock, call

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.domain import NodeSpec, Price, Usage
from app.ledger.prices import PriceBook
from app.ledger.tariffs import FREE, Step, Tariff, flat

NOVEMBER = datetime(2026, 11, 30, 12, tzinfo=UTC)
OPENAI, OPENROUTER = "https://api.openai.com/v1", "https://openrouter.ai/api/v1"
GOOGLE = "https://generativelanguage.googleapis.com/v1beta/openai"
PERPLEXITY, DEEPSEEK = "https://api.perplexity.ai", "https://api.deepseek.com/v1"


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list comes with Hearth: nothing is fetched."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was used")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def cloud(url: str = OPENAI, price: Price | None = None, model: str | None = None) -> NodeSpec:
    return NodeSpec(url=url, kind="cloud", name="cloud", tier=1, price=price, default_model=model)


def book(*overrides: tuple[str, Price], at: datetime = NOVEMBER) -> PriceBook:
    return PriceBook(overrides, now=lambda: at)


# The list

# Dollars per million tokens, as the providers publish them.
PUBLISHED = [
    (OPENAI, "gpt-4o", "2.5", "10", "1.25"),
    (OPENAI, "gpt-4o-mini", "0.15", "0.6", "0.075"),
    (OPENAI, "gpt-4o-mini-2024-07-18", "0.15", "0.6", "0.075"),
    (OPENAI, "GPT-5-mini", "0.25", "2", "0.025"),
    (OPENAI, "text-embedding-3-small", "0.02", "0", "0.02"),
    (GOOGLE, "gemini-2.5-flash", "0.3", "2.5", "0.03"),
    (GOOGLE, "models/gemini-2.5-flash", "0.3", "2.5", "0.03"),
]


@pytest.mark.parametrize(("url", "model", "read", "output", "cached"), PUBLISHED)
@pytest.mark.parametrize(
    "usage", [Usage(1, 1), Usage(1234, 567, 1000), Usage(99_999, 0, 99_999), Usage(50_001, 77_777)]
)
async def test_known_models_cost_what_is_published(
    url: str, model: str, read: str, output: str, cached: str, usage: Usage
) -> None:
    tariff = await book().find(cloud(url), model)
    assert tariff is not None

    exact = (usage.prompt_tokens - usage.cached_tokens) * Decimal(read) + usage.completion_tokens * Decimal(output)
    exact += usage.cached_tokens * Decimal(cached)  # micro-dollars: dollars per million tokens
    assert tariff.cost(usage) == int(exact.quantize(Decimal(1), ROUND_HALF_UP))


async def test_long_prompts_are_dearer_where_the_provider_says_so() -> None:
    tariff = await book().find(cloud(GOOGLE), "gemini-2.5-pro")
    assert tariff is not None

    assert tariff.cost(Usage(200_000, 1000)) == 250_000 + 10_000
    assert tariff.cost(Usage(200_001, 1000)) == 500_003 + 15_000


async def test_a_fee_for_every_request_is_counted() -> None:
    tariff = await book().find(cloud(PERPLEXITY), "sonar")
    assert tariff is not None

    assert tariff.cost(Usage(0, 0)) == 12_000
    assert tariff.at_most(0, 0) == 12_000


async def test_prices_change_at_their_date_while_hearth_runs() -> None:
    now = [datetime(2025, 6, 9, 23, 59, tzinfo=UTC)]
    prices = PriceBook(now=lambda: now[0])
    before = await prices.find(cloud(), "o3")
    now[0] = datetime(2025, 6, 10, tzinfo=UTC)
    after = await prices.find(cloud(), "o3")

    assert before is not None
    assert after is not None
    assert (before.steps[0].input, after.steps[0].input) == (10_000_000, 2_000_000)


async def test_prices_change_with_the_hour() -> None:
    by_night = await book(at=datetime(2026, 11, 30, 20, tzinfo=UTC)).find(cloud(DEEPSEEK), "deepseek-flash")
    by_day = await book(at=datetime(2026, 11, 30, 2, tzinfo=UTC)).find(cloud(DEEPSEEK), "deepseek-flash")

    assert by_night is not None
    assert by_day is not None
    assert by_night.steps[0].input < by_day.steps[0].input


@pytest.mark.parametrize(
    ("url", "model"),
    [
        (OPENAI, "gpt-99-of-nobody"),
        (OPENAI, ""),
        (OPENAI, "gpt-4o" * 10_000),
        (OPENAI, "whisper-1"),  # by the hour
        ("https://llm.example.org/v1", "gpt-4o"),
        ("http://127.0.0.1:1", "gpt-4o"),
    ],
)
async def test_what_nobody_knows_has_no_price(url: str, model: str) -> None:
    """It is not free: a budget could not be kept."""
    assert await book().find(cloud(url), model) is None


async def test_a_model_without_a_price_is_free_only_when_its_name_says_so() -> None:
    assert await book().find(cloud(OPENROUTER), "meta-llama/llama-3.3-70b-instruct:free") == FREE
    assert await book().find(cloud(OPENROUTER), "google/gemini-flash-1.5-8b-exp") is None


async def test_every_price_in_the_list_makes_a_tariff() -> None:
    from genai_prices.data import providers

    from app.ledger.prices import _listed

    tariffs = [t for p in providers for m in p.models for _, t in _listed(m, m.id) if t is not None]

    assert len(tariffs) > 2000
    assert all(t.cost(Usage(10_000, 500, 5000)) <= t.at_most(10_000, 500) for t in tariffs)


# The operator's figures


async def test_a_nodes_own_price_comes_first() -> None:
    own = Price(1_000_000, 2_000_000, 500_000)
    prices = book(("*", Price(9, 9)))

    assert await prices.find(cloud(price=own), "gpt-4o") == flat(own)
    assert prices.known(cloud(price=own), "never-found") == flat(own)


async def test_the_first_pattern_that_matches_comes_before_the_list() -> None:
    prices = book(("gpt-4o-*", Price(1, 1)), ("GPT-*", Price(2, 2)))

    assert await prices.find(cloud(), "gpt-4o-mini") == flat(Price(1, 1))
    assert await prices.find(cloud(), "gpt-4o") == flat(Price(2, 2))
    assert await prices.find(cloud("https://llm.example.org"), "gpt-x") == flat(Price(2, 2))


async def test_local_nodes_cost_nothing_or_what_the_operator_says() -> None:
    local, priced = NodeSpec("http://a:1"), NodeSpec("http://a:1", price=Price(7, 7))

    assert book().known(local, "gpt-4o") == FREE
    assert book().known(priced, "gpt-4o") == flat(Price(7, 7))
    assert await book(("*", Price(9, 9))).find(local, "m") == FREE


async def test_a_model_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = book()
    look_up = Mock(wraps=prices._look_up)
    monkeypatch.setattr(prices, "_look_up", look_up)

    await prices.load([cloud(model="gpt-4o")])
    for model in ("gpt-4o", "nothing", "nothing"):
        await prices.find(cloud(), model)

    assert look_up.call_args_list == [call(OPENAI, "gpt-4o"), call(OPENAI, "nothing")]
    assert prices.known(cloud(), "gpt-4o") is not None
    assert prices.known(cloud(), "gpt-4o-mini") is None


async def test_names_that_clients_invent_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ledger.prices._KNOWN_MAX", 3)
    prices = book(("*", Price(1, 1)))

    for number in range(10):
        assert await prices.find(cloud(), f"m{number}") == flat(Price(1, 1))

    assert len(prices._known) == 3


async def test_a_known_price_takes_no_time() -> None:
    prices = book()
    await prices.load([cloud(model="gpt-4o")])

    begin = time.perf_counter()
    for _ in range(1000):
        await prices.find(cloud(), "gpt-4o")

    assert time.perf_counter() - begin < 0.5


def test_the_list_is_not_read_before_it_is_needed() -> None:
    code = "import sys, app.ledger.prices as p; p.PriceBook(); print('genai_prices' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"False"


# Sums

amounts = st.integers(0, 10**12)
tokens = st.integers(0, 10**9)


@st.composite
def tariffs(draw: st.DrawFn) -> Tariff:
    """Those in which long prompts are no cheaper, as in every list."""
    starts = [-1, *sorted(draw(st.sets(st.integers(0, 10**6), max_size=3)))]
    inputs, outputs = (sorted(draw(st.lists(amounts, min_size=4, max_size=4))) for _ in range(2))
    share = draw(st.integers(0, 100))
    steps = [Step(start, inputs[i], outputs[i], inputs[i] * share // 100) for i, start in enumerate(starts)]
    return Tariff(steps, draw(st.integers(0, 10**6)))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    prompt = draw(tokens)
    return Usage(prompt, draw(tokens), draw(st.integers(0, prompt)))


@given(tariffs(), usages(), tokens, tokens)
def test_more_tokens_cost_no_less(tariff: Tariff, usage: Usage, more_prompt: int, more_completion: int) -> None:
    longer = usage._replace(
        prompt_tokens=usage.prompt_tokens + more_prompt, completion_tokens=usage.completion_tokens + more_completion
    )

    assert tariff.cost(longer) >= tariff.cost(usage)


@given(tariffs(), usages())
def test_cached_tokens_cost_no_more_than_others(tariff: Tariff, usage: Usage) -> None:
    assert tariff.cost(usage) <= tariff.cost(usage._replace(cached_tokens=0))


@given(tariffs(), usages(), tokens, tokens)
def test_nothing_costs_more_than_at_most(
    tariff: Tariff, usage: Usage, spare_prompt: int, spare_completion: int
) -> None:
    at_most = tariff.at_most(usage.prompt_tokens + spare_prompt, usage.completion_tokens + spare_completion)

    assert at_most >= tariff.cost(usage)


@given(st.builds(Price, amounts, amounts, st.none()), usages())
def test_sums_are_exact(price: Price, usage: Usage) -> None:
    exact = Decimal(usage.prompt_tokens * price.input + usage.completion_tokens * price.output) / 1_000_000
    assume(exact < 10**20)

    assert flat(price).cost(usage) == int(exact.quantize(Decimal(1), ROUND_HALF_UP))


def test_half_a_micro_dollar_is_rounded_up_and_reserved_whole() -> None:
    tariff = flat(Price(100_000, 0))

    assert [tariff.cost(Usage(tokens, 0)) for tokens in (4, 5, 14, 15)] == [0, 1, 1, 2]
    assert [tariff.at_most(tokens, 0) for tokens in (0, 1, 10, 11)] == [0, 1, 1, 2]


def test_more_cached_tokens_than_prompt_are_taken_for_the_prompt() -> None:
    """Some engines count them so."""
    assert flat(Price(2_000_000, 0, 1_000_000)).cost(Usage(10, 0, 50)) == 10


def test_a_tariff_covers_every_prompt() -> None:
    for steps in ([], [Step(10, 1, 1, 1)]):
        with pytest.raises(ValueError, match="every length"):
            Tariff(steps)
