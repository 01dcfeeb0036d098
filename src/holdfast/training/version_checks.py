"""Checks after a save: whether the structure changed, and whether a policy's metric is missing."""

from __future__ import annotations

from holdfast import events
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import HoldfastError, MetricMissing
from holdfast.run.policy import KeepPolicy
from holdfast.run.run import Run
from holdfast.text import warn_user
from holdfast.training.early_stop import EarlyStop


def emit_structure_change(run_url: str, before: Snapshot | None, after: Snapshot) -> None:
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
    before the best version is needed.
    """

    def __init__(self, run: Run, keep: KeepPolicy, early_stop: EarlyStop) -> None:
        self._run = run
        self._keep = keep
        self._early_stop = early_stop
        self._was_made = False
        self._message: str | None = None

    def make(self) -> None:
        """Make the check, after some saves or at the end. The store may be read."""
        was_made, self._was_made = self._was_made, True
        needed, awaited = self._keep.metrics, self._early_stop.awaited_metric
        if was_made or not (needed or awaited):
            return
        try:
            available = {name for record in self._run.records() for name in record.metrics}
        except HoldfastError:
            return  # retention reports the failure of the store
        missing, problems, url = sorted(needed - available), [], self._run.url
        if missing:
            problems.append(
                f"No version of {url} has {' or '.join(missing)}, which the keep policy uses; they"
                f" have {', '.join(sorted(available)) or 'no metrics'}. Pass it to step(), or add"
                " it with Run.add_metrics; until then, no version is the best"
            )
        if awaited is not None:
            problems.append(
                f"No step of {url} was given {awaited}, which StopWhen waits for. Pass it to step()"
                " or save(); until then, training does not stop early"
            )
        self._message = ". ".join(problems) or None

    def warn(self) -> None:
        """Issue the warning, once, in the thread of the training."""
        message, self._message = self._message, None
        if message is not None:
            warn_user(message, MetricMissing)
