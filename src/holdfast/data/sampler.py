"""Which samples a training sees, in an order that a stop cannot disturb.

::

    sampler = holdfast.ElasticSampler(len(dataset), batch_size=32, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)

The position is counted where the training is, at the end of a step, not where a prefetching
loader is; and it counts samples of all ranks together, so that any number of ranks and of
loader workers goes on from it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from holdfast.data.epoch_labels import EpochLabels
from holdfast.data.permutation import permute
from holdfast.data.sampler_group import SamplerGroup
from holdfast.errors import HoldfastError, PlanError, UncountedBatches
from holdfast.lazy_torch import torch_or_none

if TYPE_CHECKING:
    from holdfast.data.progress import Progress

Position = tuple[int, int]
"""An epoch, and how many of its samples come before."""

_CONFIG_FIELDS = ("length", "seed", "shuffle", "drop_last")
_POSITION_FIELDS = ("epoch", "samples", "ahead", "per_step")


class ElasticSampler:
    """A batch sampler for ``DataLoader(dataset, batch_sampler=sampler)`` that resumes exactly.

    ``length``: samples of the data set, at least 1. ``batch_size``: samples of one batch, of all
    ranks together; each rank yields its part, a list of ints, and parts differ by at most one
    sample. ``seed``: any int; with ``shuffle`` the order is a permutation made from seed and epoch,
    the same for ever. The last batch of an epoch, where fewer than ``batch_size`` samples are
    left, is padded to a multiple of the ranks by samples from the epoch's beginning; with
    ``drop_last`` it is dropped. ``rank``, ``ranks``: those of ``torch.distributed`` when a pass
    begins if not given, or one rank where that is not initialised.

    Put it into the state of a ``Checkpointer``: its ``step`` counts the batches. A pass over the
    loader is an epoch, and the next pass is the next epoch. The first pass after a resume is the
    rest of the epoch: none of it if the last step of the epoch was saved. After a ``break`` the
    next pass goes on behind the last batch that was counted.

    Raises ``HoldfastError`` for a size that cannot work, among them fewer samples in a batch than
    there are ranks.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self.length = operator.index(length)
        self.batch_size = operator.index(batch_size)
        self.seed = operator.index(seed)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self._rank, self._ranks = rank, ranks
        self._counted: Position = (0, 0)  # behind the last batch that a step has counted
        self._yielded: Position = (0, 0)  # behind the last batch that was given out
        self._pass_epoch = 0  # the epoch at whose end the pass ends
        self._per_step = 1  # the most batches that one step has counted
        self._pass_number = 0
        self._has_stepped = False  # a step has counted it, whatever it counted
        self._uncounted_passes = 0  # passes that were over when no step had
        self._resumed = False  # loaded, and no pass has begun since
        self._first_iteration: tuple[int, int | None] | None = (
            None  # when it was first iterated over since
        )
        self._epoch_labels = EpochLabels()
        self._group = SamplerGroup([self._epoch_labels])
        self._check_sizes()

    def __repr__(self) -> str:
        epoch, samples = self._counted
        return (
            f"ElasticSampler({self.length}, {self.batch_size}, {self.seed},"
            f" at sample {samples} of epoch {epoch})"
        )

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the position is."""
        return self._batch_count(self.length)

    @property
    def padded(self) -> int:
        """How many samples a whole epoch repeats, with the number of ranks that there are now."""
        tail = 0 if self.drop_last else self.length % self.batch_size
        return -tail % self._rank_and_world_size()[1]

    @property
    def epochs(self) -> int:
        """Epochs that are complete at the counted position."""
        epoch, samples = self._counted
        return epoch + (1 if self._is_epoch_over(samples) else 0)

    @property
    def left(self) -> int:
        """Batches of this epoch that no step has counted, those that were given out included.

        A loop that ends a step of fewer batches with the epoch asks it, since counting the
        batches of a pass goes wrong in the pass that is the rest of an epoch.
        """
        return self._batch_count(self.length - self._counted[1])

    def follow(self, progress: Progress | None, together: SamplerGroup | None = None) -> None:
        """Tells the sampler who counts epochs for the user, and the samplers of one state, each by
        the same ``together``, of each other. A ``Checkpointer`` calls it.

        A state that is saved between two passes then resumes with the next epoch once
        ``progress.epoch`` has been counted up, and with the rest of the last one (which is empty)
        before; without a ``Progress`` always with the latter.
        """
        self._epoch_labels.follow(progress)
        if together is not None:
            self._group = together
            together.epoch_labels.append(self._epoch_labels)

    def check(self, batches: int) -> None:
        """Raises the ``HoldfastError`` that ``advance`` would. Of several samplers all are asked
        before the first is moved."""
        self._has_stepped = True
        _require("A step cannot count so many batches", batches >= 0, "0 or more", batches)
        left = self._position_after(batches)[1]
        if left:
            raise HoldfastError(
                f"A step counts batches that {self} has not given out",
                expected=f"at most {batches - left}",
                found=batches,
                todo="Is step() called twice for one batch? After a resume, iterate over the loader"
                " anew; a step that takes no batch from it is step(batches=0); a sampler for"
                " evaluation does not belong into the state",
            )

    def advance(self, batches: int = 1) -> None:
        """Count so many batches as trained on. ``Checkpointer.step(batches=...)`` calls it.

        Raises ``HoldfastError`` if fewer have been given out; nothing is counted then.
        """
        batches = operator.index(batches)
        self.check(batches)
        at = self._position_after(batches)[0]
        self._per_step = max(self._per_step, batches)
        if self._is_epoch_over(at[1]) and self._yielded[0] > at[0]:
            at = (at[0] + 1, 0)
        self._counted = at
        if not self._is_epoch_over(at[1]):
            self._group.record_step()

    def state_dict(self) -> dict[str, int]:
        """Plain ints and bools, free of ranks and workers.

        ``epoch`` and ``samples`` are the counted position. ``ahead``: how many epochs further the
        pass is that was going on (other than 0 only under accumulation). ``per_step``: the most
        batches that one step has counted.
        """
        epoch, samples = self._counted
        last = self._pass_epoch
        if self._is_pass_over() and self._epoch_labels.is_counted(self._pass_epoch):
            last += 1
            if self._counted == self._yielded:
                epoch, samples = last, 0
        counts = (epoch, samples, last - epoch, self._per_step)
        return {name: getattr(self, name) for name in _CONFIG_FIELDS} | dict(
            zip(_POSITION_FIELDS, counts)
        )

    def check_state_dict(self, state: object) -> None:
        """Raise the ``PlanError`` that ``load_state_dict`` would. A load asks this first of all,
        while nothing is changed."""
        names = {*_CONFIG_FIELDS, *_POSITION_FIELDS}
        if (
            not isinstance(state, dict)
            or set(state) != names
            or not all(isinstance(value, int) for value in state.values())
        ):
            raise PlanError(
                "This is not the state of an ElasticSampler",
                expected="numbers: " + ", ".join((*_CONFIG_FIELDS, *_POSITION_FIELDS)),
                found=state if isinstance(state, dict) else type(state).__name__,
            )
        edge = not state["samples"] or not self._batch_count(state["length"] - state["samples"])
        free = {"length"} if edge and not state["ahead"] else set()
        other = [n for n in _CONFIG_FIELDS if state[n] != getattr(self, n) and n not in free]
        if other:
            raise PlanError(
                "This ElasticSampler would give other samples than the one that was saved",
                expected=", ".join(f"{n}={state[n]!r}" for n in other),
                found=", ".join(f"{n}={getattr(self, n)!r}" for n in other),
                todo="Make it as it was (another length is taken where an epoch begins or ends), or"
                " begin a new run without it: another folder, and"
                ' resume(start="RUN@latest", keys=["model/**", ...])',
            )
        counts = [state[n] for n in _POSITION_FIELDS]
        if min(counts) < 0 or state["samples"] > state["length"] or not state["per_step"]:
            raise PlanError(
                "The state of an ElasticSampler names a position that does not exist",
                expected=f"at most {state['length']} samples, and no count below 0",
                found=", ".join(f"{n}={state[n]}" for n in _POSITION_FIELDS),
            )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there: the next pass is the rest of that epoch. The batch size may be
        another, and so may the length where an epoch begins or ends.

        Raises ``PlanError``, which tells all differences at once, for the state of a sampler that
        is not like this one; nothing is changed then.
        """
        self.check_state_dict(state)
        samples = state["samples"]
        if samples and state["length"] != self.length:
            samples = self.length  # the epoch was over, and is so with another length
        self._counted = self._yielded = (state["epoch"], samples)
        self._pass_epoch = state["epoch"] + state["ahead"]
        self._per_step = state["per_step"]
        self._pass_number += 1
        self._resumed, self._first_iteration = True, None
        self._epoch_labels.reset()
        self._group.record_load(self, at_beginning=self._counted == (self._pass_epoch, 0))

    def __iter__(self) -> Iterator[list[int]]:
        """The part of this rank in each batch of the pass.

        A ``DataLoader`` draws a seed for its workers when it is iterated over, also where the run
        that was never interrupted was in mid-epoch. So the first pass after a resume puts the
        global generators back to what they were here before it gives out a batch (``Together``).
        """
        if self._resumed:
            now = (self._group.passes_begun, self._epoch_labels.current)
            if self._first_iteration is None:
                self._first_iteration = now
                self._epoch_labels.begin_pass(self._pass_epoch)
            # a DataLoader with workers asks twice at once; where something has happened in between,
            # the pass that was asked for first has ended before it came to this sampler: a loop
            # over several loaders ends with the first that is at its end
            if now == self._first_iteration:
                self._group.save_rng_state()
            else:
                self._resumed = False
        return self._pass()

    # -- how it is done ------------------------------------------------------------------------

    def _pass(self) -> Iterator[list[int]]:
        rank, ranks = self._rank_and_world_size()
        self._begin_pass()
        mine = self._pass_number
        while True:
            if mine != self._pass_number:
                raise HoldfastError(
                    "This pass over an ElasticSampler is no longer the latest",
                    expected="one pass at a time",
                    found="another pass, or a resume, that came after it",
                    todo="After a resume, iterate over the loader anew; give each loader a sampler"
                    " of its own",
                )
            epoch, start = self._yielded
            if not self._is_epoch_over(start):
                stop = min(start + self.batch_size, self.length)
                self._yielded = (epoch, stop)
                yield self._local_batch(epoch, start, stop, rank, ranks)
            elif epoch < self._pass_epoch:
                self._enter_epoch(epoch + 1)
            else:
                return

    def _begin_pass(self) -> None:
        """Decide where a pass begins, and in which epoch it ends."""
        self._pass_number += 1
        resumed, self._resumed = self._resumed, False
        if not resumed and self._is_pass_over():
            self._pass_epoch += 1
            self._enter_epoch(self._pass_epoch)
        elif not resumed:
            if self._is_epoch_over(self._yielded[1]) and self._yielded[0] == self._pass_epoch:
                self._warn_uncounted()
            self._yielded = self._counted
        self._epoch_labels.begin_pass(self._pass_epoch)
        self._group.begin_pass(self, self._pass_epoch, resumed)

    def _warn_uncounted(self) -> None:
        """A pass gave out all that it had, and more of it than a step takes was not counted."""
        if self._has_stepped:
            warnings.warn(
                f"{self} gave out its epoch to the end, but batches of it were never counted: "
                "call step(batches=k) where a step takes k batches, and give it to the loader as "
                "batch_sampler=, not as sampler=. If the loop was left early, all is well. The "
                "rest of the epoch follows",
                UncountedBatches,
                stacklevel=3,
            )
            return
        what = f"No step has counted {self}, so each pass would be the same epoch"
        todo = "Put it into the state of the Checkpointer; for evaluation use a plain DataLoader"
        self._uncounted_passes += 1
        if self._uncounted_passes > 1:  # once may be a look at the data before the first step
            raise HoldfastError(what, todo=todo)
        warnings.warn(f"{what}. {todo}", UncountedBatches, stacklevel=3)

    def _enter_epoch(self, epoch: int) -> None:
        """Go on to an epoch's beginning, and let the count go along if it owes nothing."""
        if self._counted == self._yielded:
            self._counted = (epoch, 0)
        self._yielded = (epoch, 0)

    def _is_pass_over(self) -> bool:
        """Whether the pass gave out all that it had, and what is not yet counted of it is less
        than a step's batches: the beginning of a step that ends in the next epoch."""
        whole = self._yielded[0] == self._pass_epoch and self._is_epoch_over(self._yielded[1])
        return whole and self._position_after(self._per_step - 1)[0] == self._yielded

    def _position_after(self, batches: int) -> tuple[Position, int]:
        """The position so many batches further, of those given out, and how many are missing."""
        at = self._counted
        while batches and at < self._yielded:
            epoch, samples = at if not self._is_epoch_over(at[1]) else (at[0] + 1, 0)
            at = (epoch, min(samples + self.batch_size, self.length))
            batches -= 1
        return at, batches

    def _is_epoch_over(self, samples: int) -> bool:
        """Whether an epoch has no batch behind so many samples."""
        return self._batch_count(self.length - samples) == 0

    def _batch_count(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def _local_batch(self, epoch: int, start: int, stop: int, rank: int, ranks: int) -> list[int]:
        if stop - start < self.batch_size:
            stop += -(stop - start) % ranks
        at = np.arange(start + rank, stop, ranks) % self.length
        order = permute(at, self.length, self.seed, epoch) if self.shuffle else at
        part: list[int] = order.tolist()
        return part

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Which rank this is, of how many."""
        rank, ranks = self._rank, self._ranks
        if rank is None or ranks is None:
            torch = torch_or_none()
            known = torch is not None and torch.distributed.is_available()
            if known and torch.distributed.is_initialized():
                rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            else:
                rank, ranks = 0, 1
        _require(
            "A rank of the ElasticSampler would get an empty batch",
            self.batch_size >= ranks,
            f"a batch_size (of all ranks together) of {ranks} or more, as there are {ranks} ranks",
            self.batch_size,
        )
        return rank, ranks

    def _check_sizes(self) -> None:
        _require(
            "An ElasticSampler needs samples", 1 <= self.length < 1 << 62, "1 or more", self.length
        )
        _require(
            "An ElasticSampler needs batches", self.batch_size >= 1, "1 or more", self.batch_size
        )
        _require(
            "With drop_last an ElasticSampler would never give a batch",
            not self.drop_last or self.length >= self.batch_size,
            f"a batch_size of at most the length, {self.length}",
            self.batch_size,
        )
        rank, ranks = self._rank, self._ranks
        _require(
            "An ElasticSampler needs both rank and ranks, or neither",
            (rank is None and ranks is None)
            or (rank is not None and ranks is not None and 0 <= rank < ranks),
            "0 <= rank < ranks",
            f"rank={rank}, ranks={ranks}",
        )
        self._rank_and_world_size()


def _require(what: str, good: bool, expected: str, found: object) -> None:
    if not good:
        raise HoldfastError(what, expected=expected, found=found)
