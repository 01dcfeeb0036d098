"""The tables of a version for reading only: for evaluation and serving, and as plain arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch

from limpet.arguments import check_whole, require
from limpet.errors import ManifestInvalid, MissingLeaf, NotFound
from limpet.loading.snapshot import Snapshot
from limpet.run.address import open_reader
from limpet.run.lineage import find_latest
from limpet.run.run import Run
from limpet.snapshot.location import Url, locate
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays.own import Source
from limpet.tables import segments
from limpet.tables.client import TableClient, call_all
from limpet.tables.ids import ALL_BUCKETS, BUCKETS, Ids, to_ids
from limpet.tables.local import LocalEngine
from limpet.tables.member import saved_tables
from limpet.tables.rows import Column, Rows
from limpet.tables.server import TableServer
from limpet.tables.shard import SETS, TableShard
from limpet.tables.table import SGD, Table
from limpet.tasks import ray_cluster
from limpet.text import hide_in_urls
from limpet.tracebacks import short_tracebacks

_COLUMNS = ("ids", "values")
_BLOCK = 1 << 16  # rows that are looked up at once
_COMPARED = 64 << 20  # bytes of rows that are compared at once
_AGE = attrgetter("version.branch", "version.step")
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

    def segments(self, first: int = 0, name: str = "segments") -> list[segments.StoredSegment]:
        trees = dict([*self.tree.get(name, {}).items()][first:])
        return segments.stored_segments(self.reader, f"{self.key}/{name}", trees)

    def read(self, buckets: range = ALL_BUCKETS) -> TableShard:
        """Read the rows of some buckets into memory, without slots."""
        table = replace(self.table, optimizer=SGD(0.0), admit_after=1)
        shard = TableShard(table, buckets)
        segments.restore_rows(shard.rows, self.segments(), buckets, _COLUMNS)
        return shard

    def check_count(self, rows: int) -> None:
        if rows != self.tree["rows"]:
            what = f"The segments of {self.key} in {self.reader.url} have another number of rows"
            raise ManifestInvalid(what, expected=self.tree["rows"], found=rows)


def stored_tables(reader: SnapshotReader) -> dict[str, StoredTable]:
    """Return the tables of a version by key."""
    keys = reader.read_metadata("tables") or []
    return {
        f"{member}/{name}": StoredTable(reader, f"{member}/{name}", tree)
        for member in dict.fromkeys(key.rpartition("/")[0] for key in keys)
        for name, tree in saved_tables(reader, member).items()
    }


def _by_name(reader: SnapshotReader) -> dict[str, StoredTable]:
    tables = stored_tables(reader)
    found = {key.rpartition("/")[2]: table for key, table in tables.items()}
    if len(found) < max(1, len(tables)):
        raise MissingLeaf(f"{reader.url} has no tables, or two of one name")
    return found


def _read(reader: SnapshotReader, buckets: range = ALL_BUCKETS) -> TableServer:
    """Return a server that has the rows of some buckets of a version."""
    server = TableServer([], buckets)
    with reader.pin_while_reading():
        server.replace(buckets, {n: t.read(buckets) for n, t in _by_name(reader).items()})
    return server


def _read_url(url: str, digest: str, buckets: range) -> TableServer:
    """Do the same in another process."""
    return _read(SnapshotReader(locate(url), None, digest), buckets)


def open(
    url: Url | Snapshot, *, servers: int | None = None, ray: Mapping[str, Any] | None = None
) -> View:
    """Read the tables of a version into memory, without slots, and ids that are not admitted.

    ``url``: an address as for ``limpet.open``, such as ``"runs/a@latest"``. It takes about 1.1
    times the bytes of ids and vectors, of this process or of so many ``servers``: actors of a Ray
    cluster, with the options ``ray`` as for ``Servers``. All views of a version with this number of
    servers share them, in whatever process. They end with the view that has started them; another
    one starts them again when it looks something up.

    Raises ``NotFound``, ``FormatError`` for damage, ``StoreError``, ``MissingLeaf`` if there are no
    tables, and ``LimpetError`` for other arguments and if Ray cannot start the servers.
    """
    if servers is not None:
        expected = f"a number of servers, 1 to {BUCKETS}"
        servers = check_whole("servers=", servers, expected, 1, BUCKETS)
    require("ray=", servers is not None or ray is None, "None without servers=", ray)
    ray_cluster.check_options("ray=", ray or {})
    return View(open_reader(url), servers, ray or {})


@short_tracebacks
class View:
    """The tables of a version, read-only (``tables.open``). Iteration yields their names.

    ``view["words"]`` is a table, and a module such as ``EmbeddingBag(view, "words")`` looks its
    rows up, without gradients. All methods may be called from any thread. The rows are released
    with the view and the last of these modules.
    """

    def __init__(
        self, reader: SnapshotReader, servers: int | None, options: Mapping[str, Any]
    ) -> None:
        self._changing, self._run = Lock(), Run(reader.location.store)
        self._servers, self._options = servers, options
        # modules refer to this, and not to the view: a cycle would keep unused rows
        self.client = TableClient(has_gradients=False)
        self._load(reader, _by_name(reader))

    def __iter__(self) -> Iterator[str]:
        return iter(self.client.tables)

    def __getitem__(self, name: str) -> TableView:
        """Return a table. Raises ``LimpetError`` if there is none of this name."""
        self.client.table(name)
        return TableView(self, name)

    @property
    def snapshot(self) -> Snapshot:
        """The version that the view has."""
        return Snapshot(self._reader)

    @property
    def step(self) -> int | None:
        """The step of that version."""
        return self._reader.step

    def follow(self) -> bool:
        """Change to the newest intact version of the run, if that is a newer one: return True then.

        Only changed rows are read, and are in memory twice until all of them are written. A version
        that does not continue this one, such as a full one, is read completely into new memory, and
        so is every version with ``servers=``, by new servers. Look-ups of other threads go on; they
        wait while rows are written, so that none gets rows of an older version than one before it.
        Raises as ``open``; the view does not change then.
        """
        with self._changing:
            _ = self._reader.version  # raises if it is none of a run
            for _ in range(_TRIES):
                with suppress(NotFound):  # deleted meanwhile: there is a newer one
                    return self._change_to(find_latest(self._run.catalog))
            return self._change_to(find_latest(self._run.catalog))

    def _change_to(self, reader: SnapshotReader | None) -> bool:
        now, known = self._reader, self._stored
        if reader is None or reader.digest == now.digest or _AGE(reader) < _AGE(now):
            return False
        stored = _by_name(reader)
        lists = [{n: [*t.tree["segments"]] for n, t in each.items()} for each in (known, stored)]
        begin = {n: names[: len(lists[0].get(n, ()))] for n, names in lists[1].items()}
        if self._shards and lists[0] == begin:
            self._add(reader, stored)
        else:
            self._load(reader, stored)
        return True

    def _load(self, reader: SnapshotReader, stored: dict[str, StoredTable]) -> None:
        ranges, shards = [ALL_BUCKETS], dict[str, TableShard]()
        if self._servers is None:
            server = _read(reader)
            engine: Any = LocalEngine([server])
            shards = server.shards
        else:
            from limpet.tables.ray_engine import ViewEngine, check_shared

            check_shared("url", reader.location.store)
            parts = [(t.tree["dim"], each) for t in stored.values() for each in t.segments()]
            weights = np.sum([dim * each.rows_per_bucket for dim, each in parts], axis=0)
            ranges = segments.balanced_ranges(weights, self._servers)
            url, digest = reader.url, reader.digest
            reads = {
                f"{hide_in_urls(url)} {digest} {part}": partial(_read_url, url, digest, part)
                for part in ranges
            }
            engine = ViewEngine(reads, self._options)
        counts = call_all(engine, "statistics").values()
        for name, each in stored.items():
            each.check_count(sum(server[name]["rows"] for server in counts))
        self._reader, self._stored, self._engine, self._shards = reader, stored, engine, shards
        tables, firsts = [t.table for t in stored.values()], [r.start for r in ranges]
        self.client.connect(tables, firsts, engine.call)

    def _add(self, reader: SnapshotReader, stored: dict[str, StoredTable]) -> None:
        """Read all new segments, and only then write them, with all look-ups locked out."""
        added = {}
        with reader.pin_while_reading():
            for name, each in stored.items():
                new = each.segments(len(self._stored[name].tree["segments"]))
                added[self._shards[name]] = [
                    (segment.deleted(ALL_BUCKETS), [*segment.blocks(_COLUMNS, ALL_BUCKETS)])
                    for segment in new
                ]
        with ExitStack() as locks:
            for shard, parts in added.items():
                locks.enter_context(shard.lock)
                count = sum(len(block["ids"]) for _, blocks in parts for block in blocks)
                shard.rows.reserve(len(shard.rows.column("ids")) + count)  # may raise
            for shard, parts in added.items():
                for deleted, blocks in parts:
                    segments.apply(shard.rows, deleted, blocks)
                shard.rows.mark_stored()
            self._reader, self._stored = reader, stored


class TableView:
    """A table of a ``View``, at the version that the view has."""

    def __init__(self, view: View, name: str) -> None:
        self._view, self._name = view, name

    def __len__(self) -> int:
        """Return the number of rows."""
        servers = call_all(self._view._engine, "statistics").values()
        return sum(server[self._name]["rows"] for server in servers)

    @property
    def table(self) -> Table:
        """What the version says of the table; SGD in place of an optimizer that is unknown."""
        return self._view._stored[self._name].table

    def lookup(self, ids: Any) -> torch.Tensor:
        """Return the vectors of ids (integers ``[n]``), ``[n, dim]``: those of rows, or initial
        ones, as the training has looked them up."""
        return self._view.client.pull(self._name, to_ids(ids).reshape(-1))

    def ids(self) -> Ids:
        """Return the ids of all rows, int64 ``[n]``, in ascending order."""
        parts = call_all(self._view._engine, "ids", self._name)
        ids: Ids = np.sort(np.concatenate([*parts.values()]))
        return ids

    def arrays(self) -> tuple[Ids, torch.Tensor]:
        """Return the ids of all rows, int64 ``[n]``, in ascending order, and their vectors,
        ``[n, dim]``. It needs the memory of the result; ``follow`` waits."""
        with self._view._changing:
            ids, table = self.ids(), self.table
            values = torch.empty(len(ids), table.dim, dtype=table.dtype, device="cpu")
            for start in range(0, len(ids), _BLOCK):
                values[start : start + _BLOCK] = self.lookup(ids[start : start + _BLOCK])
        return ids, values


# -- for commands ----------------------------------------------------------------------------------


def merged_tables(reader: SnapshotReader) -> dict[str, Source]:
    """Return ``KEY/ids``, in ascending order, and ``KEY/values`` of each table of a version, to be
    read by one thread. The ids and values of one table at a time are in memory."""
    memory: dict[str, tuple[TableShard, Ids]] = {}
    sources: dict[str, Source] = {}

    def read(stored: StoredTable, name: str, first: int, stop: int, out: memoryview) -> None:
        if stored.key not in memory:
            memory.clear()
            shard = stored.read()
            stored.check_count(shard.rows.count)
            memory[stored.key] = shard, np.sort(shard.ids())
        shard, ids = memory[stored.key]
        part = ids[first:stop]
        rows = torch.from_numpy(part) if name == "ids" else shard.look_up(part)
        out[:] = rows.view(-1).view(torch.uint8).numpy().data

    for key, each in stored_tables(reader).items():
        count, dim, dtype = (each.tree[name] for name in ("rows", "dim", "dtype"))
        for name, *kind in (("ids", "int64", (count,)), ("values", dtype, (count, dim))):
            sources[f"{key}/{name}"] = segments.RowsSource(partial(read, each, name), 0, *kind)
    return sources


def compare_tables(
    a: SnapshotReader, b: SnapshotReader, keys: Sequence[str]
) -> Iterator[tuple[str, str, int, int, int, int, int]]:
    """Yield for the rows or candidates of each table, if they differ, the numbers of ids that only
    one has, of the others, of those with other values, and with other slots, counts, or steps."""
    tables = stored_tables(a), stored_tables(b)
    for key in keys:
        for name, aspect in zip(SETS, ("rows", "candidates"), strict=True):
            lists = [[*each[key].tree.get(name, {})] for each in tables]
            if lists[0] != lists[1]:  # else, both have the same segments
                x, y, both, *other = _compare([each[key].segments(0, name) for each in tables])
                if x or y or any(other):
                    yield key, aspect, x, y, both, other[0], other[1]


def _compare(pair: Sequence[list[segments.StoredSegment]]) -> list[int]:
    """Compare rows by id, some buckets at a time."""
    leaves = [each[0].columns if each else {} for each in pair]
    x, y = ({n: (leaf.dtype, leaf.shape[1:]) for n, leaf in each.items()} for each in leaves)
    shared = [name for name in x if x[name] == y.get(name) and name != "ids"]
    widths = {name: segments.row_bytes(leaves[0][name]) for name in shared}
    columns = {name: Column(torch.uint8, width, None) for name, width in widths.items()}
    weights = np.sum([each.rows_per_bucket for part in pair for each in part], axis=0)
    parts = 1 + int(weights.sum() * sum(widths.values())) // _COMPARED
    counts = np.zeros(5, np.int64)
    for buckets in segments.balanced_ranges(weights, min(BUCKETS, parts)):
        a, b = Rows(columns), Rows(columns)
        for rows, stored in zip((a, b), pair, strict=True):
            segments.restore_rows(rows, stored, buckets, ["ids", *shared])
        live = a.live()
        found = b.find(a.column("ids").numpy()[live])
        mine, other = (torch.from_numpy(n[found >= 0]) for n in (live, found))
        is_other = [[x.get("values") != y.get("values")], [x != y]]
        changed = torch.tensor(is_other, device="cpu").repeat(1, len(mine))
        for name in shared:
            differs = a.column(name)[mine] != b.column(name)[other]
            changed[int(name != "values")] |= differs.any(1) if differs.ndim > 1 else differs
        only = a.count - len(mine), b.count - len(mine)
        counts += [*only, len(mine), *changed.sum(1).tolist()]
    return counts.tolist()
