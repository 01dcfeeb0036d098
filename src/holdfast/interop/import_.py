"""Import: read a foreign checkpoint and save it as a snapshot.

A checkpoint is recognized by its content. No code in it is run. Its tensors are mapped into memory,
so memory use does not depend on their size. The engine's own save computes the digests and commits.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from msgspec import structs

from holdfast.buffers import shared_pool
from holdfast.engine.saving.job import VersionMetadata
from holdfast.engine.saving.save import begin_save, finish_save
from holdfast.engine.snapshot.location import Location, path_advice, suggest_similar_path
from holdfast.engine.snapshot.snapshot import Snapshot, open_location
from holdfast.engine.state.flatten import FlatState, flatten
from holdfast.errors import HoldfastError, NotFound, Unsupported
from holdfast.format.names import MANIFEST, is_shard_name, parse_version
from holdfast.format.strict_json import unique_members
from holdfast.interop import read_dcp, read_safetensors
from holdfast.interop.arrange import step_from_name, step_from_state
from holdfast.interop.mmap_files import Advance, MappedFile
from holdfast.interop.read_dcp import TensorBoxes, load_dcp
from holdfast.interop.read_safetensors import load_huggingface_folder, load_safetensors
from holdfast.interop.read_torch import load_torch_file
from holdfast.storage.store import Store
from holdfast.threads import no_op

SUPPORTED_FORMATS = (
    "a file of torch.save, Lightning, or safetensors, a folder of Hugging Face"
    f" ({read_safetensors.SAFE_WEIGHTS_NAME}, {read_safetensors.WEIGHTS_NAME}, or their"
    f" {read_safetensors.INDEX_SUFFIX}), or a"
    f" folder of torch.distributed.checkpoint ({read_dcp.METADATA_FILE})"
)
_WEIGHT_SUFFIXES = (".bin", ".ckpt", ".distcp", ".pkl", ".pt", ".pth", ".safetensors")
_LIGHTNING_VERSION_KEY = "pytorch-lightning_version"
_TRAINER_STATE_FILE = "trainer_state.json"
_MAGIC_BYTES = (
    (b"PK\3\4", "a zip file without data.pkl"),
    (b"\x80", "a bare pickle, which can run any code"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"GGUF", "a GGUF file"),
)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignCheckpoint:
    """A checkpoint that was read.

    ``kind``: ``torch``, ``lightning``, ``safetensors``, ``huggingface``, or ``dcp``. ``value``: the
    content, with mapped tensors unless ``mapped`` is False. ``step``: the step of the checkpoint,
    if known. ``left_out``: files with weights in the same folder that are not part of the
    checkpoint.
    """

    path: str
    kind: str
    value: Any
    step: int | None = None
    mapped: bool = True
    left_out: tuple[str, ...] = ()


def size_on_disk(path: str) -> int:
    """Return the bytes of a file, or of the files directly in a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path) if os.path.exists(path) else 0
    with os.scandir(path) as entries:
        return sum(e.stat().st_size for e in entries if e.is_file())


def read_foreign_checkpoint(path: str, advance: Advance = no_op) -> ForeignCheckpoint:
    """Read the checkpoint in the file or folder ``path``.

    ``advance(nbytes)`` is called from several threads as bytes are read and checked, up to
    ``size_on_disk`` in total.

    Raises ``NotFound``; ``Unsupported`` for an unknown format and for a file that would have to run
    code; ``FormatError`` for a damaged or incomplete checkpoint; ``OSError``; and ``HoldfastError``
    if PyTorch is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as e:
        raise HoldfastError("Importing a checkpoint needs PyTorch", found="no torch package") from e
    path = path.rstrip("/") or path
    if "://" in path:
        raise Unsupported(
            f"{path} is not on a local disk",
            todo="Copy it to a local disk first, because import maps files into memory",
        )
    if not os.path.lexists(path):
        todo = path_advice(suggest_similar_path(path))
        raise NotFound(f"There is nothing at {path}", todo=todo, key=path)
    read = _read_folder if os.path.isdir(path) else _read_file
    checkpoint = read(path, advance)
    parent, name = os.path.split(os.path.abspath(path))
    steps = (checkpoint.step, step_from_name(name), step_from_name(os.path.basename(parent)))
    return replace(checkpoint, step=next((s for s in steps if s is not None), None))


def _read_file(path: str, advance: Advance) -> ForeignCheckpoint:
    if is_shard_name(os.path.basename(path)):
        raise Unsupported(
            f"{path} is a shard of a Holdfast snapshot",
            todo="`holdfast copy` copies whole snapshots",
        )
    file = MappedFile(path)
    if read_safetensors.is_safetensors(file):
        return ForeignCheckpoint(path, "safetensors", load_safetensors(file))
    loaded = load_torch_file(file, advance)
    if loaded is None:
        head = bytes(file.view[:16])
        formats = (name for magic, name in _MAGIC_BYTES if head.startswith(magic))
        found = next(formats, f"a file that begins with {head!r}" if head else "an empty file")
        raise Unsupported(
            f"{path} is not a checkpoint that can be imported",
            expected=SUPPORTED_FORMATS,
            found=found,
        )
    value, mapped = loaded
    is_lightning = isinstance(value, dict) and _LIGHTNING_VERSION_KEY in value
    kind = "lightning" if is_lightning else "torch"
    return ForeignCheckpoint(path, kind, value, step_from_state(value), mapped)


def _read_folder(path: str, advance: Advance) -> ForeignCheckpoint:
    names = sorted(os.listdir(path))
    weights = [n for n in names if n.endswith(_WEIGHT_SUFFIXES)]
    model = read_safetensors.find_model_file(set(names))
    if MANIFEST in names or any(map(parse_version, names)):
        raise Unsupported(
            f"{path} is already a Holdfast snapshot or run",
            todo="`holdfast copy` copies snapshots and runs",
        )
    if read_dcp.METADATA_FILE in names and model is not None:
        raise Unsupported(
            f"{path} may contain two checkpoints",
            expected="one checkpoint",
            found=f"{read_dcp.METADATA_FILE} of torch.distributed.checkpoint, and {model}",
            todo=f"Move one of them elsewhere, or import the file: {os.path.join(path, model)}",
        )
    if read_dcp.METADATA_FILE in names:
        value = load_dcp(path, advance)
        other = tuple(n for n in weights if not n.endswith(".distcp"))
        return ForeignCheckpoint(path, "dcp", value, step_from_state(value), left_out=other)
    if model is None:
        raise Unsupported(
            f"{path} is not a checkpoint that can be imported",
            expected=SUPPORTED_FORMATS,
            found=f"{', '.join(names[:5])}{' ...' if names[5:] else ''}" or "an empty folder",
            todo=f"Import a file in it: {os.path.join(path, weights[0])}" if weights else None,
        )
    value, files, mapped = load_huggingface_folder(path, model, advance)
    other = tuple(n for n in weights if n not in files)
    return ForeignCheckpoint(path, "huggingface", value, _read_trainer_step(path), mapped, other)


def _read_trainer_step(folder: str) -> int | None:
    """Return the step that the Trainer of Transformers recorded next to the model, if any."""
    with suppress(OSError, HoldfastError, ValueError, RecursionError):
        file = MappedFile(os.path.join(folder, _TRAINER_STATE_FILE))
        return step_from_state(json.loads(bytes(file.view), object_pairs_hook=unique_members))
    return None


# -- saving --------------------------------------------------------------------------------------


def flatten_foreign_state(state: dict[Any, Any]) -> FlatState:
    """Flatten a state that was read into a tree and its leaves.

    A tensor that was read as several boxes stays several boxes and is never assembled. Raises
    ``Unsupported``, with the key, for a value that cannot be saved.
    """
    placeholders: dict[int, tuple[Any, TensorBoxes]] = {}
    flat = flatten(_insert_placeholders(state, placeholders))
    leaves = []
    for leaf in flat.leaves:
        if id(leaf.source) in placeholders:
            boxes = placeholders[id(leaf.source)][1].boxes
            leaves += [structs.replace(leaf, source=b.tensor, box=b.box) for b in boxes]
        else:
            leaves.append(leaf)
    flat.leaves[:] = leaves
    return flat


def _insert_placeholders(value: Any, placeholders: dict[int, tuple[Any, TensorBoxes]]) -> Any:
    """Replace each ``TensorBoxes`` by a tensor of its shape that stores a single element."""
    if type(value) is dict:
        return {k: _insert_placeholders(v, placeholders) for k, v in value.items()}
    if type(value) is list:
        return [_insert_placeholders(v, placeholders) for v in value]
    if not isinstance(value, TensorBoxes):
        return value
    import torch

    placeholder = torch.empty((), dtype=getattr(torch, value.dtype)).expand(value.shape)
    # keeps it alive, so that its id stays unique
    placeholders[id(placeholder)] = (placeholder, value)
    return placeholder


def save_foreign_checkpoint(
    location: Location,
    flat: FlatState,
    checkpoint: ForeignCheckpoint,
    step: int,
    branch: int = 0,
    advance: Advance = no_op,
) -> Snapshot:
    """Save a checkpoint, flattened by ``flatten_foreign_state``, as the snapshot at ``location``.

    The note of the snapshot records the origin. ``advance(nbytes)`` is called as bytes are written.
    Raises as ``holdfast.save`` does; if it raises, nothing was committed.
    """
    note = {"imported_from": {"path": os.path.abspath(checkpoint.path), "kind": checkpoint.kind}}
    metadata = VersionMetadata(step=step, branch=branch, reason="import", note=note)
    monitored = Location(cast(Store, _ReportingStore(location.store, advance)), location.folder)
    finish_save(begin_save(monitored, flat, metadata, shared_pool(), stage_now=False))
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
