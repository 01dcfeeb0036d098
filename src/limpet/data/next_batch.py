"""What an ``ElasticSampler`` will yield next, for comparison after a resume."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.data.permutation import permute
from limpet.data.sampler import ElasticSampler


class NextBatch(NamedTuple):
    """The next batch that no step has counted, of all ranks together.

    ``epoch`` and ``samples``: its position. ``left``: the number of samples that the epoch still
    yields from there, without padding. ``ids``: the indices of its samples, little-endian int64.
    """

    epoch: int
    samples: int
    left: int
    ids: NDArray[Any]


def find_next_batch(sampler: ElasticSampler) -> NextBatch:
    """Return the next batch after the position that a state saved now would have."""
    state, length = sampler.state_dict(), sampler.length
    epoch, first = state["epoch"], state["samples"]
    left = _yielded(sampler, length - first)
    if not left:
        epoch, first, left = epoch + 1, 0, _yielded(sampler, length)
    positions = np.arange(first, first + min(sampler.batch_size, left))
    ids = permute(positions, length, sampler.seed, epoch) if sampler.shuffle else positions
    return NextBatch(epoch, first, left, np.ascontiguousarray(ids, "<i8"))


def _yielded(sampler: ElasticSampler, samples: int) -> int:
    return samples - samples % sampler.batch_size if sampler.drop_last else samples
