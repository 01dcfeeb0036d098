"""``Checkpointer``: the interface of a training loop to saving and resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self
from weakref import finalize

from limpet import events
from limpet.arguments import check_count
from limpet.deadline import Deadline
from limpet.errors import LimpetError, RankFailed
from limpet.format.config import compare_configs, describe_change, encode_config
from limpet.format.names import Version
from limpet.loading.differences import Leniency, LoadReport
from limpet.loading.snapshot import Snapshot, snapshot_of
from limpet.ranks.agreement import make_agreement
from limpet.ranks.group import Group, GroupSpec, all_reduce, saving_group
from limpet.run.catalog import read_training_metadata
from limpet.run.metrics import ADDED_METRICS, check_metrics
from limpet.run.policy import EverySeconds, KeepPolicy, Never, SavePolicy, StopWhen
from limpet.run.run import Run
from limpet.run.save_request import RequestWatcher
from limpet.sinks.terminal import default_terminal
from limpet.snapshot.location import Url
from limpet.state.flatten import flatten
from limpet.state.streamed import Streamed
from limpet.storage.throttle import store_statistics
from limpet.threads import no_op
from limpet.tiers.tiers import Tier
from limpet.tracebacks import short_tracebacks
from limpet.training import state_check
from limpet.training.cadence import Cadence
from limpet.training.early_stop import STOP_PROPOSAL
from limpet.training.ending import Ending, check_position, read_end, record_end, take_over
from limpet.training.lifecycle import Lifecycle, exclusive
from limpet.training.member import call_to_resume, check_members
from limpet.training.options import (
    Options,
    check_arguments,
    check_not_version,
    check_ranks_agree,
    check_run_empty,
    check_state,
    check_streamed,
    check_writable,
)
from limpet.training.preemption_plan import DEFAULT, Preemption
from limpet.training.response import PreemptionResponse
from limpet.training.resume import Resume, ResumeOptions, ResumePoint, left_state_invalid, parse_at
from limpet.training.resume_check import check_whole_state
from limpet.training.saver import Saver, SaveSpec
from limpet.training.step_counter import StepCounter
from limpet.training.step_savepoint import StepSavepoint

_RANKS = "ranks"
"""The field of the training metadata that has the number of ranks."""


class Checkpointer:
    """Saves a state in the background when a policy says so, and resumes training.

    ``run`` is the URL or store that receives the versions. ``state`` is a dict as for
    ``limpet.save``. Every save reads it, and ``resume`` writes it. A ``Progress`` in the state
    counts the steps and epochs. Without one, the Checkpointer counts them. A
    ``limpet.DataLoader`` in the state advances with the steps, and seeds their random numbers. A
    function that returns such a dict is called once, by ``resume`` or else by the first step or
    save. Until then, ``Checkpointer.state`` is empty.

    ``save`` says when to save (default: every ten minutes), ``keep`` which versions to keep
    (default: all), and ``stop`` when training should end (see ``should_stop``). The last step of a
    training that ends normally is saved, too, unless ``at_end=False``.

    ``on_best(snapshot)`` is called on rank 0 for each version that has become the best by the one
    metric of ``keep`` (or ``stop``, if all are kept), on a thread of its own. It is looked for
    after each save (with n versions, after each n // 50-th) and at a normal end, which waits for
    the call. Metrics that are added later count from then on. Of several new best versions, only
    the newest is passed. If the function raises, that counts as an error of a save (at the end, on
    rank 0 only), and it is called again after the next save; so is one that an end of the process
    interrupts, or prevents, after the next start.

    With ``incremental=20``, a version refers to the chunks that an earlier version holds, and the
    first of every 20 versions is written in full. True means 20.

    ``overlap=True`` copies the parameters and slots of the optimizers during the next forward and
    backward pass, which suits states on an accelerator. ``optimizer.step`` waits for the
    copy. Nothing else may change these tensors in the meantime.

    ``preemption`` says what follows a notice that the process will be stopped, such as SIGTERM. By
    default, all ranks save at one step and exit with code 75. None: nothing.

    ``tiers``: a ``MemoryTier`` also keeps the newest states in memory, and a ``LocalTier`` saves to
    a fast local disk first.

    A save that is due waits for the one in flight. If a save fails in the background, or takes more
    than ``save_timeout`` seconds, the next call of ``step`` (with several ranks: the next one whose
    save is due), ``save``, ``wait``, or ``close`` raises the error. With ``on_error="warn"``, a
    store failure causes only a ``SaveFailed`` warning in ``step`` and ``close``.

    ``config`` is a dict of plain values, such as ``vars(args)``, which is copied now. Each version
    stores that of rank 0, as plain text, in ``Snapshot.metadata["config"]``. A resume with another
    one says what differs.

    With ``metrics_log=True``, the run keeps the metrics of every step, too: rank 0 adds a small
    file with each save, every 60 s, and at the end. ``limpet metrics RUN`` shows them. A crash
    loses those since the last file.

    Rank 0 prints a line for each resume and for the end, and on a terminal for each failure, and at
    most one per minute for saves, unless a sink is attached. ``quiet=True`` or ``LIMPET_QUIET=1``
    turns this off. (After 10 s, a wait for other ranks is shown even with ``quiet=True``.)

    Under torch.distributed, every rank creates a Checkpointer and calls the same methods.
    ``group`` is the ``ProcessGroup`` or ``limpet.Group`` of these ranks if they are not all ranks.
    If the group has members, versions also hold the states of these (see ``Member``).
    The metrics and the clock of rank 0 count. All ranks act on them at a step on which they agree,
    without collectives.

    If this process has an open Checkpointer of the same run, as after a notebook cell is run again,
    that one is closed as after an exception. An ``UnsavedSteps`` warning names its unsaved steps.

    Raises ``LimpetError`` for an invalid argument, and ``PlanError`` if the state contains the
    ``state_dict()`` of an optimizer or scheduler.
    """

    def __init__(  # noqa: PLR0913  (public interface: the user decides each of them)
        self,
        run: Url,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        stop: StopWhen | None = None,
        on_best: Callable[[Snapshot], object] | None = None,
        at_end: bool = True,
        incremental: bool | int = False,
        overlap: bool = False,
        tiers: Sequence[Tier] = (),
        preemption: Preemption | None = DEFAULT,
        save_timeout: float | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        config: dict[str, Any] | None = None,
        metrics_log: bool = False,
        quiet: bool = False,
        group: GroupSpec = None,
    ) -> None:
        # a module can be called, but is no function that returns a state
        is_function = callable(state) and not isinstance(state, Mapping)
        is_function = is_function and not hasattr(state, "state_dict")
        self.state = check_state({} if is_function else state)
        self._state_function: Any = state if is_function else None
        options = Options(
            save=EverySeconds(600) if save is None else save,
            keep=KeepPolicy() if keep is None else keep,
            stop=stop,
            on_best=on_best,
            at_end=at_end,
            incremental=incremental,
            overlap=overlap,
            tiers=tiers,
            preemption=preemption,
            save_timeout=save_timeout,
            on_error=on_error,
            config=encode_config(config),
            metrics_log=metrics_log,
            quiet=quiet,
        )
        self._arguments = check_arguments(options)
        self.run = Run(run)
        check_not_version(self.run)
        check_position(self.run, self.state)
        self._all_ranks = saving_group(group)
        self._group = self._all_ranks.training or self._all_ranks
        if self._all_ranks.members:
            check_members(self._all_ranks, options)
        self._make_parts(options)
        self._join_members()
        take_over(self._ending)

    def _make_parts(self, options: Options) -> None:
        self._step_counter = StepCounter(self.state)
        self._lifecycle, self._branch = Lifecycle(), 0
        self._saver = saver = Saver(self.run, options, self._group, self._all_ranks)
        self._tiers, self._goodput, self._early_stop = saver.tiers, saver.goodput, saver.early_stop
        self._cadence = Cadence(options.save, self._group, self._step_counter, saver)
        self._agreement = make_agreement(Group(), "training")
        self._note: Mapping[str, Any] = {}
        self._metrics: Mapping[str, Any] = {}
        self.start_report: LoadReport | None = None  # of the last resume(), if it used start=
        self._watcher = RequestWatcher(self.run.store, read_more=saver.poll)
        preemption, is_never = options.preemption, isinstance(options.save, Never)
        saves_alone = not (is_never or self._all_ranks.members)  # without the parts of the members
        saves_alone = saves_alone and not check_streamed(self.state, options)
        self._savepoint = StepSavepoint(
            self.state,
            is_required=options.save.on_exception,
            is_useful=preemption is not None and preemption.save_fn is None and saves_alone,
            step_durations=self._goodput.step_durations,
        )
        self._ending = Ending(
            saver=saver,
            lifecycle=self._lifecycle,
            step_counter=self._step_counter,
            savepoint=self._savepoint,
            start_save=self._start_save,
            release=self._release,
        )
        self._preemption = PreemptionResponse(self._ending)
        self._is_never = is_never
        self._looks = 0 if is_never or self._group.rank else 2  # at what the state lacks
        self._script_options = state_check.read_options(self.state)
        self._end_lines: Callable[[], object] = no_op
        if not options.quiet:
            self._end_lines = finalize(self, default_terminal.open(self.run.url))

    def _join_members(self) -> None:
        """Save and resume with the processes that have parts of a member of the state."""
        for key, member in self.state.items():
            group = member.join(key, self.run) if isinstance(member, Streamed) else None
            if group is not None:
                if self._group.size > 1 or self._all_ranks.address not in ("", group.address):
                    raise LimpetError(f"{key!r} in the state needs a training of one process")
                self._all_ranks = self._saver.writer.group = group

    def __repr__(self) -> str:
        return f"<Checkpointer {self.run.url} at step {self._step_counter.progress.step}>"

    @property
    def current_step(self) -> int:
        """The number of steps completed, including those before the resume."""
        return self._step_counter.progress.step

    @property
    def should_stop(self) -> bool:
        """True once the ``stop`` policy says that training should end, also in an earlier process,
        after ``Preemption.exit_fn`` has returned, or if a ``watch_scope`` must end."""
        return self._early_stop.stopped or self._preemption.is_leaving

    # -- resuming ------------------------------------------------------------------------------

    @exclusive
    def resume(
        self,
        at: int | str | None = None,
        *,
        start: Url | Snapshot | None = None,
        keys: str | Sequence[str] | None = None,
        missing: Literal["error", "keep"] | list[str] = "error",
        unexpected: Literal["error", "ignore"] | list[str] = "error",
        rename: Mapping[str, str] | None = None,
        mismatched: Literal["error", "keep", "cast"] | list[str] = "error",
        check: bool = False,
    ) -> Snapshot | None:
        """Load the newest intact version into the state and return it, or None if the run is empty.

        ``at`` selects the version of that step instead, or one by its name, such as ``"91.1"`` for
        step 91 of branch 1, or ``"91"`` for step 91 of the first branch. If training does not
        continue from the newest version, a branch is durably started first.
        ``SkippedVersion`` warnings name the damaged versions that were skipped.

        ``start`` is the snapshot from which an empty run begins: ``"runs/a@120"``,
        ``"runs/a@best"``, a URL, a ``Snapshot``, or a ``Store`` with one at its root. ``keys``,
        ``missing``, ``unexpected``, ``rename``, and ``mismatched`` (as for ``limpet.load``, and
        ``"cast"`` for its ``cast=True``) determine how much of it is loaded; ``start_report`` then
        says what was. A run that has versions ignores these arguments and loads its own completely.
        Without ``start``, ``missing="keep"`` keeps the live values that its version lacks, and
        ``missing=["ema/**"]`` those that match. An event names them.

        With ``check=True``, all of the version is read again and compared with the live state,
        which finds objects that do not restore what they saved. An event reports it.

        Raises ``NoSnapshot`` if there are versions but none of them is usable, ``PlanError`` with
        all differences if the version does not match the state, and ``LimpetError`` for invalid
        arguments. Restarts under ``limpet run`` without progress end with ``NoProgress``.
        """
        step, branch = parse_at(at)
        keep, cast = ("error" if mismatched == "cast" else mismatched), mismatched == "cast"
        leniency = Leniency(missing, unexpected, cast, rename or {}, keep)
        options = ResumeOptions(start, keys, leniency, check)
        options.require_valid(goes_back=at is not None)
        self._preemption.watch()
        self._call_state_function()
        self._saver.wait_on_all_ranks("the resume")
        if self._all_ranks.members:
            call_to_resume(self._all_ranks, options)
        resume = Resume(
            run=self.run,
            state=self.state,
            group=self._all_ranks,
            at=step,
            branch=branch,
            acquire_lock=self._saver.writer_lock.acquire,
            tiers=self._tiers,
            ladder=self._ending.ladder,
            options=options,
        )
        point = self._load_version(resume)
        if point is None:
            self._cadence.restart()
            events.emit("began", run=self.run.url)
            return None
        changes = self._continue_from(point)
        if check and point.is_exact:
            check_whole_state(self.run.url, point.snapshot, self.state, self._all_ranks, changes)
        return Snapshot(point.snapshot)

    def _load_version(self, resume: Resume) -> ResumePoint | None:
        self._savepoint.invalidate()
        if not (self._lifecycle.is_resumed or self._lifecycle.is_started):
            self._script_options = state_check.read_options(self.state)
        iterators = state_check.find_iterators(self.state)
        try:
            point = resume.load()
            if point is None:
                self._step_counter.progress.begin()
            else:
                state_check.check_ended(iterators)
                metadata = point.training_metadata
                self._step_counter.resume_at(point.step, point.from_own_run, metadata)
        except BaseException as e:
            self._lifecycle.is_state_valid &= not left_state_invalid(e)
            raise
        finally:
            self._step_counter.release()
        self._lifecycle.is_resumed = self._lifecycle.is_state_valid = True
        if self._lifecycle.is_started:
            self._saver.start_tiers(self.state)
        self._step_counter.share_seeds(self._group, self.run.url)
        branch = 0 if point is None else point.branch
        self._saver.metrics_log.begin(branch, self._step_counter.progress.step)
        return point

    # -- training ------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain of ``count``, and end each one::

            for epoch in ckpt.epochs(10):
                for batch in loader:
                    train_step(batch)
                    ckpt.step()
                ckpt.metrics({"val_loss": validate()})

        It resumes first, as ``resume()`` does, unless the program has called that. An epoch ends,
        as by ``end_epoch``, when the body of the loop ends, also by ``continue``, but not by
        ``break``, ``return``, or an error, nor if the body has ended the epoch or has resumed at
        another one. No further epoch begins when ``should_stop`` is True.

        After a resume within an epoch, the first number is that of this epoch again. A
        ``limpet.DataLoader`` then yields the rest of it. If a training that has completed ``count``
        epochs is started again, nothing is yielded. A larger ``count`` continues it.

        Random generators are seeded at the start of each epoch, unless the state has an ``RNG``.
        All ranks call this. Raises what ``resume`` and ``end_epoch`` raise, and ``LimpetError`` if
        ``count`` is not a number of epochs.
        """
        return self._run_epochs(check_count("The number of epochs", count, 0))

    @short_tracebacks
    def _run_epochs(self, count: int) -> Iterator[int]:
        self._resume_once()
        counter = self._step_counter
        if counter.ended_epochs >= count > 0 and not counter.has_counted:
            return
        while counter.progress.epoch < count and not self.should_stop:
            epoch = counter.progress.epoch
            counter.seed_epoch(epoch)
            yield epoch
            # else the body has ended it, or has resumed elsewhere; an owner counts in the body
            if counter.progress.epoch == epoch or counter.progress.owner is not None:
                self.end_epoch()

    def steps(self, count: int) -> Iterator[int]:
        """Yield the numbers of the steps that remain of ``count``, for a loop without a loader::

            for step in ckpt.steps(500):
                train_step()
                ckpt.step()

        It resumes first, as ``resume()`` does, unless the program has called that. Random
        generators are seeded at the start of each step, unless the state has an ``RNG``. No further
        step begins when ``should_stop`` is True.

        All ranks call this. Raises what ``resume`` raises, and ``LimpetError`` if ``count`` is not
        a number of steps, or if the body of the loop has not called ``step``.
        """
        return self._run_steps(check_count("The number of steps", count, 0))

    @short_tracebacks
    def _run_steps(self, count: int) -> Iterator[int]:
        self._resume_once()
        counter = self._step_counter
        while counter.progress.step < count and not self.should_stop:
            step, calls = counter.progress.step, counter.calls
            counter.seed_step()
            yield step
            if counter.calls == calls and counter.progress.step == step:
                raise LimpetError(
                    f"The body of `for step in ckpt.steps({count})` has not called ckpt.step() in"
                    f" step {step}: call it at the end of each step"
                )

    def _resume_once(self) -> None:
        if not (self._lifecycle.is_resumed or self._lifecycle.is_started):
            self.resume()

    @exclusive
    def metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics, such as those of a validation, to those of the last step.

        Whatever saves that step stores them, such as the end of the epoch with ``EveryEpoch``. If
        the step is saved, they are added to its version as by ``Run.add_metrics``. Early stopping
        sees them. All ranks call this, and those of rank 0 count.

        Raises ``PlanError`` for invalid metrics, and the error of a failed save of this step.
        """
        added_metrics = check_metrics(metrics)
        with self._goodput.paused():
            self._ensure_started()
            self._add_metrics(added_metrics)
            step = self._step_counter.progress.step
            self._early_stop.observe(added_metrics, step, self._agreement)

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
        ``steps`` is the number of optimizer steps, if a function makes several at once. If the
        ``Progress`` in the state has an owner, that counts them.
        ``batches`` is the number of their batches (default: ``steps``, or for a loader of
        Accelerate, those that were yielded since the last step), for accumulated gradients.

        When this method returns, the state may change again. The error of an earlier save is raised
        here; several ranks raise it when the next save is due. The step is counted even then. After
        a notice that the process will be stopped, it saves, and raises ``Preempted`` (an exit).
        """
        with self._goodput.paused():
            self._call_state_function()
            self._metrics, error = {}, None
            try:
                self._metrics = check_metrics(metrics)
            except BaseException as e:  # noqa: BLE001  (the optimizer has stepped: count it)
                error = e
            self._step_counter.add_steps(steps, batches)
            self._saver.metrics_log.add(self._step_counter.progress.step, self._metrics)
            self._act(error)
            if self._looks:
                self._looks -= 1
                if not self._looks:
                    state_check.report_lacking(self.run.url, self.state)

    @exclusive
    def end_epoch(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Increment ``progress.epoch``, and save if a save is due. Call it after each pass over the
        data, on all ranks, if the loop does not use ``epochs``, which calls it.

        ``metrics`` are added to those of the step, as by ``metrics``. If the step is already saved,
        with the old epoch, a record about its version says that the epoch has ended. Raises what
        ``step`` raises.
        """
        added_metrics = check_metrics(metrics)
        with self._goodput.paused():
            self._ensure_started()
            was_saved = self._saver.begun_step == self._step_counter.progress.step
            is_over = self._step_counter.end_epoch()
            self._add_metrics(added_metrics)
            if was_saved and is_over and not self._is_never:
                self._saver.warn_or_raise(self._record_epoch)
            self._act(is_within_step=not is_over)

    def _record_epoch(self) -> None:
        """Record about the version of the last step that its epoch has ended since."""
        self._saver.wait_on_all_ranks("the end of an epoch")
        counter = self._step_counter
        if self._saver.saved_step == counter.progress.step:
            record_end(self._saver, "", counter.progress.epoch, counter.loader_epochs())

    @exclusive
    def save(self, metrics: Mapping[str, Any] | None = None) -> Snapshot:
        """Save now, and return the snapshot when it is committed.

        If this step is already saved on this branch, return its snapshot. ``metrics`` are added to
        the metrics of the step. If the step is already saved, they are added as by
        ``Run.add_metrics``. Call this method after ``step``, not between the batches of a step,
        where the state belongs to no step. Raises any failure, regardless of ``on_error``.
        """
        added_metrics = check_metrics(metrics)
        with self._goodput.paused():
            self._ensure_started()
            newest = self._saver.wait_on_all_ranks("ckpt.save()")
            step = self._step_counter.progress.step
            self._early_stop.observe(added_metrics, step, self._agreement)
            self._saver.metrics_log.add(step, added_metrics)
            self._metrics = {**self._metrics, **added_metrics}
            if newest is None or self._saver.saved_step != step:
                self._start_save("request")
                newest = self._saver.wait_on_all_ranks("ckpt.save()")
            else:
                self._saver.add_metrics(newest, added_metrics, ADDED_METRICS)
        if newest is None:
            raise LimpetError("The save ended without a snapshot")
        return Snapshot(newest)

    @exclusive
    def wait(self) -> Snapshot | None:
        """Wait for the save in flight, and raise its error if it failed. Return the newest version
        that this Checkpointer saved or resumed from, or None."""
        if self._lifecycle.is_closed:
            self._lifecycle.check_not_forked()
            return snapshot_of(self._saver.wait())
        self._lifecycle.check_open()
        with self._goodput.paused():
            return snapshot_of(self._saver.wait_on_all_ranks("ckpt.wait()"))

    def statistics(self) -> dict[str, float]:
        """Return statistics since this Checkpointer was created, by name.

        - ``saves``, ``failures``: saves that were committed, and that failed.
        - ``bytes``, ``referred_bytes``: bytes that saves wrote, and referred to.
        - ``blocked_seconds``, ``last_blocked_seconds``, ``waited_seconds``: for how long training
          was blocked, also by the last save, and saves waited for the save before.
        - ``background_seconds``: the time that saves took in the background.
        - ``goodput``: the share of wall time since the run first began that was spent on steps
          that a committed version holds.
        - ``step_slowdown``: how many times as long your own steps take while a save is in flight.
          It is the ratio of two medians, of the last 100 steps that began during a save and of the
          last 100 others, without the time in this object. Absent with fewer than 5 of a kind.
        - ``store_requests`` and others: see ``limpet.storage.throttle.Statistics``.
        """
        return {**self._goodput.statistics(), **store_statistics(self.run.store)}

    # -- what a step does ----------------------------------------------------------------------

    @exclusive
    def _begin_call(self) -> None:
        """Start the training: ``PreemptionGuard.run`` raises an error of this call on all ranks."""
        self._ensure_started()

    @exclusive
    def _end_call(self) -> None:
        """Do what ``step`` does, without a step, after a call that has made its own steps."""
        with self._goodput.paused():
            self._act()

    def _act(self, error: BaseException | None = None, *, is_within_step: bool = False) -> None:
        """Do what the ranks have agreed on for the state after the last step, and save if a save is
        due. ``error``: an argument of the step was invalid, so do nothing, and raise it.
        ``is_within_step``: the state belongs to no step, so the next step does it."""
        step, preemption = self._step_counter.progress.step, self._preemption
        is_deferred = preemption.open_calls > 0 or is_within_step  # a call counts once, at its end
        if is_deferred:
            self._agreement.check()
            agreed = frozenset[str]()
        else:
            agreed = self._agreement.step()
        self._early_stop.observe(self._metrics, step, self._agreement, STOP_PROPOSAL in agreed)
        if self._ending.ladder.watched is not None:
            self._ending.ladder.observe(step, self._metrics)
        if not self._step_counter.is_within_step:  # an epoch may end between batches of a step
            is_partial = preemption.open_calls > 0
            self._savepoint.mark(self._make_spec, preemption.is_pending, is_partial)
        if error is not None:
            raise error
        self._ensure_started()
        if is_deferred:  # versions hold complete calls and steps
            return
        preemption.respond(agreed)
        if self._group.size == 1:  # several ranks raise together, when the next save is due
            self._saver.warn_or_raise(self._saver.raise_failure)
        try:
            self._save_if_due(agreed)
        except RankFailed as e:
            if not preemption.is_pending:
                raise
            preemption.leave_without_ranks(e)

    def _save_if_due(self, agreed: frozenset[str]) -> None:
        requested = self._watcher.pending_request is not None
        reason = self._cadence.save_reason(requested, agreed, self._agreement)
        if reason is not None and self._saver.reported_url is None:
            self._preemption.call_save_function()
        elif reason is not None:
            self._saver.warn_or_raise(
                self._saver.wait_before_save, self._step_counter.progress.step
            )
            self._saver.warn_or_raise(self._start_save, reason)
        progress = self._step_counter.progress
        memory = self._tiers.memory
        if memory is not None and memory.is_due(progress.step, progress.epoch):
            spec = self._make_spec("memory")
            metadata = self._saver.make_metadata(spec)
            self._saver.warn_or_raise(memory.save, self.state, spec.version, metadata)

    def _make_spec(self, reason: str = "exception") -> SaveSpec:
        training = {**self._early_stop.to_metadata(), **self._step_counter.to_metadata()}
        training[state_check.OPTIONS] = self._script_options
        training[_RANKS] = self._group.size
        if self._goodput.run_calls:  # now: a savepoint may be saved in the next call
            training["run_calls"] = self._goodput.run_calls
        return SaveSpec(
            version=Version(self._step_counter.progress.step, self._branch),
            reason=reason,
            metrics=self._metrics,
            note=self._note,
            training_metadata=training,
            read_modes=partial(state_check.read_modes, self.state),
        )

    def _start_save(self, reason: str, limit: Deadline | None = None) -> None:
        self._cadence.restart()  # if the save fails at once, do not try again at every step
        self._saver.metrics_log.read()
        is_requested = self._watcher.pending_request is not None
        request = self._watcher.accept() if is_requested else None
        spec = self._make_spec(reason if request is None else "request")._replace(deadline=limit)
        if request is not None:
            spec = spec._replace(on_finished=partial(self._watcher.mark, request))
        self._saver.start(self.state, spec)

    def _add_metrics(self, metrics: dict[str, Any]) -> None:
        """Add to the metrics of the last step, and to its version if it is saved."""
        self._metrics = {**self._metrics, **metrics}
        self._saver.metrics_log.add(self._step_counter.progress.step, metrics)
        self._saver.warn_or_raise(self._add_if_saved, metrics)

    def _add_if_saved(self, metrics: Mapping[str, Any]) -> None:
        if metrics and self._cadence.has_begun:
            newest = self._saver.wait_on_all_ranks("the metrics")
            if newest is not None and self._saver.saved_step == self._step_counter.progress.step:
                self._saver.add_metrics(newest, metrics, ADDED_METRICS)

    def _ensure_started(self) -> None:
        """Check the run and acquire the writer lock, at the first step or save: a run with other
        versions, or one that is not writable, must raise now."""
        if not self._lifecycle.is_state_valid:
            raise LimpetError(
                "The last resume() failed and may have left the live state invalid",
                todo="Resume from an intact version before you continue the training",
            )
        self._call_state_function()
        self._step_counter.progress.read()
        if self._lifecycle.is_started:
            return
        # those of members that the state has got since; a scheduler may have changed the others
        self._script_options = {**state_check.read_options(self.state), **self._script_options}
        self._ending.check_entered()
        is_resumed, own = self._lifecycle.is_resumed, self._rank_arguments

        def acquire_run(arguments_by_rank: list[dict[str, str]]) -> bool:
            check_ranks_agree(arguments_by_rank)
            if not is_resumed:
                check_run_empty(self.run)
            self._saver.writer_lock.acquire()
            return True

        all_reduce(self._group, "the first step", own, dict[str, str], acquire_run, bool)
        self._tiers.open(self.run.store, self.state, is_resumed=is_resumed)
        self._saver.start_tiers(self.state)
        self._agreement = make_agreement(self._group, "training", self._preemption)
        self._preemption.agree_through(self._agreement)
        if self._group.rank == 0:
            self._watcher.start()
        self._lifecycle.is_started = True
        self._ending.warn_if_collected(self)

    def _call_state_function(self) -> None:
        """Use the state that the function returns from now on, if there is a function."""
        if self._state_function is None:
            return
        state = check_state(self._state_function())
        check_position(self.run, state)
        if check_streamed(state, self._saver.options):
            self._savepoint.is_useful = False
        self._step_counter.attach(state)
        self._savepoint.attach(state)
        self.state, self._state_function = state, None
        self._join_members()
        self._cadence.restart()
        self._script_options = state_check.read_options(self.state)

    def _rank_arguments(self) -> dict[str, str]:
        check_writable(self.state)
        flatten(self.state, self._group.rank)  # raises for what no save can write
        step, seeds = self._step_counter.progress.step, self._step_counter.loader_seeds()
        return {**self._arguments, "current_step": str(step), **seeds}

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save in flight, save the last step (unless the Checkpointer has
        ``at_end=False``, ``Never()``, or ``OnPreemption()``), and release memory. Raises the error
        of a failed save.

        Nothing is saved while an exception is handled, as in a ``finally`` block: the state may
        belong to no step. A warning names the unsaved steps. A second call does nothing.
        """
        self._preemption.end(self._lifecycle.interruption(), self._close)

    @exclusive
    def _close(self, error: BaseException | None) -> None:
        lost = self._find_lost_steps(error)
        try:
            if error is None and self._lifecycle.can_save:
                self._step_counter.progress.read()
            unsaved = self._ending.finish(error, self._preemption.is_leaving)
        finally:
            self._release()
        if unsaved:
            self._ending.warn_unsaved(error)
        if lost is not None:
            raise lost

    def _find_lost_steps(self, error: BaseException | None) -> LimpetError | None:
        """Return the error for a normal end of steps that were neither counted nor saved."""
        lifecycle = self._lifecycle
        is_normal = error is None or (type(error) is SystemExit and not error.code)
        may_save = not (self._is_never or lifecycle.is_closed or lifecycle.is_forked)
        is_lost = self._step_counter.is_uncounted and not self._saver.writer.attempt
        if not (is_normal and may_save and is_lost) or self._preemption.is_leaving:
            return None
        return LimpetError(
            f"The training ended, and nothing was saved in {self.run.url}: an optimizer in the"
            " state has stepped, but ckpt.step() was never called; call it after every step of the"
            " optimizer, or use save=Never()"
        )

    def __enter__(self) -> Self:
        self._ending.is_entered = True
        self._preemption.watch()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._preemption.end(None, self._close)
        else:
            left = self._preemption.leave_after(error)
            self._preemption.end(left or error, self._close_after)
            if left is not None:
                raise left from error

    def _close_after(self, error: BaseException) -> None:
        lost = self._find_lost_steps(error)
        self._ending.finish_after(error, self._agreement)
        if lost is not None:
            raise lost from error

    def _continue_from(self, point: ResumePoint) -> list[str]:
        """Continue from a version. Report that, and on rank 0 what of the script it has replaced.
        Return what differs from the training that saved it."""
        self._metrics, self._branch, self._note = {}, point.branch, point.note
        self.start_report = point.start_report
        if point.from_own_run:
            self._saver.resume_from(point.durable, point.sessions)
            if self._saver.saved_step == self._step_counter.progress.step:
                self._step_counter.begin_epoch(*read_end(self._saver))
        self._goodput.resume_from(point.training_metadata)
        progress = self._step_counter.progress
        self._cadence.restart(is_saving=self._saver.saved_step == progress.step)
        if self._tiers.memory is not None:
            self._tiers.memory.restart(progress.step, progress.epoch)
        self._early_stop.resume_from(point.training_metadata, point.step)
        metadata = read_training_metadata(point.snapshot)
        changes = self._step_counter.describe_sizes()
        if metadata.get(_RANKS, self._group.size) != self._group.size:
            changes.append(f"{self._group.size} ranks, was {metadata[_RANKS]}, so dropout differs")
        restored = list[str]()
        if point.from_own_run:
            restored = state_check.restore_modes(self.state, metadata.get(state_check.MODES))
        earlier, used = metadata.get(state_check.OPTIONS), state_check.read_options(self.state)
        restored += state_check.describe_changes(self._script_options, earlier, used)
        run, url, step = self.run.url, point.snapshot.url, progress.step
        events.emit("resumed", run=run, url=url, step=step, branch=self._branch, changes=changes)
        configs = point.snapshot.metadata_node("config"), self._saver.options.config
        texts = () if None in configs else [*map(describe_change, compare_configs(*configs))]
        if self._group.rank == 0 and point.from_own_run and texts:
            events.emit("config_changed", run=run, url=url, changes=texts)
        if self._group.rank == 0 and restored:
            events.emit("options_replaced", run=run, url=url, options=restored)
        return changes

    def _release(self) -> None:
        self._lifecycle.is_closed, saver = True, self._saver
        self._step_counter.close()
        if not self._lifecycle.is_forked:
            try:
                for part in (self._agreement, self._preemption, self._ending, saver, self._watcher):
                    part.close()
                saver.close_log(self._preemption.cleanup_seconds)
                saver.writer_lock.release(self._preemption.cleanup_seconds)
                is_saved = saver.saved_step == self._step_counter.progress.step
                self._tiers.close(is_saved and not saver.busy)
            finally:
                self._end_lines()
                self._preemption.finish(self._lifecycle.interruption())
