"""States in a tier that only seem to be those of a run: of one step, but of another history."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import limpet
from limpet.errors import LimpetError, SkippedVersion
from limpet.format.names import Version
from limpet.run.policy import EverySteps, Never
from limpet.run.run import Run
from limpet.storage.memory import MemoryStore
from limpet.tiers.settings import LocalTier, MemoryTier
from limpet.training.checkpointer import Checkpointer
from tests.tiers.hosts import flip_bit, train
from tests.trainings import delete_version, initial_state


def test_a_save_after_the_capture_of_the_same_step_counts(host):
    """The end of an epoch: ``step`` captures, then the epoch is counted, and then it is saved."""

    def run_epochs(count):
        state = {"w": np.zeros(1000, "f4"), "progress": limpet.Progress()}
        tier = MemoryTier(every=EverySteps(10), copies=1, path=host.path)
        ckpt = Checkpointer(host.run, state, save=Never(), tiers=[tier], preemption=None)
        host.ckpts.append(ckpt)
        ckpt.resume()
        progress = state["progress"]
        while progress.epoch < count:
            for _ in range(20):
                state["w"] += 1
                ckpt.step()
                ckpt._tiers.memory.wait()
            ckpt.end_epoch()
            ckpt.save({"val": 1.0})
        ckpt._saver.writer_lock.release()
        return progress.step

    assert run_epochs(1) == 20
    assert run_epochs(2) == 40


def train_elsewhere(host, last_step):
    """Train in the run on another host, which is lost afterward, with other weights."""
    path = Path(host.path + "-2")
    path.mkdir()
    state = initial_state()
    state["weights"] += 7
    tier = MemoryTier(every=EverySteps(10), copies=1, path=path)
    ckpt = Checkpointer(host.run, state, save=EverySteps(50), tiers=[tier], preemption=None)
    try:
        ckpt.resume()
        train(state, ckpt, last_step)
        ckpt._saver.wait()
    finally:
        ckpt._release()
        shutil.rmtree(path)
    return state


def test_a_host_that_returns_does_not_replace_a_version_of_the_same_step(host):
    state, ckpt = host.start(save=1000)
    train(state, ckpt, 50)
    ckpt._saver.writer_lock.release()
    assert "version_50" in host.captured
    trained = train_elsewhere(host, 50)
    assert Run(host.run).line() == [Version(50)]
    resumed, _ = host.start()
    assert host.path not in host.resumed.url
    assert host.warnings == []
    assert resumed["weights"].tobytes() == trained["weights"].tobytes()


def test_a_state_whose_parent_was_replaced_does_not_continue_the_run(host):
    host.train_and_die(66)  # version_50 is in the run, and version_60 in memory
    delete_version(host.run, 50)
    trained = train_elsewhere(host, 50)
    resumed, _ = host.start()
    assert host.resumed.step == 50
    assert resumed["weights"].tobytes() == trained["weights"].tobytes()
    assert host.warnings == []


def test_half_of_a_state_of_another_history_begins_no_branch(host):
    state, ckpt = host.start(save=1000)
    train(state, ckpt, 60)
    ckpt._saver.writer_lock.release()
    train_elsewhere(host, 50)
    host.file("version_60", ".safetensors").unlink()
    host.start()
    assert (host.resumed.step, host.warnings, Run(host.run).branch()) == (50, [], 0)


def test_a_local_disk_with_another_version_of_the_same_step_is_ignored(tmp_path):
    run = MemoryStore()

    def start(disk, weights, last_step):
        state = initial_state()
        state["weights"] += weights
        tiers = [LocalTier(tmp_path / disk)]
        ckpt = Checkpointer(run, state, save=EverySteps(10), tiers=tiers, preemption=None)
        resumed = ckpt.resume()
        while state["progress"].step < last_step:
            ckpt.step()
        ckpt._saver.wait()
        ckpt._release()
        return state, resumed

    start("a", 1.0, 12)
    delete_version(run, 10)
    start("b", 2.0, 12)
    state, resumed = start("a", 3.0, 0)
    assert resumed.url == "memory://memory/version_10"
    assert state["weights"][0] == 2.0


@pytest.mark.parametrize("is_supervised", [False, True])
def test_damage_that_has_overwritten_a_part_of_the_state_raises_if_nothing_else_is_left(
    host, is_supervised, tmp_path, monkeypatch
):
    """Otherwise, training would begin at step 0 with parts of the damaged state. Under ``limpet
    run``, the state is left out after three starts: nobody may be there to delete it."""
    if is_supervised:
        monkeypatch.setenv("LIMPET_STATUS", str(tmp_path))

    def start():
        state = {
            "a": np.full(5 << 20, 0.5, np.float32),
            "b": np.full(5 << 20, 0.5, np.float32),
            "progress": limpet.Progress(),
        }
        tier = MemoryTier(every=EverySteps(10), copies=1, path=host.path)
        ckpt = Checkpointer(host.run, state, save=EverySteps(1000), tiers=[tier], preemption=None)
        host.ckpts.append(ckpt)
        return state, ckpt

    state, ckpt = start()
    ckpt.resume()
    state["a"][:] = state["b"][:] = 10.0
    for _ in range(10):
        ckpt.step()
    ckpt._tiers.memory.wait()
    ckpt._saver.writer_lock.release()
    flip_bit(host.file("version_10", ".safetensors"), -1)
    for _ in range(3):
        state, ckpt = start()
        with pytest.raises(LimpetError, match="only state to resume from is damaged") as caught:
            ckpt.resume()
        assert caught.value.is_state_invalid
        assert "version_10" in str(caught.value)
        with pytest.raises(LimpetError, match="Resume from an intact version"):
            ckpt.step()
    state, ckpt = start()
    if not is_supervised:
        with pytest.raises(LimpetError, match="only state to resume from is damaged"):
            ckpt.resume()
        return
    with pytest.warns(SkippedVersion, match="The snapshots in tiers are left out"):
        assert ckpt.resume() is None
    ckpt.step()
    assert state["b"][0] == 0.5
    assert state["progress"].step == 1
