"""The control socket's file: who can open it is decided before anybody connects."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
from pathlib import Path

from specd.errors import AddressInUseError, ConfigError

_SOCKET_MODE = 0o660
_BACKLOG = 32


def bind_admin_socket(path: str | Path, *, group: int | None = None) -> socket.socket:
    """A listening socket file of mode 0660. A missing parent is made with mode 0700; a stale file is replaced.

    group: the gid that may connect besides the daemon's user; None: the daemon's own.
    Raises AddressInUseError when somebody listens there, ConfigError when the file is something else, or when others
    could swap the file because they can write to its folder or own it.
    """
    path = Path(path)
    _check_parent(path.parent)
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        os.chmod(path, _SOCKET_MODE)  # before listen: nobody can have connected
        if group is not None:
            _give(path, group)
        listener.listen(_BACKLOG)
    except ConfigError:
        listener.close()
        path.unlink(missing_ok=True)
        raise
    except OSError as error:
        listener.close()
        raise ConfigError(f"admin.socket: cannot listen on {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _give(path: Path, group: int) -> None:
    if path.stat().st_gid == group:
        return
    try:
        os.chown(path, -1, group)
    except PermissionError as error:
        name = group_name(group)
        text = f"admin.operator_group: {path} cannot be given to {name}; the daemon's user is not a member of it"
        raise ConfigError(text) from error


def group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def _check_parent(parent: Path) -> None:
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.stat()
    except OSError as error:
        raise ConfigError(f"admin.socket: cannot use the folder {parent}: {error}") from error
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"admin.socket: everybody can write to {parent}; choose a folder of your own")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"admin.socket: {parent} belongs to uid {found.st_uid}; choose a folder of your own")


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"admin.socket: {path} is there and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"admin.socket: cannot tell whether {path} is in use: {error}") from error
    raise AddressInUseError(
        f"admin.socket: another daemon listens on {path}; stop it, or give this one a socket of its own: "
        "--set admin.socket=PATH"
    )
