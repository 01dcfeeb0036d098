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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol

from holdfast.errors import RankFailed
from holdfast.words import MIB

LARGEST = 4 * MIB
"""Bytes of one value in the store; a TCPStore closes the connection above 8 MiB."""

GONE = b"gone"
"""The last pulse of a process that has ended in order."""


class KeyValues(Protocol):
    """The part of ``torch.distributed.Store`` that is used; no method of it is called that would
    wait for a key."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, number: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for one another, in seconds. ``silent``: without a pulse of a rank until
    it is taken for dead; ``stuck``: for one that is alive, but neither comes nor gets on."""

    silent: float = 60.0
    stuck: float = 600.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank has last said of itself: pulses so far, things done, and its host's name."""

    beats: int
    progress: int
    host: str


class Board:
    """The store, seen by one rank. Every method may be called from any thread, and raises
    ``RankFailed`` if the store does not answer within ``patience.silent``."""

    def __init__(
        self,
        store: KeyValues,
        rank: int,
        size: int,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.patience = patience
        self.clock = clock
        self._store = store
        self._every = min(patience.silent / 5, max(1.0, size / 2000))
        self._progress = 0
        self._beats = 0
        self._host = socket.gethostname()
        self._asked: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._starting = Lock()
        self._process = os.getpid()
        self._closed = False
        self._broken: BaseException | None = None

    # -- notes -----------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        """Leave a note, of whatever length, under a key that has none."""
        parts = [value[i : i + LARGEST] for i in range(0, len(value), LARGEST)][1:]

        def do() -> None:
            for i, part in enumerate(parts):
                self._store.set(f"{key}/{i}", part)
            self._store.set(key, f"{len(parts)} ".encode() + value[:LARGEST])  # last: it is whole

        self._ask(do)

    def look(self, key: str, *, take: bool = False) -> bytes | None:
        """The note under a key, if there is one; ``take``: and take it away."""

        def do() -> bytes | None:
            if not self._store.check([key]):
                return None
            parts, _, value = bytes(self._store.get(key)).partition(b" ")
            more = [f"{key}/{i}" for i in range(int(parts))]
            rest = [bytes(self._store.get(name)) for name in more]
            for name in [key, *more] if take else []:
                self._store.delete_key(name)
            return b"".join([value, *rest])

        found: bytes | None = self._ask(do)
        return found

    def there(self, keys: list[str]) -> bool:
        """Whether there is a note under each of the keys."""
        return bool(self._ask(lambda: self._store.check(keys)))

    def claim(self, key: str, text: str, before: str = "") -> str:
        """Leave a short note if the one that is there is ``before`` (empty: if there is none); the
        one that is there now. Where there is none and one was expected, the store answers with
        the one that was expected."""
        return bytes(self._ask(lambda: self._store.compare_set(key, before, text))).decode()

    def claimed(self, key: str) -> str | None:
        """What ``claim`` has left under a key."""

        def do() -> str | None:
            return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

        found: str | None = self._ask(do)
        return found

    def count(self, key: str) -> int:
        """Count one more under a key; how many there are now."""
        return int(self._ask(lambda: self._store.add(key, 1)))

    def forget(self, keys: Sequence[str]) -> None:
        """Take away what ``claim`` and ``count`` have left."""
        self._ask(lambda: [self._store.delete_key(k) for k in keys if self._store.check([k])])

    # -- pulses ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Note that this rank gets on with what it does."""
        self._progress += 1

    def pulses(self, ranks: Sequence[int]) -> list[Pulse | None]:
        """The last pulses of ranks; None for one that has given none yet. One that has ended in
        order has -1 beats."""

        def do() -> list[bytes | None]:
            keys = [f"pulse/{r}" for r in ranks]
            return [bytes(self._store.get(k)) if self._store.check([k]) else None for k in keys]

        return [None if raw is None else _pulse(raw) for raw in self._ask(do)]

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(
            f"pulse/{self.rank}", f"{self._beats} {self._progress} {self._host}".encode()
        )

    # -- the thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to leave pulses, if it has not begun yet."""
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = Thread(target=self._run, name="holdfast-ranks", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _ask(self, do: Callable[[], Any]) -> Any:
        if self._process != os.getpid():
            raise RankFailed(
                "A forked process cannot speak for the rank that it was forked from",
                todo="Save and load in the process that trains",
            )
        self.start()
        if self._closed or self._broken is not None:
            raise self._unanswered() from self._broken
        answer: SimpleQueue[Any] = SimpleQueue()
        self._asked.put((do, answer))
        for _ in range(8):  # not in one: a process that was stopped finds all its time gone
            with suppress(Empty):
                good, value = answer.get(timeout=self.patience.silent / 8)
                break
        else:
            self._broken = TimeoutError(f"no answer within {self.patience.silent:g} s")
            raise self._unanswered() from self._broken
        if not good:
            raise self._unanswered() from value
        return value

    def _unanswered(self) -> RankFailed:
        found = "it is closed" if self._broken is None else f"{self._broken}".partition("\n")[0]
        return RankFailed(
            "The TCPStore, by which the ranks agree, does not answer",
            expected=f"an answer within {self.patience.silent:g} s",
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
                    due = now + self._every
                    if self._broken is None:  # else the others need not wait for this rank
                        self._beat()
                asked = self._asked.get(timeout=max(0.01, due - self.clock()))
            except Empty:
                continue
            except Exception as e:  # noqa: BLE001  (top of a thread: raised by who asks next)
                self._broken = e
                while (asked := self._asked.get()) is not None:
                    asked[1].put((False, e))
                return
            if asked is None:
                with suppress(Exception):
                    self._store.set(f"pulse/{self.rank}", GONE)
                return
            do, answer = asked
            try:
                answer.put((True, do()))
            except Exception as e:  # noqa: BLE001  (raised by who has asked)
                self._broken = e
                answer.put((False, e))

    def close(self) -> None:
        """Say that this rank is gone, and speak no more. Waits for that two seconds at most."""
        with self._starting:
            self._closed, thread, self._thread = True, self._thread, None
        atexit.unregister(self.close)
        if thread is not None and self._process == os.getpid():
            self._asked.put(None)
            thread.join(2)


def _pulse(raw: bytes) -> Pulse:
    if raw == GONE:
        return Pulse(-1, 0, "")
    beats, progress, host = raw.decode().split(" ", 2)
    return Pulse(int(beats), int(progress), host)


class Vigil:
    """Looks after ranks that are waited for, from its first look on. ``what``: they have to do.
    ``stuck``: seconds for which one that is alive may get on with nothing."""

    def __init__(self, board: Board, what: str, stuck: float | None = None) -> None:
        self._board = board
        self._what = what
        self._stuck = board.patience.stuck if stuck is None else stuck
        self._seen: dict[int, tuple[Pulse | None, float, float]] = {}

    def lost(self, ranks: Sequence[int]) -> RankFailed | None:
        """The first of these ranks that has ended, is dead, or is stuck, as an error."""
        now, silent = self._board.clock(), self._board.patience.silent
        for rank, pulse in zip(ranks, self._board.pulses(ranks) if ranks else (), strict=True):
            before, beaten, moved = self._seen.get(rank, (pulse, now, now))
            if pulse is not None and before is not None:
                beaten = now if pulse.beats != before.beats else beaten
                moved = now if pulse.progress != before.progress else moved
            elif pulse is not before:
                beaten = moved = now
            self._seen[rank] = (pulse, beaten, moved)
            host = "" if pulse is None else pulse.host
            if pulse is not None and pulse.beats < 0:
                return self.error(rank, host, "it to stay until then", "that it has ended")
            if now - beaten > silent:
                expected = f"a sign of life within {silent:g} s"
                return self.error(rank, host, expected, "none: it has died, hangs, or never came")
            if now - moved > self._stuck:
                expected = f"some progress within {self._stuck:g} s"
                return self.error(rank, host, expected, "none, though the process is alive")
        return None

    def error(self, rank: int, host: str, expected: str, found: str) -> RankFailed:
        """That a rank is missed."""
        return RankFailed(
            f"Rank {rank}{host and f' on {host}'} does not take part in {self._what}",
            expected=expected,
            found=found,
            todo="Look at that rank's log. Do all ranks make this call? The bounds are"
            " HOLDFAST_SILENT and HOLDFAST_STUCK (seconds)",
            rank=rank,
            lost=True,
        )
