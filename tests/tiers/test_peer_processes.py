"""Transfers between processes, one of which is killed or stopped at every point."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from limpet.errors import LimpetError, Unavailable
from limpet.ranks.wire import HandshakeLimits
from limpet.storage.local.store import LocalStore
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.storage.memory import MemoryStore
from limpet.testing.contract import keys, partial_keys, put, random_bytes
from tests.tiers.peers import (
    LIMITS,
    SECRET,
    A,
    B,
    Proxy,
    ask,
    connect,
    memory_folder,
    serving,
)
from tests.waiting import wait_until

SIZE = 4 << 20
SHORT_LIMITS = replace(
    LIMITS, idle_seconds=2, part_seconds=2, handshakes=HandshakeLimits(seconds=2)
)

SERVER = """
import sys
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.tiers.peers.server import PeerLimits, PeerServer
limits = PeerLimits(1 << 30, 1 << 30)
server = PeerServer(TmpfsStore(sys.argv[1]), "127.0.0.1", sys.argv[2], limits)
print(server.port, flush=True)
sys.stdin.read()
"""

SENDER = """
import sys
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.tiers.peers.addresses import PeerAddress
from limpet.tiers.peers.client import PeerConnection
address = PeerAddress(1, "127.0.0.1", int(sys.argv[3]))
with PeerConnection(address, sys.argv[2], 0, 60, "the test") as peer:
    peer.send_file(TmpfsStore(sys.argv[1]), sys.argv[4])
"""


class ServerProcess:
    """A server in another process."""

    def __init__(self, folder):
        command = [sys.executable, "-c", SERVER, str(folder), SECRET]
        self.process = subprocess.Popen(command, stdin=-1, stdout=subprocess.PIPE)
        self.address, self.port = "127.0.0.1", int(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("at", [40, 300, 1 << 20, SIZE + 150])
def test_the_receiver_is_killed(folder, at):
    """Nothing is visible, what it left is removed, and another one takes the copy."""
    source, data = MemoryStore(), random_bytes(SIZE)
    put(source, A, data)
    with ServerProcess(folder) as server:

        def kill(direction, offset, data):
            if direction == "up" and offset + len(data) > at:
                server.process.kill()
                server.process.wait()
            return data

        with Proxy(server, kill) as proxy, pytest.raises(Unavailable), connect(proxy) as peer:
            peer.send_file(source, A)
    store = TmpfsStore(folder)
    store.remove_leftovers()
    assert keys(store) == partial_keys(store) == []
    with ServerProcess(folder) as server, connect(server) as peer:
        assert peer.send_file(source, A).length == SIZE
    assert store.get(A, SIZE) == data  # which outlives the receiver


@pytest.mark.slow
@pytest.mark.parametrize("at", [50, 300, 1 << 20, SIZE])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_sender_is_killed_or_stopped(folder, at, how):
    """The receiver drops the copy, and serves others meanwhile."""
    with memory_folder() as other, serving(folder, SHORT_LIMITS) as server:
        put(TmpfsStore(other), A, random_bytes(SIZE))
        children = []

        def harm(direction, offset, data):
            wait_until(lambda: children)
            if direction == "up" and offset + len(data) > at:
                os.kill(children[0].pid, how)
                return data if at >= SIZE else data[: max(0, at - offset)] or None
            return data

        with Proxy(server, harm) as proxy:
            command = [sys.executable, "-c", SENDER, str(other), SECRET, str(proxy.port), A]
            children.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            try:
                if how == signal.SIGKILL:
                    assert children[0].wait(30) == -how
                else:
                    wait_until(lambda: _is_stopped(children[0].pid), 30)
                source = MemoryStore()
                put(source, B, b"from another rank")
                with connect(server, rank=2) as peer:
                    peer.send_file(source, B)
                wait_until(lambda: not server._connections)
            finally:
                children[0].kill()
                children[0].wait()
        assert partial_keys(LocalStore(folder)) == []
        found = keys(LocalStore(folder))
        assert found in ([B], sorted([A, B]))
        if A in found:  # only the acknowledgment was lost
            assert at == SIZE
            assert LocalStore(folder).get(A, SIZE) == random_bytes(SIZE)


def _is_stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
def test_a_stopped_receiver_blocks_only_its_own_transfer(folder):
    source = MemoryStore()
    put(source, A, random_bytes(32 << 20))  # more than the buffers of the sockets
    with memory_folder() as other, ServerProcess(folder) as stopped, serving(other) as server:
        with connect(stopped) as peer:
            ask(peer)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        with (
            pytest.raises(LimpetError, match=r"time is over|timed out"),
            connect(stopped, seconds=0.3) as peer,
        ):
            peer.send_file(source, A)
        with connect(server) as peer:
            assert peer.send_file(source, A).length == 32 << 20
        os.kill(stopped.process.pid, signal.SIGCONT)
        with connect(stopped) as peer:
            assert peer.send_file(source, A).length == 32 << 20
