"""What there is to know about a run: at a glance, for all runs that are directly in a folder; and
about each version of one run."""

from __future__ import annotations

import os
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from limpet.errors import (
    DigestMismatch,
    FormatError,
    FormatTooNew,
    LimpetError,
    NotFound,
    StoreError,
)
from limpet.format.config import compare_configs
from limpet.format.names import (
    MANIFEST,
    MAX_STEP,
    MetricsFile,
    Version,
    is_spread_folder,
    parse_version,
)
from limpet.format.records import Branch, Pin, StepMetrics, Verified, VersionLease
from limpet.run import metrics_log
from limpet.run.address import BOTH_MODES, merge_objectives
from limpet.run.catalog import Catalog, VersionRecord, make_version_record
from limpet.run.lineage import (
    MAX_SEARCHES,
    changing_run_error,
    find_end,
    find_skipped,
    has_changed,
    line_ends,
    lineage_of,
)
from limpet.run.listing import Listing, list_all_files
from limpet.run.policy import Record, best_first
from limpet.run.records import VersionEvaluations, read_recorded_objectives
from limpet.run.run import Run
from limpet.run.sweep import find_orphans
from limpet.run.writer_lock import find_writer
from limpet.snapshot import pins
from limpet.storage.local.store import LocalStore
from limpet.storage.open import open_store
from limpet.storage.store import Stat, Store, exists, list_level
from limpet.text import format_age, format_list
from limpet.threads import gc_paused, look_up_each, no_op
from limpet.types import Advance

CHECK_AGAIN = 60.0
"""Seconds after which a run is read again although nothing seems to have changed. Until then, bytes
that were changed in place, or a change that a file server still hides, are not seen."""

_SETTLED = 2.0
"""Seconds after which one more change of a folder has another time, also in coarse file systems."""

_MAX_OTHERS = 1000
"""The number of folders after which no more are looked at, if none of them is a run."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run at one time. ``records``: the intact versions of the current lineage, oldest first;
    ``damaged``: the number of others. ``created``: the time of the newest intact one. ``nbytes``:
    of all files of versions. ``objectives``: metrics with their recorded modes.
    ``problem``: of the newest version or the run. ``began_at``: when the catalog was new."""

    name: str
    catalog: Catalog
    created: str | None = None
    nbytes: int = 0
    records: Sequence[Record] = ()
    damaged: int = 0
    objectives: Mapping[str, str] = field(default_factory=dict)
    ended: str | None = None
    writer: Pin | None = None
    problem: LimpetError | None = None
    began_at: float = 0.0
    states: Mapping[str, object] | None = None

    def is_running(self) -> bool | None:
        """Return whether a training writes to the run; None: unknown, it is on another machine."""
        return False if self.writer is None else pins.is_holder_alive(self.writer)

    @property
    def url(self) -> str:
        return self.catalog.store.url

    @property
    def state(self) -> str:
        """Whether a training is running, or how it ended."""
        if self.writer is not None and (alive := self.is_running()) is not False:
            age = format_age(self.writer.created)  # it may have been killed, on another machine
            what = "running" if alive else f"locked for {age}"
            return f"{what}: {pins.describe_holder(self.writer)}"
        state = self.ended or ("not running" if self.records or self.problem else "no version")
        return "stopped early" if state.startswith("stopped by ") else state

    def best_versions(self) -> list[tuple[str, str, Record]]:
        """Return the metrics with a recorded mode: their names, modes, and best versions."""
        modes = (o for o in self.objectives.items() if o[1] != BOTH_MODES)
        found = ((metric, mode, self.best(metric, mode)) for metric, mode in modes)
        return [(metric, mode, best) for metric, mode, best in found if best is not None]

    def best(self, metric: str, mode: str) -> Record | None:
        """Return the version that is the best one by a metric, as ``Run.best`` does."""
        best = best_first(self.records, metric, "max" if mode == "max" else "min")[:1]
        return next((r for r in self.records if r.version in best), None)


def summarize_runs(
    folder: Store,
    previous: Iterable[RunSummary] = (),
    advance: Callable[[int], object] = lambda step: None,
) -> list[RunSummary]:
    """Return the runs directly in a folder, that with the newest version last. One that cannot be
    read has a ``problem``. What has not changed since ``previous`` is not read again: in a local
    folder, see ``CHECK_AGAIN``; elsewhere, manifests and records. Raises ``StoreError``."""
    known = {summary.name: summary for summary in previous}
    at: Any = getattr(folder, "at", lambda name: open_store(f"{folder.url.rstrip('/')}/{name}"))
    found: list[RunSummary] = []

    def look(name: str) -> None:
        summary = summarize_run(at(name), name, known.get(name))
        found.extend([] if summary is None else [summary])
        advance(1)

    folders = (e.name for e in list_level(folder, "") if e.kind != "object")
    while batch := [*islice(folders, _MAX_OTHERS)]:
        look_up_each([name for name in batch if not is_spread_folder(name)], look, 10)
        if not found:
            break
    return sorted(found, key=lambda summary: (summary.created or "", summary.name))


def find_runs(folder: Store) -> list[str]:
    """Return the names of the runs with versions that are directly in the folder of another run."""

    def has_version(name: str) -> bool:
        with suppress(FormatError, StoreError):
            inside = list_level(folder, name, "version_")
            return any(exists(folder, f"{name}/{e.name}/{MANIFEST}") for e in inside)
        return False

    names = (e.name for e in list_level(folder, "") if e.kind != "object")
    others = (n for n in names if parse_version(n) is None and not is_spread_folder(n))
    return sorted(filter(has_version, islice(others, _MAX_OTHERS)))


@gc_paused
def summarize_run(
    store: Store, name: str = "", previous: RunSummary | None = None
) -> RunSummary | None:
    """Return a run at a glance, or None if nothing of a run is there."""
    now = time.monotonic()
    known = previous if previous and now - previous.began_at < CHECK_AGAIN else None
    if known and known.states and read_states(store, known.states) == known.states:
        return known
    catalog = known.catalog if known else Catalog(store, check_leaves=False)
    summary = RunSummary(name, catalog, began_at=known.began_at if known else now)
    try:
        summary = replace(summary, writer=find_writer(store))
        folders = (e for e in list_level(store, "", "version_") if e.kind != "object")
        if summary.writer is None and next(iter(folders), None) is None:
            return None
        for _ in range(MAX_SEARCHES):
            if (complete := _read(summary)) is not None:
                return complete
        raise changing_run_error(catalog)
    except (FormatError, StoreError) as e:
        return replace(summary, problem=e)


def _read(summary: RunSummary) -> RunSummary | None:
    """Complete a summary. None: versions were deleted meanwhile, because there are newer ones."""
    catalog, store = summary.catalog, summary.catalog.store
    listing = catalog.listing()
    states = read_states(store, ("", *map(str, listing.folders)))
    known = catalog.read_versions(listing)
    missing = [v for v in listing.folders if v not in known]
    if missing and has_changed(catalog, listing, (), missing):
        return None
    listing = replace(listing, exists=known.__contains__)
    lineage = lineage_of(catalog, listing)
    records = catalog.intact_records(lineage, known)
    intact = {r.version for r in records}
    damaged = [v for v in lineage if v not in intact and exists(store, f"{v}/{MANIFEST}")]
    if len(intact) + len(damaged) < len(lineage):
        return None
    problem = None
    if damaged and damaged[-1] == lineage[-1]:
        try:
            catalog.check(catalog.open(damaged[-1]))
        except (FormatError, StoreError) as e:
            problem = e
    latest = known.get(records[-1].version) if records else None
    recorded = ((o.metric, o.mode) for o in read_recorded_objectives(store))
    files = list_all_files(store, listing)
    orphans = {stat.key for _, stat in find_orphans(files, known)}
    stats = (stat for version in known for stat in files[version].stats)
    return replace(
        summary,
        created=latest.created if latest else None,
        nbytes=sum(stat.length for stat in stats if stat.key not in orphans),
        records=records,
        damaged=len(damaged),
        objectives=merge_objectives([*recorded, *(latest.objectives if latest else {}).items()]),
        ended=find_end(catalog, listing),
        problem=problem,
        states=states,
    )


def read_states(store: Store, folders: Iterable[str]) -> dict[str, object] | None:
    """Return what changes in each local folder whenever a file is added or removed. None: unknown,
    or one has just changed, so that a next change could have the same time."""
    states, settled = dict[str, object](), time.time() - _SETTLED
    try:
        for folder in folders if isinstance(store, LocalStore) else ():
            status = os.stat(f"{store.url}/{folder}")
            if status.st_ctime > settled:
                return None
            states[folder] = status.st_dev, status.st_ino, status.st_ctime_ns
    except OSError:
        return None
    return states or None


def rank_runs(
    place: str, runs: Sequence[RunSummary], metric: str | None, mode: str | None
) -> tuple[str, str, list[tuple[RunSummary, Record]]]:
    """Return a metric, by default the only one with a recorded mode; its mode; and the runs that
    have it, from the best on, with their best versions. Of equal values, that of the newest run is
    first. Raises ``NotFound`` if no version has a value, and ``LimpetError``."""
    recorded = merge_objectives(o for run in runs for o in run.objectives.items())
    metric = next(iter(recorded)) if metric is None and len(recorded) == 1 else metric
    mode = mode or recorded.get(metric or "")
    available = sorted({name for run in runs for r in run.records for name in r.metrics})
    metrics = f"the metrics {format_list(available, 20) or '(none)'}"
    if metric is None or mode not in ("min", "max"):
        modes = format_list([f"{name} ({how})" for name, how in sorted(recorded.items())], 20)
        raise LimpetError(
            f"{place} records no single {'mode of ' + metric if metric else 'metric'}",
            found=f"{metrics}, and the modes {modes or '(none)'}",
            todo="Pass --metric METRIC --mode min|max",
        )
    best = [(run, found) for run in reversed(runs) if (found := run.best(metric, mode))]
    if not best:
        raise NotFound(
            f"No version in {place} has a value of {metric}",
            found=metrics,
            todo="An inexact score of a training counts only with counts=True",
            key=place,
        )
    best.sort(key=lambda ranked: ranked[1].metrics[metric], reverse=mode == "max")
    return metric, mode, best


# -- all versions of one run ---------------------------------------------------------------------


@dataclass(slots=True)
class VersionEntry:
    """One version. ``nbytes``: what deleting it frees; ``referred_bytes``: in files of other
    versions. ``config``: a node, one object for equal configs. (Manifests would fill the memory.)
    """

    version: Version
    on_lineage: bool
    pinned: bool
    nbytes: int
    created: str
    problem: LimpetError | None = None
    record: VersionRecord = VersionRecord()  # noqa: RUF009  (frozen)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    referred_bytes: int = 0
    reason: str | None = None
    evaluations: VersionEvaluations = VersionEvaluations()  # noqa: RUF009  (frozen)
    is_latest: bool = False
    config: Any = None
    note: Any = None

    @property
    def goodput(self) -> float | None:
        """The share of the time since the run began that was spent on steps in this version."""
        if self.record.began is None or self.record.trained_seconds is None:
            return None
        wall = datetime.fromisoformat(self.created).timestamp() - self.record.began
        return min(self.record.trained_seconds / wall, 1.0) if wall > 0 else None

    def describe(self, is_best: bool = False) -> str:
        """Return the status, and whether the version is pinned, and the best one."""
        return f"{self.status}{', pinned' * self.pinned}{', best' * is_best}"

    @property
    def status(self) -> str:
        if isinstance(self.problem, FormatTooNew):
            return "too new"
        if self.problem is not None:
            return "damaged" if isinstance(self.problem, FormatError) else "unreadable"
        if self.is_latest:
            return "latest"
        return "ok" if self.on_lineage else "abandoned"


@dataclass(slots=True)
class ListResult:
    """What ``ls`` shows of a run. ``ends``: see ``line_ends``. ``orphans``: files that no manifest
    names."""

    run: Run
    entries: list[VersionEntry]
    ends: Mapping[int, int]
    branches: dict[int, Branch | LimpetError]
    orphans: list[Stat]
    leases: Sequence[VersionLease] = ()
    runs: Sequence[str] = ()  # the names of those directly in the folder of this one

    @property
    def branch(self) -> int:
        """The branch that training is on."""
        return next(iter(self.ends))

    @property
    def latest(self) -> VersionEntry | None:
        return next((e for e in self.entries if e.is_latest), None)

    def origin(self, branch: int) -> Version | None:
        """Return the version at which a branch began, if that is known. It may be deleted."""
        record = self.branches.get(branch)
        return parse_version(record.from_version) if isinstance(record, Branch) else None

    def parent(self, version: Version) -> Version | None:
        """Return the version before one: on its branch, or where the branch began."""
        branch = (e.version for e in self.entries if e.version.branch == version.branch)
        return max((v for v in branch if v < version), default=self.origin(version.branch))

    def chains(self) -> list[tuple[bool, list[VersionEntry]]]:
        """Return versions that follow each other: those of each branch that were left, after the
        one before them, if it exists, the newest branch last; and, with True, those of the current
        lineage."""
        left, last = dict[int, list[VersionEntry]](), dict[int, VersionEntry]()
        by_version: dict[Version | None, VersionEntry] = {e.version: e for e in self.entries}
        for entry in self.entries:
            branch = entry.version.branch
            if not entry.on_lineage:
                if branch not in left:
                    parent = last.get(branch) or by_version.get(self.origin(branch))
                    left[branch] = [parent] if parent else []
                left[branch].append(entry)
            last[branch] = entry
        line = [entry for entry in self.entries if entry.on_lineage]
        return [*((False, chain) for _, chain in sorted(left.items())), (True, line)]

    def config_changes(self) -> Iterator[tuple[Version, list[dict[str, Any]]]]:
        """Yield the versions of the current lineage whose config differs from that before."""
        for a, b in pairwise(e for e in self.entries if e.on_lineage and e.record.digest):
            changes = [] if a.config is b.config else [*compare_configs(a.config, b.config)]
            if changes:
                yield b.version, changes

    def summarize(self) -> RunSummary:
        """Return the run at a glance, as it was listed, and the state of its training now."""
        latest, store = self.latest, self.run.store
        listed = [e for e in self.entries if e.on_lineage]
        intact = [e for e in listed if e.problem is None]
        recorded = ((o.metric, o.mode) for o in read_recorded_objectives(store))
        objectives = latest.record.objectives if latest else {}
        return RunSummary(
            "",
            self.run.catalog,
            created=latest.created if latest else None,
            nbytes=sum(e.nbytes for e in self.entries),
            records=[Record(e.version, e.metrics, e.record.trained_seconds) for e in intact],
            damaged=len(listed) - len(intact),
            objectives=merge_objectives([*recorded, *objectives.items()]),
            ended=self.run.ended(),
            writer=find_writer(store),
        )


def list_versions(
    run: Run,
    listing: Listing,
    advance: Callable[[int], object] = lambda step: None,
    damaged: Mapping[str, LimpetError] = MappingProxyType({}),
) -> ListResult:
    """Open every version. A version that is deleted in the meantime is omitted. ``damaged``: those
    that the caller has found to be, by name."""
    ends = line_ends(run.catalog, listing)
    files = list_all_files(run.store, listing)
    entries: list[VersionEntry] = []
    configs: dict[bytes, Any] = {}
    for version in listing.versions:
        pinned = version in listing.lasting_pins
        nbytes = sum(stat.length for stat in files[version].stats)
        modified = max((stat.modified for stat in files[version].stats), default=0)
        created = datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds")
        on_lineage = version.step <= ends.get(version.branch, -1)
        entry = VersionEntry(version, on_lineage, pinned, nbytes, created)
        if _read_entry(run, entry, configs):
            entry.problem = entry.problem or damaged.get(str(version))
            entries.append(entry)
        advance(1)
    by_version = {e.version: e for e in entries}
    orphans = [*find_orphans(files, {v: e.record for v, e in by_version.items()})]
    for version, stat in orphans:
        if version in by_version:
            by_version[version].nbytes -= stat.length
    branches: dict[int, Branch | LimpetError] = {}
    for number in listing.branches:
        try:
            branches[number] = run.read_branch(number)
        except (FormatError, NotFound) as e:
            branches[number] = e
    for version, branch in find_skipped(run.catalog, listing, branches).items():
        if version in by_version:
            _count_as_damaged(by_version[version], branch)
    usable = [e for e in entries if e.on_lineage and e.problem is None]
    if usable:
        usable[-1].is_latest = True
    return ListResult(
        run,
        entries,
        ends,
        branches,
        [*(stat for _, stat in orphans), *run.store.partials("")],
        [*run.catalog.leases.live(listing.leases).values()],
        find_runs(run.store),
    )


def _read_entry(run: Run, entry: VersionEntry, configs: dict[bytes, Any]) -> bool:
    """Complete an entry from the manifest and the records. False: the version was deleted."""
    try:
        snapshot = run.catalog.open(entry.version)
        entry.created, entry.record = snapshot.manifest.created, make_version_record(snapshot)
        entry.evaluations = run.catalog.evaluations.read(entry.version, snapshot.digest)
        entry.metrics = {**snapshot.metrics, **entry.evaluations.metrics()}
        entry.referred_bytes = snapshot.referred_bytes
        entry.reason, entry.note = map(snapshot.metadata.get, ("reason", "note"))
        if (config := snapshot.metadata_node("config")) is not None:
            entry.config = configs.setdefault(msgspec.json.encode(config), config)
        run.catalog.check(snapshot, entry.evaluations)
    except NotFound:
        return False
    except (FormatError, StoreError) as e:
        entry.problem = e
    return True


def _count_as_damaged(entry: VersionEntry, branch: Branch) -> None:
    """Give a version that a resume skipped a problem, unless `limpet verify` has looked since."""
    since = datetime.fromisoformat(branch.created)
    records = entry.evaluations.of(Verified)
    if entry.problem is None and all(datetime.fromisoformat(r.created) < since for r in records):
        entry.problem = DigestMismatch(
            f"A resume skipped {entry.version} as damaged, and began branch {branch.number}",
            todo="To see the damage: limpet verify",
        )


# -- all steps of one run ------------------------------------------------------------------------


class BranchMetrics(NamedTuple):
    """The metrics of the steps of a branch that are on the current lineage, or of the others: for
    each metric its steps, in ascending order, and the values."""

    branch: int
    is_current: bool
    curves: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


def read_steps(
    store: Store,
    ends: Mapping[int, int],
    versions: Mapping[Version, Mapping[str, float]],
    files: Iterable[MetricsFile],
    advance: Advance = no_op,
) -> tuple[list[BranchMetrics], dict[str, LimpetError]]:
    """Return the metrics of ``versions``, and of the steps in ``files`` of the metrics log; and the
    errors of damaged files, by their keys. ``ends``: see ``line_ends``. Raises ``StoreError``."""
    found: Any = defaultdict(lambda: defaultdict(lambda: (array("q"), array("d"))))
    records, problems = dict[MetricsFile, StepMetrics](), dict[str, LimpetError]()
    limits, remaining = defaultdict[int, int](lambda: MAX_STEP), sorted(files)

    def look(file: MetricsFile) -> None:
        try:
            records[file] = metrics_log.read_file(store, file.key)[0]
        except FormatError as e:
            problems[file.key] = e
        advance(1)

    def add(branch: int, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            steps, values = found[branch, step <= ends.get(branch, -1)][name]
            steps.append(step)
            values.append(value)

    for version, added in versions.items():  # the newest values first
        add(version.branch, version.step, added)
    while remaining:  # few are in memory at a time
        look_up_each(remaining[-100:], look)
        for file in sorted(records, reverse=True):
            record = records.pop(file)
            for step, metrics in reversed(record.decoded_rows()):
                if step <= limits[file.branch]:
                    add(file.branch, step, metrics)
            limits[file.branch] = min(limits[file.branch], record.after)
        del remaining[-100:]
    for curves in found.values():
        for name, (steps, values) in curves.items():
            unique, first = np.unique(steps, return_index=True)
            curves[name] = unique, np.asarray(values)[first]
    pieces = [BranchMetrics(b, current, found[b, current]) for b, current in sorted(found)]
    return pieces, problems
