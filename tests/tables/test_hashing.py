"""Hashes of ids: part of the format, so the numbers never change."""

import numpy as np
import pytest
import torch

from limpet import tables
from limpet.errors import LimpetError
from limpet.tables.ids import BUCKETS, bucket_of, mix, to_ids
from tests.tables.ids import EXTREMES, unmix


def test_the_hash_of_an_id_never_changes():
    ids = np.array([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    assert mix(ids).tolist() == [
        0x0,
        0x5692161D100B05E5,
        0xB4D055FCF2CBBD7B,
        0x5A682AFE7965DEBD,
        0x25C26EA579CEA98A,
        0xF21C87D4233FFD60,
    ]
    assert bucket_of(ids).tolist() == [0x000, 0x569, 0xB4D, 0x5A6, 0x25C, 0xF21]


def test_mix_is_a_permutation():
    hashes = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert (mix(unmix(hashes)) == hashes).all()


def test_consecutive_ids_spread_over_all_buckets():
    counts = np.bincount(bucket_of(np.arange(200 * BUCKETS)), minlength=BUCKETS)
    assert counts.min() > 130
    assert counts.max() < 270


def test_texts_are_hashed_by_xxh3():
    ids = tables.hash_ids(["", "limpet", "\u00fcber"])
    assert ids.dtype == np.int64
    assert ids.view(np.uint64).tolist() == [
        0x2D06800538D394C2,
        0x3FA86B00BB9B636E,
        0x8CD16EA4F1917FA7,
    ]
    assert len(tables.hash_ids([])) == 0


@pytest.mark.parametrize("texts", ["abc", [1], [b"abc", None]])
def test_only_texts_are_hashed(texts):
    with pytest.raises(LimpetError, match="texts"):
        tables.hash_ids(texts)


def test_ids_are_integers_of_any_type():
    assert to_ids(np.array([2**64 - 1, 2**63], np.uint64)).tolist() == [-1, -(2**63)]
    assert to_ids(torch.tensor([[1, -2]], dtype=torch.int32)).tolist() == [[1, -2]]
    assert to_ids(np.array(EXTREMES)).tolist() == EXTREMES
    assert to_ids([3, 4]).dtype == np.int64
    assert len(to_ids([])) == 0


@pytest.mark.parametrize("ids", [[1.0], np.array([True]), torch.tensor([0.5]), ["a"], [2**70]])
def test_other_ids_are_refused(ids):
    with pytest.raises(LimpetError, match=r"^ids must be an array of integers, not "):
        to_ids(ids)
