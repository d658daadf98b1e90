"""The dashboard in a real browser: Debian's Chromium, headless."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser

from tests.browser.browsing import CHROMIUM, Tab, browser, tab


@pytest.fixture(scope="session", autouse=True)
def chromium_is_there() -> None:
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"there is no {CHROMIUM} (Debian: apt-get install chromium)")


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as opened:
        yield opened


@pytest.fixture
async def page(chromium: Browser) -> AsyncIterator[Tab]:
    """A tab on a desktop."""
    async with tab(chromium) as opened:
        yield opened
