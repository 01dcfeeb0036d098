"""``holdfast reshard SNAPSHOT DEST --shards N``: the same state in other shards, every digest
checked."""

from __future__ import annotations

from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.console import progress_bar
from holdfast.cli.output import json_option, print_json
from holdfast.cli.resolve import format_count, remove_folder_if_empty, resolve_snapshot
from holdfast.engine.snapshot.location import Location, locate, versions_in
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.engine.transform.reshard import SPLITS, reshard
from holdfast.errors import AlreadyExists
from holdfast.format.names import Version, parse_version
from holdfast.types import DTYPES

if TYPE_CHECKING:
    from rich.console import Console


@click.command("reshard", short_help="Write a snapshot anew with other shards, checked.")
@click.argument("snapshot")
@click.argument("dest")
@click.option(
    "--shards",
    type=click.IntRange(1, 99_999),
    required=True,
    metavar="N",
    help="How many files. 1: one plain safetensors file with whole tensors.",
)
@click.option(
    "--split",
    type=click.Choice(SPLITS),
    default="even",
    show_default=True,
    help="even: tensors with at least N rows are cut along dimension 0, as FSDP2 does. none: no"
    " tensor is cut.",
)
@json_option
def command(snapshot: str, dest: str, shards: int, split: str, as_json: bool) -> None:
    """Write SNAPSHOT anew at DEST with N shards, however many it has now.

    DEST is the place of the new snapshot, or a run: then it becomes that version of it. It refers
    to no other version. Every byte is checked on the way; SNAPSHOT is left as it is, and nothing
    that is there is overwritten.
    """
    old = resolve_snapshot(snapshot)
    place = _resolve_destination(old, dest)
    began = perf_counter()
    nbytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in old.leaves.values())
    with (
        remove_folder_if_empty(place.store),
        progress_bar("resharding", nbytes, quiet=as_json) as tell,
    ):
        new = reshard(old, place, shards, split, tell)
    seconds = perf_counter() - began
    if as_json:
        print_json(_build_document(old, new, split, seconds))
    else:
        from holdfast.cli.console import make_console

        render(old, new, seconds, make_console())


def _resolve_destination(snapshot: Snapshot, destination: str) -> Location:
    """Where the new snapshot will be. Raises ``AlreadyExists`` for the name of another version."""
    step, branch = snapshot.manifest.step, snapshot.manifest.branch
    place = locate(destination)
    if step is not None and versions_in(place):
        return Location(place.store, place.key(str(Version(step, branch))))
    version = parse_version(place.folder.rpartition("/")[2])
    if version is not None and (version.step, version.branch) != (step, branch):
        raise AlreadyExists(
            f"{snapshot.url} cannot become {version}",
            expected="its own step and branch in the name, or a name of another kind",
            found=f"step {step}, branch {branch}",
        )
    return place


def _build_document(old: Snapshot, new: Snapshot, split: str, seconds: float) -> dict[str, Any]:
    return {
        "from": old.url,
        "to": new.url,
        "step": new.step,
        "split": split,
        "shards": len(new.manifest.shards),
        "shards_before": len(old.manifest.shards),
        "leaves": len(new.leaves),
        "bytes": new.nbytes,
        "seconds": round(seconds, 6),
    }


def render(old: Snapshot, new: Snapshot, seconds: float, console: Console) -> None:
    """Print where the new snapshot is, and what it is made of."""
    from holdfast.cli.console import format_size, styled_text

    before, after = len(old.manifest.shards), len(new.manifest.shards)
    speed = f", {format_size(int(new.nbytes / seconds))}/s" if seconds > 1 else ""
    console.print(styled_text(f"resharded      {new.url}"), soft_wrap=True)
    shards = f"{format_count(before, 'shard')} before, {after:,} now"
    done = f"{shards}, {format_size(new.nbytes)}, all checked{speed}"
    console.print(styled_text(done, "green"), soft_wrap=True)
