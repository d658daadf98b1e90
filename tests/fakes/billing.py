"""A cloud that writes down what it charges, by its own arithmetic: none of Hearth's is in here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple, cast

from demo.engine import Edit
from demo.httpd import Answer, Part, PartKind, Received, encode
from tests.fakes.kinds import FakeCloud
from tests.fakes.openai import OpenAI


class Fare(NamedTuple):
    """Dollars per million tokens, as decimal numbers."""

    input: str
    output: str
    cached: str

    @property
    def setting(self) -> dict[str, float]:
        """As CLOUD_PRICES has it."""
        return {"input": float(self.input), "output": float(self.output), "cached_input": float(self.cached)}


FARE = Fare("3.7", "101.3", "0.41")  # odd: hardly a request comes to whole micro-dollars


@dataclass(slots=True)
class Bill:
    """What one request came to. `completion` grows while a stream is written."""

    model: str
    prompt: int
    cached: int
    completion: int
    limits: dict[str, Any] = field(default_factory=dict)  # the token limits that came with it

    def micro_dollars(self, fare: Fare = FARE) -> int:
        """Rounded half up."""
        fresh = self.prompt - self.cached
        sums = fresh * Decimal(fare.input) + self.cached * Decimal(fare.cached) + self.completion * Decimal(fare.output)
        return int(sums.to_integral_value(ROUND_HALF_UP))


class _Metered:
    """A stream's parts; each delta goes on the bill once it is written."""

    def __init__(self, parts: Iterable[Part], bill: Bill) -> None:
        self._parts = tuple(parts)
        self._bill = bill

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            yield part
            self._bill.completion += part.kind is PartKind.DELTA


class BillingEngine(OpenAI):
    """Errors are free. What is answered is charged for as far as it was written; a document is whole or not at all."""

    tells_usage = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bills: list[Bill] = []

    def _inferred(self, request: Received, edit: Edit) -> Answer:
        prompts, completions = self.prompt_tokens, self.completion_tokens
        answer = super()._inferred(request, edit)
        prompt, completion = self.prompt_tokens - prompts, self.completion_tokens - completions
        limits = {
            name: value for name, value in request.json.items() if name in ("max_tokens", "max_completion_tokens")
        }
        bill = Bill(
            request.json["model"],
            prompt,
            min(self.cached_tokens, prompt) if completion else 0,
            0 if answer.stream else completion,
            limits,
        )
        self.bills.append(bill)
        parts = answer.parts if self.tells_usage else tuple(_without_usage(answer.parts))
        if answer.stream:
            return replace(answer, parts=cast(tuple[Part, ...], _Metered(parts, bill)))
        return replace(answer, parts=parts)


def _without_usage(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        if part.data.startswith(b"{"):
            document = json.loads(part.data)
            yield replace(part, data=encode({name: value for name, value in document.items() if name != "usage"}))
        elif part.kind is not PartKind.USAGE:
            yield part


class BillingCloud(FakeCloud):
    """A paid API that keeps its bills."""

    engine_type = BillingEngine
    engine: BillingEngine

    @property
    def bills(self) -> list[Bill]:
        return self.engine.bills

    def charged(self, fare: Fare = FARE) -> int:
        """Micro-dollars for all that it served."""
        return sum(bill.micro_dollars(fare) for bill in self.bills)
