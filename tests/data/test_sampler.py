"""``ElasticSampler``: order, parts of the ranks, counting, passes, and states."""

import copy
import json
import pickle
import tracemalloc
import warnings
from collections import Counter
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from limpet.data.sampler import SamplerGroup
from torch.utils.data import TensorDataset

import limpet
from limpet.data.permutation import permute
from limpet.errors import LimpetError, PlanError

Sampler = limpet.ElasticSampler


def order(length, seed=0, epoch=0):
    return permute(np.arange(length), length, seed, epoch).tolist()


def flat(batches):
    return list(chain.from_iterable(batches))


def resumed(sampler, *arguments, **options):
    """Return a new sampler with the state of ``sampler``, as after a restart."""
    other = Sampler(*arguments, **options)
    other.load_state_dict(sampler.state_dict())
    return other


def train(sampler, batches=None):
    """Count and return up to ``batches`` batches of one pass."""
    seen = []
    for batch in islice(iter(sampler), batches):
        seen.append(batch)
        sampler.advance()
    return seen


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


def test_without_shuffle_samples_keep_their_order():
    assert train(Sampler(7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_batch_of_a_huge_data_set_needs_little_memory():
    sampler = Sampler(10**10, 256)
    current_pass = iter(sampler)
    next(current_pass)
    tracemalloc.start()
    next(current_pass)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert len(sampler) == 39_062_500


def ranks_of(count, *arguments, **options):
    return [Sampler(*arguments, **options, rank=r, ranks=count) for r in range(count)]


def step_together(samplers, passes):
    """Return each rank's part of the next batch, or an empty list at the end of the pass."""
    parts = [part for p in passes if (part := next(p, None)) is not None]
    assert len(parts) in (0, len(samplers))
    if parts:
        for sampler in samplers:
            sampler.advance()
        assert len({str(s.state_dict()) for s in samplers}) == 1
        sizes = [len(part) for part in parts]
        assert min(sizes) > 0
        assert max(sizes) - min(sizes) <= 1
    return parts


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 8), st.booleans())
@example(1, 4, 4, False)
@example(3, 8, 8, False)
def test_ranks_divide_an_epoch(length, batch, count, drop_last):
    batch = max(batch, count)
    if drop_last:
        length = max(length, batch)
    samplers = ranks_of(count, length, batch, drop_last=drop_last)
    passes = [iter(s) for s in samplers]
    seen: list[int] = []
    batches = 0
    while parts := step_together(samplers, passes):
        batches += 1
        seen += [sample for part in parts for sample in part]
        if batches * batch <= length:
            assert sum(map(len, parts)) == batch
        else:
            assert len({len(part) for part in parts}) == 1
    assert batches == len(samplers[0])
    sample_count = length // batch * batch if drop_last else length
    assert len(seen) == sample_count + samplers[0].padded
    whole = order(length)
    assert Counter(seen) == Counter(whole[:sample_count]) + Counter(
        whole[i % length] for i in range(samplers[0].padded)
    )
    assert samplers[0].epochs == 1


@given(
    st.integers(1, 150),
    st.integers(4, 20),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.booleans(),
)
@example(40, 4, [(4, 3), (2, 3), (3, 100)], 0, True)
@pytest.mark.slow
def test_the_number_of_ranks_may_change(length, batch, changes, seed, prefetch):
    """Each epoch has every sample once, and exactly the padding twice, for any ranks."""
    state: dict[str, int] | None = None
    seen: dict[int, list[int]] = {}
    repeated: dict[int, int] = {}
    for count, steps in [*changes, (3, 200)]:
        samplers = ranks_of(count, length, batch, seed)
        for s in samplers:
            if state is not None:
                s.load_state_dict(state)
        passes = [iter(s) for s in samplers]
        while steps:
            epoch, before = (samplers[0].state_dict()[n] for n in ("epoch", "samples"))
            parts = step_together(samplers, passes)
            if not parts and samplers[0].epochs == 3:
                break
            if not parts:
                passes = [iter(s) for s in samplers]
                continue
            if samplers[0].state_dict()["epoch"] != epoch:
                epoch, before = epoch + 1, 0
            samples = [sample for part in parts for sample in part]
            seen.setdefault(epoch, []).extend(samples)
            repeated[epoch] = len(samples) - (min(before + batch, length) - before)
            if repeated[epoch]:
                assert samplers[0].padded == repeated[epoch]
            steps -= 1
        if samplers[0].epochs == 3:
            break
        if prefetch:  # like a loader that has prefetched batches when the process is killed
            for p in passes:
                list(islice(p, 3))
        state = samplers[0].state_dict()
    assert set(seen) == {0, 1, 2}
    for epoch, samples in seen.items():
        whole = order(length, seed, epoch)
        padding = [whole[i % length] for i in range(repeated[epoch])]
        assert Counter(samples) == Counter(whole) + Counter(padding)


@given(st.integers(1, 300), st.lists(st.integers(1, 40), min_size=2, max_size=6), st.data())
def test_the_batch_size_may_change(length, sizes, data):
    seen: list[int] = []
    state = None
    for size in sizes:
        sampler = Sampler(length, size)
        if state is not None:
            sampler.load_state_dict(state)
        if sampler.epochs:
            break
        seen += flat(train(sampler, data.draw(st.integers(0, 10))))
        state = sampler.state_dict()
    if not sampler.epochs:
        seen += flat(train(sampler))
    assert seen == order(length)


def test_a_pass_reads_the_rank_from_torch_distributed(monkeypatch):
    sampler = Sampler(8, 4, shuffle=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert list(sampler) == [[1], [5]]
    assert Sampler(10, 4).padded == 1
    with pytest.raises(LimpetError, match=r"3 or more for 3 ranks"):
        Sampler(8, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length= of an"),
        ({"length": -1}, "length= of an"),
        ({"length": 1 << 62}, "length= of an"),
        ({"batch_size": 0}, "batch_size= of an"),
        ({"length": 3, "drop_last": True}, "at most the length with drop_last, 3"),
        ({"rank": 0}, "0 <= rank < ranks"),
        ({"ranks": 2}, "0 <= rank < ranks"),
        ({"rank": 2, "ranks": 2}, "0 <= rank < ranks"),
        ({"rank": -1, "ranks": 2}, "0 <= rank < ranks"),
        ({"rank": 0, "ranks": 0}, "0 <= rank < ranks"),
        ({"rank": 0, "ranks": 5}, "5 or more for 5 ranks"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(LimpetError, match=message):
        Sampler(**({"length": 8, "batch_size": 4} | arguments))


def test_a_data_set_instead_of_its_length_is_refused():
    with pytest.raises(
        LimpetError, match=r"whole number of samples \(len\(dataset\)\), .*TensorDataset"
    ):
        Sampler(TensorDataset(torch.zeros(4)), batch_size=2)


def test_numpy_sizes_become_plain_ints():
    sampler = Sampler(np.int64(8), np.int32(4), np.uint8(3), shuffle=np.True_)
    assert {type(v) for v in sampler.state_dict().values()} == {int, bool}


@pytest.mark.parametrize("steps", range(13))
def test_a_resume_continues_after_the_last_step(steps):
    """A resume at the end of an epoch begins with an empty pass."""
    sampler = Sampler(13, 4)
    batches = [batch for _ in range(3) for batch in train(sampler)]
    sampler = Sampler(13, 4)
    left = steps
    while left:
        left -= len(train(sampler, left))
    other = resumed(sampler, 13, 4)
    assert other.epochs == sampler.epochs == steps // 4
    first = train(other)
    assert len(first) == (-steps % 4 if steps else 4)
    assert [*batches[:steps], *first] == batches[: steps + len(first)]
    while other.epochs < 3:
        first += train(other)
    assert first == batches[steps:]


def test_the_rest_of_an_epoch_follows_a_break():
    sampler = Sampler(8, 2)
    first = train(sampler, 1)
    assert flat(first + train(sampler)) == order(8)
    assert flat(train(sampler)) == order(8, epoch=1)


def test_the_length_is_that_of_a_full_epoch():
    sampler = Sampler(10, 4)
    assert len(sampler) == 3
    train(sampler, 2)
    assert len(resumed(sampler, 10, 4)) == 3
    assert len(Sampler(10, 4, drop_last=True)) == 2
    assert len(Sampler(8, 4)) == 2


def test_left_counts_the_remaining_batches_of_the_epoch():
    sampler, left = Sampler(10, 4), []
    assert sampler.left == 3
    for _ in range(2):
        for _ in sampler:
            left.append(sampler.left)
            sampler.advance()
        left.append(sampler.left)
    assert left == [3, 2, 1, 0] * 2
    sampler = Sampler(10, 4, drop_last=True)
    train(sampler, 1)
    assert resumed(sampler, 10, 4, drop_last=True).left == 1


def test_counting_more_batches_than_yielded_is_an_error():
    sampler = Sampler(8, 2)
    with pytest.raises(LimpetError, match="Expected at most 0, found 1"):
        sampler.advance()
    current_pass = iter(sampler)
    next(current_pass)
    next(current_pass)
    with pytest.raises(LimpetError, match="Expected at most 2, found 3"):
        sampler.advance(3)
    assert sampler.state_dict()["samples"] == 0
    sampler.advance(0)
    sampler.advance(2)
    assert sampler.state_dict()["samples"] == 4
    with pytest.raises(LimpetError, match="batches= must be"):
        sampler.advance(-1)


def test_a_pass_from_before_the_resume_is_an_error():
    sampler = Sampler(8, 2)
    saved = sampler.state_dict()
    current_pass = iter(sampler)
    next(current_pass)
    sampler.load_state_dict(saved)
    with pytest.raises(LimpetError, match="no longer the latest"):
        next(current_pass)
    with pytest.raises(LimpetError, match="iterate over the loader again"):
        sampler.advance()


def test_an_iterator_created_before_the_resume_yields_the_rest():
    sampler = Sampler(8, 2)
    train(sampler, 1)
    other = Sampler(8, 2)
    current_pass = iter(other)
    other.load_state_dict(sampler.state_dict())
    assert flat(current_pass) == order(8)[2:]


def test_two_concurrent_passes_are_an_error():
    sampler = Sampler(8, 2)
    with pytest.raises(LimpetError, match="one pass at a time"):
        list(zip(sampler, sampler, strict=True))


def test_a_sampler_that_no_step_counts_yields_the_same_epoch_in_every_pass():
    """It is not in the state: for example to inspect the data, or for an evaluation."""
    sampler = Sampler(10, 2)
    for _ in range(4):
        assert flat(sampler) == order(10)


def test_reading_only_the_first_batches_causes_no_warning():
    sampler = Sampler(10, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            list(islice(sampler, 4))
        train(sampler)
        assert flat(train(sampler)) == order(10, epoch=1)


@pytest.mark.parametrize("counted", [0, 1])
def test_batches_that_were_not_counted_follow_in_the_next_pass(counted):
    """The sampler is in the state, but ``step`` gets ``batches=0`` or no ``batches=``."""
    sampler = Sampler(10, 2)
    current_pass = iter(sampler)
    next(current_pass)
    sampler.advance(counted)
    list(current_pass)
    for _ in range(3):
        assert flat(sampler) == order(10)[2 * counted :]


def test_a_resumed_sampler_that_no_step_counts_yields_the_same_rest_in_every_pass():
    sampler = Sampler(10, 2)
    train(sampler, 2)
    other = resumed(sampler, 10, 2)
    for _ in range(4):
        assert flat(other) == order(10)[4:]
    train(other)
    assert flat(train(other)) == order(10, epoch=1)


def test_the_rest_of_a_step_may_be_counted_after_the_epoch():
    sampler = Sampler(10, 2)
    for number, _ in enumerate(sampler):
        if number == 3:
            sampler.advance(4)
    current_pass = iter(sampler)
    next(current_pass)
    assert sampler.epochs == 0
    sampler.advance()
    assert sampler.epochs == 1
    assert sampler.state_dict() | {"epoch": 1, "samples": 0, "ahead": 0} == sampler.state_dict()
    sampler.advance()
    assert sampler.state_dict()["samples"] == 2


def test_a_state_within_a_step_across_epochs_resumes_as_one_pass():
    """With two passes, a loop that counts passes would train one epoch less."""
    sampler = Sampler(10, 2)
    for number, _ in enumerate(sampler):
        if number == 3:
            sampler.advance(4)
    next(iter(sampler))  # the first batch of the next epoch, not counted
    assert sampler.state_dict()["ahead"] == 1
    other = resumed(sampler, 10, 2)
    assert other.state_dict() == sampler.state_dict()
    batches = []
    for batch in other:
        batches.append(batch)
        if len(batches) == 4:
            other.advance(4)
    assert flat(batches) == order(10)[8:] + order(10, epoch=1)
    assert other.epochs == 1


def test_a_loaded_state_is_saved_unchanged():
    sampler = Sampler(8, 2)
    train(sampler)
    saved = sampler.state_dict()
    assert resumed(sampler, 8, 2).state_dict() == saved
    sampler.load_state_dict(saved)  # also after passes in this process
    assert sampler.state_dict() == saved


def test_an_empty_pass_that_was_not_started_is_ended_too():
    """The loop ends with the first of two samplers, and the saved state has both as finished."""
    old = Sampler(8, 2)
    train(old)
    group, pair = SamplerGroup(), [Sampler(8, 2), Sampler(8, 2)]
    for sampler in pair:
        sampler.join(group)
        sampler.load_state_dict(old.state_dict())
    assert list(zip(*pair)) == []
    assert [s.state_dict() for s in pair] == [old.state_dict()] * 2
    for sampler in pair:
        sampler.end_epoch()
    assert [s.state_dict()["epoch"] for s in pair] == [1, 1]
    assert [flat(train(resumed(s, 8, 2))) for s in pair] == [order(8, epoch=1)] * 2


def test_the_state_is_plain_and_independent_of_the_ranks():
    sampler = Sampler(9, 4, 7, rank=1, ranks=3)
    train(sampler, 2)
    assert sampler.state_dict() == {
        "length": 9, "seed": 7, "shuffle": True, "drop_last": False, "epoch": 0, "samples": 8,
        "ahead": 0, "per_step": 1,
    }  # fmt: skip


def test_the_error_lists_all_differences():
    sampler = Sampler(8, 2)
    train(sampler, 1)
    other = Sampler(9, 2, 1, shuffle=False, drop_last=True)
    with pytest.raises(PlanError) as caught:
        other.load_state_dict(sampler.state_dict())
    assert caught.value.expected == "length=8, seed=0, shuffle=True, drop_last=False"
    assert caught.value.found == "length=9, seed=1, shuffle=False, drop_last=True"
    assert train(other, 1) == [[0, 1]]  # the sampler is unchanged


def test_the_length_may_change_at_the_beginning_of_an_epoch():
    other = resumed(Sampler(8, 2), 90, 2)
    assert flat(train(other)) == order(90)
    sampler = Sampler(8, 2)
    train(sampler)
    sampler.end_epoch()
    assert flat(train(resumed(sampler, 90, 2))) == order(90, epoch=1)


@given(st.integers(1, 40), st.integers(1, 90), st.integers(1, 9), st.integers(1, 9), st.booleans())
@example(10, 7, 4, 4, True)
@example(8, 4, 4, 4, False)
@pytest.mark.slow
def test_the_length_may_change_only_at_the_end_of_an_epoch(
    length, other, batch, other_batch, drop_last
):
    """With ``drop_last``, an epoch ends if fewer samples than a batch are left."""
    if drop_last:
        batch, other_batch = min(batch, length), min(other_batch, other)
    sampler = Sampler(length, batch, drop_last=drop_last)
    for _ in sampler:
        sampler.advance()
        rest = length - sampler.state_dict()["samples"]
        if other != length and rest >= (other_batch if drop_last else 1):
            with pytest.raises(PlanError, match=f"length={length}, found length={other}"):
                resumed(sampler, other, other_batch, drop_last=drop_last)
    if drop_last and rest >= other_batch:
        return  # these smaller batches continue the epoch
    live = resumed(sampler, other, other_batch, drop_last=drop_last)
    live = resumed(live, other, other_batch, drop_last=drop_last)  # and saved before it continues
    assert (live.epochs, live.left) == (1, 0)
    assert train(live) == []
    sample_count = other // other_batch * other_batch if drop_last else other
    assert flat(train(live)) == order(other, epoch=1)[:sample_count]
    assert live.epochs == 2


def test_the_length_must_not_change_within_a_step():
    """The rest of the step would use samples of a different order."""
    sampler = Sampler(10, 2)
    for number, _ in enumerate(sampler):
        if number == 3:
            sampler.advance(4)
    with pytest.raises(PlanError, match="at the beginning or end of an epoch"):
        resumed(sampler, 12, 2)
    sampler.end_epoch()
    assert sampler.state_dict()["ahead"] == 1
    for samples in (0, 8, 10):
        with pytest.raises(PlanError, match="length=10, found length=12"):
            Sampler(12, 2).load_state_dict(sampler.state_dict() | {"samples": samples})


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1}, {"samples": -1}, {"samples": 9}, {"samples": 12, "length": 11},
        {"samples": -1, "length": -1}, {"ahead": -1}, {"per_step": 0}, {"epoch": "1"},
        {"samples": 1.0}, {"samples": None}, {"unknown": 1},
    ],
)  # fmt: skip
def test_impossible_states_are_rejected(change):
    sampler = Sampler(8, 2)
    train(sampler, 1)
    with pytest.raises(PlanError, match="state of an ElasticSampler"):
        sampler.load_state_dict(sampler.state_dict() | change)
    assert sampler.state_dict()["samples"] == 2


@pytest.mark.parametrize("state", [None, [], {}, {"epoch": 1, "samples": 0}])
def test_other_objects_are_rejected_as_states(state):
    with pytest.raises(PlanError, match="not the state of an ElasticSampler"):
        Sampler(8, 2).load_state_dict(state)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_is_independent_of_the_original(make_copy):
    sampler = Sampler(8, 2)
    train(sampler, 1)
    copied = make_copy(sampler)
    assert flat(train(copied)) == order(8)[2:]
    assert sampler.state_dict()["samples"] == 2
    assert flat(train(sampler)) == order(8)[2:]
    iter(resumed(sampler, 8, 2))
    assert "at sample 8 of epoch 0" in repr(sampler)


GOLDEN_BATCHES: dict[str, tuple[Any, Any, int | None, tuple[int, str]]] = {
    "ten, drop": ((10, 3), {"drop_last": True, "seed": -7}, None, (3, "49d94ef9c857bbbd")),
    "4 ranks": ((1000, 7), {"rank": 3, "ranks": 4, "seed": 5}, None, (143, "8aa2a7df9b1ec13f")),
    "100,000": ((10**5, 256), {"seed": 1}, None, (391, "4c7c200a58fcbef4")),
    "a billion, 64 ranks": (
        (10**9, 4096),
        {"seed": 3, "rank": 17, "ranks": 64},
        200,
        (200, "4ac4772a8537d220"),
    ),
    "long batches": (
        (60000, 20011),
        {"seed": 4, "rank": 0, "ranks": 2},
        None,
        (3, "b036109b21bdb27a"),
    ),
}
"""Arguments, the number of batches, and the digest of the batches before there were blocks."""


@pytest.mark.parametrize("name", GOLDEN_BATCHES)
def test_the_batches_are_those_of_every_earlier_release(name):
    arguments, options, batches, expected = GOLDEN_BATCHES[name]
    digest, count = sha256(), 0
    for batch in islice(limpet.ElasticSampler(*arguments, **options), batches):
        digest.update(json.dumps(batch).encode())
        count += 1
    assert (count, digest.hexdigest()[:16]) == expected


def batch_alone(sampler, epoch, start, rank, ranks):
    """Return a batch as it is computed without blocks."""
    stop = min(start + sampler.batch_size, sampler.length)
    if stop - start < sampler.batch_size:
        stop += -(stop - start) % ranks
    at = np.arange(start + rank, stop, ranks) % sampler.length
    order = permute(at, sampler.length, sampler.seed, epoch) if sampler.shuffle else at
    return order.tolist()


@settings(max_examples=60)
@given(st.data())
def test_blocks_hold_the_batches_that_are_computed_alone(data):
    """Also after resumes in the middle of a block, with other batch sizes and world sizes."""
    length = data.draw(st.sampled_from([1, 10, 97, 1000, 20011, 10**6, 10**9]), "length")
    shuffle = data.draw(st.booleans(), "shuffle")
    drop_last = data.draw(st.booleans(), "drop_last")
    state: Any = None
    for _ in range(data.draw(st.integers(1, 4), "resumes")):
        ranks = data.draw(st.sampled_from([1, 2, 3, 64]), "ranks")
        batch_size = data.draw(st.sampled_from([1, 3, 32, 257, 9001]), "batch_size")
        if batch_size < ranks or (drop_last and batch_size > length):
            continue
        rank = data.draw(st.integers(0, ranks - 1), "rank")
        sampler = limpet.ElasticSampler(
            length, batch_size, 5, shuffle=shuffle, drop_last=drop_last, rank=rank, ranks=ranks
        )
        if state is not None:
            sampler.load_state_dict(state)
        epoch, start = sampler._counted
        for batch in islice(sampler, data.draw(st.integers(1, 300), "batches")):
            assert batch == batch_alone(sampler, epoch, start, rank, ranks)
            full_batch = -(-batch_size // ranks)  # the last batch of an epoch may be shorter
            assert sampler._blocks._rows.nbytes <= 8 * max(8192, full_batch)
            start = min(start + batch_size, length)
            sampler.advance(1)
        state = sampler.state_dict()
