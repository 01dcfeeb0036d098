"""Follows a run: finds the next version to evaluate, and knows what has been evaluated."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast import events
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, NotFound
from holdfast.evaluation.schedule import Selection
from holdfast.format.names import Version
from holdfast.format.records import Evaluation, FailedEvaluation
from holdfast.run.run import Run


class Follower:
    """Finds versions of a run that the evaluation ``name`` has not evaluated yet.

    Each record is read once. A look at a run in which nothing is new costs one listing.
    ``metrics``: the names of those in the results that were recorded earlier, as far as they were
    looked up.
    """

    def __init__(self, run: Run, name: str, selection: Selection) -> None:
        self._run, self._name, self._selection = run, name, selection
        self._looked_up: set[Version] = set()
        self._done: set[Version] = set()
        self._failed: set[Version] = set()
        self._unreadable: set[Version] = set()
        self.metrics: set[str] = set()

    @property
    def failed(self) -> list[Version]:
        """The versions whose evaluation has failed, and is not tried again."""
        return sorted(self._failed)

    def next(self) -> tuple[Snapshot, Sequence[Version]] | None:
        """Return the snapshot to evaluate next, and the versions that wait behind it.

        The result is None if nothing is to be evaluated now. Raises ``StoreError``.
        """
        while True:
            versions = [v for v in self._run.line() if v not in self._unreadable]
            self._look_up(versions)
            version, waiting = self._selection.next(versions, self._done, self._failed)
            if version is None:
                return None
            if version in self._unreadable:  # as of now
                continue
            try:
                return self._run.open(version), waiting
            except (FormatError, NotFound) as e:
                self._pass_over(version, e)

    def finish(self, version: Version) -> None:
        """Note that a version was evaluated by this process. It is not evaluated again."""
        self._failed.discard(version)
        self._done.add(version)

    def _look_up(self, versions: Sequence[Version]) -> None:
        """Find out which versions have been evaluated, as far as that matters."""
        wanted = self._selection.wanted(versions)
        if not (self._selection.skip_none or self._selection.retry):
            wanted = wanted[-1:]
        for version in wanted:
            if version in self._looked_up:  # the lease lets nobody else evaluate under this name
                continue
            try:
                digest = self._run.open(version).digest
            except (FormatError, NotFound) as e:
                self._pass_over(version, e)
                continue
            newest = self._run.catalog.evaluations.read(version, digest).newest(self._name)
            self._looked_up.add(version)
            if isinstance(newest, Evaluation):
                self._done.add(version)
                self.metrics.update(newest.metrics)
            elif isinstance(newest, FailedEvaluation):
                self._failed.add(version)

    def _pass_over(self, version: Version, error: FormatError | NotFound) -> None:
        """Leave out a version that is damaged or was deleted, and report it."""
        self._unreadable.add(version)
        events.emit("skipped", version=str(version), error=error)
