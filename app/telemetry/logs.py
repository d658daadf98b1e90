"""Log lines: JSON for machines, a readable form on a terminal. The only module that knows structlog.

Lines are gathered and written by a thread a few times a second, so that a slow terminal or pipe never holds up a
stream. Values under names that smell of secrets are replaced.
"""

from __future__ import annotations

import atexit
import logging
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, BinaryIO, Protocol

import orjson

from app.lean import without
from app.request_ids import CURRENT

with without("rich"):  # for coloured tracebacks, which nothing here prints
    import structlog

_FLUSH_SECONDS = 0.1
_QUEUE_LINES = 100_000
_HIDDEN = "[hidden]"
_SECRET_NAMES = re.compile(r"(authorization|api[-_]?key|token$|secret|password|cookie)", re.IGNORECASE)
# Every form has one of these, which are quick to look for; nearly no request's line has any.
_SECRET_SIGNS = (b"bearer", b"authorization", b"api", b"sk-", b"hearth-", b"@")
_SECRET_FORMS = (
    # Bearer ...
    (re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE), rf"\1{_HIDDEN}"),
    # Authorization: Basic ..., x-api-key: ..., "api_key": "..."; in JSON within JSON too
    (
        re.compile(
            r"""((?:authorization|api[-_]?key)\\*["']?\s*[:=]\s*\\*["']?(?:basic\s+)?)(?!bearer\b)[^\s"'\\,;&]{4,}""",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    # Keys of OpenAI's form, which others use as well, and Hearth's own, of 43 characters after the name
    (re.compile(r"(?<![A-Za-z0-9_-])(sk-[A-Za-z0-9_.-]{6,}|hearth-[A-Za-z0-9_-]{40,})"), _HIDDEN),
    # redis://:password@host, postgresql://user:password@host. A password may itself hold an @.
    (re.compile(r"""(\w://)[^\s"'/\\]+@"""), rf"\1{_HIDDEN}@"),
)

Logger = structlog.typing.FilteringBoundLogger
RequestLine = Callable[[str, dict[str, Any]], None]  # level, fields


class LineSink(Protocol):
    """Where finished lines go."""

    def write(self, line: bytes) -> None: ...


class LineWriter:
    """Writes lines to a stream from a thread of its own, and at the end what is left. Drops lines past a bound."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._dropped = 0
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        if len(self._lines) < _QUEUE_LINES:
            self._lines.append(line)
        else:
            self._dropped += 1

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_FLUSH_SECONDS)
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if self._dropped:
            lines.append(orjson.dumps({"level": "warning", "event": "log lines dropped", "count": self._dropped}))
            self._dropped = 0
        if lines:
            try:
                self._stream.write(b"\n".join(lines) + b"\n")
                self._stream.flush()
            except (OSError, ValueError):
                self._closed = True  # nobody reads any more: there is nowhere left to say so


def make_logger(sink: LineSink, level: str, form: str) -> Logger:
    """A logger with our fields. `form` is `json`, `console`, or `auto`: console on a terminal."""
    logger: Logger = structlog.wrap_logger(
        _Output(sink),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        processors=[
            structlog.processors.add_log_level,
            add_request_ids,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            hide_secrets,
            structlog.dev.ConsoleRenderer() if _is_console(form) else _to_json,
            _without_secrets,
        ],
        context_class=dict,
        cache_logger_on_first_use=True,
    )
    return logger


def make_request_line(sink: LineSink, level: str, form: str) -> RequestLine:
    """What writes the one line that every request ends with.

    The same line as the logger's, without its chain of processors: that chain costs 20 us, a tenth of all that Hearth
    may spend on a request.
    """
    if _is_console(form):
        logger = make_logger(sink, level, form)
        return lambda name, fields: logger.log(logging.getLevelNamesMapping()[name.upper()], "request", **fields)
    threshold = logging.getLevelNamesMapping()[level]
    shown = {name for name in ("info", "warning") if logging.getLevelNamesMapping()[name.upper()] >= threshold}

    def write(name: str, fields: dict[str, Any]) -> None:
        if name in shown:
            fields |= {"event": "request", "level": name, "timestamp": datetime.now(UTC)}
            # The names of these fields are known, so that only their values could hold a secret.
            sink.write(_without_secrets(None, name, _to_json(None, name, fields)))

    return write


def _is_console(form: str) -> bool:
    return form == "console" or (form == "auto" and sys.stderr.isatty())


def open_writer(stream: BinaryIO | None = None) -> LineWriter:
    """A writer on the stream, or on standard error, that is emptied when the process ends."""
    writer = LineWriter(stream or sys.stderr.buffer)
    atexit.register(writer.close)
    return writer


class _Output:
    """What structlog hands finished lines to."""

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink

    def msg(self, line: bytes | str) -> None:
        self._sink.write(line.encode() if isinstance(line, str) else line)

    debug = info = warning = error = critical = exception = msg


def _to_json(logger: Any, method: str, fields: MutableMapping[str, Any]) -> bytes:
    return orjson.dumps(fields, default=str, option=orjson.OPT_UTC_Z)


def hide_secrets(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces values whose name is a secret's. What looks like one is found in the finished line."""
    for name in fields:
        if _is_secret_name(name):
            fields[name] = _HIDDEN
    return fields


def add_request_ids(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds the ids of the request that the line belongs to, if it does to one."""
    ids = CURRENT.get()
    if ids is not None:
        fields.setdefault("id", ids.request)
        if ids.trace:
            fields.setdefault("trace_id", ids.trace)
    return fields


def _without_secrets(logger: Any, method: str, line: Any) -> bytes:
    """The finished line, bytes or text, without what looks like a secret."""
    finished: bytes = line if isinstance(line, bytes) else line.encode()
    lower = finished.lower()
    for sign in _SECRET_SIGNS:
        if lower.rfind(sign) >= 0:  # `in` raises and catches an error on its way, and is six times as slow
            return _rewritten(finished.decode()).encode()
    return finished


def _rewritten(text: str) -> str:
    for form, instead in _SECRET_FORMS:
        text = form.sub(instead, text)
    return text


@lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    return _SECRET_NAMES.search(name) is not None


class StandardBridge(logging.Handler):
    """Sends the records of the standard library's loggers (uvicorn's, asyncio's) the same way."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = logging.Formatter().formatException(record.exc_info)
        self._logger.log(record.levelno, record.getMessage(), **fields)
