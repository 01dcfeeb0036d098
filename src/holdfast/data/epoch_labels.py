"""What ``progress.epoch``, which is the user's to count, tells of the epochs of a sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.data.progress import Progress


class Labels:
    """Whether the user has counted an epoch as done.

    A loop counts after the pass, sets ``progress.epoch`` before it, or within it for every batch.
    So what it is at a step that does not complete the epoch is the epoch's label, and more than
    that is a count. An epoch of one step has no such step: there the label at the beginning of the
    pass is taken, unless it is one behind, as it is where the pass is yet to set it.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._epoch: int | None = None  # at whose end the pass ends
        self._seen: tuple[int, int] | None = None  # an epoch, and its label
        self._first: tuple[int, int] | None = None  # those of the first pass

    @property
    def now(self) -> int | None:
        """What ``progress.epoch`` is, where there is a ``Progress``."""
        return None if self._progress is None else self._progress.epoch

    def follow(self, progress: Progress | None) -> None:
        self._progress, self._first = progress, None

    def forget(self) -> None:
        """After a resume all that was seen before is of another training."""
        self._epoch = self._seen = self._first = None

    def begun(self, epoch: int) -> None:
        """A pass begins, that ends with this epoch."""
        self._epoch, label = epoch, self.now
        if label is None:
            return
        if self._seen is None or epoch - self._seen[0] != label - self._seen[1] + 1:
            self._seen = (epoch, label)
        if self._first is None:
            self._first = (epoch, label)

    def stepped(self) -> None:
        """A step has not completed the epoch."""
        if self._epoch is not None and self.now is not None:
            self._seen = (self._epoch, self.now)

    def counted(self, epoch: int) -> bool:
        """Whether this epoch, of which all was given out, is counted as done."""
        if self.now is None or self._seen is None:
            return False
        return self.now - self._seen[1] > epoch - self._seen[0]

    def forgotten(self) -> bool:
        """Whether nobody counts: it is the third epoch of one label. Twice the same is what a loop
        may have that sets it within the pass."""
        if self._first is None or self._epoch is None:
            return False
        return self._epoch >= self._first[0] + 2 and self.now == self._first[1]
