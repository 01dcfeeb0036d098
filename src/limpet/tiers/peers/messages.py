"""The messages between two peers, as small frames, and the connection that carries them.

A frame is the length of the payload (4 bytes, big-endian), the payload (MessagePack of one of the
structs below), and its HMAC. The bytes of a file follow an ``Offer`` or a ``Coming`` as they are,
then an ``End`` with their digest.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Annotated, TypeVar, overload

import msgspec
from msgspec import Meta

from limpet.connections.auth import PROOF_BYTES, Session
from limpet.connections.error_parts import ErrorParts
from limpet.connections.sockets import close_when_forked
from limpet.deadline import Deadline
from limpet.errors import FormatError, Unavailable
from limpet.format.digest import Digest
from limpet.types import MIB

MAX_FRAME_BYTES = MIB
"""The largest payload of a frame. A longer one ends the connection before it is read."""

PART_BYTES = 256 * MIB
"""The bytes of a file whose transfer gets ``part_seconds``. So no file is too long for a slow
network, and no peer can be so slow that a transfer lasts forever."""

_CHECK_SECONDS = 1.0
"""Seconds after which a call that waits looks up again how much time is left."""

_LENGTH = struct.Struct(">I")

Length = Annotated[int, Meta(ge=0, le=1 << 60)]
Key = Annotated[str, Meta(max_length=900)]


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A message of one side to the other."""


class Hello(_Message, frozen=True):
    """The first message of a client: its rank."""

    rank: Annotated[int, Meta(ge=0)]


class Offer(_Message, frozen=True):
    """Asks the server to store a file. It answers ``Ready``, ``Stored``, or ``Refused``."""

    key: Key
    length: Length


class Ready(_Message, frozen=True):
    """Tells the client to send the bytes of the file, and an ``End``."""


class Fetch(_Message, frozen=True):
    """Asks for a range of a file. The server answers ``Coming``, the bytes of the range that the
    file has, and ``End``, or ``Refused``."""

    key: Key
    offset: Length
    length: Length


class Coming(_Message, frozen=True):
    """Announces this many bytes of a file of ``file_length`` bytes."""

    length: Length
    file_length: Length


class End(_Message, frozen=True):
    """The digest of the bytes before it, as the sender has read them."""

    digest: Digest


class Stored(_Message, frozen=True):
    """The server has the file, whose digest it computed from what it received or has."""

    length: Length
    digest: Digest


class Refused(_Message, frozen=True):
    """The error with which the server refuses a request."""

    error: ErrorParts


Message = Hello | Offer | Ready | Fetch | Coming | End | Stored | Refused

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

A = TypeVar("A", bound=_Message)
B = TypeVar("B", bound=_Message)
C = TypeVar("C", bound=_Message)


class Channel:
    """A connection to a peer, every call of which ends by ``deadline``.

    ``peer``: the name of the other side, for messages. ``stall_seconds``: the longest time without
    a byte. ``part_seconds``: the time that ``renew`` gives. ``limit`` returns the seconds that are
    left for all calls, and may change its mind at any time. Only one thread uses a channel, except
    that any may call ``interrupt``. All calls raise ``Unavailable`` if the connection or the time
    ends.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        deadline: Deadline,
        session: Session | None = None,
        stall_seconds: float = math.inf,
        part_seconds: float = math.inf,
        limit: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.peer = peer
        self.deadline = deadline
        self.session = session
        self.stall_seconds = stall_seconds
        self.part_seconds = part_seconds
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
        self.send_bytes(_LENGTH.pack(len(payload)), payload, self._open_session().sign(payload))

    @overload
    def receive(self, kind: type[A], /) -> A: ...
    @overload
    def receive(self, kind: type[A], second: type[B], /) -> A | B: ...
    @overload
    def receive(self, kind: type[A], second: type[B], third: type[C], /) -> A | B | C: ...
    def receive(self, *kinds: type[_Message]) -> _Message:
        """Return the next message, which must be of one of these kinds.

        Raises ``FormatError`` if it is another one or is invalid, and the error of a ``Refused``.
        """
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise self._invalid(f"a message of {length} bytes")
        payload = self.receive_bytes(length)
        self._open_session().verify(payload, self.receive_bytes(PROOF_BYTES), self.peer)
        try:
            message = _DECODER.decode(payload)
        except msgspec.DecodeError as e:
            raise self._invalid(str(e)) from e
        if isinstance(message, kinds):
            return message
        if isinstance(message, Refused):
            error = message.error.to_error()
            error.add_note(f"Reported by {self.peer}")
            raise error
        raise self._invalid(type(message).__name__)

    def renew(self, nbytes: int = 0) -> None:
        """Give the next answer, or the next ``PART_BYTES`` of a file, ``part_seconds`` from now.

        ``nbytes``: what the other side allocates or reads before it answers. It gets one second
        more for each ``PART_BYTES`` of them.
        """
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

    def _open_session(self) -> Session:
        if self.session is None:
            raise RuntimeError("a message before the handshake")
        return self.session

    def _wait_for(self, call: Callable[[memoryview], int], view: memoryview) -> int:
        """Return the result of a call of the socket, which may have to wait."""
        clock = self.deadline.clock
        stalled_at = clock() + self.stall_seconds
        while (seconds := min(self.seconds_left, stalled_at - clock())) > 0:
            self._socket.settimeout(min(seconds, _CHECK_SECONDS))
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
