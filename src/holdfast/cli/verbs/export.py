"""``holdfast export SNAPSHOT --to safetensors|torch|hf DIR``: files that others read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import click

from holdfast.cli.console import progress
from holdfast.cli.output import clean, json_option, print_json
from holdfast.cli.resolve import count, snapshot_at
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.interop.export import SUFFIXES, Export, export_place, plan_export, write_export

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def nbytes(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """A size such as ``5GB`` or ``500MB``, as Hugging Face's libraries read it; ``4GiB``, too."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", value, re.IGNORECASE)
    if match is not None and (match[2] or not match[3]):
        unit = _UNITS[match[2].upper()]
        if match[3]:
            unit = 1 << 10 * list(_UNITS.values()).index(unit)
        if (size := int(float(match[1]) * unit)) > 0:
            return size
    raise click.BadParameter(f"{value!r} is no size; write 5GB, 500MB or 4GiB")


@click.command("export", short_help="Write a snapshot's tensors as files that others read.")
@click.argument("snapshot")
@click.argument("to", metavar="DIR")
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(SUFFIXES)),
    required=True,
    help="safetensors: one file. torch: one for torch.load. hf: as Hugging Face has them.",
)
@click.option(
    "--root",
    metavar="KEY",
    help='Only what is below KEY; names begin behind it. "/": everything. Unless given: "model",'
    " but all for torch.",
)
@click.option(
    "--keys",
    multiple=True,
    metavar="PATTERN",
    help="Only what matches: * within a level, ** across levels. May be repeated.",
)
@click.option(
    "--max-shard-size",
    callback=nbytes,
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="hf: most bytes of tensors in one file.",
)
@json_option
def command(
    snapshot: str,
    to: str,
    kind: str,
    root: str | None,
    keys: Sequence[str],
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write the tensors of SNAPSHOT into the folder DIR, as files that need no Holdfast.

    Every byte is checked on the way. Nothing that is there is overwritten, and what fails leaves
    nothing behind. DIR may also be the name of the file, such as out/llama.safetensors.
    """
    opened = snapshot_at(snapshot)
    place, name = export_place(to, kind)
    export = plan_export(opened, kind, root=root, keys=keys, shard_size=max_shard_size, name=name)
    began = perf_counter()
    with progress("exporting", export.nbytes, quiet=as_json) as tell:
        write_export(opened, export, place, tell)
    seconds = perf_counter() - began
    if export.left_out and not as_json:
        left = count(export.left_out, "plain value")
        click.echo(f"holdfast: {left} left out: {kind} holds tensors only", err=True)
    if as_json:
        print_json(_document(opened, export, place, seconds))
    else:
        _render(export, place, seconds)


def _url(place: Location, name: str) -> str:
    return f"{place.url.rstrip('/')}/{name}"


def _document(
    snapshot: Snapshot, export: Export, place: Location, seconds: float
) -> dict[str, Any]:
    return {
        "snapshot": snapshot.url,
        "step": snapshot.step,
        "to": export.kind,
        "root": export.root,
        "files": [{"file": _url(place, f.name), "bytes": f.length} for f in export.files],
        "tensors": export.tensors,
        "left_out": export.left_out,
        "bytes": export.nbytes,
        "seconds": round(seconds, 6),
    }


def _render(export: Export, place: Location, seconds: float) -> None:
    from holdfast.cli.console import console, size, text

    screen = console()
    for file in export.files:
        told = f"{_url(place, file.name)}  {size(file.length)}"
        screen.print(text(clean(told)), soft_wrap=True)
    below = f" below {export.root}" if export.root else ""
    speed = f", {size(int(export.nbytes / seconds))}/s" if seconds > 1 else ""
    done = f"{count(export.tensors, 'tensor')}{below}, {size(export.nbytes)}, all checked{speed}"
    screen.print(text(done, "green"), soft_wrap=True)
