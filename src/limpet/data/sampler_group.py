"""The state that the samplers of one training state share, for loops over several loaders."""

from __future__ import annotations

from collections.abc import Sequence

from limpet.data.epoch_labels import EpochLabels
from limpet.errors import UncountedEpochs
from limpet.generators import States, capture_states, restore_states
from limpet.text import warn_user


class SamplerGroup:
    """The passes, the random generators before the first pass, and the epoch labels of a group.

    Each loader draws from the global generators when its iterator is created. A run that was never
    interrupted creates no iterator in the middle of an epoch. The group therefore saves the state
    of the generators before the first draw after a resume, and restores it when the first batch is
    requested.
    """

    def __init__(self, epoch_labels: Sequence[EpochLabels] = ()) -> None:
        self.passes_begun = 0
        self.has_ends = False
        """True once the loop has called ``end_epoch``: only that ends an epoch."""

        self.epoch_labels = list(epoch_labels)
        self._warned = False  # that nobody increments progress.epoch
        self._at_beginning: set[object] = set()
        self._rng_state: States | None = None

    def record_load(self, sampler: object, *, at_beginning: bool) -> None:
        """Record that a resume set the position of a sampler."""
        (self._at_beginning.add if at_beginning else self._at_beginning.discard)(sampler)
        self._rng_state = None

    def save_rng_state(self) -> None:
        """Save the state of the generators before a loader draws for the first pass after a resume.

        Nothing is saved while a sampler has yet to begin a pass from its beginning. The version was
        then saved between two passes, and the uninterrupted run also created an iterator.
        """
        if self._rng_state is None and not self._at_beginning:
            self._rng_state = capture_states()

    def record_step(self) -> None:
        """Record, for all samplers, a step that did not complete the epoch of one of them.

        Samplers whose epoch the step completed are in a pass that continues, or in one that ended
        early because another sampler was exhausted.
        """
        for labels in self.epoch_labels:
            labels.record_step()

    def is_counted(self, labels: EpochLabels, epoch: int) -> bool:
        """Return True if the loop counts its epochs itself, and has counted this one."""
        return not self.has_ends and labels.is_counted(epoch)

    def begin_pass(self, sampler: object, epoch: int, resumed: bool) -> None:
        """Record the beginning of a pass. ``resumed``: it is the first pass after a resume."""
        self.passes_begun += 1
        self._warn_uncounted(sampler, epoch)
        self._at_beginning.discard(sampler)
        rng_state, self._rng_state = self._rng_state, None
        if resumed and rng_state is not None:
            restore_states(rng_state)

    def _warn_uncounted(self, sampler: object, epoch: int) -> None:
        """Warn once if no label of any sampler changes.

        All samplers are checked because a short dataset may have several epochs during one epoch
        of a long dataset.
        """
        if self._warned or not all(labels.is_never_counted() for labels in self.epoch_labels):
            return
        self._warned = True
        label = self.epoch_labels[0].current
        warn_user(
            f"{sampler} starts epoch {epoch}, but progress.epoch is still {label}. Call "
            "ckpt.end_epoch() after the loop over the loader, and loop by `while progress.epoch < "
            "N`. Otherwise, the training makes all N epochs again after a restart",
            UncountedEpochs,
        )
