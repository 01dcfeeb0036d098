"""A file that is longer than its format allows is damaged at once, whoever reads it; what it may
protect stays."""

import time
from contextlib import suppress

import numpy as np
import pytest

import limpet
from limpet.errors import FormatError, LimpetError
from limpet.format.names import Version
from limpet.format.records import MAX_RECORD
from limpet.run import catalog, lease
from limpet.run.policy import KeepBest, KeepLast
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.storage.store import Entry, Stat, too_long_error
from tests.unreliable_stores import HookedStore

HUGE = 200 << 30
MANIFEST_LIMIT = 1 << 20


class HugeStore(HookedStore):
    """A store in which the object ``key`` has 200 GiB: zeros follow its bytes. It counts the bytes
    that are read of it."""

    def __init__(self, inner, key):
        super().__init__(inner)
        self.key, self.read_bytes = key, 0
        self.huge = Stat(key, HUGE, time.time())

    def get(self, key, limit):
        if key == self.key:
            raise too_long_error(key, self.url, limit, HUGE)
        return super().get(key, limit)

    def get_range(self, key, offset, length, into):
        if key == self.key:
            self.read_bytes += length
            data = self.inner.get(key, HUGE)[offset : offset + length]
            into[:length] = data + bytes(length - len(data))
        else:
            super().get_range(key, offset, length, into)

    def stat(self, key):
        return self.huge if key == self.key else super().stat(key)

    def list(self, prefix):
        return (self.huge if s.key == self.key else s for s in super().list(prefix))

    def list_level(self, folder, prefix=""):
        for entry in self.inner.list_level(folder, prefix):
            key = f"{folder}/{entry.name}" if folder else entry.name
            yield Entry(entry.name, entry.kind) if key == self.key else entry


def make_run():
    store = MemoryStore()
    with Run(store).writer(incremental=True) as writer:
        for step in (10, 20, 30, 40):
            writer.save({"x": np.arange(9000.0), "n": step}, step=step)
    run = Run(store)
    run.add_metrics(10, {"m": 10.0})
    return store


KINDS = {
    "manifest": ("version_30/manifest.json", None),
    "index": ("version_30/", ".index.json"),
    "shard": ("version_30/", ".safetensors"),
    "result": ("version_10/eval-metrics.", ".json"),
    "branch": "branch-1.json",
    "pin": "pin-0123456789ab.json",
    "lasting pin": "pin-version_10.json",
    "lease": "lease-val.1.json",
    "notice": "deleting/0123456789ab.json",
    "lock": "writer.json",
    "request": "request-save.json",
    "end": "version_40/eval-training.0123456789ab.ended.json",
    "restart": "restart-0-0123456789ab.json",
    "objective": f"objective-{'0' * 32}.json",
}


@pytest.fixture(params=KINDS)
def huge(request, monkeypatch):
    """The kind of a huge file, and a run with it."""
    monkeypatch.setattr(catalog, "MAX_MANIFEST", MANIFEST_LIMIT)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
    store, where = make_run(), KINDS[request.param]
    if isinstance(where, str):
        key = where
        store.put_if_absent(key, b'{"limpet":1,')
    else:
        start, end = where
        (key,) = [
            s.key for s in store.list("") if s.key.startswith(start) and s.key.endswith(end or "")
        ]
    return request.param, HugeStore(store, key)


def steps(run):
    return {version.step for version in run.listing().versions}


def test_a_file_of_200_gib(huge):
    """It is never read beyond the limit, and deletes nothing that it may protect."""
    kind, store = huge
    run = Run(store)
    found = [snapshot.step for snapshot in run.snapshots()]
    assert found == ([10, 20, 40] if kind == "manifest" else [10, 20, 30, 40])
    assert run.latest().step == 40
    assert run.best("m") is None or run.best("m").step == 10
    run.ended()
    run.pins()
    if kind != "manifest":
        assert run.open(Version(30)).verify().ok == (kind not in ("index", "shard"))
    for delete in (
        lambda: run.retain(KeepBest(1, "m")),
        lambda: run.sweep(grace=0),
        lambda: run.delete(20),
    ):
        with suppress(LimpetError):  # nothing, or this version, may be deleted
            delete()
    assert {10, 40} <= steps(run), "every version refers to version 10"
    assert steps(run) >= {"pin": {20, 30}, "lease": {30}}.get(kind, set())
    assert store.read_bytes <= max(MANIFEST_LIMIT + 128, 2 * MAX_RECORD)


def test_a_manifest_of_200_gib_does_not_stop_retention(monkeypatch):
    monkeypatch.setattr(catalog, "MAX_MANIFEST", MANIFEST_LIMIT)
    full = MemoryStore()
    for step in (1, 2, 3):
        limpet.save(full.at(f"version_{step}"), {"n": step}, step=step)
    run = Run(HugeStore(full, "version_2/manifest.json"))
    assert [v.step for v in run.retain(KeepLast(1))] == [1]
    with pytest.raises(FormatError, match=r"version_2/manifest\.json"):
        run.open(Version(2))


def test_a_damaged_result_keeps_the_version_that_it_may_make_the_best():
    store = MemoryStore()
    for step in (1, 2, 3):
        limpet.save(store.at(f"version_{step}"), {"n": step}, step=step)
        Run(store).add_metrics(step, {"m": step})
    store.put_if_absent("version_2/eval-val.0123456789ab.json", b"{}")
    assert [v.step for v in Run(store).retain(KeepLast(2))] == [1]
    assert Run(store).retain(KeepBest(1, "m", mode="max")) == []
    assert Run(store).delete(2) > 0, "on request"
