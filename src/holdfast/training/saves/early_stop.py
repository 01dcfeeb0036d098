"""Early stopping of a training, as its ``StopWhen`` policy decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast import events
from holdfast.engine.distributed.agreement import Agreement, LocalAgreement
from holdfast.engine.distributed.group import Group
from holdfast.run.evaluations.metrics import to_number
from holdfast.run.policy import Mode, StopState, StopWhen

STOP_PROPOSAL = "stop"
"""The proposal to stop on which the ranks agree."""


class EarlyStop:
    """Observes the metrics of the steps for a ``StopWhen``, or does nothing if there is none.

    With several ranks, only rank 0 observes, and all ranks stop at a step on which they agree.
    """

    def __init__(self, stop: StopWhen | None, run_url: str, group: Group) -> None:
        self._stop = stop
        self._run_url = run_url
        self._group = group
        self._state = StopState()
        self._last_step = -1
        self.awaited_metric = None if stop is None else stop.metric
        """The name of the metric until a step provides it, then None."""

        self.stopped = False
        """True once training should stop. A better value later does not change that."""

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
        """Observe the metrics of a step.

        If a step provides two values of the metric, the first one counts. ``agreed`` is True if
        the ranks have agreed to stop at this step.
        """
        if self._group.rank == 0:
            self._update(metrics, step)
        if agreed or (self._group.size == 1 and self._state.stopped):
            self.stopped = True
        elif self._state.stopped and not self.stopped:
            agreement.propose(STOP_PROPOSAL)

    def _update(self, metrics: Mapping[str, Any], step: int) -> None:
        stop = self._stop
        if stop is None or stop.metric not in metrics or step == self._last_step:
            return
        self.awaited_metric, self._last_step = None, step
        if self._state.stopped:
            return  # versions saved from now on record the stop, even after a better value
        self._state = stop.observe(self._state, to_number(metrics[stop.metric]))
        if self._state.stopped:
            best = self._state.best
            events.emit("stopped", run=self._run_url, step=step, metric=stop.metric, best=best)

    def to_metadata(self) -> dict[str, Any]:
        """Return what a version stores, so that a resumed training continues from this state."""
        return {} if self._stop is None else {"stop": self._stop.to_plain(self._state)}

    def resume_from(self, training_metadata: Mapping[str, Any]) -> None:
        """Continue from what the resumed version stores."""
        self._last_step = -1
        if self._stop is not None:
            self._state = self._stop.from_plain(training_metadata.get("stop"))
            if self._state != StopState():
                self.awaited_metric = None
            self.stopped = self._state.stopped
