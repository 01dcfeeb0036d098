"""``limpet copy A B``: copy a snapshot or a run, and check every digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import click
from msgspec.structs import replace

from limpet.cli import resolve
from limpet.cli.console import format_speed, print_line, progress_bar
from limpet.cli.exit_codes import exit_on_errors
from limpet.cli.output import describe_error, format_error_line, json_option, print_result
from limpet.cli.verbs.verify import bytes_to_read
from limpet.convert.copy import copy_snapshot, find_copy
from limpet.errors import AlreadyExists, FormatError, LimpetError, NotFound
from limpet.format.names import MetricsFile, Version, branch_name, pin_name
from limpet.format.records import MAX_RECORD, BecameBest, Ended, LastingPin, Verified, encode_record
from limpet.machine import utc_now
from limpet.run.catalog import read_sessions
from limpet.run.lineage import last_written
from limpet.run.listing import Listing
from limpet.run.metrics_log import list_files, read_file
from limpet.run.run import Run
from limpet.snapshot import pins
from limpet.snapshot.location import Location, get_bounded, is_snapshot, locate
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_count, format_size
from limpet.threads import look_up_each
from limpet.types import Advance


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy of a run keeps of a snapshot at the destination: a ``SnapshotReader`` would keep
    its tree and indexes in memory."""

    location: Location
    digest: str
    step: int | None
    nbytes: int
    nbytes_checked: int

    @classmethod
    def of(cls, copy: SnapshotReader) -> Copied:
        return cls(copy.location, copy.digest, copy.step, copy.nbytes, bytes_to_read(copy))


@dataclass(slots=True)
class CopyResult:
    """The snapshots that were copied, were already present, or are damaged and were not copied."""

    source: str
    destination: str
    copied: list[Copied] = field(default_factory=list)
    present: list[Copied] = field(default_factory=list)
    damaged: list[tuple[str, LimpetError]] = field(default_factory=list)
    branches: int = 0
    evaluations: int = 0
    pins: int = 0


@click.command("copy")
@click.argument("a")
@click.argument("b")
@json_option
@click.pass_context
def command(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Copy the snapshot or run A to B. Nothing at B is overwritten.

    The copy of an incremental version is self-contained: it refers to no other version. Every byte
    is checked, so damage is never copied. If A is a run, damaged versions are reported and skipped,
    and versions that B already has are not copied again: an interrupted copy continues where it
    stopped. Branches, logged metrics, evaluations, and lasting pins are copied, too.
    """
    source = resolve.resolve_run_or_snapshot(a)
    began = perf_counter()
    if isinstance(source, SnapshotReader):
        result = _copy_single(source, b, as_json)
    else:
        result = _copy_run(*source, Run(b), as_json)
    print_result(as_json, _build_document, render, result, perf_counter() - began)
    exit_on_errors(ctx, (e for _, e in result.damaged))


def _copy_single(snapshot: SnapshotReader, destination: str, quiet: bool) -> CopyResult:
    location = locate(destination)
    resolve.check_version_name(snapshot, location)
    result = CopyResult(snapshot.url, location.url)
    if (copy := find_copy(snapshot, location)) is not None:
        result.present.append(Copied.of(copy))
        return result
    with progress_bar("copying", bytes_to_read(snapshot), quiet=quiet) as advance:
        _copy_unless_present(snapshot, location, advance, result)
    return result


def _copy_run(run: Run, listing: Listing, destination: Run, quiet: bool) -> CopyResult:
    """Copy the branch records, the metrics log, then the intact versions, oldest first: wherever
    this stops, training can resume from the destination."""
    resolve.check_run_target(destination)
    existing = destination.listing()  # first: what appears later belongs to a concurrent copy
    result = CopyResult(run.url, destination.url, branches=len(listing.branches))
    digests: dict[Version, str] = {}  # of the versions in ``result.present``
    remaining: dict[Version, int] = {}  # the bytes to read
    for version in listing.versions:
        try:
            snapshot = run.catalog.open(version)
            copy = find_copy(snapshot, destination.location(version))
            if copy is not None:
                result.present.append(Copied.of(copy))
                digests[version] = snapshot.digest
            else:
                remaining[version] = bytes_to_read(snapshot)
        except NotFound:
            continue  # deleted in the meantime
        except FormatError as e:
            result.damaged.append((str(version), e))
    _require_earlier_copy(run, listing, destination, existing, adds_versions=bool(remaining))

    def copy_file(key: str, read: Callable[[], bytes]) -> None:
        try:
            destination.store.put_if_absent(key, read())
        except FormatError as e:
            result.damaged.append((key, e))

    def copy_log_file(file: MetricsFile) -> None:
        copy_file(file.key, lambda: read_file(run.store, file.key)[1])

    for name in map(branch_name, listing.branches):
        copy_file(name, partial(get_bounded, run.store, name, MAX_RECORD))
    look_up_each(list_files(run.store), copy_log_file)
    for (version, digest), copied in zip(digests.items(), result.present, strict=True):
        _copy_records(run, listing, version, digest, copied, result)
    with progress_bar("copying", sum(remaining.values()), quiet=quiet) as advance:
        for version in remaining:
            try:
                snapshot = run.catalog.open(version)
                location = destination.location(version)
                copied = _copy_unless_present(snapshot, location, advance, result)
                _copy_records(run, listing, version, snapshot.digest, copied, result)
            except NotFound:
                if is_snapshot(run.location(version)):  # otherwise it was deleted in the meantime
                    raise
            except FormatError as e:
                result.damaged.append((str(version), e))
    return result


def _copy_unless_present(
    snapshot: SnapshotReader, location: Location, advance: Advance, result: CopyResult
) -> Copied:
    """Copy a snapshot, and return the copy, which a concurrent copy may have made meanwhile."""
    try:
        result.copied.append(Copied.of(copy_snapshot(snapshot, location, advance)))
        return result.copied[-1]
    except AlreadyExists:
        copy = find_copy(snapshot, location)  # raises for any other snapshot
        if copy is None:
            raise
        result.present.append(Copied.of(copy))
        return result.present[-1]


def _copy_records(
    run: Run, listing: Listing, version: Version, digest: str, target: Copied, result: CopyResult
) -> None:
    """Copy the records about a version, which hold for its copy too, and its lasting pin.
    ``digest``: of its manifest."""
    records = run.catalog.evaluations.read(version, digest).records
    is_pinned = version in listing.lasting_pins
    if not (records or is_pinned):
        return
    location = target.location
    with pins.protected(location, version):
        for record in records:
            if isinstance(record, Verified):  # of the bytes in the source; the copy checks them
                continue
            key = location.key(record.file_name)
            copied = replace(record, manifest_digest=target.digest)
            try:
                location.store.put_if_absent(key, encode_record(copied))
                result.evaluations += not isinstance(record, Ended | BecameBest)
            except AlreadyExists as e:  # the other versions are copied all the same
                advice = "If `limpet verify` says that it is damaged, delete it, and copy again"
                result.damaged.append((key, e.with_advice(advice)))
        if is_pinned:
            pin = encode_record(LastingPin(str(version), utc_now()))
            with suppress(AlreadyExists):
                location.store.put_if_absent(pin_name(str(version)), pin)
            result.pins += 1


def _require_earlier_copy(
    run: Run, listing: Listing, destination: Run, existing: Listing, *, adds_versions: bool
) -> None:
    """Raise ``AlreadyExists`` unless the destination is empty or an earlier copy of the source: to
    merge two trainings would create a run that no training produced."""
    common = set(listing.branches) & set(existing.branches)
    foreign = [n for n in sorted(common) if _read_branch(run, n) != _read_branch(destination, n)]
    adds = adds_versions or not set(listing.branches) <= common
    if adds:
        foreign += sorted(set(existing.branches) - common)
    found = branch_name(foreign[0]) if foreign else None
    last = last_written(existing)
    if found is None and adds and last is not None:
        found = None if _is_continued(run, listing, destination, last) else str(last)
    if found is not None:
        raise AlreadyExists(
            f"{destination.url} is not an earlier copy of {run.url}; nothing was changed",
            expected=f"an empty location, or only what {run.url} has or continues",
            found=f"{found} of another training",
            todo="Copy to another location, or copy single versions",
        )


def _is_continued(run: Run, listing: Listing, destination: Run, last: Version) -> bool:
    """Return True if the source has the last version of the destination, or continues from it."""
    with suppress(FormatError, NotFound):
        run.catalog.open(last)
        return True  # the same one: another snapshot of this name has been refused
    with suppress(FormatError, NotFound):
        session = read_sessions(destination.catalog.open(last))[:1]
        for version in sorted(listing.versions, key=lambda v: (v.branch, v.step), reverse=True):
            with suppress(FormatError, NotFound):
                return session != [] and session[0] in read_sessions(run.catalog.open(version))
    return False


def _read_branch(run: Run, number: int) -> bytes | None:
    """Return the bytes of the record of a branch, or None if it is too long for a record."""
    try:
        return get_bounded(run.store, branch_name(number), MAX_RECORD)
    except FormatError:
        return None


def _build_document(result: CopyResult, seconds: float) -> dict[str, Any]:
    return {
        "from": result.source,
        "to": result.destination,
        "copied": [_build_snapshot_document(s) for s in result.copied],
        "present": [_build_snapshot_document(s) for s in result.present],
        "damaged": [{"version": v, **describe_error(e)} for v, e in result.damaged],
        "branches": result.branches,
        "evaluations": result.evaluations,
        "pins": result.pins,
        "bytes": sum(copy.nbytes_checked for copy in result.copied),
        "seconds": round(seconds, 6),
    }


def _build_snapshot_document(copy: Copied) -> dict[str, Any]:
    return {"snapshot": copy.location.url, "step": copy.step, "bytes": copy.nbytes}


def render(result: CopyResult, seconds: float) -> None:
    """Print the outcome for each version, and a summary."""
    for copy in result.present:
        print_line(f"already present  {copy.location.url}", "dim")
    for copy in result.copied:
        print_line(f"copied           {copy.location.url}")
    for version, error in result.damaged:
        print_line(f"NOT copied       {version}: {format_error_line(error)}", "red")
    nbytes = sum(copy.nbytes_checked for copy in result.copied)
    count = format_count(len(result.copied), "snapshot")
    summary = f"{count} copied, {format_size(nbytes)}, all checked{format_speed(nbytes, seconds)}"
    parts = (
        summary if result.copied else "Nothing copied",
        f"{len(result.present):,} already present" if result.present else "",
        f"{len(result.damaged):,} NOT copied" if result.damaged else "",
    )
    style = "red" if result.damaged else "green"
    print_line("; ".join(filter(None, parts)), style)
