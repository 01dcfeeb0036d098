"""The saves of one training: at most one is in flight, and retention follows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from limpet import events
from limpet.buffers import BufferPool, page_lock
from limpet.deadline import Deadline
from limpet.errors import (
    AlreadyExists,
    CommitError,
    FormatError,
    LimpetError,
    MetricMissing,
    RankFailed,
    SaveFailed,
    StoreError,
)
from limpet.format.names import Version, parse_lease, parse_version
from limpet.format.records import Evaluation, InexactEvaluation
from limpet.ranks.error_report import format_with_notes
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run.address import merge_objectives
from limpet.run.policy import KeepPolicy
from limpet.run.retention import undeleted_error
from limpet.run.run import Run
from limpet.run.writer import VersionWriter
from limpet.saving.commit import SaveJob, VersionMetadata
from limpet.saving.pending import Pending
from limpet.saving.save import begin_save, finish_in_background, finish_save
from limpet.saving.staging import BufferReservation, DeferredStaging
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.snapshot.snapshot import Snapshot, reader_of
from limpet.state.flatten import FlatState
from limpet.state.step_hooks import StepPreHook
from limpet.state.walk import optimizers_in
from limpet.storage.store import list_level
from limpet.text import warn_user
from limpet.tiers.local_snapshots import Promotion
from limpet.tiers.tiers import Tiers
from limpet.training.arguments import Options
from limpet.training.early_stop import EarlyStop
from limpet.training.goodput import Goodput
from limpet.training.step_savepoint import SavepointLabel


class Saver:
    """Saves states of a training in the background, through a ``VersionWriter``.

    With the option ``overlap``, parameters and slots are copied during the next step, and an
    optimizer's step waits for the copy. If the local tier is open, a save is complete on the local
    disks first, and is then promoted to the run.
    """

    def __init__(
        self,
        run: Run,
        tiers: Tiers,
        goodput: Goodput,
        checks: VersionChecks,
        options: Options,
    ) -> None:
        self.run, self.url = run, run.url
        self.begun_step = 0
        """The step of the last save that did not fail, even if it is still in flight."""

        self.group = tiers.group
        self.writer = VersionWriter(
            run.catalog,
            self.group,
            options.keep,
            incremental=options.incremental,
            timeout=options.save_timeout,
            before_deletion=checks.early_stop.before_deletion,
        )
        self.retention, self.writer_lock = self.writer.retention, self.writer.lock
        self._goodput = goodput
        self._overlap, self.on_error = options.overlap, options.on_error
        self._guard: StepPreHook | None = None
        self._pool = BufferPool(1 << 50, on_create=page_lock)
        self.reservation = BufferReservation(self._pool)
        self._tiers, self._local, self.can_flush = tiers, tiers.local, tiers.can_flush
        self.in_flight = goodput.saves = SavesInFlight(self.writer)
        self._deferred_staging: DeferredStaging | None = None
        self._waited_seconds, self._blocked_seconds = 0.0, [0.0]
        self._closing = self._is_saving_savepoint = False
        self.evaluated: dict[str, Any] = {}  # what a ``TrainingEvaluation`` stores in each version
        self._pid = os.getpid()
        self.checks = checks

    @property
    def newest(self) -> SnapshotReader | None:
        """The version that was saved or resumed last."""
        return self.writer.newest

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        return self.in_flight.busy

    @property
    def must_wait(self) -> bool:
        """True if the next save would have to wait for the one before."""
        return self.in_flight.must_wait

    @property
    def saved_step(self) -> int:
        """The step of ``newest``, or 0."""
        return 0 if self.newest is None else version_of(self.newest).step

    def attempt(self, call: Callable[[], object]) -> None:
        """Call ``call``; with ``on_error="warn"``, turn a store failure into a warning."""
        try:
            call()
        except (StoreError, CommitError) as e:
            if self.on_error == "raise" or not is_store_failure(e):
                raise
            warn_save_failed(e, self.saved_step)

    def wait_before_save(self, step: int) -> None:
        """Wait for the save in flight, because the save of ``step`` is due.

        Raises the error of the save in flight if it failed.
        """
        was_busy, began = self.must_wait, time.perf_counter()
        try:
            self.in_flight.wait_for_turn_on_all_ranks()
        finally:
            if was_busy:
                self._waited_seconds = time.perf_counter() - began
                self._goodput.seconds["waited"] += self._waited_seconds
                events.emit(
                    "save_waited", run=self.run.url, step=step, seconds=self._waited_seconds
                )

    def start(self, state: Any, spec: SaveSpec) -> None:
        """Begin to save ``state``, which may change when this method returns.

        No other save may be in flight (see ``wait_before_save``). Raises any error that occurs
        before the save continues in the background.
        """
        waited, self._waited_seconds = self._waited_seconds, 0.0
        try:
            # in the time before the process must leave, nothing is written twice
            is_local = self._local.is_open and spec.deadline is None
            self._begin_save(state, spec, time.perf_counter() - waited, is_local)
        except BaseException as e:
            self._record_failure(spec, e)
            raise

    def _begin_save(self, state: Any, spec: SaveSpec, began: float, is_local: bool) -> None:
        overlap = self._overlap and not isinstance(state, FlatState)
        if overlap and self._guard is None and optimizers_in(state):
            # a hook for all optimizers, because wrappers contain optimizers of their own
            self._guard = StepPreHook(None, self._wait_staged)
        location = self.writer.locate(spec.version, spec.deadline)
        previous, promotion, first = self.in_flight.newest, None, location
        if is_local:
            first = self._local.location(location)
            promotion = self._local.begin_promotion(location, previous)
        try:
            metadata = self.make_metadata(spec)
            job = self.writer.begin(
                first, state, metadata, self._pool, stage_now=True, overlap=overlap
            )
        except BaseException as e:
            if promotion is not None:
                promotion.collective.close()
            if not (is_local and isinstance(e, AlreadyExists)):
                raise
            self._begin_save(state, spec, began, is_local=False)  # its promotion has failed
            return
        if isinstance(job, SnapshotReader):  # its save failed with an unknown outcome
            self.begun_step = spec.version.step
            spec.on_finished(True)
            return
        self._blocked_seconds = blocked_seconds = [time.perf_counter() - began]
        self._goodput.seconds["last_blocked"] = blocked_seconds[0]

        def register(pending: Pending | None) -> None:
            # before the thread starts: an optimizer may step, an event sink may use the save, and
            # an interrupt may occur at any moment
            self._deferred_staging = job.deferred
            if pending is not None:
                self.in_flight.add(pending, promotion)
                return
            self.in_flight.discard_after(previous)
            if promotion is not None:
                promotion.collective.close()

        def finish(job: SaveJob) -> SnapshotReader:
            return self._finish_save(job, spec, blocked_seconds, promotion)

        self.begun_step = spec.version.step
        finish_in_background(job, finish, register=register)

    def make_metadata(self, spec: SaveSpec) -> VersionMetadata:
        training = {**spec.training_metadata, **self.evaluated, **self._goodput.to_metadata()}
        if spec.reason == "memory" and self.begun_step == spec.version.step:
            training["saved_with"] = self.writer.attempt  # both are of this call of step()
        return self.writer.make_metadata(
            spec.version,
            spec.reason,
            spec.metrics,
            spec.note,
            training=training,
            objectives=self.checks.objectives,
        )

    def save_savepoint(
        self,
        flat: FlatState,
        label: SavepointLabel,
        deadline: Deadline,
        group: Group,
        end_staging: Callable[[], str | None],
    ) -> None:
        """Save the state of a savepoint in the calling thread. ``group``: all ranks.

        ``end_staging`` is called when the state is copied. It returns why the copy is not valid, or
        None. A save of the same version may be in flight: the first one to commit counts.
        """
        version, note, metrics, training_metadata = label
        location = self.run.location(version).limit("save", None, deadline)
        spec = SaveSpec(version, "preemption", metrics, note, training_metadata)
        metadata = self.make_metadata(spec)
        self._is_saving_savepoint = True
        try:
            job = begin_save(location, flat, metadata, self._pool, group=group, stage_now=True)
            if reason := end_staging():
                job.staging_error = CommitError(f"{version} was not saved: {reason}")
            snapshot = finish_save(job, lambda: self.writer_lock.check(location.store))
            self.writer.emit_saved(job, blocked=0.0, seconds=time.perf_counter() - job.started_at)
        except LimpetError as e:
            events.emit("save_failed", run=self.run.url, step=version.step, error=e)
            try:
                snapshot = open_location(location.for_cleanup())
            except (FormatError, StoreError):
                raise e from None
            snapshot.location = location.without_limit()
        finally:
            self._is_saving_savepoint = False
        self.writer.newest, self.begun_step = snapshot, version.step
        self._goodput.counts["saves"] += 1
        self._goodput.mark_committed(metadata.training["trained_seconds"])

    def start_tiers(self, state: Any) -> None:
        """Check the space for ``state``, delete what is not needed in the tiers, and promote what
        an earlier training has left on the local disks, in the background. All ranks call this."""
        self._tiers.start(state)
        promoting = self._tiers.promote_leftovers(self.run, self.writer_lock.check)
        if promoting is not None:
            self.in_flight.add(*promoting)

    def prepare_flush(self) -> None:
        """Prepare for a flush without rank 0, which holds the writer lock: remember the owner."""
        if self.group.rank:
            with suppress(LimpetError):
                self.writer_lock.observe()

    def flush_tiers(self, deadline: Deadline) -> None:
        """Save the newest snapshot of this host in a tier if it is newer than all versions."""
        newest = self._tiers.flush(self.run, deadline, self.writer_lock.check)
        if newest is not None:
            self.in_flight.take(newest)

    def _wait_staged(self) -> None:
        staging = self._deferred_staging
        if staging is not None and not staging.done.is_set() and self._pid == os.getpid():
            began = time.perf_counter()
            staging.done.wait()
            waited = time.perf_counter() - began
            self._blocked_seconds[0] += waited
            self._goodput.add_blocked(waited)

    def _finish_save(
        self,
        job: SaveJob,
        spec: SaveSpec,
        blocked_seconds: list[float],
        promotion: Promotion | None,
    ) -> SnapshotReader:
        """Finish a save in the background: commit it, and then apply retention."""
        began = time.perf_counter()
        try:
            if promotion is None:
                snapshot = self.writer.commit(job)
            else:
                snapshot = promotion.finish(job, self.writer_lock.check)
        except BaseException as e:
            self._record_failure(spec, e)
            raise
        finally:
            if self._closing:
                self._pool.close()
        result = job.result
        self._goodput.counts.update(
            saves=1, bytes=result.nbytes, referred_bytes=result.referred_bytes
        )
        self._goodput.mark_committed(job.metadata.training["trained_seconds"])
        self._goodput.save_durations.add(time.perf_counter() - job.started_at)
        spec.on_finished(True)
        try:
            if job.collective.rank == 0:  # the rank that committed the version
                emit_structure_change(self.run.url, self.newest, snapshot)
                if spec.deadline is None:
                    self.checks.early_stop.after_save(snapshot)
                    self.retention.after_save(snapshot)
        except LimpetError as e:
            self.in_flight.post_commit_error = undeleted_error(e, spec.version)
        except Exception as e:  # noqa: BLE001  (the save is committed: the next call raises this)
            self.in_flight.post_commit_error = e
        seconds = time.perf_counter() - began
        self._goodput.seconds["background"] += seconds
        self.writer.emit_saved(job, blocked=blocked_seconds[0], seconds=seconds)
        return snapshot

    def _record_failure(self, spec: SaveSpec, error: BaseException) -> None:
        spec.on_finished(False)
        if self.begun_step == spec.version.step:
            self.begun_step = self.saved_step
        self._goodput.counts["failures"] += 1
        events.emit("save_failed", run=self.run.url, step=spec.version.step, error=error)

    def wait_on_all_ranks(self, deadline: Deadline | None = None) -> SnapshotReader | None:
        """Wait as ``wait`` does. If one rank raises, all do."""
        self.in_flight.wait_on_all_ranks(deadline)
        return self.newest

    def wait(self, deadline: Deadline | None = None) -> SnapshotReader | None:
        """Wait for the saves in flight, and return ``newest``. Raises the error of one that failed,
        ``TimeoutError`` at the ``deadline``, and once the error of a retention that failed."""
        self.in_flight.wait(deadline)
        return self.newest

    def add_metrics(self, snapshot: SnapshotReader, metrics: Mapping[str, Any], name: str) -> None:
        """Add the metrics of rank 0 to a version. If that fails, all ranks raise."""

        def add() -> bool:
            if metrics:
                self.run.add_metrics(Snapshot(snapshot), metrics, name)
            return True

        broadcast_from_first(self.group, f"adding metrics to {snapshot.url}", add, bool)

    def resume_from(self, snapshot: SnapshotReader | None, sessions: Sequence[str] = ()) -> None:
        """Continue from the version ``newest``, and from the work of earlier ``sessions``."""
        self.writer.continue_from(snapshot, sessions)
        self.begun_step = self.saved_step

    def close(self) -> None:
        """Release the memory. No further save may begin.

        If an interrupt ended the wait for the save in flight, that save still completes and then
        releases the buffers.
        """
        self._closing = True
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        if not (self.busy or self._is_saving_savepoint):
            self._pool.close()
        self.reservation.join()


# -- the saves in flight -------------------------------------------------------------------------


class SavesInFlight:
    """At most one save that the next one must wait for, and those before it that are complete on a
    local disk and only have to be promoted to the run.

    A wait makes the version that was saved the ``newest`` one of the ``writer``. The training
    thread calls all methods; other threads may read the properties.
    """

    def __init__(self, writer: VersionWriter) -> None:
        self._writer, self._group = writer, writer.group
        self._operation = f"the end of a save to {writer.url}"
        self._saves: list[tuple[Pending, Promotion | None]] = []  # oldest first
        self._errors: list[Exception] = []
        self.post_commit_error: Exception | None = None
        """The error of what followed a commit. The next wait raises it, once."""

    def add(self, pending: Pending, promotion: Promotion | None) -> None:
        """Count a save. With a ``promotion``, the next save waits until that has begun. Otherwise,
        it waits until this one has ended."""
        self._saves.append((pending, promotion))

    def discard_after(self, previous: Pending | None) -> None:
        """Forget a save that was added after ``previous``: it will never begin."""
        if self.newest is not previous:
            self._saves.pop()

    @property
    def newest(self) -> Pending | None:
        return self._saves[-1][0] if self._saves else None

    @property
    def busy(self) -> bool:
        """True if a save is in flight."""
        return any(not pending.done for pending, _ in self._saves)

    @property
    def must_wait(self) -> bool:
        """True if the next save would have to wait."""
        return any(
            not (pending.done or (promotion is not None and promotion.has_begun.is_set()))
            for pending, promotion in self._saves
        )

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait for all saves. Raises the error of the first one that failed.

        With a ``deadline``, the process is about to leave, and only the newest save counts. Raises
        ``TimeoutError`` at the deadline.
        """
        if deadline is None:
            for pending, _ in list(self._saves):
                pending.wait_ended()
            self.raise_failure()
        elif self._saves:
            newest = self._saves[-1][0]
            self._end(newest, deadline.seconds_left)
            for pending, _ in self._saves:  # a promotion that fails later must not change the exit
                pending.forget()

    def wait_for_turn(self) -> None:
        """Wait until the next save may begin. Raises the error of the first one that failed."""
        for pending, promotion in list(self._saves):
            if promotion is None:
                pending.wait_ended()
            else:
                promotion.has_begun.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Take the results of the saves that have ended, without a wait. Raise the first error;
        later calls raise the others."""
        for pending, _ in list(self._saves):
            if pending.done:
                try:
                    self._end(pending, None)
                except Exception as e:  # noqa: BLE001  (raised below, in order)
                    self._errors.append(e)
        if self._errors:
            raise self._errors.pop(0)
        if self.post_commit_error is not None:
            error, self.post_commit_error = self.post_commit_error, None
            raise error

    def wait_on_all_ranks(self, deadline: Deadline | None = None) -> None:
        """Wait as ``wait`` does. If one rank raises, all do: none of them goes on to a collective
        operation that the others never reach."""
        wait = partial(self.wait, deadline)
        broadcast_from_first(self._group, self._operation, lambda: True, bool, wait, deadline)

    def wait_for_turn_on_all_ranks(self) -> None:
        """Wait as ``wait_for_turn`` does. If one rank raises, all do."""
        wait = self.wait_for_turn
        broadcast_from_first(self._group, self._operation, lambda: True, bool, wait)

    def take(self, snapshot: SnapshotReader) -> None:
        """Count the result of a save, unless it is older, or a local version that is damaged."""
        newest = self._writer.newest
        is_newer = newest is None or version_of(snapshot) >= version_of(newest)
        if is_newer and not snapshot.location.is_per_host:
            self._writer.newest = snapshot

    def wait_before_last(self, is_begun: bool, deadline: Deadline) -> None:
        """Wait on all ranks before the last save of a training. ``is_begun``: it is in flight.
        Otherwise, no promotion is awaited."""

        def wait() -> None:
            for pending, promotion in list(self._saves):
                has_ended = pending.wait_ended if promotion is None else promotion.is_local.wait
                if not has_ended(deadline.seconds_left):
                    raise TimeoutError(f"{self._operation} did not come in time")
            self.raise_failure()

        if is_begun:
            self.wait_on_all_ranks(deadline)
        else:
            broadcast_from_first(self._group, self._operation, lambda: True, bool, wait, deadline)

    def _end(self, pending: Pending, timeout: float | None) -> None:
        try:
            self.take(reader_of(pending.wait(timeout)))
        except BaseException as e:  # after an interrupt, or the timeout, the save still counts
            if e is pending.error:
                self._remove(pending)
            raise
        self._remove(pending)

    def _remove(self, pending: Pending) -> None:
        self._saves = [entry for entry in self._saves if entry[0] is not pending]


# -- what a save writes besides the state --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """The version to save, the reason, and the metadata for its manifest.

    ``on_finished`` is called with True if the save was committed, and with False if it failed.
    ``deadline`` is the time by which the process leaves. Retention is then left to the next one.
    """

    version: Version
    reason: str
    metrics: Mapping[str, Any]
    note: Mapping[str, Any]
    training_metadata: Mapping[str, Any]
    on_finished: Callable[[bool], None] = lambda committed: None
    deadline: Deadline | None = None


def version_of(snapshot: SnapshotReader) -> Version:
    """Return the version of a snapshot, from the name of its folder if possible.

    This avoids a read of the manifest, which another rank may have written.
    """
    return parse_version(snapshot.location.folder) or snapshot.version


# -- checks of saves and versions -----------------------------------------------------------------


def is_store_failure(error: StoreError | CommitError) -> bool:
    """Return True if a store or a commit failed, on this rank or on another one.

    Other failures of one rank also reach the other ranks as ``RankFailed``. For those, the result
    is False.
    """
    cause = error.__cause__ if isinstance(error, RankFailed) else None
    reported_by_rank = cause is not None and not error.fields.get("lost")
    return not reported_by_rank or isinstance(cause, StoreError | CommitError)


def warn_save_failed(error: LimpetError, last_saved_step: int) -> None:
    """Warn of a save that failed, or of a failure after the commit."""
    message = (
        "Old versions accumulate"
        if error.is_after_commit
        else f"NOTHING WAS SAVED; there is no version since step {last_saved_step}"
    )
    warn_user(f"{message}: {format_with_notes(error)}", SaveFailed)


class VersionChecks:
    """The check that warns at the end of the training, and early stopping.

    ``objectives``: the metrics of the policies, which each version records.
    """

    def __init__(self, run: Run, keep: KeepPolicy, early_stop: EarlyStop) -> None:
        self.early_stop = early_stop
        self.objectives = merge_objectives(keep.objectives | early_stop.objectives)
        self._run, self._needed = run, keep.metrics
        self.evaluated = set[str]()
        """The metrics that evaluations in this training have given, also about versions that are
        deleted since."""

    def warn_of_missing_metrics(self) -> None:
        """Warn, at the end of a training, of metrics that policies use and nothing has given."""
        awaited = self.early_stop.awaited_metric
        needed = self._needed.union(() if awaited is None else (awaited,)) - self.evaluated
        if needed and (message := find_missing_metrics(self._run, needed)):
            warn_user(message, MetricMissing)


def emit_structure_change(
    run_url: str, before: SnapshotReader | None, after: SnapshotReader
) -> None:
    """Emit ``structure_changed`` if the leaves of a version differ from those of the one before.

    A change is not an error: an optimizer creates its slots at its first step, or a layer is
    unfrozen. The event helps a person who investigates the change later.
    """
    old, new = {} if before is None else before.leaves, after.leaves
    if old and old != new:
        events.emit(
            "structure_changed",
            run=run_url,
            version=str(after.version),
            added=sorted(new.keys() - old.keys()),
            removed=sorted(old.keys() - new.keys()),
            changed=sorted(k for k in new.keys() & old.keys() if new[k] != old[k]),
        )


def find_missing_metrics(run: Run, needed: frozenset[str]) -> str:
    """Describe the ``needed`` metrics that nothing has given to a version; empty if there are none.

    An inexact evaluation gives its metrics, too. While an evaluation of the run is at work, or if
    the store cannot be read, nothing is concluded.
    """
    given = set[str]()
    try:
        for version, record in run.catalog.read_versions(run.listing()).items():
            evaluations = run.catalog.evaluations.read(version, record.digest)
            results = evaluations.of(Evaluation) + evaluations.of(InexactEvaluation)
            given.update(record.metrics, *(result.metrics for result in results))
        missing = needed - given
        if not missing or any(parse_lease(e.name) for e in list_level(run.store, "", "lease-")):
            return ""
    except LimpetError:
        return ""  # retention reports the failure of the store
    return (
        f"No version of {run.url} has {' or '.join(sorted(missing))}, which a policy uses; they"
        f" have {', '.join(sorted(given)) or 'no metrics'}. Pass it to step(), end_epoch(), or"
        " save(), or add it with Run.add_metrics. A metric of an epoch needs a version of its end"
        " (save=... | limpet.EveryEpoch())"
    )
