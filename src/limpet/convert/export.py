"""Write a version for other libraries.

1. Plan the files. Everything that cannot be exported is refused now.
2. Write the files, and then the record beside them, which says where they are from.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar, cast

import numpy as np

from limpet.arguments import real, require
from limpet.convert import windows
from limpet.convert.export_record import RECORD_SUFFIX, ExportedFile, encode_record, find_record
from limpet.convert.export_torch import TorchState, convert_state, write_torch_file
from limpet.convert.read_safetensors import FOREIGN_CODES
from limpet.errors import AlreadyExists, MissingLeaf, NotFound, StoreError, Unsupported
from limpet.format import tree
from limpet.format.names import join_key, parse_version, to_dotted
from limpet.format.numpy_dtypes import from_descr
from limpet.format.safetensors import build_header
from limpet.layout.select import ABSENT, make_key_filter, match_all, prune
from limpet.layout.shard_layout import chunk_cuts
from limpet.lazy_torch import import_torch
from limpet.loading.load import load_snapshot
from limpet.machine import path_text
from limpet.run.run import Run
from limpet.saving.image import Image
from limpet.snapshot.location import Location, is_snapshot, locate, versions_in
from limpet.snapshot.reader import SnapshotReader
from limpet.state.arrays.own import Source
from limpet.storage.store import Store
from limpet.text import format_list
from limpet.threads import no_op
from limpet.types import DTYPES, Advance
from limpet.version import __version__

T = TypeVar("T")

SUFFIXES = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
    "hf": (),
}
"""The export formats, each with the suffixes that make the target a file name, not a folder."""

MODEL_KEY = "model"
"""The part of a state that is exported to ``safetensors`` and ``hf`` by default."""

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

UNSUPPORTED_DTYPES = ("complex32", "complex128")
"""The dtypes that safetensors has no code for."""

_DTYPE_CODES = FOREIGN_CODES | {"float4_e2m1fn_x2": "F4"}

MAX_SHARD_SIZE = 5 * 10**9
"""Maximum bytes of tensors in one Hugging Face file: the default of its libraries."""

_MAX_LISTED = 20

_AVERAGED, _AVERAGED_COUNT = "module.", "n_averaged"
"""The state of a ``torch.optim.swa_utils.AveragedModel``: the prefix of the names of the model, and
the name of the count next to it."""


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
class OutputTensor:
    """A tensor to export: its ``name`` in the file, and the ``key`` of the leaf or a ``source``."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    source: Source | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of an export: what it begins with, and the tensors that follow, in order."""

    name: str
    head: bytes
    tensors: tuple[OutputTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedExport:
    """An export that can be written into ``location``: ``files`` of ``hf`` and ``safetensors``, or
    the file and the state in memory for ``torch``. All of it is below the key ``root``."""

    snapshot: SnapshotReader
    location: Location
    kind: str
    root: str
    files: tuple[OutputFile, ...]
    torch: tuple[str, TorchState] | None
    tensors: int
    nbytes: int
    left_out: int

    @property
    def names(self) -> list[str]:
        """The names of the files, without the record. The last one is opened by other libraries."""
        return [file.name for file in self.files] if self.torch is None else [self.torch[0]]

    @property
    def record_name(self) -> str:
        return self.names[-1] + RECORD_SUFFIX

    def write(self, advance: Advance = no_op) -> ExportResult:
        """Write the files; after an error, none remains, unless another call has completed the same
        export. Files of an earlier call are compared and kept. Several threads call ``advance``."""
        refuse_existing(self)
        origin, store = _origin(self.snapshot), _ComparingStore(self.location.store)
        location = Location(cast(Store, store), self.location.folder)
        record_key, written = location.key(self.record_name), dict[str, ExportedFile]()
        may_be_listed = True  # in a record of another call
        try:
            with self.snapshot.pin_while_reading():
                if self.torch is None:
                    for name, file in write_files(self.snapshot, self.files, location, advance):
                        written[name] = file
                else:
                    name, state = self.torch
                    write = partial(write_torch_file, state, location, name, advance)
                    written[name] = store.write_or_compare(location.key(name), write)
            record = encode_record(origin, written)
            length, may_be_listed = len(record), False
            try:
                store.put_if_absent(record_key, record)
            except AlreadyExists as e:
                may_be_listed = True
                earlier = find_record(self.location, self.record_name)
                if earlier is None or earlier.files != written:
                    raise _other_file_error(self.location.store, record_key) from e
                length = store.stat(record_key).length
        except BaseException:
            with suppress(StoreError):  # report the first error
                earlier = find_record(self.location, self.record_name) if may_be_listed else None
                listed = {} if earlier is None else earlier.files
                for name, file in written.items():
                    if location.key(name) not in store.compared and listed.get(name) != file:
                        store.delete(location.key(name))
            raise
        url = location.url.rstrip("/")
        sizes = {**{name: f.length for name, f in written.items()}, self.record_name: length}
        return ExportResult(
            snapshot=self.snapshot.url,
            files=tuple((f"{url}/{name}", nbytes) for name, nbytes in sizes.items()),
            tensors=self.tensors,
            nbytes=self.nbytes,
            left_out=self.left_out,
        )


def prepare_export(
    snapshot: SnapshotReader,
    path: str | os.PathLike[str],
    to: str,
    *,
    root: str | None = None,
    keys: Sequence[str] = (),
    max_shard_size: float = MAX_SHARD_SIZE,
    merged: Mapping[str, Source] = {},
) -> PreparedExport:
    """Check and plan an export before anything is written. ``merged``: sources, by key, in place of
    the leaves of a part, but not for ``torch``. Raises ``MissingLeaf`` if nothing is selected, and
    ``Unsupported``, which names everything that the format cannot represent."""
    require("to=", to in SUFFIXES, " or ".join(map(repr, SUFFIXES)), to)
    most = real(max_shard_size) or 0
    expected = "a number of bytes, 1 or more, such as 5e9"
    require("max_shard_size=", most >= 1, expected, max_shard_size)
    require("path", isinstance(path, str | os.PathLike), "a path or a URL", path)
    location, name = locate_export(path_text("path=", path), to)
    if root is None:
        has_model = any(k == MODEL_KEY for _, k in tree.members(snapshot.manifest.tree, "") or ())
        root = MODEL_KEY if has_model and not keys and to != "torch" else ""
    root = root.strip("/")
    node = _find_container(snapshot, root)
    prefix = _averaged_model_prefix(node, root)
    torch, files, left_out = None, list[OutputFile](), 0
    if to == "torch":
        state = _load_state(snapshot, node, root, keys, prefix)
        torch, sizes = (name or "model.pt", state), [*state.tensors.values()]
    else:
        tensors, left_out = _select_tensors(snapshot, node, root, keys, prefix)
        above = {key: key.rpartition("/")[0] + "/" for key in merged}
        sources = [
            OutputTensor(_tensor_name(key, root), key, each.dtype, each.shape, each)
            for key, each in merged.items()
            if any(tensor.key.startswith(above[key]) for tensor in tensors)
        ]
        tensors = [t for t in tensors if not t.key.startswith(tuple(above.values()))] + sources
        sizes = [tensor.nbytes for tensor in tensors]
        files = (
            plan_hf_files(tensors, most)
            if to == "hf"
            else [plan_safetensors_file(name or SINGLE_FILE, tensors)]
        )
    prepared = PreparedExport(
        snapshot,
        location,
        to,
        root,
        files=tuple(files),
        torch=torch,
        tensors=len(sizes),
        nbytes=sum(sizes),
        left_out=left_out,
    )
    refuse_existing(prepared)
    return prepared


def locate_export(to: str, kind: str) -> tuple[Location, str | None]:
    """Return the folder to export to, and the name of the file if ``to`` names one, else None."""
    folder, slash, last = to.rpartition("/")
    name = None
    if last.endswith(SUFFIXES[kind]) and not folder.endswith(":/"):  # s3://BUCKET.pt is a bucket
        to, name = folder or slash or ".", last
    if not to.strip("/"):
        raise StoreError(f"{to!r} does not name a folder to export to")
    return locate(to), name


def refuse_existing(export: PreparedExport) -> None:
    """Raise ``AlreadyExists``, before anything is written, for files of no earlier call."""
    location = export.location
    # of a version that is saved later, retention deletes the whole folder
    is_in_run = parse_version(location.folder) and Run(location.store).listing().has_version()
    if is_in_run or is_snapshot(location) or versions_in(location):
        raise AlreadyExists(
            f"{location.url} is a snapshot, a version, or a run; nothing was exported into it",
            todo="Export to another folder",
            key=location.folder,
            store=location.store.url,
        )
    names = {*export.names, export.record_name}
    if export.kind == "hf":  # readers would use these instead of the new files
        names |= {SINGLE_FILE, INDEX_FILE}
    for name in sorted(names):
        with suppress(NotFound):
            length = location.store.stat(location.key(name)).length
            if not _may_be_equal(export, name, length):
                raise _other_file_error(location.store, location.key(name))


def _may_be_equal(export: PreparedExport, name: str, length: int) -> bool:
    """Return True if an existing file may be that of an earlier call: by its length and beginning,
    or by the version in a record."""
    location, planned = export.location, {file.name: file for file in export.files}
    if name == export.record_name:
        record = find_record(location, name)
        return record is not None and record.origin.get("manifest") == export.snapshot.digest
    if name not in planned:
        return name in export.names  # a file for torch.load, which is compared as a whole
    file = planned[name]
    head = bytearray(len(file.head))
    if length != len(head) + sum(tensor.nbytes for tensor in file.tensors):
        return False
    location.store.get_range(location.key(name), 0, len(head), memoryview(head))
    return head == file.head


def _other_file_error(store: Store, key: str) -> AlreadyExists:
    folder, _, name = key.rpartition("/")
    return AlreadyExists(
        f"There is already another file {name} in {Location(store, folder).url}; nothing was"
        " changed",
        todo="Export to another folder, or delete that file first",
        key=key,
        store=store.url,
    )


class _ComparingStore:
    """A store in which a file that exists is not written, but compared."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.compared: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_or_compare(self, key: str, write: Callable[[], T]) -> T:
        """Call ``write`` for the file ``key``; again if another process has created it."""
        try:
            return write()
        except AlreadyExists:
            if key in self.compared:
                raise
            return write()

    def put(self, key: str, length: int, *head: int) -> Any:
        try:
            found = self._inner.stat(key).length
        except NotFound:
            return self._inner.put(key, length, *head)
        self.compared.add(key)
        if found != length:
            raise _other_file_error(self._inner, key)
        return nullcontext(_Comparison(self._inner, key))


class _Comparison:
    """An upload that compares what it gets with the existing file ``key``."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key

    def write_at(self, offset: int, *data: memoryview) -> None:
        for part in data:
            existing = bytearray(len(part))
            self._store.get_range(self._key, offset, len(part), memoryview(existing))
            if existing != part:
                raise _other_file_error(self._store, self._key)
            offset += len(part)

    def commit(self) -> None:
        """Do nothing; all of it was compared."""


def _origin(snapshot: SnapshotReader) -> dict[str, Any]:
    """Return what the record says about the origin. It has no host and no full path."""
    folder = snapshot.location.folder
    is_version = parse_version(folder) is not None
    metrics = snapshot.metrics
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


# -- selecting ------------------------------------------------------------------------------------


def _find_container(snapshot: SnapshotReader, root: str) -> Any:
    """Return the node at the key ``root``, which must be a container. Raises ``MissingLeaf``."""
    node, key = snapshot.manifest.tree, ""
    while (members := tree.members(node, key)) is not None and key != root:
        inner = next(((c, k) for c, k in members if f"{root}/".startswith(f"{k}/")), None)
        if inner is None:
            break
        node, key = inner
    if members is None or key != root:
        keys = [k for _, k in tree.members(node, key) or ()]
        raise MissingLeaf(
            f"{snapshot.url} has nothing below {root}",
            expected="the key of a part of its state",
            found=", ".join(keys[:_MAX_LISTED]) or f"a leaf, {key}",
            todo="`limpet show SNAPSHOT` prints the keys",
            leaf=root,
        )
    return node


def _averaged_model_prefix(node: Any, root: str) -> str:
    """Return ``module.`` if ``node`` is an ``AveragedModel``, which has ``n_averaged`` next to its
    member ``module``, else ""."""
    children = tree.children(node, root) if tree.is_dict(node) else ()
    names = {str(name) for name, _, _ in children}
    others = names - {_AVERAGED_COUNT}
    is_averaged = len(names) > len(others) > 0 and all(n.startswith(_AVERAGED) for n in others)
    return _AVERAGED if is_averaged else ""


def _select_tensors(
    snapshot: SnapshotReader, node: Any, root: str, keys: Sequence[str], prefix: str
) -> tuple[list[OutputTensor], int]:
    """Return the selected tensors and arrays in tree order, and the number of plain values."""
    is_selected = make_key_filter(list(keys)) if keys else match_all
    count = join_key(root, _AVERAGED_COUNT) if prefix else None
    tensors: dict[str, OutputTensor] = {}
    refused: dict[str, str] = {}
    left_out = 0
    for key, leaf in tree.walk(node, root, split_sparse=False):
        tag = next(iter(leaf), "") if type(leaf) is dict else ""
        if key == count or not any(is_selected(k) for k, _ in tree.walk(leaf, key)):
            continue
        name = _tensor_name(key, root)
        source = leaf["tied"] if tag == "tied" else key
        if tag == "sparse":
            refused[key] = "sparse"
        elif tag == "subclass":
            refused[key] = f"of class {leaf[tag]['class']}"
        elif source not in snapshot.leaves or tag == "blob":
            left_out += 1
        elif len(leaf.get("array", ())) == 3:
            refused[key] = f"an array of {from_descr(leaf['array'][2])}"
        elif (dtype := snapshot.leaves[source][0]) in UNSUPPORTED_DTYPES:
            refused[key] = dtype
        else:
            tensor = OutputTensor(
                name.removeprefix(prefix), source, dtype, snapshot.leaves[source][1]
            )
            if tensor.name in tensors or tensor.name == "__metadata__":
                refused[key] = f"its name {tensor.name} is taken"
            tensors[tensor.name] = tensor
    _raise_if_refused(snapshot, refused, "safetensors")
    if not tensors:
        raise _nothing_selected_error(snapshot, root)
    return list(tensors.values()), left_out


def _tensor_name(key: str, root: str) -> str:
    """Return the key below the root, with its names unescaped."""
    escapes = {"~0": "~", "~1": "/"}
    return "/".join(
        "" if level == "~" else re.sub("~[01]", lambda match: escapes[match[0]], level)
        for level in key.removeprefix(f"{root}/").split("/")
    )


def _load_state(
    snapshot: SnapshotReader, part: Any, root: str, keys: Sequence[str], prefix: str
) -> TorchState:
    """Load what is selected of the node ``part`` for ``torch.save``. Every byte is checked."""
    import_torch("Writing a file for torch.load needs PyTorch; one for safetensors does not")
    refused = {
        key: f"of class {leaf['subclass']['class']}"
        for key, leaf in tree.walk(part, root, split_sparse=False)
        if type(leaf) is dict and "subclass" in leaf
    }
    if not keys:
        _raise_if_refused(snapshot, refused, "torch.load(weights_only=True)")
    is_selected = make_key_filter(list(keys)) if keys else match_all
    if prune(part, is_selected, root) is ABSENT:
        raise _nothing_selected_error(snapshot, root)
    value: Any = load_snapshot(snapshot, keys=[*keys] or ([root] if root else None))
    key, node = "", snapshot.manifest.tree
    while key != root:
        if not {"list", "tuple"}.isdisjoint(node):
            names = [(i, c, join_key(key, str(i))) for i, c in enumerate(node[next(iter(node))])]
        else:
            names = tree.children(node, key)
        name, node, key = next(row for row in names if f"{root}/".startswith(f"{row[2]}/"))
        value = value[name]
    if prefix:
        value.pop(_AVERAGED_COUNT, None)
    parameters = {to_dotted(k) for k, _ in tree.walk(snapshot.manifest.tree, split_sparse=False)}
    state = convert_state(value, root, parameters, prefix)
    _raise_if_refused(snapshot, state.refused, "torch.load(weights_only=True)")
    return state


def _raise_if_refused(snapshot: SnapshotReader, refused: dict[str, str], target: str) -> None:
    if refused:
        raise Unsupported(
            f"{snapshot.url} has leaves that {target} cannot represent",
            found=format_list([f"{key} ({why})" for key, why in refused.items()], _MAX_LISTED),
            todo="Select other leaves with --root KEY or --keys PATTERN, such as --keys 'model/**'",
            leaves=tuple(refused),
        )


def _nothing_selected_error(snapshot: SnapshotReader, root: str) -> MissingLeaf:
    return MissingLeaf(
        f"The selection contains nothing of {snapshot.url} that can be exported",
        expected=f"tensors or arrays below {root}" if root else "tensors or arrays",
        found=", ".join([*snapshot.nodes()][:10]),
        todo="`limpet show SNAPSHOT --keys '**'` prints the keys; * matches within a level, **"
        " across levels",
    )


# -- the files -------------------------------------------------------------------------------------


def plan_safetensors_file(name: str, tensors: Sequence[OutputTensor]) -> OutputFile:
    """Plan a safetensors file, with larger elements first, so that all tensors are aligned. Raises
    ``Unsupported`` if the library would refuse the header."""
    ordered = sorted(tensors, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name))
    rows, at = [], 0
    for tensor in ordered:
        code = _DTYPE_CODES.get(tensor.dtype, DTYPES[tensor.dtype].stored_dtype)
        shape = tensor.shape
        if code == "F4":  # two elements per byte
            shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
        rows.append((tensor.name, code, shape, at, at + tensor.nbytes))
        at += tensor.nbytes
    return OutputFile(name, build_header(rows), tuple(ordered))


def plan_hf_files(tensors: Sequence[OutputTensor], max_shard_size: float) -> list[OutputFile]:
    """Plan the files of a Hugging Face checkpoint; if there are several, the index comes last."""
    shards = list(_split_into_files(tensors, max_shard_size))
    if len(shards) == 1:
        return [plan_safetensors_file(SINGLE_FILE, shards[0])]
    total = len(shards)
    names = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    file_of = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors)},
        "weight_map": {t.name: file_of[t.name] for t in tensors},
    }
    files = [plan_safetensors_file(*pair) for pair in zip(names, shards, strict=True)]
    return [*files, OutputFile(INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())]


def _split_into_files(
    tensors: Sequence[OutputTensor], max_shard_size: float
) -> Iterator[list[OutputTensor]]:
    """Split tensors into files in the order of the state, as ``huggingface_hub`` does. A tensor of
    more than ``max_shard_size`` gets its own file."""
    shard: list[OutputTensor] = []
    used = 0
    for tensor in tensors:
        if tensor.nbytes > max_shard_size:
            yield [tensor]
            continue
        if used + tensor.nbytes > max_shard_size:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += tensor.nbytes
    if shard:
        yield shard


def write_files(
    snapshot: SnapshotReader, files: Sequence[OutputFile], location: Location, advance: Advance
) -> Iterator[tuple[str, ExportedFile]]:
    """Write the files, and yield each with its name: in ascending order if a store uploads parts or
    only appends. (A tile takes parts of many leaves, see ``windows.py``.)"""
    store = cast(_ComparingStore, location.store)
    with snapshot.not_found_if_deleted():
        locations = windows.locate_leaves(snapshot)
        for file in files:
            lengths = np.array([tensor.nbytes for tensor in file.tensors], np.int64)
            ends, cuts = np.cumsum(lengths) + len(file.head), chunk_cuts(len(file.head), lengths)
            leaves = [
                windows.OrderedLeaf(t.key, t.dtype, t.shape, t.nbytes, source=t.source)
                for t in file.tensors
            ]
            leaves = windows.group_leaves(snapshot, leaves, locations)
            if store.traits.part_size or store.traits.ordered:
                leaves = [leaf._replace(tile_ends=()) for leaf in leaves]
            image = Image(
                file.head,
                leaf_boxes=[],
                sources=[(number, 0) for number in range(len(leaves))],
                box_starts=(ends - lengths).tolist(),
                box_ends=ends.tolist(),
                cuts=cuts,
                length=int(cuts[-1]),
            )
            image = windows.add_cuts(image, leaves)
            read = windows.make_reader(snapshot, leaves, locations)
            key = location.key(file.name)
            write = partial(
                windows.write_images, location.store, [key], [image], leaves, read, advance
            )
            [digests] = store.write_or_compare(key, write)
            pieces = zip(np.diff(image.cuts, prepend=0).tolist(), digests, strict=True)
            yield file.name, ExportedFile(image.length, [*pieces])
