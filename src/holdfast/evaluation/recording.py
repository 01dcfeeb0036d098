"""What an evaluation records besides results: failures, and by which metric versions compare."""

from __future__ import annotations

from contextlib import suppress

from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, HoldfastError, NotFound
from holdfast.format.digest import digest
from holdfast.format.names import objective_name
from holdfast.format.records import MAX_TEXT, FailedEvaluation, Objective, encode_objective
from holdfast.run.evaluations.metrics import put_about_version
from holdfast.run.run import Run
from holdfast.text import to_repr


def record_failure(run: Run, snapshot: Snapshot, name: str, cause: str) -> None:
    """Record that the evaluation ``name`` of a snapshot failed.

    Raises ``NotFound`` if the snapshot was deleted or replaced, ``FormatError`` if its manifest is
    damaged, and ``StoreError``.
    """
    version = snapshot.version
    if run.open(version).digest != snapshot.digest:
        raise NotFound(f"{snapshot.url} was replaced by another snapshot", store=run.url)
    earlier = run.catalog.evaluations.read(version, snapshot.digest).records
    about = version, snapshot.digest
    put_about_version(FailedEvaluation, name, about, run.store, earlier, cause=cause[:MAX_TEXT])


def make_objective(metric: object, mode: object) -> Objective:
    """Return the objective. Raises ``HoldfastError`` if it is not valid."""
    if not isinstance(metric, str) or not metric or mode not in ("min", "max"):
        raise HoldfastError(
            "Invalid value for objective= of Evaluation",
            expected='a metric and "min" or "max", such as ("val/loss", "min")',
            found=to_repr((metric, mode))[:200],
        )
    return Objective(metric, mode)


def record_objective(run: Run, objective: Objective) -> None:
    """Record by which metric versions of the run are compared, unless that is recorded."""
    name = digest(f"{objective.mode} {objective.metric}".encode())
    with suppress(AlreadyExists):
        run.store.put_if_absent(objective_name(name), encode_objective(objective))
