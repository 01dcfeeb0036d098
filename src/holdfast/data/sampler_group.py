"""What the samplers of one state must know of each other, where a loop reads them side by side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from holdfast.data.epoch_labels import EpochLabels
from holdfast.data.rng import RNG
from holdfast.errors import UncountedEpochs


class SamplerGroup:
    """The passes that samplers of one state began, the generators before the first of them, and
    the labels of their epochs.

    Each loader that is iterated over draws from the global generators, and in mid-epoch a run
    that was never interrupted did not iterate. So what they were before the first draw after a
    resume is put back when the first batch is asked for.
    """

    def __init__(self, epoch_labels: Sequence[EpochLabels] = ()) -> None:
        self.passes_begun = 0
        self.epoch_labels = list(epoch_labels)
        self._warned = False  # that progress.epoch is not counted
        self._at_beginning: set[object] = set()
        self._rng_state: dict[str, Any] | None = None

    def record_load(self, sampler: object, *, at_beginning: bool) -> None:
        """A resume put the sampler somewhere, maybe at the beginning of a pass."""
        (self._at_beginning.add if at_beginning else self._at_beginning.discard)(sampler)
        self._rng_state = None

    def save_rng_state(self) -> None:
        """Before a loader draws for the first pass after a resume.

        Not while one of the samplers is still to begin a pass at its beginning: the version is from
        between two passes, and the run that was never interrupted iterated as well.
        """
        if self._rng_state is None and not self._at_beginning:
            self._rng_state = RNG().state_dict()

    def record_step(self) -> None:
        """A step has not completed the epoch of one of them. Those whose epoch it has completed
        are in a pass that goes on, or that has been cut short by the end of another sampler."""
        for labels in self.epoch_labels:
            labels.record_step()

    def begin_pass(self, sampler: object, epoch: int, resumed: bool) -> None:
        """A sampler is asked for the first batch of a pass, its first one after a resume or not."""
        self.passes_begun += 1
        self._warn_uncounted(sampler, epoch)
        self._at_beginning.discard(sampler)
        generators, self._rng_state = self._rng_state, None
        if resumed and generators is not None:
            RNG().load_state_dict(generators)

    def _warn_uncounted(self, sampler: object, epoch: int) -> None:
        """A short data set may have several epochs in one of a long one, so all are asked."""
        if self._warned or not all(labels.is_never_counted() for labels in self.epoch_labels):
            return
        self._warned = True
        label = self.epoch_labels[0].current
        warnings.warn(
            f"{sampler} goes on to epoch {epoch}, and progress.epoch is still {label}: "
            "count progress.epoch, by progress.epoch += 1 after the loop over the loader. "
            f"After a restart a loop over epochs would begin at epoch {label} again",
            UncountedEpochs,
            stacklevel=4,
        )
