"""The saves of one training: one in flight at a time, and after each the retention."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from holdfast import events
from holdfast.buffers import BufferPool
from holdfast.engine.distributed.error_report import format_with_notes
from holdfast.engine.distributed.group import Group, all_reduce, broadcast_from_first, current_group
from holdfast.engine.saving.job import SaveJob, VersionMetadata
from holdfast.engine.saving.overlap import DeferredStaging, pin_memory
from holdfast.engine.saving.pending import Pending
from holdfast.engine.saving.save import begin_save, finish_in_background, finish_save
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.state.flatten import FlatState, flatten
from holdfast.engine.state.savepoint import Savepoint
from holdfast.engine.state.step_hooks import StepPreHook
from holdfast.engine.state.walk import optimizers_in
from holdfast.errors import AlreadyExists, HoldfastError
from holdfast.format.manifest import Parent
from holdfast.format.names import Version, parse_version
from holdfast.run.metrics import to_numbers
from holdfast.run.policy import KeepPolicy
from holdfast.run.run import Run
from holdfast.run.writer_lock import WriterLock
from holdfast.training.early_stop import EarlyStop
from holdfast.training.goodput import Goodput

METRIC_CHECK_AFTER = 3
"""Saves after which a metric that no version has is worth a warning."""


ALREADY_SAVED = "saved"


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """What is to be saved: as which version, why, and what its manifest says beside the state.
    ``ended`` is told whether it was committed."""

    version: Version
    reason: str
    metrics: Mapping[str, Any]
    note: Mapping[str, Any]
    training_metadata: Mapping[str, Any]
    on_finished: Callable[[bool], None] = lambda committed: None


class Saver:
    """Saves states into a run, each in the background, and keeps what is to be kept.

    ``writer`` is asked before every commit whether this is still the training that writes, and
    ``stopping`` whether it still waits for its metric.

    ``newest`` is the version that was saved or resumed last; the next one names it as its parent,
    and refers to its chunks, but for every ``full_every``-th version (None: never a full one). With
    ``overlap`` parameters and slots are copied beside the next step, until an optimizer steps.
    """

    def __init__(
        self,
        run: Run,
        keep: KeepPolicy,
        goodput: Goodput,
        writer_lock: WriterLock,
        early_stop: EarlyStop,
        full_every: int | None,
        overlap: bool,
    ) -> None:
        self.run = run
        self.newest: Snapshot | None = None
        self._keep = keep
        self._goodput = goodput
        self._writer_lock = writer_lock
        self._early_stop = early_stop
        self._full_every = full_every
        self._overlap = overlap
        self._guard: StepPreHook | None = None
        self._pool = BufferPool(1 << 50, on_create=pin_memory if overlap else None)
        self._unstarted_reservation: Thread | None = None
        self._reservation: Thread | None = None
        self._attempt = ""
        self._pending: Pending | None = None
        self._deferred_staging: DeferredStaging | None = None
        self._waited_seconds = 0.0
        self._blocked_seconds = [0.0]
        self._closing = False
        self._pid = os.getpid()
        self._post_commit_error: Exception | None = None
        self._metrics_checked = False
        self.metric_warning: str | None = None
        """What the training should be told at its next step, or at the end."""

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None and not self._pending.done

    @property
    def saved_step(self) -> int:
        """The step of ``newest``; 0 if there is none."""
        return 0 if self.newest is None else _version_of(self.newest).step

    def prepare_reservation(self, state: Any, group: Group) -> None:
        """See how much room ``state`` will need, if the ranks share what all of them have. Raises
        what is wrong with it."""
        nbytes = 2 * self._pool.buffer_size
        for leaf in flatten(state, group.rank).leaves:
            shared = leaf.box.sizes == leaf.shape
            nbytes += int(leaf.source.nbytes) // (group.size if shared else 1)
        self._unstarted_reservation = Thread(
            target=self._pool.preallocate, args=(nbytes,), name="holdfast-room"
        )

    def reserve_buffers(self) -> None:
        """Make the buffers while no save is due yet, on a thread: to touch new memory takes ten
        times as long as to copy into it. A save at the very first step makes them itself: beside a
        thread that does the same it would take longer."""
        room, self._unstarted_reservation = self._unstarted_reservation, None
        if room is not None:
            with suppress(RuntimeError):  # no thread can be had: the first save makes them
                room.start()
                self._reservation = room

    def wait_before_save(self, step: int, group: Group) -> None:
        """Wait for the save in flight, since that of ``step`` is due. Raises what made it fail."""
        was_busy, began = self.busy, time.perf_counter()
        try:
            self.wait_on_all_ranks(group)
        finally:
            if was_busy:
                self._waited_seconds = time.perf_counter() - began
                self._goodput.seconds["waited"] += self._waited_seconds
                events.emit(
                    "save_waited", run=self.run.url, step=step, seconds=self._waited_seconds
                )

    def start(self, state: Any, spec: SaveSpec) -> None:
        """Begin to save ``state``; it may be changed when this returns. No other save is in flight:
        see ``settle``. Raises what is wrong so far."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        try:
            self._begin_save(state, spec, time.perf_counter() - waited)
        except BaseException as e:
            self._record_failure(spec, e)
            raise

    def _begin_save(self, state: Any, spec: SaveSpec, began: float) -> None:
        place, label, base = (
            self.run.location(spec.version),
            self._make_metadata(spec),
            self._choose_base(),
        )
        beside = self._overlap and not isinstance(state, FlatState)
        if beside and self._guard is None and optimizers_in(state):
            self._guard = StepPreHook(None, self._wait_staged)  # whichever: wrappers hold others
        try:
            draft = begin_save(
                place, state, label, self._pool, stage_now=True, base=base, overlap=beside
            )
        except AlreadyExists as e:
            there = self._open_committed(spec.version)
            if there.manifest.attempt != self._attempt:
                raise HoldfastError(
                    f"Another training has saved {spec.version} of {self.run.url}",
                    todo="Look for a second job that writes to the same run; end one of them, and"
                    " start the other again",
                ) from e
            self.newest = there  # our own: an error had left it unknown whether it was committed
            spec.on_finished(True)
            return
        self._attempt = draft.attempt
        self._deferred_staging = (
            draft.deferred
        )  # before a thread reads it: an optimizer may step at any moment
        self._blocked_seconds = cost = [time.perf_counter() - began]
        self._goodput.seconds["last_blocked"] = cost[0]
        known = Event()
        try:
            self._pending = finish_in_background(
                draft, lambda d: self._finish_save(d, spec, cost, known)
            )
        finally:
            known.set()

    def _open_committed(self, version: Version) -> Snapshot:
        """What has been committed as that version, on all ranks or on none."""
        found: list[Snapshot] = []

        def look() -> None:
            found.append(self.run.open(version))

        broadcast_from_first(
            current_group(), f"a look at {version}", lambda: True, bool, on_each=look
        )
        return found[0]

    def _make_metadata(self, spec: SaveSpec) -> VersionMetadata:
        parent = self.newest
        return VersionMetadata(
            step=spec.version.step,
            branch=spec.version.branch,
            parent=None if parent is None else Parent(parent.location.folder, parent.digest),
            reason=spec.reason,
            metrics=to_numbers(spec.metrics),
            note=spec.note,
            training={**spec.training_metadata, **self._goodput.to_metadata()},
        )

    def save_after_exception(
        self, savepoint: Savepoint, spec: SaveSpec, group: Group, problems: list[str]
    ) -> None:
        """Save the state of the last boundary after an error has ended the training, if all ranks
        have it still; ``told`` gets what hinders it. Raises what makes the save fail."""
        earlier = None
        try:
            self.wait()
        except Exception as e:  # noqa: BLE001  (this save may succeed where that one failed)
            earlier = e
        there = self.newest is not None and _version_of(self.newest) == spec.version
        state = None if there else savepoint.flatten_captured()
        mine = (
            ALREADY_SAVED if there else "" if state is not None else str(savepoint.invalid_reason)
        )
        gone = all_reduce(
            group, "the state before an exception", lambda: mine, str, _first_reason, str
        )
        if gone and gone != ALREADY_SAVED:
            problems.append(f"the state after step {spec.version.step} was not saved: {gone}")
            if earlier is not None:
                raise earlier
        elif earlier is not None:
            problems.append(f"an earlier save failed: {format_with_notes(earlier)}")
        if state is not None and not gone:
            self.start(state, spec)
            self.wait()

    def _wait_staged(self) -> None:
        rest = self._deferred_staging
        if rest is not None and not rest.done.is_set() and self._pid == os.getpid():
            began = time.perf_counter()
            rest.done.wait()
            waited = time.perf_counter() - began
            self._blocked_seconds[0] += waited
            self._goodput.add_blocked(waited)

    def _choose_base(self) -> Snapshot | None:
        """The version whose chunks the next one may refer to; of several ranks rank 0 says so."""
        base = None if self._full_every == 1 else self.newest
        if base is None or self._full_every is None or current_group().rank:
            return base
        # the first of so many is full, the others are its chain
        return base if base.chain + 1 < self._full_every else None

    def _finish_save(
        self, job: SaveJob, spec: SaveSpec, blocked_seconds: list[float], pending_set: Event
    ) -> Snapshot:
        """The background half: commit, then delete what is not to be kept."""
        began = time.perf_counter()
        pending_set.wait()  # who hears of the save may ask for it
        try:
            snapshot = finish_save(job, self._writer_lock.check)
        except BaseException as e:
            self._record_failure(spec, e)
            raise
        finally:
            if self._closing:
                self._pool.close()
        tally = self._goodput
        tally.counts["saves"] += 1
        outcome = job.result
        tally.counts["bytes"] += outcome.nbytes
        tally.counts["referred_bytes"] += outcome.referred_bytes
        tally.mark_committed(job.metadata.training["trained_seconds"])
        spec.on_finished(True)
        try:
            if job.collective.rank == 0:  # who has committed it
                self._emit_structure_change(snapshot)
                if tally.counts["saves"] == METRIC_CHECK_AFTER:
                    self.check_metrics_given()
                self.run.retain(self._keep)
        except HoldfastError as e:
            more = f"{spec.version} is saved: it is old versions that could not be deleted"
            self._post_commit_error = e.with_advice(more, committed=str(spec.version))
        except Exception as e:  # noqa: BLE001  (the save is committed; this is raised at the next call)
            self._post_commit_error = e
        seconds = time.perf_counter() - began
        tally.seconds["background"] += seconds
        events.emit(
            "saved",
            run=self.run.url,
            version=str(spec.version),
            step=spec.version.step,
            reason=spec.reason,
            bytes=outcome.nbytes,
            referred=outcome.referred_bytes,
            blocked=blocked_seconds[0],
            seconds=seconds,
            metrics=dict(job.metadata.metrics),
        )
        return snapshot

    def _emit_structure_change(self, snapshot: Snapshot) -> None:
        """A state of another structure than before is nothing wrong (an optimizer makes its slots
        at its first step, a layer is thawed), but who wonders about it later should find it."""
        was, now = {} if self.newest is None else self.newest.leaves, snapshot.leaves
        if not was or was == now:
            return
        events.emit(
            "structure_changed",
            run=self.run.url,
            version=str(snapshot.version),
            added=sorted(now.keys() - was.keys()),
            removed=sorted(was.keys() - now.keys()),
            changed=sorted(k for k in now.keys() & was.keys() if now[k] != was[k]),
        )

    def check_metrics_given(self) -> None:
        """Once, after some saves or at the end: a policy that waits for a metric which never comes
        keeps nothing, and whoever misspelt its name should not find that out when the best is
        wanted."""
        looked, self._metrics_checked = self._metrics_checked, True
        wanted, awaited = self._keep.metrics, self._early_stop.awaited_metric
        if looked or not self._goodput.counts["saves"] or not (wanted or awaited):
            return
        try:
            given = {name for record in self.run.records() for name in record.metrics}
        except HoldfastError:
            return  # the store is in trouble, which retention tells
        missing, advice = sorted(wanted - given), []
        if missing:
            there = ", ".join(sorted(given)) or "no metrics"
            advice.append(
                f"None of the versions of {self.run.url} has {' or '.join(missing)}, by which"
                f" a policy keeps them; they have {there}. Give it to step(), or add it by"
                " Run.add_metrics; until then none is the best"
            )
        if awaited is not None:
            advice.append(
                f"No step of {self.run.url} was given {awaited}, which StopWhen waits for. Give it"
                " to step() or save(); until then nothing stops"
            )
        self.metric_warning = ". ".join(advice) or None

    def _record_failure(self, spec: SaveSpec, error: BaseException) -> None:
        spec.on_finished(False)
        self._goodput.counts["failures"] += 1
        events.emit("save_failed", run=self.run.url, step=spec.version.step, error=error)

    def wait_on_all_ranks(self, group: Group) -> Snapshot | None:
        """As ``wait``, on all ranks together: where one raises, all do, so that none goes on to
        what the others do not come to."""
        broadcast_from_first(
            group, f"the end of a save to {self.run.url}", lambda: True, bool, on_each=self.wait
        )
        return self.newest

    def wait(self) -> Snapshot | None:
        """Wait for the save in flight and return ``newest``. Raises what made the save fail."""
        pending = self._pending
        if pending is not None:
            try:
                self.newest = pending.wait()
            finally:  # whoever is interrupted here has still to wait for it
                if pending.done:
                    self._pending = None
        if self._post_commit_error is not None:
            error, self._post_commit_error = self._post_commit_error, None
            raise error
        return self.newest

    def add_metrics(self, snapshot: Snapshot, metrics: Mapping[str, Any], group: Group) -> None:
        """Add rank 0's ``more`` to the version; of all ranks all raise what fails."""

        def add() -> bool:
            if metrics:
                self.run.add_metrics(snapshot, metrics)
            return True

        broadcast_from_first(group, f"adding metrics to {snapshot.url}", add, bool)

    def resume_from(self, snapshot: Snapshot) -> None:
        """Go on from a version."""
        self.newest = snapshot
        self._attempt = ""

    def poll(self) -> None:
        """As ``wait``, but a save that goes on is left to itself."""
        if not self.busy:
            self.wait()

    def close(self) -> None:
        """Give the memory back; nothing is saved any more, but for the save in flight, should who
        waited for it have been interrupted."""
        self._closing = True
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        if not self.busy:
            self._pool.close()
        if self._reservation is not None:
            self._reservation.join()


def _first_reason(reasons: list[str]) -> str:
    """Why the state before an exception cannot be saved, if so: that it is, as rank 0 knows, or
    that a rank has it no more."""
    lacking = [rank for rank, why in enumerate(reasons) if why not in ("", ALREADY_SAVED)]
    if reasons[0] == ALREADY_SAVED or not lacking:
        return reasons[0]
    return reasons[lacking[0]] + (f" (on rank {lacking[0]})" if len(reasons) > 1 else "")


def _version_of(snapshot: Snapshot) -> Version:
    """The version by its folder's name: the manifest, which another rank may have written, need not
    be read for it."""
    version = parse_version(snapshot.location.folder)
    return snapshot.version if version is None else version
