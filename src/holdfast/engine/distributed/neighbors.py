"""Reports a rank whose process has ended, by the ranks next to it on the same host.

A rank that is killed sends no last heartbeat. Without a report, the others wait for one for
``Timeouts.silent`` seconds. The system knows at once that a process has ended, and ranks with
consecutive numbers usually share a host.
"""

from __future__ import annotations

import os

from holdfast import machine
from holdfast.engine.distributed.store_connection import KeyValueStore


class Neighbors:
    """The ranks before and after this one, if they are on this host.

    All calls are made in the thread that owns the connection.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._unknown = [r for r in (rank - 1, rank + 1) if 0 <= r < size]
        self._processes: dict[int, tuple[int, str]] = {}
        self._host = ""

    def report(self, store: KeyValueStore, closed: bytes) -> None:
        """Make the last heartbeat of a neighbor whose process has ended say so. Call it after each
        heartbeat of this rank.

        ``closed``: the heartbeat of a process that has ended regularly, which stays.
        """
        if not self._host:
            self._announce(store)
        for rank in list(self._unknown):
            if store.check([f"heartbeat/{rank}/process"]):
                self._unknown.remove(rank)
                host, _, process = store.get(f"heartbeat/{rank}/process").decode().rpartition("\n")
                if host == self._host:
                    self._processes[rank] = int(process.partition(":")[0]), process
        for rank, (pid, process) in self._processes.items():
            if pid != os.getpid() and machine.pid_and_start_time(pid) != process:
                key = f"heartbeat/{rank}"
                last = bytes(store.get(key))
                # a message that is still on its way may replace this one, which is then repeated
                if last != closed and not last.startswith(b"-1 "):
                    name = last.decode().split(" ")[2]
                    store.set(key, f"-1 0 {name}".encode())

    def _announce(self, store: KeyValueStore) -> None:
        """Tell the neighbors which process this is."""
        host, boot, process = machine.process_identity()
        self._host = f"{host}\n{boot}"
        if not process.endswith(":gone"):  # the system does not tell
            store.set(f"heartbeat/{self._rank}/process", f"{self._host}\n{process}".encode())
