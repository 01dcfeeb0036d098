"""Checks of versions: a changed structure, and a metric that is missing."""

from __future__ import annotations

from limpet import events
from limpet.errors import LimpetError, MetricMissing
from limpet.format.names import parse_lease
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.run.address import merge_objectives
from limpet.run.policy import KeepPolicy
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import list_level
from limpet.text import warn_user
from limpet.training.early_stop import EarlyStop


class VersionChecks:
    """The check that warns at the end of the training, and early stopping.

    ``objectives``: the metrics of the policies, which each version records.
    """

    def __init__(self, run: Run, keep: KeepPolicy, early_stop: EarlyStop) -> None:
        self.early_stop = early_stop
        self.objectives = merge_objectives(keep.objectives | early_stop.objectives)
        self._run, self._needed = run, keep.metrics
        self.evaluated = set[str]()
        """The metrics that evaluations in this training have given, also about versions that are
        deleted since."""

    def warn_of_missing_metrics(self) -> None:
        """Warn, at the end of a training, of metrics that policies use and nothing has given."""
        awaited = self.early_stop.awaited_metric
        needed = self._needed.union(() if awaited is None else (awaited,)) - self.evaluated
        if needed and (message := find_missing_metrics(self._run, needed)):
            warn_user(message, MetricMissing)


def emit_structure_change(
    run_url: str, before: SnapshotReader | None, after: SnapshotReader
) -> None:
    """Emit ``structure_changed`` if the leaves of a version differ from those of the one before.

    A change is not an error: an optimizer creates its slots at its first step, or a layer is
    unfrozen. The event helps a person who investigates the change later.
    """
    old, new = {} if before is None else before.leaves, after.leaves
    if old and old != new:
        events.emit(
            "structure_changed",
            run=run_url,
            version=str(after.version),
            added=sorted(new.keys() - old.keys()),
            removed=sorted(old.keys() - new.keys()),
            changed=sorted(k for k in new.keys() & old.keys() if new[k] != old[k]),
        )


def find_missing_metrics(run: Run, needed: frozenset[str]) -> str:
    """Describe the ``needed`` metrics that nothing has given to a version; empty if there are none.

    An inexact evaluation gives its metrics, too. While an evaluation of the run is at work, or if
    the store cannot be read, nothing is concluded.
    """
    given = set[str]()
    try:
        for version, record in run.catalog.read_versions(run.listing()).items():
            evaluations = run.catalog.evaluations.read(version, record.digest)
            results = evaluations.of(Evaluation) + evaluations.of(InexactEvaluation)
            given.update(record.metrics, *(result.metrics for result in results))
        missing = needed - given
        if not missing or any(parse_lease(e.name) for e in list_level(run.store, "", "lease-")):
            return ""
    except LimpetError:
        return ""  # retention reports the failure of the store
    return (
        f"No version of {run.url} has {' or '.join(sorted(missing))}, which a policy uses; they"
        f" have {', '.join(sorted(given)) or 'no metrics'}. Pass it to step(), end_epoch(), or"
        " save(), or add it with Run.add_metrics. A metric of an epoch needs a version of its end"
        " (save=... | limpet.EveryEpoch())"
    )
