"""The small records of a run, with complete validation: branches, pins, and evaluations.

See ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from limpet.format.digest import Digest
from limpet.format.names import Attempt, EvaluationFile, EvaluationName, MetricsFile, VersionName
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


def encode_metric(value: Metric) -> Metric:
    """Return a number as JSON represents it."""
    text: Any = repr(value)
    return {"float": text} if isinstance(value, float) and not isfinite(value) else value


def decode_metric(value: Metric) -> float:
    """Return a number that JSON represents."""
    return float(value["float"]) if isinstance(value, dict) else value


Step = Annotated[int, Meta(ge=0, lt=10**18)]
"""A number of steps, or of epochs."""

ProcessName = Annotated[str, Meta(pattern=r"\A[0-9]{1,10}:([0-9]{1,20}|gone)\Z")]


class Branch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version from which training continued, and why it was not the newest (``reason``)."""

    number: Annotated[int, Meta(gt=0, lt=10**9)]
    from_version: VersionName
    from_digest: Digest
    created: str
    reason: str


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects an attempt or a version from ``sweep`` and retention. ``host``, ``boot``,
    ``process`` (pid and start time): on the owner's machine, they show whether it is alive."""

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
    """A record about the snapshot whose manifest has this digest, and no other. ``name``: of the
    evaluation that made it, or of the training."""

    name: EvaluationName
    attempt: Attempt
    version: VersionName
    manifest_digest: Digest
    created: str

    kind: ClassVar[str] = ""

    @property
    def file_name(self) -> str:
        return str(EvaluationFile(self.name, self.attempt, self.kind))


class _WithMetrics(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """A record of numbers by name."""

    metrics: Mapping[str, Metric]

    def decoded_metrics(self) -> dict[str, float]:
        """Return the metrics as numbers."""
        return {name: decode_metric(value) for name, value in self.metrics.items()}


class Evaluation(_WithMetrics, frozen=True, forbid_unknown_fields=True):
    """The result of one attempt to evaluate a version."""


class InexactEvaluation(_WithMetrics, frozen=True, forbid_unknown_fields=True):
    """The result of an evaluation while the training went on from ``first_step`` to ``last_step``.
    It is about the newest version at its end, and a score of it only if it ``counts``."""

    first_step: Step
    last_step: Step
    counts: bool

    kind: ClassVar[str] = "inexact"


class FailedEvaluation(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """An attempt to evaluate a version that failed, and why. The version has no score from it."""

    cause: Annotated[str, Meta(max_length=MAX_TEXT)]

    kind: ClassVar[str] = "failed"


class Ended(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """The training ended normally at this version, for a ``reason``, or with an empty one an epoch
    did. ``epochs`` are complete: one more than the version holds, if its step was saved before its
    epoch ended. ``positions``: the epochs at which the loaders of the state go on, by key, or None
    if the version does not have the last steps: a longer training makes them again."""

    reason: Annotated[str, Meta(max_length=MAX_TEXT)]
    epochs: Step
    positions: Mapping[str, Step] | None

    kind: ClassVar[str] = "ended"


class BecameBest(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """The version became the best by this metric, and ``on_best`` of the training has returned."""

    metric: str
    mode: Literal["min", "max"]

    kind: ClassVar[str] = "best"


class Verified(AboutVersion, frozen=True, forbid_unknown_fields=True):
    """Every byte of the version was read: the ``damage`` that was found, or none."""

    damage: Annotated[str, Meta(max_length=MAX_TEXT)]

    kind: ClassVar[str] = "verified"


class VersionLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Protects ``versions`` while the evaluation ``name`` renews it, each time in a new file: until
    an observer sees no renewal for ``seconds``, or the process has ended (as for a ``Pin``)."""

    name: EvaluationName
    attempt: Attempt
    versions: Sequence[VersionName]
    seconds: Annotated[float, Meta(gt=0, le=MAX_LEASE_SECONDS)]
    created: str
    host: str
    boot: str
    process: ProcessName


class StepMetrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metrics after steps, in ascending order; a later row adds to an earlier one of its step.
    ``start``: the number, among all starts of the training, of the one that has logged them. What
    earlier ones have logged after the step ``after`` of the branch does not count any more."""

    branch: Annotated[int, Meta(ge=0, lt=10**9)]
    start: Annotated[int, Meta(gt=0, lt=10**9)]
    after: Step
    created: str
    rows: Annotated[Sequence[tuple[Step, Mapping[str, Metric]]], Meta(min_length=1)]

    def decoded_rows(self) -> list[tuple[int, dict[str, float]]]:
        """Return the rows with numbers."""
        return [(s, {n: decode_metric(v) for n, v in m.items()}) for s, m in self.rows]

    @property
    def file(self) -> MetricsFile:
        return MetricsFile(self.branch, self.start, self.rows[0][0])


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A metric by which versions are compared, and whether smaller or larger is better."""

    metric: str
    mode: Literal["min", "max"]


_Record = TypeVar(
    "_Record", Branch, Pin, LastingPin, VersionLease, AboutVersion, StepMetrics, Objective
)


def encode_record(record: _Record) -> bytes:
    """Return the file content of a record. The metrics of an evaluation are ints and floats."""
    if isinstance(record, StepMetrics):
        rows = [(s, {n: encode_metric(v) for n, v in m.items()}) for s, m in record.rows]
        record = msgspec.structs.replace(record, rows=rows)
    if isinstance(record, _WithMetrics):
        metrics = {name: encode_metric(v) for name, v in record.metrics.items()}
        record = msgspec.structs.replace(record, metrics=metrics)
    return seal(record)[0]


def _decode(decoder: StrictDecoder[_Record], raw: bytes, file: str) -> _Record:
    """Return a record. Every field is checked. Raises the same errors as ``decode_manifest``."""
    record = unseal(raw, decoder, file)[0]
    if not isinstance(record, Objective):
        require(file, is_utc_time(record.created), "a time in UTC in `created`", record.created)
    return record


decode_branch = partial(_decode, StrictDecoder(msgspec.json.Decoder(Branch)))
decode_pin = partial(_decode, StrictDecoder(msgspec.json.Decoder(Pin)))
decode_lasting_pin = partial(_decode, StrictDecoder(msgspec.json.Decoder(LastingPin)))
decode_lease = partial(_decode, StrictDecoder(msgspec.json.Decoder(VersionLease)))
_decode_metrics = partial(_decode, StrictDecoder(msgspec.json.Decoder(StepMetrics)))
decode_objective = partial(_decode, StrictDecoder(msgspec.json.Decoder(Objective)))


def decode_step_metrics(raw: bytes, key: str) -> StepMetrics:
    """Return a file of the metrics log, which has the name of its content."""
    found = _decode_metrics(raw, key)
    steps = [found.after, *(step for step, _ in found.rows)]
    require(key, steps == sorted(steps), "ascending steps", steps)
    require(key, found.file.key == key, "a file of this name", found.file.key)
    return found


_ABOUT_VERSION: Mapping[str, StrictDecoder[AboutVersion]] = {
    kind.kind: StrictDecoder(msgspec.json.Decoder(kind))
    for kind in (Evaluation, FailedEvaluation, Ended, InexactEvaluation, BecameBest, Verified)
}


def decode_about_version(raw: bytes, file: str, kind: str = "") -> AboutVersion:
    """Return a record of a ``kind`` of ``EvaluationFile``: by default, a result."""
    return _decode(_ABOUT_VERSION[kind], raw, file)
