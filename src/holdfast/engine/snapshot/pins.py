"""Pins: while one is held, nothing deletes the files of that attempt, or of that version.

Whoever is to rely on a version that another process may delete pins it first and then looks
whether its manifest is (still) there; whoever deletes takes the manifest first and then looks for
pins. So one of the two always sees the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from holdfast import events
from holdfast.engine.snapshot.location import Location
from holdfast.errors import Denied, FormatError, NotFound, StoreError
from holdfast.format.names import MANIFEST, Version, new_attempt, parse_pin, parse_version, pin_name
from holdfast.format.records import MAX_RECORD, Pin, decode_pin, encode_pin
from holdfast.machine import _process, identity, now
from holdfast.storage.store import Stat, Store
from holdfast.types import MIB

WORTH = 64 * MIB
"""Bytes from which on reading them takes long enough to be pinned: fewer are read in less time
than a deletion takes to come to them."""


def hold(place: Location, attempt: str, version: Version | None = None) -> str:
    """Pin the files of an attempt, and a version, for as long as this process lives; returns the
    pin's key. ``place``: of any version of the run."""
    host, boot, process = identity()
    name = None if version is None else str(version)
    pin = Pin(attempt, name, now(), host, boot, process)
    key = place.beside(pin_name(new_attempt()))
    try:
        place.store.put_if_absent(key, encode_pin(pin))
    except Denied:
        raise  # so nothing was written, and to delete would be denied as well
    except StoreError:
        release(place, key)  # it may be there although its put failed
        raise
    return key


@contextmanager
def held(place: Location, attempt: str, version: Version | None = None) -> Iterator[str]:
    """Holds a pin for the time of a ``with`` block; gives its key."""
    key = hold(place, attempt, version)
    try:
        yield key
    finally:
        release(place, key)


@contextmanager
def reading(place: Location, nbytes: int, bases: Iterable[Version] = ()) -> Iterator[None]:
    """Pins the version at ``place`` and its ``bases`` while ``nbytes`` of them are read, if that
    is worth a pin. Raises ``NotFound`` if it was deleted before the pin was there.

    No pin where none can be written (a read-only folder, a full disk): the reader checks every
    byte, so that a version which is deleted under it costs it an error, never wrong data.
    """
    version = parse_version(place.folder.rpartition("/")[2])
    with ExitStack() as pins:
        if version is not None and nbytes >= WORTH:
            attempt, pinned = new_attempt(), False
            with suppress(StoreError):
                for each in (version, *bases):
                    pins.enter_context(held(place, attempt, each))
                pinned = True
            if pinned:
                seen(place)
        yield


def seen(place: Location) -> None:
    """Look whether a version that was just pinned is still there. Raises ``NotFound``."""
    try:
        place.store.stat(place.key(MANIFEST))
    except NotFound as e:
        raise NotFound(
            f"{place.url} was deleted before it could be pinned",
            todo="Take another version; `holdfast pin RUN STEP` keeps one for good",
            key=place.key(MANIFEST),
            store=place.store.url,
        ) from e


def release(place: Location, key: str) -> None:
    """Take the pin away. What was saved is committed or not without it, so a store that fails
    here fails no save: the pin ends with this process, and ``sweep`` removes it."""
    try:
        place.store.delete(key)
    except StoreError as e:
        events.emit("pin_left", key=key, store=place.store.url, error=str(e))


def of_processes(store: Store, stats: Iterable[Stat]) -> Iterator[tuple[Stat, Pin | FormatError]]:
    """The pins of processes among objects of a run, each with its record, or what is wrong with
    it. One that is taken away meanwhile is left out."""
    for stat in stats:
        if parse_pin(stat.key) is not None:
            try:
                yield stat, decode_pin(store.get(stat.key, MAX_RECORD), stat.key)
            except NotFound:
                continue
            except FormatError as e:
                yield stat, e


def alive(pin: Pin) -> bool | None:
    """Whether the process that holds the pin lives; None if it is on another machine."""
    host, boot, _ = identity()
    if pin.host != host:
        return None
    if pin.boot != boot:
        return False
    return _process(int(pin.process.partition(":")[0])) == pin.process
