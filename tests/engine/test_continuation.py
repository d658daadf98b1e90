"""Real llama.cpp servers that are killed in the middle of a text: another one goes on, every time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest

from tests.engine.conftest import MODEL, Engine, Hearth, serving, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

KILLS = 20
TOKENS = 60
KILLED_AFTER = 12  # pieces of text


@dataclass
class Told:
    """What a client got of one stream."""

    node: str
    pieces: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    finish: str | None = None
    tokens: int = 0


@pytest.fixture
def never_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines die again and again here, and are to be asked again all the same."""
    monkeypatch.setenv("BREAKER_FAIL_MAX", "0")


async def told(hearth: Hearth, engines: list[Engine], number: int) -> Told:
    """Reads one stream to its end; the engine that began it is killed on the way."""
    async with openai.AsyncOpenAI(base_url=hearth.base_url, api_key="unused", max_retries=0, timeout=120) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Tell me story number {number} of an old house by the sea."}],
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        answer = Told(raw.headers["x-hearth-node"])
        async for chunk in raw.parse():
            answer.ids.add(chunk.id)
            answer.tokens = chunk.usage.completion_tokens if chunk.usage else answer.tokens
            for choice in chunk.choices:
                answer.finish = choice.finish_reason or answer.finish
                if choice.delta.content:
                    answer.pieces.append(choice.delta.content)
            if len(answer.pieces) == KILLED_AFTER:
                victim = next(engine for engine in engines if engine.url.endswith(answer.node))
                await asyncio.to_thread(victim.kill)
    return answer


@pytest.mark.usefixtures("never_left_alone")
async def test_a_text_goes_on_every_time_that_its_engine_is_killed(engines: list[Engine], tmp_path: Path) -> None:
    nodes = [{"url": engine.url, "kind": "llamacpp"} for engine in engines]
    with serving(nodes, tmp_path / "hearth.txt") as hearth:
        for number in range(KILLS):
            answer = await told(hearth, engines, number)

            assert answer.finish == "length", f"stream {number} of {KILLS}"
            assert len(answer.ids) == 1
            assert len(answer.pieces) > KILLED_AFTER
            # A model's text may end in half a character or in white space, of which the tokens are counted anew.
            assert TOKENS - 3 <= answer.tokens <= TOKENS + 3
            before, after = "".join(answer.pieces[:KILLED_AFTER]), "".join(answer.pieces[KILLED_AFTER:])
            assert not after.startswith(before)
            for engine in engines:
                engine.start()
            wait_for(lambda: hearth.states() == ["healthy", "healthy"], 20, "both nodes")

        wait_for(lambda: hearth.in_flight() == 0, 2, "an idle gateway")
