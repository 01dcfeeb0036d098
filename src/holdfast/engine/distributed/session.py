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

from holdfast.engine.distributed.failure_detector import LATE, tell_late
from holdfast.engine.distributed.kv import Board, KeyValues, Patience
from holdfast.errors import RankFailed

_OFTEN = 0.01


class SessionBoard(Board):
    """A ``Board`` within a session. ``within``: the store with a prefix before all keys. A rank
    that asks for anything first waits, ``patience.stuck`` seconds at most, until rank 0 has
    answered; it does so as soon as it has a board itself."""

    def __init__(
        self,
        store: KeyValues,
        rank: int,
        size: int,
        patience: Patience,
        within: Callable[[str], KeyValues],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(store, rank, size, patience, clock)
        self._hall = store
        self._within = within
        self._mine = secrets.token_hex(8)
        self._lacking = dict.fromkeys(range(1, size) if rank == 0 else (), "")
        self._joined = Event()
        self._told_late = False
        self._usual, self._every = self._every, _OFTEN
        if rank == 0:
            self._join(self._mine)

    def _join(self, session: str) -> None:
        self._store = self._within(session)
        self._joined.set()

    def _beat(self) -> None:
        if self._lacking:
            self._welcome()
        elif not self._joined.is_set():
            self._seek()
        waits = self._lacking or not self._joined.is_set()
        self._every = min(self._usual, self._every * 1.2) if waits else self._usual
        if self._joined.is_set():
            super()._beat()

    def _welcome(self) -> None:
        """Answer the ranks that ask for the session, until each has left a pulse in it."""
        for rank, answered in list(self._lacking.items()):
            said = self._said(f"hello/{rank}")
            if self._store.check([f"pulse/{rank}"]):
                del self._lacking[rank]
                self._every = _OFTEN
            elif said not in ("", answered):
                self._hall.set(f"welcome/{rank}", f"{said} {self._mine}".encode())
                self._lacking[rank] = said

    def _seek(self) -> None:
        hello, welcome = f"hello/{self.rank}", f"welcome/{self.rank}"
        if self._beats == 0:
            self._hall.set(hello, self._mine.encode())
            self._beats = 1
        said, _, session = self._said(welcome).partition(" ")
        if said == self._mine:
            self._hall.delete_key(welcome)
            self._join(session)

    def _said(self, key: str) -> str:
        return bytes(self._hall.get(key)).decode() if self._hall.check([key]) else ""

    def _ask(self, do: Callable[[], Any]) -> Any:
        if self._process == os.getpid() and not self._joined.is_set():
            self.start()
            self._await_session()
        return super()._ask(do)

    def _await_session(self) -> None:
        began, stuck = self.clock(), self.patience.stuck
        while not self._joined.wait(_OFTEN):
            if self._closed or self._broken is not None:
                raise self._unanswered() from self._broken
            waited = self.clock() - began
            if waited > LATE and not self._told_late:
                self._told_late = True
                tell_late([0], "the first call of all ranks", waited, stuck)
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
