"""How two nodes share one generation, as far as the gateway has a part in it. Sans-I/O throughout.

A *prefill* node reads the prompt and keeps what it computed (the KV cache); a *decode* node fetches that and writes
the answer, which is the client's whole answer. What the gateway carries from one to the other is a `Handoff`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

from app.domain import Failure
from app.errors import NodeFailure
from app.providers.base import Call, Outgoing
from app.providers.disaggregation.bodies import decoded
from app.providers.openai_faults import event_error


class MigrationProtocol(IntEnum):
    """By what LMDeploy's engines move a cache. The values go over the wire."""

    TCP = 1
    RDMA = 2
    NVLINK = 3


class LinkType(IntEnum):
    """What carries RDMA. The values go over the wire."""

    IB = 1
    ROCE = 2


class Migration(NamedTuple):
    """How LMDeploy's engines are told to move caches; the other kinds settle that among themselves."""

    protocol: MigrationProtocol = MigrationProtocol.RDMA
    link_type: LinkType = LinkType.ROCE
    with_gdr: bool = True
    dummy_prefill: bool = False  # no prefill at all: for measuring decode nodes, whose answers mean nothing then


class Side(StrEnum):
    """Which of the two nodes."""

    PREFILL = "prefill"
    DECODE = "decode"


class NodeRequest(NamedTuple):
    """A request to one of the two nodes beside those that generate. The path lies below the node's URL."""

    side: Side
    method: str
    path: str
    body: bytes | None = None


class PrefillNode(NamedTuple):
    """What the other node has to know of the one that reads the prompt."""

    id: str  # its URL, byte for byte as it was registered
    bootstrap_port: int | None = None  # SGLang; None = the engine's default


class Handoff(NamedTuple):
    """What the decode request of one generation must say, and what the prefill node still holds for it."""

    prefill_id: str
    member: bytes = b""  # of the decode request, as JSON text: `"name":value`; empty = an ordinary request
    session: int | None = None  # held by the prefill node until it is fetched or freed; None = none, or unknown
    finished: bool = False  # there is nothing to fetch; the decode request is an ordinary one
    leaks: bool = False  # the prefill node will hold its cache for ever, as nobody can say which it is


class Prefill(NamedTuple):
    """The request for the prefill node. The handoff is there already when both nodes are asked at once."""

    outgoing: Outgoing
    handoff: Handoff | None = None


LinkSteps = Generator[Sequence[NodeRequest], Sequence[bytes], None]


class LinkRefused(NodeFailure):
    """Two nodes cannot be linked. Neither breaker hears of it: each may be well, and pair with others."""

    def __init__(self, prefill_id: str, decode_id: str, why: str) -> None:
        message = f"prefill node {prefill_id} and decode node {decode_id} cannot be linked: {why}"
        super().__init__(Failure.CONNECT, message, counts=False)


class PrefillBroken(NodeFailure):
    """A prefill answer of no use. `abandon`: what frees the cache that the node holds nevertheless."""

    def __init__(self, what: str, abandon: NodeRequest | None = None) -> None:
        super().__init__(Failure.MALFORMED, f"the prefill node sent {what}")
        self.abandon = abandon


class Disaggregation(Protocol):
    """How the nodes of one kind share a generation. One object for all pairs; it keeps nothing about any of them.

    For each generation: `refuse`; if `splits` and `skipped` is None: `prefill`, the node's answer through
    `parse_prefill` (unless the prefill came with a handoff: then both nodes are asked at once and the prefill node's
    answer is read and thrown away), `decode`. Both requests should carry the same x-request-id. Should decode fail
    before it has answered: `decode` on another node with the same handoff, or `abandon` and begin anew.
    """

    concurrent: bool  # both nodes are asked at once
    plain_decode_allowed: bool  # a decode node also serves ordinary requests: `decode(call, None)`
    skipped: Handoff | None  # what decode nodes get in place of all prefills; None = prefill is done

    def refuse(self, call: Call) -> None:
        """Raises `InvalidRequest` for what nodes that share a generation cannot do, whichever they are."""
        ...

    def splits(self, call: Call) -> bool:
        """Whether the call gains from two nodes. If not, ask a decode node with `decode(call, None)`."""
        ...

    def link_steps(self, prefill_id: str, decode_id: str) -> LinkSteps | None:
        """The handshake of a pair; None when this kind needs none.

        Yields requests that may be sent at once and is sent the bodies of their answers (status 200), in that order.
        It raises `LinkRefused` when the two do not fit together. It must be repeated when either node has restarted.
        """
        ...

    def drop_steps(self, prefill_id: str, decode_id: str, sessions: Iterable[int]) -> Sequence[Sequence[NodeRequest]]:
        """What undoes a link and frees the sessions that the prefill node holds for it.

        Requests of one batch may be sent at once. Their answers do not matter: either node may be gone.
        """
        ...

    def prefill(self, call: Call, node: PrefillNode) -> Prefill:
        """The request for the prefill node, whose answer is one document, never a stream."""
        ...

    def parse_prefill(self, call: Call, node: PrefillNode, reply: bytes) -> Handoff:
        """Reads the prefill node's answer (status 200). Raises `NodeFailure` when it is of no use for decode.

        A `PrefillBroken` may come with a request that frees what the node holds. When the handoff is `finished`, the
        prefill node may still hold a session: abandon it, and let a decode node answer.
        """
        ...

    def decode(self, call: Call, handoff: Handoff | None) -> Outgoing:
        """The request for the decode node: the client's, and what the handoff adds. None: an ordinary request."""
        ...

    def abandon(self, handoff: Handoff) -> NodeRequest | None:
        """What frees a cache that no decode node will fetch. None: nothing can, or the node does so by itself."""
        ...


# -- what the kinds share


def with_member(outgoing: Outgoing, member: bytes) -> Outgoing:
    """The request with one more member, all else byte for byte as it was. A member of that name was never in it."""
    if not member:
        return outgoing
    start = outgoing.body.index(b"{") + 1
    return outgoing._replace(body=outgoing.body[:start] + member + b"," + outgoing.body[start:])


def quiet(call: Call) -> Call:
    """The same call for an answer in one document."""
    return call._replace(request=call.request._replace(stream=False))


def wants_one_token(fields: Mapping[str, Any]) -> bool:
    limits = (fields.get("max_completion_tokens"), fields.get("max_tokens"))
    return next((limit for limit in limits if limit is not None), None) == 1


def answers_wanted(fields: Mapping[str, Any]) -> int:
    """The client's `n`, where it is a number."""
    count = fields.get("n")
    return count if type(count) is int else 1


def prompts_in(fields: Mapping[str, Any]) -> int:
    """How many prompts a completion has: a list of tokens is one, a list of texts or of such lists is several."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def object_in(reply: bytes) -> dict[str, Any]:
    """A prefill node's answer. Raises what an error in it means, or `PrefillBroken` when it is no JSON object."""
    try:
        document = decoded(reply)
    except (ValueError, RecursionError) as error:
        raise PrefillBroken("something that is not JSON") from error
    failure = event_error(document, begun=False)
    if failure is not None:
        raise failure
    if not isinstance(document, dict):
        raise PrefillBroken("JSON that is no object")
    return document
