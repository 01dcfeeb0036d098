"""The saves of one training that are in flight, and the waits for them."""

from __future__ import annotations

from functools import partial

from limpet.deadline import Deadline
from limpet.ranks.group import broadcast_from_first
from limpet.run.writer import VersionWriter
from limpet.saving.pending import Pending
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.snapshot import reader_of
from limpet.tiers.local_snapshots import Promotion
from limpet.training.saves.save_spec import version_of


class SavesInFlight:
    """At most one save that the next one must wait for, and those before it that are complete on a
    local disk and only have to be promoted to the run.

    A wait makes the version that was saved the ``newest`` one of the ``writer``. The training
    thread calls all methods; other threads may read the properties.
    """

    def __init__(self, writer: VersionWriter) -> None:
        self._writer, self._group = writer, writer.group
        self._operation = f"the end of a save to {writer.url}"
        self._saves: list[tuple[Pending, Promotion | None]] = []  # oldest first
        self._errors: list[Exception] = []
        self.post_commit_error: Exception | None = None
        """The error of what followed a commit. The next wait raises it, once."""

    def add(self, pending: Pending, promotion: Promotion | None) -> None:
        """Count a save. With a ``promotion``, the next save waits until that has begun. Otherwise,
        it waits until this one has ended."""
        self._saves.append((pending, promotion))

    def discard_after(self, previous: Pending | None) -> None:
        """Forget a save that was added after ``previous``: it will never begin."""
        if self.newest is not previous:
            self._saves.pop()

    @property
    def newest(self) -> Pending | None:
        return self._saves[-1][0] if self._saves else None

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        return any(not pending.done for pending, _ in self._saves)

    @property
    def must_wait(self) -> bool:
        """True if the next save would have to wait."""
        return any(
            not (pending.done or (promotion is not None and promotion.has_begun.is_set()))
            for pending, promotion in self._saves
        )

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait for all saves. Raises the error of the first one that failed.

        With a ``deadline``, the process is about to leave, and only the newest save counts. Raises
        ``TimeoutError`` at the deadline.
        """
        if deadline is None:
            for pending, _ in list(self._saves):
                pending.wait_ended()
            self.raise_failure()
        elif self._saves:
            newest = self._saves[-1][0]
            self._end(newest, deadline.seconds_left)
            for pending, _ in self._saves:  # a promotion that fails later must not change the exit
                pending.forget()

    def wait_for_turn(self) -> None:
        """Wait until the next save may begin. Raises the error of the first one that failed."""
        for pending, promotion in list(self._saves):
            if promotion is None:
                pending.wait_ended()
            else:
                promotion.has_begun.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Take the results of the saves that have ended, without a wait. Raise the first error;
        later calls raise the others."""
        for pending, _ in list(self._saves):
            if pending.done:
                try:
                    self._end(pending, None)
                except Exception as e:  # noqa: BLE001  (raised below, in order)
                    self._errors.append(e)
        if self._errors:
            raise self._errors.pop(0)
        if self.post_commit_error is not None:
            error, self.post_commit_error = self.post_commit_error, None
            raise error

    def wait_on_all_ranks(self, deadline: Deadline | None = None) -> None:
        """Wait as ``wait`` does. If one rank raises, all do: none of them goes on to a collective
        operation that the others never reach."""
        wait = partial(self.wait, deadline)
        broadcast_from_first(self._group, self._operation, lambda: True, bool, wait, deadline)

    def wait_for_turn_on_all_ranks(self) -> None:
        """Wait as ``wait_for_turn`` does. If one rank raises, all do."""
        wait = self.wait_for_turn
        broadcast_from_first(self._group, self._operation, lambda: True, bool, wait)

    def take(self, snapshot: SnapshotReader) -> None:
        """Count the result of a save, unless it is older, or a local version that is damaged."""
        newest = self._writer.newest
        is_newer = newest is None or version_of(snapshot) >= version_of(newest)
        if is_newer and not snapshot.location.is_per_host:
            self._writer.newest = snapshot

    def wait_before_last(self, is_begun: bool, deadline: Deadline) -> None:
        """Wait on all ranks before the last save of a training. ``is_begun``: it is in flight.
        Otherwise, no promotion is awaited."""

        def wait() -> None:
            for pending, promotion in list(self._saves):
                has_ended = pending.wait_ended if promotion is None else promotion.is_local.wait
                if not has_ended(deadline.seconds_left):
                    raise TimeoutError(f"{self._operation} did not come in time")
            self.raise_failure()

        if is_begun:
            self.wait_on_all_ranks(deadline)
        else:
            broadcast_from_first(self._group, self._operation, lambda: True, bool, wait, deadline)

    def _end(self, pending: Pending, timeout: float | None) -> None:
        try:
            self.take(reader_of(pending.wait(timeout)))
        except BaseException as e:  # after an interrupt, or the timeout, the save still counts
            if e is pending.error:
                self._remove(pending)
            raise
        self._remove(pending)

    def _remove(self, pending: Pending) -> None:
        self._saves = [entry for entry in self._saves if entry[0] is not pending]
