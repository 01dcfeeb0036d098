"""What a training does after a notice: agree with the other ranks, save, and leave in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from threading import RLock
from traceback import format_exception
from typing import Any, TypeVar

from limpet import events
from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.errors import LimpetError, NoProgress, Preempted, RankFailed
from limpet.notices import exit_status
from limpet.notices.exit_timer import ExitTimer, end_process, exit_margin, save_deadline
from limpet.notices.notice import Notice
from limpet.notices.platform import detect_sources
from limpet.notices.signals import request_signals, stop_signals
from limpet.notices.watcher import NoticeWatcher
from limpet.ranks.agreement import Agreement, AnyAgreement, LocalAgreement, Observer, RoundDeadline
from limpet.ranks.collective import SAVE_FN
from limpet.ranks.error_report import decode_raised, describe_cause, error_text, is_from_torch
from limpet.ranks.group import broadcast_from_first, failing_together
from limpet.text import describe_newest
from limpet.threads import call_with_limit
from limpet.training.ending import Ending
from limpet.training.preemption_plan import LEAVE, SAVE_BEFORE_STOP, SAVE_ON_REQUEST
from limpet.training.step_savepoint import SLACK, SavepointSaver

STUCK_SECONDS = 30.0
"""Without a notice, the time that a rank gets to raise the error of another one."""

_NOTE_SECONDS = 0.5
"""The time to note that this restart has ended well, before the process ends."""

_POLL_SECONDS = 0.5
"""The longest time until another rank sees a proposal."""


_NOTHING: frozenset[str] = frozenset()

E = TypeVar("E", BaseException, BaseException | None)


class PreemptionResponse(Observer):
    """Responds to notices, of this process and other ranks, as ``Preemption`` says. Threads of the
    watcher, the agreement, and the exit timer call it, and the training ``respond``."""

    def __init__(self, ending: Ending) -> None:
        self._ending, self._saver, self._goodput = ending, ending.saver, ending.saver.goodput
        self._settings, self._group = self._saver.options.preemption, self._saver.group
        self._steps = ending.step_counter
        self.agreement: AnyAgreement = LocalAgreement()
        """The agreement of the ranks, once the training has started."""

        self.open_calls = self.open_scopes = 0
        """The calls of ``PreemptionGuard.run`` in progress, and the blocks of ``watch_scope``."""

        self.must_leave = False
        """True if the training must leave at the end of the block of ``watch_scope``."""

        self.save_arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        """The arguments of ``Preemption.save_fn``."""

        self.save_fn = None if self._settings is None else self._settings.save_fn
        self._has_called = False  # ``save_fn`` has returned
        self._noted = _NOTHING  # what the ranks have agreed on in the block of ``watch_scope``
        self._timer = ExitTimer()
        self._savepoint_saver = SavepointSaver(
            ending.savepoint, self._goodput, self._saver, self._group, self._on_lost
        )
        self._watcher: NoticeWatcher | None = None
        self._lock = RLock()
        self._deadline: Deadline | None = None
        self._failure: RankFailed | None = None
        self._announced_in = 0  # the id of the process
        self._peer_error: BaseException | None = None
        self._ended_by: tuple[bool, str] | None = None
        self._is_without_ranks = False
        self.has_left = False
        """True once the last step is saved and ``exit_fn`` has returned."""
        self.cleanup_seconds = CLEANUP_SECONDS
        """The time for what the end of the training removes. It is shorter after a notice."""

    # -- the beginning and the end -------------------------------------------------------------

    def watch(self) -> None:
        """Start to watch the sources of notices. A second call does nothing."""
        if self._settings is None or self._watcher is not None:
            return
        given = self._settings.notices
        sources, find = ([stop_signals()], detect_sources) if given is None else (given, tuple)
        self._watcher = NoticeWatcher(sources, self.on_notice, find)
        self._watcher.start()
        exit_status.announce_worker(request_signals(sources))
        self._announced_in = os.getpid()

    @property
    def is_leaving(self) -> bool:
        """True if the process leaves although the training has not ended."""
        return self.must_leave or self.has_left

    @property
    def is_pending(self) -> bool:
        """True after a notice, until this process leaves."""
        return self._deadline is not None

    def agree_through(self, agreement: AnyAgreement) -> None:
        """Use ``agreement`` from now on, also for a notice that came before, and watch."""
        self.watch()
        self._savepoint_saver.join()
        with self._lock:
            earlier, self.agreement = self.agreement, agreement
            is_pending, error = self.is_pending, self._peer_error
        if error is not None and isinstance(agreement, Agreement):
            agreement.raise_at_next_step(error)  # it came before this call
        if isinstance(earlier, LocalAgreement) and SAVE_ON_REQUEST in earlier.step():
            agreement.propose(SAVE_ON_REQUEST)
        if is_pending:
            self._propose(LEAVE)

    def close(self) -> None:
        """Stop to watch, because the training ends. The deadline counts until ``finish``."""
        self._savepoint_saver.close()
        self.agreement = LocalAgreement()  # it refers to this object, and to a connection
        if self._watcher is not None:
            self._watcher.close()

    def finish(self, ended: BaseException | None) -> None:
        """Let the process live on, unless a save is in flight that does not end. Then raise the
        error that ended a source of notices (see ``NoticeWatcher.raise_error``)."""
        if not self._saver.busy:
            self._timer.clear()
        if self._watcher is not None:
            self._watcher.raise_error(ended)

    def end(self, error: E, finish: Callable[[E], object]) -> None:
        """Call ``finish``, which ends the training, then leave the status for ``limpet run``. After
        a notice, an error leaves ``FAILED``, and one that may follow from the stop nothing. A
        normal end leaves ``DONE`` at the exit, unless ``finish`` raises."""
        exit_status.forget_done()  # of an earlier training in this process
        is_failed = error is not None and (not isinstance(error, SystemExit) or bool(error.code))
        try:
            finish(error)
        finally:
            is_told = self._is_announced and self.is_pending
            if is_told and error is not None and is_own_failure(error):
                exit_status.leave_code(self._status(exit_status.FAILED, describe_cause(error)))
        if not is_failed and self._is_announced:
            done = self._status(exit_status.DONE, "the training is complete")
            exit_status.leave_done_at_exit(done if self.is_pending else None)

    @property
    def _is_announced(self) -> bool:
        """True if ``limpet run`` expects a status of this process."""
        return self._announced_in == os.getpid() and not self.has_left

    # -- notices, on other threads ---------------------------------------------------------------

    def on_notice(self, notice: Notice) -> None:
        if self._settings is None or self.has_left:
            return
        plan = self._settings.plan(notice, self._exit_seconds())
        if plan.seconds == inf:
            events.emit("notice", source=notice.source, seconds=None)
            self.agreement.propose(SAVE_ON_REQUEST)
            return
        deadline = Deadline(f"the exit after {notice.source}", time.monotonic() + plan.seconds)
        is_first = self._deadline is None
        if not self._set_deadline(deadline, notice.source):
            return
        self._savepoint_saver.expect(deadline, time.monotonic() + plan.train_seconds)
        if plan.train_seconds:
            self._leave_at(time.monotonic() + plan.train_seconds)
            if is_first:
                self._propose(SAVE_BEFORE_STOP)
        else:
            self._propose(LEAVE)

    def on_deadline(self, deadline: RoundDeadline) -> None:
        """Respond to a notice that any rank has received."""
        clock = self.agreement.clock if isinstance(self.agreement, Agreement) else time.monotonic
        at = time.monotonic() + deadline.at - clock()
        agreed = Deadline(f"the exit after {deadline.cause}", at)
        if self._set_deadline(agreed, deadline.cause):
            # the rank with the notice proposes it too, unless it dies
            self._leave_at(at - self._exit_seconds())
            if self._settings is not None:  # those of the rank with the notice are the same
                notice = Notice(deadline.cause, agreed.seconds_left)
                plan = self._settings.plan(notice, self._exit_seconds())
                self._savepoint_saver.expect(agreed, time.monotonic() + plan.train_seconds)

    def on_failure(self, actions: frozenset[str], error: RankFailed) -> None:
        """Leave alone if ranks could not agree on a notice, unless as a training has ended."""
        is_demanded = not actions.isdisjoint((SAVE_BEFORE_STOP, LEAVE))
        if is_demanded and self._deadline is not None and "ended" not in error.fields:
            self._failure = error
            self._savepoint_saver.hasten()

    def on_error(self, report: str) -> None:
        """Raise the error of another rank here, or end the process if that is not possible."""
        error = decode_raised(report)
        with self._lock:
            agreement, self._peer_error, deadline = self.agreement, error, self._deadline
        if isinstance(agreement, Agreement):
            agreement.raise_at_next_step(error)
        if self._ended_by is not None:
            return  # the training thread waits for its own saves only, which have limits
        left = STUCK_SECONDS if deadline is None else min(STUCK_SECONDS, deadline.seconds_left / 2)
        message = (
            f"another rank has failed ({describe_cause(error)[:200]}), and this rank"
            f" has not returned from a call for {left:.0f} s"
        )
        end = partial(self._end_now, exit_status.FAILED, message)
        self._timer.set("error", time.monotonic() + left, end)

    def on_raised(self) -> None:
        """The training thread has raised the error of another rank."""
        self._timer.clear("error")

    def _on_lost(self) -> None:
        """Leave soon: with a rank dead, no collective operation of the training may ever return."""
        self._is_without_ranks = True
        if self._deadline is not None:
            at = time.monotonic() + self._deadline.seconds_left / 2
            self._timer.set("exit", at, self._end_late)

    def _set_deadline(self, deadline: Deadline, cause: str) -> bool:
        """Return True if there was no deadline, or a later one."""
        with self._lock:
            known, left = self._deadline, deadline.seconds_left
            if self.has_left or (known is not None and known.at <= deadline.at + 0.1):
                return False
            self.cleanup_seconds = exit_margin(left)
            self._deadline = replace(deadline, cleanup=self.cleanup_seconds)
        events.emit("notice", source=cause, seconds=left)
        self._saver.on_best.is_held = True
        self._timer.set("exit", deadline.at - exit_margin(left), self._end_late)
        return True

    def _leave_at(self, at: float) -> None:
        self._timer.set("leave", at, partial(self._propose, LEAVE))

    def _propose(self, action: str) -> None:
        if (deadline := self._deadline) is not None:
            cause = deadline.purpose.removeprefix("the exit after ")
            self.agreement.propose(action, deadline.seconds_left, cause)

    def _exit_seconds(self) -> float:
        """Return the time that is needed for an agreement, a step, a save, and the exit."""
        step, save = self._goodput.usual_seconds
        return _POLL_SECONDS + 2 * step + 1.25 * save + SLACK

    # -- the end of the process ------------------------------------------------------------------

    def _end_late(self) -> None:
        """End the process because the training has not left by itself."""
        source = "a notice" if self._deadline is None else self._deadline.purpose
        code = self._code()
        step = self._steps.progress.step
        message = (
            f"this process ends now, before it is killed, for {source}. Its last step is {step},"
            f" and {self._describe_saved()}"
        )
        if self._ended_by is not None:  # a text: the frames of the error refer to the state
            has_failed, why = self._ended_by
            code, message = exit_status.FAILED if has_failed else code, f"{message}. {why}"
        self._end_now(code, message)

    def _end_now(self, code: int, message: str) -> None:
        if code == exit_status.FAILED and self._ended_by is None:
            # without a notice, a snapshot in a tier is saved within 10 s
            limit, known = Deadline.after(10.0, "the end of this process"), self._deadline
            self._savepoint_saver.flush(limit if known is None else save_deadline(known))
        if code == exit_status.SAVED and not self._is_without_ranks:
            limit = Deadline.after(_NOTE_SECONDS, "the end of this process")
            leave = partial(self._ending.ladder.leave, code, self._failure, limit)
            call_with_limit(leave, "limpet-end", _NOTE_SECONDS)
        with suppress(LimpetError):
            code = exit_status.leave_code(self._status(code, message))
        end_process(code, message)

    def _describe_saved(self) -> str:
        if self._has_called:
            return "save_fn has saved"
        if self.save_fn is not None and self._newest_step is None:
            return "save_fn has not saved it"
        return describe_newest(self._newest_step)

    def _code(self) -> int:
        is_saved = self._has_called or self._savepoint_saver.saved_step is not None
        is_saved = is_saved or self._saver.saved_step == self._steps.progress.step
        return exit_status.SAVED if is_saved else exit_status.UNSAVED

    @property
    def _newest_step(self) -> int | None:
        steps = self._saver.newest_step, self._savepoint_saver.saved_step
        return max((step for step in steps if step is not None), default=None)

    def _status(self, code: int, why: str) -> exit_status.Status:
        return exit_status.Status(
            code,
            self._group.rank,
            step=self._steps.progress.step,
            saved_step=self._newest_step,
            run=self._saver.reported_url,
            why=why,
        )

    # -- the training thread ---------------------------------------------------------------------

    def respond(self, agreed: frozenset[str]) -> None:
        """Save and leave if the ranks have agreed on that, or cannot agree; in ``watch_scope``,
        only note it while there is time. Raises ``Preempted``, unless ``exit_fn`` returns."""
        # leave also if the ranks could not agree, or if their threads save
        is_urgent = self._failure is not None or self._savepoint_saver.is_decided
        leaves = LEAVE in agreed or is_urgent
        if self.open_scopes and not (LEAVE in agreed and self.must_leave):
            if leaves and not self.must_leave:
                self.must_leave, self._noted = True, agreed
                if self._deadline is not None:  # leave later, while a save still fits
                    self._leave_at(self._deadline.at - self._exit_seconds())
            return
        if self.open_scopes == 0:
            agreed, self._noted, self.must_leave = agreed | self._noted, _NOTHING, False
        if LEAVE in agreed or leaves:
            self._leave(LEAVE in agreed)

    def leave_after(self, error: BaseException) -> Preempted | None:
        """Return the exception with which to leave after ``error``, or None. After a notice, it may
        follow from a rank that left: the thread saves what it can, and ``error`` is shown."""
        why = f"{type(error).__name__} had ended the training: {error_text(error)[:200]}"
        self._ended_by = is_own_failure(error), why
        self._timer.clear("error")
        deadline, is_saved = self._deadline, False
        if deadline is None or not (isinstance(error, RankFailed) or is_from_torch(error)):
            return None
        if self._group.size > 1:
            saved_step = self._savepoint_saver.wait(save_deadline(deadline))
            is_saved = saved_step is not None or self._savepoint_saver.has_flushed
        try:
            if is_saved or self._failure is not None:
                exit_status.write_error("".join(format_exception(error)))
                self._exit(self._code(), deadline, error)
        except Preempted as left:
            return left
        return None

    def leave_without_ranks(self, error: RankFailed) -> None:
        """Leave without the other ranks, because one of them failed in a save after a notice."""
        self._failure = error
        self._leave(together=False)

    def call_save_function(self) -> None:
        """Call ``Preemption.save_fn``, if there is one, with the arguments of this call."""
        if self.save_fn is not None:
            args, kwargs = self.save_arguments
            self._ending.call_save_function(self.save_fn, *args, **kwargs)

    def _leave(self, together: bool) -> None:
        deadline = self._deadline
        if deadline is None or self._settings is None:
            return
        problem: BaseException | None = self._failure
        limit = save_deadline(deadline)
        together = together and self._savepoint_saver.claim()
        if together and self.save_fn is not None:  # its errors, of any class, are raised
            with failing_together(self._group, SAVE_FN, limit, as_raised=True):
                self.call_save_function()
            broadcast_from_first(self._group, SAVE_FN, lambda: True, bool, deadline=limit)
            self._has_called = True
        else:
            try:
                if together:
                    self._ending.save_last_step(limit)
                elif self._savepoint_saver.wait(limit) is None:
                    self._saver.wait(limit)
            except (LimpetError, TimeoutError) as e:
                problem = e
                self._savepoint_saver.flush(limit)
        self._exit(self._code(), deadline, problem)

    def _exit(self, code: int, deadline: Deadline, problem: BaseException | None) -> None:
        settings, step, saved_step = self._settings, self._steps.progress.step, self._newest_step
        cause = deadline.purpose.removeprefix("the exit after ")
        events.emit(
            "preempted",
            run=self._saver.reported_url,
            step=step,
            saved=saved_step,
            code=code,
            source=cause,
            seconds_left=deadline.seconds_left,
            error=problem,
        )
        self._ending.ladder.leave(code, problem, deadline)
        with self._lock:
            self.has_left, self._failure, self._deadline = True, None, None
        self._savepoint_saver.close()
        if not self._saver.busy:
            self._timer.clear()
        if settings is not None and settings.exit_fn is not None:
            settings.exit_fn()
            self.cleanup_seconds = CLEANUP_SECONDS
            self._timer.clear()  # training may go on, also while an old promotion is in flight
            return
        why = f"stopped after step {step}, which is saved, because of {cause}"
        if code != exit_status.SAVED or saved_step is None or step > saved_step:
            when = f"after step {step}" if step else "before the first step"
            why = f"stopped {when} because of {cause}; {self._describe_saved()}"
            why += "" if problem is None else f". {problem}"
        if self._group.rank == 0:
            exit_status.write_error(why)
        code = exit_status.leave_code(self._status(code, why))
        raise Preempted(code, step, saved_step, why)


def is_own_failure(error: BaseException) -> bool:
    """Return False for an exit with code 0, an interrupt, and an error that may be the consequence
    of the stop of another process."""
    if isinstance(error, Preempted | NoProgress | RankFailed) or is_from_torch(error):
        return False
    return bool(error.code) if isinstance(error, SystemExit) else isinstance(error, Exception)
