"""``holdfast export SNAPSHOT --to safetensors|torch|hf DIR``: write files for other libraries."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import click

from holdfast.cli.console import (
    format_size,
    format_speed,
    make_console,
    print_line,
    progress_bar,
)
from holdfast.cli.output import json_option, keys_option, print_result
from holdfast.cli.resolve import format_count, resolve_snapshot
from holdfast.engine.snapshot.location import Location
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.interop.export import SUFFIXES, ExportPlan, locate_export, plan_export, write_export

_SIZE_PREFIXES = ("", "K", "M", "G", "T")


def parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Parse a size in bytes, such as ``5GB`` or ``500MB`` (as Hugging Face does) or ``4GiB``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", value, re.IGNORECASE)
    if match is not None and (match[2] or not match[3]):
        unit = (1024 if match[3] else 1000) ** _SIZE_PREFIXES.index(match[2].upper())
        if (size := int(float(match[1]) * unit)) > 0:
            return size
    raise click.BadParameter(f"{value!r} is not a size; write 5GB, 500MB, or 4GiB")


@click.command("export", short_help="Write a snapshot's tensors in another format.")
@click.argument("snapshot")
@click.argument("to", metavar="DIR")
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(SUFFIXES)),
    required=True,
    help="safetensors: one file. torch: one file for torch.load. hf: Hugging Face files.",
)
@click.option(
    "--root",
    metavar="KEY",
    help='Export only what is below KEY, and remove KEY from the names. "/": everything. Default:'
    ' "model", or everything for torch.',
)
@keys_option
@click.option(
    "--max-shard-size",
    callback=parse_size,
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="hf: maximum bytes of tensors in one file.",
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
    """Write the tensors of SNAPSHOT into the folder DIR, in a format of another library.

    Every byte is checked. No existing file is overwritten, and a failed export leaves no file
    behind. DIR may also be the name of the file, such as out/llama.safetensors.
    """
    opened = resolve_snapshot(snapshot)
    location, name = locate_export(to, kind)
    plan = plan_export(
        opened, kind, root=root, keys=keys, max_shard_size=max_shard_size, file_name=name
    )
    began = perf_counter()
    with progress_bar("exporting", plan.nbytes, quiet=as_json) as advance:
        write_export(opened, plan, location, advance)
    seconds = perf_counter() - began
    if plan.left_out and not as_json:
        omitted = format_count(plan.left_out, "plain value")
        click.echo(f"holdfast: {omitted} omitted: {kind} files contain only tensors", err=True)
    build_document = partial(_build_document, opened)
    print_result(as_json, build_document, _render, plan, location, seconds)


def _file_url(location: Location, name: str) -> str:
    return f"{location.url.rstrip('/')}/{name}"


def _build_document(
    snapshot: Snapshot, plan: ExportPlan, location: Location, seconds: float
) -> dict[str, Any]:
    return {
        "snapshot": snapshot.url,
        "step": snapshot.step,
        "to": plan.kind,
        "root": plan.root,
        "files": [{"file": _file_url(location, f.name), "bytes": f.length} for f in plan.files],
        "tensors": plan.tensor_count,
        "left_out": plan.left_out,
        "bytes": plan.nbytes,
        "seconds": round(seconds, 6),
    }


def _render(plan: ExportPlan, location: Location, seconds: float) -> None:
    console = make_console()
    for file in plan.files:
        print_line(console, f"{_file_url(location, file.name)}  {format_size(file.length)}")
    below = f" below {plan.root}" if plan.root else ""
    count = format_count(plan.tensor_count, "tensor")
    checked = f"{format_size(plan.nbytes)}, all checked{format_speed(plan.nbytes, seconds)}"
    print_line(console, f"{count}{below}, {checked}", "green")
