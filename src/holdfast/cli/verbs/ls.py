"""``holdfast ls RUN``: all versions of a run, and what is known of each without reading bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress
from holdfast.cli.output import brief, describe, json_option, print_json
from holdfast.cli.resolve import count, run_at, stray
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import FormatError, FormatTooNew, HoldfastError, NotFound, StoreError
from holdfast.format.names import Version
from holdfast.format.records import Branch
from holdfast.run.catalog import Known, Listing, known_of, orphans
from holdfast.run.run import Run
from holdfast.storage.store import Stat

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


@dataclass(slots=True)
class Entry:
    """One version as it was found. ``nbytes``: of the files that its manifest names, or, where
    that cannot be read, of all in its folder. ``metrics``: of its save and of evaluations."""

    version: Version
    snapshot: Snapshot | None
    problem: HoldfastError | None
    on_line: bool
    nbytes: int
    created: str
    known: Known = Known()  # noqa: RUF009  (frozen)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    pinned: bool = False
    latest: bool = False

    @property
    def referred(self) -> int:
        """Bytes in files of other versions."""
        return 0 if self.snapshot is None else self.snapshot.referred_bytes

    @property
    def state(self) -> str:
        if isinstance(self.problem, FormatTooNew):
            return "too new"
        if self.problem is not None:
            return "damaged" if isinstance(self.problem, FormatError) else "unreadable"
        if self.latest:
            return "latest"
        return "ok" if self.on_line else "left"


@dataclass(slots=True)
class Found:
    """A run as ``ls`` shows it."""

    run: Run
    entries: list[Entry]
    branch: int
    branches: dict[int, Branch | HoldfastError]
    orphans: list[Stat]
    stray: str | None = None

    @property
    def latest(self) -> Entry | None:
        return next((e for e in self.entries if e.latest), None)


@click.command("ls", short_help="List the versions: step, age, size, metrics, intact or not.")
@click.argument("run")
@json_option
def command(run: str, as_json: bool) -> None:
    """List the versions of RUN: step, age, size, metrics, and whether they are intact.

    Damaged versions are listed too, and those on branches that training has left. A version
    counts as intact here if its manifest is sound and its files are there in full length; "verify"
    reads the bytes.
    """
    place, listing = run_at(run)
    with progress("reading manifests", len(listing.versions), quiet=as_json, unit="versions") as t:
        found = look(place, listing, t)
    if as_json:
        print_json(_document(found))
    else:
        from holdfast.cli.console import console

        render(found, console())


def look(run: Run, listing: Listing, tell: Any = lambda step: None) -> Found:
    """Open every version. One that is deleted meanwhile is left out."""
    line_now = set(run.line(listing))
    entries: list[Entry] = []
    for version in listing.versions:
        entry = _entry(run, version, listing.folders[version], version in line_now)
        if entry is not None:
            entry.pinned = version in listing.lasting
            entries.append(entry)
        tell(1)
    left = [stat for _, stat in orphans(listing, {e.version: e.known for e in entries})]
    sound = [e for e in entries if e.on_line and e.problem is None]
    if sound:
        sound[-1].latest = True
    branches: dict[int, Branch | HoldfastError] = {}
    for number in listing.branches:
        try:
            branches[number] = run.read_branch(number)
        except (FormatError, NotFound) as e:
            branches[number] = e
    left += run.store.partials("")
    return Found(run, entries, run.branch(listing), branches, left, stray(run))


def _entry(run: Run, version: Version, files: Sequence[Stat], on_line: bool) -> Entry | None:
    snapshot, problem = None, None
    try:
        snapshot = run.open(version)
        snapshot.check_files()
    except NotFound:
        return None
    except (FormatError, StoreError) as e:
        problem = e
    if snapshot is not None:
        known = known_of(snapshot)
        metrics = {**snapshot.metadata.get("metrics", {})}
        metrics.update(run.ledger.metrics(version, known, files))
        nbytes, created = snapshot.nbytes, snapshot.created
        return Entry(version, snapshot, problem, on_line, nbytes, created, known, metrics)
    modified = max(f.modified for f in files)
    created = datetime.fromtimestamp(modified, UTC).isoformat(timespec="seconds")
    return Entry(version, None, problem, on_line, sum(f.length for f in files), created)


def _document(found: Found) -> dict[str, Any]:
    latest = found.latest
    return {
        "run": found.run.url,
        "latest": None if latest is None else str(latest.version),
        "branch": found.branch,
        "versions": [_version(found.run, e) for e in found.entries],
        "branches": [
            {"number": number, "problem": describe(b)}
            if isinstance(b, HoldfastError)
            else {
                "number": number,
                "from": b.from_version,
                "reason": b.reason,
                "created": b.created,
                "problem": None,
            }
            for number, b in found.branches.items()
        ],
        "orphans": {"files": len(found.orphans), "bytes": sum(s.length for s in found.orphans)},
        "stray": found.stray is not None,
        "bytes_checked": False,
    }


def _version(run: Run, entry: Entry) -> dict[str, Any]:
    metadata = {} if entry.snapshot is None else entry.snapshot.metadata
    return {
        "version": str(entry.version),
        "url": run.place(entry.version).url,
        "step": entry.version.step,
        "branch": entry.version.branch,
        "on_line": entry.on_line,
        "latest": entry.latest,
        "created": entry.created,
        "bytes": entry.nbytes,
        "referred_bytes": entry.referred,
        "reason": metadata.get("reason"),
        "metrics": entry.metrics,
        "pinned": entry.pinned,
        "intact": entry.problem is None,
        "problem": None if entry.problem is None else describe(entry.problem),
    }


def render(found: Found, screen: Console) -> None:
    """Print the table, what is wrong, and what else lies there."""
    from holdfast.cli import console as show

    total = sum(e.nbytes for e in found.entries)
    many = count(len(found.entries), "version")
    screen.print(
        show.text(found.run.url, "bold"), show.text(f"{many}, {show.size(total)}", "dim"),
        sep="  ", soft_wrap=True,
    )  # fmt: skip
    branched = any(e.version.branch for e in found.entries)
    refers = any(e.referred for e in found.entries)
    sizes = ("own", "referred") if refers else ("size",)
    names = ("step", *(("branch",) if branched else ()), "age", *sizes, "state", "reason")
    table = show.table(*names, "metrics", right=("step", "branch", "age", *sizes))
    rows = [_cells(entry, branched, refers) for entry in found.entries]
    # metrics get what is left of the line; nothing else is cut short, however narrow it is
    used = sum(max(len(n), *(r[i].cell_len for r in rows)) + 2 for i, n in enumerate(names))
    room = max(len("metrics"), screen.width - used)
    for row in rows:
        row[-1].truncate(room, overflow="ellipsis")
        table.add_row(*row)
    screen.width = max(screen.width, used + room)  # a terminal wraps what is wider
    screen.print(table)
    for note in _notes(found):
        screen.print(note, soft_wrap=True)


_STYLES = {"latest": "green", "ok": "", "left": "dim"}
"""Of what is well; all else is red."""


def _cells(entry: Entry, branched: bool, refers: bool) -> list[Text]:
    from holdfast.cli.console import age, numbers, size, text

    metadata = {} if entry.snapshot is None else entry.snapshot.metadata
    base = "dim" if entry.state == "left" or not entry.on_line else ""
    branch = [text(entry.version.branch or "", base)] if branched else []
    referred = [text(size(entry.referred) if entry.referred else "", base)] if refers else []
    return [
        text(entry.version.step, base),
        *branch,
        text(age(entry.created), base),
        text(size(entry.nbytes), base),
        *referred,
        text(entry.state + ", pinned" * entry.pinned, _STYLES.get(entry.state, "red")),
        text(metadata.get("reason") or "", base, 12),
        text(numbers(entry.metrics), base),
    ]


def _notes(found: Found) -> list[Text]:
    from holdfast.cli.console import size, text

    notes = [
        text(f"{e.version}: {brief(e.problem)}", "red")
        for e in found.entries
        if e.problem is not None
    ]
    for number, branch in found.branches.items():
        if isinstance(branch, HoldfastError):
            notes.append(text(f"branch {number}: {brief(branch)}", "red"))
        else:
            left = f"branch {number} left from {branch.from_version} ({branch.reason})"
            notes.append(text(left, "dim"))
    if found.latest is None:
        notes.append(text("No version that training is on is intact.", "red"))
    if found.orphans:
        nbytes = size(sum(s.length for s in found.orphans))
        notes.append(
            text(
                f"{count(len(found.orphans), 'file')} ({nbytes}) that no manifest names: of a save"
                f" under way, or left behind (holdfast sweep {found.run.url})",
                "yellow",
            )
        )
    if found.stray is not None:
        notes.append(text(found.stray, "yellow"))
    notes.append(text(f"Bytes are not checked: holdfast verify {found.run.url}", "dim"))
    return notes
