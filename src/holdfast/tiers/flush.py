"""Saves the newest captured state to the run, after its training has ended or cannot save anymore.

Each host copies the shards that are in its memory. The host that finds all files there commits the
manifest, which all hosts have. So the hosts need no connection to one another.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.deadline import Deadline
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.snapshot.spread import unspread
from holdfast.engine.transform.copy import copy_shards
from holdfast.errors import AlreadyExists, DeadlinePassed, HoldfastError, NotFound
from holdfast.format.manifest import MAX_MANIFEST, Manifest, decode_manifest
from holdfast.format.names import MANIFEST
from holdfast.run.run import Run
from holdfast.run.writer_lock import find_writer
from holdfast.settings import MEMORY_SUFFIX
from holdfast.storage.local.store import LocalStore
from holdfast.storage.store import Store
from holdfast.tiers.inventory import CurrentLine, find_candidates, take_inventory

_POLL_SECONDS = 0.1


class MemoryRecord(msgspec.Struct, frozen=True):
    """What a training tells ``holdfast run``: the folder of its run in a tier, and the run.

    ``saves_all``: all versions there count, not only the newest one.
    """

    folder: str
    run: str
    saves_all: bool = False


_RECORD = msgspec.json.Decoder(MemoryRecord)


def record_memory(status_folder: str, record: MemoryRecord, tier: str) -> None:
    """Tell ``holdfast run`` where the captured states are. It never raises ``OSError``: without
    the record, they stay there for the next start."""
    with suppress(OSError):
        Path(status_folder, f"{os.getpid()}-{tier}{MEMORY_SUFFIX}").write_bytes(
            msgspec.json.encode(record)
        )


def lasting_url(store: Store) -> str:
    """Return the URL of a store, as a process in another folder opens it."""
    inner = unspread(store)
    return inner.root if isinstance(inner, LocalStore) else store.url


def flush_recorded(
    status_folder: str, seconds: float
) -> Iterator[Snapshot | HoldfastError | OSError]:
    """Save the newest states in memory of all trainings that have left a record, within about so
    many seconds. Yield each version that was saved, and each error."""
    deadline = Deadline.after(seconds, "the save of the newest state in memory")
    records = set()
    for path in Path(status_folder).glob(f"*{MEMORY_SUFFIX}"):
        with suppress(OSError, msgspec.DecodeError):
            records.add(_RECORD.decode(path.read_bytes()))
    for record in sorted(records, key=lambda r: r.folder):
        if os.path.isdir(record.folder):
            try:
                run = Run(record.run)
                if record.saves_all:
                    yield from flush_all(record.folder, run, deadline)
                elif flushed := flush_newest(record.folder, run, deadline, is_writer=False):
                    yield flushed
            except (HoldfastError, OSError) as e:
                yield e


def flush_newest(folder: str, run: Run, deadline: Deadline, *, is_writer: bool) -> Snapshot | None:
    """Save the newest captured state that is newer than all versions of ``run``, and return it.

    ``folder``: that of the run in a tier of this host. ``is_writer``: this process writes to the
    run; otherwise, nothing is saved while another training does. None: there is no such state.

    Raises ``DeadlinePassed`` if files that this host lacks do not arrive in time, ``FormatError``
    if the state is damaged, and ``StoreError``. If it raises, nothing was committed.
    """
    with _one_process(folder, deadline):
        newer = find_newer(folder, run)
        if not newer:
            return None
        if not is_writer:
            _require_no_writer(run)
        return _flush(newer[-1], run, deadline)


def flush_all(folder: str, run: Run, deadline: Deadline) -> Iterator[Snapshot]:
    """Do the same with all states that are newer than the versions of ``run``, oldest first."""
    with _one_process(folder, deadline):
        for captured in find_newer(folder, run):
            _require_no_writer(run)
            yield _flush(captured, run, deadline)


def find_newer(folder: str, run: Run) -> list[Snapshot]:
    """Return the captured states on this host that are newer than all versions of ``run``, and
    continue them, oldest first; nothing but their manifests was read. Raises ``FormatError`` and
    ``StoreError``."""
    store = LocalStore(folder, direct=False)
    line, found = CurrentLine(run), []
    for candidate in find_candidates([take_inventory(store, 0)], "memory"):
        if candidate.digest and line.is_newer(candidate.version):
            captured = Snapshot(Location(store, candidate.folder), None, candidate.digest)
            if line.is_continued_by(candidate, captured):
                found.append(captured)
    return found[::-1]


def _flush(captured: Snapshot, run: Run, deadline: Deadline) -> Snapshot:
    source = captured.location
    key = source.key(MANIFEST)
    raw = source.store.get(key, MAX_MANIFEST)
    manifest, digest = decode_manifest(raw, key)
    location = run.location(captured.version).limit("flush", None, deadline)
    held = [s for s in manifest.shards if _has(source, s.name) and _has(source, s.index.name)]
    with pins.hold_pin(location, manifest.attempt, captured.version):
        copy_shards(source, location, held)
        _await_files(location, manifest, deadline)
        flushed = Snapshot(location, manifest, digest)
        flushed.read_indexes()
        try:
            location.store.put_if_absent(location.key(MANIFEST), raw)
        except AlreadyExists:  # another host was faster, or another training saved this step
            if location.store.get(location.key(MANIFEST), MAX_MANIFEST) != raw:
                raise
    flushed.location = location.without_limit()
    return flushed


def _has(location: Location, name: str) -> bool:
    try:
        location.store.stat(location.key(name))
    except NotFound:
        return False
    return True


def _await_files(location: Location, manifest: Manifest, deadline: Deadline) -> None:
    """Wait until all files are in the store in full length, as this process sees it."""
    missing = {f.name: f.length for s in manifest.shards for f in (s, s.index)}
    while missing:
        for name, length in list(missing.items()):
            with suppress(NotFound):
                if location.store.stat(location.key(name)).length == length:
                    del missing[name]
        if missing and not deadline.seconds_left:
            raise DeadlinePassed(
                f"The newest captured state was not saved to {location.url}",
                expected=f"{min(missing)} from the host that has it",
                found="no such file when the time was over",
                todo="The next training resumes from the hosts that are left, or from an older"
                " version",
            )
        if missing:
            time.sleep(_POLL_SECONDS)


def _require_no_writer(run: Run) -> None:
    """Raise ``HoldfastError`` if another training writes to the run, or may do so."""
    writer = find_writer(run.store)
    if writer is not None and pins.is_holder_alive(writer) is not False:
        raise HoldfastError(
            f"The newest captured state was not saved to {run.url}",
            expected="a training that has ended",
            found=f"process {writer.process.partition(':')[0]} on {writer.host.split()[0]}, which"
            " may still write to the run",
            todo="Nothing, if that is the next training of this run",
        )


@contextmanager
def _one_process(folder: str, deadline: Deadline) -> Iterator[None]:
    """Let one process of this host flush at a time: the others then find the version."""
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
