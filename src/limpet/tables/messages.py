"""What workers, servers, and the coordinator of a training with tables say to one another.

A *push* is what one mini-batch of a worker changes: rows by unique ids, gradients of dense
parameters, and buffers. A worker sends it to all servers, which hold it, and then *commits* it at
the coordinator, whose answer, an ``Entry``, lets the servers apply it. The *ledger* has the newest
entry of each worker. A *cut* is the state of all servers at one ledger; the coordinator counts cuts
by *epochs*. Everything belongs to one *generation*, which ends when a server is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch

from limpet.tables.ids import Ids, unique
from limpet.tasks.batches import Key
from limpet.tasks.task import Report

RowGradients = tuple[Ids, torch.Tensor]
"""Distinct ids, and the sum of the gradients of each, float32."""


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


class Rates(msgspec.Struct, frozen=True):
    """The learning rates with which a push is applied: by table, and of each parameter group."""

    tables: dict[str, float]
    groups: list[float] = []


class Entry(msgspec.Struct, frozen=True, tag=True):
    """The newest commit of a worker: the number of its push, the epoch of cuts in which it was
    committed, the step that it is, and the rates. Number 0: it has committed nothing."""

    number: int
    epoch: int
    step: int
    rates: Rates


Ledger = dict[str, Entry]
"""The newest commit of each worker."""


class Mark(msgspec.Struct, frozen=True):
    """The beginning of an epoch: a server applies all of the ledger first, and nothing else."""

    generation: int
    epoch: int
    ledger: Ledger
    rates: Rates
    step: int = 0
    batches: int = 0


class Sender(NamedTuple):
    """What each message of a worker to a server begins with. ``committed``: the number of its last
    committed push; ``entry``: that commit, unless a round applies the push."""

    generation: int
    worker: str
    committed: int
    entry: Entry | None


class Push(NamedTuple):
    """The gradients of one mini-batch, or the part of one server."""

    rows: dict[str, RowGradients]
    dense: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


# -- from a worker to the coordinator --------------------------------------------------------------


class Commit(msgspec.Struct, frozen=True, tag=True):
    """A push that all servers hold, and the records that it consumes. ``worker``: no other one has
    had this name in the training. ``batch``: the number of the
    mini-batch, if rounds are synchronous. ``evaluates``: the worker does evaluation tasks."""

    worker: str
    number: int
    reports: list[Report]
    batch: int = -1
    metrics: dict[str, float] = {}
    evaluates: bool = False


class NextBatch(msgspec.Struct, frozen=True, tag=True):
    """A worker asks for its next mini-batch of a synchronous round; or, once all records are
    consumed, whether the evaluation is complete. ``evaluates``: see ``Commit``."""

    worker: str
    batch_size: int
    evaluates: bool = False


# -- the answers of the coordinator ----------------------------------------------------------------


class Batch(msgspec.Struct, frozen=True, tag=True):
    """A mini-batch: its number since the beginning of the training, and its records."""

    number: int
    keys: list[Key]


Answer = Entry | Batch | Literal["stale", "taken", "wait", "finished", "stopped"]
"""To a commit: its entry, or why it is refused: ``"stale"``, others have committed too much since
the coordinator last answered this worker; ``"taken"``, others have its records now. ``"wait"``:
there is nothing now, ask again. ``"finished"``: all records are consumed. ``"stopped"``: the worker
is of an older generation, or counts as lost."""
