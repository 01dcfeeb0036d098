"""A training with tables, beside a dict of rows that each of its versions must equal."""

from contextlib import contextmanager

import numpy as np
import torch

import limpet
from limpet import tables
from limpet.loading.snapshot import reader_of
from limpet.run.lineage import start_branch
from limpet.tables.rows import Rows

WORDS = tables.Table("words", 4, optimizer=tables.SGD(lr=1.0, momentum=0.0))
URLS = tables.Table(
    "urls",
    3,
    optimizer=tables.SGD(lr=1.0),
    initializer=tables.Normal(),
    dtype="bfloat16",
    admit_after=2,
)


class Training:
    """Saves versions of ``specs`` by ``count`` servers into a run.

    ``rows``: by table, the rows by id. ``versions``: by step, what they were.
    """

    def __init__(self, store, *specs, count=1, seed=0):
        self.run, self.specs, self.random = limpet.Run(store), specs, np.random.default_rng(seed)
        self.servers = tables.Servers(specs, count)
        self.rows = {spec.name: {} for spec in specs}
        self.waiting = {spec.name: {} for spec in specs}  # gradients of ids not yet admitted
        self.versions, self.step = {}, 0

    def update(self, name, ids, gradient=1.0):
        """Apply a gradient of which all elements are equal to each of distinct ids."""
        spec = self.servers.specs[name]
        rows, numbers = self.servers.client.look_up(name, torch.tensor(ids))
        (rows[numbers] * gradient).sum().backward()
        self.servers.step()
        for i in ids:
            count = self.waiting[name][i] = self.waiting[name].get(i, 0) + 1
            if i not in self.rows[name] and count >= spec.admit_after:
                self.rows[name][i] = spec.initial(np.array([i]))[0]
            if i in self.rows[name]:
                row = self.rows[name][i].float() - gradient
                self.rows[name][i] = row.to(spec.dtype)

    def evict(self, name, ids):
        for server in self.servers.servers:
            server.shards[name].delete(np.unique(ids))
        for i in ids:
            self.rows[name].pop(i, None)
            self.waiting[name].pop(i, None)

    def change(self):
        """Update, evict, and re-create random rows of each table."""
        for spec in self.specs:
            ids = self.random.integers(-40, 40, 9 if self.step else 300) * 2**50
            for _ in range(1 if self.step else spec.admit_after):
                self.update(spec.name, np.unique(ids).tolist(), float(self.random.integers(1, 9)))
            self.evict(spec.name, self.random.permutation(ids)[:4].tolist())
            self.update(spec.name, [int(ids[0])])

    @contextmanager
    def saving(self, **options):
        """Hold a writer, with which ``save`` saves."""
        with self.run.writer(**options) as self.writer:
            yield self

    def save(self):
        self.step += 1
        self.versions[self.step] = {name: dict(rows) for name, rows in self.rows.items()}
        return self.writer.save({"tables": self.servers}, step=self.step)

    def branch(self, step):
        """Let the training go on from an earlier version, on a new branch."""
        catalog, version = self.run.catalog, self.run.find(step)
        start_branch(catalog, reader_of(self.run.open(version)), version, "a test")

    def assert_equal(self, view, step):
        """Assert that a view has exactly the rows of a version."""
        assert view.step == step
        assert [*view] == [spec.name for spec in self.specs]
        for spec in self.specs:
            rows, found = self.versions[step][spec.name], view[spec.name]
            ids = np.array(sorted(rows), np.int64)
            assert len(found) == len(rows)
            assert found.ids().tolist() == ids.tolist()
            some = [*rows, 7, -1, 2**63 - 1, -(2**63), *[i * 2**50 for i in range(-40, 40)]]
            initial = spec.initial(np.array(some))
            expected = torch.stack([rows.get(i, initial[n]) for n, i in enumerate(some)])
            looked_up = found.lookup(some)
            assert looked_up.dtype == spec.dtype
            assert torch.equal(looked_up, expected)
            merged_ids, merged = found.arrays()
            assert merged_ids.dtype == np.int64
            assert merged_ids.tolist() == ids.tolist()
            assert merged.shape == (len(rows), spec.dim)
            assert all(torch.equal(rows[i], merged[n]) for n, i in enumerate(ids.tolist()))


def keep_views_at_their_limit(monkeypatch):
    """Let the cuts of evaluations be at their limit with the first row that changes."""
    begin = Rows.begin_view

    def begin_view(rows, *names):
        cut = begin(rows, *names)
        cut.old_bytes_limit = 1
        return cut

    monkeypatch.setattr(Rows, "begin_view", begin_view)
