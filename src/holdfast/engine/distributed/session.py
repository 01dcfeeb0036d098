"""A board for one start of a job, over a store that outlives it.

torchrun keeps its TCPStore when it starts the ranks again, and tells them nothing by which all of
them could tell one start from another (its count of restarts is each agent's own). So each rank
says a number that only it knows, and rank 0 answers it by the session, a prefix of all other keys:
what an earlier start has left, or a process left over from it still says, is never read.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from threading import Event
from typing import Any

from holdfast.engine.distributed.failure_detector import STRAGGLER_SECONDS, emit_stragglers
from holdfast.engine.distributed.kv import KeyValueStore, KVClient, Timeouts
from holdfast.errors import RankFailed

_POLL_SECONDS = 0.01


class SessionKVClient(KVClient):
    """A ``Board`` within a session. ``within``: the store with a prefix before all keys. A rank
    that asks for anything first waits, ``patience.stuck`` seconds at most, until rank 0 has
    answered; it does so as soon as it has a board itself."""

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        timeouts: Timeouts,
        with_prefix: Callable[[str], KeyValueStore],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, rank, size, timeouts, clock)
        self._root_store = store
        self._with_prefix = with_prefix
        self._token = secrets.token_hex(8)
        self._unjoined_ranks = dict.fromkeys(range(1, size) if rank == 0 else (), "")
        self._joined = Event()
        self._stragglers_reported = False
        self._normal_interval, self._heartbeat_interval = self._heartbeat_interval, _POLL_SECONDS
        if rank == 0:
            self._join(self._token)

    def _join(self, session: str) -> None:
        self._store = self._with_prefix(session)
        self._joined.set()

    def _send_heartbeat(self) -> None:
        if self._unjoined_ranks:
            self._answer_joins()
        elif not self._joined.is_set():
            self._request_session()
        waits = self._unjoined_ranks or not self._joined.is_set()
        self._heartbeat_interval = (
            min(self._normal_interval, self._heartbeat_interval * 1.2)
            if waits
            else self._normal_interval
        )
        if self._joined.is_set():
            super()._send_heartbeat()

    def _answer_joins(self) -> None:
        """Answer the ranks that ask for the session, until each has left a pulse in it."""
        for rank, answered in list(self._unjoined_ranks.items()):
            said = self._read_text(f"hello/{rank}")
            if self._store.check([f"pulse/{rank}"]):
                del self._unjoined_ranks[rank]
                self._heartbeat_interval = _POLL_SECONDS
            elif said not in ("", answered):
                self._root_store.set(f"welcome/{rank}", f"{said} {self._token}".encode())
                self._unjoined_ranks[rank] = said

    def _request_session(self) -> None:
        hello, welcome = f"hello/{self.rank}", f"welcome/{self.rank}"
        if self._heartbeat_count == 0:
            self._root_store.set(hello, self._token.encode())
            self._heartbeat_count = 1
        said, _, session = self._read_text(welcome).partition(" ")
        if said == self._token:
            self._root_store.delete_key(welcome)
            self._join(session)

    def _read_text(self, key: str) -> str:
        return bytes(self._root_store.get(key)).decode() if self._root_store.check([key]) else ""

    def _call(self, operation: Callable[[], Any]) -> Any:
        if self._pid == os.getpid() and not self._joined.is_set():
            self.start()
            self._await_session()
        return super()._call(operation)

    def _await_session(self) -> None:
        began, stuck = self.clock(), self.timeouts.stuck
        while not self._joined.wait(_POLL_SECONDS):
            if self._closed or self._error is not None:
                raise self._unresponsive_error() from self._error
            waited = self.clock() - began
            if waited > STRAGGLER_SECONDS and not self._stragglers_reported:
                self._stragglers_reported = True
                emit_stragglers([0], "the first call of all ranks", waited, stuck)
            if waited > stuck:
                raise RankFailed(
                    "Rank 0 does not take part in what other ranks do",
                    expected=f"it within {stuck:g} s",
                    found="no sign of it since this process was started",
                    todo="Look at that rank's log. Do all ranks make this call? The bound is"
                    " HOLDFAST_STUCK (seconds)",
                    rank=0,
                    lost=True,
                )
