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
from holdfast.machine import pid_and_start_time, process_identity, utc_now
from holdfast.storage.store import Stat, Store
from holdfast.types import MIB

MIN_PINNED_BYTES = 64 * MIB
"""Bytes from which on reading them takes long enough to be pinned: fewer are read in less time
than a deletion takes to come to them."""


def create_pin(location: Location, attempt: str, version: Version | None = None) -> str:
    """Pin the files of an attempt, and a version, for as long as this process lives; returns the
    pin's key. ``place``: of any version of the run."""
    host, boot, process = process_identity()
    name = None if version is None else str(version)
    pin = Pin(attempt, name, utc_now(), host, boot, process)
    key = location.run_key(pin_name(new_attempt()))
    try:
        location.store.put_if_absent(key, encode_pin(pin))
    except Denied:
        raise  # so nothing was written, and to delete would be denied as well
    except StoreError:
        remove_pin(location, key)  # it may be there although its put failed
        raise
    return key


@contextmanager
def hold_pin(location: Location, attempt: str, version: Version | None = None) -> Iterator[str]:
    """Holds a pin for the time of a ``with`` block; gives its key."""
    key = create_pin(location, attempt, version)
    try:
        yield key
    finally:
        remove_pin(location, key)


@contextmanager
def pin_while_reading(
    location: Location, nbytes: int, bases: Iterable[Version] = ()
) -> Iterator[None]:
    """Pins the version at ``place`` and its ``bases`` while ``nbytes`` of them are read, if that
    is worth a pin. Raises ``NotFound`` if it was deleted before the pin was there.

    No pin where none can be written (a read-only folder, a full disk): the reader checks every
    byte, so that a version which is deleted under it costs it an error, never wrong data.
    """
    version = parse_version(location.folder.rpartition("/")[2])
    with ExitStack() as pins:
        if version is not None and nbytes >= MIN_PINNED_BYTES:
            attempt, pinned = new_attempt(), False
            with suppress(StoreError):
                for each in (version, *bases):
                    pins.enter_context(hold_pin(location, attempt, each))
                pinned = True
            if pinned:
                require_manifest(location)
        yield


def require_manifest(location: Location) -> None:
    """Look whether a version that was just pinned is still there. Raises ``NotFound``."""
    try:
        location.store.stat(location.key(MANIFEST))
    except NotFound as e:
        raise NotFound(
            f"{location.url} was deleted before it could be pinned",
            todo="Take another version; `holdfast pin RUN STEP` keeps one for good",
            key=location.key(MANIFEST),
            store=location.store.url,
        ) from e


def remove_pin(location: Location, key: str) -> None:
    """Take the pin away. What was saved is committed or not without it, so a store that fails
    here fails no save: the pin ends with this process, and ``sweep`` removes it."""
    try:
        location.store.delete(key)
    except StoreError as e:
        events.emit("pin_left", key=key, store=location.store.url, error=str(e))


def read_process_pins(
    store: Store, stats: Iterable[Stat]
) -> Iterator[tuple[Stat, Pin | FormatError]]:
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


def is_holder_alive(pin: Pin) -> bool | None:
    """Whether the process that holds the pin lives; None if it is on another machine."""
    host, boot, _ = process_identity()
    if pin.host != host:
        return None
    if pin.boot != boot:
        return False
    return pid_and_start_time(int(pin.process.partition(":")[0])) == pin.process
