"""``limpet verify RUN|SNAPSHOT``: read every byte and compare it with its digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import click

from limpet import errors
from limpet.cli.console import Cell, format_speed, print_line, print_table, progress_bar
from limpet.cli.exit_codes import exit_on_errors
from limpet.cli.output import describe_error, json_option, print_result
from limpet.cli.resolve import resolve_run_or_snapshot
from limpet.convert.export_record import check_export
from limpet.convert.stored_files import size_of_foreign
from limpet.format.names import (
    MANIFEST,
    Version,
    branch_name,
    parse_evaluation,
    parse_version,
    pin_name,
)
from limpet.format.records import (
    MAX_RECORD,
    decode_about_version,
    decode_branch,
    decode_lasting_pin,
)
from limpet.loading.snapshot import Snapshot
from limpet.run.listing import Listing
from limpet.run.metrics_log import list_files, read_file
from limpet.run.run import Run
from limpet.snapshot.location import get_bounded
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.verify import CheckedChunks, Problem, Report
from limpet.storage.store import Store
from limpet.text import format_count, format_list, format_size


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result for one version, one record of the run, or one exported file."""

    name: str
    url: str
    nbytes: int
    problems: tuple[Problem, ...]
    is_version: bool = True


@click.command("verify")
@click.argument("run_or_snapshot", metavar="RUN|SNAPSHOT")
@json_option
@click.pass_context
def command(ctx: click.Context, run_or_snapshot: str, as_json: bool) -> None:
    """Read every byte of a SNAPSHOT, or of all versions of a RUN, and compare it with its digest.
    The files that `limpet export` wrote, or a folder with them, are compared with their records.

    All damage is reported by file, offset, and leaf. For an incremental version, this includes
    damage in the versions that it refers to. The exit code is 3 if there is damage. Wrong bytes of
    a version are recorded in its run, if the store is writable, until it is found intact again.
    """
    began = perf_counter()
    target = _find_target(run_or_snapshot, as_json)
    if isinstance(target, list):
        url, results = run_or_snapshot, target
    elif isinstance(target, SnapshotReader):
        url, results = target.url, [_verify_snapshot(target, as_json)]
    else:
        url, results = target[0].url, verify_run(*target, as_json)
    build_document = partial(_build_document, url)
    print_result(as_json, build_document, render, results, perf_counter() - began)
    exit_on_errors(ctx, (p.error for result in results for p in result.problems))


def _find_target(
    url: str, quiet: bool
) -> tuple[Run, Listing] | SnapshotReader | list[VerifyResult]:
    """Return the run or the snapshot at ``url``, or the results for exported files there."""
    try:
        return resolve_run_or_snapshot(url)
    except errors.NotFound as e:
        if "versions" in e.fields:
            raise
        checks = []
        with (
            suppress(errors.NotFound, errors.Unsupported, FileNotFoundError),
            progress_bar("verifying", size_of_foreign(url, all_files=True), quiet=quiet) as advance,
        ):
            checks = check_export(url, advance)
        if not checks:
            raise
    return [
        VerifyResult(
            check.name,
            check.url,
            check.nbytes,
            () if check.error is None else (Problem(check.name, None, (), check.error),),
            is_version=False,
        )
        for check in checks
    ]


def _verify_snapshot(snapshot: SnapshotReader, quiet: bool) -> VerifyResult:
    with progress_bar("verifying", bytes_to_read(snapshot), quiet=quiet) as advance:
        report = snapshot.verify(advance)
    name = snapshot.location.folder.rpartition("/")[2] or snapshot.url
    return _record(Run(snapshot.location.store), snapshot, name, report)


def _record(run: Run, snapshot: SnapshotReader, name: str, report: Report) -> VerifyResult:
    """Record what was found, if the snapshot is a version of the run, and return it."""
    try:
        if parse_version(snapshot.location.folder) is not None:
            run.record_verification(Snapshot(snapshot), report)
    except errors.FormatError:
        pass  # its folder has the name of another version
    except errors.LimpetError as e:
        click.echo(f"limpet: the result is not recorded in the run: {e}", err=True)
    return VerifyResult(name, report.url, report.nbytes, report.problems)


def verify_run(run: Run, listing: Listing, quiet: bool) -> list[VerifyResult]:
    """Verify all versions and records of a run, except files that are deleted in the meantime."""
    results: list[VerifyResult] = []
    own_bytes: dict[Version, int] = {}
    for version in listing.versions:  # not kept open: the trees of many versions fill the memory
        if (snapshot := _open_version(run, version, results)) is not None:
            own_bytes[version] = bytes_to_read(snapshot) - snapshot.referred_bytes
    for key, read in _run_records(run, listing):
        try:
            read(run.store, key)
        except errors.NotFound:
            continue
        except (errors.FormatError, errors.StoreError) as e:
            results.append(_failed_result(key, key, f"{run.url}/{key}", e))
    seen: CheckedChunks = {}  # reads data that several versions refer to only once
    with progress_bar("verifying", sum(own_bytes.values()), quiet=quiet) as advance:
        for version in own_bytes:
            snapshot = _open_version(run, version, results)
            with suppress(errors.NotFound):
                if snapshot is not None:
                    report = snapshot.verify(advance, seen)
                    results.append(_record(run, snapshot, str(version), report))
    order = {str(v): i for i, v in enumerate(listing.versions)}
    results.sort(key=lambda result: order.get(result.name, len(order)))
    return results


def _open_version(run: Run, version: Version, results: list[VerifyResult]) -> SnapshotReader | None:
    """Open a version, or add its problem to ``results``. Returns None if it was deleted, too."""
    location = run.location(version)
    try:
        return run.catalog.open(version)
    except errors.NotFound:
        return None
    except (errors.FormatError, errors.StoreError) as e:
        results.append(_failed_result(str(version), location.key(MANIFEST), location.url, e))
        return None


def _run_records(run: Run, listing: Listing) -> list[tuple[str, Callable[[Store, str], object]]]:
    """Return the keys of branch records, lasting pins, records about versions, and files of the
    metrics log, and what reads each."""
    folders = (run.catalog.files(version, listing) for version in listing.folders)
    keys = (stat.key for folder in folders for stat in folder.stats)
    about = ((key, parse_evaluation(key.rpartition("/")[2])) for key in keys)
    records: list[tuple[str, Callable[[bytes, str], object]]] = [
        *((branch_name(number), decode_branch) for number in listing.branches),
        *((pin_name(str(version)), decode_lasting_pin) for version in sorted(listing.lasting_pins)),
        *((key, partial(decode_about_version, kind=file.kind)) for key, file in about if file),
    ]
    return [
        *((key, partial(_read_record, decode)) for key, decode in records),
        *((file.key, read_file) for file in sorted(list_files(run.store))),
    ]


def _read_record(decode: Callable[[bytes, str], object], store: Store, key: str) -> object:
    return decode(get_bounded(store, key, MAX_RECORD), key)


def _failed_result(
    name: str, file: str, url: str, error: errors.FormatError | errors.StoreError
) -> VerifyResult:
    return VerifyResult(name, url, 0, (Problem(file, error.fields.get("offset"), (), error),))


def bytes_to_read(snapshot: SnapshotReader) -> int:
    """Return the bytes of the shards and indexes, and of the data that the snapshot refers to."""
    shards = snapshot.manifest.shards
    return sum(s.length + s.index.length for s in shards) + snapshot.referred_bytes


def _build_document(url: str, results: list[VerifyResult], seconds: float) -> dict[str, Any]:
    return {
        "place": url,
        "ok": not any(r.problems for r in results),
        "bytes": sum(r.nbytes for r in results),
        "seconds": round(seconds, 6),
        "versions": [
            {
                "version": r.name,
                "url": r.url,
                "ok": not r.problems,
                "bytes": r.nbytes,
                "problems": [
                    {
                        "file": p.file,
                        "offset": p.offset,
                        "leaves": p.leaves,
                        **describe_error(p.error),
                    }
                    for p in r.problems
                ],
            }
            for r in results
        ],
    }


def _group_problems(results: list[VerifyResult]) -> list[tuple[Problem, list[str]]]:
    """Return each problem once, with the names of other versions that it affects by references."""
    groups: dict[object, tuple[Problem, str, list[str]]] = {}
    for result in results:
        for p in result.problems:
            # without an offset, only the message distinguishes problems in one file
            what = p.error.what if p.offset is None else ""
            key = (p.file, p.offset, type(p.error), str(p.error.expected), what)
            _, first, others = groups.setdefault(key, (p, result.name, []))
            if result.name not in (first, *others):
                others.append(result.name)
    return [(p, others) for p, _, others in groups.values()]


def render(results: list[VerifyResult], seconds: float) -> None:
    """Print one line for each version, then each problem, and a summary."""
    rows: list[list[Cell]] = []
    for r in results:
        problems = (format_count(len(r.problems), "problem"), "red")
        status = problems if r.problems else ("ok", "green")
        rows.append([(r.name, ""), (format_size(r.nbytes), ""), status])
    kind = "version" if not results or results[0].is_version else "file"
    print_table(rows, (kind, "checked", ""), right_aligned=("checked",))
    for p, others in _group_problems(results):
        print_line()
        print_line(p.file if p.offset is None else f"{p.file}, byte {p.offset}", "red")
        print_line(p.error.brief, "dim")
        if p.leaves and not isinstance(p.error, errors.DigestMismatch):  # its message names them
            print_line(f"leaves: {format_list(p.leaves, 8)}", "dim")
        if others:
            print_line(f"also affects {', '.join(others)}", "dim")
    nbytes = sum(r.nbytes for r in results)
    failures = sum(bool(r.problems) for r in results)
    noun = "version" if not results or results[0].is_version else "exported file"
    records = len([r for r in results[1:] if r.is_version and parse_version(r.name) is None])
    count = format_count(len(results) - records, noun)
    count += f" and {format_count(records, 'record')}" if records else ""
    verdict = f"problems in {failures} of {count}" if failures else f"{count} intact"
    compared = f"{format_size(nbytes)} read and compared{format_speed(nbytes, seconds)}"
    print_line()
    print_line(f"{verdict}; {compared}", "red" if failures else "green")
