"""The log of the metrics of every step of a run; ``run/overview`` reads it.

A training with ``metrics_log=True`` writes what is new with each save, every 60 s, and at its end,
each time to another small file. A file says after which step of its branch it goes on: what files
of earlier starts have after that was lost in a crash, and does not count any more.
"""

from __future__ import annotations

from threading import Lock
from time import monotonic
from typing import Any

from limpet import events
from limpet.errors import AlreadyExists, LimpetError
from limpet.format.manifest import MAX_MANIFEST
from limpet.format.names import METRICS_LOG, MetricsFile, parse_metrics_file
from limpet.format.records import StepMetrics, decode_step_metrics, encode_record
from limpet.machine import utc_now
from limpet.run.metrics import Row, read_rows
from limpet.run.writer_lock import WriterLock
from limpet.snapshot.location import get_bounded
from limpet.storage.store import Store, list_level

_MOST_UNREAD, _MOST_KEPT = 10_000, 100_000  # steps on a device, and to be written


class MetricsLog:
    """Writes the log, if it ``is_on``. The training thread calls all methods but ``write``."""

    def __init__(self, lock: WriterLock, *, is_on: bool) -> None:
        self._lock, self.is_on, self._read_at = lock, is_on, monotonic()
        self._position = 0, 0  # branch, step
        self._unread, self._rows = list[Row](), list[Row]()  # on a device, and to be written
        self._written: object = None  # the lock and the position after the last file
        self._number = 0  # of the start that wrote it
        self._is_failing, self._turn = False, Lock()  # of the threads that write

    def begin(self, branch: int, step: int) -> None:
        """Go on after a step of a branch, from which the training has resumed."""
        self._position = branch, step
        if not self.is_on:  # an earlier training may have had a log: before a commit, undo its end
            self._rows.append((self._position, step, {}))

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Add checked metrics to those of a step. Each step calls this."""
        if metrics and self.is_on:
            self._unread.append((self._position, step, metrics))
            self._position = self._position[0], step
            if monotonic() - self._read_at >= 60 or len(self._unread) >= _MOST_UNREAD:
                self.read()

    def read(self, *, may_wait: bool = True) -> None:
        """Let what was added be written; without a wait, only what is not on a device."""
        rows, self._unread, self._read_at = self._unread, [], monotonic()
        self._rows += read_rows(rows, may_wait=may_wait)

    def write(self, store: Store, seconds: float = 0, *, must: bool = False) -> None:
        """Write what was read, unless another training has the run, or another thread writes for
        more than ``seconds``. The next call tries again after a failure, which an event reports;
        or this raises it, if it ``must`` succeed."""
        if not (self._rows and self._turn.acquire(timeout=seconds)):
            return
        try:
            while self._rows and self._lock.is_held(store):
                self._put(store)
            self._is_failing = False
        except LimpetError as e:
            if must:
                raise
            if not self._is_failing:
                events.emit("metrics_unwritten", run=store.url, error=e)
            self._is_failing = True
        finally:
            del self._rows[:-_MOST_KEPT]
            self._turn.release()

    def _put(self, store: Store) -> None:
        lock_id, position = self._lock.id, self._rows[0][0]
        if self._written != (lock_id, position):  # a new start; another training may have logged
            self._number = 1 + max((file.start for file in list_files(store)), default=0)
        if self._number == 1 and not self.is_on:
            self._rows.clear()  # there is no log
            return
        branch, after = position
        rows, size = list[tuple[int, dict[str, Any]]](), 0
        for before, step, metrics in [*self._rows]:
            size += 40 + sum(6 * len(name) + 40 for name in metrics)  # at most so many bytes
            if before != position or (rows and size > 1 << 20):
                break
            rows.append((step, metrics))
            position = branch, step
        record = StepMetrics(branch, self._number, after, utc_now(), rows)
        try:
            store.put_if_absent(record.file.key, encode_record(record))
        except AlreadyExists:  # the last file has only this step, or it was not known to be written
            self._number += 1
        else:
            self._written = lock_id, position
            del self._rows[: len(rows)]


def list_files(store: Store) -> list[MetricsFile]:
    """Return the files of the log of a run, in any order."""
    found = (parse_metrics_file(e.name) for e in list_level(store, METRICS_LOG))
    return [file for file in found if file is not None]


def read_file(store: Store, key: str) -> tuple[StepMetrics, bytes]:
    """Return a file of the log, and its bytes. Raises ``NotFound`` and ``FormatError``."""
    raw = get_bounded(store, key, MAX_MANIFEST)
    return decode_step_metrics(raw, key), raw
