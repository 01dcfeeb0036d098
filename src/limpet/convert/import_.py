"""Import: read a foreign checkpoint and save it as a snapshot.

A checkpoint is recognized by its content. No code in it is run. Its tensors are mapped into memory,
so memory use does not depend on their size. The usual save computes the digests and commits.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import msgspec

from limpet import events
from limpet.arguments import require
from limpet.buffers import Buffer, shared_pool
from limpet.convert import arrange, read_dcp, read_safetensors
from limpet.convert.copy import find_same
from limpet.convert.export_record import require_intact
from limpet.convert.mmap_files import ForeignFile, MappedFile
from limpet.convert.read_dcp import load_dcp
from limpet.convert.read_safetensors import load_huggingface_folder, load_safetensors
from limpet.convert.read_torch import load_torch_file
from limpet.convert.stored_files import ForeignFolder, StoredFile, is_safetensors, locate_foreign
from limpet.errors import FormatError, LimpetError, NotFound, Unsupported
from limpet.format.names import MANIFEST, is_shard_name, parse_version, split_address
from limpet.format.strict_json import unique_members
from limpet.lazy_torch import import_torch
from limpet.loading.snapshot import Snapshot
from limpet.machine import full_path, path_text
from limpet.saving.commit import VersionMetadata, raise_if_exists
from limpet.saving.image import copy_bytes
from limpet.saving.save import begin_save, finish_save
from limpet.snapshot.location import Location, Url, locate
from limpet.snapshot.reader import SnapshotReader, open_location
from limpet.state.flatten import FlatState, flatten
from limpet.storage.store import Store
from limpet.threads import Workers, no_op
from limpet.types import BLOCK_SIZE, Advance

SUPPORTED_FORMATS = (
    "a file of torch.save, Lightning, or safetensors, a folder of Hugging Face"
    f" ({read_safetensors.SAFE_WEIGHTS_NAME}, {read_safetensors.WEIGHTS_NAME}, or their"
    f" {read_safetensors.INDEX_SUFFIX}), or a"
    f" folder of torch.distributed.checkpoint ({read_dcp.METADATA_FILE})"
)
_WEIGHT_SUFFIXES = (".bin", ".ckpt", ".distcp", ".pkl", ".pt", ".pth", ".safetensors")
_LIGHTNING_VERSION_KEY = "pytorch-lightning_version"
_TRAINER_STATE_FILE = "trainer_state.json"
_MAX_TRAINER_STATE = 1 << 28
_MEMBER_FILE = re.compile(
    r"(?:pytorch_)?(?P<role>model|optimizer|scheduler|scaler)(?:_(?P<number>[0-9]{1,6}))?"
    r"\.(?:safetensors|bin|pt)"
)
"""The files of Accelerate (``optimizer.bin``, ``model_1.safetensors``) and of the Trainer of
Transformers (``optimizer.pt``)."""


@dataclass(frozen=True, slots=True, eq=False)
class ForeignCheckpoint:
    """A checkpoint that was read; ``value`` has mapped tensors if ``mapped``. ``left_out``: other
    files with weights in the folder; ``stored``: the files in a store that were opened."""

    path: str
    kind: str  # torch, lightning, safetensors, huggingface, transformers, accelerate, or dcp
    value: Any
    step: int | None = None
    mapped: bool = True
    left_out: tuple[str, ...] = ()
    stored: tuple[StoredFile, ...] = ()


def read_foreign_checkpoint(path: str | Location, advance: Advance = no_op) -> ForeignCheckpoint:
    """Read the checkpoint in the file or folder at a path, a URL, or a location.

    ``advance(nbytes)`` is called from several threads, up to ``size_of_foreign`` in total. Tensors
    of a safetensors file in a store are read later; other files are fetched (see ``stored_files``).
    An exported file is first compared with its record, which reads it twice.
    """
    import_torch("Importing a checkpoint needs PyTorch")
    with suppress(NotFound):  # reported below, with what is there instead
        require_intact(path)
    path, location = locate_foreign(path)
    if location is not None:
        checkpoint = _read_stored(location, advance)
    elif not os.path.lexists(path):
        raise _nothing_error(path, "Check the path")
    elif os.path.isdir(path):
        checkpoint = _read_folder(ForeignFolder(path, None), advance)
    else:
        _refuse_shard(path)
        checkpoint = _read_file(MappedFile(path), advance)
    names = (path if location else full_path(path)).split("/")[-1:-3:-1]
    steps = (checkpoint.step, *map(arrange.step_from_name, names))
    return replace(checkpoint, step=next((s for s in steps if s is not None), None))


def _read_stored(location: Location, advance: Advance) -> ForeignCheckpoint:
    """Read the checkpoint at a location in a store: an object, or a folder."""
    _refuse_shard(location.url)
    if location.folder:
        with suppress(NotFound):
            file = StoredFile(location)
            return replace(_read_file(file, advance), stored=(file,))
    folder = ForeignFolder(location.url, location)
    if not folder.names():
        raise _nothing_error(location.url, "Check the URL")
    checkpoint = _read_folder(folder, advance)
    return replace(checkpoint, stored=tuple(folder.opened))


def _nothing_error(path: str, todo: str) -> NotFound:
    if split_address(path)[1] is not None:
        todo = f"If it is a version of a run, use `limpet copy`. {todo}"
    return NotFound(f"There is nothing at {path}", todo=todo, key=path)


def _refuse_shard(path: str) -> None:
    if is_shard_name(os.path.basename(path)):
        raise Unsupported(
            f"{path} is a shard of a Limpet snapshot",
            todo="`limpet copy` copies whole snapshots",
        )


def _read_file(file: ForeignFile, advance: Advance) -> ForeignCheckpoint:
    path = file.path
    if is_safetensors(file):
        return ForeignCheckpoint(path, "safetensors", load_safetensors(file))
    loaded = load_torch_file(file, advance)
    if loaded is None:
        head = file.read(0, 16)
        found = f"a file that begins with {head!r}" if head else "an empty file"
        raise Unsupported(
            f"{path} is not a checkpoint that can be imported",
            expected=SUPPORTED_FORMATS,
            found=found,
        )
    value, mapped = loaded
    is_lightning = isinstance(value, dict) and _LIGHTNING_VERSION_KEY in value
    kind = "lightning" if is_lightning else "torch"
    return ForeignCheckpoint(path, kind, value, arrange.step_from_state(value), mapped)


def _read_folder(folder: ForeignFolder, advance: Advance) -> ForeignCheckpoint:
    path, names = folder.path, folder.names()
    weights = [n for n in names if n.endswith(_WEIGHT_SUFFIXES)]
    model = read_safetensors.find_model_file(set(names))
    if MANIFEST in names or any(map(parse_version, names)):
        raise Unsupported(
            f"{path} is already a Limpet snapshot or run",
            todo="`limpet copy` copies snapshots and runs",
        )
    if read_dcp.METADATA_FILE in names and model is not None:
        raise Unsupported(
            f"{path} may contain two checkpoints",
            expected="one checkpoint",
            found=f"{read_dcp.METADATA_FILE} of torch.distributed.checkpoint, and {model}",
            todo=f"Move one of them elsewhere, or import the file: {os.path.join(path, model)}",
        )
    if read_dcp.METADATA_FILE in names:
        value = load_dcp(folder, advance)
        other = tuple(n for n in weights if not n.endswith(".distcp"))
        return ForeignCheckpoint(path, "dcp", value, arrange.step_from_state(value), left_out=other)
    if model is None:
        raise Unsupported(
            f"{path} is not a checkpoint that can be imported",
            expected=SUPPORTED_FORMATS,
            found=f"{', '.join(names[:5])}{' ...' if names[5:] else ''}" or "an empty folder",
            todo=f"Import a file in it: {os.path.join(path, weights[0])}" if weights else None,
        )
    value, files, mapped = load_huggingface_folder(folder, model, advance)
    matches = {n: m for n in weights if n not in files and (m := _MEMBER_FILE.fullmatch(n))}
    kind = "huggingface"
    if any(match["role"] == "optimizer" for match in matches.values()):
        kind = "transformers" if _TRAINER_STATE_FILE in names else "accelerate"
        value = {arrange.MODEL_KEY: value}
        for name, match in matches.items():
            member = _read_file(folder.open(name), advance)
            value[arrange.numbered_name(match["role"], int(match["number"] or 0))] = member.value
            mapped = mapped and member.mapped
        files = [*files, *matches]
    other = tuple(n for n in weights if n not in files)
    return ForeignCheckpoint(path, kind, value, _read_trainer_step(folder), mapped, other)


def _read_trainer_step(folder: ForeignFolder) -> int | None:
    """Return the step that the Trainer of Transformers recorded next to the model, if any."""
    with suppress(OSError, LimpetError, ValueError, RecursionError):
        file = folder.open(_TRAINER_STATE_FILE)
        raw = file.read(0, _MAX_TRAINER_STATE)
        return arrange.step_from_state(json.loads(raw, object_pairs_hook=unique_members))
    return None


# -- saving --------------------------------------------------------------------------------------


def import_checkpoint(
    path: str | os.PathLike[str],
    url: Url,
    *,
    step: int | None = None,
    key: str | None = None,
    keep_names: bool = False,
) -> Snapshot:
    """Save a checkpoint of another library as the snapshot at ``url``. Return the snapshot.

    ``path``: a file of torch.save, Lightning, or safetensors, or a folder of Hugging Face,
    Transformers' Trainer, Accelerate, or torch.distributed.checkpoint; a path or URL. No code in it
    is run, and its tensors are not held in memory. Load ``url`` afterward, as any snapshot.
    ``docs/import-export.md`` says which names the members get.

    ``step``: of the snapshot; None: the one in the name of the folder, such as ``version_120``, or
    else the one that the checkpoint records. ``key``: store everything under this key of the state.
    ``keep_names=True`` keeps ``module.`` and other prefixes of wrappers in the names, and the names
    of the members.

    Only this process saves, also under torch.distributed. If an earlier import of the same bytes is
    at ``url``, it is returned. Raises ``AlreadyExists`` if another snapshot is; ``NotFound``;
    ``Unsupported`` for another format, for a file that would have to run code, and for values that
    no snapshot holds; ``FormatError`` for a damaged file; ``NoSpace``, ``StoreError``, ``OSError``;
    and ``LimpetError`` if PyTorch is not installed.
    """
    location = locate(url)
    require("path", isinstance(path, str | os.PathLike), "a path or a URL", path)
    checkpoint = read_foreign_checkpoint(path_text("path=", path))
    arranged = arrange.arrange_state(
        checkpoint.value, key, kind=checkpoint.kind, keep_names=keep_names
    )
    version = parse_version(location.folder.rpartition("/")[2])
    if step is None:
        step = checkpoint.step if version is None else version.step
    branch = 0 if version is None else version.branch
    flat = flatten(arranged.state)
    earlier = find_earlier(location, flat, checkpoint, step)
    return Snapshot(earlier or save_foreign_checkpoint(location, flat, checkpoint, step, branch))


def find_earlier(
    location: Location, flat: FlatState, checkpoint: ForeignCheckpoint, step: int | None
) -> SnapshotReader | None:
    """Return the snapshot at ``location`` if it is an import of this checkpoint, with the same
    bytes, or None if there is none. Raises ``AlreadyExists`` for any other one."""
    origin = _origin(checkpoint)

    def is_same(found: SnapshotReader) -> bool:
        if found.metadata.get("note") != {"imported_from": origin} or found.step != step:
            return False
        trees = {msgspec.json.encode(tree) for tree in (found.manifest.tree, flat.tree)}
        with suppress(FormatError):
            return len(trees) == 1 and _has_bytes(found, flat) and found.verify().ok
        return False

    found = find_same(location, is_same, f"an intact import of {origin['path']}")
    if found is None:
        raise_if_exists(location)  # a run
    return found


def _origin(checkpoint: ForeignCheckpoint) -> dict[str, str]:
    path = checkpoint.path if checkpoint.stored else full_path(checkpoint.path)
    return {"path": path, "kind": checkpoint.kind}


def _has_bytes(found: SnapshotReader, flat: FlatState) -> bool:
    """Return True if the shard of an import has the bytes of the state."""
    location, new, existing = found.location, Buffer(BLOCK_SIZE), Buffer(BLOCK_SIZE)
    places = {
        (leaf.key, box.offsets, box.sizes): (location.file_key(index.path), box.at)
        for index in found.indexes()
        for leaf in index.leaves
        for box in leaf.boxes
    }
    for leaf in flat.leaves:
        nbytes = int(leaf.source.nbytes)
        key, first = places.get((leaf.key, leaf.box.offsets, leaf.box.sizes), ("", -1))
        if first < 0 < nbytes:
            return False
        for start in range(0, nbytes, BLOCK_SIZE):
            size = min(BLOCK_SIZE, nbytes - start)
            copy_bytes(leaf.source, start, start + size, new)
            location.store.get_range(key, first + start, size, existing.view)
            if new.view[:size] != existing.view[:size]:
                return False
    return True


def save_foreign_checkpoint(
    location: Location,
    flat: FlatState,
    checkpoint: ForeignCheckpoint,
    step: int | None,
    branch: int = 0,
    advance: Advance = no_op,
) -> SnapshotReader:
    """Save a checkpoint, flattened, as the snapshot at ``location``; its note has the origin.
    Raises ``StoreError`` if a file in a store was replaced. If it raises, nothing was committed."""
    note = {"imported_from": _origin(checkpoint)}
    metadata = VersionMetadata(step=step, branch=branch, reason="import", note=note)
    monitored = Location(cast(Store, _ReportingStore(location.store, advance)), location.folder)

    job = begin_save(monitored, flat, metadata, shared_pool(), stage_now=False)
    each = Workers.create().each
    finish_save(job, fence=lambda: each(checkpoint.stored, StoredFile.require_unchanged))
    events.emit(
        "imported",
        path=checkpoint.path,
        kind=checkpoint.kind,
        step=step,
        left_out=list(checkpoint.left_out),
    )
    return open_location(location)


class _Reporting:
    """A store or an upload, ``inner``, that reports the bytes that are written."""

    def __init__(self, inner: Any, advance: Advance) -> None:
        self._inner, self._advance = inner, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ReportingStore(_Reporting):
    def put(self, key: str, length: int, *head: int) -> Any:
        return _ReportingUpload(self._inner.put(key, length, *head), self._advance)


class _ReportingUpload(_Reporting):
    def write_at(self, offset: int, *data: memoryview) -> None:
        self._inner.write_at(offset, *data)
        self._advance(sum(map(len, data)))

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._inner.__exit__(*exc)
