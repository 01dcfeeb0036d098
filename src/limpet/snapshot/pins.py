"""Pins: while a pin exists, no process deletes the files of its attempt or of its version.

A process that depends on a version first pins the version and then checks that its manifest still
exists. A process that deletes a version first deletes the manifest and then checks for pins. So at
least one of the two processes detects the other.

A copy has the attempt of its source, so it may find files that another process has decided to
delete. Such a process therefore writes a *notice* before it checks for pins, and removes the notice
after the deletion. A copy first writes its pin and then checks for notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from limpet import events
from limpet.errors import BrokenLink, Denied, FormatError, NotFound, StoreError, Unavailable
from limpet.format.names import (
    MANIFEST,
    NOTICES,
    Version,
    notice_name,
    parse_notice,
    parse_pin,
    parse_version,
    pin_name,
    random_id,
)
from limpet.format.records import MAX_RECORD, Lease, Pin, decode_pin, encode_record
from limpet.machine import CAN_SEE_PROCESSES, pid_and_start_time, process_identity, utc_now
from limpet.snapshot.location import Location, get_bounded
from limpet.storage.store import Store, list_level
from limpet.text import PIN_ADVICE
from limpet.types import MIB

MIN_PINNED_BYTES = 64 * MIB
"""The smallest read, in bytes, that pins its version. A smaller read finishes before a deletion
reaches its files."""

REMOTE_PIN_TTL = 7 * 24 * 3600.0
"""Age, in seconds, at which a pin expires if it is unreadable or its process cannot be checked.

A process on another machine cannot be checked.
"""

_ended_notices: dict[str, set[str]] = {}
"""The keys of the notices of this process that it could not remove, by the URL of the store.

This process may live for months, and its notices stop copies as long. The next deletion therefore
removes them.
"""


def create_pin(
    location: Location,
    attempt: str,
    version: Version | None = None,
    make_name: Callable[[str], str] = pin_name,
) -> str:
    """Pin the files of an attempt, and optionally a version; return the pin's key.

    The pin is valid while this process lives. ``location``: the location of any version of the run.
    ``make_name`` returns its key, relative to the run. Raises ``StoreError`` if the pin cannot be
    written.
    """
    host, boot, process = process_identity()
    name = None if version is None else str(version)
    pin = Pin(attempt, name, utc_now(), host, boot, process)
    key = location.run_key(make_name(random_id()))
    try:
        location.store.put_if_absent(key, encode_record(pin))
    except StoreError as e:
        # After a refusal, nothing was written, and a deletion would be refused too.
        if e.is_outcome_unknown or not isinstance(e, Denied):
            remove_pin(location, key)  # the pin may exist although the write failed
        raise
    return key


@contextmanager
def hold_pin(location: Location, attempt: str, version: Version | None = None) -> Iterator[str]:
    """Hold a pin during a ``with`` block, which receives the pin's key."""
    key = create_pin(location, attempt, version)
    try:
        yield key
    finally:
        remove_pins(location, [key])


@contextmanager
def announce_deletion(location: Location, version: Version | None) -> Iterator[None]:
    """Hold a notice that this process deletes files, during a ``with`` block that deletes them.

    The block must first look for pins. ``version``: the version to which the files belong, or None
    for any. ``location``: as for ``create_pin``.
    """
    key = create_pin(location, random_id(), version, notice_name)
    try:
        yield
    finally:
        ended = _ended_notices.setdefault(location.store.url, set())
        earlier = [*ended]
        ended.add(key)
        try:
            for notice in (key, *earlier):
                location.store.delete(notice)
                ended.discard(notice)
        except StoreError as e:
            events.emit("pin_left", key=key, store=location.store.url, error=str(e))


def require_no_deletion(location: Location, version: Version) -> None:
    """Check that no process deletes files of a version, after the version was pinned.

    Raises ``Unavailable`` if a process announced that it does.
    """
    for key, notice in read_process_pins(location.store, list_notices(location)):
        about = None if isinstance(notice, FormatError) else notice.version
        if about in (None, str(version)) and not is_stale(location.store, key, notice):
            raise Unavailable(
                f"A process is deleting files of {location.url}; nothing was committed",
                expected="no notice of a deletion",
                found=f"the notice {key}"
                if isinstance(notice, FormatError)
                else f"the notice {key} of process {notice.process.partition(':')[0]} on"
                f" {notice.host.partition(' ')[0]}, since {notice.created}",
                todo="Copy again later. If that process has ended, or deletes nothing (its log has"
                " the event pin_left), delete the notice",
                key=key,
                store=location.store.url,
            )


@contextmanager
def pin_while_reading(
    location: Location, nbytes: int, bases: Iterable[Version] = ()
) -> Iterator[None]:
    """Pin the version at ``location`` and its ``bases`` during a read of ``nbytes`` bytes.

    A read of less than ``MIN_PINNED_BYTES`` creates no pin. If the store refuses the pin (a
    read-only folder, a full disk), the read continues without one: every byte is checked, so the
    deletion of the version during the read causes an error, not wrong data.

    Raises ``NotFound`` if the version was deleted before the pin existed.
    """
    version = parse_version(location.folder.rpartition("/")[2])
    keys: list[str] = []
    with ExitStack() as pins:
        pins.callback(remove_pins, location, keys)
        if version is not None and nbytes >= MIN_PINNED_BYTES:
            attempt, pinned = random_id(), False
            with suppress(StoreError):
                for pinned_version in (version, *bases):
                    keys.append(create_pin(location, attempt, pinned_version))
                pinned = True
            if pinned:
                require_manifest(location)
        yield


def require_manifest(location: Location, when: str = "before it could be pinned") -> None:
    """Check that a version still exists, after it was pinned or after a read of it failed.

    The manifest is deleted first. Raises ``NotFound`` if the version was deleted; ``when`` is part
    of the message.
    """
    try:
        location.store.stat(location.key(MANIFEST))
    except NotFound as e:
        raise NotFound(
            f"{location.url} was deleted {when}",
            todo=PIN_ADVICE,
            key=location.key(MANIFEST),
            store=location.store.url,
        ) from e


def remove_pin(location: Location, key: str) -> None:
    """Remove a pin.

    An error of the store does not fail the save, because the commit does not depend on the pin. A
    pin that remains is invalid when this process ends, and ``sweep`` removes it.
    """
    try:
        location.store.delete(key)
    except StoreError as e:
        events.emit("pin_left", key=key, store=location.store.url, error=str(e))


def remove_pins(location: Location, keys: Sequence[str]) -> None:
    """Remove pins at the end of an operation, as ``remove_pin`` does."""
    if keys:
        location = location.for_cleanup()
    for key in keys:
        remove_pin(location, key)


def list_process_pins(store: Store) -> list[str]:
    """Return the keys of the pins of processes in the folder of a run."""
    entries = list_level(store, "", "pin-")
    return [e.name for e in entries if parse_pin(e.name) is not None and e.kind != "folder"]


def list_notices(location: Location) -> list[str]:
    """Return the keys of the notices of a run: see ``announce_deletion``. ``location``: as for
    ``create_pin``."""
    entries = list_level(location.store, location.run_key(NOTICES))
    found = (f"{NOTICES}/{e.name}" for e in entries if e.kind != "folder")
    return [location.run_key(name) for name in found if parse_notice(name) is not None]


def read_process_pins(store: Store, keys: Iterable[str]) -> Iterator[tuple[str, Pin | FormatError]]:
    """Yield the keys of pins with their records.

    If a record is damaged, the error takes its place. A pin that was removed is skipped.
    """
    for key in keys:
        try:
            yield key, decode_pin(get_bounded(store, key, MAX_RECORD), key)
        except NotFound:
            continue
        except FormatError as e:
            yield key, e


def is_stale(store: Store, key: str, pin: Pin | FormatError, now: float | None = None) -> bool:
    """Return True if a pin protects nothing any more: its process has ended, or the pin is so old
    that it has expired, which matters only if nothing is known of its process.

    ``now`` replaces the current time, in seconds since the epoch.
    """
    is_alive = None if isinstance(pin, FormatError) else is_holder_alive(pin)
    if is_alive is not None:
        return not is_alive
    try:
        return (time.time() if now is None else now) - store.stat(key).modified >= REMOTE_PIN_TTL
    except BrokenLink:
        return False
    except NotFound:
        return True  # removed meanwhile


def is_holder_alive(pin: Pin | Lease) -> bool | None:
    """Return True if the process that holds the pin is alive; None if this cannot be seen, as on
    another machine."""
    host, boot, own = process_identity()
    if pin.host != host:
        return None
    if pin.boot != boot:
        return False
    current = pid_and_start_time(int(pin.process.partition(":")[0]))
    if not CAN_SEE_PROCESSES and pin.process != own:
        return None
    return current == pin.process
