"""Trainings on a real file system that becomes full, and later has free space again."""

import subprocess
import warnings

import numpy as np
import pytest

import limpet
from limpet.errors import NoSpace, SaveFailed
from limpet.run.policy import EverySteps, KeepLast
from limpet.run.run import Run

pytestmark = pytest.mark.root


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 14 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=14m", "none", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def make_state():
    return {"x": np.zeros(1 << 20, np.float32), "progress": limpet.Progress()}


def train_steps(state, ckpt, count):
    for _ in range(count):
        state["x"] += 1.0
        ckpt.step()
        ckpt._saver.pending._ended.wait()


def test_full_disk_raises_by_default_and_keeps_committed_versions(small_disk):
    state = make_state()
    ckpt = limpet.Checkpointer(small_disk / "run", state, save=EverySteps(1))
    with pytest.raises(NoSpace, match="No space left"):
        train_steps(state, ckpt, 5)
    with pytest.raises(NoSpace):  # the last step cannot be saved either
        ckpt.close()
    kept = Run(small_disk / "run").snapshots()
    assert [s.step for s in kept] == [1, 2, 3]
    assert all(s.verify().ok for s in kept)
    # the failed save occupies no space
    assert not list(Run(small_disk / "run").store.partials(""))


def test_on_error_warn_continues_and_saves_again_when_space_is_free(small_disk):
    state = make_state()
    with limpet.Checkpointer(
        small_disk / "run", state, save=EverySteps(1), keep=KeepLast(2), on_error="warn"
    ) as ckpt:
        train_steps(state, ckpt, 2)
        (small_disk / "other").write_bytes(bytes(4 << 20))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_steps(state, ckpt, 4)
        assert {w.category for w in caught} == {SaveFailed}
        assert "since step 2" in str(caught[0].message)
        (small_disk / "other").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaveFailed)
            train_steps(state, ckpt, 2)
    kept = Run(small_disk / "run").snapshots()
    assert [s.step for s in kept] == [7, 8]
    assert all(s.verify().ok for s in kept)
    assert limpet.load(small_disk / "run" / "version_8")["x"][0] == 8
