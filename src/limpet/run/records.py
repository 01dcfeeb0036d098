"""What is recorded about versions after they were saved, which never changes and is read only once:
results and failures of evaluations, ends, and the objectives by which versions are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from limpet import errors, events
from limpet.arguments import require
from limpet.format import names
from limpet.format.digest import digest
from limpet.format.names import EvaluationFile, Version, parse_evaluation
from limpet.format.records import (
    MAX_RECORD,
    AboutVersion,
    Evaluation,
    FailedEvaluation,
    InexactEvaluation,
    Objective,
    Verified,
    VersionLease,
    decode_about_version,
    decode_objective,
    encode_record,
)
from limpet.format.sealed import check_length
from limpet.run.listing import list_entries
from limpet.run.metrics import ADDED_METRICS
from limpet.snapshot.location import get_bounded
from limpet.snapshot.pins import describe_holder
from limpet.storage.store import Store, list_level
from limpet.text import to_repr

_T = TypeVar("_T", bound=AboutVersion)


@dataclass(frozen=True, slots=True)
class VersionEvaluations:
    """The records about one snapshot, oldest first, and whether others are damaged."""

    records: tuple[AboutVersion, ...] = ()
    is_damaged: bool = False

    def of(self, kind: type[_T]) -> list[_T]:
        """Return the records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def metrics(self, *, only_exact: bool = False) -> dict[str, float]:
        """Return the metrics of the results, and of the inexact ones that count unless
        ``only_exact``. A newer result overrides an older one, and an exact one those that are not.
        """
        metrics: dict[str, float] = {}
        for inexact in () if only_exact else self.of(InexactEvaluation):
            if inexact.counts:
                metrics.update(inexact.decoded_metrics())
        for exact in self.of(Evaluation):
            metrics.update(exact.decoded_metrics())
        return metrics

    def newest(self, name: str) -> Evaluation | FailedEvaluation | None:
        """Return the newest result or failure of the evaluation ``name``, or None."""
        outcomes = [r for r in self.records if isinstance(r, Evaluation | FailedEvaluation)]
        return next((r for r in reversed(outcomes) if r.name == name), None)

    def damage(self) -> str:
        """Return the wrong bytes that `limpet verify` has found last, or nothing."""
        return "".join(record.damage for record in self.of(Verified)[-1:])


class EvaluationReader:
    """Reads the records in the folders of versions, and keeps them. ``report`` gets the key and the
    error of each that is damaged or about another snapshot; it is left out."""

    def __init__(self, store: Store, report: Callable[[str, errors.LimpetError], object]) -> None:
        self._store = store
        self._report = report
        self._known: dict[
            Version, dict[tuple[str, str], AboutVersion | errors.FormatError | None]
        ] = {}

    def read(self, version: Version, digest: str) -> VersionEvaluations:
        """Return the records about the snapshot whose manifest has ``digest``. The folder is listed
        again, because a record may be added at any time."""
        records, is_damaged = list[AboutVersion](), False
        for entry in list_entries(self._store, version, "eval-"):
            file = parse_evaluation(entry.name)
            if file is not None and entry.kind != "folder":
                found = self._read_cached(version, file, digest)
                if isinstance(found, AboutVersion):
                    records.append(found)
                is_damaged |= isinstance(found, errors.FormatError)
        return VersionEvaluations(tuple(in_order(records)), is_damaged)

    def forget(self, version: Version) -> None:
        """Drop what is known of a version that does not exist any more."""
        self._known.pop(version, None)

    def _read_cached(
        self, version: Version, file: EvaluationFile, digest: str
    ) -> AboutVersion | errors.FormatError | None:
        """Return what is in a file, or its damage, or None if it is missing or misplaced."""
        known, key = self._known.setdefault(version, {}), f"{version}/{file}"
        if (key, digest) in known:
            return known[key, digest]
        found: AboutVersion | errors.FormatError | None = None
        try:
            record = decode_about_version(get_bounded(self._store, key, MAX_RECORD), key, file.kind)
            error = _find_mismatch(record, key, version, file, digest)
            found = record if error is None else None
        except errors.NotFound:
            return None
        except errors.FormatError as e:
            found = error = e
        if error is not None:
            self._report(key, error)
        if not isinstance(error, errors.BrokenLink):  # its target may come back
            known[key, digest] = found
        return found


def _find_mismatch(
    record: AboutVersion, key: str, version: Version, file: EvaluationFile, digest: str
) -> errors.FormatError | None:
    """Return why an intact record says nothing about the snapshot, or None if it does."""
    found = record.name, record.attempt, record.version, record.manifest_digest
    expected = file.name, file.attempt, str(version), digest
    if found == expected:
        return None
    return errors.ManifestInvalid(
        f"{key} is about another snapshot, or has the file name of another record",
        expected=", ".join(expected),
        found=", ".join(found),
        file=key,
    )


def in_order(records: Iterable[AboutVersion]) -> list[AboutVersion]:
    """Return the records from the oldest to the newest."""
    return sorted(records, key=lambda r: (datetime.fromisoformat(r.created), r.attempt))


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """The state of one evaluation of one version: ``DONE`` with the ``metrics`` of its newest
    result; ``INEXACT``, if a training measured them from ``first_step`` to ``last_step``, and
    whether it ``counts``; ``FAILED`` with the ``cause`` of the newest failure; or ``PENDING``: a
    live lease of ``cause`` protects the version, which is being evaluated, or waits for that."""

    state: Literal["DONE", "INEXACT", "FAILED", "PENDING"]
    created: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""
    first_step: int | None = None
    last_step: int | None = None
    counts: bool | None = None


def find_statuses(
    version: Version, evaluations: VersionEvaluations, leases: Iterable[VersionLease]
) -> dict[str, EvaluationStatus]:
    """Return the state of each evaluation of a version, by name. ``leases``: the live ones of the
    run. A lease counts more than a result: it protects the version for another attempt."""
    found: dict[str, EvaluationStatus] = {}
    for record in evaluations.records:
        if isinstance(record, FailedEvaluation):
            found[record.name] = EvaluationStatus("FAILED", record.created, cause=record.cause)
        elif isinstance(record, Evaluation):
            metrics = record.decoded_metrics()
            found[record.name] = EvaluationStatus("DONE", record.created, metrics)
        elif isinstance(record, InexactEvaluation):
            found[record.name] = EvaluationStatus(
                "INEXACT",
                record.created,
                record.decoded_metrics(),
                first_step=record.first_step,
                last_step=record.last_step,
                counts=record.counts,
            )
    for lease in leases:
        if str(version) in lease.versions:
            cause = describe_holder(lease)
            found[lease.name] = EvaluationStatus("PENDING", lease.created, cause=cause)
    return found


def _next_time(record: AboutVersion) -> datetime:
    """Return a second after a record's time; less in 9999, whose last moment is an error."""
    time = datetime.fromisoformat(record.created)
    remaining = datetime.max.replace(tzinfo=UTC) - time
    if not remaining:
        raise errors.LimpetError(
            f"No record can be newer than {record.version}/{record.file_name}",
            found=f"the time {record.created}, the last one",
            todo="Delete that file; the clock of the machine that wrote it was wrong",
        )
    return time + min(timedelta(seconds=1), remaining)


def put_about_version(
    kind: type[AboutVersion],
    name: str,
    snapshot: tuple[Version, str],
    store: Store,
    earlier: Iterable[AboutVersion],
    **content: Any,
) -> None:
    """Store a record about a snapshot (version, digest of its manifest), later than those
    ``earlier``. Raises ``LimpetError`` for a bad name or length, and ``StoreError``."""
    check_name(name)
    file, (version, digest) = names.EvaluationFile(name, names.random_id()), snapshot
    created = max([datetime.now(UTC).replace(microsecond=0), *map(_next_time, earlier)])
    record = kind(name, file.attempt, str(version), digest, created.isoformat(), **content)
    key, raw = f"{version}/{record.file_name}", encode_record(record)
    check_length(key, raw, MAX_RECORD, "Store less in one record")
    store.put_if_absent(key, raw)


def check_name(name: object) -> str:
    """Return the name of an evaluation or an author. Raises ``LimpetError`` if it is invalid."""
    is_valid = isinstance(name, str) and names.parse_lease(names.lease_name(name, 1)) is not None
    expected = "1 to 64 of the characters a-z, A-Z, 0-9, -, and _"
    require("The name of an evaluation or an author", is_valid, expected, name)
    return str(name)


def check_job_name(name: object) -> str:
    """Return the name of an evaluation job, or one inside a training. Raises ``LimpetError``."""
    expected = "another one than that of the metrics that Run.add_metrics adds"
    require("The name of an evaluation", name != ADDED_METRICS, expected, name)
    return check_name(name)


# -- objectives --------------------------------------------------------------------------------
#
# A training records the metrics of its own policies in the metadata of each version. An evaluation
# comes later, when the version cannot change any more, so it has files of its own in the run.


def make_objective(objective: object) -> Objective:
    """Return the objective of a metric and a mode. Raises ``LimpetError`` if it is not valid."""
    match objective:
        case (str(metric), "min" | "max" as mode) if metric:
            return Objective(metric, mode)
    expected = 'a metric and "min" or "max", such as ("val/loss", "min")'
    raise errors.LimpetError(f"objective= must be {expected}, not {to_repr(objective)[:120]}")


def record_objective(store: Store, objective: Objective) -> None:
    """Record an objective in a run, unless it is recorded. Raises ``StoreError``."""
    name = digest(f"{objective.mode} {objective.metric}".encode())
    with suppress(errors.AlreadyExists):
        store.put_if_absent(names.objective_name(name), encode_record(objective))


def read_recorded_objectives(store: Store) -> list[Objective]:
    """Return the objectives that evaluations have recorded in a run. The event ``skipped`` reports
    a damaged record. Raises ``StoreError``."""
    found = []
    for entry in list_level(store, "", "objective-"):
        if entry.kind != "folder" and names.is_objective_name(entry.name):
            try:
                raw = get_bounded(store, entry.name, MAX_RECORD)
                found.append(decode_objective(raw, entry.name))
            except errors.NotFound:
                continue
            except errors.FormatError as e:
                events.emit("skipped", version=entry.name, error=e)
    return found
