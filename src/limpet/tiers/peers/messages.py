"""The messages between two peers. The bytes of a file follow an ``Offer`` that is accepted, or a
``Coming``, as they are, then an ``End`` with their digest."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from limpet.format.digest import Digest
from limpet.ranks.wire import Message, Messages, Refused

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
