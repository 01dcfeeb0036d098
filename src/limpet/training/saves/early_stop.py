"""Early stopping of a training, as its ``StopWhen`` policy decides."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from limpet import events
from limpet.errors import LimpetError
from limpet.format.names import Version
from limpet.ranks.agreement import Agreement, LocalAgreement
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.catalog import VersionRecord, read_training_metadata
from limpet.run.lineage import find_end
from limpet.run.metrics import to_number
from limpet.run.policy import Mode, StopState, StopWhen
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.training.saves.recorded_scores import RecordedScores
from limpet.training.saves.score_history import ScoreHistory

STOP_PROPOSAL = "stop"
"""The proposal to stop on which the ranks agree."""


class EarlyStop:
    """Observes the scores of the steps for a ``StopWhen``, or does nothing if there is none.

    A score is given to a step, or an evaluation records it about the version of the step. With
    several ranks, only rank 0 observes, and all ranks stop at a step on which they agree.
    """

    def __init__(self, stop: StopWhen | None, run: Run, group: Group) -> None:
        self._stop = stop
        self._run = run
        self._group = group
        self._is_decided = False
        self.stopped = False
        """True once training should stop. A better score later does not change that."""

        if stop is not None:
            self._history = self._stored = ScoreHistory(stop)
            self._recorded = RecordedScores(run, stop.metric)

    @property
    def awaited_metric(self) -> str | None:
        """The name of the metric until there is a score, then None."""
        if self._stop is None or self._history.state != StopState():
            return None
        return self._stop.metric

    # -- the training thread -------------------------------------------------------------------

    @property
    def objectives(self) -> frozenset[tuple[str, Mode]]:
        """The metric and the mode of the policy."""
        stop = self._stop
        return frozenset() if stop is None else frozenset(((stop.metric, stop.mode),))

    def observe(
        self,
        metrics: Mapping[str, Any],
        step: int,
        agreement: Agreement | LocalAgreement,
        agreed: bool,
    ) -> None:
        """Observe the metrics of a step, and the scores that were recorded since the last call.

        If a step provides two values of the metric, the first one counts. ``agreed`` is True if
        the ranks have agreed to stop at this step.
        """
        if self._group.rank == 0:
            self._update(metrics, step)
        if agreed or (self._group.size == 1 and self._is_decided):
            self.stopped = True
        elif self._is_decided and not self.stopped:
            agreement.propose(STOP_PROPOSAL)

    def _update(self, metrics: Mapping[str, Any], step: int) -> None:
        stop = self._stop
        if stop is None or self._is_decided:
            return  # versions saved from now on store the stop, even after a better score
        for version, score in sorted(self._recorded.take().items()):
            self._history.record(version.step, score)
        if stop.metric in metrics:
            self._history.give(step, to_number(metrics[stop.metric]))
        state = self._history.state
        self._is_decided = state.stopped
        if state.stopped:
            run = self._run.url
            events.emit("stopped", run=run, step=step, metric=stop.metric, best=state.best)

    def to_metadata(self) -> dict[str, Any]:
        """Return what a version stores, so that a resumed training continues from these scores."""
        return {} if self._stop is None else {"stop": self._history.to_plain()}

    def resume_from(self, training_metadata: Mapping[str, Any], step: int) -> None:
        """Continue from what the resumed version, of ``step``, stores, and from all records.

        All ranks call this. Raises ``StoreError``, on all ranks, if the records cannot be read.
        """
        if self._stop is not None:
            stored = self._stop, training_metadata.get("stop"), step
            self._history = ScoreHistory.from_plain(*stored)
            self._stored = ScoreHistory.from_plain(*stored)
            self._is_decided = self._history.state.stopped
        operation = f"reading the scores in {self._run.url}"
        self.stopped = broadcast_from_first(
            self._group, operation, lambda: self._read_all(step), bool
        )

    def _read_all(self, step: int) -> bool:
        if self._stop is not None:
            self._recorded.restart()
            self._update({}, step)
            self._is_decided |= find_end(self._run.catalog) == self._stop_reason
        return self._is_decided

    @property
    def _stop_reason(self) -> str:
        return f"stopped by {self._stop}"

    @property
    def end_reason(self) -> str:
        """Why the training ends, if it ends now and normally."""
        return self._stop_reason if self.stopped and self._stop is not None else "finished"

    # -- background threads of rank 0 ----------------------------------------------------------

    def after_save(self, snapshot: SnapshotReader) -> None:
        """Read the records of the newest versions. ``snapshot``: the one just committed.

        Raises ``StoreError``.
        """
        if self._stop is None or self._is_decided:
            return
        stored, version = read_training_metadata(snapshot).get("stop"), snapshot.version
        self._stored = ScoreHistory.from_plain(self._stop, stored, version.step)
        self._recorded.add(snapshot)
        try:
            self._recorded.read_newest()
        except LimpetError as e:
            advice = f"{version} was saved, but the scores of evaluations could not be read"
            raise e.with_advice(f"{advice}. Until they are, they do not stop the training") from e

    def poll(self) -> None:
        """Read the records of some versions. Raises ``StoreError``."""
        if self._stop is not None and not self._is_decided:
            self._recorded.poll()

    def before_deletion(
        self, versions: Collection[Version], known: Mapping[Version, VersionRecord]
    ) -> Collection[Version]:
        """Read the records of versions that are to be deleted. See ``BeforeDeletion``.

        A version is kept until another one stores its score. Otherwise, the score would be lost if
        the process died before the next save.
        """
        if self._stop is None or self._is_decided:
            return ()
        scores = self._recorded.read_before_deletion(versions, known)
        return {v for v, score in scores.items() if not self._stored.covers(v.step, score)}
