"""The parts of a ``Checkpointer``, and what they do together at each step and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from limpet import events
from limpet.deadline import Deadline
from limpet.format.names import Version
from limpet.loading.differences import LoadReport
from limpet.ranks.agreement import make_agreement
from limpet.ranks.group import GroupSpec, LocalGroup, saving_group
from limpet.run.catalog import read_training_metadata
from limpet.run.metrics import ADDED_METRICS
from limpet.run.policy import Never
from limpet.run.run import Run
from limpet.run.save_request import RequestWatcher
from limpet.snapshot.location import Url
from limpet.tiers.tiers import Tiers
from limpet.training.arguments import (
    Options,
    acquire_run,
    check_arguments,
    check_loadable,
    check_not_version,
)
from limpet.training.cadence import Cadence
from limpet.training.ending import Ending, make_savepoint
from limpet.training.guarded_calls import GuardedCalls
from limpet.training.lifecycle import Lifecycle, exclusive, show_lines
from limpet.training.response import PreemptionResponse
from limpet.training.resume_check import compare_next_batches, record_next_batches
from limpet.training.resume_point import ResumePoint
from limpet.training.saves.early_stop import STOP_PROPOSAL, EarlyStop
from limpet.training.saves.goodput import Goodput
from limpet.training.saves.save_spec import SaveSpec
from limpet.training.saves.saver import Saver
from limpet.training.saves.version_checks import VersionChecks
from limpet.training.script_options import OPTIONS, describe_changes, read_options
from limpet.training.state_check import StateCheck
from limpet.training.step_counter import StepCounter
from limpet.training.step_savepoint import SavepointLabel, StepSavepoint
from limpet.training.takeover import take_over
from limpet.training.warn import raise_or_warn


class CheckpointerBase:
    """What a ``Checkpointer`` consists of. ``Checkpointer`` adds the public methods."""

    def __init__(self, run: Url, state: dict[str, Any], options: Options, group: GroupSpec) -> None:
        self._arguments = check_arguments(options)
        self.run, self.state = Run(run), state
        self._group = saving_group(group)
        self._early_stop = EarlyStop(options.stop, self.run, self._group)
        self._step_counter = StepCounter(state)
        check_not_version(self.run)
        self._goodput, self._lifecycle, self._branch = Goodput(), Lifecycle(), 0
        self._tiers = Tiers(options.tiers, self._group)
        self._saver = self._make_saver(options)
        self._raise_or_warn = partial(raise_or_warn, on_error=options.on_error, saver=self._saver)
        self._acquire_lock = self._saver.writer_lock.acquire
        self._cadence = Cadence(options.save, options.busy, self._group, self._step_counter)
        self._agreement = make_agreement(LocalGroup(), "training")
        self._note: Mapping[str, Any] = {}
        self._metrics: Mapping[str, Any] = {}
        self.start_report: LoadReport | None = None  # of the last resume(), if it used start=
        self._watcher = RequestWatcher(self.run.store, read_more=self._early_stop.poll)
        self._savepoint, self._ending = self._make_ending(options)
        self._preemption = PreemptionResponse(
            options.preemption,
            self._group,
            step_counter=self._step_counter,
            goodput=self._goodput,
            saver=self._saver,
            ending=self._ending,
            savepoint=self._savepoint,
        )
        self._calls = GuardedCalls(self._preemption, self._goodput)
        is_checked = self._group.rank == 0 and not isinstance(options.save, Never)
        self._state_check = StateCheck(self.run.url, state, is_checked)
        self._script_options = read_options(state)
        self._end_lines = show_lines(self, self.run.url, options.quiet)
        take_over(self)

    def _make_saver(self, options: Options) -> Saver:
        checks = VersionChecks(self.run, options.keep, self._early_stop)
        parts = self.run, self._tiers, options.keep, self._goodput, checks
        return Saver(*parts, options.incremental, options.overlap, options.save_timeout)

    def _make_ending(self, options: Options) -> tuple[StepSavepoint, Ending]:
        savepoint = make_savepoint(self.state, options.save, options.preemption, self._goodput)
        parts = self._saver, self._cadence, self._lifecycle, self._step_counter
        return savepoint, Ending(
            options.save, options.on_error, *parts, self._start_save, savepoint
        )

    def _continue_from(self, point: ResumePoint) -> None:
        self._metrics, self._branch, self._note = {}, point.branch, point.note
        self.start_report = point.start_report
        self._step_counter.resume_at(point.step, point.from_own_run, point.training_metadata)
        if point.from_own_run:
            self._saver.resume_from(point.durable, point.sessions)
        self._goodput.resume_from(point.training_metadata)
        self._cadence.restart(is_saving=self._saver.saved_step == self._step_counter.step)
        self._tiers.memory.restart(self._step_counter.step, self._step_counter.epoch)
        self._early_stop.resume_from(point.training_metadata, point.step)
        self._report_resume(point)

    def _report_resume(self, point: ResumePoint) -> None:
        """Say where training continues, and, on rank 0, whether with the recorded next batch, and
        which options of the script the version has replaced."""
        run, url, is_first = self.run.url, point.snapshot.url, self._group.rank == 0
        is_compared = is_first and point.is_exact
        batches = compare_next_batches(point.snapshot, self.state) if is_compared else {}
        events.emit(
            "resumed",
            run=run,
            url=url,
            step=self._step_counter.step,
            branch=self._branch,
            next_batch_equal=all(batches.values()) if batches else None,
        )
        if differing := [f"the next batch of {path}" for path in batches if not batches[path]]:
            events.emit("resume_differs", run=run, url=url, differing=differing)
        earlier = read_training_metadata(point.snapshot).get(OPTIONS)
        changes = describe_changes(self._script_options, earlier, read_options(self.state))
        if is_first and changes:
            events.emit("options_replaced", run=run, url=url, options=changes)

    @property
    def _is_stopping(self) -> bool:
        return self._early_stop.stopped or self._calls.is_leaving

    # -- steps -----------------------------------------------------------------------------------

    @exclusive
    def _begin_call(self) -> None:
        """Start the training: ``PreemptionGuard.run`` raises an error of this call on all ranks."""
        self._lifecycle.check_open()
        self._ensure_started()

    @exclusive
    def _end_call(self) -> None:
        """Do what ``step`` does, without a step, after a call that has made its own steps."""
        self._lifecycle.check_open()
        with self._goodput.paused():
            self._act(self._agree())

    def _act(self, agreed: frozenset[str]) -> None:
        """Leave if the ranks have agreed on that, and save if a save is due."""
        self._ensure_started()
        if self._calls.is_running:  # its end does the rest, so that versions hold complete calls
            return
        self._calls.respond(agreed)
        if self._group.size == 1:  # several ranks raise together, when the next save is due
            self._raise_or_warn(self._saver.in_flight.raise_failure)
        self._preemption.leave_on_failure(lambda: self._save_if_due(agreed))

    def _agree(self) -> frozenset[str]:
        """Return what the ranks have agreed on for the state after the last step."""
        agreed, step = self._calls.agree(self._agreement), self._step_counter.step
        self._early_stop.observe(self._metrics, step, self._agreement, STOP_PROPOSAL in agreed)
        self._ending.ladder.observe(step, self._metrics)
        if not self._step_counter.is_within_step:  # an epoch may end between batches of a step
            is_pending = self._preemption.is_pending
            self._savepoint.mark(self._make_label, is_pending, self._calls.is_running)
        return agreed

    def _make_label(self) -> SavepointLabel:
        version = Version(self._step_counter.step, self._branch)
        training = {**self._early_stop.to_metadata(), **self._step_counter.to_metadata()}
        training[OPTIONS] = self._script_options
        return SavepointLabel(version, self._note, self._metrics, training)

    def _save_if_due(self, agreed: frozenset[str]) -> None:
        requested, busy = self._watcher.pending_request is not None, self._saver.must_wait
        reason = self._cadence.save_reason(requested, agreed, self._agreement, busy)
        if reason is None:
            self._saver.reservation.start()
        elif not self._cadence.skip_if_busy(lambda: busy, self.run.url, self._goodput):
            self._raise_or_warn(lambda: self._saver.wait_before_save(self._step_counter.step))
            self._raise_or_warn(lambda: self._start_save(reason))
        if self._tiers.memory.is_due(self._step_counter.step, self._step_counter.epoch):
            spec = self._make_spec("memory")
            snapshot = self.state, spec.version, self._saver.make_metadata(spec)
            self._raise_or_warn(lambda: self._tiers.memory.save(*snapshot))

    def _make_spec(self, reason: str, metrics: Mapping[str, Any] | None = None) -> SaveSpec:
        version, note, last_metrics, stop = self._make_label()
        metrics, training = last_metrics if metrics is None else metrics, dict(stop)
        return SaveSpec(version, reason, metrics, note, training | record_next_batches(self.state))

    def _start_save(
        self, reason: str, metrics: Mapping[str, Any] | None = None, limit: Deadline | None = None
    ) -> None:
        self._cadence.restart()  # if the save fails at once, do not try again at every step
        reason = reason if self._watcher.pending_request is None else "request"
        done = self._watcher.accept_with_callback()
        spec = replace(self._make_spec(reason, metrics), on_finished=done, deadline=limit)
        self._saver.start(self.state, spec)

    def _add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add to the metrics of the last step, and to its version if it is saved."""
        self._metrics = {**self._metrics, **metrics}
        self._raise_or_warn(lambda: self._add_if_saved(metrics))

    def _add_if_saved(self, metrics: Mapping[str, Any]) -> None:
        if metrics and self._cadence.has_begun:
            newest = self._saver.wait_on_all_ranks()
            if newest is not None and self._saver.saved_step == self._step_counter.step:
                self._saver.add_metrics(newest, metrics, ADDED_METRICS)

    def _ensure_started(self) -> None:
        """Check the run and acquire the writer lock, at the first step or save: a run with other
        versions, or one that is not writable, must raise now."""
        self._lifecycle.check_state_valid()
        if self._lifecycle.is_started:
            return
        self._ending.check_entered()
        is_resumed, parts = self._lifecycle.is_resumed, (self._acquire_lock, self._rank_arguments)
        acquire_run(self.run, self._group, *parts, is_resumed=is_resumed)
        self._tiers.open(self.run.store, self.state, is_resumed=is_resumed)
        self._saver.start_tiers(self.state)
        self._agreement = make_agreement(self._group, "training", self._preemption)
        self._preemption.agree_through(self._agreement)
        if self._group.rank == 0:
            self._watcher.start()
        self._lifecycle.is_started = True
        self._ending.warn_if_collected(self)

    def _rank_arguments(self) -> dict[str, str]:
        check_loadable(self.state)
        self._saver.reservation.measure(self.state, self._group)
        return {**self._arguments, "current_step": str(self._step_counter.step)}

    def _release(self) -> None:
        self._lifecycle.is_closed, saver = True, self._saver
        self._step_counter.release()
        if not self._lifecycle.is_forked:
            try:
                for part in (self._agreement, self._preemption, self._ending, saver, self._watcher):
                    part.close()
                saver.writer_lock.release(self._preemption.cleanup_seconds)
                self._tiers.close(saver.saved_step == self._step_counter.step and not saver.busy)
            finally:
                self._end_lines()
                self._preemption.finish(self._lifecycle.interruption())
