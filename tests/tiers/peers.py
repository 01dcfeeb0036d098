"""Peers in one process, and a proxy between them that does harm."""

import os
import shutil
import socket
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from limpet.format.digest import digest
from limpet.format.names import shard_name
from limpet.ranks.wire import make_secret
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.tiers.peers.addresses import PeerAddress
from limpet.tiers.peers.client import PeerConnection
from limpet.tiers.peers.server import PeerLimits, PeerServer

SECRET = make_secret()
LIMITS = PeerLimits(file_bytes=1 << 30, total_bytes=1 << 30)


def file(name):
    """Return the key of a shard that a test calls ``name``."""
    return f"version_1/{shard_name(0, 1, digest(name.encode())[:12])}"


A, B = file("a"), file("b")


@contextmanager
def memory_folder():
    path = Path(tempfile.mkdtemp(prefix="limpet-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def serving(folder, limits=LIMITS, secret=SECRET, store=None):
    with PeerServer(store or TmpfsStore(folder), "127.0.0.1", secret, limits) as server:
        yield server


def address(server, rank=1):
    return PeerAddress(rank, server.address, server.port)


def connect(server, *, secret=SECRET, rank=0, seconds=20):
    return PeerConnection(address(server), secret, rank, seconds, "the test")


def ask(peer):
    """Make a request, which the server answers."""
    store = MemoryStore()
    store.put_if_absent(file("asked"), b"")
    peer.send_file(store, file("asked"))


@contextmanager
def forked_child():
    """Within the block, a forked process lives."""
    ready, begun = os.pipe()
    child = os.fork()
    if not child:
        os.close(begun)
        os.read(ready, 1)  # lives until the parent closes the pipe
        os._exit(0)
    try:
        yield
    finally:
        os.close(begun)
        os.waitpid(child, 0)
        os.close(ready)


class Proxy:
    """Passes bytes between a client and a server, as ``change(direction, offset, data)`` returns
    them. If it returns None, the connections are cut."""

    def __init__(self, server, change):
        self._server, self._change = server, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address, self.port = self._listener.getsockname()
        Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            other = socket.create_connection((self._server.address, self._server.port))
            for direction, source, target in (("up", client, other), ("down", other, client)):
                Thread(target=self._pass, args=(direction, source, target), daemon=True).start()

    def _pass(self, direction, source, target):
        offset = 0
        try:
            while data := source.recv(65536):
                changed = self._change(direction, offset, data)
                if changed is None:
                    break
                offset += len(data)
                target.sendall(changed)
        except OSError:
            pass
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def limit_buffers(self, size):
        """Let the connections from clients buffer about so many bytes."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._listener.close()
