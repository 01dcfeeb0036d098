"""The order of the samples, which must never change, and its batches."""

import json
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from limpet.data import epoch_order
from limpet.data.epoch_order import EpochOrder, permute


def order(length, seed=0, epoch=0):
    return permute(np.arange(length), length, seed, epoch).tolist()


GOLDEN = {
    "5": [3, 1, 4, 0, 2],
    "10": [8, 3, 6, 1, 9, 7, 4, 0, 2, 5],
    "2000": [1257, 1982, 1287, 104, 1805, 1880, 653, 289],
    "1e10": [833913199, 3847223831, 6174919768],
}


def test_the_order_never_changes():
    """Saved positions refer to the order. If this test fails, resumed runs get other samples."""
    assert order(5) == GOLDEN["5"]
    assert order(10, seed=-1, epoch=7) == GOLDEN["10"]
    assert order(2000, seed=2**80, epoch=1)[:8] == GOLDEN["2000"]
    at = np.array([0, 1, 10**10 - 1])
    assert permute(at, 10**10, 3, 10**6).tolist() == GOLDEN["1e10"]


@given(st.integers(1, 5000), st.integers(), st.integers(0, 10**9))
@example(1023, 0, 0)
@example(1024, 0, 0)
@settings(max_examples=60)
def test_the_order_is_a_permutation(length, seed, epoch):
    assert sorted(order(length, seed, epoch)) == list(range(length))


def batches(length, size, seed, rank=0, ranks=1, *, shuffle=True, drop_last=False, epoch=0, at=0):
    """Yield this rank's parts of the batches from the position ``at`` on, and their positions."""
    source = EpochOrder(
        range(length), None, is_shuffled=shuffle, is_by_batch=False, drop_last=drop_last, key=seed
    )
    source.size = size
    for start, stop, is_last, part in source.parts(epoch, at, rank, ranks):
        yield (start, stop), part
        assert is_last == (length - stop < (size if drop_last else 1))


def test_few_batches_are_computed_at_once(monkeypatch):
    """The arrays of an order of 10^9 samples would not fit into memory."""
    sizes = []

    def record(positions, *arguments):
        sizes.append(len(positions))
        return permute(positions, *arguments)

    monkeypatch.setattr(epoch_order, "permute", record)
    for size, ranks in ((1, 1), (256, 1), (4096, 64), (20011, 2)):
        sizes.clear()
        for _, _ in zip(range(300), batches(10**9, size, 3, 0, ranks), strict=False):
            pass
        assert max(sizes) <= max(8192, -(-size // ranks))
        assert len(sizes) == 1 + 299 // max(1, 8192 // -(-size // ranks))


GOLDEN_BATCHES = {
    "ten, drop": ((10, 3, -7), {"drop_last": True}, None, (3, "49d94ef9c857bbbd")),
    "4 ranks": ((1000, 7, 5, 3, 4), {}, None, (143, "8aa2a7df9b1ec13f")),
    "100,000": ((10**5, 256, 1), {}, None, (391, "4c7c200a58fcbef4")),
    "a billion, 64 ranks": ((10**9, 4096, 3, 17, 64), {}, 200, (200, "4ac4772a8537d220")),
    "long batches": ((60000, 20011, 4, 0, 2), {}, None, (3, "b036109b21bdb27a")),
}
"""Arguments, the number of batches, and the digest of the batches before there were blocks."""


@pytest.mark.parametrize("name", GOLDEN_BATCHES)
def test_the_batches_are_those_of_every_earlier_release(name):
    arguments, options, limit, expected = GOLDEN_BATCHES[name]
    digest, count = sha256(), 0
    for _, batch in batches(*arguments, **options):
        digest.update(json.dumps(batch).encode())
        count += 1
        if count == limit:
            break
    assert (count, digest.hexdigest()[:16]) == expected


@settings(max_examples=60)
@given(st.data())
def test_blocks_hold_the_batches_that_are_computed_alone(data):
    """Also after resumes in the middle of a block, with other batch sizes and world sizes."""
    length = data.draw(st.sampled_from([1, 10, 97, 1000, 20011, 10**6, 10**9]), "length")
    shuffle = data.draw(st.booleans(), "shuffle")
    at = 0
    for _ in range(data.draw(st.integers(1, 4), "resumes")):
        ranks = data.draw(st.sampled_from([1, 2, 3, 64]), "ranks")
        size = data.draw(st.sampled_from([1, 3, 32, 257, 9001]), "batch size")
        if size < ranks:
            continue
        rank, epoch = data.draw(st.integers(0, ranks - 1), "rank"), 3
        limit = data.draw(st.integers(1, 300), "batches")
        parts = batches(length, size, 5, rank, ranks, shuffle=shuffle, epoch=epoch, at=at)
        for (start, stop), batch in (part for part, _ in zip(parts, range(limit))):
            padding = -(stop - start) % ranks if stop - start < size else 0
            positions = np.arange(start + rank, stop + padding, ranks) % length
            expected = permute(positions, length, 5, epoch) if shuffle else positions
            assert batch == expected.tolist()
            at = stop
