"""A resumed run ends bit for bit like an uninterrupted run, also with objects of other libraries.

``tests/loops`` kills trainings that use a ``limpet.DataLoader``.
"""

import gc
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import limpet
from limpet.storage.memory import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_state(lr=0.1):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def test_optimizer_options_come_from_the_version_and_can_be_changed_afterwards():
    store = MemoryStore()
    with limpet.Checkpointer(store, make_state(), save=limpet.EverySteps(1)) as ckpt:
        ckpt.step()
    state = make_state(lr=0.5)
    group = state["optimizer"].param_groups[0]
    with limpet.Checkpointer(store, state) as ckpt:
        ckpt.resume()
        assert state["optimizer"].param_groups[0]["lr"] == group["lr"] == 0.1
        assert state["scheduler"].base_lrs == [0.1]
        group["lr"] = 0.5
        ckpt.step()
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
