"""Saves that run concurrently with other saves and sweeps, or find the files of failed saves."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet.errors import AlreadyExists, CommitError, StoreError
from limpet.format import names
from limpet.format.names import MANIFEST
from limpet.loading.snapshot import reader_of
from limpet.run.run import Run
from limpet.saving.commit import SaveJob
from limpet.saving.save import finish_save
from limpet.snapshot import pins
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.testing.crashfs import CrashFs
from limpet.testing.faults import FaultFs
from tests.crash.promises import check_promises
from tests.saving.saves import begin_version, keys, save
from tests.trainings import state_after
from tests.unreliable_stores import HookedStore

YEAR_SECONDS = 365 * 24 * 3600.0
REPOSITORY = Path(__file__).parents[2]


def orphans(store):
    """Return the keys that belong to no committed attempt."""
    run = Run(store)
    attempts = {reader_of(run.open(v)).manifest.attempt for v in run.listing().versions}
    return {
        key
        for key in keys(store)
        if not key.endswith(MANIFEST)
        and names.parse_attempt(key.rpartition("/")[2]) not in attempts
    }


@pytest.mark.parametrize("jobs", [2, 5])
def test_one_of_several_jobs_that_save_the_same_version_commits(jobs):
    store = HookedStore(MemoryStore())
    ready = threading.Barrier(jobs)
    store.before = lambda method, key: (
        ready.wait(10) if method == "put_if_absent" and MANIFEST in key else None
    )

    def job(_):
        try:
            return save(store, 1)
        except (CommitError, AlreadyExists) as e:
            return e

    with ThreadPoolExecutor(jobs) as threads:
        results = list(threads.map(job, range(jobs)))
    [winner] = [r for r in results if isinstance(r, SnapshotReader)]
    for loser in results:
        assert loser is winner or isinstance(loser, CommitError)
    store.before = lambda method, key: None
    assert reader_of(Run(store).open(winner.version)).digest == winner.digest
    left = orphans(store)
    assert len(left) == 2 * (jobs - 1)
    assert Run(store).sweep().removed == []  # the files are younger than the grace period
    assert set(Run(store).sweep(now=time.time() + YEAR_SECONDS).removed) == left
    assert check_promises(store, [1]) == [1]


def test_an_earlier_attempt_that_finishes_late_does_not_replace_the_committed_one():
    store = MemoryStore()
    late = begin_version(store, 1)
    committed = save(store, 1)
    with pytest.raises(CommitError, match="another save has committed"):
        finish_save(late)
    assert reader_of(Run(store).open(committed.version)).digest == committed.digest
    assert len(orphans(store)) == 2
    assert check_promises(store, [1]) == [1]


def test_a_late_save_of_an_earlier_step_is_not_the_latest_version():
    store = MemoryStore()
    late = begin_version(store, 1)
    save(store, 1)
    save(store, 2)
    Run(store).delete(Run(store).listing().versions[0])
    finish_save(late)
    assert Run(store).latest().step == 2
    assert check_promises(store, [1, 2]) == [1, 2]


def test_a_second_save_of_a_version_is_refused_before_anything_is_written():
    store = MemoryStore()
    save(store, 1)
    before = keys(store)
    with pytest.raises(AlreadyExists, match="never modified"):
        save(store, 1)
    assert keys(store) == before


@pytest.mark.parametrize("ranks", [1, 4])
def test_files_of_a_crashed_save_are_ignored_and_swept(ranks):
    store = MemoryStore()
    leftovers = []
    for attempt in ("0" * 12, "a" * 12):
        for rank in range(ranks):
            for name in (names.shard_name, names.index_name):
                leftovers.append(f"version_1/{name(rank, ranks, attempt)}")
                store.put_if_absent(leftovers[-1], b"of an earlier run")
    store.put_if_absent("version_1/shard-00000-of-00001.safetensors", b"of another program")
    assert save(store, 1).verify().ok
    assert np.array_equal(limpet.load(store.at("version_1"))["weights"], state_after(1)["weights"])
    swept = Run(store).sweep(now=time.time() + YEAR_SECONDS)
    assert sorted(swept.removed) == sorted(leftovers)
    # The sweep leaves files that Limpet did not write.
    store.delete("version_1/shard-00000-of-00001.safetensors")
    check_promises(store, [1])


class CallbackFs(FaultFs):
    """A file system that calls ``act`` before call number ``at``."""

    def __init__(self, inner, at, act):
        super().__init__(inner)
        self.at, self.act = at, act
        self.acted = False

    def _next_fault(self, kind):
        with self._lock:
            self.counts[kind] += 1
            now = self.counts.total() == self.at
        if now:
            self.acted = True
            self.act()


def test_a_sweep_at_any_moment_removes_no_file_of_a_save_in_progress():
    """This also holds if the clock jumps, or if the save takes longer than the grace period."""
    kept: set[str] = set()
    failed: list[str] = []
    for at in range(1, 1000):
        inner = CrashFs()

        def sweep(inner=inner):
            swept = Run(LocalStore("/run", fs=inner)).sweep(grace=0, now=time.time() + YEAR_SECONDS)
            kept.update(why for _, why in swept.kept)
            assert [key for key in swept.removed if ".pin-" not in key] == []

        fs = CallbackFs(inner, at, sweep)
        try:
            save(LocalStore("/run", fs=fs), 1)
        except StoreError as e:
            failed.append(e.key)
            continue
        if not fs.acted:
            break
        assert Run(LocalStore("/run", fs=inner)).open(names.Version(1)).verify().ok
    else:
        pytest.fail("the save makes more calls than expected")
    assert kept == {"a save is in progress"}
    # The only file that no pin protects is the pin itself, before it gets its name.
    assert failed
    assert all("pin-" in key for key in failed)


def test_a_save_that_begins_while_a_sweep_lists_files_is_safe():
    """The sweep may list the pins before the save creates its pin. The files of the save are then
    also newer than that list."""
    for at in range(1, 100):
        store = HookedStore(MemoryStore())
        store.put_if_absent("version_1/shard-00000-of-00001.00000000000a.safetensors", b"old")
        calls = [0]
        jobs: list[SaveJob] = []

        def act(method, key, store=store, calls=calls, jobs=jobs, at=at):
            calls[0] += 1
            if calls[0] == at:
                job = begin_version(store.inner, 1)
                pins.create_pin(job.location, job.partition.attempt)
                upload = store.inner.put(
                    f"version_1/{names.shard_name(0, 1, job.partition.attempt)}", 3
                )
                upload.write_at(0, memoryview(b"abc"))
                upload.commit()
                store.inner.put(f"version_1/{names.index_name(0, 1, job.partition.attempt)}", 3)
                jobs.append(job)

        store.before = store.after = act
        removed = Run(store).sweep(grace=0, now=time.time() + YEAR_SECONDS).removed
        assert [key for key in removed if "00000000000a" not in key] == []
        if not jobs:
            assert at > 5
            return
    pytest.fail("the sweep makes more calls than expected")


SAVE_THAT_HANGS = """
import sys, time
from limpet.snapshot import pins
from limpet.saving.commit import VersionMetadata
from limpet.saving.save import begin_save
from limpet.snapshot.location import Location
from limpet.buffers import shared_pool
from limpet.storage.local.store import LocalStore
from tests.trainings import state_after
store = LocalStore(sys.argv[1])
location, metadata = Location(store, "version_1"), VersionMetadata(step=1)
job = begin_save(location, state_after(1), metadata, shared_pool(), stage_now=False)
pins.create_pin(job.location, job.partition.attempt)
with store.put(f"version_1/shard-00000-of-00001.{job.partition.attempt}.safetensors", 5) as upload:
    upload.write_at(0, memoryview(b"12345"))
    upload.commit()
unfinished = store.put(f"version_1/shard-00000-of-00001.{job.partition.attempt}.index.json", 9)
print("held", flush=True)
time.sleep(60)
"""


def test_a_pin_protects_files_only_while_its_process_lives(tmp_path):
    store = LocalStore(tmp_path / "run")
    command = [sys.executable, "-c", SAVE_THAT_HANGS, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            swept = Run(store).sweep(grace=0, now=time.time() + YEAR_SECONDS)
            assert swept.removed == []
            assert {why for _, why in swept.kept} == {"a save is in progress"}
        finally:
            process.kill()
    assert len(keys(store)) == 2
    assert check_promises(store, assume_dead_pins=False) == []
