"""Comparing leaves: digests first, then bytes, in pieces."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
import torch

import holdfast
from holdfast.engine.snapshot import compare
from holdfast.engine.snapshot.compare import compare_bytes, find_equal_by_digest
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.storage.memory import MemoryStore


def saved(value: object) -> Snapshot:
    return holdfast.save(MemoryStore(), {"x": value})


def distance(a: object, b: object) -> tuple[int, float | None]:
    found = compare_bytes(saved(a), saved(b), [("x", "x")])["x", "x"]
    return found.differing, found.largest


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "int64"])
def test_numbers_differ_by_so_much(dtype: str) -> None:
    a = np.arange(6, dtype=dtype)
    b = a.copy()
    b[2] += 3
    b[4] -= 1
    assert distance(a, b) == (2, 3.0)


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int64", "int16"])
def test_integers_at_both_ends_do_not_overflow(dtype: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a, b = np.array([low], dtype), np.array([high], dtype)
    assert distance(a, b) == (1, float(int(high) - int(low)))


def test_bfloat16_counts_without_torch_dtypes() -> None:
    a = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert distance(a, a + torch.tensor([0.0, 0.5], dtype=torch.bfloat16)) == (1, 0.5)


def test_what_numpy_cannot_count_with_is_compared_by_bytes() -> None:
    a = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    b = torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn)
    assert distance(a, b) == (1, None)
    assert distance(np.array([True]), np.array([False])) == (1, None)


def test_nan_is_told_and_the_same_nan_is_equal() -> None:
    nan = np.array([np.nan, 1.0])
    assert distance(nan, nan.copy()) == (0, None)
    differing, largest = distance(nan, np.array([0.0, 1.0]))
    assert differing == 1
    assert largest is not None
    assert isnan(largest)


def test_zeros_of_both_signs_differ_by_nothing() -> None:
    assert distance(np.array([0.0]), np.array([-0.0])) == (1, 0.0)


def test_large_leaves_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "BATCH_BYTES", 1000)
    a = np.arange(7 * 11 * 5, dtype=np.float32).reshape(7, 11, 5)
    b = a.copy()
    b[3, 4, 2] += 7
    b[6, 10, 4] -= 2
    told: list[int] = []
    x, y = saved(a), saved(b)
    found = compare_bytes(x, y, [("x", "x")], told.append)["x", "x"]
    assert (found.elements, found.differing, found.largest) == (385, 2, 7.0)
    assert sum(told) == a.nbytes
    assert max(told) <= 1000


def test_digests_tell_only_what_is_equal() -> None:
    a = holdfast.save(MemoryStore(), {"x": np.zeros(70000), "y": np.ones(70000)})
    b = holdfast.save(MemoryStore(), {"x": np.zeros(70000), "y": np.zeros(70000)})
    pairs = [("x", "x"), ("y", "y"), ("x", "y")]
    assert find_equal_by_digest(a, b, pairs) >= {("x", "x")}
    assert ("y", "y") not in find_equal_by_digest(a, b, pairs)
