"""Nodes that misbehave in every way that we know, of every kind: another one answers, or the client is told.

What must never happen: a hang, a 500, a leaked connection or slot, or half an answer that looks whole.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import KINDS, Behaviour, FakeNode, Stage, stage
from tests.system.harness import gateway, until
from tests.system.reading import read

LOCAL_KINDS = [name for name in KINDS if name != "cloud"]
# The request was wrong, says the node: nobody else is asked.
REFUSALS = {Behaviour.STATUS_400: 400}
TEXT = "häufig 😀 ok "
IMPATIENT = {"first_token_timeout": 1, "idle_timeout": 1, "request_timeout": 8, "breaker_fail_max": 0}


def _node(kind: str) -> FakeNode[Any]:
    return KINDS[kind](models=["m"], text=TEXT)


@pytest.mark.parametrize("behaviour", [b for b in Behaviour if b is not Behaviour.OK])
@pytest.mark.parametrize("kind", LOCAL_KINDS)
async def test_a_hostile_node_costs_no_answer_that_has_not_begun(kind: str, behaviour: Behaviour) -> None:
    async with _node(kind) as bad, _node(kind) as good:
        settings = {**IMPATIENT, "lb_strategy": "round_robin", "health_check_interval": 60}
        async with gateway(bad, good, **settings) as hearth:
            expected = TEXT
            for stream in (True, False):
                bad.behave(behaviour)
                asked = len(good.inferences)

                answer = read(await hearth.chat(stream=stream))

                reached = stage(behaviour, stream=stream, ollama=kind == "ollama")
                if kind == "transformers" and behaviour is Behaviour.NO_FINISH_REASON and stream:
                    reached = Stage.SOME  # it never sends [DONE], so that nothing says that the answer is whole
                if behaviour in REFUSALS:
                    assert answer.status == REFUSALS[behaviour]
                    assert answer.error
                    assert len(good.inferences) == asked
                elif behaviour is Behaviour.TOOL_INDEX_ZERO or behaviour is Behaviour.HUGE_LINE:
                    assert answer.whole
                elif reached is Stage.SOME and not answer.whole:
                    # Whole all the same: when the fault comes in one read with the first content, so that another
                    # node could answer, or after the finish reason, so that only the formal end was missing.
                    assert answer.status == 200
                    assert answer.error
                    assert not answer.finish_reasons
                    assert expected.startswith(answer.text)
                else:
                    assert answer.whole, answer
                    assert answer.text == expected
                    if reached is not Stage.SOME:
                        assert answer.headers["x-hearth-node"] == ("n0" if reached is Stage.ALL else "n1")
                # The next round begins with the hostile node again.
                await until(lambda: bad.open == 0, "the hostile node is free")
                if len(good.inferences) == asked:
                    bad.recover()
                    await hearth.chat()
            assert await hearth.in_flight() == 0
            assert not [line for line in hearth.lines.all if line["event"] == "bug"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "document"])
@pytest.mark.parametrize("behaviour", [b for b in Behaviour if b is not Behaviour.OK])
async def test_a_hostile_node_that_is_alone_gives_a_clean_error_and_no_hang(behaviour: Behaviour, stream: bool) -> None:
    settings = {**IMPATIENT, "max_attempts": 2, "health_check_interval": 60}
    async with _node("ollama") as bad, gateway(bad, **settings) as hearth:
        bad.behave(behaviour)

        answer = read(await hearth.chat(stream=stream))

        if not answer.whole:
            assert answer.status != 500
            assert answer.error
            assert answer.error["message"]
        await until(lambda: bad.open == 0, "the node is free")
        assert await hearth.in_flight() == 0
