"""What a training does after a notice: agree with the other ranks, save, and leave in time."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from threading import RLock
from traceback import format_exception
from typing import Any, Protocol

from holdfast import events
from holdfast.deadline import Deadline
from holdfast.engine.distributed.agreement import Agreement, LocalAgreement
from holdfast.engine.distributed.error_report import decode_raised
from holdfast.engine.distributed.rounds import RoundDeadline
from holdfast.errors import HoldfastError, Preempted, RankFailed
from holdfast.preemption.exit_status import (
    DONE,
    FAILED,
    SAVED,
    UNSAVED,
    Status,
    announce_worker,
    leave_code,
)
from holdfast.preemption.exit_timer import ExitTimer, end_process
from holdfast.preemption.notice import Notice, NoticeSource
from holdfast.preemption.notices.platform import detect
from holdfast.preemption.policy import Preemption
from holdfast.preemption.signals import SignalNotice
from holdfast.preemption.watcher import NoticeWatcher

SAVE, LEAVE = "save before the stop", "save and leave"
"""The actions on which the ranks agree after a notice."""

SAVE_ONLY = "save after a notice"
"""The action after a notice that the machine is at risk, or after a signal that means this."""

STUCK_SECONDS = 30.0
"""Without a notice, the time that a rank gets to raise the error of another one."""

_SLACK = 1.0
"""Seconds beyond the measured times of a step and a save."""

_POLL_SECONDS = 0.5
"""The longest time until another rank sees a proposal."""


class Steps(Protocol):
    """What counts the steps of the training."""

    @property
    def step(self) -> int:
        """The last step that is complete."""


class Durations(Protocol):
    """What measures the steps and saves of the training."""

    @property
    def usual_seconds(self) -> tuple[float, float]:
        """The times in seconds that nearly all steps and nearly all saves take."""


class Saves(Protocol):
    """What saves the state of the training."""

    url: str

    @property
    def saved_step(self) -> int:
        """The step of the newest committed version, or 0."""

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""

    def wait(self, deadline: Deadline) -> object:
        """Wait for the save in flight, without the other ranks."""


class Ending(Protocol):
    """What ends the training."""

    def save_last_step(self, deadline: Deadline) -> None:
        """Save the last step on all ranks, and wait until it is committed."""


class PreemptionResponse:
    """Responds to notices, of this process and of other ranks, as ``Preemption`` says.

    The watcher of the sources, the thread of the agreement, and the exit timer call it on their
    threads. The training thread calls ``respond`` at each step.
    """

    def __init__(
        self,
        settings: Preemption | None,
        rank: int,
        parts: tuple[Steps, Durations, Saves, Ending],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._steps, self._durations, self._saves, self._ending = parts
        self._clock = clock
        self._agreement: Agreement | LocalAgreement = LocalAgreement()
        self._timer = ExitTimer(clock)
        self._watcher: NoticeWatcher | None = None
        self._lock = RLock()
        self._deadline: Deadline | None = None
        self._failure: Exception | None = None
        self.has_left = False
        """True once the last step is saved and ``exit_fn`` has returned."""

        self.is_urgent = False
        """True if the ranks could not agree, and this rank must leave at its next step."""

    # -- the beginning and the end -------------------------------------------------------------

    def watch(self) -> None:
        """Start to watch the sources of notices. A second call does nothing."""
        if self._settings is None or self._watcher is not None:
            return
        sources, find = self._settings.notices, _detect_platform
        if sources is not None:
            find = tuple
        else:
            sources = [SignalNotice()]
        self._watcher = NoticeWatcher(sources, self.on_notice, find)
        self._watcher.start()
        announce_worker()

    def agree_through(self, agreement: Agreement | LocalAgreement) -> None:
        """Use ``agreement`` from now on, also for a notice that came before."""
        with self._lock:
            self._agreement = agreement
            deadline = self._deadline
        if deadline is not None:
            self._propose(LEAVE, deadline)

    def close(self) -> None:
        """Stop to watch, because the training has ended.

        The process still ends by the deadline if a save is in flight that does not end.
        """
        if not self._saves.busy:
            self._timer.clear()
        if self._deadline is not None and not self.has_left:
            # torchrun returns 1 after a signal, even if all of its workers are done
            atexit.register(_leave_done, self._status(DONE, "the training is complete"))
        self._agreement = LocalAgreement()  # it refers to this object, and to a connection
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    # -- notices, on other threads ---------------------------------------------------------------

    def on_notice(self, notice: Notice) -> None:
        """Respond to a notice of a source."""
        if self._settings is None or self.has_left:
            return
        plan = self._settings.plan(notice, self._exit_seconds())
        if plan.seconds == inf:
            events.emit("notice", source=notice.source, seconds=None)
            self._agreement.propose(SAVE_ONLY)
            return
        deadline = Deadline(
            f"the exit after {notice.source}", self._clock() + plan.seconds, self._clock
        )
        is_first = self._deadline is None
        if not self._set_deadline(deadline, notice.source):
            return
        if plan.train_seconds:
            self._leave_at(self._clock() + plan.train_seconds)
            if is_first:
                self._propose(SAVE, deadline)
        else:
            self._propose(LEAVE, deadline)

    def on_deadline(self, deadline: RoundDeadline) -> None:
        """Respond to a notice that any rank has received."""
        at = self._clock() + deadline.at - self._agreement_clock()
        cause = f"the exit after {deadline.cause}"
        if self._set_deadline(Deadline(cause, at, self._clock), deadline.cause):
            # the rank with the notice proposes it too, unless it dies
            self._leave_at(at - self._exit_seconds())

    def on_failure(self, actions: frozenset[str], error: RankFailed) -> None:
        """Leave without the other ranks if they could not agree on what a notice demands.

        A rank whose training has ended is no reason: this one is about to end too.
        """
        is_demanded = not actions.isdisjoint((SAVE, LEAVE)) and self._deadline is not None
        if is_demanded and "ended" not in error.fields:
            self._failure, self.is_urgent = error, True

    def on_error(self, report: str) -> None:
        """Raise the error of another rank here, or end the process if that is not possible."""
        error = decode_raised(report)
        if isinstance(self._agreement, Agreement):
            self._agreement.raise_at_next_step(error)
        left = STUCK_SECONDS
        if self._deadline is not None:
            left = min(left, self._deadline.seconds_left / 2)
        message = (
            f"another rank has failed ({type(error).__name__}: {str(error)[:200]}), and this rank"
            f" has not returned from a call for {left:.0f} s. The stacks of its threads:"
        )
        self._timer.set("error", self._clock() + left, lambda: self._end_now(FAILED, message))

    def on_raised(self) -> None:
        """The training thread has raised the error of another rank."""
        self._timer.clear("error")

    def _set_deadline(self, deadline: Deadline, cause: str) -> bool:
        """Return True if there was no deadline, or a later one."""
        with self._lock:
            known = self._deadline
            if self.has_left or (known is not None and known.at <= deadline.at + 0.1):
                return False
            left = deadline.seconds_left
            self._deadline = Deadline(
                deadline.purpose, deadline.at, deadline.clock, cleanup=min(2.0, left / 20)
            )
        events.emit("notice", source=cause, seconds=left)
        margin = _exit_margin(left)
        self._timer.set("exit", deadline.at - margin, self._end_late)
        return True

    def _leave_at(self, at: float) -> None:
        self._timer.set("leave", at, self._propose_to_leave)

    def _propose_to_leave(self) -> None:
        if self._deadline is not None:
            self._propose(LEAVE, self._deadline)

    def _propose(self, action: str, deadline: Deadline) -> None:
        cause = deadline.purpose.removeprefix("the exit after ")
        self._agreement.propose(action, deadline.seconds_left, cause)

    def _agreement_clock(self) -> float:
        return self._agreement.clock() if isinstance(self._agreement, Agreement) else self._clock()

    def _exit_seconds(self) -> float:
        """Return the time that is needed for an agreement, a step, a save, and the exit."""
        step, save = self._durations.usual_seconds
        return _POLL_SECONDS + 2 * step + 1.25 * save + _SLACK

    # -- the end of the process ------------------------------------------------------------------

    def _end_late(self) -> None:
        """End the process because the training has not left by itself."""
        source = "a notice" if self._deadline is None else self._deadline.purpose
        message = (
            f"this process ends now, before it is killed, for {source}. Its last step is"
            f" {self._steps.step}, and the newest version is that of step {self._saves.saved_step}."
            " The stacks of its threads:"
        )
        self._end_now(self._code(), message)

    def _end_now(self, code: int, message: str) -> None:
        with suppress(HoldfastError):
            code = leave_code(self._status(code, message))
        end_process(code, message)

    def _code(self) -> int:
        return SAVED if self._saves.saved_step == self._steps.step else UNSAVED

    def _status(self, code: int, why: str) -> Status:
        step, saved_step = self._steps.step, self._saves.saved_step
        return Status(code, self._rank, step, saved_step, self._saves.url, why)

    # -- the training thread ---------------------------------------------------------------------

    def respond(self, agreed: frozenset[str]) -> None:
        """Save and leave if the ranks have agreed on that, or cannot agree.

        Raises ``Preempted``, unless ``exit_fn`` returns.
        """
        if LEAVE in agreed:
            self._leave(together=True)
        elif self.is_urgent:
            self._leave(together=False)

    def leave_on_failure(self, save: Callable[[], object]) -> None:
        """Call ``save``. After a notice, leave without the other ranks if one of them fails."""
        try:
            save()
        except RankFailed as e:
            if self._deadline is None:
                raise
            self._failure = e
            self._leave(together=False)

    def leave_after(self, error: BaseException) -> None:
        """Leave if the ranks could not agree on that, and ``error`` has ended the training.

        The ranks then leave one after the other. In those that wait in a collective of the
        training, it fails because the others have left. The error is shown, since it may be another
        one. Raises ``Preempted``, unless ``exit_fn`` returns.
        """
        if self.is_urgent and isinstance(error, Exception):
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write("".join(format_exception(error)))
            self._failure = error
            self._leave(together=False)

    def _leave(self, together: bool, *args: Any, **kwargs: Any) -> None:
        deadline, settings = self._deadline, self._settings
        if deadline is None or settings is None:
            return
        problem: BaseException | None = self._failure
        code = None
        try:
            limit = _save_deadline(deadline)
            if not together:
                self._saves.wait(limit)
            elif settings.save_fn is not None:
                settings.save_fn(*args, **kwargs)
                code = SAVED
            else:
                self._ending.save_last_step(limit)
        except (HoldfastError, TimeoutError) as e:
            problem = e
        self._exit(self._code() if code is None else code, deadline, problem)

    def _exit(self, code: int, deadline: Deadline, problem: BaseException | None) -> None:
        settings, step, saved_step = self._settings, self._steps.step, self._saves.saved_step
        cause = deadline.purpose.removeprefix("the exit after ")
        events.emit(
            "preempted",
            run=self._saves.url,
            step=step,
            saved=saved_step,
            code=code,
            source=cause,
            seconds_left=deadline.seconds_left,
            error=problem,
        )
        with self._lock:
            self.has_left, self.is_urgent, self._deadline = True, False, None
        if not self._saves.busy:
            self._timer.clear()
        if settings is not None and settings.exit_fn is not None:
            settings.exit_fn()
            return
        why = _describe(code, step, saved_step, cause, problem)
        if self._rank == 0:
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write(f"holdfast: {why}\n")
                sys.stderr.flush()
        code = leave_code(self._status(code, why))
        raise Preempted(code, step, saved_step, why)


def _leave_done(status: Status) -> None:
    """Leave the status of a training that ended in spite of a notice, unless an exception ends the
    process."""
    if not hasattr(sys, "last_value"):
        leave_code(status)


def _detect_platform() -> Sequence[NoticeSource]:
    sources = detect()
    events.emit("platform_detected", sources=[s.name for s in sources])
    return sources


def _exit_margin(left: float) -> float:
    """Return the seconds before the deadline at which a process ends that has not left."""
    return min(2.0, left / 20)


def _save_deadline(deadline: Deadline) -> Deadline:
    """Return the deadline of the last save: its cleanups and its waits for late ranks still fit."""
    reserved = _exit_margin(deadline.seconds_left) + 3 * deadline.cleanup_seconds
    seconds = max(deadline.seconds_left - reserved, deadline.seconds_left / 2, 0.1)
    return Deadline.after(seconds, deadline.purpose, deadline.clock, deadline.cleanup)


def _describe(
    code: int, step: int, saved_step: int, cause: str, problem: BaseException | None
) -> str:
    if code == SAVED:
        return f"stopped after step {step}, which is saved, because of {cause}"
    text = (
        f"stopped after step {step} because of {cause}; the newest version is of step {saved_step}"
    )
    return text if problem is None else f"{text}. {problem}"
