"""The ledger's answers as JSON and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Budget, Period
from app.ledger.report import (
    BudgetState,
    Dimension,
    Query,
    Report,
    Sums,
    UsageLine,
    budget_document,
    dimensions,
    document,
    table,
)
from app.ledger.span import DAY_MS, Span, period_span
from app.sharing.meter import GATEWAY, Account

NOVEMBER = Span(20_758 * DAY_MS, 20_788 * DAY_MS)
SUMS = Sums(
    requests=4,
    failed=1,
    estimated=1,
    tokens_in=100,
    tokens_out=20,
    tokens_cached=40,
    cost=1_234_567,
    saved=5,
    first_content_ms=301,
    first_contents=2,
)
FIGURES = {
    "requests": 4,
    "failed": 1,
    "tokens_in": 100,
    "tokens_out": 20,
    "tokens_cached": 40,
    "estimated_share": 0.25,
    "cost_usd": 1.234567,
    "saved_usd": 0.000005,
    "first_content_ms": 150.5,
}


def report(*groups: tuple[str, ...], by: tuple[Dimension, ...], **fields: Any) -> Report:
    return Report(Query(NOVEMBER, by), [UsageLine(group, SUMS) for group in groups], SUMS, **fields)


def parsed(found: Report) -> list[list[str]]:
    return list(csv.reader(io.StringIO("".join(table(found)), newline="")))


def test_json_has_dollars_and_whole_days() -> None:
    found = report(("2026-11-01", "k1"), by=(Dimension.DAY, Dimension.KEY), cut=True, key_names={"k1": "laptop"})

    assert document(found) == {
        "since": "2026-11-01",
        "until": "2026-11-30",
        "by": ["day", "key"],
        "lines": [{"day": "2026-11-01", "key": "k1", "key_name": "laptop", **FIGURES}],
        "total": FIGURES,
        "cut": True,
    }


def test_csv_has_money_with_six_decimals() -> None:
    head, line = parsed(report(("2026-11-01", "k1"), by=(Dimension.DAY, Dimension.KEY), key_names={"k1": "laptop"}))

    assert head == ["day", "key", "key_name", *FIGURES]
    assert line == ["2026-11-01", "k1", "laptop", "4", "1", "100", "20", "40", "0.25", "1.234567", "0.000005", "150.5"]


def test_csv_without_lines_has_the_same_head() -> None:
    by = (Dimension.KEY, Dimension.TIER)

    assert parsed(report(by=by)) == [["key", "key_name", "tier", *FIGURES]]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(text: str) -> None:
    found = report((text, text), by=(Dimension.KEY, Dimension.MODEL), key_names={text: text})

    assert parsed(found)[1][:3] == [f"'{text}"] * 3


@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.text("a=\"',\n\r;")), max_size=5))
def test_csv_reads_back_as_it_was_but_for_apostrophes(groups: list[tuple[str, str]]) -> None:
    rows = parsed(report(*groups, by=(Dimension.MODEL, Dimension.NODE)))

    assert [[cell.removeprefix("'") for cell in row[:2]] for row in rows[1:]] == [
        [cell.removeprefix("'") for cell in group] for group in groups
    ]


def test_a_long_csv_comes_in_pieces() -> None:
    pieces = list(table(report(*((f"m{index}",) for index in range(2000)), by=(Dimension.MODEL,))))

    assert len(pieces) > 2
    assert max(map(len, pieces)) < 40_000


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("day,key", (Dimension.DAY, Dimension.KEY)),
        ("key,day,key", (Dimension.KEY, Dimension.DAY)),
        ("", ()),
        ("tier", (Dimension.TIER,)),
    ],
)
def test_words_to_group_by(text: str, found: tuple[Dimension, ...]) -> None:
    assert dimensions(text) == found


@pytest.mark.parametrize("text", ["days", "day,,key", "day, key", "DAY", ",", " "])
def test_unknown_words_to_group_by_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of day, key") as error:
        dimensions(text)

    assert error.value.args[1] == "by"


def test_an_overspent_budget_has_nothing_left() -> None:
    account = Account(GATEWAY, Budget(2_000_000, Period.MONTH))
    state = BudgetState(account, period_span(Period.MONTH, NOVEMBER.since), spent=1_500_000, held=750_000)

    assert budget_document(state) == {
        "scope": "gateway",
        "period": "month",
        "limit_usd": 2.0,
        "spent_usd": 1.5,
        "held_usd": 0.75,
        "left_usd": 0.0,
        "since": "2026-11-01",
        "resets": "2026-12-01",
        "resets_at": NOVEMBER.until,
    }
