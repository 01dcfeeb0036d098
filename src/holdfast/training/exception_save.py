"""The save after an exception: the state before the step that raised."""

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
"""Seconds within which all ranks must join a save after an exception.

If only one rank has raised, the other ranks hang or are terminated.
"""


class ExceptionSave:
    """Keeps the state after the last step, in order to save it if the next step raises."""

    def __init__(self, state: dict[str, Any], group: Group) -> None:
        self._savepoint = Savepoint(state)
        self._group = group
        self._marked: tuple[int, dict[str, Any], Mapping[str, Any]] | None = None

    def mark(
        self, step: int, training_metadata: dict[str, Any], metrics: Mapping[str, Any]
    ) -> None:
        """Capture the state, which is the state after ``step``."""
        self._marked = None
        self._savepoint.capture()
        self._marked = step, training_metadata, metrics

    def discard(self) -> None:
        """Discard the captured state, because a different state is about to be loaded."""
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
        """Save the state before the step that raised.

        Whatever prevents the save is appended to ``problems``. If another rank raised a different
        error first, that error is most likely the cause. It is then reported in ``problems``, or
        as a note on ``error`` and in the note of the version.
        """
        if self._marked is None:
            return
        step, training_metadata, metrics = self._marked
        cause = f"{type(error).__name__}: {error}"[:1000]
        first = Arrival(self._group.rank, "", cause)
        try:
            collective = self._group.collective("the save after an exception", JOIN_TIMEOUT, cause)
            first = collective.first_arrival
            _join_ranks(collective, step)
        except RankFailed as e:
            failure = HoldfastError(e.what, expected=e.expected, found=e.found)  # without advice
            problems.append(
                f"the state after step {step} was not saved:"
                f" {failure}{_first_error_text(first, cause)}"
            )
        else:
            if first_error := _first_error_text(first, cause):
                error.add_note(first_error.strip())
                cause = f"{first.cause} (rank {first.rank})"
            note = {**note, "error": cause}
            spec = SaveSpec(Version(step, branch), "exception", metrics, note, training_metadata)
            saver.save_after_exception(self._savepoint, spec, self._group, problems)

    def close(self) -> None:
        self._savepoint.close()


def _join_ranks(collective: Collective, step: int) -> None:
    """Wait for the other ranks, with the timeout of ``collective``.

    Raises ``RankFailed`` unless all ranks join, and their last completed step is the same.
    """
    try:
        with collective:
            steps = collective.gather(step, int)
            if steps is not None and (other := {*steps} - {step}):
                rank = steps.index(min(other))
                raise RankFailed(
                    "The ranks did not raise in the same step",
                    expected=f"step {step} as the last completed step of all ranks, as on rank 0",
                    found=f"step {steps[rank]} on rank {rank}",
                    rank=rank,
                )
            collective.broadcast(True if steps is not None else None, bool)
    finally:
        collective.close()


def _first_error_text(first: Arrival, own_error: str) -> str:
    """Return a sentence about the error that another rank raised first, if it is a different one.

    The sentence begins with a space. It is empty if there is no such error.
    """
    if first.cause in ("", own_error):
        return ""
    return f" Rank {first.rank} raised first: {first.cause}"
