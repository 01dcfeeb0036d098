"""Export: write the tensors of a snapshot in another format, and check every digest.

1. Select the part of the tree to export.
2. Plan the files, and the offset of each leaf in them. Values that the format cannot represent are
   refused, and the error names all of them.
3. Write each file under a temporary name in pieces, sync it, then give it its name.

Memory use is that of ``stream_leaves``, and does not depend on the size of the snapshot.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.engine.planning.select import ABSENT, KeyFilter, make_key_filter, match_all, prune
from holdfast.engine.snapshot.location import Location, is_snapshot, locate, versions_in
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, MissingLeaf, NotFound, StoreError, Unsupported
from holdfast.format import torchzip, tree
from holdfast.interop.output_layout import (
    INDEX_FILE,
    SINGLE_FILE,
    UNSUPPORTED_DTYPES,
    OutputFile,
    OutputTensor,
    plan_hf_files,
    plan_safetensors_file,
    plan_torch_file,
)
from holdfast.interop.stream import stream_leaves
from holdfast.interop.torch_pickle import build_torch_pickle
from holdfast.text import format_list
from holdfast.threads import no_op
from holdfast.types import MIB

SUFFIXES = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
    "hf": (),
}
"""The export formats, each with the suffixes that make the target a file name, not a folder."""

MODEL_KEY = "model"
"""The part of a state that is exported to ``safetensors`` and ``hf`` by default."""

MAX_SHARD_SIZE = 5 * 10**9
"""Maximum bytes of tensors in one Hugging Face file: the default of its libraries."""

SEGMENT = 64 * MIB
"""How many bytes of a file are exported before the next ones, to a store that uploads parts or only
appends. The leaves come in the order in which a shard has them, and a leaf with a checksum comes
before its header. This bounds the bytes that wait for those in front of them."""

MAX_LISTED = 20

Advance = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files to write.

    ``root``: the key below which everything is exported. ``tensor_count`` and ``nbytes``: the
    number of tensors, and the bytes of their elements. ``left_out``: the number of plain values
    that the format cannot represent.
    """

    kind: str
    root: str
    files: tuple[OutputFile, ...]
    tensor_count: int
    nbytes: int
    left_out: int = 0


def plan_export(
    snapshot: Snapshot,
    kind: str,
    *,
    root: str | None = None,
    keys: Sequence[str] = (),
    max_shard_size: int = MAX_SHARD_SIZE,
    file_name: str | None = None,
) -> ExportPlan:
    """Plan an export to ``kind``, one of ``SUFFIXES``. Only the manifest is read.

    ``root``: the key below which everything is exported; ``"/"`` exports all. None means ``model``
    if there is one, no ``keys`` are given, and ``kind`` is not ``torch``; otherwise all. ``keys``:
    patterns; only leaves that match one of them are exported. ``file_name``: the name of the file,
    if the export is a single one.

    Raises ``MissingLeaf`` if nothing is selected, and ``Unsupported``, which names everything that
    ``kind`` cannot represent.
    """
    if root is None:
        has_model = any(k == MODEL_KEY for _, k in tree.members(snapshot.manifest.tree, "") or ())
        root = MODEL_KEY if has_model and not keys and kind != "torch" else ""
    root = root.strip("/")
    node = _find_container(snapshot, root)
    selected = make_key_filter(list(keys)) if keys else match_all
    left_out = 0
    if kind == "torch":
        files, tensors = _plan_torch(snapshot, node, root, selected, file_name or "model.pt")
    else:
        tensors, left_out = _select_tensors(snapshot, node, root, selected)
        files = (
            plan_hf_files(tensors, max_shard_size)
            if kind == "hf"
            else [plan_safetensors_file(file_name or SINGLE_FILE, tensors)]
        )
    nbytes = sum(t.nbytes for t in tensors)
    return ExportPlan(kind, root, tuple(files), len(tensors), nbytes, left_out)


def locate_export(to: str, kind: str) -> tuple[Location, str | None]:
    """Return the folder to export to, and the name of the file if ``to`` names one (else None).

    Raises ``StoreError``.
    """
    folder, slash, last = to.rpartition("/")
    name = None
    if last.endswith(SUFFIXES[kind]) and not folder.endswith(":/"):  # s3://BUCKET.pt is a bucket
        to, name = folder or slash or ".", last
    if "://" not in to and os.path.basename(to.rstrip("/")) in ("", ".", ".."):
        if not to.strip("/"):
            raise StoreError(f"{to!r} does not name a folder to export to")
        to = os.path.abspath(to)
    return locate(to), name


def write_export(
    snapshot: Snapshot, plan: ExportPlan, location: Location, advance: Advance = no_op
) -> None:
    """Write the files into the folder ``location``. If this function raises, none of them remains.

    ``advance(nbytes)`` is called from several threads as bytes of tensors are written. Raises
    ``AlreadyExists``, ``FormatError`` if the snapshot is damaged, and ``StoreError``.
    """
    _refuse_existing(location, plan)
    written: list[str] = []
    try:
        with snapshot.pin_while_reading():
            for file in plan.files:
                _write_file(snapshot, file, location, advance)
                written.append(location.key(file.name))
    except BaseException:
        for key in written:
            with suppress(StoreError):  # report the first error
                location.store.delete(key)
        raise


# -- selecting ------------------------------------------------------------------------------------


def _find_container(snapshot: Snapshot, root: str) -> Any:
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
            found=", ".join(keys[:MAX_LISTED]) or f"a leaf, {key}",
            todo="`holdfast show SNAPSHOT` prints the keys",
            leaf=root,
        )
    return node


def _select_tensors(
    snapshot: Snapshot, node: Any, root: str, is_selected: KeyFilter
) -> tuple[list[OutputTensor], int]:
    """Return the selected tensors and arrays in tree order, and the number of plain values."""
    tensors: dict[str, OutputTensor] = {}
    refused: dict[str, str] = {}
    left_out = 0
    for key, leaf in tree.walk(node, root, split_sparse=False):
        tag = next(iter(leaf), "") if type(leaf) is dict else ""
        if not any(is_selected(k) for k, _ in tree.walk(leaf, key)):
            continue
        source = leaf["tied"] if tag == "tied" else key
        if tag == "sparse":
            refused[key] = "sparse"
        elif source not in snapshot.leaves or tag == "blob":
            left_out += 1
        elif len(leaf.get("array", ())) == 3:
            refused[key] = f"an array of {tree.from_descr(leaf['array'][2])}"
        elif (dtype := snapshot.leaves[source][0]) in UNSUPPORTED_DTYPES:
            refused[key] = dtype
        else:
            tensor = OutputTensor(_tensor_name(key, root), source, *snapshot.leaves[source])
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


def _plan_torch(
    snapshot: Snapshot, node: Any, root: str, is_selected: KeyFilter, file_name: str
) -> tuple[list[OutputFile], list[OutputTensor]]:
    """Plan one file with the selected tree. Arrays become tensors; tied tensors share a record."""
    selected = node if is_selected is match_all else prune(node, is_selected, root)
    if selected is ABSENT:
        raise _nothing_selected_error(snapshot, root)
    pickled = build_torch_pickle(snapshot, selected, root)
    _raise_if_refused(snapshot, pickled.refused, "torch.load(weights_only=True)")
    tensors = [OutputTensor(key, key, *snapshot.leaves[key]) for key in pickled.tensors]
    return [plan_torch_file(file_name, pickled.to_bytes(), tensors)], tensors


def _raise_if_refused(snapshot: Snapshot, refused: dict[str, str], target: str) -> None:
    if refused:
        raise Unsupported(
            f"{snapshot.url} has leaves that {target} cannot represent",
            found=format_list([f"{key} ({why})" for key, why in refused.items()], MAX_LISTED),
            todo="Select other leaves with --root KEY or --keys PATTERN, such as --keys 'model/**'",
            leaves=tuple(refused),
        )


def _nothing_selected_error(snapshot: Snapshot, root: str) -> MissingLeaf:
    return MissingLeaf(
        f"The selection contains nothing of {snapshot.url} that can be exported",
        expected=f"tensors or arrays below {root}" if root else "tensors or arrays",
        found=", ".join(snapshot.keys()[:10]),
        todo="`holdfast show SNAPSHOT --keys '**'` prints the keys; * matches within a level, **"
        " across levels",
    )


# -- writing --------------------------------------------------------------------------------------


def _refuse_existing(location: Location, plan: ExportPlan) -> None:
    """Raise ``AlreadyExists`` before anything is written."""
    if is_snapshot(location) or versions_in(location):
        raise AlreadyExists(
            f"{location.url} is a snapshot or a run; nothing was exported into it",
            todo="Export to another folder",
            key=location.folder,
            store=location.store.url,
        )
    names = {file.name for file in plan.files}
    if plan.kind == "hf":  # readers would use these instead of the new files
        names |= {SINGLE_FILE, INDEX_FILE}
    for name in sorted(names):
        with suppress(NotFound):
            location.store.stat(location.key(name))
            raise AlreadyExists(
                f"There is already a file {name} in {location.url}; nothing was changed",
                todo="Export to another folder, or delete that file first",
                key=location.key(name),
                store=location.store.url,
            )


def _write_file(snapshot: Snapshot, file: OutputFile, location: Location, advance: Advance) -> None:
    """Write one file, in ascending order as far as possible. Raises as ``write_export`` does.

    A store that uploads parts keeps incomplete parts in memory, and a store that can only append
    keeps everything that comes too early.
    """
    crcs: list[list[tuple[int, int, int]]] = [[] for _ in file.keys]
    checksums = [0] * len(file.keys)
    build_header = file.build_leaf_header
    store = location.store

    def write_piece(at: int, raw: bytes) -> None:
        upload.write_at(at, memoryview(raw))

    is_split = store.traits.part_size or store.traits.ordered
    with store.put(location.key(file.name), file.length) as upload:
        for at, raw in file.pieces:
            write_piece(at, raw)
        for numbers in _split_by_offset(file, SEGMENT if is_split else file.length):

            def write(i: int, at: int, data: memoryview, numbers: list[int] = numbers) -> None:
                upload.write_at(file.offsets[numbers[i]] + at, data)
                if build_header is not None:
                    crcs[numbers[i]].append((at, len(data), zlib.crc32(data)))
                advance(len(data))

            stream_leaves(snapshot, [file.keys[n] for n in numbers], write)
            if build_header is not None:
                for n in numbers:
                    found = ((length, crc) for _, length, crc in sorted(crcs[n]))
                    checksums[n] = torchzip.combine_crc32(found)
                    write_piece(*build_header(n, checksums[n]))
        if file.build_directory is not None:
            write_piece(*file.build_directory(checksums))
        upload.commit()


def _split_by_offset(file: OutputFile, nbytes: int) -> Iterator[list[int]]:
    """Yield the numbers of the leaves in the order of their offsets, in groups that lie within
    ``nbytes`` bytes of the file. A larger leaf is a group of its own: in a group, the leaves that
    are assembled come last, so one in front of it would keep all of it waiting."""
    in_order = sorted(range(len(file.keys)), key=file.offsets.__getitem__)
    ends = [file.offsets[n] for n in in_order[1:]] + [file.length]
    start = 0
    while start < len(in_order):
        end = file.offsets[in_order[start]] + nbytes
        stop = start + 1
        while stop < len(in_order) and ends[stop] <= end:
            stop += 1
        yield in_order[start:stop]
        start = stop
