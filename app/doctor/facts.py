"""What the doctor has seen: plain values, gathered by some modules beside this one and judged by others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from app.domain import LoadedModel, ModelInfo, NodeSpec
from app.providers.base import Health


class Trouble(StrEnum):
    """Why there was no answer."""

    REFUSED = "refused"
    UNRESOLVED = "unresolved"
    NO_CONNECTION = "no connection"  # in time, or no route
    SLOW = "slow"
    NO_HTTP = "no http"
    TLS_UNTRUSTED = "tls untrusted"
    TLS_OUT_OF_DATE = "tls out of date"
    TLS_OTHER_NAME = "tls other name"
    TLS_NONE = "tls none"
    CA_FILE = "ca_file"


class Elsewhere(NamedTuple):
    """What answers at another address than the one that was given."""

    url: str
    title: str  # of its kind


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A node or a cloud target, as seen without cost. Everything after `trouble` is unknown when there is one.

    `answered` is what a node is recognised as: a kind's name, or None.
    """

    spec: NodeSpec
    trouble: Trouble | None = None
    detail: str = ""  # of the trouble; no secret
    other_scheme: bool = False  # it answers over http where https is given, or the other way round
    elsewhere: Sequence[Elsewhere] = ()
    in_container: bool = False  # this process is
    redirect: str = ""  # where it sends whoever asks: scheme and host
    answered: str | None = None
    hearth: str | None = None  # its version, when it is a Hearth
    key_refused: bool = False
    health: Health | None = None
    models_status: int | None = None
    models: Sequence[ModelInfo] | None = None  # None = not listed, or not to be read
    loaded: Sequence[LoadedModel] | None = None
    v1_lists: bool = False  # cloud only: it lists its models below /v1, though not below the URL that was given
    clock_ahead_seconds: float | None = None  # of ours

    @property
    def about(self) -> str:
        return f"{'cloud' if self.spec.tier else 'node'} {self.spec.name or self.spec.url}"


class Unpriced(NamedTuple):
    """A model that a budget covers and whose price nobody knows."""

    cloud: str
    model: str


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """`trouble` is one line without a password. `folder` is the file's, where there is one."""

    name: str
    trouble: str | None = None
    folder: str | None = None
    writable: bool = True
    exists: bool = True
    revision: str | None = None  # None = there are no tables yet
    head: str = ""
    lost: int = 0
    lost_micro_dollars: int = 0


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """`trouble` is one line without a password."""

    server: str
    trouble: str | None = None
    version: str = ""
    eviction: str = ""  # the server's maxmemory_policy
    limited: bool = False  # its memory is


@dataclass(frozen=True, slots=True)
class PortFacts:
    """Whether Hearth could listen, and who does so now."""

    host: str
    port: int
    trouble: str | None = None  # "taken", or the system's own words
    hearth: str | None = None  # the version of the Hearth that runs there
    certificate_trouble: str | None = None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    python: tuple[int, int, int]
    cpus: int
    workers: int
    open_files: int | None  # at most; None = no limit that is known
    unwritable: Sequence[tuple[str, str]] = ()  # the setting, and the folder that it needs
