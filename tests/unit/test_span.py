"""Days and periods begin at midnight UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import Period
from app.ledger.span import DAY_MS, day_of, midnight, period_span, span

MOMENTS = st.integers(0, 4_000_000_000_000)


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


NOW = ms("2026-11-18T15:30:00")  # a Wednesday


@pytest.mark.parametrize(
    ("since", "until", "begin", "end"),
    [
        (None, None, "2026-11-01", "2026-11-19"),
        ("2026-11-03", None, "2026-11-03", "2026-11-19"),
        ("2026-11-03", "2026-11-03", "2026-11-03", "2026-11-04"),
        ("1d", None, "2026-11-18", "2026-11-19"),
        ("7d", None, "2026-11-12", "2026-11-19"),
        ("month", None, "2026-11-01", "2026-11-19"),
        ("week", None, "2026-11-16", "2026-11-19"),
        ("day", None, "2026-11-18", "2026-11-19"),
        ("2024-02-28", "2024-02-29", "2024-02-28", "2024-03-01"),
        ("0001-01-01", "9999-12-31", "0001-01-01", None),
    ],
)
def test_words_name_whole_days(since: str | None, until: str | None, begin: str, end: str | None) -> None:
    found = span(since, until, NOW)

    assert day_of(found.since) == begin
    assert end is None or day_of(found.until) == end
    assert found.since % DAY_MS == found.until % DAY_MS == 0


@pytest.mark.parametrize(
    ("since", "until", "name"),
    [
        ("yesterday", None, "since"),
        ("", None, "since"),
        (None, "", "until"),
        ("0d", None, "since"),
        ("20261101", None, "since"),
        ("2026-W01-1", None, "since"),
        ("2026-02-30", None, "since"),
        ("٢٠٢٦-١١-٠١", None, "since"),
        ("2026-11-01T00:00", None, "since"),
        (None, "7d", "until"),
        (None, "2026-13-01", "until"),
        ("2026-11-03", "2026-11-02", "until"),
        ("2027-01-01", None, "until"),
    ],
)
def test_what_is_wrong_is_named(since: str | None, until: str | None, name: str) -> None:
    with pytest.raises(ValueError) as raised:
        span(since, until, NOW)

    assert raised.value.args[1] == name


@pytest.mark.parametrize(
    ("period", "at", "begin", "end"),
    [
        (Period.MONTH, "2026-12-31T23:59:59.999", "2026-12-01", "2027-01-01"),
        (Period.MONTH, "2028-02-29T00:00:00", "2028-02-01", "2028-03-01"),
        (Period.WEEK, "2026-11-15T23:59:59.999", "2026-11-09", "2026-11-16"),
        (Period.WEEK, "2026-11-16T00:00:00", "2026-11-16", "2026-11-23"),
        (Period.DAY, "2026-11-30T00:00:00", "2026-11-30", "2026-12-01"),
    ],
)
def test_a_period_is_the_one_that_the_moment_is_in(period: Period, at: str, begin: str, end: str) -> None:
    found = period_span(period, ms(at))

    assert (found.since, found.until) == (ms(begin), ms(end))


@given(MOMENTS, st.sampled_from(Period))
def test_periods_follow_each_other_without_a_gap(at: int, period: Period) -> None:
    now = period_span(period, at)
    following = period_span(period, now.until)

    assert now.since <= at < now.until
    assert following.since == now.until
    assert period_span(period, now.until - 1) == now


@given(MOMENTS)
def test_a_day_is_named_as_the_calendar_has_it(at: int) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at)

    assert day_of(at) == moment.date().isoformat()
    assert midnight(at) == ms(moment.date().isoformat())
