"""The writer lock of a run, ``writer.json``: one training writes at a time.

A live process of this machine keeps the lock. One of another machine may be gone, so a new training
takes its lock over; the old one finds the other's file, or last version, at its next save, and
saves nothing more. (Fencing: M. Kleppmann, "How to do distributed locking", 2016.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from limpet import errors, machine
from limpet.deadline import CLEANUP_SECONDS, Deadline
from limpet.format.names import WRITER_LOCK, random_id
from limpet.format.records import MAX_RECORD, Pin, decode_pin, encode_record
from limpet.run.catalog import Catalog, read_sessions
from limpet.run.lineage import last_written
from limpet.snapshot import pins
from limpet.snapshot.location import Location, get_bounded
from limpet.storage.store import MAX_PUTS, Store, contended_error, within


class WriterLock:
    """The exclusive right of one writer to save into a run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.id: str | None = None
        """The id under which this process holds the lock, or None if it does not."""
        self.sessions: Sequence[str] = ()
        """The session of this writer, and those that it continues; none: unknown."""
        self._observed_id: str | None = None

    def observe(self) -> None:
        """Remember the owner, which is another rank of this training: ``check`` then raises if
        another training takes the lock over. Raises ``StoreError`` and ``FormatTooNew``."""
        owner = find_writer(self._store)
        self._observed_id = None if owner is None else owner.attempt

    def acquire(self, store: Store | None = None) -> None:
        """Acquire the lock. Raises ``LimpetError`` if another live process of this machine has it,
        ``FormatTooNew`` if its owner is unknown, and ``StoreError``."""
        store = self._store if store is None else store
        if self.is_held(store):
            return
        lock, previous = pins.make_pin(random_id()), None
        for _ in range(MAX_PUTS):
            try:
                store.put_if_absent(WRITER_LOCK, encode_record(lock))
            except errors.AlreadyExists:
                previous = find_writer(store)
                is_other = previous is not None and previous.process != lock.process
                if previous is not None and is_other and pins.is_holder_alive(previous):
                    what = "Another training writes to this run"
                    raise self._lock_error(previous, what) from None
                store.delete(WRITER_LOCK)
            else:
                self.id = lock.attempt
                if previous is not None:
                    self._release_pins_of(previous, store)
                return
        raise contended_error(WRITER_LOCK, self._store.url)

    @staticmethod
    def _release_pins_of(previous: Pin, store: Store) -> None:
        """Remove the pins of the previous writer, another process that commits nothing more: they
        would stay for days. Its notices stay: it may be alive and in the middle of a deletion."""
        identity = (previous.host, previous.boot, previous.process)
        if identity != machine.process_identity():
            with suppress(errors.StoreError):
                keys = pins.list_process_pins(store)
                for key, pin in pins.read_process_pins(store, keys):
                    if isinstance(pin, Pin) and (pin.host, pin.boot, pin.process) == identity:
                        pins.remove_pin(Location(store, ""), key)

    def check(self, store: Store) -> None:
        """Raise ``LimpetError`` if another training has the lock. ``store``: the run's, perhaps
        with a deadline. After ``release`` it passes, so that a save in flight can complete."""
        expected = self.id or self._observed_id
        if expected is None:
            return
        owner = find_writer(store)
        if owner is None and self.id is None:
            return  # its owner has ended
        if owner is None:  # removed by hand, damaged, or of another training that has ended
            self._check_last_version(store)
            self.acquire(store)
        elif owner.attempt != expected:
            raise self._lock_error(owner, "Another training has taken this run over")

    def _check_last_version(self, store: Store) -> None:
        """Raise ``LimpetError`` if a training has saved that this one does not continue."""
        catalog = Catalog(store)
        last = last_written(catalog.listing())
        with suppress(errors.FormatError, errors.NotFound):
            sessions = [] if last is None else read_sessions(catalog.open(last))
            # a version without a session, which no training has saved, says nothing
            if self.sessions and sessions and sessions[0] not in self.sessions:
                raise errors.LimpetError(
                    f"Another training has taken this run over, and has ended: {self._store.url}",
                    expected="a last version that this training has saved or continues",
                    found=f"{last} of the other training",
                    todo="Start this training again: it continues from the newest version",
                )

    def is_held(self, store: Store) -> bool:
        """Return True if this writer has the lock, without an effect on it. Raises as ``check``."""
        owner = None if self.id is None else find_writer(store)
        return owner is not None and owner.attempt == self.id

    def release(self, seconds: float = CLEANUP_SECONDS) -> None:
        """Release the lock within ``seconds``, without an error: a dead process blocks none."""
        lock_id, self.id = self.id, None
        if lock_id is None:
            return
        store = within(self._store, Deadline.after(seconds, "the release of the writer lock"))
        with suppress(errors.StoreError, errors.FormatTooNew):
            owner = find_writer(store)
            if owner is not None and owner.attempt == lock_id:
                store.delete(WRITER_LOCK)

    def _lock_error(self, owner: Pin, what: str) -> errors.LimpetError:
        is_own_process = owner.process == machine.process_identity()[2]
        this = "this " if is_own_process else ""
        return errors.LimpetError(
            f"{what}: {self._store.url}",
            expected=f"one training at a time (this one is process {os.getpid()})",
            found=f"{this}{pins.describe_holder(owner)}, since {owner.created}",
            todo="End one of the two, or give each its own run. A training that has died does not"
            " block others",
            process=owner.process,
            host=owner.host,
        )


def find_writer(store: Store) -> Pin | None:
    """Return the owner of the lock, or None if the file is missing or damaged. Raises
    ``FormatTooNew``, because a file of a later format has an owner."""
    try:
        return decode_pin(get_bounded(store, WRITER_LOCK, MAX_RECORD), WRITER_LOCK)
    except errors.FormatTooNew:
        raise
    except (errors.NotFound, errors.FormatError):
        return None
