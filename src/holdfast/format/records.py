"""The small records beside the versions of a run: branches and pins, with total validation.

See ``docs/format.md``.
"""

from __future__ import annotations

import re

import msgspec

from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import demands, is_time, seal, unseal

_PROCESS = re.compile(r"[0-9]{1,10}:([0-9]{1,20}|gone)")


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From which version training went on, and why not from the newest (``reason``)."""

    number: int
    from_version: str
    from_digest: str
    created: str
    reason: str


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keeps ``sweep`` and retention off: the files of an attempt under way, or a version.

    ``host``, ``boot`` and ``process`` (pid and start time) tell on the same machine whether the
    one who holds it still lives, whatever the clock says.
    """

    attempt: str
    version: str | None
    created: str
    host: str
    boot: str
    process: str


def encode_branch(branch: Branch) -> bytes:
    return seal(branch)[0]


def decode_branch(raw: bytes, file: str) -> Branch:
    """The record of a branch, every field checked. Raises as ``decode_manifest`` does."""
    branch = unseal(raw, Branch, file)[0]
    demand = demands(file)
    demand(
        names.parse_branch(names.branch_name(branch.number)) is not None, "a branch", branch.number
    )
    demand(names.parse_version(branch.from_version) is not None, "a version", branch.from_version)
    demand(is_digest(branch.from_digest), "a digest of 32 hex digits", branch.from_digest)
    demand(is_time(branch.created), "a time of day in UTC", branch.created)
    return branch


def encode_pin(pin: Pin) -> bytes:
    return seal(pin)[0]


def decode_pin(raw: bytes, file: str) -> Pin:
    """A pin, every field checked. Raises as ``decode_manifest`` does."""
    pin = unseal(raw, Pin, file)[0]
    demand = demands(file)
    demand(names.is_attempt(pin.attempt), "an attempt of 12 hex digits", pin.attempt)
    version = pin.version is None or names.parse_version(pin.version) is not None
    demand(version, "a version or null", pin.version)
    demand(is_time(pin.created), "a time of day in UTC", pin.created)
    demand(_PROCESS.fullmatch(pin.process) is not None, "a process as pid:start", pin.process)
    return pin
