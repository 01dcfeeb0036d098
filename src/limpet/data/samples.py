"""What runs in the workers of a ``limpet.DataLoader``: it makes batches, and seeds the generators
for each, so that a batch depends only on its position and on the samples that it has."""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from inspect import unwrap
from itertools import islice
from random import getrandbits
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data

from limpet import generators
from limpet.generators import MASK, NUMPY, PYTHON, TORCH, digest, seed_generators

_DEFAULT_COLLATES = (data.default_collate, data.default_convert)  # they draw nothing

_LARGE = 10_000
"""The length of a container that is not copied with the dataset that has it."""


class Task(NamedTuple):
    """A batch to make. ``at``: the position of the batch in the ``epoch``."""

    epoch: int
    at: int
    rank: int
    indices: list[Any]


class Difference(NamedTuple):
    """A dataset gave two different samples for one index. The file and line of its code."""

    file: str
    line: int
    name: str


def get_back(batch: Any) -> Any:
    """Return the batch. The inner loader has samples that are batches already."""
    return batch


def start_worker(worker_init_fn: Callable[[int], object] | None, worker: int) -> None:
    """Call ``worker_init_fn`` of the user, who expects their own dataset in the worker. The worker
    outlives a signal to all processes of a job, such as SIGTERM, until the training has saved."""
    info: Any = data.get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    signals: Any = sys.modules.get("limpet.notices.signals")
    if signals is not None:  # a training handles signals that go to all processes of a job
        signals.protect_worker(worker)
    if worker_init_fn is not None:
        worker_init_fn(worker)


@dataclass(eq=False, repr=False)
class Samples(data.Dataset[Any]):
    """A dataset of batches, each by its ``Task``. An item is the batch, and a ``Difference`` if the
    first sample of a worker, which is fetched twice, differs.

    PyTorch's generator is seeded for each sample. Those of Python and NumPy, which take 6 us more,
    only if a sample was seen to use them: that batch is then made again.

    ``sets_epoch``: a new ``epoch`` is passed to ``set_epoch`` of the dataset.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    is_batched: bool
    sets_epoch: bool
    epoch: int | None = None
    key: int = 0
    """The seed of the loader."""

    _seeded: int = TORCH
    _expected: tuple[Any, ...] | None = None

    def __getitem__(self, task: Task) -> tuple[Any, Difference | None]:
        difference = None
        if self.sets_epoch and task.epoch != self.epoch:
            self.epoch = task.epoch
            self.dataset.set_epoch(task.epoch)
        if self._expected is None:  # this worker has made no batch yet
            self._reset_unseeded()
            self._expected = _draw()
            difference = self._compare_first(task)
        samples = self._fetch(task)
        if self.collate not in _DEFAULT_COLLATES:
            seed_generators(self.key, generators.COLLATE, task.epoch, task.at, task.rank)
        return self.collate(samples if self.is_batched else samples[0]), difference

    def _fetch(self, task: Task) -> list[Any]:
        dataset, key, epoch = self.dataset, self.key, task.epoch
        if self.is_batched and callable(fetch_many := getattr(dataset, "__getitems__", None)):
            seed_generators(key, generators.BATCH, epoch, task.at, task.rank)
            return fetch_many(task.indices)  # type: ignore[no-any-return]
        while True:
            kinds, samples = self._seeded, []
            if kinds != PYTHON | NUMPY | TORCH:
                self._reset_unseeded()
            for index in task.indices:
                number = index & MASK if type(index) is int else _number_of(index)
                seed_generators(key, generators.SAMPLE, epoch, number, kinds=kinds)
                samples.append(dataset[index])
            if kinds != PYTHON | NUMPY | TORCH:
                for kind, now, expected in zip((PYTHON, NUMPY), _draw(), self._expected or ()):
                    if now != expected:
                        self._seeded |= kind
            if self._seeded == kinds:
                return samples

    def _reset_unseeded(self) -> None:
        seed_generators(0, kinds=(PYTHON | NUMPY) & ~self._seeded)

    def _compare_first(self, task: Task) -> Difference | None:
        first = task._replace(indices=task.indices[:1])
        if are_equal(self._fetch(first), self._fetch(first)):
            return None
        kind = type(self.dataset)
        many = self.is_batched and hasattr(kind, "__getitems__")
        name = "__getitems__" if many else "__getitem__"
        code = getattr(unwrap(getattr(kind, name)), "__code__", None)
        file, line = ("<unknown>", 0) if code is None else (code.co_filename, code.co_firstlineno)
        return Difference(file, line, f"{kind.__qualname__}.{name}")


def _draw() -> tuple[Any, ...]:
    """Return the next numbers of the generators that are not seeded for each sample."""
    return getrandbits(64), np.random.random_sample()


def _number_of(index: Any) -> int:
    """Return 64 bits for an index, the same in each process (``hash`` of a text is not)."""
    with suppress(TypeError):
        return int(index.__index__()) & MASK if hasattr(index, "__index__") else digest(repr(index))
    return digest(repr(index))


def are_equal(a: Any, b: Any) -> bool:
    """Return False if two samples differ. Objects that cannot be compared count as equal: those
    that do not even equal a copy of themselves, such as NaN, and sets of such objects."""
    if type(a) is not type(b):
        return False
    with suppress(Exception):
        if isinstance(a, Mapping) and a.keys() == b.keys():
            return all(are_equal(a[key], b[key]) for key in a)
        if isinstance(a, Mapping):  # a key may be an object, or NaN
            return are_equal([*a.items()], [*b.items()])
        if isinstance(a, list | tuple | deque):
            return len(a) == len(b) and all(map(are_equal, a, b))
        if is_dataclass(a):
            names = [field.name for field in fields(a)]
            return all(are_equal(getattr(a, n, None), getattr(b, n, None)) for n in names)
        if isinstance(a, torch.Tensor):
            return a.shape == b.shape and bool(
                torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all()
            )
        if isinstance(a, np.ndarray):
            if a.dtype.hasobject or a.dtype.names:  # their bytes are addresses, or have gaps
                return are_equal(a.tolist(), b.tolist())
            return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
        compares: Any = type(a).__eq__
        if compares is not object.__eq__:
            return bool(a == b) or a != pickle.loads(pickle.dumps(a))
    return True


# -- streams -------------------------------------------------------------------------------------


class WorkerState(NamedTuple):
    """Where a worker of a stream is after a batch. ``data``: the state of its dataset, if it has
    one; ``batches``: those that it has made in this epoch."""

    worker: int
    batches: int
    ended: bool
    data: Any


@dataclass(eq=False, repr=False)
class Stream(data.IterableDataset[Any]):
    """A stream of batches, each with the ``WorkerState`` after it.

    Each epoch begins with the dataset as it was made, and a call of its ``set_epoch``. Generators
    are seeded before each batch, and PyTorch's before each sample.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    batch_size: int | None
    drop_last: bool
    rank: int
    replay: bool
    key: int = 0
    _initial: Any = None
    _start: tuple[int, list[WorkerState | None], int] = (0, [], 0)
    _is_exact: bool | None = None

    def __post_init__(self) -> None:
        self._has_state = not self.replay and has_state(self.dataset)
        # the workers of a loader with persistent workers read it when a pass begins
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, epoch: int, states: list[WorkerState | None], turn: int) -> None:
        """Begin the next pass at these states of the workers, of which ``turn`` is the next."""
        self._epoch.fill_(epoch)
        self._start = (epoch, states, turn)

    def __iter__(self) -> Iterator[tuple[Any, WorkerState] | None]:
        info, epoch = data.get_worker_info(), int(self._epoch)
        worker = info.id if info else 0
        start_epoch, states, turn = self._start
        state = states[worker] if states and epoch == start_epoch else None
        if states and epoch == start_epoch and worker < turn:
            yield None  # the turns of the workers stay as they were
        if state is None or not state.ended:
            yield from self._batches(epoch, worker, state)

    def _batches(
        self, epoch: int, worker: int, state: WorkerState | None
    ) -> Iterator[tuple[Any, WorkerState]]:
        number = state.batches if state else 0
        if self._has_state and self._initial is None:  # after worker_init_fn, which may change it
            self._initial = deepcopy(self.dataset.state_dict())
        saved = state.data if state and self._has_state else None
        if saved is not None and not self._continues_exactly(epoch):
            saved = None
        dataset = copy_of(self.dataset)  # also if it has a state, which may lack a generator
        # __iter__ may shuffle
        seed_generators(self.key, generators.ORDER, epoch, worker, self.rank)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        # a copy begins as it was made, while Hugging Face's does not load its own state in workers
        if self._has_state and (saved is not None or dataset is self.dataset):
            dataset.load_state_dict(deepcopy(self._initial if saved is None else saved))
        iterator = iter(dataset)
        for done in range(number if saved is None else 0):  # read again what was read before
            self._read(iterator, epoch, worker, done)
        ended = False
        while not ended:
            samples, ended = self._read(iterator, epoch, worker, number)
            number += 1
            if not samples or (self.drop_last and len(samples) < (self.batch_size or 1)):
                return
            if self.collate not in _DEFAULT_COLLATES:
                seed_generators(self.key, generators.COLLATE, epoch, number, worker, self.rank)
            batch = self.collate(samples if self.batch_size else samples[0])
            after = deepcopy(dataset.state_dict()) if self._has_state else None
            yield batch, WorkerState(worker, number, ended, after)

    def _read(
        self, iterator: Iterator[Any], epoch: int, worker: int, number: int
    ) -> tuple[list[Any], bool]:
        """Return the samples of a batch, and whether the dataset has ended."""
        position = self.key, generators.BATCH, epoch, number, worker, self.rank
        seed_generators(*position)
        samples: list[Any] = []
        for item in range(self.batch_size or 1):
            if item:
                seed_generators(*position, item, kinds=TORCH)
            try:
                samples.append(next(iterator))
            except StopIteration:
                return samples, True
        return samples, False

    def _continues_exactly(self, epoch: int) -> bool:
        """Return whether a copy of the dataset gives the same samples after a ``load_state_dict``.
        Those that shuffle in a buffer, or read in batches, may lose what they hold."""
        if self._is_exact is None:
            first, second = copy_of(self.dataset), copy_of(self.dataset)
            if first is self.dataset:  # it cannot be copied: trust it
                self._is_exact = True
                return True
            for copied in (first, second):
                if hasattr(copied, "set_epoch"):
                    copied.set_epoch(epoch)
            seed_generators(self.key, generators.ORDER, epoch)
            iterator = iter(first)
            self._compared(iterator, 0)
            second.load_state_dict(deepcopy(first.state_dict()))
            expected = self._compared(iterator, 1)
            seed_generators(self.key, generators.ORDER, epoch)
            # a part without more samples shows nothing, and is soon read again
            self._is_exact = bool(expected) and are_equal(expected, self._compared(iter(second), 1))
        return self._is_exact

    def _compared(self, iterator: Iterator[Any], number: int) -> list[Any]:
        seed_generators(self.key, generators.BATCH, number)
        return list(islice(iterator, 5))


def has_state(dataset: Any) -> bool:
    """Return whether a dataset has methods that save and load its position."""
    names = "state_dict", "load_state_dict"
    has_methods = all(callable(getattr(dataset, name, None)) for name in names)
    return has_methods and not _is_shuffled(getattr(dataset, "_ex_iterable", None))


def _is_shuffled(part: Any) -> bool:
    """Return whether a part of a stream of Hugging Face has a shuffle buffer. States do not have
    its content, which makes a difference only after as many samples."""
    inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
    is_buffer = type(part).__name__ == "BufferShuffledExamplesIterable"
    return is_buffer or any(_is_shuffled(p) for p in inner if p is not None)


def copy_of(dataset: Any) -> Any:
    """Return a copy, because iterating may change a dataset. Large members are shared."""
    members = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
    large = (
        m
        for m in members
        if isinstance(m, torch.Tensor | np.ndarray)
        or (isinstance(m, list | dict | set | tuple) and len(m) > _LARGE)
    )
    try:
        return deepcopy(dataset, {id(member): member for member in large})
    except Exception:  # noqa: BLE001  (it has an open file, or the like)
        return dataset
