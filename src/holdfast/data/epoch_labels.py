"""What ``progress.epoch``, which is the user's to count, tells of the epochs of a sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.data.progress import Progress


class EpochLabels:
    """Whether the user has counted an epoch as done.

    A loop counts after the pass, sets ``progress.epoch`` before it, or within it for every batch.
    So what it is at a step that does not complete the epoch is the epoch's label, and more than
    that is a count. An epoch of one step has no such step: there the label at the beginning of the
    pass is taken, unless it is one behind, as it is where the pass is yet to set it.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._pass_epoch: int | None = None  # at whose end the pass ends
        self._latest_label: tuple[int, int] | None = None  # an epoch, and its label
        self._first_label: tuple[int, int] | None = None  # those of the first pass

    @property
    def current(self) -> int | None:
        """What ``progress.epoch`` is, where there is a ``Progress``."""
        return None if self._progress is None else self._progress.epoch

    def follow(self, progress: Progress | None) -> None:
        self._progress, self._first_label = progress, None

    def reset(self) -> None:
        """After a resume all that was seen before is of another training."""
        self._pass_epoch = self._latest_label = self._first_label = None

    def begin_pass(self, epoch: int) -> None:
        """A pass begins, that ends with this epoch."""
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
        """A step has not completed the epoch."""
        if self._pass_epoch is not None and self.current is not None:
            self._latest_label = (self._pass_epoch, self.current)

    def is_counted(self, epoch: int) -> bool:
        """Whether this epoch, of which all was given out, is counted as done."""
        if self.current is None or self._latest_label is None:
            return False
        return self.current - self._latest_label[1] > epoch - self._latest_label[0]

    def is_never_counted(self) -> bool:
        """Whether nobody counts: it is the third epoch of one label. Twice the same is what a loop
        may have that sets it within the pass."""
        if self._first_label is None or self._pass_epoch is None:
            return False
        return self._pass_epoch >= self._first_label[0] + 2 and self.current == self._first_label[1]
