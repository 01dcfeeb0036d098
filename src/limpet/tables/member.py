"""The servers of one process as a member of a state: they save and restore with the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from secrets import token_hex
from threading import RLock, get_ident
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from limpet.errors import FormatError, LimpetError, MissingLeaf, NotFound
from limpet.format import tree
from limpet.ranks.group import Group
from limpet.snapshot.leaf import LeafView
from limpet.snapshot.reader import SnapshotReader
from limpet.state.streamed import Streamed
from limpet.tables import segments
from limpet.tables.ids import BUCKETS
from limpet.tables.messages import Mark
from limpet.tables.rows import Cut
from limpet.tables.server import TableServer
from limpet.tables.shard import SETS, TableShard, sets_of
from limpet.tables.table import Table

_Counts = dict[str, tuple[int, int, int]]
"""The ``counts`` of the rows of a server, by ``TABLE/SET``."""

_Stored = Mapping[str, Sequence[segments.StoredSegment]]
"""The segments of a version by ``TABLE/SET``."""


class _CutPlan(msgspec.Struct, frozen=True):
    """What rank 0 decides: the name of new segments, which tables are written in full, the counts
    of all servers, and the losses."""

    suffix: str
    full: list[str]
    servers: list[_Counts]
    losses: list[dict[str, int]]


class TableMember(Streamed):
    """The ``servers`` of this process, the first of which has the number ``first``, of ``count``.

    All processes of the group that have servers, and rank 0, have a member under one key.
    """

    make_mark: Callable[[], Mark] | None = None
    """On rank 0: begins an epoch, and returns its mark."""

    def __init__(
        self, specs: Sequence[Table], servers: Sequence[TableServer], *, first: int, count: int
    ) -> None:
        self.specs = {table.name: table for table in specs}
        self.tables = [*self.specs]
        self.servers, self._first, self.count = servers, first, count
        self.ranges = segments.equal_ranges(count)
        self.losses: list[dict[str, int]] = []
        """The ``losses`` of each table: buckets that have returned to a version."""

        self._base = ""
        """The digest of the version that has all rows that do not count as changed."""

        self._stored: dict[str, dict[str, segments.Lengths]] = {}
        """By ``TABLE/SET``: the segments of that version by name."""

        self._saving: dict[str, dict[str, segments.Lengths]] = {}
        self._tree: dict[str, Any] = {}
        self._cuts: list[dict[str, Cut]] = []
        self._marked, self._begun, self._marked_by = ExitStack(), 0, 0
        self._save_lock = RLock()

    # -- saving ----------------------------------------------------------------------------------

    def begin_save(self, key: str, base: SnapshotReader | None, group: Group) -> None:
        """Begin a cut on all servers, at one mark. Until ``end_staging``, nothing is applied."""
        with self._save_lock:  # not while another save ends, in its thread
            if self._cuts:  # another save runs, or Ctrl-C came where nobody could end it
                self._end(None, None)
                self._begun += 1
            self._begun += 1
            with closing(group.collective("the cut of the tables")) as collective, collective:
                mark = collective.broadcast(self.make_mark() if self.make_mark else None, Mark)
                for server in self.servers:
                    self._marked.enter_context(server.at_mark(mark))
                    self._marked_by = get_ident()
                is_usable = base is not None and base.digest == self._base
                found = collective.gather((is_usable, self._count()), tuple[bool, list[_Counts]])
                plan = None if found is None else self._plan(found)
                plan = collective.broadcast(plan, _CutPlan)
            with self._changing():
                for server in self.servers:
                    self._cuts.append(cuts := {})
                    for below, rows in sets_of(server.shards).items():
                        cuts[below] = rows.begin_cut(is_full=below.partition("/")[0] in plan.full)
            has_old = bool(self.servers) and plan.full != self.tables
            saved = saved_tables(base, key) if base is not None and has_old else {}
            self._saving = {}
            made = {name: self._table(name, mark, plan, saved.get(name, {})) for name in self.specs}
            self._tree = made if self.servers else {}

    def _count(self) -> list[_Counts]:
        servers = [sets_of(server.shards) for server in self.servers]
        return [{key: rows.counts for key, rows in sets.items()} for sets in servers]

    def _plan(self, found: Sequence[tuple[bool, list[_Counts]]]) -> _CutPlan:
        """Decide on rank 0 which tables are written in full: without a base that is usable for all
        processes, or when the increments have more than half as many rows as the table."""
        is_usable = all(is_usable for is_usable, _ in found)
        servers, full = [counts for _, process in found for counts in process], []
        for name in self.specs:
            stored = [*self._stored.get(f"{name}/segments", {}).values()]
            counts = [server[f"{name}/segments"] for server in servers]
            added = sum(int(lengths.sum()) for lengths in stored[1:])
            added += sum(touched + deleted for _, touched, deleted in counts)
            if not is_usable or not stored or 2 * added > sum(rows for rows, _, _ in counts):
                full.append(name)
        return _CutPlan(token_hex(4), full, servers, self.losses)

    def _table(self, name: str, mark: Mark, plan: _CutPlan, saved: Mapping[str, Any]) -> Any:
        """Return the tree of a table, and remember its segments for the next save."""
        plain, is_full = self.specs[name].to_plain(), name in plan.full
        plain["optimizer"]["lr"] = mark.rates.tables[name]
        table = {
            **plain,
            "rows": sum(counts[f"{name}/segments"][0] for counts in plan.servers),
            "step": mark.step,
            "batches": mark.batches,
            "first_buckets": [buckets.start for buckets in self.ranges],
            **({"losses": plan.losses} if plan.losses else {}),
        }
        for set_name in SETS:
            key = f"{name}/{set_name}"
            counts = [counts[key] for counts in plan.servers if key in counts]
            if not counts:
                continue
            stored = {} if is_full else self._stored.get(key, {})
            rows, *changed = np.array(counts).T
            new = np.stack([rows, 0 * rows] if is_full else changed)
            added = {f"{len(stored)}.{plan.suffix}": new} if is_full or new.any() else {}
            self._saving[key] = {**stored, **added}
            cuts = {n: each[key] for n, each in enumerate(self._cuts, self._first)}
            table[set_name] = {}
            for n, lengths in self._saving[key].items() if cuts else ():
                old = saved[set_name][n] if n in stored else None
                table[set_name][n] = segments.segment_tree(lengths, self.ranges, cuts, old)
        return table

    def state_dict(self) -> dict[str, Any]:
        return self._tree

    def end_staging(self) -> None:
        self._marked.close()

    def end_save(self, digest: str | None, error: BaseException | None) -> None:
        if self._marked_by == get_ident():  # else, the locks may be those of another save
            self._marked.close()
        with self._save_lock:
            self._end(digest, error)

    def _end(self, digest: str | None, error: BaseException | None) -> None:
        with self._changing():
            is_alone, self._begun = self._begun == 1, self._begun - 1
            cuts, self._cuts, self._tree = self._cuts, [], {}
            for cut in [cut for each in cuts for cut in each.values()]:
                cut.end(is_committed=digest is not None and is_alone)
            stored, self._saving = self._saving, {}
            if digest is not None and is_alone:
                self._base, self._stored = digest, stored
            elif not is_alone or isinstance(error, FormatError | NotFound):
                self._base = ""  # the base may be damaged: the next save is full

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Do not go on after an interrupt of the block: nobody would end a lost cut."""
        with ExitStack() as servers:
            for server in self.servers:
                servers.enter_context(server.changing(LimpetError))
            yield

    # -- loading ---------------------------------------------------------------------------------

    def differences(self, saved: Mapping[str, Any]) -> dict[str, str]:
        found = {name: "saved, not live" for name in saved if name not in self.specs}
        for name, table in self.specs.items():
            if name not in saved:
                found[name] = "not saved, live a table"
                continue
            for key, text in table.differences(saved[name]).items():
                found[f"{name}/{key}"] = text
        return found

    def restore(self, snapshot: SnapshotReader, key: str) -> None:
        """Read the rows of all servers of this process, each those of its buckets. The ranges are
        those of the version, if as many servers have saved it."""
        self._saving = {}
        for server in self.servers:
            server.replace(server.buckets, None)
        saved = saved_tables(snapshot, key)
        stored = {
            f"{name}/{n}": segments.stored_segments(snapshot, f"{key}/{name}/{n}", table.get(n, {}))
            for name, table in saved.items()
            for n in SETS
        }
        first_table = next(iter(saved.values()))
        firsts, self.losses = first_table["first_buckets"], first_table.get("losses", [])
        if len(firsts) == self.count:
            self.ranges = segments.ranges_from(firsts)
        else:
            self.ranges = segments.balanced_ranges(self._weights(stored), self.count)
        ranges = self.ranges[self._first :][: len(self.servers)]
        restored = [self._restore(buckets, stored) for buckets in ranges]
        for server, buckets, shards in zip(self.servers, ranges, restored):
            for name, shard in shards.items():
                shard.evicted_step = saved[name]["step"]  # a fill may have been later
            server.replace(buckets, shards)
        self._base = snapshot.digest if len(firsts) == self.count else ""
        starts = [buckets.start for buckets in self.ranges]
        self._stored = {
            key: {
                s.name: np.add.reduceat([s.rows_per_bucket, s.deleted_per_bucket], starts, axis=1)
                for s in each
            }
            for key, each in stored.items()
        }
        self.restored(saved, snapshot)

    def _restore(self, buckets: range, stored: _Stored) -> dict[str, TableShard]:
        """Return the shards of some buckets, read from a version."""
        shards = {name: TableShard(table, buckets) for name, table in self.specs.items()}
        for key, rows in sets_of(shards).items():
            segments.restore_rows(rows, stored[key], buckets)
        return shards

    def _weights(self, stored: _Stored) -> NDArray[np.float64]:
        """Return about how many bytes the rows of each bucket have."""
        weights = np.zeros(BUCKETS)
        for name, table in self.specs.items():
            widths = [width for width, _ in table.optimizer.slots(1).values()]
            for segment in stored[f"{name}/segments"]:
                weights += table.dim * (1 + sum(widths)) * segment.rows_per_bucket
        return weights

    def restored(self, saved: Mapping[str, Any], snapshot: SnapshotReader) -> None:
        """Take over what else a version says of the tables, after a restore."""


def saved_tables(reader: SnapshotReader, key: str) -> Any:
    """Return the tree below ``key``, such as of the tables, with a ``LeafView`` for each leaf."""
    for _, node, found in tree.children(reader.manifest.tree, ""):
        if found == key:
            return tree.decode(node, key, lambda leaf, at: LeafView(reader, at, leaf))
    raise MissingLeaf(f"{reader.url} has no tables under {key!r}", leaf=key)
