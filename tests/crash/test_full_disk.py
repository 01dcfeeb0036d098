"""A disk that is really full in the middle of a training, and has room again later."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import NoSpace, SaveFailed
from holdfast.run.policy import EverySteps, KeepLast
from holdfast.run.run import Run

pytestmark = pytest.mark.root


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 14 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=14m", "none", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def fresh() -> dict[str, object]:
    return {"x": np.zeros(1 << 20, np.float32), "progress": holdfast.Progress()}


def steps(state: dict[str, object], ckpt: holdfast.Checkpointer, count: int) -> None:
    for _ in range(count):
        state["x"] += 1.0  # type: ignore[operator]
        ckpt.step()
        ckpt._saver._pending._ended.wait()  # type: ignore[union-attr]


def test_by_default_it_raises_and_what_was_committed_stays(small: Path) -> None:
    state = fresh()
    ckpt = holdfast.Checkpointer(small / "run", state, save=EverySteps(1))
    with pytest.raises(NoSpace, match="No space left"):
        steps(state, ckpt, 5)
    ckpt.close()
    kept = Run(small / "run").snapshots()
    assert [s.step for s in kept] == [1, 2, 3]
    assert all(s.verify().ok for s in kept)
    assert not list(Run(small / "run").store.partials(""))  # nothing is left to fill it further


def test_with_warn_training_goes_on_and_saves_again_once_there_is_room(small: Path) -> None:
    state = fresh()
    with holdfast.Checkpointer(
        small / "run", state, save=EverySteps(1), keep=KeepLast(2), on_error="warn"
    ) as ckpt:
        steps(state, ckpt, 2)
        (small / "other").write_bytes(bytes(4 << 20))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            steps(state, ckpt, 4)
        assert {w.category for w in told} == {SaveFailed}
        assert "since step 2" in str(told[0].message)
        (small / "other").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SaveFailed)
            steps(state, ckpt, 2)
    kept = Run(small / "run").snapshots()
    assert [s.step for s in kept] == [7, 8]
    assert all(s.verify().ok for s in kept)
    assert holdfast.load(small / "run" / "version_8")["x"][0] == 8
