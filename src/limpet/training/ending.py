"""How a training ends: the save of the last step, the save after an exception, and warnings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from threading import current_thread
from typing import Any
from weakref import finalize, ref

from limpet import errors, events
from limpet.deadline import Deadline
from limpet.format.records import Ended, InexactEvaluation
from limpet.machine import after_fork
from limpet.notices.exit_status import write_error
from limpet.ranks.agreement import AnyAgreement
from limpet.ranks.collective import Collective
from limpet.ranks.error_report import Arrival, describe_cause, format_with_notes
from limpet.ranks.group import Group, all_reduce, broadcast_from_first
from limpet.run.policy import Never, OnPreemption
from limpet.run.records import put_about_version
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.storage.local.store import LocalStore
from limpet.storage.memory import MemoryStore
from limpet.text import user_line, warn_user
from limpet.threads import no_op
from limpet.tiers.ladder import Ladder
from limpet.training.lifecycle import Lifecycle, exclusive, is_process_ending
from limpet.training.saver import Saver, SaveSpec, version_of
from limpet.training.step_counter import StepCounter, find_positions
from limpet.training.step_savepoint import StepSavepoint

JOIN_TIMEOUT = 20.0
"""Seconds within which all ranks must join a save after an exception.

If only one rank has raised, the other ranks hang or are terminated.
"""

_END = "the end of the training"


class Ending:
    """Ends a training: saves what the policy and ``at_end`` say, and warns of steps that no version
    holds. No state is ever saved that may belong to no step."""

    def __init__(
        self,
        saver: Saver,
        lifecycle: Lifecycle,
        step_counter: StepCounter,
        savepoint: StepSavepoint,
        start_save: Callable[..., object],
        release: Callable[[], object],
    ) -> None:
        self._policy = policy = saver.options.save
        self._at_end = saver.options.at_end and policy.at_end
        self.expects_save = not isinstance(policy, Never | OnPreemption)
        """True if steps that no version holds are worth a warning after an exception."""

        self._group = saver.group
        self.saver = saver
        self._lifecycle = lifecycle
        self.step_counter = step_counter
        self.savepoint = savepoint
        self._start_save = start_save
        self._release = release
        self.call_save_function = lifecycle.call_save_function
        self.is_entered = False
        """True in a ``with`` block, which allows saves after an exception."""

        self.ladder = Ladder(saver.run, saver.group, saves=not isinstance(policy, Never))

    # -- after a notice -------------------------------------------------------------------------

    def save_last_step(self, deadline: Deadline) -> None:
        """Save the last step on all ranks, and wait until it is committed. ``Never`` saves nothing.
        A save in flight is awaited first, but no promotion. If it fails, this one may succeed."""
        saver, step = self.saver, self.step_counter.progress.step
        with suppress(errors.StoreError, errors.CommitError):  # an event has reported it
            saver.wait_before_last(saver.begun_step == step, deadline)
        if saver.saved_step != step and not isinstance(self._policy, Never):
            self._start_save("preemption", deadline)
            self.saver.wait_on_all_ranks("the last save", deadline)

    # -- during the training -------------------------------------------------------------------

    def check_entered(self) -> None:
        """Raise ``LimpetError`` if ``OnException`` is used outside a ``with`` block. Without the
        block, the Checkpointer does not see that the training raised."""
        if self._policy.on_exception and not self.is_entered:
            raise errors.LimpetError(
                "OnException can never fire: use the Checkpointer as a context manager, or remove"
                " OnException(), which copies state at every step"
            )

    def warn_if_collected(self, checkpointer: object) -> None:
        """Warn of unsaved steps if ``checkpointer`` is discarded, or the process ends, unclosed."""
        if self._group.rank == 0 and self._at_end:
            finalize(
                checkpointer,
                warn_collected,
                lifecycle=self._lifecycle,
                saver=self.saver,
                step_counter=self.step_counter,
                line=user_line(),
            )

    # -- the end -------------------------------------------------------------------------------

    def finish(self, error: BaseException | None, is_leaving: bool) -> bool:
        """Wait for the save in flight, and save the last step. ``error``: being handled, or None;
        ``is_leaving``: the training goes on elsewhere. Return True if steps may be unsaved."""
        could_save = self._lifecycle.can_save
        self.saver.on_best.is_held |= error is not None or is_leaving
        at_end = could_save and self._at_end and not is_process_ending()
        if at_end and error is not None:
            report_exception(self._group, error)
        try:
            self._wait()
        except Exception:
            if at_end and error is None:  # this save may succeed although that one failed
                self._save()
            raise
        if at_end and error is None:
            self._save()
        saver = self.saver
        if could_save and error is None and not is_process_ending():
            steps, reason = self.step_counter, saver.early_stop.end_reason
            is_saved = saver.saved_step == steps.progress.step
            positions = steps.loader_epochs() if is_saved else None
            parts: list[Callable[[], object]] = [saver.finish_log, saver.on_best.finish]
            if not is_leaving:
                parts.insert(0, partial(record_end, saver, reason, steps.progress.epoch, positions))
            if self._group.rank == 0:
                parts.append(partial(saver.retention.finish, saver.writer.newest))
            failures: list[Exception] = []
            for part in parts:
                try:
                    saver.warn_or_raise(part)
                except Exception as e:  # noqa: BLE001  (the other parts follow)
                    failures.append(e)
            for failure in failures[1:]:
                failures[0].add_note(f"In addition, {format_with_notes(failure)}")
            if failures:
                raise failures[0]
            if self._group.rank == 0 and saver.writer.attempt:
                report_missing_metrics(saver)
        is_over = is_process_ending() or self._lifecycle.is_forked
        if self._lifecycle.is_resumed and not (could_save or is_over):  # it was complete
            saver.warn_or_raise(saver.on_best.finish)
        if not self._lifecycle.is_closed:
            self.ladder.end(error)
        return could_save and not (at_end and error is None)

    def _wait(self) -> None:
        if not self._lifecycle.is_forked:
            self.saver.warn_or_raise(self.saver.wait)

    def _save(self) -> None:
        """Save the last step on all ranks. If a version has it, the others are not waited for.
        ``RankFailed``: not all ranks end at this step without an exception."""
        group, step = self._group, self.step_counter.progress.step
        if self.saver.saved_step == step:
            problem = errors.RankFailed(
                f"Rank {group.rank} has ended after step {step}, which is saved",
                expected="all ranks to end after the same step",
                todo="Make the same number of steps on all ranks",
                rank=group.rank,
            )
            report_exception(group, problem)
            return
        with closing(group.collective(_END)) as collective, collective:
            _compare_steps(collective, step, "The ranks did not end at the same step")
        self.saver.warn_or_raise(self._start_save, "end")
        self._wait()

    def finish_after(self, error: BaseException, agreement: AnyAgreement) -> None:
        """End the training after ``error`` in the ``with`` block; other failures are reported with
        it. Raises the error of the rank that raised first, from ``error``."""
        if isinstance(error, errors.Preempted | errors.NoProgress):
            self._release()
            return
        first = None
        if not isinstance(error, SystemExit) or error.code:
            first = agreement.publish_error(error)
        try:
            self.finish_here(error)
            self.ladder.end(error)
        finally:
            if first is not None:
                raise first from error

    def finish_here(self, error: BaseException) -> None:
        """Do the same, but do not tell the other ranks, and leave the record of restarts alone."""
        problems: list[str] = []
        self.saver.on_best.is_held = True
        could_save = self._lifecycle.can_save
        try:
            self._end_after(error, problems)
        except Exception as e:
            is_tolerable = isinstance(e, errors.StoreError | errors.CommitError)
            is_tolerable = is_tolerable and self.saver.options.on_error == "warn"
            if isinstance(error, SystemExit) and not error.code and not is_tolerable:
                raise  # exit code 0 would report success to the parent process
            is_saved = "committed" in getattr(e, "fields", ())
            problems.append(("" if is_saved else "the last save failed: ") + format_with_notes(e))
        finally:
            # notes and warnings, because Python may show no note; if warnings are errors, there are
            # only notes, and lines on stderr for ``SystemExit`` and the like
            for message in problems:
                error.add_note(f"In addition, {message}")
                warning = f"The training ended with {type(error).__name__}. In addition, {message}"
                try:
                    warn_user(warning, errors.SaveFailed)
                except errors.SaveFailed:
                    if not isinstance(error, Exception):
                        write_error(warning)
        if could_save and isinstance(error, SystemExit) and not error.code and not problems:
            self.warn_unsaved(error)  # Python shows no traceback

    @exclusive
    def _end_after(self, error: BaseException, problems: list[str]) -> None:
        label, can_save = self.savepoint.label, self._lifecycle.can_save
        try:
            if can_save and self._policy.on_exception and label is not None:
                self._save_before_exception(label, error, problems)
            elif can_save and self._at_end:
                report_exception(self._group, error)
        finally:
            try:
                self._wait()
            finally:
                self._release()

    def _save_before_exception(
        self, label: SaveSpec, error: BaseException, problems: list[str]
    ) -> None:
        """Save the state after the last step; what prevents that goes to ``problems``. So does
        another rank's earlier error, the likely cause, or it is noted on ``error`` and version."""
        step, cause = label.version.step, describe_cause(error)
        first = Arrival(self._group.rank, "", cause, "")
        try:
            collective = self._group.collective("the save after an exception", JOIN_TIMEOUT, error)
            first = collective.first_arrival
            with closing(collective), collective:
                _compare_steps(collective, step, "The ranks did not raise in the same step")
        except errors.RankFailed as e:
            failure = errors.LimpetError(e.what, expected=e.expected, found=e.found)  # no advice
            earlier = _first_error_text(first, cause)
            problems.append(f"the state after step {step} was not saved: {failure}{earlier}")
        else:
            if first_error := _first_error_text(first, cause):
                error.add_note(first_error.strip())
                cause = f"{first.cause} (rank {first.rank})"
            self._save_captured(label._replace(note={**label.note, "error": cause}), problems)

    def _save_captured(self, label: SaveSpec, problems: list[str]) -> None:
        """Save the captured state, if all ranks have it; ``problems`` gets what prevents it."""
        saver, earlier_error = self.saver, None
        try:
            saver.wait()
        except Exception as e:  # noqa: BLE001  (this save may succeed although that one failed)
            earlier_error = e
        state, own_reason = None, _ALREADY_SAVED
        if saver.writer.newest is None or version_of(saver.writer.newest) != label.version:
            state = self.savepoint.flatten_captured(self._group.rank)
            own_reason = str(self.savepoint.invalid_reason) if state is None else ""
        operation = "the state before an exception"
        reason = all_reduce(self._group, operation, lambda: own_reason, str, _first_reason, str)
        if reason and reason != _ALREADY_SAVED:
            problems.append(f"the state after step {label.version.step} was not saved: {reason}")
            if earlier_error is not None:
                raise earlier_error
        elif earlier_error is not None:
            problems.append(f"an earlier save failed: {format_with_notes(earlier_error)}")
        if state is not None and not reason:
            saver.start(state, label)
            saver.wait()

    def warn_unsaved(self, error: BaseException | None) -> None:
        """Warn, on rank 0, of the steps that no version holds. Emit an event on all ranks."""
        step, saved_step = self.step_counter.progress.step, self.saver.saved_step
        url, newest_step = self.saver.run.url, self.saver.newest_step
        is_expected = self.expects_save if error is not None else self._at_end
        if step != saved_step and is_expected:
            events.emit("left_unsaved", run=url, step=step, since=newest_step)
            if self._group.rank == 0:
                reason = unsaved_reason(error)
                message = describe_unsaved_steps(url, step, newest_step, reason)
                warn_user(message, errors.UnsavedSteps)

    def close(self) -> None:
        saver, must_report = self.saver, self._lifecycle.must_report_end
        if self._start_save is not no_op and saver.reported_url is not None and must_report:
            events.emit(
                "finished",
                run=saver.url,
                step=self.step_counter.progress.step,
                saved=saver.newest_step,
                new=bool(saver.writer.attempt),
                reason=saver.early_stop.end_reason,
                error=self._lifecycle.interruption(),
            )
        self._start_save = self._release = no_op  # the Checkpointer refers to this object
        self.savepoint.close()


def report_exception(group: Group, error: BaseException) -> None:
    """Make the other ranks raise ``error`` in their next operation, without waiting for them."""
    # they know already that a rank failed, or have ended, with the key-value store
    with suppress(Exception):
        collective = group.collective(_END, JOIN_TIMEOUT, error)
        collective.abort(error, as_raised=True)
        collective.close()


_ALREADY_SAVED = "saved"
"""The reason for not saving after an exception that the version exists already."""


def _first_reason(reasons: list[str]) -> str:
    """Return why the state before an exception is not saved, or "": rank 0 has saved it, or what
    the first rank without it says."""
    without_state = [rank for rank, why in enumerate(reasons) if why not in ("", _ALREADY_SAVED)]
    if reasons[0] == _ALREADY_SAVED or not without_state:
        return reasons[0]
    rank = without_state[0]
    return reasons[rank] + (f" (on rank {rank})" if len(reasons) > 1 else "")


def _compare_steps(collective: Collective, step: int, problem: str) -> None:
    """Wait for the other ranks. Raises ``RankFailed`` unless all join after the same last step."""
    steps = collective.gather(step, int)
    if steps is not None and (other := {*steps} - {step}):
        rank = steps.index(min(other))
        raise errors.RankFailed(
            problem,
            expected=f"step {step} as the last completed step of all ranks, as on rank 0",
            found=f"step {steps[rank]} on rank {rank}",
            rank=rank,
        )
    collective.broadcast(True if steps is not None else None, bool)


def _first_error_text(first: Arrival, own_error: str) -> str:
    """Return a sentence, after a space, about another error that a rank raised first, or ""."""
    if first.cause in ("", own_error):
        return ""
    return f" Rank {first.rank} raised first: {first.cause}"


# -- after the last save -------------------------------------------------------------------------


def record_end(saver: Saver, reason: str, epochs: int, positions: dict[str, int] | None) -> None:
    """Record about the newest version that ``epochs`` are complete, and the epochs at which the
    loaders go on, unless the version does not have the last steps. ``reason``: why the training has
    ended, so that nobody waits for more, or ""."""
    newest, run = saver.writer.newest, saver.run
    if newest is None or saver.group.rank:
        return
    version = version_of(newest)
    try:
        records = run.catalog.evaluations.read(version, newest.digest)
        if [(end.reason, end.epochs) for end in records.of(Ended)[-1:]] == [(reason, epochs)]:
            return
        with suppress(errors.NotFound):  # somebody has deleted the version
            pins.require_manifest(run.location(version))
            about = version, newest.digest
            content = {"reason": reason, "epochs": epochs, "positions": positions}
            put_about_version(Ended, "training", about, run.store, records.records, **content)
    except errors.LimpetError as e:
        what = "the training" if reason else "its epoch"
        advice = f"{version} was saved, but the end of {what} could not be recorded"
        raise e.with_advice(advice, committed=str(version)) from e


def read_end(saver: Saver) -> tuple[int, Mapping[str, int] | None]:
    """Return how many epochs were complete when the newest version was left, and the epochs of the
    loaders, or None if it does not have the last steps. All ranks call this; they raise
    ``StoreError`` together."""

    def read() -> tuple[int, Mapping[str, int] | None]:
        newest = saver.writer.newest
        if newest is None:
            return 0, None
        ends = saver.run.catalog.evaluations.read(version_of(newest), newest.digest).of(Ended)
        return (ends[-1].epochs, ends[-1].positions) if ends else (0, None)

    operation = f"the end of {saver.url}"
    return broadcast_from_first(saver.group, operation, read, tuple[int, Mapping[str, int] | None])


def report_missing_metrics(saver: Saver) -> None:
    """Emit ``metric_missing`` for metrics of policies that no version has, unless an evaluation is
    at work, or the store cannot be read. It is no warning: one may still follow. ``inexact``: the
    ones that only evaluations that do not count have measured."""
    awaited, given = saver.early_stop.awaited_metric, set[str]()
    inexact = saver.inexact_metrics.copy()
    needed = {metric for metric, _ in saver.options.keep.objectives}
    needed |= set() if awaited is None else {awaited}
    if not needed - saver.evaluated_metrics:
        return
    catalog = saver.run.catalog
    with suppress(errors.LimpetError):  # retention reports the failure of the store
        listing = catalog.listing()
        for version, record in catalog.read_versions(listing).items():
            evaluations = catalog.evaluations.read(version, record.digest)
            given.update(record.metrics, evaluations.metrics())
            inexact.update(*(r.metrics for r in evaluations.of(InexactEvaluation)))
        missing = needed - saver.evaluated_metrics - given
        if missing and not listing.leases:
            events.emit(
                "metric_missing",
                run=saver.url,
                metrics=sorted(missing),
                given=sorted(given),
                inexact=sorted(missing & inexact),
            )


# -- warnings at the end --------------------------------------------------------------------------


def describe_unsaved_steps(run_url: str, step: int, newest_step: int | None, reason: str) -> str:
    """Say that the steps after ``newest_step`` are not in any version, and why."""
    first = (newest_step or 0) + 1
    steps = f"Step {step} is" if step <= first else f"Steps {first} to {step} are"
    where = f"{run_url}, where nothing is saved" if newest_step is None else run_url
    return f"{steps} not in any version of {where}: {reason}"


def warn_collected(
    lifecycle: Lifecycle, saver: Saver, step_counter: StepCounter, line: tuple[str, int]
) -> None:
    """Warn of unsaved steps of a Checkpointer that was never closed, made at the user's ``line``:
    in any thread, or at exit, so that nothing is saved, and no sink, which may lock, is called."""
    step, begun_step = step_counter.progress.step, saver.begun_step
    if not lifecycle.can_save or step == begun_step:
        return
    ended = "the process ended" if is_process_ending() else "the Checkpointer was discarded"
    reason = f"{ended} before close(). Use a with block, or call close()"
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if is_process_ending() and error is not None:  # in a script, it has ended the main thread
        reason = unsaved_reason(error)
    newest_step = begun_step or saver.newest_step
    message = describe_unsaved_steps(saver.run.url, step, newest_step, reason)
    try:
        warnings.warn_explicit(message, errors.UnsavedSteps, *line)
    except errors.UnsavedSteps:
        if not is_process_ending():
            raise
        write_error(message)


def unsaved_reason(error: BaseException | None) -> str:
    """Return why the last steps were not saved, and what to do."""
    if error is None:
        return "the process was ending. Call close() earlier, or use a with block"
    return (
        f"the training ended with an exception ({describe_cause(error)}). Only OnException()"
        " saves then, in a with block"
    )


# -- a newer Checkpointer takes the run over ------------------------------------------------------
#
# In a notebook, the cell that creates the Checkpointer of a run is run again and again. The earlier
# Checkpointer is then closed as after an exception: its saves in flight complete, and nothing that
# may belong to no step is saved. Only a Checkpointer that the same thread has made is closed. The
# ranks of one job may share a process, in threads; a rank takes over only from itself.
#
# This happens when the new one is created. At its first step, it would be too late: ``resume``
# would not see the version of the save in flight.

_trainings: dict[ref[Saver], ref[Ending]] = {}
"""The trainings of this process, by their ``Saver``, which lives until its saves have ended.

There is no lock: each access is a single operation of the dict.
"""

after_fork(_trainings.clear)  # they belong to the parent


def _forget(saver: ref[Saver], trainings: dict[ref[Saver], ref[Ending]] = _trainings) -> None:
    trainings.pop(saver, None)  # a parameter: at the exit of the interpreter, globals are None


def take_over(newer: Ending) -> None:
    """End earlier trainings of this process with the run and rank of a ``newer`` one.
    ``LimpetError``, and no change, if another thread made one, or one of its calls is running."""
    saver = newer.saver
    for known, owner in _trainings.copy().items():
        earlier = known()
        if earlier is None or earlier.group.rank != saver.group.rank:
            continue
        if _is_same_run(earlier, saver.run):
            _end(earlier, owner())
    _trainings[ref(saver, _forget)] = ref(newer)


def check_position(run: Run, state: dict[str, Any]) -> None:
    """Raise ``LimpetError`` if an open training of another run in this process counts in the same
    objects: each would advance them for both."""
    own = {*map(id, find_positions(state))}
    for training in [owner() for owner in _trainings.copy().values()]:
        if training is None or training._lifecycle.is_closed:
            continue
        shared = [p for p in training.step_counter.positions if id(p) in own]
        if shared and not _is_same_run(training.saver, run):
            raise errors.LimpetError(
                f"The {type(shared[0]).__name__} in the state counts for an open Checkpointer of"
                f" {training.saver.url}: close that one, or give each run an object of its own"
            )


def _end(saver: Saver, earlier: Ending | None) -> None:
    """End an earlier training, or wait for its saves if its Checkpointer has been discarded."""
    if earlier is None or earlier._lifecycle.is_closed:
        try:
            saver.wait()
        except Exception as e:  # noqa: BLE001  (the new training may be what the user does about it)
            warn_user(f"The last save of an earlier Checkpointer failed: {e}", errors.SaveFailed)
        saver.writer_lock.release()
        return
    lifecycle, run, running = earlier._lifecycle, saver.run.url, earlier._lifecycle.running_call()
    if running is not None or lifecycle.made_by is not current_thread():
        found = "another thread, which has made it"
        if running is not None:
            found = f"a call of {running[0]}() in {running[1]} thread"
        raise errors.LimpetError(
            f"An earlier Checkpointer of this process is in use for {run}, by {found}: close that"
            " one first, or give each training its own run"
        )
    lifecycle.was_taken_over = True
    could_save = lifecycle.can_save
    error = errors.LimpetError(f"A newer Checkpointer of this process has taken {run} over")
    earlier.finish_here(error)
    step, newest_step = earlier.step_counter.progress.step, saver.newest_step
    if could_save:
        events.emit("taken_over", run=run, step=step, saved=newest_step)
    if could_save and step != saver.saved_step and earlier.expects_save:
        reason = "a newer Checkpointer of this process has taken the run over"
        if newest_step is not None:
            reason += f". Call its resume() to continue from step {newest_step}"
        message = describe_unsaved_steps(run, step, newest_step, reason)
        # Not ``warn``, which shows an equal message only once: a cell may run many times.
        warnings.warn_explicit(message, errors.UnsavedSteps, *user_line())


def _is_same_run(earlier: Saver, run: Run) -> bool:
    """Return True if a training has this run, however it is spelled."""
    first, second = earlier.run.store, run.store
    if isinstance(first, LocalStore) and isinstance(second, LocalStore):
        return os.path.realpath(first.url) == os.path.realpath(second.url)
    if isinstance(first, MemoryStore) and isinstance(second, MemoryStore):
        return first.shares_objects_with(second) and first.url == second.url
    is_in_memory = first.traits.in_memory or second.traits.in_memory
    return first is second or (first.url == second.url and not is_in_memory)
