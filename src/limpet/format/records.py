"""The small records of a run, with complete validation: branches, pins, and evaluations.

See ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from limpet.format.digest import Digest
from limpet.format.names import (
    Attempt,
    EvaluationFile,
    EvaluationName,
    VersionName,
)
from limpet.format.sealed import Int64, is_utc_time, require, seal, unseal
from limpet.format.strict_json import StrictDecoder

MAX_RECORD = 1 << 20
"""The maximum size of a record in bytes. A longer record is rejected before it is read."""

MAX_TEXT = 16_384
"""The maximum length of a cause or a reason, in characters."""

MAX_LEASE_SECONDS = 86_400
"""The longest time for which a lease protects versions without a renewal."""

Metric = (
    Int64
    | float
    | Annotated[dict[Literal["float"], Literal["nan", "inf", "-inf"]], Meta(min_length=1)]
)
"""A number, as JSON represents it: NaN and infinities are objects."""


ProcessName = Annotated[str, Meta(pattern=r"\A[0-9]{1,10}:([0-9]{1,20}|gone)\Z")]


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version from which training continued, and why it was not the newest (``reason``)."""

    number: Annotated[int, Meta(gt=0, lt=10**9)]
    from_version: VersionName
    from_digest: Digest
    created: str
    reason: str


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects the files of an attempt in progress, or a version, from ``sweep`` and retention.

    ``host``, ``boot``, and ``process`` (pid and start time) identify the owner. On the same machine
    they show whether the owner is still alive, independent of the clock.
    """

    attempt: Attempt
    version: VersionName | None
    created: str
    host: str
    boot: str
    process: ProcessName


class LastingPin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects a version until the pin is removed, independent of any process."""

    version: VersionName
    created: str


class AboutVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record about the snapshot whose manifest has the digest ``manifest_digest``, and no other.

    ``name`` says who made it: the name of an evaluation, or the training.
    """

    name: EvaluationName
    attempt: Attempt
    version: VersionName
    manifest_digest: Digest
    created: str

    kind: ClassVar[str] = ""

    @property
    def file_name(self) -> str:
        return str(EvaluationFile(self.name, self.attempt, self.kind))


class Evaluation(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """The result of one attempt to evaluate a version: numbers by name."""

    metrics: Mapping[str, Metric]

    def decoded_metrics(self) -> dict[str, float]:
        """Return the metrics as numbers."""
        return _decode_metrics(self.metrics)


class InexactEvaluation(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """The result of an evaluation during which the training went on. It is no score of a version.

    Parts of the data were evaluated with the parameters after the steps ``first_step`` up to
    ``last_step``. The version is the newest one at the end of the evaluation.
    """

    metrics: Mapping[str, Metric]
    first_step: Annotated[int, Meta(ge=0, lt=10**18)]
    last_step: Annotated[int, Meta(ge=0, lt=10**18)]

    kind: ClassVar[str] = "inexact"

    def decoded_metrics(self) -> dict[str, float]:
        """Return the metrics as numbers."""
        return _decode_metrics(self.metrics)


def _decode_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {
        name: float(value["float"]) if isinstance(value, dict) else value
        for name, value in metrics.items()
    }


class FailedEvaluation(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """An attempt to evaluate a version that failed, and why. The version has no score from it."""

    cause: Annotated[str, Meta(max_length=MAX_TEXT)]

    kind: ClassVar[str] = "failed"


class Ended(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """The training ended normally when this was its newest version, and why (``reason``).

    ``epochs``: the number of complete epochs. The version holds one less if its step was saved
    before its epoch ended.
    """

    reason: Annotated[str, Meta(max_length=MAX_TEXT)]
    epochs: Annotated[int, Meta(ge=0, lt=10**18)]

    kind: ClassVar[str] = "ended"


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects ``versions`` while the evaluation ``name`` renews it.

    Every renewal has a file of its own. A lease ends if an observer sees no renewal for ``seconds``
    seconds, or if its process has ended (as for a ``Pin``). ``attempt`` is that of the evaluator.
    """

    name: EvaluationName
    attempt: Attempt
    versions: Sequence[VersionName]
    seconds: Annotated[float, Meta(gt=0, le=MAX_LEASE_SECONDS)]
    created: str
    host: str
    boot: str
    process: ProcessName


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric by which versions of the run are compared, and whether smaller or larger is
    better."""

    metric: str
    mode: Literal["min", "max"]


_Record = TypeVar("_Record", Branch, Pin, LastingPin, Lease, AboutVersion)


_BRANCH = StrictDecoder(msgspec.json.Decoder(Branch))
_PIN = StrictDecoder(msgspec.json.Decoder(Pin))
_LASTING_PIN = StrictDecoder(msgspec.json.Decoder(LastingPin))
_LEASE = StrictDecoder(msgspec.json.Decoder(Lease))
_OBJECTIVE = StrictDecoder(msgspec.json.Decoder(Objective))
_ABOUT_VERSION: Mapping[str, StrictDecoder[AboutVersion]] = {
    kind.kind: StrictDecoder(msgspec.json.Decoder(kind))
    for kind in (Evaluation, FailedEvaluation, Ended, InexactEvaluation)
}


def _decode(raw: bytes, decoder: StrictDecoder[_Record], file: str) -> _Record:
    """Return a record. Every field is checked. Raises the same errors as ``decode_manifest``."""
    record = unseal(raw, decoder, file)[0]
    require(file, is_utc_time(record.created), "a time in UTC in `created`", record.created)
    return record


def encode_branch(branch: Branch) -> bytes:
    return seal(branch)[0]


def decode_branch(raw: bytes, file: str) -> Branch:
    return _decode(raw, _BRANCH, file)


def encode_pin(pin: Pin) -> bytes:
    return seal(pin)[0]


def decode_pin(raw: bytes, file: str) -> Pin:
    return _decode(raw, _PIN, file)


def encode_lasting_pin(pin: LastingPin) -> bytes:
    return seal(pin)[0]


def decode_lasting_pin(raw: bytes, file: str) -> LastingPin:
    return _decode(raw, _LASTING_PIN, file)


def encode_about_version(record: AboutVersion) -> bytes:
    """Return the file content of a record. The metrics of an evaluation are ints and floats."""
    if isinstance(record, Evaluation | InexactEvaluation):
        metrics = {
            name: {"float": repr(v)} if isinstance(v, float) and not isfinite(v) else v
            for name, v in record.metrics.items()
        }
        record = msgspec.structs.replace(record, metrics=metrics)
    return seal(record)[0]


def decode_about_version(raw: bytes, file: str, kind: str = "") -> AboutVersion:
    """Return a record of a ``kind`` of ``EvaluationFile``: by default, a result."""
    return _decode(raw, _ABOUT_VERSION[kind], file)


def encode_lease(lease: Lease) -> bytes:
    return seal(lease)[0]


def decode_lease(raw: bytes, file: str) -> Lease:
    return _decode(raw, _LEASE, file)


def encode_objective(objective: Objective) -> bytes:
    return seal(objective)[0]


def decode_objective(raw: bytes, file: str) -> Objective:
    """Return a checked record. Raises the same errors as ``decode_manifest``."""
    return unseal(raw, _OBJECTIVE, file)[0]
