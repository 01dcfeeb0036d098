"""The tables of a version for reading only: for evaluation and serving, and as plain arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

import torch

from limpet.arguments import require
from limpet.errors import ManifestInvalid, MissingLeaf, NotFound
from limpet.format.names import parse_version
from limpet.loading.snapshot import Snapshot
from limpet.run.address import open_reader
from limpet.run.lineage import find_latest
from limpet.run.run import Run
from limpet.snapshot.location import Url
from limpet.snapshot.reader import SnapshotReader
from limpet.tables.client import Placement, TableClient
from limpet.tables.hashing import BUCKETS, to_ids
from limpet.tables.index import Ids
from limpet.tables.member import saved_tables
from limpet.tables.optimizers import SGD
from limpet.tables.segments import StoredSegment, put_rows, restore_rows, stored_segments
from limpet.tables.shard import TableShard
from limpet.tables.table import Table
from limpet.tracebacks import short_tracebacks

_ALL, _COLUMNS = range(BUCKETS), ("ids", "values")
_BLOCK = 1 << 16  # rows that are looked up at once
_TRIES = 10  # versions that may be deleted in a row while they are read


class StoredTable(NamedTuple):
    """A table of a version. ``tree`` has a ``LeafView`` for each leaf."""

    reader: SnapshotReader
    key: str
    tree: Mapping[str, Any]

    @property
    def table(self) -> Table:
        with suppress(ManifestInvalid):
            return Table.from_plain(self.tree)
        # nothing is updated here: the optimizer may be one of a newer release
        return Table.from_plain({**self.tree, "optimizer": {"kind": "SGD", "lr": 0.0}})

    def segments(self, first: int = 0) -> list[StoredSegment]:
        trees = dict([*self.tree["segments"].items()][first:])
        return [*stored_segments(self.reader, f"{self.key}/segments", trees).values()]

    def read(self, buckets: range = _ALL, columns: Sequence[str] = _COLUMNS) -> TableShard:
        """Read the rows of some buckets into memory, without slots."""
        table = replace(self.table, optimizer=SGD(0.0), admit_after=1)
        shard = TableShard(table, buckets.start, buckets.stop)
        restore_rows(shard.rows, self.segments(), buckets, columns)
        if buckets == _ALL and shard.rows.count != self.tree["rows"]:
            what = f"The segments of {self.key} in {self.reader.url} have another number of rows"
            raise ManifestInvalid(what, expected=self.tree["rows"], found=shard.rows.count)
        return shard


def stored_tables(reader: SnapshotReader) -> dict[str, StoredTable]:
    """Return the tables of a version by name. Raises ``MissingLeaf`` if it has none."""
    keys = reader.read_metadata("tables") or []
    found = {
        name: StoredTable(reader, f"{member}/{name}", tree)
        for member in dict.fromkeys(key.rpartition("/")[0] for key in keys)
        for name, tree in saved_tables(reader, member).items()
    }
    if not found or len(found) < len(keys):
        raise MissingLeaf(f"{reader.url} has {'two tables of one name' if found else 'no tables'}")
    return found


def sorted_ids(shard: TableShard) -> Ids:
    with shard.lock:
        ids: Ids = shard.rows.column("ids").numpy()[shard.rows.live()]
    ids.sort()
    return ids


def open(url: Url | Snapshot) -> View:
    """Read the tables of a version into memory, without slots, and ids that are not admitted.

    ``url``: an address as for ``limpet.open``, such as ``"runs/a@latest"``. It takes about 1.1
    times the bytes of ids and vectors. Raises ``NotFound``, ``FormatError`` for damage,
    ``StoreError``, and ``MissingLeaf`` if there are no tables.
    """
    return View(open_reader(url))


class _Loaded(NamedTuple):
    reader: SnapshotReader
    stored: dict[str, StoredTable]
    shards: dict[str, TableShard]


@short_tracebacks
class View:
    """The tables of a version, read-only (``tables.open``). Iteration yields their names.

    ``view["words"]`` is a table, and a module such as ``EmbeddingBag(view, "words")`` looks its
    rows up, without gradients. All methods may be called from any thread.
    """

    def __init__(self, reader: SnapshotReader, buckets: range = _ALL) -> None:
        self._buckets, self._changing, self._run = buckets, Lock(), Run(reader.location.store)
        self._loaded = self._load(reader, stored_tables(reader))
        self.client = TableClient([], Placement([0]), self._call, has_gradients=False)
        self.client.tables = {name: each.table for name, each in self._loaded.stored.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded.stored)

    def __getitem__(self, name: str) -> TableView:
        """Return a table. Raises ``LimpetError`` if there is none of this name."""
        self.client.table(name)
        return TableView(self, name)

    @property
    def snapshot(self) -> Snapshot:
        """The version that the view has."""
        return Snapshot(self._loaded.reader)

    @property
    def step(self) -> int | None:
        """The step of that version."""
        return self._loaded.reader.step

    def _call(self, _: str, arguments: Mapping[int, Any]) -> dict[int, Any]:
        shards, wanted = self._loaded.shards, arguments[0][1]
        return {0: {name: shards[name].look_up(ids) for name, ids in wanted.items()}}

    def _load(self, reader: SnapshotReader, stored: dict[str, StoredTable]) -> _Loaded:
        with reader.pin_while_reading():
            return _Loaded(reader, stored, {n: t.read(self._buckets) for n, t in stored.items()})

    def follow(self) -> bool:
        """Change to the newest intact version of the run, if that is a newer one: return True then.

        Only changed rows are read, and are in memory twice until all of them are written. A version
        that does not continue this one, such as a full one, is read completely into new memory.
        Look-ups of other threads go on; they wait while rows are written, so that none gets rows
        of an older version than one before it. Raises ``FormatError`` for damage, and
        ``StoreError``; the view does not change then.
        """
        with self._changing:
            reader, catalog = self._loaded.reader, self._run.catalog
            is_version = parse_version(reader.location.folder) is not None
            require("The snapshot that follow() continues", is_version, "of a run", reader.url)
            for _ in range(_TRIES):
                with suppress(NotFound):  # deleted meanwhile: there is a newer one
                    return self._change_to(find_latest(catalog) or reader)
            return self._change_to(find_latest(catalog) or reader)

    def _change_to(self, reader: SnapshotReader) -> bool:
        now, new = self._loaded.reader, reader.version
        if now.digest == reader.digest or (new.branch, new.step) < (
            now.version.branch,
            now.version.step,
        ):
            return False
        stored = stored_tables(reader)
        known = {name: [*each.tree["segments"]] for name, each in self._loaded.stored.items()}
        found = {name: [*each.tree["segments"]] for name, each in stored.items()}
        if known == {name: names[: len(known.get(name, ()))] for name, names in found.items()}:
            self._add(reader, stored)
        else:
            self._loaded = self._load(reader, stored)
        self.client.tables = {name: each.table for name, each in stored.items()}
        return True

    def _add(self, reader: SnapshotReader, stored: dict[str, StoredTable]) -> None:
        """Read all new segments, and only then write them, with all look-ups locked out."""
        added, (_, known, shards) = [], self._loaded
        with reader.pin_while_reading():
            for name, each in stored.items():
                for segment in each.segments(len(known[name].tree["segments"])):
                    blocks = [
                        (count, {n: column.copy() for n, column in block.items()})
                        for count, block in segment.blocks(_COLUMNS, self._buckets)
                    ]
                    added.append((shards[name], segment.deleted(self._buckets), blocks))
        with ExitStack() as locks:
            for shard in shards.values():
                locks.enter_context(shard.lock)
                count = sum(n for each, _, blocks in added if each is shard for n, _ in blocks)
                shard.rows.reserve(len(shard.rows.column("ids")) + count)  # may raise
            for shard, deleted, blocks in added:
                shard.delete(deleted)
                for count, block in blocks:
                    put_rows(shard.rows, count, block)
            for shard in shards.values():
                shard.rows.mark_stored()
            self._loaded = _Loaded(reader, stored, shards)


class TableView:
    """A table of a ``View``, at the version that the view has."""

    def __init__(self, view: View, name: str) -> None:
        self._view, self._name = view, name

    @property
    def table(self) -> Table:
        """What the version says of the table; SGD in place of an optimizer that is unknown."""
        return self._view.client.table(self._name)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._view._loaded.shards[self._name].rows.count

    def lookup(self, ids: Any) -> torch.Tensor:
        """Return the vectors of ids (integers ``[n]``), ``[n, dim]``: those of rows, or initial
        ones, as the training has looked them up."""
        return self._view.client.pull(self._name, to_ids(ids).reshape(-1))

    def ids(self) -> Ids:
        """Return the ids of all rows, int64 ``[n]``, in ascending order."""
        return sorted_ids(self._view._loaded.shards[self._name])

    def arrays(self) -> tuple[Ids, torch.Tensor]:
        """Return the ids of all rows, int64 ``[n]``, in ascending order, and their vectors,
        ``[n, dim]``. It needs the memory of the result; ``follow`` waits."""
        with self._view._changing:
            ids, table = self.ids(), self.table
            values = torch.empty(len(ids), table.dim, dtype=table.dtype, device="cpu")
            for start in range(0, len(ids), _BLOCK):
                values[start : start + _BLOCK] = self.lookup(ids[start : start + _BLOCK])
        return ids, values
