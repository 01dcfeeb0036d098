"""Sums of the gradients of rows, in a fixed order: the result has the same bits in every run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from limpet.tables.index import unique
from limpet.tables.messages import RowGradients


def merge_gradients(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the distinct ids of several parts, each of which has distinct ids, and the sum of the
    gradients of each id in the order of the parts."""
    if len(parts) == 1:
        return parts[0]
    ids, inverse = unique(np.concatenate([ids for ids, _ in parts]))
    merged = parts[0][1].new_zeros(len(ids), parts[0][1].shape[1])
    start = 0
    for part_ids, gradients in parts:
        rows = torch.from_numpy(inverse[start : start + len(part_ids)])
        merged.index_copy_(0, rows, merged.index_select(0, rows).add_(gradients))
        start += len(part_ids)
    return ids, merged
