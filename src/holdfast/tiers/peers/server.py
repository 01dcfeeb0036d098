"""A server that stores copies of files for peers, and sends files to them.

One thread accepts connections and makes the handshakes of all of them, without waiting for any. A
connection gets its own thread only after its peer has proved that it knows the secret of the job.
Strangers can therefore occupy neither threads nor memory; at most they displace one another.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import replace
from threading import Lock, Thread

from holdfast.deadline import Deadline
from holdfast.errors import (
    AlreadyExists,
    Denied,
    HoldfastError,
    NotFound,
    StoreError,
    Unavailable,
)
from holdfast.format.names import MANIFEST
from holdfast.storage.store import Store, check_key
from holdfast.threads import start_thread
from holdfast.tiers.peers.accounts import PeerAccounts, PeerLimits
from holdfast.tiers.peers.auth import HELLO_BYTES, PROOF_BYTES, ServerHandshake, Session
from holdfast.tiers.peers.files import begin_copy, digest_file, receive_content, send_content
from holdfast.tiers.peers.messages import (
    Channel,
    Coming,
    Fetch,
    Hello,
    Offer,
    Ready,
    Refused,
    Stored,
    close_when_forked,
)

_POLL_SECONDS = 0.2
"""Seconds after which the times of the handshakes are checked."""


class PeerServer:
    """Serves the files of ``store`` at ``address``, an IP address of this host, on its own threads.

    ``secret``: that of the job (see ``auth.py``). ``limits``: see ``PeerLimits``. The server
    listens when this returns; ``port`` is its port. It never stores a manifest: only this host may
    make a snapshot visible. Raises ``StoreError`` if it cannot listen.
    """

    def __init__(self, store: Store, address: str, secret: str, limits: PeerLimits) -> None:
        self._store, self._secret = store, secret
        self._accounts = PeerAccounts(store, limits)
        self._lock = Lock()
        self._threads: dict[Channel, Thread] = {}
        self._closed = False
        self._listener = _listen(address)
        self.address, self.port = self._listener.getsockname()[:2]
        self._wake, self._woken = socket.socketpair()
        for connection in (self._listener, self._wake, self._woken):
            close_when_forked(connection)
        self._thread = Thread(target=self._run, name="holdfast-peers", daemon=True)
        if not start_thread(self._thread):
            for connection in (self._listener, self._wake, self._woken):
                connection.close()
            raise StoreError(
                f"Cannot serve copies at {address}: no thread can be started",
                todo="Raise the limit on processes and threads (ulimit -u)",
            )

    def close(self) -> None:
        """Stop accepting connections, and end those that exist. What is half received is gone."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()  # from now on, no connection is added, and each thread has been started
        for connection in (self._wake, self._woken):
            connection.close()
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

    # -- the thread that accepts -----------------------------------------------------------------

    def _run(self) -> None:
        pending: dict[socket.socket, _Pending] = {}  # oldest first
        with selectors.DefaultSelector() as selector:
            for listening in (self._listener, self._woken):
                selector.register(listening, selectors.EVENT_READ)
            while not self._closed:
                ready = {key.fileobj for key, _ in selector.select(_POLL_SECONDS)}
                surplus = len(pending) - self.limits.handshakes
                for number, (connection, handshake) in enumerate(list(pending.items())):
                    session = handshake.advance() if connection in ready else None
                    is_late = number < surplus or not handshake.deadline.seconds_left
                    if session is not None or handshake.has_failed or is_late:
                        selector.unregister(connection)
                        del pending[connection]
                    if session is not None:
                        self._start(connection, session)
                    elif connection not in pending:
                        connection.close()
                if self._listener in ready and (accepted := self._accept()) is not None:
                    pending[accepted.connection] = accepted
                    selector.register(accepted.connection, selectors.EVENT_READ)
        for connection in (*pending, self._listener):
            connection.close()

    def _accept(self) -> _Pending | None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None  # the peer has gone
        except OSError:  # no descriptor is left: the connections that exist go on
            time.sleep(_POLL_SECONDS)
            return None
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_when_forked(connection)
        deadline = Deadline.after(self.limits.handshake_seconds, "the handshake with a peer")
        return _Pending(connection, self._secret, deadline)

    def _start(self, connection: socket.socket, session: Session) -> None:
        """Serve a connection in a new thread, unless there are too many."""
        limits = self.limits
        times = limits.idle_seconds, limits.part_seconds
        channel = Channel(connection, "a peer", self._idle_deadline(), session, *times)
        thread = Thread(target=self._serve, args=(channel,), name="holdfast-peer", daemon=True)
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

    # -- the thread of a connection --------------------------------------------------------------

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
        except HoldfastError as e:
            with suppress(HoldfastError):
                channel.send(Refused.from_error(e))
        except BaseException as e:  # noqa: BLE001  (top of a thread: the peer raises it)
            error = StoreError(f"The server of {self._store.url} failed: {type(e).__name__}: {e}")
            with suppress(HoldfastError):
                channel.send(Refused.from_error(error))
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
        except HoldfastError:
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


class _Pending:
    """A connection whose peer has not proved yet that it knows the secret. It never waits."""

    def __init__(self, connection: socket.socket, secret: str, deadline: Deadline) -> None:
        self.connection = connection
        self.deadline = deadline
        self.has_failed = False
        self._handshake = ServerHandshake(secret)
        self._received = b""
        self._is_challenged = False

    def advance(self) -> Session | None:
        """Read what has arrived. Return the session once the peer has proved itself."""
        wanted = PROOF_BYTES if self._is_challenged else HELLO_BYTES
        try:
            data = self.connection.recv(wanted - len(self._received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self._received += data
        self.has_failed = not data
        if len(self._received) < wanted:
            return None
        received, self._received = self._received, b""
        if self._is_challenged:
            session = self._handshake.accept(received)
            self.has_failed = session is None
            return session
        self._is_challenged = True
        challenge = self._handshake.challenge(received)
        try:
            # the first bytes of a connection: there is space for them
            is_sent = challenge is not None and self.connection.send(challenge) == len(challenge)
        except OSError:
            is_sent = False
        self.has_failed = not is_sent
        return None


def _listen(address: str) -> socket.socket:
    """Return a socket that listens at a free port of one address, and never of all."""
    try:
        ip = ipaddress.ip_address(address)
        if ip.is_unspecified or ip.is_multicast:
            raise ValueError(f"{address} means every address of this host")
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
    except (ValueError, OSError) as e:
        raise StoreError(
            f"Cannot serve copies at {address}",
            expected="the IP address of one interface of this host",
            found=str(e),
            todo="Name the interface of the network between the hosts: interface=",
        ) from e
    listener.setblocking(False)
    return listener
