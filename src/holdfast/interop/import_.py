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
from holdfast.engine.distributed.group import acting_as, current_group
from holdfast.engine.saving.job import Label
from holdfast.engine.saving.save import begin, finish
from holdfast.engine.snapshot.location import Location, near
from holdfast.engine.snapshot.snapshot import Snapshot, open_at
from holdfast.engine.state.flatten import Flat, flatten
from holdfast.errors import HoldfastError, NotFound, Unsupported
from holdfast.format.names import MANIFEST, is_shard, parse_version
from holdfast.interop import read_dcp, read_safetensors
from holdfast.interop.arrange import step_in_name, step_in_state
from holdfast.interop.mmap_files import Mapped, Tell
from holdfast.interop.read_dcp import Parted, load_dcp
from holdfast.interop.read_safetensors import load_folder, load_safetensors
from holdfast.interop.read_torch import ZIP, is_old, load_old, load_zip, torch_records
from holdfast.storage.store import Store, Upload

TRIED = (
    "a file of torch.save, Lightning or safetensors, a folder of Hugging Face"
    f" ({read_safetensors.SAFE}, {read_safetensors.BIN}, or their {read_safetensors.INDEX}), or a"
    f" folder of torch.distributed.checkpoint ({read_dcp.METADATA})"
)
_WEIGHTS = (".bin", ".ckpt", ".distcp", ".pkl", ".pt", ".pth", ".safetensors")
_LIGHTNING = "pytorch-lightning_version"
_TRAINER = "trainer_state.json"
_BEGINNINGS = (
    (b"PK\3\4", "a zip file without data.pkl"),
    (b"\x80", "a bare pickle, which may run whatever it likes"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"GGUF", "a GGUF file"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
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


def read_foreign(path: str, tell: Tell = bool) -> Foreign:
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
        close = near(path)
        todo = "Check the path" if close is None else f"Perhaps {close} is meant"
        raise NotFound(f"There is nothing at {path}", todo=todo, key=path)
    made = _read_folder(path, tell) if os.path.isdir(path) else _read_file(path, tell)
    if made.step is not None:
        return made
    above, name = os.path.split(os.path.abspath(path))
    step = step_in_name(name)
    return replace(made, step=step_in_name(os.path.basename(above)) if step is None else step)


def _read_file(path: str, tell: Tell) -> Foreign:
    if is_shard(os.path.basename(path)):
        raise Unsupported(
            f"{path} is a shard of a Holdfast snapshot",
            todo="`holdfast copy` copies whole snapshots",
        )
    file = Mapped(path)
    head = bytes(file.view[:512])
    if read_safetensors.is_safetensors(head, file.length):
        return Foreign(path, "safetensors", load_safetensors(file))
    records = torch_records(file) if head[:4] == ZIP else None
    if records is None and not is_old(head):
        known = (what for begin, what in _BEGINNINGS if head.startswith(begin))
        found = next(known, f"a file that begins with {head[:16]!r}" if head else "an empty file")
        raise Unsupported(
            f"{path} is no checkpoint that can be imported", expected=TRIED, found=found
        )
    value = load_old(path) if records is None else load_zip(file, records, tell)
    lightning = isinstance(value, dict) and _LIGHTNING in value
    kind = "lightning" if lightning else "torch"
    return Foreign(path, kind, value, step_in_state(value), mapped=records is not None)


def _read_folder(path: str, tell: Tell) -> Foreign:
    names = sorted(os.listdir(path))
    model = read_safetensors.model_file(set(names))
    if MANIFEST in names or any(map(parse_version, names)):
        raise Unsupported(
            f"{path} is of Holdfast already", todo="`holdfast copy` copies snapshots and runs"
        )
    if read_dcp.METADATA in names and model is not None:
        raise Unsupported(
            f"{path} may be two checkpoints",
            expected="one",
            found=f"{read_dcp.METADATA} of torch.distributed.checkpoint, and {model}",
            todo=f"Move one of them elsewhere, or name the file: {os.path.join(path, model)}",
        )
    if read_dcp.METADATA in names:
        value = load_dcp(path, tell)
        rest = [n for n in names if n.endswith(_WEIGHTS) and not n.endswith(".distcp")]
        return Foreign(path, "dcp", value, step_in_state(value), left_out=tuple(rest))
    if model is None:
        files = [n for n in names if n.endswith(_WEIGHTS)]
        raise Unsupported(
            f"{path} is no checkpoint that can be imported",
            expected=TRIED,
            found=f"{', '.join(names[:5])}{' ...' if names[5:] else ''}" or "an empty folder",
            todo=f"Name a file in it: {os.path.join(path, files[0])}" if files else None,
        )
    value, files, mapped = load_folder(path, model, tell)
    rest = [n for n in names if n.endswith(_WEIGHTS) and n not in files]
    return Foreign(path, "huggingface", value, _trainer_step(path), mapped, tuple(rest))


def _trainer_step(folder: str) -> int | None:
    """The step that the Trainer of Transformers has left beside the model."""
    path = os.path.join(folder, _TRAINER)
    with suppress(OSError, ValueError, RecursionError), open(path, "rb") as opened:
        return step_in_state(json.load(opened))
    return None


# -- saving it -----------------------------------------------------------------------------------


def take_apart(state: dict[Any, Any]) -> Flat:
    """The tree and the leaves of a state that was read: a tensor of which there are parts becomes
    as many boxes, so that it is never put together. Raises ``Unsupported`` by key for what cannot
    be kept."""
    parted: dict[int, tuple[Any, Parted]] = {}
    flat = flatten(_stand_in(state, parted))
    leaves = []
    for leaf in flat.leaves:
        _, found = parted.get(id(leaf.source), (None, None))
        if found is None:
            leaves.append(leaf)
        else:
            leaves += [structs.replace(leaf, source=p.tensor, box=p.box) for p in found.parts]
    flat.leaves[:] = leaves
    return flat


def _stand_in(value: Any, parted: dict[int, tuple[Any, Parted]]) -> Any:
    """The value with a tensor of one element, spread out, for each that is in parts."""
    if type(value) is dict:
        return {k: _stand_in(v, parted) for k, v in value.items()}
    if type(value) is list:
        return [_stand_in(v, parted) for v in value]
    if not isinstance(value, Parted):
        return value
    import torch

    made = torch.empty((), dtype=getattr(torch, value.dtype)).expand(value.shape)
    parted[id(made)] = made, value
    return made


def save_foreign(
    place: Location, flat: Flat, read: Foreign, step: int, branch: int = 0, tell: Tell = bool
) -> Snapshot:
    """Save what ``take_apart`` made of a checkpoint as the snapshot at ``place``, which says in its
    note where it is from. ``tell`` is told of bytes written.

    Raises as ``holdfast.save`` does; whenever it raises, nothing was committed.
    """
    note = {"imported_from": {"path": os.path.abspath(read.path), "kind": read.kind}}
    label = Label(step=step, branch=branch, reason="import", note=note)
    told = Location(cast(Store, _Told(place.store, tell)), place.folder)
    with acting_as(current_group("alone")):
        finish(begin(told, flat, label, shared_pool(), ahead=False))
    return open_at(place)


class _Told:
    """A store that tells of the bytes that its uploads are given."""

    def __init__(self, store: Store, tell: Tell) -> None:
        self._store, self._tell = store, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, length: int) -> Any:
        return _ToldUpload(self._store.put(key, length), self._tell)


class _ToldUpload:
    def __init__(self, upload: Upload, tell: Tell) -> None:
        self._upload, self._tell = upload, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upload, name)

    def write_at(self, offset: int, data: memoryview) -> None:
        self._upload.write_at(offset, data)
        self._tell(len(data))

    def __enter__(self) -> _ToldUpload:
        self._upload.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._upload.__exit__(*exc)
