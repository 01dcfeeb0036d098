"""A later save is the save that a fresh process makes, whatever changed in between."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from tests.saving.structure_changes import CHANGES, build, digest_of

Json = dict[str, Any]


@pytest.fixture(scope="module")
def fresh_digests():
    """Return the digest of the save after each change, each made by a process of its own."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.saving.structure_changes"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    digests: dict[str, str] = json.loads(made.stdout)
    assert all(digests.values()), made.stderr
    return digests


@pytest.mark.slow
def test_the_changes_change_the_save(fresh_digests):
    """Otherwise, the comparisons below could not fail."""
    unchanged = [name for name, d in fresh_digests.items() if d == fresh_digests["nothing"]]
    assert unchanged == ["nothing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_save_after_a_change_is_that_of_a_fresh_process(name, tmp_path, fresh_digests):
    state = build()
    never = limpet.EverySteps(10**9)
    with limpet.Checkpointer(str(tmp_path), state, save=never) as checkpointer:
        for begin in (lambda s: None, lambda s: None, CHANGES[name], lambda s: None):
            checkpointer.step()
            begin(state)
            checkpointer.save()
    digests = [digest_of(tmp_path / f"version_{v}") for v in (1, 2, 3, 4)]
    assert digests[:2] == [fresh_digests["nothing"]] * 2
    assert digests[2:] == [fresh_digests[name]] * 2


@pytest.mark.slow
def test_the_state_of_another_training_at_the_same_addresses_is_saved_anew(tmp_path):
    ids: list[int] = []
    for i in range(500):
        if i >= 12 and len(set(ids)) < len(ids):  # some had the id of an earlier one
            return
        state: Json = {"t": torch.full((64 + i % 2,), float(i)), "n": {"a": i}}
        name = str(tmp_path / f"run{i}")
        with limpet.Checkpointer(name, state, save=limpet.EverySteps(1)) as checkpointer:
            ids.append(id(state["t"]))
            for _ in range(2):
                checkpointer.step()
        loaded = limpet.load(f"{name}/version_2")
        assert loaded["n"] == {"a": i}
        assert torch.equal(loaded["t"], torch.full((64 + i % 2,), float(i)))
        del state, checkpointer, loaded
        gc.collect()
    pytest.fail("no state had the id of an earlier one")
