"""``limpet.export``: write a version for other libraries.

1. Open the snapshot.
2. Plan the files. Everything that cannot be exported is refused now.
3. Write the files. Each one records where it is from, and its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from limpet.errors import LimpetError
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

    ``snapshot``: the URL of the version. ``files``: the URLs of the files, with their bytes.
    ``tensors`` and ``nbytes``: the number of tensors and the bytes of their elements. ``left_out``:
    the number of plain values that the format cannot represent.
    """

    snapshot: str
    files: tuple[tuple[str, int], ...]
    tensors: int
    nbytes: int
    left_out: int


@dataclass(frozen=True, slots=True)
class PreparedExport:
    """An export that can be written. ``warnings``: what the user should know about the result."""

    snapshot: SnapshotReader
    plan: ExportPlan
    location: Location
    warnings: tuple[str, ...]

    def write(self, advance: Advance = no_op) -> ExportResult:
        """Write the files: see ``write_export``. ``plan.nbytes`` bytes are advanced in total."""
        plan, url = self.plan, self.location.url.rstrip("/")
        write_export(self.snapshot, plan, self.location, advance)
        return ExportResult(
            snapshot=self.snapshot.url,
            files=tuple((f"{url}/{file.name}", file.length) for file in plan.files),
            tensors=plan.tensor_count,
            nbytes=plan.nbytes,
            left_out=plan.left_out,
        )


def export(
    snapshot: Url | Snapshot,
    path: str | os.PathLike[str],
    to: Literal["hf", "safetensors", "torch", "accelerate", "transformers", "lightning"] = "hf",
    *,
    root: str | None = None,
    keys: str | Sequence[str] = (),
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

    Every byte is checked. No file is overwritten, and if this function raises, none of its files
    remains. Raises ``NotFound``, ``AlreadyExists``, ``FormatError`` for damage, ``PlanError`` for
    what cannot be exported, ``StoreError``, and ``LimpetError`` for other arguments.
    """
    opened = reader_of(snapshot) if isinstance(snapshot, Snapshot) else open_reader(snapshot)
    prepared = prepare_export(
        opened,
        path,
        to,
        root=root,
        keys=[keys] if isinstance(keys, str) else keys,
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
    if to in TRAINING_KINDS and keys:
        raise LimpetError(
            f"A checkpoint for {to} contains the whole model and the optimizers",
            expected="no keys (keys=, --keys)",
            found=f"keys={list(keys)}",
            todo="Export weights with to='hf', 'safetensors', or 'torch'",
        )
    location, name = locate_export(os.fspath(path), to)
    plan = plan_export(
        snapshot,
        kind=to,
        root=root,
        keys=keys,
        max_shard_size=max_shard_size,
        file_name=name,
        record=_make_record(snapshot),
    )
    warnings: tuple[str, ...] = ()
    if plan.not_exported:
        omitted = format_list(plan.not_exported, _MAX_LISTED)
        warnings = (f"Not in the checkpoint for {to}: {omitted}",)
    refuse_existing(location, plan)
    return PreparedExport(snapshot, plan, location, warnings)


def _make_record(snapshot: SnapshotReader) -> dict[str, Any]:
    """Return what the exported files say about their origin. It has no host and no full path."""
    folder = snapshot.location.folder
    is_version = parse_version(folder) is not None
    metrics = select_numbers(snapshot.metadata.get("metrics"))
    if is_version:
        metrics = Run(snapshot.location.store).metrics(snapshot.version)
    return {
        "writer": f"limpet {__version__}",
        "run": _last_name(snapshot.location.store.url) if is_version else None,
        "version": folder.rpartition("/")[2] or _last_name(snapshot.url),
        "step": snapshot.step,
        "manifest": snapshot.digest,
        "metrics": metrics,
    }


def _last_name(url: str) -> str | None:
    """Return the last level of a URL's path, or None if the URL has only a host."""
    _, separator, path = url.rstrip("/").rpartition("://")
    above, _, name = path.rpartition("/")
    return name if above or not separator else None
