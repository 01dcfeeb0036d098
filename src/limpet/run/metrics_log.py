"""The metrics of all steps of a run: those that its trainings have logged, and of its versions.

A training with ``metrics_log=True`` writes what is new with each save, every 60 s, and at its end,
each time to another small file. A file says after which step of its branch it goes on: what earlier
starts have logged after that was lost in a crash, and does not count any more.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet import events
from limpet.errors import AlreadyExists, FormatError, LimpetError
from limpet.format.manifest import MAX_MANIFEST
from limpet.format.names import MAX_STEP, METRICS_LOG, MetricsFile, parse_metrics_file
from limpet.format.records import StepMetrics, decode_step_metrics, encode_record
from limpet.machine import utc_now
from limpet.run.lineage import line_ends
from limpet.run.metrics import Row, is_on_device, read_rows
from limpet.run.run import Run
from limpet.run.writer_lock import WriterLock
from limpet.snapshot.location import get_bounded
from limpet.storage.store import Store, list_level
from limpet.threads import look_up_each, no_op
from limpet.types import Advance

_MOST_UNREAD, _MOST_KEPT = 10_000, 100_000  # steps on a device, and to be written


@dataclass
class _Start:
    """A start of a training: the last step written, and its number while it has one lock."""

    branch: int
    after: int
    number: int = 0
    lock_id: str | None = None


class MetricsLog:
    """Writes the log, if it ``is_on``. The training thread calls all methods but ``write``."""

    def __init__(self, lock: WriterLock, *, is_on: bool) -> None:
        self._lock, self._is_on, self._read_at = lock, is_on, monotonic()
        self._start, self._unread = _Start(0, 0), list[Row]()
        self._rows: list[tuple[_Start, Row]] = []  # read, and to be written
        self._is_failing = False
        self._turn = Lock()  # of the threads that write

    def begin(self, branch: int, step: int) -> None:
        """Go on after a step of a branch, from which the training has resumed."""
        self.read()
        self._start = _Start(branch, step)

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Add checked metrics to those of a step. Each step calls this."""
        if metrics and self._is_on:
            self._unread.append((step, metrics))
            if monotonic() - self._read_at >= 60 or len(self._unread) >= _MOST_UNREAD:
                self.read()

    def read(self, *, may_wait: bool = True) -> None:
        """Let what was added be written; without a wait, only what is not on a device."""
        rows, self._unread, self._read_at = self._unread, [], monotonic()
        if not may_wait:
            rows = [row for row in rows if not any(map(is_on_device, row[1].values()))]
        self._rows += [(self._start, row) for row in read_rows(rows)]

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
        start, rows, size = self._rows[0][0], list[Row](), 0
        for owner, (step, metrics) in [*self._rows]:
            size += 40 + sum(6 * len(name) + 40 for name in metrics)  # at most so many bytes
            if owner is not start or (rows and (step < rows[-1][0] or size > 1 << 20)):
                break
            rows.append((step, metrics))
        # another training may have had the lock in the meantime; the program itself may go back
        if start.lock_id != self._lock.id or rows[0][0] < start.after:
            start.number = 1 + max((file.start for file in list_files(store)), default=0)
            start.lock_id = self._lock.id
        after = min(start.after, rows[0][0])
        record = StepMetrics(start.branch, start.number, after, utc_now(), rows)
        try:
            store.put_if_absent(record.file.key, encode_record(record))
        except AlreadyExists:  # the last file has only this step, or it was not known to be written
            start.number += 1
        else:
            start.after = rows[-1][0]
            del self._rows[: len(rows)]


class BranchMetrics(NamedTuple):
    """The metrics of the steps of a branch that are on the current lineage, or of the others: for
    each metric its steps, in ascending order, and the values."""

    branch: int
    is_current: bool
    curves: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


def read(run: Run, advance: Advance = no_op) -> tuple[list[BranchMetrics], dict[str, LimpetError]]:
    """Return the metrics of the steps that a run has logged, and of its versions; and the errors of
    damaged files of the log, by their keys. Raises ``StoreError``."""
    catalog, listing = run.catalog, run.listing()
    files, problems = list[StepMetrics](), dict[str, LimpetError]()
    ends, limits = line_ends(catalog, listing), dict[int, int]()
    found: Any = defaultdict(lambda: defaultdict(lambda: (array("q"), array("d"))))

    def look(key: str) -> None:
        try:
            files.append(decode_step_metrics(get_bounded(run.store, key, MAX_MANIFEST), key))
        except FormatError as e:
            problems[key] = e
        advance(1)

    def add(branch: int, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            steps, values = found[branch, step <= ends.get(branch, -1)][name]
            steps.append(step)
            values.append(value)

    for version, record in catalog.read_versions(listing).items():  # the newest values first
        added = catalog.evaluations.read(version, record.digest).metrics() if record.digest else {}
        add(version.branch, version.step, {**record.metrics, **added})
    remaining = sorted(list_files(run.store))
    while remaining:  # few are in memory at a time
        look_up_each([file.key for file in remaining[-100:]], look)
        for file in sorted(files, key=lambda file: file.file, reverse=True):
            limit = limits.get(file.branch, MAX_STEP)
            limits[file.branch] = min(limit, file.after)
            for step, metrics in reversed(file.decoded_rows()):
                if step <= limit:
                    add(file.branch, step, metrics)
        del remaining[-100:], files[:]
    pieces = []
    for (branch, is_current), curves in sorted(found.items()):
        ordered = {}
        for name, (steps, values) in curves.items():
            unique, first = np.unique(np.asarray(steps, np.int64), return_index=True)
            ordered[name] = unique, np.asarray(values)[first]
        pieces.append(BranchMetrics(branch, is_current, ordered))
    return pieces, problems


def list_files(store: Store) -> list[MetricsFile]:
    """Return the files of the log of a run, in any order."""
    found = (parse_metrics_file(e.name) for e in list_level(store, METRICS_LOG))
    return [file for file in found if file is not None]
