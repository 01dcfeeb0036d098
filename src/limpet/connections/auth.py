"""The handshake between two peers: each proves that it knows the secret of the job.

Everything before the proof has a fixed size, and nothing in it is interpreted. The secret never
travels, and no message of an earlier handshake is of use, because both sides choose a new random
number. The connection is authenticated, not encrypted: whoever can read the packets of the network
can read what is sent.

::

    client                                             server
    MAGIC, client_nonce                          ->
                <-  server_nonce, HMAC("server", client_nonce, server_nonce)
    HMAC("client", client_nonce, server_nonce)   ->

The messages after it carry an HMAC with a key that follows from both nonces (``Session``).
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from limpet.errors import Denied

MAGIC = b"LIMPET01"
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES


def make_secret() -> str:
    """Return a new random secret for a job, as hexadecimal text."""
    return secrets.token_hex(32)


def _proof(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """Return an HMAC-SHA256. All parts but the last one have a fixed size."""
    return hmac.digest(key, b"".join((label, b"\0", *parts)), "sha256")


@dataclass(slots=True)
class Session:
    """The authentication of the messages of one connection, in both directions.

    ``sent`` and ``received`` count the messages, so that none can be repeated or left out.
    """

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


class ClientHandshake:
    """The side that connects: send ``hello``, then what ``answer`` returns."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello = MAGIC + self._nonce

    def answer(self, challenge: bytes, peer: str) -> tuple[bytes, Session]:
        """Return the proof for a challenge of ``CHALLENGE_BYTES`` bytes, and the session.

        Raises ``Denied`` if the server does not know the secret.
        """
        nonces = self._nonce + challenge[:NONCE_BYTES]
        proof = challenge[NONCE_BYTES:]
        if not hmac.compare_digest(_proof(self._secret, b"server", nonces), proof):
            raise Denied(
                f"{peer} does not know the secret of this job; nothing was sent to it",
                expected="a process of this job",
                todo="Another job may use the address now: look up the address again",
            )
        session = Session(_proof(self._secret, b"session", nonces), True)
        return _proof(self._secret, b"client", nonces), session


class ServerHandshake:
    """The side that is connected to: call ``challenge``, then ``accept``."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._nonces = b""

    def challenge(self, hello: bytes) -> bytes | None:
        """Return the answer to a hello of ``HELLO_BYTES`` bytes. None: it is another protocol."""
        if hello[: len(MAGIC)] != MAGIC:
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = hello[len(MAGIC) :] + nonce
        return nonce + _proof(self._secret, b"server", self._nonces)

    def accept(self, proof: bytes) -> Session | None:
        """Return the session, or None if the proof is wrong."""
        if not hmac.compare_digest(_proof(self._secret, b"client", self._nonces), proof):
            return None
        return Session(_proof(self._secret, b"session", self._nonces), False)
