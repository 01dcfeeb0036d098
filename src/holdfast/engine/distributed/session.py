"""A key-value client for one start of a job, over a store that outlives the start.

torchrun keeps its TCPStore when it restarts the ranks, and gives them no value that is common to
all ranks and differs between starts (each agent has its own restart count). Therefore each rank
sends a random token, and rank 0 replies with the session, which is a prefix of all other keys. Keys
that an earlier start has left, or that a leftover process of it still sets, are never read.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from holdfast.engine.distributed.failure_detector import STRAGGLER_SECONDS, emit_stragglers
from holdfast.engine.distributed.kv import KeyValueStore, KVClient, Timeouts
from holdfast.errors import RankFailed

T = TypeVar("T")

_POLL_SECONDS = 0.01


class SessionKVClient(KVClient):
    """A ``KVClient`` within a session.

    ``with_prefix``: returns a view of the store with a prefix before all keys. The first request of
    a rank waits for the reply of rank 0, for at most ``timeouts.stuck`` seconds. Rank 0 replies as
    soon as its own client has started.
    """

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
        is_joining = self._unjoined_ranks or not self._joined.is_set()
        self._heartbeat_interval = (
            min(self._normal_interval, self._heartbeat_interval * 1.2)
            if is_joining
            else self._normal_interval
        )
        if self._joined.is_set():
            super()._send_heartbeat()

    def _answer_joins(self) -> None:
        """Reply to ranks that request the session, until each has sent a heartbeat in it."""
        for rank, answered_token in list(self._unjoined_ranks.items()):
            token = self._read_text(f"hello/{rank}")
            if self._store.check([f"heartbeat/{rank}"]):
                del self._unjoined_ranks[rank]
                self._heartbeat_interval = _POLL_SECONDS
            elif token not in ("", answered_token):
                self._root_store.set(f"welcome/{rank}", f"{token} {self._token}".encode())
                self._unjoined_ranks[rank] = token

    def _request_session(self) -> None:
        hello, welcome = f"hello/{self.rank}", f"welcome/{self.rank}"
        if self._heartbeat_count == 0:
            self._root_store.set(hello, self._token.encode())
            self._heartbeat_count = 1
        token, _, session = self._read_text(welcome).partition(" ")
        if token == self._token:
            self._root_store.delete_key(welcome)
            self._join(session)

    def _read_text(self, key: str) -> str:
        return bytes(self._root_store.get(key)).decode() if self._root_store.check([key]) else ""

    def _call(self, operation: Callable[[], T]) -> T:
        if self._pid == os.getpid() and not self._joined.is_set():
            self.start()
            self._await_session()
        return super()._call(operation)

    def _await_session(self) -> None:
        started_at, timeout = self.clock(), self.timeouts.stuck
        while not self._joined.wait(_POLL_SECONDS):
            if self._closed or self._error is not None:
                raise self._unresponsive_error() from self._error
            waited = self.clock() - started_at
            if waited > STRAGGLER_SECONDS and not self._stragglers_reported:
                self._stragglers_reported = True
                emit_stragglers([0], "the first call of all ranks", waited, timeout)
            if waited > timeout:
                raise RankFailed(
                    "Rank 0 did not join the first call of all ranks",
                    expected=f"it to join within {timeout:g} s",
                    found="no response from rank 0 since this process started",
                    todo="Check the log of rank 0, and that all ranks make this call."
                    " HOLDFAST_STUCK sets the time limit in seconds",
                    rank=0,
                    lost=True,
                )
