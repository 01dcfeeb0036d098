"""Where a training is: the steps that it has made, and the samplers that move on with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.data.progress import Progress
from holdfast.data.sampler import ElasticSampler
from holdfast.data.sampler_group import Together
from holdfast.engine.state.walk import found_in
from holdfast.errors import HoldfastError
from holdfast.text import an


class Count:
    """Counts the steps, in the ``Progress`` of a state or, without one, itself, and moves the
    ``ElasticSampler`` objects of the state on with them. Raises ``HoldfastError`` if there are
    several ``Progress``."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._progress = _the_only(list(found_in(state, Progress)))
        self._samplers = list(found_in(state, ElasticSampler))
        together = Together()
        for sampler in self._samplers:
            sampler.follow(self._progress, together)
        self._steps = 0
        self._counted: int | None = None

    @property
    def step(self) -> int:
        """Steps done, the resumed ones included."""
        return self._steps if self._progress is None else self._progress.step

    @property
    def sees_epochs(self) -> bool:
        """Whether it is known at a step that it completes an epoch."""
        return bool(self._samplers)

    @property
    def epochs(self) -> int:
        """Epochs completed, by the first sampler; 0 without one."""
        return self._samplers[0].epochs if self._samplers else 0

    def add(self, batches: int) -> None:
        """Count one more step, of so many batches. Raises ``HoldfastError`` if somebody else has
        counted too."""
        progress, counted = self._progress, self._counted
        if progress is not None:
            _check(progress.step, counted)
        for sampler in self._samplers:
            sampler.check(batches)  # before the first moves
        for sampler in self._samplers:
            sampler.advance(batches)
        self._counted = None  # should this be interrupted, the count is not held against anyone
        if progress is not None:
            progress.step += 1
            self._counted = progress.step
        else:
            self._steps += 1

    def resumed(self, step: int, own: bool) -> None:
        """Go on at ``step``. ``own``: it is that of a version of the run itself, whatever the
        ``Progress`` in the state says."""
        self._steps, self._counted = step, None
        if own and self._progress is not None:
            self._progress.step = step


def _the_only(found: Sequence[Progress]) -> Progress | None:
    """The Progress of a state, if it has one. Raises ``HoldfastError`` if it has several."""
    if len(found) > 1:
        raise HoldfastError(
            "The state has several Progress objects",
            expected="one, which counts the steps of this training",
            found=len(found),
        )
    return found[0] if found else None


def _check(step: Any, counted: int | None) -> None:
    """Raise ``HoldfastError`` unless ``step`` can be counted on, and is what was ``counted``."""
    if type(step) is not int or not 0 <= step < 10**17:
        raise HoldfastError(
            "progress.step is no number of steps",
            expected="an int of 0 or more",
            found=f"{step!r}, {an(type(step).__name__)}"[:200],
        )
    if counted is not None and step != counted:
        raise HoldfastError(
            "progress.step was changed between two steps",
            expected=counted,
            found=step,
            todo="Leave it alone: ckpt.step() counts it",
        )
