"""The state of each evaluation of a version: done, failed, or in progress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from limpet.format.names import Version
from limpet.format.records import Evaluation, FailedEvaluation, Lease
from limpet.run.evaluations.reader import VersionEvaluations


@dataclass(frozen=True, slots=True)
class EvaluationStatus:
    """The state of one evaluation of one version.

    ``DONE``: ``metrics`` are those of its newest result. ``FAILED``: ``cause`` says why the newest
    attempt failed. ``PENDING``: a live lease protects the version, and ``cause`` says who has it;
    the version is being evaluated, or waits for that.
    """

    state: Literal["DONE", "FAILED", "PENDING"]
    created: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    cause: str = ""


def find_statuses(
    version: Version, evaluations: VersionEvaluations, leases: Iterable[Lease]
) -> dict[str, EvaluationStatus]:
    """Return the state of each evaluation of a version, by name.

    A lease of an evaluation that has a result of this version protects it for another attempt.
    ``leases``: those of the run that are alive.
    """
    found: dict[str, EvaluationStatus] = {}
    for record in evaluations.outcomes():
        if isinstance(record, FailedEvaluation):
            found[record.name] = EvaluationStatus("FAILED", record.created, cause=record.cause)
        elif isinstance(record, Evaluation):
            metrics = record.decoded_metrics()
            found[record.name] = EvaluationStatus("DONE", record.created, metrics)
    for lease in leases:
        if str(version) in lease.versions:
            holder = f"process {lease.process.partition(':')[0]} on {lease.host.partition(' ')[0]}"
            found[lease.name] = EvaluationStatus("PENDING", lease.created, cause=holder)
    return found
