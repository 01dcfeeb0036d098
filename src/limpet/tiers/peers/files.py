"""The bytes of one file, from a store to a connection or back, with their digest on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import xxhash

from limpet.buffers import Buffer
from limpet.errors import DigestMismatch
from limpet.ranks.wire import PART_BYTES, Channel
from limpet.storage.store import MappedUpload, Stat, Store, Upload, put_mapped
from limpet.threads import no_op
from limpet.tiers.peers.messages import End
from limpet.types import MIB

STEP_BYTES = MIB
"""The bytes that are received, or read and sent, at once: they stay in the processor's cache until
their digest is computed."""


def begin_copy(store: Store, key: str, length: int) -> MappedUpload:
    """Begin to write a file that is received. Raises ``StoreError``."""
    return put_mapped(store, key, length) or _BufferedUpload(store.put(key, length))


class _BufferedUpload(Upload):
    """An upload to a disk. All views share one buffer, so only one may be in use."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._buffer = Buffer(STEP_BYTES)

    def view(self, offset: int, length: int) -> memoryview:
        return self._buffer.view[:length]

    def write_at(self, offset: int, *data: memoryview) -> None:
        self._upload.write_at(offset, *data)

    def commit(self) -> Stat:
        return self._upload.commit()

    def abort(self) -> None:
        self._upload.abort()


def send_content(
    channel: Channel,
    store: Store,
    key: str,
    offset: int,
    length: int,
    advance: Callable[[], object] = no_op,
) -> str:
    """Send a range of a file, then the digest of its bytes. Return the digest.

    The digest is that of the very bytes that are sent. ``advance`` is called before each
    ``PART_BYTES``. Raises ``StoreError``.
    """
    hasher = xxhash.xxh3_128()
    for number, view in enumerate(_read_steps(store, key, offset, length)):
        if not number % (PART_BYTES // STEP_BYTES):
            channel.renew()
            advance()
        hasher.update(view)
        channel.send_bytes(view)
    digest = hasher.hexdigest()
    channel.send(End(digest))
    return digest


def receive_content(
    channel: Channel,
    key: str,
    length: int,
    view: Callable[[int, int], memoryview],
    write_at: Callable[[int, memoryview], object] = no_op,
) -> str:
    """Receive bytes of a file, and return their digest, which is that of the sender.

    ``view(offset, length)`` returns memory for so many of the bytes, with which ``write_at`` is
    called once it is filled. Raises ``DigestMismatch``.
    """
    hasher = xxhash.xxh3_128()
    for start in range(0, length, STEP_BYTES):
        if not start % PART_BYTES:
            channel.renew()
        step = view(start, min(STEP_BYTES, length - start))
        channel.receive_into(step)
        hasher.update(step)
        write_at(start, step)
    found, expected = hasher.hexdigest(), channel.receive(End).digest
    if found != expected:
        raise DigestMismatch(
            f"{key} was damaged on its way from {channel.peer}; it is not used",
            expected=f"digest {expected}",
            found=found,
            todo="Send it again; if this repeats, test the memory of both hosts and the network",
        )
    return found


def digest_file(store: Store, key: str, length: int, check: Callable[[], object]) -> str:
    """Return the digest of a file. ``check`` is called regularly; it raises to end this."""
    hasher = xxhash.xxh3_128()
    for view in _read_steps(store, key, 0, length):
        check()
        hasher.update(view)
    return hasher.hexdigest()


def _read_steps(store: Store, key: str, offset: int, length: int) -> Iterator[memoryview]:
    """Yield the bytes of a range of a file. Each view is valid until the next one.

    The file is not mapped. If another process truncated it, an access to the mapping would end this
    process with SIGBUS; a read fails.
    """
    buffer = Buffer(STEP_BYTES)
    for start in range(0, length, STEP_BYTES):
        view = buffer.view[: min(STEP_BYTES, length - start)]
        store.get_range(key, offset + start, len(view), view)
        yield view
