"""``limpet reshard SNAPSHOT DEST --shards N``: write a state in other shards, check all digests."""

from __future__ import annotations

from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import click

from limpet.cli.console import format_speed, print_line, progress_bar
from limpet.cli.output import json_option, print_result
from limpet.cli.resolve import check_version_name, resolve_snapshot
from limpet.convert.reshard import SPLITS, reshard
from limpet.format.names import Version
from limpet.snapshot.location import Location, locate, versions_in
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_count, format_size
from limpet.types import DTYPES


@click.command("reshard")
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
    with progress_bar("resharding", nbytes, quiet=as_json) as advance:
        new = reshard(old, location, shards, split, advance)
    build_document = partial(_build_document, split)
    print_result(as_json, build_document, render, old, new, perf_counter() - began)


def _resolve_destination(snapshot: SnapshotReader, destination: str) -> Location:
    """Return the new snapshot's location; ``AlreadyExists`` if another version has its name."""
    step, branch = snapshot.manifest.step, snapshot.manifest.branch
    location = locate(destination)
    if step is not None and versions_in(location):
        return Location(location.store, location.key(str(Version(step, branch))))
    check_version_name(snapshot, location)
    return location


def _build_document(
    split: str, old: SnapshotReader, new: SnapshotReader, seconds: float
) -> dict[str, Any]:
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


def render(old: SnapshotReader, new: SnapshotReader, seconds: float) -> None:
    """Print the location, the shards, and the size of the new snapshot."""
    print_line(f"resharded      {new.url}")
    before = format_count(len(old.manifest.shards), "shard")
    checked = f"{format_size(new.nbytes)}, all checked{format_speed(new.nbytes, seconds)}"
    print_line(f"{before} before, {len(new.manifest.shards):,} now, {checked}", "green")
