"""``holdfast import FILE_OR_DIR RUN``: a checkpoint that others wrote, as a version of a run."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import count, refuse_target
from holdfast.engine.saving.commit import refuse_existing
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.format.names import Version
from holdfast.interop.arrange import MAX_STEP, Arranged, arrange
from holdfast.interop.import_ import Foreign, read_foreign, save_foreign, size_on_disk, take_apart
from holdfast.run.run import Run

if TYPE_CHECKING:
    from rich.console import Console

_KINDS = {
    "torch": "a file of torch.save",
    "lightning": "a Lightning checkpoint",
    "safetensors": "a safetensors file",
    "huggingface": "a Hugging Face folder",
    "dcp": "a torch.distributed.checkpoint folder",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """What was read, how it hangs in the state, and the snapshot that it became."""

    read: Foreign
    arranged: Arranged
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
    refuse_target(place)
    with progress("checking", size_on_disk(file_or_dir), quiet=as_json) as tell:
        read = read_foreign(file_or_dir, tell)
    step = read.step if step is None else step
    if step is None:
        raise click.UsageError(
            f"{file_or_dir} does not tell after which step it was saved: give --step N"
        )
    version = Version(step, place.branch())
    refuse_existing(place.place(version))
    arranged = arrange(read.value, under, keep_names=keep_names)
    flat = take_apart(arranged.state)
    nbytes = sum(leaf.source.nbytes for leaf in flat.leaves)
    with progress("importing", nbytes, quiet=as_json) as tell:
        made = save_foreign(place.place(version), flat, read, step, version.branch, tell)
    imported = Imported(read, arranged, made, perf_counter() - began)
    if as_json:
        print_json(_document(imported))
    else:
        from holdfast.cli.console import console

        render(imported, console())


def _document(imported: Imported) -> dict[str, Any]:
    read, made = imported.read, imported.snapshot
    return {
        "from": read.path,
        "kind": read.kind,
        "snapshot": made.url,
        "step": made.step,
        "leaves": len(made.leaves),
        "bytes": made.nbytes,
        "mapped": read.mapped,
        "renamed": imported.arranged.renamed,
        "converted": imported.arranged.converted,
        "left_out": list(read.left_out),
        "seconds": round(imported.seconds, 6),
    }


def render(imported: Imported, screen: Console) -> None:
    """Print what came of it, and whatever is not as the checkpoint had it."""
    from holdfast.cli.console import size, text

    read, made, arranged = imported.read, imported.snapshot, imported.arranged
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
    screen.print(text(f"{_KINDS[read.kind]}  {read.path}", "dim"), soft_wrap=True)
    for note in notes:
        screen.print(text(note, "yellow"), soft_wrap=True)
    leaves = count(len(made.leaves), "leaf", "leaves")
    screen.print(text(f"{made.url}  {leaves}, {size(made.nbytes)}", "green"), soft_wrap=True)
