"""Writes the versions of a run: the lock, the parent, the commit, and retention of each version.

A ``Checkpointer`` saves through it in the background, other programs by ``Run.writer``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import msgspec

from limpet import events
from limpet.arguments import require, whole
from limpet.buffers import BufferPool, shared_pool
from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, FormatError, LimpetError, StoreError
from limpet.format.manifest import Parent
from limpet.format.names import MAX_STEP, Version, parse_version, random_id
from limpet.loading.snapshot import Snapshot, snapshot_of
from limpet.ranks.group import Group, broadcast_from_first
from limpet.run import lineage
from limpet.run.catalog import Catalog
from limpet.run.listing import STEP, to_int
from limpet.run.metrics import check_metrics, to_numbers
from limpet.run.policy import KeepPolicy
from limpet.run.retention import BeforeDeletion, Retention
from limpet.run.writer_lock import WriterLock
from limpet.saving.commit import SaveJob, VersionMetadata
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location
from limpet.snapshot.reader import SnapshotReader
from limpet.state.streamed import find_streamed
from limpet.storage.store import Store
from limpet.tracebacks import short_tracebacks

_MAX_SESSIONS = 256
"""The sessions that a version names. A backup that lacks as many restarts is refused."""


def check_incremental(value: object) -> None:
    """Raise ``LimpetError`` unless this is a valid ``incremental=``."""
    is_valid = type(value) is bool or whole(value, 1) is not None
    require("incremental=", is_valid, "True, False, or a number of versions, 1 or more", value)


class _Start(msgspec.Struct, frozen=True):
    """Where rank 0 lets all ranks continue: the newest version, or none, and the branch."""

    version: str = ""
    digest: str = ""
    branch: int = 0


@short_tracebacks
class VersionWriter(AbstractContextManager["VersionWriter"]):
    """Writes versions of a run, one at a time. All ranks of the group make the same calls.

    ``newest`` is the version that was saved or resumed last. The next version names it as its
    parent. With ``incremental=20``, it refers to the chunks of ``newest``, and the first of every
    20 versions is written in full; True means 20.
    ``lock`` is checked before every commit. A save of more than ``timeout`` seconds fails.
    """

    def __init__(
        self,
        catalog: Catalog,
        group: Group,
        keep: KeepPolicy,
        *,
        incremental: bool | int = False,
        timeout: float | None = None,
        before_deletion: BeforeDeletion = lambda *_: (),
    ) -> None:
        self.group = group
        self.url = catalog.store.url
        self.lock = WriterLock(catalog.store)
        self.retention = Retention(catalog, keep, before_deletion)
        self.newest: SnapshotReader | None = None
        self.attempt = ""
        """The attempt of the last save; empty if there is none since the last resume."""
        self._catalog = catalog
        self._digests: dict[Version, str] = {}  # of versions to which others refer
        self._full_every = 20 if incremental is True else int(incremental)
        self._timeout = timeout
        self.lock.sessions = [random_id()]
        self._branch: int | None = None  # None: not in a ``with`` block

    # -- without a training loop ---------------------------------------------------------------

    @property
    def latest(self) -> Snapshot | None:
        """The version that was saved last, or from which this writer continues, or None."""
        return snapshot_of(self.newest)

    def __enter__(self) -> Self:
        """Acquire the writer lock, and continue from the newest intact version of the run.

        If newer versions are damaged, a branch is started. Raises ``LimpetError`` if another live
        process on this machine writes to the run, ``NoSnapshot`` if there are versions but none is
        intact, and ``StoreError``.
        """
        start = broadcast_from_first(
            self.group, f"the start of a writer of {self.url}", self._find_start, _Start
        )
        self._branch = start.branch
        if self.group.rank and start.version:
            location = Location(self._catalog.store, start.version)
            self.continue_from(SnapshotReader(location, None, start.digest))
        return self

    def _find_start(self) -> _Start:
        self.lock.acquire()
        try:
            newest, skipped = lineage.find_newest(self._catalog, SnapshotReader.check_files)
            listing = self._catalog.listing()
            branch = lineage.newest_branch(self._catalog, listing)
            if newest is None:
                return _Start(branch=branch)
            version = newest.version
            if version != lineage.newest_version(self._catalog, listing):
                reason = lineage.skipped_reason(skipped)
                branch = lineage.start_branch(self._catalog, newest, version, reason)
            self.continue_from(newest, lineage.find_sessions(self._catalog, listing, newest))
            return _Start(str(version), newest.digest, branch)
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Apply retention if it is due, unless an exception ends the block; release the lock."""
        self._branch = None
        try:
            if error is None and self.group.rank == 0 and self.attempt:
                self.retention.finish(self.newest)
        finally:
            self.lock.release()

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Save ``state`` as the version of ``step``, delete what ``keep`` does not keep, and return
        the version.

        ``state``: as for ``limpet.save``. ``step``: greater than that of ``latest``. ``metrics``:
        numbers by name, by which ``keep`` may decide. ``note``: plain values for the metadata.

        If a save fails with an unknown outcome, such as after a lost answer, save the same step
        again. If the first save has committed its version after all, this returns that version,
        and ``state``, ``metrics``, and ``note`` of the second call are not saved. Otherwise, it
        saves as usual.

        Raises ``LimpetError`` for an invalid argument, outside of the ``with`` block, or if another
        process has taken the run over; and the errors of ``limpet.save``. If old versions cannot be
        deleted, the error has the field ``committed``: the version is saved.
        """
        number, checked = to_int(step, STEP), check_metrics(metrics)
        last = -1
        if self.newest is not None:  # the name of its folder needs no read of the manifest
            last = (parse_version(self.newest.location.folder) or self.newest.version).step
        if not last < number <= MAX_STEP:
            raise LimpetError(f"step must be greater than {last}, the last one; found {number}")
        if self._branch is None:
            raise LimpetError("A writer of versions saves only in a with block: with run.writer()")
        version, began = Version(number, self._branch), time.perf_counter()
        try:
            metadata = self.make_metadata(version, "request", checked, note or {})
            job = self.begin(self.locate(version), state, metadata, shared_pool(), stage_now=False)
            if isinstance(job, SnapshotReader):
                saved = job
            else:
                saved = self.newest = self.commit(job)
                seconds = time.perf_counter() - began
                self.emit_saved(job, blocked=seconds, seconds=seconds)
        except BaseException as e:
            events.emit("save_failed", run=self.url, step=number, error=e)
            raise
        if self.group.rank == 0:
            self.retention.after_save(saved)
        return Snapshot(saved)

    # -- the steps of a save -------------------------------------------------------------------

    def continue_from(self, newest: SnapshotReader | None, sessions: Sequence[str] = ()) -> None:
        """Continue from the version ``newest``, and from the work of earlier ``sessions``."""
        own = self.lock.sessions[0]
        self.lock.sessions = [*dict.fromkeys([own, *sessions])][:_MAX_SESSIONS]
        self.newest, self.attempt = newest, ""

    def locate(self, version: Version, deadline: Deadline | None = None) -> Location:
        """Return where a version is saved, with the time limit of one save."""
        location = Location(self._catalog.store, str(version))
        return location.limit("save", self._timeout, deadline)

    def make_metadata(
        self, version: Version, reason: str, metrics: Mapping[str, Any], note: Mapping[str, Any]
    ) -> VersionMetadata:
        """Return what the manifest of a version stores beside the state. Waits for the devices of
        the metrics."""
        parent = self.newest
        return VersionMetadata(
            step=version.step,
            branch=version.branch,
            parent=None if parent is None else Parent(parent.location.folder, parent.digest),
            reason=reason,
            metrics=to_numbers(metrics),
            note=note,
            training={"sessions": self.lock.sessions},
        )

    def begin(
        self,
        location: Location,
        state: Any,
        metadata: VersionMetadata,
        pool: BufferPool,
        *,
        stage_now: bool,
        overlap: bool = False,
    ) -> SaveJob | SnapshotReader:
        """Run the first half of a save (see ``begin_save``) at ``location``, of the run or per
        host.

        If this writer has committed the version before, by a save whose outcome was unknown, return
        it; it is then ``newest``. Raises ``LimpetError`` if another training has saved it, and
        ``AlreadyExists`` if it is complete on the hosts.
        """
        base = self.newest if self._full_every else None
        if base is not None and self.group.rank == 0:  # its decision counts
            # of every full_every versions, the first is full and the others are its chain
            base = base if base.manifest.chain + 1 < self._full_every else None
            if base is not None and find_streamed(state) and not self._is_sound(base):
                base = None  # later, it is too late: a streamed member decides now what it writes
        try:
            job = begin_save(
                location,
                state,
                metadata,
                pool,
                group=self.group,
                stage_now=stage_now,
                base=base,
                overlap=overlap,
            )
        except AlreadyExists as e:
            if location.is_per_host:
                raise
            existing = self._open_on_all_ranks(Version(metadata.step or 0, metadata.branch))
            if existing.manifest.attempt != self.attempt:
                raise LimpetError(
                    f"Another training has saved {location.folder} of {self.url}",
                    todo="Find the second job that writes to this run, and stop one of the two",
                ) from e
            self.newest = existing
            return existing
        self.attempt = job.partition.attempt
        return job

    def commit(
        self, job: SaveJob, check_writer: Callable[[Store], object] | None = None
    ) -> SnapshotReader:
        """Run the second half of a save, with the fence: by default, the lock. If `limpet verify`
        has found damage in what it would refer to, the save is full."""
        fence = partial(check_writer or self.lock.check, job.location.store)
        saved = finish_save(job, fence, self._is_sound)
        self.retention.is_held = job.base is not None and not self._is_sound(job.base)
        return saved

    def _is_sound(self, base: SnapshotReader) -> bool:
        """Return True if `limpet verify` has surely found no damage in a version and its bases."""
        if self.group.rank:  # the decision of rank 0 counts
            return True
        try:
            for version in base.bases - self._digests.keys():
                self._digests[version] = self._catalog.open(version).digest
            known = {base.version: base.digest, **{v: self._digests[v] for v in base.bases}}
            found = [self._catalog.evaluations.read(*version) for version in known.items()]
        except (FormatError, StoreError):
            return False
        return not any(records.damage() or records.is_damaged for records in found)

    def emit_saved(self, job: SaveJob, *, blocked: float, seconds: float) -> None:
        """Emit the event ``saved``, with the seconds for which the save blocked the program."""
        metadata, result = job.metadata, job.result
        events.emit(
            "saved",
            run=self.url,
            version=job.location.folder.rpartition("/")[2],
            step=metadata.step,
            reason=metadata.reason,
            bytes=result.nbytes,
            referred=result.referred_bytes,
            blocked=blocked,
            seconds=seconds,
            metrics=dict(metadata.metrics),
        )

    def _open_on_all_ranks(self, version: Version) -> SnapshotReader:
        """Open a committed version on all ranks, or raise on all ranks."""
        snapshots: list[SnapshotReader] = []
        broadcast_from_first(
            self.group,
            f"the opening of {version}",
            lambda: True,
            bool,
            on_each=lambda: snapshots.append(self._catalog.open(version)),
        )
        return snapshots[0]
