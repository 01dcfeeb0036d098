"""What is known of the versions of a run, so that deciding about a thousand of them after every
save does not read a thousand manifests: manifests and evaluations never change, so each is read
once in the life of a ``Run``, and the little that decisions need of it is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast import events
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, HoldfastError, ManifestInvalid, NotFound
from holdfast.format import names
from holdfast.format.manifest import MAX_BYTES
from holdfast.format.names import Version
from holdfast.format.records import MAX_RECORD, Evaluation, decode_evaluation
from holdfast.run.metrics import check_metrics, numbers, plain
from holdfast.run.policy import Record
from holdfast.storage.store import Stat, Store

_VERSION = re.compile(rb"version_[0-9]{1,18}(?:\.[1-9][0-9]{0,8})?")


@dataclass(frozen=True, slots=True)
class Listing:
    """One look at a run's store: objects by version folder, the numbers of branches, pins of
    processes, and the versions that lasting pins are for."""

    folders: Mapping[Version, Sequence[Stat]]
    branches: list[int]
    pins: list[Stat]
    lasting: dict[Version, Stat]

    @property
    def versions(self) -> list[Version]:
        """Versions with a manifest, that is: all that exist; oldest first."""
        return sorted(v for v, files in self.folders.items() if manifest_in(files) is not None)


def manifest_in(files: Iterable[Stat]) -> Stat | None:
    """The manifest among the files of a version's folder."""
    return next((f for f in files if f.key.endswith("/" + names.MANIFEST)), None)


def orphans(listing: Listing, known: Mapping[Version, Known]) -> list[tuple[Version, Stat]]:
    """The files in versions' folders that no manifest names or refers to: shards and indexes, and
    evaluations where there is no manifest. None beside a manifest that cannot be read: it may
    name them."""
    named = {key for k in known.values() for key in k.files}
    found = []
    for version, files in listing.folders.items():
        manifest = known.get(version)
        if manifest is None or manifest.digest:
            for stat in files:
                name = stat.key.rpartition("/")[2]
                evaluates = manifest is None and names.parse_evaluation(name) is not None
                if evaluates or (names.attempt_of(name) is not None and stat.key not in named):
                    found.append((version, stat))
    return found


@dataclass(frozen=True, slots=True)
class Known:
    """Of one version. ``files``: keys in the run and lengths of all that its manifest names or
    refers to. A manifest that is damaged has no ``digest`` and names nothing; whatever versions
    its bytes mention count as its ``bases`` then."""

    digest: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    bases: frozenset[Version] = frozenset()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def intact(self, lengths: Mapping[str, int]) -> bool:
        """Whether the manifest is sound and every file is there in full length."""
        return self.digest != "" and all(lengths.get(k) == n for k, n in self.files.items())


class Ledger:
    """Reads what is to be known of versions, each file once. Raises ``StoreError`` where the
    store fails: what a manifest says cannot be told then, and nothing may be deleted."""

    def __init__(self, store: Store, open_: Callable[[Version], Snapshot]) -> None:
        self._store = store
        self._open = open_
        self._manifests: dict[Stat, Known] = {}
        self._evaluations: dict[tuple[Stat, str], tuple[Evaluation, ...]] = {}

    def versions(self, listing: Listing) -> dict[Version, Known]:
        """All versions that exist; one that is deleted meanwhile is left out."""
        found = {}
        for version in listing.versions:
            known = self.version(version, listing.folders[version])
            if known is not None:
                found[version] = known
        self._forget(listing)
        return found

    def version(self, version: Version, files: Sequence[Stat]) -> Known | None:
        """One version, by the files of its folder; None if it is gone."""
        manifest = manifest_in(files)
        if manifest is None:
            return None
        known = self._manifests.get(manifest)
        if known is None:
            try:
                known = self._manifests[manifest] = self._read(version, manifest)
            except NotFound:
                return None
        return known

    def _read(self, version: Version, manifest: Stat) -> Known:
        try:
            return known_of(self._open(version))
        except FormatError as e:
            events.emit("skipped", version=str(version), error=e)
            raw = self._store.get(manifest.key, MAX_BYTES)
            mentioned = {names.parse_version(m.decode()) for m in _VERSION.findall(raw)}
            return Known(bases=frozenset(v for v in mentioned if v is not None))

    def records(
        self, line: Iterable[Version], listing: Listing, known: Mapping[Version, Known]
    ) -> list[Record]:
        """The intact versions of a line, oldest first, with their metrics."""
        lengths = {s.key: s.length for files in listing.folders.values() for s in files}
        return [
            Record(v, self.metrics(v, known[v], listing.folders[v]))
            for v in line
            if v in known and known[v].intact(lengths)
        ]

    def metrics(self, version: Version, known: Known, files: Sequence[Stat]) -> dict[str, float]:
        """The metrics of the save and of evaluations; of a metric that several have the newest."""
        found = dict(known.metrics)
        for evaluation in self.evaluations(version, known.digest, files):
            found.update(evaluation.numbers())
        return found

    def evaluations(self, version: Version, digest: str, files: Sequence[Stat]) -> list[Evaluation]:
        """The evaluations of the snapshot with that manifest, oldest first; what is damaged or
        of another snapshot is skipped, with an event."""
        found: list[Evaluation] = []
        for stat in files:
            name = names.parse_evaluation(stat.key.rpartition("/")[2])
            if name is not None:
                found += self._evaluation(stat, (*name, str(version), digest))
        return sorted(found, key=_age)

    def _evaluation(self, stat: Stat, expected: tuple[str, ...]) -> tuple[Evaluation, ...]:
        """The evaluation in a file; none if it is damaged or not what is expected."""
        read = self._evaluations.get((stat, expected[-1]))
        if read is None:
            try:
                read = (self._read_evaluation(stat.key, expected),)
            except NotFound:
                return ()
            except FormatError as e:
                events.emit("skipped", version=stat.key, error=e)
                read = ()
            self._evaluations[stat, expected[-1]] = read
        return read

    def _read_evaluation(self, key: str, expected: tuple[str, ...]) -> Evaluation:
        found = decode_evaluation(self._store.get(key, MAX_RECORD), key)
        said = (found.name, found.attempt, found.version, found.manifest_digest)
        if said != expected:
            raise ManifestInvalid(
                f"{key} evaluates another snapshot, or has the name of another",
                expected=", ".join(expected),
                found=", ".join(said),
                file=key,
            )
        return found

    def _forget(self, listing: Listing) -> None:
        there = {stat for files in listing.folders.values() for stat in files}
        for stat in list(self._manifests):
            if stat not in there:
                self._manifests.pop(stat, None)
        for pair in list(self._evaluations):
            if pair[0] not in there:
                self._evaluations.pop(pair, None)


def known_of(snapshot: Snapshot) -> Known:
    """What is known of an open snapshot."""
    files = {}
    for shard in snapshot.manifest.shards:
        files[snapshot.place.key(shard.name)] = shard.length
        files[snapshot.place.key(shard.index.name)] = shard.index.length
        for other in shard.refers:
            files[snapshot.place.beside(other.path.removeprefix("../"))] = other.length
    return Known(snapshot.digest, files, snapshot.bases, numbers(snapshot.metadata.get("metrics")))


def training_of(snapshot: Snapshot) -> Mapping[str, Any]:
    """What a version notes of its training for the services, which another writer may have left
    out."""
    found = snapshot.metadata.get("training")
    return found if isinstance(found, dict) else {}


def new_evaluation(
    name: str,
    version: Version,
    digest: str,
    metrics: Mapping[str, Any],
    earlier: Iterable[Evaluation],
) -> Evaluation:
    """An attempt that is newer than all ``earlier`` ones, also where the clock has jumped: of
    which the newest is told by its time alone. Raises ``HoldfastError`` for what cannot be kept."""
    attempt = names.new_attempt()
    if names.parse_evaluation(names.evaluation_name(name, attempt)) is None:
        raise HoldfastError(
            f"No evaluation can be called {str(name)[:80]!r}",
            expected="1 to 64 of the characters a-z, A-Z, 0-9, - and _",
            found=repr(name)[:80],
        )
    past = [datetime.fromisoformat(e.created) + timedelta(seconds=1) for e in earlier]
    created = max([datetime.now(UTC), *past]).isoformat(timespec="seconds")
    return Evaluation(name, attempt, str(version), digest, created, plain(check_metrics(metrics)))


def _age(evaluation: Evaluation) -> tuple[str, str]:
    return evaluation.created, evaluation.attempt
