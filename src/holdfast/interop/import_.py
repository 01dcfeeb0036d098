"""Checkpoints that others wrote: recognised by what is in them, and saved as snapshots.

Nothing of them is run. Their tensors are mapped, so that memory stays bounded however large they
are; what is digested and committed is done by the engine's own save.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from msgspec import structs

from holdfast.buffers import shared_pool
from holdfast.engine.distributed.group import current_group, use_group
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location, suggest_similar_path
from holdfast.engine.snapshot.snapshot import Snapshot, open_location
from holdfast.engine.state.flatten import FlatState, flatten
from holdfast.errors import HoldfastError, NotFound, Unsupported
from holdfast.format.names import MANIFEST, is_shard_name, parse_version
from holdfast.interop import read_dcp, read_safetensors
from holdfast.interop.arrange import step_from_name, step_from_state
from holdfast.interop.mmap_files import Advance, MappedFile
from holdfast.interop.read_dcp import TensorBoxes, load_dcp
from holdfast.interop.read_safetensors import load_huggingface_folder, load_safetensors
from holdfast.interop.read_torch import (
    ZIP_MAGIC,
    is_legacy,
    load_legacy,
    load_zip,
    read_torch_records,
)
from holdfast.storage.store import Store, Upload

SUPPORTED_FORMATS = (
    "a file of torch.save, Lightning or safetensors, a folder of Hugging Face"
    f" ({read_safetensors.SAFE_WEIGHTS_NAME}, {read_safetensors.WEIGHTS_NAME}, or their"
    f" {read_safetensors.INDEX_SUFFIX}), or a"
    f" folder of torch.distributed.checkpoint ({read_dcp.METADATA_FILE})"
)
_WEIGHT_SUFFIXES = (".bin", ".ckpt", ".distcp", ".pkl", ".pt", ".pth", ".safetensors")
_LIGHTNING_VERSION_KEY = "pytorch-lightning_version"
_TRAINER_STATE_FILE = "trainer_state.json"
_MAGIC_BYTES = (
    (b"PK\3\4", "a zip file without data.pkl"),
    (b"\x80", "a bare pickle, which may run whatever it likes"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"GGUF", "a GGUF file"),
)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignCheckpoint:
    """What was read. ``kind``: ``torch``, ``lightning``, ``safetensors``, ``huggingface`` or
    ``dcp``; ``value``: what it holds, its tensors mapped unless ``mapped`` is False; ``step``:
    after which it was saved, if that is known; ``left_out``: weights beside it in its folder that
    are not part of it."""

    path: str
    kind: str
    value: Any
    step: int | None = None
    mapped: bool = True
    left_out: tuple[str, ...] = ()


def size_on_disk(path: str) -> int:
    """Bytes of a file, or of the files right in a folder: what reading it may take."""
    if not os.path.isdir(path):
        return os.path.getsize(path) if os.path.exists(path) else 0
    with os.scandir(path) as entries:
        return sum(e.stat().st_size for e in entries if e.is_file())


def read_foreign_checkpoint(path: str, advance: Advance = bool) -> ForeignCheckpoint:
    """Read the checkpoint that is the file or folder ``path``. ``tell`` is told of bytes that were
    read to be checked, up to ``size_on_disk``, from several threads.

    Raises ``NotFound``; ``Unsupported`` for what is none of those known, and for whatever would
    have to be run; ``FormatError`` for what is damaged or not complete; ``OSError``.
    """
    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise HoldfastError("Checkpoints of others are read with PyTorch", found="none") from e
    path = path.rstrip("/") or path
    if "://" in path:
        raise Unsupported(
            f"{path} is not on a local disk", todo="Copy it to one first: it is mapped into memory"
        )
    if not os.path.lexists(path):
        close = suggest_similar_path(path)
        todo = "Check the path" if close is None else f"Perhaps {close} is meant"
        raise NotFound(f"There is nothing at {path}", todo=todo, key=path)
    made = _read_folder(path, advance) if os.path.isdir(path) else _read_file(path, advance)
    if made.step is not None:
        return made
    above, name = os.path.split(os.path.abspath(path))
    step = step_from_name(name)
    return replace(made, step=step_from_name(os.path.basename(above)) if step is None else step)


def _read_file(path: str, advance: Advance) -> ForeignCheckpoint:
    if is_shard_name(os.path.basename(path)):
        raise Unsupported(
            f"{path} is a shard of a Holdfast snapshot",
            todo="`holdfast copy` copies whole snapshots",
        )
    file = MappedFile(path)
    head = bytes(file.view[:512])
    if read_safetensors.is_safetensors(head, file.length):
        return ForeignCheckpoint(path, "safetensors", load_safetensors(file))
    records = read_torch_records(file) if head[:4] == ZIP_MAGIC else None
    if records is None and not is_legacy(head):
        known = (what for begin, what in _MAGIC_BYTES if head.startswith(begin))
        found = next(known, f"a file that begins with {head[:16]!r}" if head else "an empty file")
        raise Unsupported(
            f"{path} is no checkpoint that can be imported", expected=SUPPORTED_FORMATS, found=found
        )
    value = load_legacy(path) if records is None else load_zip(file, records, advance)
    lightning = isinstance(value, dict) and _LIGHTNING_VERSION_KEY in value
    kind = "lightning" if lightning else "torch"
    return ForeignCheckpoint(path, kind, value, step_from_state(value), mapped=records is not None)


def _read_folder(path: str, advance: Advance) -> ForeignCheckpoint:
    names = sorted(os.listdir(path))
    model = read_safetensors.find_model_file(set(names))
    if MANIFEST in names or any(map(parse_version, names)):
        raise Unsupported(
            f"{path} is of Holdfast already", todo="`holdfast copy` copies snapshots and runs"
        )
    if read_dcp.METADATA_FILE in names and model is not None:
        raise Unsupported(
            f"{path} may be two checkpoints",
            expected="one",
            found=f"{read_dcp.METADATA_FILE} of torch.distributed.checkpoint, and {model}",
            todo=f"Move one of them elsewhere, or name the file: {os.path.join(path, model)}",
        )
    if read_dcp.METADATA_FILE in names:
        value = load_dcp(path, advance)
        rest = [n for n in names if n.endswith(_WEIGHT_SUFFIXES) and not n.endswith(".distcp")]
        return ForeignCheckpoint(path, "dcp", value, step_from_state(value), left_out=tuple(rest))
    if model is None:
        files = [n for n in names if n.endswith(_WEIGHT_SUFFIXES)]
        raise Unsupported(
            f"{path} is no checkpoint that can be imported",
            expected=SUPPORTED_FORMATS,
            found=f"{', '.join(names[:5])}{' ...' if names[5:] else ''}" or "an empty folder",
            todo=f"Name a file in it: {os.path.join(path, files[0])}" if files else None,
        )
    value, files, mapped = load_huggingface_folder(path, model, advance)
    rest = [n for n in names if n.endswith(_WEIGHT_SUFFIXES) and n not in files]
    return ForeignCheckpoint(
        path, "huggingface", value, _read_trainer_step(path), mapped, tuple(rest)
    )


def _read_trainer_step(folder: str) -> int | None:
    """The step that the Trainer of Transformers has left beside the model."""
    path = os.path.join(folder, _TRAINER_STATE_FILE)
    with suppress(OSError, ValueError, RecursionError), open(path, "rb") as opened:
        return step_from_state(json.load(opened))
    return None


# -- saving it -----------------------------------------------------------------------------------


def flatten_foreign_state(state: dict[Any, Any]) -> FlatState:
    """The tree and the leaves of a state that was read: a tensor of which there are parts becomes
    as many boxes, so that it is never put together. Raises ``Unsupported`` by key for what cannot
    be kept."""
    parted: dict[int, tuple[Any, TensorBoxes]] = {}
    flat = flatten(_insert_placeholders(state, parted))
    leaves = []
    for leaf in flat.leaves:
        _, found = parted.get(id(leaf.source), (None, None))
        if found is None:
            leaves.append(leaf)
        else:
            leaves += [structs.replace(leaf, source=p.tensor, box=p.box) for p in found.boxes]
    flat.leaves[:] = leaves
    return flat


def _insert_placeholders(value: Any, placeholders: dict[int, tuple[Any, TensorBoxes]]) -> Any:
    """The value with a tensor of one element, spread out, for each that is in parts."""
    if type(value) is dict:
        return {k: _insert_placeholders(v, placeholders) for k, v in value.items()}
    if type(value) is list:
        return [_insert_placeholders(v, placeholders) for v in value]
    if not isinstance(value, TensorBoxes):
        return value
    import torch

    made = torch.empty((), dtype=getattr(torch, value.dtype)).expand(value.shape)
    placeholders[id(made)] = made, value
    return made


def save_foreign_checkpoint(
    location: Location,
    flat: FlatState,
    checkpoint: ForeignCheckpoint,
    step: int,
    branch: int = 0,
    advance: Advance = bool,
) -> Snapshot:
    """Save what ``take_apart`` made of a checkpoint as the snapshot at ``place``, which says in its
    note where it is from. ``tell`` is told of bytes written.

    Raises as ``holdfast.save`` does; whenever it raises, nothing was committed.
    """
    note = {"imported_from": {"path": os.path.abspath(checkpoint.path), "kind": checkpoint.kind}}
    label = VersionMetadata(step=step, branch=branch, reason="import", note=note)
    told = Location(cast(Store, _ProgressStore(location.store, advance)), location.folder)
    with use_group(current_group("alone")):
        finish_save(begin_save(told, flat, label, shared_pool(), stage_now=False))
    return open_location(location)


class _ProgressStore:
    """A store that tells of the bytes that its uploads are given."""

    def __init__(self, store: Store, advance: Advance) -> None:
        self._store, self._advance = store, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, length: int) -> Any:
        return _ProgressUpload(self._store.put(key, length), self._advance)


class _ProgressUpload:
    def __init__(self, upload: Upload, advance: Advance) -> None:
        self._upload, self._advance = upload, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upload, name)

    def write_at(self, offset: int, data: memoryview) -> None:
        self._upload.write_at(offset, data)
        self._advance(len(data))

    def __enter__(self) -> _ProgressUpload:
        self._upload.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._upload.__exit__(*exc)
