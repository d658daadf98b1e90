"""When a key ends, as people write it."""

from __future__ import annotations

import pytest

from app.commands.keys import expiry
from app.commands.terminal import Refused

NOW = 1_800_000_000_000
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("written", "moment"),
    [
        ("12h", NOW + 12 * HOUR),
        ("30d", NOW + 30 * 24 * HOUR),
        ("4w", NOW + 28 * 24 * HOUR),
        ("2027-01-31", 1_801_353_600_000),
        ("2027-01-31T01:00+01:00", 1_801_353_600_000),
        ("2027-01-31 00:00:00.5", 1_801_353_600_500),
    ],
)
def test_a_time_from_now_or_a_date(written: str, moment: int) -> None:
    assert expiry(written, NOW) == moment


@pytest.mark.parametrize("written", ["", "30", "d", "0d", "-1d", "30 d", "1y", "2027-02-30", "tomorrow"])
def test_anything_else_is_refused(written: str) -> None:
    with pytest.raises(Refused, match="--expires"):
        expiry(written, NOW)
