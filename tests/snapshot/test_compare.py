"""The comparison of leaves: by digests first, then by bytes, in pieces."""

from math import isnan

import numpy as np
import pytest
import torch

import limpet
from limpet.loading.snapshot import reader_of
from limpet.snapshot import compare
from limpet.snapshot.compare import compare_bytes, find_equal_by_digest
from limpet.storage.memory import MemoryStore


def saved(value):
    return reader_of(limpet.save(MemoryStore(), {"x": value}))


def distance(a, b):
    found = compare_bytes(saved(a), saved(b), [("x", "x")])["x", "x"]
    return found.differing, found.largest


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int8", "int64"])
def test_the_number_of_differences_and_the_largest_one_are_returned(dtype):
    a = np.arange(6, dtype=dtype)
    b = a.copy()
    b[2] += 3
    b[4] -= 1
    assert distance(a, b) == (2, 3.0)


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int64", "int16"])
def test_the_difference_of_the_extreme_integers_does_not_overflow(dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a, b = np.array([low], dtype), np.array([high], dtype)
    assert distance(a, b) == (1, float(int(high) - int(low)))


def test_bfloat16_values_are_compared_as_numbers():
    a = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert distance(a, a + torch.tensor([0.0, 0.5], dtype=torch.bfloat16)) == (1, 0.5)


def test_dtypes_without_numpy_arithmetic_are_compared_by_bytes():
    a = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    b = torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn)
    assert distance(a, b) == (1, None)
    assert distance(np.array([True]), np.array([False])) == (1, None)


def test_equal_nans_are_equal_and_a_nan_makes_the_largest_difference_nan():
    nan = np.array([np.nan, 1.0])
    assert distance(nan, nan.copy()) == (0, None)
    differing, largest = distance(nan, np.array([0.0, 1.0]))
    assert differing == 1
    assert largest is not None
    assert isnan(largest)


def test_zeros_of_both_signs_are_different_with_a_difference_of_zero():
    assert distance(np.array([0.0]), np.array([-0.0])) == (1, 0.0)


def test_large_leaves_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(compare, "BATCH_BYTES", 1000)
    a = np.arange(7 * 11 * 5, dtype=np.float32).reshape(7, 11, 5)
    b = a.copy()
    b[3, 4, 2] += 7
    b[6, 10, 4] -= 2
    compared: list[int] = []
    x, y = saved(a), saved(b)
    found = compare_bytes(x, y, [("x", "x")], compared.append)["x", "x"]
    assert (found.elements, found.differing, found.largest) == (385, 2, 7.0)
    assert sum(compared) == a.nbytes
    assert max(compared) <= 1000


def test_leaves_with_different_digests_are_not_reported_as_equal():
    a = limpet.save(MemoryStore(), {"x": np.zeros(70000), "y": np.ones(70000)})
    b = limpet.save(MemoryStore(), {"x": np.zeros(70000), "y": np.zeros(70000)})
    pairs = [("x", "x"), ("y", "y"), ("x", "y")]
    assert find_equal_by_digest(reader_of(a), reader_of(b), pairs) >= {("x", "x")}
    assert ("y", "y") not in find_equal_by_digest(reader_of(a), reader_of(b), pairs)
