"""Pins: while one is held, ``sweep`` keeps its hands off the files of that attempt."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from holdfast import events
from holdfast.engine.location import Location
from holdfast.errors import StoreError
from holdfast.format.names import new_attempt, pin_name
from holdfast.format.records import Pin, encode_pin


def hold(place: Location, attempt: str) -> str:
    """Pin the files of an attempt for as long as this process lives; returns the pin's key."""
    host, boot, process = identity()
    pin = Pin(attempt, None, now(), host, boot, process)
    key = place.beside(pin_name(new_attempt()))
    try:
        place.store.put_if_absent(key, encode_pin(pin))
    except StoreError:
        release(place, key)  # it may be there although its put failed
        raise
    return key


@contextmanager
def held(place: Location, attempt: str) -> Iterator[None]:
    """Holds a pin for the time of a ``with`` block."""
    key = hold(place, attempt)
    try:
        yield
    finally:
        release(place, key)


def release(place: Location, key: str) -> None:
    """Take the pin away. What was saved is committed or not without it, so a store that fails
    here fails no save: the pin ends with this process, and ``sweep`` removes it."""
    try:
        place.store.delete(key)
    except StoreError as e:
        events.emit("pin_left", key=key, store=place.store.url, error=str(e))


def alive(pin: Pin) -> bool | None:
    """Whether the process that holds the pin lives; None if it is on another machine."""
    host, boot, _ = identity()
    if pin.host != host:
        return None
    if pin.boot != boot:
        return False
    return _process(int(pin.process.partition(":")[0])) == pin.process


def identity() -> tuple[str, str, str]:
    """This machine, this boot of it, and this process as ``pid:start`` (a pid alone returns).

    A container whose processes cannot be seen from here counts as another machine.
    """
    try:
        seen = os.readlink("/proc/self/ns/pid")
    except OSError:
        seen = ""
    host = f"{socket.gethostname()} {seen}"
    return host, _read("/proc/sys/kernel/random/boot_id"), _process(os.getpid())


def now() -> str:
    """The time of day in UTC, for people to read."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _process(pid: int) -> str:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    # a zombie or a vanished process holds nothing
    if not fields or fields[0] in ("Z", "X"):
        return f"{pid}:gone"
    return f"{pid}:{fields[19]}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
