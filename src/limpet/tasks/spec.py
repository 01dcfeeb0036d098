"""What a job consists of: its data sets, cut into tasks. Nothing here changes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from limpet.arguments import check_whole, require, whole
from limpet.errors import LimpetError, PlanError
from limpet.text import is_text

Kind = Literal["training", "evaluation", "prediction"]
KINDS: tuple[Kind, ...] = ("training", "evaluation", "prediction")
"""Only steps of a training consume a part of a task, and streams. Only an evaluation has a result
of each task, for whoever waits for the job: of the others, a failure must end the loop of workers.
"""

DataSets = int | Mapping[str, int | range | None]
"""The data of a job. An int is the number of records of a single data set without a name. A mapping
gives each data set, file, or stream its number of records, a ``range`` of records (step 1), or None
for a stream whose end is not known."""

_MAX_RECORDS = 1 << 62


class TaskRange(NamedTuple):
    """The records of one task: ``start`` up to ``stop`` of a data set, in one epoch. ``stop`` is
    None for a stream, which is one task per epoch."""

    data: str
    start: int
    stop: int | None
    epoch: int


@dataclass(frozen=True)
class JobSpec:
    """A job: every record of its data sets once per epoch, in tasks of ``task_size`` records, once
    the job ``after`` is complete."""

    kind: Kind
    name: str
    data: tuple[tuple[str, int, int | None], ...]
    task_size: int
    epochs: int
    after: str | None

    @cached_property
    def text(self) -> str:
        """The specification as JSON: two jobs are the same if their texts are."""
        fields = self.kind, self.name, self.data, self.task_size, self.epochs, self.after
        return json.dumps(fields)

    @cached_property
    def _task_counts(self) -> list[int]:
        """The number of tasks in the first data sets of an epoch: 0, those of one, of two, ..."""
        sizes = [1 if b is None else -(-(b - a) // self.task_size) for _, a, b in self.data]
        return [0, *accumulate(sizes)]

    @cached_property
    def tasks(self) -> int:
        return self._task_counts[-1] * self.epochs

    def range_of(self, number: int) -> TaskRange:
        """Return the records of a task, which is numbered from 0."""
        epoch, number = divmod(number, self._task_counts[-1])
        i = bisect_right(self._task_counts, number) - 1
        name, first, stop = self.data[i]
        if stop is None:
            return TaskRange(name, first, None, epoch)
        start = first + (number - self._task_counts[i]) * self.task_size
        return TaskRange(name, start, min(start + self.task_size, stop), epoch)


def make_spec(
    kind: str, data: DataSets, task_size: int, epochs: int, name: str, after: str | None
) -> JobSpec:
    """Return the specification of a job. Raises ``LimpetError`` if it is not valid."""
    for text in (name,) if after is None else (name, after):
        require("The name of a job", is_text(text) and text != "", "a text, not empty", text)
    task_size, epochs = (
        check_whole(
            f"{label} of job {name!r}", number, "a whole number, 1 or more", 1, _MAX_RECORDS - 1
        )
        for label, number in (("task_size", task_size), ("epochs", epochs))
    )
    if not isinstance(data, Mapping):
        data = {"": data}
    ranges: list[tuple[str, int, int | None]] = []
    for key, value in data.items():
        start, stop = _limits(name, key, value)
        is_valid = stop is not None or kind == "training"
        require(f"The end of each data set of job {name!r}", is_valid, "a number", stop)
        if start != stop:
            ranges.append((key, start, stop))
    spec = JobSpec(check_kind(kind), name, tuple(ranges), task_size, epochs, after)
    require(f"The number of records of job {name!r}", bool(ranges), "1 or more", 0)
    is_valid = spec.tasks < _MAX_RECORDS
    require(f"The number of tasks of job {name!r}", is_valid, f"< {_MAX_RECORDS}", spec.tasks)
    return spec


def parse_spec(text: object) -> JobSpec:
    """Return the specification with this ``text``. Raises ``PlanError`` if there is none."""
    try:
        kind, name, data, task_size, epochs, after = json.loads(str(text))
        sets = {key: None if stop is None else range(start, stop) for key, start, stop in data}
        spec = make_spec(kind, sets, task_size, epochs, name, after)
        if spec.text != text:
            raise ValueError("not the text of a specification")
    except (ValueError, TypeError, RecursionError, LimpetError) as e:
        raise PlanError(
            "The state of a task queue contains a job that does not exist",
            expected="the specification of a job",
            found=repr(text)[:200],
        ) from e
    return spec


def check_kind(kind: str) -> Kind:
    """Return the kind of a task. Raises ``LimpetError`` if there is no such kind."""
    require("The kind of a task", kind in KINDS, " or ".join(map(repr, KINDS)), kind)
    return cast("Kind", kind)


def _limits(job: str, key: object, value: int | range | None) -> tuple[int, int | None]:
    """Return the first record of a data set, and the end, which is None for a stream."""
    require(f"The name of a data set of job {job!r}", is_text(key), "a text", key)
    if value is None:
        return 0, None
    first, end = (value.start, value.stop) if isinstance(value, range) else (0, value)
    start, stop = whole(first), whole(end, max(first, 0), _MAX_RECORDS - 1)
    is_valid = start is not None and stop is not None and getattr(value, "step", 1) == 1
    expected = "a number, or a range with the step 1"
    require(f"The records of data set {key!r} of job {job!r}", is_valid, expected, value)
    return start or 0, stop
