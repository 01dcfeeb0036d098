"""``limpet.export``, which merges the segments of tables. Only tables need torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from limpet.convert.export import MAX_SHARD_SIZE, ExportResult, PreparedExport, prepare_export
from limpet.loading.snapshot import Snapshot
from limpet.run.address import open_reader
from limpet.snapshot.location import Url
from limpet.snapshot.reader import SnapshotReader


def export(
    snapshot: Url | Snapshot,
    path: str | os.PathLike[str],
    to: Literal["hf", "safetensors", "torch"] = "hf",
    *,
    root: str | None = None,
    keys: str | Sequence[str] = (),
    max_shard_size: float = MAX_SHARD_SIZE,
) -> ExportResult:
    """Write the tensors of a snapshot into the folder ``path``, in a format of another library.

    ``snapshot``: a ``Snapshot``, or an address as for ``limpet.open``, such as ``"runs/a@best"``.
    ``to``: ``"hf"`` writes the files of Hugging Face, of at most ``max_shard_size`` bytes of
    tensors each; ``"safetensors"`` one file; ``"torch"`` one file for ``torch.load``, which needs
    memory for all that it contains. ``path`` may be the name of the one file, and a URL.

    ``root`` exports what is below that key, and removes it from the names (default: ``"model"`` if
    there is one, everything for ``"torch"`` or if ``keys`` are given; ``"/"``: everything).
    ``keys``: only leaves that match, as for ``limpet.load``. The state of an ``AveragedModel``
    gets the names of the model's own parameters. An embedding table becomes ``KEY/ids``, ascending,
    and ``KEY/values``, but for ``"torch"``.

    Every byte is checked. A small file beside the export, written last, has the lengths and digests
    of the others: ``limpet verify`` and ``limpet import`` check them. No file is overwritten: one
    with the same bytes, of an earlier call, counts as written, and any other one raises
    ``AlreadyExists``. If this function raises, none of its files remains. It also raises
    ``NotFound``, ``FormatError`` for damage, ``PlanError`` for what cannot be exported,
    ``StoreError``, and ``LimpetError`` for other arguments.
    """
    opened, keys = open_reader(snapshot), [keys] if isinstance(keys, str) else keys
    return prepare(opened, path, to, root=root, keys=keys, max_shard_size=max_shard_size).write()


def prepare(
    snapshot: SnapshotReader, path: str | os.PathLike[str], to: str, **options: Any
) -> PreparedExport:
    """Plan an export: see ``prepare_export``."""
    merged = {}
    if snapshot.read_metadata("tables") and to != "torch":
        from limpet.tables.view import merged_tables  # imports torch

        merged = merged_tables(snapshot)
    return prepare_export(snapshot, path, to, merged=merged, **options)
