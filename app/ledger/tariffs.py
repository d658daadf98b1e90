"""What a request costs, in whole micro-dollars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.domain import Price, Usage

_MILLION = 1_000_000
_ALWAYS = -1


class Step(NamedTuple):
    """Micro-dollars per million tokens, for all tokens of a request whose prompt has more than `above` tokens."""

    above: int
    input: int
    output: int
    cached: int


class Tariff:
    """A model's prices at one provider: steps by the length of the prompt, and a fee for every request."""

    __slots__ = ("fee", "steps")

    def __init__(self, steps: Iterable[Step], fee: int = 0) -> None:
        """`fee` is in micro-dollars. Raises ValueError when no step applies to short prompts."""
        self.steps = tuple(sorted(steps))
        self.fee = fee
        if not self.steps or self.steps[0].above != _ALWAYS:
            raise ValueError("a tariff needs a step for every length of a prompt")

    def cost(self, usage: Usage) -> int:
        """What this took, rounded half up. Tokens from a cache count once, at their own price."""
        prompt, completion, cached = usage
        if cached > prompt:
            cached = prompt
        _, input_price, output_price, cached_price = self._step(prompt)
        parts = (prompt - cached) * input_price + cached * cached_price + completion * output_price
        return self.fee + (parts + _MILLION // 2) // _MILLION

    def at_most(self, prompt_tokens: int, completion_tokens: int) -> int:
        """No request with at most so many tokens costs more."""
        reached = [step for step in self.steps if step.above < prompt_tokens] or self.steps[:1]
        dearest_input = max(max(step.input, step.cached) for step in reached)
        dearest_output = max(step.output for step in reached)
        parts = prompt_tokens * dearest_input + completion_tokens * dearest_output
        return self.fee + -(-parts // _MILLION)

    def _step(self, prompt_tokens: int) -> Step:
        for step in reversed(self.steps):
            if prompt_tokens > step.above:
                return step
        return self.steps[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tariff) and (self.steps, self.fee) == (other.steps, other.fee)

    def __hash__(self) -> int:
        return hash((self.steps, self.fee))

    def __repr__(self) -> str:
        return f"Tariff({self.steps!r}, fee={self.fee})"


def flat(price: Price) -> Tariff:
    """The tariff of an operator's figure."""
    cached = price.input if price.cached_input is None else price.cached_input
    return Tariff([Step(_ALWAYS, price.input, price.output, cached)])


FREE = flat(Price(0, 0))
