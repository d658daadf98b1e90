"""Pairs of vLLM engines with a connector that pulls, such as NixlConnector.

The engines find each other by what the prefill node puts into `kv_transfer_params`, which differs between versions and
connectors and is carried over whole. What is not fetched the prefill node frees by itself, after 480 s by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from app.domain import Operation
from app.providers.base import Call, Outgoing
from app.providers.disaggregation.base import (
    Handoff,
    NodeRequest,
    Prefill,
    PrefillBroken,
    PrefillNode,
    answers_wanted,
    object_in,
    prompts_in,
    quiet,
    with_member,
)
from app.providers.disaggregation.bodies import GONE, edited, encoded
from app.providers.vllm import KIND

_KEEP: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_LIMIT = "max_completion_tokens"


class VLLMPairs:
    """Prefill first, then decode, which computes the first token anew: the prefill node's is thrown away."""

    concurrent = False
    plain_decode_allowed = True
    skipped: Handoff | None = None

    def refuse(self, call: Call) -> None:
        """Refuses nothing: what cannot be split is served by a decode node alone."""

    def splits(self, call: Call) -> bool:
        """Several answers or prompts are several requests inside the engine, of which one would find its cache."""
        fields = call.request.fields
        if call.request.operation is Operation.EMBEDDING or fields.get("use_beam_search"):
            return False
        return answers_wanted(fields) <= 1 and prompts_in(fields) <= 1

    def link_steps(self, prefill_id: str, decode_id: str) -> None:
        return None

    def drop_steps(self, prefill_id: str, decode_id: str, sessions: Iterable[int]) -> Sequence[Sequence[NodeRequest]]:
        return ()

    def prefill(self, call: Call, node: PrefillNode) -> Prefill:
        outgoing = KIND.translate(quiet(call))
        changes: dict[str, Any] = {
            "kv_transfer_params": _KEEP,
            "stream": False,
            "max_tokens": 1,
            "stream_options": GONE,
            "min_tokens": GONE,
            "min_completion_tokens": GONE,
        }
        if call.request.fields.get(_LIMIT) is not None:
            changes[_LIMIT] = 1
        return Prefill(outgoing._replace(body=edited(outgoing.body, changes)))

    def parse_prefill(self, call: Call, node: PrefillNode, reply: bytes) -> Handoff:
        """`finished` when the node kept nothing, as it does when the model has said all with its first token."""
        params = object_in(reply).get("kv_transfer_params")
        if params is None:
            return Handoff(node.id, finished=True)
        if not isinstance(params, dict):
            raise PrefillBroken("kv_transfer_params that are no object")
        try:
            return Handoff(node.id, b'"kv_transfer_params":' + encoded(params))
        except RecursionError as error:
            raise PrefillBroken("kv_transfer_params that are nested too deeply") from error

    def decode(self, call: Call, handoff: Handoff | None) -> Outgoing:
        return with_member(KIND.translate(call), b"" if handoff is None else handoff.member)

    def abandon(self, handoff: Handoff) -> None:
        return None
