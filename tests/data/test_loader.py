"""``limpet.DataLoader``: parts of the ranks, arguments, states, refusals, and random numbers.

``tests/loops`` trains with it, in processes that are killed.
"""

import random
import warnings
from collections import Counter, UserDict, deque
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils import data

import limpet
from limpet.errors import InexactResume, LimpetError, PlanError
from limpet.generators import capture_states, restore_states
from limpet.storage.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _generators():
    before = capture_states()
    yield
    restore_states(before)


def make(length=8, batch_size=2, **options):
    """Return a loader of the numbers below ``length``."""
    if "total_batch_size" not in options and "batch_sampler" not in options:
        options["batch_size"] = batch_size
    if not {"sampler", "batch_sampler", "shuffle"} & options.keys():
        options["shuffle"] = True
    return limpet.DataLoader(range(length), **({"seed": 1} | options))


def read(loader, batches=None, *, count=True):
    """Return, and count, up to ``batches`` batches of one pass."""
    seen = []
    for batch in islice(loader, batches):
        seen.append(batch.tolist())
        if count:
            loader.count(1)
    return seen


def flat(batches):
    return list(chain.from_iterable(batches))


def resumed(loader, *arguments, **options):
    other = make(*arguments, **options)
    other.load_state_dict(loader.state_dict())
    return other


# -- ranks -----------------------------------------------------------------------------------------


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 8), st.booleans())
@example(1, 4, 4, False)
@example(3, 8, 8, False)
@settings(max_examples=40)
def test_ranks_divide_an_epoch(length, total, ranks, drop_last):
    total = max(total, ranks)
    loaders = [
        make(length, total_batch_size=total, drop_last=drop_last, rank=r, ranks=ranks)
        for r in range(ranks)
    ]
    order = flat(read(make(length, 1), count=False))
    parts = [read(loader) for loader in loaders]
    assert len({str(loader.state_dict()) for loader in loaders}) == 1
    assert {len(p) for p in parts} == {len(loaders[0])}
    for number, batch in enumerate(zip(*parts)):
        expected = order[number * total : (number + 1) * total]
        padding = -len(expected) % ranks if len(expected) < total else 0
        expected += [order[i % length] for i in range(padding)]
        assert Counter(flat(batch)) == Counter(expected)
        assert max(map(len, batch)) - min(map(len, batch)) <= (0 if padding else 1)
    samples = length // total * total if drop_last else length
    assert len(loaders[0]) == (length // total if drop_last else -(-length // total))
    assert len({*flat(flat(parts))}) == samples


@given(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=5))
@settings(max_examples=30)
def test_the_number_of_ranks_may_change(length, changes):
    """Each epoch has every sample, and its steps are the same."""
    for sampler in (data.RandomSampler(range(length)), None):
        options = {"total_batch_size": 5, **({"sampler": sampler} if sampler else {})}
        whole, state, steps = read(make(length, **options)), None, []
        for ranks, limit in [*changes, (3, 99)]:
            loaders = [make(length, **options, rank=r, ranks=ranks) for r in range(ranks)]
            if state is not None:
                [loader.load_state_dict(state) for loader in loaders]
            steps += map(flat, zip(*(read(loader, limit) for loader in loaders)))
            state = loaders[0].state_dict()
        assert [{*step} for step in steps[:-1]] == [{*step} for step in whole[:-1]]
        assert {*whole[-1]} <= {*steps[-1]}  # and what pads it


def test_a_pass_reads_the_rank_from_torch_distributed(monkeypatch):
    loader = make(8, 2, shuffle=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *a: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *a: 3)
    assert read(loader) == [[1, 4], [7]]  # 6 per step; 6, 7, and one that pads
    assert loader.samples_per_step == 6
    with pytest.raises(LimpetError, match="3 or more for 3 ranks"):
        read(make(8, total_batch_size=2))
    with pytest.raises(LimpetError, match="give seed= to a loader outside of the state"):
        read(make(8, seed=None))


def test_a_batch_sampler_is_divided_among_the_ranks():
    batches = [[0, 1, 2, 3], [4, 5], [6]]
    parts = [read(make(8, batch_sampler=batches, rank=r, ranks=2)) for r in range(2)]
    assert parts == [[[0, 2], [4], [6]], [[1, 3], [5], [6]]]


# -- arguments -------------------------------------------------------------------------------------

DISTRIBUTED = data.DistributedSampler(range(8), 2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": DISTRIBUTED}, "A DistributedSampler is refused: remove it"),
        (
            {"batch_sampler": data.BatchSampler(DISTRIBUTED, 2, False)},
            "A DistributedSampler is refused: remove it",
        ),
        ({"in_order": False, "num_workers": 1}, "in_order=False is refused"),
        ({"total_batch_size": 8, "batch_size": 4}, "total_batch_size= replaces batch_size="),
        ({"total_batch_size": 8, "batch_sampler": [[0]]}, "total_batch_size= replaces batch_size="),
        ({"total_batch_size": 0}, "total_batch_size= must be"),
        ({"total_batch_size": 2.5}, "total_batch_size= must be"),
        ({"seed": "x"}, "seed= must be an int"),
        ({"seed": 1.5}, "seed= must be an int"),
        ({"rank": 0}, "0 <= rank < ranks"),
        ({"ranks": 2}, "0 <= rank < ranks"),
        ({"rank": 2, "ranks": 2}, "0 <= rank < ranks"),
        ({"rank": -1, "ranks": 2}, "0 <= rank < ranks"),
        ({"rank": 0, "ranks": 0}, "0 <= rank < ranks"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_sentence(options, message):
    with pytest.raises(LimpetError, match=message) as caught:
        limpet.DataLoader(range(8), **options)
    assert "\n" not in str(caught.value)
    assert "Expected" not in str(caught.value)


def test_the_arguments_are_those_of_torch():
    """Also by position, and with torch's own errors."""
    loader = limpet.DataLoader(range(10), 4, False)
    assert read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (len(loader), loader.batch_size, len(loader.sampler)) == (3, 4, 10)
    assert read(make(10, 4, drop_last=True, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [int(x) for x in make(3, None, shuffle=False)] == [0, 1, 2]
    with pytest.raises(ValueError, match="mutually exclusive"):
        limpet.DataLoader(range(8), sampler=[1], shuffle=True)
    with pytest.raises(TypeError, match="unexpected"):
        limpet.DataLoader(range(8), batchsize=4)


def test_a_seed_decides_the_order():
    torch.manual_seed(3)
    first, second = make(99, seed=None), make(99, seed=None, generator=torch.Generator())
    assert read(make(99), count=False) == read(make(99), count=False)
    assert read(make(99, seed=2**64 + 1), count=False) == read(make(99), count=False)
    assert read(first, count=False) != read(second, count=False)
    torch.manual_seed(3)
    assert read(make(99, seed=None), count=False) == read(first, count=False)
    assert make(seed=None, generator=torch.Generator().manual_seed(5)).key == make(seed=5).key


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(13))
def test_a_resume_continues_after_the_last_step(steps):
    whole = make(13, 4)
    batches = [batch for _ in range(3) for batch in read(whole)]
    loader, left = make(13, 4), steps
    while left:
        left -= len(read(loader, left))
    other = resumed(loader, 13, 4)
    assert (len(other), other.epoch) == (4, max(0, steps - 1) // 4)
    seen = read(other)
    assert len(seen) == (-steps % 4 if steps else 4)
    while len(seen) < 12 - steps:
        seen += read(other)
    assert seen == batches[steps:]


def test_batches_that_no_step_counts_come_again():
    loader, order = make(10), flat(read(make(10)))
    for _ in range(3):
        assert flat(read(loader, 4, count=False)) == order[:8]
        assert flat(read(loader, count=False)) == order
    read(loader, 1)
    assert flat(read(loader, count=False)) == order[2:]
    assert flat(read(loader, count=False)) == order[2:]
    assert flat(read(loader)) == order[2:]
    assert flat(read(loader)) != order


def test_the_batch_is_numbered_in_its_epoch():
    loader, numbers = make(10, 4), []
    read(loader, 1)
    for _ in resumed(loader, 10, 4):
        numbers.append(loader.batch)
    other = resumed(loader, 10, 4)
    assert [other.batch for _ in other] == [1, 2]


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.booleans())
@settings(max_examples=60)
def test_the_batches_that_remain_can_be_counted(length, size, steps, other_size, drop_last):
    """Also those of another size, and of more samples: the epoch keeps its length."""
    loader = make(length, size, drop_last=drop_last)
    seen = read(loader, steps)
    assert loader.batches_done == len(seen)
    if seen:
        other = resumed(loader, length + 9, other_size, drop_last=drop_last)
        remaining = len(other) - other.batches_done
        assert remaining == len(read(other))


def test_the_batches_that_remain_can_be_counted_if_they_are_the_positions():
    sampler = data.BatchSampler(range(10), 4, False)
    for loader in (limpet.DataLoader(range(10), batch_sampler=sampler, seed=1), lines(seed=1)):
        assert len(read(loader, 2)) == loader.batches_done == 2


def test_counting_more_batches_than_yielded_is_an_error():
    loader = make()
    loader.attach("data", object())
    with pytest.raises(LimpetError, match=r"loader 'data' has yielded.*at most 0, found 1"):
        loader.check(1)
    read(loader, 2, count=False)
    with pytest.raises(LimpetError, match="at most 2, found 3"):
        loader.check(3)
    loader.check(2)


def test_a_pass_from_before_a_resume_is_an_error():
    loader = make()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(LimpetError, match=r"began before a resume.* Iterate over the loader again"):
        next(batches)


def test_two_concurrent_passes_are_an_error():
    loader = make()
    with pytest.raises(LimpetError, match="or a later pass"):
        list(zip(loader, loader))


def step_with(state, **counts):
    with limpet.Checkpointer(MemoryStore(), state) as ckpt:
        ckpt.step(**counts)


def test_a_loader_that_has_yielded_nothing_is_an_error_at_the_first_step():
    train, evaluation = make(), make()
    next(iter(train))
    with pytest.raises(LimpetError, match=r"'data/val' has yielded.* evaluation into the state"):
        step_with({"train": train, "data": {"val": evaluation}})
    assert train.state_dict()["at"] == 0  # neither has advanced
    next(iter(train))
    step_with({"train": train, "val": evaluation}, batches=0)


def test_a_count_that_does_not_fit_is_reported():
    state = {"loader": make(), "x": torch.zeros(1)}
    with (
        limpet.Checkpointer(MemoryStore(), state) as ckpt,
        pytest.raises(LimpetError, match=r"have not counted all batches.*step\(batches=k\)"),
    ):
        for _ in ckpt.epochs(2):
            for _ in state["loader"]:
                if state["loader"].batch % 2:
                    ckpt.step()


@pytest.mark.parametrize(
    "loader",
    [data.DataLoader(range(8)), data.DataLoader(range(8), sampler=DISTRIBUTED)],
    ids=["plain", "distributed"],
)
def test_a_loader_of_torch_is_refused_in_a_state_and_can_be_converted(loader):
    with pytest.raises(PlanError, match=r"data/train in the state is a PyTorch DataLoader.*elast"):
        limpet.Checkpointer(MemoryStore(), {"data": {"train": loader}})
    converted = limpet.elastic(loader)
    with limpet.Checkpointer(MemoryStore(), {"data": {"train": converted}}) as ckpt:
        next(iter(converted))
        ckpt.step()


def test_a_replaced_loader_continues_at_the_position_with_other_data():
    """Frameworks make a new loader for each epoch. The one in the state takes it over."""

    def train(ckpt, loader, epochs):
        seen = []
        for epoch in epochs:
            loader.replace(limpet.DataLoader(range(4 + 2 * epoch), batch_size=2, shuffle=True))
            for batch in loader:
                seen.append(batch.tolist())
                ckpt.step()
            ckpt.end_epoch()
        return seen

    store = MemoryStore()
    loader = limpet.DataLoader([7], seed=3)
    with limpet.Checkpointer(store, {"loader": loader}, save=limpet.EverySteps(3)) as ckpt:
        whole = train(ckpt, loader, range(3))
    for part, count in ((whole[:2], 4), (whole[2:5], 6), (whole[5:], 8)):
        assert sorted(chain.from_iterable(part)) == [*range(count)]
    again = limpet.DataLoader(range(100), shuffle=True)
    with limpet.Checkpointer(store, {"loader": again}) as ckpt:
        ckpt.resume(at=3)  # in the second epoch
        assert train(ckpt, again, range(1, 3)) == whole[3:]


def test_a_converted_loader_has_the_arguments():
    options = {"batch_size": 3, "drop_last": True, "num_workers": 1, "prefetch_factor": 3}
    converted = limpet.elastic(data.DataLoader(range(10), shuffle=True, **options), seed=4)
    assert {name: getattr(converted, name) for name in options} == options
    own = limpet.DataLoader(range(10), shuffle=True, seed=4, **options)
    assert read(converted) == read(own)
    assert limpet.elastic(own) is own
    with pytest.raises(LimpetError, match=r"seed= and ranks= must be given to the limpet"):
        limpet.elastic(own, seed=5, ranks=2)
    parts = [
        limpet.elastic(
            data.DataLoader(range(10), batch_size=9), total_batch_size=4, rank=rank, ranks=2
        )
        for rank in range(2)
    ]
    assert [read(part) for part in parts] == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    with pytest.raises(LimpetError, match="total_batch_size= replaces batch_size= and batch_samp"):
        limpet.elastic(data.DataLoader(range(4), batch_sampler=[[1]]), total_batch_size=4)
    batches = limpet.elastic(data.DataLoader(range(4), batch_sampler=[[1, 2], [3]]))
    assert read(batches) == [[1, 2], [3]]
    sampler = data.DistributedSampler(range(8), 2, 1, seed=9, drop_last=True)
    converted = limpet.elastic(data.DataLoader(range(8), batch_size=4, sampler=sampler))
    assert (converted.key, converted.drop_last) == (9, True)
    for other in (range(8), None, [1, 2]):
        with pytest.raises(LimpetError, match=r"elastic\(\) takes a DataLoader, not "):
            limpet.elastic(other)


def test_elastic_refuses_a_loader_whose_class_makes_the_batches():
    """Its method would not be called, and the batches would be others, silently."""

    class Doubled(data.DataLoader):
        def __iter__(self):
            yield from (2 * batch for batch in super().__iter__())

    class Renamed(Doubled):
        pass

    class Collating(data.DataLoader):
        def __init__(self, dataset):
            super().__init__(dataset, batch_size=2, collate_fn=sum)

    with pytest.raises(LimpetError, match=r"would not call Doubled.__iter__: do that in the data"):
        limpet.elastic(Renamed(range(4)))
    assert list(limpet.elastic(Collating(range(4)))) == [1, 5]


# -- states ----------------------------------------------------------------------------------------


class Lines(data.IterableDataset):
    def __iter__(self):
        yield from range(8)


def lines(**options):
    return limpet.DataLoader(Lines(), batch_size=2, **options)


@pytest.mark.parametrize(
    ("make_other", "message"),
    [
        (lambda: make(seed=2), "Expected seed 1, found seed 2"),
        (lambda: make(shuffle=False), "Expected order shuffled, found order sequential"),
        (lambda: make(sampler=range(8)), "Expected order shuffled, found order sampler"),
        (lambda: make(7), "Expected length 8, found length 7"),
        (lambda: make(batch_sampler=[[0, 1]]), "found order batch_sampler"),
        (lambda: lines(seed=1), "Expected order shuffled, found order stream"),
    ],
)
def test_a_position_of_other_batches_is_refused(make_other, message):
    store, state = MemoryStore(), {"loader": make()}
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
        next(iter(state["loader"]))
        ckpt.step()
    other = {"loader": make_other()}
    before = other["loader"].state_dict()
    with (
        limpet.Checkpointer(store, other) as ckpt,
        pytest.raises(PlanError, match=rf"would yield other batches.*{message}"),
    ):
        ckpt.resume()
    assert {**other["loader"].state_dict(), "seed": 0} == {**before, "seed": 0}


def test_between_two_epochs_another_dataset_and_order_are_accepted():
    loader = make()
    read(loader)
    loader.begin_epoch(1)
    for other in (make(4), make(shuffle=False), make(batch_sampler=[[0, 1]])):
        other.load_state_dict(loader.state_dict())
        read(other)
        assert other.epoch == 1


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"rank": 0, "ranks": 2}])
def test_a_stream_with_other_workers_or_ranks_is_refused(options):
    stream = lines(num_workers=1)
    read(stream, 2)
    other = lines(**({"num_workers": 1} | options))
    with pytest.raises(PlanError, match=r"Expected rank, ranks, workers \[0, 1, 1\], found"):
        other.load_state_dict(stream.state_dict())
    del stream, other


@pytest.mark.parametrize(
    "change",
    [{"at": -1}, {"epoch": "1"}, {"seed": None}, {"per_step": -1}, {"at": True}, {"seed": 1.0}],
)
def test_what_is_no_state_is_refused(change):
    loader = make()
    for state in (loader.state_dict() | change, {}, None, [], {"seed": 1}):
        with pytest.raises(PlanError, match=r"not the state of a limpet\.DataLoader"):
            loader.load_state_dict(state)


def test_a_sampler_that_draws_another_order_is_refused():
    class Unseeded(data.Sampler):
        rng = np.random.default_rng()

        def __len__(self):
            return 64

        def __iter__(self):
            return iter(self.rng.permutation(64).tolist())

    loader = make(64, sampler=Unseeded())
    read(loader, 2)
    with pytest.raises(LimpetError, match="draws another order of epoch 0 than before"):
        read(resumed(loader, 64, sampler=Unseeded()))


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler", "epochs"])
def test_a_sampler_that_cannot_draw_its_order_again_is_refused_before_the_first_step(kind):
    """Otherwise, a resume at the beginning of an epoch would continue in another order."""

    class Own(data.Sampler):
        def __init__(self):
            self.rng, self.epochs = np.random.default_rng(0), 0

        def __iter__(self):
            self.epochs += 1
            rng = np.random.default_rng(self.epochs) if kind == "epochs" else self.rng
            return iter(rng.permutation(8).tolist())

    batches = {"batch_sampler": data.BatchSampler(Own(), 2, False)}
    loader = make(**(batches if kind == "batch_sampler" else {"sampler": Own()}))
    assert flat(loader) != flat(loader)  # outside of a state, any order will do
    with (
        limpet.Checkpointer(MemoryStore(), {"loader": loader}, save=limpet.Never()),
        pytest.raises(LimpetError, match="draws another order of epoch 0 than before"),
    ):
        read(loader)


def test_a_sampler_for_one_pass_is_not_drawn_twice():
    loader = make(sampler=iter([3, 1, 2]))
    with limpet.Checkpointer(MemoryStore(), {"loader": loader}, save=limpet.Never()):
        assert flat(read(loader)) == [3, 1, 2]


def test_a_sampler_gives_another_order_in_each_epoch():
    class Ordered(data.Sampler):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(random.Random(self.epoch).sample(range(64), 64))

    generator = torch.Generator()
    for sampler in (
        Ordered(),
        data.RandomSampler(range(64)),
        data.RandomSampler(range(64), generator=generator),
    ):
        loader = make(64, sampler=sampler)
        orders = [flat(read(loader)) for _ in range(3)]
        assert len({*map(str, orders)}) == 3
        assert [sorted(order) for order in orders] == [[*range(64)]] * 3


def changes_of_a_resume(before, after):
    """Return what the event of a resume says, and train two steps, the second one resumed."""
    store, found = MemoryStore(), []
    for loader in (before, after):
        with limpet.attach(lambda name, fields: found.append((name, fields.get("changes")))):
            save = limpet.EverySteps(1)
            with limpet.Checkpointer(store, {"loader": loader}, save=save) as ckpt:
                ckpt.resume()
                next(iter(loader))
                ckpt.step()
    return [changes for name, changes in found if name == "resumed"]


def test_a_resume_says_that_the_batch_size_has_changed():
    assert changes_of_a_resume(make(999, 128), make(999, 64)) == [["64 samples per step, was 128"]]
    assert changes_of_a_resume(make(999, 64), make(999, total_batch_size=64)) == [[]]


@given(st.integers(1, 99), st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), max_size=5))
@settings(max_examples=30)
def test_the_batch_size_may_change(length, changes):
    seen, state = [], None
    for size, limit in [*changes, (7, 99)]:
        loader = make(length, size)
        if state is not None:
            loader.load_state_dict(state)
        seen += flat(read(loader, limit))
        state = loader.state_dict()
    assert seen == flat(read(make(length, 1)))


# -- random numbers --------------------------------------------------------------------------------


def draw():
    return random.random(), float(np.random.random()), torch.rand(()).item()


class Noisy(data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.tensor([*draw(), i])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [None, data.RandomSampler(range(6))])
def test_a_loader_outside_the_state_changes_no_generator(workers, sampler):
    options = {"sampler": sampler} if sampler else {"shuffle": True}
    loader = limpet.DataLoader(Noisy(), batch_size=4, num_workers=workers, **options)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = [draw() for _ in range(4)]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    found = [draw() for _ in loader]
    next(iter(loader))
    assert [*found, draw(), draw()] == expected


class Shuffled(data.IterableDataset):
    """A stream whose ``__iter__`` draws at once: it is no generator."""

    def __init__(self, has_state):
        self.at = 0
        if has_state:
            self.state_dict, self.load_state_dict = lambda: {"at": self.at}, self.load

    def load(self, state):
        self.at = state["at"]

    def __iter__(self):
        return iter([*random.sample(range(6), 6), *torch.randperm(6)])


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_stream_that_draws_before_its_first_sample_depends_on_its_position(options, has_state):
    loader = limpet.DataLoader(Shuffled(has_state), batch_size=4, seed=1, **options)
    passes = []
    for disturbance in (0, 0, 5):
        [draw() for _ in range(disturbance)]
        passes.append([batch.tolist() for batch in loader])
    assert passes[0] == passes[1] == passes[2]


class Partial(data.IterableDataset):
    """A stream whose state lacks its generator."""

    def __init__(self):
        self.at, self.rng = 0, random.Random(0)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield self.rng.random()


@pytest.mark.parametrize("workers", [0, 1])
def test_each_pass_begins_with_the_stream_as_it_was_made_also_if_its_state_lacks_a_part(workers):
    options = {"batch_size": 4, "num_workers": workers, "persistent_workers": bool(workers)}
    loader = limpet.DataLoader(Partial(), seed=1, **options)
    passes = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert passes[0] == passes[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_data_pipe_is_refused_where_pytorch_would_divide_it():
    def read(**options):
        pipe = data.datapipes.iter.IterableWrapper(range(6)).shuffle().sharding_filter()
        return flat(batch.tolist() for batch in limpet.DataLoader(pipe, 2, seed=1, **options))

    assert sorted(read()) == [*range(6)]
    assert read() == read()
    for options in ({"num_workers": 1}, {"rank": 0, "ranks": 2}):
        with pytest.raises(LimpetError, match="is not divided among workers and ranks"):
            read(**options)


def test_a_loader_keeps_its_seed_after_its_training():
    """Also under another key: a restart has the seed from the version of the first training."""
    found = []
    first, second = MemoryStore(), MemoryStore()
    for _ in range(2):
        loader = limpet.DataLoader(range(8), batch_size=4, shuffle=True)
        with limpet.Checkpointer(first, {"a": loader}, save=limpet.AtEnd()) as ckpt:
            for _ in ckpt.epochs(1):
                for _ in loader:
                    ckpt.step()
        with limpet.Checkpointer(second, {"b": loader}, save=limpet.Never()) as ckpt:
            for _ in ckpt.epochs(1):
                for batch in loader:
                    found.append(batch.tolist())
                    ckpt.step()
    assert found[:2] == found[2:]


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_loop_of_steps_may_begin_a_pass_for_each_batch(stop):
    """Also after a resume at the end of an epoch, from which a pass is empty."""

    def run(store, count):
        loader = limpet.DataLoader(range(8), batch_size=4, shuffle=True, seed=1)
        with limpet.Checkpointer(store, {"loader": loader}, save=limpet.EverySteps(1)) as ckpt:
            for _ in ckpt.steps(count):
                yield next(iter(loader)).tolist()
                ckpt.step()

    store = MemoryStore()
    assert [*run(store, stop), *run(store, 6)] == [*run(MemoryStore(), 6)]


def test_a_loader_in_the_state_seeds_each_step_by_its_key():
    """Two loaders with one seed give different numbers, and the last one decides."""
    found = {}
    for name in ("a", "b"):
        loader = limpet.DataLoader(Noisy(), batch_size=2, seed=7)
        with limpet.Checkpointer(MemoryStore(), {name: loader}):
            numbers = found[name] = []
            for batch in loader:
                numbers.append((batch[0, :3].tolist(), draw()))
            numbers.append(("end", draw()))
            draw()
        before = draw()
        list(loader)  # the training has ended
        assert draw() != before
    draws = [numbers for _, numbers in found["a"] + found["b"]]
    assert len({*draws}) == 8
    assert [batch for batch, _ in found["a"]] == [batch for batch, _ in found["b"]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["sample", "batch", "call"])
def test_a_dataset_with_a_generator_of_its_own_causes_one_warning_with_its_line(workers, kind):
    class Own(data.Dataset):
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"x": [self.rng.normal(), i]}

    class OwnByBatch(Own):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    class Seeded(Own):
        def __getitem__(self, i):
            self.rng = np.random.default_rng(torch.initial_seed())
            return super().__getitem__(i)

    dataset = {"sample": Own, "batch": OwnByBatch, "call": Seeded}[kind]()
    loader = limpet.DataLoader(dataset, batch_size=2, num_workers=workers, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InexactResume)
        for _ in range(2):
            list(loader)
    found = [w for w in caught if w.category is InexactResume]
    if kind == "call":
        assert not found
        return
    [warning] = found
    method = "__getitem__" if kind == "sample" else "__getitems__"
    assert f"{method} gave two different samples for one index" in str(warning.message)
    function = getattr(type(dataset), method).__code__
    assert (warning.filename, warning.lineno) == (__file__, function.co_firstlineno)


@dataclass
class Sample:
    image: object
    label: object


class Keyed(UserDict):
    """As the results of tokenizers are."""


NAN = "nan"
SAMPLES = {
    "image": lambda noise: Image.new("L", (2, 2), int(noise * 250)),
    "dataclass": lambda noise: Sample(torch.full((2,), noise), float(NAN)),
    "dataclass of objects": lambda noise: Sample(random.Random(), Sample(object(), noise)),
    "object array": lambda noise: np.array([f"text {noise}", np.arange(2), None], object),
    "structured array": lambda noise: np.array([(1, noise)], "i1, f8"),
    "array": lambda noise: np.array([-0.0, float(NAN), noise]),
    "mapping": lambda noise: Keyed(x=torch.full((2,), noise), y=float(NAN)),
    "keys": lambda noise: {object(): 1, float(NAN): noise},
    "queue": lambda noise: deque([float(NAN), object(), noise]),
    "tuple": lambda noise: (torch.tensor([float(NAN), -0.0]), complex(NAN), noise, "text"),
    "set": lambda noise: {"text", noise},
    "set of objects": lambda noise: ({object(), float(NAN)}, noise),
    "sparse tensor": lambda noise: [torch.eye(2).to_sparse(), noise],
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_only_a_sample_that_differs_causes_a_warning(kind):
    """It is made again for each fetch, and may have what is never equal."""

    class Made(data.Dataset):
        def __init__(self, *noises):
            self.noises = [*noises]

        def __len__(self):
            return 1

        def __getitem__(self, _):
            return SAMPLES[kind](self.noises.pop(0))

    options = {"batch_size": None, "seed": 1, "collate_fn": lambda sample: sample}
    with warnings.catch_warnings():
        warnings.simplefilter("error", InexactResume)
        list(limpet.DataLoader(Made(0.5, 0.5, 0.5, 0.5), **options))
    with pytest.warns(InexactResume):
        list(limpet.DataLoader(Made(0.25, 0.5, 0.5, 0.5), **options))


def test_the_seed_of_a_sample_is_one_of_the_epoch_and_sample_only():
    """Not of the order, the batch size, the workers, or what was drawn before."""
    expected = {}
    for options in ({"batch_size": 1}, {"batch_size": 4, "shuffle": True}, {"num_workers": 2}):
        loader = limpet.DataLoader(Noisy(), seed=1, **options)
        for epoch in range(2):
            loader.begin_epoch(epoch)
            for row in chain.from_iterable(loader):
                *numbers, i = row.tolist()
                assert expected.setdefault((epoch, int(i)), numbers) == numbers
    assert len({str(numbers) for numbers in expected.values()}) == 12


def test_steps_of_a_model_are_equal_after_any_history():
    """Dropout, with a loader in the state."""
    found = []
    for history in (0, 5):
        torch.manual_seed(1)
        model, loader = nn.Dropout(0.5), make(8, seed=3)
        torch.rand(history)
        with limpet.Checkpointer(MemoryStore(), {"loader": loader}) as ckpt:
            for _ in loader:
                found.append(model(torch.ones(64)).tolist())
                torch.rand(history)
                ckpt.step()
    assert found[:4] == found[4:]
    assert len({str(x) for x in found}) == 4
