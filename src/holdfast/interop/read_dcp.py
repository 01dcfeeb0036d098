"""Folders of ``torch.distributed.checkpoint`` (DCP), read without it.

``.metadata`` is a pickle, and PyTorch unpickles it freely. Here the few names that DCP writes
into it stand for records that do nothing, made anew for each file; any other name is refused, so
that nothing is run. A part of a tensor is a ``torch.save`` of its own within a ``.distcp`` file;
its bytes are mapped where they lie. Nothing is ever put together in memory.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.planning.global_plan import plan_write
from holdfast.engine.planning.local_plan import make_offer
from holdfast.engine.planning.shard_layout import Holding
from holdfast.errors import FormatError, PlanError, Unsupported
from holdfast.format.tree import MAX_DEPTH, shape_fits
from holdfast.interop.mmap_files import Mapped, Record, Tell, check_crc, zip_records
from holdfast.interop.read_torch import ZIP, load_bytes
from holdfast.settings import read_settings
from holdfast.threads import in_parallel
from holdfast.types import DTYPES, Box

METADATA = ".metadata"
_MAX_LIST = 1 << 20

_DCP = "torch.distributed.checkpoint."
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    (_DCP + "metadata", name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (_DCP + "filesystem", "_StorageInfo"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
}
_PLAIN = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("torch.storage", "UntypedStorage"): "uint8",
} | {("torch", name): name for name in DTYPES}
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_MALFORMED = (
    pickle.UnpicklingError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    EOFError,
    RecursionError,
    MemoryError,
    OverflowError,
)


class _Record:
    """What a pickle says of an object: what it was called with, and its state. Does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Reader(pickle.Unpickler):
    """Makes records of the names that DCP writes, and refuses all others."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        at = (module, name)
        if at in _PLAIN:
            return _PLAIN[at]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if at not in _RECORDS:
            raise Unsupported(
                f"{self._name} wants to run {module}.{name}, and nothing in it was run",
                expected="only what torch.distributed.checkpoint writes itself",
                todo="If you trust where it comes from, load it with torch.distributed.checkpoint,"
                " and give what you need of it to holdfast.save",
                classes=(f"{module}.{name}",),
            )
        return self._made.setdefault(at, type(name, (_Record,), {}))

    def persistent_load(self, pid: Any) -> Any:
        """A storage: ``("storage", dtype, key, device, elements)``."""
        kind, dtype, key, _, elements = pid
        if kind != "storage" or dtype not in DTYPES or type(elements) is not int:
            raise ValueError(f"a storage {pid!r:.100}")
        return dtype, str(key), elements


@dataclass(slots=True)
class _Part:
    """A box of a tensor: where its ``torch.save`` lies, and, once that is read, the tensor."""

    key: str
    dtype: str
    box: Box
    where: tuple[str, int, int]
    tensor: Any = None


@dataclass(slots=True)
class Parted:
    """A tensor of which a file has boxes, each mapped."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[_Part] = field(default_factory=list)


class _Folder:
    """One folder while it is read: its files, mapped once each, and where DCP says things lie."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.files: dict[str, Mapped] = {}
        self.list = Mapped(os.path.join(path, METADATA))
        try:
            self.metadata = _Reader(bytes(self.list.view), self.list.path).load()
            self.places = {
                (i.fqn, None if getattr(i, "offset", None) is None else tuple(i.offset)): info
                for i, info in self.metadata.storage_data.items()
            }
            self.paths = getattr(self.metadata, "planner_data", None)
        except _MALFORMED as e:
            raise self.broken("a list of tensors and where they lie", e) from e

    def broken(self, expected: str, found: object) -> FormatError:
        what = (
            f"{found}" if not isinstance(found, Exception) else f"{type(found).__name__}: {found}"
        )
        return self.list.broken(expected, what)

    def where(self, fqn: str, offset: tuple[int, ...] | None) -> tuple[str, int, int]:
        """File, first and past-the-last byte of a value."""
        info = self.places.get((fqn, offset))
        if info is None and not any(offset or ()):
            info = self.places.get((fqn, None))
        if info is None:
            raise self.broken(f"where {fqn} at {offset} lies", "nothing")
        name, start, length = info.relative_path, info.offset, info.length
        if getattr(info, "transform_descriptors", None):
            raise Unsupported(
                f"{self.path} cannot be imported: {fqn} was transformed when it was written",
                found=f"{info.transform_descriptors!r:.100}",
                todo="Load it with torch.distributed.checkpoint and its extensions, and save that",
            )
        if type(name) is not str or not name or ".." in name.split("/") or name[0] == "/":
            raise self.broken("a file in the folder", f"{name!r:.100}")
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise self.broken(f"where {fqn} lies in {name}", f"{start!r:.50}, {length!r:.50}")
        file = self.files.get(name)
        if file is None:
            path = os.path.join(self.path, name)
            if not os.path.isfile(path):
                raise self.broken(f"the file {name} beside it", "no such file")
            file = self.files[name] = Mapped(path)
        if start + length > file.length:
            raise file.broken(f"{fqn} up to byte {start + length}", "the end of the file", start)
        return name, start, start + length


def load_dcp(folder: str, tell: Tell) -> dict[Any, Any]:
    """The state in a DCP folder, nested as it was saved. A tensor is mapped if it lies in one
    piece, else a ``Parted``.

    Raises ``FormatError`` if anything is missing or not as the list has it, and ``Unsupported``.
    """
    opened = _Folder(folder)
    values: dict[str, Any] = {}
    parts: list[_Part] = []
    try:
        for fqn, about in opened.metadata.state_dict_metadata.items():
            if hasattr(about, "chunks"):
                values[fqn] = _parted(opened, fqn, about)
                parts += values[fqn].parts
            else:
                name, start, stop = opened.where(fqn, None)
                file = opened.files[name]
                _checked(file, fqn, start, stop, tell)
                values[fqn] = load_bytes(bytes(file.view[start:stop]), f"{file.path} ({fqn})")
        _check_tiled(opened, values)
    except _MALFORMED as e:
        raise opened.broken("a list of tensors and where they lie", e) from e
    threads = min(read_settings().threads, len(parts))
    in_parallel(parts, lambda part: _read(opened, part, tell), threads)
    for fqn, value in values.items():
        if isinstance(value, Parted) and value.parts[0].box == Box.whole(value.shape):
            values[fqn] = value.parts[0].tensor
    return _nested(opened, values)


def _parted(opened: _Folder, fqn: str, about: Any) -> Parted:
    """What the list says of a tensor, checked."""
    properties, shape = about.properties, tuple(about.size)
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if type(fqn) is not str or dtype not in DTYPES or not shape_fits(dtype, shape):
        raise opened.broken("a tensor of a dtype and shape that can be", f"{dtype!r}, {shape!r}")
    made = Parted(dtype, shape)
    for chunk in about.chunks:
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if not all(type(n) is int for n in (*box.offsets, *box.sizes)) or not box.inside(shape):
            raise opened.broken(f"parts of {fqn} within {shape}", f"{box}")
        if box.elements or 0 in shape:  # a rank that has nothing may say so, or not
            made.parts.append(_Part(fqn, dtype, box, opened.where(fqn, box.offsets)))
    if not made.parts:
        raise opened.broken(f"parts of {fqn}", "none")
    return made


def _check_tiled(opened: _Folder, values: dict[str, Any]) -> None:
    """Whether the parts of every tensor make it up, each element once."""
    holdings = [
        Holding(fqn, value.dtype, value.shape, part.box)
        for fqn, value in values.items()
        if isinstance(value, Parted)
        for part in value.parts
    ]
    try:
        plan_write([make_offer(holdings)])
    except PlanError as e:
        raise opened.broken("parts that make up every tensor", e.found) from e


def _checked(file: Mapped, fqn: str, start: int, stop: int, tell: Tell) -> dict[str, Record]:
    """The records of the zip file that lies there, the CRC of each compared."""
    if bytes(file.view[start : start + 4]) != ZIP:
        raise file.broken(f"{fqn} as torch.save writes it", "something else", start)
    records = zip_records(file, start, stop)
    for record in records.values():
        check_crc(file, record, tell)
    return records


def _read(opened: _Folder, part: _Part, tell: Tell) -> None:
    """Map one part of a tensor."""
    name, start, stop = part.where
    file = opened.files[name]
    records = _checked(file, part.key, start, stop, tell)
    try:
        about = _Reader(_bytes(file, records["data.pkl"]), f"{file.path} ({part.key})").load()
        (dtype, key, _), offset, size, stride = about.args[:4]
        if type(about).__name__ == "_rebuild_tensor_v3":
            dtype, metadata = about.args[6], about.args[7:]
        else:
            metadata = about.args[6:]
        order = _bytes(file, records["byteorder"]) if "byteorder" in records else b"little"
        data = records[f"data/{key}"]
        item = DTYPES[dtype].itemsize
        fits = (dtype, tuple(size)) == (part.dtype, part.box.sizes)
        sound = all(type(n) is int and n >= 0 for n in (offset, *size, *stride))
        end = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        inside = part.box.elements == 0 or end * item <= data.stop - data.start
    except _MALFORMED as e:
        raise file.broken(f"{part.key} as torch.save writes it", str(e), start) from e
    if not fits or not sound or not inside or order != b"little" or any(metadata):
        raise file.broken(
            f"{part.key} of {part.dtype} {part.box.sizes}, little-endian",
            f"{dtype} {size!r:.80} of stride {stride!r:.80} at {offset}, {order!r}",
            start,
        )
    if part.box.elements == 0:
        part.tensor = file.tensor(dtype, part.box.sizes, start)
    else:
        flat = file.tensor(dtype, (end,), data.start)
        part.tensor = flat.as_strided(part.box.sizes, tuple(stride), offset)


def _bytes(file: Mapped, record: Record) -> bytes:
    return bytes(file.view[record.start : record.stop])


# -- the nesting ---------------------------------------------------------------------------------


def _nested(opened: _Folder, values: dict[str, Any]) -> dict[Any, Any]:
    """DCP flattens nested dicts and lists, and keeps the path of each value: levels as text, places
    in a list as integers. A name without a path stands as it is."""
    paths = opened.paths if isinstance(opened.paths, dict) else {}
    root = _Level()
    for fqn, value in values.items():
        path = paths.get(fqn, (fqn,))
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= MAX_DEPTH
            or not all(type(p) in (str, int) for p in path)
        ):
            raise opened.broken(f"the path of {fqn}", f"{path!r:.100}")
        level = root
        for name in path[:-1]:
            level = level.members.setdefault(name, _Level())
            if not isinstance(level, _Level):
                raise opened.broken(f"a dict or list at {path}", "a value")
        if level.members.setdefault(path[-1], value) is not value:
            raise opened.broken(f"one value at {path}", "two")
    made = root.made(opened)
    if not isinstance(made, dict):
        raise opened.broken("a dict of values", type(made).__name__)
    return made


@dataclass(slots=True)
class _Level:
    """A dict or list while its members come in."""

    members: dict[Any, Any] = field(default_factory=dict)

    def made(self, opened: _Folder) -> Any:
        values = {
            k: v.made(opened) if isinstance(v, _Level) else v for k, v in self.members.items()
        }
        places = [k for k in values if type(k) is int]
        if not places:
            return values
        # what a list held besides, such as an empty dict, DCP has not kept
        if len(places) < len(values) or min(places) < 0 or max(places) > _MAX_LIST:
            raise opened.broken("a list's places as numbers", f"{list(values)[:5]!r:.100}")
        return [values.get(i) for i in range(max(places) + 1)]
