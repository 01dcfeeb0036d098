"""What the samplers of one state must know of each other, where a loop reads them side by side."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from holdfast.data.epoch_labels import Labels
from holdfast.data.rng import RNG
from holdfast.errors import UncountedEpochs


class Together:
    """The passes that samplers of one state began, the generators before the first of them, and
    the labels of their epochs.

    Each loader that is iterated over draws from the global generators, and in mid-epoch a run
    that was never interrupted did not iterate. So what they were before the first draw after a
    resume is put back when the first batch is asked for.
    """

    def __init__(self, labels: Sequence[Labels] = ()) -> None:
        self.begun = 0
        self.labels = list(labels)
        self._told = False  # that progress.epoch is not counted
        self._beginning: set[object] = set()
        self._generators: dict[str, Any] | None = None

    def loaded(self, sampler: object, *, at_beginning: bool) -> None:
        """A resume put the sampler somewhere, maybe at the beginning of a pass."""
        (self._beginning.add if at_beginning else self._beginning.discard)(sampler)
        self._generators = None

    def note_generators(self) -> None:
        """Before a loader draws for the first pass after a resume.

        Not while one of the samplers is still to begin a pass at its beginning: the version is from
        between two passes, and the run that was never interrupted iterated as well.
        """
        if self._generators is None and not self._beginning:
            self._generators = RNG().state_dict()

    def stepped(self) -> None:
        """A step has not completed the epoch of one of them. Those whose epoch it has completed
        are in a pass that goes on, or that has been cut short by the end of another sampler."""
        for labels in self.labels:
            labels.stepped()

    def begin(self, sampler: object, epoch: int, resumed: bool) -> None:
        """A sampler is asked for the first batch of a pass, its first one after a resume or not."""
        self.begun += 1
        self._tell_uncounted(sampler, epoch)
        self._beginning.discard(sampler)
        generators, self._generators = self._generators, None
        if resumed and generators is not None:
            RNG().load_state_dict(generators)

    def _tell_uncounted(self, sampler: object, epoch: int) -> None:
        """A short data set may have several epochs in one of a long one, so all are asked."""
        if self._told or not all(labels.forgotten() for labels in self.labels):
            return
        self._told = True
        label = self.labels[0].now
        warnings.warn(
            f"{sampler} goes on to epoch {epoch}, and progress.epoch is still {label}: "
            "count progress.epoch, by progress.epoch += 1 after the loop over the loader. "
            f"After a restart a loop over epochs would begin at epoch {label} again",
            UncountedEpochs,
            stacklevel=4,
        )
