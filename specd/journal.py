"""Ids of the requests that are accepted and have not ended, in a file: what a crash lost is told by the next start.

    specd-journal 1
    accepted 1764527215.123 chatcmpl-5f3a#12.0
    finished 1764527219.871 chatcmpl-5f3a#12.0

One line an event and never any text of a request. A thread writes; the event loop only hands over, so that a slow disk
holds up nobody. Nothing is fsynced: the file outlives the process, not the machine. It is made anew, with the open
requests alone, when it has grown, and after a failed write: a full disk costs the journal, never a request.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from specd.errors import ConfigError, JournalInUseError, OutputError
from specd.log import get_logger

_HEADER = b"specd-journal 1\n"
_ACCEPTED, _ENDS = "accepted", ("finished", "failed", "aborted")
_GROWTH_BYTES = 256 << 10  # since it was made anew
_MOST_WAITING = 1 << 16  # events that the thread may be behind; then it makes the file anew instead
_RETRY_S = 1.0  # after a failed write
_CLOSE_S = 5.0
_SHOWN = 100  # ids in the log
_FLAGS = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

log = get_logger("journal")


def journal_path(setting: str, env: Mapping[str, str]) -> Path | None:
    """What `server.journal` says; None: no journal."""
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    folder = env.get("STATE_DIRECTORY")  # set by systemd; several folders are joined with ":"
    return Path(folder.split(":")[0], "requests.journal") if folder else None


def check_file(path: Path) -> None:
    """What can be said of a journal without making, locking or changing it. Raises ConfigError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"server.journal: {path}: no file can be made in {path.parent}") from None
        return
    except OSError as error:
        raise ConfigError(f"server.journal: {path} cannot be opened: {error.strerror}") from error
    try:
        _check_head(path, file)
    finally:
        os.close(file)


def _check_head(path: Path, file: int) -> None:
    """Raises ConfigError when this is something else, which would be overwritten."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ConfigError(f"server.journal: {path} is not a regular file")
    head = os.pread(file, len(_HEADER), 0)
    # After a power failure there may be zeros where something was to be written.
    if head and not _HEADER.startswith(head) and head.strip(b"\0"):
        raise ConfigError(f"server.journal: {path} holds something else; it would be overwritten")


def unfinished(lines: Iterable[bytes]) -> tuple[list[str], int]:
    """(ids that were accepted and did not end, oldest first; lines that are damaged). A torn last line is no event."""
    live: dict[str, None] = {}
    damaged = 0
    for line in lines:
        words = line.decode("ascii", "replace").split()
        if len(words) != 3 or not line.endswith(b"\n") or words[0] not in (_ACCEPTED, *_ENDS):
            damaged += 1
        elif words[0] == _ACCEPTED:
            live[words[2]] = None
        else:
            live.pop(words[2], None)
    return list(live), damaged


class RequestJournal:
    """`lost` are the ids that the process before this one left open. One process may have it open."""

    def __init__(self, path: Path) -> None:
        """Reads. Nothing is written before `start`: when this process never serves, the next one finds what this did.

        Raises JournalInUseError, ConfigError for a file that is no journal or cannot be opened, OutputError for a full
        disk.
        """
        self._path = path
        self._file = _open(path)
        try:
            self.lost = self._read()
        except BaseException:
            os.close(self._file)
            raise
        self._num_failed = self._num_dropped = 0  # counted by the thread, by the event loop
        self._live: dict[str, float] = {}  # id -> when it was accepted; changed by the event loop alone
        self._events: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._grown = 0  # bytes
        self._stale = True  # the file does not say what `_live` does
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="specd-journal", daemon=True)

    def start(self) -> None:
        """From now on the file is about this process: tells the log what was lost, and makes it anew."""
        if self.lost:
            # The engine's names are the responses' ids, made unique by what stands behind the "#".
            names = list(dict.fromkeys(name.partition("#")[0] for name in self.lost))
            log.warning("requests_lost", total=len(self.lost), ids=names[:_SHOWN], path=str(self._path))
        self._save(b"", 0)
        self._thread.start()

    def _read(self) -> tuple[str, ...]:
        _check_head(self._path, self._file)
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(len(_HEADER))
            lost, damaged = unfinished(file)
        if damaged:
            log.warning("journal_damaged", path=str(self._path), lines=damaged)
        return tuple(lost)

    @property
    def num_failed(self) -> int:
        """Events that were not written when they came."""
        return self._num_failed + self._num_dropped

    def begin(self, request_id: str) -> None:
        """A request was accepted."""
        now = self._live[request_id] = time.time()
        self._put(_line(_ACCEPTED, now, request_id))

    def end(self, request_id: str, how: str) -> None:
        """It is over: finished, failed or aborted. One that began before the journal is passed over."""
        if self._live.pop(request_id, None) is not None:
            self._put(_line(how, time.time(), request_id))

    def close(self) -> None:
        """Writes what has happened; a disk that takes none of it is not waited for."""
        if self._thread.ident is None:  # it was never started
            os.close(self._file)
            return
        self._events.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("journal_left", path=str(self._path), advice="the disk does not answer")

    def _put(self, line: bytes) -> None:
        if self._events.qsize() < _MOST_WAITING:
            self._events.put(line)
        else:
            self._num_dropped += 1
            self._stale = True

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        closing = False
        while not closing:
            lines, closing = self._take()
            self._save(b"".join(lines), len(lines))
        if self._grown:  # nothing is left but what is open
            self._stale = True
            self._save(b"", 0)
        os.close(self._file)

    def _take(self) -> tuple[list[bytes], bool]:
        """What has happened since the last time, and whether this was all. Waits; after a failure not for long."""
        lines: list[bytes] = []
        try:
            event = self._events.get(timeout=_RETRY_S if self._stale else None)
            while event is not None:
                lines.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return lines, False
        return lines, True

    def _save(self, data: bytes, count: int) -> None:
        """Appends data, which is `count` events, or makes the file anew, where they are in `_live`."""
        try:
            if self._stale or self._grown > _GROWTH_BYTES:
                self._rewrite()
            elif data:
                _write(self._file, data)
                self._grown += len(data)
        except OSError as error:
            self._stale = True
            self._num_failed += count
            if not self._failing:
                log.error("journal_failed", path=str(self._path), error=str(error))
            self._failing = True
            return
        if self._failing:
            log.info("journal_recovered", path=str(self._path), failed=self.num_failed)
        self._failing = False

    def _rewrite(self) -> None:
        """Another file under the same name, locked before it has that name. Raises OSError; then the old one stays."""
        self._stale = False  # from here on: `begin` and `end` may set it again
        live = self._live.copy()
        new = self._path.with_name(self._path.name + ".new")
        new.unlink(missing_ok=True)  # of a process that was killed here; or it is no file, and would hold up everybody
        file = os.open(new, os.O_WRONLY | os.O_EXCL | _FLAGS, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, _HEADER + b"".join(_line(_ACCEPTED, at_s, name) for name, at_s in live.items()))
            new.rename(self._path)
        except BaseException:
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._grown = file, 0


def _open(path: Path) -> int:
    """The file, locked. Raises JournalInUseError, ConfigError or OutputError."""
    while True:
        try:
            file = os.open(path, os.O_RDWR | _FLAGS, 0o600)
        except OSError as error:
            text = f"server.journal: {path} cannot be opened: {error.strerror}"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (OutputError if full else ConfigError)(text) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BlockingIOError as error:
            os.close(file)
            raise JournalInUseError(
                f"server.journal: another process writes {path}; each daemon needs a journal of its own"
            ) from error
        except FileNotFoundError:
            pass  # as below
        except OSError as error:
            os.close(file)
            raise ConfigError(f"server.journal: {path} cannot be locked: {error.strerror}") from error
        os.close(file)  # another process made the file anew and ended between the two: the one of that name counts


def _line(event: str, at_s: float, request_id: str) -> bytes:
    return f"{event} {at_s:.3f} {request_id}\n".encode()


def _write(file: int, data: bytes) -> None:
    """All of it; a full disk may take a part before it refuses. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
