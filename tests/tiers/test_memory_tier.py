"""A training with a memory tier in one process: what it resumes from, and what stays in memory."""

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

import limpet
from limpet.errors import Denied, LimpetError, NoSpace
from limpet.format.names import MANIFEST, RUN_ID, Version
from limpet.loading.snapshot import reader_of
from limpet.run.policy import EverySeconds, EverySteps
from limpet.run.run import Run
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.tiers import memory_snapshots
from limpet.tiers.run_id import read_or_create_run_id
from limpet.tiers.settings import MemoryTier
from limpet.training.checkpointer import Checkpointer
from tests.tiers.hosts import flip_bit, train
from tests.trainings import initial_state, state_after, states_equal, train_step
from tests.waiting import run_threads


def test_a_killed_training_resumes_from_memory_without_losing_captured_steps(host):
    host.train_and_die(77)
    assert host.captured == ["version_60", "version_70"]
    state, ckpt = host.start()
    assert host.resumed.step == 70
    assert str(host.path) in host.resumed.url
    assert states_equal(state, state_after(70))
    with ckpt:
        train(state, ckpt, 100)
    assert states_equal(state, state_after(100))
    run = Run(host.run)
    assert run.line() == [Version(50), Version(100)]
    assert run.branch() == 0
    last = run.snapshots()[-1]
    assert reader_of(last).manifest.parent is not None
    assert reader_of(last).manifest.parent.version == "version_50"
    origin = last.metadata["note"]["resumed_from_tier"]
    assert origin == {
        "tier": "memory",
        "version": "version_70",
        "digest": reader_of(host.resumed).digest,
    }


def test_the_newest_two_states_stay_in_memory_and_none_after_the_end(host):
    state, ckpt = host.start(every=5)
    with ckpt:
        for last in (5, 10, 15, 20, 25):
            train(state, ckpt, last)
            ckpt._tiers.memory.wait()
            assert host.captured == [f"version_{n}" for n in (last - 5, last) if n]
    assert not [p for p in Path(host.path).rglob("*") if p.is_file()]


def test_a_state_is_deleted_from_its_manifest_on(host, monkeypatch):
    """A kill in between leaves files that no manifest names, not a state that lacks files: that
    would be reported as damage, and training would continue on a new branch."""
    deleted: list[str] = []
    delete = LocalStore.delete
    monkeypatch.setattr(LocalStore, "delete", lambda *a: (deleted.append(a[1]), delete(*a))[1])
    host.train_and_die(33)
    first = [key for key in deleted if key.startswith("version_10/")]
    assert first[0] == f"version_10/{MANIFEST}"
    assert len(first) == 3


def test_a_state_of_the_same_step_as_the_newest_version_is_preferred(host):
    host.train_and_die(50)
    host.start()
    assert host.resumed.step == 50
    assert host.path in host.resumed.url


def test_a_newer_durable_version_wins_and_older_states_are_deleted(host):
    host.train_and_die(58, every=20, save=50)
    assert host.captured == ["version_20", "version_40"]
    _, ckpt = host.start()
    assert host.resumed.step == 50
    assert host.path not in host.resumed.url
    assert host.captured == ["version_20", "version_40"]  # another training might be the writer
    ckpt._ensure_started()
    assert host.captured == []
    assert host.warnings == []
    assert Run(host.run).branch() == 0


def test_the_states_of_a_deleted_run_are_not_resumed(host):
    host.train_and_die(33, save=1000)
    for stat in list(host.run.list("")):
        host.run.delete(stat.key)
    host.start()
    assert host.resumed is None


@pytest.mark.parametrize("file", ["safetensors", "index.json", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_is_skipped_and_reported_and_the_older_state_is_loaded(host, file, damage):
    host.train_and_die(77)
    path = host.file("version_70", file)
    if damage == "flip":
        flip_bit(path, path.stat().st_size // 2)
    elif damage == "cut":
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    state, ckpt = host.start()
    assert host.resumed.step == 60
    assert states_equal(state, state_after(60))
    if (file, damage) != (MANIFEST, "missing"):  # without a manifest, there is no state
        (message,) = host.warnings
        assert message.startswith("version_70 in memory is skipped.")
    with ckpt:
        train(state, ckpt, 120)
    assert states_equal(state, state_after(120))


def test_below_a_known_state_a_branch_begins(host):
    host.train_and_die(77)
    for version in ("version_60", "version_70"):
        flip_bit(host.file(version, "safetensors"), 2000)
    state, ckpt = host.start()
    assert host.resumed.step == 50
    assert len(host.warnings) == 2
    assert Run(host.run).branch() == 1
    with ckpt:
        train(state, ckpt, 100)
        ckpt._tiers.memory.wait()
        assert host.captured == ["version_90.1", "version_100.1"]
    assert states_equal(state, state_after(100))
    assert Run(host.run).line() == [Version(50), Version(100, 1)]


def test_going_back_discards_what_is_in_memory(host):
    host.train_and_die(127)
    state, ckpt = host.start()
    ckpt.resume(at=50)
    with ckpt:
        ckpt._ensure_started()
        assert host.captured == []
        train(state, ckpt, 75)
        ckpt._tiers.memory.wait()
        assert host.captured == ["version_60.1", "version_70.1"]
    assert states_equal(state, state_after(75))


def test_a_state_that_was_captured_while_the_first_save_was_in_flight_counts(host):
    """Its parent is older than the newest version, but the same training captured it."""
    state, ckpt = host.start(save=50)
    train(state, ckpt, 49)
    released = threading.Event()
    original = host.run.put_if_absent

    def wait_for_manifest(key, data):
        if key == f"version_50/{MANIFEST}":
            released.wait(20)
        return original(key, data)

    host.run.put_if_absent = wait_for_manifest
    train(state, ckpt, 65)
    released.set()
    ckpt._saver.wait()
    ckpt._saver.writer_lock.release()
    assert Run(host.run).line() == [Version(50)]
    state, _ = host.start()
    assert host.resumed.step == 60
    assert reader_of(host.resumed).manifest.parent is None
    assert states_equal(state, state_after(60))


def test_a_state_from_before_another_training_went_on_is_not_resumed(host):
    """The host was away while another one continued from the durable version."""
    host.train_and_die(87)
    away = host.path
    host.path = tempfile.mkdtemp(prefix="limpet-test-", dir="/dev/shm")
    try:
        host.train_and_die(63, save=20)
        assert Run(host.run).line() == [Version(50), Version(60)]
    finally:
        shutil.rmtree(host.path)
        host.path = away
    assert host.captured == ["version_70", "version_80"]
    _, ckpt = host.start()
    assert host.resumed.step == 60
    assert host.path not in host.resumed.url
    ckpt._ensure_started()
    assert host.captured == []


def test_a_capture_is_skipped_while_the_one_before_is_in_progress(host, monkeypatch):
    """The training never waits for a slow peer."""
    released, skipped = threading.Event(), list[str]()
    monkeypatch.setattr(memory_snapshots.MemorySnapshots, "_copy", lambda *_: released.wait(20))
    _, ckpt = host.start(every=5)
    with ckpt, limpet.attach(lambda name, _: skipped.append(name)):
        for _ in range(12):
            ckpt.step()
        assert not released.is_set()
        assert skipped.count("memory_save_skipped") == 1
        assert host.captured == []
        released.set()
        ckpt._tiers.memory.wait()
        for _ in range(3):
            ckpt.step()
        ckpt._tiers.memory.wait()
        assert host.captured == ["version_5", "version_15"]


def test_a_capture_in_progress_at_the_kill_leaves_nothing_that_counts(host):
    host.train_and_die(77)
    torn = host.folder / "version_80"
    torn.mkdir()
    (torn / "shard-00000-of-00001.0123456789ab.safetensors").write_bytes(b"x" * 100)
    (torn / ".shard.0123.mapped.partial").write_bytes(b"x" * 100)
    _, ckpt = host.start()
    ckpt._ensure_started()
    assert host.resumed.step == 70
    assert host.captured == ["version_60", "version_70"]
    assert not torn.exists() or not [p for p in torn.iterdir() if not p.name.startswith(".")]


@pytest.mark.parametrize("fails", [False, True])
def test_resume_waits_for_the_capture_in_progress(host, monkeypatch, fails):
    """As in a notebook, if the cell that trains is interrupted, and run again."""
    go = threading.Event()

    def copy(tier, version, *_):
        if version.step == 30 and not go.is_set():
            go.wait(20)
            if fails:
                raise NoSpace("The memory is full")

    state, ckpt = host.start()
    train(state, ckpt, 29)
    monkeypatch.setattr(memory_snapshots.MemorySnapshots, "_copy", copy)
    while state["progress"].step < 33:
        ckpt.step({"loss": train_step(state)})
    timer = threading.Timer(0.3, go.set)
    timer.start()
    resumed = ckpt.resume()
    assert go.is_set()
    assert resumed is not None
    assert resumed.step == (20 if fails else 30)
    train(state, ckpt, 43)
    assert states_equal(state, state_after(43))
    assert host.captured == ["version_30", "version_40"]
    for name in host.captured:
        assert limpet.open(host.folder / name).verify().ok
    ckpt._saver.writer_lock.release()
    host.start()
    assert host.resumed.step == 40
    assert host.warnings == []
    assert Run(host.run).branch() == 0


def test_a_wait_that_is_interrupted_leaves_the_capture_in_progress(host, monkeypatch):
    state, ckpt = host.start(every=5)
    go = threading.Event()
    monkeypatch.setattr(memory_snapshots.MemorySnapshots, "_copy", lambda *_: go.wait(20))
    while state["progress"].step < 5:
        ckpt.step({"loss": train_step(state)})
    pending = ckpt._tiers.memory._pending
    assert pending is not None

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pending, "wait", interrupt)
        ckpt._tiers.memory.wait()
    assert ckpt._tiers.memory._pending is pending
    go.set()
    ckpt._tiers.memory.wait()
    assert host.captured == ["version_5"]


def test_a_folder_on_a_disk_is_refused(host):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        host.path, path = folder, host.path
        try:
            with pytest.raises(LimpetError, match="of the memory tier is not in memory"):
                host.start()
        finally:
            host.path = path


def test_a_folder_that_is_deleted_during_the_training_is_private_again(host):
    """By a person, or by a login manager that cleans up after its user."""
    state, ckpt = host.start()
    train(state, ckpt, 10)
    shutil.rmtree(Path(host.path) / f"limpet-{os.getuid()}")
    train(state, ckpt, 30)
    ckpt._saver.writer_lock.release()
    host.start()
    assert host.resumed.step == 30


def test_a_folder_of_another_user_is_refused(host):
    own = Path(host.path) / f"limpet-{os.getuid()}"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    with pytest.raises(Denied, match="is not private"):
        host.start()


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 10},
        {"every": EverySeconds(10)},
        {"copies": 0},
        {"copies": True},
        {"path": ""},
        {"interface": 3},
        {"domain": 3},
    ],
    ids="".join,
)
def test_invalid_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(LimpetError, match=f"{name}= of MemoryTier must be"):
        MemoryTier(**{"every": EverySteps(10), **wrong})


@pytest.mark.parametrize("tiers", ["memory", [3], MemoryTier(every=EverySteps(1))], ids=repr)
def test_invalid_tiers_are_refused(tiers):
    with pytest.raises(LimpetError, match="tiers= must be"):
        Checkpointer(MemoryStore(), initial_state(), tiers=tiers)


def test_a_failed_capture_is_raised_and_leaves_no_files(host, monkeypatch):
    state, ckpt = host.start(every=5)

    def fail(*_):
        raise NoSpace("The memory is full")

    with pytest.raises(NoSpace, match="The memory is full"), ckpt:
        train(state, ckpt, 5)
        ckpt._tiers.memory.wait()
        monkeypatch.setattr(memory_snapshots.MemorySnapshots, "_copy", fail)
        train(state, ckpt, 15)
    assert host.captured == ["version_5"]
    left = [p for p in host.folder.rglob("*.safetensors") if "version_10" in str(p)]
    assert left == []


def test_the_identity_of_a_run_stays_until_it_is_damaged():
    store = MemoryStore()
    first = read_or_create_run_id(store)
    assert read_or_create_run_id(store) == first
    store.delete(RUN_ID)
    store.put_if_absent(RUN_ID, b"damaged")
    second = read_or_create_run_id(store)
    assert second != first
    assert read_or_create_run_id(store) == second


def test_only_the_copy_of_a_run_gets_another_identity(tmp_path):
    def identity(name):
        return read_or_create_run_id(LocalStore(tmp_path / name))

    first = identity("a")
    (tmp_path / "link").symlink_to("a")
    assert identity("link") == first
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = identity("b")
    assert copied != first
    assert (identity("a"), identity("b")) == (first, copied)
    (tmp_path / "a").rename(tmp_path / "moved")
    assert identity("moved") == first
    assert identity("a") not in (first, copied)
    assert identity("moved") == first, "the run that began in its old place is another one"


def test_a_copied_run_and_its_original_do_not_share_their_states(host, tmp_path):
    host.run = LocalStore(tmp_path / "a")
    host.train_and_die(25, save=20)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    host.run = LocalStore(tmp_path / "b")
    host.train_and_die(33, save=20)
    assert host.resumed.step == 20
    host.run = LocalStore(tmp_path / "a")
    host.start(save=20)
    assert host.resumed.step == 20
    assert host.resumed.url == str(next(Path(host.path).rglob("version_20")))


def test_two_processes_agree_on_the_identity():
    store, found = MemoryStore(), list[str]()
    threads = [
        threading.Thread(target=lambda: found.append(read_or_create_run_id(store)))
        for _ in range(8)
    ]
    run_threads(threads)
    assert len(set(found)) == 1
