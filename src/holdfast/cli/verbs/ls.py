"""``holdfast ls RUN``: all versions of a run, and what is known of each without reading bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress_bar
from holdfast.cli.output import describe_error, format_error_brief, json_option, print_json
from holdfast.cli.resolve import format_count, resolve_run, stray_snapshot_warning
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, FormatTooNew, HoldfastError, NotFound, StoreError
from holdfast.format.names import Version
from holdfast.format.records import Branch
from holdfast.run.catalog import Listing, VersionRecord, find_orphans, make_version_record
from holdfast.run.run import Run
from holdfast.storage.store import Stat

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@dataclass(slots=True)
class VersionEntry:
    """One version as it was found. ``nbytes``: of the files that its manifest names, or, where
    that cannot be read, of all in its folder. ``metrics``: of its save and of evaluations."""

    version: Version
    snapshot: Snapshot | None
    problem: HoldfastError | None
    on_lineage: bool
    nbytes: int
    created: str
    record: VersionRecord = VersionRecord()  # noqa: RUF009  (frozen)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    is_latest: bool = False

    @property
    def referred_bytes(self) -> int:
        """Bytes in files of other versions."""
        return 0 if self.snapshot is None else self.snapshot.referred_bytes

    @property
    def status(self) -> str:
        if isinstance(self.problem, FormatTooNew):
            return "too new"
        if self.problem is not None:
            return "damaged" if isinstance(self.problem, FormatError) else "unreadable"
        if self.is_latest:
            return "latest"
        return "ok" if self.on_lineage else "left"


@dataclass(slots=True)
class ListResult:
    """A run as ``ls`` shows it."""

    run: Run
    entries: list[VersionEntry]
    branch: int
    branches: dict[int, Branch | HoldfastError]
    orphans: list[Stat]
    stray_warning: str | None = None

    @property
    def latest(self) -> VersionEntry | None:
        return next((e for e in self.entries if e.is_latest), None)


@click.command("ls", short_help="List the versions: step, age, size, metrics, intact or not.")
@click.argument("run")
@json_option
def command(run: str, as_json: bool) -> None:
    """List the versions of RUN: step, age, size, metrics, and whether they are intact.

    Damaged versions are listed too, and those on branches that training has left. A version
    counts as intact here if its manifest is sound and its files are there in full length; "verify"
    reads the bytes.
    """
    place, listing = resolve_run(run)
    with progress_bar(
        "reading manifests", len(listing.versions), quiet=as_json, unit="versions"
    ) as t:
        found = list_versions(place, listing, t)
    if as_json:
        print_json(_build_document(found))
    else:
        from holdfast.cli.console import make_console

        render(found, make_console())


def list_versions(run: Run, listing: Listing, advance: Any = lambda step: None) -> ListResult:
    """Open every version. One that is deleted meanwhile is left out."""
    line_now = set(run.line(listing))
    entries: list[VersionEntry] = []
    for version in listing.versions:
        entry = _read_entry(run, version, listing.folders[version], version in line_now)
        if entry is not None:
            entry.pinned = version in listing.lasting_pins
            entries.append(entry)
        advance(1)
    left = [stat for _, stat in find_orphans(listing, {e.version: e.record for e in entries})]
    sound = [e for e in entries if e.on_lineage and e.problem is None]
    if sound:
        sound[-1].is_latest = True
    branches: dict[int, Branch | HoldfastError] = {}
    for number in listing.branches:
        try:
            branches[number] = run.read_branch(number)
        except (FormatError, NotFound) as e:
            branches[number] = e
    left += run.store.partials("")
    return ListResult(
        run, entries, run.branch(listing), branches, left, stray_snapshot_warning(run)
    )


def _read_entry(
    run: Run, version: Version, files: Sequence[Stat], on_lineage: bool
) -> VersionEntry | None:
    snapshot, problem = None, None
    try:
        snapshot = run.open(version)
        snapshot.check_files()
    except NotFound:
        return None
    except (FormatError, StoreError) as e:
        problem = e
    if snapshot is not None:
        known = make_version_record(snapshot)
        metrics = {**snapshot.metadata.get("metrics", {})}
        metrics.update(run.catalog.metrics(version, known, files))
        nbytes, created = snapshot.nbytes, snapshot.created
        return VersionEntry(version, snapshot, problem, on_lineage, nbytes, created, known, metrics)
    modified = max(f.modified for f in files)
    created = datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds")
    return VersionEntry(version, None, problem, on_lineage, sum(f.length for f in files), created)


def _build_document(result: ListResult) -> dict[str, Any]:
    latest = result.latest
    return {
        "run": result.run.url,
        "latest": None if latest is None else str(latest.version),
        "branch": result.branch,
        "versions": [_build_version_document(result.run, e) for e in result.entries],
        "branches": [
            {"number": number, "problem": describe_error(b)}
            if isinstance(b, HoldfastError)
            else {
                "number": number,
                "from": b.from_version,
                "reason": b.reason,
                "created": b.created,
                "problem": None,
            }
            for number, b in result.branches.items()
        ],
        "orphans": {"files": len(result.orphans), "bytes": sum(s.length for s in result.orphans)},
        "stray": result.stray_warning is not None,
        "bytes_checked": False,
    }


def _build_version_document(run: Run, entry: VersionEntry) -> dict[str, Any]:
    metadata = {} if entry.snapshot is None else entry.snapshot.metadata
    return {
        "version": str(entry.version),
        "url": run.location(entry.version).url,
        "step": entry.version.step,
        "branch": entry.version.branch,
        "on_line": entry.on_lineage,
        "latest": entry.is_latest,
        "created": entry.created,
        "bytes": entry.nbytes,
        "referred_bytes": entry.referred_bytes,
        "reason": metadata.get("reason"),
        "metrics": entry.metrics,
        "pinned": entry.pinned,
        "intact": entry.problem is None,
        "problem": None if entry.problem is None else describe_error(entry.problem),
    }


def render(result: ListResult, console: Console) -> None:
    """Print the table, what is wrong, and what else lies there."""
    from holdfast.cli import console as show

    total = sum(e.nbytes for e in result.entries)
    many = format_count(len(result.entries), "version")
    console.print(
        show.styled_text(result.run.url, "bold"),
        show.styled_text(f"{many}, {show.format_size(total)}", "dim"),
        sep="  ", soft_wrap=True,
    )  # fmt: skip
    branched = any(e.version.branch for e in result.entries)
    refers = any(e.referred_bytes for e in result.entries)
    sizes = ("own", "referred") if refers else ("size",)
    names = ("step", *(("branch",) if branched else ()), "age", *sizes, "state", "reason")
    table = show.make_table(*names, "metrics", right_aligned=("step", "branch", "age", *sizes))
    rows = [_table_cells(entry, branched, refers) for entry in result.entries]
    # metrics get what is left of the line; nothing else is cut short, however narrow it is
    used = sum(max(len(n), *(r[i].cell_len for r in rows)) + 2 for i, n in enumerate(names))
    room = max(len("metrics"), console.width - used)
    for row in rows:
        row[-1].truncate(room, overflow="ellipsis")
        table.add_row(*row)
    console.width = max(console.width, used + room)  # a terminal wraps what is wider
    console.print(table)
    for note in _footnotes(result):
        console.print(note, soft_wrap=True)


_STATUS_STYLES = {"latest": "green", "ok": "", "left": "dim"}
"""Of what is well; all else is red."""


def _table_cells(entry: VersionEntry, show_branch: bool, show_referred: bool) -> list[Text]:
    from holdfast.cli.console import format_age, format_metrics, format_size, styled_text

    metadata = {} if entry.snapshot is None else entry.snapshot.metadata
    base = "dim" if entry.status == "left" or not entry.on_lineage else ""
    branch = [styled_text(entry.version.branch or "", base)] if show_branch else []
    referred = (
        [styled_text(format_size(entry.referred_bytes) if entry.referred_bytes else "", base)]
        if show_referred
        else []
    )
    return [
        styled_text(entry.version.step, base),
        *branch,
        styled_text(format_age(entry.created), base),
        styled_text(format_size(entry.nbytes), base),
        *referred,
        styled_text(
            entry.status + ", pinned" * entry.pinned, _STATUS_STYLES.get(entry.status, "red")
        ),
        styled_text(metadata.get("reason") or "", base, 12),
        styled_text(format_metrics(entry.metrics), base),
    ]


def _footnotes(result: ListResult) -> list[Text]:
    from holdfast.cli.console import format_size, styled_text

    notes = [
        styled_text(f"{e.version}: {format_error_brief(e.problem)}", "red")
        for e in result.entries
        if e.problem is not None
    ]
    for number, branch in result.branches.items():
        if isinstance(branch, HoldfastError):
            notes.append(styled_text(f"branch {number}: {format_error_brief(branch)}", "red"))
        else:
            left = f"branch {number} left from {branch.from_version} ({branch.reason})"
            notes.append(styled_text(left, "dim"))
    if result.latest is None:
        notes.append(styled_text("No version that training is on is intact.", "red"))
    if result.orphans:
        nbytes = format_size(sum(s.length for s in result.orphans))
        notes.append(
            styled_text(
                f"{format_count(len(result.orphans), 'file')} ({nbytes}) that no manifest names:"
                f" of a save under way, or left behind (holdfast sweep {result.run.url})",
                "yellow",
            )
        )
    if result.stray_warning is not None:
        notes.append(styled_text(result.stray_warning, "yellow"))
    notes.append(styled_text(f"Bytes are not checked: holdfast verify {result.run.url}", "dim"))
    return notes
