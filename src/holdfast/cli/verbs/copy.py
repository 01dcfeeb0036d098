"""``holdfast copy A B``: a snapshot or a whole run to another place, every digest checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from holdfast.cli.console import progress
from holdfast.cli.exit_codes import DAMAGED, exit_code
from holdfast.cli.output import describe, json_option, line, print_json
from holdfast.cli.resolve import count, no_empty_folder, refuse_target, run_or_snapshot, stray
from holdfast.cli.verbs.verify import size_of
from holdfast.engine.saving.commit import refuse_existing
from holdfast.engine.snapshot.location import Location, is_snapshot, locate
from holdfast.engine.snapshot.snapshot import Snapshot, open_at
from holdfast.engine.transform.copy import copied_attempt, copy_snapshot
from holdfast.errors import AlreadyExists, FormatError, HoldfastError, NotFound
from holdfast.format.names import (
    MANIFEST,
    Version,
    branch_name,
    evaluation_name,
    parse_version,
    pin_name,
)
from holdfast.format.records import LastingPin, encode_evaluation, encode_lasting
from holdfast.machine import now
from holdfast.run.catalog import Listing, training_of
from holdfast.run.lineage import forked
from holdfast.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

_SMALL = 1 << 20


@dataclass(slots=True)
class Copied:
    """What was copied, what was there already, and what is damaged and therefore was not."""

    source: str
    to: str
    copied: list[Snapshot] = field(default_factory=list)
    present: list[Snapshot] = field(default_factory=list)
    damaged: list[tuple[str, HoldfastError]] = field(default_factory=list)
    branches: int = 0
    evaluations: int = 0
    pins: int = 0
    stray: str | None = None


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
    found = run_or_snapshot(a)
    began = perf_counter()
    with no_empty_folder(locate(b).store if isinstance(found, Snapshot) else Run(b).store):
        if isinstance(found, Snapshot):
            copied = _one(found, b, as_json)
        else:
            copied = _whole(*found, Run(b), as_json)
    seconds = perf_counter() - began
    if as_json:
        print_json(_document(copied, seconds))
    else:
        from holdfast.cli.console import console

        render(copied, seconds, console())
    codes = [exit_code(e) for _, e in copied.damaged]
    if codes:
        ctx.exit(DAMAGED if DAMAGED in codes else codes[0])


def _one(snapshot: Snapshot, to: str, quiet: bool) -> Copied:
    place = locate(to)
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
    refuse_existing(place)
    with progress("copying", size_of(snapshot), quiet=quiet) as tell:
        made = copy_snapshot(snapshot, place, tell)
    return Copied(snapshot.url, made.url, [made])


def _whole(run: Run, listing: Listing, to: Run, quiet: bool) -> Copied:
    """All intact versions of a run, oldest first, after the records of its branches: whenever
    this ends, what has arrived is a run that can be resumed."""
    refuse_target(to)
    copied = Copied(run.url, to.url, stray=stray(run))
    there: list[Snapshot] = []
    todo: list[tuple[Snapshot, Location]] = []
    for version in listing.versions:
        try:
            snapshot = run.open(version)
            place = to.place(version)
            if _same(snapshot, place):
                copied.present.append(open_at(place))
                there.append(snapshot)
            else:
                todo.append((snapshot, place))
        except NotFound:
            continue  # deleted meanwhile
        except FormatError as e:
            copied.damaged.append((str(version), e))
    _refuse_strangers(run, listing, to, copied, todo)
    for number in listing.branches:
        to.store.put_if_absent(branch_name(number), run.store.get(branch_name(number), _SMALL))
        copied.branches += 1
    for snapshot, made in zip(there, copied.present, strict=True):
        _beside(run, listing, snapshot, made, copied)
    with progress("copying", sum(size_of(s) for s, _ in todo), quiet=quiet) as tell:
        for snapshot, place in todo:
            try:
                copied.copied.append(copy_snapshot(snapshot, place, tell))
                _beside(run, listing, snapshot, copied.copied[-1], copied)
            except NotFound:
                if is_snapshot(snapshot.place):  # else deleted meanwhile
                    raise
            except FormatError as e:
                copied.damaged.append((place.folder, e))
    return copied


def _beside(run: Run, listing: Listing, snapshot: Snapshot, made: Snapshot, copied: Copied) -> None:
    """The evaluations of a version, which are as true of its copy, and its lasting pin."""
    version = snapshot.version
    for found in run.ledger.evaluations(version, snapshot.digest, listing.folders[version]):
        key = made.place.key(evaluation_name(found.name, found.attempt))
        same = replace(found, manifest_digest=made.digest)
        made.place.store.put_if_absent(key, encode_evaluation(same))
        copied.evaluations += 1
    if version in listing.lasting:
        pin = encode_lasting(LastingPin(str(version), now()))
        with suppress(AlreadyExists):
            made.place.store.put_if_absent(pin_name(str(version)), pin)
        copied.pins += 1


def _same(snapshot: Snapshot, place: Location) -> bool:
    """Whether a copy of the snapshot is at ``place``, or what it is a copy of; False if nothing is.

    Raises ``AlreadyExists`` if another snapshot is, or a damaged copy.
    """
    try:
        other = open_at(place)
        other.check_files()
    except NotFound:
        return False
    except FormatError as e:
        raise AlreadyExists(
            f"A damaged snapshot is at {place.url} already; nothing was changed",
            found=e.what,
            todo=f"Move its {MANIFEST} away, and nothing else (newer versions may refer to other"
            " files there), and copy again; or copy to another place",
        ) from e
    same = (
        other.digest == snapshot.digest
        or other.manifest.attempt == copied_attempt(snapshot)
        or snapshot.manifest.attempt == copied_attempt(other)
    )
    if not same:
        raise AlreadyExists(
            f"Another snapshot is at {place.url} already; nothing was changed",
            expected=f"a copy of {snapshot.url}, or nothing",
            found=f"a snapshot of {other.created} by another save",
            todo="Copy to another place",
        )
    return True


def _earlier(todo: list[tuple[Snapshot, Location]], to: Run, versions: Sequence[Version]) -> bool:
    """Whether what is there can be an earlier copy, of which the source has kept nothing: all of it
    is older, and of a training that began at the same moment."""
    if not todo or versions[-1].step >= min(s.version.step for s, _ in todo):
        return False
    began = training_of(todo[0][0]).get("began")
    try:
        return began is not None and began == training_of(to.open(versions[-1])).get("began")
    except (FormatError, NotFound):
        return False


def _refuse_strangers(
    run: Run,
    listing: Listing,
    to: Run,
    copied: Copied,
    todo: list[tuple[Snapshot, Location]],
) -> None:
    """Two trainings in one run would be one that never was."""
    theirs = to.listing()
    versions = theirs.versions
    stranger = forked(run, listing, to, theirs) if copied.present else None
    if stranger is not None:
        advice = "Copy to another place"
        records = [branch_name(n) for n in listing.branches if n not in theirs.branches]
        if records and parse_version(stranger) is not None:
            advice += (
                f". But if a sweep of abandoned versions has deleted {stranger} from"
                f" {copied.source}: put a copy of {' and '.join(records)} into {to.url} by hand,"
                " which leaves it there too, and copy again"
            )
        raise AlreadyExists(
            f"{to.url} and {copied.source} seem to have both gone on since one was copied from the"
            " other; nothing was changed",
            expected=f"nothing that {copied.source} never had",
            found=stranger,
            todo=advice,
        )
    if versions and not copied.present and not _earlier(todo, to, versions):
        raise AlreadyExists(
            f"{to.url} holds another training; nothing was changed",
            expected=f"an empty place, or an earlier copy of {copied.source}",
            found=f"{count(len(versions), 'version')} that {copied.source} does not have",
            todo="Copy to another place, or single versions one by one",
        )


def _document(copied: Copied, seconds: float) -> dict[str, Any]:
    return {
        "from": copied.source,
        "to": copied.to,
        "copied": [_snapshot(s) for s in copied.copied],
        "present": [_snapshot(s) for s in copied.present],
        "damaged": [{"version": v, **describe(e)} for v, e in copied.damaged],
        "branches": copied.branches,
        "evaluations": copied.evaluations,
        "pins": copied.pins,
        "stray": copied.stray is not None,
        "bytes": sum(map(size_of, copied.copied)),
        "seconds": round(seconds, 6),
    }


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {"snapshot": snapshot.url, "step": snapshot.step, "bytes": snapshot.nbytes}


def render(copied: Copied, seconds: float, screen: Console) -> None:
    """Print each version's fate, and the sum."""
    from holdfast.cli.console import size, text

    for snapshot in copied.present:
        screen.print(text(f"already there  {snapshot.url}", "dim"), soft_wrap=True)
    for snapshot in copied.copied:
        screen.print(text(f"copied         {snapshot.url}"), soft_wrap=True)
    for version, error in copied.damaged:
        screen.print(text(f"NOT copied     {version}: {line(error)}", "red"), soft_wrap=True)
    if copied.stray is not None:
        screen.print(text(copied.stray, "yellow"), soft_wrap=True)
    nbytes = sum(map(size_of, copied.copied))
    speed = f", {size(int(nbytes / seconds))}/s" if seconds > 1 else ""
    done = f"{count(len(copied.copied), 'snapshot')} copied, {size(nbytes)}, all checked{speed}"
    parts = [done if copied.copied else "Nothing copied"]
    if copied.present:
        parts.append(f"{len(copied.present):,} already there")
    if copied.damaged:
        parts.append(f"{len(copied.damaged):,} NOT copied")
    screen.print(text("; ".join(parts), "red" if copied.damaged else "green"))
