"""Takes the pictures of the dashboard in docs/pictures: python -m tests.browser.pictures [--seconds 300]

Four nodes under load, of which one goes down, and a cloud that serves what is left over. Everything is a fake that runs
here; the gateway is real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser

from demo.ollama import Model
from tests.browser.browsing import PHONE, Tab, browser, tab
from tests.fakes import FakeCloud, FakeNode, FakeOllama, FakeVLLM
from tests.system.gateway_process import ROOT, GatewayProcess

PICTURES = ROOT / "docs" / "pictures"
CLOUD_KEY = "sk-cloud-key-for-tests-0001"

_GB = 10**9
_LLAMA, _QWEN, _CODER, _EMBED = "llama3.1:8b", "qwen3:14b", "qwen3-coder:30b", "nomic-embed-text:latest"
_SIZES = {_LLAMA: 6.2, _QWEN: 11.4, _CODER: 19.8, _EMBED: 0.6}
_CLIENTS = 9
_AFTERWARDS_SECONDS = 4.0


@dataclass
class House:
    """What a house may have: a tower, a rack, a Mac, a laptop, and somebody else's cloud."""

    tower: FakeOllama
    rack: FakeVLLM
    mac: FakeOllama
    laptop: FakeOllama
    cloud: FakeCloud

    def settings(self) -> dict[str, Any]:
        local: list[tuple[str, str, FakeNode[Any], dict[str, Any]]] = [
            ("gpu-tower", "ollama", self.tower, {"vram_gb": 24, "max_concurrency": 4}),
            ("rack", "vllm", self.rack, {"max_concurrency": 8}),
            ("mac-studio", "ollama", self.mac, {"vram_gb": 48, "max_concurrency": 3}),
            ("laptop", "ollama", self.laptop, {"vram_gb": 8, "max_concurrency": 1}),
        ]
        nodes = [{"name": name, "kind": kind, "url": node.url, **more} for name, kind, node, more in local]
        cloud = {
            "name": "cloud",
            "endpoint": f"{self.cloud.url}/v1",
            "api_key": CLOUD_KEY,
            "models": ["gpt-*"],
            "price": {"input": 2.5, "output": 10},
        }
        return {
            "local_nodes": json.dumps(nodes),
            "cloud_providers": json.dumps([cloud]),
            "model_map": json.dumps({name: {"local": name, "cloud": "gpt-5-mini"} for name in (_LLAMA, _QWEN, _CODER)}),
            "cloud_budget_usd": 1,
            "cloud_max_tokens": 1024,
            "database_url": "sqlite:///hearth.db",
            "health_check_interval": 1,
            "health_check_timeout": 1,
            "log_level": "ERROR",
        }


def _ollama(*models: str, **options: Any) -> FakeOllama:
    sized = [Model(name, size=int(_SIZES[name] * _GB)) for name in models]
    return FakeOllama(sized, **options)


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        yield House(
            tower=await enter(_ollama(_LLAMA, _QWEN, _EMBED, tokens=180, first_seconds=0.12, token_seconds=0.012)),
            rack=await enter(FakeVLLM([_LLAMA], tokens=180, first_seconds=0.06, token_seconds=0.008)),
            mac=await enter(_ollama(_QWEN, _CODER, _EMBED, tokens=180, first_seconds=0.35, token_seconds=0.02)),
            laptop=await enter(_ollama(_LLAMA, tokens=180, first_seconds=0.5, token_seconds=0.035)),
            cloud=await enter(FakeCloud(["gpt-5-mini"], tokens=220, first_seconds=0.4, token_seconds=0.01)),
        )


async def _client(gateway: GatewayProcess) -> None:
    """Asks for ever, as people do: mostly small things, then a pause."""
    while True:
        model = random.choices([_LLAMA, _QWEN, _CODER, "gpt-5-mini"], [58, 22, 12, 8])[0]
        words = " ".join(["word"] * random.randint(20, 900))
        body = {
            "model": model,
            "messages": [{"role": "user", "content": words}],
            "stream": random.random() < 0.9,
            "max_tokens": random.randint(40, 220),
        }
        try:
            await gateway.client.post("/v1/chat/completions", json=body, timeout=60)
        except httpx.TransportError:
            return
        await asyncio.sleep(random.uniform(0.2, 2.5))


async def _take(seconds: float) -> None:
    random.seed(5)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with house() as home, GatewayProcess(Path(folder), **home.settings()) as gateway, browser() as opened:
            await gateway.ready()
            clients = [asyncio.create_task(_client(gateway)) for _ in range(_CLIENTS)]
            try:
                await _picture_all(opened, gateway, home, seconds)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


async def _picture_all(opened: Browser, gateway: GatewayProcess, home: House, seconds: float) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "dashboard": {"viewport": {"width": 1280, "height": 1040}},
        "dashboard-dark": {"viewport": {"width": 1280, "height": 1040}, "color_scheme": "dark"},
        "dashboard-phone": {"viewport": {**PHONE, "height": 1400}},
    }
    async with AsyncExitStack() as stack:
        tabs: dict[str, Tab] = {}
        for name, options in sizes.items():
            tabs[name] = await stack.enter_async_context(tab(opened, **options))
            await tabs[name].open(gateway.url)
            await tabs[name].live()
        await asyncio.sleep(seconds)
        home.laptop.crash()
        await asyncio.sleep(_AFTERWARDS_SECONDS)
        for name, each in tabs.items():
            await each.card("laptop").get_by_text("Down").wait_for()
            path = PICTURES / f"{name}.png"
            await each.page.screenshot(path=path, animations="disabled")
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")
            assert not each.complaints, each.complaints


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.pictures", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="of load; the charts show five minutes")
    asyncio.run(_take(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
