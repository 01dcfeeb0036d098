"""The messages between two peers. The bytes of a file follow an ``Offer`` that is accepted, or a
``Coming``, as they are, then an ``End`` with their digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from limpet.buffers import Buffer
from limpet.errors import DigestMismatch
from limpet.format.digest import Digest
from limpet.ranks.wire import PART_BYTES, Channel, Message, Messages, Refused
from limpet.storage.store import Store
from limpet.threads import no_op
from limpet.types import MIB

STEP_BYTES = MIB
"""The bytes on their way at once: they stay in the processor's cache for their digest."""

Length = Annotated[int, Meta(ge=0, le=1 << 60)]
Key = Annotated[str, Meta(max_length=900)]


class Hello(Message, frozen=True):
    """The first message of a client: its rank."""

    rank: Annotated[int, Meta(ge=0)]


class Offer(Message, frozen=True):
    """Asks the server to store a file. It answers ``Ready``, ``Stored``, or ``Refused``."""

    key: Key
    length: Length


class Ready(Message, frozen=True):
    """Tells the client to send the bytes of the file, and an ``End``."""


class Fetch(Message, frozen=True):
    """Asks for a range of a file. The server answers ``Coming``, the bytes of the range that the
    file has, and ``End``, or ``Refused``."""

    key: Key
    offset: Length
    length: Length


class Coming(Message, frozen=True):
    """Announces this many bytes of a file of ``file_length`` bytes."""

    length: Length
    file_length: Length


class End(Message, frozen=True):
    """The digest of the bytes before it, as the sender has read them."""

    digest: Digest


class Stored(Message, frozen=True):
    """The server has the file, whose digest it computed from what it received or has."""

    length: Length
    digest: Digest


MESSAGES = Messages(
    msgspec.msgpack.Decoder(Hello | Offer | Ready | Fetch | Coming | End | Stored | Refused)
)


def send_content(
    channel: Channel,
    store: Store,
    key: str,
    offset: int,
    length: int,
    advance: Callable[[], object] = no_op,
) -> str:
    """Send a range of a file, then the digest of the very bytes that were sent, and return it.
    ``advance`` is called before each ``PART_BYTES``. Raises ``StoreError``."""
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
    """Receive bytes, and return their digest, which is the sender's. ``view(offset, length)``
    returns memory for them; ``write_at`` is called once it is filled. Raises ``DigestMismatch``."""
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
    """Yield the bytes of a range, each view valid until the next. They are read, not mapped: a
    mapping of a file that somebody truncates would end this process with SIGBUS."""
    buffer = Buffer(STEP_BYTES)
    for start in range(0, length, STEP_BYTES):
        view = buffer.view[: min(STEP_BYTES, length - start)]
        store.get_range(key, offset + start, len(view), view)
        yield view
