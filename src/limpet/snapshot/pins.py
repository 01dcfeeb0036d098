"""Pins: while a pin exists, no process deletes the files of its attempt or of its version.

A process that reads a version pins it, and then checks that its manifest still exists. One that
deletes it deletes the manifest, and then checks for pins. So at least one detects the other, and
what the reader needs stays. That the version itself stays, needs more: ``protected``. The deletion
holds a *notice* from before it decides for the last time until its end. Who protects the version
pins it, and then looks for notices: it sees the notice, or the decision sees the pin. A copy, which
may reuse files that are being deleted, does the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from limpet import events
from limpet.errors import BrokenLink, Denied, FormatError, NotFound, StoreError, Unavailable
from limpet.format import names
from limpet.format.records import MAX_RECORD, Pin, VersionLease, decode_pin, encode_record
from limpet.machine import CAN_SEE_PROCESSES, pid_and_start_time, process_identity, utc_now
from limpet.snapshot.location import Location, get_bounded
from limpet.storage.store import Store, list_level
from limpet.text import PIN_ADVICE
from limpet.types import MIB

MIN_PINNED_BYTES = 64 * MIB
"""The smallest read that pins its version. A smaller one ends before a deletion reaches it."""

REMOTE_PIN_TTL = 7 * 24 * 3600.0
"""Age, in seconds, at which a pin expires if it is unreadable or of another machine."""

_ended_notices: dict[str, set[str]] = {}
"""The keys of the notices of this process that it could not remove, by the URL of the store. They
would stop copies for as long as it lives, so its next deletion removes them."""


def make_pin(attempt: str, version: names.Version | None = None) -> Pin:
    """Return a record of this process, as of now."""
    name = None if version is None else str(version)
    return Pin(attempt, name, utc_now(), *process_identity())


def create_pin(
    location: Location,
    attempt: str,
    version: names.Version | None = None,
    make_name: Callable[[str], str] = names.pin_name,
) -> str:
    """Pin the files of an attempt, and a version, while this process lives; return the key.
    ``location``: of any version of the run. Raises ``StoreError`` if the pin cannot be written."""
    key = location.run_key(make_name(names.random_id()))
    try:
        location.store.put_if_absent(key, encode_record(make_pin(attempt, version)))
    except StoreError as e:
        # After a refusal, nothing was written, and a deletion would be refused too.
        if e.is_outcome_unknown or not isinstance(e, Denied):
            remove_pin(location, key)  # the pin may exist although the write failed
        raise
    return key


@contextmanager
def hold_pin(
    location: Location, attempt: str, version: names.Version | None = None
) -> Iterator[str]:
    """Hold a pin during a ``with`` block, which receives the pin's key."""
    key = create_pin(location, attempt, version)
    try:
        yield key
    finally:
        remove_pins(location, [key])


@contextmanager
def protected(location: Location, version: names.Version) -> Iterator[None]:
    """Keep a version during a ``with`` block that writes a record that protects it from then on.
    Raises ``NotFound`` if it was deleted, or is being deleted."""
    with hold_pin(location, names.random_id(), version):
        require_no_deletion(location, version)
        require_manifest(location)
        yield


@contextmanager
def announce_deletion(
    location: Location, versions: Iterable[names.Version | None]
) -> Iterator[None]:
    """Hold a notice for each of ``versions`` during a ``with`` block that first looks for what
    protects them, and then deletes them. None: it deletes orphans of any version."""
    keys: list[str] = []
    try:
        for version in versions:
            keys.append(create_pin(location, names.random_id(), version, names.notice_name))
        yield
    finally:
        ended = _ended_notices.setdefault(location.store.url, set())
        ended |= {*keys}
        try:
            for notice in [*ended] if keys else ():
                location.store.delete(notice)
                ended.discard(notice)
        except StoreError as e:
            events.emit("pin_left", key=notice, store=location.store.url, error=str(e))


def require_no_deletion(
    location: Location, version: names.Version, *, of_files: bool = False
) -> None:
    """Raise ``NotFound`` if a process announced that it deletes a version; with ``of_files``, raise
    ``Unavailable``, also for orphans in its folder. The caller MUST have pinned the version."""
    about = {str(version), None} if of_files else {str(version)}
    for key, notice in read_process_pins(location.store, list_notices(location)):
        is_damaged = isinstance(notice, FormatError)
        if (is_damaged or notice.version in about) and not is_stale(location.store, key, notice):
            found = f"the notice {key}"
            if not isinstance(notice, FormatError):
                found += f" of {describe_holder(notice)}, since {notice.created}"
            raise (Unavailable if of_files else NotFound)(
                f"A process is deleting files of {location.url}; nothing was committed",
                expected="no notice of a deletion",
                found=found,
                todo=f"{'Copy again later' if of_files else 'Choose another version'}. If that"
                " process has ended, or deletes nothing (its log has the event pin_left), delete"
                " the notice",
                key=key,
                store=location.store.url,
            )


@contextmanager
def pin_while_reading(
    location: Location, nbytes: int, bases: Iterable[names.Version] = ()
) -> Iterator[None]:
    """Pin the version at ``location`` and its ``bases`` during a read of ``nbytes`` bytes, if they
    are at least ``MIN_PINNED_BYTES``. Raises ``NotFound`` if the version was deleted before."""
    version = names.parse_version(location.folder.rpartition("/")[2])
    keys: list[str] = []
    with ExitStack() as pins:
        pins.callback(remove_pins, location, keys)
        if version is not None and nbytes >= MIN_PINNED_BYTES:
            attempt, pinned = names.random_id(), False
            # Where no pin can be written (a read-only folder, a full disk), a deletion during the
            # read causes an error, not wrong data: every byte is checked.
            with suppress(StoreError):
                for pinned_version in (version, *bases):
                    keys.append(create_pin(location, attempt, pinned_version))
                pinned = True
            if pinned:
                require_manifest(location)
        yield


def require_manifest(location: Location, when: str = "before it could be pinned") -> None:
    """Raise ``NotFound`` if a version was deleted ``when`` (a part of the message): the manifest
    goes first. Call it after a pin was written, or after a read failed."""
    try:
        location.store.stat(location.key(names.MANIFEST))
    except NotFound as e:
        raise NotFound(
            f"{location.url} was deleted {when}",
            todo=PIN_ADVICE,
            key=location.key(names.MANIFEST),
            store=location.store.url,
        ) from e


def remove_pin(location: Location, key: str) -> None:
    """Remove a pin. An error of the store is only reported, because no commit depends on it: the
    pin is invalid when this process ends, and ``sweep`` removes it."""
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
    return [e.name for e in entries if names.is_pin_name(e.name) and e.kind != "folder"]


def list_notices(location: Location) -> list[str]:
    """Return the keys of the notices of a run. ``location``: as for ``create_pin``."""
    entries = list_level(location.store, location.run_key(names.NOTICES))
    found = (f"{names.NOTICES}/{e.name}" for e in entries if e.kind != "folder")
    return [location.run_key(name) for name in found if names.is_notice_name(name)]


def read_process_pins(store: Store, keys: Iterable[str]) -> Iterator[tuple[str, Pin | FormatError]]:
    """Yield the keys of pins that exist with their records, or the error of a damaged record."""
    for key in keys:
        try:
            yield key, decode_pin(get_bounded(store, key, MAX_RECORD), key)
        except NotFound:
            continue
        except FormatError as e:
            yield key, e


def is_stale(store: Store, key: str, pin: Pin | FormatError, now: float | None = None) -> bool:
    """Return True if a pin protects nothing any more: its process has ended, or nothing is known of
    its process and it has expired. ``now``: in seconds since the epoch."""
    is_alive = None if isinstance(pin, FormatError) else is_holder_alive(pin)
    if is_alive is not None:
        return not is_alive
    try:
        return (time.time() if now is None else now) - store.stat(key).modified >= REMOTE_PIN_TTL
    except BrokenLink:
        return False
    except NotFound:
        return True  # removed meanwhile


def describe_holder(record: Pin | VersionLease) -> str:
    """Return ``process 4711 on node-3``."""
    return f"process {record.process.partition(':')[0]} on {record.host.partition(' ')[0]}"


def is_holder_alive(pin: Pin | VersionLease) -> bool | None:
    """Return True if the pin's process is alive; None if unknown, as one of another machine."""
    host, boot, own = process_identity()
    if pin.host != host:
        return None
    if pin.boot != boot:
        return False
    current = pid_and_start_time(int(pin.process.partition(":")[0]))
    if not CAN_SEE_PROCESSES and pin.process != own:
        return None
    return current == pin.process
