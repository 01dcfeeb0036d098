"""Checks of versions: a changed structure, a metric that is missing, and a state that is stale."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from limpet import events
from limpet.errors import LimpetError, MetricMissing, PlanError, StateUnchanged
from limpet.format.names import Version, parse_lease
from limpet.lazy_torch import torch_or_none
from limpet.run.address import merge_objectives
from limpet.run.policy import KeepPolicy, SavePolicy
from limpet.run.run import Run
from limpet.saving.commit import Receipt
from limpet.saving.job import SaveJob
from limpet.saving.stale_state import Observation, StepCount, TrainableBoxes
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import FlatState
from limpet.text import format_list, warn_user
from limpet.training.saves.early_stop import EarlyStop

_MAX_LISTED = 5

METRIC_CHECK_AFTER = 3
"""The number of saves after which a metric that no version has causes a warning."""


class VersionChecks:
    """The checks that warn in the thread of the training, and early stopping.

    ``metric`` is made after some saves, and ``stale`` at every save. ``objectives``: the metrics of
    the policies, which each version records.
    """

    def __init__(
        self,
        run: Run,
        save: SavePolicy,
        keep: KeepPolicy,
        early_stop: EarlyStop,
        on_unchanged: Literal["raise", "warn"],
    ) -> None:
        self.early_stop = early_stop
        self.objectives = merge_objectives(keep.objectives | early_stop.objectives)
        self.metric = MetricCheck(run, save, keep, early_stop)
        self.stale = StaleStateCheck(run.url, on_unchanged)

    def after_save(self, saves: int) -> None:
        """Make the check that needs some versions. ``saves``: the saves of this training."""
        if saves >= METRIC_CHECK_AFTER:
            self.metric.make(at_end=False)

    def warn(self) -> None:
        """Issue the warnings, each once, in the thread of the training."""
        self.metric.warn()
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


class MetricCheck:
    """Finds out, once, whether a policy needs a metric that nothing has provided so far.

    A policy on a metric that never comes keeps nothing. The user should learn of a misspelled name
    before the best version is needed. If ``save`` saves the ends of epochs, which probably have the
    metric, the check follows the first one.
    """

    def __init__(self, run: Run, save: SavePolicy, keep: KeepPolicy, early_stop: EarlyStop) -> None:
        self._run = run
        self._needed = keep.metrics
        self._early_stop = early_stop
        self._awaits_epoch, self._has_epoch = save.wants_epochs, False
        self._first_steps: dict[str, int] = {}
        """By name: the first step at which the training passed a metric, saved or not."""

        self._was_made = self._is_left_to_end = False
        self._message: str | None = None

    def observe(self, metrics: Mapping[str, Any], step: int, epochs: int) -> None:
        """Note the metrics of a step, and the number of epochs that are complete after it."""
        for name in self._needed.intersection(metrics):
            self._first_steps.setdefault(name, step)
        # one call later, since end_epoch follows the step that completes the epoch of a sampler
        self._awaits_epoch, self._has_epoch = self._awaits_epoch and not self._has_epoch, epochs > 0

    def make(self, *, at_end: bool) -> None:
        """Make the check, after some saves or ``at_end``. The store may be read.

        A separate job may still record the metric. If one has recorded anything, the check after
        some saves is left to the end, and if one is at work then, nothing is concluded. A metric
        that was passed first at the newest version or later may be saved soon: the next save
        decides.
        """
        awaited, waits = self._early_stop.awaited_metric, self._is_left_to_end or self._awaits_epoch
        if self._was_made or (waits and not at_end) or not (self._needed or awaited):
            return
        try:
            records = self._run.records()
            available = {name for record in records for name in record.metrics}
            missing = sorted(self._needed - available)
            newest = max((record.version.step for record in records), default=0)
            if not at_end and any(self._first_steps.get(m, -1) >= newest for m in missing):
                return
            if (missing or awaited not in (None, *available)) and (
                _is_being_evaluated(self._run) or (not at_end and _was_evaluated(self._run))
            ):
                self._is_left_to_end = True
                return
        except LimpetError:
            return  # retention reports the failure of the store
        self._was_made = True
        problems, url = self._describe_missing(missing, available), self._run.url
        if awaited is not None and awaited not in available:
            problems.append(
                f"No step or evaluation of {url} has given {awaited}, which StopWhen waits for."
                " Pass it to step(), end_epoch(), or save(), or add it with Run.add_metrics; until"
                " then, training does not stop early"
            )
        self._message = ". ".join(problems) or None

    def _describe_missing(self, missing: Sequence[str], available: Collection[str]) -> list[str]:
        """Return what to say about metrics of the keep policy: those that were passed only at steps
        that were not saved, and those that were never passed."""
        unsaved = [name for name in missing if name in self._first_steps]
        never = [name for name in missing if name not in self._first_steps]
        first = min((self._first_steps[name] for name in unsaved), default=0)
        found = ", ".join(sorted(available)) or "no metrics"
        return [
            f"No version of {self._run.url} has {' or '.join(names)}, which the keep policy uses;"
            f" they have {found}. {advice}; until then, no version is the best"
            for names, advice in (
                (never, "Pass it to step() or end_epoch(), or add it with Run.add_metrics"),
                (
                    unsaved,
                    f"It was passed, first at step {first}, but only at steps that were not saved."
                    " Save them too (the ends of epochs: save=... | limpet.EveryEpoch())",
                ),
            )
            if names
        ]

    def warn(self) -> None:
        """Issue the warning, once, in the thread of the training."""
        message, self._message = self._message, None
        if message is not None:
            warn_user(message, MetricMissing)


def _is_being_evaluated(run: Run) -> bool:
    """Return True if there is a lease of an evaluation."""
    return any(parse_lease(e.name) is not None for e in run.store.list_unspread("", "lease-"))


def _was_evaluated(run: Run) -> bool:
    """Return True if an evaluation of a version has a result, or has failed."""
    catalog = run.catalog
    known = catalog.read_versions(run.listing()).items()
    digests = ((version, record.digest) for version, record in known if record.digest)
    return any(catalog.evaluations.read(*snapshot).outcomes() for snapshot in digests)


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
