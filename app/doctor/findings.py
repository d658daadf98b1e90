"""What the doctor says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from app.commands.printable import one_line


class Level(StrEnum):
    """How bad it is."""

    GOOD = "good"
    WARNING = "warning"  # works, but probably not as meant
    WRONG = "wrong"


class Code(StrEnum):
    """Every finding there is; docs/doctor.md explains each. Programs may rely on the values."""

    SETTINGS = "settings"
    SETTINGS_WRONG = "settings_wrong"
    SETTINGS_DOUBTFUL = "settings_doubtful"

    NO_NODES = "no_nodes"
    NODE = "node"
    NODE_SKIPPED = "node_skipped"
    REFUSED = "connection_refused"
    UNRESOLVED = "name_unresolved"
    NO_CONNECTION = "no_connection"
    SLOW = "no_answer_in_time"
    NO_HTTP = "no_http"
    REDIRECTED = "redirected"
    TLS_UNTRUSTED = "tls_untrusted"
    TLS_OUT_OF_DATE = "tls_out_of_date"
    TLS_OTHER_NAME = "tls_other_name"
    TLS_NONE = "tls_none"
    TLS_WANTED = "tls_wanted"
    CA_FILE = "ca_file"
    IS_HEARTH = "is_hearth"
    OTHER_KIND = "other_kind"
    UNKNOWN_KIND = "unknown_kind"
    KEY_REFUSED = "key_refused"
    UNHEALTHY = "unhealthy"
    NOT_READY = "not_ready"
    NO_MODELS = "no_models"

    MODEL = "model"
    MODEL_MISSING = "model_missing"
    MODEL_MISSING_THERE = "model_missing_there"
    MODEL_NAMED_DIFFERENTLY = "model_named_differently"
    MODEL_DECLARED_ONLY = "model_declared_only"
    MODEL_DIFFERS = "model_differs"
    CONTEXT_DIFFERS = "context_differs"
    CONTEXT_SMALL = "context_small"
    CONTEXT_CHANGES = "context_changes"
    VRAM_HINT = "vram_hint"
    ON_CPU = "on_cpu"
    PRELOAD = "preload"

    CLOCK = "clock"

    CLOUD = "cloud"
    CLOUD_KEY_MISSING = "cloud_key_missing"
    CLOUD_ENDPOINT = "cloud_endpoint"
    CLOUD_MODEL = "cloud_model"
    CLOUD_STATUS = "cloud_status"
    PRICE_UNKNOWN = "price_unknown"
    BUDGET_IDLE = "budget_idle"

    LEDGER = "ledger"
    LEDGER_UNREACHABLE = "ledger_unreachable"
    LEDGER_NEWER = "ledger_newer"
    LEDGER_LOST = "ledger_lost_spends"
    NOT_WRITABLE = "not_writable"

    REDIS = "redis"
    REDIS_UNREACHABLE = "redis_unreachable"
    REDIS_OLD = "redis_old"
    REDIS_EVICTS = "redis_evicts"

    PORT = "port"
    PORT_TAKEN = "port_taken"
    PORT_REFUSED = "port_refused"
    HEARTH_RUNS = "hearth_runs"
    OWN_CERTIFICATE = "own_certificate"
    WORKERS = "workers"
    FILES = "open_files"
    PYTHON = "python"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is so. `remedy` is one line that says what to do; "" where nothing is to be done."""

    level: Level
    code: Code
    about: str  # "node gpu1", "ledger"
    message: str
    remedy: str = ""


def good(code: Code, about: str, message: str) -> Finding:
    return Finding(Level.GOOD, code, about, message)


def warning(code: Code, about: str, message: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, code, about, message, remedy)


def wrong(code: Code, about: str, message: str, remedy: str) -> Finding:
    return Finding(Level.WRONG, code, about, message, remedy)


def document(findings: Iterable[Finding], version: str) -> dict[str, Any]:
    """For machines."""
    rows = [asdict(finding) for finding in findings]
    counts = {level.value: sum(row["level"] == level for row in rows) for level in Level}
    return {"version": version, "ok": not counts[Level.WRONG], "counts": counts, "findings": rows}


def cleaned(finding: Finding, secrets: Iterable[str]) -> Finding:
    """Without keys, should a node repeat one that it was sent, and without what would steer a terminal."""
    known = sorted((secret for secret in secrets if secret), key=len, reverse=True)

    def clean(text: str) -> str:
        for secret in known:
            text = text.replace(secret, "***")
        return one_line(text)

    return Finding(finding.level, finding.code, clean(finding.about), clean(finding.message), clean(finding.remedy))
