"""A server that stores copies of files for peers, and sends files to them.

A connection gets its own thread after its peer has proved that it knows the secret of the job.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace
from threading import Lock, Thread

from limpet.connections.auth import Session
from limpet.connections.error_parts import ErrorParts
from limpet.connections.listener import Listener
from limpet.deadline import Deadline
from limpet.errors import (
    AlreadyExists,
    Denied,
    LimpetError,
    NotFound,
    StoreError,
    Unavailable,
)
from limpet.format.names import MANIFEST
from limpet.storage.store import Store, check_key
from limpet.threads import start_thread
from limpet.tiers.peers.accounts import PeerAccounts, PeerLimits
from limpet.tiers.peers.files import begin_copy, digest_file, receive_content, send_content
from limpet.tiers.peers.messages import (
    Channel,
    Coming,
    Fetch,
    Hello,
    Offer,
    Ready,
    Refused,
    Stored,
)


class PeerServer:
    """Serves the files of ``store`` at ``address``, an IP address of this host, on its own threads.

    ``secret``: that of the job (see ``auth.py``). ``limits``: see ``PeerLimits``. The server
    listens when this returns; ``port`` is its port. It never stores a manifest: only this host may
    make a snapshot visible. Raises ``StoreError`` if it cannot listen.
    """

    def __init__(self, store: Store, address: str, secret: str, limits: PeerLimits) -> None:
        self._store = store
        self._accounts = PeerAccounts(store, limits)
        self._lock = Lock()
        self._threads: dict[Channel, Thread] = {}
        self._listener = Listener(
            address, secret, "serve copies", self._start, lambda: self.limits.handshakes
        )
        self.address, self.port = self._listener.address, self._listener.port

    def close(self) -> None:
        """Stop accepting connections, and end those that exist. What is half received is gone."""
        self._listener.close()  # now, no connection is added, and each thread has been started
        with self._lock:
            threads = dict(self._threads)
        for channel in threads:
            channel.interrupt()
        for thread in threads.values():
            thread.join()

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def limits(self) -> PeerLimits:
        """The limits, which may be replaced at any time."""
        return self._accounts.limits

    @limits.setter
    def limits(self, limits: PeerLimits) -> None:
        self._accounts.limits = limits

    # -- the threads of the connections ---------------------------------------------------------

    def _start(self, connection: socket.socket, session: Session) -> None:
        """Serve a connection in a new thread, unless there are too many."""
        limits = self.limits
        times = limits.idle_seconds, limits.part_seconds
        channel = Channel(connection, "a peer", self._idle_deadline(), session, *times)
        thread = Thread(target=self._serve, args=(channel,), name="limpet-peer", daemon=True)
        with self._lock:
            is_served = len(self._threads) < self.limits.connections
            if is_served:
                self._threads[channel] = thread
        if not is_served or not start_thread(thread):
            self._forget(channel)

    def _idle_deadline(self) -> Deadline:
        return Deadline.after(self.limits.idle_seconds, "the next request of a peer")

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._threads.pop(channel, None)
        channel.close()

    def _serve(self, channel: Channel) -> None:
        """Answer the requests of a peer, until it closes the connection or one of them fails."""
        try:
            rank = channel.receive(Hello).rank
            channel.peer = f"rank {rank}"
            while True:
                request = channel.receive(Offer, Fetch)
                channel.deadline = replace(channel.deadline, purpose=f"a request of rank {rank}")
                channel.renew(request.length if isinstance(request, Offer) else 0)
                self._answer(channel, rank, request)
                channel.deadline = self._idle_deadline()
        except Unavailable:
            return  # the connection has ended
        except LimpetError as e:
            with suppress(LimpetError):
                channel.send(Refused(ErrorParts.of(e)))
        except BaseException as e:  # noqa: BLE001  (top of a thread: the peer raises it)
            error = StoreError(f"The server of {self._store.url} failed: {type(e).__name__}: {e}")
            with suppress(LimpetError):
                channel.send(Refused(ErrorParts.of(error)))
        finally:
            self._forget(channel)

    def _answer(self, channel: Channel, rank: int, request: Offer | Fetch) -> None:
        if isinstance(request, Offer):
            channel.send(self._receive(channel, rank, request))
            return
        file_length = self._store.stat(request.key).length
        length = max(0, min(request.length, file_length - request.offset))
        channel.send(Coming(length, file_length))
        try:
            send_content(channel, self._store, request.key, request.offset, length)
        except LimpetError:
            channel.interrupt()  # the peer would read a message as bytes of the file
            raise

    def _receive(self, channel: Channel, rank: int, offer: Offer) -> Stored:
        """Store a file that a peer offers, or find out that it is stored already."""
        store, key = self._store, offer.key
        if key.rpartition("/")[2] == MANIFEST:
            raise Denied(
                f"A peer must not write {key} to {store.url}",
                expected="a shard or an index",
                found="a manifest, which makes a snapshot visible",
                todo="Let a rank of this host write it, after it has checked the files",
                key=key,
                store=store.url,
            )
        check_key(key, store.url)
        with suppress(NotFound):
            return self._find(channel, key)
        with (
            self._accounts.reserving(rank, key, offer.length),
            begin_copy(store, key, offer.length) as upload,
        ):
            channel.send(Ready())
            try:
                write = upload.view, upload.write_at
                digest = receive_content(channel, key, offer.length, *write)
                return Stored(upload.commit().length, digest)
            except AlreadyExists:  # from another connection
                return self._find(channel, key)

    def _find(self, channel: Channel, key: str) -> Stored:
        """Return what is stored under a key. Raises ``NotFound``."""
        length = self._store.stat(key).length
        return Stored(length, digest_file(self._store, key, length, channel.check_time))
