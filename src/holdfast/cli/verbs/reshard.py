"""``holdfast reshard SNAPSHOT DEST --shards N``: write the same state in another number of shards,
and check every digest."""

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


@click.command("reshard", short_help="Write a snapshot again in N shards.")
@click.argument("snapshot")
@click.argument("dest")
@click.option(
    "--shards",
    type=click.IntRange(1, 99_999),
    required=True,
    metavar="N",
    help="Number of files. 1: one plain safetensors file with whole tensors.",
)
@click.option(
    "--split",
    type=click.Choice(SPLITS),
    default="even",
    show_default=True,
    help="even: tensors with at least N rows are split along dimension 0, as FSDP2 does. none: no"
    " tensor is split.",
)
@json_option
def command(snapshot: str, dest: str, shards: int, split: str, as_json: bool) -> None:
    """Write SNAPSHOT again at DEST with N shards, whatever its current number of shards.

    DEST is the location of the new snapshot, or a run, where the snapshot becomes the version of
    the same step and branch. The new snapshot refers to no other version. Every byte is checked.
    SNAPSHOT is not modified, and nothing at DEST is overwritten.
    """
    old = resolve_snapshot(snapshot)
    location = _resolve_destination(old, dest)
    began = perf_counter()
    nbytes = sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in old.leaves.values())
    with (
        remove_folder_if_empty(location.store),
        progress_bar("resharding", nbytes, quiet=as_json) as advance,
    ):
        new = reshard(old, location, shards, split, advance)
    seconds = perf_counter() - began
    if as_json:
        print_json(_build_document(old, new, split, seconds))
    else:
        from holdfast.cli.console import make_console

        render(old, new, seconds, make_console())


def _resolve_destination(snapshot: Snapshot, destination: str) -> Location:
    """Return the location of the new snapshot.

    Raises ``AlreadyExists`` if the destination has the name of another version.
    """
    step, branch = snapshot.manifest.step, snapshot.manifest.branch
    location = locate(destination)
    if step is not None and versions_in(location):
        return Location(location.store, location.key(str(Version(step, branch))))
    version = parse_version(location.folder.rpartition("/")[2])
    if version is not None and (version.step, version.branch) != (step, branch):
        raise AlreadyExists(
            f"{snapshot.url} cannot become {version}",
            expected="the snapshot's own step and branch, or a name that is not a version",
            found=f"step {step}, branch {branch}",
        )
    return location


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
    """Print the location, the shards, and the size of the new snapshot."""
    from holdfast.cli.console import format_size, styled_text

    before, after = len(old.manifest.shards), len(new.manifest.shards)
    speed = f", {format_size(int(new.nbytes / seconds))}/s" if seconds > 1 else ""
    console.print(styled_text(f"resharded      {new.url}"), soft_wrap=True)
    shards = f"{format_count(before, 'shard')} before, {after:,} now"
    summary = f"{shards}, {format_size(new.nbytes)}, all checked{speed}"
    console.print(styled_text(summary, "green"), soft_wrap=True)
