"""What a trainer holds: resume, step, and the run's state is safe."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from holdfast import events
from holdfast.engine.distributed.agreement import make_agreement
from holdfast.engine.distributed.group import (
    GroupSpec,
    LocalGroup,
    all_reduce,
    saving_group,
    use_group,
)
from holdfast.engine.snapshot.location import Url
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import CommitError, HoldfastError, MetricMissing, SkippedVersion, StoreError
from holdfast.format.names import Version
from holdfast.run.metrics import check_metrics
from holdfast.run.policy import EverySeconds, KeepPolicy, SavePolicy, StopWhen, check_can_fire
from holdfast.run.run import Run
from holdfast.run.save_request import RequestWatcher
from holdfast.run.writer_lock import WriterLock
from holdfast.training.arguments import (
    check_arguments,
    check_choices,
    check_no_copies,
    check_not_version,
    check_ranks_agree,
    check_run_empty,
    not_entered_error,
    stable_repr,
)
from holdfast.training.cadence import Cadence
from holdfast.training.early_stop import STOP_PROPOSAL, EarlyStop
from holdfast.training.exception_save import ExceptionSave
from holdfast.training.goodput import Goodput
from holdfast.training.resume import StartSelection, left_state_invalid, resume_run, start_from
from holdfast.training.saver import Saver, SaveSpec
from holdfast.training.step_counter import StepCounter
from holdfast.training.warn import (
    attach_secondary_errors,
    is_store_failure,
    last_save_message,
    warn_save_failed,
    warn_unsaved_steps,
)


class Checkpointer:
    """Saves a state beside the training when a policy says so, and resumes it.

    ``run``: where the versions go. ``state``: as for ``holdfast.save``; it is read at every save,
    and written by ``resume``. A ``Progress`` in it counts the steps (without one the Checkpointer
    counts itself), and an ``ElasticSampler`` is moved on with them.

    ``save``: when (every ten minutes if not given); ``keep``: what to keep (everything if not
    given); ``stop``: when training should end (``should_stop``). ``incremental``: chunks that an
    earlier version holds are referred to; every ``full_every``-th version is written in full all
    the same (None: never; for weights that stay frozen). ``overlap`` (experimental: it never ran
    on an accelerator): parameters and slots of the optimizers in the state are copied beside the
    next forward and backward, and ``optimizer.step`` waits for it; nothing else may change them
    meanwhile.

    One save is in flight at a time. ``busy``: the next that is due waits for it ("wait"), or is
    left out until it is done ("skip"). A save that fails in the background raises at the next
    ``step``, ``save``, ``wait`` or ``close``; with ``on_error="warn"`` a store that fails costs no
    more than a ``SaveFailed`` warning in ``step`` and ``close``, and training goes on.

    Under torch.distributed every rank makes one, and calls the same methods; ``group``: a
    ``ProcessGroup`` if not all ranks do. Metrics and clocks are those of rank 0; what they tell is
    done at a step on which all agree, without a collective.
    """

    def __init__(  # noqa: PLR0913  (the public face; each is a thing that a person decides)
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
        busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["raise", "warn"] = "raise",
        group: GroupSpec = None,
    ) -> None:
        save = EverySeconds(600) if save is None else save
        keep = KeepPolicy() if keep is None else keep
        check_arguments(state, save, keep, stop)
        choices = check_choices(busy, on_error, full_every, incremental, overlap)
        self._arguments = {"save": stable_repr(save), **choices}
        self.run = Run(run)
        self.state = state
        self._save_policy = save
        self._group = saving_group(group)
        self._is_rank_zero = self._group.rank == 0
        self._early_stop = EarlyStop(stop, self.run.url, self._group)
        self._on_error = on_error
        self._step_counter = StepCounter(state)
        check_can_fire(save, self._step_counter.knows_epochs)
        check_no_copies(state)
        check_not_version(self.run)
        self._goodput = Goodput()
        full_every = full_every if incremental else 1
        self._writer_lock = WriterLock(self.run.store)
        self._saver = Saver(
            self.run, keep, self._goodput, self._writer_lock, self._early_stop, full_every, overlap
        )
        self._cadence = Cadence(save, busy, self._group, self._step_counter)
        self._agreement = make_agreement(LocalGroup(), "training")
        self._agreed_proposals: frozenset[str] = frozenset()
        self._watcher = RequestWatcher(self.run.store)
        self._exception_save: ExceptionSave | None = None
        self._branch = 0
        self._note: Mapping[str, Any] = {}
        self._metrics: Mapping[str, Any] = {}
        self._state_invalid = self._resumed = self._started = self._closed = False
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Checkpointer {self.run.url} at step {self.current_step}>"

    @property
    def current_step(self) -> int:
        """Steps done, the resumed ones included."""
        return self._step_counter.step

    @property
    def should_stop(self) -> bool:
        """Whether the ``stop`` policy has seen enough. A resumed training counts on."""
        return self._early_stop.stopped

    # -- resuming ------------------------------------------------------------------------------

    def resume(
        self,
        at: int | None = None,
        *,
        branch: int | None = None,
        start: str | None = None,
        keys: str | Sequence[str] | None = None,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["error", "ignore"] = "error",
        rename: Mapping[str, str] | None = None,
        share: bool = False,
    ) -> Snapshot | None:
        """Load the newest intact version into the state and return it; None if the run is empty.

        ``at``: the version of that step instead; ``branch``: along that branch. Going on from
        anything but the newest version, because newer ones are damaged (each is told in a
        ``SkippedVersion`` warning) or because ``at`` or ``branch`` says so, starts a branch,
        durably, before this returns. ``share``: as for ``holdfast.load``.

        ``start``: what an empty run begins with: a snapshot (``"runs/a@120"``, ``"runs/a@latest"``
        or a URL), of which ``keys``, ``missing``, ``unexpected`` and ``rename`` (as for
        ``holdfast.load``) say how much is taken. A run that has versions of its own goes on from
        those, whole and strictly, so that one script serves the first start and every restart.

        Raises ``NoSnapshot`` if there are versions but none that can be used, and ``PlanError``
        with all differences if the version is of another state.
        """
        self._check_open()
        self._saver.wait_on_all_ranks(self._group)
        part = StartSelection.from_arguments(
            start, keys, missing, unexpected, rename, (at, branch) != (None, None)
        )
        if self._exception_save is not None:
            self._exception_save.discard()
        try:
            with use_group(self._group):
                found = resume_run(
                    self.run, self.state, at, branch, self._writer_lock.acquire, share
                )
                if found is None and start is not None:
                    found = start_from(start, self.state, part, share)
        except BaseException as e:
            self._state_invalid = self._state_invalid or left_state_invalid(e)
            self._step_counter.resume_at(self.current_step, from_own_run=False)
            raise
        self._resumed, self._state_invalid = True, False
        if found is None:
            self._step_counter.resume_at(self.current_step, from_own_run=False)
            events.emit("began", run=self.run.url)
            return None
        self._metrics = {}
        self._branch, self._note = found.branch, found.note
        self._step_counter.resume_at(found.step, found.from_own_run)
        if found.from_own_run:
            self._saver.resume_from(found.snapshot)
        self._early_stop.resume_from(found.training_metadata)
        self._goodput.resume_from(found.training_metadata)
        self._cadence.restart()
        events.emit("resumed", url=found.snapshot.url, step=self.current_step, branch=self._branch)
        for told in found.skipped:
            warnings.warn(told, SkippedVersion, stacklevel=2)
        return found.snapshot

    # -- training ------------------------------------------------------------------------------

    def step(self, metrics: Mapping[str, Any] | None = None, *, batches: int = 1) -> None:
        """Call after every optimizer step: counts it, and saves when a save is due.

        ``metrics``: numbers by name, kept with the version that this step may become;
        ``batches``: how many the step was made of, where gradients are accumulated. Returns when
        the state may be changed again. Raises what made an earlier save fail (of several ranks: all
        of them, when the next is due); the step is counted all the same.
        """
        self._check_open()
        with self._goodput.paused():
            self._metrics = {}
            try:
                self._metrics = check_metrics(metrics)
            finally:  # also where they are none: the optimizer has stepped
                self._count_step(self._metrics, batches)
            self._ensure_started()
            if self._group.size == 1:  # several ranks raise together, when the next save is due
                self._raise_or_warn(self._saver.poll)
            self._save_if_due()
            self._warn_metric_missing()

    def _count_step(self, metrics: Mapping[str, Any], batches: int) -> None:
        """One more step, of which the state is now."""
        self._step_counter.add_step(batches)
        self._agreed_proposals = self._agreement.step()
        agreed = STOP_PROPOSAL in self._agreed_proposals
        self._early_stop.observe(metrics, self.current_step, self._agreement, agreed)
        if self._exception_save is not None:
            self._exception_save.mark(self.current_step, self._early_stop.to_metadata(), metrics)

    def _save_if_due(self) -> None:
        wanted = self._watcher.pending_request is not None
        reason = self._cadence.save_reason(
            wanted, self._agreed_proposals, self._agreement, self._saver.busy
        )
        if reason is None:
            self._saver.reserve_buffers()
            return
        if self._cadence.skip_if_busy(lambda: self._saver.busy, self.run.url, self._goodput):
            return
        self._raise_or_warn(lambda: self._saver.wait_before_save(self.current_step, self._group), 4)
        self._raise_or_warn(lambda: self._start_save(reason, self._metrics), 4)

    def _start_save(self, reason: str, metrics: Mapping[str, Any]) -> None:
        self._cadence.restart()  # a save that fails at once is not tried again at every step
        version, training = Version(self.current_step, self._branch), self._early_stop.to_metadata()
        reason, ended = (
            "request" if self._watcher.pending_request else reason,
            self._watcher.accept_with_callback(),
        )
        with use_group(self._group):
            order = SaveSpec(version, reason, metrics, self._note, training, ended)
            self._saver.start(self.state, order)

    def save(self, metrics: Mapping[str, Any] | None = None) -> Snapshot:
        """Save now, and return the snapshot once it is committed; if this step is saved already
        on this branch, that one. ``metrics``: besides those that the step was given (then added as
        by ``Run.add_metrics``). Call it after ``step``: amid the batches of one the state is that
        of no step. Raises what goes wrong, whatever ``on_error`` says."""
        self._check_open()
        more = check_metrics(metrics)
        with self._goodput.paused():
            self._ensure_started()
            newest = self._saver.wait_on_all_ranks(self._group)
            self._early_stop.observe(more, self.current_step, self._agreement, False)
            if newest is None or self._saver.saved_step != self.current_step:
                self._start_save("request", {**self._metrics, **more})
                newest = self._saver.wait_on_all_ranks(self._group)
            else:
                self._saver.add_metrics(newest, more, self._group)
        if newest is None:
            raise HoldfastError("The save ended without a snapshot")
        return newest

    def save_on_signal(self, number: int) -> None:
        """Let a signal such as ``signal.SIGUSR1`` ask for a save, like ``holdfast request-save``,
        until ``close``. A handler that was there before is called as well."""
        self._check_open()
        self._watcher.install_signal_handler(number)

    def wait(self) -> Snapshot | None:
        """Wait until the save in flight is committed; the newest version that this Checkpointer
        saved or resumed, None if there is none. Raises what made the save fail."""
        self._check_not_forked()
        with self._goodput.paused():
            return (
                self._saver.wait() if self._closed else self._saver.wait_on_all_ranks(self._group)
            )

    def statistics(self) -> dict[str, float]:
        """Since this Checkpointer was made: ``saves``, ``failures``, ``skipped``, ``bytes`` written
        and ``referred_bytes``; seconds that training was held up (``blocked``; by the last save
        ``last_blocked``; ``waited`` for the save before), and that saves took in the
        ``background``. And ``goodput``: the share of wall time, since the run first began, that
        went into steps which a committed version holds."""
        return self._goodput.statistics()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save in flight and give the memory back. Raises what made it fail."""
        self._close_parts()
        if self._pid == os.getpid():
            if self._is_rank_zero:
                self._saver.check_metrics_given()
            self._warn_metric_missing()

    def _close_parts(self) -> None:
        self._closed = True
        if self._pid != os.getpid():
            return  # saves and buffers are those of the process that this one was forked from
        try:
            self._raise_or_warn(self._saver.wait)
        finally:
            self._agreement.close()
            if self._exception_save is not None:
                self._exception_save.close()
            self._saver.close()
            self._writer_lock.release()
            self._watcher.close()

    def __enter__(self) -> Self:
        if self._save_policy.on_exception and self._exception_save is None:
            self._exception_save = ExceptionSave(self.state, self._group)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return self._exit_normally()
        told: list[str] = []
        try:
            try:
                if self._exception_save is not None and self._can_save:
                    with use_group(self._group):
                        self._exception_save.save(
                            self._saver, error, self._branch, self._note, told
                        )
            finally:
                self._close_parts()
        except Exception as e:
            forgiven = self._on_error == "warn" and isinstance(e, StoreError | CommitError)
            if isinstance(error, SystemExit) and not error.code and not forgiven:
                raise  # whoever has started this process must not hear that all is well
            told.append(last_save_message(e))
        finally:
            attach_secondary_errors(error, told)

    @property
    def _can_save(self) -> bool:
        """Whether it has begun to save, the state is that of a step, and nobody has closed it."""
        return self._started and not (
            self._state_invalid or self._closed or self._pid != os.getpid()
        )

    def _exit_normally(self) -> None:
        alive, skipped = self._can_save, self._cadence.skipped_since_save and self._is_rank_zero
        self.close()
        if alive and self._saver.saved_step != self.current_step:
            warn_unsaved_steps(self.run.url, self.current_step, self._saver.saved_step, skipped)

    # -- how it is done ------------------------------------------------------------------------

    def _warn_metric_missing(self) -> None:
        advice, self._saver.metric_warning = self._saver.metric_warning, None
        if advice is not None:
            warnings.warn(advice, MetricMissing, stacklevel=3)

    def _raise_or_warn(self, call: Callable[[], object], stacklevel: int = 3) -> None:
        """Call it; what a store does wrong is raised, or a warning, as ``on_error`` says."""
        try:
            call()
        except (StoreError, CommitError) as e:
            if self._on_error == "raise" or not is_store_failure(e):
                raise
            warn_save_failed(e, self._saver.saved_step, stacklevel + 1)

    def _check_open(self) -> None:
        if self._closed:
            raise HoldfastError("The Checkpointer is closed", todo="Make a new one")
        self._check_not_forked()

    def _check_not_forked(self) -> None:
        if self._pid != os.getpid():
            raise HoldfastError(
                "This Checkpointer belongs to the process that this one was forked from",
                todo="Save in the process that trains",
            )

    def _ensure_started(self) -> None:
        """At the first step: training afresh into a run that has versions would mix two
        trainings, and a run that cannot be written to should be known now."""
        if self._state_invalid:
            raise HoldfastError(
                "The last resume() failed, and the live state may be that of no step",
                todo="Resume from a version that is intact before going on",
            )
        if self._started:
            return
        if self._save_policy.on_exception and self._exception_save is None:
            raise not_entered_error()
        all_reduce(
            self._group,
            "the first step",
            self._rank_arguments,
            dict[str, str],
            self._check_and_lock,
            bool,
        )
        self._agreement = make_agreement(self._group, "training")
        if self._is_rank_zero:
            self._watcher.start()
        self._started = True

    def _rank_arguments(self) -> dict[str, str]:
        self._saver.prepare_reservation(self.state, self._group)
        return {**self._arguments, "current_step": str(self.current_step)}

    def _check_and_lock(self, arguments_by_rank: Sequence[dict[str, str]]) -> bool:
        check_ranks_agree(arguments_by_rank)
        if not self._resumed:
            check_run_empty(self.run)
        self._writer_lock.acquire()
        return True
