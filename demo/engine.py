"""What a fake node's engine must offer, whatever its dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from demo.httpd import Answer, Part, Received
from demo.script import Reply, Script

Edit = Callable[[Reply], Reply]


def unchanged(reply: Reply) -> Reply:
    return reply


class Engine(Protocol):
    """Answers requests in one dialect."""

    script: Script

    @property
    def busy_status(self) -> int:
        """What it answers when it will not queue another request."""
        ...

    def infers(self, request: Received) -> bool:
        """Whether this request costs the engine work, as opposed to a probe."""
        ...

    async def answer(self, request: Received, edit: Edit = unchanged) -> Answer:
        """The answer to a request; `edit` may change what the model says before it is written down."""
        ...

    def error(self, status: int, message: str | None = None) -> Answer:
        """An answer with this status, in the engine's own shape."""
        ...

    def missing(self, model: str) -> Answer:
        """What it answers when it does not have the model."""
        ...

    def error_parts(self, message: str) -> tuple[Part, ...]:
        """What the engine writes into a stream that has begun when it fails, to the stream's end."""
        ...
