"""What a page shows of a run, besides what `limpet ls` lists: values by step, and contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from limpet.deadline import Deadline, call_within
from limpet.errors import FormatError, LimpetError, NotFound, StoreError, Unavailable
from limpet.run import metrics_log
from limpet.run.overview import (
    BranchMetrics,
    ListResult,
    RunSummary,
    VersionEntry,
    read_steps,
)
from limpet.snapshot.contents import Contents, read_contents

READ_SECONDS = 60.0
"""The longest time for which a page waits for the contents of a version."""

MAX_BRANCHES = 24
"""The number of abandoned branches that a plot shows: the newest ones."""

_MAX_ROWS = 400

Getter = Callable[[VersionEntry], Mapping[str, float]]


class RunReport(NamedTuple):
    """A run on a page. ``contents``: of the newest version, or why they cannot be shown.
    ``checked``: the bytes that were verified for this page. ``log``: the metrics of every step, if
    they were logged; ``damaged``: its files that cannot be read."""

    result: ListResult
    summary: RunSummary
    contents: Contents | LimpetError | None
    checked: int | None
    log: Sequence[BranchMetrics] = ()
    damaged: Mapping[str, LimpetError] = {}


class Series(NamedTuple):
    """Values by step, of the run with this number on the page. ``kind``: how they are drawn."""

    run: int
    label: str
    kind: str
    points: Sequence[tuple[int, float]]


def read_report(result: ListResult, stats_bytes: int, checked: int | None = None) -> RunReport:
    """Read what a page shows of a run whose versions are listed. Raises ``StoreError``."""
    run, latest = result.run, result.latest
    contents = None if latest is None else read_version(result, latest, stats_bytes)
    files = metrics_log.list_files(run.store)
    versions = {e.version: e.metrics for e in result.entries}
    log = read_steps(run.store, result.ends, versions, files) if files else ([], {})
    return RunReport(result, result.summarize(), contents, checked, *log)


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


def find_series(
    reports: Sequence[RunReport], get: Getter, name: str, label: str, kind: str
) -> Iterator[Series]:
    """Yield the numbers called ``name`` that ``get`` finds in the versions of runs."""
    for number, report in enumerate(reports):
        for is_current, chain in report.result.chains()[-1 - MAX_BRANCHES :]:
            found = [e for e in chain if name in get(e)]
            if found and found[-1].on_lineage == is_current:  # not only the one before a branch
                points = [(e.version.step, get(e)[name]) for e in found]
                how = (label, kind) if is_current else ("abandoned", "abandoned")
                yield Series(number, *how, points)


def find_logged(reports: Sequence[RunReport], name: str) -> Iterator[Series]:
    """Yield the values of a metric at every step that was logged."""
    for number, report in enumerate(reports):
        line = list[tuple[int, float]]()
        left = [piece for piece in report.log if not piece.is_current][-MAX_BRANCHES:]
        saved = {e.version.step for e in report.result.entries if name in e.metrics}
        for piece in (*left, *(piece for piece in report.log if piece.is_current)):
            steps, values = piece.curves.get(name, ((), ()))
            points = [*zip(map(int, steps), map(float, values), strict=True)]
            if piece.is_current:
                line += points
            elif not saved.issuperset(steps):
                yield Series(number, "abandoned", "abandoned", points)
        if not saved.issuperset(step for step, _ in line):  # a metric of versions only is not here
            yield Series(number, "every step", "thin", line)
