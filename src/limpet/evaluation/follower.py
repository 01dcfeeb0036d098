"""Follows a run: finds the next version to evaluate, and knows what has been evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from limpet import events
from limpet.errors import FormatError, NotFound
from limpet.evaluation.options import Selection
from limpet.format.names import Version
from limpet.format.records import Evaluation, FailedEvaluation
from limpet.loading.snapshot import Snapshot
from limpet.run.lineage import lineage_folders
from limpet.run.listing import Listing
from limpet.run.run import Run
from limpet.threads import no_op

_State = Literal["found", "open", "done", "failed", "unreadable"]
"""What is known of a version: it exists; it was looked up, and has no record of the evaluation; it
has a result; its evaluation has failed; it is damaged, or was deleted before it was evaluated."""


class Follower:
    """Finds versions of a run that the evaluation ``name`` has not evaluated yet. If nothing is
    new, a look costs one listing, and a request for each folder without a version."""

    def __init__(self, run: Run, name: str, selection: Selection) -> None:
        self._run, self._name, self._selection = run, name, selection
        self.on_damaged: Callable[[Version, FormatError], object] = no_op
        """Called once for each version whose manifest is damaged: it is left out."""

        self._branch = 0
        self._known: dict[Version, _State] = {}
        self._deleted: set[Version] = set()  # those that were evaluated
        self.metrics: set[str] = set()

    def in_state(self, state: _State) -> list[Version]:
        """Return the versions in a state, in order."""
        return sorted([version for version, known in self._known.items() if known == state])

    def next(self) -> tuple[Snapshot, Sequence[Version]] | None:
        """Return the snapshot to evaluate next, if any, and the versions that wait behind it."""
        listing = self._run.listing()
        folders = self._list(listing)
        while True:
            versions = sorted({*self._find(folders, listing), *self._deleted})
            self._look_up(versions)
            done = {*self.in_state("done"), *self._deleted}
            version, waiting = self._selection.next(versions, done, self.in_state("failed"))
            if version is None:
                return None
            try:
                return self._run.open(version), waiting
            except (FormatError, NotFound) as e:
                self.pass_over(version, e)

    def finish(self, version: Version) -> None:
        """Note that a version was evaluated by this process. It is not evaluated again."""
        self._known[version] = "done"

    def _list(self, listing: Listing) -> Sequence[Version]:
        """Return the versions of the lineage with a folder; forget others, which may be saved
        again. Evaluated ones count until the training continues on a branch."""
        branch = self._run.branch(listing)
        folders = lineage_folders(self._run.catalog, listing, branch)
        for version in self._known.keys() - set(folders):
            self._run.catalog.forget(version)
            if self._known.pop(version) in ("done", "failed"):
                self._deleted.add(version)
        self._deleted.difference_update(folders)
        if branch != self._branch:
            self._branch, self._deleted = branch, set()
        return folders

    def _find(self, folders: Sequence[Version], listing: Listing) -> list[Version]:
        """Return the versions that exist and that matter: all, or only the newest one."""
        selection, found = self._selection, list[Version]()
        needs_all = selection.skip_none or selection.retry or selection.every_steps is not None
        for version in reversed(folders):
            if self._known.get(version) == "unreadable":
                continue
            if version in self._known or listing.exists(version):
                self._known.setdefault(version, "found")
                found.append(version)
                if not needs_all:
                    break
        return found

    def _look_up(self, versions: Sequence[Version]) -> None:
        """Find out which versions have been evaluated, as far as that matters."""
        wanted = self._selection.wanted(versions)
        if not (self._selection.skip_none or self._selection.retry):
            wanted = wanted[-1:]
        for version in wanted:
            # the lease lets nobody else evaluate under this name
            if self._known.get(version) != "found":
                continue
            try:
                digest = self._run.catalog.open(version).digest
            except (FormatError, NotFound) as e:
                self.pass_over(version, e)
                continue
            newest = self._run.catalog.evaluations.read(version, digest).newest(self._name)
            self._known[version] = "open"
            if isinstance(newest, Evaluation):
                self._known[version] = "done"
                self.metrics.update(newest.metrics)
            elif isinstance(newest, FailedEvaluation):
                self._known[version] = "failed"

    def pass_over(self, version: Version, error: FormatError | NotFound) -> None:
        """Leave out a version that is damaged or was deleted, and report it once."""
        if self._known.get(version) == "unreadable":
            return
        self._known[version] = "unreadable"
        events.emit("skipped", version=str(version), error=error)
        if isinstance(error, FormatError):
            self.on_damaged(version, error)
