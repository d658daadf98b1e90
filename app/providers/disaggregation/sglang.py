"""Pairs of SGLang engines, which meet in a room.

Both get the request at once, with the address of the prefill node's bootstrap server and the number of a room there
that nobody else uses. The prefill node pushes its cache to whoever joins the room; the decode node's answer is the
client's. What has not met in time the engines clean up themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from app.domain import Operation
from app.errors import InvalidRequest
from app.providers.base import Call, Outgoing
from app.providers.disaggregation.base import (
    Handoff,
    NodeRequest,
    Prefill,
    PrefillNode,
    answers_wanted,
    prompts_in,
    with_member,
)
from app.providers.disaggregation.bodies import encoded
from app.providers.sglang import KIND

_ROOMS = 2**63


class SGLangPairs:
    """Both at once, so that a failure of either ends both, and each try needs a new room: call `prefill` again.

    `return_logprob` is not completed with the prompt's own log probabilities, which the prefill node alone has.
    """

    concurrent = True
    plain_decode_allowed = False
    skipped: Handoff | None = None

    def __init__(self, room: Callable[[], int] = lambda: secrets.randbelow(_ROOMS)) -> None:
        self._room = room

    def refuse(self, call: Call) -> None:
        if answers_wanted(call.request.fields) > 1 and prompts_in(call.request.fields) > 1:
            raise InvalidRequest(
                "n > 1 for several prompts is not supported when prefill and decode are apart; send them one by one",
                param="n",
            )

    def splits(self, call: Call) -> bool:
        return call.request.operation is not Operation.EMBEDDING

    def link_steps(self, prefill_id: str, decode_id: str) -> None:
        return None

    def drop_steps(self, prefill_id: str, decode_id: str, sessions: Iterable[int]) -> Sequence[Sequence[NodeRequest]]:
        return ()

    def prefill(self, call: Call, node: PrefillNode) -> Prefill:
        fields = call.request.fields
        count = max(answers_wanted(fields), prompts_in(fields))
        host, port = _host(node.id), node.bootstrap_port
        meeting: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": self._room()}
        if count > 1:
            rooms = [self._room() for _ in range(count)]
            meeting = {"bootstrap_host": [host] * count, "bootstrap_port": [port] * count, "bootstrap_room": rooms}
        handoff = Handoff(node.id, encoded(meeting)[1:-1])
        return Prefill(self.decode(call, handoff), handoff)

    def parse_prefill(self, call: Call, node: PrefillNode, reply: bytes) -> Handoff:
        raise NotImplementedError("a prefill node's answer is thrown away here")

    def decode(self, call: Call, handoff: Handoff | None) -> Outgoing:
        return with_member(KIND.translate(call), b"" if handoff is None else handoff.member)

    def abandon(self, handoff: Handoff) -> None:
        return None


def _host(url: str) -> str:
    """The host of a URL, an IPv6 address in brackets."""
    name = urlsplit(url).hostname or ""
    return f"[{name}]" if ":" in name else name
