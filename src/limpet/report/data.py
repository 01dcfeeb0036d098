"""What a page shows of a run, besides what `limpet ls` lists: values by step, and contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from limpet.deadline import Deadline, call_within
from limpet.errors import FormatError, LimpetError, NotFound, StoreError, Unavailable
from limpet.format.names import Version
from limpet.run.overview import ListResult, RunSummary, VersionEntry
from limpet.snapshot.contents import Contents, read_contents

READ_SECONDS = 60.0
"""The longest time for which a page waits for the contents of a version."""

_MAX_ROWS = 400

Getter = Callable[[VersionEntry], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run on a page. ``contents``: of the newest version, or why they cannot be shown.
    ``checked``: the bytes that were verified for this page."""

    result: ListResult
    summary: RunSummary
    contents: Contents | LimpetError | None
    checked: int | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Values by step, of the run with this number on the page. ``kind``: how they are drawn, solid
    or dashed; or abandoned, from the version before the branch on."""

    run: int
    label: str
    kind: str
    points: Sequence[tuple[int, float]]


def read_report(result: ListResult, stats_bytes: int, checked: int | None = None) -> RunReport:
    """Read what a page shows of a run whose versions are listed. Raises ``StoreError``."""
    latest = result.latest
    contents = None if latest is None else read_version(result, latest, stats_bytes)
    return RunReport(result, result.summarize(), contents, checked)


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
    results: Sequence[ListResult], get: Getter, name: str, label: str, kind: str
) -> Iterator[Series]:
    """Yield the numbers called ``name`` that ``get`` finds in versions: a series for the current
    lineage of each run, and one for each branch that was left."""
    for number, result in enumerate(results):
        values = {e.version: found[name] for e in result.entries if name in (found := get(e))}
        chains: dict[int | None, list[Version]] = {}
        for e in result.entries:
            branch = None if e.on_lineage else e.version.branch
            if e.version in values:
                is_first = branch is not None and branch not in chains
                before = result.parent(e.version) if is_first else None
                chains.setdefault(branch, [before] if before in values else []).append(e.version)
        for branch, chain in chains.items():
            points = [(v.step, values[v]) for v in chain]
            how = (label, kind) if branch is None else ("abandoned", "abandoned")
            yield Series(number, *how, points)
