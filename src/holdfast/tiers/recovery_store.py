"""The store from which a captured state is loaded: that of this host, and those of its peers."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock

from holdfast import events
from holdfast.deadline import Deadline
from holdfast.errors import AlreadyExists, HoldfastError, NotFound, StoreError, Unavailable
from holdfast.format.manifest import MAX_MANIFEST, decode_manifest
from holdfast.format.names import MANIFEST
from holdfast.storage.local.store import LocalStore
from holdfast.storage.store import Stat, Traits, Upload, exists
from holdfast.tiers.inventory import files_of

Fetch = Callable[[int, str, int, int], object]
"""Copies a file from the store of a rank's host into this one: ``fetch(rank, key, min_length,
max_length)``. Raises ``HoldfastError``, also for a file of another length."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""The seconds before the peers are asked again, which double each time."""

_POLL_SECONDS = 0.02
"""The seconds between two looks whether another process has ended its copy."""


class RecoveryStore:
    """Reads files from the store of this host. A file that it lacks is first fetched from a peer.

    ``sources``: for each file of one state, the ranks that serve it in the length that the manifest
    of the state names. ``stat`` returns that length for a file that this host lacks, and fetches
    nothing but the manifest. A peer that does not answer is reported by an event, and the next one
    is asked. Peers that may only be busy are asked again for ``seconds`` per file; for as long, a
    process waits for another one of this host that fetches the file. Every failure is a
    ``NotFound``: the training then resumes from an older state, or from the durable store. Nothing
    can be written.
    """

    def __init__(
        self,
        own: LocalStore,
        sources: Mapping[str, Sequence[int]],
        fetch: Fetch,
        seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._own = own
        self._sources = sources
        self._fetch = fetch
        self._seconds, self._clock, self._sleep = seconds, clock, sleep
        self._locks: dict[str, Lock] = {key: Lock() for key in sources}
        self._numbers = {key: number for number, key in enumerate(sorted(sources))}
        self._lengths: dict[str, int] = {}
        self._lengths_lock = Lock()

    @property
    def traits(self) -> Traits:
        return self._own.traits

    @property
    def url(self) -> str:
        return self._own.url

    def stat(self, key: str) -> Stat:
        if not _is_manifest(key) and self._sources.get(key) and not exists(self._own, key):
            # A load looks up every file before it reads the few that this rank needs.
            return Stat(key, self._length(key), modified=0.0)
        self._ensure(key)
        return self._own.stat(key)

    def get(self, key: str, limit: int) -> bytes:
        self._ensure(key)
        return self._own.get(key, limit)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        self._ensure(key)
        self._own.get_range(key, offset, length, into)

    def list(self, prefix: str) -> Iterator[Stat]:
        start = f"{prefix}/" if prefix else ""
        return (self.stat(key) for key in sorted(self._sources) if key.startswith(start))

    def _ensure(self, key: str) -> None:
        """Fetch a file that this host lacks. Raises ``NotFound`` if no peer can send it."""
        if key not in self._sources:
            raise self._unknown(key)
        with self._locks[key]:
            if exists(self._own, key):
                return
            deadline = Deadline.after(self._seconds, f"the copy of {key}", self._clock)
            if _is_manifest(key):  # it is small, and there is nothing yet that can be locked
                self._fetch_from_any(key, 0, MAX_MANIFEST, deadline)
                return
            length = self._length(key)  # from now on, the manifest is on this host
            manifest = self._own.path(_manifest_of(key))
            with _hold_byte(manifest, self._numbers[key], deadline, self._sleep):
                if not exists(self._own, key):  # no other process has fetched it meanwhile
                    self._fetch_from_any(key, length, length, deadline)

    def _length(self, key: str) -> int:
        """Return the length of a file according to the manifest of its state."""
        folder, manifest_key = key.rpartition("/")[0], _manifest_of(key)
        with self._lengths_lock:
            if not self._lengths:
                raw = self.get(manifest_key, MAX_MANIFEST)
                files = files_of(decode_manifest(raw, manifest_key)[0])
                self._lengths = {f"{folder}/{name}": length for name, length in files.items()}
            if key not in self._lengths:
                raise self._unknown(key)
            return self._lengths[key]

    def _fetch_from_any(self, key: str, shortest: int, longest: int, deadline: Deadline) -> None:
        """Ask all peers in turn, until one sends the file, none could, or the time is over."""
        left, reasons, pause = list(self._sources[key]), dict[int, str](), _FIRST_PAUSE
        while True:
            for rank in list(left):
                try:
                    self._fetch(rank, key, shortest, longest)
                    return
                except AlreadyExists:  # another rank of this host has fetched it
                    return
                except HoldfastError as e:
                    if rank not in reasons:
                        events.emit("copy_failed", key=key, rank=rank, error=e)
                    reasons[rank] = f"rank {rank}: {e}"
                    if not _may_be_busy(e):
                        left.remove(rank)
            if not left or not deadline.seconds_left:
                break
            # at random times: many hosts may wait for the same peer
            self._sleep(min(pause * random.uniform(0.5, 1.0), deadline.seconds_left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise _missing(key, self.url, "; ".join(reasons.values()) or "no peer has it")

    def _unknown(self, key: str) -> NotFound:
        return _missing(key, self.url, "it is not a file of this state")

    # -- what only a store that can be written does ----------------------------------------------

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        raise _read_only(key, self.url)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        raise _read_only(key, self.url)

    def delete(self, key: str) -> None:
        raise _read_only(key, self.url)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return iter(())


def _may_be_busy(error: HoldfastError) -> bool:
    """Return True if a peer may send a file later. It resets connections when it has too many.
    Nobody listens at an address that refuses them: its process has ended."""
    is_refused = isinstance(error.__cause__, ConnectionRefusedError)
    return isinstance(error, Unavailable) and not is_refused


@contextmanager
def _hold_byte(
    path: str, number: int, deadline: Deadline, sleep: Callable[[float], object]
) -> Iterator[None]:
    """Hold the lock on one byte of a file, which one process of this host at a time can have.

    The kernel releases it if the process dies, and no file remains. The lock only avoids copies
    that nobody needs: the block also begins without it, if the deadline passes or the file system
    has no locks.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            while not _set_lock(fd, fcntl.F_WRLCK, number) and deadline.seconds_left:
                sleep(min(_POLL_SECONDS, deadline.seconds_left))
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has the descriptor, too
            _set_lock(fd, fcntl.F_UNLCK, number)
        os.close(fd)


def _set_lock(fd: int, kind: int, number: int) -> bool:
    """Lock or unlock one byte of an open file. Return False if somebody else has locked it."""
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)  # struct flock of fcntl(2)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _manifest_of(key: str) -> str:
    return f"{key.rpartition('/')[0]}/{MANIFEST}"


def _is_manifest(key: str) -> bool:
    return key.rpartition("/")[2] == MANIFEST


def _missing(key: str, url: str, found: str) -> NotFound:
    return NotFound(
        f"{key} is on no host that answers",
        found=found,
        todo="Resume from an older version",
        key=key,
        store=url,
    )


def _read_only(key: str, url: str) -> StoreError:
    return StoreError(f"{key} cannot be written: {url} is only read to resume", key=key, store=url)
