"""Leases: for how long an evaluation that runs protects its versions, also after its machine is
gone.

The holder renews its lease by creating the file with the next number. The greatest number counts,
so whoever lost its lease finds out at its next renewal. An observer compares no clocks: its own
measures for how long it has seen the newest file. The file's attempt says whose it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock, Thread

from limpet import events, machine
from limpet.errors import AlreadyExists, FormatError, LimpetError, NotFound, StoreError
from limpet.format.names import Version, lease_name, parse_lease, random_id
from limpet.format.records import MAX_RECORD, VersionLease, decode_lease, encode_record
from limpet.snapshot.location import get_bounded
from limpet.snapshot.pins import describe_holder, is_holder_alive
from limpet.storage.store import Store, contended_error, list_level
from limpet.threads import Latch, start_thread

LEASE_SECONDS = 10.0
"""Default time after the last renewal at which a lease ends."""

_RENEWALS = 3
"""The number of renewals in the time of a lease."""

_MAX_CONFIRM = 30.0
"""The longest time for which ``LeaseObserver.confirm`` waits by default, in seconds."""

_MAX_JOIN = 10.0
"""The longest time for which the end of an evaluation waits for a renewal, in seconds."""

_MAX_LISTINGS = 3
"""The number of times that leases are listed while a listed file is deleted before it is read."""

Wait = Callable[[float], object]


class LeaseObserver:
    """Decides which leases are alive. Keep it for as long as the run is observed: a lease that it
    sees for the first time is alive, unless its process has ended on this machine."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = Lock()
        self._records: dict[str, VersionLease | FormatError] = {}
        self._first_seen: dict[str, float] = {}
        self.unreadable: set[str] = set()
        """Damaged files at the last call of ``live``: each may protect any version until its holder
        replaces it, for at most ``LEASE_SECONDS``."""

    def live(self, files: Iterable[str] | None = None) -> dict[str, VersionLease]:
        """Return the newest live lease of each name by its key, of ``files`` or all. The event
        ``skipped`` reports a damaged file (see ``unreadable``). Raises ``StoreError``."""
        with self._lock:
            for _ in range(_MAX_LISTINGS):
                newest = newest_leases(list_leases(self._store) if files is None else files)
                for known in (self._records, self._first_seen):
                    for key in known.keys() - newest.keys():
                        known.pop(key, None)
                found = {key: self._read(key) for key in newest}
                if all(key in self._records for key in newest):
                    break
                files = None  # renewed, or released, since the listing
            oldest = self._clock() - LEASE_SECONDS
            self.unreadable = {
                key
                for key, record in self._records.items()
                if isinstance(record, FormatError) and self._first_seen[key] > oldest
            }
            return {
                key: lease
                for key, lease in found.items()
                if lease is not None and not self._has_ended(key, lease)
            }

    def confirm(self, wait: Wait = time.sleep, limit: float = _MAX_CONFIRM) -> None:
        """Wait until each lease that is alive has been renewed or has ended, for at most ``limit``
        seconds. A process that has only just started otherwise takes every lease for alive."""
        end, first = self._clock() + limit, self.live().keys() | self.unreadable
        while (waiting := first & (live := self.live()).keys() | self.unreadable) and (
            self._clock() < end
        ):
            seconds = [live[key].seconds if key in live else LEASE_SECONDS for key in waiting]
            wait(min(seconds) / (2 * _RENEWALS))

    def _read(self, key: str) -> VersionLease | None:
        """Return the lease in a file, or None if it was deleted or is damaged."""
        known = self._records.get(key)
        try:
            lease = read_lease(self._store, key)
        except NotFound:
            self._records.pop(key, None)
            return None
        except FormatError as e:
            if not isinstance(known, FormatError):
                self._records[key], self._first_seen[key] = e, self._clock()
                events.emit("skipped", version=key, error=e)
            return None
        if lease != known:  # also if a later lease has the number of an earlier one
            self._records[key], self._first_seen[key] = lease, self._clock()
        return lease

    def _has_ended(self, key: str, lease: VersionLease) -> bool:
        is_old = self._clock() - self._first_seen[key] >= lease.seconds
        return is_old or is_holder_alive(lease) is False


def list_leases(store: Store, name: str = "") -> list[str]:
    """Return the keys of the files of leases, of one evaluation or of all."""
    prefix = f"lease-{name}." if name else "lease-"
    entries = list_level(store, "", prefix)
    return [e.name for e in entries if e.kind != "folder" and parse_lease(e.name) is not None]


def newest_leases(files: Iterable[str]) -> dict[str, int]:
    """Return the newest file of each evaluation, with its number. Other names are ignored."""
    newest: dict[str, tuple[int, str]] = {}
    for file in files:
        if (parsed := parse_lease(file)) is not None:
            name, number = parsed
            newest[name] = max(newest.get(name, (0, "")), (number, file))
    return {file: number for number, file in newest.values()}


def read_lease(store: Store, key: str) -> VersionLease:
    """Read the file of a lease. Raises ``NotFound``, ``FormatError``, or another ``StoreError``."""
    return decode_lease(get_bounded(store, key, MAX_RECORD), key)


class LeaseHolder:
    """Holds the lease of an evaluation, and renews it on a thread, which calls ``on_lost`` once if
    another process has taken the lease over, or the store took no renewal in time."""

    def __init__(
        self,
        store: Store,
        name: str,
        seconds: float = LEASE_SECONDS,
        on_lost: Callable[[LimpetError], object] = lambda error: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait | None = None,
    ) -> None:
        self._store, self._name, self.seconds = store, name, seconds
        self._on_lost, self._clock = on_lost, clock
        self._closing = Latch()
        self._wait: Wait = self._closing.wait if wait is None else wait
        self._lock = Lock()
        self._attempt = random_id()
        self._versions: Sequence[Version] = ()
        self._number = 0
        self._renewed_at = 0.0
        self._error: LimpetError | None = None
        self._thread: Thread | None = None

    def acquire(self) -> None:
        """Acquire the lease, after the end of one that another process seems to hold. Raises
        ``LimpetError`` if another process renews it, and ``StoreError``."""
        observer = LeaseObserver(self._store, self._clock)
        first: str | None = None
        end = self._clock() + 3 * self.seconds + _MAX_CONFIRM
        while self._clock() < end:
            files = list_leases(self._store, self._name)
            number = max(newest_leases(files).values(), default=0)
            live = observer.live(files)
            key = next(iter(live), None)
            if key is None:
                with suppress(AlreadyExists):  # if another process was faster, look at its lease
                    self._put(number + 1)
                    return
            elif first is not None and key != first:
                raise LimpetError(
                    f"Another process evaluates {self._store.url} under the name {self._name}",
                    expected="one evaluation of each name at a time",
                    found=f"{describe_holder(live[key])}, which renews its lease",
                    todo="Stop one of the two, or give this one another name",
                )
            first = first or key
            self._wait(self.seconds / (2 * _RENEWALS))
        raise contended_error(lease_name(self._name, 1), self._store.url)

    def start(self) -> None:
        """Start to renew the lease. Raises ``LimpetError`` if no thread can be started."""
        thread = Thread(target=self._renew_regularly, name="limpet-lease", daemon=True)
        if not start_thread(thread):
            raise LimpetError(f"No thread can be started to renew the lease of {self._name}")
        self._thread = thread

    def protect(self, versions: Sequence[Version]) -> None:
        """Protect these versions, and no others. Only one that is ``pins.protected`` meanwhile is
        sure to exist from then on. Raises the error of the lost lease, and ``StoreError``."""
        with self._lock:
            self.check()
            self._versions = tuple(versions)
            self._renew()

    @property
    def protects(self) -> bool:
        """True if the lease protects any version."""
        return bool(self._versions)

    def check(self) -> None:
        """Raise the error of the lost lease, if it is lost."""
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Stop to renew the lease, and end it. If the store fails or hangs, it ends by itself."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_MAX_JOIN)
            if self._thread.is_alive():  # a daemon thread, in a call of a store that hangs
                return
        with self._lock, suppress(StoreError):
            for key in list_leases(self._store, self._name):  # an interrupt may have left a file
                if self._is_own(key):
                    self._store.delete(key)

    def _renew_regularly(self) -> None:
        while not self._closing.is_set():
            self._wait(self.seconds / _RENEWALS)
            if self._closing.is_set():
                return
            try:
                with self._lock:
                    self._renew()
            except LimpetError as e:
                has_time = self._clock() - self._renewed_at < self.seconds
                if isinstance(e, StoreError) and not isinstance(e, NotFound) and has_time:
                    continue  # the store may answer in time
                self._error = e
                self._on_lost(e)
                return

    def _renew(self) -> None:
        """Write the next file and delete the others. Raises an error if the lease is lost."""
        own = lease_name(self._name, self._number)
        try:
            with suppress(FormatError):  # the renewal replaces a damaged file
                # another process that took the lease over has deleted it
                if read_lease(self._store, own).attempt != self._attempt:
                    raise NotFound(f"There is no {own} of this process", store=self._store.url)
            self._put(self._number + 1)
        except (NotFound, AlreadyExists) as e:
            raise LimpetError(
                f"The lease of evaluation {self._name} of {self._store.url} is lost",
                expected=f"the file {own}, renewed every {self.seconds / _RENEWALS:.1f} s",
                todo="Another process may have taken the evaluation over, because this one was"
                " stopped for a while; or the run was moved or deleted",
            ) from e

    def _put(self, number: int) -> None:
        """Write the file with a number, and delete those with smaller ones. Raises
        ``AlreadyExists`` if there is this number or a greater one."""
        host, boot, process = machine.process_identity()
        lease = VersionLease(
            name=self._name,
            attempt=self._attempt,
            versions=[str(version) for version in self._versions],
            seconds=self.seconds,
            created=machine.utc_now(),
            host=host,
            boot=boot,
            process=process,
        )
        own, began = lease_name(self._name, number), self._clock()
        try:
            self._store.put_if_absent(own, encode_record(lease))
        except AlreadyExists:
            if not self._is_own(own):
                raise
            self._put(number + 1)  # an earlier call wrote the file, and then raised
            return
        files = list_leases(self._store, self._name)
        if newest_leases(files).get(own) is None:  # the number was free because its file was old
            self._store.delete(own)
            raise AlreadyExists(f"There is a newer lease than {own}", store=self._store.url)
        self._number, self._renewed_at = number, began
        for file in files:
            if file != own:
                self._store.delete(file)

    def _is_own(self, key: str) -> bool:
        try:
            return read_lease(self._store, key).attempt == self._attempt
        except (NotFound, FormatError):
            return False
