"""Read folders of ``torch.distributed.checkpoint`` (DCP) without using DCP.

``.metadata`` is a pickle. A restricted unpickler maps the few class names that DCP writes to inert
classes, new for each pickle, and refuses all others, so no code is run. Each part of a tensor is a
``torch.save`` within a ``.distcp`` file, mapped where it is and never assembled in memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from limpet.convert import mmap_files
from limpet.convert.extent import check_bytes, check_extent
from limpet.convert.read_torch import ZIP_MAGIC, torch_load
from limpet.convert.stored_files import ForeignFolder, require_space
from limpet.errors import FormatError, NotFound, PlanError, Unsupported
from limpet.format.tree import MAX_DEPTH, MAX_DIMENSIONS, is_valid_shape
from limpet.layout.global_plan import make_global_plan
from limpet.layout.local_plan import make_local_plan
from limpet.layout.shard_layout import LeafBox
from limpet.state.arrays import LocalBoxes
from limpet.threads import Workers, no_op
from limpet.types import DTYPES, Advance, Box

METADATA_FILE = ".metadata"

_DCP_PREFIX = "torch.distributed.checkpoint."
_SHARDED_TENSOR_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_INERT_CLASSES = {
    (_DCP_PREFIX + "metadata", name)
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
    (_DCP_PREFIX + "filesystem", "_StorageInfo"),
    (_SHARDED_TENSOR_METADATA, "TensorProperties"),
    (_SHARDED_TENSOR_METADATA, "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
}
_STORAGE_DTYPES = {
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
_SUBSTITUTES = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("torch.storage", "UntypedStorage"): "uint8",
    **{("torch", name): name for name in DTYPES},
    **{("torch", storage): name for storage, name in _STORAGE_DTYPES.items()},
}
_MALFORMED_ERRORS = (
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


class _InertObject:
    """The arguments and the state of a pickled object. It has no behavior."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles inert objects for the names that DCP writes, and refuses all other names."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        qualified = (module, name)
        if qualified in _SUBSTITUTES:
            return _SUBSTITUTES[qualified]
        if qualified not in _INERT_CLASSES:
            raise Unsupported(
                f"{self._name} refers to {module}.{name}, which could run code; nothing was run",
                expected="only names that torch.distributed.checkpoint itself writes",
                todo="If you trust the origin of the file, load it with"
                " torch.distributed.checkpoint, and pass what you need to limpet.save",
                classes=(f"{module}.{name}",),
            )
        return self._classes.setdefault(qualified, type(name, (_InertObject,), {}))

    def persistent_load(self, pid: Any) -> Any:
        """Return dtype, key, and elements of ``("storage", dtype, key, device, elements)``."""
        kind, dtype, key, _, elements = pid
        if kind != "storage" or dtype not in DTYPES or type(elements) is not int:
            raise ValueError(f"invalid storage {pid!r:.100}")
        return dtype, str(key), elements


@dataclass(slots=True)
class _StoredBox:
    """A box of a tensor. ``file_span``: the file of its ``torch.save``, and the first and
    past-the-last byte there; ``tensor``: mapped, once it was read."""

    key: str
    dtype: str
    box: Box
    file_span: tuple[str, int, int]
    tensor: Any = None

    @property
    def nbytes(self) -> int:
        _, start, stop = self.file_span
        return max(stop - start, self.box.numel * DTYPES[self.dtype].itemsize)


@dataclass(slots=True)
class _TensorBoxes:
    """A tensor that is stored as several boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[_StoredBox] = field(default_factory=list)


class _DcpFolder:
    """A folder that is being read: its mapped files, and the locations that DCP recorded."""

    def __init__(self, folder: ForeignFolder) -> None:
        self._folder, self.path = folder, folder.path
        self._opened: dict[str, mmap_files.ForeignFile] = {}
        self.files: dict[str, mmap_files.MappedFile] = {}
        self._parts = 0
        self.metadata_file = folder.open(METADATA_FILE).mapped()
        self.metadata_file.release_descriptor()
        self.nbytes = self.metadata_file.length
        try:
            self.metadata = _RestrictedUnpickler(
                bytes(self.metadata_file.view), self.metadata_file.path
            ).load()
            self.storage_infos = {
                (i.fqn, None if getattr(i, "offset", None) is None else tuple(i.offset)): info
                for i, info in self.metadata.storage_data.items()
            }
            self.planner_data = getattr(self.metadata, "planner_data", None)
        except _MALFORMED_ERRORS as e:
            raise self.format_error("a list of tensors and their locations", e) from e

    def format_error(self, expected: str, found: object) -> FormatError:
        if isinstance(found, Exception):
            found = f"{type(found).__name__}: {found}"
        return self.metadata_file.format_error(expected, str(found))

    def dims(self, numbers: Any) -> tuple[int, ...]:
        """Return a shape or an offset. Many tensors may share one, so its length is checked."""
        if len(numbers) > MAX_DIMENSIONS:
            raise self.format_error(f"at most {MAX_DIMENSIONS} dimensions", len(numbers))
        return tuple(numbers)

    def count_part(self) -> None:
        """Count a part of a tensor. Each takes a byte of the metadata, unless lists are shared."""
        self._parts += 1
        if self._parts > self.metadata_file.length:
            raise self.format_error("a list of parts for each tensor", "tensors that share parts")

    def find_span(self, fqn: str, offset: tuple[int, ...] | None) -> tuple[str, int, int]:
        """Return the file, the first byte, and the past-the-last byte of a value."""
        info = self.storage_infos.get((fqn, offset))
        if info is None and not any(offset or ()):
            info = self.storage_infos.get((fqn, None))
        if info is None:
            raise self.format_error(f"the location of {fqn} at {offset}", "nothing")
        name, start, length = info.relative_path, info.offset, info.length
        if getattr(info, "transform_descriptors", None):
            raise Unsupported(
                f"{self.path} cannot be imported: {fqn} was transformed when it was written",
                found=f"{info.transform_descriptors!r:.100}",
                todo="Load it with torch.distributed.checkpoint and its extensions, then save it",
            )
        if type(name) is not str or not name or ".." in name.split("/") or name[0] == "/":
            raise self.format_error("a file in the folder", f"{name!r:.100}")
        if type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise self.format_error(f"a range of {fqn} in {name}", f"{start!r:.50}, {length!r:.50}")
        file = self._opened.get(name)
        if file is None:
            try:
                file = self._opened[name] = self._folder.open(name)
            except NotFound as e:
                expected = f"the file {name} in the same folder"
                raise self.format_error(expected, "no such file") from e
            self.nbytes += file.length
        if start + length > file.length:
            raise file.format_error(
                f"{fqn} up to byte {start + length}", "the end of the file", start
            )
        return name, start, start + length

    def map_files(self, advance: Advance) -> Advance:
        """Map all files in which spans were found. Return the function to call for the bytes that
        are checked, which counts none that were counted here."""
        require_space([*self._opened.values()])
        for name, file in self._opened.items():
            self.files[name] = file.mapped(advance)
            self.files[name].release_descriptor()
        return no_op if any(f.is_fetched for f in self.files.values()) else advance


def load_dcp(folder: ForeignFolder, advance: Advance) -> dict[Any, Any]:
    """Return the state in a DCP folder, nested as it was saved. A tensor stored in one piece is
    mapped; any other one is a ``LocalBoxes``."""
    opened = _DcpFolder(folder)
    values: dict[str, Any] = {}
    boxes: list[_StoredBox] = []
    spans: dict[str, tuple[str, int, int]] = {}
    try:
        for fqn, metadata in opened.metadata.state_dict_metadata.items():
            if hasattr(metadata, "chunks"):
                values[fqn] = _parse_tensor_metadata(opened, fqn, metadata)
                boxes += values[fqn].boxes
            else:
                values[fqn], spans[fqn] = None, opened.find_span(fqn, None)
        # read or written: values must not share most of the bytes of the files
        nbytes = sum(box.nbytes for box in boxes)
        nbytes += sum(stop - start for _, start, stop in spans.values())
        check_bytes(nbytes, opened.nbytes, folder.path)
        _check_coverage(opened, values)
        advance = opened.map_files(advance)
        for fqn, (name, start, stop) in spans.items():
            file = opened.files[name]
            _read_checked_records(file, fqn, start, stop, advance)
            origin = f"{file.path} ({fqn})"
            values[fqn] = torch_load(io.BytesIO(file.view[start:stop]), origin, mmap=False)
            check_extent(values[fqn], stop - start, origin)
    except _MALFORMED_ERRORS as e:
        raise opened.format_error("a list of tensors and their locations", e) from e
    Workers.create().each(boxes, lambda box: _map_box(opened, box, advance))
    for fqn, value in values.items():
        if isinstance(value, _TensorBoxes) and value.boxes[0].box == Box.whole(value.shape):
            values[fqn] = value.boxes[0].tensor
        elif isinstance(value, _TensorBoxes):
            box_tensors = [(stored.box, stored.tensor) for stored in value.boxes]
            values[fqn] = LocalBoxes(value.shape, box_tensors, value.dtype, tie_key=fqn)
    paths = opened.planner_data if isinstance(opened.planner_data, dict) else {}
    return unflatten(values, paths, opened.metadata_file.length, opened.format_error)


def _parse_tensor_metadata(folder: _DcpFolder, fqn: str, metadata: Any) -> _TensorBoxes:
    """Return a tensor without mapped boxes. Raises ``FormatError`` if its metadata is invalid."""
    properties, shape = metadata.properties, folder.dims(metadata.size)
    dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
    if type(fqn) is not str or dtype not in DTYPES or not is_valid_shape(dtype, shape):
        raise folder.format_error("a tensor of a valid dtype and shape", f"{dtype!r}, {shape!r}")
    tensor = _TensorBoxes(dtype, shape)
    for chunk in metadata.chunks:
        folder.count_part()
        box = Box(folder.dims(chunk.offsets), folder.dims(chunk.sizes))
        if not all(type(n) is int for n in (*box.offsets, *box.sizes)) or not box.is_within(shape):
            raise folder.format_error(f"parts of {fqn} within {shape}", f"{box}")
        if box.numel or 0 in shape:  # ranks without elements may have recorded empty boxes
            tensor.boxes.append(_StoredBox(fqn, dtype, box, folder.find_span(fqn, box.offsets)))
    if not tensor.boxes:
        raise folder.format_error(f"parts of {fqn}", "none")
    return tensor


def _check_coverage(folder: _DcpFolder, values: dict[str, Any]) -> None:
    """Raise ``FormatError`` unless the boxes of each tensor cover every element exactly once."""
    leaf_boxes = [
        LeafBox(fqn, value.dtype, value.shape, stored.box)
        for fqn, value in values.items()
        if isinstance(value, _TensorBoxes)
        for stored in value.boxes
    ]
    try:
        make_global_plan([make_local_plan(leaf_boxes)])
    except PlanError as e:
        raise folder.format_error("parts that cover every tensor exactly once", e.found) from e


def _read_checked_records(
    file: mmap_files.MappedFile, fqn: str, start: int, stop: int, advance: Advance
) -> dict[str, mmap_files.ZipRecord]:
    """Return the records of the zip file at bytes ``start`` to ``stop``; check their CRCs."""
    if bytes(file.view[start : start + 4]) != ZIP_MAGIC:
        raise file.format_error(f"{fqn} as torch.save writes it", "something else", start)
    records = mmap_files.read_zip_records(file, start, stop)
    for record in records.values():
        mmap_files.check_crc(file, record, advance)
    return records


def _map_box(folder: _DcpFolder, stored_box: _StoredBox, advance: Advance) -> None:
    """Map one box of a tensor. Raises ``FormatError`` if it differs from the metadata."""
    name, start, stop = stored_box.file_span
    file = folder.files[name]
    records = _read_checked_records(file, stored_box.key, start, stop, advance)
    try:
        pickled = _RestrictedUnpickler(
            _record_bytes(file, records["data.pkl"]), f"{file.path} ({stored_box.key})"
        ).load()
        (dtype, key, _), offset, size, stride = pickled.args[:4]
        metadata = pickled.args[6:]
        if type(pickled).__name__ == "_rebuild_tensor_v3":
            dtype, *metadata = metadata
        order = _record_bytes(file, records["byteorder"]) if "byteorder" in records else b"little"
        data = records[f"data/{key}"]
        itemsize = DTYPES[dtype].itemsize
        matches = (dtype, tuple(size)) == (stored_box.dtype, stored_box.box.sizes)
        valid = all(type(n) is int and n >= 0 for n in (offset, *size, *stride))
        end = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        inside = stored_box.box.numel == 0 or end * itemsize <= data.stop - data.start
    except _MALFORMED_ERRORS as e:
        raise file.format_error(f"{stored_box.key} as torch.save writes it", str(e), start) from e
    if not (matches and valid and inside) or order != b"little" or any(metadata):
        raise file.format_error(
            f"{stored_box.key} of {stored_box.dtype} {stored_box.box.sizes}, little-endian",
            f"{dtype} {size!r:.80} with stride {stride!r:.80} at {offset}, {order!r}",
            start,
        )
    if stored_box.box.numel == 0:
        stored_box.tensor = file.tensor(dtype, stored_box.box.sizes, start)
    else:
        flat = file.tensor(dtype, (end,), data.start)
        stored_box.tensor = flat.as_strided(stored_box.box.sizes, tuple(stride), offset)


def _record_bytes(file: mmap_files.MappedFile, record: mmap_files.ZipRecord) -> bytes:
    return bytes(file.view[record.start : record.stop])


# -- the nesting that DCP has flattened ------------------------------------------------------------


FormatErrorMaker = Callable[[str, object], FormatError]
"""Returns the error for invalid metadata, from what was expected and what was found."""

_FREE_FILLERS = 1 << 17
"""The list positions without a value that any folder may have."""


def unflatten(
    values: Mapping[str, Any], paths: Mapping[Any, Any], nbytes: int, error: FormatErrorMaker
) -> dict[Any, Any]:
    """Return the nested state by DCP's paths, in which integers are positions in lists. A name
    without path stays at the top. ``nbytes``, of the metadata, bounds unused positions."""
    root, fillers = _Container(), _FREE_FILLERS + nbytes
    for fqn, value in values.items():
        path = paths.get(fqn, (fqn,))
        if (
            not isinstance(path, tuple)
            or not 0 < len(path) <= MAX_DEPTH
            or not all(type(p) in (str, int) for p in path)
        ):
            raise error(f"the path of {fqn}", f"{path!r:.100}")
        level = root
        for name in path[:-1]:
            level = level.setdefault(name, _Container())
            if not isinstance(level, _Container):
                raise error(f"a dict or list at {path}", "a value")
        if level.setdefault(path[-1], value) is not value:
            raise error(f"one value at {path}", "two")

    def build(container: _Container) -> Any:
        nonlocal fillers
        values = {k: build(v) if isinstance(v, _Container) else v for k, v in container.items()}
        positions = [k for k in values if type(k) is int]
        if not positions:
            return values
        fillers -= max(positions) + 1 - len(positions)
        if len(positions) < len(values) or min(positions) < 0 or fillers < 0:
            raise error("positions in a list", f"{list(values)[:5]!r:.100}")
        # DCP does not save members such as an empty dict; they become None
        return [values.get(i) for i in range(max(positions) + 1)]

    state = build(root)
    if not isinstance(state, dict):
        raise error("a dict of values", type(state).__name__)
    return state


class _Container(dict[Any, Any]):
    """A dict or list whose members are being collected."""
