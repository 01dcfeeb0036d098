"""A key-value client for the TCPStore of the job, by which ranks exchange small values.

One thread of this process owns the connection and never blocks in the store; waiters poll. If the
host of the store dies or hangs, only that thread is blocked, and callers time out. The thread also
sends a heartbeat at a regular interval (1 second for up to 2000 ranks), by which other ranks
distinguish a slow rank from a dead one.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread
from typing import Any, TypeVar

from limpet.errors import RankFailed
from limpet.ranks.failure_detector import Heartbeat, Neighbors, WaitPosition
from limpet.ranks.store_connection import KeyValueStore, StoreConnection, host_of
from limpet.types import MIB

T = TypeVar("T")

MAX_VALUE_BYTES = 4 * MIB
"""The maximum size of one value in bytes. A TCPStore closes the connection above 8 MiB."""

CLOSED_HEARTBEAT = b"closed"
"""The last heartbeat of a process that has ended regularly."""

NO_VALUE = "-"
"""A value that no key ever has."""

MAX_BATCH_KEYS = 64
"""The maximum number of values that the thread reads for one request."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long ranks wait for one another, in seconds.

    ``silent``: the time without a heartbeat after which a rank is considered dead; ``stuck``: the
    time after which a live rank that neither joins nor makes progress is considered stuck.
    """

    silent: float = 60.0
    stuck: float = 600.0


class KVClient:
    """A client of one rank for the store.

    Every method may be called from any thread. A method raises ``RankFailed`` if the store does not
    respond within ``timeouts.silent`` seconds. ``connection``: the connection of ``store``, if only
    this client uses it.
    """

    connection: StoreConnection | None = None

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        size: int,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.timeouts = timeouts
        self.clock = clock
        self._store = store
        self.store_host = host_of(store)
        self._heartbeat_interval = min(timeouts.silent / 5, max(1.0, size / 2000))
        self._progress = 0
        self._heartbeat_count = 0
        self._waiting_at: list[WaitPosition] = []
        self._ranks_seen: set[int] = set()
        self._host = socket.gethostname()
        self._neighbors = Neighbors(rank, size)
        self._requests: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        self._thread: Thread | None = None
        # The garbage collector may call ``close`` in the thread that starts the client.
        self._start_lock = RLock()
        self._pid = os.getpid()
        self._closed = False
        self.peer_error: BaseException | None = None
        """The error that has ended the training of another rank, until this rank raises it."""

        self.give_up_at = inf
        """The time on ``clock`` at which waits for other ranks end, unless they have a deadline."""

        self._error: BaseException | None = None
        """Without its traceback, which would keep this client and its connection alive."""

    def raise_peer_error(self) -> None:
        """Raise ``peer_error``, once, in the training thread: saves in the background go on."""
        if (error := self.peer_error) and not current_thread().name.startswith("limpet-"):
            self.peer_error = None
            raise error

    # -- values ----------------------------------------------------------------------------------

    def put_all(self, values: Mapping[str, bytes]) -> list[str]:
        """Set the values, of any length, of keys that have none, in few requests.

        Returns the keys to pass to ``delete``.
        """
        extra_keys: list[str] = []
        batch: dict[str, bytes] = {}
        for key, value in values.items():
            extra_parts = range(MAX_VALUE_BYTES, len(value), MAX_VALUE_BYTES)
            for i, start in enumerate(extra_parts):
                extra_keys.append(f"{key}/{i}")
                self._set({extra_keys[-1]: b" " + value[start : start + MAX_VALUE_BYTES]})
            if (
                sum(map(len, batch.values())) + len(value) > MAX_VALUE_BYTES
                or len(batch) >= 4 * MAX_BATCH_KEYS
            ):
                self._set(batch)
                batch = {}
            # The first part is written last, because it completes the value.
            batch[key] = f"{len(extra_parts)} ".encode() + value[:MAX_VALUE_BYTES]
        self._set(batch)
        return [*values, *extra_keys]

    def _set(self, batch: dict[str, bytes]) -> None:
        if len(batch) == 1:
            self._call(lambda: self._store.set(*next(iter(batch.items()))))
        elif batch:
            self._call(lambda: self._store.multi_set(list(batch), list(batch.values())))

    def try_get(self, key: str, *, delete: bool = False) -> bytes | None:
        """Return the value of a key, or None; with ``delete``, also delete the key."""

        def read() -> bytes | None:
            value, keys = self._read_value(key)
            for name in keys if delete else ():
                self._store.delete_key(name)
            return value

        return self._call(read)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys, up to the first key without a value or a limit per request."""

        def read() -> list[bytes]:
            values: list[bytes] = []
            nbytes = 0
            for key in keys[:MAX_BATCH_KEYS]:
                value = None if nbytes > MAX_VALUE_BYTES else self._read_value(key)[0]
                if value is None:
                    break
                values.append(value)
                nbytes += len(value)
            return values

        return self._call(read)

    def _read_value(self, key: str) -> tuple[bytes | None, list[str]]:
        """Return a value and all keys that it uses."""
        first = self._get_or_none(key)
        if first is None:
            return None, []
        count, _, value = first.partition(b" ")
        extra_keys = [f"{key}/{i}" for i in range(int(count))]
        extra_parts = [self._get_or_none(name) for name in extra_keys]
        if None in extra_parts:
            return None, []  # another rank is deleting it
        return b"".join([value, *(part[1:] for part in extra_parts if part)]), [key, *extra_keys]

    def _get_or_none(self, key: str) -> bytes | None:
        """Return the value of a key, or None, in one request.

        This uses a ``compare_set`` that changes nothing, because ``get`` would wait for a key that
        has just been deleted.
        """
        value = bytes(self._store.compare_set(key, NO_VALUE, NO_VALUE))
        return None if value == NO_VALUE.encode() else value

    def has_all(self, keys: list[str]) -> bool:
        """Return True if every key has a value."""
        return bool(self._call(lambda: self._store.check(keys)))

    def compare_and_set(self, key: str, value: str, expected: str = "") -> str:
        """Set a short value if the current value is ``expected`` (empty: if there is none).

        Returns the current value after that. If there is none but one was expected, the store
        returns ``expected``.
        """
        return bytes(self._call(lambda: self._store.compare_set(key, expected, value))).decode()

    def get_text(self, key: str) -> str | None:
        """Return the value that ``compare_and_set`` has set, or None."""
        value = self._call(lambda: self._get_or_none(key) if self._store.check([key]) else None)
        return None if value is None else value.decode()

    def increment(self, key: str) -> int:
        """Increment the counter of a key and return its new value."""
        return int(self._call(lambda: self._store.add(key, 1)))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys that ``put_all``, ``compare_and_set``, or ``increment`` has set."""
        for at in range(0, len(keys), MAX_BATCH_KEYS):
            self._call(partial(self._delete_batch, keys[at : at + MAX_BATCH_KEYS]))

    def _delete_batch(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._store.check([key]):
                self._store.delete_key(key)

    # -- heartbeats ------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """A counter that increases when this rank makes progress."""
        return self._progress

    def advance(self) -> None:
        """Record that this rank has made progress."""
        self._progress += 1

    @contextmanager
    def waiting(self, position: WaitPosition) -> Iterator[None]:
        """Record within the context that this rank waits for others."""
        self._waiting_at.append(position)
        try:
            yield
        finally:
            self._waiting_at.remove(position)

    def heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        """Return the last heartbeats of ranks; None for a rank without a first heartbeat.

        The ``count`` of a rank that has ended is -1.
        """
        heartbeats: dict[int, Heartbeat] = {}

        def read(batch: Sequence[int]) -> None:
            # The keys of seen ranks are never deleted, so ``multi_get`` does not wait.
            seen = [r for r in batch if r in self._ranks_seen]
            raws = self._store.multi_get([f"heartbeat/{r}" for r in seen]) if seen else []
            heartbeats.update(
                (r, _decode_heartbeat(bytes(raw))) for r, raw in zip(seen, raws, strict=True)
            )
            for r in batch:
                if r not in heartbeats and (raw := self._get_or_none(f"heartbeat/{r}")) is not None:
                    self._ranks_seen.add(r)
                    heartbeats[r] = _decode_heartbeat(raw)

        for at in range(0, len(ranks), 4 * MAX_BATCH_KEYS):
            self._call(partial(read, ranks[at : at + 4 * MAX_BATCH_KEYS]))
        return [heartbeats.get(r) for r in ranks]

    def _send_heartbeat(self) -> None:
        self._heartbeat_count += 1
        fields = [
            self._heartbeat_count,
            self._progress,
            self._host,
            *min(self._waiting_at.copy(), default=()),
        ]
        self._store.set(f"heartbeat/{self.rank}", " ".join(map(str, fields)).encode())
        self._neighbors.report(self._store, CLOSED_HEARTBEAT)

    def _send_closed(self) -> None:
        self._store.set(f"heartbeat/{self.rank}", CLOSED_HEARTBEAT)

    # -- the thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that sends heartbeats if it is not running."""
        with self._start_lock:
            if self._thread is None and not self._closed:
                self._thread = Thread(target=self._run, name="limpet-ranks", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _call(self, operation: Callable[[], T]) -> T:
        if self._pid != os.getpid():
            raise RankFailed(
                "A forked process cannot act for the rank that it was forked from",
                todo="Save and load in the training process",
            )
        self.start()
        if self._closed or self._error is not None:
            raise self._unresponsive_error() from self._error
        answer: SimpleQueue[tuple[T, Exception | None]] = SimpleQueue()
        self._requests.put((operation, answer))
        for _ in range(8):  # in parts: a process that was suspended has lost only one part
            with suppress(Empty):
                value, error = answer.get(timeout=self.timeouts.silent / 8)
                break
        else:
            self._error = TimeoutError(f"no response within {self.timeouts.silent:g} s")
            raise self._unresponsive_error() from self._error
        if error is not None:
            raise self._unresponsive_error() from error
        return value

    def _unresponsive_error(self) -> RankFailed:
        if self._error is None:
            return RankFailed(
                "This rank has left the group of ranks",
                expected="a call before destroy_process_group, Group.close, or the process's end",
                found="that the client is closed",
                todo="Initialize or join a group again, and create a new Checkpointer",
                rank=self.rank,
                lost=True,
            )
        return RankFailed(
            "The TCPStore that the ranks use to communicate does not respond",
            expected=f"a response within {self.timeouts.silent:g} s",
            found=str(self._error).partition("\n")[0][:200],
            todo="The process that hosts the store has died or hangs, or the network is down."
            " Committed versions are safe; restart the job",
            rank=None,
            lost=True,
        )

    def _run(self) -> None:
        next_heartbeat_at = 0.0
        while True:
            try:
                if (now := self.clock()) >= next_heartbeat_at:
                    next_heartbeat_at = now + self._heartbeat_interval
                    # After an error, no heartbeat: the others then stop waiting for this rank.
                    if self._error is None:
                        self._send_heartbeat()
                request = self._requests.get(timeout=max(0.01, next_heartbeat_at - self.clock()))
            except Empty:
                continue
            except Exception as e:  # noqa: BLE001  (top of a thread: raised in the next caller)
                self._error = e.with_traceback(None)
                while (request := self._requests.get()) is not None:
                    request[1].put((None, e))
                return
            if request is None:
                with suppress(Exception):
                    self._send_closed()
                return
            operation, answer = request
            try:
                answer.put((operation(), None))
            except Exception as e:  # noqa: BLE001  (raised in the caller)
                self._error = e.with_traceback(None)
                answer.put((None, e))

    def close(self) -> None:
        """Send a last heartbeat, end the thread, and close the connection.

        If the store does not respond within 2 seconds, the connection is interrupted. A store
        without a connection gets ``timeouts.silent`` seconds, because a call that returned while
        the interpreter ends would end the process with "terminate called".
        """
        with self._start_lock:
            self._closed, thread, self._thread = True, self._thread, None
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return
        is_current = thread is current_thread()  # the garbage collector may call this anywhere
        if thread is not None and not is_current:
            self._requests.put(None)
            thread.join(2)
        is_interrupted = self.connection is not None and self.connection.interrupt()
        if thread is not None and not is_current:
            thread.join(2 if is_interrupted else self.timeouts.silent)


def _decode_heartbeat(raw: bytes) -> Heartbeat:
    if raw == CLOSED_HEARTBEAT:
        return Heartbeat(-1, 0, "")
    count, progress, host, *position = raw.decode().split(" ")
    return Heartbeat(int(count), int(progress), host, tuple(map(int, position)) or None)
