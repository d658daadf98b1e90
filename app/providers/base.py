"""What a kind of node is: how to ask it, how to read its answer, how to probe it. Sans-I/O throughout.

A kind is data plus a few functions. A new one is a module beside this one that defines `KIND`, and one row in
`app.providers.KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from app.domain import EngineLoad, LoadedModel, ModelInfo, NodeState, Operation, Request, Timings, Usage


class Call(NamedTuple):
    """What one attempt asks of a node."""

    request: Request
    model: str  # the node's own name for it
    num_ctx: int | None = None
    capabilities: frozenset[str] | None = None  # of the model on that node; None = unknown
    output_limit: int | None = None  # tokens, where the client set no limit
    reasoning_content: bool = False  # also give reasoning under the name `reasoning_content`
    goes_on: bool = False  # another node began the answer, and the request ends with what it wrote


class Outgoing(NamedTuple):
    """The HTTP request for a node: a path below the node's URL, and a JSON body."""

    path: str
    body: bytes


class Answer(Protocol):
    """Turns a node's answer into the client's bytes. One object per attempt.

    Any split of the input gives the same output, joined.
    `feed` and `finish` raise `NodeFailure` when the answer is broken, and `RequestRefused` when the node says in it
    that the request was wrong.
    """

    content_type: bytes  # of what the client gets
    begun: bool  # the output so far holds content, so that the answer may be committed
    ended: bool  # the node has said all; reading may stop
    usage: Usage | None
    finish_reason: str | None
    timings: Timings | None  # what the node says of its speed, with the usage

    def feed(self, data: bytes) -> bytes:
        """Takes the next bytes from the node and returns whole events for the client, or b"" for none yet."""
        ...

    def finish(self) -> bytes:
        """Takes the end of the node's answer; returns what is left: the end of a stream, or the whole document."""
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """What a health probe says."""

    state: NodeState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Signature:
    """A GET that only this kind answers in this way. `matches` gets the status and the decoded JSON, or None."""

    path: str
    matches: Callable[[int, Any], bool]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A GET, not there on every node, whose answer says how busy the engine is. `read` gets the body of an answer of
    status 200, and raises ValueError when that says nothing of it."""

    path: str
    read: Callable[[bytes], EngineLoad]
    tells: frozenset[str]  # fields of `EngineLoad`: it is not asked when all of them are known
    constant: bool = False  # what it tells does not change while the engine runs
    stirs: bool = False  # the engine takes the question for work: it stays awake for it, and wakes up


@dataclass(frozen=True, slots=True)
class Probe:
    """How to see, without cost, that a node is up and what it serves. Paths are below the node's URL."""

    health_path: str
    models_path: str
    health: Callable[[int, Any], Health]  # status, decoded JSON or None
    models: Callable[[Any], list[ModelInfo]]  # raises ValueError when the document is not such a list
    loaded_path: str | None = None
    loaded: Callable[[Any], list[LoadedModel]] | None = None
    gauges: tuple[Gauge, ...] = ()  # in the order in which they are asked


@dataclass(frozen=True, slots=True)
class Prefix:
    """How one kind is told that the last message of a chat is the start of its answer.

    `reasoning` are the names under which that message may hold the thoughts before it. `no_thinking` goes to the chat
    template, so that the node does not begin with thoughts anew: where there were some, or else `always`.
    """

    by_itself: bool = False  # a last message of the assistant is always gone on with, whoever wrote it
    fields: Mapping[str, Any] = field(default_factory=dict)
    message: Mapping[str, Any] = field(default_factory=dict)
    reasoning: tuple[str, ...] = ()
    no_thinking: Mapping[str, Any] = field(default_factory=dict)
    always: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """How to speak to one kind of node.

    `refusal` turns a status other than 200 into the exception to raise: `RequestRefused` when the request was
    wrong, else `NodeFailure`. Header names arrive in lower case.
    """

    name: str
    title: str
    translate: Callable[[Call], Outgoing]  # raises InvalidRequest for what this kind cannot do
    answer: Callable[[Call], Answer]
    refusal: Callable[[int, Mapping[str, str], bytes], Exception]
    probe: Probe
    signatures: tuple[Signature, ...] = field(default=())
    # Makes the node load a model (its own name, for what, num_ctx) without asking it for anything.
    load: Callable[[str, Operation, int | None], Outgoing] | None = None
    cloud: bool = False
    takes_num_ctx: bool = False  # a request says how large the context is to be
    names_have_tags: bool = False  # Ollama's model names: `m` = `m:latest`, case-insensitive
    # How the node at this URL goes on with an answer that another one began; None = it does not know how.
    prefix: Callable[[str], Prefix | None] = lambda url: None
    continues_prompts: bool = False  # a completion goes on where its prompt ends, in the middle of an answer too
