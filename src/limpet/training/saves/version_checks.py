"""Checks of versions: a changed structure, a metric that is missing, and a state that is stale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from limpet import events
from limpet.errors import LimpetError, MetricMissing, PlanError, StateUnchanged
from limpet.format.names import Version, parse_lease
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.lazy_torch import torch_or_none
from limpet.run.address import merge_objectives
from limpet.run.policy import KeepPolicy
from limpet.run.run import Run
from limpet.saving.commit import Receipt
from limpet.saving.job import SaveJob
from limpet.saving.stale_state import Observation, StepCount, TrainableBoxes
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import FlatState
from limpet.storage.store import list_level
from limpet.text import format_list, warn_user
from limpet.training.saves.early_stop import EarlyStop

_MAX_LISTED = 5


class VersionChecks:
    """The checks that warn in the thread of the training, and early stopping.

    ``stale`` is checked at every save. ``objectives``: the metrics of the policies, which each
    version records.
    """

    def __init__(
        self,
        run: Run,
        keep: KeepPolicy,
        early_stop: EarlyStop,
        on_unchanged: Literal["raise", "warn"],
    ) -> None:
        self.early_stop = early_stop
        self.objectives = merge_objectives(keep.objectives | early_stop.objectives)
        self._run, self._needed = run, keep.metrics
        self.evaluated = set[str]()
        """The metrics that evaluations in this training have given, also about versions that are
        deleted since."""
        self.stale = StaleStateCheck(run.url, on_unchanged)

    def warn_of_missing_metrics(self) -> None:
        """Warn, at the end of a training, of metrics that policies use and nothing has given."""
        awaited = self.early_stop.awaited_metric
        needed = self._needed.union(() if awaited is None else (awaited,)) - self.evaluated
        if needed and (message := find_missing_metrics(self._run, needed)):
            warn_user(message, MetricMissing)

    def warn(self) -> None:
        """Issue the warning of a stale state, once, in the thread of the training."""
        self.stale.warn()


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


# -- stale states --------------------------------------------------------------------------------


class StaleStateCheck:
    """Finds versions whose trainable leaves are the same although an optimizer has stepped.

    Such a state is a copy that nobody trains, and training cannot be resumed from it. The check
    compares the digests of the chunks that hold trainable leaves of at least 64 KiB, which every
    save computes, and one digest of all smaller ones, computed from their staged bytes. A leaf is
    trainable if it shares its memory with a tensor that requires a gradient. If the state has
    neither such tensors nor modules, every floating-point tensor except a slot is trainable.

    All ranks compare the boxes that they write. Rank 0 finds the version stale if no rank has found
    a change. Nothing is concluded if the layout has changed, or from the first version of a
    process, resumed or saved.
    """

    def __init__(self, run_url: str, on_unchanged: Literal["raise", "warn"]) -> None:
        self._run_url = run_url
        self._raises = on_unchanged == "raise"
        self._steps: StepCount | None = None
        self._trainable: TrainableBoxes | None = None
        self._committed: Observation | None = None
        self._message: str | None = None
        self._is_done = False

    def observe(self, job: SaveJob, state: Any, version: Version) -> None:
        """Observe a save that begins. Call it before an optimizer may step again."""
        try:
            self._observe(job, state, version)
        except BaseException:
            with job, job.collective:  # otherwise another rank would wait forever
                raise

    def _observe(self, job: SaveJob, state: Any, version: Version) -> None:
        if self._is_done or isinstance(state, FlatState) or torch_or_none() is None:
            return
        trainable = self._trainable
        if trainable is None or not trainable.matches(job.image):
            trainable = self._trainable = TrainableBoxes.find(state, job.partition, job.image)
            if self._steps is not None:
                self._steps.follow(trainable)
        if self._steps is None and trainable.shapes:
            self._steps = StepCount(trainable)
        if self._steps is not None:
            job.observer = Observation(
                str(version), trainable, self._committed, self._steps.count, self._steps.found_inf
            )

    def check(self, receipts: Sequence[Receipt]) -> None:
        """Check the version that is about to be committed, on rank 0.

        Raises ``PlanError`` for a stale state if the user chose that.
        """
        if self._is_done or any(r.unchanged is None for r in receipts) or self._committed is None:
            return
        leaves = sorted({key for r in receipts for key in r.unchanged or ()})
        if not leaves:
            return
        since = f"since {self._committed.version}, although an optimizer has stepped"
        todo = (
            "Check that the state holds the model that is trained, not a copy of it, and that its"
            " parameters get gradients"
        )
        if self._raises:
            raise PlanError(
                f"Nothing was committed to {self._run_url}: no trainable leaf has changed {since}",
                expected="other values in at least one trainable leaf",
                found=f"the same bytes in {format_list(leaves, _MAX_LISTED)}",
                todo=todo,
                leaves=tuple(leaves),
            )
        self._is_done = True
        self._message = (
            f"No trainable leaf in {self._run_url} has changed {since}:"
            f" {format_list(leaves, _MAX_LISTED)}. {todo}"
        )

    def mark_committed(self, job: SaveJob) -> None:
        """Compare the next version with the one of ``job``, which is committed."""
        self._committed = job.observer
        if self._committed is not None:
            self._committed.base = None

    def restart(self) -> None:
        """Forget the last version, because a load has changed the state."""
        self._committed = self._trainable = None

    def warn(self) -> None:
        """Issue the warning, once, in the thread of the training."""
        message, self._message = self._message, None
        if message is not None:
            warn_user(message, StateUnchanged)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.remove()
