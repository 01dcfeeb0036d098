"""The servers of one process as a member of a state: they save and restore with the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from secrets import token_hex
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from limpet.errors import FormatError, MissingLeaf, NotFound
from limpet.format import tree
from limpet.ranks.group import Group
from limpet.snapshot.leaf import LeafView
from limpet.snapshot.reader import SnapshotReader
from limpet.state.streamed import Streamed
from limpet.tables.hashing import BUCKETS
from limpet.tables.messages import Mark
from limpet.tables.rows import Cut, Rows
from limpet.tables.segments import (
    SETS,
    Part,
    Segment,
    StoredSegment,
    balanced_ranges,
    carried_segment,
    equal_ranges,
    new_segment,
    restore_rows,
    sets_of,
    stored_segments,
)
from limpet.tables.server import TableServer
from limpet.tables.shard import TableShard
from limpet.tables.table import Table


class _Counts(msgspec.Struct, frozen=True):
    """What a process has: for each of its servers, by table and set of rows, the number of rows, of
    those changed since the last version, and of the ids deleted since. ``base``: the digest of the
    version with which its rows were committed or restored."""

    base: str
    servers: list[dict[str, dict[str, tuple[int, int, int]]]]


class _CutPlan(msgspec.Struct, frozen=True):
    """What rank 0 decides: the name of new segments, which tables are written in full, and the
    counts of all servers."""

    suffix: str
    full: list[str]
    servers: list[dict[str, dict[str, tuple[int, int, int]]]]


_Stored = Mapping[tuple[str, str], Mapping[str, StoredSegment]]
"""The segments of a version by table and set, and by name."""


class TableMember(Streamed):
    """The ``servers`` of this process, the first of which has the number ``first``, of ``count``.

    ``make_mark``: on rank 0, begins an epoch and returns its mark. All processes of the group that
    have servers, and rank 0, have a member under one key.
    """

    def __init__(
        self,
        specs: Sequence[Table],
        servers: Sequence[TableServer],
        *,
        first: int,
        count: int,
        make_mark: Callable[[], Mark] | None,
    ) -> None:
        self.specs = {table.name: table for table in specs}
        self.tables = [*self.specs]
        self.servers, self._first, self.count = servers, first, count
        self._make_mark = make_mark
        self.ranges = equal_ranges(count)
        self._base = ""
        """The digest of the version that has all rows that do not count as changed."""

        self._stored: dict[tuple[str, str], dict[str, Segment]] = {}
        """By table and set: the segments of that version by name."""

        self._saving: dict[tuple[str, str], dict[str, Segment]] = {}
        self._tree: dict[str, Any] = {}
        self._cuts: list[tuple[Rows, Cut]] = []
        self._marked, self._begun = ExitStack(), 0

    # -- saving ----------------------------------------------------------------------------------

    def begin_save(self, key: str, base: SnapshotReader | None, group: Group) -> None:
        """Begin a cut on all servers, at one mark. Until ``end_staging``, nothing is applied."""
        if self._cuts:  # another save runs, or Ctrl-C came where nobody could end it
            self.end_save(None, None)
            self._begun += 1
        self._begun += 1
        with closing(group.collective("the cut of the tables")) as collective, collective:
            mark = self._make_mark() if self._make_mark else None
            mark = collective.broadcast(mark, Mark)
            for server in self.servers:
                self._marked.enter_context(server.at_mark(mark))
            found = collective.gather(self._count(base), _Counts)
            plan = None if found is None else self._plan(found, base)
            plan = collective.broadcast(plan, _CutPlan)
        parts = [self._begin_cuts(server, plan) for server in self.servers]
        carried: dict[str, Any] = {}
        if base is not None and parts and len(plan.full) < len(self.specs):
            carried = saved_tables(base, key)
        self._saving = {}
        made = {name: self._table(name, mark, plan, parts, carried) for name in self.specs}
        self._tree = made if parts else {}

    def _count(self, base: SnapshotReader | None) -> _Counts:
        counts = [
            {
                name: {
                    set_name: (rows.count, rows.count_touched(), rows.count_deleted())
                    for set_name, rows in sets_of(shard).items()
                }
                for name, shard in server.shards.items()
            }
            for server in self.servers
        ]
        return _Counts("" if base is None or base.digest != self._base else base.digest, counts)

    def _plan(self, found: Sequence[_Counts], base: SnapshotReader | None) -> _CutPlan:
        """Decide on rank 0 which tables are written in full: without a usable base, or when the
        increments have more than half as many rows as the table."""
        servers = [server for counts in found for server in counts.servers]
        is_usable = base is not None and all(counts.base for counts in found if counts.servers)
        full = []
        for name in self.specs:
            increments = [*self._stored.get((name, "segments"), {}).values()][1:]
            added = sum(sum(segment.rows) + sum(segment.deleted) for segment in increments)
            added += sum(sum(server[name]["segments"][1:]) for server in servers)
            rows = sum(server[name]["segments"][0] for server in servers)
            if not is_usable or (name, "segments") not in self._stored or 2 * added > rows:
                full.append(name)
        return _CutPlan(token_hex(4), full, servers)

    def _begin_cuts(self, server: TableServer, plan: _CutPlan) -> dict[str, dict[str, Cut]]:
        cuts: dict[str, dict[str, Cut]] = {}
        for name, shard in server.shards.items():
            with shard.lock:
                for set_name, rows in sets_of(shard).items():
                    cut = rows.begin_cut(is_full=name in plan.full)
                    self._cuts.append((rows, cut))
                    cuts.setdefault(name, {})[set_name] = cut
        return cuts

    def _table(
        self,
        name: str,
        mark: Mark,
        plan: _CutPlan,
        cuts: Sequence[Mapping[str, Mapping[str, Cut]]],
        carried: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the tree of a table, and remember its segments for the next save."""
        plain = self.specs[name].to_plain()
        plain["optimizer"]["lr"] = mark.rates.tables[name]
        counts = [server[name] for server in plan.servers]
        table = {
            **plain,
            "rows": sum(each["segments"][0] for each in counts),
            "step": mark.step,
            "batches": mark.batches,
            "first_buckets": [buckets.start for buckets in self.ranges],
        }
        is_full = name in plan.full
        numbered = [*enumerate(self.servers, self._first)]
        for set_name in counts[0] if counts else ():
            stored = {} if is_full else self._stored.get((name, set_name), {})
            segments = {
                old: carried_segment(
                    carried[name][set_name][old],
                    segment,
                    [(number, server.buckets) for number, server in numbered],
                )
                for old, segment in (stored if cuts else {}).items()
            }
            rows, touched, deleted = zip(*(each[set_name] for each in counts), strict=True)
            new = Segment(rows if is_full else touched, [0] * len(rows) if is_full else deleted)
            saving = dict(stored)
            if is_full or sum(new.rows) + sum(new.deleted):
                new_name = f"{len(stored)}.{plan.suffix}"
                saving[new_name] = new
                parts = [
                    Part(number, each[name][set_name], server.buckets)
                    for (number, server), each in zip(numbered, cuts, strict=True)
                ]
                if parts:
                    columns = cuts[0][name][set_name].columns
                    segments[new_name] = new_segment(columns, new, parts)
            table[set_name] = segments
            self._saving[name, set_name] = saving
        return table

    def state_dict(self) -> dict[str, Any]:
        return self._tree

    def end_staging(self) -> None:
        self._marked.close()

    def end_save(self, digest: str | None, error: BaseException | None) -> None:
        self._marked.close()
        is_alone, self._begun = self._begun == 1, self._begun - 1
        cuts, self._cuts, self._tree = self._cuts, [], {}
        for rows, cut in cuts:
            with rows.lock:
                rows.end_cut(cut, is_committed=digest is not None and is_alone)
        stored, self._saving = self._saving, {}
        if digest is not None and is_alone:
            self._base, self._stored = digest, stored
        elif not is_alone or isinstance(error, FormatError | NotFound):
            self._base = ""  # the base may be damaged: the next save is full

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
            (name, set_name): stored_segments(snapshot, f"{key}/{name}/{set_name}", table[set_name])
            for name, table in saved.items()
            for set_name in SETS
            if set_name in table
        }
        firsts = next(iter(saved.values()))["first_buckets"]
        if len(firsts) == self.count:
            self.ranges = [range(a, b) for a, b in zip(firsts, [*firsts[1:], BUCKETS])]
        else:
            self.ranges = balanced_ranges(_weights(self.specs, stored), self.count)
        ranges = self.ranges[self._first :][: len(self.servers)]
        restored = [self._restore(buckets, stored) for buckets in ranges]
        for server, buckets, shards in zip(self.servers, ranges, restored):
            for name, shard in shards.items():
                shard.evicted_step = saved[name]["step"]  # a fill may have been later
            server.replace(buckets, shards)
        self._base = snapshot.digest if len(firsts) == self.count else ""
        self._stored = {
            key: {name: self._segment(segment) for name, segment in segments.items()}
            for key, segments in stored.items()
        }
        self.restored(saved, snapshot)

    def _restore(self, buckets: range, stored: _Stored) -> dict[str, TableShard]:
        """Return the shards of some buckets, read from a version."""
        first, stop = buckets.start, buckets.stop
        shards = {name: TableShard(table, first, stop) for name, table in self.specs.items()}
        for (name, set_name), segments in stored.items():
            if (rows := sets_of(shards[name]).get(set_name)) is not None:
                restore_rows(rows, [*segments.values()], buckets)
        return shards

    def _segment(self, segment: StoredSegment) -> Segment:
        def lengths(counts: NDArray[np.int64]) -> list[int]:
            return [int(counts[buckets.start : buckets.stop].sum()) for buckets in self.ranges]

        return Segment(lengths(segment.rows_per_bucket), lengths(segment.deleted_per_bucket))

    def restored(self, saved: Mapping[str, Any], snapshot: SnapshotReader) -> None:
        """Take over what else a version says of the tables, after a restore."""


def _weights(specs: Mapping[str, Table], stored: _Stored) -> NDArray[np.float64]:
    """Return about how many bytes the rows of each bucket have."""
    weights = np.zeros(BUCKETS)
    for (name, set_name), segments in stored.items():
        slots = specs[name].optimizer.slots(1).values()
        row = specs[name].dim * (1 + sum(width for width, _ in slots))
        for segment in segments.values() if set_name == "segments" else ():
            weights += row * segment.rows_per_bucket
    return weights


def saved_tables(reader: SnapshotReader, key: str) -> dict[str, Any]:
    """Return the tree below ``key``, such as of the tables, with a ``LeafView`` for each leaf."""
    node = reader.manifest.tree
    for _, child, found in tree.children(node, ""):
        if found == key:
            tables: dict[str, Any] = tree.decode(
                child, key, lambda leaf, at: LeafView(reader, at, leaf)
            )
            return tables
    raise MissingLeaf(f"{reader.url} has no tables under {key!r}", leaf=key)
