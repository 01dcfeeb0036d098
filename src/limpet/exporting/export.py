"""``limpet.export``: write a version, or the average of several, for other libraries.

1. Open the snapshot, and the versions to average with it.
2. Plan the files. Everything that cannot be exported is refused now.
3. Write the files. Each one records where it is from, and its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from limpet.errors import LimpetError
from limpet.exporting.average import (
    AveragedLeaves,
    check_versions,
    find_statistics,
    find_versions,
)
from limpet.exporting.companions import find_companions
from limpet.exporting.plan import (
    MAX_SHARD_SIZE,
    SUFFIXES,
    ExportPlan,
    locate_export,
    plan_export,
)
from limpet.exporting.training_files import TRAINING_KINDS
from limpet.exporting.write import refuse_existing, write_export
from limpet.format.names import parse_version
from limpet.format.validate import LeafSpecs
from limpet.interop.mmap_files import Advance
from limpet.run.address import open_reader
from limpet.run.evaluations.metrics import select_numbers
from limpet.run.run import Run
from limpet.snapshot.location import Location, Url
from limpet.snapshot.reader import SnapshotReader
from limpet.snapshot.snapshot import Snapshot, reader_of
from limpet.text import format_list, warn_user
from limpet.threads import no_op
from limpet.version import __version__

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What was exported.

    ``snapshot``: the URL of the version; ``averaged``: the names of the versions whose average it
    is, oldest first, or none. ``files``: the URLs of the files, with their bytes. ``tensors`` and
    ``nbytes``: the number of tensors and the bytes of their elements. ``left_out``: the number of
    plain values that the format cannot represent.
    """

    snapshot: str
    averaged: tuple[str, ...]
    files: tuple[tuple[str, int], ...]
    tensors: int
    nbytes: int
    left_out: int


@dataclass(frozen=True, slots=True)
class PreparedExport:
    """An export that can be written. ``versions``: the versions to average, the newest one last.

    ``warnings``: what the user should know about the result.
    """

    versions: tuple[SnapshotReader, ...]
    plan: ExportPlan
    location: Location
    warnings: tuple[str, ...]

    def write(self, advance: Advance = no_op) -> ExportResult:
        """Write the files: see ``write_export``. ``plan.nbytes`` bytes are advanced in total."""
        snapshot, plan = self.versions[-1], self.plan
        if len(self.versions) == 1:
            write_export(snapshot, plan, self.location, advance)
        else:
            with AveragedLeaves(self.versions) as average:
                write_export(snapshot, plan, self.location, advance, average.stream)
        sizes = [(c.name, c.file.length) for c in plan.companions]
        sizes += [(file.name, file.length) for file in plan.files]
        url = self.location.url.rstrip("/")
        return ExportResult(
            snapshot.url,
            tuple(v.location.folder for v in self.versions) if self.versions[1:] else (),
            tuple((f"{url}/{name}", nbytes) for name, nbytes in sizes),
            plan.tensor_count,
            plan.nbytes,
            plan.left_out,
        )


def export(
    snapshot: Url | Snapshot,
    path: str | os.PathLike[str],
    to: Literal["hf", "safetensors", "torch", "accelerate", "transformers", "lightning"] = "hf",
    *,
    root: str | None = None,
    keys: str | Sequence[str] = (),
    average: int = 1,
    like: str | os.PathLike[str] | None = None,
    max_shard_size: float = MAX_SHARD_SIZE,
) -> ExportResult:
    """Write the tensors of a snapshot into the folder ``path``, in a format of another library.

    ``snapshot``: a ``Snapshot``, or an address as for ``limpet.open``, such as ``"runs/a@best"``.
    ``to``: ``"hf"`` writes the files of Hugging Face, of at most ``max_shard_size`` bytes of
    tensors each; ``"safetensors"`` one file; ``"torch"`` one file for ``torch.load``.
    ``"accelerate"``, ``"transformers"``, and ``"lightning"`` write a checkpoint from which that
    library resumes; a warning lists what it lacks. ``path`` may be the name of the one file, and a
    URL.

    ``root`` exports what is below that key, and removes it from the names (default: ``"model"`` if
    there is one, everything for ``"torch"`` or if ``keys`` are given; ``"/"``: everything).
    ``keys``: only leaves that match, as for ``limpet.load``. The state of an ``AveragedModel``
    gets the names of the model's own parameters.

    ``average=5`` exports the average of the last five versions up to this one, computed in float64;
    integers are those of the newest. ``like``: the folder of a Hugging Face model whose
    configuration and tokenizer are copied, with ``to="hf"``.

    Every byte is checked. No file is overwritten, and if this function raises, none of its files
    remains. Raises ``NotFound``, ``AlreadyExists``, ``FormatError`` for damage, ``PlanError`` for
    what cannot be exported or averaged, ``StoreError``, and ``LimpetError`` for other arguments.
    """
    opened = reader_of(snapshot) if isinstance(snapshot, Snapshot) else open_reader(snapshot)
    prepared = prepare_export(
        opened,
        path,
        to,
        root=root,
        keys=[keys] if isinstance(keys, str) else keys,
        average=average,
        like=like,
        max_shard_size=max_shard_size,
    )
    for message in prepared.warnings:
        warn_user(message, UserWarning)
    return prepared.write()


def prepare_export(
    snapshot: SnapshotReader,
    path: str | os.PathLike[str],
    to: str,
    *,
    root: str | None = None,
    keys: Sequence[str] = (),
    average: int = 1,
    like: str | os.PathLike[str] | None = None,
    max_shard_size: float = MAX_SHARD_SIZE,
) -> PreparedExport:
    """Check and plan an export, as ``export`` does, before anything is written."""
    if to not in SUFFIXES:
        raise LimpetError(
            "Invalid value for to=", expected=" or ".join(map(repr, SUFFIXES)), found=repr(to)[:80]
        )
    is_number = isinstance(max_shard_size, int | float) and not isinstance(max_shard_size, bool)
    if not is_number or not max_shard_size >= 1:
        raise LimpetError(
            "Invalid value for max_shard_size=",
            expected="a number of bytes, 1 or more, such as 5e9",
            found=repr(max_shard_size)[:80],
        )
    if like is not None and to not in ("hf", "transformers"):
        raise LimpetError(
            "Configuration and tokenizer are copied only into a folder of Hugging Face",
            expected="--to hf or transformers together with --like (like=)",
            found=f"--to {to}",
        )
    if to in TRAINING_KINDS and (keys or average > 1):
        raise LimpetError(
            f"A checkpoint for {to} contains the whole model and the optimizers of one version",
            expected="no keys (keys=, --keys) and no average (average=, --average)",
            found=f"keys={list(keys)}, average={average}",
            todo="Export weights with to='hf', 'safetensors', or 'torch'",
        )
    location, name = locate_export(os.fspath(path), to)
    companions = [] if like is None else find_companions(like, location)
    versions = find_versions(snapshot, average)
    plan_one = partial(
        plan_export,
        kind=to,
        root=root,
        keys=keys,
        max_shard_size=max_shard_size,
        file_name=name,
        companions=companions,
    )
    plan = plan_one(snapshot, record=_make_record(versions))
    warnings: tuple[str, ...] = ()
    if versions[1:]:
        plans = [*map(plan_one, versions[:-1]), plan]
        leaves = [_leaves(v, p) for v, p in zip(versions, plans, strict=True)]
        check_versions(versions, leaves)
        warnings = _statistics_warning(find_statistics(leaves[-1]))
    if plan.not_exported:
        omitted = format_list(plan.not_exported, _MAX_LISTED)
        warnings = (f"Not in the checkpoint for {to}: {omitted}",)
    refuse_existing(location, plan)
    return PreparedExport(tuple(versions), plan, location, warnings)


def _leaves(snapshot: SnapshotReader, plan: ExportPlan) -> LeafSpecs:
    return {key: snapshot.leaves[key] for file in plan.files for key in file.keys}


def _statistics_warning(keys: Sequence[str]) -> tuple[str, ...]:
    if not keys:
        return ()
    return (
        "The average contains statistics of BatchNorm, which do not fit averaged weights:"
        f" {format_list(keys, _MAX_LISTED)}. Before you use the model, compute them again with"
        " torch.optim.swa_utils.update_bn(loader, model)",
    )


def _make_record(versions: Sequence[SnapshotReader]) -> dict[str, Any]:
    """Return what the exported files say about their origin. It has no host and no full path."""
    snapshot = versions[-1]
    folder = snapshot.location.folder
    is_version = parse_version(folder) is not None
    metrics = select_numbers(snapshot.metadata.get("metrics"))
    if is_version:
        metrics = Run(snapshot.location.store).metrics(snapshot.version)
    record: dict[str, Any] = {
        "writer": f"limpet {__version__}",
        "run": _last_name(snapshot.location.store.url) if is_version else None,
        "version": folder.rpartition("/")[2] or _last_name(snapshot.url),
        "step": snapshot.step,
        "manifest": snapshot.digest,
        "metrics": metrics,
    }
    if versions[1:]:
        record["averaged"] = [
            {"version": v.location.folder, "manifest": v.digest} for v in versions
        ]
    return record


def _last_name(url: str) -> str | None:
    """Return the last level of a URL's path, or None if the URL has only a host."""
    _, separator, path = url.rstrip("/").rpartition("://")
    above, _, name = path.rpartition("/")
    return name if above or not separator else None
