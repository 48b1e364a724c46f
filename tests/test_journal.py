"""The journal of accepted requests: what it says after a kill, a torn write, a full disk, and for how long it grows."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

import specd.journal
from specd.config_loader import load_config
from specd.errors import ConfigError, JournalInUseError
from specd.journal import RequestJournal, journal_path, unfinished


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.journal"


def started(path: Path) -> RequestJournal:
    journal = RequestJournal(path)
    journal.start()
    return journal


def lost(path: Path) -> tuple[str, ...]:
    """What the next process finds."""
    journal = started(path)
    journal.close()
    return journal.lost


def killed(path: Path, *, open_ids: tuple[str, ...], ended: tuple[str, ...] = ()) -> None:
    """A process that ends by a SIGKILL of itself, once its journal has taken everything."""
    script = (
        "import os, signal, sys, time; from pathlib import Path; from specd.journal import RequestJournal\n"
        "path, ended, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]\n"
        "journal = RequestJournal(path); journal.start()\n"
        "for name in names: journal.begin(name)\n"
        "for name in names[:ended]: journal.end(name, 'finished')\n"
        "while path.read_bytes().count(b'\\n') < 1 + len(names) + ended: time.sleep(0.001)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [str(path), str(len(ended)), *ended, *open_ids]
    code = subprocess.run([sys.executable, "-c", script, *words], check=False, timeout=60).returncode
    assert code == -signal.SIGKILL


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_where_it_is() -> None:
    assert journal_path("auto", {}) is None
    assert journal_path("off", {"STATE_DIRECTORY": "/var/lib/specd"}) is None
    assert journal_path("auto", {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a/requests.journal")
    assert journal_path("/tmp/x", {"STATE_DIRECTORY": "/var/lib/specd"}) == Path("/tmp/x")


def test_a_killed_process_leaves_its_open_requests(path: Path) -> None:
    killed(path, open_ids=("chatcmpl-a#1.0", "cmpl-b#2.0", "cmpl-b#2.1"), ended=("cmpl-c#3.0",))
    with structlog.testing.capture_logs() as logs:
        assert lost(path) == ("chatcmpl-a#1.0", "cmpl-b#2.0", "cmpl-b#2.1")
    (line,) = [line for line in logs if line["event"] == "requests_lost"]
    assert line["log_level"] == "warning"
    assert (line["total"], line["ids"]) == (3, ["chatcmpl-a", "cmpl-b"]), "as clients know them"
    assert lost(path) == (), "they are told once"


def test_whatever_ends_is_not_lost(path: Path) -> None:
    journal = started(path)
    for how in ("finished", "failed", "aborted"):
        journal.begin(how)
        journal.end(how, how)
    journal.end("warm-up", "finished")  # it began before the journal
    until(lambda: path.read_bytes().count(b"\n") == 7)
    assert unfinished(path.read_bytes().splitlines(keepends=True)[1:]) == ([], 0)
    journal.close()
    assert path.read_bytes() == b"specd-journal 1\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("tail", "expected", "damaged"),
    [
        (b"accepted 1.000 b", ["a"], 1),
        (b"accepted 1.0", ["a"], 1),
        (b"finished 1.000 a", ["a"], 1),  # who knows whether the name goes on
        (b"\0" * 40, ["a"], 1),
        (b"\xff\xfe\nfinished 2.000 a\n", [], 1),
        (b"accepted 1.000 b\n", ["a", "b"], 0),
    ],
)
def test_a_torn_end_is_no_event(path: Path, tail: bytes, expected: list[str], damaged: int) -> None:
    path.write_bytes(b"specd-journal 1\naccepted 1.000 a\n" + tail)
    with structlog.testing.capture_logs() as logs:
        assert list(lost(path)) == expected
    assert sum(line["lines"] for line in logs if line["event"] == "journal_damaged") == damaged


@pytest.mark.parametrize("content", [b"", b"specd-jou", b"\0" * 512])
def test_a_file_without_a_whole_first_line_is_empty(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert lost(path) == ()
    assert path.read_bytes() == b"specd-journal 1\n"


def test_another_s_file_is_not_overwritten(path: Path, tmp_path: Path) -> None:
    path.write_text("[server]\nport = 1\n")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        RequestJournal(path)
    assert path.read_text() == "[server]\nport = 1\n"
    with pytest.raises(ConfigError, match="No such file"):
        RequestJournal(tmp_path / "nowhere" / "x")
    with pytest.raises(ConfigError, match="regular file"):
        RequestJournal(Path("/dev/null"))
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic links"):
        RequestJournal(path)


def test_one_daemon_a_file(path: Path) -> None:
    first = started(path)
    with pytest.raises(JournalInUseError, match=re.escape(str(path))):
        RequestJournal(path)
    first._stale = True
    first.begin("a")  # makes the file anew: it is still the first one's
    until(lambda: b" a\n" in path.read_bytes())
    with pytest.raises(JournalInUseError):
        RequestJournal(path)
    first.close()
    assert lost(path) == ("a",)


def test_it_does_not_grow_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specd.journal, "_GROWTH_BYTES", 2000)
    journal = started(path)
    journal.begin("stays")
    largest = 0
    for number in range(500):
        journal.begin(f"request-{number}")
        journal.end(f"request-{number}", "finished")
        until(lambda: journal._events.empty())
        largest = max(largest, path.stat().st_size)
    assert 1000 < largest < 2500
    journal.begin("last")
    journal.close()
    assert lost(path) == ("stays", "last")
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is set no write has room for more than half of what is asked."""
    full, write = threading.Event(), os.write

    def limited(file: int, data: memoryview) -> int:
        if not full.is_set():
            return write(file, data)
        if len(data) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(specd.journal.os, "write", limited)
    yield full
    full.clear()


def test_a_full_disk_costs_the_journal_and_nothing_else(
    path: Path, full_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specd.journal, "_RETRY_S", 0.01)
    with structlog.testing.capture_logs() as logs:
        journal = started(path)
        journal.begin("early")
        until(lambda: b" early\n" in path.read_bytes())
        full_disk.set()
        journal.begin("a")
        journal.begin("b")
        journal.end("early", "finished")
        until(lambda: journal.num_failed == 3)
        time.sleep(0.05)  # it is tried again and again
        assert [line["event"] for line in logs] == ["journal_failed"], "told once"
        until(lambda: not path.with_name(path.name + ".new").exists())  # between two tries there is none
        full_disk.clear()
        until(lambda: logs[-1]["event"] == "journal_recovered")
        assert unfinished(path.read_bytes().splitlines(keepends=True)[1:]) == (["a", "b"], 0), "nothing was forgotten"
        journal.end("a", "finished")
        journal.close()
    assert lost(path) == ("b",)


def test_a_start_on_a_full_disk_reads_and_serves(
    path: Path, full_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specd.journal, "_RETRY_S", 0.01)
    killed(path, open_ids=("a",))
    full_disk.set()
    journal = started(path)
    assert journal.lost == ("a",)
    journal.begin("b")
    full_disk.clear()
    until(lambda: b" b\n" in path.read_bytes())
    assert b" a\n" not in path.read_bytes()
    journal.close()


def test_a_write_that_the_kernel_refuses(path: Path) -> None:
    """Not a scripted one: the process may not make files larger than so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = started(path)
    with structlog.testing.capture_logs() as logs:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
            journal.begin("a")
            until(lambda: journal.num_failed == 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        until(lambda: len(logs) == 2)
    assert [line["event"] for line in logs] == ["journal_failed", "journal_recovered"]
    journal.close()
    assert lost(path) == ("a",)


def test_a_disk_that_does_not_answer_holds_up_nobody(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events beyond the limit are dropped and counted; when the disk is back the file is right all the same."""
    monkeypatch.setattr(specd.journal, "_MOST_WAITING", 10)
    asked, answers, write = threading.Event(), threading.Event(), os.write

    def stuck(file: int, data: memoryview) -> int:
        asked.set()
        answers.wait(10)
        return write(file, data)

    journal = started(path)
    monkeypatch.setattr(specd.journal.os, "write", stuck)
    journal.begin("first")
    assert asked.wait(10)  # the thread hangs in its write
    start = time.monotonic()
    for number in range(100):
        journal.begin(f"r{number}")
    journal.end("r0", "aborted")
    assert time.monotonic() - start < 1
    assert journal.num_failed == 91
    answers.set()
    until(lambda: b" r99\n" in path.read_bytes())
    journal.close()
    assert lost(path) == ("first", *(f"r{number}" for number in range(1, 100)))


def test_a_name_without_a_folder_is_a_slip() -> None:
    with pytest.raises(ConfigError, match=r"server\.journal.*'none'"):
        load_config(None, env={}, sets=["server.journal=none"])
    for value in ("auto", "off", "/var/lib/specd/x", "./x"):
        assert load_config(None, env={}, sets=[f"server.journal={value}"]).server.journal == value


def test_a_file_system_without_locks_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(specd.journal.fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="cannot be locked: No locks available"):
        RequestJournal(path)


def test_what_stands_in_the_new_file_s_place_is_put_away(path: Path) -> None:
    """Nobody reads from this pipe: to open it for writing would hold up the start for ever."""
    os.mkfifo(path.with_name(path.name + ".new"))
    journal = started(path)
    journal.begin("a")
    journal.close()
    assert lost(path) == ("a",)
