"""Plain values that all layers share. No I/O, and nothing imported from outside the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

LOCAL_TIER = 0
MICRO_DOLLARS = 1_000_000  # in a dollar
GIB = 2**30  # bytes
WEIGHT_MAX = 1000  # of a key


class Operation(StrEnum):
    """What a client asks for, whatever the dialect."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"


class Outcome(StrEnum):
    """How an attempt ended; exactly one per attempt."""

    OK = "ok"
    REFUSED = "refused"  # the request was wrong
    FAILED = "failed"  # the node broke
    ABANDONED = "abandoned"  # the client left


class Failure(StrEnum):
    """Why a node failed an attempt. The values are metric labels and the `x-hearth-fallback` header."""

    CONNECT = "connect_error"
    CONNECT_TIMEOUT = "connect_timeout"
    DISCONNECTED = "disconnected"  # closed or reset before it answered
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    DEADLINE = "request_timeout"
    BUSY = "busy"
    SERVER_ERROR = "server_error"
    AUTH = "node_auth"  # the node refused Hearth's own key for it
    MODEL_MISSING = "model_missing"
    CONTEXT_TOO_SMALL = "context_length_exceeded"  # the prompt does not fit there
    EMPTY = "empty_answer"
    MALFORMED = "malformed_answer"
    ERROR_EVENT = "error_event"  # an error object where content was expected
    CUT = "cut"  # ended in the middle of its answer
    NOT_CONTINUED = "not_continued"  # did not go on with what another node had begun


class NodeState(StrEnum):
    """What probes last said of a node."""

    UNKNOWN = "unknown"  # not reached yet
    JOINING = "joining"  # has registered, and is not ready yet
    HEALTHY = "healthy"
    LOADING = "loading"  # up, but its engine is not ready
    SLEEPING = "sleeping"
    DOWN = "down"


class Priority(StrEnum):
    """Who has the first turn of those who wait for a node; the first comes first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Period(StrEnum):
    """How long a budget lasts. Periods begin at midnight UTC; weeks on Monday."""

    MONTH = "month"
    WEEK = "week"
    DAY = "day"


class Budget(NamedTuple):
    """What may be spent in the cloud in one period. `limit` is in micro-dollars."""

    limit: int
    period: Period = Period.MONTH


class Rate(NamedTuple):
    """How much may be asked for in a minute; None = any amount."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class QueueRules(NamedTuple):
    """How requests of a route wait; None = as set for all."""

    size: int | None = None  # requests that may wait
    timeout_seconds: float | None = None
    priority: Priority | None = None  # of those whose key states none
    keep_alive_seconds: float | None = None  # without an answer, before a stream is kept alive; 0 = never


NO_RULES = QueueRules()


class Price(NamedTuple):
    """Micro-dollars per million tokens. `cached_input` is what tokens read from a prefix cache cost; None = `input`."""

    input: int
    output: int
    cached_input: int | None = None


class Caller(NamedTuple):
    """Who asks: what the key that was shown may do. `id` is safe for logs and the ledger; "" = no key was needed."""

    id: str = ""
    name: str = ""
    routes: tuple[str, ...] = ()  # patterns of the model names that it may ask for; () = all
    local_only: bool = False
    budget: Budget | None = None
    rate: Rate | None = None
    weight: int = 1  # turns that it has at a time, where its requests and others' wait
    priority: Priority | None = None  # None = its routes'


ANYBODY = Caller()


class Role(StrEnum):
    """What part of a generation a node does."""

    HYBRID = "hybrid"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One upstream server as the operator described it."""

    url: str  # without a trailing slash
    kind: str | None = None  # found by probing when None
    name: str = ""
    models: tuple[str, ...] = ()  # () = ask the node
    api_key: str = field(default="", repr=False)
    weight: float = 1.0
    speed: float | None = None
    max_concurrency: int | None = None
    vram_gb: float | None = None
    num_ctx: int | None = None
    preload: tuple[str, ...] = ()  # models to load whenever it comes up
    role: Role = Role.HYBRID
    tier: int = LOCAL_TIER
    default_model: str | None = None  # cloud only: asked for when a route names no cloud model
    price: Price | None = None  # the operator's figure; a local node without one costs nothing
    budget: Budget | None = None  # cloud only
    rate: Rate | None = None  # cloud only: what the provider allows
    retries: int = 0  # how often this node is asked again after a failed connection, before the next one is
    health_check: bool = True  # False = never probed, and taken to be up
    tls_verify: bool = True
    ca_file: str | None = None  # certificates to trust for this node, in place of the system's
    prefix: str | None = None  # how it goes on with an answer that has begun; None = as its kind does


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that a node lists."""

    name: str
    capabilities: frozenset[str] | None = None  # None = the node does not say
    context_length: int | None = None
    digest: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in a node's memory now."""

    name: str
    vram_bytes: int | None = None
    context_length: int | None = None


class EngineLoad(NamedTuple):
    """What an engine says of its own work, whoever gave it to it; None where it does not say."""

    running: int | None = None  # requests that it works on
    waiting: int | None = None  # requests in its own queue
    slots: int | None = None  # requests that it works on at once, at most
    cache_used: float | None = None  # share of its room for KV caches

    def beside(self, other: EngineLoad) -> EngineLoad:
        """Both together; where both say something, this one."""
        return self._replace(**{name: value for name, value in other._asdict().items() if getattr(self, name) is None})


class Usage(NamedTuple):
    """Token counts of one answer. `cached_tokens` is the part of `prompt_tokens` read from a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(NamedTuple):
    """Seconds that a node says it took for the parts of one answer, and tokens of the prompt; None where it does not
    say."""

    load: float | None = None
    prefill: float | None = None
    decode: float | None = None
    read: int | None = None  # tokens that it had to read in the seconds of `prefill`
    cached: int | None = None  # tokens that it found in its cache


class Request(NamedTuple):
    """One client request, checked. Never changed: the next attempt may go to another kind of node."""

    id: str
    operation: Operation
    model: str  # as the client asked
    body: bytes  # as the client sent it
    fields: Mapping[str, Any]  # the body, decoded
    stream: bool = False
    include_usage: bool = False  # the client wants the usage chunk of a stream
    local_only: bool = False
    reasoning_content: bool = False  # the client also wants reasoning under that name
    caller: Caller = ANYBODY
    priority: Priority | None = None  # that the client is content with; never more than its key's or route's
    forwarded: tuple[tuple[str, str], ...] = ()  # client headers that a node may see


class AttemptRecord(NamedTuple):
    """What the log line says of one attempt."""

    node: str
    tier: int
    outcome: Outcome
    failure: Failure | None
    message: str
    ms: float


def tier_name(tier: int) -> str:
    """How a tier is called in headers, logs and metrics."""
    return "local" if tier == LOCAL_TIER else "cloud"
