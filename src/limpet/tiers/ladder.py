"""The restore ladder: what a training leaves out when it resumes. ``decide`` is the whole rule."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from math import isnan
from typing import Any

from msgspec import structs

from limpet import events
from limpet.deadline import Deadline
from limpet.errors import FormatError, NoProgress, Preempted, StoreError
from limpet.format.names import Version, parse_version, random_id, restart_name
from limpet.machine import utc_now
from limpet.notices.exit_status import GIVE_UP, SAVED, Status, leave_code, write_error
from limpet.ranks.group import Group
from limpet.run.lineage import lineage_folders
from limpet.run.metrics import to_numbers
from limpet.run.run import Run
from limpet.settings import status_folder
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.store import within
from limpet.text import format_list
from limpet.tiers.inventory import TierName, TierSnapshot
from limpet.tiers.restarts import Restart, delete_restarts, read_restarts, write_restart

PATIENCE = 3
"""The number of restarts without progress on each rung."""


class Rung(IntEnum):
    """What a resume leaves out. Each rung also leaves out what the ones before it do."""

    NEWEST = 0
    """Nothing: it loads the newest state."""

    DURABLE = 1
    """The snapshots in tiers."""

    OLDER = 2
    """The newest version of the run."""

    GIVE_UP = 3
    """Everything: the training must not run again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a training resumes, after the ``counted`` restarts without progress, as restart
    ``number`` of its rung. ``skipped`` is left behind, from now on if it ``goes_back``."""

    rung: Rung = Rung.NEWEST
    counted: Sequence[Restart] = ()
    number: int = 1
    skipped: Version | None = None
    goes_back: bool = False

    def goal(self, loaded_step: int) -> int:
        """Return the step that must be exceeded for progress. ``loaded_step``: -1 for none."""
        # Once the training has been moved back, it is the last step that it ever had: if it always
        # died at step 55, it would be moved back from 50 to 40, save 50 again, and so on forever.
        return max([loaded_step, *(r.goal for r in self.counted)]) if self.rung else loaded_step


def has_progress(restart: Restart, newest_step: int) -> bool:
    """Return True if a restart no longer counts. ``newest_step``: of the newest state, or -1."""
    return newest_step > restart.goal


def decide(
    restarts: Iterable[Restart],
    newest_step: int,
    versions: Sequence[Version],
    own: Restart | None = None,
) -> Plan:
    """Return how to resume. ``versions``: the newest two of the current lineage, newest first.

    ``own``: the record of this process, if it resumes again. It is no restart, but its rung stays.

    Three restarts on a rung without progress lead to the next one:

    1. ``DURABLE``, unless none of them has resumed from a tier: nothing would be different. One
       restart suffices if a metric was NaN soon after it had resumed from a tier.
    2. ``OLDER``, if there is a version before the newest one.
    3. ``GIVE_UP``.
    """
    counted = [r for r in restarts if not has_progress(r, newest_step)]
    counted.sort(key=lambda r: (r.rung, r.created))
    known = counted if own is None or has_progress(own, newest_step) else [*counted, own]
    rung = Rung(max((r.rung for r in known), default=Rung.NEWEST))
    on_rung = [r for r in counted if r.rung == rung]
    is_suspect = rung == Rung.NEWEST and any(r.has_nan and r.tier for r in on_rung)
    if len(on_rung) < PATIENCE and not is_suspect:
        left = [parse_version(r.skipped) for r in known if r.rung == rung and r.skipped]
        skipped = left[0] if left else None
        return Plan(rung, counted, number=1 + len(on_rung), skipped=skipped)
    if rung == Rung.NEWEST and any(r.tier is not None for r in on_rung):
        return Plan(Rung.DURABLE, counted)
    if rung < Rung.OLDER and len(versions) > 1:
        return Plan(Rung.OLDER, counted, skipped=versions[0], goes_back=True)
    return Plan(Rung.GIVE_UP, counted)


_MAX_LISTED = 9

NAN_STEPS = 20
"""The steps after a restore from a tier in which a metric that is NaN makes the tier suspect."""


class LadderExhausted(Exception):
    """There is nothing left to resume from. The text says so. Rank 0 sends it to the others."""


class Ladder:
    """Counts the restarts of a training under ``limpet run``, and decides what they leave out.

    Only rank 0 calls it, except ``give_up``: ``choose`` and ``check`` before a load, ``record``
    after it, ``end`` or ``leave``. Nothing counts outside ``limpet run``, or without ``saves``,
    where no progress would be visible. ``at=`` is the decision of a person, and deletes all
    records.
    """

    def __init__(self, run: Run, group: Group, *, saves: bool) -> None:
        self._run, self._group, self._has_saves = run, group, saves
        self._plan = Plan()
        self._is_requested = False
        self._key, self._pid = "", 0
        self.watched: Restart | None = None
        """The restart whose first metrics must be numbers: see ``observe``."""
        self._watched_until = -1
        self.leaves_newer = False
        """True if the newest snapshot in a tier is left out, which is newer than all versions."""

        self.left_out: str | None = None
        """What is left out, and why."""

    @property
    def _is_active(self) -> bool:
        return self._has_saves and not self._is_requested and status_folder() is not None

    @property
    def branch_reason(self) -> str:
        """The reason for a branch that begins where the ladder goes back; otherwise empty."""
        is_reason = self.leaves_newer or self._plan.rung == Rung.OLDER
        return "restarts without progress" if is_reason else ""

    # -- resuming ----------------------------------------------------------------------------------

    def choose(
        self, found: Sequence[TierSnapshot], *, is_requested: bool
    ) -> Sequence[TierSnapshot]:
        """Return the snapshots that may be loaded: all that were ``found``, or none.
        ``is_requested``: a person has named what to resume from. Raises ``LadderExhausted``."""
        self._plan, self._is_requested = Plan(), is_requested
        self.leaves_newer, self.left_out = False, None
        if not self._is_active:
            return found
        try:
            restarts = read_restarts(self._run.store)
        except StoreError as e:  # the ladder must not keep a training from resuming
            self._report(f"The restarts without progress cannot be counted: {e}")
            return found
        if not restarts:
            return found
        listing, catalog = self._run.listing(), self._run.catalog
        lineage = lineage_folders(catalog, listing)
        versions = [*islice(filter(listing.exists, reversed(lineage)), 2)]
        branch, durable_step = self._run.branch(listing), versions[0].step if versions else -1
        in_tiers = [c.version.step for c in found if c.is_whole and c.version.branch == branch]
        newest_step = max([durable_step, *in_tiers])
        void = [key for key, r in restarts.items() if has_progress(r, newest_step)]
        delete_restarts(self._run.store, void)
        own = restarts.pop(self._key, None)
        self._plan = plan = decide(restarts.values(), newest_step, versions, own)
        if plan.rung == Rung.GIVE_UP:
            raise LadderExhausted(self._describe_end())
        if plan.rung == Rung.NEWEST:
            return found
        self.leaves_newer = newest_step > durable_step
        self.left_out = self._describe_rung()
        return []

    def check(self, version: Version) -> None:
        """Raise ``FormatError``, as a damaged version would, for one that is left behind."""
        if version == self._plan.skipped:
            raise FormatError(f"{PATIENCE} restarts made no progress")

    def give_up_without_older(self) -> None:
        """Raise ``LadderExhausted`` if the run has no intact version because one is left behind."""
        if self._plan.skipped is not None:
            raise LadderExhausted(self._describe_end())

    def record(self, snapshot: SnapshotReader | None, tier: TierName | None = None) -> None:
        """Record what this restart has loaded (None: the run is empty), before the training goes
        back on a branch. Raises ``StoreError`` only if it would go back again at every restart."""
        store = self._run.store
        if self._is_requested:
            self._forget_all()
        if not self._is_active:
            return
        plan, version = self._plan, None if snapshot is None else snapshot.version
        restart = Restart(
            rung=plan.rung,
            goal=plan.goal(-1 if version is None else version.step),
            version=None if version is None else str(version),
            digest=None if snapshot is None else snapshot.digest,
            tier=tier,
            skipped=None if plan.skipped is None else str(plan.skipped),
            created=utc_now(),
        )
        earlier, self._key = self._key, restart_name(plan.rung, random_id())
        self._pid, self.watched = os.getpid(), None
        if tier is not None and version is not None:
            self.watched, self._watched_until = restart, version.step + NAN_STEPS
        try:
            write_restart(store, self._key, restart)
        except StoreError as e:
            if plan.goes_back:
                raise
            self._report(f"If this restart makes no progress, it is not counted: {e}")
        delete_restarts(store, [earlier] if earlier else [])

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note if a metric is NaN in one of the first steps after a restore from a tier: the next
        restart then leaves the tiers out. A state after a later step is progress as usual."""
        watched = self.watched
        if watched is None or step > self._watched_until or not self._key:
            return
        if any(isnan(number) for number in to_numbers(metrics).values()):
            self.watched, earlier = None, self._key
            self._key = restart_name(watched.rung, random_id())
            suspect = structs.replace(watched, goal=max(watched.goal, step), has_nan=True)
            try:
                write_restart(self._run.store, self._key, suspect)
            except StoreError as e:
                write_error(f"that a metric was NaN after a restore is not recorded: {e}")
            delete_restarts(self._run.store, [earlier])

    def _forget_all(self) -> None:
        try:
            delete_restarts(self._run.store, read_restarts(self._run.store))
        except StoreError as e:
            self._report(f"The records of earlier restarts are not deleted: {e}")

    def _report(self, message: str) -> None:
        events.emit("restarts_uncounted", run=self._run.url, error=message)

    # -- the end -----------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """Remove the record of this restart if ``error``, which ended the training, is None or the
        decision of a person: an interrupt, or an exit with code 0 that is not Limpet's own."""
        is_good = error is None or isinstance(error, KeyboardInterrupt)
        if isinstance(error, SystemExit) and not isinstance(error, Preempted | NoProgress):
            is_good = not error.code
        if self._key and self._pid == os.getpid() and is_good:
            self._remove(None)

    def leave(self, code: int, problem: object, deadline: Deadline) -> None:
        """Remove the record of this restart if it leaves with ``SAVED`` and no ``problem``."""
        # After the failure of a rank, torchrun stops the others, for which that looks like a
        # preemption. Their last step may be the one that they resumed from.
        if self._key and code == SAVED and problem is None:
            self._remove(deadline)

    def _remove(self, deadline: Deadline | None) -> None:
        key, self._key = self._key, ""
        store = self._run.store if deadline is None else within(self._run.store, deadline)
        try:
            store.delete(key)
        except StoreError as e:
            # a warning could be an error, and keep the process from leaving in time
            write_error(f"{key} was not deleted, so this restart may count as failed: {e}")

    def give_up(self, reason: str) -> NoProgress:
        """Leave the status of a training that must not run again; return the exception to raise."""
        if self._group.rank == 0:
            write_error(reason)
        status = Status(GIVE_UP, self._group.rank, run=self._run.url, why=reason)
        return NoProgress(leave_code(status), reason)

    # -- messages ----------------------------------------------------------------------------------

    def _describe_rung(self) -> str:
        plan = self._plan
        count = f"This is restart {plan.number} of {PATIENCE} on this rung of the restore ladder"
        left = plan.skipped
        if left is None:
            return (
                f"{self._describe_restarts()} The snapshots in tiers are left out. Training resumes"
                f" from the run itself. {count}; then it goes back one version"
            )
        return (
            f"{self._describe_restarts()} Training has left {left} behind, and continues from the"
            f" version before it, on a new branch. {count}; then it exits with code 93. To return"
            f' to {left}, call resume(at="{left.step}.{left.branch}") once'
        )

    def _describe_end(self) -> str:
        return (
            f"{self._describe_restarts()} The training has resumed from all states that a restart"
            " tries, so it must not be run again as it is. Find the cause in the logs of these"
            f" restarts. Then delete the files restart-*.json in {self._run.url}, or call"
            " resume(at=STEP) once, and run it again"
        )

    def _describe_restarts(self) -> str:
        counted = self._plan.counted
        last = max(r.goal for r in counted)
        beyond = f"beyond step {last}" if last >= 0 else "at all"
        restarts = format_list([str(r) for r in counted[-_MAX_LISTED:]], _MAX_LISTED, "; ")
        return f"{len(counted)} restarts have made no progress {beyond}: {restarts}."
