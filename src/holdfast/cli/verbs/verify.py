"""``holdfast verify RUN|SNAPSHOT``: every byte read and compared with its digest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress
from holdfast.cli.exit_codes import DAMAGED, exit_code
from holdfast.cli.output import brief, describe, json_option, print_json
from holdfast.cli.resolve import count, run_or_snapshot, stray
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.snapshot.verify import Problem, Seen
from holdfast.errors import Denied, DigestMismatch, FormatError, NotFound, StoreError, Unavailable
from holdfast.format.names import MANIFEST, branch_name, is_shard, parse_evaluation, pin_name
from holdfast.format.records import MAX_RECORD, decode_branch, decode_evaluation, decode_lasting
from holdfast.run.catalog import Listing
from holdfast.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of one version (or of a record beside it)."""

    name: str
    url: str
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def unread(self) -> bool:
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
    found = run_or_snapshot(place)
    began = perf_counter()
    if isinstance(found, Snapshot):
        url = found.url
        checked, note, danger = [_check_open(found, as_json)], None, None
    else:
        url, note = found[0].url, stray(found[0])
        checked, danger = _check_run(*found, as_json)
    seconds = perf_counter() - began
    if as_json:
        document = _document(url, checked, seconds)
        print_json({**document, "danger": danger, "stray": note is not None})
    else:
        from holdfast.cli.console import console, text

        screen = console()
        render(checked, seconds, screen)
        for told in (danger, note):
            if told is not None:
                screen.print(text(told, "yellow"), soft_wrap=True)
    codes = [exit_code(p.error) for c in checked for p in c.problems]
    if codes:
        ctx.exit(DAMAGED if DAMAGED in codes else codes[0])


def _check_open(snapshot: Snapshot, quiet: bool) -> Checked:
    with progress("verifying", size_of(snapshot), quiet=quiet) as tell:
        report = snapshot.verify(tell)
    name = snapshot.place.folder.rpartition("/")[2] or snapshot.url
    return Checked(name, snapshot.url, report.nbytes, report.problems)


def _check_run(run: Run, listing: Listing, quiet: bool) -> tuple[list[Checked], str | None]:
    """Every version, branch, lasting pin and evaluation, and whether saves to come are in danger.
    What is deleted meanwhile is left out."""
    checked: list[Checked] = []
    opened: list[Snapshot] = []
    newest = _newest(run, listing)
    for version in listing.versions:
        place = run.place(version)
        try:
            opened.append(run.open(version))
        except NotFound:
            continue
        except (FormatError, StoreError) as e:
            checked.append(_broken(str(version), place.key(MANIFEST), place.url, e))
    for key, decode in _records(listing):
        try:
            decode(run.store.get(key, MAX_RECORD), key)
        except NotFound:
            continue
        except (FormatError, StoreError) as e:
            checked.append(_broken(key, key, f"{run.url}/{key}", e))
    seen: Seen = {}  # so that what several versions refer to is read once
    nbytes = sum(size_of(s) - s.referred_bytes for s in opened)
    with progress("verifying", nbytes, quiet=quiet) as tell:
        for snapshot in opened:
            try:
                report = snapshot.verify(tell, seen)
            except NotFound:
                continue
            checked.append(
                Checked(snapshot.place.folder, snapshot.url, report.nbytes, report.problems)
            )
    order = {str(v): i for i, v in enumerate(listing.versions)}
    checked.sort(key=lambda c: order.get(c.name, len(order)))
    bases = {str(s.version) for s in opened if s.bases}
    return checked, _danger(next((c for c in checked if c.name == newest and bases), None))


def _newest(run: Run, listing: Listing) -> str | None:
    """The newest version on the line; None if there is none, or that cannot be told: it is for
    advice only."""
    try:
        return next((str(v) for v in reversed(run.line(listing))), None)
    except (FormatError, StoreError):
        return None


def _records(listing: Listing) -> Iterator[tuple[str, Callable[[bytes, str], object]]]:
    """The small files that are of use as long as the run lives, and how each is read."""
    for number in listing.branches:
        yield branch_name(number), decode_branch
    for version in listing.lasting:
        yield pin_name(str(version)), decode_lasting
    for files in listing.folders.values():
        for stat in files:
            if parse_evaluation(stat.key.rpartition("/")[2]) is not None:
                yield stat.key, decode_evaluation


def _danger(newest: Checked | None) -> str | None:
    """What to do at once if the newest version of a run of increments has rotted: a save looks at
    what it refers to by length only."""
    problems = newest.problems if newest else ()
    rotten = {p.file for p in problems if isinstance(p.error, DigestMismatch)}
    # of manifests and indexes an increment needs its own only
    files = sorted(f for f in rotten if is_shard(f.rpartition("/")[2]))
    if newest is None or not files:
        return None
    return (
        f"If training is going on, its next save refers to what is damaged in {newest.name}. Move"
        f" {', '.join(files)} out of the run now: then that save is a full one"
    )


def _broken(name: str, file: str, url: str, error: FormatError | StoreError) -> Checked:
    return Checked(name, url, 0, (Problem(file, error.fields.get("offset"), (), error),))


def size_of(snapshot: Snapshot) -> int:
    """Bytes of its shards and indexes, and those that it refers to."""
    own = sum(s.length + s.index.length for s in snapshot.manifest.shards)
    return own + snapshot.referred_bytes


def _document(url: str, checked: list[Checked], seconds: float) -> dict[str, Any]:
    return {
        "place": url,
        "ok": not any(c.problems for c in checked),
        "bytes": sum(c.nbytes for c in checked),
        "seconds": round(seconds, 6),
        "versions": [
            {
                "version": c.name,
                "url": c.url,
                "ok": not c.problems,
                "bytes": c.nbytes,
                "problems": [
                    {"file": p.file, "offset": p.offset, "leaves": p.leaves, **describe(p.error)}
                    for p in c.problems
                ],
            }
            for c in checked
        ],
    }


def _causes(checked: list[Checked]) -> list[tuple[Problem, list[str]]]:
    """What is wrong, each once, with the further versions that it takes along: what is damaged in
    one version is so in all that refer to it."""
    found: dict[object, tuple[Problem, str, list[str]]] = {}
    for c in checked:
        for p in c.problems:
            # of one place in one file; where none is told, the words are all that tells
            what = p.error.what if p.offset is None else ""
            key = (p.file, p.offset, type(p.error), str(p.error.expected), what)
            _, first, others = found.setdefault(key, (p, c.name, []))
            if c.name not in (first, *others):
                others.append(c.name)
    return [(p, others) for p, _, others in found.values()]


def render(checked: list[Checked], seconds: float, screen: Console) -> None:
    """Print one line for each version, and under it what is wrong with it."""
    from holdfast.cli.console import size, table, text

    versions = table("version", "checked", "", right=("checked",))
    for c in checked:
        state = (
            text(count(len(c.problems), "problem"), "red") if c.problems else text("ok", "green")
        )
        versions.add_row(text(c.name), text(size(c.nbytes)), state)
    screen.print(versions)
    for p, others in _causes(checked):
        where = p.file if p.offset is None else f"{p.file}, byte {p.offset}"
        screen.print()
        screen.print(text(where, "red"), soft_wrap=True)
        screen.print(text(brief(p.error), "dim"), soft_wrap=True)
        if p.leaves and not isinstance(p.error, DigestMismatch):  # that one names them
            more = f" and {len(p.leaves) - 8} more" if len(p.leaves) > 8 else ""
            told = f"leaves: {', '.join(p.leaves[:8])}{more}"
            screen.print(text(told, "dim"), soft_wrap=True)
        if others:
            screen.print(text(f"takes along {', '.join(others)}", "dim"), soft_wrap=True)
    nbytes = sum(c.nbytes for c in checked)
    unread = sum(c.unread for c in checked)
    bad = sum(bool(c.problems) for c in checked) - unread
    parts = ((bad, "damaged"), (unread, "not to be read"))
    told = ", ".join(f"{n} of {len(checked)} {how}" for n, how in parts if n)
    verdict = told or f"{count(len(checked), 'version')} intact"
    speed = f", {size(int(nbytes / seconds))}/s" if seconds > 1 else ""
    screen.print()
    screen.print(
        text(f"{verdict}; {size(nbytes)} read and compared{speed}", "red" if told else "green")
    )
