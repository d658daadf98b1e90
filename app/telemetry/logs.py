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
from collections.abc import MutableMapping
from typing import Any, BinaryIO, Protocol

import orjson
import structlog

_FLUSH_SECONDS = 0.1
_QUEUE_LINES = 100_000
_SECRET_NAMES = re.compile(r"(authorization|api[-_]?key|token$|secret|password|cookie)", re.IGNORECASE)
_SECRET_VALUES = re.compile(r"(Bearer\s+|sk-)[A-Za-z0-9._~+/=-]{6,}")
_HIDDEN = "[hidden]"

Logger = structlog.typing.FilteringBoundLogger


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
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    render = structlog.dev.ConsoleRenderer() if console else _to_json
    logger: Logger = structlog.wrap_logger(
        None,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            hide_secrets,
            render,
            _Deliver(sink),
        ],
        context_class=dict,
    )
    return logger


def open_writer() -> LineWriter:
    """A writer on standard error that is emptied when the process ends."""
    writer = LineWriter(sys.stderr.buffer)
    atexit.register(writer.close)
    return writer


class _Deliver:
    """The last processor: hands the line over and tells structlog to do no more."""

    def __init__(self, sink: LineSink) -> None:
        self._write = sink.write

    def __call__(self, logger: Any, method: str, line: Any) -> str:
        self._write(line.encode() if isinstance(line, str) else line)
        raise structlog.DropEvent


def _to_json(logger: Any, method: str, fields: MutableMapping[str, Any]) -> bytes:
    return orjson.dumps(fields, default=str)


def hide_secrets(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces values whose name or look is a secret's."""
    for name, value in fields.items():
        if _SECRET_NAMES.search(name):
            fields[name] = _HIDDEN
        elif isinstance(value, str) and ("Bearer" in value or "sk-" in value):
            fields[name] = _SECRET_VALUES.sub(_HIDDEN, value)
    return fields


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
