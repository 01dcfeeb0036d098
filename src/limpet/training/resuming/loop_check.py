"""Finds a loop that makes all of its epochs again after a resume, because it counts them itself.

``for epoch in range(10)`` is correct in the first process only. A loop is reported if Limpet has
not told it how far the training is: it has neither read the position of the training nor put
anything into the state that may count, other than a ``Progress``.
"""

from __future__ import annotations

from math import inf
from opcode import opmap
from types import FrameType
from typing import Any

from limpet.data.sampler import ElasticSampler
from limpet.errors import InexactResume
from limpet.state.replication import PerRank, Replicated
from limpet.text import user_frame, warn_user
from limpet.training.step_counter import StepCounter

_REPEATED = (
    "A loop that counts its epochs or steps itself, such as `for epoch in range(10)`, makes all of"
    " them again"
)
_ELSEWHERE = "If the loop takes its position from elsewhere, ignore this warning"

_NO_PROGRESS = (
    f"the state has no Progress, and ckpt.current_step was not read. {_REPEATED}. Add"
    ' "progress": limpet.Progress() to the state, call ckpt.end_epoch() after each epoch, and'
    " write `while progress.epoch < 10`. To add it to an existing run, call"
    f' resume(missing="keep") once. {_ELSEWHERE}'
)
_UNREAD_PROGRESS = (
    f"neither progress.epoch nor ckpt.current_step was read. {_REPEATED}. Write"
    f" `while progress.epoch < 10`. {_ELSEWHERE}"
)


class LoopCheck:
    """Warns once after a resume.

    The warning comes when the loop must have tested its condition: at the second step, and not
    before the second pass of an ``ElasticSampler``, because one pass over the rest of the data
    needs no count, or the second epoch of a ``Progress``.
    """

    def __init__(self, run: str, state: dict[str, Any], counter: StepCounter) -> None:
        self._run, self._state, self._counter = run, state, counter
        self._is_waiting = False
        self._resumed_step = self._steps = 0
        self._passes, self._epoch, self._reads = 0.0, 0, 0

    def begin(self, step: int, known: tuple[type, ...]) -> None:
        """Begin anew after a resume of the training's own run at ``step``; 0: there was none.

        ``known``: the types of members that count no epochs or steps.
        """
        self._resumed_step, self._steps, counter = step, 0, self._counter
        self._passes, self._epoch, self._reads = counter.passes, counter.epoch, counter.reads
        known = *known, ElasticSampler
        self._is_waiting = (
            step > 0 and not _may_count(self._state, known) and _discards_result(user_frame())
        )

    def note_read(self) -> None:
        """Record that the loop has asked for the position of the training."""
        self._is_waiting = False

    def check(self) -> None:
        """Warn at the end of a step if nothing has told the loop its position."""
        if not self._is_waiting:
            return
        self._steps += 1
        if self._counter.reads != self._reads:
            self._is_waiting = False
        elif self._has_tested_its_condition:
            self._is_waiting = False
            has = _UNREAD_PROGRESS if self._counter.has_progress else _NO_PROGRESS
            warn_user(
                f"The training has resumed {self._run} at step {self._resumed_step}, but nothing"
                f" has told its loop so: {has}",
                InexactResume,
            )

    @property
    def _has_tested_its_condition(self) -> bool:
        if self._steps < 2:
            return False
        if self._counter.passes != inf:
            return self._counter.passes >= self._passes + 2
        return not self._counter.has_progress or self._counter.is_in_epoch(after=self._epoch)


def _may_count(value: Any, known: tuple[type, ...]) -> bool:
    """Return True if a part of the state may hold a number of epochs or steps."""
    if isinstance(value, PerRank | Replicated):
        return _may_count(value.value, known)
    if isinstance(value, dict | list | tuple):
        members = value.values() if isinstance(value, dict) else value
        return any(_may_count(member, known) for member in members)
    return not isinstance(value, known)


def _discards_result(frame: FrameType) -> bool:
    """Return True if the call that ``frame`` is in is a statement of its own.

    Otherwise, the caller may have taken the step from the snapshot that ``resume`` has returned.
    """
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and code[at] == opmap["CACHE"]:
        at += 2
    return at < len(code) and code[at] == opmap["POP_TOP"]
