"""API keys while the daemon runs: made, listed, taken away, and read again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specd.errors import RequestError
from specd.server.admin.keyfile import KeyFile
from specd.server.auth import ApiKeys


def let_in(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check(f"Bearer {key}")
    except RequestError:
        return False
    return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# ours\nold weight=5\n")
    path.chmod(0o640)
    return path


def test_a_key_is_made_shown_once_and_taken_away(file: Path) -> None:
    keys = ApiKeys.from_file(str(file))
    salt = keys.check("Bearer old")
    store = KeyFile(keys, str(file))
    made = store.add("alice's laptop")
    assert let_in(keys, str(made["key"]))
    assert keys.check("Bearer old") == salt  # its caches are still its own
    assert keys.weight(salt) == 5
    assert str(made["key"]) not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    old, new = store.entries()
    assert (old["name"], old["weight"], old["stored"]) == (None, 5, "plain text")
    assert new == {"id": made["id"], "name": "alice's laptop", "weight": 1, "stored": "hash"}
    store.remove(str(old["id"]))
    assert not let_in(keys, "old")
    assert let_in(keys, str(made["key"]))
    assert file.read_text().startswith("# ours\n# key ")
    assert let_in(ApiKeys.from_file(str(file)), str(made["key"]))  # a restart reads the same


def test_the_last_key_stays(file: Path) -> None:
    store = KeyFile(ApiKeys.from_file(str(file)), str(file))
    (only,) = store.entries()
    with pytest.raises(RequestError, match="last key"):
        store.remove(str(only["id"]))
    with pytest.raises(RequestError, match="no key"):
        store.remove("0123456789ab")
    assert "old" in file.read_text()


def test_without_a_file_there_is_nothing_to_add_to() -> None:
    store = KeyFile(ApiKeys(), "")
    assert store.entries() == []
    with pytest.raises(RequestError, match="not set"):
        store.add("x")


def test_a_file_that_cannot_be_written_changes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys.from_file(str(file))

    def refuse(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(RequestError, match=r"cannot be written \(Read-only"):
        KeyFile(keys, str(file)).add("x")
    assert let_in(keys, "old")
    assert [path.name for path in file.parent.iterdir()] == ["keys"]
    assert file.read_text() == "# ours\nold weight=5\n"
