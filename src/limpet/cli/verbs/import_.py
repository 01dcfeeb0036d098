"""``limpet import FILE_OR_DIR RUN``: save another library's checkpoint as a version."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any

import click

from limpet.cli.console import print_line, progress_bar
from limpet.cli.output import json_option, print_result
from limpet.cli.resolve import check_run_target
from limpet.convert.arrange import ArrangedState, arrange_state
from limpet.convert.import_ import (
    ForeignCheckpoint,
    find_earlier,
    read_foreign_checkpoint,
    save_foreign_checkpoint,
)
from limpet.convert.stored_files import size_of_foreign
from limpet.format.names import MAX_STEP, Version
from limpet.run.run import Run
from limpet.snapshot.reader import SnapshotReader
from limpet.state.flatten import flatten
from limpet.text import format_count, format_list, format_size


@click.command("import")
@click.argument("file_or_dir")
@click.argument("run")
@click.option(
    "--step",
    type=click.IntRange(0, MAX_STEP),
    help="The step of the version. Default: the step that the checkpoint records.",
)
@click.option("--as", "under", metavar="KEY", help="Store everything under KEY of the state.")
@click.option(
    "--keep-names",
    is_flag=True,
    help='Keep "module." and other wrapper prefixes, and the names of members.',
)
@json_option
def command(
    file_or_dir: str, run: str, step: int | None, under: str | None, keep_names: bool, as_json: bool
) -> None:
    """Save the checkpoint FILE_OR_DIR as a version of RUN. No code in it is run.

    Supported are files of torch.save, Lightning, and safetensors, and folders of Hugging Face,
    Transformers, Accelerate, and torch.distributed.checkpoint, whatever their names. A dict of
    dicts, such as {"model": ..., "optimizer": ...}, is kept; the state dict of a model alone is
    stored under "model", and that of an optimizer under "optimizer".
    FILE_OR_DIR may be a URL. A safetensors file there is not copied to the local disk. The other
    formats are, temporarily: set TMPDIR to a folder with enough space.
    """
    began = perf_counter()
    target = Run(run)
    check_run_target(target)
    with progress_bar("checking", size_of_foreign(file_or_dir), quiet=as_json) as advance:
        checkpoint = read_foreign_checkpoint(file_or_dir, advance)
    step = checkpoint.step if step is None else step
    if step is None:
        raise click.UsageError(f"{file_or_dir} does not record its step: give --step N")
    version = Version(step, target.branch())
    location = target.location(version)
    arranged = arrange_state(checkpoint.value, under, kind=checkpoint.kind, keep_names=keep_names)
    flat = flatten(arranged.state)
    snapshot = find_earlier(location, flat, checkpoint, step)
    if snapshot is None:
        nbytes = sum(leaf.source.nbytes for leaf in flat.leaves)
        with progress_bar("importing", nbytes, quiet=as_json) as advance:
            snapshot = save_foreign_checkpoint(
                location, flat, checkpoint, step, version.branch, advance
            )
    build_document = partial(_build_document, perf_counter() - began)
    print_result(as_json, build_document, render, checkpoint, arranged, snapshot)


def _build_document(
    seconds: float, checkpoint: ForeignCheckpoint, arranged: ArrangedState, snapshot: SnapshotReader
) -> dict[str, Any]:
    return {
        "from": checkpoint.path,
        "kind": checkpoint.kind,
        "snapshot": snapshot.url,
        "step": snapshot.step,
        "leaves": len(snapshot.leaves),
        "bytes": snapshot.nbytes,
        "mapped": checkpoint.mapped,
        "members": arranged.members,
        "renamed": arranged.renamed,
        "converted": arranged.converted,
        "left_out": list(checkpoint.left_out),
        "seconds": round(seconds, 6),
    }


def render(
    checkpoint: ForeignCheckpoint, arranged: ArrangedState, snapshot: SnapshotReader
) -> None:
    """Print the snapshot, and how it differs from the checkpoint."""
    renamed, converted = ", ".join(arranged.renamed), ", ".join(arranged.converted)
    members = format_list([f"{old} to {new}" for old, new in arranged.members.items()], 8)
    left_out = ", ".join(checkpoint.left_out[:5]) + (" ..." if checkpoint.left_out[5:] else "")
    notes = (
        (members, f"Renamed: {members}"),
        (renamed, f"Removed wrapper prefixes from the names in {renamed}"),
        (converted, f"Keyed by parameter name: {converted}"),
        (
            not checkpoint.mapped,
            "Read into memory as a whole: files in this old format cannot be mapped",
        ),
        (left_out, f"Not imported: {left_out}"),
    )
    print_line(f"{checkpoint.kind}  {checkpoint.path}", "dim")
    for applies, note in notes:
        if applies:
            print_line(note, "yellow")
    leaves = format_count(len(snapshot.leaves), "leaf", "leaves")
    print_line(f"{snapshot.url}  {leaves}, {format_size(snapshot.nbytes)}", "green")
