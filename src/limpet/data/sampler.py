"""A batch sampler whose order and position survive an interruption of the training.

The position advances at the end of a training step, not when a loader prefetches a batch. It counts
the samples of all ranks, so that training can continue with any number of ranks and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limpet.arguments import check_count, check_rank, check_whole, require
from limpet.data.permutation import permute
from limpet.errors import LimpetError, PlanError
from limpet.generators import States, capture_states, restore_states
from limpet.lazy_torch import rank_and_world_size

Position = tuple[int, int]
"""An epoch, and the number of its samples before the position."""

_CONFIG_FIELDS = ("length", "seed", "shuffle", "drop_last")
_POSITION_FIELDS = ("epoch", "samples", "ahead", "per_step")


class ElasticSampler:
    """A batch sampler for ``DataLoader(dataset, batch_sampler=sampler)`` that resumes exactly.

    ``length``: the number of samples in the dataset, at least 1. ``batch_size``: the number of
    samples in one batch over all ranks. Each rank yields its part of a batch as a list of ints, and
    the parts differ by at most one sample. ``seed``: any int. With ``shuffle``, the order is a
    permutation made from the seed and the epoch, which never changes. An incomplete last
    batch of an epoch is padded to a multiple of the number of ranks with samples from the beginning
    of the epoch; with ``drop_last`` it is dropped. ``rank``, ``ranks``: if not given, those of
    ``torch.distributed`` when a pass begins, or a single rank if that is not initialized.

    Put the sampler into the state of a ``Checkpointer``, whose ``step`` counts the batches. A pass
    over the loader is an epoch, and the next pass is the next epoch. The first pass after a resume
    is the rest of the epoch, which is empty if the version was saved at the last step of the epoch.
    After a ``break``, the next pass continues after the last counted batch. ``skip_empty``: never
    resume into an empty pass, but begin the next epoch, for loops that end at an empty epoch.

    Raises ``LimpetError`` for invalid sizes, such as fewer samples in a batch than ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        skip_empty: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.length = check_count(
            "length= of an ElasticSampler", length, unit="samples (len(dataset))"
        )
        self.batch_size = check_count("batch_size= of an ElasticSampler", batch_size)
        name = "seed= of an ElasticSampler"
        self.seed = check_whole(name, seed, "a whole number", -math.inf)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.skip_empty = bool(skip_empty)
        self._rank, self._ranks = check_rank(rank, ranks)
        self._counted: Position = (0, 0)  # after the last batch that a step has counted
        self._yielded: Position = (0, 0)  # after the last batch that was yielded
        self._pass_epoch = 0  # the epoch at whose end the pass ends
        self._per_step = 1  # the most batches that one step has counted
        self.pass_number = 0
        self._resumed = False  # a state was loaded, and no pass has begun since
        self._has_ended = False  # end_epoch was called since the pass was over
        self._first_iteration: int | None = None  # the events before it, since a load
        self._blocks = BatchBlocks()
        self._group = SamplerGroup()
        require("length= of an ElasticSampler", self.length < 1 << 62, "less than 2**62", length)
        is_used = not self.drop_last or self.length >= self.batch_size
        expected = f"at most the length with drop_last, {self.length}"
        require("batch_size= of an ElasticSampler", is_used, expected, batch_size)
        self._rank_and_world_size()

    def __repr__(self) -> str:
        epoch, samples = self._counted
        return (
            f"ElasticSampler({self.length}, {self.batch_size}, {self.seed},"
            f" at sample {samples} of epoch {epoch})"
        )

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, independent of the position."""
        return self._batch_count(self.length)

    @property
    def padded(self) -> int:
        """The number of samples that a whole epoch repeats with the current number of ranks."""
        tail = 0 if self.drop_last else self.length % self.batch_size
        return -tail % self._rank_and_world_size()[1]

    @property
    def epochs(self) -> int:
        """The number of epochs that are complete at the counted position."""
        epoch, samples = self._counted
        return epoch + (1 if self._is_epoch_over(samples) else 0)

    @property
    def left(self) -> int:
        """The number of batches of this epoch that no step has counted, including yielded ones. Use
        it to end a step with the epoch: a loop counter is wrong in the rest of an epoch."""
        return self._batch_count(self.length - self._counted[1])

    @property
    def is_within_step(self) -> bool:
        """True if the pass is over, but its last batches belong to a step that has not ended."""
        return self._counted != self._yielded and self._is_pass_over()

    def join(self, group: SamplerGroup) -> None:
        """Connect the sampler to the other samplers of a state. A ``Checkpointer`` calls this."""
        self._group = group

    def check(self, batches: int) -> None:
        """Raise the error that ``advance`` would raise. A step first checks all samplers."""
        missing = self._position_after(batches)[1]
        if missing:
            raise LimpetError(
                f"A step counts more batches than {self} has yielded",
                expected=f"at most {batches - missing}",
                found=batches,
                todo="Check that step() is called once per batch. After a resume, iterate over"
                " the loader again. Call step(batches=0) for a step without a batch. Do not"
                " put a sampler for evaluation into the state",
            )

    def advance(self, batches: int = 1) -> None:
        """Count this many batches as trained. ``Checkpointer.step(batches=...)`` calls this.

        Raises ``LimpetError``, and counts nothing, if fewer batches were yielded.
        """
        batches = check_count("batches=", batches, 0)
        self.check(batches)
        position = self._position_after(batches)[0]
        self._per_step = max(self._per_step, batches)
        if self._is_epoch_over(position[1]) and self._yielded[0] > position[0]:
            position = (position[0] + 1, 0)
        self._counted = position

    def end_epoch(self) -> None:
        """End the epoch, if its pass is over: a state that is saved now resumes with the next one.
        Otherwise, it resumes with the rest of the epoch, which may be empty."""
        self._group.events += 1
        if self._is_pass_over():
            self._has_ended, self._resumed = True, False

    def state_dict(self) -> dict[str, int]:
        """Return plain ints and bools that do not depend on ranks and workers.

        ``epoch`` and ``samples`` are the counted position. ``ahead``: the number of epochs that the
        current pass is ahead of it (nonzero only under gradient accumulation). ``per_step``: the
        most batches that one step has counted.
        """
        epoch, samples = self._counted
        last_epoch = self._pass_epoch
        if self._has_ended and self._is_pass_over():
            last_epoch += 1
            if self._counted == self._yielded:
                epoch, samples = last_epoch, 0
        counts = (epoch, samples, last_epoch - epoch, self._per_step)
        return {name: getattr(self, name) for name in _CONFIG_FIELDS} | dict(
            zip(_POSITION_FIELDS, counts)
        )

    def check_state_dict(self, state: object) -> None:
        """Raise the error that ``load_state_dict`` would raise. A load calls this first."""
        if (
            not isinstance(state, dict)
            or set(state) != {*_CONFIG_FIELDS, *_POSITION_FIELDS}
            or not all(isinstance(value, int) for value in state.values())
        ):
            raise PlanError(
                "The loaded value is not the state of an ElasticSampler",
                expected="numbers: " + ", ".join((*_CONFIG_FIELDS, *_POSITION_FIELDS)),
                found=state if isinstance(state, dict) else type(state).__name__,
            )
        at_edge = not state["samples"] or not self._batch_count(state["length"] - state["samples"])
        optional = {"length"} if at_edge and not state["ahead"] else set()
        differing = [
            n for n in _CONFIG_FIELDS if state[n] != getattr(self, n) and n not in optional
        ]
        if differing:
            raise PlanError(
                "This ElasticSampler would yield different samples than the saved one",
                expected=", ".join(f"{n}={state[n]!r}" for n in differing),
                found=", ".join(f"{n}={getattr(self, n)!r}" for n in differing),
                todo="Use the saved arguments (length may change at the beginning or end of an"
                " epoch), or start a new run in another folder without the saved sampler:"
                ' resume(start="RUN@latest", keys=["model/**", ...])',
            )
        counts = [state[n] for n in _POSITION_FIELDS]
        if min(counts) < 0 or state["samples"] > state["length"] or not state["per_step"]:
            raise PlanError(
                "The state of an ElasticSampler contains a position that does not exist",
                expected=f"at most {state['length']} samples, and no negative count",
                found=", ".join(f"{n}={state[n]}" for n in _POSITION_FIELDS),
            )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position: the next pass is the rest of that epoch.

        The batch size may differ, and so may the length at the beginning or end of an epoch. Raises
        ``PlanError``, which lists all differences at once and changes nothing, if the saved sampler
        would yield different samples.
        """
        self.check_state_dict(state)
        samples = state["samples"]
        if samples and state["length"] != self.length:
            samples = self.length  # a complete epoch stays complete with another length
        self._counted = self._yielded = (state["epoch"], samples)
        self._pass_epoch = state["epoch"] + state["ahead"]
        self._per_step = state["per_step"]
        self.pass_number += 1
        skips = self.skip_empty and self._is_pass_over()
        self._resumed, self._has_ended, self._first_iteration = not skips, False, None
        at_beginning = skips or self._counted == (self._pass_epoch, 0)
        self._group.record_load(self, at_beginning=at_beginning)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch of the pass. The first pass after a resume restores
        the global generators before its first batch (see ``SamplerGroup``)."""
        if self._resumed:
            now = self._group.events
            if self._first_iteration is None:
                self._first_iteration = now
            # A DataLoader with workers creates two iterators at once. If something happened in
            # between, the first pass ended before it reached this sampler: a loop over several
            # loaders ends when the first loader is exhausted.
            if now == self._first_iteration:
                self._group.save_rng_state()
            else:
                self._resumed = False
        return self._pass()

    # -- implementation ------------------------------------------------------------------------

    def _pass(self) -> Iterator[list[int]]:
        rank, ranks = self._rank_and_world_size()
        self._begin_pass()
        pass_number = self.pass_number
        while True:
            if pass_number != self.pass_number:
                raise LimpetError(
                    "This pass over an ElasticSampler is no longer the latest",
                    expected="one pass at a time",
                    found="a later pass or resume",
                    todo="After a resume, iterate over the loader again. Use a separate"
                    " sampler for each loader",
                )
            epoch, start = self._yielded
            if not self._is_epoch_over(start):
                stop = min(start + self.batch_size, self.length)
                self._yielded = (epoch, stop)
                order = (self.length, self.seed, self.shuffle)
                yield self._blocks.local_batch(
                    order, epoch, (start, stop), self.batch_size, rank, ranks
                )
            elif epoch < self._pass_epoch:
                self._enter_epoch(epoch + 1)
            else:
                return

    def _begin_pass(self) -> None:
        """Determine the position at which a pass begins, and the epoch with which it ends."""
        self.pass_number += 1
        resumed, self._resumed, self._has_ended = self._resumed, False, False
        if not resumed and self._is_pass_over():
            self._pass_epoch += 1
            self._enter_epoch(self._pass_epoch)
        elif not resumed:
            self._yielded = self._counted
        self._group.begin_pass(self, resumed)

    def _enter_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch; the counted position follows if it is up to date."""
        if self._counted == self._yielded:
            self._counted = (epoch, 0)
        self._yielded = (epoch, 0)

    def _is_pass_over(self) -> bool:
        """Return True if the pass yielded everything, and fewer batches than one step takes are
        uncounted: they are the beginning of a step that ends in the next epoch."""
        complete = self._yielded[0] == self._pass_epoch and self._is_epoch_over(self._yielded[1])
        return complete and self._position_after(self._per_step - 1)[0] == self._yielded

    def _position_after(self, batches: int) -> tuple[Position, int]:
        """Advance by up to this many yielded batches; return the position and the missing count."""
        position = self._counted
        while batches and position < self._yielded:
            epoch, samples = (
                position if not self._is_epoch_over(position[1]) else (position[0] + 1, 0)
            )
            position = (epoch, min(samples + self.batch_size, self.length))
            batches -= 1
        return position, batches

    def _is_epoch_over(self, samples: int) -> bool:
        """Return True if an epoch has no batch after this many samples."""
        return self._batch_count(self.length - samples) == 0

    def _batch_count(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank of this process and the number of ranks."""
        rank, ranks = self._rank, self._ranks
        if rank is None or ranks is None:
            rank, ranks = rank_and_world_size()
        expected = f"{ranks} or more for {ranks} ranks: it is the total over all ranks"
        require(
            "batch_size= of an ElasticSampler", self.batch_size >= ranks, expected, self.batch_size
        )
        return rank, ranks


# -- what follows --------------------------------------------------------------------------------


class NextBatch(NamedTuple):
    """The next batch that no step has counted, of all ranks. ``left``: the number of samples that
    the epoch still yields, without padding. ``ids``: their indices, little-endian int64."""

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


# -- several samplers ----------------------------------------------------------------------------


class SamplerGroup:
    """The passes of samplers. Loaders draw from the global generators when iterators are created,
    so the group saves these before that after a resume, and restores them at the first batch."""

    def __init__(self) -> None:
        self.events = 0
        """The number of passes begun and of epochs ended."""

        self._at_beginning: set[object] = set()
        self._rng_state: States | None = None

    def record_load(self, sampler: object, *, at_beginning: bool) -> None:
        """Record that a resume set the position of a sampler."""
        (self._at_beginning.add if at_beginning else self._at_beginning.discard)(sampler)
        self._rng_state = None

    def save_rng_state(self) -> None:
        """Save the generators before a loader draws for the first pass after a resume, unless the
        version was saved between two passes: there, the uninterrupted run drew, too."""
        if self._rng_state is None and not self._at_beginning:
            self._rng_state = capture_states()

    def begin_pass(self, sampler: object, resumed: bool) -> None:
        """Record the beginning of a pass. ``resumed``: it is the first pass after a resume."""
        self.events += 1
        self._at_beginning.discard(sampler)
        rng_state, self._rng_state = self._rng_state, None
        if resumed and rng_state is not None:
            restore_states(rng_state)


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
