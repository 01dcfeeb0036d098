"""A later save is the save that a fresh process makes, whatever changed in between."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import limpet
from limpet.saving import image
from limpet.state import flatten as flatten_module
from tests.saving.structure_changes import CHANGES, build, digest_of

Json = dict[str, Any]


@pytest.fixture(scope="module")
def fresh_digests() -> dict[str, str]:
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
def test_the_changes_change_the_save(fresh_digests: dict[str, str]) -> None:
    """Otherwise, the comparisons below could not fail."""
    unchanged = [name for name, d in fresh_digests.items() if d == fresh_digests["nothing"]]
    assert unchanged == ["nothing", *UNSAVED]


UNSAVED = ["stride", "stride of a parameter"]
"""Changes that no save shows."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_save_after_a_change_is_that_of_a_fresh_process(
    name: str, tmp_path: Path, fresh_digests: dict[str, str]
) -> None:
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


def test_the_state_of_another_training_at_the_same_addresses_is_saved_anew(tmp_path: Path) -> None:
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


def test_a_save_of_the_same_structure_makes_no_new_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    build_header = image.build_header
    monkeypatch.setattr(image, "build_header", lambda e: made.append(1) or build_header(e))
    state = build()
    with limpet.Checkpointer(str(tmp_path), state, save=limpet.EverySteps(10**9)) as checkpointer:
        for count, change in ((1, int), (1, int), (2, CHANGES["a leaf added"]), (2, int)):
            change(state) if change is not int else None
            checkpointer.step()
            checkpointer.save()
            assert len(made) == count
        cache = checkpointer._group.cache["layouts"]
        for i in range(5):
            state[f"new {i}"] = torch.ones(1)
            checkpointer.step()
            checkpointer.save()
        assert len(cache) <= 2


def test_a_layout_that_is_shared_by_images_cannot_be_changed() -> None:
    cache: Json = {}
    boxes = [
        image.LeafBox("a", "float32", (3,), flatten_module.Box.whole((3,))),
        image.LeafBox("b", "float32", (1,), flatten_module.Box.whole((1,))),
    ]
    first, second = (image.make_image([object(), object()], boxes, cache=cache) for _ in range(2))
    assert first.cuts is second.cuts
    with pytest.raises(ValueError, match="read-only"):
        first.cuts[0] = 1
    first.sources.clear()
    assert len(second.sources) == 2


def count_calls(call: Callable[[], object]) -> int:
    """Return how many Python functions are called."""
    calls: list[object] = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_flattening_calls_few_functions_per_leaf() -> None:
    counts = []
    for layers in (50, 200):
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        counts.append(count_calls(lambda state=state: flatten_module.flatten(state)))
    leaves = 150 * 8
    assert counts[1] - counts[0] < 8 * leaves
