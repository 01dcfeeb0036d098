"""``limpet export SNAPSHOT --to FORMAT DIR``: write files for other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import click

from limpet.cli.console import format_speed, print_line, progress_bar
from limpet.cli.output import json_option, keys_option, parse_size, print_result
from limpet.cli.resolve import refuse_address, resolve_newest
from limpet.convert.export import SUFFIXES, ExportResult, PreparedExport
from limpet.tables.export import prepare
from limpet.text import format_count, format_size


@click.command("export")
@click.argument("snapshot")
@click.argument("to", metavar="DIR")
@click.option(
    "--to",
    "kind",
    type=click.Choice(list(SUFFIXES)),
    required=True,
    help="safetensors: one file. torch: one file for torch.load, which needs memory"
    " for all of it. hf: Hugging Face files.",
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
    *,
    root: str | None,
    keys: Sequence[str],
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write the tensors of SNAPSHOT into the folder DIR, in a format of another library.

    If SNAPSHOT is a run, its newest version is exported. Every byte is checked. No existing file is
    overwritten, and a failed export leaves no file behind. DIR may also be the name of the file,
    such as out/llama.safetensors. An embedding table becomes KEY/ids, ascending, and KEY/values,
    without slots, which are in memory for one table at a time.
    """
    opened = resolve_newest(snapshot, quiet=as_json)
    prepared = prepare(opened, to, kind, root=root, keys=keys, max_shard_size=max_shard_size)
    refuse_address(prepared.location.url)
    began = perf_counter()
    with progress_bar("exporting", prepared.nbytes, quiet=as_json) as advance:
        result = prepared.write(advance)
    seconds = perf_counter() - began
    if result.left_out and not as_json:
        omitted = format_count(result.left_out, "plain value")
        click.echo(f"limpet: {omitted} omitted: {kind} files contain only tensors", err=True)
    print_result(as_json, _build_document, _render, prepared, result, seconds)


def _build_document(
    prepared: PreparedExport, result: ExportResult, seconds: float
) -> dict[str, Any]:
    return {
        "snapshot": result.snapshot,
        "step": prepared.snapshot.step,
        "to": prepared.kind,
        "root": prepared.root,
        "files": [{"file": url, "bytes": nbytes} for url, nbytes in result.files],
        "tensors": result.tensors,
        "left_out": result.left_out,
        "bytes": result.nbytes,
        "seconds": round(seconds, 6),
    }


def _render(prepared: PreparedExport, result: ExportResult, seconds: float) -> None:
    root = prepared.root
    for url, nbytes in result.files:
        print_line(f"{url}  {format_size(nbytes)}")
    below = f" below {root}" if root else ""
    count = format_count(result.tensors, "tensor")
    checked = f"{format_size(result.nbytes)}, all checked{format_speed(result.nbytes, seconds)}"
    print_line(f"{count}{below}, {checked}", "green")
