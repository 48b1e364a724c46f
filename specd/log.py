"""Logs: one event a line on standard error, JSON (orjson) or, on a terminal, coloured text.

Event names are constant, snake_case and past tense (`request_finished`); everything else is a field. Prompt and
output text never goes into a field.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, BinaryIO, Literal, TextIO, cast

import orjson
import structlog
from structlog.typing import FilteringBoundLogger, Processor

# systemd's priority prefixes (sd-daemon(3)), so that `journalctl -p warning` works.
_PRIORITIES = {"debug": b"<7>", "info": b"<6>", "warning": b"<4>", "error": b"<3>", "critical": b"<2>"}


class _Unfailing:
    """A stream that may be closed, or broken at its other end: a line that reaches nobody must not cost a request."""

    def __init__(self, stream: TextIO | BinaryIO) -> None:
        self._stream: Any = stream

    def write(self, data: str | bytes) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(data)
        return len(data)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def configure(level: str = "info", format: Literal["auto", "json", "console"] = "auto") -> None:
    """Sets level and format for the whole process; may be called again."""
    stream = sys.stderr
    console = format == "console" or (format == "auto" and stream.isatty())
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    if console:
        # Plain tracebacks: fancier ones print local variables, and a local may hold somebody's prompt.
        plain = structlog.dev.plain_traceback
        processors.append(
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), timestamp_key="ts", exception_formatter=plain)
        )
        if _in_journal(stream):
            processors.append(_prefix_lines)
        factory: Any = structlog.PrintLoggerFactory(cast("TextIO", _Unfailing(stream)))
    else:
        processors += [structlog.processors.format_exc_info, _render_journal if _in_journal(stream) else _render]
        factory = structlog.BytesLoggerFactory(cast("BinaryIO", _Unfailing(stream.buffer)))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry `module=name`; it follows later calls of `configure`."""
    return cast("FilteringBoundLogger", structlog.get_logger(module=name))


def _render(logger: Any, method: str, event: structlog.typing.EventDict) -> bytes:
    """`ts`, `level`, `event` first: the eye finds them without a parser."""
    head = {key: event.pop(key) for key in ("ts", "level", "event") if key in event}
    return orjson.dumps({**head, **event}, default=repr, option=orjson.OPT_NON_STR_KEYS)


def _render_journal(logger: Any, method: str, event: structlog.typing.EventDict) -> bytes:
    prefix = _PRIORITIES.get(str(event.get("level")), b"<6>")
    return prefix + _render(logger, method, event)


def _prefix_lines(logger: Any, method: str, text: Any) -> str:
    """The journal makes an entry of each line, of a traceback too."""
    prefix = _PRIORITIES.get("error" if method == "exception" else method, b"<6>").decode()
    return "\n".join(prefix + line for line in str(text).splitlines())


def _in_journal(stream: TextIO) -> bool:
    """Whether the stream is the journal: systemd names its device and inode in $JOURNAL_STREAM."""
    named = os.environ.get("JOURNAL_STREAM")
    if not named:
        return False
    try:
        stat = os.fstat(stream.fileno())
    except OSError:  # a captured stream without a descriptor is not the journal
        return False
    return named == f"{stat.st_dev}:{stat.st_ino}"
