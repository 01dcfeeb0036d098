"""How many bytes peers may store on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from limpet.connections.listener import HandshakeLimits
from limpet.errors import NoSpace, NotFound
from limpet.storage.store import Store


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """The limits of a server.

    ``file_bytes``: the longest file that it stores; ``peer_bytes``: the bytes of all files that one
    rank may have here at once; ``total_bytes``: those of all ranks. ``connections``: the largest
    number of authenticated connections, each of which has a thread; ``handshakes``: the limits of
    connections that have not proved yet that they know the secret, which have none.
    ``part_seconds``: the time for the answer to a request, and for each ``PART_BYTES`` of a file;
    ``idle_seconds``: the time without a byte, between two requests and within a file.
    """

    file_bytes: int
    peer_bytes: int
    total_bytes: int
    connections: int = 32
    handshakes: HandshakeLimits = field(default_factory=HandshakeLimits)
    part_seconds: float = 120.0
    idle_seconds: float = 60.0


class PeerAccounts:
    """The files that peers have stored, and those that they are sending."""

    def __init__(self, store: Store, limits: PeerLimits) -> None:
        self._store = store
        self.limits = limits
        self._lock = Lock()
        self._files: dict[tuple[int, str], int] = {}
        self._sending: list[tuple[int, int]] = []

    @contextmanager
    def reserving(self, rank: int, key: str, length: int) -> Iterator[None]:
        """Count a file that a rank sends; if the block succeeds, until it is deleted.

        Raises ``NoSpace`` if a limit does not allow the file.
        """
        self._check("A file", length, self.limits.file_bytes, key)
        entry = (rank, length)
        with self._lock:
            self._forget_deleted()
            counted = [*self._sending, *((r, n) for (r, _), n in self._files.items())]
            of_rank = sum(n for r, n in counted if r == rank)
            total = sum(n for _, n in counted)
            self._check(f"The files of rank {rank}", of_rank + length, self.limits.peer_bytes, key)
            self._check("The files of all peers", total + length, self.limits.total_bytes, key)
            self._sending.append(entry)
        try:
            yield
            with self._lock:
                self._files[rank, key] = length
        finally:
            with self._lock:
                self._sending.remove(entry)

    def _forget_deleted(self) -> None:
        for rank, key in list(self._files):
            try:
                self._store.stat(key)
            except NotFound:
                del self._files[rank, key]

    def _check(self, what: str, nbytes: int, limit: int, key: str) -> None:
        if nbytes > limit:
            raise NoSpace(
                f"{what} would be too large for the memory of this host; {key} was not stored",
                expected=f"at most {limit} bytes",
                found=f"{nbytes} bytes",
                todo="Delete generations that are not needed, or allow the peers more memory",
                key=key,
                store=self._store.url,
            )
