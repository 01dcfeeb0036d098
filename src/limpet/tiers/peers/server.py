"""A server that stores copies of files for peers, and sends files to them, with a thread for each
connection whose peer has proved that it knows the secret of the job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Lock

from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, LimpetError, NoSpace, NotFound
from limpet.format.names import MANIFEST, parse_attempt, parse_version
from limpet.ranks.wire import Channel, Connections, HandshakeLimits, Listener, Session
from limpet.storage.local.os_calls import BeneathFs
from limpet.storage.local.store import LocalStore
from limpet.storage.store import Store, exists, put_mapped
from limpet.tiers.peers import transfer


@dataclass(frozen=True, slots=True)
class PeerLimits:
    file_bytes: int  # of one file
    total_bytes: int  # of all files that peers may have here at once
    connections: int = 32  # authenticated, each with a thread
    handshakes: HandshakeLimits = field(default_factory=HandshakeLimits)
    part_seconds: float = 120.0  # for the answer to a request, and for each ``PART_BYTES``
    idle_seconds: float = 60.0  # without a byte, between two requests and within a file


class PeerAccounts:
    """The files that peers have stored, and those that they are sending."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._files: dict[str, int] = {}
        self._sending: list[int] = []

    @contextmanager
    def reserving(self, key: str, length: int, limits: PeerLimits) -> Iterator[None]:
        """Count a file that a rank sends; if the block succeeds, until it is deleted. Raises
        ``NoSpace`` if a limit does not allow the file."""
        self._check("A file", length, limits.file_bytes, key)
        with self._lock:
            self._files = {k: n for k, n in self._files.items() if exists(self._store, k)}
            total = sum(self._sending) + sum(self._files.values())
            self._check("The files of all peers", total + length, limits.total_bytes, key)
            self._sending.append(length)
        try:
            yield
            with self._lock:
                self._files[key] = length
        finally:
            with self._lock:
                self._sending.remove(length)

    def _check(self, what: str, nbytes: int, limit: int, key: str) -> None:
        if nbytes > limit:
            raise NoSpace(
                f"{what} would be too large for the memory of this host; {key} was not stored",
                expected=f"at most {limit} bytes",
                found=f"{nbytes} bytes",
                todo="Delete snapshots that are not needed, or allow the peers more memory",
                key=key,
                store=self._store.url,
            )


class PeerServer(AbstractContextManager["PeerServer", None]):
    """Serves the files of the versions in ``store`` at an IP address of this host, and no others,
    nor those behind symbolic links. It stores no manifest: only this host may make a snapshot
    visible. Raises ``StoreError`` if it cannot listen."""

    def __init__(self, store: Store, address: str, secret: str, limits: PeerLimits) -> None:
        self._store = self._to_read = store
        if isinstance(store, LocalStore):
            self._to_read = LocalStore(store.url, fs=BeneathFs(store.url), direct=False)
        self.limits = limits  # may be replaced at any time
        self._accounts = PeerAccounts(store)
        self._connections = Connections("limpet-peer", limits.connections)
        self._listener = Listener(address, secret, "serve copies", self._start, limits.handshakes)
        self.address, self.port = self._listener.address, self._listener.port

    def close(self) -> None:
        """Stop accepting connections, and end those that exist. What is half received is gone."""
        self._listener.close()
        self._connections.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- the threads of the connections ---------------------------------------------------------

    def _start(self, connection: socket.socket, session: Session) -> None:
        limits = self.limits
        channel = Channel(
            connection,
            "a peer",
            transfer.MESSAGES,
            self._idle_deadline(),
            session,
            stall_seconds=limits.idle_seconds,
            part_seconds=limits.part_seconds,
        )
        self._connections.start(channel, self._serve)

    def _idle_deadline(self) -> Deadline:
        return Deadline.after(self.limits.idle_seconds, "the next request of a peer")

    def _serve(self, channel: Channel) -> None:
        """Answer the requests of a peer, until it closes the connection or one of them fails."""
        rank = channel.receive(transfer.Hello).rank
        channel.peer = f"rank {rank}"
        while True:
            request = channel.receive(transfer.Offer, transfer.Fetch)
            channel.deadline = replace(channel.deadline, purpose=f"a request of rank {rank}")
            channel.renew(request.length if isinstance(request, transfer.Offer) else 0)
            self._answer(channel, request)
            channel.deadline = self._idle_deadline()

    def _answer(self, channel: Channel, request: transfer.Offer | transfer.Fetch) -> None:
        if isinstance(request, transfer.Offer):
            channel.send(self._receive(channel, request))
            return
        self._check_key(request.key, "read", MANIFEST)
        file_length = self._to_read.stat(request.key).length
        length = max(0, min(request.length, file_length - request.offset))
        channel.send(transfer.Coming(length, file_length))
        try:
            transfer.send_content(channel, self._to_read, request.key, request.offset, length)
        except LimpetError:
            channel.interrupt()  # the peer would read a message as bytes of the file
            raise

    def _receive(self, channel: Channel, offer: transfer.Offer) -> transfer.Stored:
        """Store a file that a peer offers, or find out that it is stored already."""
        store, key = self._store, offer.key
        self._check_key(key, "write")
        with suppress(NotFound):
            return self._find(channel, key)
        with ExitStack() as stack:
            stack.enter_context(self._accounts.reserving(key, offer.length, self.limits))
            if (upload := put_mapped(store, key, offer.length)) is None:
                raise Denied(f"{store.url} is not memory: it takes no copies", key=key)
            stack.enter_context(upload)
            channel.send(transfer.Ready())
            try:
                write = upload.view, upload.write_at
                digest = transfer.receive_content(channel, key, offer.length, *write)
                return transfer.Stored(upload.commit().length, digest)
            except AlreadyExists:  # from another connection
                return self._find(channel, key)

    def _find(self, channel: Channel, key: str) -> transfer.Stored:
        """Return what is stored under a key. Raises ``NotFound``."""
        length = self._to_read.stat(key).length
        return transfer.Stored(
            length, transfer.digest_file(self._to_read, key, length, channel.check_time)
        )

    def _check_key(self, key: str, action: str, *others: str) -> None:
        """Raise ``Denied`` unless a key is that of a shard or an index of a version, or of a file
        of one of the ``others`` names there."""
        folder, _, name = key.partition("/")
        if parse_version(folder) is None or not (parse_attempt(name) or name in others):
            raise Denied(
                f"A peer must not {action} {key} in {self._store.url}",
                expected=" or ".join(("a shard or an index of a version", *others)),
                found=key,
                key=key,
                store=self._store.url,
            )
