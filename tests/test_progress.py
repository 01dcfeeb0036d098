"""Progress and RNG: what comes back after a resume is what would have followed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import PlanError
from holdfast.storage.memory import MemoryStore


def draw() -> tuple[float, float, float, list[float]]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        torch.randn(3).tolist(),
    )


def test_random_numbers_go_on_where_they_were() -> None:
    store = MemoryStore()
    np.random.normal()  # leaves one number cached, which is state too
    random.gauss(0, 1)
    holdfast.save(store, {"rng": holdfast.RNG()})
    expected = [draw() for _ in range(3)]
    draw()
    holdfast.load(store, into={"rng": holdfast.RNG()})
    assert [draw() for _ in range(3)] == expected


def test_progress_comes_back() -> None:
    store = MemoryStore()
    progress = holdfast.Progress()
    progress.epoch, progress.step, progress.samples = 3, 70, 2240
    holdfast.save(store, {"progress": progress})
    other = holdfast.Progress()
    holdfast.load(store, into={"progress": other})
    assert (other.epoch, other.step, other.samples) == (3, 70, 2240)
    assert repr(other) == "Progress(epoch=3, step=70, samples=2240)"


def test_progress_refuses_another_state() -> None:
    with pytest.raises(PlanError, match="epoch, step and samples"):
        holdfast.Progress().load_state_dict({"epoch": 1})
