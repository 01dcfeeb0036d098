"""The small records of a run, with complete validation: branches, pins, and evaluations.

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
"""The maximum size of a record in bytes. A longer record is rejected before it is read."""

_PROCESS = re.compile(r"[0-9]{1,10}:([0-9]{1,20}|gone)")
_INT64_LIMIT = 1 << 63
_FLOATS = {"nan": nan, "inf": inf, "-inf": -inf}


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version from which training continued, and why it was not the newest (``reason``)."""

    number: int
    from_version: str
    from_digest: str
    created: str
    reason: str


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects the files of an attempt in progress, or a version, from ``sweep`` and retention.

    ``host``, ``boot``, and ``process`` (pid and start time) identify the owner. On the same machine
    they show whether the owner is still alive, independent of the clock.
    """

    attempt: str
    version: str | None
    created: str
    host: str
    boot: str
    process: str


class LastingPin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects a version until the pin is removed, independent of any process."""

    version: str
    created: str


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one attempt to evaluate a version.

    ``metrics`` contains numbers by name. They apply only to the snapshot whose manifest has the
    digest ``manifest_digest``.
    """

    name: str
    attempt: str
    version: str
    manifest_digest: str
    created: str
    metrics: Mapping[str, Any]

    def decoded_metrics(self) -> dict[str, float]:
        """Return the metrics as numbers.

        In a file, a number that JSON cannot represent has the form ``{"float": "nan"}``.
        """
        return {
            name: _FLOATS[value["float"]] if isinstance(value, dict) else value
            for name, value in self.metrics.items()
        }


def encode_branch(branch: Branch) -> bytes:
    return seal(branch)[0]


def decode_branch(raw: bytes, file: str) -> Branch:
    """Return the record of a branch. Every field is checked.

    Raises the same errors as ``decode_manifest``.
    """
    branch = unseal(raw, Branch, file)[0]
    require = make_require(file)
    require(
        names.parse_branch(names.branch_name(branch.number)) is not None, "a branch", branch.number
    )
    require(names.parse_version(branch.from_version) is not None, "a version", branch.from_version)
    require(is_digest(branch.from_digest), "a digest of 32 hex digits", branch.from_digest)
    require(is_utc_time(branch.created), "a time in UTC", branch.created)
    return branch


def encode_pin(pin: Pin) -> bytes:
    return seal(pin)[0]


def decode_pin(raw: bytes, file: str) -> Pin:
    """Return a pin. Every field is checked. Raises the same errors as ``decode_manifest``."""
    pin = unseal(raw, Pin, file)[0]
    require = make_require(file)
    require(names.is_attempt(pin.attempt), "an attempt of 12 hex digits", pin.attempt)
    valid_version = pin.version is None or names.parse_version(pin.version) is not None
    require(valid_version, "a version or null", pin.version)
    require(is_utc_time(pin.created), "a time in UTC", pin.created)
    require(_PROCESS.fullmatch(pin.process) is not None, "a process as pid:start", pin.process)
    return pin


def encode_lasting_pin(pin: LastingPin) -> bytes:
    return seal(pin)[0]


def decode_lasting_pin(raw: bytes, file: str) -> LastingPin:
    """Return a lasting pin. Every field is checked.

    Raises the same errors as ``decode_manifest``.
    """
    pin = unseal(raw, LastingPin, file)[0]
    require = make_require(file)
    require(names.parse_version(pin.version) is not None, "a version", pin.version)
    require(is_utc_time(pin.created), "a time in UTC", pin.created)
    return pin


def encode_evaluation(evaluation: Evaluation) -> bytes:
    """Return the file content of an evaluation whose metrics are ints and floats."""
    metrics = {
        name: {"float": repr(value)} if isinstance(value, float) and not isfinite(value) else value
        for name, value in evaluation.metrics.items()
    }
    return seal(msgspec.structs.replace(evaluation, metrics=metrics))[0]


def decode_evaluation(raw: bytes, file: str) -> Evaluation:
    """Return an evaluation. Every field is checked.

    Raises the same errors as ``decode_manifest``.
    """
    evaluation = unseal(raw, Evaluation, file)[0]
    require = make_require(file)
    file_name = names.evaluation_name(evaluation.name, evaluation.attempt)
    valid_name = names.parse_evaluation(file_name) is not None
    require(valid_name, "a name and an attempt", f"{evaluation.name}, {evaluation.attempt}")
    require(names.parse_version(evaluation.version) is not None, "a version", evaluation.version)
    require(
        is_digest(evaluation.manifest_digest),
        "a digest of 32 hex digits",
        evaluation.manifest_digest,
    )
    require(is_utc_time(evaluation.created), "a time in UTC", evaluation.created)
    for name, value in evaluation.metrics.items():
        require(_is_number(value), f"a number for {name[:80]!r}", value)
    return evaluation


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
