"""One server: the rows of its buckets, its part of the dense model, and the pushes that it holds.

A push is applied when its commit is known: from the next message of its worker, or from a mark of
the coordinator. A server applies nothing of a later epoch before the mark of that epoch, so what
it has at a mark is exactly the ledger of the mark, without any worker having waited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock

import torch

from limpet.errors import LimpetError
from limpet.tables.dense import DensePart
from limpet.tables.ids import Ids
from limpet.tables.messages import Entry, Mark, Push, Rates, Sender, merge_gradients
from limpet.tables.rows import Cut
from limpet.tables.shard import TableShard, sets_of
from limpet.tables.table import Table


class StaleMessage(Exception):
    """A message is of an older generation, or its worker counts as lost. It has had no effect."""


class TableServer:
    """A server. All methods may be called from any thread, and any message may come twice, late, or
    from a worker that counts as lost. ``buckets``: those whose rows it has."""

    def __init__(
        self, tables: Sequence[Table], buckets: range, dense: DensePart | None = None
    ) -> None:
        self.replace(buckets, {table.name: TableShard(table, buckets) for table in tables})
        self.dense = dense
        self.generation = self.epoch = 0
        self._lock = RLock()
        self._pending: dict[str, dict[int, Push]] = {}
        """By worker and number, the pushes that are not applied. Numbers only grow."""

        self._applied: dict[str, int] = {}
        """By worker, the number of its last push that was applied."""

        self._committed: list[tuple[str, Entry]] = []
        """Commits whose pushes are not applied, because their epoch has not begun."""

        self._lost: set[str] = set()
        self._held: dict[str, tuple[dict[str, Cut], dict[str, torch.Tensor]]] = {}
        """By name, the cuts that are held for evaluations: of each table, and the dense values."""

    def replace(self, buckets: range, shards: dict[str, TableShard] | None) -> None:
        """Have other rows. None: a restore begins, and has failed if it does not end."""
        self.buckets, self._shards = buckets, shards

    @property
    def shards(self) -> dict[str, TableShard]:
        """The shards by table. Raises ``LimpetError`` if a restore of them has failed."""
        if self._shards is None:
            todo = "restore an intact version, or create the Servers again"
            what = "The tables are not valid, because a restore or an update of them failed"
            raise LimpetError(f"{what}: {todo}")
        return self._shards

    @contextmanager
    def changing(self, *harmless: type[Exception]) -> Iterator[None]:
        """Do not let anything use or save rows that an error, such as Ctrl-C, has left half new."""
        try:
            yield
        except harmless:
            raise
        except BaseException:
            self.replace(self.buckets, None)
            raise

    # -- messages of workers ---------------------------------------------------------------------

    def pull(self, sender: Sender | None, name: str, ids: Ids, cut: str = "") -> torch.Tensor:
        """Return the rows of ids in a table, as they are, or were at a ``cut`` that is held.
        Without a ``sender``, nothing is confirmed."""
        if sender is not None:
            self._confirm(sender)
        return self.shards[name].look_up(ids, cut=self._at(cut)[0][name] if cut else None)

    def pull_dense(
        self, sender: Sender | None, version: int, cut: str = ""
    ) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the version of the dense part, and its parameters and buffers unless the caller
        has this ``version``; or those at a ``cut`` that is held."""
        if sender is not None:
            self._confirm(sender)
        if self.dense is None:
            return 0, {}
        with self._lock:
            if cut:
                return 0, self._at(cut)[1]
            same = self.dense.version == version
            return self.dense.version, {} if same else self.dense.values()

    def _at(self, cut: str) -> tuple[dict[str, Cut], dict[str, torch.Tensor]]:
        if (held := self._held.get(cut)) is None:
            raise LimpetError("The cut of an evaluation was released")
        return held

    def push(self, sender: Sender, number: int, push: Push) -> bool:
        """Hold a push until its commit is known. What its worker has pushed before, and has not
        committed, was refused. Returns False while old rows are at their limit: send it again."""
        self.check(push)
        with self._lock:
            self._confirm(sender)
            if any(rows.must_wait for rows in sets_of(self.shards).values()):
                return False
            pending = self._pending.get(sender.worker, {})
            if number > max(self._applied.get(sender.worker, 0), *pending, 0):
                kept = {n: held for n, held in pending.items() if n <= sender.committed}
                self._pending[sender.worker] = {**kept, number: push}
            return True

    def _confirm(self, sender: Sender) -> None:
        with self._lock:
            if sender.generation != self.generation or sender.worker in self._lost:
                raise StaleMessage
            if sender.entry is not None:
                self._commit(sender.worker, sender.entry)

    # -- messages of the coordinator -------------------------------------------------------------

    def restart(self, generation: int, epoch: int) -> None:
        """Forget all pushes: no worker has committed anything in this generation."""
        with self._lock:
            self.release(*self._held)
            self.generation, self.epoch = generation, epoch
            self._pending, self._applied, self._committed, self._lost = {}, {}, [], set()
            if self.dense is not None:
                self.dense.restart()

    @contextmanager
    def at_mark(self, mark: Mark) -> Iterator[None]:
        """Apply the ledger of a mark, hold everything else within the block, and then begin the
        epoch of the mark. A repeated mark changes nothing."""
        with self._lock:
            if self.shards and mark.generation != self.generation:  # raises if they are not valid
                raise StaleMessage
            if mark.epoch > self.epoch:
                self._apply_committed()
                for worker, entry in mark.ledger.items():
                    self._apply(worker, entry)
                if self.dense is not None:
                    self.dense.set_rates(mark.rates.groups)
            yield
            if mark.epoch > self.epoch:
                self.epoch = mark.epoch
                self._apply_committed()

    def mark(self, mark: Mark) -> None:
        """Begin the epoch of a mark, without a cut."""
        with self.at_mark(mark):
            pass

    def hold(self, mark: Mark) -> None:
        """Begin the epoch of a mark, and hold its cut, whose name is the epoch: ``pull`` reads it
        until ``release``."""
        with self.at_mark(mark):
            if mark.epoch > self.epoch:
                cuts = {n: shard.rows.begin_view("values") for n, shard in self.shards.items()}
                dense = {} if self.dense is None else self.dense.values()
                self._held[str(mark.epoch)] = cuts, dense

    def release(self, *cuts: str) -> None:
        """End cuts that are held. One that is not is no error."""
        with self._lock:
            for name in self._held.keys() & cuts:
                for cut in self._held.pop(name)[0].values():
                    cut.end()

    def lose(self, generation: int, worker: str, committed: int, entry: Entry | None) -> None:
        """Declare a worker lost: what it has not ``committed`` never happened. ``entry``: as in a
        ``Sender``."""
        with self._lock:
            if generation != self.generation:
                raise StaleMessage
            self._lost.add(worker)
            pending = self._pending.get(worker, {})
            self._pending[worker] = {n: push for n, push in pending.items() if n <= committed}
            if entry is not None:
                self._commit(worker, entry)

    def apply_round(
        self, generation: int, pushes: Sequence[tuple[str, int]], step: int, rates: Rates
    ) -> None:
        """Apply the pushes of a synchronous round, in the order of their mini-batches: the average
        of the dense gradients, and the sum of those of the rows."""
        with self._lock:
            if generation != self.generation:
                raise StaleMessage
            if pushes[0][1] <= self._applied.get(pushes[0][0], 0):
                return  # the message has come twice
            held = [self._pending[worker].pop(number) for worker, number in pushes]
            for worker, number in pushes:
                self._applied[worker] = max(number, self._applied.get(worker, 0))
            self._update(held, step, rates)

    # -- implementation --------------------------------------------------------------------------

    def _commit(self, worker: str, entry: Entry) -> None:
        """Apply what a worker has committed, now or later."""
        if entry.number > self._applied.get(worker, 0):
            if (worker, entry) not in self._committed:
                self._committed.append((worker, entry))
            self._apply_committed()

    def _apply_committed(self) -> None:
        """Apply the commits of the current epoch. They do not wait while old rows are at their
        limit: each worker has at most one, as its next push is refused then."""
        for worker, entry in [*self._committed]:
            if entry.epoch <= self.epoch:
                self._committed.remove((worker, entry))
                self._apply(worker, entry)

    def _apply(self, worker: str, entry: Entry) -> None:
        """Apply the pushes of a worker up to an entry: one, because each push of a worker brings
        the entry of the one before."""
        pending = self._pending.get(worker, {})
        for number in sorted(n for n in pending if n <= entry.number):
            self._update([pending.pop(number)], entry.step, entry.rates)
        self._applied[worker] = max(entry.number, self._applied.get(worker, 0))

    def check(self, push: Push) -> None:
        """Raise ``LimpetError`` for a gradient that its table refuses."""
        for name, (ids, gradients) in push.rows.items():
            self.shards[name].check(ids, gradients)

    def update(self, push: Push, step: int, rates: Rates) -> None:
        """Apply a push that was checked, in a training without workers."""
        with self._room_for_old_rows(self.shards):
            self._update([push], step, rates)

    def _update(self, pushes: Sequence[Push], step: int, rates: Rates) -> None:
        with self.changing():
            for name, shard in self.shards.items():
                parts = [push.rows[name] for push in pushes if name in push.rows]
                if parts:
                    ids, gradients = merge_gradients(parts)
                    shard.push(ids, gradients, lr=rates.tables[name], step=step)
                else:  # what it has does not depend on the number of servers
                    shard.evict(step)
            if self.dense is not None:
                self.dense.update(pushes, step, rates.groups)

    def fill(self, name: str, ids: Ids, vectors: torch.Tensor, step: int) -> None:
        """Set rows: see ``Servers.fill``. A cut begins before or after that."""
        shard = self.shards[name]
        with self._room_for_old_rows({name: shard}), self.changing(LimpetError):
            shard.fill(ids, vectors, step=step)

    @contextmanager
    def _room_for_old_rows(self, shards: Mapping[str, TableShard]) -> Iterator[None]:
        """Hold the lock while no cut of these has as many old rows as it may have."""
        is_held, sets = False, sets_of(shards).values()
        while not is_held:
            for rows in sets:
                rows.wait()  # without the lock, which the end of a cut needs
            with self._lock:
                if is_held := not any(rows.must_wait for rows in sets):
                    yield

    def ids(self, name: str) -> Ids:
        """Return the ids of the rows of a table, in any order."""
        return self.shards[name].ids()

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return the statistics of each table."""
        return {name: shard.statistics() for name, shard in self.shards.items()}
