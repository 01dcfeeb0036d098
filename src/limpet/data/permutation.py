"""The order of the samples of an epoch: a seeded permutation that is computed per position.

PyTorch does not promise that ``torch.randperm`` stays, and 10^10 samples would take 80 GB.
"""

from __future__ import annotations

from hashlib import shake_256
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


# -- batches in blocks ---------------------------------------------------------------------------


_MAX_BLOCK = 8192
"""The number of indices that are computed at once, unless one batch has more. They take 0.5 ms, and
the arrays of a block fit into a processor's L2 cache."""

Order = tuple[int, int, bool]
"""The number of samples, the seed, and whether the order is shuffled."""


class BatchBlocks:
    """Returns this rank's parts of batches. It computes the next batches too, and keeps them."""

    def __init__(self) -> None:
        self._key: Any = None
        self._first = 0
        self._rows: NDArray[Any] = np.empty((0, 0), np.int64)

    def local_batch(
        self,
        order: Order,
        epoch: int,
        span: tuple[int, int],
        batch_size: int,
        rank: int,
        ranks: int,
    ) -> list[int]:
        """Return the samples of this rank in the batch of the positions ``span`` of an epoch,
        padded to a multiple of ``ranks`` with samples from the beginning of the epoch."""
        start, stop = span
        if stop - start < batch_size:
            stop += -(stop - start) % ranks
            positions = np.arange(start + rank, stop, ranks)
            return _samples(positions, order, epoch).tolist()  # type: ignore[no-any-return]
        key = (order, epoch, batch_size, rank, ranks)
        row, offset = divmod(start - self._first, batch_size)
        if key != self._key or offset or not 0 <= row < len(self._rows):
            local = np.arange(start + rank, stop, ranks)
            complete = (order[0] - start) // batch_size
            count = min(complete, max(1, _MAX_BLOCK // len(local)))
            positions = local + batch_size * np.arange(count)[:, np.newaxis]
            self._key = None  # in case the next line is interrupted
            self._rows = _samples(positions.reshape(-1), order, epoch).reshape(positions.shape)
            self._first, self._key, row = start, key, 0
        batch: list[int] = self._rows[row].tolist()
        return batch


def _samples(positions: NDArray[np.int64], order: Order, epoch: int) -> NDArray[Any]:
    length, seed, shuffle = order
    positions %= length
    return permute(positions, length, seed, epoch) if shuffle else positions
