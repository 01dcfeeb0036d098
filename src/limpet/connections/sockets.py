"""Sockets that belong to one process only, and that notice the end of the other host."""

from __future__ import annotations

import socket
import weakref

from limpet.machine import after_fork

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A connection ends 30 s after the last sign of life of the other host. Some systems lack some."""

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_when_forked(connection: socket.socket) -> None:
    """Close a socket in a forked process. Otherwise, a connection would seem to be alive as long as
    a worker of a data loader lives."""
    _open_sockets.add(connection)


def keep_alive(connection: socket.socket) -> None:
    """Let the system find out whether the other host of a TCP connection is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_sockets() -> None:
    for connection in list(_open_sockets):
        connection.close()


after_fork(_close_sockets)
