"""Addresses of versions, such as ``RUN@120``, and the public functions that accept them.

Whether a metric is minimized is recorded, and never guessed from its name: a wrong guess would
export the worst version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from limpet.deadline import Deadline
from limpet.errors import NotFound
from limpet.format.names import Version, split_address
from limpet.loading.differences import Leniency
from limpet.loading.snapshot import Snapshot, load_and_show, open_again
from limpet.machine import path_text
from limpet.ranks.group import (
    Group,
    GroupSpec,
    broadcast_from_first,
    current_group,
    failing_together,
)
from limpet.run.catalog import read_objectives
from limpet.run.lineage import find_best, find_latest
from limpet.run.records import read_recorded_objectives
from limpet.run.run import Run
from limpet.snapshot.location import Url, locate
from limpet.snapshot.reader import SnapshotReader, open_location, open_snapshot
from limpet.storage.open import open_store
from limpet.storage.store import within
from limpet.text import format_list

ADDRESS_FORMS = (
    "The address of a version is RUN/version_120, RUN@120 (on branch 1: RUN@120.1), RUN@latest,"
    " RUN@best, or RUN@best:METRIC"
)

BOTH_MODES = "both"
"""The recorded mode of a metric that one policy minimizes and another one maximizes."""

_MAX_LISTED = 20
_BUCKET = re.compile(r"(s3|az|gs)://[^/@]+")


def is_bucket(url: str) -> bool:
    """Return True if ``URL@120`` must be an address: no name of a bucket contains an ``@``."""
    return _BUCKET.fullmatch(url) is not None


def resolve_address(text: str, deadline: Deadline | None = None) -> tuple[str, str | None]:
    """Split an address into the URL of the run and the text after ``@``; None: not an address. If
    ``RUN@best:NAME@120`` may be split in two places, the longer run counts if it exists."""
    url, version = split_address(text)
    longer, step = split_address(text, by_metric=False)
    is_ambiguous = step is not None and len(longer) > len(url) and not is_bucket(url)
    if is_ambiguous and _open_run(longer, deadline).listing().has_version():
        return longer, step
    return url, version


def _open_run(url: str, deadline: Deadline | None) -> Run:
    return Run(url if deadline is None else within(open_store(url), deadline))


def open_version(address: Url | Snapshot) -> Snapshot:
    """Open the snapshot at an address. Only its manifest is read.

    An address is ``RUN@120`` (step 120 on the current lineage), ``RUN@120.1`` (step 120 of branch
    1), ``RUN@latest`` (the newest intact version), ``RUN@best`` or ``RUN@best:METRIC`` (the version
    with the best value of the metric, by the mode that the run records), the URL of a snapshot, a
    ``Store`` with the snapshot at its root, or a ``Snapshot``, which is opened again. If a snapshot
    exists at the literal address, that snapshot is opened.

    Raises ``NotFound``, ``NoSnapshot``, or ``FormatError``, also if another snapshot has replaced
    the given one.
    """
    return Snapshot(open_reader(address))


def open_reader(address: Url | Snapshot, deadline: Deadline | None = None) -> SnapshotReader:
    """Do the same as ``open_version``, by a ``deadline``, for the packages of Limpet."""
    if isinstance(address, Snapshot):
        return open_again(address)
    if not isinstance(address, str | os.PathLike):
        return open_snapshot(address)
    text = path_text("A URL", address)
    url, version = split_address(text)
    if version is None or not is_bucket(url):
        try:
            return open_location(locate(address).limit("load", None, deadline))
        except NotFound as e:
            if version is None:
                if "versions" in e.fields:  # a run: the error names one of its versions
                    raise
                raise e.with_advice(ADDRESS_FORMS) from e
    url, version = resolve_address(text, deadline)
    run = _open_run(url, deadline)
    if version is None or not version[0].isdecimal():
        newest = find_latest(run.catalog)
        if newest is not None:
            return newest if version == "latest" else _find_best(run, newest, version or "")
    elif run.listing().has_version():
        step, _, branch = version.partition(".")
        found = Version(int(step), int(branch)) if branch else run.find(int(step))
        return run.catalog.open(found)
    raise NotFound(
        f"{run.url} is not a run with versions", todo="Check the path", key=text, store=run.url
    )


# -- the best version ----------------------------------------------------------------------------


def merge_objectives(objectives: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return what a version records of the metrics of policies: see ``catalog.read_objectives``."""
    merged: dict[str, str] = {}
    for metric, mode in sorted(objectives):
        merged[metric] = mode if merged.get(metric, mode) == mode else BOTH_MODES
    return merged


def _find_best(run: Run, newest: SnapshotReader, version: str) -> SnapshotReader:
    """Return the version that ``best`` or ``best:METRIC`` means, by the modes that the newest
    version and the evaluations record. Raises ``NotFound``, which says what to write instead."""
    recorded = ((o.metric, o.mode) for o in read_recorded_objectives(run.store))
    objectives = merge_objectives([*read_objectives(newest).items(), *recorded])
    _, _, metric = version.partition(":")
    if not metric and len(objectives) == 1:
        metric = next(iter(objectives))
    mode = objectives.get(metric)
    if mode in ("min", "max"):
        best = find_best(run.catalog, metric, "min" if mode == "min" else "max")
        if best is not None:
            return best
    available = {name for record in run.records() for name in record.metrics}
    listed = [f"{name} ({how})" for name, how in sorted(objectives.items())]
    inexact = ". An inexact score of a training counts only with counts=True"
    raise NotFound(
        f"{run.url}@{version} does not name a version",
        expected="one metric with a recorded mode, and a version with a value other than NaN",
        found=f"the metrics {format_list(sorted(available), _MAX_LISTED) or '(none)'},"
        f" and the modes {format_list(listed, _MAX_LISTED) or '(none)'}",
        todo="Write RUN@best:METRIC if its mode is recorded, or name the mode:"
        f" limpet best {run.url} --metric {metric or 'METRIC'} --mode min|max, in Python"
        f" limpet.Run({run.url!r}).best(METRIC, mode=...). KeepBest, StopWhen, and `limpet evaluate"
        f" RUN --metric METRIC --mode min|max` record it{'' if metric in available else inexact}",
        key=run.url,
        store=run.url,
    )


# -- all ranks -----------------------------------------------------------------------------------


def open_on_all_ranks(
    address: Url | Snapshot, group: Group, timeout: float | None = None
) -> SnapshotReader:
    """Open what rank 0 finds at an address on all ranks, because a run may change meanwhile. Raises
    on all ranks as ``open_version``, and ``Unavailable`` after ``timeout`` seconds."""
    if isinstance(address, Snapshot):
        return open_again(address, group, timeout)
    is_text = isinstance(address, str | os.PathLike)
    where = path_text("A URL", address) if is_text else open_store(address).url
    purpose = f"the load of {where}: {timeout} s"
    deadline = None if timeout is None else Deadline.after(timeout, purpose)

    opened: list[SnapshotReader] = []

    def choose() -> tuple[str, str]:
        opened.append(open_reader(address, deadline))
        return opened[0].url, opened[0].digest

    opening = f"the opening of {where}"
    found, digest = broadcast_from_first(group, opening, choose, tuple[str, str], deadline=deadline)
    # A URL does not contain the options of a store, so each rank uses the store that it was given.
    location = locate(found if is_text else address).limit("load", None, deadline)
    if opened:  # on rank 0, which has read the manifest
        return SnapshotReader(location, opened[0].manifest, digest, opened[0].leaves)
    return SnapshotReader(location, None, digest)


def load(  # noqa: PLR0913  (the public face)
    url: Url | Snapshot,
    into: Mapping[str, Any] | None = None,
    *,
    keys: str | Sequence[str] | None = None,
    device: Any = None,
    missing: Literal["error", "keep"] | list[str] = "error",
    unexpected: Literal["error", "ignore"] | list[str] = "error",
    cast: bool = False,
    rename: Mapping[str, str] | None = None,
    mismatched: Literal["error", "keep"] | list[str] = "error",
    group: GroupSpec = None,
    timeout: float | None = None,
) -> Any:
    """Load the snapshot at ``url`` and check every byte that is read.

    ``url`` may be an address, such as ``"runs/a@best"``, or a ``Snapshot``, which has this method,
    too: see ``limpet.open``. Without ``into``, return a new dict of tensors on ``device`` (the CPU
    if None), arrays, and plain values. ``device="saved"`` stands for the devices from which the
    tensors were saved, and ``device={"cuda:0": "cpu"}`` maps some of these, as ``map_location`` of
    ``torch.load`` does. With ``into``, a mapping like the one that was saved, fill it in place and
    return a ``LoadReport``; a terminal shows what was kept, ignored, or converted. ``keys``: load
    only leaves whose key matches. ``"model/fc"`` selects that leaf, all leaves below it, and those
    that continue it with a dot, as ``model/fc.weight``; ``*`` matches within a level, ``**`` across
    levels.

    A checkpoint of torch.save, Lightning, Accelerate, Transformers, DCP, or safetensors is imported
    first: see ``limpet.import_checkpoint``.

    The load is strict by default. ``missing="keep"`` keeps live values that the snapshot lacks,
    ``unexpected="ignore"`` ignores leaves that the live state lacks, and ``cast=True`` converts
    dtypes. ``mismatched="keep"`` keeps live values that have another shape; a parameter also keeps
    its optimizer slots, or has none. A list of patterns, as ``keys``, in place of these words
    tolerates only the keys that match: ``missing=["ema/**"]``. ``rename={"model/old":
    "model/new"}`` renames members of the snapshot, with everything below them, before they are
    matched with the live state. A load fails after ``timeout`` seconds.

    Under torch.distributed, all ranks load ``into`` their live states together, whatever layout the
    snapshot was saved with, or all raise. If several ranks of a host need the same data of a large
    snapshot, one reads it and passes it on through shared memory (64 MiB per host). A load without
    ``into`` or with ``group="alone"`` concerns this process only. Raises ``NotFound``,
    ``FormatError``, ``StoreError``, or a ``PlanError`` that lists all differences, after which
    ``into`` is unchanged.
    """
    leniency = Leniency(missing, unexpected, cast, rename or {}, mismatched)
    ranks = Group() if into is None else current_group(group)
    is_text = isinstance(url, str | os.PathLike)
    is_address = is_text and split_address(path_text("A URL", url))[1] is not None
    if is_address or isinstance(url, Snapshot):
        snapshot = open_on_all_ranks(url, ranks, timeout)
    else:
        location = locate(url).limit("load", timeout)
        with failing_together(ranks, f"the load of {location.url}", location.deadline):
            snapshot = open_location(location)
    return load_and_show(snapshot, into, keys, device, leniency, ranks)
