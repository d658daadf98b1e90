"""The dashboard in a real browser: Debian's Chromium, headless."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.browser.browsing import CHROMIUM, Tab, browser, tab


@pytest.fixture(scope="session", autouse=True)
def chromium_is_there() -> None:
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"there is no {CHROMIUM} (Debian: apt-get install chromium)")
    expect.set_options(timeout=10_000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """One for all tests of a module, which share its event loop: each of them has a tab of its own."""
    async with browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def page(chromium: Browser) -> AsyncIterator[Tab]:
    """A tab on a desktop."""
    async with tab(chromium) as opened:
        yield opened
