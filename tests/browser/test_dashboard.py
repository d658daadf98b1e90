"""The dashboard as a person meets it. The gateway is real, and so is the browser."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from tests.browser.browsing import PHONE, Tab, tab
from tests.fakes import FakeCloud, FakeLlamaCpp, FakeNode, FakeOllama, FakeVLLM, Model
from tests.system.gateway_process import ROOT, GatewayProcess
from tests.system.harness import Gateway, gateway, node_settings, used_by_others

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "an-admin-key"
CLOUD_KEY = "sk-cloud-key-for-tests-0001"
OUTAGE = re.compile("Failed to load resource: (net::ERR_|the server responded with a status of 401)")


def _cloud(cloud: FakeCloud) -> dict[str, Any]:
    return {"cloud_endpoint": f"{cloud.url}/v1", "cloud_api_key": CLOUD_KEY, "cloud_model": "gpt-4o-mini"}


@asynccontextmanager
async def shown(page: Tab, *nodes: FakeNode[Any], **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway whose dashboard is open."""
    async with gateway(*nodes, **settings) as hearth:
        await page.open(hearth.url)
        try:
            yield hearth
        finally:
            await page.page.goto("about:blank")  # or the gateway would wait for its viewer


async def test_it_shows_nodes_and_who_served_a_request(page: Tab) -> None:
    async with FakeOllama([Model("m:latest", size=6_200_000_000)]) as ollama, FakeVLLM(["big"]) as vllm:
        async with shown(page, ollama, vllm) as hearth:
            await page.live()
            await hearth.chat("m", stream=True)

            row = page.page.get_by_role("row").filter(has=page.page.get_by_role("cell", name="n0 local"))
            await expect(row).to_contain_text("only candidate")
            await expect(page.card("n0")).to_contain_text("Healthy")
            await expect(page.card("n0")).to_contain_text("m:latest 5.8 GiB")
            await expect(page.card("n1")).to_contain_text("vllm")
            assert page.complaints == []
            assert page.asked == {hearth.url}


async def test_it_shows_the_slots_of_an_engine_and_what_others_do_there(page: Tab) -> None:
    async with FakeLlamaCpp(["m"], first_seconds=30) as node:
        async with shown(page, node, health_check_interval=0.1) as hearth:
            async with used_by_others(node, 2):
                own = asyncio.create_task(hearth.chat("m"))

                await expect(page.card("n0")).to_contain_text("1 of 4, and 2 from elsewhere")
                own.cancel()
                await asyncio.gather(own, return_exceptions=True)
            assert page.complaints == []


async def test_it_says_why_the_cloud_served(page: Tab) -> None:
    async with FakeOllama(["m"]) as node, FakeCloud() as cloud:
        async with shown(page, node, **_cloud(cloud), breaker_fail_max=0) as hearth:
            await page.live()
            node.crash()
            await hearth.chat("m")

            row = page.page.get_by_role("row").filter(has=page.page.get_by_role("cell", name=re.compile("cloud$")))
            await expect(row).to_contain_text(re.compile("n0: connect error; so the cloud|no local node could"))


async def test_a_node_that_goes_down_is_shown_within_three_seconds(page: Tab) -> None:
    async with FakeOllama(["m"]) as node:
        async with shown(page, node, health_check_interval=1):
            await expect(page.card("n0")).to_contain_text("Healthy")
            node.crash()
            began = time.monotonic()

            await expect(page.card("n0")).to_contain_text("Down", timeout=3000)
            assert time.monotonic() - began < 3
            await expect(page.page.locator("[aria-live=polite]").last).to_contain_text("n0: Down, connection refused")
            assert await page.page.title() == "(1 down) Hearth"
            assert page.complaints == []


@pytest.mark.timeout(120)
async def test_it_survives_a_restart_of_the_gateway(page: Tab, tmp_path: Path) -> None:
    async with FakeOllama(["m"]) as node:
        settings: dict[str, Any] = {"local_nodes": node_settings(node), "admin_keys": KEY}
        async with GatewayProcess(tmp_path, **settings) as hearth:
            await hearth.ready()
            await page.open(hearth.url)
            await _log_in(page)
            await page.live()
            began = time.monotonic()
            hearth.signal(signal.SIGTERM)
            await expect(page.page.get_by_role("alert").first).to_contain_text("The connection to Hearth is lost")
            await hearth.ended()
            assert time.monotonic() - began < 5, "viewers hold up the end"
            await hearth.start()
            await hearth.serving()

            await expect(page.page.get_by_role("status")).to_have_text("Live", timeout=10_000)
            await expect(page.page.get_by_role("alert").first).to_be_hidden()
            await expect(page.card("n0")).to_contain_text("Healthy")
            assert [text for text in page.complaints if not OUTAGE.match(text)] == []


async def test_with_admin_keys_it_wants_one(page: Tab) -> None:
    async with FakeOllama(["m"]) as node:
        async with shown(page, node, admin_keys=KEY):
            field = page.page.get_by_label("Admin key")
            await field.fill("wrong")
            await field.press("Enter")
            await expect(page.page.get_by_text("This is none of the admin keys.")).to_be_visible()
            await expect(page.page.get_by_role("heading", name="Nodes")).to_be_hidden()
            await _log_in(page)
            await page.live()

            await page.page.get_by_role("button", name="Drain n0").click()
            await expect(page.card("n0")).to_contain_text("Drained")
            (cookie,) = await page.page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
            await page.page.get_by_role("button", name="Log out").click()
            await expect(field).to_be_visible()
            assert await page.page.context.cookies() == []
            assert [text for text in page.complaints if not OUTAGE.match(text)] == []


async def test_its_buttons_drain_and_enable_by_keyboard(page: Tab) -> None:
    async with FakeOllama(["m"]) as first, FakeOllama(["m"]) as second:
        async with shown(page, first, second) as hearth:
            await page.live()
            await _tab_to(page, "Drain n1")
            await page.page.keyboard.press("Enter")
            await expect(page.card("n1")).to_contain_text("Drained")
            assert (await hearth.nodes())["n1"]["draining"]
            assert await _focused(page) == "Enable n1", "the focus must stay where it is"
            await page.page.keyboard.press("Space")

            await expect(page.card("n1")).to_contain_text("Healthy")
            assert not (await hearth.nodes())["n1"]["draining"]


async def test_a_button_that_did_nothing_says_so_until_it_does(page: Tab) -> None:
    """What came of a press is told for longer than the second until the next snapshot."""
    async with FakeOllama(["m"]) as node:
        async with shown(page, node) as hearth:
            await page.live()
            banner = page.page.get_by_role("alert").first
            await page.page.route("**/drain", lambda route: route.fulfill(status=404, json=_error("it has left")))
            await page.page.get_by_role("button", name="Drain n0").click()
            await expect(banner).to_have_text("n0 could not be drained: it has left")
            for count in (1, 2):
                await hearth.chat("m")
                await expect(page.page.locator("#requests tr")).to_have_count(count)
            await expect(banner).to_have_text("n0 could not be drained: it has left")
            await page.page.unroute("**/drain")
            await page.page.get_by_role("button", name="Drain n0").click()

            await expect(page.card("n0")).to_contain_text("Drained")
            await expect(banner).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_used_by_everybody(chromium: Browser, scheme: Any) -> None:
    """On a phone, in the dark, and by ear: no sideways scrolling, names and landmarks, and contrast."""
    async with FakeOllama(["a-model-with-a-name-that-is-much-longer-than-a-phone-is-wide:70b-instruct-q4"]) as node:
        async with FakeCloud() as cloud, gateway(node, **_cloud(cloud)) as hearth:
            async with tab(chromium, viewport=PHONE, color_scheme=scheme, has_touch=True) as phone:
                await phone.open(hearth.url)
                await phone.live()
                await hearth.chat("a-model-with-a-name-that-is-much-longer-than-a-phone-is-wide:70b-instruct-q4")
                await hearth.chat("gpt-4o-mini")
                await expect(phone.page.locator("#requests tr")).to_have_count(2)
                found = await phone.page.evaluate(_EXAMINE)

                assert found == {"wide": False, "nameless": [], "faint": [], "landmarks": ["HEADER", "MAIN"]}
                assert await phone.page.evaluate("document.documentElement.lang") == "en"


async def test_pausing_holds_the_requests_still(page: Tab) -> None:
    async with FakeOllama(["m"]) as node:
        async with shown(page, node) as hearth:
            await page.live()
            await page.page.get_by_role("button", name="Pause").click()
            await hearth.chat("m")
            await expect(page.page.get_by_text("Paused · 1 new")).to_be_visible()
            assert await page.page.locator("#requests tr").count() == 0
            await page.page.get_by_role("button", name="Pause").click()

            await expect(page.page.locator("#requests tr")).to_have_count(1)


async def test_its_policy_forbids_what_it_does_not_need(page: Tab) -> None:
    """The policy works: a script that somebody got into the page would not run."""
    async with shown(page):
        await page.live()
        with pytest.raises(Exception, match="TrustedHTML"):
            await page.page.evaluate("document.body.innerHTML = '<img src=x onerror=alert(1)>'")


async def test_every_file_of_the_page_is_small_and_its_own() -> None:
    files = {path.name: path.read_text() for path in (ROOT / "app" / "dashboard").iterdir()}

    assert sum(map(len, files.values())) < 80_000
    assert not [name for name, text in files.items() if re.search(r"https?://(?!www\.w3\.org/)", text)]


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "not_found_error", "param": None, "code": "not_found"}}


async def _log_in(page: Tab) -> None:
    await page.page.get_by_label("Admin key").fill(KEY)
    await page.page.get_by_role("button", name="Log in").click()


async def _focused(page: Tab) -> str:
    return str(await page.page.evaluate("document.activeElement.textContent"))


async def _tab_to(page: Tab, name: str) -> None:
    for _ in range(30):
        await page.page.keyboard.press("Tab")
        if await _focused(page) == name:
            return
    raise AssertionError(f"the keyboard does not reach '{name}'")


# Colours are compared as WCAG 2.2 says (1.4.3); text that nobody sees is left out.
_EXAMINE = """() => {
  const seen = (element) => element.checkVisibility() && !element.closest('.visually-hidden, .skip');
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = channels(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const contrast = (element) => {
    const style = getComputedStyle(element);
    const text = channels(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [high, low] = [light(text), light(behind(element))].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const named = (element) => element.textContent.trim() || element.ariaLabel || element.labels?.length;
  for (const animation of document.getAnimations()) animation.finish();
  return {
    wide: document.documentElement.scrollWidth > window.innerWidth,
    nameless: [...document.querySelectorAll('button, input, a, [role=img], img')]
      .filter((element) => !named(element) && !element.getAttribute('aria-label') && element.alt !== '')
      .map((element) => element.outerHTML.slice(0, 80)),
    faint: [...document.body.querySelectorAll('*')]
      .filter((element) => seen(element) && own(element) && contrast(element) < 4.5)
      .map((element) => `${element.className} ${element.textContent.slice(0, 40)} ${contrast(element).toFixed(2)}`),
    landmarks: [...document.querySelectorAll('header, main')].filter(seen).map((element) => element.tagName),
  };
}"""
