"""``holdfast copy A B``: a snapshot or a whole run to another place, every digest checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from holdfast.cli.console import progress_bar
from holdfast.cli.exit_codes import DAMAGED, exit_code
from holdfast.cli.output import describe_error, format_error_line, json_option, print_json
from holdfast.cli.resolve import (
    check_run_target,
    format_count,
    remove_folder_if_empty,
    resolve_run_or_snapshot,
    stray_snapshot_warning,
)
from holdfast.cli.verbs.verify import bytes_to_read
from holdfast.engine.saving.commit import raise_if_exists
from holdfast.engine.snapshot.location import Location, is_snapshot, locate
from holdfast.engine.snapshot.snapshot import Snapshot, open_location
from holdfast.engine.transform.copy import attempt_of_copy, copy_snapshot
from holdfast.errors import AlreadyExists, FormatError, HoldfastError, NotFound
from holdfast.format.names import (
    MANIFEST,
    Version,
    branch_name,
    evaluation_name,
    parse_version,
    pin_name,
)
from holdfast.format.records import LastingPin, encode_evaluation, encode_lasting_pin
from holdfast.machine import utc_now
from holdfast.run.catalog import Listing, read_training_metadata
from holdfast.run.lineage import find_divergence
from holdfast.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

_MAX_BRANCH_SIZE = 1 << 20


@dataclass(slots=True)
class CopyResult:
    """What was copied, what was there already, and what is damaged and therefore was not."""

    source: str
    destination: str
    copied: list[Snapshot] = field(default_factory=list)
    present: list[Snapshot] = field(default_factory=list)
    damaged: list[tuple[str, HoldfastError]] = field(default_factory=list)
    branches: int = 0
    evaluations: int = 0
    pins: int = 0
    stray_warning: str | None = None


@click.command("copy", short_help="Copy a snapshot or a run, checked.")
@click.argument("a")
@click.argument("b")
@json_option
@click.pass_context
def command(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Copy the snapshot or run A to B. Nothing that is there is overwritten.

    What is incremental becomes self-contained: the copy refers to no other version. Every byte is
    checked on the way, so that damage is never copied. Of a run, damaged versions are named and
    left out, and versions that B has already are not copied again: a copy that was interrupted
    goes on where it stopped. Branches, evaluations and lasting pins come with their versions.
    """
    found = resolve_run_or_snapshot(a)
    began = perf_counter()
    with remove_folder_if_empty(locate(b).store if isinstance(found, Snapshot) else Run(b).store):
        if isinstance(found, Snapshot):
            copied = _copy_single(found, b, as_json)
        else:
            copied = _copy_run(*found, Run(b), as_json)
    seconds = perf_counter() - began
    if as_json:
        print_json(_build_document(copied, seconds))
    else:
        from holdfast.cli.console import make_console

        render(copied, seconds, make_console())
    codes = [exit_code(e) for _, e in copied.damaged]
    if codes:
        ctx.exit(DAMAGED if DAMAGED in codes else codes[0])


def _copy_single(snapshot: Snapshot, destination: str, quiet: bool) -> CopyResult:
    place = locate(destination)
    version = parse_version(place.folder.rpartition("/")[2])
    if version is not None and (version.step, version.branch) != (
        snapshot.manifest.step,
        snapshot.manifest.branch,
    ):
        raise AlreadyExists(
            f"{snapshot.url} cannot become {version}",
            expected="its own step and branch in the name, or a name of another kind",
            found=f"step {snapshot.step}, branch {snapshot.manifest.branch}",
        )
    raise_if_exists(place)
    with progress_bar("copying", bytes_to_read(snapshot), quiet=quiet) as tell:
        made = copy_snapshot(snapshot, place, tell)
    return CopyResult(snapshot.url, made.url, [made])


def _copy_run(run: Run, listing: Listing, destination: Run, quiet: bool) -> CopyResult:
    """All intact versions of a run, oldest first, after the records of its branches: whenever
    this ends, what has arrived is a run that can be resumed."""
    check_run_target(destination)
    copied = CopyResult(run.url, destination.url, stray_warning=stray_snapshot_warning(run))
    there: list[Snapshot] = []
    todo: list[tuple[Snapshot, Location]] = []
    for version in listing.versions:
        try:
            snapshot = run.open(version)
            place = destination.location(version)
            if _is_copy_at(snapshot, place):
                copied.present.append(open_location(place))
                there.append(snapshot)
            else:
                todo.append((snapshot, place))
        except NotFound:
            continue  # deleted meanwhile
        except FormatError as e:
            copied.damaged.append((str(version), e))
    _refuse_other_training(run, listing, destination, copied, todo)
    for number in listing.branches:
        destination.store.put_if_absent(
            branch_name(number), run.store.get(branch_name(number), _MAX_BRANCH_SIZE)
        )
        copied.branches += 1
    for snapshot, made in zip(there, copied.present, strict=True):
        _copy_records(run, listing, snapshot, made, copied)
    with progress_bar("copying", sum(bytes_to_read(s) for s, _ in todo), quiet=quiet) as tell:
        for snapshot, place in todo:
            try:
                copied.copied.append(copy_snapshot(snapshot, place, tell))
                _copy_records(run, listing, snapshot, copied.copied[-1], copied)
            except NotFound:
                if is_snapshot(snapshot.location):  # else deleted meanwhile
                    raise
            except FormatError as e:
                copied.damaged.append((place.folder, e))
    return copied


def _copy_records(
    run: Run, listing: Listing, snapshot: Snapshot, target: Snapshot, result: CopyResult
) -> None:
    """The evaluations of a version, which are as true of its copy, and its lasting pin."""
    version = snapshot.version
    for found in run.catalog.evaluations(version, snapshot.digest, listing.folders[version]):
        key = target.location.key(evaluation_name(found.name, found.attempt))
        same = replace(found, manifest_digest=target.digest)
        target.location.store.put_if_absent(key, encode_evaluation(same))
        result.evaluations += 1
    if version in listing.lasting_pins:
        pin = encode_lasting_pin(LastingPin(str(version), utc_now()))
        with suppress(AlreadyExists):
            target.location.store.put_if_absent(pin_name(str(version)), pin)
        result.pins += 1


def _is_copy_at(snapshot: Snapshot, location: Location) -> bool:
    """Whether a copy of the snapshot is at ``place``, or what it is a copy of; False if nothing is.

    Raises ``AlreadyExists`` if another snapshot is, or a damaged copy.
    """
    try:
        other = open_location(location)
        other.check_files()
    except NotFound:
        return False
    except FormatError as e:
        raise AlreadyExists(
            f"A damaged snapshot is at {location.url} already; nothing was changed",
            found=e.what,
            todo=f"Move its {MANIFEST} away, and nothing else (newer versions may refer to other"
            " files there), and copy again; or copy to another place",
        ) from e
    same = (
        other.digest == snapshot.digest
        or other.manifest.attempt == attempt_of_copy(snapshot)
        or snapshot.manifest.attempt == attempt_of_copy(other)
    )
    if not same:
        raise AlreadyExists(
            f"Another snapshot is at {location.url} already; nothing was changed",
            expected=f"a copy of {snapshot.url}, or nothing",
            found=f"a snapshot of {other.created} by another save",
            todo="Copy to another place",
        )
    return True


def _is_earlier_copy(
    remaining: list[tuple[Snapshot, Location]], destination: Run, versions: Sequence[Version]
) -> bool:
    """Whether what is there can be an earlier copy, of which the source has kept nothing: all of it
    is older, and of a training that began at the same moment."""
    if not remaining or versions[-1].step >= min(s.version.step for s, _ in remaining):
        return False
    began = read_training_metadata(remaining[0][0]).get("began")
    try:
        return began is not None and began == read_training_metadata(
            destination.open(versions[-1])
        ).get("began")
    except (FormatError, NotFound):
        return False


def _refuse_other_training(
    run: Run,
    listing: Listing,
    destination: Run,
    result: CopyResult,
    remaining: list[tuple[Snapshot, Location]],
) -> None:
    """Two trainings in one run would be one that never was."""
    theirs = destination.listing()
    versions = theirs.versions
    stranger = (
        find_divergence(run.catalog, listing, destination.catalog, theirs)
        if result.present
        else None
    )
    if stranger is not None:
        advice = "Copy to another place"
        records = [branch_name(n) for n in listing.branches if n not in theirs.branches]
        if records and parse_version(stranger) is not None:
            advice += (
                f". But if a sweep of abandoned versions has deleted {stranger} from"
                f" {result.source}: put a copy of {' and '.join(records)} into {destination.url}"
                " by hand, which leaves it there too, and copy again"
            )
        raise AlreadyExists(
            f"{destination.url} and {result.source} seem to have both gone on since one was copied"
            " from the other; nothing was changed",
            expected=f"nothing that {result.source} never had",
            found=stranger,
            todo=advice,
        )
    if versions and not result.present and not _is_earlier_copy(remaining, destination, versions):
        raise AlreadyExists(
            f"{destination.url} holds another training; nothing was changed",
            expected=f"an empty place, or an earlier copy of {result.source}",
            found=f"{format_count(len(versions), 'version')} that {result.source} does not have",
            todo="Copy to another place, or single versions one by one",
        )


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
        "stray": result.stray_warning is not None,
        "bytes": sum(map(bytes_to_read, result.copied)),
        "seconds": round(seconds, 6),
    }


def _build_snapshot_document(snapshot: Snapshot) -> dict[str, Any]:
    return {"snapshot": snapshot.url, "step": snapshot.step, "bytes": snapshot.nbytes}


def render(result: CopyResult, seconds: float, console: Console) -> None:
    """Print each version's fate, and the sum."""
    from holdfast.cli.console import format_size, styled_text

    for snapshot in result.present:
        console.print(styled_text(f"already there  {snapshot.url}", "dim"), soft_wrap=True)
    for snapshot in result.copied:
        console.print(styled_text(f"copied         {snapshot.url}"), soft_wrap=True)
    for version, error in result.damaged:
        console.print(
            styled_text(f"NOT copied     {version}: {format_error_line(error)}", "red"),
            soft_wrap=True,
        )
    if result.stray_warning is not None:
        console.print(styled_text(result.stray_warning, "yellow"), soft_wrap=True)
    nbytes = sum(map(bytes_to_read, result.copied))
    speed = f", {format_size(int(nbytes / seconds))}/s" if seconds > 1 else ""
    count = format_count(len(result.copied), "snapshot")
    done = f"{count} copied, {format_size(nbytes)}, all checked{speed}"
    parts = [done if result.copied else "Nothing copied"]
    if result.present:
        parts.append(f"{len(result.present):,} already there")
    if result.damaged:
        parts.append(f"{len(result.damaged):,} NOT copied")
    console.print(styled_text("; ".join(parts), "red" if result.damaged else "green"))
