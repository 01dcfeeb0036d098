"""A stopped and resumed run ends bit for bit like an uninterrupted run.

Each stop is simulated in this process: all objects are dropped, created again with different random
numbers, and resumed. ``tests/crash`` kills real processes.
"""

import gc
import random
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import limpet
from limpet.errors import LimpetError, PlanError
from limpet.storage.memory import MemoryStore
from limpet.storage.open import open_store

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@dataclass(frozen=True)
class Options:
    """A small training. A step has ``per_step`` batches, or fewer at an epoch's end (``flush``)."""

    optimizer: str = "sgd"
    length: int = 11
    batch: int = 4
    drop_last: bool = False
    workers: int = 0
    persistent: bool = False
    per_step: int = 1
    flush: bool = False
    noisy: bool = False
    epochs: int = 3

    def __str__(self):
        plain = Options()
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k))


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set. With ``noisy``, samples use random numbers of the global generators."""

    def __init__(self, options):
        g = torch.Generator().manual_seed(7)
        self.x = torch.randn(options.length, 4, generator=g)
        self.noisy = options.noisy

    def __getitem__(self, i):
        x = self.x[i]
        noise = torch.randn(4) + random.random() + np.random.normal() if self.noisy else 0.0
        return x + noise, x.sum()


@dataclass
class Training:
    options: Options
    losses: list[float] = field(default_factory=list)
    batches: int = 0
    fail_at: int = -1
    fail_late: bool = False

    def __post_init__(self):
        o = self.options
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.optimizer: torch.optim.Optimizer
        self.scheduler: torch.optim.lr_scheduler.LRScheduler
        if o.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.7)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, 0.05, total_steps=100
            )
        self.progress = limpet.Progress()
        self.sampler = limpet.ElasticSampler(o.length, o.batch, seed=3, drop_last=o.drop_last)
        self.loader = DataLoader(
            Points(o),
            batch_sampler=self.sampler,
            num_workers=o.workers,
            persistent_workers=o.persistent,
        )
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
            "sampler": self.sampler,
            "rng": limpet.RNG(),
        }

    def backward(self, batch):
        x, y = batch
        if self.batches == self.fail_at and not self.fail_late:
            raise ZeroDivisionError
        self.batches += 1
        x = x + random.gauss(0, 0.1) + float(np.random.normal()) * 0.1 + 0.1 * torch.randn_like(x)
        loss = (self.model(x).squeeze(1) - y).square().mean()
        loss.backward()
        if self.batches == self.fail_at + 1 and self.fail_late:
            raise ZeroDivisionError
        return loss.item()

    def run(self, ckpt, stop=1 << 30):
        window: list[float] = []
        while self.progress.epoch < self.options.epochs:
            for batch in self.loader:
                window.append(self.backward(batch))
                last = self.options.flush and len(window) == self.sampler.left
                if len(window) < self.options.per_step and not last:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.losses += window
                ckpt.step({"loss": window[-1]}, batches=len(window))
                window = []
                if self.progress.step == stop:
                    return
            ckpt.end_epoch()

    def digest(self):
        """Return a digest of everything that determines the rest of the training."""
        parts = [*self.model.state_dict().values(), torch.get_rng_state()]
        for slots in self.optimizer.state_dict()["state"].values():
            parts += [v for v in slots.values() if isinstance(v, torch.Tensor)]
        digest = sha256(b"".join(p.numpy().tobytes() for p in parts))
        generator_states = (random.getstate(), np.random.get_state()[1].tobytes())
        plain_states = (
            self.scheduler.state_dict(),
            self.progress.state_dict(),
            self.sampler.state_dict(),
        )
        digest.update(repr((generator_states, plain_states)).encode())
        return digest.hexdigest()


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def run_uninterrupted(options):
    seed_all(0)
    training = Training(options)
    with limpet.Checkpointer(MemoryStore(), training.state) as ckpt:
        training.run(ckpt)
    return training


def run_until_stop(options, store, every, stop):
    seed_all(0)
    training = Training(options)
    with limpet.Checkpointer(store, training.state, save=limpet.EverySteps(every)) as ckpt:
        training.run(ckpt, stop)
    return training


def resume_and_finish(options, store):
    """Resume and finish a training. Return it, and the step at which it resumed."""
    seed_all(99)  # a new process has different random numbers
    training = Training(options)
    torch.randn(5)
    with limpet.Checkpointer(store, training.state, save=limpet.EverySteps(1000)) as ckpt:
        ckpt.resume()
        start = training.progress.step
        training.run(ckpt)
    return training, start


WITHOUT_WORKERS = [
    Options(),
    Options(noisy=True, drop_last=True, optimizer="adamw"),
    Options(per_step=2),
    Options(per_step=3, length=19, drop_last=True),
    Options(per_step=4, length=18, epochs=4),
    Options(per_step=2, flush=True, noisy=True),
    Options(batch=12),
]
WITH_WORKERS = [
    Options(workers=2, epochs=2),
    Options(workers=2, epochs=3, persistent=True, drop_last=True),
    Options(workers=2, epochs=2, per_step=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [*WITHOUT_WORKERS, *WITH_WORKERS], ids=str)
def test_a_stop_at_any_step_ends_with_the_same_bits(options):
    reference = run_uninterrupted(options)
    expected = reference.digest()
    assert len(set(reference.losses)) == len(reference.losses)
    for saved in range(1, reference.progress.step + 1):
        store = MemoryStore()
        # up to two more steps are lost
        stop = min(saved + saved % 3, 2 * saved - 1, reference.progress.step)
        first = run_until_stop(options, store, saved, max(stop, saved))
        second, start = resume_and_finish(options, store)
        assert start == saved
        done = len(reference.losses) - len(second.losses)
        assert first.losses == reference.losses[: len(first.losses)]
        assert second.losses == reference.losses[done:]
        assert second.digest() == expected, f"saved at step {saved}"


@pytest.mark.slow
@pytest.mark.parametrize("options", [Options(), Options(per_step=2, noisy=True)], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_an_exception_in_any_step_ends_with_the_same_bits(options, late):
    """The state before the step is saved, whatever the loop and the loader have done since.

    ``late``: the exception occurs within the step, after the backward pass.
    """
    reference = run_uninterrupted(options)
    expected = reference.digest()
    for raising in range(1, len(reference.losses)):
        store = MemoryStore()
        seed_all(0)
        first = Training(options)
        first.fail_at, first.fail_late = raising, late
        ckpt = limpet.Checkpointer(store, first.state, save=limpet.OnException())
        with pytest.raises(ZeroDivisionError), ckpt:
            first.run(ckpt)
        if len(first.losses) == 0:
            assert list(store.list("")) == []  # before the first step, nothing can be saved
            continue
        second, start = resume_and_finish(options, store)
        assert start == len(first.losses) // options.per_step
        assert first.losses + second.losses == reference.losses
        assert second.digest() == expected, f"raised in batch {raising}"


LOADERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 0, "generator": torch.Generator()},
]


class IndexDataset(Dataset[int]):
    """A data set of pairs: the index, and the seed of the worker."""

    def __getitem__(self, i):
        worker = torch.utils.data.get_worker_info()
        return i, -1 if worker is None else worker.seed - worker.id


def generators():
    state = limpet.RNG().state_dict()
    return repr((state["python"], state["numpy"][1].tolist(), state["torch"].tolist()))


@pytest.mark.parametrize("options", LOADERS, ids=["0", "1", "2", "persistent", "own generator"])
@pytest.mark.parametrize("steps", [1, 3, 4, 5])
def test_the_first_batch_finds_the_restored_generators(options, steps):
    sampler = limpet.ElasticSampler(8, 2)
    for _ in range(steps):
        if sampler.left in (0, 4):
            batches = iter(sampler)
        next(batches)
        sampler.advance()
    other = limpet.ElasticSampler(8, 2)
    loader = DataLoader(IndexDataset(), batch_sampler=other, **options)
    other.load_state_dict(sampler.state_dict())
    seed_all(5)
    restored = generators()
    for _ in loader:
        assert generators() == restored
        other.advance()
    assert generators() == restored  # also after an empty pass


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_that_starts_an_epoch_draws_a_seed(workers):
    """Otherwise the seeds of the workers would be the same in every epoch."""
    sampler = limpet.ElasticSampler(8, 2)
    other = limpet.ElasticSampler(8, 2)
    other.load_state_dict(sampler.state_dict())
    loader = DataLoader(IndexDataset(), batch_sampler=other, num_workers=workers)
    seed_all(5)
    seeds, states = [], []
    for _ in range(3):
        for _, seed in loader:
            seeds.append(seed[0].item())
            other.advance()
        states.append(generators())
    assert len(set(states)) == 3
    assert len(set(seeds)) == (3 if workers else 1)
    seed_all(5)
    torch.empty((), dtype=torch.int64).random_()
    assert generators() == states[0]


def test_draws_between_the_loader_and_its_first_batch_are_undone():
    """An uninterrupted run does not draw these numbers within an epoch."""
    sampler = limpet.ElasticSampler(8, 2)
    next(iter(sampler))
    sampler.advance()
    sampler.load_state_dict(sampler.state_dict())
    seed_all(5)
    restored = generators()
    batches = iter(DataLoader(IndexDataset(), batch_sampler=sampler))
    seed_all(6)
    next(batches)
    assert generators() == restored


def make_state(length=8, lr=0.1):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "progress": limpet.Progress(),
        "sampler": limpet.ElasticSampler(length, 2),
        "rng": limpet.RNG(),
    }


def save_version(store, step):
    """Save the version of a step in an epoch of four steps."""
    state = make_state()
    with limpet.Checkpointer(store, state, save=limpet.EverySteps(step)) as ckpt:
        for number, _ in enumerate(state["sampler"], 1):
            ckpt.step()
            if number == step:
                return


def test_a_sampler_in_the_state_that_is_used_for_evaluation_raises():
    state = make_state()
    state["evaluation"] = limpet.ElasticSampler(6, 2)
    with limpet.Checkpointer(MemoryStore(), state) as ckpt:
        next(iter(state["sampler"]))
        with pytest.raises(
            LimpetError, match=r"Sampler\(6, 2.*Do not put a sampler for evaluation"
        ):
            ckpt.step()


def test_calling_step_twice_for_a_batch_raises():
    state = make_state()
    with limpet.Checkpointer(MemoryStore(), state) as ckpt:
        next(iter(state["sampler"]))
        ckpt.step()
        with pytest.raises(LimpetError, match=r"step\(\) is called once per batch"):
            ckpt.step()


def test_a_data_set_that_grew_within_an_epoch_needs_a_new_run(tmp_path):
    """The advice of the error works."""
    store = open_store(tmp_path / "a")
    save_version(store, 3)
    state = make_state(12)
    with pytest.raises(PlanError, match="length=8, found length=12"):
        state["sampler"].load_state_dict(limpet.load(tmp_path / "a/version_3")["sampler"])
    with (
        limpet.Checkpointer(tmp_path / "a", state) as ckpt,
        pytest.raises(PlanError, match="length=8, found length=12"),
    ):
        ckpt.resume()
    with limpet.Checkpointer(tmp_path / "b", state) as ckpt:
        others = [f"{name}/**" for name in state if name != "sampler"]
        ckpt.resume(start=f"{tmp_path}/a@latest", keys=others)
        assert ckpt.current_step == state["progress"].step == 3
        assert len(list(state["sampler"])) == 6


def test_optimizer_options_come_from_the_version_and_can_be_changed_afterwards():
    store = MemoryStore()
    save_version(store, 4)
    state = make_state(lr=0.5)
    group = state["optimizer"].param_groups[0]
    with limpet.Checkpointer(store, state) as ckpt:
        ckpt.resume()
        assert state["optimizer"].param_groups[0]["lr"] == group["lr"] == 0.1
        assert state["scheduler"].base_lrs == [0.1]
        group["lr"] = 0.5
        ckpt.step(batches=0)
        ckpt.save()
    other = make_state()
    with limpet.Checkpointer(store, other) as ckpt:
        ckpt.resume()
    assert other["optimizer"].param_groups[0]["lr"] == 0.5


class Stream(IterableDataset[torch.Tensor]):
    """A stream of numbers that keeps its position and its own random noise."""

    def __init__(self, length=10):
        self.length, self.at, self.loaded = length, 0, False
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        if self.at == self.length and not self.loaded:
            self.at = 0  # not at the end, because a state saved there resumes as an empty pass
        self.loaded = False
        while self.at < self.length:
            self.at += 1
            yield self.at + torch.rand((), generator=self.generator)

    def state_dict(self):
        noise = self.generator.get_state()
        # all kinds of plain values, as in existing data sets
        values = [None, [1, (2.5, {"deep": b"\x00\xff", "none": [None]})], {3: "three"}, True]
        return {"at": self.at, "noise": noise, "bytes": bytes(range(256)), "values": values}

    def load_state_dict(self, state):
        self.at, self.loaded = state["at"], True
        self.generator.set_state(state["noise"])
        assert state["bytes"] == bytes(range(256))
        assert state["values"] == self.state_dict()["values"]


class RestartingStream(Stream):
    """A stream that is at its beginning after each pass, like the data sets of torchdata."""

    def __iter__(self):
        yield from super().__iter__()
        self.at = 0


@dataclass
class ReadingLoop:
    """A loop that records its data and the random numbers that a step would draw."""

    parts: dict[str, Any]
    loader: Any
    seen: list[tuple[list[float], float]] = field(default_factory=list)

    def run(self, store, stop=1 << 30):
        progress = limpet.Progress()
        state = {**self.parts, "progress": progress, "rng": limpet.RNG()}
        with limpet.Checkpointer(store, state, save=limpet.EverySteps(1)) as ckpt:
            ckpt.resume()
            while progress.epoch < 2:
                for batch in self.loader:
                    self.seen.append((batch.tolist(), torch.rand(1).item()))
                    ckpt.step()
                    if progress.step == stop:
                        return self.seen
                ckpt.end_epoch()
        return self.seen


def check_exact_resume(make):
    seed_all(0)
    reference = make().run(MemoryStore())
    for stop in range(1, len(reference) + 1):
        store = MemoryStore()
        seed_all(0)
        first = make().run(store, stop)
        seed_all(99)
        assert first + make().run(store) == reference, f"stopped at step {stop}"


def test_an_iterable_data_set_resumes_from_its_own_state():
    def make():
        data = Stream()
        loader = DataLoader(data, batch_size=4, generator=torch.Generator())
        return ReadingLoop({"data": data}, loader)

    check_exact_resume(make)


def plain():
    return {"loader": DataLoader(list(map(float, range(10))), batch_size=4, shuffle=True)}


def streamed():
    data = Stream()
    return {"data": data, "loader": DataLoader(data, batch_size=4, generator=torch.Generator())}


def stateful():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    data = list(map(float, range(10)))
    order = torchdata.sampler.RandomSampler(data, generator=torch.Generator().manual_seed(1))
    options = {"sampler": order, "generator": torch.Generator()}
    loader = torchdata.StatefulDataLoader(data, batch_size=4, **options)
    return {"data": loader, "loader": loader}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("make", "saved_after_count"),
    [(plain, True), (streamed, False), (stateful, True)],
    ids=["plain", "streamed", "stateful"],
)
def test_a_save_between_two_epochs_resumes_exactly(make, saved_after_count, late):
    """Plain and stateful loaders need the save after the epoch is counted, streams before it."""

    def run(store, epochs):
        parts, progress, seen = make(), limpet.Progress(), []
        loader = parts.pop("loader")
        state = {**parts, "progress": progress, "rng": limpet.RNG()}
        with limpet.Checkpointer(store, state, save=limpet.AtEnd()) as ckpt:
            ckpt.resume()
            while progress.epoch < epochs:
                for batch in loader:
                    seen.append(batch.tolist())
                    ckpt.step()
                if late:
                    ckpt.end_epoch()
                ckpt.save()
                if not late:
                    ckpt.end_epoch()
        return seen

    seed_all(0)
    reference = run(MemoryStore(), 3)
    seed_all(0)
    store = MemoryStore()
    first = run(store, 1)
    seed_all(99)
    assert (first + run(store, 3) == reference) is (saved_after_count is late)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_stateful_loader_resumes_from_its_own_state(monkeypatch, kind, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    # otherwise, a stopped worker is detected only after 5 s
    for module in (torch.utils.data._utils, stateful.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.05)

    def make():
        options: dict[str, Any] = {"num_workers": workers, "generator": torch.Generator()}
        if kind == "stream":
            # Only full batches, because torchdata 0.11 miscounts a partial one.
            data: Any = RestartingStream(8)
        else:  # its own generator, because the loader does not count all draws of a shared one
            data = list(map(float, range(10)))
            order = torch.Generator().manual_seed(1)
            options["sampler"] = stateful.sampler.RandomSampler(data, generator=order)
        loader = stateful.StatefulDataLoader(data, batch_size=4, **options)
        return ReadingLoop({"loader": loader}, loader)

    check_exact_resume(make)
    if workers:  # otherwise, a later test would wait for the stopped workers, for up to 40 s
        gc.collect()


def forever(loader):
    while True:
        yield from loader


def zipped(first, second):
    return zip(first, second)


def with_next(first, second):
    second_batches = iter(second)
    for one in first:
        yield one, next(second_batches)


@dataclass
class Pair:
    """A loop over two loaders whose samplers are in one state.

    ``count``: it counts epochs; ``save``: it also saves between two epochs, before or after that.
    """

    lengths: tuple[int, int] = (6, 6)
    combine: Any = zipped
    endless: bool = False  # the second loader does not determine the epoch
    count: bool = True
    save: str = "no"
    epochs: int = 3

    def __str__(self):
        plain = Pair()
        changed = [k for k, v in vars(self).items() if v != getattr(plain, k)]
        return ",".join(f"{k}={getattr(self, k)}".replace(" ", "")[:25] for k in changed)

    def run(self, store, stop=-1, stop_at_epoch=-1):
        samplers = [limpet.ElasticSampler(n, 2, seed=i) for i, n in enumerate(self.lengths)]
        first, second = (DataLoader(IndexDataset(), batch_sampler=s) for s in samplers)
        if self.endless:
            second = forever(second)
        progress, seen = limpet.Progress(), []
        state: dict[str, Any] = {"samplers": samplers, "rng": limpet.RNG(), "progress": progress}
        policy = limpet.EverySteps(1000 if stop < 0 else stop)
        with limpet.Checkpointer(store, state, save=policy) as ckpt:
            ckpt.resume()
            for epoch in range(progress.epoch, self.epochs if self.count else 99):
                for (x, _), (y, _) in self.combine(first, second):
                    drawn = torch.rand(1).item()
                    seen.append((x.tolist(), y.tolist(), drawn))
                    ckpt.step()
                    if ckpt.current_step == stop or (not self.count and len(seen) >= 12):
                        return seen
                if self.save == "before":
                    ckpt.save()
                if self.count:
                    ckpt.end_epoch()
                if self.save == "after":
                    ckpt.save()
                if epoch == stop_at_epoch:
                    return seen
        return seen

    def check_exact_resume(self):
        seed_all(0)
        reference = self.run(MemoryStore())
        for stop in range(1, len(reference)):
            store = MemoryStore()
            seed_all(0)
            first = self.run(store, stop)
            seed_all(99)
            rest = self.run(store)
            assert (first + rest)[: len(reference)] == reference, f"stopped at step {stop}"
            assert len(first + rest) == len(reference) or not self.count
        for epoch in range(self.epochs - 1 if self.save != "no" else 0):
            store = MemoryStore()
            seed_all(0)
            first = self.run(store, stop_at_epoch=epoch)
            seed_all(99)
            assert first + self.run(store) == reference, f"stopped after epoch {epoch}"


LENGTHS = [(6, 6), (4, 6), (6, 4), (2, 6), (2, 2)]
PAIRS = [
    *(Pair(lengths, count=c) for lengths in LENGTHS for c in (True, False)),
    *(Pair(lengths, save=s) for lengths in LENGTHS for s in ("before", "after")),
    Pair(combine=with_next),
    *(Pair(lengths, endless=True) for lengths in LENGTHS[:3]),
    *(Pair(lengths, combine=with_next, endless=True, save="after") for lengths in LENGTHS[:3]),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_two_samplers_resume_exactly(pair):
    """The loop ends a pass when one sampler ends, possibly before the other has yielded a batch.

    Both loaders draw a seed before the first batch.
    """
    pair.check_exact_resume()


def test_a_step_that_one_sampler_cannot_count_advances_none():
    samplers = [limpet.ElasticSampler(8, 2), limpet.ElasticSampler(8, 2)]
    with limpet.Checkpointer(MemoryStore(), {"samplers": samplers}) as ckpt:
        passes = [iter(s) for s in samplers]
        next(passes[0])
        with pytest.raises(LimpetError, match=r"more batches than .* has yielded"):
            ckpt.step()
        assert [s.left for s in samplers] == [4, 4]
        next(passes[1])
        ckpt.step()
        assert [s.left for s in samplers] == [3, 3]
