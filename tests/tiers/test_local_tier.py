"""Saves to a local disk first, in one process: what is promoted, resumed, and left behind."""

import os
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

import limpet
from limpet import Preemption
from limpet.deadline import Deadline
from limpet.errors import (
    DeadlinePassed,
    FormatError,
    LimpetError,
    NoSpace,
    Preempted,
    SaveFailed,
    SkippedVersion,
    StoreError,
    Unavailable,
)
from limpet.format.names import MANIFEST, WRITER_LOCK, Version
from limpet.format.records import Pin, encode_record
from limpet.loading.snapshot import reader_of
from limpet.machine import utc_now
from limpet.notices.notice import Notice
from limpet.run.policy import AtEnd, EverySteps, KeepBest, KeepLast
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.tiers import flush, local_snapshots
from limpet.tiers.flush import flush_recorded
from limpet.tiers.restarts import read_restarts
from limpet.tiers.settings import LocalTier, MemoryTier
from limpet.training import response
from limpet.training.checkpointer import Checkpointer
from tests.cli.invoke import run_cli
from tests.notices.announced import Announced
from tests.tiers.hosts import flip_bit
from tests.tiers.hosts import train as train_and_capture
from tests.trainings import (
    delete_version,
    forget,
    initial_state,
    state_after,
    states_equal,
    train_step,
)
from tests.unreliable_stores import HookedStore
from tests.waiting import wait_until

DEADLINE = 20.0


class Disk:
    """A local disk, and a durable store, whose calls a test can hold up or fail."""

    def __init__(self, path):
        self.path = path / "nvme"
        self.memory = f"/dev/shm/limpet-test-{os.getpid()}-{id(self):x}"
        self.durable = MemoryStore()
        self.run = HookedStore(self.durable)
        self.is_reachable = threading.Event()
        self.is_reachable.set()
        self.run.before = self._before
        self.fails = False
        self.only = self.failing = self.hanging = ""
        self.ckpts: list[Checkpointer] = []
        self.found: limpet.Snapshot | None = None
        self.warnings: list[str] = []

    def _before(self, method, key):
        """Promotions write shards; the lock and the pins can always be written."""
        if key.endswith(".safetensors") and method in ("put", "commit"):
            assert self.is_reachable.wait(DEADLINE)
            end = time.monotonic() + DEADLINE
            while self.hanging and key.startswith(self.hanging) and time.monotonic() < end:
                time.sleep(0.001)
            is_failing = self.failing and key.startswith(self.failing)
            if self.fails or is_failing or not key.startswith(self.only):
                raise StoreError("The store is away")

    def start(self, save=None, resume=True, **options):
        state = initial_state()
        options.setdefault("tiers", [LocalTier(self.path)])
        options.setdefault("preemption", None)
        ckpt = Checkpointer(self.run, state, save=save or EverySteps(10), **options)
        self.ckpts.append(ckpt)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.found = ckpt.resume() if resume else None
        self.warnings = [str(w.message) for w in caught if w.category is SkippedVersion]
        return state, ckpt

    def die(self, ckpt):
        """End as SIGKILL does: the promotions in flight never commit."""
        self.fails = True
        self.is_reachable.set()
        for pending, _ in ckpt._saver._saves:
            pending.wait_ended()
            if pending.error is not None:
                with pytest.raises(type(pending.error)):
                    pending.wait()
        ckpt._saver.writer_lock.release()
        forget(ckpt)
        self.fails = False

    def release(self):
        """End the threads of all trainings."""
        self.is_reachable.set()
        self.hanging = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for ckpt in self.ckpts:
                for pending, _ in ckpt._saver._saves:
                    pending.wait_ended()
                ckpt._release()

    @property
    def resumed(self):
        """The snapshot from which the last start has resumed. There must be one."""
        assert self.found is not None
        return self.found

    @property
    def folder(self):
        (own,) = self.path.iterdir()
        (folder,) = own.iterdir()
        return folder

    @property
    def captured(self):
        """The steps of the complete versions on the disk."""
        if not any(p.is_dir() for p in self.path.iterdir() for p in p.iterdir()):
            return []
        walked = os.walk(self.folder)  # a folder may be deleted meanwhile
        return sorted(int(Path(p).name[8:]) for p, _, files in walked if MANIFEST in files)

    def await_captured(self, steps):
        wait_until(lambda: self.captured == steps, DEADLINE, lambda: self.captured)

    def start_and_promote(self, last_step, **options):
        """Start a training, and wait until all of its saves are in the run."""
        state, ckpt = self.start(**options)
        train(state, ckpt, last_step)
        ckpt.wait()
        return state, ckpt

    def start_alone(self, last_step, captured, **options):
        """Start a training that cannot reach the run, and train as ``train_alone`` does."""
        self.is_reachable.clear()
        state, ckpt = self.start(**options)
        self.train_alone(state, ckpt, last_step, captured)
        return state, ckpt

    def train_alone(self, state, ckpt, last_step, captured):
        """Train without the run, until the disk has the versions of the steps ``captured``."""
        self.is_reachable.clear()
        train(state, ckpt, last_step)
        self.await_captured(captured)

    @property
    def promoted(self):
        return [version.step for version in Run(self.durable).listing().versions]

    def file(self, version, suffix):
        (path,) = (self.folder / version).glob(f"*{suffix}")
        return path


def train(state, ckpt, last_step):
    while state["progress"].step < last_step:
        ckpt.step({"loss": train_step(state)})


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path)
    os.mkdir(disk.memory)
    yield disk
    disk.release()
    shutil.rmtree(disk.memory)


def test_a_save_is_on_the_disk_first_and_then_the_same_version_in_the_run(disk):
    _, ckpt = disk.start_alone(10, [10])
    assert disk.promoted == []
    disk.is_reachable.set()
    snapshot = ckpt.wait()
    assert snapshot is not None
    assert snapshot.url == f"{disk.durable.url}/version_10"
    assert snapshot.verify().ok
    local = limpet.open(disk.folder / "version_10")
    assert (reader_of(local).digest, local.verify().ok) == (reader_of(snapshot).digest, True)


def test_one_save_may_begin_while_the_one_before_is_promoted(disk):
    state, ckpt = disk.start_alone(10, [10])
    ckpt._saver.wait_for_turn()
    train(state, ckpt, 20)  # the save of step 20 does not wait for the run
    disk.await_captured([10, 20])
    assert ckpt._saver.must_wait
    assert (disk.promoted, ckpt.statistics()["saves"]) == ([], 0)
    disk.is_reachable.set()
    ckpt.wait()
    assert disk.promoted == [10, 20]
    assert reader_of(Run(disk.durable).snapshots()[0]).manifest.parent is None
    assert disk.captured == [10, 20]


@pytest.mark.parametrize("add", ["metrics", "end_epoch"])
def test_retention_decides_with_metrics_that_come_during_the_last_promotion(disk, add):
    state, ckpt = disk.start(save=EverySteps(1), keep=KeepBest(1, "val", mode="min"))
    for score in (0.5, 0.6):
        train_step(state)
        ckpt.step({"val": score})
        ckpt.wait()
    assert disk.promoted == [1, 2]
    disk.train_alone(state, ckpt, 3, [2, 3])
    threading.Timer(0.05, disk.is_reachable.set).start()
    getattr(ckpt, add)({"val": 0.1})
    ckpt.close()
    assert disk.promoted == [3]


def test_a_killed_training_resumes_from_the_disk_and_promotes_what_it_left(disk):
    state, ckpt = disk.start_alone(27, [10, 20])
    disk.die(ckpt)
    assert disk.promoted == []
    state, ckpt = disk.start()
    assert disk.resumed.url == str(disk.folder / "version_20")
    assert states_equal(state, state_after(20))
    with ckpt:
        train(state, ckpt, 30)
        ckpt.wait()
        assert disk.promoted == [10, 20, 30]
    assert states_equal(state, state_after(30))
    last = Run(disk.durable).snapshots()[-1]
    assert last.metadata["note"]["resumed_from_tier"]["tier"] == "local"
    assert Run(disk.durable).branch() == 0
    assert all(s.verify().ok for s in Run(disk.durable).snapshots())


def test_after_a_fast_restart_the_leftover_is_the_parent_of_the_next_version(disk):
    disk.is_reachable.clear()
    state, ckpt = disk.start()
    train(state, ckpt, 10)
    disk.die(ckpt)
    state, ckpt = disk.start()
    train(state, ckpt, 11)
    ckpt.wait()  # for the leftover
    assert disk.promoted == [10]
    assert reader_of(ckpt.save()).manifest.parent.version == "version_10"


def test_a_promoted_version_is_loaded_from_the_disk_and_not_promoted_again(disk):
    state, ckpt = disk.start_and_promote(10)
    disk.die(ckpt)
    written: list[str] = []
    disk.run.before = lambda method, key: written.append(key) if method == "put" else None
    state, ckpt = disk.start()
    assert disk.resumed.url == str(disk.folder / "version_10")
    train(state, ckpt, 11)
    ckpt.wait()
    assert written == []
    assert states_equal(state, state_after(11))


def test_the_newest_of_memory_disk_and_run_counts(disk, tmp_path):
    memory = MemoryTier(every=EverySteps(4), copies=1, path=disk.memory)
    tiers: list[Any] = [memory, LocalTier(disk.path)]
    for last, found in ((10, "version_10"), (13, "version_12"), (24, "version_24")):
        disk.is_reachable.clear()
        state, ckpt = disk.start(tiers=tiers)
        train_and_capture(state, ckpt, last)
        ckpt._saver.wait_for_turn()
        folder = str(ckpt._tiers.memory.store.url)
        disk.die(ckpt)
        state, ckpt = disk.start(tiers=tiers)
        assert reader_of(disk.resumed).location.folder == found
        assert (folder in disk.resumed.url) == (found != "version_10")
        assert states_equal(state, state_after(disk.resumed.step or 0))
        train(state, ckpt, state["progress"].step + 1)
        ckpt.wait()  # what the disk has is promoted, also if the memory has a newer state
        assert disk.promoted == ([10] if last < 20 else [10, 20])
        disk.die(ckpt)
    ckpt.close()
    ckpt._tiers.memory.keep_only(None)


def test_a_state_that_one_tier_still_has_begins_no_branch(disk):
    memory = MemoryTier(every=EverySteps(10), copies=1, path=disk.memory)
    tiers: list[Any] = [memory, LocalTier(disk.path)]
    disk.is_reachable.clear()
    state, ckpt = disk.start(tiers=tiers)
    train_and_capture(state, ckpt, 13)
    disk.await_captured([10])
    folder = str(ckpt._tiers.memory.store.url)
    disk.die(ckpt)
    flip_bit(disk.file("version_10", "safetensors"), -1)
    state, ckpt = disk.start(tiers=tiers)
    assert folder in disk.resumed.url
    assert states_equal(state, state_after(10))
    assert [w.partition(".")[0] for w in disk.warnings] == [
        "version_10 on the local disk is skipped"
    ]
    assert Run(disk.durable).branch() == 0
    ckpt.close()
    ckpt._tiers.memory.keep_only(None)


@pytest.mark.parametrize("suffix", ["safetensors", "index.json", "json"])
def test_flipped_bits_on_the_disk_are_skipped_and_never_promoted(disk, suffix):
    state, ckpt = disk.start_and_promote(10)
    disk.train_alone(state, ckpt, 20, [10, 20])
    disk.die(ckpt)
    name = MANIFEST if suffix == "json" else suffix
    flip_bit(disk.file("version_20", name), 200)
    state, ckpt = disk.start()
    (message,) = disk.warnings
    assert "version_20 on the local disk is skipped" in message
    assert disk.resumed.step == 10
    assert states_equal(state, state_after(10))
    with ckpt:
        train(state, ckpt, 20)
    run = Run(disk.durable)
    assert run.line() == [Version(10), Version(20, 1)]
    assert all(s.verify().ok for s in run.snapshots())


def test_bits_that_flip_between_the_disk_and_the_run_fail_the_save(disk):
    _, ckpt = disk.start_alone(10, [10])
    flip_bit(disk.file("version_10", "safetensors"), 500)
    disk.is_reachable.set()
    with pytest.raises(FormatError):
        ckpt.wait()
    assert disk.promoted == []


@pytest.mark.parametrize("damage", ["a flipped bit", "no shard"])
def test_a_damaged_leftover_does_not_stop_a_training_with_a_newer_state(disk, damage):
    memory = MemoryTier(every=EverySteps(3), copies=1, path=disk.memory)
    tiers: list[Any] = [memory, LocalTier(disk.path)]
    disk.is_reachable.clear()
    state, ckpt = disk.start(tiers=tiers)
    train_and_capture(state, ckpt, 12)
    disk.die(ckpt)
    shard = disk.file("version_10", "safetensors")
    flip_bit(shard, 500) if damage == "a flipped bit" else shard.unlink()
    skipped: list[str] = []
    detach = limpet.attach(
        lambda name, fields: skipped.append(fields["version"]) if name == "skipped" else None
    )
    began = time.monotonic()
    with detach:
        state, ckpt = disk.start(tiers=tiers)
        assert disk.resumed.step == 12
        with ckpt:
            train(state, ckpt, 13)
            assert ckpt.save().step == 13
    assert time.monotonic() - began < 5
    assert disk.promoted == [13]
    assert skipped == ["version_10"] * (damage == "a flipped bit")


def test_a_store_that_is_away_is_reported_and_the_disk_has_the_state(disk):
    disk.fails = True
    state, ckpt = disk.start()
    train(state, ckpt, 10)
    with pytest.raises(StoreError, match="The store is away"):
        ckpt.wait()
    assert disk.captured == [10]
    disk.fails = False
    assert ckpt.save().step == 10  # the same step, directly
    assert disk.promoted == [10]
    assert limpet.open(disk.durable.at("version_10")).verify().ok


def test_with_warnings_the_training_bridges_a_time_without_the_store(disk):
    disk.fails = True
    state, ckpt = disk.start(on_error="warn")
    with pytest.warns(SaveFailed, match="The store is away"):
        train(state, ckpt, 35)
        for pending, _ in ckpt._saver._saves:
            pending.wait_ended()
        train(state, ckpt, 38)  # each step raises one error
    assert disk.captured == [20, 30]
    disk.fails = False
    train(state, ckpt, 40)
    ckpt.wait()
    assert (disk.promoted, disk.captured) == ([40], [30, 40])


def test_retention_counts_promoted_versions_only(disk):
    _, ckpt = disk.start_alone(20, [10, 20], keep=KeepLast(1))
    disk.is_reachable.set()
    ckpt.wait()
    assert (disk.promoted, disk.captured) == ([20], [10, 20])


def test_the_save_before_the_end_of_the_machine_is_written_directly(disk):
    source = Announced()
    state, ckpt = disk.start(preemption=Preemption(notices=[source]))
    with pytest.raises(Preempted) as left, ckpt:
        train(state, ckpt, 12)
        source.announce(20.0)
        train(state, ckpt, 10**6)
    assert (left.value.code, left.value.saved_step) == (75, state["progress"].step)
    assert disk.promoted[-1] == left.value.saved_step
    assert left.value.saved_step not in disk.captured


def test_a_training_without_resume_refuses_what_an_earlier_one_left(disk):
    disk.is_reachable.clear()
    state, ckpt = disk.start()
    train(state, ckpt, 10)
    disk.die(ckpt)
    state, ckpt = disk.start(resume=False)
    with pytest.raises(LimpetError, match="The local tier has states of an earlier training"):
        train(state, ckpt, 1)
    assert disk.captured == [10]
    ckpt._saver.writer_lock.release()


def test_unfinished_files_of_a_killed_process_are_deleted(disk):
    state, ckpt = disk.start_and_promote(10)
    disk.die(ckpt)
    partial = disk.folder / "version_20" / ".shard.0011223344556677.partial"
    partial.parent.mkdir()
    partial.write_bytes(bytes(100))
    state, ckpt = disk.start()
    assert partial.exists()  # another training might still write it: this one is not the writer yet
    train(state, ckpt, 11)
    assert not partial.exists()


def test_a_disk_that_is_too_small_raises_before_the_training(disk, monkeypatch):
    class Small:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(local_snapshots.os, "statvfs", lambda path: Small)
    with pytest.raises(NoSpace, match=r"does not fit on its disk.*3 snapshots|2 snapshots"):
        disk.start()


def test_bad_arguments_raise(disk, tmp_path):
    with pytest.raises(LimpetError, match="incremental=True"):
        disk.start(incremental=True)
    with pytest.raises(LimpetError, match="tiers= must be"):
        disk.start(tiers=[LocalTier("a"), LocalTier("b")])
    for path in ("", 5, "s3://bucket"):
        with pytest.raises(LimpetError, match="path= of LocalTier must be"):
            LocalTier(path)
    run = tmp_path / "run"
    ckpt = Checkpointer(run, initial_state(), tiers=[LocalTier(run / "tier")])
    disk.ckpts.append(ckpt)
    with pytest.raises(LimpetError, match="is in the folder of the run"):
        ckpt.resume()


def die_with_both_tiers(disk, status, monkeypatch):
    """Train and end when 10 and 20 are on the disk and 21 in memory, but nothing is in the run."""
    monkeypatch.setenv("LIMPET_STATUS", str(status))
    monkeypatch.setattr(flush, "Run", lambda url: Run(disk.run))
    memory = MemoryTier(every=EverySteps(3), copies=1, path=disk.memory)
    disk.is_reachable.clear()
    state, ckpt = disk.start(tiers=[memory, LocalTier(disk.path)])
    train_and_capture(state, ckpt, 22)
    disk.await_captured([10, 20])
    assert disk.promoted == []
    return ckpt


def flush_results(status, seconds):
    """Return the step of each version that ``limpet run`` saves, or the type of the error."""
    results = flush_recorded(str(status), seconds)
    return [r.step if isinstance(r, SnapshotReader) else type(r) for r in results]


def test_versions_on_the_disk_are_promoted_before_a_state_in_memory_is_saved(
    disk, tmp_path, monkeypatch
):
    """The folder in memory is the first one in the order of the names."""
    disk.die(die_with_both_tiers(disk, tmp_path, monkeypatch))
    assert flush_results(tmp_path, 20) == [10, 20, 21]
    assert disk.promoted == [10, 20, 21]
    assert all(snapshot.verify().ok for snapshot in Run(disk.durable).snapshots())
    assert flush_results(tmp_path, 20) == []
    state, _ = disk.start()
    assert states_equal(state, state_after(21))


def test_a_damaged_version_on_the_disk_does_not_keep_limpet_run_from_saving_newer_ones(
    disk, tmp_path, monkeypatch
):
    disk.die(die_with_both_tiers(disk, tmp_path, monkeypatch))
    flip_bit(disk.file("version_10", "safetensors"), 200)
    error, *steps = flush_results(tmp_path, 20)
    assert issubclass(error, FormatError)
    assert steps == disk.promoted == [20, 21]


def test_a_version_that_waits_for_a_lost_host_leaves_half_of_the_time_to_the_newest_state(
    disk, tmp_path, monkeypatch
):
    disk.die(die_with_both_tiers(disk, tmp_path, monkeypatch))
    disk.file("version_10", "safetensors").unlink()
    began = time.monotonic()
    assert flush_results(tmp_path, 4) == [DeadlinePassed, 20, 21]
    assert 1.5 < time.monotonic() - began < 4
    assert disk.promoted == [20, 21]


def test_the_copy_of_a_version_before_the_newest_state_ends_after_half_of_the_time(
    disk, tmp_path, monkeypatch
):
    """The calls of a local folder do not end by a deadline themselves."""
    disk.die(die_with_both_tiers(disk, tmp_path, monkeypatch))

    def slow(method, key):
        if method == "put" and key.startswith("version_10"):
            time.sleep(1.5)

    disk.run.before = slow
    assert flush_results(tmp_path, 2.5) == [Unavailable, 20, 21]
    assert disk.promoted == [20, 21]


def test_a_training_that_was_taken_over_saves_nothing_more_when_it_must_leave(
    disk, tmp_path, monkeypatch
):
    ckpt = die_with_both_tiers(disk, tmp_path, monkeypatch)
    elsewhere = Pin("0" * 12, None, utc_now(), "another host", "boot", "1:1")
    disk.durable.delete(WRITER_LOCK)
    disk.durable.put_if_absent(WRITER_LOCK, encode_record(elsewhere))
    with pytest.raises(LimpetError, match="has taken this run over"):
        ckpt._saver.flush_tiers(Deadline.after(20, "the flush of a test"))
    assert disk.promoted == []
    disk.die(ckpt)


def test_limpet_run_saves_into_the_run_of_a_training_that_has_changed_its_folder(
    disk, tmp_path, monkeypatch
):
    (tmp_path / "status").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("LIMPET_STATUS", str(tmp_path / "status"))
    monkeypatch.chdir(tmp_path)
    ckpt = Checkpointer("runs/a", initial_state(), tiers=[LocalTier(disk.path)])
    disk.ckpts.append(ckpt)
    monkeypatch.chdir(tmp_path / "elsewhere")
    ckpt.resume()
    (record,) = (tmp_path / "status").glob("*.memory")
    assert msgspec.json.decode(record.read_bytes())["run"] == str(tmp_path / "runs" / "a")


def leave(disk, last_step):
    """Train, and die when the versions after that of step 10 are on the disk, but not in the run.
    The newest two stay there."""
    state, ckpt = disk.start_and_promote(19)
    disk.train_alone(state, ckpt, last_step, [last_step - 10, last_step])
    disk.die(ckpt)


def test_a_state_after_a_late_leftover_is_found_by_the_next_training(disk):
    """30 names 10 as its parent, because 20 was still being promoted; another training wrote 20."""
    leave(disk, 20)
    assert disk.promoted == [10]
    state, ckpt = disk.start_alone(30, [20, 30])
    disk.only = "version_20"
    disk.is_reachable.set()
    wait_until(lambda: disk.promoted == [10, 20])
    disk.die(ckpt)
    disk.only = ""
    state, ckpt = disk.start()
    assert (disk.resumed.step, disk.warnings) == (30, [])
    train(state, ckpt, 31)
    ckpt.wait()
    assert disk.promoted == [10, 20, 30]


def test_a_damaged_manifest_in_the_run_does_not_hide_what_the_disk_has(disk):
    state, ckpt = disk.start_alone(20, [10, 20])
    disk.only = "version_10"
    disk.is_reachable.set()
    wait_until(lambda: disk.promoted == [10])
    disk.die(ckpt)
    disk.only = ""
    data = bytearray(disk.durable.get(f"version_10/{MANIFEST}", 1 << 20))
    data[200] ^= 4
    disk.durable.delete(f"version_10/{MANIFEST}")
    disk.durable.put_if_absent(f"version_10/{MANIFEST}", bytes(data))
    state, ckpt = disk.start()
    assert disk.resumed.step == 20
    assert states_equal(state, state_after(20))


def test_the_state_below_a_damaged_one_is_not_lost_by_another_kill(disk):
    leave(disk, 30)
    flip_bit(disk.file("version_30", "safetensors"), 500)
    for _ in range(3):  # starts that die before their first step
        _, ckpt = disk.start()
        assert disk.resumed.step == 20
        disk.die(ckpt)
    assert Run(disk.durable).branch() == 1
    with disk.start()[1] as ckpt:
        train(ckpt.state, ckpt, 30)
    assert Run(disk.durable).line() == [Version(10), Version(20), Version(30, 1)]
    assert all(s.verify().ok for s in Run(disk.durable).snapshots())


def test_a_resume_elsewhere_deletes_nothing_of_a_live_training(disk):
    state, ckpt = disk.start_and_promote(10)
    disk.train_alone(state, ckpt, 20, [10, 20])
    (disk.folder / "version_30").mkdir()
    (disk.folder / "version_30" / "shard-00000-of-00001.0123456789ab.safetensors").write_bytes(b"x")
    files = {p for p in disk.folder.rglob("*") if p.is_file()}
    forget(ckpt)  # it is in another process
    disk.start()
    assert {p for p in disk.folder.rglob("*") if p.is_file()} == files
    disk.is_reachable.set()
    ckpt.wait()
    assert disk.promoted == [10, 20]


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_the_end_waits_for_all_promotions_and_names_the_one_that_failed(disk, on_error):
    disk.failing = "version_10/"
    _, ckpt = disk.start_alone(20, [10, 20], save=EverySteps(10) | AtEnd(), on_error=on_error)
    disk.is_reachable.set()
    expected: Any = pytest.raises(StoreError, match="is away")
    if on_error == "warn":
        expected = pytest.warns(SaveFailed, match="is away")
    with expected:
        ckpt.close()
    assert disk.promoted == [20]
    assert ckpt.statistics()["saves"] == 1
    assert ckpt.statistics()["failures"] == 1
    assert not ckpt._saver.busy


def test_a_notice_does_not_wait_for_a_slow_promotion(disk, monkeypatch):
    monkeypatch.setattr(response, "end_process", lambda code, message: None)
    source = Announced()
    state, ckpt = disk.start(preemption=Preemption(notices=[source]))
    train(state, ckpt, 9)
    disk.hanging = "version_10/"
    with pytest.raises(Preempted) as left:
        with ckpt:
            train(state, ckpt, 10)
            disk.await_captured([10])
            source.announce(5.0)
            for step in range(11, 30):  # the save of step 30 would wait for the promotion
                train(state, ckpt, step)
                time.sleep(0.1)
        pytest.fail("it must leave")
    assert left.value.code == 75
    assert disk.promoted[-1] == left.value.saved_step
    disk.hanging = ""


def test_training_that_goes_on_after_a_notice_is_not_ended_because_of_a_slow_promotion(disk):
    preemption = Preemption(notices=[], exit_fn=lambda: None)
    state, ckpt = disk.start(preemption=preemption)
    train(state, ckpt, 9)
    disk.hanging = "version_10/"
    train(state, ckpt, 10)
    disk.await_captured([10])
    ckpt._preemption.on_notice(Notice("a test", 20.0))
    while not ckpt.should_stop:
        train(state, ckpt, state["progress"].step + 1)
    assert disk.promoted == [state["progress"].step]
    assert ckpt._saver.busy
    assert ckpt._preemption._timer._calls == {}


def test_a_save_that_fails_on_the_disk_leaves_nothing_there(disk, monkeypatch):
    state, ckpt = disk.start(on_error="warn")
    train(state, ckpt, 1)
    store = ckpt._tiers.local.store
    real = store.put_if_absent

    def fail(key, data):
        if key.endswith(MANIFEST):
            raise StoreError("The disk is broken")
        return real(key, data)

    monkeypatch.setattr(store, "put_if_absent", fail)
    with pytest.warns(SaveFailed, match="The disk is broken"):
        train(state, ckpt, 45)
        ckpt.close()
    assert ckpt.statistics()["failures"] == 5, "also the save of the last step"
    assert [p for p in disk.path.rglob("*") if p.is_file()] == []


def test_a_damaged_copy_of_what_the_run_has_starts_no_branch(disk):
    state, ckpt = disk.start_and_promote(10)
    disk.die(ckpt)
    flip_bit(disk.file("version_10", "safetensors"), 500)
    state, ckpt = disk.start()
    assert disk.resumed.url == f"{disk.durable.url}/version_10"
    assert (disk.warnings, Run(disk.durable).branch()) == ([], 0)
    assert states_equal(state, state_after(10))


def test_going_back_still_promotes_what_the_run_lacks(disk):
    leave(disk, 20)
    state, ckpt = disk.start()
    ckpt.resume(at=10)
    with ckpt:
        train(state, ckpt, 20)
    run = Run(disk.durable)
    assert run.line() == [Version(10), Version(20, 1)]
    assert [*run.listing().versions] == [Version(10), Version(20), Version(20, 1)]
    assert reader_of(run.snapshots()[-1]).manifest.parent.version == "version_10"


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_training_that_goes_back_without_a_restart_begins_a_branch(disk, is_blocked):
    memory = MemoryTier(every=EverySteps(4), copies=1, path=disk.memory)
    state, ckpt = disk.start(tiers=[memory, LocalTier(disk.path)])
    with ckpt:
        train(state, ckpt, 27)
        ckpt.wait()
        ckpt.resume(at=10)
        ckpt._tiers.memory.wait()
        assert states_equal(state, state_after(10))
        assert ckpt._tiers.memory._snapshots == []
        if is_blocked:
            disk.is_reachable.clear()
        train_and_capture(state, ckpt, 27)
        disk.is_reachable.set()
    versions = [str(v) for v in Run(disk.durable).line()]
    assert versions == ["version_10", "version_20.1", "version_27.1"]
    assert states_equal(state, state_after(27))
    assert all(s.verify().ok for s in Run(disk.durable).snapshots())


def test_a_leftover_that_the_run_cannot_take_is_skipped(disk):
    """A shard with its name, but other bytes, is in the run."""
    leave(disk, 20)
    name = disk.file("version_20", "safetensors").name
    with disk.durable.put(f"version_20/{name}", 5) as upload:
        upload.write_at(0, memoryview(b"other"))
        upload.commit()
    state, ckpt = disk.start()
    with ckpt:
        train(state, ckpt, 30)
    assert disk.promoted == [10, 30]


@pytest.mark.parametrize("kind", ["file", "link", "parent"])
def test_a_folder_that_cannot_be_used_is_named(disk, tmp_path, kind):
    path = tmp_path / "bad"
    if kind == "file":
        path.write_text("")
    elif kind == "link":
        path.symlink_to(tmp_path / "missing" / "far")
    else:
        path = Path("/proc/nope")
    with pytest.raises(StoreError, match=r"local tier cannot use the folder .*another path="):
        disk.start(tiers=[LocalTier(path)])


@pytest.mark.parametrize("failing", ["run", "disk"])
def test_no_failure_of_a_store_loses_a_state(tmp_path, failing):
    """Fail the n-th call of the store during a training, for every n, and resume."""
    number = seen = 0
    while seen >= number:
        number += 1
        disk = Disk(tmp_path / str(number))
        seen = 0

        def fail(method, key):
            nonlocal seen
            seen += 1
            if seen == number:  # noqa: B023
                raise StoreError("A failure")

        state, ckpt = disk.start(EverySteps(2))
        local = ckpt._tiers.local
        hooked = HookedStore(local.store)
        (disk.run if failing == "run" else hooked).before = fail
        local.store = hooked
        reached = 0
        try:
            while reached < 6:
                train(state, ckpt, reached + 1)
                reached = state["progress"].step
            ckpt.wait()
        except LimpetError:
            pass
        disk.run.before = hooked.before = lambda method, key: None
        disk.die(ckpt)
        durable = max(disk.promoted, default=0)
        state, ckpt = disk.start(EverySteps(2))
        step = 0 if disk.found is None else disk.found.step
        assert step is not None
        assert step >= durable
        assert step >= reached - 4, f"call {number}: step {reached} was reached"
        assert states_equal(state, state_after(step))
        train(state, ckpt, 7)
        assert ckpt.save().verify().ok
        assert all(s.verify().ok for s in Run(disk.durable).snapshots())
        ckpt.close()
        disk.release()
    assert number > 25


def test_a_copy_of_a_run_accepts_versions_that_were_saved_during_a_promotion(disk, tmp_path):
    """30 names 10 as its parent, and 20 lies between them. The run then keeps only 30."""
    run, copy = str(tmp_path / "run"), str(tmp_path / "copy")
    disk.durable = disk.run.inner = LocalStore(run, direct=False)
    state, ckpt = disk.start_and_promote(19)
    disk.train_alone(state, ckpt, 30, [20, 30])
    disk.is_reachable.set()
    ckpt.wait()
    parents = [reader_of(s).manifest.parent for s in Run(run).snapshots()]
    assert [p and p.version for p in parents] == [None, "version_10", "version_10"]
    assert run_cli("copy", run, copy).code == 0
    delete_version(Run(copy).store, 30)
    for step in (10, 20):
        Run(run).delete(step)
    result = run_cli("copy", run, copy)
    assert result.code == 0, result.err
    assert [v.step for v in Run(copy).listing().versions] == [10, 20, 30]


def test_the_disk_s_copy_of_a_version_of_the_run_is_not_a_state_that_the_run_lacks(
    disk, tmp_path, monkeypatch
):
    """To leave it out would change nothing, so the ladder goes to an older version at once."""
    statuses = tmp_path / "statuses"
    statuses.mkdir()
    monkeypatch.setenv("LIMPET_STATUS", str(statuses))
    for _ in range(4):
        state, ckpt = disk.start()
        train(state, ckpt, 22)
        ckpt.wait()
        ckpt._ending.ladder._key = ""  # the record of this restart stays, as after SIGKILL
        disk.die(ckpt)
    assert disk.resumed.url == str(disk.folder / "version_20")
    assert {r.tier for r in read_restarts(disk.durable).values()} == {None}
    disk.start()
    assert disk.resumed.step == 10
    assert "goes back one version" not in disk.warnings[0]
    assert "left version_20 behind" in disk.warnings[0]
