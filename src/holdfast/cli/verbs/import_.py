"""``holdfast import FILE_OR_DIR RUN``: a checkpoint that others wrote, as a version of a run."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress_bar
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import check_run_target, format_count
from holdfast.engine.saving.commit import raise_if_exists
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.names import Version
from holdfast.interop.arrange import MAX_STEP, ArrangedState, arrange_state
from holdfast.interop.import_ import (
    ForeignCheckpoint,
    flatten_foreign_state,
    read_foreign_checkpoint,
    save_foreign_checkpoint,
    size_on_disk,
)
from holdfast.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

_KIND_NAMES = {
    "torch": "a file of torch.save",
    "lightning": "a Lightning checkpoint",
    "safetensors": "a safetensors file",
    "huggingface": "a Hugging Face folder",
    "dcp": "a torch.distributed.checkpoint folder",
}


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What was read, how it hangs in the state, and the snapshot that it became."""

    checkpoint: ForeignCheckpoint
    arranged: ArrangedState
    snapshot: Snapshot
    seconds: float


@click.command("import", short_help="Make a version of another's checkpoint.")
@click.argument("file_or_dir")
@click.argument("run")
@click.option(
    "--step",
    type=click.IntRange(0, MAX_STEP - 1),
    help="The step that it was saved after, where it does not tell.",
)
@click.option("--as", "under", metavar="KEY", help="Put all of it under this key of the state.")
@click.option(
    "--keep-names", is_flag=True, help='Leave "module." and other marks of wrappers in names.'
)
@json_option
def command(
    file_or_dir: str,
    run: str,
    step: int | None,
    under: str | None,
    keep_names: bool,
    as_json: bool,
) -> None:
    """Save the checkpoint FILE_OR_DIR as a version of RUN. Nothing in it is ever run.

    Known are files of torch.save, of Lightning and of safetensors, and folders of Hugging Face
    and of torch.distributed.checkpoint, whatever they are called. A dict of dicts, such as
    {"model": ..., "optimizer": ...}, stands as it is; a state dict alone goes under "model".
    """
    began = perf_counter()
    place = Run(run)
    check_run_target(place)
    with progress_bar("checking", size_on_disk(file_or_dir), quiet=as_json) as tell:
        read = read_foreign_checkpoint(file_or_dir, tell)
    step = read.step if step is None else step
    if step is None:
        raise click.UsageError(
            f"{file_or_dir} does not tell after which step it was saved: give --step N"
        )
    version = Version(step, place.branch())
    raise_if_exists(place.location(version))
    arranged = arrange_state(read.value, under, keep_names=keep_names)
    flat = flatten_foreign_state(arranged.state)
    nbytes = sum(leaf.source.nbytes for leaf in flat.leaves)
    with progress_bar("importing", nbytes, quiet=as_json) as tell:
        made = save_foreign_checkpoint(
            place.location(version), flat, read, step, version.branch, tell
        )
    imported = ImportResult(read, arranged, made, perf_counter() - began)
    if as_json:
        print_json(_build_document(imported))
    else:
        from holdfast.cli.console import make_console

        render(imported, make_console())


def _build_document(result: ImportResult) -> dict[str, Any]:
    read, made = result.checkpoint, result.snapshot
    return {
        "from": read.path,
        "kind": read.kind,
        "snapshot": made.url,
        "step": made.step,
        "leaves": len(made.leaves),
        "bytes": made.nbytes,
        "mapped": read.mapped,
        "renamed": result.arranged.renamed,
        "converted": result.arranged.converted,
        "left_out": list(read.left_out),
        "seconds": round(result.seconds, 6),
    }


def render(result: ImportResult, console: Console) -> None:
    """Print what came of it, and whatever is not as the checkpoint had it."""
    from holdfast.cli.console import format_size, styled_text

    read, made, arranged = result.checkpoint, result.snapshot, result.arranged
    notes = []
    if arranged.renamed:
        notes.append(f"Marks of wrappers taken out of the names in {', '.join(arranged.renamed)}")
    if arranged.converted:
        notes.append(f"Keyed by names of parameters: {', '.join(arranged.converted)}")
    if not read.mapped:
        notes.append("Read into memory as a whole: files of this old kind cannot be mapped")
    if read.left_out:
        shown = ", ".join(read.left_out[:5]) + (" ..." if read.left_out[5:] else "")
        notes.append(f"Not imported: {shown}")
    console.print(styled_text(f"{_KIND_NAMES[read.kind]}  {read.path}", "dim"), soft_wrap=True)
    for note in notes:
        console.print(styled_text(note, "yellow"), soft_wrap=True)
    leaves = format_count(len(made.leaves), "leaf", "leaves")
    console.print(
        styled_text(f"{made.url}  {leaves}, {format_size(made.nbytes)}", "green"), soft_wrap=True
    )
