"""Who writes to a run: one training at a time.

At its first step a training puts ``writer.json`` into its run, and takes it away at its end.
Another one is refused as long as the process that put it lives on this machine. A process that
cannot be seen from here may be gone for good, with its machine: it is succeeded, and should it
live after all, it finds at its next save that the file is no longer its own, and saves nothing
more. No clock is asked. (Fencing, as in M. Kleppmann, "How to do distributed locking", 2016.)
"""

from __future__ import annotations

import os
from contextlib import suppress

from holdfast import machine
from holdfast.engine.snapshot import pins
from holdfast.engine.snapshot.location import Location
from holdfast.errors import (
    AlreadyExists,
    FormatError,
    FormatTooNew,
    HoldfastError,
    NotFound,
    StoreError,
)
from holdfast.format.names import WRITER_LOCK, new_attempt
from holdfast.format.records import MAX_RECORD, Pin, decode_pin, encode_pin
from holdfast.storage.store import Store


class WriterLock:
    """The right of one Checkpointer to save into a run."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._id: str | None = None

    def acquire(self) -> None:
        """Become the writer. Raises ``HoldfastError`` if another process of this machine is it and
        lives, ``FormatTooNew`` if that cannot be told, and ``StoreError`` if the run cannot be
        written to."""
        found = None if self._id is None else self._read_owner()
        if found is not None and found.attempt == self._id:
            return
        host, boot, process = machine.process_identity()
        mine = Pin(new_attempt(), None, machine.utc_now(), host, boot, process)
        other = None
        while True:
            try:
                self._store.put_if_absent(WRITER_LOCK, encode_pin(mine))
            except AlreadyExists:
                other = self._read_owner()
                if other is not None and other.process != process and pins.is_holder_alive(other):
                    raise self._lock_error(other, "Another training writes to this run") from None
                self._store.delete(WRITER_LOCK)
            else:
                self._id = mine.attempt
                if other is not None:
                    self._release_pins_of(other)
                return

    def _release_pins_of(self, predecessor: Pin) -> None:
        """Take away the pins of a predecessor in another process: it commits nothing more, and
        nobody else could tell for days that it is gone. Those days pass where the store fails."""
        theirs = (predecessor.host, predecessor.boot, predecessor.process)
        if theirs != machine.process_identity():
            with suppress(StoreError):
                for stat, found in pins.read_process_pins(self._store, self._store.list("")):
                    if isinstance(found, Pin) and (found.host, found.boot, found.process) == theirs:
                        pins.remove_pin(Location(self._store, ""), stat.key)

    def check(self) -> None:
        """See that this is still the writer; once released, a save in flight may still end. Raises
        ``HoldfastError`` if another has taken over."""
        if self._id is None:
            return
        other = self._read_owner()
        if other is None:  # removed by hand, or damaged: nobody else is it
            self.acquire()
            return
        if other.attempt != self._id:
            raise self._lock_error(other, "Another training has taken this run over")

    def release(self) -> None:
        """Be it no more. A store that fails here does no harm: the process ends."""
        mine, self._id = self._id, None
        with suppress(StoreError, FormatTooNew):
            if (
                mine is not None
                and (found := self._read_owner()) is not None
                and found.attempt == mine
            ):
                self._store.delete(WRITER_LOCK)

    def _read_owner(self) -> Pin | None:
        """Who is the writer; None for nobody, or for a record that is damaged. One of a later
        format is somebody: raises ``FormatTooNew``."""
        try:
            return decode_pin(self._store.get(WRITER_LOCK, MAX_RECORD), WRITER_LOCK)
        except FormatTooNew:
            raise
        except (NotFound, FormatError):
            return None

    def _lock_error(self, other: Pin, what: str) -> HoldfastError:
        here = "this process" if other.process == machine.process_identity()[2] else "process"
        number = other.process.partition(":")[0]
        return HoldfastError(
            f"{what}: {self._store.url}",
            expected=f"one training at a time (this one is process {os.getpid()})",
            found=f"{here} {number} on {other.host.split()[0]}, since {other.created}",
            todo="End one of them, or give each a run of its own; one that died blocks nobody",
            process=other.process,
            host=other.host,
        )
