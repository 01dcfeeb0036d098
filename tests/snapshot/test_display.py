"""Snapshots as mappings, and how they display themselves."""

import copy
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import StoreError
from limpet.loading.snapshot import Snapshot, SubtreeView, reader_of
from limpet.run.run import Run
from limpet.snapshot.leaf import LeafView
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.memory import MemoryStore
from tests.docs.reference import render
from tests.trainings import trained_run
from tests.unreliable_stores import HookedStore

ATTACK = "<script>alert('x')</script>\"&\x1b[31m\n"
STATE: dict[str, Any] = {
    "model": {"fc": {"weight": np.zeros((3, 2)), "bias": np.zeros(3)}, "steps": 7},
    "history": [1, 2.5, "three"],
    "mixed": [1, np.ones(2)],
    "nothing": {},
    "none": None,
    "numbers": {1: "one", "1": "text"},
    "sparse": torch.eye(3).to_sparse(),
}


def save(state, **options):
    """Return the opened snapshot of a state, and the list of all later calls of its store."""
    calls = list[tuple[str, str]]()
    store = HookedStore(MemoryStore())
    limpet.save(store, state, **options)
    snapshot = limpet.open(store)
    store.before = lambda method, key: calls.append((method, key))
    return snapshot, calls


def test_a_snapshot_is_a_mapping_of_its_state():
    snapshot, calls = save(STATE, step=12)
    assert len(snapshot) == len(snapshot.keys()) == len(list(snapshot))
    assert snapshot.metrics == {}
    for key in snapshot:
        assert key in snapshot
        snapshot[key]
    for key in ("model", "model/fc", "mixed", "nothing", "numbers", "sparse"):
        assert key in snapshot
        assert isinstance(snapshot[key], SubtreeView)
    assert snapshot["history"] == [1, 2.5, "three"]
    assert snapshot["none"] is None
    assert "history" in snapshot
    for missing in ("", "mod", "model/", "/model", "model/fc/weights", 5, None):
        assert missing not in snapshot
    with pytest.raises(KeyError, match=r"mod is not a key; the keys are model/fc/weight"):
        snapshot["mod"]
    assert calls == []  # nothing was read


def test_the_keys_of_a_sub_mapping_are_relative():
    snapshot, calls = save(STATE, step=12)
    model = snapshot["model"]
    assert list(model) == ["fc/weight", "fc/bias", "steps"]
    assert len(model) == 3
    assert model["steps"] == 7
    assert model["fc"]["weight"].shape == model["fc/weight"].shape == (3, 2)
    assert list(model["fc"]) == ["weight", "bias"]
    assert "fc" in model
    assert "fc/weight" in model
    assert "model/fc/weight" not in model
    assert model.get("no", 3) == 3
    assert [k for k, v in model.items() if isinstance(v, LeafView)] == ["fc/weight", "fc/bias"]
    with pytest.raises(KeyError, match=r"model/steps is not a key of model, and relative to it"):
        model["model/steps"]
    assert (len(snapshot["nothing"]), bool(snapshot["nothing"])) == (0, False)
    assert snapshot["mixed"]["0"] == 1
    assert dict(snapshot["numbers"]) == {"1": "one", "1~2": "text"}
    assert list(snapshot["sparse"]) == ["indices", "values"]
    assert model.nbytes == 9 * 8
    assert calls == []
    assert model["fc/bias"].read().tolist() == [0, 0, 0]  # the first read


def test_the_tree_is_the_state_with_views():
    snapshot, calls = save(STATE, step=12)
    tree = snapshot.tree
    assert list(tree) == list(STATE)
    assert tree["numbers"] == {1: "one", "1": "text"}
    assert tree["history"] == STATE["history"]
    assert isinstance(tree["model"]["fc"]["weight"], LeafView)
    assert isinstance(tree["mixed"][1], LeafView)
    assert calls == []
    assert tree["model"]["fc"]["weight"][0:1].shape == (1, 2)


def test_a_leaf_that_is_used_like_a_tensor_says_how_to_read_it():
    leaf = save(STATE)[0]["model/fc/weight"]
    with pytest.raises(AttributeError, match=r"no mean: .* not read yet\. Read them with read\(\)"):
        leaf.mean()
    assert not hasattr(leaf, "numpy")
    assert copy.copy(leaf).key == leaf.key


def test_a_snapshot_without_leaves_is_not_false():
    snapshot, _ = save({})
    assert snapshot
    assert len(snapshot) == 0
    assert repr(snapshot) == "<Snapshot memory://memory: 4.00 KiB: empty>"


def test_the_repr_shows_step_size_and_members():
    snapshot, calls = save(STATE, step=12)
    assert repr(snapshot).startswith("<Snapshot memory://memory: step 12, ")
    assert repr(snapshot).endswith(
        " KiB: model, history, mixed, nothing, none, numbers, and 1 more>"
    )
    assert repr(snapshot["model"]) == "<SubtreeView model: 3 keys, 72 B: fc, steps>"
    assert calls == []


def test_the_repr_of_an_unread_snapshot_reads_nothing():
    store = trained_run()
    snapshot = Run(store).latest()
    assert snapshot is not None
    reader = reader_of(snapshot)
    unread = Snapshot(SnapshotReader(reader.location, None, reader.digest))
    store.delete(reader.location.key("manifest.json"))
    assert repr(unread) == "<Snapshot memory://memory/version_60, not read yet>"


def test_the_repr_escapes_names():
    snapshot, calls = save({ATTACK: {ATTACK: np.zeros(2), "value": ATTACK}})
    key = next(iter(snapshot)).rpartition("/")[0]
    shown = repr(snapshot) + repr(snapshot[key])
    assert "<script>" in shown
    assert "\x1b" not in shown
    assert "\n" not in shown
    assert calls == []


@pytest.mark.slow
def test_a_large_state_displays_quickly_and_briefly():
    members = {f"layer{i}": {"w": np.zeros(1), "b": np.zeros(1)} for i in range(5000)}
    snapshot, _ = save({"model": members, "optimizer": members, "progress": {"step": 1}})
    began = time.process_time()
    text = repr(snapshot) + repr(snapshot["model"])
    for i in range(1000):  # a lookup does not depend on the number of leaves
        snapshot["model"][f"layer{i}"]
    assert time.process_time() - began < 10  # 0.5 s on an idle machine
    assert len(text) < 1000


def test_long_names_are_shortened():
    snapshot, _ = save({"n" * 50_000: {"m" * 50_000: 1}})
    assert len(repr(snapshot)) < 300


PUBLIC_NAMES = [
    *("bases", "chain", "created", "keys", "load", "metadata", "metrics", "nbytes"),
    *("referred_bytes", "step", "tree", "url", "verify", "version"),
]


def test_the_public_names_are_those_of_the_reference():
    snapshot, _ = save({"x": 1})
    assert [name for name in dir(Snapshot) if not name.startswith("_")] == PUBLIC_NAMES
    assert [name for name in dir(snapshot) if not name.startswith("_")] == PUBLIC_NAMES
    assert "SnapshotReader" not in limpet.__all__
    section = render()["limpet.md"].split("## `limpet.Snapshot`\n")[1].partition("\n## ")[0]
    assert sorted(re.findall(r"^### `(\w+)`$", section, re.MULTILINE)) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(Snapshot, name).__doc__


def test_every_public_class_says_what_its_objects_are():
    public = [getattr(limpet, name) for name in limpet.__all__]
    classes = [c for c in public if isinstance(c, type) and c is not limpet.Store]
    assert len(classes) > 20
    assert [c for c in classes if c.__repr__ is object.__repr__] == []


def test_a_pending_save_shows_its_state():
    store = HookedStore(MemoryStore())
    gate = threading.Event()
    store.before = lambda method, key: method == "put" and gate.wait(20)
    pending = limpet.save_async(store, {"x": np.zeros(3)})
    assert repr(pending) == f"<Pending save to {store.url}, in progress>"
    gate.set()
    pending.wait()
    assert repr(pending) == f"<Pending save to {store.url}, committed>"

    def refuse(method, key):
        if method == "put":
            raise StoreError("no write", key=key, store=store.url)

    store = HookedStore(MemoryStore())
    store.before = refuse
    pending = limpet.save_async(store, {"x": np.zeros(3)})
    with pytest.raises(StoreError):
        pending.wait()
    assert repr(pending) == f"<Pending save to {store.url}, failed>"


def test_a_random_state_and_a_source_of_notices_show_their_arguments(tmp_path):
    assert repr(limpet.RNG()) == "RNG()"
    source = limpet.preemption.FileNotice(tmp_path / "stop")
    assert repr(source) == f"<FileNotice the file {tmp_path}/stop, every 1 s>"
