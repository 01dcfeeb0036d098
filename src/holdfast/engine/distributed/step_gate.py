"""Where the training thread of one rank waits until it is known what all ranks do at a step."""

from __future__ import annotations

import sys
from threading import Condition

from holdfast.errors import RankFailed

NOTHING: frozenset[str] = frozenset()
NEVER = sys.maxsize


class Gate:
    """Holds the training thread of one rank at a step that is being agreed on.

    The usual path of ``step`` takes no lock. The training thread writes ``_at`` and then reads
    ``_shut``; the watcher writes ``_shut`` and then reads ``_at`` (Dekker, 1962). The GIL lets one
    thread run at a time, and each see all that was written before: so either the training sees the
    gate, or the watcher sees that it has come too late. Never neither.
    """

    def __init__(self, longest: float) -> None:
        self.taken = 0
        """How often ``step`` has returned something."""

        self._at = 0
        self._shut = NEVER  # the first of _due and _armed
        self._armed = NEVER
        self._due: dict[int, frozenset[str]] = {}
        self._met: dict[str, int] = {}
        self._error: RankFailed | None = None
        self._longest = longest
        self._closed = False
        self._changed = Condition()

    @property
    def at(self) -> int:
        """Steps that the training has come to."""
        return self._at

    def step(self) -> frozenset[str]:
        self._at = at = self._at + 1
        if at < self._shut:
            return NOTHING
        return self._arrive(at)

    def _arrive(self, at: int) -> frozenset[str]:
        with self._changed:
            for _ in range(8):  # not in one: a process that was stopped finds all its time gone
                if known := self._changed.wait_for(lambda: self._settled(at), self._longest / 8):
                    break
            first = min(self._due, default=NEVER)
            if first <= at:  # less: an earlier call was interrupted while it waited
                whats = self._due.pop(first)
                self.taken += 1
                self._met.update(dict.fromkeys(whats, self.taken))
                self._reshut()
                return whats
            if known and at < self._shut:
                return NOTHING
            error, self._armed = self._error, NEVER
            self._reshut()
        raise error or RankFailed(
            "The thread by which the ranks agree does not answer",
            expected=f"an answer within {self._longest:g} s",
            todo="Start the job again from what was committed",
        )

    def _settled(self, at: int) -> bool:
        return at < self._shut or self._error is not None or min(self._due, default=NEVER) <= at

    def _reshut(self) -> None:
        due = min(self._due, default=NEVER)
        self._shut = NEVER if self._closed else min(due, self._armed)
        self._changed.notify_all()

    # -- for the watcher -------------------------------------------------------------------------

    def arm(self, at: int) -> bool:
        """Hold the training at a step from now on. False: it has come so far already."""
        with self._changed:
            self._armed = at
            self._reshut()
            if self._at < at:
                return True
            self._armed = NEVER
            self._reshut()
            return False

    def release(self) -> None:
        """Nothing is agreed at the step that it is armed for."""
        with self._changed:
            self._armed = NEVER
            self._reshut()

    def grant(self, at: int, whats: frozenset[str]) -> None:
        """It is agreed what to do at the step that it is armed for."""
        with self._changed:
            self._armed = NEVER
            self._due[at] = whats
            self._reshut()

    def fail(self, error: RankFailed) -> None:
        """Whether something is agreed at the step that it is armed for will never be known."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing up any more."""
        with self._changed:
            self._closed = True
            self._reshut()

    def meets(self, what: str, since: int) -> bool:
        """Whether ``step`` has returned it after ``taken`` was ``since``, or will."""
        with self._changed:
            later = any(what in whats for whats in self._due.values())
            return later or self._met.get(what, 0) > since
