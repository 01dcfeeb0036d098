"""Send copies of files to a peer, and fetch files from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from limpet.errors import AlreadyExists, StoreError
from limpet.ranks.wire import connect
from limpet.storage.store import Store
from limpet.threads import no_op
from limpet.tiers.peers.addresses import PeerAddress
from limpet.tiers.peers.transfer import (
    MESSAGES,
    Coming,
    Fetch,
    Hello,
    Offer,
    Ready,
    Stored,
    digest_file,
    receive_content,
    send_content,
)


@dataclass(frozen=True, slots=True)
class FileReceipt:
    """A file that the side that received it has stored, with its digest of what it received."""

    key: str
    length: int
    digest: str


class PeerConnection:
    """A connection to the server of a peer. It is a context manager, for one thread.

    ``secret``: that of the job; ``rank``: the own rank; ``seconds``: the time for each answer, and
    for each ``PART_BYTES`` of a file; ``purpose``: what this is, for messages; ``limit`` returns
    the seconds that are left for all calls, and may change its mind at any time. After an error,
    the connection is closed. The calls raise ``Unavailable`` if the peer is away, slow, or busy,
    ``Denied`` if it does not know the secret, and its own error if it refuses a request.
    """

    def __init__(
        self,
        address: PeerAddress,
        secret: str,
        rank: int,
        seconds: float,
        purpose: str,
        limit: Callable[[], float] = lambda: math.inf,
    ) -> None:
        peer = f"rank {address.rank} at {address.host}:{address.port}"
        self._channel = connect(
            (address.host, address.port), secret, peer, MESSAGES, purpose, seconds, limit
        )
        try:
            self._channel.send(Hello(rank))
            self._channel.renew()
        except BaseException:
            self.close()
            raise

    def send_file(
        self, store: Store, key: str, advance: Callable[[], object] = no_op
    ) -> FileReceipt:
        """Copy a file of ``store`` to the peer, under the same key. Return its receipt.

        A file that the peer has already is not sent again. ``advance`` is called before each
        ``PART_BYTES``; it raises to end the transfer. Raises ``AlreadyExists`` if the peer has
        other bytes there, and ``DigestMismatch`` if bytes changed on their way.
        """
        channel = self._channel
        length = store.stat(key).length
        channel.renew(length)
        channel.send(Offer(key, length))
        answer: Ready | Stored = channel.receive(Ready, Stored)
        if isinstance(answer, Stored):
            channel.renew(length)
            stored, digest = answer, digest_file(store, key, length, channel.check_time)
        else:
            digest = send_content(channel, store, key, 0, length, advance)
            channel.renew()
            stored = channel.receive(Stored)
        if (stored.length, stored.digest) != (length, digest):
            raise AlreadyExists(
                f"{channel.peer} has other bytes in {key}; nothing was changed",
                expected=f"{length} bytes with digest {digest}",
                found=f"{stored.length} bytes with digest {stored.digest}",
                todo="Save the version again: names of shards contain an attempt",
                key=key,
            )
        return FileReceipt(key, length, digest)

    def fetch_file(self, key: str, limit: int) -> bytes:
        """Return the bytes of a small file of the peer.

        Raises ``NotFound`` if the peer does not have it, ``StoreError`` if it is longer than
        ``limit`` bytes, and ``DigestMismatch`` if bytes changed on their way.
        """
        coming = self._request(key, 0, limit)
        if coming.file_length > limit or coming.length != coming.file_length:
            raise self._wrong_length(key, f"at most {limit} bytes", coming)
        data = bytearray(coming.length)
        self._receive(key, memoryview(data))
        return bytes(data)

    def fetch_range(self, key: str, file_length: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes of a file of the peer from ``offset`` on.

        Raises ``NotFound`` if the peer does not have the file, ``StoreError`` if it does not have
        ``file_length`` bytes or ends before the range does, and ``DigestMismatch`` if bytes changed
        on their way. Then, ``into`` is undefined.
        """
        coming = self._request(key, offset, len(into))
        if (coming.file_length, coming.length) != (file_length, len(into)):
            raise self._wrong_length(key, f"{len(into)} bytes of {file_length}", coming)
        self._receive(key, into)

    def _request(self, key: str, offset: int, length: int) -> Coming:
        self._channel.renew()
        self._channel.send(Fetch(key, offset, length))
        return self._channel.receive(Coming)

    def _receive(self, key: str, into: memoryview) -> None:
        receive_content(self._channel, key, len(into), lambda at, count: into[at : at + count])

    def _wrong_length(self, key: str, expected: str, coming: Coming) -> StoreError:
        self.close()  # the bytes are on their way
        return StoreError(
            f"{key} of {self._channel.peer} has another length",
            expected=expected,
            found=f"{coming.length} bytes of {coming.file_length}",
            key=key,
        )

    def close(self) -> None:
        """Close the connection. What the peer has half received is gone."""
        self._channel.close()

    def __enter__(self) -> PeerConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
