"""The savepoint of a training, and its save after a notice if the training does not save in time.

It is captured after steps at which that costs almost nothing. After a notice, while the training is
in a long step or a wait, a thread of each rank saves the state after the last step that all hold.
If a rank is dead, the newest complete state of a tier is saved in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import ceil, inf
from threading import Thread
from typing import TYPE_CHECKING, Any

from limpet import events
from limpet.deadline import Deadline
from limpet.errors import DeadlinePassed, RankFailed
from limpet.notices.exit_timer import exit_margin
from limpet.ranks.collective import Collective
from limpet.ranks.group import Group, broadcast_from_first
from limpet.state.copy_pool import TooManyBytes
from limpet.state.savepoint import Savepoint
from limpet.state.sharding import is_distributed_tensor
from limpet.state.walk import modules_in, optimizers_in, parameters_of
from limpet.threads import Latch, call_with_limit, no_op, start_thread
from limpet.training.goodput import Durations, Goodput
from limpet.training.saver import Saver, SaveSpec
from limpet.types import MIB

if TYPE_CHECKING:
    import torch

SHARE = 0.01
"""The largest share of a step that a capture after each step may take."""

_MEASURED_SHARE = SHARE / 10
"""The share that captures take in the long run if they are too expensive to be made at each step:
each one measures whether that is still so."""

_MAX_SKIPPED = 10_000

MAX_BYTES = 64 * MIB
"""The largest copies that are kept during steps (after a notice, all): training needs memory."""


class StepSavepoint(Savepoint):
    """The state after the last step, for a save in the next one or after its exception. ``mark``
    captures it if it ``is_required``, or urgent, or takes at most a hundredth of a step."""

    label: SaveSpec | None

    def __init__(
        self, state: dict[str, Any], is_required: bool, is_useful: bool, step_durations: Durations
    ) -> None:
        super().__init__(state)
        self._is_required, self.is_useful = is_required, is_useful
        self._step_durations = step_durations
        self._skip = 0
        self._is_expensive = False
        self._is_failing = self._is_partial = False
        self._sharded: list[torch.nn.Module] | None = None

    def attach(self, state: dict[str, Any]) -> None:
        self.state, self._sharded = state, None

    def mark(
        self, make_label: Callable[[], SaveSpec], is_pending: bool, is_partial: bool = False
    ) -> None:
        """Capture the state after a step, unless too expensive. ``is_pending``: after a notice;
        ``is_partial``: in ``PreemptionGuard.run``: only a save after an exception may hold it."""
        self._is_partial = is_partial
        if self._is_required:
            self.capture(make_label())
            return
        if is_partial or not self.is_useful:
            return
        self._reshard()
        if is_pending:
            self._try_capture(make_label, inf)
        elif self._skip:
            self._skip -= 1
        else:
            began = time.perf_counter()
            self._try_capture(make_label, MAX_BYTES)
            seconds = time.perf_counter() - began
            step_seconds = self._step_durations.percentile(50)
            was_expensive = self._is_expensive
            self._is_expensive = self._is_failing or seconds > SHARE * step_seconds
            # the first of two in a row may have found new slots of an optimizer
            if self._is_expensive and (was_expensive or self._is_failing):
                captures = ceil(seconds / (_MEASURED_SHARE * max(step_seconds, 1e-6)))
                self._skip = _MAX_SKIPPED if self._is_failing else min(captures, _MAX_SKIPPED)
                self._is_expensive = False
                self.free()

    def _reshard(self) -> None:
        """Free what a forward pass without backward has gathered in ``fully_shard`` modules, by a
        hook of ``state_dict()``: on all ranks, because the next pass must gather the same."""
        if self._sharded is None:
            owned = (p for o in optimizers_in(self.state) for p in parameters_of(o))
            found = modules_in(self.state) if any(map(is_distributed_tensor, owned)) else []
            self._sharded = [m for root in found for m in root.modules() if m._parameters]
        for module in [*self._sharded]:
            if _has_gathered(module):
                module.state_dict()
                if _has_gathered(module):  # it is never sharded
                    self._sharded.remove(module)

    def _try_capture(self, make_label: Callable[[], SaveSpec], max_bytes: float) -> None:
        """Capture. A failure, such as one of the user's ``state_dict``, must not end the training
        because of a save that may never be needed. An event reports the first one."""
        try:
            self.capture(make_label(), max_bytes)
            self._is_failing = False
        except Exception as e:  # noqa: BLE001  (a save of the same state raises it)
            if not (self._is_failing or isinstance(e, TooManyBytes)):
                events.emit("savepoint_failed", error=e)
            self._is_failing = True  # the next one would need as many bytes
            self.free()

    @property
    def step(self) -> int:
        """The step of the last capture, or 0."""
        label = self.label
        return 0 if label is None else label.version.step

    def hold(self) -> bool:
        """Keep the captured state until ``release``, if of whole calls."""
        return not self._is_partial and super().hold()


def _has_gathered(module: torch.nn.Module) -> bool:
    """Return True if the module has parameters of its own that are not distributed."""
    own = module._parameters.values()  # parameters() would cost a millisecond at each step
    return not all(p is None or is_distributed_tensor(p) for p in own)


# -- its save after a notice ----------------------------------------------------------------------

SLACK = 1.0
"""Seconds beyond the measured times of a step and a save."""

_POLL_SECONDS = 0.02


@dataclass(eq=False)
class SavepointSaver:
    """Saves the savepoint on its own thread, from the first notice. Threads of notices call
    ``expect``, the training ``claim`` and ``wait``. ``on_lost``: a tier's is saved instead."""

    savepoint: StepSavepoint
    durations: Goodput
    saver: Saver
    group: Group
    on_lost: Callable[[], object] = no_op
    saved_step: int | None = None
    """The step that this thread has saved because of a notice."""

    has_flushed: bool = False
    """True if a state of a tier was saved in place of the savepoint."""

    is_decided: bool = False
    """True if the save of the savepoint has begun: the training thread waits, and leaves."""

    _begun_key: str = ""
    _choice: Collective | None = None
    _deadline: Deadline | None = None
    _leave_at: float = 0.0
    _is_stopped: bool = False
    _is_hastened: bool = False
    _is_awaited: bool = False
    _claim: dict[str, str] = field(default_factory=dict)  # who saves: it is set atomically
    _is_claimed: bool = False
    _thread: Thread | None = None
    _ended: Latch = field(default_factory=Latch)

    def __post_init__(self) -> None:
        self._own_group = self.group

    # -- the training thread ---------------------------------------------------------------------

    def join(self) -> None:
        """Prepare for a save of several ranks. All ranks call this at their first step."""
        if self.group.kv is not None:
            self._begun_key = f"{self.group.next_sequence_number()}/begun"
            self._own_group = self.group.twin()

    def claim(self) -> bool:
        """Return True if the training saves now, False if the thread does: then wait for it."""
        if self.group.size == 1:
            return self._claim.setdefault("by", "training") == "training"
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
        self.on_lost = no_op  # it refers to an object that refers to this one, and to a connection
        thread, self._thread, choice = self._thread, None, self._choice
        if thread is not None and not self.is_decided:
            if choice is not None:  # do not wait in it for the other ranks
                choice.abort(RankFailed(f"The training of rank {self.group.rank} has ended"))
            thread.join(2)

    # -- notices, on other threads ---------------------------------------------------------------

    def expect(self, deadline: Deadline, leave_at: float) -> None:
        """Save before this process ends for ``deadline``, which is the first or an earlier one.
        Until ``leave_at``, the training goes on."""
        is_first = self._deadline is None
        ends_at = deadline.at - exit_margin(deadline.seconds_left)
        self._deadline, self._leave_at = replace(deadline, at=ends_at), leave_at
        if is_first and self.savepoint.is_useful and not self._is_stopped:
            thread = Thread(target=self._run, name="limpet-savepoint", daemon=True)
            self._thread = thread if start_thread(thread) else None

    def hasten(self) -> None:
        """Save now, because the ranks cannot agree on a step."""
        self._is_hastened = True

    def flush(self, deadline: Deadline) -> bool:
        """Save the newest state of a tier, because no late step was saved. Returns by ``deadline``:
        True if the step of that state, or a later one, is saved."""
        before = self.saver.saved_step

        def save() -> None:
            try:
                self.saver.flush_tiers(deadline)
            except Exception as e:  # noqa: BLE001  (the state stays where it is)
                events.emit("flush_failed", error=e)

        if self.saved_step is None:
            call_with_limit(save, "limpet-flush", deadline.seconds_left)
        return self.saver.saved_step > before

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        is_lost = False
        try:
            self.saver.prepare_flush()
            deadline = self._wait_until_needed()
            if deadline is not None and self._hold_together(deadline):
                self._save(deadline)
        except Exception as e:  # noqa: BLE001  (top of a thread: the training leaves without a save)
            if not (self._is_stopped or self._is_claimed):
                events.emit("savepoint_failed", error=e)
            is_lost = isinstance(e, RankFailed) and bool(e.fields.get("lost"))
        finally:
            self.savepoint.release()
            deadline = self._deadline
            is_over = self._is_stopped or self._is_claimed or self.saver.busy
            if deadline is not None and not is_over and self.saved_step is None:
                self.has_flushed = self.flush(_limit(deadline))
                if self.has_flushed and is_lost:  # otherwise, the step in progress may still end
                    self.on_lost()
            if self.saved_step is None:  # the training may still reach its next step, and save
                self._claim, self.is_decided = {}, False
            self._ended.set()

    def _wait_until_needed(self) -> Deadline | None:
        """Return the deadline when it is time to save, or None if the training has left."""
        polls_at = 0.0
        while not self._is_stopped:
            deadline, now = self._deadline, time.monotonic()
            if deadline is None or now >= deadline.at:
                return None
            if self._is_hastened or now >= self._needed_at(deadline, now):
                return deadline
            if self.group.kv is not None and self._begun_key and now >= polls_at:
                polls_at = now + 0.25 + self.group.size * 1e-4
                if self.group.kv.get_text(self._begun_key) is not None:
                    return deadline  # another rank cannot wait any longer
            time.sleep(_POLL_SECONDS)
        return None

    def _needed_at(self, deadline: Deadline, now: float) -> float:
        """Return when to save: after half of the time, or now if the step will end too late."""
        step, save = self.durations.usual_seconds
        step_ends_at = max(self.durations.step_began_at + step, now)
        if step and step_ends_at + 1.25 * save + SLACK > deadline.at:
            return max(self._leave_at, now)
        return (self._leave_at + deadline.at) / 2

    def _hold_together(self, deadline: Deadline) -> bool:
        """Hold the savepoint of one step on all ranks, so that no optimizer steps; False: its save
        is in flight. Raises ``RankFailed``, and ``DeadlinePassed`` if a rank has none."""
        group, limit = self._own_group, self._hold_limit(deadline)
        if group.kv is not None:
            if not self._begun_key:
                return False  # the training has made no step
            group.kv.compare_and_set(self._begun_key, "1")
            respond = replace(limit, at=time.monotonic() + max(deadline.seconds_left / 3, 1.0))
            operation = "the save before the exit"
            broadcast_from_first(group, operation, lambda: True, bool, deadline=respond)
        step = 0
        self._choice = group.collective("the choice of the step to save", deadline=limit)
        with closing(self._choice) as choice, choice:
            while True:
                votes = choice.gather(self._hold(step, limit), tuple[int, bool])
                decision = None
                if votes is not None:
                    steps = [step for step, _ in votes]
                    is_saving = any(is_saving for _, is_saving in votes)
                    decision = max(steps), min(steps) == max(steps), is_saving
                step, is_equal, is_saving = choice.broadcast(decision, tuple[int, bool, bool])
                if is_equal:
                    return not is_saving
                if self.savepoint.step < step:
                    self.savepoint.release()

    def _hold(self, step: int, limit: Deadline) -> tuple[int, bool]:
        """Hold the savepoint of ``step`` or later: its step, and whether the training saves it."""
        while not self._is_stopped and limit.seconds_left:
            has_begun = self.saver.begun_step == self.savepoint.step
            if not self.saver.busy or (has_begun and self.group.size > 1):
                if self.savepoint.hold() and self.savepoint.step >= step:
                    is_saving = has_begun or self._is_claimed
                    return self.savepoint.step, is_saving and self.group.size > 1
                self.savepoint.release()
                if self._is_awaited:
                    break
            time.sleep(_POLL_SECONDS)
        raise DeadlinePassed(
            "The state after the last step is not available",
            found=self.savepoint.invalid_reason or "a save in flight",
        )

    def _hold_limit(self, deadline: Deadline) -> Deadline:
        """Return until when the ranks wait for a savepoint, so that a save still fits, or that of
        a state in a tier, which takes as long, although no save may be measured yet."""
        left = deadline.seconds_left
        save = min(1.25 * self.durations.usual_seconds[1] + SLACK, left / 2)
        reserved = max(save, left / 4) if self.saver.can_flush else save / 4
        return replace(deadline, at=deadline.at - reserved, cleanup=min(1.0, left / 20))

    def _save(self, deadline: Deadline) -> None:
        """Save the savepoint, which is held. The next step may begin when it is copied."""
        label = self.savepoint.label
        if label is None:
            return
        if self.group.size == 1 and self._claim.setdefault("by", "watcher") != "watcher":
            return
        self.is_decided = True
        if label.version.step > self.saver.saved_step:
            flat = self.savepoint.flatten_captured(self.group.rank)
            if flat is None:
                raise RankFailed(str(self.savepoint.invalid_reason), rank=self.group.rank)
            end, group = self._end_staging, self._own_group
            self.saver.save_savepoint(flat, label, _limit(deadline), group, end)
        self.saved_step = label.version.step

    def _end_staging(self) -> str | None:
        reason = self.savepoint.invalid_reason
        self.savepoint.release()
        return reason


def _limit(deadline: Deadline) -> Deadline:
    """Return the deadline of the save: its cleanup and the exit still fit."""
    left = deadline.seconds_left
    return Deadline.after(
        max(0.1, left - left / 10), deadline.purpose, deadline.clock, cleanup=min(1.0, left / 20)
    )
