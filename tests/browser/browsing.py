"""A browser and its tabs, with everything that went wrong in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright

CHROMIUM = "/usr/bin/chromium"
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1360, "height": 900}

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Tab:
    """A page, what its console said, and where its requests went."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []  # errors and warnings of the console, violations of the policy among them
        self.asked: set[str] = set()  # origins
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._requested)

    async def open(self, url: str) -> None:
        await self.page.goto(f"{url}/dashboard", wait_until="commit")

    async def live(self) -> None:
        await self.page.get_by_role("status").filter(has_text="Live").wait_for()

    def card(self, name: str) -> Any:
        return self.page.get_by_role("listitem").filter(has=self.page.get_by_role("heading", name=name, exact=True))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _requested(self, request: Request) -> None:
        self.asked.add("/".join(request.url.split("/")[:3]))


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield opened
        finally:
            await opened.close()


@asynccontextmanager
async def tab(opened: Browser, **options: Any) -> AsyncIterator[Tab]:
    """A tab of its own, as of a new visitor. Waits are short: a page that is slow is broken."""
    context = await opened.new_context(**{"viewport": DESKTOP, **options})
    context.set_default_timeout(8000)
    try:
        yield Tab(await context.new_page())
    finally:
        await context.close()
