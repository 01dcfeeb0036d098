"""Saves the snapshots of a training that has ended, or cannot save anymore, from its tiers.

Each host copies the shards that it has. The host that finds all files in the run commits the
manifest, which all hosts have. So the hosts need no connection to one another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import msgspec

from limpet.convert.copy import copy_shards
from limpet.deadline import Deadline
from limpet.errors import (
    AlreadyExists,
    DeadlinePassed,
    FormatError,
    LimpetError,
    NotFound,
    StoreError,
)
from limpet.format.manifest import MAX_MANIFEST, Manifest, decode_manifest
from limpet.format.names import MANIFEST, Version
from limpet.format.records import MAX_RECORD
from limpet.run.catalog import read_sessions
from limpet.run.lineage import newest_version
from limpet.run.run import Run
from limpet.run.writer_lock import find_writer
from limpet.settings import MEMORY_SUFFIX
from limpet.snapshot import pins
from limpet.snapshot.location import Location, get_bounded
from limpet.snapshot.reader import SnapshotReader
from limpet.storage.local.store import LocalStore
from limpet.storage.store import Store, exists
from limpet.tiers.inventory import CurrentLine, find_snapshots, take_inventory

_POLL_SECONDS = 0.1

_WAIT_SECONDS = 60.0
"""The longest time for which one host waits for the files of others. One that ends later finds the
files of this host in the run, and commits the versions."""


class MemoryRecord(msgspec.Struct, frozen=True):
    """What a training tells ``limpet run``: the folder of its run in a tier, the run, and whether
    all versions there count, not only the newest one."""

    folder: str
    run: str
    saves_all: bool = False


_RECORD = msgspec.json.Decoder(MemoryRecord)


def record_memory(status_folder: str, record: MemoryRecord, tier: str) -> None:
    """Tell ``limpet run`` where its snapshots are. It never raises ``OSError``: without
    the record, they stay there for the next start."""
    with suppress(OSError):
        Path(status_folder, f"{os.getpid()}-{tier}{MEMORY_SUFFIX}").write_bytes(
            msgspec.json.encode(record)
        )


def flush_recorded(
    status_folder: str, seconds: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[SnapshotReader | LimpetError | OSError]:
    """Save what all trainings that have left a record still have in their tiers, within about so
    many seconds of ``clock``. Yield each version that was saved, and each error."""
    deadline = Deadline.after(seconds, "the save of the newest state in memory", clock)
    records: dict[str, set[MemoryRecord]] = {}
    folder = LocalStore(status_folder, direct=False)
    for path in Path(status_folder).glob(f"*{MEMORY_SUFFIX}"):
        with suppress(OSError, LimpetError, msgspec.DecodeError):
            record = _RECORD.decode(get_bounded(folder, path.name, MAX_RECORD))
            if os.path.isdir(record.folder):
                records.setdefault(record.run, set()).add(record)
    for url in sorted(records):
        try:
            yield from flush_states(records[url], Run(url), deadline)
        except (LimpetError, OSError) as e:
            yield e


def flush_states(
    records: Collection[MemoryRecord],
    run: Run,
    deadline: Deadline,
    check_writer: Callable[[Store], object] | None = None,
) -> Iterator[SnapshotReader | LimpetError | OSError]:
    """Save the states of one training on this host that are newer than all versions of ``run``.
    Yield each version, or the error for it, oldest first; those after an error are saved, too.

    An error of ``check_writer``, by default that another training writes to the run, is raised, and
    nothing more is committed. Also raises ``FormatError`` and ``StoreError``.
    """
    with ExitStack() as held:
        for record in sorted(records, key=lambda r: r.folder):
            held.enter_context(_one_process(record.folder, deadline))
        line = CurrentLine(run)
        newer = _find_states(records, line)
        check = check_writer or partial(_require_no_writer, run, line.newest, newer)
        if newer:
            check(run.store)
        # The newest state is what counts if the time is short: its files are copied first, and the
        # others get half of the time that is left. But it is committed last: no version that is
        # older than the newest one of the run could follow.
        copies: list[_Copy | LimpetError | OSError] = []
        limit = deadline
        for reader in reversed(newer):
            location = run.location(reader.version).limit("flush", None, limit)
            try:
                copies.append(held.enter_context(_copy(reader, location)))
            except (LimpetError, OSError) as e:
                copies.append(e)
            else:
                limit = _within(deadline, 0.5) if limit is deadline else limit
        patience = _within(deadline, 1.0, _WAIT_SECONDS)
        for copy in reversed(copies):
            try:
                yield copy.commit(patience, check) if isinstance(copy, _Copy) else copy
            except (StoreError, FormatError, DeadlinePassed) as e:  # not those of ``check_writer``
                yield e


def _within(deadline: Deadline, part: float, most: float = inf) -> Deadline:
    """Return the end of a part of the time that is left, or of ``most`` seconds."""
    return replace(deadline, at=deadline.clock() + min(most, part * deadline.seconds_left))


def _find_states(records: Iterable[MemoryRecord], line: CurrentLine) -> list[SnapshotReader]:
    """Return the states on this host that continue the versions of the run, oldest first: all on
    local disks, and the newest one in memory, if it is newer still."""
    found: list[SnapshotReader] = []
    for record in sorted(records, key=lambda r: not r.saves_all):
        newer = _find_newer(record.folder, line)
        newest = found[-1].version.step if found else -1
        if record.saves_all:
            found += newer
        elif newer and newer[-1].version.step > newest:
            found.append(newer[-1])
    return found


def _find_newer(folder: str, line: CurrentLine) -> list[SnapshotReader]:
    store, found = LocalStore(folder, direct=False), []
    for snapshot in find_snapshots(take_inventory(store, 0), "memory"):
        if snapshot.digest and line.is_newer(snapshot.version):
            location = Location(store, snapshot.folder, is_per_host=True)
            reader = SnapshotReader(location, None, snapshot.digest)
            if line.is_continued_by(snapshot, reader):
                found.append(reader)
    return found[::-1]


@dataclass(frozen=True)
class _Copy:
    """A state whose files on this host are in the run, and pinned. ``raw``: its manifest."""

    flushed: SnapshotReader
    raw: bytes

    def commit(self, patience: Deadline, check_writer: Callable[[Store], object]) -> SnapshotReader:
        """Commit the state once the files of all hosts are there."""
        flushed, location = self.flushed, self.flushed.location
        _await_files(location, flushed.manifest, patience.earlier(location.deadline))
        flushed.read_indexes()
        check_writer(location.store)  # another training may have begun during the copy
        try:
            location.store.put_if_absent(location.key(MANIFEST), self.raw)
        except AlreadyExists:  # another host was faster, or another training saved this step
            if location.store.get(location.key(MANIFEST), MAX_MANIFEST) != self.raw:
                raise
        flushed.location = location.without_limit()
        return flushed


@contextmanager
def _copy(reader: SnapshotReader, location: Location) -> Iterator[_Copy]:
    """Copy the files of a state that are on this host, and pin them during a ``with`` block. Raises
    ``Unavailable`` at the deadline, also for a folder, whose calls do not end by then."""
    source = reader.location
    key = source.key(MANIFEST)
    raw = source.store.get(key, MAX_MANIFEST)
    manifest, digest = decode_manifest(raw, key)
    held = [
        shard
        for shard in manifest.shards
        if all(exists(source.store, source.key(f.name)) for f in (shard, shard.index))
    ]
    with pins.hold_pin(location, manifest.attempt, reader.version):
        pins.require_no_deletion(location, reader.version, of_files=True)
        copy_shards(source, location, held, lambda _: location.check_time())
        yield _Copy(SnapshotReader(location, manifest, digest), raw)


def _await_files(location: Location, manifest: Manifest, deadline: Deadline) -> None:
    """Wait until all files are in the store in full length, as this process sees it."""
    missing = {s.path: s.length for s in manifest.shards}
    missing |= {s.index_path: s.index.length for s in manifest.shards}
    while missing:
        for path, length in list(missing.items()):
            with suppress(NotFound):
                if location.store.stat(location.file_key(path)).length == length:
                    del missing[path]
        if missing and not deadline.seconds_left:
            raise DeadlinePassed(
                f"A snapshot in a tier was not saved to {location.url}",
                expected=f"{min(missing)} from the host that has it",
                found="no such file when the time was over",
                todo="A host that comes later commits the version. Otherwise, the next training"
                " resumes from the hosts that are left, or from an older version",
            )
        if missing:
            time.sleep(_POLL_SECONDS)


def _require_no_writer(
    run: Run, before: Version | None, newer: Sequence[SnapshotReader], store: Store
) -> None:
    """Raise ``LimpetError`` if another training may write to the run, or has done so since
    ``before`` was the newest version, other than the states that are saved."""
    writer = find_writer(store)
    if writer is not None and pins.is_holder_alive(writer) is not False:
        raise LimpetError(
            f"A snapshot in a tier was not saved to {run.url}",
            expected="a training that has ended",
            found=f"{pins.describe_holder(writer)}, which may still write to the run",
            todo="Nothing, if that is the next training of this run",
        )
    newest = newest_version(run.catalog, run.listing())
    if newest is None or newest in (before, *(reader.version for reader in newer)):
        return
    session = next(iter(read_sessions(run.catalog.open(newest))), "")
    if session not in read_sessions(newer[-1]):  # otherwise, another host has saved it
        raise LimpetError(
            f"A snapshot in a tier was not saved to {run.url}",
            expected="no version of another training",
            found=str(newest),
            todo="Nothing, if the next training of this run has saved it",
        )


@contextmanager
def _one_process(folder: str, deadline: Deadline) -> Iterator[None]:
    """Let one process of this host flush at a time: the others then find the version."""
    import fcntl  # a tier needs Linux

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                deadline.check()
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)
