"""Logs: one JSON object a line, levels, loggers that follow a later configuration."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import structlog

from specd import log


class Stream(io.TextIOWrapper):
    """Standard error that can say what it is."""

    def __init__(self, *, tty: bool) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def configured(monkeypatch: pytest.MonkeyPatch, level: str, *, tty: bool = False, format: Any = "auto") -> Stream:
    stream = Stream(tty=tty)
    monkeypatch.setattr(sys, "stderr", stream)
    log.configure(level, format)
    return stream


def test_json_lines_when_it_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = log.get_logger("engine")  # before configure: it must follow
    stream = configured(monkeypatch, "info")
    logger.info("request_finished", tokens=3, odd=object)
    logger.debug("step_done")
    (line,) = stream.text.splitlines()
    record = orjson.loads(line)
    assert list(record)[:3] == ["ts", "level", "event"]
    assert (record["event"], record["level"], record["module"], record["tokens"]) == (
        "request_finished", "info", "engine", 3,
    )  # fmt: skip
    assert record["ts"].endswith("Z")


def test_an_exception_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "info")
    try:
        raise ValueError("broken")
    except ValueError:
        log.get_logger("x").exception("step_failed")
    (line,) = stream.text.splitlines()
    assert "ValueError: broken" in orjson.loads(line)["exception"]


def test_console_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "info", tty=True)
    log.get_logger("x").info("became_ready", port=8000)
    assert "became_ready" in stream.text
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(stream.text)


def test_format_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "debug", tty=True, format="json")
    log.get_logger("x").debug("a")
    assert orjson.loads(stream.text)["level"] == "debug"


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "error")
    log.get_logger("x").warning("a")
    assert stream.text == ""
    log.get_logger("x").error("b")
    assert orjson.loads(stream.text)["event"] == "b"


@pytest.mark.parametrize("format", ["auto", "console"])
def test_the_journal_gets_priorities(monkeypatch: pytest.MonkeyPatch, format: Any) -> None:
    read, write = os.pipe()
    stat = os.fstat(write)
    monkeypatch.setenv("JOURNAL_STREAM", f"{stat.st_dev}:{stat.st_ino}")
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        log.configure("info", format)
        log.get_logger("x").warning("something_happened")
        try:
            raise ValueError("broken")
        except ValueError:
            log.get_logger("x").exception("step_failed")
    with os.fdopen(read, "rb") as reader:
        first, *rest = reader.read().splitlines()
    assert first.startswith(b'<4>{"ts"' if format == "auto" else b"<4>2")
    assert rest
    assert all(line.startswith(b"<3>") for line in rest), "the lines of a traceback too"
    configured(monkeypatch, "info").close()  # a stream without a descriptor is not the journal


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_log_that_cannot_be_written_costs_nothing(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    stream = configured(monkeypatch, "info", format=format)
    log.get_logger("test").info("something_happened")
    assert "something_happened" in stream.text
    stream.close()
    log.get_logger("test").error("nobody_was_told")
