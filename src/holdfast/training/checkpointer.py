"""``Checkpointer``: the interface of a training loop to saving and resuming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

from holdfast import events
from holdfast.deadline import Deadline
from holdfast.engine.distributed.agreement import make_agreement
from holdfast.engine.distributed.group import GroupSpec, LocalGroup, saving_group
from holdfast.engine.loading.binding import STRICT, Leniency
from holdfast.engine.loading.report import LoadReport
from holdfast.engine.snapshot.location import Url
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import HoldfastError
from holdfast.format.names import Version
from holdfast.preemption.guarded_calls import GuardedCalls
from holdfast.preemption.policy import DEFAULT, Preemption
from holdfast.preemption.response import PreemptionResponse
from holdfast.preemption.savepoints.step_savepoint import SavepointLabel
from holdfast.run.evaluations.metrics import check_metrics
from holdfast.run.evaluations.trust import NOT_DISTRUSTED, Trust
from holdfast.run.policy import AtEnd, EverySeconds, KeepPolicy, SavePolicy, StopWhen
from holdfast.run.request_watcher import RequestWatcher
from holdfast.run.run import Run
from holdfast.storage.throttle import store_statistics
from holdfast.tiers.tiers import Tier, Tiers
from holdfast.training.arguments import (
    STRUCTURE,
    acquire_lock,
    acquire_run,
    check_arguments,
    check_loadable,
    check_not_version,
    check_state,
)
from holdfast.training.cadence import Cadence
from holdfast.training.ending import Ending, make_savepoint
from holdfast.training.lifecycle import Lifecycle, exclusive, show_lines
from holdfast.training.resume import resume_run
from holdfast.training.resume_point import ResumePoint, ResumeRequest, left_state_invalid
from holdfast.training.resuming.gaps import GapCheck
from holdfast.training.resuming.receipt import Consumption, check_resume, record_next_batches
from holdfast.training.resuming.schedules import Arguments, read_arguments, warn_replaced
from holdfast.training.saves.early_stop import STOP_PROPOSAL, EarlyStop
from holdfast.training.saves.goodput import Goodput
from holdfast.training.saves.save_spec import SaveSpec
from holdfast.training.saves.saver import Saver
from holdfast.training.saves.version_checks import VersionChecks
from holdfast.training.start import check_start, start_from
from holdfast.training.step_counter import StepCounter
from holdfast.training.takeover import take_over
from holdfast.training.warn import raise_or_warn


class Checkpointer:
    """Saves a state in the background when a policy says so, and resumes training.

    ``run`` is the URL or store that receives the versions. ``state`` is a dict as for
    ``holdfast.save``. Every save reads it, and ``resume`` writes it. A ``Progress`` in the state
    counts the steps. Without one, the Checkpointer counts them. An ``ElasticSampler`` in the state
    advances with the steps.

    ``save`` says when to save (default: every ten minutes and at the end), ``keep`` which versions
    to keep (default: all), and ``stop`` when training should end (see ``should_stop``).

    With ``incremental=True``, a version refers to the chunks that an earlier version holds. Every
    ``full_every``-th version is written in full; with ``full_every=None``, none has to be.

    ``overlap=True`` copies the parameters and slots of the optimizers during the next forward and
    backward pass, which suits states on an accelerator. ``optimizer.step`` waits for the
    copy. Nothing else may change these tensors in the meantime.

    ``preemption`` says what follows a notice that the process will be stopped, such as SIGTERM. By
    default, all ranks save at one step and exit with code 75. None: nothing.

    ``tiers``: a ``MemoryTier`` also keeps the newest states in memory, and a ``LocalTier`` saves to
    a fast local disk first. ``spread=16`` spreads the shards over 16 prefixes (``Run.set_spread``).

    A save that is due waits for the one in flight (``busy="wait"``), or is skipped (``"skip"``). If
    a save fails in the background, or takes more than ``save_timeout`` seconds, the next call of
    ``step``, ``save``, ``wait``, or ``close`` raises the error. With ``on_error="warn"``, a store
    failure causes only a ``SaveFailed`` warning in ``step`` and ``close``.

    If an optimizer stepped since the previous save, but no trainable parameter in the state has
    changed, the state is probably a copy that nobody trains. A ``StateUnchanged`` warning names the
    parameters, once. With ``on_unchanged="raise"``, the save raises and commits nothing.

    On a terminal, rank 0 prints a line for each resume and failure, and at most one per minute for
    saves, unless a sink is attached. ``quiet=True`` or ``HOLDFAST_QUIET=1`` turns this off.

    Under torch.distributed, every rank creates a Checkpointer and calls the same methods.
    ``group`` is the ``ProcessGroup`` of these ranks if they are not all ranks. The metrics and the
    clock of rank 0 count. All ranks act on them at a step on which they agree, without collectives.

    If this process has an open Checkpointer of the same run, as after a notebook cell is run again,
    that one is closed as after an exception. An ``UnsavedSteps`` warning names its unsaved steps.

    Raises ``HoldfastError`` for an invalid argument, and ``PlanError`` if the state contains the
    ``state_dict()`` of an optimizer or scheduler.
    """

    def __init__(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        run: Url,
        state: dict[str, Any],
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        stop: StopWhen | None = None,
        incremental: bool = False,
        full_every: int | None = 20,
        overlap: bool = False,
        spread: int | None = None,
        tiers: Sequence[Tier] = (),
        preemption: Preemption | None = DEFAULT,
        busy: Literal["wait", "skip"] = "wait",
        save_timeout: float | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        on_unchanged: Literal["raise", "warn"] = "warn",
        quiet: bool = False,
        group: GroupSpec = None,
    ) -> None:
        save = EverySeconds(600) | AtEnd() if save is None else save
        keep = KeepPolicy() if keep is None else keep
        check_state(state)
        self._arguments = check_arguments(
            save=save,
            keep=keep,
            stop=stop,
            busy=busy,
            save_timeout=save_timeout,
            on_error=on_error,
            on_unchanged=on_unchanged,
            full_every=full_every,
            incremental=incremental,
            overlap=overlap,
            spread=spread,
            tiers=tiers,
            preemption=preemption,
            quiet=quiet,
        )
        self.run, self.state = Run(run), state
        self._group = saving_group(group)
        self._early_stop = EarlyStop(stop, self.run, self._group)
        self._step_counter = StepCounter(state)
        self._step_counter.check_can_fire(save)
        check_not_version(self.run)
        self._goodput, self._lifecycle, self._branch = Goodput(), Lifecycle(), 0
        checks = VersionChecks(self.run, keep, self._early_stop, on_unchanged)
        self._tiers = Tiers(tiers, self._group)
        options = full_every if incremental else 1, overlap, save_timeout
        self._saver = Saver(self.run, self._tiers, keep, self._goodput, checks, *options)
        self._raise_or_warn = partial(raise_or_warn, on_error=on_error, saver=self._saver)
        self._acquire_lock = partial(acquire_lock, self.run, self._saver.writer_lock, spread)
        self._cadence = Cadence(save, busy, self._group, self._step_counter)
        self._agreement = make_agreement(LocalGroup(), "training")
        self._note: Mapping[str, Any] = {}
        self.start_report: LoadReport | None = None  # of the last resume(), if it used start=
        self._metrics: Mapping[str, Any] = {}
        self._watcher = RequestWatcher(self.run.store, read_more=self._early_stop.poll)
        self._make_ending(save, on_error, preemption)
        self._calls = GuardedCalls(self._preemption, self._goodput)
        self._consumption = Consumption(self.run)
        self._gaps = GapCheck(self.run.url, state, save, self._group.rank, self._step_counter)
        self._end_lines = show_lines(self, self.run.url, quiet)
        take_over(self)

    def _make_ending(
        self, save: SavePolicy, on_error: Literal["raise", "warn"], preemption: Preemption | None
    ) -> None:
        self._savepoint = make_savepoint(self.state, save, preemption, self._goodput)
        common = self._saver, self._cadence, self._lifecycle, self._step_counter
        self._ending = Ending(save, on_error, *common, self._start_save, self._savepoint)
        observed = self._step_counter, self._goodput, self._saver, self._ending, self._savepoint
        self._preemption = PreemptionResponse(preemption, self._group, observed)

    def __repr__(self) -> str:
        return f"<Checkpointer {self.run.url} at step {self.current_step}>"

    @property
    def current_step(self) -> int:
        """The number of steps completed, including those before the resume."""
        self._gaps.note_read()
        return self._step_counter.step

    @property
    def should_stop(self) -> bool:
        """True once the ``stop`` policy says that training should end, also in an earlier process,
        after ``Preemption.exit_fn`` has returned, or if a ``watch_scope`` must end."""
        self._gaps.note_read()
        return self._early_stop.stopped or self._calls.is_leaving

    # -- resuming ------------------------------------------------------------------------------

    @exclusive
    def resume(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        at: int | None = None,
        *,
        branch: int | None = None,
        trust: Trust = NOT_DISTRUSTED,
        start: Url | None = None,
        keys: str | Sequence[str] | None = None,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        rename: Mapping[str, str] | None = None,
        mismatched: Literal["error", "keep"] = "error",
        cast: bool = False,
        check: bool = True,
    ) -> Snapshot | None:
        """Load the newest intact version into the state and return it, or None if the run is empty.

        Versions with a negative verdict (``Run.attest``) are skipped; with ``trust="attested"``,
        also those without a positive one. ``at`` selects the version of that step instead, and
        ``branch`` the lineage of that branch. If training does not continue from the newest
        version, a branch is durably started first. ``SkippedVersion`` warnings name the others.

        ``start`` is the snapshot from which an empty run begins: ``"runs/a@120"``,
        ``"runs/a@best"``, a URL, or a ``Store`` with the snapshot at its root. ``keys``,
        ``missing``, ``unexpected``, ``rename``, ``mismatched``, and ``cast`` (as for
        ``holdfast.load``) determine how much of it is loaded; ``start_report`` then says what was.
        A run that has versions ignores these arguments and loads its own completely.

        ``missing="keep"`` without ``start`` keeps the live values that the version of the run
        lacks. A ``KeptValues`` warning names each key, and later versions record them.

        Unless ``check=False``, the live state is then compared with the digests of the version, and
        the next batch of an ``ElasticSampler`` with the recorded one, and an event reports that.

        Raises ``NoSnapshot`` if there are versions but none of them is usable, ``PlanError`` with
        all differences if the version does not match the state, and ``HoldfastError`` for invalid
        arguments. Restarts under ``holdfast run`` without progress end with ``NoProgress``.
        """
        self._lifecycle.check_open()
        self._preemption.watch()
        self._saver.wait_on_all_ranks()
        leniency = Leniency(missing, unexpected, cast, rename or {}, mismatched)
        check_start(start, keys, leniency, goes_back=(at, branch) != (None, None))
        self._savepoint.discard()
        own, request = leniency if start is None else STRICT, ResumeRequest(at, branch, trust)
        schedules = read_arguments(self.state)
        try:
            parts = self._acquire_lock, self._tiers, self._ending.ladder
            point = resume_run(self.run, self.state, self._group, request, *parts, own)
            if point is None and start is not None:
                point = start_from(start, self.state, self._group, keys, leniency)
        except BaseException as e:
            self._lifecycle.is_state_valid &= not left_state_invalid(e)
            raise
        finally:  # the load may have changed the step of the state
            self._step_counter.resume_at(self.current_step, from_own_run=False)
        self._lifecycle.is_resumed = self._lifecycle.is_state_valid = True
        if self._lifecycle.is_started:
            self._saver.start_tiers(self.state)
        if point is None:
            events.emit("began", run=self.run.url)
            return None
        self._continue_from(point, schedules)
        if check and (point.from_own_run or (keys is None and point.is_exact_start)):
            check_resume(self.run.url, point.snapshot, self.state, self._group)
        return point.snapshot

    def _continue_from(self, point: ResumePoint, schedules: Arguments) -> None:
        self._metrics, self._branch, self._note = {}, point.branch, point.note
        self.start_report = point.start_report
        self._step_counter.resume_at(point.step, point.from_own_run)
        self._gaps.restart(point.step if point.from_own_run else 0)
        if self._group.rank == 0:
            warn_replaced(schedules, self.state, point.snapshot.url)
        self._consumption.restart(point.snapshot, point.step)
        if point.from_own_run:
            self._saver.resume_from(point.durable, point.sessions)
        self._goodput.resume_from(point.training_metadata)
        self._cadence.restart(is_saving=self._saver.saved_step == self.current_step)
        self._tiers.memory.restart(self.current_step, self._step_counter.epochs)
        self._early_stop.resume_from(point.training_metadata, point.step)
        events.emit(
            "resumed",
            run=self.run.url,
            url=point.snapshot.url,
            step=self.current_step,
            branch=self._branch,
        )

    # -- training ------------------------------------------------------------------------------

    @exclusive
    def step(
        self,
        metrics: Mapping[str, Any] | None = None,
        *,
        steps: int = 1,
        batches: int | None = None,
    ) -> None:
        """Count one step, and save if a save is due. Call it after every optimizer step.

        ``metrics`` maps names to numbers. If this step is saved, its version stores them.
        ``steps`` is the number of optimizer steps, if a function makes several at once.
        ``batches`` is the number of their batches (default: ``steps``), for accumulated gradients.

        When this method returns, the state may change again. The error of an earlier save is raised
        here; several ranks raise it when the next save is due. The step is counted even then. After
        a notice that the process will be stopped, it saves, and raises ``Preempted`` (an exit).
        """
        self._lifecycle.check_open()
        with self._goodput.paused():
            self._metrics = {}
            try:
                self._metrics = check_metrics(metrics)
            finally:  # count the step even if the metrics are invalid: the optimizer has stepped
                self._step_counter.add_steps(steps, steps if batches is None else batches)
                self._calls.steps += 1
                agreed = self._agree()
            self._act(agreed)

    @exclusive
    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Increment ``progress.epoch``, and save if a save is due. Call it after each pass over the
        data, on all ranks. ``EveryEpoch`` then works with any loader.

        ``metrics`` are added to those of the step. If it is already saved, with the old epoch, they
        are added to its version as by ``Run.add_metrics``, and nothing is saved: a resume from
        there begins with the (empty) rest of the epoch, and ``end_epoch`` follows.

        Raises what ``step`` raises, and ``HoldfastError`` if the state has no ``Progress``, or if
        other code has changed ``progress.epoch`` since the last call.
        """
        self._lifecycle.check_open()
        added_metrics = check_metrics(metrics)
        with self._goodput.paused():
            self._ensure_started()
            self._step_counter.end_epoch()
            self._metrics = {**self._metrics, **added_metrics}
            self._raise_or_warn(lambda: self._add_if_saved(added_metrics))
            self._act(self._agree())

    def _add_if_saved(self, metrics: Mapping[str, Any]) -> None:
        if metrics and self._cadence.has_begun:
            newest = self._saver.wait_on_all_ranks()
            if newest is not None and self._saver.saved_step == self.current_step:
                self._saver.add_metrics(newest, metrics, "evaluation")

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
        self._gaps.check()
        if self._calls.is_running:  # its end does the rest, so that versions hold complete calls
            return
        self._calls.respond(agreed)
        if self._group.size == 1:  # several ranks raise together, when the next save is due
            self._raise_or_warn(self._saver.in_flight.raise_failure)
        self._saver.checks.warn()  # of earlier saves: the one that starts now may end any time
        self._preemption.leave_on_failure(lambda: self._save_if_due(agreed))

    def _agree(self) -> frozenset[str]:
        """Return what the ranks have agreed on for the state after the last step."""
        agreed, step = self._calls.agree(self._agreement), self.current_step
        self._early_stop.observe(self._metrics, step, self._agreement, STOP_PROPOSAL in agreed)
        self._ending.ladder.observe(step, self._metrics)
        self._savepoint.mark(self._make_label, self._preemption.is_pending, self._calls.is_running)
        return agreed

    def _make_label(self) -> SavepointLabel:
        version, stop = Version(self.current_step, self._branch), self._early_stop.to_metadata()
        return SavepointLabel(version, self._note, self._metrics, stop)

    def _save_if_due(self, agreed: frozenset[str]) -> None:
        requested, busy = self._watcher.pending_request is not None, self._saver.must_wait
        reason = self._cadence.save_reason(requested, agreed, self._agreement, busy)
        if reason is None:
            self._saver.reservation.start()
        elif not self._cadence.skip_if_busy(lambda: busy, self.run.url, self._goodput):
            self._raise_or_warn(lambda: self._saver.wait_before_save(self.current_step))
            self._raise_or_warn(lambda: self._start_save(reason))
        if self._tiers.memory.is_due(self.current_step, self._step_counter.epochs):
            spec = self._make_spec("capture")
            capture = self.state, spec.version, self._saver.make_metadata(spec)
            self._raise_or_warn(lambda: self._tiers.memory.capture(*capture))

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

    @exclusive
    def save(self, metrics: Mapping[str, Any] | None = None) -> Snapshot:
        """Save now, and return the snapshot when it is committed.

        If this step is already saved on this branch, return its snapshot. ``metrics`` are added to
        the metrics of the step. If the step is already saved, they are added as by
        ``Run.add_metrics``. Call this method after ``step``, not between the batches of a step,
        where the state belongs to no step. Raises any failure, regardless of ``on_error``.
        """
        self._lifecycle.check_open()
        added_metrics = check_metrics(metrics)
        with self._goodput.paused():
            self._ensure_started()
            newest = self._saver.wait_on_all_ranks()
            self._early_stop.observe(added_metrics, self.current_step, self._agreement, False)
            if newest is None or self._saver.saved_step != self.current_step:
                self._start_save("request", {**self._metrics, **added_metrics})
                newest = self._saver.wait_on_all_ranks()
            else:
                self._saver.add_metrics(newest, added_metrics, "evaluation")
        if newest is None:
            raise HoldfastError("The save ended without a snapshot")
        return newest

    @exclusive
    def wait(self) -> Snapshot | None:
        """Wait for the save in flight, and raise its error if it failed. Return the newest version
        that this Checkpointer saved or resumed from, or None."""
        self._lifecycle.check_not_forked()
        with self._goodput.paused():
            is_closed = self._lifecycle.is_closed
            return self._saver.wait() if is_closed else self._saver.wait_on_all_ranks()

    def statistics(self) -> dict[str, float]:
        """Return statistics since this Checkpointer was created, by name.

        - ``saves``, ``failures``, ``skipped``: saves that were committed, failed, were skipped.
        - ``bytes``, ``referred_bytes``: bytes that saves wrote, and referred to.
        - ``blocked_seconds``, ``last_blocked_seconds``, ``waited_seconds``: for how long training
          was blocked, also by the last save, and saves waited for the save before.
        - ``background_seconds``: the time that saves took in the background.
        - ``goodput``: the share of wall time since the run first began that was spent on steps
          that a committed version holds.
        - ``step_slowdown``: how many times as long your own steps take while a save is in flight.
          It is the ratio of two medians, of the last 100 steps that began during a save and of the
          last 100 others, without the time in this object. Absent with fewer than 5 of a kind.
        - ``store_requests`` and others: see ``holdfast.storage.throttle.Statistics``.
        """
        return {**self._goodput.statistics(), **store_statistics(self.run.store)}

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save in flight, save the last step if ``AtEnd`` is in the policy, and
        release memory. Raises the error of a failed save.

        Nothing is saved while an exception is handled, as in a ``finally`` block: the state may
        belong to no step. A warning names the unsaved steps. A second call does nothing.
        """
        self._preemption.end(self._lifecycle.interruption(), self._close)

    @exclusive
    def _close(self, error: BaseException | None) -> None:
        try:
            if error is None and self._group.rank == 0 and not self.should_stop:
                self._consumption.check(self.current_step)
            unsaved = self._ending.finish(error, self._calls.is_leaving)
        finally:
            self._release()
        if unsaved:
            self._ending.warn_unsaved(error)
        if not self._lifecycle.is_forked:
            if self._group.rank == 0 and self._goodput.counts["saves"]:
                self._saver.checks.metric.make(at_end=True)
            self._saver.checks.warn()

    def _release(self) -> None:
        self._lifecycle.is_closed, saver = True, self._saver
        if not self._lifecycle.is_forked:
            try:
                for part in (self._agreement, self._preemption, self._ending, saver, self._watcher):
                    part.close()
                saver.writer_lock.release(self._preemption.cleanup_seconds)
                self._tiers.close(saver.saved_step == self.current_step and not saver.busy)
            finally:
                self._end_lines()
                self._preemption.finish(self._lifecycle.interruption())

    def __enter__(self) -> Self:
        self._ending.enter()
        self._preemption.watch()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._preemption.end(None, self._close)
        else:
            left, parts = self._preemption.leave_after(error), (self._agreement, self._release)
            self._preemption.end(left or error, lambda e: self._ending.finish_after(e, *parts))
            if left is not None:
                raise left from error

    def _ensure_started(self) -> None:
        """Check the run and acquire the writer lock, at the first step or save: a run with other
        versions, or one that is not writable, must raise now."""
        self._lifecycle.check_state_valid()
        if self._lifecycle.is_started:
            return
        self._ending.check_entered()
        is_resumed, parts = self._lifecycle.is_resumed, (self._acquire_lock, self._rank_arguments)
        is_uniform = acquire_run(self.run, self._group, *parts, is_resumed=is_resumed)
        self._tiers.open(self.run.store, self.state, is_resumed=is_resumed)
        self._saver.start_tiers(self.state)
        self._agreement = make_agreement(self._group, "training", self._preemption)
        self._preemption.agree_through(self._agreement, is_uniform)
        if self._group.rank == 0:
            self._watcher.start()
        self._lifecycle.is_started = True
        self._ending.warn_if_collected(self)

    def _rank_arguments(self) -> dict[str, str]:
        check_loadable(self.state, self._group.rank)
        structure = self._saver.reservation.measure(self.state, self._group)
        return {**self._arguments, "current_step": str(self.current_step), STRUCTURE: structure}
