"""The saves of one training: at most one is in flight, and retention follows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, ParamSpec

from limpet import errors, events
from limpet.buffers import BufferPool, page_lock
from limpet.deadline import Deadline
from limpet.format.names import Version, parse_version
from limpet.loading.snapshot import Snapshot, reader_of
from limpet.ranks.error_report import format_with_notes
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.address import merge_objectives
from limpet.run.metrics_log import MetricsLog
from limpet.run.run import Run
from limpet.run.writer import VersionWriter
from limpet.saving.commit import SaveJob, VersionMetadata
from limpet.saving.pending import Pending
from limpet.saving.save import begin_save, finish_in_background, finish_save
from limpet.saving.staging import DeferredStaging
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.state.flatten import FlatState
from limpet.state.step_hooks import StepPreHook
from limpet.state.walk import optimizers_in
from limpet.storage.store import Store, within
from limpet.text import warn_user
from limpet.threads import no_op
from limpet.tiers.local_snapshots import LocalSnapshots, Promotion
from limpet.tiers.tiers import Tiers
from limpet.training.early_stop import EarlyStop
from limpet.training.goodput import Goodput
from limpet.training.member import MemberCall, call_members
from limpet.training.on_best import OnBest
from limpet.training.options import Options

P = ParamSpec("P")


class Saver:
    """Saves states of a training in the background. Only the training thread calls methods; any
    thread may read the properties. At most one save is in flight that the next one must wait for;
    with the local tier, only until its promotion to the run begins. With ``overlap``, an
    optimizer's step waits for the copy. ``all_ranks``: those of ``group``, and its members."""

    def __init__(self, run: Run, options: Options, group: Group, all_ranks: Group) -> None:
        self.run, self.url = run, run.url
        self.reported_url: str | None = run.url  # None: of a PreemptionGuard without Checkpointer
        self.begun_step = 0
        """The step of the last save that did not fail, even if it is still in flight."""

        self.group, self.options = group, options
        self.goodput = Goodput()
        self.early_stop = EarlyStop(options.stop, run, group)
        self.tiers = Tiers(options.tiers, group)
        self.writer = VersionWriter(
            run.catalog,
            all_ranks,
            options.keep,
            incremental=options.incremental,
            timeout=options.save_timeout,
            before_deletion=self.early_stop.before_deletion,
        )
        self.retention, self.writer_lock = self.writer.retention, self.writer.lock
        is_logging = options.metrics_log and self.group.rank == 0
        self.metrics_log = MetricsLog(self.writer_lock, is_on=is_logging)
        self.objectives = merge_objectives(options.objectives)
        self.evaluated_metrics = set[str]()
        """The metrics that evaluations in this training have given, also about versions that are
        deleted since; ``inexact_metrics``: those that do not count."""
        self.inexact_metrics = set[str]()
        self._guard: StepPreHook | None = None
        self._pool = BufferPool(1 << 50, on_create=page_lock)
        self.can_flush = self.tiers.can_flush
        self._saves: Sequence[tuple[Pending, Promotion | None]] = ()  # oldest first
        # of saves that have ended, and of what follows a commit: each wait raises one
        self._errors: list[Exception] = []
        function = options.on_best if self.group.rank == 0 else None
        self.on_best = OnBest(function, options.objectives, run, self._errors)
        self._deferred_staging: DeferredStaging | None = None
        self._waited_seconds, self._blocked_seconds = 0.0, [0.0]
        self._closing = self._is_saving_savepoint = False
        self.evaluated: dict[str, Any] = {}  # what a ``TrainingEvaluation`` stores in each version
        self._pid = os.getpid()

    @property
    def newest_step(self) -> int | None:
        """The step of the version that was saved or resumed last, or None if there is none."""
        newest = self.writer.newest
        return None if newest is None else version_of(newest).step

    @property
    def saved_step(self) -> int:
        """The same, or 0: the state before the first step need not be saved."""
        return self.newest_step or 0

    @property
    def pending(self) -> Pending | None:
        """The newest save whose result no wait has taken, or None."""
        return self._saves[-1][0] if self._saves else None

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        for pending, _ in self._saves:  # noqa: SIM110  (each step asks this: no generator)
            if not pending.done:
                return True
        return False

    @property
    def must_wait(self) -> bool:
        """True if the next save would have to wait for the one before."""
        for pending, promotion in self._saves:
            if not (pending.done or (promotion is not None and promotion.has_begun.is_set())):
                return True
        return False

    def warn_or_raise(self, call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``call``; with ``on_error="warn"``, turn it into a warning if a store, a commit, or
        what follows it failed, also on another rank."""
        try:
            call(*args, **kwargs)
        except errors.LimpetError as e:
            is_reported = isinstance(e, errors.RankFailed) and not e.fields.get("lost")
            cause = (e.__cause__ if is_reported else None) or e
            is_failure = isinstance(cause, errors.StoreError | errors.CommitError)
            is_tolerable = is_failure or "committed" in getattr(cause, "fields", ())
            if self.options.on_error == "raise" or not is_tolerable:
                raise
            since = "" if self.newest_step is None else f" since step {self.newest_step}"
            begin = f"NOTHING WAS SAVED; there is no version{since}: "
            begin = "" if "committed" in e.fields else begin
            warn_user(f"{begin}{format_with_notes(e)}", errors.SaveFailed)

    # -- waiting -------------------------------------------------------------------------------

    def wait(self, deadline: Deadline | None = None) -> SnapshotReader | None:
        """Wait for the saves in flight, and return the newest version, or raise their error, and
        once that of a retention. With a ``deadline``, before an exit, only the newest counts."""
        if deadline is None:
            for pending, _ in self._saves:
                pending.wait_ended()
            self.raise_failure()
        elif self._saves:
            saves = self._saves
            self._end(saves[-1], deadline.seconds_left)
            for pending, _ in saves:  # a promotion that fails later must not change the exit
                pending.forget()
        return self.writer.newest

    def wait_on_all_ranks(
        self, what: str, limit: Deadline | None = None, wait: Callable[[], object] | None = None
    ) -> SnapshotReader | None:
        """Wait as ``wait`` does. If one rank raises, all do: none of them goes on to a collective
        operation that the others never reach. ``what``: what the user has called."""
        wait = partial(self.wait, limit) if wait is None else wait
        if self.group.size == 1:
            wait()
        else:
            operation, done = f"{what} of {self.url}", lambda: True
            broadcast_from_first(self.group, operation, done, bool, wait, limit)
        return self.writer.newest

    def wait_before_save(self, step: int) -> None:
        """Wait on all ranks until the due save of ``step`` may begin, or raise an earlier error."""
        was_busy, began = self.must_wait, time.perf_counter()
        try:
            self.wait_on_all_ranks(f"the save after step {step}", wait=self.wait_for_turn)
        finally:
            if was_busy:
                self._waited_seconds = time.perf_counter() - began
                self.goodput.seconds["waited"] += self._waited_seconds
                events.emit("save_waited", run=self.url, step=step, seconds=self._waited_seconds)

    def wait_for_turn(self) -> None:
        """Wait until the next save may begin. Raises the error of the first one that failed."""
        for pending, promotion in self._saves:
            (pending.wait_ended if promotion is None else promotion.has_begun.wait)()
        self.raise_failure()

    def wait_before_last(self, is_begun: bool, deadline: Deadline) -> None:
        """Wait on all ranks before the last save of a training. ``is_begun``: it is in flight.
        Otherwise, no promotion is awaited."""

        def wait() -> None:
            for pending, promotion in self._saves:
                has_ended = pending.wait_ended if promotion is None else promotion.is_local.wait
                if not has_ended(deadline.seconds_left):
                    raise TimeoutError(f"The end of a save to {self.url} did not come in time")
            self.raise_failure()

        self.wait_on_all_ranks("the end", deadline, None if is_begun else wait)

    def raise_failure(self) -> None:
        """Take the results of the ended saves. Raise the first error, and later the others."""
        for save in self._saves:
            if save[0].done:
                try:
                    self._end(save, None)
                except Exception as e:  # noqa: BLE001  (raised below, in order)
                    self._errors.append(e)
        if self._errors:
            raise self._errors.pop(0)

    def _end(self, save: tuple[Pending, Promotion | None], timeout: float | None) -> None:
        """Wait for a save, and take its result: also later, after an interrupt or timeout."""
        failure = None
        try:
            self.take(reader_of(save[0].wait(timeout)))
        except BaseException as e:
            if e is not save[0].error:
                raise
            failure = e
        saves = list(self._saves)  # other threads may iterate over the list
        saves.remove(save)
        self._saves = saves
        if failure is not None:
            raise failure

    def take(self, snapshot: SnapshotReader) -> None:
        """Count the result of a save, unless it is older, or a local version that is damaged."""
        newest = self.writer.newest
        is_newer = newest is None or version_of(snapshot) >= version_of(newest)
        if is_newer and not snapshot.location.is_per_host:
            self.writer.newest = snapshot

    def poll(self) -> None:
        """Write the metrics, and read the scores of some versions. Raises ``StoreError``."""
        self.metrics_log.write(self.run.store)
        self.early_stop.poll()

    # -- saving --------------------------------------------------------------------------------

    def start(self, state: Any, spec: SaveSpec) -> None:
        """Begin to save ``state``, which may change when this returns. No other save may be in
        flight (``wait_before_save``)."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        try:
            # in the time before the process must leave, nothing is written twice
            local = self.tiers.local if spec.deadline is None else None
            self._begin_save(state, spec, time.perf_counter() - waited, local)
        except BaseException as e:
            self._record_failure(spec, e)
            raise

    def _begin_save(
        self, state: Any, spec: SaveSpec, began: float, local: LocalSnapshots | None
    ) -> None:
        overlap = self.options.overlap and not isinstance(state, FlatState)
        if overlap and self._guard is None and optimizers_in(state):
            # a hook for all optimizers, because wrappers contain optimizers of their own
            self._guard = StepPreHook(None, self._wait_staged)
        location = self.writer.locate(spec.version, spec.deadline)
        previous, promotion, first = self._saves, None, location
        if local is not None:
            first = local.location(location)
            promotion = local.begin_promotion(location, self.pending)
        try:
            metadata = self.make_metadata(spec)
            if (group := self.writer.group).members:
                call_members(group, MemberCall(spec.version), location.deadline)
            job = self.writer.begin(
                first, state, metadata, self._pool, stage_now=True, overlap=overlap
            )
        except BaseException as e:
            if promotion is not None:
                promotion.collective.close()
            if local is None or not isinstance(e, errors.AlreadyExists):
                raise
            self._begin_save(state, spec, began, None)  # its promotion has failed
            return
        if isinstance(job, SnapshotReader):  # its save failed with an unknown outcome
            self.begun_step = spec.version.step
            spec.on_finished(True)
            return
        self._blocked_seconds = [time.perf_counter() - began]
        self.goodput.seconds["last_blocked"] = self._blocked_seconds[0]

        def register(pending: Pending | None) -> None:
            # before the thread starts: an optimizer may step, an event sink may use the save, and
            # an interrupt may occur at any moment
            self._deferred_staging = job.deferred
            if pending is not None:
                self._saves = [*previous, (pending, promotion)]
                self.goodput.pending = pending
                return
            self._saves = previous  # it will never begin
            if promotion is not None:
                promotion.collective.close()

        self.begun_step = spec.version.step
        finish = partial(
            self._finish_save, spec=spec, blocked_seconds=self._blocked_seconds, promotion=promotion
        )
        finish_in_background(job, finish, register=register)

    def make_metadata(self, spec: SaveSpec) -> VersionMetadata:
        training = {**spec.training_metadata, **spec.read_modes()}
        training |= {**self.evaluated, **self.goodput.to_metadata()}
        if spec.reason == "memory" and self.begun_step == spec.version.step:
            training["saved_with"] = self.writer.attempt  # both are of this call of step()
        made = self.writer.make_metadata(spec.version, spec.reason, spec.metrics, spec.note)
        training |= made.training
        config = self.options.config
        return replace(made, training=training, objectives=self.objectives, config=config)

    def save_savepoint(
        self,
        flat: FlatState,
        spec: SaveSpec,
        deadline: Deadline,
        group: Group,
        end_staging: Callable[[], str | None],
    ) -> None:
        """Save a savepoint in the calling thread. ``group``: all ranks. ``end_staging``, called
        after the copy, returns why it is not valid, or None. The same version may be in flight."""
        version = spec.version
        location = self.run.location(version).limit("save", None, deadline)
        metadata = self.make_metadata(spec._replace(reason="preemption"))
        self._is_saving_savepoint = True
        try:
            job = begin_save(location, flat, metadata, self._pool, group=group, stage_now=True)
            if reason := end_staging():
                job.staging_error = errors.CommitError(f"{version} was not saved: {reason}")
            snapshot = finish_save(job, lambda: self.writer_lock.check(location.store))
            self.writer.emit_saved(job, blocked=0.0, seconds=time.perf_counter() - job.started_at)
        except errors.LimpetError as e:
            events.emit("save_failed", run=self.run.url, step=version.step, error=e)
            try:
                snapshot = open_location(location.for_cleanup())
            except (errors.FormatError, errors.StoreError):
                raise e from None
            snapshot.location = location.without_limit()
        finally:
            self._is_saving_savepoint = False
        self.writer.newest, self.begun_step = snapshot, version.step
        self.goodput.counts["saves"] += 1
        self.goodput.mark_committed(metadata.training["trained_seconds"])

    def start_tiers(self, state: Any) -> None:
        """Check the space for ``state``, delete what is not needed in the tiers, and promote what
        an earlier training has left on the local disks, in the background. All ranks call this."""
        self.tiers.start(state)
        promoting = self.tiers.promote_leftovers(self.run, self.writer_lock.check)
        if promoting is not None:
            self._saves = [*self._saves, promoting]
            self.goodput.pending = promoting[0]

    def prepare_flush(self) -> None:
        """Prepare for a flush without rank 0, which holds the writer lock: remember the owner."""
        if self.group.rank:
            with suppress(errors.LimpetError):
                self.writer_lock.observe()

    def flush_tiers(self, deadline: Deadline) -> None:
        """Save the newest snapshot of this host in a tier if it is newer than all versions."""
        newest = self.tiers.flush(self.run, deadline, self.writer_lock.check)
        if newest is not None:
            self.take(newest)

    def _wait_staged(self) -> None:
        staging = self._deferred_staging
        if staging is not None and not staging.done.is_set() and self._pid == os.getpid():
            began = time.perf_counter()
            staging.done.wait()
            waited = time.perf_counter() - began
            self._blocked_seconds[0] += waited
            self.goodput.add_blocked(waited)

    def _finish_save(
        self,
        job: SaveJob,
        spec: SaveSpec,
        blocked_seconds: list[float],
        promotion: Promotion | None,
    ) -> SnapshotReader:
        """Finish a save in the background: commit it, and then apply retention."""
        began = time.perf_counter()

        def check_writer(store: Store) -> None:
            try:
                # before the commit, so that no kill loses the metrics; but not within a time limit
                if spec.deadline is None and self.options.save_timeout is None:
                    self.metrics_log.write(self.run.store)
            except Exception as e:  # noqa: BLE001  (commit all the same: the next call raises this)
                self._errors.append(e)
            self.writer_lock.check(store)  # right before the commit

        try:
            if promotion is None:
                snapshot = self.writer.commit(job, check_writer)
            else:
                snapshot = promotion.finish(job, check_writer)
        except BaseException as e:
            self._record_failure(spec, e)
            raise
        finally:
            if self._closing:
                self._pool.close()
        result = job.result
        self.goodput.counts.update(
            saves=1, bytes=result.nbytes, referred_bytes=result.referred_bytes
        )
        self.goodput.mark_committed(job.metadata.training["trained_seconds"])
        self.goodput.save_durations.add(time.perf_counter() - job.started_at)
        spec.on_finished(True)
        try:
            if job.collective.rank == 0 and spec.deadline is None:  # it has committed the version
                self.metrics_log.write(self.run.store)
                self.early_stop.after_save(snapshot)
                self.on_best.after_save(snapshot.location.folder)
                self.retention.after_save(snapshot)
        except Exception as e:  # noqa: BLE001  (the save is committed: the next call raises this)
            self._errors.append(e)
        seconds = time.perf_counter() - began
        self.goodput.seconds["background"] += seconds
        self.writer.emit_saved(job, blocked=blocked_seconds[0], seconds=seconds)
        return snapshot

    def _record_failure(self, spec: SaveSpec, error: BaseException) -> None:
        spec.on_finished(False)
        if self.begun_step == spec.version.step:
            self.begun_step = self.saved_step
        self.goodput.counts["failures"] += 1
        events.emit("save_failed", run=self.run.url, step=spec.version.step, error=error)

    def add_metrics(self, snapshot: SnapshotReader, metrics: Mapping[str, Any], name: str) -> None:
        """Add the metrics of rank 0 to a version. If that fails, all ranks raise."""

        def add() -> bool:
            if metrics:
                self.run.add_metrics(Snapshot(snapshot), metrics, name)
            return True

        broadcast_from_first(self.group, f"adding metrics to {snapshot.url}", add, bool)

    def resume_from(self, snapshot: SnapshotReader | None, sessions: Sequence[str] = ()) -> None:
        """Continue from a version, and from the work of earlier ``sessions``."""
        self.writer.continue_from(snapshot, sessions)
        self.begun_step = self.saved_step

    def finish_log(self) -> None:
        """Write the metrics of the last steps. Raises ``StoreError``."""
        if not self.metrics_log.is_on:
            return
        self.metrics_log.read()
        try:
            self.metrics_log.write(self.run.store, -1, must=True)
        except errors.LimpetError as e:
            newest = self.writer.newest
            saved = {} if newest is None else {"committed": newest.location.folder}
            raise e.with_advice("The last metrics could not be logged", **saved) from e

    def close_log(self, seconds: float) -> None:
        """Write within ``seconds`` what is left of the metrics, without an error or a wait for a
        device, which may never answer."""
        if not self.metrics_log.is_on:
            return
        self.metrics_log.read(may_wait=False)
        deadline = Deadline.after(seconds, "the last metrics")
        self.metrics_log.write(within(self.run.store, deadline), seconds)

    def close(self) -> None:
        """Release the memory. None may begin; one in flight after an interrupt still completes."""
        self._closing = True
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        if not (self.busy or self._is_saving_savepoint):
            self._pool.close()


# -- what a save writes besides the state --------------------------------------------------------


class SaveSpec(NamedTuple):
    """The version to save, and its metadata. ``on_finished`` gets whether it was committed;
    ``deadline``: when the process leaves, in which case retention is left to the next;
    ``read_modes`` returns more metadata, at the time of the save."""

    version: Version
    reason: str
    metrics: Mapping[str, Any]
    note: Mapping[str, Any]
    training_metadata: Mapping[str, Any]
    on_finished: Callable[[bool], object] = no_op
    deadline: Deadline | None = None
    read_modes: Callable[[], dict[str, Any]] = dict


def version_of(snapshot: SnapshotReader) -> Version:
    """Return a snapshot's version, if possible by its folder's name: its manifest may be unread."""
    return parse_version(snapshot.location.folder) or snapshot.version
