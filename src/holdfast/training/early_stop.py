"""Early stop in a training: what its ``StopWhen`` has seen so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast import events
from holdfast.engine.distributed.agreement import Agreement, Alone
from holdfast.engine.distributed.group import Group
from holdfast.run.metrics import number
from holdfast.run.policy import Patience, StopWhen

STOP = "stop"
"""What the ranks agree on."""


class Stopping:
    """Observes the metrics of the steps, for a ``StopWhen`` or for none. Of several ranks rank 0
    does, and all stop at a step on which they agree."""

    def __init__(self, stop: StopWhen | None, run: str, group: Group) -> None:
        self._stop = stop
        self._run = run
        self._group = group
        self._patience = Patience()
        self._step = -1
        self.awaited = None if stop is None else stop.metric
        """The metric, as long as no step was given it."""

        self.stopped = False
        """Whether it has seen enough; a better value later does not take that back."""

    def observe(
        self, metrics: Mapping[str, Any], step: int, agreement: Agreement | Alone, agreed: bool
    ) -> None:
        """Look at what a step was given; the first value counts if it is given two. ``agreed``:
        whether the ranks have agreed to stop now."""
        if self._group.rank == 0:
            self._look(metrics, step)
        if agreed or (self._group.size == 1 and self._patience.stopped):
            self.stopped = True
        elif self._patience.stopped and not self.stopped:
            agreement.propose(STOP)

    def _look(self, metrics: Mapping[str, Any], step: int) -> None:
        stop, before = self._stop, self._patience
        if stop is None or stop.metric not in metrics or step == self._step:
            return
        self.awaited, self._step = None, step
        if before.stopped:
            return  # and so say the versions, also after a better value
        self._patience = stop.observe(before, number(metrics[stop.metric]))
        if self._patience.stopped:
            best = self._patience.best
            events.emit("stopped", run=self._run, step=step, metric=stop.metric, best=best)

    def note(self) -> dict[str, Any]:
        """What a version notes for who resumes from it."""
        return {} if self._stop is None else {"stop": self._stop.to_plain(self._patience)}

    def resumed(self, training: Mapping[str, Any]) -> None:
        """Go on from what the resumed version has noted."""
        self._step = -1
        if self._stop is not None:
            self._patience = self._stop.from_plain(training.get("stop"))
            if self._patience != Patience():
                self.awaited = None
            self.stopped = self._patience.stopped
