"""Who is at the other end of a Unix socket, and when it dies. Linux."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77  # Linux 6.5; no name in Python's socket module yet
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected.

    Attributes:
        pid: 0 where it is in a process namespace that this one cannot see.
    """

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The credentials that the kernel noted when the process connected."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def death_of(connection: socket.socket, peer: Peer) -> int | None:
    """A descriptor that is readable once the process at the other end is dead, or ``None`` where there is none.

    The end of the connection does not tell: a forked child, such as a DataLoader's worker, keeps it open.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pass
    if peer.pid <= 0:
        return None
    try:
        return os.pidfd_open(peer.pid)
    except OSError:
        return None
