"""What tables contain, live and in versions, as plain values that a test compares."""

import numpy as np
import torch

from limpet.tables.ids import bucket_of


def live(servers):
    """By table, the rows by id, and the counts of ids that are not admitted. Each row is a dict of
    bytes. Each id is on the server that has its bucket."""
    found = {}
    for server in servers.servers:
        for name, shard in server.shards.items():
            rows, candidates = found.setdefault(name, ({}, {}))
            for each, into in ((shard.rows, rows), (shard.candidates, candidates)):
                new = {} if each is None else _rows_of(each)
                assert not new.keys() & into.keys()
                assert {*bucket_of(np.array([*new], np.int64)).tolist()} <= {*server.buckets}
                into.update(new)
    return found


def _rows_of(rows):
    at = torch.from_numpy(rows.live())
    columns = {name: _raw(rows.column(name)[at]) for name in rows.columns}
    ids = columns.pop("ids").view(np.int64)
    return {
        i: {name.removeprefix("slot/"): column[n].tobytes() for name, column in columns.items()}
        for n, i in enumerate(ids.reshape(-1).tolist())
    }


def _raw(column):
    """The bytes of each row of a column."""
    column = torch.as_tensor(column).contiguous()
    width = column.element_size() * column[:1].numel()
    if not len(column):
        return np.empty((0, 8), np.uint8)
    return column.view(-1).view(torch.uint8).numpy().reshape(len(column), width)


def saved(snapshot, key="tables"):
    """The same of a version, whose segments this merges: later ones win, and in each the deletions
    come first."""
    tables = snapshot.load()[key]
    found = {name: ({}, {}) for name in tables}
    for name, table in tables.items():
        for set_name, into in zip(("segments", "candidates"), found[name]):
            for segment in table.get(set_name, {}).values():
                for i in np.asarray(segment["deleted"]).tolist():
                    into.pop(i, None)
                columns = {
                    **({"values": segment["values"]} if "values" in segment else {}),
                    **segment["slots"],
                    **{each: segment[each] for each in ("counts", "last_steps")},
                }
                columns = {each: _raw(column) for each, column in columns.items()}
                for n, i in enumerate(np.asarray(segment["ids"]).tolist()):
                    into[i] = {each: column[n].tobytes() for each, column in columns.items()}
        assert len(found[name][0]) == table["rows"]
    return found


def differing(a, b):
    """What two contents differ in, for a short message."""
    return [
        (name, n, i, a[name][n].get(i), b[name][n].get(i))
        for name in a.keys() | b.keys()
        for n in (0, 1)
        for i in a[name][n].keys() | b[name][n].keys()
        if a[name][n].get(i) != b[name][n].get(i)
    ][:3]
