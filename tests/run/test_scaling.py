"""The cost of a save, a resume, and a retention does not depend on how much is in the run.

The tests count system calls, not seconds. What is known is not read again, but what a deletion
relies on is looked up again.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import limpet
from limpet.convert.copy import copy_snapshot
from limpet.format.manifest import decode_manifest
from limpet.format.names import MANIFEST, Version, parse_version
from limpet.format.sealed import seal
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySteps, KeepBest, KeepEvery, KeepLast, KeepPolicy
from limpet.run.retention import VERSIONS_PER_SAVE
from limpet.run.run import Run
from limpet.snapshot.location import Location
from limpet.storage.local.os_calls import Fs
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from tests.trainings import state_after

STATE: dict[str, Any] = {"x": np.arange(3.0)}


class CountingFs(Fs):
    """Counts the calls, and the names that were listed. ``folders`` are those that were listed."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.folders: list[str] = []

    def open(self, path, flags):
        self.counts["open"] += 1
        return super().open(path, flags)

    def stat(self, path, *, follow=True):
        self.counts["stat"] += 1
        return super().stat(path, follow=follow)

    def scandir(self, path):
        self.folders.append(os.path.basename(path))
        self.counts["scandir"] += 1
        return super().scandir(path)

    def take(self):
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        self.folders.clear()
        return counts


@pytest.fixture(autouse=True)
def no_other_threads(monkeypatch):
    """The watcher for requests polls at arbitrary times, so the number of calls would vary.

    So would the order of lookups in threads.
    """
    monkeypatch.setattr("limpet.threads.SLOW_LOOKUP", math.inf)
    monkeypatch.setattr("limpet.run.save_request.RequestWatcher.start", lambda self: None)


def make_run(path, count):
    """Return a run with the versions 10, 20, ..., quickly: their shards are one file."""
    first = limpet.save(path / "version_10", STATE)
    manifest, _ = decode_manifest((path / "version_10" / MANIFEST).read_bytes(), MANIFEST)
    shards = [
        name
        for shard in reader_of(first).manifest.shards
        for name in (shard.name, shard.index.name)
    ]
    for number in range(2, count + 1):
        folder = path / f"version_{10 * number}"
        folder.mkdir()
        for name in shards:
            os.link(path / "version_10" / name, folder / name)
        (folder / MANIFEST).write_bytes(seal(replace(manifest, step=10 * number))[0])
    return path


def count_in_training(path, last, keep, saves=4):
    """Count the calls of reading and training in a run, whose retention knows the versions.

    The calls of ``saves`` saves are added. The last of them applies retention.
    """
    fs, counts = CountingFs(), dict[str, Counter[str]]()
    store = LocalStore(path, fs=fs)
    assert Run(store).latest() is not None
    counts["latest"] = fs.take()
    assert Run(store).find(last) == Version(last)
    counts["find"] = fs.take()
    state = {"x": np.arange(3.0)}
    with limpet.Checkpointer(store, state, save=EverySteps(10**9), keep=keep) as ckpt:
        ckpt.resume()
        counts["resume"] = fs.take()
        counts["saves"] = Counter()
        for number in range(saves + 1):
            ckpt.step({"loss": 1.0})
            fs.take()
            ckpt.save()
            if number:  # the retention of the first one reads every manifest, once
                counts["saves"] += fs.take()
        ckpt.run.retain(keep or KeepPolicy())
        counts["retention"] = fs.take()
    if keep is None:
        assert len(list(path.glob("version_*"))) == last // 10 + saves + 1
    else:
        records = Run(path).records()
        assert {r.version for r in records} == keep.keep(records)
    return counts


@pytest.mark.parametrize(
    ("keep", "count"),
    [
        (None, 300),
        (KeepEvery(10) | KeepLast(1), 300),
        (KeepEvery(10) | KeepLast(1) | KeepLast(2), 300),
        pytest.param(KeepEvery(10) | KeepLast(1), 1000, marks=pytest.mark.slow),
    ],
    ids=["all", "each save deletes", "union", "many"],
)
def test_the_calls_do_not_depend_on_the_number_of_versions(tmp_path, count, keep):
    saves = count // VERSIONS_PER_SAVE
    few = count_in_training(make_run(tmp_path / "few", 10), 100, keep, saves)
    many = count_in_training(make_run(tmp_path / "many", count), 10 * count, keep, saves)
    assert few["saves"]["scandir"] <= 15 * saves
    assert few["saves"].total() < 100 * saves
    if keep is not None:  # one retention in each run of many versions
        assert many.pop("saves") <= few.pop("saves")
    assert many == few


@pytest.mark.parametrize("kind", ["last", "best", "own"])
def test_looking_up_all_versions_costs_the_same_for_each_save(tmp_path, kind):
    """A policy may keep very many versions, or look at the metrics of all of them."""
    count = 300

    class Own(KeepPolicy):
        def keep(self, records):
            return {r.version for r in records[-count:]}

    best = KeepBest(count // 2, "loss") | KeepEvery(10) | KeepLast(1)
    keep = {"last": KeepLast(count), "best": best, "own": Own()}[kind]
    saves = count // VERSIONS_PER_SAVE
    few = count_in_training(make_run(tmp_path / "few", 10), 100, KeepLast(10), saves)
    many = count_in_training(make_run(tmp_path / "many", count), 10 * count, keep, saves)
    # for each version: its manifest, its links, its metrics, its two files, and its manifest again
    per_save = 6.5 * VERSIONS_PER_SAVE
    assert many["saves"].total() <= few["saves"].total() + saves * per_save


def test_a_policy_on_metrics_lists_each_folder_once_and_reads_nothing_again(tmp_path):
    path = make_run(tmp_path / "run", 100)
    for step in (50, 300, 310):
        Run(path).add_metrics(step, {"loss": step})
    fs = CountingFs()
    run = Run(LocalStore(path, fs=fs))
    keep = KeepBest(2, "loss") | KeepEvery(10)
    assert run.retain(keep) == []
    first = fs.take()
    assert run.retain(keep) == []
    again = fs.take()
    assert first["open"] == 103
    assert again["open"] == 0
    assert again["scandir"] <= 102
    Run(path).add_metrics(20, {"loss": 1})
    assert run.retain(KeepBest(1, "loss")) == [Version(s) for s in range(10, 1000, 10) if s != 20]


def test_unrelated_files_cost_at_most_the_listing_of_the_root(tmp_path):
    keep = KeepEvery(10) | KeepLast(1)
    plain = count_in_training(make_run(tmp_path / "plain", 10), 100, keep)
    path = make_run(tmp_path / "run", 10)
    for number in range(30):
        for folder in ("wandb", f"wandb/run-{number}/files", "version_x", "tensorboard/a/b"):
            (path / folder).mkdir(parents=True, exist_ok=True)
            (path / folder / f"events.{number}").write_bytes(b"")
        (path / f"notes-{number}.txt").write_bytes(b"")
        (path / f"slurm-{number}.out").symlink_to(tmp_path / "missing")
    fs = CountingFs()
    assert count_in_training(path, 100, keep) == plain
    run = Run(LocalStore(path, fs=fs))
    assert run.latest() is not None
    run.retain(KeepLast(1))
    run.snapshots()
    run.records()
    assert {f for f in fs.folders if not f.startswith("version_1")} <= {"run", "version_20"} | {
        f"version_{step}" for step in range(10, 120)
    }


def test_the_first_retention_is_linear(tmp_path):
    def count(versions):
        fs = CountingFs()
        path = make_run(tmp_path / str(versions), versions)
        assert len(Run(LocalStore(path, fs=fs)).retain(KeepLast(1))) == versions - 1
        return fs.take().total()

    few, many = count(20), count(200)
    assert many <= 10.5 * few


class World:
    """A run that other processes change at random between two retentions of one process."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.store = MemoryStore()
        self.step = 0

    def versions(self):
        return Run(self.store).listing().versions

    def change(self):
        others = [self.damage, self.delete, self.save_again, self.evaluate, self.pin, self.repair]
        self.random.choice([self.save] * 6 + others)()

    def save(self):
        self.step += self.random.randint(1, 4)
        loss = self.random.random()
        limpet.save(self.store.at(f"version_{self.step}"), state_after(1), step=self.step)
        Run(self.store).add_metrics(Version(self.step), {"loss": loss})

    def _any_key(self):
        # not an evaluation: what was read from it stays true
        keys = [s.key for s in self.store.list("") if s.key.startswith("version_")]
        keys = [key for key in keys if "/eval-" not in key]
        return self.random.choice(keys) if keys else None

    def damage(self):
        if (key := self._any_key()) is not None:
            raw = self.store.get(key, 1 << 30)
            self.store.delete(key)
            if self.random.random() < 0.7:
                self.store.put_if_absent(key, raw[:-1])

    def delete(self):
        if versions := self.versions():
            version = self.random.choice(versions)
            for stat in list(self.store.list(str(version))):
                self.store.delete(stat.key)

    def save_again(self):
        if versions := self.versions():
            version = self.random.choice(versions)
            for stat in list(self.store.list(str(version))):
                self.store.delete(stat.key)
            limpet.save(self.store.at(str(version)), state_after(2), step=version.step)

    def evaluate(self):
        intact = [s.version for s in Run(self.store).snapshots()]
        if intact:
            metrics = {"loss": self.random.random()}
            Run(self.store).add_metrics(self.random.choice(intact), metrics)

    def pin(self):
        if versions := self.versions():
            Run(self.store).pin(self.random.choice(versions).step)

    def repair(self):
        """Remove the damaged versions and the pins, which prevent deletions."""
        intact = {s.version for s in Run(self.store).snapshots()}
        for stat in list(self.store.list("")):
            if parse_version(stat.key.partition("/")[0]) not in intact:
                self.store.delete(stat.key)

    def copy(self):
        copied = MemoryStore()
        for stat in self.store.list(""):
            copied.put_if_absent(stat.key, self.store.get(stat.key, 1 << 30))
        return copied


POLICIES = [
    KeepLast(2),
    KeepLast(4),
    KeepEvery(5) | KeepLast(1),
    KeepBest(2, "loss"),
    KeepBest(1, "loss") | KeepEvery(7) | KeepLast(2),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_knows_the_run_deletes_what_a_new_one_would(policy, seed):
    world = World(seed)
    known = Run(world.store)
    deleted = 0
    for _ in range(40):
        for _ in range(world.random.randint(0, 3)):
            world.change()
        copied = world.copy()
        expected = Run(copied).retain(policy)
        found = known.retain(policy)
        assert found == expected
        kept = {s.key for s in world.store.list("") if "/eval-" not in s.key}
        assert kept == {s.key for s in copied.list("") if "/eval-" not in s.key}
        deleted += len(found)
    assert deleted > 3


def test_a_version_saved_again_by_another_process_keeps_its_base():
    store, state = MemoryStore(), {"frozen": np.arange(9000.0), "live": np.zeros(9)}

    def train(steps, incremental):
        with limpet.Checkpointer(store, state, save=EverySteps(1), incremental=incremental) as ckpt:
            ckpt.resume()
            for _ in range(steps):
                state["live"] += 1
                ckpt.step()

    train(3, incremental=False)
    known = Run(store)
    assert known.retain(KeepLast(3)) == []  # it knows that version 3 is self-contained
    for stat in [*store.list("version_3")]:  # Run.delete refuses the newest version
        store.delete(stat.key)
    train(1, incremental=True)
    assert Run(store).open(Version(3)).bases == {Version(2)}
    assert known.retain(KeepLast(1)) == [Version(1)]
    assert Run(store).open(Version(3)).verify().ok


def test_what_is_kept_instead_is_looked_up_before_each_deletion(tmp_path):
    """Whichever file of a kept version is lost: an intact version is not deleted for it."""
    damages: list[Callable[[Path], object]] = [
        lambda file: file.unlink(),
        lambda file: os.truncate(file, 1),
        lambda file: (file.unlink(), file.symlink_to("missing")),
        lambda file: (file.unlink(), file.mkdir()),
    ]
    for number, damage in enumerate(damages):
        for suffix in (MANIFEST, ".index.json", ".safetensors"):
            path = tmp_path / f"{number}-{suffix}"
            for step in (1, 2, 3):
                limpet.save(path / f"version_{step}", STATE)
            known = Run(path)
            assert known.retain(KeepLast(3)) == []
            [file] = [f for f in (path / "version_3").iterdir() if f.name.endswith(suffix)]
            damage(file)
            known.retain(KeepLast(1))
            latest = Run(path).latest()
            assert latest.step == 2
            assert latest.verify().ok


def test_a_copy_of_a_version_does_not_list_its_run(tmp_path):
    """A copy of a run would otherwise list it once for each of its versions."""
    source = limpet.save(tmp_path / "source" / "version_5", STATE, step=5)
    counts = []
    for name, count in (("small", 5), ("large", 50)):
        fs = CountingFs()
        store = LocalStore(make_run(tmp_path / name, count), fs=fs)
        copy_snapshot(reader_of(source), Location(store, "version_5"))
        assert name not in fs.folders
        counts.append(fs.take())
    assert counts[0] == counts[1]
