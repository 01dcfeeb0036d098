"""The store from which a captured state is loaded: that of this host, and those of its peers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from threading import Lock
from typing import Protocol, TypeVar

from holdfast import events
from holdfast.buffers import as_byte_view
from holdfast.deadline import Deadline
from holdfast.errors import HoldfastError, NotFound, StoreError, Unavailable
from holdfast.format.manifest import MAX_MANIFEST, decode_manifest
from holdfast.format.names import MANIFEST
from holdfast.storage.checks import check_range, too_long_error
from holdfast.storage.store import Stat, Store, Traits, Upload
from holdfast.tiers.inventory import files_of

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""The seconds before the peers are asked again, which double each time."""


class Peer(Protocol):
    """What reads files of another host (``PeerConnection``). Raises ``HoldfastError``."""

    def fetch_file(self, key: str, limit: int) -> bytes: ...

    def fetch_range(self, key: str, file_length: int, offset: int, into: memoryview) -> object: ...


class RecoveryStore:
    """Reads files from the store of this host, and what it lacks from those of its peers.

    ``sources``: for each file of one state, the ranks that serve it in the length that the manifest
    of the state names. ``connect`` connects to a rank. Only the bytes that are asked for are
    fetched, and nothing is stored: a load proves each chunk by its digest before it uses a byte.

    A peer that does not answer is reported by an event, and the next one is asked. Peers that may
    only be busy are asked again for ``seconds`` per call. Every failure is a ``NotFound``: the
    training then resumes from an older state, or from the durable store. Nothing can be written.
    """

    def __init__(
        self,
        own: Store,
        sources: Mapping[str, Sequence[int]],
        connect: Callable[[int], AbstractContextManager[Peer]],
        seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._own = own
        self._sources = sources
        self._connect = connect
        self._seconds, self._clock, self._sleep = seconds, clock, sleep
        self._failed: set[int] = set()
        self._manifest = b""
        self._lengths: dict[str, int] = {}
        self._lengths_lock = Lock()

    @property
    def traits(self) -> Traits:
        return self._own.traits

    @property
    def url(self) -> str:
        return self._own.url

    def stat(self, key: str) -> Stat:
        self._check_key(key)
        try:
            return self._own.stat(key)
        except NotFound:
            return Stat(key, self._length(key), modified=0.0)

    def get(self, key: str, limit: int) -> bytes:
        self._check_key(key)
        with suppress(NotFound):
            return self._own.get(key, limit)
        if _is_manifest(key):
            self._manifest = self._manifest or self._ask(key, lambda p: p.fetch_file(key, limit))
            return self._manifest
        length = self._length(key)
        if length > limit:
            raise too_long_error(key, self.url, limit, length)
        data = bytearray(length)
        self.get_range(key, 0, length, memoryview(data))
        return bytes(data)

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        self._check_key(key)
        with suppress(NotFound):
            self._own.get_range(key, offset, length, into)
            return
        view = as_byte_view(into)[:length]
        check_range(key, self.url, offset, length, len(view))
        total = self._length(key)
        self._ask(key, lambda peer: peer.fetch_range(key, total, offset, view))

    def list(self, prefix: str) -> Iterator[Stat]:
        start = f"{prefix}/" if prefix else ""
        return (self.stat(key) for key in sorted(self._sources) if key.startswith(start))

    def _check_key(self, key: str) -> None:
        if key not in self._sources:
            raise _missing(key, self.url, "it is not a file of this state")

    def _length(self, key: str) -> int:
        """Return the length of a file according to the manifest of its state."""
        folder = key.rpartition("/")[0]
        manifest_key = f"{folder}/{MANIFEST}"
        with self._lengths_lock:
            if not self._lengths:
                raw = self.get(manifest_key, MAX_MANIFEST)
                files = files_of(decode_manifest(raw, manifest_key)[0])
                self._lengths = {f"{folder}/{name}": length for name, length in files.items()}
                self._lengths[manifest_key] = len(raw)
            if key not in self._lengths:
                raise _missing(key, self.url, "it is not a file of this state")
            return self._lengths[key]

    def _ask(self, key: str, request: Callable[[Peer], T]) -> T:
        """Ask all peers in turn, until one answers, none could, or the time is over."""
        deadline = Deadline.after(self._seconds, f"the copy of {key}", self._clock)
        # those that have failed come last: each try may take long
        left = sorted(self._sources[key], key=self._failed.__contains__)
        reasons, pause = dict[int, str](), _FIRST_PAUSE
        while True:
            for rank in list(left):
                try:
                    with self._connect(rank) as peer:
                        answer = request(peer)
                    self._failed.discard(rank)
                    return answer
                except HoldfastError as e:
                    if rank not in self._failed:
                        events.emit("copy_failed", key=key, rank=rank, error=e)
                    reasons[rank] = f"rank {rank}: {e}"
                    self._failed.add(rank)
                    if not _may_be_busy(e):
                        left.remove(rank)
            if not left or not deadline.seconds_left:
                break
            # at random times: many hosts may wait for the same peer
            self._sleep(min(pause * random.uniform(0.5, 1.0), deadline.seconds_left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise _missing(key, self.url, "; ".join(reasons.values()) or "no peer has it")

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
