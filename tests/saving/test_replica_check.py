"""Digests that ranks use to compare their copies of a value, and the merging of trees."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limpet.buffers import BufferPool
from limpet.errors import PlanError
from limpet.saving.partition import RankNodes, digest_values, merge_trees
from limpet.state.arrays.torch import digest_on_device
from limpet.state.flatten import LocalLeaf
from limpet.state.replication import Replication
from limpet.threads import Workers
from limpet.types import MIB, Box

COUNTING = torch.arange(1000, dtype=torch.float32)


def leaf(source, key="x"):
    shape = tuple(source.shape)
    return LocalLeaf(key, "float32", shape, source, Box.whole(shape), Replication.UNVERIFIED)


def digests(*sources, threads=2):
    return digest_values(
        [leaf(s, f"x{i}") for i, s in enumerate(sources)], Workers(BufferPool(16 * MIB), threads)
    )


@given(st.integers(1, 300), st.data())
def test_a_change_of_any_bit_at_any_position_changes_the_device_digest(length, data):
    raw = torch.from_numpy(np.random.default_rng(length).integers(0, 256, length, np.uint8))
    before = digest_on_device(raw)
    changed = raw.clone()
    changed[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_on_device(changed) != before
    assert digest_on_device(raw.clone()) == before


def test_the_device_digest_depends_on_the_order_of_words_and_on_the_tail():
    words = torch.arange(1, 100, dtype=torch.int64)
    swapped = words.clone()
    swapped[[3, 77]] = swapped[[77, 3]]
    assert digest_on_device(words) != digest_on_device(swapped)
    assert digest_on_device(words.flip(0)) != digest_on_device(words)
    # Both tensors have the same dtype and length, and fill only part of a padded word.
    assert digest_on_device(torch.tensor([1, 2, 3], dtype=torch.uint8)) != digest_on_device(
        torch.tensor([1, 2, 4], dtype=torch.uint8)
    )


@pytest.mark.parametrize(
    "tensor",
    [
        COUNTING,
        COUNTING.reshape(10, 100).t(),
        COUNTING[::3],
        torch.ones(5, dtype=torch.bool),
        torch.ones(7, dtype=torch.complex64) * 1j,
        torch.ones(5, dtype=torch.bfloat16),
        torch.ones(6).to(torch.float8_e4m3fn),
        torch.tensor(3.0),
        torch.empty(0),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_the_device_digest_does_not_depend_on_strides(tensor):
    assert digest_on_device(tensor) == digest_on_device(
        tensor.clone(memory_format=torch.contiguous_format)
    )


def test_the_device_digest_does_not_depend_on_the_step_size(monkeypatch):
    whole = digest_on_device(COUNTING)
    monkeypatch.setattr("limpet.state.arrays.torch._WORDS_PER_STEP", 7)
    assert digest_on_device(COUNTING) == whole


@pytest.mark.parametrize("threads", [1, 3])
def test_digests_depend_only_on_the_elements(threads):
    large = torch.arange(3 * MIB, dtype=torch.float32)
    grid = COUNTING.reshape(10, 100)
    sources: list[Any] = [
        large, COUNTING, grid.t(), np.arange(9.0)[::2], torch.empty(0), COUNTING[:3],
    ]  # fmt: skip
    made = digests(*sources, threads=threads)
    assert len(set(made)) == len(made)
    again = [s.copy() if isinstance(s, np.ndarray) else s.contiguous().clone() for s in sources]
    assert digests(*again, threads=threads) == made
    for at in (0, 1_200_000, len(large) - 1):
        other = large.clone()
        other[at] += 1
        assert digests(other) != made[:1]


def test_digests_compare_minus_zero_and_nans_by_their_bits():
    a, b = torch.zeros(3), torch.zeros(3)
    b[1] = -0.0
    assert digests(a) != digests(b)
    nan = torch.full((3,), float("nan"))
    assert digests(nan) == digests(nan.clone())


def test_keys_that_only_some_ranks_have_are_added_in_order():
    one = {"dict": {"a": 1, "m": {"dict": {"x": {"tensor": ["float32", [2]]}}}}}
    two = {"dict": {"m": {"dict": {"y": None, "x": {"tensor": ["float32", [2]]}}}, "b": "s"}}
    assert merge_trees([(one, (0,)), (two, (1,))], RankNodes()) == {
        "dict": {"a": 1, "m": {"dict": {"x": {"tensor": ["float32", [2]]}, "y": None}}, "b": "s"}
    }


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (None, False),
        ("a", "b"),
        ({"float": "nan"}, {"float": "inf"}),
        ({"list": [1]}, {"list": [1, 2]}),
        ({"list": []}, {"tuple": []}),
        ({"dict": {}}, {"ordered": {}}),
        ({"tensor": ["float32", [2]]}, {"tensor": ["float32", [3]]}),
        ({"tensor": ["float32", [2]]}, {"tied": "b"}),
    ],
)
def test_a_value_that_differs_between_ranks_raises_an_error_that_names_the_ranks(one, two):
    trees = [({"dict": {"k": one, "same": 2}}, (0, 2)), ({"dict": {"k": two, "same": 2}}, (1,))]
    with pytest.raises(PlanError, match=r"k: .* on ranks 0, 2, .* on rank 1") as e:
        merge_trees(trees, RankNodes())
    assert e.value.leaves == ("k",)
    assert merge_trees([(one, (0,)), (one, (1,))], RankNodes()) == one
