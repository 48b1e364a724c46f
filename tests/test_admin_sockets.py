"""The control socket's file: modes, stale ones, and whose folder it may lie in."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from specd.errors import AddressInUseError, ConfigError
from specd.server.admin.sockets import bind_admin_socket


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "admin.sock"
    with bind_admin_socket(path, group=os.getegid()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.stat().st_gid == os.getegid()


def test_a_group_that_it_cannot_be_given_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr("os.chown", refuse)
    with pytest.raises(ConfigError, match=r"admin\.operator_group: .* 54321"):
        bind_admin_socket(tmp_path / "admin.sock", group=54321)
    assert not (tmp_path / "admin.sock").exists()


def test_stale_sockets_are_replaced_and_living_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    bind_admin_socket(path).close()
    assert path.exists()
    with bind_admin_socket(path), pytest.raises(AddressInUseError, match=r"--set admin\.socket="):
        bind_admin_socket(path)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_admin_socket(path)
    assert path.read_text() == "precious"
    link = tmp_path / "link.sock"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a socket"):
        bind_admin_socket(link)


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ConfigError, match="everybody can write"):
        bind_admin_socket(shared / "admin.sock")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use the folder"):
        bind_admin_socket(tmp_path / "file" / "admin.sock")
    with pytest.raises(ConfigError, match="cannot listen"):
        bind_admin_socket(tmp_path / ("x" * 150))


def test_listens_with_a_backlog(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with bind_admin_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(str(path))
