"""The order of the batches of an epoch: computed for a position, or drawn again from a sampler.

A computed order is a seeded permutation. PyTorch does not promise that ``torch.randperm`` stays,
and 10^10 samples would take 80 GB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import shake_256
from itertools import chain, cycle, islice
from math import isqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from limpet.errors import LimpetError
from limpet.generators import ORDER, digest, seed_generators

Part = tuple[int, int, bool, list[Any]]
"""The position before a batch, after it, whether it is the last, and the samples of this rank."""

_BLOCK = 4096
"""The items that are drawn from a sampler with one seed."""

_MAX_BLOCK = 8192
"""The number of indices that are computed at once, unless one batch has more. They take 0.5 ms, and
the arrays of a block fit into a processor's L2 cache."""


@dataclass
class EpochOrder:
    """Gives the parts of the batches of an epoch that one rank makes.

    ``sampler``: of the user, for all ranks, or None. ``key``: the seed. ``size``: the samples of
    all ranks in a batch, 1 if the sampler gives whole batches.
    """

    dataset: Any
    sampler: Any
    is_shuffled: bool
    is_by_batch: bool
    drop_last: bool
    key: int = 0
    size: int = 1

    length: int | None = None
    """The number of samples of the epoch, which a dataset that grows does not change."""

    first: int | None = None
    """A digest of what the sampler has given first in the epoch."""

    must_check: bool = False
    """The sampler was not yet seen to draw an order twice, as a resume does."""

    def __len__(self) -> int:
        """Return the number of samples, or of batches if the sampler gives those."""
        return len(self.dataset if self.sampler is None else self.sampler)

    def parts(self, epoch: int, at: int, rank: int, ranks: int) -> Iterator[Part]:
        """Yield the parts of ``rank`` in the batches after the position ``at``."""
        if self.sampler is None:
            return self._computed_parts(epoch, at, rank, ranks)
        return self._drawn_parts(epoch, at, rank, ranks)

    def _computed_parts(self, epoch: int, at: int, rank: int, ranks: int) -> Iterator[Part]:
        """Compute a block of batches at once."""
        if self.length is None:
            self.length = len(self)
        length, size, own = self.length, self.size, np.arange(rank, self.size, ranks)
        least = size if self.drop_last else 1
        while length - at >= least:
            count = min((length - at) // size, max(1, _MAX_BLOCK // len(own)))
            block: NDArray[Any] = at + own + size * np.arange(count)[:, np.newaxis]
            if not count:  # the last batch is padded with samples from the beginning of the epoch
                end = length + -(length - at) % ranks
                block = np.arange(at + rank, end, ranks)[np.newaxis] % length
            if self.is_shuffled:
                block = permute(block.reshape(-1), length, self.key, epoch).reshape(block.shape)
            for batch in block:
                stop = min(at + size, length)
                yield at, stop, length - stop < least, batch.tolist()
                at = stop

    def _drawn_parts(self, epoch: int, at: int, rank: int, ranks: int) -> Iterator[Part]:
        """Draw again from the beginning of the epoch."""
        drawn, size, by_batch = self._draw(epoch), self.size, self.is_by_batch
        first = [] if by_batch else list(islice(drawn, ranks))  # pads the last batch
        items = islice(chain(first, drawn), at, None)
        batches = map(list, items) if by_batch else iter(lambda: list(islice(items, size)), [])
        least = size if self.drop_last and not by_batch else 0
        batch: list[Any] | None = next(batches, None)
        while batch is not None and len(batch) >= least:
            following = next(batches, None)
            stop = at + (1 if by_batch else len(batch))
            if by_batch or len(batch) < size:
                batch += islice(cycle(first or batch[:]), -len(batch) % ranks)
            is_last = following is None or len(following) < least
            yield at, stop, is_last, batch[rank::ranks]
            at, batch = stop, following

    def _draw(self, epoch: int) -> Iterator[Any]:
        """Yield what the sampler gives, in blocks with seeds of their own."""
        is_once = any(isinstance(s, Iterator) for s in wrapped_samplers(self.sampler))
        if self.must_check and self.first is None and not is_once:
            self.first = digest(repr(list(islice(self._begin(epoch), _BLOCK))))
        self.must_check = False
        iterator, number = self._begin(epoch), 0
        while block := list(islice(iterator, _BLOCK)):
            if number == 0:
                self._check_order(epoch, digest(repr(block)))
            yield from block
            number += 1
            seed_generators(self.key, ORDER, epoch, number)

    def _begin(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over the sampler, which draws what follows from the seed."""
        seed_generators(self.key, ORDER, epoch, 0)
        for sampler in wrapped_samplers(self.sampler):
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(torch.initial_seed())
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return iter(self.sampler)

    def _check_order(self, epoch: int, first: int) -> None:
        if self.first not in (None, first):
            raise LimpetError(
                f"The sampler of the loader draws another order of epoch {epoch} than before",
                todo="Its order must depend only on Python's, NumPy's, and PyTorch's global"
                " generators, which are seeded for each epoch, or on set_epoch()",
            )
        self.first = first


def wrapped_samplers(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, and those that it wraps."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


# -- the computed order ---------------------------------------------------------------------------


def permute(positions: NDArray[np.int64], length: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return the samples at these positions (each less than ``length``) of the epoch's order, a
    permutation that must never change, because saved positions depend on it.

    A Feistel network over pairs of digits, whose results are permuted again until they are in range
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Short orders need more
    rounds.
    """
    rounds = 24 if length < 1024 else 12
    key = shake_256(f"{seed} {epoch}".encode()).digest(8 * rounds)
    keys = np.frombuffer(key, "<u8").astype(np.uint64)
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    a, b = np.uint64(rows), np.uint64(columns)
    order = positions.astype(np.uint64)
    pending = np.arange(len(order))
    while len(pending):
        row, column = np.divmod(order[pending], b)
        for first, second in zip(keys[::2], keys[1::2]):
            row += _splitmix64(column ^ first)
            _reduce(row, a)
            column += _splitmix64(row ^ second)
            _reduce(column, b)
        candidates = row * b + column
        order[pending] = candidates
        pending = pending[candidates >= length]
    return order


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Change ``x`` to the finalizer of SplitMix64 (Steele, Lea, and Flood, 2014), and return it."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _reduce(x: NDArray[np.uint64], n: np.uint64) -> None:
    """Compute ``x %= n``. NumPy divides by a scalar in a quarter of the time of a remainder."""
    quotients = x // n
    quotients *= n
    x -= quotients
