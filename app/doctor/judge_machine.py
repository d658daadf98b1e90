"""What there is to say of this machine, of the port, and of what Hearth keeps and shares."""

from __future__ import annotations

from collections.abc import Iterator

from app import __version__
from app.doctor.facts import LedgerFacts, MachineFacts, PortFacts, RedisFacts
from app.doctor.findings import Code, Finding, good, warning, wrong

_LEAST_PYTHON = (3, 11)
_FEW_FILES = 1024
_FILES_PER_STREAM = 2
_LEAST_REDIS = 6
_NO_EVICTION = "noeviction"
_LEDGER = "ledger"


def judge_machine(facts: MachineFacts) -> list[Finding]:
    return [*_python(facts), *_workers(facts), *_files(facts), *_folders(facts)]


def _python(facts: MachineFacts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < _LEAST_PYTHON:
        yield wrong(Code.PYTHON, "python", f"Python {version} is too old", "install Python 3.11 or newer")
    else:
        yield good(Code.PYTHON, "python", f"Python {version}")


def _workers(facts: MachineFacts) -> Iterator[Finding]:
    cpus = f"{facts.cpus} CPU{'' if facts.cpus == 1 else 's'}"
    if facts.workers > facts.cpus:
        remedy = f"set WORKERS to {facts.cpus} or less"
        yield warning(Code.WORKERS, "WORKERS", f"{facts.workers} workers share {cpus}, and wait for each other", remedy)
    else:
        yield good(Code.WORKERS, "WORKERS", f"{facts.workers} of {cpus}")


def _files(facts: MachineFacts) -> Iterator[Finding]:
    if facts.open_files is None:
        return
    streams = max(0, facts.open_files - 100) // _FILES_PER_STREAM
    message = f"a process may have {facts.open_files} files open: about {streams} streams at once"
    if facts.open_files < _FEW_FILES:
        remedy = "raise the limit: ulimit -n 65536, LimitNOFILE= of systemd, or --ulimit nofile= of Docker"
        yield warning(Code.FILES, "open files", message, remedy)
    else:
        yield good(Code.FILES, "open files", message)


def _folders(facts: MachineFacts) -> Iterator[Finding]:
    for setting, folder in facts.unwritable:
        remedy = f"let Hearth's user write there, or set {setting} to another place, or to off"
        yield wrong(Code.NOT_WRITABLE, setting, f"the folder {folder} cannot be written", remedy)


def judge_port(facts: PortFacts) -> list[Finding]:
    """HOST and PORT, and Hearth's own certificate."""
    return [*_port(facts), *_certificate(facts)]


def _port(facts: PortFacts) -> Iterator[Finding]:
    about, where = "HOST and PORT", f"{facts.host}:{facts.port}"
    if facts.trouble is None:
        yield good(Code.PORT, about, f"{where} is free")
    elif facts.hearth == __version__:
        yield good(Code.HEARTH_RUNS, about, f"Hearth {facts.hearth} runs at {where}")
    elif facts.hearth is not None:
        message = f"Hearth {facts.hearth} runs at {where}, and this is {__version__}"
        yield warning(Code.HEARTH_RUNS, about, message, "restart it, so that it is this version")
    elif facts.trouble == "taken":
        message = f"another program listens at {where}"
        yield wrong(Code.PORT_TAKEN, about, message, "set PORT to another number, or end that program")
    else:
        remedy = "set HOST to an address of this machine (127.0.0.1, or 0.0.0.0 for all), and PORT to 1024 or more"
        yield wrong(Code.PORT_REFUSED, about, f"Hearth cannot listen at {where}: {facts.trouble}", remedy)


def _certificate(facts: PortFacts) -> Iterator[Finding]:
    if facts.certificate_trouble:
        remedy = "name a certificate and the key that belongs to it, both in PEM form and without a password"
        yield wrong(Code.OWN_CERTIFICATE, "SSL_CERTFILE", facts.certificate_trouble, remedy)


def judge_ledger(facts: LedgerFacts | None) -> list[Finding]:
    """None = there is no ledger."""
    if facts is None:
        return [good(Code.LEDGER, _LEDGER, "off: no usage is kept, and there are no keys but those of the settings")]
    if not facts.writable:
        remedy = "let Hearth's user write there (in Docker: a volume that belongs to it), or set DATABASE_URL"
        return [wrong(Code.NOT_WRITABLE, _LEDGER, f"{facts.folder} cannot be written", remedy)]
    if facts.trouble is not None:
        remedy = "see that the database runs and that DATABASE_URL's host, user and password are right"
        return [wrong(Code.LEDGER_UNREACHABLE, _LEDGER, facts.trouble, remedy)]
    return [*_tables(facts), *_lost(facts)]


def _tables(facts: LedgerFacts) -> Iterator[Finding]:
    if facts.revision is None:
        yield good(Code.LEDGER, _LEDGER, f"{facts.name}: its tables are made at the first start")
    elif facts.revision > facts.head:
        message = f"{facts.name} was written by a newer Hearth (tables {facts.revision}, known here {facts.head})"
        yield wrong(Code.LEDGER_NEWER, _LEDGER, message, "run that version, or set DATABASE_URL to another database")
    elif facts.revision < facts.head:
        yield good(Code.LEDGER, _LEDGER, f"{facts.name}: its tables are brought up to date at the next start")
    else:
        yield good(Code.LEDGER, _LEDGER, f"{facts.name} is reached, its tables are up to date")


def _lost(facts: LedgerFacts) -> Iterator[Finding]:
    if facts.lost:
        message = (
            f"{facts.lost} cloud request{'' if facts.lost == 1 else 's'} of processes that died count as reserved "
            f"(${facts.lost_micro_dollars / 1_000_000:.2f}), as nobody knows their cost"
        )
        remedy = "compare with the provider's bill: python -m app usage lost, then usage reconcile"
        yield warning(Code.LEDGER_LOST, _LEDGER, message, remedy)


def judge_redis(facts: RedisFacts | None) -> list[Finding]:
    """None = nothing is shared."""
    if facts is None:
        return []
    about = "REDIS_URL"
    if facts.trouble is not None:
        message = f"{facts.server} cannot be used: {facts.trouble}"
        remedy = "see that it runs and that REDIS_URL's host, port and password are right"
        return [wrong(Code.REDIS_UNREACHABLE, about, message, remedy)]
    return [*_redis_version(facts, about), *_redis_memory(facts, about)]


def _redis_version(facts: RedisFacts, about: str) -> Iterator[Finding]:
    major = facts.version.partition(".")[0]
    if major.isdigit() and int(major) < _LEAST_REDIS:
        message = f"{facts.server} is version {facts.version}, older than {_LEAST_REDIS}"
        yield warning(Code.REDIS_OLD, about, message, "install a newer Redis or Valkey")
    else:
        yield good(Code.REDIS, about, f"{facts.server} is reached, version {facts.version or 'unknown'}")


def _redis_memory(facts: RedisFacts, about: str) -> Iterator[Finding]:
    if facts.limited and facts.eviction not in ("", _NO_EVICTION):
        message = f"when it is full it throws keys away ({facts.eviction}), and with them what was spent and counted"
        yield warning(Code.REDIS_EVICTS, about, message, "set its maxmemory-policy to noeviction")
