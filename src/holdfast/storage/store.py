"""The Store protocol: bytes at keys. Every place that Holdfast writes to speaks it.

A key is a relative path of segments joined by ``/`` (``version_120/manifest.json``). Every
method may be called from any thread. Every failure is a ``StoreError`` that names key and store;
only ``Unavailable`` is worth trying again.

``holdfast.testing.StoreContract`` is the same contract as tests; ``MemoryStore`` is the
reference. (One small interface with its MUSTs in writing, as restic's ``backend.go`` has it.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import StoreError


@dataclass(frozen=True, slots=True)
class Traits:
    """What the layers above must know of a store, as data.

    ``alignment``: offsets that are multiples of it are written and read fastest (bytes).
    ``durable``: what it holds survives the death of the machine, not only of the process.
    """

    name: str
    alignment: int
    durable: bool


@dataclass(frozen=True, slots=True)
class Stat:
    """An object: its key, its length in bytes, and when it was written.

    ``modified`` is in seconds since 1970 by the store's own clock, which may jump.
    """

    key: str
    length: int
    modified: float


class Upload(Protocol):
    """One object on its way into a store; invisible until ``commit`` has returned.

    Used as a context: leaving it without ``commit`` aborts.
    """

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``.

        May be called from many threads at once, in any order; every byte of the object MUST be
        written exactly once. ``data`` MUST NOT change until the call has returned.
        """
        ...

    def commit(self) -> Stat:
        """Make the object durable, then visible, whole.

        Raises ``StoreError`` if its length is not the announced one, if a write was lost, or if
        another object has the key (``AlreadyExists``). After an error the object is not visible,
        unless the error says that the outcome is unknown.
        """
        ...

    def abort(self) -> None:
        """Give up and remove what was written. May be called at any time, also twice."""
        ...

    def __enter__(self) -> Upload: ...

    def __exit__(self, *exc: object) -> None: ...


class Store(Protocol):
    """A place for bytes at keys."""

    @property
    def traits(self) -> Traits: ...

    @property
    def url(self) -> str:
        """Where this is, as the user would write it."""
        ...

    def put(self, key: str, length: int) -> Upload:
        """Begin to write an object of ``length`` bytes under a key that is new.

        For the large files. The caller makes keys unique (names carry an attempt), so a store
        that cannot tell need not look.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        """Write a small object whole, durably, if and only if the key is free.

        Of any number of concurrent calls with different bytes exactly one returns; the others
        raise ``AlreadyExists``. An unknown outcome is settled here: the object is read back,
        and if it holds exactly ``data``, the call has succeeded.
        """
        ...

    def get(self, key: str, limit: int) -> bytes:
        """The whole object. Raises ``NotFound``; ``StoreError`` if it is longer than ``limit``."""
        ...

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        """Read exactly ``length`` bytes from ``offset`` into the beginning of ``into``.

        ``into`` may be longer; what stands behind ``length`` afterwards is undefined. Fewer
        bytes than asked for is a ``StoreError``, never a short read.
        """
        ...

    def stat(self, key: str) -> Stat:
        """Raises ``NotFound``."""
        ...

    def list(self, prefix: str) -> Iterator[Stat]:
        """Every committed object whose key begins with the folder ``prefix`` (``""``: all), in
        order of keys. An unfinished upload is not among them. No such folder: nothing."""
        ...

    def partials(self, prefix: str) -> Iterator[Stat]:
        """What unfinished uploads left behind under the folder ``prefix``, for ``sweep`` alone.
        Their keys may be given to ``delete``."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object, durably. No such object: nothing happens."""
        ...


def check_key(key: str, store: str) -> str:
    """The key itself, if it can name an object in every store; else ``StoreError``."""
    segments = key.split("/")
    if not key or len(key) > 900 or any(s in ("", ".", "..") or "\0" in s for s in segments):
        raise StoreError(
            f"The key {key[:200]!r} cannot be used in {store}",
            expected="segments joined by '/', none empty, '.', '..' or with NUL, 900 characters",
            found=repr(key[:200]),
            key=key,
            store=store,
        )
    return key
