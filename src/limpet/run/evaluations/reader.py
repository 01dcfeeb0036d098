"""Reads what is recorded about versions, each record once: none of them ever changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from limpet.errors import BrokenLink, FormatError, LimpetError, ManifestInvalid, NotFound
from limpet.format.names import EvaluationFile, Version, parse_evaluation
from limpet.format.records import (
    MAX_RECORD,
    AboutVersion,
    Evaluation,
    FailedEvaluation,
    decode_about_version,
)
from limpet.snapshot.location import get_bounded
from limpet.storage.store import Entry, Store

_T = TypeVar("_T", bound=AboutVersion)


@dataclass(frozen=True, slots=True)
class VersionEvaluations:
    """The records about one snapshot, oldest first."""

    records: tuple[AboutVersion, ...] = ()

    def of(self, kind: type[_T]) -> list[_T]:
        """Return the records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the results. A newer result overrides an older one."""
        metrics: dict[str, float] = {}
        for evaluation in self.of(Evaluation):
            metrics.update(evaluation.decoded_metrics())
        return metrics

    def newest(self, name: str) -> Evaluation | FailedEvaluation | None:
        """Return the newest result or failure of the evaluation ``name``, or None."""
        outcomes = [r for r in self.outcomes() if r.name == name]
        return outcomes[-1] if outcomes else None

    def outcomes(self) -> list[Evaluation | FailedEvaluation]:
        """Return the results and the failures of evaluations."""
        return [r for r in self.records if isinstance(r, Evaluation | FailedEvaluation)]


class EvaluationReader:
    """Reads the records in the folders of versions, and keeps them.

    ``entries`` lists what is in the folder of a version under a name that begins with ``eval-``.
    For each record that is damaged or about another snapshot, ``report`` is called with the key and
    the error, and the record is omitted.
    """

    def __init__(
        self,
        store: Store,
        entries: Callable[[Version], Iterable[Entry]],
        report: Callable[[str, LimpetError], object],
    ) -> None:
        self._store = store
        self._entries = entries
        self._report = report
        self._known: dict[Version, dict[tuple[str, str], AboutVersion | None]] = {}

    def read(self, version: Version, digest: str) -> VersionEvaluations:
        """Return the records about the snapshot whose manifest has ``digest``.

        The folder of the version is listed, because a record can be added at any time.
        """
        records = list[AboutVersion]()
        for entry in self._entries(version):
            file = parse_evaluation(entry.name)
            if file is not None and entry.kind != "folder":
                found = self._read_cached(version, file, digest)
                if found is not None:
                    records.append(found)
        return VersionEvaluations(tuple(in_order(records)))

    def forget(self, version: Version) -> None:
        """Drop what is known of a version that does not exist any more."""
        self._known.pop(version, None)

    def _read_cached(
        self, version: Version, file: EvaluationFile, digest: str
    ) -> AboutVersion | None:
        """Return what is in a file, or None if it is missing or damaged, or does not belong
        there."""
        known, key = self._known.setdefault(version, {}), f"{version}/{file}"
        if (key, digest) in known:
            return known[key, digest]
        found: AboutVersion | None = None
        try:
            record = decode_about_version(get_bounded(self._store, key, MAX_RECORD), key, file.kind)
            error = _find_mismatch(record, key, version, file, digest)
            found = record if error is None else None
        except NotFound:
            return None
        except FormatError as e:
            error = e
        if error is not None:
            self._report(key, error)
        if not isinstance(error, BrokenLink):  # its target may come back
            known[key, digest] = found
        return found


def _find_mismatch(
    record: AboutVersion, key: str, version: Version, file: EvaluationFile, digest: str
) -> FormatError | None:
    """Return why an intact record says nothing about the snapshot, or None if it does."""
    found = record.name, record.attempt, record.version, record.manifest_digest
    expected = file.name, file.attempt, str(version), digest
    if found == expected:
        return None
    return ManifestInvalid(
        f"{key} is about another snapshot, or has the file name of another record",
        expected=", ".join(expected),
        found=", ".join(found),
        file=key,
    )


def in_order(records: Iterable[AboutVersion]) -> list[AboutVersion]:
    """Return the records from the oldest to the newest."""
    return sorted(records, key=lambda r: (datetime.fromisoformat(r.created), r.attempt))
