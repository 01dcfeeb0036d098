"""The store of a run whose shards and indexes are spread over several folders.

An object store limits the rate of requests per prefix of the keys. In a run that has the record
``spread.json``, shards and indexes are therefore stored as ``spread-XX/version_N/NAME``, where
``XX`` depends on a hash. A ``SpreadStore`` gives them their usual keys, so that nothing else has to
know of it. It reads the record when it needs it, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from limpet.deadline import Deadline
from limpet.errors import (
    AlreadyExists,
    Denied,
    DigestMismatch,
    LimpetError,
    ManifestInvalid,
    NotFound,
)
from limpet.format import names
from limpet.format.records import MAX_PREFIXES, MAX_RECORD, Spread, decode_spread, encode_spread
from limpet.storage import store as base_store
from limpet.storage.checks import is_partial
from limpet.storage.store import Entry, RangeReader, Stat, Store, Traits, Upload
from limpet.text import MAX_SHOWN, format_list, to_repr

T = TypeVar("T")

_HASH: Final = "xxh3-128+rank"
RESTORE_SPREAD = (
    "Call limpet.Run({!r}).set_spread(N) with the number that the run had, as in"
    " Checkpointer(spread=N). A number that does not fit the files in the folders spread-XX is"
    " refused, with those that fit"
)


def spread_store(store: Store) -> SpreadStore:
    """Return the store of a run as a ``SpreadStore``."""
    return store if isinstance(store, SpreadStore) else SpreadStore(store)


def unspread(store: Store) -> Store:
    """Return the store that shows every object under the key that it has in storage."""
    inner: Store = getattr(store, "unspread", store)
    return inner


def read_spread(store: Store) -> Spread | None:
    """Read how a run spreads its files, or return None if it does not.

    Raises ``FormatError`` if the record is damaged or of a later format, and ``StoreError``.
    """
    try:
        return decode_spread(store.get(names.SPREAD, MAX_RECORD), names.SPREAD)
    except NotFound:
        return None
    except (ManifestInvalid, DigestMismatch) as e:
        raise type(e)(
            f"{names.SPREAD} in {store.url}, which has the number of folders over which the run is"
            " spread, is damaged or of another program",
            expected=e.expected,
            found=e.found,
            todo=_restore_advice(store),
            file=names.SPREAD,
        ) from e


def _restore_advice(store: Store) -> str:
    """Return what to do about a damaged record."""
    delete = f"Delete the file: limpet.open_store({store.url!r}).delete({names.SPREAD!r})"
    if _has_folders(store):
        return f"{delete}. {RESTORE_SPREAD.format(store.url)}"
    return f"The run has no folders spread-XX, so it is not spread. {delete}"


def _has_folders(store: Store) -> bool:
    """Return True if there is a folder over which a run is, or was, spread."""
    found = {e.name for e in base_store.list_level(store, "", "spread-") if e.kind != "object"}
    return any(map(names.is_spread_folder, found))


def create_spread(store: SpreadStore, prefixes: int, has_versions: Callable[[], object]) -> None:
    """Create the record of a run, or check that it is the one that exists.

    A record that was lost is restored: that of a run with versions, or with files in the folders
    ``spread-XX``, is created if all these files are where it says. ``has_versions`` returns
    something true if the run has versions. Raises ``LimpetError`` if ``prefixes`` is invalid, if
    the run has a record with another number, or if it has no record, and versions or files that
    ``prefixes`` does not fit, and what ``read_spread`` raises.
    """
    if type(prefixes) is not int or not 2 <= prefixes <= MAX_PREFIXES:
        raise LimpetError(
            "Invalid number of prefixes",
            expected=f"a number from 2 to {MAX_PREFIXES}",
            found=to_repr(prefixes)[:80],
        )
    found = store.look_again()
    if found is None:
        fitting = _fitting_numbers(store.unspread)
        if prefixes not in fitting and (fitting or has_versions()):
            raise _other_spread_error(store.url, prefixes, "versions that are not spread", fitting)
        with suppress(AlreadyExists):
            store.put_if_absent(names.SPREAD, encode_spread(Spread(_HASH, prefixes)))
        found = store.look_again()  # another process may have been faster
    if found is None or found.prefixes != prefixes:
        number = "none" if found is None else found.prefixes
        raise _other_spread_error(store.url, prefixes, f"spread={number}")


def _fitting_numbers(store: Store) -> list[int]:
    """Return the numbers of prefixes that fit all files in the folders ``spread-XX`` of a run; none
    if there are no such files."""
    fitting, is_spread = [*range(2, MAX_PREFIXES + 1)], False
    for entry in base_store.list_level(store, "", "spread-"):
        if entry.kind == "object" or not names.is_spread_folder(entry.name):
            continue
        for stat in store.list(entry.name):
            key = _usual_key(stat.key)
            if names.is_spreadable(key):
                is_spread = True
                fitting = [n for n in fitting if Spread(_HASH, n).place(key) == stat.key]
    return fitting if is_spread else []


def _other_spread_error(
    url: str, prefixes: int, found: str, fitting: Sequence[int] = ()
) -> LimpetError:
    if fitting:
        return LimpetError(
            f"The record {names.SPREAD} of {url} was lost, and {prefixes} is not its number",
            expected=f"a number that fits the files: {format_list(fitting, MAX_SHOWN)}",
            found=prefixes,
            todo="Call limpet.Run(URL).set_spread with the right number, which restores it",
        )
    return LimpetError(
        f"{url} does not spread its shards over {prefixes} prefixes",
        expected=f"an empty run, or one that was created with spread={prefixes}",
        found=found,
        todo="Omit spread= to follow the run. To change it, call Run(URL).set_spread on an empty"
        " location and copy the run there with `limpet copy`",
    )


@dataclass(slots=True)
class _Known:
    """What is known of a run. All views of one store share it.

    ``spread`` is None if there was no record, or if nobody has ``looked``. ``strays`` maps keys to
    where a listing found their objects, if that is not where the record says. ``is_lost``: see
    ``has_lost_record``.
    """

    spread: Spread | None = None
    looked: bool = False
    strays: dict[str, str] = field(default_factory=dict)
    is_lost: bool | None = None


class SpreadStore:
    """A view of the store ``unspread``, which belongs to a run.

    An object that is not where the record says is looked for at its usual place, and the other way
    round. So a save that began before the record existed, and a version that another tool copied,
    can be read.
    """

    def __init__(self, store: Store, known: _Known | None = None) -> None:
        self.unspread = store
        self._known = _Known() if known is None else known

    def __getattr__(self, name: str) -> Any:  # what only some stores have, such as statistics
        if name == "unspread":  # a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.unspread, name)

    @property
    def traits(self) -> Traits:
        return self.unspread.traits

    @property
    def url(self) -> str:
        return self.unspread.url

    @property
    def spread(self) -> Spread | None:
        """The record of the run, or None if there was none when it was looked for."""
        return self._known.spread if self._known.looked else self.look_again()

    def look_again(self) -> Spread | None:
        """Return the record. It is read if there was none before."""
        if self._known.spread is None:
            self._known.spread = read_spread(self.unspread)
            self._known.looked = True
        return self._known.spread

    def has_lost_record(self) -> bool:
        """Return True if there is no record, but a folder for it, which is looked for once."""
        if self._known.is_lost is None:
            self._known.is_lost = _has_folders(self.unspread)
        return self._known.is_lost and self._known.spread is None

    def learn(self, spread: Spread | None) -> None:
        """Take over what another rank has read, so that this one does not read it."""
        if self._known.spread is None:
            self._known.spread, self._known.looked = spread, True

    def within(self, deadline: Deadline) -> Store:
        """See ``limpet.storage.store.within``."""
        return type(self)(base_store.within(self.unspread, deadline), self._known)

    def put(self, key: str, length: int, head: int = 0) -> Upload:
        place = self.place(key)
        upload = self.unspread.put(place, length, *([head] if self.traits.part_size else []))
        return upload if place == key else _SpreadUpload(upload, key)

    def put_if_absent(self, key: str, data: bytes) -> Stat:
        return replace(self.unspread.put_if_absent(self.place(key), data), key=key)

    def get(self, key: str, limit: int) -> bytes:
        return self._find(key, lambda place: self.unspread.get(place, limit))

    def get_range(self, key: str, offset: int, length: int, into: memoryview) -> None:
        self._find(key, lambda place: self.unspread.get_range(place, offset, length, into))

    def open_range(self, key: str, offset: int, length: int) -> RangeReader:
        """See ``RangeReader``. The first read finds out where the object is."""
        open_place: Callable[[str, int, int], RangeReader] = self.unspread.open_range  # type: ignore[attr-defined]
        if not self._is_spread(key):
            return open_place(key, offset, length)
        return _SpreadRange(
            lambda read: self._find(key, lambda place: read(open_place(place, offset, length)))
        )

    def stat(self, key: str) -> Stat:
        return replace(self._find(key, self.unspread.stat), key=key)

    def delete(self, key: str) -> None:
        stray = self._known.strays.pop(key, None)
        for place in {self.place(key)} | ({stray} if stray is not None else set()):
            self.unspread.delete(place)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._list(self.unspread.list, prefix)

    def partials(self, prefix: str) -> Iterator[Stat]:
        return self._list(self.unspread.partials, prefix)

    def list_level(self, folder: str, prefix: str = "") -> Iterable[Entry]:
        """See ``limpet.storage.store.list_level``. It costs one listing per folder of the record,
        unless a name with ``prefix`` cannot be that of a shard, an index, or a version."""
        found = {entry.name: entry for entry in self.list_unspread(folder, prefix)}
        spread = self.spread if self._may_hold(folder, prefix) else None
        for spread_folder in () if spread is None else spread.folders:
            start = f"{spread_folder}/{folder}".rstrip("/")
            for entry in base_store.list_level(self.unspread, start, prefix):
                if entry.kind == "folder" or self._is_spread(f"{folder}/{entry.name}"):
                    stat = None if entry.stat is None else self._rename(entry.stat, spread)
                    found.setdefault(entry.name, Entry(entry.name, entry.kind, stat))
        return found.values()

    def list_unspread(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        """Yield what is directly in a folder itself, and not in the folders of the record."""
        for entry in base_store.list_level(self.unspread, folder, prefix):
            key = f"{folder}/{entry.name}"
            if entry.kind != "folder" and self._is_spread(key) and self.place(key) != key:
                self._known.strays[key] = key
            if folder or not names.is_spread_folder(entry.name):
                yield entry

    def list_spread(self) -> Iterator[Stat]:
        """Yield the objects in the folders of the record, in no order."""
        spread = self.look_again()
        for spread_folder in () if spread is None else spread.folders:
            for stat in self.unspread.list(spread_folder):
                yield self._rename(stat, spread)

    @property
    def link_target(self) -> Callable[[str], str | None]:
        """See ``LocalStore.link_target``. Other stores do not have it."""
        target_of: Callable[[str], str | None] = self.unspread.link_target  # type: ignore[attr-defined]

        def link_target(key: str) -> str | None:
            target = target_of(self._known.strays.get(key) or self.place(key))
            return target if target is None else _usual_key(target)

        return link_target

    @staticmethod
    def _is_spread(key: str) -> bool:
        """Return True for a key that a record applies to."""
        return names.is_spreadable(key)

    @staticmethod
    def _may_hold(folder: str, prefix: str) -> bool:
        """Return True if ``_is_spread`` may be true of names in a folder, or of keys below them."""
        first, begins = folder.partition("/")[0], "shard-" if folder else "version_"
        is_version = not folder or names.parse_version(first) is not None
        return is_version and (begins.startswith(prefix) or prefix.startswith(begins))

    def place(self, key: str) -> str:
        """Return where the object of a key is, if it is where it should be."""
        if not self._is_spread(key):
            return key
        return key if self.spread is None else self.spread.place(key)

    def _find(self, key: str, read: Callable[[str], T]) -> T:
        """Read an object where it should be, or else at the other place.

        S3 denies access to what is missing if listing is not allowed.
        """
        if not self._is_spread(key):
            return read(key)
        if (spread := self._known.spread) is not None:
            try:
                return read(spread.place(key))
            except (NotFound, Denied):
                with suppress(NotFound, Denied):
                    return read(key)
                raise
        try:
            return read(key)
        except (NotFound, Denied):
            with suppress(NotFound, Denied):
                spread = self.look_again()
            if spread is None:
                raise
        return read(spread.place(key))

    def _list(self, list_objects: Callable[[str], Iterator[Stat]], prefix: str) -> Iterator[Stat]:
        spread = self.look_again() if self._may_hold(prefix, "") else None
        if spread is None:
            return list_objects(prefix)
        below = [f"{folder}/{prefix}" for folder in spread.folders] if prefix else []
        found = (stat for start in (prefix, *below) for stat in list_objects(start))
        stats = {stat.key: stat for stat in (self._rename(stat, spread) for stat in found)}
        return iter(sorted(stats.values(), key=lambda stat: stat.key))

    def _rename(self, stat: Stat, spread: Spread | None) -> Stat:
        """Return the status of an object in storage with its usual key."""
        key = _usual_key(stat.key)
        if not self._is_spread(key) and not is_partial(key.rpartition("/")[2]):
            return stat  # of somebody else
        if stat.key != (spread.place(key) if spread is not None and self._is_spread(key) else key):
            self._known.strays[key] = stat.key
        return stat if key == stat.key else replace(stat, key=key)


def _usual_key(key: str) -> str:
    """Return the key that an object in storage would have in a run that is not spread."""
    first, _, rest = key.partition("/")
    return rest if rest and names.is_spread_folder(first) else key


class _SpreadRange(RangeReader):
    """A range of an object. ``find`` calls a function with the reader of each place where the
    object may be, until the function does not raise ``NotFound``."""

    def __init__(self, find: Callable[[Callable[[RangeReader], None]], None]) -> None:
        self._find = find
        self._readers = ExitStack()
        self._found: RangeReader | None = None

    def read_into(self, view: memoryview) -> None:
        if self._found is not None:
            self._found.read_into(view)
            return

        def read(reader: RangeReader) -> None:
            self._readers.enter_context(reader).read_into(view)
            self._found = reader

        self._find(read)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._readers.close()


class _SpreadUpload(Upload):
    """An upload whose object has the usual key ``key``."""

    def __init__(self, upload: Upload, key: str) -> None:
        self._upload, self._key = upload, key

    def write_at(self, offset: int, *data: memoryview) -> None:
        self._upload.write_at(offset, *data)

    def commit(self) -> Stat:
        return replace(self._upload.commit(), key=self._key)

    def abort(self) -> None:
        self._upload.abort()
