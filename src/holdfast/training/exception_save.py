"""The end of a training: the state before an error, and what is told that nothing else tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.distributed.collective import Collective
from holdfast.engine.distributed.error_report import Arrival
from holdfast.engine.distributed.group import Group
from holdfast.engine.state.savepoint import Savepoint
from holdfast.errors import HoldfastError, RankFailed
from holdfast.format.names import Version
from holdfast.training.saver import Saver, SaveSpec

JOIN_TIMEOUT = 20.0
"""Seconds in which all ranks must have come to a save after an exception: where only one has
raised, the others hang or are ended."""


class ExceptionSave:
    """Keeps the state as it was after the last step, to save it should the next one raise."""

    def __init__(self, state: dict[str, Any], group: Group) -> None:
        self._savepoint = Savepoint(state)
        self._group = group
        self._marked: tuple[int, dict[str, Any], Mapping[str, Any]] | None = None

    def mark(
        self, step: int, training_metadata: dict[str, Any], metrics: Mapping[str, Any]
    ) -> None:
        """The state is that after ``step``."""
        self._marked = None
        self._savepoint.capture()
        self._marked = step, training_metadata, metrics

    def discard(self) -> None:
        """The state is about to become another one."""
        self._savepoint.invalidate()
        self._marked = None

    def save(
        self,
        saver: Saver,
        error: BaseException,
        branch: int,
        note: Mapping[str, Any],
        problems: list[str],
    ) -> None:
        """Save the state before the step that raised. ``told`` gets what hinders it. Where another
        rank has raised something else before, that is told too: it is the cause, most likely."""
        if self._marked is None:
            return
        step, training, metrics = self._marked
        said = f"{type(error).__name__}: {error}"[:1000]
        first = Arrival(self._group.rank, "", said)
        try:
            meeting = self._group.collective("the save after an exception", JOIN_TIMEOUT, said)
            first = meeting.first_arrival
            _join_ranks(meeting, step)
        except RankFailed as e:
            short = HoldfastError(e.what, expected=e.expected, found=e.found)
            problems.append(
                f"the state after step {step} was not saved:"
                f" {short}{_first_error_text(first, said)}"
            )
        else:
            if before := _first_error_text(first, said):
                error.add_note(before.strip())
                said = f"{first.cause} (rank {first.rank})"
            note = {**note, "error": said}
            order = SaveSpec(Version(step, branch), "exception", metrics, note, training)
            saver.save_after_exception(self._savepoint, order, self._group, problems)

    def close(self) -> None:
        self._savepoint.close()


def _join_ranks(collective: Collective, step: int) -> None:
    """Wait for the other ranks, not for as long as usual. Raises ``RankFailed`` if not all have
    raised as well, and after the same step."""
    try:
        with collective:
            steps = collective.gather(step, int)
            if steps is not None and (other := {*steps} - {step}):
                rank = steps.index(min(other))
                raise RankFailed(
                    "The ranks did not raise in the same step",
                    expected=f"step {step} behind all ranks, as behind rank 0",
                    found=f"step {steps[rank]} behind rank {rank}",
                    rank=rank,
                )
            collective.broadcast(True if steps is not None else None, bool)
    finally:
        collective.close()


def _first_error_text(first: Arrival, own_error: str) -> str:
    """What another rank has raised before this one, if it is not the same."""
    same = first.cause in ("", own_error)
    return "" if same else f" Rank {first.rank} has raised first: {first.cause}"
