"""Which captured states continue the current lineage of a run."""

from __future__ import annotations

from math import inf

from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError
from holdfast.format.names import Version
from holdfast.run.catalog import read_sessions
from holdfast.run.lineage import branch_origin, newest_version
from holdfast.run.run import Run
from holdfast.tiers.inventory import Candidate


class CurrentLine:
    """The current lineage of a run, of which ``newest`` is the newest version, or None.

    ``branch``: its number. ``durable``: the newest version, or None if there is none, or if its
    manifest is damaged. Raises ``FormatError`` for the record of a branch, and ``StoreError``.
    """

    def __init__(self, run: Run) -> None:
        listing = run.listing()
        self.newest = newest_version(run.catalog, listing)
        self.branch = number = run.branch(listing)
        self._last_steps: dict[int, float] = {number: inf}
        while number and (origin := branch_origin(run.catalog, number, listing.folders)):
            number = origin.branch
            self._last_steps[number] = origin.step
        self.durable: Snapshot | None = None
        self._session = ""
        self._is_damaged = False
        if self.newest is not None:
            try:
                durable = run.open(self.newest)
                self._session = next(iter(read_sessions(durable)), "")
                self.durable = durable
            except FormatError:
                self._is_damaged = True

    def is_newer(self, version: Version) -> bool:
        """Return True if a version of this lineage is newer than all that the run has."""
        is_later = self.newest is None or version.step > self.newest.step
        return is_later and version.step <= self._last_steps.get(version.branch, -1)

    def is_continued_by(self, candidate: Candidate, captured: Snapshot) -> bool:
        """Return True if a captured state continues from the newest version of the run, or from
        none.

        It names that version as its parent, or the same training, or one that it has resumed from,
        captured it before the version was committed. A host that was away for a while may have a
        state from before. If the manifest of the newest version is damaged, this cannot be told,
        and the state counts. Reads the manifest of ``captured``; raises ``FormatError``.
        """
        if self._is_damaged:
            return True
        parent = None if candidate.parent is None else candidate.parent.version
        if parent == (None if self.newest is None else str(self.newest)):
            return True
        return self._session != "" and self._session in read_sessions(captured)
