"""Saves the savepoint after a notice, if the training does not save in time.

The training thread may be in a long step, in an evaluation, or in a collective operation with a
rank that is dead. A thread of each rank then saves the state after the last complete step. With
several ranks, the live ones decide that together (``live_ranks.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from typing import Protocol

from limpet import events
from limpet.deadline import Deadline
from limpet.errors import RankFailed
from limpet.notices.exit_timer import exit_margin
from limpet.ranks.group import Group, LocalGroup, StoreGroup
from limpet.state.flatten import FlatState
from limpet.text import format_ranks
from limpet.threads import Claim, Latch, call_with_limit, no_op, start_thread
from limpet.training.live_ranks import Decision, SavepointVote, Voter, VoteTimes
from limpet.training.step_savepoint import SavepointLabel, StepSavepoint

SLACK = 1.0
"""Seconds beyond the measured times of a step and a save."""

_POLL_SECONDS = 0.02


class Durations(Protocol):
    """What measures the steps and saves of the training."""

    @property
    def usual_seconds(self) -> tuple[float, float]:
        """The times in seconds that nearly all steps and nearly all saves take."""

    @property
    def step_began_at(self) -> float:
        """The time on the clock at which the step in progress began."""


class Saves(Protocol):
    """What saves the state of the training."""

    begun_step: int
    can_flush: bool
    """True if there may be states that ``flush_captured`` saves."""

    @property
    def saved_step(self) -> int:
        """The step of the newest committed version, or 0."""

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""

    def prepare_savepoint(self) -> None:
        """Prepare for ``save_savepoint``, which may be without rank 0."""

    def flush_captured(self, deadline: Deadline) -> None:
        """Save the newest captured state if it is newer than all versions, or raise."""

    def save_savepoint(
        self,
        flat: FlatState,
        label: SavepointLabel,
        deadline: Deadline,
        group: Group,
        end_staging: Callable[[], str | None],
    ) -> None:
        """Save the state of a savepoint, or raise."""


class SavepointSaver:
    """Saves the savepoint on a thread of its own, which starts at the first notice.

    ``expect`` is called on the threads of notices, ``claim`` and ``wait`` in the training thread.
    ``on_lost`` is called after a save without some ranks, which are dead or stopped, or after one
    of the newest captured state in its place: nothing better can follow.
    """

    def __init__(
        self,
        savepoint: StepSavepoint,
        durations: Durations,
        saves: Saves,
        group: Group,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[], object] = no_op,
    ) -> None:
        self.saved_step: int | None = None
        """The step that was saved because of a notice, by this thread or by other ranks."""

        self.is_decided = False
        """True if the save of the savepoint has begun: the training thread waits, and leaves."""

        self._savepoint = savepoint
        self._durations = durations
        self._saves = saves
        self._group = group
        self._clock = clock
        self._on_lost = on_lost
        self._vote: SavepointVote | None = None
        self._is_uniform = False
        self._deadline: Deadline | None = None
        self._leave_at = 0.0
        self._is_stopped = self._is_hastened = self._is_awaited = False
        self._claim = Claim()
        self._is_claimed = self._has_lost_ranks = False
        self._thread: Thread | None = None
        self._ended = Latch()

    # -- the training thread ---------------------------------------------------------------------

    def join(self, is_uniform: bool) -> None:
        """Prepare for a vote. All ranks call this at their first step. ``is_uniform`` is True if
        the states of all ranks have the same leaves. Otherwise, as with pipelines, a rank that is
        dead may be the only one with some leaves, and the boxes of the others do not show that."""
        self._is_uniform = is_uniform
        if isinstance(self._group, StoreGroup) and self._group.size > 1:
            name = f"{self._group.next_sequence_number()}/savepoint"
            if self._savepoint.is_useful:
                self._vote = SavepointVote(self._group, name, self._clock)

    def claim(self) -> bool:
        """Return True if the training itself saves now. Return False if the thread saves already:
        then wait for it. With several ranks, the thread goes on if one of them is dead."""
        if self._group.size == 1:
            return self._claim.take("training")
        self._is_claimed = not self.is_decided
        return self._is_claimed

    def wait(self, deadline: Deadline) -> int | None:
        """Save the savepoint at once if possible. Return its step, or None if nothing was saved."""
        self._is_hastened = self._is_awaited = True  # there will be no other savepoint
        if self._thread is not None:
            self._ended.wait(deadline.seconds_left)
        return self.saved_step

    def close(self) -> None:
        """End the thread, because the training has ended."""
        self._is_stopped = True
        self._on_lost = no_op  # it refers to an object that refers to this one, and to a connection
        thread, self._thread = self._thread, None
        if thread is not None and not self.is_decided:
            thread.join(2)
        if self.saved_step is not None and isinstance(self._group, StoreGroup):
            self._group.kv.peer_error = None  # that of ``_end_waits``

    # -- notices, on other threads ---------------------------------------------------------------

    def expect(self, deadline: Deadline, leave_at: float) -> None:
        """Save before this process ends for ``deadline``, which is the first or an earlier one.
        Until ``leave_at``, the training goes on."""
        is_first = self._deadline is None
        ends_at = deadline.at - exit_margin(deadline.seconds_left)
        self._deadline, self._leave_at = replace(deadline, at=ends_at), leave_at
        if is_first and self._savepoint.is_useful and not self._is_stopped:
            thread = Thread(target=self._run, name="limpet-savepoint", daemon=True)
            self._thread = thread if start_thread(thread) else None

    def hasten(self) -> None:
        """Save now, because the ranks cannot agree on a step."""
        self._is_hastened = True

    def flush(self, deadline: Deadline) -> bool:
        """Save the newest captured state, because neither the last step nor the one before was
        saved. This returns by ``deadline``, also if the store does not answer. Return True if the
        step of that state, or a later one, is saved."""
        before = self._saves.saved_step

        def save() -> None:
            try:
                self._saves.flush_captured(deadline)
            except Exception as e:  # noqa: BLE001  (the state stays where it is)
                events.emit("flush_failed", error=e)

        if self.saved_step is None:
            call_with_limit(save, "limpet-flush", deadline.seconds_left)
        return self._saves.saved_step > before

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._saves.prepare_savepoint()
            deadline = self._wait_until_needed()
            if deadline is not None and self._vote is None and self._group.size == 1:
                self._save_alone(deadline)
            elif deadline is not None and self._vote is not None:
                self._save_together(self._vote, deadline)
        except Exception as e:  # noqa: BLE001  (top of a thread: the training leaves without a save)
            events.emit("savepoint_failed", error=e)
        finally:
            self._savepoint.release()
            self._flush_if_unsaved()
            if self.saved_step is None:  # the training may still reach its next step, and save
                self._claim, self.is_decided = Claim(), False
            self._ended.set()

    def _flush_if_unsaved(self) -> None:
        deadline = self._deadline
        is_over = self._is_stopped or self._is_claimed or self._saves.busy
        is_saved = deadline is not None and not is_over and self.flush(_limit(deadline))
        if is_saved and self._has_lost_ranks:  # otherwise, the step in progress may still end
            self._on_lost()

    def _wait_until_needed(self) -> Deadline | None:
        """Return the deadline when it is time to save, or None if the training has left."""
        vote_seen_at = 0.0
        while not self._is_stopped:
            deadline, now = self._deadline, self._clock()
            if deadline is None or now >= deadline.at:
                return None
            if self._is_hastened or now >= self._needed_at(deadline, now):
                return deadline
            if self._vote is not None and now >= vote_seen_at + self._vote.poll_seconds:
                vote_seen_at = now
                if self._vote.has_begun():
                    return deadline
            time.sleep(_POLL_SECONDS)
        return None

    def _needed_at(self, deadline: Deadline, now: float) -> float:
        """Return the time at which the savepoint must be saved.

        That is after half of the time, or now if the step in progress will not end in time.
        """
        step, save = self._durations.usual_seconds
        step_ends_at = max(self._durations.step_began_at + step, now)
        if step and step_ends_at + 1.25 * save + SLACK > deadline.at:
            return max(self._leave_at, now)
        return (self._leave_at + deadline.at) / 2

    def _save_alone(self, deadline: Deadline) -> None:
        times = self._times(deadline)
        while not self._is_stopped:
            is_busy, now = self._saves.busy, self._clock()
            if now >= (deadline.at if is_busy else times.hold_by):
                return
            is_free = not is_busy or now >= times.vote_by
            if is_free and self._savepoint.hold():
                if self._claim.take("watcher"):
                    self._save(deadline, LocalGroup(), ())
                return
            time.sleep(_POLL_SECONDS)

    def _save_together(self, vote: SavepointVote, deadline: Deadline) -> None:
        vote.begin()
        hold, release = self._hold, self._savepoint.release
        voter = Voter(hold, release, self._is_saving, lambda: self._is_awaited)
        decision = vote.run(voter, self._times(deadline), lambda: self._is_stopped)
        if decision is None:
            return
        missing = [r for r in range(self._group.size) if r not in decision.ranks]
        if self._group.rank in missing:
            self._wait_for_others(vote, deadline)
            return
        self._has_lost_ranks = bool(missing)
        if missing and not self._is_uniform:
            raise RankFailed(
                f"The state of {format_ranks(missing)} is lost",
                expected="states with the same leaves on all ranks",
                found="different leaves",
                rank=missing[0],
                lost=True,
            )
        self._save(deadline, vote.subgroup(decision), missing)
        vote.mark_saved(decision.step)
        self._end_waits(decision)
        if missing:
            self._on_lost()

    def _save(self, deadline: Deadline, group: Group, missing: Sequence[int]) -> None:
        """Save the savepoint, which is held. The next step may begin when it is copied."""
        label = self._savepoint.label
        if label is None:
            return
        self.is_decided = True
        if missing:
            label = label._replace(note={**label.note, "missing_ranks": list(missing)})
        if label.version.step > self._saves.saved_step:
            flat = self._savepoint.flatten(self._group.rank)
            if flat is None:
                raise RankFailed(str(self._savepoint.invalid_reason), rank=self._group.rank)
            self._saves.save_savepoint(flat, label, _limit(deadline), group, self._end_staging)
        self.saved_step = label.version.step

    def _end_staging(self) -> str | None:
        reason = self._savepoint.invalid_reason
        self._savepoint.release()
        return reason

    def _hold(self) -> int | None:
        return self._savepoint.step if self._savepoint.hold() else None

    def _is_saving(self) -> bool:
        is_begun = self._saves.busy and self._saves.begun_step == self._savepoint.step
        return is_begun or self._is_claimed

    def _wait_for_others(self, vote: SavepointVote, deadline: Deadline) -> None:
        """Wait for the ranks that save without this one."""
        self._savepoint.release()
        while self.saved_step is None and self._clock() < deadline.at and not self._is_stopped:
            self.saved_step = vote.saved_step()
            time.sleep(vote.poll_seconds)

    def _end_waits(self, decision: Decision) -> None:
        """Make the training thread leave if it waits for a rank that is dead."""
        if isinstance(self._group, StoreGroup):
            error = RankFailed(f"The live ranks have saved step {decision.step} after a notice")
            self._group.kv.peer_error = error

    def _times(self, deadline: Deadline) -> VoteTimes:
        """Return until when the ranks wait for each other, so that a save still fits."""
        now, save = self._clock(), self._durations.usual_seconds[1]
        left = deadline.at - now
        poll = 0.0 if self._vote is None else self._vote.poll_seconds
        save_seconds = min(1.25 * save + SLACK, left / 2)
        respond_by, vote_by = now + max(left / 4, 3 * poll), deadline.at - save_seconds
        hold_by = end = deadline.at - save_seconds / 4
        if self._saves.can_flush:  # this takes as long as a save, and no save may be measured yet
            hold_by = min(vote_by, deadline.at - left / 4)
        return VoteTimes(respond_by, hold_by, vote_by, end)


def _limit(deadline: Deadline) -> Deadline:
    """Return the deadline of the save: its cleanup and the exit still fit."""
    left = deadline.seconds_left
    return Deadline.after(
        max(0.1, left - left / 10), deadline.purpose, deadline.clock, cleanup=min(1.0, left / 20)
    )
