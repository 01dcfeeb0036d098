"""The rows of one table on one server, and cuts: the rows as they were at one moment.

A *column* has one entry per row. Rows are found by id, and numbered in no particular order; the
number of a deleted row is used again. While a cut is held, a row that changes is copied first, so
that the cut is read while the rows change.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Condition

import numpy as np
import torch
from numpy.typing import NDArray

from limpet.errors import LimpetError
from limpet.tables.ids import BUCKETS, IdIndex, Ids, bucket_of
from limpet.types import BLOCK_SIZE

RowNumbers = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Bits of a row's flags. A deleted row has none.
_LIVE = 1
_TOUCHED = 2  # changed since the last committed version, and not part of the cut of a save
_IN_SAVE = 4  # changed since the last committed version, and part of the cut of a save
_STORED = 8  # the last committed version or the cut of a save has the id: its deletion is recorded

_PER_BUCKET = ("rows_per_bucket", "deleted_per_bucket")
_HUGE = 64 << 20  # bytes of an array that asks for huge pages: random rows are read 1.5 x as fast
_MOST_ROWS = 2**31 - 1  # the index has their numbers as int32


class GrowableArray:
    """A column in private anonymous memory, which the kernel moves when it grows.

    New rows are zero, and use no memory until they are written. A tensor of ``view`` is an export
    of the memory: while one lives, ``reserve`` raises ``BufferError``. (torch.frombuffer would
    keep none, and its tensor would be left behind.)
    """

    def __init__(self, dtype: torch.dtype, width: int | None) -> None:
        self.dtype = dtype
        self.shape: tuple[int, ...] = () if width is None else (width,)
        self.row_bytes = dtype.itemsize * (width or 1)
        self._capacity = max(1, mmap.PAGESIZE // self.row_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self._capacity * self.row_bytes, flags=flags)

    def view(self, rows: int, buffer: memoryview | None = None) -> torch.Tensor:
        """Return the first rows of this array, or of a buffer. Drop it before a growth."""
        memory = self._memory if buffer is None else buffer
        array = np.frombuffer(memory, np.uint8, rows * self.row_bytes)
        return torch.from_numpy(array).view(self.dtype).view(rows, *self.shape)

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows. Raises ``LimpetError`` if there is no memory."""
        if rows <= self._capacity:
            return
        # by a quarter: twice a large array may be more than the kernel allows
        nbytes = max(rows, self._capacity * 5 // 4) * self.row_bytes
        if is_huge := nbytes >= _HUGE:
            nbytes += -nbytes % _HUGE  # aligned, else huge pages are split when they move
        try:
            self._memory.resize(nbytes)
        except OSError as e:
            what = f"There is no memory for {rows:,} rows of a table"
            todo = "Use more servers, or limit the rows: evict=Evict(max_rows=...)"
            raise LimpetError(what, todo=todo) from e
        self._capacity = nbytes // self.row_bytes
        if is_huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)


class ReusedMemory:
    """Gives tensors whose memory is used again when they are garbage: to fault fresh pages takes
    longer than to fill them. One thread at a time may ask for a tensor."""

    def __init__(self) -> None:
        self._free = deque[NDArray[np.uint8]](maxlen=4)

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = rows * columns * dtype.itemsize
        if nbytes > _HUGE:  # more than a mini-batch: what is kept would be as large as the table
            return torch.empty(rows, columns, dtype=dtype, device="cpu")
        memory = self._free.pop() if self._free else np.empty(1, np.uint8)
        if len(memory) < nbytes:
            memory = np.empty(nbytes * 5 // 4, np.uint8)
        part = memory[:nbytes]  # the tensor refers to this object, which refers to the memory
        weakref.finalize(part, self._free.append, memory).atexit = False
        return torch.from_numpy(part).view(dtype).view(rows, columns)


@dataclass(frozen=True)
class Column:
    """A column: the type of its elements, the number of them in a row (None: it is 1-d), and the
    value in a new row; None if whoever inserts rows writes it."""

    dtype: torch.dtype
    width: int | None = None
    initial: float | None = 0.0


def _make_arrays(columns: Mapping[str, Column]) -> dict[str, GrowableArray]:
    return {name: GrowableArray(column.dtype, column.width) for name, column in columns.items()}


class Rows:
    """The rows of a table: ``ids`` (int64), the given columns, ``counts`` (int32), and
    ``last_steps`` (int64). ``old_rows``: of which part of them a cut may have copies.

    Methods are called under ``lock``; those of cuts acquire it themselves. A tensor of ``column``
    must not live when the lock is released, for rows move when there are more: code that has one is
    a function of its own, which returns under the lock.
    """

    def __init__(
        self, columns: Mapping[str, Column], lock: Condition | None = None, old_rows: float = 0.25
    ) -> None:
        self.lock, self.old_rows = lock or Condition(), old_rows
        self.columns = {"ids": Column(torch.int64, initial=None), **columns}
        self.columns |= {"counts": Column(torch.int32), "last_steps": Column(torch.int64)}
        self._arrays = _make_arrays(self.columns)
        self._arrays["flags"] = GrowableArray(torch.uint8, None)
        self._index = IdIndex()
        self._stop = self.count = 0  # all rows are below; the number of those that live
        self._free, self._free_count = np.empty(0, np.int32), 0  # a stack of deleted rows
        self._deleted: list[Ids] = []  # since the last committed version
        self._cuts: list[Cut] = []
        self._save: Cut | None = None  # that of a save

    @property
    def nbytes(self) -> int:
        """The memory of the rows, of the index, and of the old rows of cuts, in bytes."""
        nbytes = self._stop * sum(array.row_bytes for array in self._arrays.values())
        return nbytes + self._index.nbytes + sum(cut.old_bytes for cut in self._cuts)

    def column(self, name: str, stop: int | None = None) -> torch.Tensor:
        """Return the entries of all rows, also of deleted ones, or of those below ``stop``."""
        return self._arrays[name].view(self._stop if stop is None else stop)

    def _flags(self) -> NDArray[np.uint8]:
        return self.column("flags").numpy()

    def find(self, ids: Ids) -> RowNumbers:
        """Return the row of each id, -1 if it has none."""
        return self._index.find(ids, self.column("ids").numpy())

    def live(self) -> RowNumbers:
        """Return all rows, in ascending order."""
        return np.flatnonzero(self._flags() & _LIVE)

    def reserve(self, stop: int) -> None:
        """Make room for the rows below ``stop``. Raises ``LimpetError`` if there is no memory."""
        if stop > _MOST_ROWS:
            what = f"A table has more than {_MOST_ROWS:,} rows on one server"
            raise LimpetError(what, todo="Use more servers")
        for array in self._arrays.values():
            array.reserve(stop)

    def insert(self, ids: Ids) -> RowNumbers:
        """Return new rows for ids that are distinct and have none."""
        left = max(0, self._free_count - len(ids))
        reused = self._free[left : self._free_count].astype(np.int64)
        stop = self._stop + len(ids) - len(reused)
        self.reserve(stop)
        rows = np.concatenate([reused, np.arange(self._stop, stop)])
        self._stop, self._free_count = stop, left
        for name, column in self.columns.items():
            if column.initial is not None:  # memory that was never used is zero
                fill = rows if column.initial else reused
                self.column(name).index_fill_(0, torch.from_numpy(fill), column.initial)
        keys = self.column("ids").numpy()
        keys[rows] = ids
        self._index.insert(ids, rows, keys)
        self._flags()[rows] = _LIVE | _TOUCHED
        self.count += len(ids)
        return rows

    def before_change(self, rows: RowNumbers) -> None:
        """Copy distinct rows for the cuts that need them; they count as changed from now on."""
        for cut in self._cuts:
            cut.keep(rows)
        self._flags()[rows] |= _TOUCHED

    def delete(self, rows: RowNumbers) -> None:
        """Delete distinct rows."""
        self.before_change(rows)
        flags, ids = self._flags(), self.column("ids").numpy()[rows]
        if len(stored := ids[(flags[rows] & _STORED) > 0]):
            self._deleted.append(stored)
        flags[rows] = 0
        self._index.remove(ids, rows)
        first, self._free_count = self._free_count, self._free_count + len(rows)
        if self._free_count > len(self._free):
            self._free = np.resize(self._free, 2 * self._free_count)
        self._free[first : self._free_count] = rows
        self.count -= len(rows)

    def adopt(self, count: int) -> None:
        """Take over the rows below ``count`` of an empty object, whose columns were filled after
        ``reserve``: they are those of a committed version. Raises ``LimpetError`` if an id occurs
        twice; the object must not be used then."""
        self._stop = self.count = count
        keys = self.column("ids").numpy()
        self._index.insert(keys, np.arange(count), keys)
        self._flags()[:] = _LIVE | _STORED

    @property
    def counts(self) -> tuple[int, int, int]:
        """The number of rows, of those that changed since the last committed version, and of the
        distinct ids that were deleted since."""
        changed = np.count_nonzero(self._flags() & (_TOUCHED | _IN_SAVE))
        return self.count, int(changed), len(_distinct(self._deleted))

    def mark_stored(self) -> None:
        """Let all rows count as those of the last committed version."""
        flags = self._flags()
        flags[flags > 0] = _LIVE | _STORED
        self._deleted.clear()

    @property
    def must_wait(self) -> bool:
        """True while the old rows of a cut have reached their limit: updates must wait."""
        return any(cut.old_bytes >= cut.old_bytes_limit for cut in self._cuts)

    def wait(self) -> None:
        """Wait until that is not so: the end of a cut notifies the lock."""
        with self.lock:
            self.lock.wait_for(lambda: not self.must_wait)

    def begin_cut(self, *, is_full: bool) -> Cut:
        """Return a cut for a save: of all rows, or of those that changed since the last committed
        version. Only one is held at a time; ``Cut.end`` ends it."""
        with self.lock:
            if self._save is not None:
                raise LimpetError("A cut of this table for a save is held already")
            cut = self._begin(_LIVE if is_full else _TOUCHED, [*self.columns])
            self._save = cut
            flags = self._flags()
            flags += flags & _TOUCHED  # they become _IN_SAVE, which no row is yet
            flags |= cut.members * np.uint8(_STORED)
            del flags  # before the lock is released
            cut.all_deleted, self._deleted = self._deleted, []
        if not is_full:
            deleted = _distinct(cut.all_deleted)
            cut.deleted = deleted[np.argsort(bucket_of(deleted), kind="stable")]
        return cut

    def begin_view(self, *names: str) -> Cut:
        """Return a cut of the columns ``names`` of all rows, to find rows by id (``Cut.find``).
        ``Cut.end`` ends it. Several may be held, also during a save."""
        with self.lock:
            return self._begin(_LIVE, ["ids", *names])

    def _begin(self, flag: int, names: list[str]) -> Cut:
        self._cuts.append(Cut(self, (self._flags() & flag) > 0, names))
        return self._cuts[-1]

    def _end_save(self, cut: Cut, *, is_committed: bool) -> None:
        flags, self._save = self._flags(), None
        in_save = flags & _IN_SAVE
        flags ^= in_save
        if not is_committed:
            flags |= in_save >> 1  # _TOUCHED
            self._deleted = cut.all_deleted + self._deleted


class Cut:
    """Rows as they were at one moment, in the order of their buckets. All methods but ``keep`` are
    called without the lock: they acquire it for a few milliseconds at a time."""

    def __init__(self, rows: Rows, members: Mask, names: list[str]) -> None:
        self._rows, self._lock, self.members, self.has_ended = rows, rows.lock, members, False
        self._copies = np.zeros(len(members), np.int32)  # of each row: 1 + that of its copy, or 0
        self._columns = {name: rows.columns[name] for name in names}
        self._old = _make_arrays(self._columns)
        self._old_row = sum(array.row_bytes for array in self._old.values())
        self._old_count = 0
        self._old_index, self._indexed = IdIndex(), 0  # of the first copies
        self.count = int(np.count_nonzero(members))
        self.deleted: Ids = np.empty(0, np.int64)  # distinct, in the order of their buckets
        self.all_deleted: list[Ids] = []
        self.old_bytes_limit = max(BLOCK_SIZE, int(rows.count * self._old_row * rows.old_rows))

    def end(self, *, is_committed: bool = False) -> None:
        """End the cut. If a version with it is not surely committed, its rows and deletions count
        again as changes since the last committed version.

        Gives the memory back: a Checkpointer refers to its last save until the next one, also
        during a restore. What still reads gets an error, so it needs ``members``.
        """
        with self._lock:
            rows = self._rows
            rows._cuts.remove(self)
            self.has_ended = True
            del self._rows
            self._old = _make_arrays(self._columns)
            self._old_index, self._copies = IdIndex(), np.empty(0, np.int32)
            vars(self).pop("_order", None)
            if self is rows._save:
                rows._end_save(self, is_committed=is_committed)
            self._lock.notify_all()

    @property
    def kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of an element of everything that ``read`` reads."""
        kinds = {n: (str(a.dtype).removeprefix("torch."), a.shape) for n, a in self._old.items()}
        return kinds | {"deleted": ("int64", ())} | dict.fromkeys(_PER_BUCKET, ("int32", ()))

    @property
    def old_bytes(self) -> int:
        """The bytes of the copies of rows that changed since."""
        return self._old_count * self._old_row

    def keep(self, rows: RowNumbers) -> None:
        """Copy distinct rows that are about to change, if the cut has them and no copy yet."""
        rows = rows[rows < len(self.members)]
        rows = rows[self._is_current(rows)]
        start, stop = self._old_count, self._old_count + len(rows)
        for name, array in self._old.items():
            array.reserve(stop)
            source, out = self._rows.column(name), array.view(stop)[start:]
            torch.index_select(source, 0, torch.from_numpy(rows), out=out)
        self._copies[rows] = np.arange(start + 1, stop + 1)
        self._old_count = stop

    def _is_current(self, rows: RowNumbers) -> Mask:
        return self.members[rows] & ~self._copies[rows].astype(np.bool_)

    def read(self, name: str, first: int, stop: int, out: memoryview) -> None:
        """Write the entries ``first`` to ``stop`` of a column, of ``deleted``, or of the counts per
        bucket into ``out``, which has their size. Several threads may read at once."""
        if name in ("deleted", *_PER_BUCKET):
            out[:] = getattr(self, name)[first:stop].view(np.uint8).data
        else:
            rows = self._order[0][first:stop]
            self._gather(name, rows, self._old[name].view(len(rows), out))

    def find(self, name: str, ids: Ids) -> tuple[torch.Tensor, Mask]:
        """Return the entries of ids in a column, and for each id whether the cut has it; without
        one, its entry is undefined."""
        with self._lock:
            self._check()
            return self._find(name, ids)  # its views end before the lock is released

    def _find(self, name: str, ids: Ids) -> tuple[torch.Tensor, Mask]:
        keys, old = (self._old[n].view(self._old_count) for n in ("ids", name))
        if self._indexed < self._old_count:
            new = np.arange(self._indexed, self._old_count)
            self._old_index.insert(keys.numpy()[new], new, keys.numpy())
            self._indexed = self._old_count
        copies, rows = self._old_index.find(ids, keys.numpy()), self._rows.find(ids)
        is_current, is_copied = (rows >= 0) & (rows < len(self.members)), copies >= 0
        is_current[is_current] = self._is_current(rows[is_current])
        found, current = old.new_empty((len(ids), *old.shape[1:])), self._rows.column(name)
        for source, numbers, mask in ((current, rows, is_current), (old, copies, is_copied)):
            found[torch.from_numpy(mask)] = source[torch.from_numpy(numbers[mask])]
        return found, is_current | is_copied

    @property
    def rows_per_bucket(self) -> NDArray[np.int32]:
        """The number of rows in each bucket, int32 ``[4096]``."""
        return self._order[1]

    @property
    def deleted_per_bucket(self) -> NDArray[np.int32]:
        """The number of deleted ids in each bucket, int32 ``[4096]``."""
        return _count_buckets(bucket_of(self.deleted))

    @cached_property
    def _order(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The rows in the order of their buckets, and the number of rows in each bucket."""
        rows = np.flatnonzero(self.members).astype(np.int32)
        ids = np.empty(len(rows), np.int64)
        self._gather("ids", rows, torch.from_numpy(ids))
        buckets = bucket_of(ids)
        return rows[np.argsort(buckets, kind="stable")], _count_buckets(buckets)

    def _gather(self, name: str, rows: NDArray[np.int32], out: torch.Tensor) -> None:
        step = max(1, BLOCK_SIZE // self._old[name].row_bytes)
        for start in range(0, len(rows), step):
            with self._lock:
                self._check()
                self._gather_block(name, rows[start : start + step], out[start : start + step])

    def _gather_block(self, name: str, rows: NDArray[np.int32], out: torch.Tensor) -> None:
        torch.index_select(self._rows.column(name), 0, torch.from_numpy(rows), out=out)
        copies = self._copies[rows]
        changed = np.flatnonzero(copies)
        old = self._old[name].view(self._old_count)
        out[torch.from_numpy(changed)] = old[torch.from_numpy(copies[changed] - 1)]

    def _check(self) -> None:
        if self.has_ended:
            todo = "Make one save of the tables at a time: ckpt.wait() before limpet.save()"
            raise LimpetError("The cut of a table was read after its end", todo=todo)


def _distinct(parts: Sequence[Ids]) -> Ids:
    return np.unique(np.concatenate([*parts, np.empty(0, np.int64)]))


def _count_buckets(buckets: NDArray[np.uint16]) -> NDArray[np.int32]:
    return np.bincount(buckets, minlength=BUCKETS).astype(np.int32)
