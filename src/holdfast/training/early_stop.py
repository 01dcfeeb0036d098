"""Early stop in a training: what its ``StopWhen`` has seen so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast import events
from holdfast.engine.distributed.agreement import Agreement, LocalAgreement
from holdfast.engine.distributed.group import Group
from holdfast.run.metrics import to_number
from holdfast.run.policy import StopState, StopWhen

STOP_PROPOSAL = "stop"
"""What the ranks agree on."""


class EarlyStop:
    """Observes the metrics of the steps, for a ``StopWhen`` or for none. Of several ranks rank 0
    does, and all stop at a step on which they agree."""

    def __init__(self, stop: StopWhen | None, run_url: str, group: Group) -> None:
        self._stop = stop
        self._run_url = run_url
        self._group = group
        self._state = StopState()
        self._last_step = -1
        self.awaited_metric = None if stop is None else stop.metric
        """The metric, as long as no step was given it."""

        self.stopped = False
        """Whether it has seen enough; a better value later does not take that back."""

    def observe(
        self,
        metrics: Mapping[str, Any],
        step: int,
        agreement: Agreement | LocalAgreement,
        agreed: bool,
    ) -> None:
        """Look at what a step was given; the first value counts if it is given two. ``agreed``:
        whether the ranks have agreed to stop now."""
        if self._group.rank == 0:
            self._update(metrics, step)
        if agreed or (self._group.size == 1 and self._state.stopped):
            self.stopped = True
        elif self._state.stopped and not self.stopped:
            agreement.propose(STOP_PROPOSAL)

    def _update(self, metrics: Mapping[str, Any], step: int) -> None:
        stop, before = self._stop, self._state
        if stop is None or stop.metric not in metrics or step == self._last_step:
            return
        self.awaited_metric, self._last_step = None, step
        if before.stopped:
            return  # and so say the versions, also after a better value
        self._state = stop.observe(before, to_number(metrics[stop.metric]))
        if self._state.stopped:
            best = self._state.best
            events.emit("stopped", run=self._run_url, step=step, metric=stop.metric, best=best)

    def to_metadata(self) -> dict[str, Any]:
        """What a version notes for who resumes from it."""
        return {} if self._stop is None else {"stop": self._stop.to_plain(self._state)}

    def resume_from(self, training_metadata: Mapping[str, Any]) -> None:
        """Go on from what the resumed version has noted."""
        self._last_step = -1
        if self._stop is not None:
            self._state = self._stop.from_plain(training_metadata.get("stop"))
            if self._state != StopState():
                self.awaited_metric = None
            self.stopped = self._state.stopped
