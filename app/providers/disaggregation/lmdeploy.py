"""Pairs of LMDeploy engines (its "DistServe").

The gateway introduces the engines to each other before a pair's first generation. An engine knows another by its id,
which is the URL that it was registered under, in every message byte for byte the same: it is a key in both engines,
and its host is the address that an engine opens its own socket on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from app.domain import Operation
from app.errors import InvalidRequest
from app.providers.base import Call, Outgoing
from app.providers.disaggregation.base import (
    Handoff,
    LinkRefused,
    LinkSteps,
    Migration,
    NodeRequest,
    Prefill,
    PrefillBroken,
    PrefillNode,
    Side,
    answers_wanted,
    object_in,
    prompts_in,
    quiet,
    wants_one_token,
    with_member,
)
from app.providers.disaggregation.bodies import decoded, edited, encoded
from app.providers.lmdeploy import KIND

ENGINE_INFO = "/distserve/engine_info"
INITIALIZE = "/distserve/p2p_initialize"
CONNECT = "/distserve/p2p_connect"
DROP = "/distserve/p2p_drop_connect"
FREE = "/distserve/free_cache"

_UNKNOWN_SESSION = -1  # not 0, which may be the session of somebody else
_DUMMY_ID = "dummy:dummy"
_SUCCESS = 1
_LIMIT = 2**63  # the engines' integers are smaller
_SAME_ON_BOTH = ("tp_size", "block_size")  # the decode engine's migration loop dies of a difference


class LMDeployPairs:
    """Prefill first, then decode, which emits the prefill node's token as its own first.

    A session that is not fetched is held until it is freed by its id. Engines from 0.15 on do not tell the id
    (InternLM/lmdeploy#4967), unless they answer with `cache_session_id` (InternLM/lmdeploy#4977): the generation works
    without, but the prefill node never gets its memory back.
    """

    concurrent = False
    plain_decode_allowed = True

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self.skipped = self._handoff(_DUMMY_ID, 0, 0, [], dummy=True) if migration.dummy_prefill else None

    def refuse(self, call: Call) -> None:
        if answers_wanted(call.request.fields) > 1:
            raise InvalidRequest("n > 1 is not supported with the DistServe serving strategy.", param="n")
        if prompts_in(call.request.fields) > 1:
            # One list of blocks would come back for all of them.
            raise InvalidRequest(
                "more than one prompt is not supported with the DistServe serving strategy.", param="prompt"
            )

    def splits(self, call: Call) -> bool:
        return call.request.operation is not Operation.EMBEDDING and not wants_one_token(call.request.fields)

    # -- links

    def link_steps(self, prefill_id: str, decode_id: str) -> LinkSteps:
        pair = _Pair(prefill_id, decode_id)
        replies = yield [NodeRequest(side, "GET", ENGINE_INFO) for side in Side]
        configs = [_object(pair, side, ENGINE_INFO, reply) for side, reply in zip(Side, replies, strict=True)]
        for name in _SAME_ON_BOTH:
            _check_same(pair, name, configs[0].get(name), configs[1].get(name))
        replies = yield self._initialize(pair, configs[0], configs[1])
        prefill, decode = (_endpoint(pair, side, reply) for side, reply in zip(Side, replies, strict=True))
        replies = yield self._connect(pair, prefill, decode)
        for side, reply in zip(Side, replies, strict=True):
            _check_status(pair, side, CONNECT, _object(pair, side, CONNECT, reply))

    def _initialize(self, pair: _Pair, prefill: Any, decode: Any) -> Sequence[NodeRequest]:
        rdma = {"with_gdr": self._migration.with_gdr, "link_type": int(self._migration.link_type)}
        configs = {Side.PREFILL: prefill, Side.DECODE: decode}
        return [
            _post(
                side,
                INITIALIZE,
                {
                    "local_engine_id": pair.id(side),
                    "local_engine_config": configs[side],
                    "remote_engine_id": pair.id(_other(side)),
                    "remote_engine_config": configs[_other(side)],
                    "protocol": int(self._migration.protocol),
                    "rank": None,
                    "tcp_config": None,
                    "rdma_config": rdma,
                    "nvlink_config": None,
                },
            )
            for side in Side
        ]

    def _connect(self, pair: _Pair, prefill: _Endpoint, decode: _Endpoint) -> Sequence[NodeRequest]:
        endpoints = {Side.PREFILL: prefill, Side.DECODE: decode}
        return [
            _post(
                side,
                CONNECT,
                {
                    "protocol": int(self._migration.protocol),
                    "remote_engine_id": pair.id(_other(side)),
                    "remote_engine_endpoint_info": endpoints[_other(side)].engine,
                    "remote_kvtransfer_endpoint_info": endpoints[_other(side)].transfer,
                },
            )
            for side in Side
        ]

    def drop_steps(self, prefill_id: str, decode_id: str, sessions: Iterable[int]) -> Sequence[Sequence[NodeRequest]]:
        pair = _Pair(prefill_id, decode_id)
        frees = [_free(prefill_id, session) for session in sessions]
        drops = [
            _post(side, DROP, {"engine_id": pair.id(side), "remote_engine_id": pair.id(_other(side))}) for side in Side
        ]
        return [frees, drops] if frees else [drops]

    # -- generations

    def prefill(self, call: Call, node: PrefillNode) -> Prefill:
        outgoing = KIND.translate(quiet(call))
        changes: dict[str, Any] = {"max_tokens": 1, "stream": False, "with_cache": True, "preserve_cache": True}
        if call.request.operation is Operation.CHAT:
            changes["max_completion_tokens"] = 1
        return Prefill(outgoing._replace(body=edited(outgoing.body, changes)))

    def parse_prefill(self, call: Call, node: PrefillNode, reply: bytes) -> Handoff:
        """`finished` when the model has said all with its first token: there is nothing then to go on from."""
        document = object_in(reply)
        session = _session(document)
        if wants_one_token(call.request.fields) or _stopped(document):
            return self._ended(node.id, session)
        blocks, tokens = document.get("cache_block_ids"), document.get("remote_token_ids")
        if not (_are_numbers(blocks) and _are_numbers(tokens)):
            # Never to be sent on: a wrong list of blocks ends the decode engine's loop (InternLM/lmdeploy#4965).
            what = "cache_block_ids" if not _are_numbers(blocks) else "remote_token_ids"
            raise PrefillBroken(f"an answer without {what}", None if session is None else _free(node.id, session))
        return self._handoff(node.id, session, tokens[-1], blocks)

    def decode(self, call: Call, handoff: Handoff | None) -> Outgoing:
        return with_member(KIND.translate(call), b"" if handoff is None else handoff.member)

    def abandon(self, handoff: Handoff) -> NodeRequest | None:
        return None if handoff.session is None else _free(handoff.prefill_id, handoff.session)

    def _handoff(
        self, prefill_id: str, session: int | None, token: int, blocks: list[int], *, dummy: bool = False
    ) -> Handoff:
        migration = {
            "protocol": int(self._migration.protocol),
            "remote_engine_id": prefill_id,
            "remote_session_id": _UNKNOWN_SESSION if session is None else session,
            "remote_token_id": token,
            "remote_block_ids": blocks,
            "is_dummy_prefill": dummy,
        }
        member = b'"migration_request":' + encoded(migration)
        return Handoff(prefill_id, member, None if dummy else session, leaks=session is None)

    def _ended(self, prefill_id: str, session: int | None) -> Handoff:
        return Handoff(prefill_id, session=session, finished=True, leaks=session is None)


class _Pair(NamedTuple):
    prefill: str
    decode: str

    def id(self, side: Side) -> str:
        return self.prefill if side is Side.PREFILL else self.decode


class _Endpoint(NamedTuple):
    """How an engine can be reached by its peer; what is in it is their own affair."""

    engine: Any
    transfer: Any


def _other(side: Side) -> Side:
    return Side.DECODE if side is Side.PREFILL else Side.PREFILL


def _post(side: Side, path: str, body: Mapping[str, Any]) -> NodeRequest:
    return NodeRequest(side, "POST", path, encoded(body))


def _free(prefill_id: str, session: int) -> NodeRequest:
    return _post(Side.PREFILL, FREE, {"remote_engine_id": prefill_id, "remote_session_id": session})


# -- answers to the handshake


def _check_same(pair: _Pair, name: str, prefill: Any, decode: Any) -> None:
    if type(prefill) is not int or type(decode) is not int:
        raise LinkRefused(*pair, f"{name} is {prefill!r} on one and {decode!r} on the other, which are no numbers")
    if prefill != decode:
        raise LinkRefused(*pair, f"{name} is {prefill} on the one and {decode} on the other; start both with the same")


def _endpoint(pair: _Pair, side: Side, reply: bytes) -> _Endpoint:
    document = _object(pair, side, INITIALIZE, reply)
    _check_status(pair, side, INITIALIZE, document)
    engine, transfer = document.get("engine_endpoint_info"), document.get("kvtransfer_endpoint_info")
    if not engine or not transfer:
        raise LinkRefused(*pair, f"the {side} node did not say at {INITIALIZE} how it can be reached")
    return _Endpoint(engine, transfer)


def _check_status(pair: _Pair, side: Side, path: str, document: Mapping[str, Any]) -> None:
    if document.get("status") != _SUCCESS:
        raise LinkRefused(*pair, f"the {side} node reported at {path} that it failed")


def _object(pair: _Pair, side: Side, path: str, reply: bytes) -> dict[str, Any]:
    """An engine's answer: an object, or, as the engines describe themselves, the text of one in a JSON string."""
    try:
        value = decoded(reply)
        value = decoded(value.encode()) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise LinkRefused(*pair, f"the {side} node answered {path} with something that is not JSON") from error
    if not isinstance(value, dict):
        raise LinkRefused(*pair, f"the {side} node answered {path} with JSON that is no object")
    return value


# -- answers to prefill


def _session(document: Mapping[str, Any]) -> int | None:
    """The engine's number for what it holds, where it tells it.

    Old engines give it as the answer's id. Newer ones have there something like `chatcmpl-x`, or -1.
    """
    number = document.get("cache_session_id")
    if _is_number(number):
        return number
    name = document.get("id")
    if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 19:
        return int(name)
    return None


def _stopped(document: Mapping[str, Any]) -> bool:
    choices = document.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and first.get("finish_reason") == "stop"


def _are_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LIMIT
