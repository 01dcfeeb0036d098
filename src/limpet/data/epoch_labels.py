"""Relates ``progress.epoch`` to the epochs of a sampler if a loop never calls ``end_epoch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from limpet.data.progress import Progress


class EpochLabels:
    """Determines whether the user has counted an epoch as complete.

    A training loop increments ``progress.epoch`` after each pass, or sets it before the pass, or
    sets it at every batch. The value at a step that does not complete the epoch is therefore the
    label of the epoch, and a greater value means that the epoch is counted. An epoch of one step
    has no such step. Its label is the value at the beginning of the pass, unless that value is one
    too low because the loop sets it only within the pass.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._pass_epoch: int | None = None  # the epoch at whose end the pass ends
        self._latest_label: tuple[int, int] | None = None  # an epoch and its label
        self._first_label: tuple[int, int] | None = None  # the epoch and label of the first pass

    @property
    def current(self) -> int | None:
        """The value of ``progress.epoch``, or None without a ``Progress``."""
        return None if self._progress is None else self._progress._epoch

    def follow(self, progress: Progress | None) -> None:
        """Use this ``Progress`` from now on."""
        self._progress, self._first_label = progress, None

    def reset(self) -> None:
        """Forget all labels, because those before a resume belong to another training."""
        self._pass_epoch = self._latest_label = self._first_label = None

    def begin_pass(self, epoch: int) -> None:
        """Record the beginning of a pass that ends with this epoch."""
        self._pass_epoch, label = epoch, self.current
        if label is None:
            return
        if (
            self._latest_label is None
            or epoch - self._latest_label[0] != label - self._latest_label[1] + 1
        ):
            self._latest_label = (epoch, label)
        if self._first_label is None:
            self._first_label = (epoch, label)

    def record_step(self) -> None:
        """Record a step that did not complete the epoch."""
        if self._pass_epoch is not None and self.current is not None:
            self._latest_label = (self._pass_epoch, self.current)

    def is_counted(self, epoch: int) -> bool:
        """Return True if the user has counted this epoch, which was fully yielded, as complete."""
        return (
            self.current is not None
            and self._latest_label is not None
            and self.current - self._latest_label[1] > epoch - self._latest_label[0]
        )

    def is_never_counted(self) -> bool:
        """Return True if nobody increments ``progress.epoch``: the third epoch has the same label.

        Two epochs may have the same label if the loop sets ``progress.epoch`` within the pass.
        """
        return (
            self._first_label is not None
            and self._pass_epoch is not None
            and self._pass_epoch >= self._first_label[0] + 2
            and self.current == self._first_label[1]
        )
