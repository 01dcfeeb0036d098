"""The datasets, samplers, and loaders of the trainings."""

import random
from pathlib import Path

import numpy as np
import torch
from torch.utils import data

import limpet

LENGTH = 22
BATCH = 4
"""An epoch has five batches of four samples and one of two."""


class BadSample(Exception):
    """A sample cannot be read."""


class Images(data.Dataset):
    """Samples of four numbers. ``kinds``: the generators from which their augmentation draws, and
    other properties. ``folder``: the number of samples may grow, and is in a file there."""

    has_failed = False

    def __init__(self, kinds, folder):
        self.kinds, self.file = kinds.split(), Path(folder) / "length"

    def __len__(self):
        return int(self.file.read_text()) if "growing" in self.kinds else LENGTH

    def __getitem__(self, i):
        x = torch.arange(4.0) + i / 10
        if "torch" in self.kinds:
            x = x + torch.randn(4)
        if "python" in self.kinds:
            x = x + random.gauss(0, 1)
        if "numpy" in self.kinds:
            x = x + float(np.random.normal())
        if "rare" in self.kinds and i % 7 == 3:
            x = x * random.random() + float(np.random.normal())
        if "own" in self.kinds:  # as Albumentations does
            x = x + float(np.random.default_rng(torch.initial_seed()).normal())
        if "failing" in self.kinds and i == 9 and not self.file.exists():
            self.file.touch()
            raise BadSample
        return x, torch.tensor(i)


class ImagesByBatch(Images):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Names(data.Dataset):
    """Samples that are found by a name, as in a dict of files."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, name):
        i = int(name[1:])
        return torch.full((4,), i / 10) + torch.randn(4) + random.random(), torch.tensor(i)


class Lines(data.IterableDataset):
    """A stream in an order of the epoch. Each worker of each rank has its part."""

    def __init__(self, rank, ranks):
        self.epoch, self.rank, self.ranks = 0, rank, ranks

    def set_epoch(self, epoch):
        self.epoch = epoch

    def part(self):
        info = data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        order = random.Random(self.epoch).sample(range(LENGTH * self.ranks), LENGTH * self.ranks)
        return order[self.rank + worker * self.ranks :: self.ranks * workers]

    def sample(self, i):
        return torch.full((4,), i / 10) + torch.randn(4) + random.random(), torch.tensor(i)

    def __iter__(self):
        for i in self.part():
            yield self.sample(i)


class SizedLines(Lines):
    def __len__(self):
        return LENGTH


class PositionedLines(Lines):
    """A stream with an exact state. After a pass it stays at its end."""

    at = 0

    def __iter__(self):
        part = self.part()
        while self.at < len(part):
            self.at += 1
            yield self.sample(part[self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class UnevenLines(PositionedLines):
    """The first worker has a third of what the others have."""

    def part(self):
        part, info = super().part(), data.get_worker_info()
        return part[: len(part) // 3] if info and info.id == 0 else part


class BufferedLines(PositionedLines):
    """A stream with a buffer that its state lacks, as Hugging Face's shuffle has."""

    def __iter__(self):
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(random.randrange(len(buffer)))
        random.shuffle(buffer)
        yield from buffer


STREAMS = {
    "lines": Lines,
    "sized": SizedLines,
    "positioned": PositionedLines,
    "uneven": UnevenLines,
    "buffered": BufferedLines,
}


class Generated(data.Sampler):
    """A sampler that is a Python generator, and draws each index when it is asked for."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        for i in data.RandomSampler(range(LENGTH)):
            yield (i + random.randrange(LENGTH) + np.random.randint(LENGTH)) % LENGTH


class OwnOrder(data.Sampler):
    """A sampler with a generator of its own, which ``set_epoch`` seeds."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(random.Random(self.epoch).sample(range(LENGTH), LENGTH))


class NameOrder(data.Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return (f"n{i}" for i in random.sample(range(LENGTH), LENGTH))


class LazyBatches(data.Sampler):
    """A batch sampler that draws each batch and its size when it is asked for."""

    def __len__(self):
        return 6

    def __iter__(self):
        for _ in range(6):
            yield [random.randrange(LENGTH) for _ in range(random.randint(2, 5))]


SAMPLERS = {
    "weighted": lambda: data.WeightedRandomSampler(torch.arange(1.0, LENGTH + 1), LENGTH),
    "weighted with a generator": lambda: data.WeightedRandomSampler(
        torch.arange(1.0, LENGTH + 1), LENGTH, generator=torch.Generator()
    ),
    "subset": lambda: data.SubsetRandomSampler(range(3, LENGTH - 1)),
    "generated": Generated,
    "own order": OwnOrder,
    "names": NameOrder,
}


def collate_with_noise(samples):
    x, i = data.default_collate(samples)
    return x + 0.1 * torch.rand(1) + random.random() + float(np.random.random()), i


def make_loader(case, workers, folder, rank, ranks):
    """Return the loader of the training, or one that PyTorch has if ``elastic`` replaces it."""
    options = {"batch_size": BATCH, "num_workers": workers, "drop_last": case.drop_last}
    if workers:
        options |= {
            "persistent_workers": case.persistent,
            "multiprocessing_context": case.context,
            "prefetch_factor": 3,
        }
    if case.collate:
        options["collate_fn"] = collate_with_noise
    if case.pin_memory:
        options["pin_memory"] = True
    kind = case.data
    if kind in STREAMS:
        dataset = STREAMS[kind](rank, ranks)
        options["replay"] = case.replay
    else:
        by_batch = "by-batch" in kind
        dataset = (ImagesByBatch if by_batch else Images)(kind, folder)
        options["shuffle"] = True
        if case.sampler == "lazy batches":
            for name in ("batch_size", "drop_last", "shuffle"):
                del options[name]
            options["batch_sampler"] = LazyBatches()
        elif case.sampler:
            options |= {"sampler": SAMPLERS[case.sampler](), "shuffle": False}
        if case.sampler == "names":
            dataset = Names()
    if case.single:
        options["batch_size"] = None
        del options["drop_last"]
    if case.total:
        del options["batch_size"]
        options["total_batch_size"] = case.total
    return limpet.DataLoader(dataset, **options)
