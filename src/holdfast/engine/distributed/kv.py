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

LARGEST = 4 * MIB
"""Bytes of one value in the store; a TCPStore closes the connection above 8 MiB."""

GONE = b"gone"
"""The last pulse of a process that has ended in order."""

_NONE = "-"
"""Is no value of any key."""

MANY = 64
"""Notes that are looked at in one turn of the thread."""


Turn = tuple[int, ...]
"""The number of a meeting, of a turn in it, and of a wait in that."""


class KeyValues(Protocol):
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
class Patience:
    """How long ranks wait for one another, in seconds. ``silent``: without a pulse of a rank until
    it is taken for dead; ``stuck``: for one that is alive, but neither comes nor gets on."""

    silent: float = 60.0
    stuck: float = 600.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank has last said of itself: pulses so far, things done, its host's name, and the
    first of the turns in which it waits for others."""

    beats: int
    progress: int
    host: str
    waits: Turn | None = None


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
        self._waits: list[Turn] = []
        self._met: set[int] = set()
        self._host = socket.gethostname()
        self._asked: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._starting = Lock()
        self._process = os.getpid()
        self._closed = False
        self._broken: BaseException | None = None

    # -- notes -----------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> list[str]:
        """Leave a note, of whatever length, under a key that has none. Returns what ``forget``
        takes to take it away."""
        return self.put_all({key: value})

    def put_all(self, notes: Mapping[str, bytes]) -> list[str]:
        """As ``put``, of many notes, in few calls."""
        used: list[str] = []
        some: dict[str, bytes] = {}
        for key, value in notes.items():
            rest = range(LARGEST, len(value), LARGEST)
            for i, at in enumerate(rest):
                used.append(f"{key}/{i}")
                self._set({used[-1]: b" " + value[at : at + LARGEST]})
            if sum(map(len, some.values())) + len(value) > LARGEST or len(some) >= 4 * MANY:
                self._set(some)
                some = {}
            some[key] = f"{len(rest)} ".encode() + value[:LARGEST]  # last: it is whole
        self._set(some)
        return [*notes, *used]

    def _set(self, some: dict[str, bytes]) -> None:
        if len(some) == 1:
            self._ask(lambda: self._store.set(*next(iter(some.items()))))
        elif some:
            self._ask(lambda: self._store.multi_set(list(some), list(some.values())))

    def look(self, key: str, *, take: bool = False) -> bytes | None:
        """The note under a key, if there is one; ``take``: and take it away."""

        def do() -> bytes | None:
            found, used = self._whole(key)
            for name in used if take else ():
                self._store.delete_key(name)
            return found

        found: bytes | None = self._ask(do)
        return found

    def looks(self, keys: Sequence[str]) -> list[bytes]:
        """The notes under keys, up to the first that has none, or to many."""

        def do() -> list[bytes]:
            made: list[bytes] = []
            nbytes = 0
            for key in keys[:MANY]:
                found = None if nbytes > LARGEST else self._whole(key)[0]
                if found is None:
                    break
                made.append(found)
                nbytes += len(found)
            return made

        found: list[bytes] = self._ask(do)
        return found

    def _whole(self, key: str) -> tuple[bytes | None, list[str]]:
        """A note, and all keys that it has taken."""
        first = self._peek(key)
        if first is None:
            return None, []
        count, _, value = first.partition(b" ")
        used = [f"{key}/{i}" for i in range(int(count))]
        rest = [self._peek(name) for name in used]
        if None in rest:
            return None, []  # it is being taken away
        return b"".join([value, *(part[1:] for part in rest if part)]), [key, *used]

    def _peek(self, key: str) -> bytes | None:
        """The value of a key if it has one, in one call. What changes nothing asks for it: ``get``
        would wait for a key that has just been taken away."""
        found = bytes(self._store.compare_set(key, _NONE, _NONE))
        return None if found == _NONE.encode() else found

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
        found: bytes | None = self._ask(
            lambda: self._peek(key) if self._store.check([key]) else None
        )
        return None if found is None else found.decode()

    def count(self, key: str) -> int:
        """Count one more under a key; how many there are now."""
        return int(self._ask(lambda: self._store.add(key, 1)))

    def forget(self, keys: Sequence[str]) -> None:
        """Take away what ``put``, ``claim`` and ``count`` have left."""
        for at in range(0, len(keys), MANY):
            self._ask(partial(self._delete, keys[at : at + MANY]))

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self._store.check([key]):
                self._store.delete_key(key)

    # -- pulses ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Note that this rank gets on with what it does."""
        self._progress += 1

    @contextmanager
    def waiting(self, turn: Turn) -> Iterator[None]:
        """Within the context this rank waits for others."""
        self._waits.append(turn)
        try:
            yield
        finally:
            self._waits.remove(turn)

    def pulses(self, ranks: Sequence[int]) -> list[Pulse | None]:
        """The last pulses of ranks; None for one that has given none yet. One that has ended in
        order has -1 beats."""
        made: dict[int, Pulse] = {}

        def look(some: Sequence[int]) -> None:
            met = [r for r in some if r in self._met]  # their keys stay: to ask for all never waits
            raws = self._store.multi_get([f"pulse/{r}" for r in met]) if met else []
            made.update((r, _pulse(bytes(raw))) for r, raw in zip(met, raws, strict=True))
            for r in some:
                if r not in self._met and (raw := self._peek(f"pulse/{r}")) is not None:
                    self._met.add(r)
                    made[r] = _pulse(raw)

        for at in range(0, len(ranks), 4 * MANY):
            self._ask(partial(look, ranks[at : at + 4 * MANY]))
        return [made.get(r) for r in ranks]

    def _beat(self) -> None:
        self._beats += 1
        said = [self._beats, self._progress, self._host, *min(self._waits.copy(), default=())]
        self._store.set(f"pulse/{self.rank}", " ".join(map(str, said)).encode())

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
    beats, progress, host, *waits = raw.decode().split(" ")
    return Pulse(int(beats), int(progress), host, tuple(map(int, waits)) or None)
