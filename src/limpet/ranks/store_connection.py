"""The job's TCPStore: its methods, and the TCP connection with which a call can be ended.

A call of a TCPStore does not return while the process that hosts the store is stopped, whatever
the timeout. If it returns after the interpreter has begun to end, PyTorch's binding ends the
process with "terminate called" and exit code -6. So the client ends its call before. PyTorch offers
no method for that, but shows the file descriptor in the ``repr`` of the store.
"""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from typing import Protocol

_CLIENT = re.compile(r"SocketImpl\(fd=(\d+), .*?remote=.*?:(\d+)\)")


class KeyValueStore(Protocol):
    """The methods of ``torch.distributed.Store`` that Limpet uses.

    They are called such that none of them waits for a key.
    """

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, number: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class StoreConnection:
    """A duplicate of the file descriptor of a TCPStore, which only Limpet uses.

    ``description``: the ``repr`` of the store. Stores of other kinds, whose calls do not wait for a
    process, have no connection.
    """

    def __init__(self, description: str) -> None:
        match = _CLIENT.search(description)
        self._port = -1 if match is None else int(match[2])
        self._fd = -1
        if match is not None:
            with suppress(OSError):  # no descriptor is left: ``interrupt`` then returns False
                self._fd = os.dup(int(match[1]))

    def interrupt(self) -> bool:
        """Make the call in progress and all later calls fail at once.

        Returns False if there is no connection.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return False
        # A socket object for the whole lifetime could change the blocking mode of the connection.
        with socket.socket(fileno=fd) as connection:
            try:
                if connection.getpeername()[1] != self._port:
                    return False
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the store has closed the connection, so no call waits for it
                return True
            return True


def host_of(store: object) -> str:
    """Return the host that serves a TCPStore, or this host for a store of another kind."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", "127.0.0.1"))
