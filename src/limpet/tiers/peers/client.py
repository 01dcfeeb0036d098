"""Send copies of files to a peer, and fetch files from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from limpet.errors import AlreadyExists, StoreError
from limpet.ranks.wire import connect
from limpet.storage.store import Store
from limpet.threads import no_op
from limpet.tiers.peers import transfer
from limpet.tiers.peers.addresses import PeerAddress


class PeerConnection(AbstractContextManager["PeerConnection", None]):
    """A connection to the server of a peer, for one thread. Raises ``Unavailable`` if it is away,
    slow, or busy, ``Denied`` for another secret, and its error if it refuses a request."""

    def __init__(
        self,
        address: PeerAddress,
        secret: str,
        rank: int,
        seconds: float,  # for each answer, and for each ``PART_BYTES`` of a file
        purpose: str,
        limit: Callable[[], float] = lambda: math.inf,  # the seconds left for all calls
    ) -> None:
        peer = f"rank {address.rank} at {address.host}:{address.port}"
        self._channel = connect(
            (address.host, address.port), secret, peer, transfer.MESSAGES, purpose, seconds, limit
        )
        try:
            self._channel.send(transfer.Hello(rank))
            self._channel.renew()
        except BaseException:
            self.close()
            raise

    def send_file(
        self, store: Store, key: str, advance: Callable[[], object] = no_op
    ) -> transfer.Stored:
        """Copy a file to the peer, unless the peer has it. ``advance`` is called before each
        ``PART_BYTES``. Raises ``AlreadyExists`` for other bytes there, and ``DigestMismatch``."""
        channel = self._channel
        length = store.stat(key).length
        channel.renew(length)
        channel.send(transfer.Offer(key, length))
        answer: transfer.Ready | transfer.Stored = channel.receive(transfer.Ready, transfer.Stored)
        if isinstance(answer, transfer.Stored):
            channel.renew(length)
            stored, digest = answer, transfer.digest_file(store, key, length, channel.check_time)
        else:
            digest = transfer.send_content(channel, store, key, 0, length, advance)
            channel.renew()
            stored = channel.receive(transfer.Stored)
        if (stored.length, stored.digest) != (length, digest):
            raise AlreadyExists(
                f"{channel.peer} has other bytes in {key}; nothing was changed",
                expected=f"{length} bytes with digest {digest}",
                found=f"{stored.length} bytes with digest {stored.digest}",
                todo="Save the version again: names of shards contain an attempt",
                key=key,
            )
        return stored

    def fetch_file(self, key: str, limit: int) -> bytes:
        """Return the bytes of a file of the peer. Raises ``NotFound``, ``StoreError`` if it is
        longer than ``limit`` bytes, and ``DigestMismatch``."""
        coming = self._request(key, 0, limit)
        if coming.file_length > limit or coming.length != coming.file_length:
            raise self._wrong_length(key, f"at most {limit} bytes", coming)
        data = bytearray(coming.length)
        self._receive(key, memoryview(data))
        return bytes(data)

    def fetch_range(self, key: str, file_length: int, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset`` on. Raises ``NotFound``, ``StoreError`` for another length,
        and ``DigestMismatch``; then ``into`` is undefined."""
        coming = self._request(key, offset, len(into))
        if (coming.file_length, coming.length) != (file_length, len(into)):
            raise self._wrong_length(key, f"{len(into)} bytes of {file_length}", coming)
        self._receive(key, into)

    def _request(self, key: str, offset: int, length: int) -> transfer.Coming:
        self._channel.renew()
        self._channel.send(transfer.Fetch(key, offset, length))
        return self._channel.receive(transfer.Coming)

    def _receive(self, key: str, into: memoryview) -> None:
        transfer.receive_content(
            self._channel, key, len(into), lambda at, count: into[at : at + count]
        )

    def _wrong_length(self, key: str, expected: str, coming: transfer.Coming) -> StoreError:
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

    def __exit__(self, *error: object) -> None:
        self.close()
