"""A later save is the save that a fresh process makes, whatever changed in between."""

import gc
from typing import Any

import pytest
import torch

import limpet
from tests.fork_server import FORK_SERVER
from tests.saving.structure_changes import CHANGES, build, digest_of, send_fresh_digests

Json = dict[str, Any]


def fresh_digests():
    """Return the digest of the save after each change, each made by a process of its own."""
    pipe, other_end = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=send_fresh_digests, args=(other_end,))
    process.start()
    other_end.close()
    digests = pipe.recv()
    process.join()
    assert all(digests.values())
    return digests


def digests_around(change, folder):
    """Return the digests of two saves before a change, and of two after it."""
    state = build()
    with limpet.Checkpointer(folder, state, save=limpet.EverySteps(10**9)) as checkpointer:
        for begin in (lambda s: None, lambda s: None, change, lambda s: None):
            checkpointer.step()
            begin(state)
            checkpointer.save()
    return [digest_of(folder / f"version_{v}") for v in (1, 2, 3, 4)]


@pytest.mark.slow
def test_a_save_after_a_change_is_that_of_a_fresh_process(tmp_path):
    fresh = fresh_digests()
    before = fresh["nothing"]
    assert [name for name, digest in fresh.items() if digest == before] == ["nothing"]
    wrong = [
        name
        for number, (name, change) in enumerate(CHANGES.items())
        if digests_around(change, tmp_path / f"{number}") != [before] * 2 + [fresh[name]] * 2
    ]
    assert wrong == []


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
