"""The position of a training: its step count, and the samplers that advance with it."""

from __future__ import annotations

from typing import Any

from holdfast.data.progress import Progress
from holdfast.data.sampler import ElasticSampler
from holdfast.data.sampler_group import SamplerGroup
from holdfast.engine.state.walk import find_instances
from holdfast.errors import HoldfastError
from holdfast.generators import open_block
from holdfast.text import with_article


class StepCounter:
    """Counts the steps and advances the ``ElasticSampler`` objects of a state.

    A ``Progress`` keeps the count: that of the state, or one of this object if the state has none.
    Raises ``HoldfastError`` if the state has several ``Progress`` objects.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        found = list(find_instances(state, Progress))
        if len(found) > 1:
            raise HoldfastError(
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
        self._block: object | None = None

    @property
    def step(self) -> int:
        """The number of steps completed, including those before the resume."""
        return self._progress.step

    @property
    def has_counted(self) -> bool:
        """True if a step has ended since the start of the process, or the last resume."""
        return self._expected_step is not None

    @property
    def knows_epochs(self) -> bool:
        """True if it is known at each step whether the step completes an epoch."""
        return bool(self._samplers)

    @property
    def epochs(self) -> int:
        """The number of epochs that the first sampler has completed, or 0 without a sampler."""
        return self._samplers[0].epochs if self._samplers else 0

    def add_step(self, batches: int) -> None:
        """Count one more step, which consists of ``batches`` batches.

        Raises ``HoldfastError`` if other code has changed the step count since the last step.
        """
        progress = self._progress
        _check_step(progress.step, self._expected_step)
        self._check_block()
        for sampler in self._samplers:
            sampler.check(batches)  # check all samplers before any of them advances
        for sampler in self._samplers:
            sampler.advance(batches)
        # if an interrupt ends this method here, the next call must not report a wrong count
        self._expected_step = None
        progress.step += 1
        self._expected_step = progress.step

    def _check_block(self) -> None:
        """Raise ``HoldfastError`` if the step before was in the same block of ``isolated_rng``.

        Such a training would save the generators as they were before all of its steps.
        """
        block, self._block = self._block, open_block()
        if block is not None and block is self._block:
            raise HoldfastError(
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
        self._expected_step = None
        if from_own_run or self._saved_progress is None:
            self._progress.step = step


def _check_step(step: Any, expected_step: int | None) -> None:
    """Raise ``HoldfastError`` unless ``step`` is a valid count, and is the expected one."""
    if type(step) is not int or not 0 <= step < 10**17:
        raise HoldfastError(
            "progress.step is not a number of steps",
            expected="an int of 0 or more",
            found=f"{step!r}, {with_article(type(step).__name__)}"[:200],
        )
    if expected_step is not None and step != expected_step:
        raise HoldfastError(
            "progress.step was changed between two steps",
            expected=expected_step,
            found=step,
            todo="Do not assign progress.step; ckpt.step() counts the steps",
        )
