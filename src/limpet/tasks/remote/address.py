"""The address at which workers connect to a queue: ``tcp://HOST:PORT/SECRET``."""

from __future__ import annotations

import re
import socket
import time

from limpet.connections.auth import CHALLENGE_BYTES, ClientHandshake, Session
from limpet.connections.sockets import keep_alive
from limpet.errors import LimpetError, TaskError

_ADDRESS = re.compile(r"tcp://(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:/@\s]+)):(\d{1,5})/([0-9a-f]{64})")


def format_address(host: str, port: int, secret: str) -> str:
    """Return the address of a queue."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}/{secret}"


def connect_to(address: str, seconds: float) -> tuple[socket.socket, Session]:
    """Connect to an address within ``seconds``. Raises ``TaskError`` if nothing answers there,
    ``Denied`` if it does not know the secret, and ``LimpetError`` if the address is invalid."""
    parts = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if parts is None:
        raise LimpetError(
            "Invalid address of a task queue",  # without the text: it may have the secret
            expected="what TaskServer.listen has returned: tcp://HOST:PORT/SECRET",
            found=f"a text of {len(address)} characters"
            if isinstance(address, str)
            else type(address).__name__,
        )
    host, port, secret = parts[1] or parts[2], int(parts[3]), parts[4]
    peer = f"the owner of the task queue at {host}:{port}"
    end = time.monotonic() + seconds
    sock: socket.socket | None = None
    try:
        sock = socket.create_connection((host, port), seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        handshake = ClientHandshake(secret)
        sock.sendall(handshake.hello)
        proof, session = handshake.answer(_receive(sock, CHALLENGE_BYTES, end), peer)
        sock.sendall(proof)
    except BaseException as e:
        if sock is not None:
            sock.close()
        if not isinstance(e, (OSError, OverflowError, UnicodeError)):
            raise
        raise TaskError(
            f"Cannot connect to {peer}",
            expected=f"an answer within {seconds} s",
            found=f"{type(e).__name__}: {e}",
            todo="Find out whether its process runs, and whether this host can reach that address",
        ) from e
    return sock, session


def _receive(sock: socket.socket, count: int, end: float) -> bytes:
    """Return the next ``count`` bytes. Raises ``OSError`` unless they are here in time."""
    data = b""
    while len(data) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        received = sock.recv(count - len(data))
        if not received:
            raise ConnectionResetError("the other side has closed the connection")
        data += received
    return data
