"""A member of a state whose arrays change while a save runs: a small model of a table."""

from threading import Lock
from typing import Any

import numpy as np

from limpet.loading.snapshot import Snapshot
from limpet.state.arrays import LocalBoxes
from limpet.state.arrays.own import Source
from limpet.state.streamed import Streamed
from limpet.storage.memory import MemoryStore
from limpet.tables.segments import CarriedSource
from limpet.types import Box

WIDTH = 4


class HeldRows(Source):
    """Rows that do not change until the save ends."""

    is_held = True
    dtype = "float32"

    def __init__(self, rows, member):
        self.rows, self.shape, self.member = rows, rows.shape, member

    def read_into(self, start, view):
        assert self.member.is_saving, "a source was read after the end of the save"
        self.member.before_read()
        self.member.bytes_read += len(view)
        view[:] = self.rows.reshape(-1).view(np.uint8)[start : start + len(view)].data


class Table(Streamed):
    """A growing list of segments of rows. Each save has those that the base has, by reference, and
    one new segment of the rows that were appended since.

    ``rank`` and ``size``: which part of each segment this member has. ``calls``: what was called.
    """

    tables = ("words",)

    def __init__(self, rank=0, size=1, dim=WIDTH):
        self.rank, self.size, self.dim = rank, size, dim
        self.segments: dict[str, Any] = {}  # by name: own rows, and the first of them
        self.newest = ""
        self.calls: list[Any] = []
        self.errors: list[BaseException | None] = []
        self.base: Any = None
        self.fail: dict[str, BaseException] = {}
        self.bytes_read, self.before_read = 0, lambda: None
        self.carries_from: Any = None  # instead of the base
        self.find = lambda name: (name, 0)  # the segment of the base that has rows, and the first
        self._lock = Lock()

    @property
    def is_saving(self):
        return self.calls.count("begin") > sum(type(call) is tuple for call in self.calls)

    def append(self, count, value):
        """Add ``count`` rows to the next segment, of which each rank has its part."""
        first, end = count * self.rank // self.size, count * (self.rank + 1) // self.size
        rows = np.full((count, self.dim), value, np.float32) + np.arange(count)[:, None]
        self.segments[f"s{len(self.segments)}"] = rows[first:end].astype(np.float32), first, count

    def values(self):
        return {name: rows.tobytes() for name, (rows, _, _) in self.segments.items()}

    def end_staging(self):
        pass

    def begin_save(self, key, base, group):
        self.calls.append("begin")
        self.base, self.group = base, group
        self.cut = dict(self.segments)
        if "begin" in self.fail:
            raise self.fail["begin"]

    def state_dict(self):
        plain = {"name": "words", "dim": self.dim}
        if not self.is_saving:
            return plain
        base = self.carries_from or self.base
        known: Any = {} if base is None else Snapshot(base)
        segments = {}
        for name, (rows, first, count) in self.cut.items():
            (known_name, at), shape = self.find(name), (count, self.dim)
            key = f"tables/words/segments/{known_name}/values"
            source: Source = HeldRows(rows, self)
            if key in known:
                source = CarriedSource(known[key], first + at, first + at + len(rows))
            parts = [(Box((first, 0), rows.shape), source)] if len(rows) else []
            values = LocalBoxes(shape, parts, "float32")
            segments[name] = {"values": values, "counts": np.arange(3)}
        return {"words": {**plain, "segments": segments}}

    def end_save(self, digest, error):
        assert self.is_saving, "a save was ended twice"
        self.calls.append((digest, None if error is None else type(error)))
        self.errors.append(error)
        self.newest = digest or self.newest
        if "end" in self.fail:
            raise self.fail["end"]

    def differences(self, saved):
        self.calls.append("differences")
        if "differences" in self.fail:
            raise self.fail["differences"]
        words = saved["words"]
        return {"words/dim": f"{words['dim']}, live {self.dim}"} if words["dim"] != self.dim else {}

    def restore(self, snapshot, key):
        self.calls.append("restore")
        if "restore" in self.fail:
            raise self.fail["restore"]
        found = Snapshot(snapshot)
        names = [k.split("/")[3] for k in found if k.startswith(f"{key}/words/segments/")]
        self.segments = {}
        for name in dict.fromkeys(names):
            leaf = found[f"{key}/words/segments/{name}/values"]
            first = leaf.shape[0] * self.rank // self.size
            end = leaf.shape[0] * (self.rank + 1) // self.size
            self.segments[name] = leaf[first:end].numpy(), first, leaf.shape[0]


class CountedReads:
    """A store in memory that counts the bytes that are read of shards."""

    def __init__(self):
        self.inner, self.count = MemoryStore(), 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_range(self, key, offset, length, into):
        self.count += length if key.endswith(".safetensors") else 0
        self.inner.get_range(key, offset, length, into)


def make_table(*counts, **options):
    """Return a table with a segment of each of these numbers of rows."""
    table = Table(**options)
    for number, count in enumerate(counts):
        table.append(count, 100.0 * number)
    return table
