"""This rank's parts of consecutive batches, computed in blocks.

A permutation of a few indices takes as long as one of a thousand: the time is that of NumPy's
calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from limpet.data.permutation import permute

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
        """Return the samples of this rank in the batch of the positions ``span`` of an epoch.

        An incomplete batch is padded to a multiple of ``ranks`` with samples from the beginning of
        the epoch.
        """
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
