"""A key-value client for one start of a job, over a store that outlives the start.

torchrun keeps its TCPStore when it restarts the ranks, and gives them no value that is common to
all ranks and differs between starts (each agent has its own restart count). Therefore each rank
sends a random token, and rank 0 replies with the session, which is a prefix of all other keys. Keys
that an earlier start has left, or that a leftover process of it still sets, are never read.

Until all ranks have joined, each rank repeats its greeting with the time of day. So a rank that
dies after its first call, but before the others make theirs, is detected like any other. A greeting
from before the start of this process may be from an earlier start, and is ignored.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from limpet import machine
from limpet.errors import RankFailed
from limpet.ranks.failure_detector import STRAGGLER_SECONDS, emit_stragglers
from limpet.ranks.kv import (
    CLOSED_HEARTBEAT,
    NO_VALUE,
    KVClient,
    Timeouts,
)
from limpet.ranks.store_connection import KeyValueStore
from limpet.threads import Latch

T = TypeVar("T")

_POLL_SECONDS = 0.01

_BEFORE_JOINING = b"0 0 "
"""The heartbeat that rank 0 sets for a rank that has greeted but not joined."""

_last_closed_at = 0.0
"""The time of day at which this process last closed a client: an earlier initialization ended."""


class Greeting(NamedTuple):
    """What a rank writes for the other ranks until all have joined.

    ``token`` is empty if there is no greeting; ``sent_at``: the time of day.
    """

    token: str = ""
    sent_at: float = 0.0
    is_closed: bool = False

    @classmethod
    def decode(cls, text: str) -> Greeting:
        token, _, rest = text.partition(" ")
        try:
            sent_at, _, closed = rest.partition(" ")
            return cls(token, float(sent_at), bool(closed))
        except ValueError:
            return cls(token)


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
        self._joined = Latch()
        self._stragglers_reported = False
        self._started_at = max(machine.process_started_at(), _last_closed_at)
        self._coordinator = Greeting()
        self._unsent: dict[str, str] = {}
        self._normal_interval, self._heartbeat_interval = self._heartbeat_interval, _POLL_SECONDS
        if rank == 0:
            self._join(self._token)

    def _join(self, session: str) -> None:
        self._store = self._with_prefix(session)
        for key, value in list(self._unsent.items()):
            self._store.compare_set(key, "", value)
        self._joined.set()

    def set_when_joined(self, key: str, value: str) -> None:
        """Set the value of a key without one, now or when rank 0 replies."""
        self._unsent[key] = value
        if self._joined.is_set():
            self.compare_and_set(key, value)

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

    def _greet(self, end: str = "") -> None:
        greeting = f"{self._token} {time.time():.3f}{end}".encode()
        self._root_store.set(f"hello/{self.rank}", greeting)

    def _send_closed(self) -> None:
        if self._unjoined_ranks or not self._joined.is_set():
            self._greet(" closed")
        if self._joined.is_set():
            super()._send_closed()

    def _answer_joins(self) -> None:
        """Reply to ranks that request the session, until each has sent a heartbeat in it."""
        self._greet()
        for rank, answered_token in list(self._unjoined_ranks.items()):
            greeting, key = self._read_greeting(rank), f"heartbeat/{rank}"
            heartbeat = self._get_or_none(key)
            is_current = greeting.sent_at >= self._started_at
            if heartbeat not in (None, _BEFORE_JOINING, CLOSED_HEARTBEAT):
                del self._unjoined_ranks[rank]
                self._root_store.delete_key(f"hello/{rank}")
                self._heartbeat_interval = _POLL_SECONDS
            elif greeting.is_closed:
                for earlier in ("", _BEFORE_JOINING.decode()) if is_current else ():
                    self._store.compare_set(key, earlier, CLOSED_HEARTBEAT.decode())
            elif greeting.token not in ("", answered_token):
                reply = f"{greeting.token} {self._token}"
                self._root_store.set(f"welcome/{rank}", reply.encode())
                self._unjoined_ranks[rank] = greeting.token
                if is_current:
                    self._store.compare_set(key, "", _BEFORE_JOINING.decode())
        if not self._unjoined_ranks:
            self._root_store.delete_key("hello/0")

    def _request_session(self) -> None:
        welcome = f"welcome/{self.rank}"
        self._heartbeat_count = 1
        self._greet()
        token, _, session = self._read_text(welcome).partition(" ")
        if token == self._token:
            self._root_store.delete_key(welcome)
            self._join(session)
        else:
            self._coordinator = self._read_greeting(0)

    def _read_greeting(self, rank: int) -> Greeting:
        return Greeting.decode(self._read_text(f"hello/{rank}"))

    def _read_text(self, key: str) -> str:
        """Return a value, or an empty string. Unlike ``get``, this never waits for the key."""
        value = bytes(self._root_store.compare_set(key, NO_VALUE, NO_VALUE)).decode()
        return "" if value == NO_VALUE else value

    def close(self) -> None:
        super().close()
        if self._pid == os.getpid():
            global _last_closed_at
            _last_closed_at = time.time()

    def _call(self, operation: Callable[[], T]) -> T:
        self.await_session()
        return super()._call(operation)

    def await_session(self, exceeded: Callable[[float], str] = lambda waited: "") -> None:
        """Wait for the reply of rank 0. Raises ``RankFailed`` if it has ended, died, or is late.

        ``exceeded``: returns the limit that a wait of so many seconds exceeds, besides that of
        ``Timeouts``, or an empty string.
        """
        if self._pid != os.getpid() or self._joined.is_set():
            return
        self.start()
        silent, stuck = self.timeouts.silent, self.timeouts.stuck
        waited = silent_for = 0.0
        now, last_greeting = self.clock(), self._coordinator
        while not self._joined.wait(_POLL_SECONDS):
            if self._closed or self._error is not None:
                raise self._unresponsive_error() from self._error
            # in parts: a process that was suspended has lost only one part
            passed = min(self.clock() - now, silent / 8)
            now, greeting = self.clock(), self._coordinator
            waited += passed
            silent_for = 0.0 if greeting != last_greeting else silent_for + passed
            last_greeting = greeting
            if waited > STRAGGLER_SECONDS and not self._stragglers_reported:
                self._stragglers_reported = True
                emit_stragglers([0], "the first call of all ranks", waited, stuck)
            is_current = greeting.sent_at >= self._started_at
            # rank 0 would replace the last greeting of an earlier start in the meantime
            if is_current and greeting.is_closed and silent_for > 2 * self._normal_interval:
                expected = "its process to run until all ranks have made their first call"
                raise self._no_reply_error(expected, "that the process has ended")
            if is_current and silent_for > silent:
                expected = f"a heartbeat within {silent:g} s"
                raise self._no_reply_error(expected, "none: the process has died or hangs")
            limit = f"it to join within {stuck:g} s" if waited > stuck else exceeded(waited)
            if limit:
                found = "no response from rank 0 since this process started"
                raise self._no_reply_error(limit, found)

    def _no_reply_error(self, expected: str, found: str) -> RankFailed:
        return RankFailed(
            "Rank 0 did not join the first call of all ranks",
            expected=expected,
            found=found,
            todo="Check the log of rank 0, and that all ranks make this call. LIMPET_SILENT and"
            " LIMPET_STUCK set the time limits in seconds",
            rank=0,
            lost=True,
        )
