"""The Store protocol: bytes under keys. Limpet accesses every storage through it.

A key is a relative path of segments joined by ``/`` (``version_120/manifest.json``). Any thread may
call any method. Every failure is a ``StoreError`` that names the key and the store; only
``Unavailable`` is worth retrying.

``limpet.testing.StoreContract`` tests this contract, and ``MemoryStore`` is the reference
implementation. (The model: restic's ``backend.go``, one small interface with its MUSTs in writing.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeVar

import msgspec

from limpet.deadline import Deadline
from limpet.errors import AlreadyExists, Denied, NotFound, StoreError
from limpet.types import BLOCK_SIZE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a store that other layers need.

    ``alignment``: reads and writes are fastest at offsets that are multiples of it, in bytes.
    ``durable``: the objects survive a crash of the machine, not only the end of the process.
    ``part_size``: the store sends an upload in parts of at least so many bytes, and a ``write_at``
    of one whole part needs no copy (see ``part_length``). 0: writes of any size are equal.
    ``connections``: the largest number of parts for which a save takes memory at once; those that
    are staged are in memory anyway. 0: no limit.
    ``read_size``: the largest range to read with one request. A store with it has the method
    ``open_range``. ``ordered``: the store only appends. A ``write_at`` behind what was written
    before it needs no copy; other bytes wait in a temporary file (see
    ``SequentialUpload``), so a save writes with one thread. ``atomic``: of any number of concurrent
    calls of ``put_if_absent``, at most one creates the object; without it, two trainings can both
    commit. ``hidden_uploads``: what removes the unfinished uploads that ``partials`` cannot list;
    empty if it lists all.
    ``upload_memory``: how many bytes an unfinished upload keeps in memory: about so many in all if
    the store is ``ordered``, else for each thread that writes to it in other pieces than parts. An
    operation with several uploads or threads limits their number accordingly (``upload_memory``).
    ``spread``: over how many folders a save spreads its shards; 0: it does not. ``in_memory``: a
    read is a copy within this machine's memory, so that it waits for nothing.
    """

    name: str
    alignment: int
    durable: bool
    part_size: int = 0
    connections: int = 0
    read_size: int = 0
    ordered: bool = False
    atomic: bool = True
    hidden_uploads: str = ""
    upload_memory: int = 0
    spread: int = 0
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Stat:
    """The status of an object: its key, its length in bytes, and the time when it was written.

    ``modified`` is in seconds since 1970 by the clock of the store, which may jump.
    """

    key: str
    length: int
    modified: float


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A name directly in a folder: an object, a folder, or a symbolic link to one of the two.

    What a link leads to may be missing. ``stat`` is the status of an object if the store knows it
    without another call.
    """

    name: str
    kind: Literal["object", "folder", "link"]
    stat: Stat | None = None


class Upload(Protocol):
    """An object that is being written. It is invisible until ``commit`` returns.

    An upload is a context manager: leaving the context without ``commit`` aborts the upload. A
    class that derives from this one inherits that.
    """

    def write_at(self, offset: int, *data: memoryview) -> None:
        """Write ``data`` at ``offset``. Several views are written one behind the other; only a
        store with a ``part_size`` gets several.

        Many threads may call this at once, in any order. Every byte of the object MUST be written
        exactly once. ``data`` MUST NOT change until the call returns.
        """
        ...

    def commit(self) -> Stat:
        """Make the whole object durable, then visible.

        Raises ``StoreError`` if the length differs from the announced length or if a write was
        lost, and ``AlreadyExists`` if another object has the key. After an error, the object is not
        visible, unless the error says that the outcome is unknown.
        """
        ...

    def abort(self) -> None:
        """Abort the upload and remove the written data. May be called at any time, also twice."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()


class MappedUpload(Upload, Protocol):
    """An upload whose bytes are in the memory of this process before they are written."""

    def view(self, offset: int, length: int) -> memoryview:
        """Return these bytes of the object as memory to fill.

        They count as written once this view has been passed to ``write_at``, which then copies
        nothing. Nothing may be written to the view after ``commit``. Raises ``StoreError`` if the
        range does not lie within the object.
        """
        ...


class RangeReader(Protocol):
    """A range of an object, which is read from its first byte to its last. It is a context manager,
    and only one thread uses it."""

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes.

        Raises ``StoreError`` if the range or the object has fewer; a short read never succeeds.
        """
        ...

    def __enter__(self) -> RangeReader: ...

    def __exit__(self, *exc: object) -> None: ...


class Store(Protocol):
    """A place that holds bytes under keys."""

    @property
    def traits(self) -> Traits: ...

    @property
    def url(self) -> str:
        """The location of the store, as a user would write it."""
        ...

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        """Begin to write an object of ``length`` bytes under a new key.

        ``head``: the length of the object's header. The first part consists of the header and
        ``part_length`` bytes. Only a store with a ``part_size`` gets this argument.

        This method is for large files. The caller makes keys unique (names contain an attempt).
        A store that finds the key taken refuses it at the latest in ``commit``; a store that
        cannot find out cheaply does not have to (``StoreContract.put_sees_existing``).
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        """Write a small object atomically and durably, if and only if the key does not exist.

        Of any number of concurrent calls with different bytes, exactly one returns; the others
        raise ``AlreadyExists``. This method resolves an unknown outcome: it reads the object back,
        and succeeds if the object contains exactly ``data``.
        """
        ...

    def get(self, key: str, limit: int) -> bytes:
        """Return the whole object.

        Raises ``NotFound``, and ``StoreError`` if the object is longer than ``limit`` bytes.
        """
        ...

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        """Read exactly ``length`` bytes from ``offset`` into the beginning of ``into``.

        If ``into`` is longer, its content after the first ``length`` bytes is then undefined.
        Raises ``StoreError`` if the object has fewer bytes; a short read never succeeds.
        """
        ...

    def stat(self, key: str) -> Stat:
        """Return the status of an object. Raises ``NotFound``."""
        ...

    def list(self, prefix: str) -> Iterator[Stat]:
        """Yield every committed object under the folder ``prefix`` (``""``: all), ordered by key.

        Unfinished uploads are not included. If the folder does not exist, nothing is yielded.

        A store may also have ``at(folder)``, which returns a store for the keys below a folder, as
        all of Limpet's have: ``limpet.Run(store.at("runs/a"))``. It may have ``list_level(folder,
        prefix)``, ``within(deadline)``, and ``put_mapped(key, length)``: see the functions of these
        names. With a ``read_size`` in its traits, it has ``open_range(key, offset, length)``, which
        returns a ``RangeReader``.
        """
        ...

    def partials(self, prefix: str) -> Iterator[Stat]:
        """Yield the files of unfinished uploads under the folder ``prefix``.

        Only ``sweep`` uses this. ``delete`` accepts their keys.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object durably. If the object does not exist, nothing happens."""
        ...


def list_level(store: Store, folder: str, prefix: str = "") -> Iterable[Entry]:
    """Return what is directly in a folder (``""``: the root), in any order, if its name begins with
    ``prefix``. A store without the optional method ``list_level`` is listed recursively."""
    if (method := getattr(store, "list_level", None)) is not None:
        entries: Iterable[Entry] = method(folder, prefix)
        return entries
    start, found = f"{folder}/" if folder else "", dict[str, Entry]()
    for stat in store.list(folder):
        name, slash, _ = stat.key.removeprefix(start).partition("/")
        if name.startswith(prefix):
            found[name] = Entry(name, "folder") if slash else Entry(name, "object", stat)
    return found.values()


def exists(store: Store, key: str) -> bool:
    """Return True if there is an object with the key. Raises ``StoreError`` if that is unknown."""
    try:
        store.stat(key)
    except NotFound:
        return False
    return True


def within(store: Store, deadline: Deadline) -> Store:
    """Return a view of a store, by its optional method ``within``, all of whose calls end by a
    deadline. A store without it waits for no server."""
    method = getattr(store, "within", None)
    view: Store = store if method is None else method(deadline)
    return view


def put_mapped(store: Store, key: str, length: int) -> MappedUpload | None:
    """Begin to write an object into memory, by the optional method ``put_mapped`` (see
    ``Store.put``). None: the store is not memory."""
    method = getattr(store, "put_mapped", None)
    upload: MappedUpload | None = None if method is None else method(key, length)
    return upload


MAX_PARTS = 10_000
"""The largest number of parts of an upload, which is that of S3."""


def part_length(traits: Traits, length: int) -> int:
    """Return the length of the parts of an upload: a multiple of ``BLOCK_SIZE``, at least
    ``part_size``, and such that ``MAX_PARTS`` suffice."""
    least = max(traits.part_size, -(-length // (MAX_PARTS - 1)))
    return -(-least // BLOCK_SIZE) * BLOCK_SIZE


def upload_memory(traits: Traits, length: int) -> int:
    """Return how many bytes an upload keeps in memory (see ``Traits``): a small object is kept
    whole, and by some clients once more while it is sent."""
    if not traits.upload_memory:
        return 0
    longest_part = -(-length // (MAX_PARTS - 1)) if traits.part_size else 0
    return min(max(traits.upload_memory, 2 * longest_part), 2 * length)


def check_key(key: str, store: str) -> str:
    """Return the key if it is valid in every store. Raises ``StoreError`` otherwise."""
    if len(key) > 900 or "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise StoreError(
            f"Invalid key {key[:200]!r} for {store}",
            expected="at most 900 characters: segments joined by '/', none of them empty, '.',"
            " '..', or with a NUL character",
            found=repr(key[:200]),
            key=key,
            store=store,
        )
    return key


# -- checks and errors that all stores share -------------------------------------------------------


class WrittenRanges:
    """The ranges of an object that were written. Threads may add some: each appends to a list."""

    def __init__(self, key: str, store: str, length: int) -> None:
        self._fields = {"key": key, "store": store}
        self._length = length
        self._ranges: list[tuple[int, int]] = []
        if length < 0:
            raise StoreError(f"Cannot write an object of {length} bytes", **self._fields)

    @contextmanager
    def adding(self, offset: int, size: int) -> Iterator[None]:
        """Add a range when the block, which writes it, has succeeded. Raises ``StoreError`` before,
        if it is not in the object."""
        self.check(offset, size)
        yield
        if size:
            self._ranges.append((offset, size))

    def check(self, offset: int, size: int) -> None:
        """Raise ``StoreError`` if a range does not lie within the object."""
        if offset < 0 or offset + size > self._length:
            raise StoreError(
                f"A write to {self._fields['key']} is outside the object",
                expected=f"bytes between 0 and {self._length}",
                found=f"bytes {offset} to {offset + size}",
                offset=offset,
                **self._fields,
            )

    def require_complete(self) -> None:
        """Raise ``StoreError`` with the first byte that was written never or twice, if any was."""
        end = 0
        for offset, size in [*sorted(self._ranges), (self._length, 0)]:
            if offset != end:
                raise StoreError(
                    f"Cannot commit {self._fields['key']}",
                    expected=f"each of its {self._length} bytes written exactly once",
                    found=f"byte {min(offset, end)} written {'twice' if offset < end else 'never'}",
                    offset=min(offset, end),
                    **self._fields,
                )
            end = offset + size


def check_range(key: str, store: str, offset: int, length: int, capacity: int) -> None:
    """Raise ``StoreError`` if a range is negative or does not fit into ``capacity`` bytes."""
    if offset < 0 or length < 0 or length > capacity:
        raise StoreError(
            f"Invalid range for reading {key} in {store}",
            expected=f"an offset of 0 or more, and at most the {capacity} bytes of the buffer",
            found=f"{length} bytes from offset {offset}",
            key=key,
            store=store,
            offset=offset,
        )


def short_read_error(key: str, store: str, offset: int, length: int, found: int) -> StoreError:
    return StoreError(
        f"{key} in {store} is too short for a read from byte {offset}",
        expected=f"{length} bytes",
        found=f"{found} bytes",
        todo="The object was truncated or replaced: load another version",
        key=key,
        store=store,
        offset=offset,
    )


def replaced_error(key: str, store: str) -> StoreError:
    return StoreError(
        f"{key} in {store} was replaced while it was read",
        expected="an object that does not change",
        todo="Find the program that writes there; load another version",
        key=key,
        store=store,
    )


def too_long_error(key: str, store: str, limit: int, found: int) -> StoreError:
    return StoreError(
        f"{key} in {store} is too long",
        expected=f"at most {limit} bytes",
        found=f"{found} bytes",
        key=key,
        store=store,
    )


MAX_PUTS = 100
"""The largest number of tries to create an object that other processes create and delete."""


def contended_error(key: str, store: str) -> StoreError:
    """Return the error for an object that was there again each time it had been removed."""
    return StoreError(
        f"Cannot create {key} in {store}: it exists again each time that it was removed",
        expected=f"to create it in {MAX_PUTS} tries",
        todo=f"Find the program that creates {key} again and again, and end it",
        key=key,
        store=store,
    )


def is_partial(name: str) -> bool:
    """Return True if a file or an object with this name is an unfinished upload."""
    return name.startswith(".") and name.endswith(".partial")


def refuse_partial(key: str, store: str) -> None:
    """Raise ``StoreError`` if an object with this key would look like an unfinished upload."""
    if is_partial(key.rpartition("/")[2]):
        raise StoreError(
            f"Cannot write {key} to {store}: the name is reserved for unfinished uploads",
            key=key,
            store=store,
        )


def weak_store_error(key: str, store: str, promise: str, found: str) -> Denied:
    """Return the error for a write to a store that cannot keep ``promise``: ``Denied``, as for a
    read-only folder, because reading goes on."""
    return Denied(
        f"{store} cannot keep a promise of Limpet; nothing was written to it",
        expected=promise,
        found=found,
        todo="Use another store, or accept this: limpet.open_store(URL, allow_weak=True)",
        key=key,
        store=store,
    )


def exists_error(key: str, store: str) -> AlreadyExists:
    return AlreadyExists(f"{key} is already in {store}; nothing was changed", key=key, store=store)


def lost_upload_error(key: str, store: str) -> StoreError:
    what = f"The upload of {key} to {store} was deleted by another process"
    todo = "Check who deletes unfinished uploads: the rules of the bucket, and `limpet sweep`"
    return StoreError(what, todo=todo, key=key, store=store)


def check_written_length(key: str, store: str, expected: int, found: int) -> None:
    """Raise ``StoreError`` if an object has another length than what was written."""
    if found != expected:
        raise StoreError(
            f"The length of {key} in {store} differs from the bytes written",
            expected=f"{expected} bytes",
            found=f"{found} bytes",
            key=key,
            store=store,
        )
