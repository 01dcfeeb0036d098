"""What commands show of the verdicts on versions, and of their evaluations."""

from __future__ import annotations

from typing import Any

from limpet.errors import LimpetError
from limpet.format.names import parse_version
from limpet.run.evaluations.reader import VersionEvaluations
from limpet.run.evaluations.status import EvaluationStatus, find_statuses
from limpet.run.evaluations.trust import describe_verdict, find_distrust, trust_of
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader


def read_evaluations(snapshot: SnapshotReader) -> VersionEvaluations:
    """Return what is recorded about a version of a run; nothing about any other snapshot."""
    version = parse_version(snapshot.location.folder)
    if version is None:
        return VersionEvaluations()
    return Run(snapshot.location.store).catalog.evaluations.read(version, snapshot.digest)


def read_statuses(
    snapshot: SnapshotReader, evaluations: VersionEvaluations
) -> dict[str, EvaluationStatus]:
    """Return the state of each evaluation of a version of a run; of any other snapshot, none."""
    version = parse_version(snapshot.location.folder)
    if version is None:
        return {}
    leases = Run(snapshot.location.store).catalog.leases.live()
    return find_statuses(version, evaluations, leases.values())


def build_verdicts(evaluations: VersionEvaluations) -> dict[str, Any]:
    """Return the members ``trust`` and ``verdicts`` of a JSON document."""
    return {
        "trust": trust_of(evaluations),
        "verdicts": [
            {"by": v.name, "ok": v.ok, "note": v.note, "created": v.created}
            for v in evaluations.verdicts().values()
        ],
    }


def describe_verdicts(evaluations: VersionEvaluations) -> list[str]:
    """Return one line for the newest verdict of each author, and one for those that cannot be
    read."""
    lines = [describe_verdict(verdict) for verdict in evaluations.verdicts().values()]
    if evaluations.unreadable:
        error: LimpetError | None = find_distrust(
            VersionEvaluations(unreadable=evaluations.unreadable)
        )
        lines.append(str(error))
    return lines
