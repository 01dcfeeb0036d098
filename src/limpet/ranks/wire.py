"""The wire between processes of a job: framing, authentication, deadlines, and errors.

A frame is the length of the payload (4 bytes, big-endian), the payload (MessagePack of a
``Message``, never a pickle), and, over TCP, its HMAC. Raw bytes may follow a message that announces
them. Each side of a TCP connection first proves that it knows the secret of the job, which never
travels. Before the proof, sizes are fixed and nothing is interpreted; the numbers are random::

    client                                             server
    MAGIC, client_nonce                          ->
                <-  server_nonce, HMAC("server", client_nonce, server_nonce)
    HMAC("client", client_nonce, server_nonce)   ->

The messages after it carry an HMAC with a key that follows from both nonces (``Session``). They are
authenticated, not encrypted: whoever can read the packets of the network can read what is sent.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from typing import Any, TypeVar, overload

import msgspec

from limpet.deadline import Deadline
from limpet.errors import Denied, FormatError, LimpetError, StoreError, Unavailable
from limpet.machine import after_fork
from limpet.ranks.error_report import ErrorReport
from limpet.threads import start_thread
from limpet.types import MIB

MAGIC = b"LIMPET01"
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES

MAX_FRAME_BYTES = MIB
"""The longest payload of a frame, by default."""

PART_BYTES = 256 * MIB
"""The bytes of a file whose transfer gets ``part_seconds``. So no file is too long for a slow
network, and no peer can be so slow that a transfer lasts forever."""

_CONNECT_SECONDS = 10.0
"""The longest time for a connection and its handshake. A host that is gone does not answer at all,
and a process that is stopped makes no handshake."""

_POLL_SECONDS = 0.2
"""Seconds after which the times of the handshakes are checked."""

_LENGTH = struct.Struct(">I")

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""A connection ends 30 s after the last sign of life of the other host. Some systems lack some."""


# -- messages ------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message of one side to the other."""


class Refused(Message, frozen=True):
    """The error with which the other side refuses a request."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Messages:
    """A set of messages, made at the import: ``msgspec`` crashes if two threads build ``decoder``,
    of their union with ``Refused``. A longer payload than ``max_bytes`` is not read."""

    decoder: msgspec.msgpack.Decoder[Any]
    max_bytes: int = MAX_FRAME_BYTES


A = TypeVar("A", bound=Message)
B = TypeVar("B", bound=Message)


# -- authentication ------------------------------------------------------------------------------


def make_secret() -> str:
    """Return a new random secret for a job, as hexadecimal text."""
    return secrets.token_hex(32)


def _proof(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """Return an HMAC-SHA256. All parts but the last one have a fixed size."""
    return hmac.digest(key, b"".join((label, b"\0", *parts)), "sha256")


@dataclass(slots=True)
class Session:
    """The authentication of a connection's messages, in both directions. The counts prevent that
    one is repeated or left out."""

    key: bytes = field(repr=False)
    is_client: bool
    sent: int = 0
    received: int = 0

    def sign(self, payload: bytes) -> bytes:
        """Return the code of the next message that this side sends."""
        self.sent += 1
        return self._code(self.is_client, self.sent, payload)

    def verify(self, payload: bytes, code: bytes, peer: str) -> None:
        """Raise ``Denied`` unless the next message of the other side has this code."""
        self.received += 1
        expected = self._code(not self.is_client, self.received, payload)
        if not hmac.compare_digest(expected, code):
            raise Denied(
                f"A message from {peer} was changed on its way",
                todo="Find out what changes packets in this network, then send it again",
            )

    def _code(self, from_client: bool, number: int, payload: bytes) -> bytes:
        label = b"from client" if from_client else b"from server"
        return _proof(self.key, label, number.to_bytes(8, "big"), payload)


def answer_challenge(
    secret: str, nonce: bytes, challenge: bytes, peer: str
) -> tuple[bytes, Session]:
    """Return the proof of the client that sent ``MAGIC + nonce``, and its session. ``Denied``: the
    server does not know the secret."""
    key, nonces = secret.encode(), nonce + challenge[:NONCE_BYTES]
    if not hmac.compare_digest(_proof(key, b"server", nonces), challenge[NONCE_BYTES:]):
        raise Denied(
            f"{peer} does not know the secret of this job; nothing was sent to it",
            expected="a process of this job",
            todo="Another job may use the address now: look up the address again",
        )
    return _proof(key, b"client", nonces), Session(_proof(key, b"session", nonces), True)


def make_challenge(secret: str, hello: bytes) -> tuple[bytes, bytes] | None:
    """Return both nonces, and the answer to a hello of ``HELLO_BYTES``; None: another protocol."""
    if hello[: len(MAGIC)] != MAGIC:
        return None
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = hello[len(MAGIC) :] + nonce
    return nonces, nonce + _proof(secret.encode(), b"server", nonces)


def accept_proof(secret: str, nonces: bytes, proof: bytes) -> Session | None:
    """Return the session of the server, or None if the proof is wrong."""
    key = secret.encode()
    if not hmac.compare_digest(_proof(key, b"client", nonces), proof):
        return None
    return Session(_proof(key, b"session", nonces), False)


# -- a connection --------------------------------------------------------------------------------

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_when_forked(connection: socket.socket) -> None:
    """Close a socket in a forked process. Otherwise, a connection would seem to be alive as long as
    a worker of a data loader lives."""
    _open_sockets.add(connection)


def _close_sockets() -> None:
    for connection in list(_open_sockets):
        connection.close()


after_fork(_close_sockets)


def _prepare(connection: socket.socket) -> None:
    """Send small messages at once, and find out whether the other host is still there."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Channel:
    """A connection that carries messages, every call of which ends by ``deadline``, or raises
    ``Unavailable``. ``stall_seconds``: the longest time without a byte. ``part_seconds``: what
    ``renew`` gives. ``limit`` returns the seconds that are left for all calls, and may change at
    any time. ``session``: None for a pair of sockets that no other process can reach. Only one
    thread uses a channel, except that any may call ``interrupt``."""

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        messages: Messages,
        deadline: Deadline,
        session: Session | None = None,
        *,
        stall_seconds: float = math.inf,
        part_seconds: float = math.inf,
        limit: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.peer = peer
        self.deadline = deadline
        self.session = session
        self.stall_seconds = stall_seconds
        self.part_seconds = part_seconds
        self._messages = messages
        self._limit = limit
        self._socket = connection
        close_when_forked(connection)

    def send_bytes(self, *views: bytes | memoryview) -> None:
        """Send all bytes, in one packet if they are few."""
        view = memoryview(views[0] if len(views) == 1 else b"".join(views))
        with self._timed("send to"):
            while view:
                view = view[self._wait_for(self._socket.send, view) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill a view with the next bytes."""
        with self._timed("receive from"):
            while view:
                count = self._wait_for(self._socket.recv_into, view)
                if not count:
                    raise ConnectionResetError("the other side has closed the connection")
                view = view[count:]

    def receive_bytes(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def send(self, message: Message) -> None:
        """Send a message."""
        payload = msgspec.msgpack.encode(message)
        code = self.session.sign(payload) if self.session else b""
        self.send_bytes(_LENGTH.pack(len(payload)), payload, code)

    @overload
    def receive(self, kind: type[A], /) -> A: ...
    @overload
    def receive(self, kind: type[A], second: type[B], /) -> A | B: ...
    @overload
    def receive(self, *kinds: type[Message]) -> Any: ...
    def receive(self, *kinds: type[Message]) -> Any:
        """Return the next message. Raises ``FormatError`` if it is of another kind or invalid,
        ``Denied`` if it was changed, and the error of a ``Refused``."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if length > self._messages.max_bytes:
            raise self._invalid(f"a message of {length} bytes")
        payload = self.receive_bytes(length)
        if self.session:
            self.session.verify(payload, self.receive_bytes(PROOF_BYTES), self.peer)
        try:
            message = self._messages.decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise self._invalid(str(e)) from e
        if isinstance(message, kinds):
            return message
        if isinstance(message, Refused):
            error = message.error.to_peer_error()
            error.add_note(f"Reported by {self.peer}")
            raise error
        raise self._invalid(type(message).__name__)

    def refuse(self, error: LimpetError) -> None:
        """Answer with an error. If the connection has ended, nobody waits for it."""
        with suppress(LimpetError):
            self.send(Refused(ErrorReport.of(error)))

    def renew(self, nbytes: int = 0) -> None:
        """Give the next answer, or ``PART_BYTES`` of a file, ``part_seconds`` from now, and one
        more for each ``PART_BYTES`` of ``nbytes``, which the other side allocates or reads."""
        seconds = self.part_seconds + nbytes / PART_BYTES
        self.deadline = replace(self.deadline, at=self.deadline.clock() + seconds)

    @property
    def seconds_left(self) -> float:
        """The seconds until the calls fail; 0.0 after ``interrupt``."""
        return max(0.0, min(self.deadline.seconds_left, self._limit()))

    def check_time(self) -> None:
        """Raise ``Unavailable`` if the time is over, or after ``interrupt``."""
        with self._timed("go on with"):
            if not self.seconds_left:
                raise TimeoutError

    def interrupt(self) -> None:
        """Make the call in progress and all later calls fail at once."""
        self._limit = lambda: 0.0
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _wait_for(self, call: Callable[[memoryview], int], view: memoryview) -> int:
        """Return the result of a call of the socket, which may have to wait."""
        clock = self.deadline.clock
        stalled_at = clock() + self.stall_seconds
        while (seconds := min(self.seconds_left, stalled_at - clock())) > 0:
            self._socket.settimeout(min(seconds, 1.0))  # the time that is left may change
            with suppress(TimeoutError):
                return call(view)
        raise TimeoutError

    @contextmanager
    def _timed(self, action: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as e:
            raise Unavailable(
                f"Cannot {action} {self.peer}: the time is over for {self.deadline.purpose}",
                todo="Find out whether its process is stopped or its host is overloaded",
            ) from e
        except OSError as e:
            raise Unavailable(
                f"Cannot {action} {self.peer}: {e.strerror or e}",
                todo="Its process may have ended, or may be busy; look up its address again",
            ) from e

    def _invalid(self, found: str) -> FormatError:
        return FormatError(
            f"An invalid message came from {self.peer}",
            expected="a message of this protocol",
            found=found,
            todo="Use the same version of Limpet on all hosts",
        )


def connect(
    address: tuple[str, int],
    secret: str,
    peer: str,
    messages: Messages,
    purpose: str,
    part_seconds: float,
    limit: Callable[[], float] = lambda: math.inf,
) -> Channel:
    """Connect to a ``Listener``, with the handshake, within 10 s or ``part_seconds``.
    ``Unavailable``: nothing answers; ``Denied``: it does not know the secret. See ``Channel``."""
    deadline = Deadline.after(min(_CONNECT_SECONDS, part_seconds), purpose)
    try:
        left = max(0.001, min(deadline.seconds_left, limit()))
        connection = socket.create_connection(address, left)
    except (OSError, OverflowError, UnicodeError) as e:
        raise Unavailable(
            f"Cannot connect to {peer}: {getattr(e, 'strerror', None) or e}",
            todo="Its process may have ended; look up its address again",
        ) from e
    channel = Channel(connection, peer, messages, deadline, part_seconds=part_seconds, limit=limit)
    try:
        with channel._timed("connect to"):
            _prepare(connection)
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel.send_bytes(MAGIC, nonce)
        challenge = channel.receive_bytes(CHALLENGE_BYTES)
        proof, session = answer_challenge(secret, nonce, challenge, peer)
        channel.send_bytes(proof)
    except BaseException:
        channel.close()
        raise
    channel.session = session
    return channel


# -- servers -------------------------------------------------------------------------------------


class Connections:
    """The connections of a server, at most ``most``, each of which has a thread."""

    def __init__(self, name: str, most: float = math.inf) -> None:
        self._name, self._most = name, most
        self._lock = Lock()
        self._threads: dict[Channel, Thread] = {}
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._threads)

    def start(self, channel: Channel, serve: Callable[[Channel], object]) -> bool:
        """Serve a connection, or close it and return False. An error that ``serve(channel)`` raises
        is sent to the other side, and ends the connection."""
        thread = Thread(target=self._run, args=(channel, serve), name=self._name, daemon=True)
        with self._lock:
            is_served = not self.is_closed and len(self._threads) < self._most
            if is_served:
                self._threads[channel] = thread
        if is_served and start_thread(thread):
            return True
        self._forget(channel)
        return False

    def close(self) -> None:
        """End all connections, and serve no more of them."""
        with self._lock:
            self.is_closed = True
            threads = dict(self._threads)
        for channel in threads:
            channel.interrupt()
        for channel, thread in threads.items():
            with suppress(RuntimeError):  # Ctrl-C came before it was started
                thread.join(5.0)
            if not thread.is_alive():
                self._forget(channel)  # otherwise, it does so itself

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._threads.pop(channel, None)
        channel.close()

    def _run(self, channel: Channel, serve: Callable[[Channel], object]) -> None:
        try:
            serve(channel)
        except Unavailable:
            return  # the connection has ended
        except LimpetError as e:
            channel.refuse(e)
        except BaseException as e:  # noqa: BLE001  (top of a thread: the other side raises it)
            channel.refuse(StoreError(f"The server failed: {type(e).__name__}: {e}"))
        finally:
            self._forget(channel)


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """``connections``: the largest number of connections that have not proved yet that they know
    the secret; the oldest one is closed. ``seconds``: the time for that proof."""

    connections: int = 64
    seconds: float = 5.0


@dataclass(eq=False, slots=True)
class _Handshake:
    """A connection whose peer has not yet proved that it knows the secret. ``received``: the bytes
    of the message that is arriving; ``nonces``: both, after the hello."""

    connection: socket.socket
    deadline: Deadline
    received: bytes = b""
    nonces: bytes = b""
    has_failed: bool = False


class Listener:
    """Listens at ``address``, an IP address of this host, and a ``port`` (0: a free one), or raises
    ``StoreError``. One thread makes all handshakes, without waiting for any: strangers can occupy
    neither threads nor memory; at most they displace one another. ``purpose``, for errors: "serve
    copies". ``accept`` gets each connection whose peer has proved that it knows ``secret``, and
    must neither wait nor raise."""

    def __init__(
        self,
        address: str,
        secret: str,
        purpose: str,
        accept: Callable[[socket.socket, Session], object],
        limits: HandshakeLimits = HandshakeLimits(),
        port: int = 0,
    ) -> None:
        self._secret, self._accept_session, self._limits = secret, accept, limits
        self._closed = False
        with ExitStack() as opened:  # closes what is open if this fails
            self._listener = opened.enter_context(_listen(address, port, purpose))
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

    def _run(self) -> None:
        pending: dict[socket.socket, _Handshake] = {}  # oldest first
        with self._selector as selector:
            while not self._closed:
                ready = {key.fileobj for key, _ in selector.select(_POLL_SECONDS)}
                surplus = len(pending) - self._limits.connections
                for number, (connection, handshake) in enumerate(list(pending.items())):
                    session = self._advance(handshake) if connection in ready else None
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

    def _accept(self) -> _Handshake | None:
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
            _prepare(connection)
        deadline = Deadline.after(self._limits.seconds, "the handshake with a peer")
        return _Handshake(connection, deadline)

    def _advance(self, handshake: _Handshake) -> Session | None:
        """Read what has arrived, without a wait. Return the session once the secret is proved."""
        wanted = PROOF_BYTES if handshake.nonces else HELLO_BYTES
        try:
            data = handshake.connection.recv(wanted - len(handshake.received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        handshake.received += data
        handshake.has_failed = not data
        if len(handshake.received) < wanted:
            return None
        received, handshake.received = handshake.received, b""
        if handshake.nonces:
            session = accept_proof(self._secret, handshake.nonces, received)
            handshake.has_failed = session is None
            return session
        handshake.has_failed = True
        if (made := make_challenge(self._secret, received)) is not None:
            handshake.nonces, challenge = made
            with suppress(OSError):  # the first bytes of a connection: there is space for them
                sent = handshake.connection.send(challenge)
                handshake.has_failed = sent < len(challenge)
        return None


def _listen(address: str, port: int, purpose: str) -> socket.socket:
    """Return a socket that listens at a port of one address, and never of all."""
    try:
        ip = ipaddress.ip_address(str(address))  # a number would be an address, too
        if ip.is_unspecified or ip.is_multicast:
            raise ValueError(f"{address} means every address of this host")
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=128)
    except (ValueError, OSError, OverflowError) as e:
        raise StoreError(
            f"Cannot {purpose} at {address}",
            expected="the IP address of one interface of this host, and a free port",
            found=str(e),
            todo="Name the address of this host in the network between the hosts",
        ) from e
    listener.setblocking(False)
    return listener
