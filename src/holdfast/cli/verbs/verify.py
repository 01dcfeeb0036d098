"""``holdfast verify RUN|SNAPSHOT``: every byte read and compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress_bar
from holdfast.cli.exit_codes import DAMAGED, exit_code
from holdfast.cli.output import describe_error, format_error_brief, json_option, print_json
from holdfast.cli.resolve import format_count, resolve_run_or_snapshot, stray_snapshot_warning
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.snapshot.verify import CheckedChunks, Problem
from holdfast.errors import Denied, DigestMismatch, FormatError, NotFound, StoreError, Unavailable
from holdfast.format.names import MANIFEST, branch_name, is_shard_name, parse_evaluation, pin_name
from holdfast.format.records import MAX_RECORD, decode_branch, decode_evaluation, decode_lasting_pin
from holdfast.run.catalog import Listing
from holdfast.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What was found of one version (or of a record beside it)."""

    name: str
    url: str
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def is_unreadable(self) -> bool:
        """Whether all that is wrong is that the store does not give it."""
        denied = [isinstance(p.error, Denied | Unavailable) for p in self.problems]
        return bool(denied) and all(denied)


@click.command("verify", short_help="Read every byte and compare it with its digest.")
@click.argument("place", metavar="RUN|SNAPSHOT")
@json_option
@click.pass_context
def command(ctx: click.Context, place: str, as_json: bool) -> None:
    """Read every byte of a SNAPSHOT, or of all versions of a RUN, and compare it with its digest.

    All damage is told, by file, offset and leaf; of an incremental version also what is damaged in
    the versions that it refers to. The exit code is 3 if there is any.
    """
    found = resolve_run_or_snapshot(place)
    began = perf_counter()
    if isinstance(found, Snapshot):
        url = found.url
        checked, note, danger = [_verify_snapshot(found, as_json)], None, None
    else:
        url, note = found[0].url, stray_snapshot_warning(found[0])
        checked, danger = _verify_run(*found, as_json)
    seconds = perf_counter() - began
    if as_json:
        document = _build_document(url, checked, seconds)
        print_json({**document, "danger": danger, "stray": note is not None})
    else:
        from holdfast.cli.console import make_console, styled_text

        screen = make_console()
        render(checked, seconds, screen)
        for told in (danger, note):
            if told is not None:
                screen.print(styled_text(told, "yellow"), soft_wrap=True)
    codes = [exit_code(p.error) for c in checked for p in c.problems]
    if codes:
        ctx.exit(DAMAGED if DAMAGED in codes else codes[0])


def _verify_snapshot(snapshot: Snapshot, quiet: bool) -> VerifyResult:
    with progress_bar("verifying", bytes_to_read(snapshot), quiet=quiet) as tell:
        report = snapshot.verify(tell)
    name = snapshot.location.folder.rpartition("/")[2] or snapshot.url
    return VerifyResult(name, snapshot.url, report.nbytes, report.problems)


def _verify_run(run: Run, listing: Listing, quiet: bool) -> tuple[list[VerifyResult], str | None]:
    """Every version, branch, lasting pin and evaluation, and whether saves to come are in danger.
    What is deleted meanwhile is left out."""
    checked: list[VerifyResult] = []
    opened: list[Snapshot] = []
    newest = _newest_version(run, listing)
    for version in listing.versions:
        place = run.location(version)
        try:
            opened.append(run.open(version))
        except NotFound:
            continue
        except (FormatError, StoreError) as e:
            checked.append(_failed_result(str(version), place.key(MANIFEST), place.url, e))
    for key, decode in _run_records(listing):
        try:
            decode(run.store.get(key, MAX_RECORD), key)
        except NotFound:
            continue
        except (FormatError, StoreError) as e:
            checked.append(_failed_result(key, key, f"{run.url}/{key}", e))
    seen: CheckedChunks = {}  # so that what several versions refer to is read once
    nbytes = sum(bytes_to_read(s) - s.referred_bytes for s in opened)
    with progress_bar("verifying", nbytes, quiet=quiet) as tell:
        for snapshot in opened:
            try:
                report = snapshot.verify(tell, seen)
            except NotFound:
                continue
            checked.append(
                VerifyResult(snapshot.location.folder, snapshot.url, report.nbytes, report.problems)
            )
    order = {str(v): i for i, v in enumerate(listing.versions)}
    checked.sort(key=lambda c: order.get(c.name, len(order)))
    bases = {str(s.version) for s in opened if s.bases}
    return checked, _damage_warning(next((c for c in checked if c.name == newest and bases), None))


def _newest_version(run: Run, listing: Listing) -> str | None:
    """The newest version on the line; None if there is none, or that cannot be told: it is for
    advice only."""
    try:
        return next((str(v) for v in reversed(run.line(listing))), None)
    except (FormatError, StoreError):
        return None


def _run_records(listing: Listing) -> Iterator[tuple[str, Callable[[bytes, str], object]]]:
    """The small files that are of use as long as the run lives, and how each is read."""
    for number in listing.branches:
        yield branch_name(number), decode_branch
    for version in listing.lasting_pins:
        yield pin_name(str(version)), decode_lasting_pin
    for files in listing.folders.values():
        for stat in files:
            if parse_evaluation(stat.key.rpartition("/")[2]) is not None:
                yield stat.key, decode_evaluation


def _damage_warning(newest: VerifyResult | None) -> str | None:
    """What to do at once if the newest version of a run of increments has rotted: a save looks at
    what it refers to by length only."""
    problems = newest.problems if newest else ()
    rotten = {p.file for p in problems if isinstance(p.error, DigestMismatch)}
    # of manifests and indexes an increment needs its own only
    files = sorted(f for f in rotten if is_shard_name(f.rpartition("/")[2]))
    if newest is None or not files:
        return None
    return (
        f"If training is going on, its next save refers to what is damaged in {newest.name}. Move"
        f" {', '.join(files)} out of the run now: then that save is a full one"
    )


def _failed_result(name: str, file: str, url: str, error: FormatError | StoreError) -> VerifyResult:
    return VerifyResult(name, url, 0, (Problem(file, error.fields.get("offset"), (), error),))


def bytes_to_read(snapshot: Snapshot) -> int:
    """Bytes of its shards and indexes, and those that it refers to."""
    own = sum(s.length + s.index.length for s in snapshot.manifest.shards)
    return own + snapshot.referred_bytes


def _build_document(url: str, results: list[VerifyResult], seconds: float) -> dict[str, Any]:
    return {
        "place": url,
        "ok": not any(c.problems for c in results),
        "bytes": sum(c.nbytes for c in results),
        "seconds": round(seconds, 6),
        "versions": [
            {
                "version": c.name,
                "url": c.url,
                "ok": not c.problems,
                "bytes": c.nbytes,
                "problems": [
                    {
                        "file": p.file,
                        "offset": p.offset,
                        "leaves": p.leaves,
                        **describe_error(p.error),
                    }
                    for p in c.problems
                ],
            }
            for c in results
        ],
    }


def _group_problems(results: list[VerifyResult]) -> list[tuple[Problem, list[str]]]:
    """What is wrong, each once, with the further versions that it takes along: what is damaged in
    one version is so in all that refer to it."""
    found: dict[object, tuple[Problem, str, list[str]]] = {}
    for c in results:
        for p in c.problems:
            # of one place in one file; where none is told, the words are all that tells
            what = p.error.what if p.offset is None else ""
            key = (p.file, p.offset, type(p.error), str(p.error.expected), what)
            _, first, others = found.setdefault(key, (p, c.name, []))
            if c.name not in (first, *others):
                others.append(c.name)
    return [(p, others) for p, _, others in found.values()]


def render(results: list[VerifyResult], seconds: float, console: Console) -> None:
    """Print one line for each version, and under it what is wrong with it."""
    from holdfast.cli.console import format_size, make_table, styled_text

    versions = make_table("version", "checked", "", right_aligned=("checked",))
    for c in results:
        state = (
            styled_text(format_count(len(c.problems), "problem"), "red")
            if c.problems
            else styled_text("ok", "green")
        )
        versions.add_row(styled_text(c.name), styled_text(format_size(c.nbytes)), state)
    console.print(versions)
    for p, others in _group_problems(results):
        where = p.file if p.offset is None else f"{p.file}, byte {p.offset}"
        console.print()
        console.print(styled_text(where, "red"), soft_wrap=True)
        console.print(styled_text(format_error_brief(p.error), "dim"), soft_wrap=True)
        if p.leaves and not isinstance(p.error, DigestMismatch):  # that one names them
            more = f" and {len(p.leaves) - 8} more" if len(p.leaves) > 8 else ""
            told = f"leaves: {', '.join(p.leaves[:8])}{more}"
            console.print(styled_text(told, "dim"), soft_wrap=True)
        if others:
            console.print(styled_text(f"takes along {', '.join(others)}", "dim"), soft_wrap=True)
    nbytes = sum(c.nbytes for c in results)
    unread = sum(c.is_unreadable for c in results)
    bad = sum(bool(c.problems) for c in results) - unread
    parts = ((bad, "damaged"), (unread, "not to be read"))
    told = ", ".join(f"{n} of {len(results)} {how}" for n, how in parts if n)
    verdict = told or f"{format_count(len(results), 'version')} intact"
    speed = f", {format_size(int(nbytes / seconds))}/s" if seconds > 1 else ""
    console.print()
    console.print(
        styled_text(
            f"{verdict}; {format_size(nbytes)} read and compared{speed}", "red" if told else "green"
        )
    )
