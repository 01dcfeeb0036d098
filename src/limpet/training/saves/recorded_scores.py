"""The scores that evaluations record about the versions of a training while it goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from limpet.format.names import Version
from limpet.run.catalog import VersionRecord
from limpet.run.lineage import lineage_of
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.threads import look_up_each

MAX_VERSIONS = 100
"""The newest versions whose records are read after each save, and by polls in turn."""

VERSIONS_PER_POLL = 8
"""The versions whose records one poll reads: each costs a request to the store."""


@dataclass(slots=True)
class _Lineage:
    """The newest versions of a lineage, oldest first, each with the digest of its manifest, the
    scores that were found. Threads read and write it without a lock, one operation at a time."""

    digests: dict[Version, str]
    scores: dict[Version, float] = field(default_factory=dict)
    has_changed: bool = False


class RecordedScores:
    """Reads the records about the versions of a run in background threads, for one metric.

    The training thread takes the scores, and never waits for the store. A resume begins again with
    another lineage; what a thread then still finds on the lineage before is lost.
    """

    def __init__(self, run: Run, metric: str) -> None:
        self._run = run
        self._metric = metric
        self._lineage = _Lineage({})
        self._polled = 0

    def restart(self) -> None:
        """Begin with the current lineage of the run, and read the records of all its versions.

        Raises ``StoreError``.
        """
        catalog, listing = self._run.catalog, self._run.listing()
        known = catalog.read_versions(listing) if listing.folders else {}
        versions = [v for v in lineage_of(catalog, listing) if v in known and known[v].digest]
        digests = {v: known[v].digest for v in versions}
        self._lineage = _Lineage({v: digests[v] for v in versions[-MAX_VERSIONS:]})
        self._read(self._lineage, digests)

    def add(self, snapshot: SnapshotReader) -> None:
        """Add a version that was just committed."""
        lineage = self._lineage
        digests = {**lineage.digests, snapshot.version: snapshot.digest}
        lineage.digests = dict([*digests.items()][-MAX_VERSIONS:])
        for version in [*lineage.scores][: -2 * MAX_VERSIONS]:
            del lineage.scores[version]

    def read_newest(self) -> None:
        """Read the records of the newest versions. Raises ``StoreError``."""
        lineage = self._lineage
        self._read(lineage, lineage.digests)

    def poll(self) -> None:
        """Read the records of some of the newest versions, in turn. Raises ``StoreError``."""
        lineage = self._lineage
        digests = lineage.digests
        versions = [*reversed(digests)]
        if self._polled >= len(versions):
            self._polled = 0
        begin, self._polled = self._polled, self._polled + VERSIONS_PER_POLL
        self._read(lineage, {v: digests[v] for v in versions[begin : self._polled]})

    def read_before_deletion(
        self, versions: Collection[Version], known: Mapping[Version, VersionRecord]
    ) -> dict[Version, float]:
        """Read the records of versions that are to be deleted, and return their scores.

        ``known``: all versions that exist. Raises ``StoreError``.
        """
        lineage = self._lineage
        lineage.digests = {v: d for v, d in lineage.digests.items() if v in known}
        return self._read(lineage, {v: known[v].digest for v in versions})

    def _read(self, lineage: _Lineage, digests: Mapping[Version, str]) -> dict[Version, float]:
        found: dict[Version, float] = {}

        def look(version: Version) -> None:
            records = self._run.catalog.evaluations.read(version, digests[version])
            score = records.metrics().get(self._metric)
            if score is None:
                return
            found[version] = score
            if lineage.scores.get(version) != score:
                lineage.scores[version] = score
                lineage.has_changed = True

        look_up_each([*digests], look)
        return found

    def take(self) -> Mapping[Version, float]:
        """Return all scores if there are new ones since the last call. For the training thread."""
        lineage = self._lineage
        if not lineage.has_changed:
            return {}
        lineage.has_changed = False  # before the copy: what comes meanwhile is taken again
        return lineage.scores.copy()
