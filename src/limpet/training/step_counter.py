"""The position of a training: its steps and epochs, and the samplers that advance with it."""

from __future__ import annotations

from math import inf
from typing import Any

from limpet.data.progress import Progress
from limpet.data.sampler import ElasticSampler
from limpet.data.sampler_group import SamplerGroup
from limpet.errors import LimpetError, UncountedEpochs
from limpet.generators import open_block
from limpet.run.policy import SavePolicy
from limpet.state.walk import find_instances
from limpet.text import to_repr, warn_user, with_article

LONG_EPOCH = 10_000
"""The number of steps after which a policy that waits for ``end_epoch`` is probably forgotten."""


class StepCounter:
    """Counts the steps and advances the ``ElasticSampler`` objects of a state.

    A ``Progress`` keeps the count: that of the state, or one of this object if the state has none.
    Raises ``LimpetError`` if the state has several ``Progress`` objects.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        found = list(find_instances(state, Progress))
        if len(found) > 1:
            raise LimpetError(
                "The state has several Progress objects",
                expected="one, which counts the steps of this training",
                found=len(found),
            )
        self._saved_progress: Progress | None = found[0] if found else None
        self._progress = Progress() if self._saved_progress is None else self._saved_progress
        self._samplers = list(find_instances(state, ElasticSampler))
        sampler_group = SamplerGroup()
        for sampler in self._samplers:
            sampler.follow(self._saved_progress, sampler_group)
        self._expected_step: int | None = None
        self._expected_epoch: int | None = None
        self._block: object | None = None
        self._needs_ends = False  # a policy waits for the first call of end_epoch
        self._count_epochs()

    @property
    def step(self) -> int:
        """The number of steps completed, including those before the resume."""
        return self._progress._step

    @property
    def has_counted(self) -> bool:
        """True if a step has ended since the start of the process, or the last resume."""
        return self._expected_step is not None

    @property
    def passes(self) -> float:
        """The number of passes that each sampler has begun; infinity without a sampler."""
        return min((sampler.pass_number for sampler in self._samplers), default=inf)

    @property
    def reads(self) -> int:
        """The number of times that the loop has read its position in the ``Progress`` and the
        samplers."""
        return self._progress._reads + sum(int(s._reads) for s in self._samplers)

    @property
    def has_progress(self) -> bool:
        """True if the state has a ``Progress``."""
        return self._saved_progress is not None

    def is_in_epoch(self, after: int) -> bool:
        """Return True if a step was made in a later epoch of the ``Progress`` than ``after``."""
        return self.epoch != after and self._progress._steps_in_epoch() > 0

    @property
    def epoch(self) -> int:
        """``progress.epoch``, without a read by the loop."""
        return self._progress._epoch

    def check_can_fire(self, policy: SavePolicy) -> None:
        """Raise ``LimpetError`` for a policy that can never fire in this training."""
        if not policy.wants_epochs or self._samplers:
            return
        self._needs_ends = True
        if self._saved_progress is None:
            raise LimpetError(
                "EveryEpoch can never fire: nothing in the state counts epochs",
                expected="a limpet.Progress or a limpet.ElasticSampler in the state",
                found="neither",
                todo='Add "progress": limpet.Progress() to the state, and call ckpt.end_epoch()'
                " after each epoch",
            )

    @property
    def epochs(self) -> int:
        """The number of completed epochs: those of the first sampler, and those that ``end_epoch``
        has ended early. Without a sampler: those that it has ended, also before the resume."""
        return self._ended_epochs + (self._samplers[0]._complete_epochs() if self._samplers else 0)

    def add_steps(self, steps: int, batches: int) -> None:
        """Count ``steps`` more steps, which consist of ``batches`` batches together.

        Raises ``LimpetError`` if other code has changed the step count since the last step.
        """
        progress = self._progress
        todo = "Do not assign progress.step; ckpt.step() counts the steps"
        _check_count("step", progress._step, self._expected_step, "steps", todo)
        if type(steps) is not int or steps < 1:
            raise LimpetError(
                "Invalid number of steps",
                expected="an int of 1 or more",
                found=to_repr(steps)[:200],
                todo="Call step() after each step, or step(steps=k) after a function that makes k",
            )
        self._check_block()
        for sampler in self._samplers:
            sampler.check(batches)  # check all samplers before any of them advances
        for sampler in self._samplers:
            sampler.advance(batches)
        # if an interrupt ends this method here, the next call must not report a wrong count
        self._expected_step = None
        progress._step += steps
        self._expected_step = progress._step
        if self._needs_ends and (
            progress._epoch != self._ended_epochs or progress._steps_in_epoch() >= LONG_EPOCH
        ):
            self._warn_epochs()

    def end_epoch(self) -> None:
        """Count an epoch as complete, in ``progress.epoch`` and for the samplers.

        Raises ``LimpetError``, and counts nothing, without a ``Progress`` in the state, and if
        other code has changed ``progress.epoch`` since the last call.
        """
        progress = self._saved_progress
        if progress is None:
            raise LimpetError(
                "end_epoch() has nowhere to count the epoch",
                expected='a Progress in the state: {"progress": limpet.Progress(), ...}',
                found="none, so a restart would begin at epoch 0",
            )
        calls = "calls of end_epoch()"
        todo = "Remove `progress.epoch += 1`; ckpt.end_epoch() counts the epochs"
        _check_count("epoch", progress._epoch, self._expected_epoch, calls, todo)
        has_ended = [sampler.end_epoch() for sampler in self._samplers]
        self._needs_ends = False
        self._expected_epoch = None  # as in add_steps
        progress.epoch = progress._epoch + 1
        self._expected_epoch = progress._epoch
        if not has_ended:
            self._ended_epochs = progress._epoch
        elif not has_ended[0]:  # the first sampler does not count this one
            self._ended_epochs += 1

    def _count_epochs(self) -> None:
        """Count the epochs of ``progress`` as ended, unless a sampler counts them."""
        epoch = self._progress._epoch
        self._ended_epochs = epoch if type(epoch) is int and not self._samplers else 0

    def _warn_epochs(self) -> None:
        self._needs_ends = False
        warn_user(
            f"ckpt.end_epoch() was not called before step {self._progress._step} (progress.epoch is"
            f" {self._progress._epoch}), and EveryEpoch waits for it. Call it after each epoch,"
            " instead of progress.epoch += 1. If your epochs are this long, add EverySteps(...)",
            UncountedEpochs,
        )

    def _check_block(self) -> None:
        """Raise ``LimpetError`` if the step before was in the same block of ``isolated_rng``.

        Such a training would save the generators as they were before all of its steps.
        """
        block, self._block = self._block, open_block()
        if block is not None and block is self._block:
            raise LimpetError(
                "Two steps of the training were in the same block of isolated_rng()",
                expected="only an evaluation in the block, because random numbers drawn in it are"
                " undone and not saved",
                todo="Train outside of the block",
            )

    def resume_at(self, step: int, from_own_run: bool) -> None:
        """Continue at ``step``.

        ``from_own_run`` is True if a version of the run itself was loaded. Its step then replaces
        that of the ``Progress`` in the state.
        """
        self._expected_step = self._expected_epoch = None
        if from_own_run or self._saved_progress is None:
            self._progress._step = step
        self._count_epochs()


def _check_count(name: str, count: Any, expected: int | None, calls: str, todo: str) -> None:
    """Raise ``LimpetError`` unless ``progress.step``, or ``epoch``, is a count, and ``expected``,
    its value after the last of the ``calls``."""
    if type(count) is not int or (name == "step" and not 0 <= count < 10**17):
        raise LimpetError(
            f"progress.{name} is not a number of {name}s",
            expected="an int of 0 or more",
            found=f"{count!r}, {with_article(type(count).__name__)}"[:200],
        )
    if expected is not None and count != expected:
        raise LimpetError(
            f"progress.{name} was changed between two {calls}",
            expected=expected,
            found=count,
            todo=todo,
        )
