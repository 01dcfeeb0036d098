"""What a page shows of a run, besides what `limpet ls` lists: values by step, and contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from limpet.deadline import Deadline, call_within
from limpet.errors import FormatError, LimpetError, NotFound, StoreError, Unavailable
from limpet.format.names import MetricsFile
from limpet.run.overview import BranchMetrics, ListResult, RunSummary, VersionEntry, read_steps
from limpet.snapshot.contents import Contents, read_contents

READ_SECONDS = 60.0
"""The longest time for which a page waits for the contents of a version."""

MAX_BRANCHES = 24
"""The number of abandoned branches that a plot shows: the newest ones."""

_MAX_ROWS = 400
_ABANDONED = "abandoned", "abandoned"  # the label and the kind of a series


class RunReport(NamedTuple):
    """A run on a page. ``contents``: of the newest version, or why they cannot be shown.
    ``checked``: the bytes that were verified for this page. ``steps``: the metrics of saves and, if
    it ``has_log``, of the steps between them; ``damaged``: files of the log that cannot be read."""

    result: ListResult
    summary: RunSummary
    contents: Contents | LimpetError | None
    checked: int | None
    has_log: bool
    steps: Sequence[BranchMetrics]
    damaged: Mapping[str, LimpetError]


class Series(NamedTuple):
    """Values by step, of the run with this number on the page. ``kind``: how they are drawn."""

    run: int
    label: str
    kind: str
    points: Sequence[tuple[int, float]]


def read_report(
    result: ListResult, files: Sequence[MetricsFile], stats_bytes: int, checked: int | None = None
) -> RunReport:
    """Read what a page shows of a listed run. ``files``: of its log. Raises ``StoreError``."""
    run, latest = result.run, result.latest
    contents = None if latest is None else read_version(result, latest, stats_bytes)
    saved = {e.version: e.record.metrics for e in result.entries}
    steps, damaged = read_steps(run.store, result.ends, saved, files)
    return RunReport(result, result.summarize(), contents, checked, bool(files), steps, damaged)


def read_version(result: ListResult, entry: VersionEntry, limit: int) -> Contents | LimpetError:
    """Return what a version contains, with statistics for which ``limit`` bytes are read, also of
    the version before. An error is returned, also if the store does not answer."""
    catalog, parent = result.run.catalog, result.parent(entry.version)
    what = f"the contents of {entry.version} in {result.run.url}"

    def read() -> Contents:
        snapshot, earlier = catalog.open(entry.version), None
        with suppress(FormatError, NotFound):  # damaged, or deleted meanwhile
            earlier = None if parent is None else catalog.open(parent)
        return read_contents(snapshot, earlier, _MAX_ROWS, limit)

    try:
        return call_within(Deadline.after(READ_SECONDS, what), read)
    except (FormatError, StoreError) as e:
        return e
    except TimeoutError:
        return Unavailable(f"The store has not sent {what} in {READ_SECONDS:g} s")


def find_steps(reports: Sequence[RunReport], name: str) -> Iterator[Series]:
    """Yield the values of a metric that trainings have saved or logged."""
    for number, report in enumerate(reports):
        left = [[piece] for piece in report.steps if not piece.is_current][-MAX_BRANCHES:]
        for pieces in (*left, [piece for piece in report.steps if piece.is_current]):
            curves = [zip(*p.curves[name], strict=True) for p in pieces if name in p.curves]
            points = [(int(step), float(value)) for curve in curves for step, value in curve]
            if points:
                how = ("training", "solid") if pieces[0].is_current else _ABANDONED
                yield Series(number, *how, points)


def find_values(
    reports: Sequence[RunReport],
    get: Callable[[VersionEntry], float | None],
    label: str,
    kind: str = "solid",
) -> Iterator[Series]:
    """Yield the values that ``get`` finds in versions."""
    for number, report in enumerate(reports):
        for is_current, chain in report.result.chains()[-1 - MAX_BRANCHES :]:
            found = [(e, value) for e in chain if (value := get(e)) is not None]
            if found and found[-1][0].on_lineage == is_current:  # not only that before a branch
                points = [(e.version.step, value) for e, value in found]
                yield Series(number, *((label, kind) if is_current else _ABANDONED), points)
