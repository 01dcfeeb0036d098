"""The newest state in memory goes to the run after its training has ended."""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import limpet
from limpet.cli.verbs import run as run_verb
from limpet.deadline import Deadline
from limpet.errors import DeadlinePassed, FormatError, LimpetError, NoSpace, Preempted, StoreError
from limpet.format.names import WRITER_LOCK, Version
from limpet.format.records import Pin, encode_record
from limpet.loading.snapshot import reader_of
from limpet.machine import utc_now
from limpet.preemption import Preemption
from limpet.run.policy import EverySteps
from limpet.run.run import Run
from limpet.run.writer_lock import WriterLock
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.memory import MemoryStore
from limpet.tiers import flush as flush_module
from limpet.tiers.flush import MemoryRecord, flush_recorded, flush_states, record_memory
from limpet.tiers.settings import MemoryTier
from limpet.training.checkpointer import Checkpointer
from tests.notices.announced import Announced
from tests.ranks.trainings import TrainingJob
from tests.tiers.hosts import flip_bit, train
from tests.trainings import initial_state, state_after, states_equal
from tests.unreliable_stores import HookedStore
from tests.waiting import run_threads, wait_until


def soon(seconds=20):
    return Deadline.after(seconds, "the flush of a test")


def flush(host, seconds=20, is_writer=True):
    """Save the newest state in memory, and return the version, or None. It raises the error."""
    return flush_folder(host.folder, Run(host.run), seconds, is_writer)


def flush_folder(folder, run, seconds=20, is_writer=False):
    records = [MemoryRecord(str(folder), run.url)]
    check = WriterLock(run.store).check if is_writer else None
    for result in flush_states(records, run, soon(seconds), check):
        if isinstance(result, Exception):
            raise result
        return result
    return None


def test_the_newest_state_becomes_a_version(host):
    host.train_and_die(77)
    flushed = flush(host)
    assert flushed.step == 70
    assert flushed.verify().ok
    assert Run(host.run).line() == [Version(50), Version(70)]
    assert Run(host.run).latest().metadata["reason"] == "memory"
    assert not [s.key for s in host.run.list("") if "pin-" in s.key]
    state = initial_state()
    with Checkpointer(host.run, state, save=EverySteps(1000)) as ckpt:
        assert ckpt.resume().step == 70
        assert states_equal(state, state_after(70))


def test_if_the_last_save_fails_the_newest_captured_state_is_saved(host):
    """BEHAVIOURS.md, C2: it is better than the version before, and the exit code says that the last
    step is not saved."""
    store, source = HookedStore(MemoryStore()), Announced()

    def fail(method, key):
        if method == "put" and key.startswith("version_13/"):
            raise NoSpace("The disk is full")

    store.before = fail
    state = initial_state()
    tier = MemoryTier(every=EverySteps(5), copies=1, path=host.path)
    preemption = Preemption(notices=[source])
    save = EverySteps(10**9)
    ckpt = Checkpointer(store, state, save=save, tiers=[tier], preemption=preemption)
    with pytest.raises(Preempted) as left, ckpt:
        ckpt.resume()
        train(state, ckpt, 12)
        source.announce()
        while not ckpt._preemption.agreement._proposals.qsize():
            time.sleep(0.001)
        train(state, ckpt, 13)
    assert (left.value.code, left.value.step, left.value.saved_step) == (76, 13, 10)
    assert "The disk is full" in left.value.reason
    (flushed,) = Run(store.inner).snapshots()
    assert (flushed.step, flushed.metadata["reason"]) == (10, "memory")
    assert flushed["weights"][:].tobytes() == state_after(10)["weights"].tobytes()


def test_nothing_is_flushed_twice_or_if_a_version_is_newer(host):
    host.train_and_die(77)
    assert flush(host).step == 70
    assert flush(host) is None


@pytest.mark.parametrize("suffix", ["safetensors", "index.json"])
def test_damage_in_memory_is_not_saved(host, suffix):
    host.train_and_die(77)
    flip_bit(host.file("version_70", suffix), 300)
    with pytest.raises(FormatError):
        flush(host)
    assert Run(host.run).line() == [Version(50)]


def test_another_training_that_writes_to_the_run_prevents_the_flush(host):
    host.train_and_die(77)
    state = initial_state()
    with Checkpointer(host.run, state, save=EverySteps(1000), at_end=False) as ckpt:
        ckpt.resume()
        ckpt.step()
        assert host.run.stat(WRITER_LOCK)
        with pytest.raises(LimpetError, match="may still write to the run"):
            flush(host, is_writer=False)
    assert Run(host.run).line() == [Version(50)]
    assert flush(host, is_writer=False).step == 70


def test_a_host_with_only_a_part_waits_for_the_others_and_then_gives_up(host):
    host.train_and_die(77)
    host.file("version_70", "safetensors").unlink()
    with pytest.raises(DeadlinePassed, match="from the host that has it"):
        flush(host, 0.3)
    assert Run(host.run).line() == [Version(50)]


@pytest.mark.parametrize("is_writer", [False, True])
def test_a_training_that_begins_elsewhere_during_the_copy_prevents_the_commit(host, is_writer):
    host.train_and_die(77)
    store = HookedStore(host.run)
    lock = WriterLock(store)
    if is_writer:
        lock.acquire()

    def begin(method, key):
        if (method, key.partition("/")[0]) == ("put", "version_70"):
            host.run.delete(WRITER_LOCK)
            host.run.put_if_absent(WRITER_LOCK, encode_record(elsewhere))

    elsewhere = Pin("0" * 12, None, utc_now(), "another host", "boot", "1:1")
    store.before = begin
    records = [MemoryRecord(str(host.folder), host.run.url)]
    check = lock.check if is_writer else None
    with pytest.raises(LimpetError, match=r"has taken this run over|may still write to the run"):
        list(flush_states(records, Run(store), soon(), check))
    assert Run(host.run).line() == [Version(50)]


def test_a_training_that_began_and_ended_during_the_copy_prevents_the_commit(host):
    host.train_and_die(77)
    store = HookedStore(host.run)

    def train_elsewhere(method, key):
        if (method, key.partition("/")[0]) == ("put", "version_70"):
            state = initial_state()
            with Checkpointer(host.run, state, save=EverySteps(2)) as ckpt:
                ckpt.resume()
                train(state, ckpt, 52)

    store.before = train_elsewhere
    records = [MemoryRecord(str(host.folder), host.run.url)]
    with pytest.raises(LimpetError, match="no version of another training"):
        list(flush_states(records, Run(store), soon()))
    assert Run(host.run).line() == [Version(50), Version(52)]


@contextmanager
def two_hosts(url):
    """Return the folders of two hosts with a state of step 5, of which each has one shard."""
    folders = [tempfile.mkdtemp(prefix="limpet-test-", dir="/dev/shm") for _ in range(2)]
    try:
        with TrainingJob(2, limpet.open_store(folders[0])) as job:

            def work(trainer):
                with trainer.make_checkpointer(save=EverySteps(5)):
                    trainer.train_steps(5)

            job.run(work)
        for path in Path(folders[0]).iterdir():
            if not path.name.startswith("version_"):
                path.unlink()
        shutil.copytree(folders[0], folders[1], dirs_exist_ok=True)
        for folder, other in zip(folders, ("00001", "00000"), strict=True):
            for path in (Path(folder) / "version_5").glob(f"shard-{other}*"):
                path.unlink()
        yield folders
    finally:
        for folder in folders:
            shutil.rmtree(folder)


def test_two_hosts_that_have_a_part_each_commit_together(tmp_path):
    """Each copies its shards, and whoever sees all of them commits."""
    url = str(tmp_path / "run")
    results: list[Any] = []

    def flush_part(folder):
        try:
            results.append(flush_folder(folder, Run(url)))
        except BaseException as e:
            results.append(e)

    with two_hosts(url) as folders:
        run_threads(threading.Thread(target=flush_part, args=(f,)) for f in folders)
    assert [getattr(r, "step", r) for r in results] in ([5, 5], [5, None], [None, 5])
    assert Run(url).latest().verify().ok
    assert len(reader_of(Run(url).latest()).manifest.shards) == 2


def test_a_host_does_not_wait_long_for_another_one_which_commits_when_it_comes(
    tmp_path, monkeypatch
):
    """The other host may be lost. If it is only late, it finds the files of this one."""
    monkeypatch.setattr(flush_module, "_WAIT_SECONDS", 0.3)
    url = str(tmp_path / "run")
    with two_hosts(url) as folders:
        began = time.monotonic()
        with pytest.raises(DeadlinePassed, match="from the host that has it"):
            flush_folder(folders[0], Run(url), 600)
        assert time.monotonic() - began < 10
        assert Run(url).line() == []
        assert flush_folder(folders[1], Run(url), 600).step == 5
    assert Run(url).latest().verify().ok


def test_records_lead_to_the_memory_and_their_errors_are_returned(host, tmp_path):
    host.train_and_die(77)
    run = tmp_path / "run"
    for stat in host.run.list(""):
        path = run / stat.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(host.run.get(stat.key, 1 << 30))
    record_memory(str(tmp_path), MemoryRecord(str(host.folder), str(run)), "memory")
    (tmp_path / "9.memory").write_bytes(b"not a record")
    (result,) = flush_recorded(str(tmp_path), 20)
    assert isinstance(result, SnapshotReader)
    assert result.step == 70
    assert list(flush_recorded(str(tmp_path), 20)) == []
    record_memory("/nonexistent", MemoryRecord("a", "b"), "memory")  # raises nothing


SCRIPT = """
import os, signal, sys
import numpy as np, limpet
state = {"x": np.zeros(9), "progress": limpet.Progress()}
tier = limpet.MemoryTier(every=limpet.EverySteps(5), copies=1, path=sys.argv[2])
save = limpet.EverySteps(1000)
with limpet.Checkpointer(sys.argv[1], state, save=save, tiers=[tier]) as ckpt:
    ckpt.resume()
    while ckpt.current_step < 12:
        state["x"] += 1
        ckpt.step()
        ckpt._tiers.memory.wait()
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
"""


@pytest.mark.slow
def test_limpet_run_flushes_what_a_killed_training_has_left(tmp_path, memory):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "limpet", "run", "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        [*command, str(run), memory, "SIGKILL"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "the snapshot of step 10 was saved" in done.stderr
    snapshot = Run(run).latest()
    assert snapshot is not None
    assert snapshot.step == 10
    assert snapshot["x"][:].tolist() == [10.0] * 9


@pytest.mark.slow
def test_a_signal_ends_the_wait_of_limpet_run_for_the_files_of_another_host(tmp_path, memory):
    """The scheduler kills it soon after the signal, and then there would be no exit code."""
    lose_shard = (
        "import glob\n    for path in glob.glob(sys.argv[2] + '/*/*/version_10/shard-*'):"
        "\n        os.unlink(path)\n    os.kill("
    )
    script = SCRIPT.replace("os.kill(", lose_shard)
    command = [sys.executable, "-m", "limpet", "run", "--", sys.executable, "-c", script]
    run = tmp_path / "run"
    with subprocess.Popen(
        [*command, str(run), memory, "SIGKILL"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_until(lambda: [*run.glob("pin-*")], 60)  # the flush has begun
            time.sleep(0.5)
            assert process.poll() is None
            began = time.monotonic()
            process.terminate()
            assert process.stderr is not None
            assert "from the host that has it" in process.stderr.read()
            assert process.wait(30) == 1
            assert time.monotonic() - began < 20
        finally:
            process.kill()


def test_an_older_version_that_was_saved_does_not_count_if_the_newest_state_was_not(
    tmp_path, monkeypatch
):
    """Otherwise, exit code 76 would become 75, which is not counted as a failure."""
    (tmp_path / "1.memory").touch()
    older = SimpleNamespace(step=20, url="runs/a/version_20")
    results: list[Any] = [older, StoreError("The store is away")]
    monkeypatch.setattr(flush_module, "flush_recorded", lambda *_: iter(results))
    assert run_verb._flush_memory(tmp_path, 1) == ""
    results.reverse()
    assert run_verb._flush_memory(tmp_path, 1) == "the snapshot of step 20 was saved"
