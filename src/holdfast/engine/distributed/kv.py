"""Where ranks leave notes for one another: small values by key, in the TCPStore of the job.

One thread of this process speaks to the store, on a connection of its own, and nothing ever waits
inside the store: who waits looks again and again. So a store whose host has died or hangs holds up
that thread only, and whoever asks it gives up after a while. The same thread leaves a pulse every
second, by which the others tell a slow rank from a dead one.
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
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

from holdfast.errors import RankFailed
from holdfast.types import MIB

MAX_VALUE_BYTES = 4 * MIB
"""Bytes of one value in the store; a TCPStore closes the connection above 8 MiB."""

CLOSED_HEARTBEAT = b"gone"
"""The last pulse of a process that has ended in order."""

_NO_VALUE = "-"
"""Is no value of any key."""

MAX_BATCH_KEYS = 64
"""Notes that are looked at in one turn of the thread."""


WaitPosition = tuple[int, ...]
"""The number of a meeting, of a turn in it, and of a wait in that."""


class KeyValueStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used; no method of it is called that would
    wait for a key."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_set(self, keys: list[str], values: list[bytes]) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, number: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long ranks wait for one another, in seconds. ``silent``: without a pulse of a rank until
    it is taken for dead; ``stuck``: for one that is alive, but neither comes nor gets on."""

    silent: float = 60.0
    stuck: float = 600.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rank has last said of itself: pulses so far, things done, its host's name, and the
    first of the turns in which it waits for others."""

    count: int
    progress: int
    host: str
    waiting_at: WaitPosition | None = None


class KVClient:
    """The store, seen by one rank. Every method may be called from any thread, and raises
    ``RankFailed`` if the store does not answer within ``patience.silent``."""

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
        self._heartbeat_interval = min(timeouts.silent / 5, max(1.0, size / 2000))
        self._progress = 0
        self._heartbeat_count = 0
        self._waiting_at: list[WaitPosition] = []
        self._ranks_seen: set[int] = set()
        self._host = socket.gethostname()
        self._requests: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        self._thread: Thread | None = None
        self._start_lock = Lock()
        self._pid = os.getpid()
        self._closed = False
        self._error: BaseException | None = None

    # -- notes -----------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> list[str]:
        """Leave a note, of whatever length, under a key that has none. Returns what ``forget``
        takes to take it away."""
        return self.put_all({key: value})

    def put_all(self, values: Mapping[str, bytes]) -> list[str]:
        """As ``put``, of many notes, in few calls."""
        used: list[str] = []
        some: dict[str, bytes] = {}
        for key, value in values.items():
            rest = range(MAX_VALUE_BYTES, len(value), MAX_VALUE_BYTES)
            for i, at in enumerate(rest):
                used.append(f"{key}/{i}")
                self._set({used[-1]: b" " + value[at : at + MAX_VALUE_BYTES]})
            if (
                sum(map(len, some.values())) + len(value) > MAX_VALUE_BYTES
                or len(some) >= 4 * MAX_BATCH_KEYS
            ):
                self._set(some)
                some = {}
            some[key] = f"{len(rest)} ".encode() + value[:MAX_VALUE_BYTES]  # last: it is whole
        self._set(some)
        return [*values, *used]

    def _set(self, batch: dict[str, bytes]) -> None:
        if len(batch) == 1:
            self._call(lambda: self._store.set(*next(iter(batch.items()))))
        elif batch:
            self._call(lambda: self._store.multi_set(list(batch), list(batch.values())))

    def try_get(self, key: str, *, delete: bool = False) -> bytes | None:
        """The note under a key, if there is one; ``take``: and take it away."""

        def do() -> bytes | None:
            found, used = self._read_value(key)
            for name in used if delete else ():
                self._store.delete_key(name)
            return found

        found: bytes | None = self._call(do)
        return found

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """The notes under keys, up to the first that has none, or to many."""

        def do() -> list[bytes]:
            made: list[bytes] = []
            nbytes = 0
            for key in keys[:MAX_BATCH_KEYS]:
                found = None if nbytes > MAX_VALUE_BYTES else self._read_value(key)[0]
                if found is None:
                    break
                made.append(found)
                nbytes += len(found)
            return made

        found: list[bytes] = self._call(do)
        return found

    def _read_value(self, key: str) -> tuple[bytes | None, list[str]]:
        """A note, and all keys that it has taken."""
        first = self._get_or_none(key)
        if first is None:
            return None, []
        count, _, value = first.partition(b" ")
        used = [f"{key}/{i}" for i in range(int(count))]
        rest = [self._get_or_none(name) for name in used]
        if None in rest:
            return None, []  # it is being taken away
        return b"".join([value, *(part[1:] for part in rest if part)]), [key, *used]

    def _get_or_none(self, key: str) -> bytes | None:
        """The value of a key if it has one, in one call. What changes nothing asks for it: ``get``
        would wait for a key that has just been taken away."""
        found = bytes(self._store.compare_set(key, _NO_VALUE, _NO_VALUE))
        return None if found == _NO_VALUE.encode() else found

    def has_all(self, keys: list[str]) -> bool:
        """Whether there is a note under each of the keys."""
        return bool(self._call(lambda: self._store.check(keys)))

    def compare_and_set(self, key: str, value: str, expected: str = "") -> str:
        """Leave a short note if the one that is there is ``before`` (empty: if there is none); the
        one that is there now. Where there is none and one was expected, the store answers with
        the one that was expected."""
        return bytes(self._call(lambda: self._store.compare_set(key, expected, value))).decode()

    def get_text(self, key: str) -> str | None:
        """What ``claim`` has left under a key."""
        found: bytes | None = self._call(
            lambda: self._get_or_none(key) if self._store.check([key]) else None
        )
        return None if found is None else found.decode()

    def increment(self, key: str) -> int:
        """Count one more under a key; how many there are now."""
        return int(self._call(lambda: self._store.add(key, 1)))

    def delete(self, keys: Sequence[str]) -> None:
        """Take away what ``put``, ``claim`` and ``count`` have left."""
        for at in range(0, len(keys), MAX_BATCH_KEYS):
            self._call(partial(self._delete_batch, keys[at : at + MAX_BATCH_KEYS]))

    def _delete_batch(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._store.check([key]):
                self._store.delete_key(key)

    # -- pulses ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Note that this rank gets on with what it does."""
        self._progress += 1

    @contextmanager
    def waiting(self, position: WaitPosition) -> Iterator[None]:
        """Within the context this rank waits for others."""
        self._waiting_at.append(position)
        try:
            yield
        finally:
            self._waiting_at.remove(position)

    def heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        """The last pulses of ranks; None for one that has given none yet. One that has ended in
        order has -1 beats."""
        made: dict[int, Heartbeat] = {}

        def look(some: Sequence[int]) -> None:
            met = [
                r for r in some if r in self._ranks_seen
            ]  # their keys stay: to ask for all never waits
            raws = self._store.multi_get([f"pulse/{r}" for r in met]) if met else []
            made.update(
                (r, _decode_heartbeat(bytes(raw))) for r, raw in zip(met, raws, strict=True)
            )
            for r in some:
                if (
                    r not in self._ranks_seen
                    and (raw := self._get_or_none(f"pulse/{r}")) is not None
                ):
                    self._ranks_seen.add(r)
                    made[r] = _decode_heartbeat(raw)

        for at in range(0, len(ranks), 4 * MAX_BATCH_KEYS):
            self._call(partial(look, ranks[at : at + 4 * MAX_BATCH_KEYS]))
        return [made.get(r) for r in ranks]

    def _send_heartbeat(self) -> None:
        self._heartbeat_count += 1
        said = [
            self._heartbeat_count,
            self._progress,
            self._host,
            *min(self._waiting_at.copy(), default=()),
        ]
        self._store.set(f"pulse/{self.rank}", " ".join(map(str, said)).encode())

    # -- the thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to leave pulses, if it has not begun yet."""
        with self._start_lock:
            if self._thread is None and not self._closed:
                self._thread = Thread(target=self._run, name="holdfast-ranks", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _call(self, operation: Callable[[], Any]) -> Any:
        if self._pid != os.getpid():
            raise RankFailed(
                "A forked process cannot speak for the rank that it was forked from",
                todo="Save and load in the process that trains",
            )
        self.start()
        if self._closed or self._error is not None:
            raise self._unresponsive_error() from self._error
        answer: SimpleQueue[Any] = SimpleQueue()
        self._requests.put((operation, answer))
        for _ in range(8):  # not in one: a process that was stopped finds all its time gone
            with suppress(Empty):
                good, value = answer.get(timeout=self.timeouts.silent / 8)
                break
        else:
            self._error = TimeoutError(f"no answer within {self.timeouts.silent:g} s")
            raise self._unresponsive_error() from self._error
        if not good:
            raise self._unresponsive_error() from value
        return value

    def _unresponsive_error(self) -> RankFailed:
        found = "it is closed" if self._error is None else f"{self._error}".partition("\n")[0]
        return RankFailed(
            "The TCPStore, by which the ranks agree, does not answer",
            expected=f"an answer within {self.timeouts.silent:g} s",
            found=found[:200],
            todo="The process that hosts it has died or hangs, or the network is gone; what was"
            " committed before is safe. Start the job again",
            rank=None,
            lost=True,
        )

    def _run(self) -> None:
        due = 0.0
        while True:
            try:
                if (now := self.clock()) >= due:
                    due = now + self._heartbeat_interval
                    if self._error is None:  # else the others need not wait for this rank
                        self._send_heartbeat()
                asked = self._requests.get(timeout=max(0.01, due - self.clock()))
            except Empty:
                continue
            except Exception as e:  # noqa: BLE001  (top of a thread: raised by who asks next)
                self._error = e
                while (asked := self._requests.get()) is not None:
                    asked[1].put((False, e))
                return
            if asked is None:
                with suppress(Exception):
                    self._store.set(f"pulse/{self.rank}", CLOSED_HEARTBEAT)
                return
            do, answer = asked
            try:
                answer.put((True, do()))
            except Exception as e:  # noqa: BLE001  (raised by who has asked)
                self._error = e
                answer.put((False, e))

    def close(self) -> None:
        """Say that this rank is gone, and speak no more. Waits for that two seconds at most."""
        with self._start_lock:
            self._closed, thread, self._thread = True, self._thread, None
        atexit.unregister(self.close)
        if thread is not None and self._pid == os.getpid():
            self._requests.put(None)
            thread.join(2)


def _decode_heartbeat(raw: bytes) -> Heartbeat:
    if raw == CLOSED_HEARTBEAT:
        return Heartbeat(-1, 0, "")
    beats, progress, host, *waits = raw.decode().split(" ")
    return Heartbeat(int(beats), int(progress), host, tuple(map(int, waits)) or None)
