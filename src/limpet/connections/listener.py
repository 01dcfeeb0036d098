"""A listening socket that hands over connections whose peer knows the secret of the job.

One thread accepts connections and makes the handshakes of all of them, without waiting for any.
Strangers can therefore occupy neither threads nor memory; at most they displace one another.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Thread

from limpet.connections.auth import HELLO_BYTES, PROOF_BYTES, ServerHandshake, Session
from limpet.connections.sockets import close_when_forked
from limpet.deadline import Deadline
from limpet.errors import StoreError
from limpet.threads import start_thread

_POLL_SECONDS = 0.2
"""Seconds after which the times of the handshakes are checked."""


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """``connections``: the largest number of connections that have not proved yet that they know
    the secret; the oldest one is closed. ``seconds``: the time for that proof."""

    connections: int = 64
    seconds: float = 5.0


class Listener:
    """Listens at a free port of ``address``, an IP address of this host, on a thread of its own.

    ``purpose``: what the connections are for, for messages: "serve copies". ``accept`` gets each
    connection whose peer has proved that it knows ``secret``, and must neither wait nor raise.
    ``limits`` returns those of the handshakes. It listens when this returns, at ``port``. Raises
    ``StoreError`` if it cannot.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        purpose: str,
        accept: Callable[[socket.socket, Session], object],
        limits: Callable[[], HandshakeLimits] = HandshakeLimits,
    ) -> None:
        self._secret, self._accept_session, self._limits = secret, accept, limits
        self._closed = False
        with ExitStack() as opened:  # closes what is open if this fails
            self._listener = opened.enter_context(_listen(address, purpose))
            self.address, self.port = self._listener.getsockname()[:2]
            try:
                self._wake, self._woken = map(opened.enter_context, socket.socketpair())
                self._selector = opened.enter_context(selectors.DefaultSelector())
            except OSError as e:
                raise StoreError(
                    f"Cannot {purpose} at {address}: {e.strerror}",
                    todo="Raise the limit on open files (ulimit -n)",
                ) from e
            for connection in (self._listener, self._wake, self._woken):
                close_when_forked(connection)
            for listening in (self._listener, self._woken):
                self._selector.register(listening, selectors.EVENT_READ)
            self._thread = Thread(target=self._run, name="limpet-listener", daemon=True)
            if not start_thread(self._thread):
                raise StoreError(
                    f"Cannot {purpose} at {address}: no thread can be started",
                    todo="Raise the limit on processes and threads (ulimit -u)",
                )
            opened.pop_all()

    def close(self) -> None:
        """Stop accepting connections. Those that ``accept`` has got remain."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):  # a forked process, in which it is closed
            self._wake.send(b"\0")
        self._thread.join()  # from now on, ``accept`` is not called
        for connection in (self._wake, self._woken):
            connection.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        pending: dict[socket.socket, _Pending] = {}  # oldest first
        with self._selector as selector:
            while not self._closed:
                ready = {key.fileobj for key, _ in selector.select(_POLL_SECONDS)}
                surplus = len(pending) - self._limits().connections
                for number, (connection, handshake) in enumerate(list(pending.items())):
                    session = handshake.advance() if connection in ready else None
                    is_late = number < surplus or not handshake.deadline.seconds_left
                    if session is not None or handshake.has_failed or is_late:
                        selector.unregister(connection)
                        del pending[connection]
                    if session is not None:
                        self._accept_session(connection, session)
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
        close_when_forked(connection)
        connection.setblocking(False)
        with suppress(OSError):  # on some systems, if the peer has gone
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = Deadline.after(self._limits().seconds, "the handshake with a peer")
        return _Pending(connection, self._secret, deadline)


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


def _listen(address: str, purpose: str) -> socket.socket:
    """Return a socket that listens at a free port of one address, and never of all."""
    try:
        ip = ipaddress.ip_address(str(address))  # a number would be an address, too
        if ip.is_unspecified or ip.is_multicast:
            raise ValueError(f"{address} means every address of this host")
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=128)
    except (ValueError, OSError) as e:
        raise StoreError(
            f"Cannot {purpose} at {address}",
            expected="the IP address of one interface of this host",
            found=str(e),
            todo="Name the address of this host in the network between the hosts",
        ) from e
    listener.setblocking(False)
    return listener
