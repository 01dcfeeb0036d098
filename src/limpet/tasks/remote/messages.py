"""The messages between a worker process and the owner of a queue: JSON lines, no pickle.

A request has a number, which its reply repeats. The owner answers a request that arrives twice with
the same reply, and does it once. Results are JSON text within the JSON, which keeps NaN.
"""

from __future__ import annotations

import socket
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from limpet.connections.auth import PROOF_BYTES, Session
from limpet.connections.error_parts import ErrorParts
from limpet.errors import TaskError
from limpet.format.strict_json import DECODE_ERRORS, StrictDecoder
from limpet.tasks.task import Report

MAX_LINE = 64 << 20
"""The most bytes of a message: a result may contain the state of a metric."""

MAX_NAME = 200
"""The most characters of the name of a worker, which is part of messages."""

_RECEIVE_BYTES = 1 << 16
_CODE_LENGTH = 2 * PROOF_BYTES


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    number: int


class Hello(_Message, frozen=True):
    """The first message of a worker that has connected to an address: its name. Later, it has no
    effect: the leases of a worker are those of one name."""

    worker: Annotated[str, Meta(max_length=MAX_NAME)]


class Get(_Message, frozen=True):
    """Lease a task. The reply is a ``Leased`` or, without a task, a ``Reply``."""

    kind: str
    lease_seconds: float | None


class Finished(_Message, frozen=True):
    """Ask ``Queue.finished``."""

    kind: str


class Consumed(_Message, frozen=True):
    """Records were consumed, by one step."""

    reports: list[Report]


class Done(_Message, frozen=True):
    """A task is complete."""

    report: Report
    result: str


class Failed(_Message, frozen=True):
    """An attempt failed."""

    report: Report
    cause: str


class Released(_Message, frozen=True):
    """A worker returns a task."""

    report: Report


class Renew(_Message, frozen=True):
    """Start the time of a lease anew."""

    report: Report


Request = Hello | Get | Finished | Consumed | Done | Failed | Released | Renew


class Leased(_Message, frozen=True):
    """A task."""

    kind: str
    id: int
    attempt: int
    job: str
    data: str
    start: int
    stop: int | None
    epoch: int
    position: int


class Reply(_Message, frozen=True):
    """The answer to a request: yes or no."""

    value: bool


class Refused(_Message, frozen=True):
    """The error that a request has raised."""

    error: ErrorParts


Answer = Leased | Reply | Refused

_REQUESTS: StrictDecoder[Request] = StrictDecoder(msgspec.json.Decoder(Request))
_ANSWERS: StrictDecoder[Answer] = StrictDecoder(msgspec.json.Decoder(Answer))
_encoder = msgspec.json.Encoder()


def encode(message: Request | Answer) -> bytes:
    """Return a message as a line. Raises ``TaskError`` if it is too long."""
    line = _encoder.encode(message) + b"\n"
    if len(line) > MAX_LINE:
        raise TaskError(
            "A message of a task queue is too long",
            expected=f"at most {MAX_LINE} bytes",
            found=len(line),
            todo="Return a smaller result: sums and counts instead of one value per record",
        )
    return line


class Connection:
    """One end of a socket that carries messages. Not thread-safe.

    With a ``session``, each line begins with the code that authenticates it, as hexadecimal text.
    """

    def __init__(self, sock: socket.socket, peer: str, session: Session | None = None) -> None:
        self._socket, self._peer, self._session = sock, peer, session
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer without the end of a line

    def send(self, line: bytes, timeout: float) -> None:
        """Send an encoded message within ``timeout`` seconds. Raises ``OSError``."""
        code = self._session.sign(line).hex().encode() if self._session else b""
        self._socket.settimeout(timeout)
        self._socket.sendall(code + line)

    def receive_request(self) -> Request | None:
        """Return the next request, or None at the end of the connection. Waits as long as the
        worker is connected: it may be at work on a task."""
        line = self._receive_line(None)
        return None if line is None else self._decode(_REQUESTS, line)

    def receive_answer(self, timeout: float) -> Answer | None:
        """Return the next answer, or None at the end of the connection."""
        line = self._receive_line(timeout)
        return None if line is None else self._decode(_ANSWERS, line)

    def _receive_line(self, timeout: float | None) -> bytes | None:
        """Return a line. Raises ``OSError``, and ``TimeoutError`` unless all of it is here in time.

        A line that is cut off by the end of the connection is no message.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (stop := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE + _CODE_LENGTH:
                raise self._invalid(f"a line of at most {MAX_LINE} bytes", "a longer one")
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no message from {self._peer} in time")
            self._socket.settimeout(left)
            received = self._socket.recv(_RECEIVE_BYTES)
            if not received:
                return None
            self._buffer += received
        line = bytes(self._buffer[:stop])
        del self._buffer[: stop + 1]
        self._searched = 0
        return line

    def _decode(self, decoder: StrictDecoder[Any], line: bytes) -> Any:
        if self._session:
            code, line = line[:_CODE_LENGTH], line[_CODE_LENGTH:]
            self._session.verify(line + b"\n", _to_bytes(code), self._peer)
        try:
            return decoder.decode(line)
        except DECODE_ERRORS as e:
            raise self._invalid("a message", f"{e}: {line[:200]!r}") from e

    def _invalid(self, expected: str, found: str) -> TaskError:
        return TaskError(
            f"{self._peer} sent something that is not a message of a task queue",
            expected=expected,
            found=found,
            todo="Use one version of Limpet for the owner and its workers",
        )


def _to_bytes(code: bytes) -> bytes:
    """Return a code from its hexadecimal text, or one that is wrong if it is none."""
    try:
        return bytes.fromhex(code.decode())
    except ValueError:
        return b""
