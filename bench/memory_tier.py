"""Topic 13: a snapshot into memory, and its copy to a peer, compared with memcpy and a socket."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import fresh_process
from bench.report import Options, Section, judge

_REPEATS = 10
_SETTLED = 4
"""The saves after which the files of three snapshots exist."""

_SERVER = """
import sys
from limpet.storage.local.tmpfs import TmpfsStore
from limpet.tiers.peers.server import PeerLimits, PeerServer
store = TmpfsStore(sys.argv[1])
server = PeerServer(store, "127.0.0.1", "secret", PeerLimits(1 << 40, 1 << 40, 1 << 40))
print(server.port, flush=True)
for line in sys.stdin:
    store.delete(line.strip())
    print(flush=True)
"""

_BARE_SERVER = """
import mmap, socket, sys
listener, size = socket.create_server(("127.0.0.1", 0)), int(sys.argv[1])
view = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
print(listener.getsockname()[1], flush=True)
while True:
    connection, at = listener.accept()[0], 0
    while at < size:
        at += connection.recv_into(view[at : at + (1 << 20)])
    connection.sendall(b"k")
    connection.close()
"""


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_capture(folder: str, size: int, spare_files: int) -> dict[str, list[float]]:
    """Alternate between memcpy and the capture of a state; return the seconds of each, and of the
    background half. Runs in a child process."""
    from bench import states
    from limpet.buffers import BufferPool
    from limpet.saving.commit import VersionMetadata
    from limpet.saving.save import begin_save, finish_save
    from limpet.settings import read_settings
    from limpet.snapshot.location import Location
    from limpet.storage.local.tmpfs import TmpfsStore

    state, threads = states.large_state(size), read_settings().threads
    memcpy = states.memcpy_of(state)
    store, pool = TmpfsStore(folder, spare_files=spare_files), BufferPool(1 << 40)
    found: dict[str, list[float]] = {"memcpy": [], "capture": [], "background": []}
    for version in range(1, _REPEATS + _SETTLED):
        found["memcpy"].append(memcpy(threads))
        location, metadata = Location(store, f"version_{version}"), VersionMetadata(step=version)
        start = time.perf_counter()
        job = begin_save(location, state, metadata, pool, stage_now=True)
        found["capture"].append(time.perf_counter() - start)
        start = time.perf_counter()
        finish_save(job)
        found["background"].append(time.perf_counter() - start)
        for stat in store.list(f"version_{version - 2}"):
            store.delete(stat.key)
    return {"first": found["capture"][:1]} | {n: v[_SETTLED - 1 :] for n, v in found.items()}


def measure_transfer(folder: str, size: int) -> dict[str, list[float]]:
    """Alternate between a bare socket and the copy of a file to a peer, over loopback; return the
    seconds of each. Runs in a child process; the servers are other processes."""
    from limpet.storage.local.tmpfs import TmpfsStore
    from limpet.tiers.peers.addresses import PeerAddress
    from limpet.tiers.peers.client import PeerConnection

    store, data = TmpfsStore(f"{folder}/own"), memoryview(os.urandom(size))
    with store.put_mapped("version_1/shard", size) as upload:
        upload.write_at(0, data)
        upload.commit()
    commands = ([_SERVER, f"{folder}/peer"], [_BARE_SERVER, str(size)])
    servers = [
        subprocess.Popen([sys.executable, "-c", *command], stdin=-1, stdout=-1, text=True)
        for command in commands
    ]
    peer_input, peer_output = servers[0].stdin, servers[0].stdout
    assert peer_input is not None  # noqa: S101
    assert peer_output is not None  # noqa: S101
    ports = [int(server.stdout.readline()) for server in servers if server.stdout]

    def send_to_peer() -> None:
        address = PeerAddress(1, "127.0.0.1", ports[0])
        with PeerConnection(address, "secret", 0, 600, "the benchmark") as peer:
            peer.send_file(store, "version_1/shard")

    def send_bare() -> None:
        with socket.create_connection(("127.0.0.1", ports[1])) as connection:
            for at in range(0, size, 1 << 20):
                connection.sendall(data[at : at + (1 << 20)])
            connection.recv(1)

    found: dict[str, list[float]] = {"bare": [], "peer": []}
    try:
        for _ in range(_REPEATS):
            found["bare"].append(_seconds(send_bare))
            found["peer"].append(_seconds(send_to_peer))
            peer_input.write("version_1/shard\n")
            peer_input.flush()
            peer_output.readline()
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    return {name: values[2:] for name, values in found.items()}


def sections(options: Options) -> list[Section]:
    size = options.medium
    title = f"Snapshot of {size >> 20} MiB into memory, and its copy to a peer"
    text = (
        "A snapshot is staged into the file in /dev/shm itself. The baseline is one copy of the"
        " same state into touched memory by as many threads. With spare files, the files of"
        " deleted snapshots are used again; without, each file is new. The copy to a peer goes"
        " over loopback, with digests on both sides; the baseline is a bare socket. Both sides"
        " share the cores of this machine."
    )
    results: dict[str, dict[str, list[float]]] = {"spare": {}, "new": {}, "transfer": {}}
    missing = []
    arguments: dict[str, dict[str, Any]] = {
        "spare": {"spare_files": 3},
        "new": {"spare_files": 0},
        "transfer": {},
    }
    for name, more in arguments.items():
        folder = Path(tempfile.mkdtemp(prefix="limpet-bench-", dir="/dev/shm"))
        function = "measure_transfer" if name == "transfer" else "measure_capture"
        try:
            results[name] = fresh_process.call(
                f"bench.memory_tier:{function}", folder=str(folder), size=size, **more
            )
        except fresh_process.MeasurementFailed as failure:
            missing.append(f"limpet: {failure}")
        finally:
            shutil.rmtree(folder)

    def ratios(name: str, of: str, to: str) -> list[float]:
        found = results[name]
        return [a / b for a, b in zip(found.get(of, []), found.get(to, []), strict=True)]

    def milliseconds(name: str, of: str) -> list[float]:
        return [1000 * each for each in results[name].get(of, [])]

    reported = {
        "capture": milliseconds("spare", "capture"),
        "memcpy": milliseconds("spare", "memcpy"),
        "the rest, in the background": milliseconds("spare", "background"),
        "the first capture": milliseconds("spare", "first"),
        "capture into new files": milliseconds("new", "capture"),
        "copy to a peer": milliseconds("transfer", "peer"),
        "bare socket": milliseconds("transfer", "bare"),
    }
    verdicts = [
        judge("capture / memcpy", ratios("spare", "capture", "memcpy"), most=1.2),
        judge("copy to a peer / bare socket", ratios("transfer", "peer", "bare")),
        *(judge(label, values, unit="ms", digits=0) for label, values in reported.items()),
    ]
    return [Section(title, text, verdicts, missing=missing)]
