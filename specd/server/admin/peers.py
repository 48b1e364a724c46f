"""Who calls, as the kernel says (SO_PEERCRED), and what that gives the right to."""

from __future__ import annotations

import dataclasses
import enum
import errno
import grp
import os
import pwd
import socket
import struct

from aiohttp import web

from specd.config import AdminConfig
from specd.errors import ConfigError

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SO_PEERGROUPS = 59  # Linux 4.13; the socket module does not name it
_MOST_ID = (1 << 32) - 2  # of users and groups; one more means nobody
_MAX_GROUPS = 256  # what Python's getsockopt can return; of a peer with more, the first group counts alone


class Level(enum.IntEnum):
    """Each level has the rights of those below it."""

    USER = 0
    OPERATOR = 1
    ADMIN = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end. The pid may already be somebody else's."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()  # the other ones


class Levels:
    """root, the daemon's own user and `admin.admins` are ADMIN, `admin.operator_group` is OPERATOR, others are USER."""

    def __init__(self, admins: frozenset[int] = frozenset(), operators: int | None = None) -> None:
        self.admins = admins | {0, os.geteuid()}
        self.operators = operators  # a gid

    @classmethod
    def configured(cls, config: AdminConfig) -> Levels:
        """Raises ConfigError when a user or group does not exist."""
        group = config.operator_group
        return cls(frozenset(_uid(name) for name in config.admins), _gid(group) if group else None)

    def replace(self, other: Levels) -> None:
        self.admins, self.operators = other.admins, other.operators

    def of(self, peer: Peer | None) -> Level:
        if peer is None:
            return Level.USER
        if peer.uid in self.admins:
            return Level.ADMIN
        if self.operators is not None and self.operators in (peer.gid, *peer.groups):
            return Level.OPERATOR
        return Level.USER


def peer_of(request: web.Request) -> Peer | None:
    """The connection's credentials; None when it has already gone."""
    if request.transport is None:
        return None
    connection = request.transport.get_extra_info("socket")
    pid, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.ENOPROTOOPT):
            raise
        groups = b""
    return Peer(pid, uid, gid, struct.unpack(f"{len(groups) // 4}I", groups))


def _uid(name: str) -> int:
    if name.isdecimal():
        return _number(name, "admin.admins")
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise ConfigError(f"admin.admins: there is no user {name!r}") from error


def _gid(name: str) -> int:
    if name.isdecimal():
        return _number(name, "admin.operator_group")
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(f"admin.operator_group: there is no group {name!r}") from error


def _number(name: str, setting: str) -> int:
    if len(name) > len(str(_MOST_ID)) or int(name) > _MOST_ID:
        raise ConfigError(f"{setting}: {name[:32]} is beyond the largest id, {_MOST_ID}")
    return int(name)
