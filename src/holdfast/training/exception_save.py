"""The end of a training: the state before an error, and what is told that nothing else tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.distributed.collective import Meeting
from holdfast.engine.distributed.error_report import Came
from holdfast.engine.distributed.group import Group
from holdfast.engine.state.savepoint import Boundary
from holdfast.errors import HoldfastError, RankFailed
from holdfast.format.names import Version
from holdfast.training.saver import Order, Saver

COME = 20.0
"""Seconds in which all ranks must have come to a save after an exception: where only one has
raised, the others hang or are ended."""


class Rescue:
    """Keeps the state as it was after the last step, to save it should the next one raise."""

    def __init__(self, state: dict[str, Any], group: Group) -> None:
        self._boundary = Boundary(state)
        self._group = group
        self._marked: tuple[int, dict[str, Any], Mapping[str, Any]] | None = None

    def mark(self, step: int, training: dict[str, Any], metrics: Mapping[str, Any]) -> None:
        """The state is that after ``step``."""
        self._marked = None
        self._boundary.mark()
        self._marked = step, training, metrics

    def forget(self) -> None:
        """The state is about to become another one."""
        self._boundary.forget()
        self._marked = None

    def save(
        self,
        saver: Saver,
        error: BaseException,
        branch: int,
        note: Mapping[str, Any],
        told: list[str],
    ) -> None:
        """Save the state before the step that raised. ``told`` gets what hinders it. Where another
        rank has raised something else before, that is told too: it is the cause, most likely."""
        if self._marked is None:
            return
        step, training, metrics = self._marked
        said = f"{type(error).__name__}: {error}"[:1000]
        first = Came(self._group.rank, "", said)
        try:
            meeting = self._group.meet("the save after an exception", COME, said)
            first = meeting.first
            _come(meeting, step)
        except RankFailed as e:
            short = HoldfastError(e.what, expected=e.expected, found=e.found)
            told.append(f"the state after step {step} was not saved: {short}{_before(first, said)}")
        else:
            if before := _before(first, said):
                error.add_note(before.strip())
                said = f"{first.cause} (rank {first.rank})"
            note = {**note, "error": said}
            order = Order(Version(step, branch), "exception", metrics, note, training)
            saver.rescue(self._boundary, order, self._group, told)

    def close(self) -> None:
        self._boundary.close()


def _come(meeting: Meeting, step: int) -> None:
    """Wait for the other ranks, not for as long as usual. Raises ``RankFailed`` if not all have
    raised as well, and after the same step."""
    try:
        with meeting:
            steps = meeting.gather(step, int)
            if steps is not None and (other := {*steps} - {step}):
                rank = steps.index(min(other))
                raise RankFailed(
                    "The ranks did not raise in the same step",
                    expected=f"step {step} behind all ranks, as behind rank 0",
                    found=f"step {steps[rank]} behind rank {rank}",
                    rank=rank,
                )
            meeting.share(True if steps is not None else None, bool)
    finally:
        meeting.close()


def _before(first: Came, said: str) -> str:
    """What another rank has raised before this one, if it is not the same."""
    same = first.cause in ("", said)
    return "" if same else f" Rank {first.rank} has raised first: {first.cause}"
