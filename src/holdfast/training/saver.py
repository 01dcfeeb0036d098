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
from holdfast.buffers import Pool
from holdfast.engine.distributed.error_report import in_full
from holdfast.engine.distributed.group import Group, by_all, by_first, current_group
from holdfast.engine.saving.job import Draft, Label
from holdfast.engine.saving.overlap import Rest, pin_memory
from holdfast.engine.saving.pending import Pending
from holdfast.engine.saving.save import begin, finish, in_background
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.state.flatten import Flat, flatten
from holdfast.engine.state.savepoint import Boundary
from holdfast.engine.state.step_hooks import Guard
from holdfast.engine.state.walk import optimizers_in
from holdfast.errors import AlreadyExists, HoldfastError
from holdfast.format.manifest import Parent
from holdfast.format.names import Version, parse_version
from holdfast.run.metrics import plain
from holdfast.run.policy import KeepPolicy
from holdfast.run.run import Run
from holdfast.run.writer_lock import Writer
from holdfast.training.early_stop import Stopping
from holdfast.training.goodput import Tally

ENOUGH = 3
"""Saves after which a metric that no version has is worth a warning."""


SAVED = "saved"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be saved: as which version, why, and what its manifest says beside the state.
    ``ended`` is told whether it was committed."""

    version: Version
    reason: str
    metrics: Mapping[str, Any]
    note: Mapping[str, Any]
    training: Mapping[str, Any]
    ended: Callable[[bool], None] = lambda committed: None


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
        tally: Tally,
        writer: Writer,
        stopping: Stopping,
        full_every: int | None,
        overlap: bool,
    ) -> None:
        self.run = run
        self.newest: Snapshot | None = None
        self._keep = keep
        self._tally = tally
        self._writer = writer
        self._stopping = stopping
        self._full_every = full_every
        self._overlap = overlap
        self._guard: Guard | None = None
        self._pool = Pool(1 << 50, prepare=pin_memory if overlap else None)
        self._room: Thread | None = None
        self._reserving: Thread | None = None
        self._attempt = ""
        self._pending: Pending | None = None
        self._rest: Rest | None = None
        self._waited = 0.0
        self._cost = [0.0]
        self._closing = False
        self._process = os.getpid()
        self._late: Exception | None = None
        self._looked = False
        self.advice: str | None = None
        """What the training should be told at its next step, or at the end."""

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None and not self._pending.done

    @property
    def saved_step(self) -> int:
        """The step of ``newest``; 0 if there is none."""
        return 0 if self.newest is None else _version(self.newest).step

    def measure(self, state: Any, group: Group) -> None:
        """See how much room ``state`` will need, if the ranks share what all of them have. Raises
        what is wrong with it."""
        nbytes = 2 * self._pool.unit
        for leaf in flatten(state, group.rank).leaves:
            shared = leaf.box.sizes == leaf.shape
            nbytes += int(leaf.source.nbytes) // (group.size if shared else 1)
        self._room = Thread(target=self._pool.reserve, args=(nbytes,), name="holdfast-room")

    def make_room(self) -> None:
        """Make the buffers while no save is due yet, on a thread: to touch new memory takes ten
        times as long as to copy into it. A save at the very first step makes them itself: beside a
        thread that does the same it would take longer."""
        room, self._room = self._room, None
        if room is not None:
            with suppress(RuntimeError):  # no thread can be had: the first save makes them
                room.start()
                self._reserving = room

    def settle(self, step: int, group: Group) -> None:
        """Wait for the save in flight, since that of ``step`` is due. Raises what made it fail."""
        was_busy, began = self.busy, time.perf_counter()
        try:
            self.rest(group)
        finally:
            if was_busy:
                self._waited = time.perf_counter() - began
                self._tally.seconds["waited"] += self._waited
                events.emit("save_waited", run=self.run.url, step=step, seconds=self._waited)

    def start(self, state: Any, order: Order) -> None:
        """Begin to save ``state``; it may be changed when this returns. No other save is in flight:
        see ``settle``. Raises what is wrong so far."""
        waited, self._waited = self._waited, 0.0
        try:
            self._begin(state, order, time.perf_counter() - waited)
        except BaseException as e:
            self._failed(order, e)
            raise

    def _begin(self, state: Any, order: Order, began: float) -> None:
        place, label, base = self.run.place(order.version), self._label(order), self._base()
        beside = self._overlap and not isinstance(state, Flat)
        if beside and self._guard is None and optimizers_in(state):
            self._guard = Guard(None, self._wait_staged)  # whichever: wrappers hold others
        try:
            draft = begin(place, state, label, self._pool, ahead=True, base=base, beside=beside)
        except AlreadyExists as e:
            there = self._there(order.version)
            if there.manifest.attempt != self._attempt:
                raise HoldfastError(
                    f"Another training has saved {order.version} of {self.run.url}",
                    todo="Look for a second job that writes to the same run; end one of them, and"
                    " start the other again",
                ) from e
            self.newest = there  # our own: an error had left it unknown whether it was committed
            order.ended(True)
            return
        self._attempt = draft.attempt
        self._rest = draft.rest  # before a thread reads it: an optimizer may step at any moment
        self._cost = cost = [time.perf_counter() - began]
        self._tally.seconds["last_blocked"] = cost[0]
        known = Event()
        try:
            self._pending = in_background(draft, lambda d: self._finish(d, order, cost, known))
        finally:
            known.set()

    def _there(self, version: Version) -> Snapshot:
        """What has been committed as that version, on all ranks or on none."""
        found: list[Snapshot] = []

        def look() -> None:
            found.append(self.run.open(version))

        by_first(current_group(), f"a look at {version}", lambda: True, bool, each=look)
        return found[0]

    def _label(self, order: Order) -> Label:
        parent = self.newest
        return Label(
            step=order.version.step,
            branch=order.version.branch,
            parent=None if parent is None else Parent(parent.place.folder, parent.digest),
            reason=order.reason,
            metrics=plain(order.metrics),
            note=order.note,
            training={**order.training, **self._tally.note()},
        )

    def rescue(self, boundary: Boundary, order: Order, group: Group, told: list[str]) -> None:
        """Save the state of the last boundary after an error has ended the training, if all ranks
        have it still; ``told`` gets what hinders it. Raises what makes the save fail."""
        earlier = None
        try:
            self.wait()
        except Exception as e:  # noqa: BLE001  (this save may succeed where that one failed)
            earlier = e
        there = self.newest is not None and _version(self.newest) == order.version
        state = None if there else boundary.state_at_boundary()
        mine = SAVED if there else "" if state is not None else str(boundary.gone)
        gone = by_all(group, "the state before an exception", lambda: mine, str, _gone, str)
        if gone and gone != SAVED:
            told.append(f"the state after step {order.version.step} was not saved: {gone}")
            if earlier is not None:
                raise earlier
        elif earlier is not None:
            told.append(f"an earlier save failed: {in_full(earlier)}")
        if state is not None and not gone:
            self.start(state, order)
            self.wait()

    def _wait_staged(self) -> None:
        rest = self._rest
        if rest is not None and not rest.done.is_set() and self._process == os.getpid():
            began = time.perf_counter()
            rest.done.wait()
            waited = time.perf_counter() - began
            self._cost[0] += waited
            self._tally.blocked(waited)

    def _base(self) -> Snapshot | None:
        """The version whose chunks the next one may refer to; of several ranks rank 0 says so."""
        base = None if self._full_every == 1 else self.newest
        if base is None or self._full_every is None or current_group().rank:
            return base
        # the first of so many is full, the others are its chain
        return base if base.chain + 1 < self._full_every else None

    def _finish(self, draft: Draft, order: Order, cost: list[float], known: Event) -> Snapshot:
        """The background half: commit, then delete what is not to be kept."""
        began = time.perf_counter()
        known.wait()  # who hears of the save may ask for it
        try:
            snapshot = finish(draft, self._writer.check)
        except BaseException as e:
            self._failed(order, e)
            raise
        finally:
            if self._closing:
                self._pool.close()
        tally = self._tally
        tally.counts["saves"] += 1
        outcome = draft.outcome
        tally.counts["bytes"] += outcome.nbytes
        tally.counts["referred_bytes"] += outcome.referred
        tally.committed(draft.label.training["trained_seconds"])
        order.ended(True)
        try:
            if draft.meeting.rank == 0:  # who has committed it
                self._tell_structure(snapshot)
                if tally.counts["saves"] == ENOUGH:
                    self.look_for_metrics()
                self.run.retain(self._keep)
        except HoldfastError as e:
            more = f"{order.version} is saved: it is old versions that could not be deleted"
            self._late = e.told(more, committed=str(order.version))
        except Exception as e:  # noqa: BLE001  (the save is committed; this is raised at the next call)
            self._late = e
        seconds = time.perf_counter() - began
        tally.seconds["background"] += seconds
        events.emit(
            "saved",
            run=self.run.url,
            version=str(order.version),
            step=order.version.step,
            reason=order.reason,
            bytes=outcome.nbytes,
            referred=outcome.referred,
            blocked=cost[0],
            seconds=seconds,
            metrics=dict(draft.label.metrics),
        )
        return snapshot

    def _tell_structure(self, snapshot: Snapshot) -> None:
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

    def look_for_metrics(self) -> None:
        """Once, after some saves or at the end: a policy that waits for a metric which never comes
        keeps nothing, and whoever misspelt its name should not find that out when the best is
        wanted."""
        looked, self._looked = self._looked, True
        wanted, awaited = self._keep.metrics, self._stopping.awaited
        if looked or not self._tally.counts["saves"] or not (wanted or awaited):
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
        self.advice = ". ".join(advice) or None

    def _failed(self, order: Order, error: BaseException) -> None:
        order.ended(False)
        self._tally.counts["failures"] += 1
        events.emit("save_failed", run=self.run.url, step=order.version.step, error=error)

    def rest(self, group: Group) -> Snapshot | None:
        """As ``wait``, on all ranks together: where one raises, all do, so that none goes on to
        what the others do not come to."""
        by_first(group, f"the end of a save to {self.run.url}", lambda: True, bool, each=self.wait)
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
        if self._late is not None:
            error, self._late = self._late, None
            raise error
        return self.newest

    def add_metrics(self, newest: Snapshot, more: Mapping[str, Any], group: Group) -> None:
        """Add rank 0's ``more`` to the version; of all ranks all raise what fails."""

        def add() -> bool:
            if more:
                self.run.add_metrics(newest, more)
            return True

        by_first(group, f"adding metrics to {newest.url}", add, bool)

    def resumed(self, snapshot: Snapshot) -> None:
        """Go on from a version."""
        self.newest = snapshot
        self._attempt = ""

    def look(self) -> None:
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
        if self._reserving is not None:
            self._reserving.join()


def _gone(told: list[str]) -> str:
    """Why the state before an exception cannot be saved, if so: that it is, as rank 0 knows, or
    that a rank has it no more."""
    lacking = [rank for rank, why in enumerate(told) if why not in ("", SAVED)]
    if told[0] == SAVED or not lacking:
        return told[0]
    return told[lacking[0]] + (f" (on rank {lacking[0]})" if len(told) > 1 else "")


def _version(snapshot: Snapshot) -> Version:
    """The version by its folder's name: the manifest, which another rank may have written, need not
    be read for it."""
    version = parse_version(snapshot.place.folder)
    return snapshot.version if version is None else version
