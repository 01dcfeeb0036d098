"""The small records of a run beside its manifests, with total validation: branches, pins,
evaluations.

See ``docs/format.md``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite, nan
from typing import Any

import msgspec

from holdfast.format import names
from holdfast.format.digest import is_digest
from holdfast.format.sealed import is_utc_time, make_require, seal, unseal

MAX_RECORD = 1 << 20
"""Bytes; a longer record is refused before it is read."""

_PROCESS = re.compile(r"[0-9]{1,10}:([0-9]{1,20}|gone)")
_INT64_LIMIT = 1 << 63
_FLOATS = {"nan": nan, "inf": inf, "-inf": -inf}


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


class LastingPin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keeps a version until the pin is taken away, whoever lives."""

    version: str
    created: str


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one attempt to evaluate a version found: ``metrics``, numbers by name, of exactly the
    snapshot whose manifest has that digest."""

    name: str
    attempt: str
    version: str
    manifest_digest: str
    created: str
    metrics: Mapping[str, Any]

    def decoded_metrics(self) -> dict[str, float]:
        """The metrics as numbers; what JSON has no word for is ``{"float": "nan"}`` in a file."""
        return {
            name: _FLOATS[value["float"]] if isinstance(value, dict) else value
            for name, value in self.metrics.items()
        }


def encode_branch(branch: Branch) -> bytes:
    return seal(branch)[0]


def decode_branch(raw: bytes, file: str) -> Branch:
    """The record of a branch, every field checked. Raises as ``decode_manifest`` does."""
    branch = unseal(raw, Branch, file)[0]
    demand = make_require(file)
    demand(
        names.parse_branch(names.branch_name(branch.number)) is not None, "a branch", branch.number
    )
    demand(names.parse_version(branch.from_version) is not None, "a version", branch.from_version)
    demand(is_digest(branch.from_digest), "a digest of 32 hex digits", branch.from_digest)
    demand(is_utc_time(branch.created), "a time of day in UTC", branch.created)
    return branch


def encode_pin(pin: Pin) -> bytes:
    return seal(pin)[0]


def decode_pin(raw: bytes, file: str) -> Pin:
    """A pin, every field checked. Raises as ``decode_manifest`` does."""
    pin = unseal(raw, Pin, file)[0]
    demand = make_require(file)
    demand(names.is_attempt(pin.attempt), "an attempt of 12 hex digits", pin.attempt)
    version = pin.version is None or names.parse_version(pin.version) is not None
    demand(version, "a version or null", pin.version)
    demand(is_utc_time(pin.created), "a time of day in UTC", pin.created)
    demand(_PROCESS.fullmatch(pin.process) is not None, "a process as pid:start", pin.process)
    return pin


def encode_lasting_pin(pin: LastingPin) -> bytes:
    return seal(pin)[0]


def decode_lasting_pin(raw: bytes, file: str) -> LastingPin:
    """A lasting pin, every field checked. Raises as ``decode_manifest`` does."""
    pin = unseal(raw, LastingPin, file)[0]
    demand = make_require(file)
    demand(names.parse_version(pin.version) is not None, "a version", pin.version)
    demand(is_utc_time(pin.created), "a time of day in UTC", pin.created)
    return pin


def encode_evaluation(evaluation: Evaluation) -> bytes:
    """``evaluation``, whose metrics are ints and floats, as a file."""
    metrics = {
        name: {"float": repr(value)} if isinstance(value, float) and not isfinite(value) else value
        for name, value in evaluation.metrics.items()
    }
    return seal(msgspec.structs.replace(evaluation, metrics=metrics))[0]


def decode_evaluation(raw: bytes, file: str) -> Evaluation:
    """An evaluation, every field checked. Raises as ``decode_manifest`` does."""
    found = unseal(raw, Evaluation, file)[0]
    demand = make_require(file)
    good = names.parse_evaluation(names.evaluation_name(found.name, found.attempt)) is not None
    demand(good, "a name and an attempt", f"{found.name}, {found.attempt}")
    demand(names.parse_version(found.version) is not None, "a version", found.version)
    demand(is_digest(found.manifest_digest), "a digest of 32 hex digits", found.manifest_digest)
    demand(is_utc_time(found.created), "a time of day in UTC", found.created)
    for name, value in found.metrics.items():
        demand(_is_number(value), f"a number for {name[:80]!r}", value)
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, dict):
        return (
            list(value) == ["float"]
            and isinstance(value["float"], str)
            and (value["float"] in _FLOATS)
        )
    if isinstance(value, int):
        return not isinstance(value, bool) and -_INT64_LIMIT <= value < _INT64_LIMIT
    return isinstance(value, float)
