"""Where a training is: the steps that it has made, and the samplers that move on with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.data.progress import Progress
from holdfast.data.sampler import ElasticSampler
from holdfast.data.sampler_group import SamplerGroup
from holdfast.engine.state.walk import find_instances
from holdfast.errors import HoldfastError
from holdfast.text import with_article


class StepCounter:
    """Counts the steps, in the ``Progress`` of a state or, without one, itself, and moves the
    ``ElasticSampler`` objects of the state on with them. Raises ``HoldfastError`` if there are
    several ``Progress``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._progress = _single_progress(list(find_instances(state, Progress)))
        self._samplers = list(find_instances(state, ElasticSampler))
        together = SamplerGroup()
        for sampler in self._samplers:
            sampler.follow(self._progress, together)
        self._steps = 0
        self._expected_step: int | None = None

    @property
    def step(self) -> int:
        """Steps done, the resumed ones included."""
        return self._steps if self._progress is None else self._progress.step

    @property
    def knows_epochs(self) -> bool:
        """Whether it is known at a step that it completes an epoch."""
        return bool(self._samplers)

    @property
    def epochs(self) -> int:
        """Epochs completed, by the first sampler; 0 without one."""
        return self._samplers[0].epochs if self._samplers else 0

    def add_step(self, batches: int) -> None:
        """Count one more step, of so many batches. Raises ``HoldfastError`` if somebody else has
        counted too."""
        progress, counted = self._progress, self._expected_step
        if progress is not None:
            _check_step(progress.step, counted)
        for sampler in self._samplers:
            sampler.check(batches)  # before the first moves
        for sampler in self._samplers:
            sampler.advance(batches)
        self._expected_step = (
            None  # should this be interrupted, the count is not held against anyone
        )
        if progress is not None:
            progress.step += 1
            self._expected_step = progress.step
        else:
            self._steps += 1

    def resume_at(self, step: int, from_own_run: bool) -> None:
        """Go on at ``step``. ``own``: it is that of a version of the run itself, whatever the
        ``Progress`` in the state says."""
        self._steps, self._expected_step = step, None
        if from_own_run and self._progress is not None:
            self._progress.step = step


def _single_progress(found: Sequence[Progress]) -> Progress | None:
    """The Progress of a state, if it has one. Raises ``HoldfastError`` if it has several."""
    if len(found) > 1:
        raise HoldfastError(
            "The state has several Progress objects",
            expected="one, which counts the steps of this training",
            found=len(found),
        )
    return found[0] if found else None


def _check_step(step: Any, expected_step: int | None) -> None:
    """Raise ``HoldfastError`` unless ``step`` can be counted on, and is what was ``counted``."""
    if type(step) is not int or not 0 <= step < 10**17:
        raise HoldfastError(
            "progress.step is no number of steps",
            expected="an int of 0 or more",
            found=f"{step!r}, {with_article(type(step).__name__)}"[:200],
        )
    if expected_step is not None and step != expected_step:
        raise HoldfastError(
            "progress.step was changed between two steps",
            expected=expected_step,
            found=step,
            todo="Leave it alone: ckpt.step() counts it",
        )
