"""The rows of one table on one server: look-ups, updates, admission, and eviction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from limpet.arguments import real, require
from limpet.errors import LimpetError
from limpet.tables.ids import ALL_BUCKETS, BUCKETS, Ids, to_ids, unique
from limpet.tables.rows import Column, Cut, Mask, ReusedMemory, RowNumbers, Rows
from limpet.tables.table import Table

_BLOCK = 256 << 10  # bytes of the values that are updated at once: they stay in the L2 cache

SETS = ("segments", "candidates")
"""The sets of rows of a table, as a version calls them: those with vectors, and the counts of ids
that are not admitted yet."""


class TableShard:
    """The rows of a table in some buckets.

    All methods are safe in several threads: they acquire ``lock``. ``rows`` has the columns
    ``values`` and ``slot/NAME``; ``candidates`` has the ids that are not admitted yet, None if
    ``admit_after`` is 1.
    """

    def __init__(self, table: Table, buckets: range = ALL_BUCKETS) -> None:
        self.table, self.buckets = table, buckets
        slots = table.optimizer.slots(table.dim)
        self.slots = {name: f"slot/{name}" for name in slots}
        columns = {"values": Column(table.dtype, table.dim, None)}
        for name, (width, initial) in slots.items():
            columns[self.slots[name]] = Column(torch.float32, width, initial)
        self.rows = Rows(columns, old_rows=table.old_rows)
        self.lock = self.rows.lock
        self.candidates = Rows({}, self.lock, table.old_rows) if table.admit_after > 1 else None
        self.sets = {n: rows for n, rows in zip(SETS, (self.rows, self.candidates)) if rows}
        self._memory = ReusedMemory()  # of look-ups
        self._counts = dict.fromkeys(("admitted", "evicted", "refused", "dropped"), 0)
        self.evicted_step = 0

    def look_up(self, ids: Ids, *, cut: Cut | None = None) -> torch.Tensor:
        """Return the vectors of ids (int64 ``[n]``), ``[n, dim]`` of the table's dtype: of rows, or
        initial ones. Nothing changes. ``cut``: as they were at a cut."""
        if cut is None:
            with self.lock:
                vectors, is_there = self._look_up(ids)
        else:
            vectors, is_there = cut.find("values", ids)
        absent = np.flatnonzero(~is_there)
        return vectors.index_copy_(0, torch.from_numpy(absent), self.table.initial(ids[absent]))

    def _look_up(self, ids: Ids) -> tuple[torch.Tensor, Mask]:
        rows = self.rows.find(ids)
        is_there = rows >= 0
        values = self.rows.column("values")
        found = self._memory.empty(len(ids), self.table.dim, values.dtype)
        if len(values):
            np.maximum(rows, 0, out=rows)  # any row: an initial vector follows
            torch.index_select(values, 0, torch.from_numpy(rows), out=found)
        return found, is_there

    def ids(self) -> Ids:
        """Return the ids of all rows, in any order."""
        with self.lock:
            ids: Ids = self.rows.column("ids").numpy()[self.rows.live()]
        return ids

    def statistics(self) -> dict[str, int]:
        """Return the counts that ``Servers.statistics`` describes."""
        with self.lock:
            return {
                "rows": self.rows.count,
                "bytes": sum(rows.nbytes for rows in self.sets.values()),
                "candidates": 0 if self.candidates is None else self.candidates.count,
                **self._counts,
            }

    def check(self, ids: Ids, grads: torch.Tensor) -> Mask:
        """Return for each row of gradients whether it is finite. Raises as ``push`` does."""
        what, is_valid = f"The gradient of {self.table.name}", grads.dtype == torch.float32
        _check_shape(what, is_valid, "float32", grads, [len(ids), self.table.dim])
        return _finite(self.table, "gradients", ids, grads, may_skip=self.table.nan == "skip")

    def push(self, ids: Ids, grads: torch.Tensor, *, lr: float, step: int) -> None:
        """Update the rows of distinct ids (int64 ``[n]``) by their gradients (float32 ``[n, dim]``)
        with the learning rate ``lr``; ``step`` is the number of the update.

        Does not wait for a cut: see ``Rows.wait``. Raises ``LimpetError`` before anything changes
        if a gradient is not finite, unless the table has ``nan="skip"``.
        """
        rate = real(lr)
        require("lr", rate is not None and 0 <= rate < np.inf, "a number, 0 or more", lr)
        grads, is_finite = grads.detach(), self.check(ids, grads)
        with self.lock:
            if not is_finite.all():
                ids, grads = ids[is_finite], grads[torch.from_numpy(is_finite)]
                self._counts["refused"] += int(np.count_nonzero(~is_finite))
            self._evict_unused(step - 1)
            self._push(ids, grads, float(lr), step)
            self.evict(step)

    def _push(self, ids: Ids, grads: torch.Tensor, lr: float, step: int) -> None:
        rows = self.rows.find(ids)
        absent = np.flatnonzero(rows < 0)
        if len(absent):
            counts = np.zeros(len(absent), np.int32)
            if self.candidates is not None:
                counts = self._count(self.candidates, ids[absent], step)
                absent, counts = absent[counts >= 0], counts[counts >= 0]
            rows[absent] = self._create(ids[absent], self.table.initial(ids[absent]))
            self.rows.column("counts").numpy()[rows[absent]] = counts
            self._counts["admitted"] += len(absent)
            is_there = rows >= 0
            if not is_there.all():
                rows, grads = rows[is_there], grads[torch.from_numpy(is_there)]
                self._counts["dropped"] += int(np.count_nonzero(~is_there))
        self.rows.before_change(rows)
        self._update(rows, grads, lr)
        self.rows.column("counts").numpy()[rows] += 1
        self.rows.column("last_steps").numpy()[rows] = step

    def _count(self, candidates: Rows, ids: Ids, step: int) -> NDArray[np.int32]:
        """Count gradients of ids without a row. Return the earlier counts of those that are
        admitted, else -1."""
        rows = candidates.find(ids)
        is_new = rows < 0
        rows[is_new] = candidates.insert(ids[is_new])
        candidates.before_change(rows)
        candidates.column("last_steps").numpy()[rows] = step
        counts = candidates.column("counts").numpy()
        counts[rows] += 1
        is_admitted = counts[rows] >= self.table.admit_after
        earlier = np.where(is_admitted, counts[rows] - 1, np.int32(-1))
        candidates.delete(rows[is_admitted])
        return earlier

    def _create(self, ids: Ids, vectors: torch.Tensor) -> RowNumbers:
        rows = self.rows.insert(ids)
        self.rows.column("values").index_copy_(0, torch.from_numpy(rows), vectors)
        return rows

    def _update(self, rows: RowNumbers, grads: torch.Tensor, lr: float) -> None:
        values, numbers = self.rows.column("values"), torch.from_numpy(rows)
        columns = {name: self.rows.column(column) for name, column in self.slots.items()}
        step = max(1, _BLOCK // (4 * self.table.dim))
        for start in range(0, len(rows), step):
            part = numbers[start : start + step]
            vectors = values.index_select(0, part).float()
            slots = {name: column.index_select(0, part) for name, column in columns.items()}
            self.table.optimizer.update(vectors, slots, grads[start : start + step], lr)
            values.index_copy_(0, part, vectors.to(values.dtype))
            for name, column in columns.items():
                column.index_copy_(0, part, slots[name])

    def fill(self, ids: Ids, vectors: torch.Tensor, *, step: int = 0) -> None:
        """Set the rows of ids to vectors, both as ``check_rows`` returns them. Each is as a new
        row: initial slots, count 0, last step ``step``. ``admit_after`` does not matter, eviction
        does. Does not wait for a cut."""
        with self.lock:
            absent = int(np.count_nonzero(self.rows.find(ids) < 0))
            self.rows.reserve(len(self.rows.column("ids")) + absent)  # may raise
            self.delete(ids)
            rows = self._create(ids, vectors)
            self.rows.column("last_steps").numpy()[rows] = step
            self._evict_most()

    def delete(self, ids: Ids) -> None:
        """Delete the rows of distinct ids, if they have any, and what is counted of them."""
        with self.lock:
            for rows in self.sets.values():
                numbers = rows.find(ids)
                rows.delete(numbers[numbers >= 0])

    def evict(self, step: int) -> None:
        """Evict what the table's ``Evict`` says after update ``step``; ``push`` does it itself."""
        with self.lock:
            self._evict_unused(step)
            self._evict_most()

    def _evict_unused(self, step: int) -> None:
        """Evict as after the last multiple of ``every``, unless that was done: the result does not
        depend on whether there was an update at just that step."""
        evict = self.table.evict
        if evict is None or step // evict.every * evict.every <= self.evicted_step:
            return
        self.evicted_step = step = step // evict.every * evict.every
        for rows in self.sets.values():
            live = rows.live()
            last_steps = rows.column("last_steps").numpy()[live]
            is_out = np.zeros(len(live), np.bool_)
            if evict.unused_steps is not None:
                is_out |= step - last_steps > evict.unused_steps
            if evict.min_count is not None and rows is self.rows:
                is_out |= rows.column("counts").numpy()[live] < evict.min_count
            self._evict(rows, live[is_out & (last_steps <= step)])

    def _evict_most(self) -> None:
        """Keep to the maximum. Evicting down to 15/16 of it makes the cost per new row small."""
        if self.table.evict is None or self.table.evict.max_rows is None:
            return
        most = max(1, self.table.evict.max_rows * len(self.buckets) // BUCKETS)
        for rows in self.sets.values():
            if rows.count <= most:
                continue
            live, count = rows.live(), rows.count - max(1, most * 15 // 16)
            last_steps = rows.column("last_steps").numpy()[live]
            border = np.partition(last_steps, count - 1)[count - 1]
            older, same = live[last_steps < border], live[last_steps == border]
            ids, counts = rows.column("ids").numpy()[same], rows.column("counts").numpy()[same]
            order = np.lexsort((ids, counts))[: count - len(older)]
            self._evict(rows, np.concatenate([older, same[order]]))

    def _evict(self, rows: Rows, numbers: RowNumbers) -> None:
        rows.delete(numbers)
        if rows is self.rows:
            self._counts["evicted"] += len(numbers)


def sets_of(shards: Mapping[str, TableShard]) -> dict[str, Rows]:
    """Return the sets of rows of shards, by ``TABLE/SET``."""
    return {f"{n}/{key}": rows for n, shard in shards.items() for key, rows in shard.sets.items()}


def check_rows(table: Table, ids: Any, values: Any) -> tuple[Ids, torch.Tensor]:
    """Return distinct ids, and finite vectors in the table's dtype. Raises ``LimpetError``."""
    name, ids = table.name, to_ids(ids).reshape(-1)
    vectors = torch.as_tensor(values, device="cpu").detach()
    is_valid = vectors.is_floating_point()
    _check_shape(f"values of {name}", is_valid, "floats", vectors, [len(ids), table.dim])
    vectors = vectors.to(table.dtype)
    distinct, places = unique(ids)
    if len(distinct) < len(ids):
        raise LimpetError(f"ids of {name} has {distinct[np.bincount(places).argmax()]} twice")
    _finite(table, "values", ids, vectors, may_skip=False)
    return ids, vectors


def _check_shape(name: str, is_kind: bool, kind: str, x: torch.Tensor, shape: list[int]) -> None:
    is_valid = is_kind and [*x.shape] == shape
    require(name, is_valid, f"{kind} {shape}", f"{x.dtype} {[*x.shape]}")


def _finite(table: Table, what: str, ids: Ids, x: torch.Tensor, *, may_skip: bool) -> Mask:
    """Return for each row of x whether all its elements are finite."""
    if bool(torch.isfinite(x.sum())):  # says it of all, and is cheap
        return np.ones(len(x), np.bool_)
    is_finite: Mask = torch.isfinite(x).all(dim=1).numpy()
    bad = ids[~is_finite]
    if len(bad) and not may_skip:
        what = f"{what} of {table.name} are not finite, of {len(bad)} ids such as"
        todo = 'Correct them, such as by a lower rate; nan="skip" drops such gradients'
        raise LimpetError(f"{what} {', '.join(map(str, bad[:5]))}", todo=todo)
    return is_finite
