"""Exporting: a snapshot's tensors as files that others read, every digest checked on the way.

1. Choose: what of the tree is wanted. 2. Plan: which files, and where in them each leaf lies; what
the target cannot express is refused by name. 3. Write: each file aside, filled in pieces, synced,
then named. The memory used is that of ``pour``, whatever the sizes.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.engine.planning.select import ABSENT, Selected, everything, prune, selector
from holdfast.engine.snapshot.location import Location, is_snapshot, locate, versions_in
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, MissingLeaf, NotFound, StoreError, Unsupported
from holdfast.format import torchzip, tree
from holdfast.format.names import join
from holdfast.interop.output_layout import (
    INDEX,
    SINGLE,
    UNNAMED,
    OutFile,
    Tensor,
    hf_files,
    tensor_file,
    torch_file,
)
from holdfast.interop.stream import pour
from holdfast.interop.torch_pickle import pickled

SUFFIXES = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
    "hf": (),
}
"""What can be exported to; and what a file is called, rather than the folder that it will be in."""

MODEL = "model"
"""The part of a state that is exported to ``safetensors`` and ``hf`` unless another is named."""

SHARD_SIZE = 5 * 10**9
"""Most bytes of tensors in one file of a Hugging Face checkpoint, as its libraries have it."""

SHOWN = 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Export:
    """What is to be written. ``root``: the key below which it is; ``nbytes``: of its ``tensors``;
    ``left_out``: how many plain values the target has no place for."""

    kind: str
    root: str
    files: tuple[OutFile, ...]
    tensors: int
    nbytes: int
    left_out: int = 0


def plan_export(
    snapshot: Snapshot,
    kind: str,
    *,
    root: str | None = None,
    keys: Sequence[str] = (),
    shard_size: int = SHARD_SIZE,
    name: str | None = None,
) -> Export:
    """What an export to ``kind`` (one of ``SUFFIXES``) would write; only the manifest is read.

    ``root``: the key of what is exported, ``"/"`` for all. None: ``model`` where there is one and
    no ``keys`` are given, except to ``torch``; else all. ``keys``: only leaves that match one of
    these patterns. ``name``: of the file, where it is one.

    Raises ``MissingLeaf`` if nothing is chosen, ``Unsupported`` naming all that ``kind`` cannot
    express.
    """
    if root is None:
        top = any(k == MODEL for _, k in _members(snapshot.manifest.tree, "") or ())
        root = MODEL if top and not keys and kind != "torch" else ""
    root = root.strip("/")
    node = _below(snapshot, root)
    selected = selector(list(keys)) if keys else everything
    left_out = 0
    if kind == "torch":
        file, tensors = _torch(snapshot, node, root, selected, name or "model.pt")
        files = [file]
    else:
        tensors, left_out = _tensors(snapshot, node, root, selected)
        if kind == "hf":
            files = hf_files(tensors, shard_size)
        else:
            files = [tensor_file(name or SINGLE, tensors)]
    nbytes = sum(t.nbytes for t in tensors)
    return Export(kind, root, tuple(files), len(tensors), nbytes, left_out)


def export_place(to: str, kind: str) -> tuple[Location, str | None]:
    """The folder to export to, and the name of the file if ``to`` is one. Raises ``StoreError``."""
    folder, slash, last = to.rpartition("/")
    name = None
    if last.endswith(SUFFIXES[kind]):
        to, name = folder or slash or ".", last
    if "://" not in to and os.path.basename(to.rstrip("/")) in ("", ".", ".."):
        if not to.strip("/"):
            raise StoreError(f"{to!r} names no folder to export to")
        to = os.path.abspath(to)
    return locate(to), name


def write_export(
    snapshot: Snapshot, export: Export, place: Location, progress: Progress | None = None
) -> None:
    """Write the files into the folder ``place``; whenever this raises, none of them is there.

    ``progress(nbytes)`` is called as bytes of tensors are done, from several threads. Raises
    ``AlreadyExists``, ``FormatError`` if the snapshot is damaged, ``StoreError``.
    """
    _refuse_existing(place, export)
    made: list[str] = []
    try:
        with snapshot.pinned():
            for file in export.files:
                _write(snapshot, file, place, progress)
                made.append(place.key(file.name))
    except BaseException:
        for key in made:
            with suppress(StoreError):  # the first error is told
                place.store.delete(key)
        raise


# -- choosing -------------------------------------------------------------------------------------


def _members(node: Any, key: str) -> list[tuple[Any, str]] | None:
    """Node and key of all that is right in a container; None for what is none."""
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered", "items"):
        return [(child, k) for _, child, k in tree.children(node, key)]
    if tag in ("list", "tuple"):
        return [(child, join(key, str(i))) for i, child in enumerate(node[tag])]
    return None


def _below(snapshot: Snapshot, root: str) -> Any:
    """The node of the key ``root``, which must be a container. Raises ``MissingLeaf``."""
    node, key = snapshot.manifest.tree, ""
    while (members := _members(node, key)) is not None and key != root:
        found = [(c, k) for c, k in members if f"{root}/".startswith(f"{k}/")]
        if not found:
            break
        node, key = found[0]
    if members is None or key != root:
        raise MissingLeaf(
            f"{snapshot.url} has nothing below {root}",
            expected="the key of a part of its state",
            found=", ".join(k for _, k in (members or ())[:SHOWN]) or f"a leaf, {key}",
            todo="`holdfast show SNAPSHOT` prints the keys",
            leaf=root,
        )
    return node


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """As ``tree.walk``, but a sparse tensor is one."""
    members = _members(node, key)
    if members is None:
        yield key, node
    for child, k in members or ():
        yield from _leaves(child, k)


def _tensors(
    snapshot: Snapshot, node: Any, root: str, selected: Selected
) -> tuple[list[Tensor], int]:
    """The chosen tensors and arrays in order of the tree, and how many plain values there are."""
    made: dict[str, Tensor] = {}
    refused: dict[str, str] = {}
    left_out = 0
    for key, leaf in _leaves(node, root):
        tag = next(iter(leaf), "") if type(leaf) is dict else ""
        if not any(selected(k) for k, _ in tree.walk(leaf, key)):
            continue
        source = leaf["tied"] if tag == "tied" else key
        if tag == "sparse":
            refused[key] = "sparse"
        elif source not in snapshot.leaves or tag == "blob":
            left_out += 1
        elif len(leaf.get("array", ())) == 3:
            refused[key] = f"an array of {tree.from_descr(leaf['array'][2])}"
        elif (dtype := snapshot.leaves[source][0]) in UNNAMED:
            refused[key] = dtype
        else:
            tensor = Tensor(_name(key, root), source, *snapshot.leaves[source])
            if tensor.name in made or tensor.name == "__metadata__":
                refused[key] = f"its name {tensor.name} is taken"
            made[tensor.name] = tensor
    _refuse(snapshot, refused, "safetensors")
    if not made:
        raise _nothing(snapshot, root)
    return list(made.values()), left_out


def _name(key: str, root: str) -> str:
    """The key below the root, with the names in it as they were before they were escaped."""
    plain = {"~0": "~", "~1": "/"}
    return "/".join(
        "" if level == "~" else re.sub("~[01]", lambda found: plain[found[0]], level)
        for level in key.removeprefix(f"{root}/").split("/")
    )


def _torch(
    snapshot: Snapshot, node: Any, root: str, selected: Selected, name: str
) -> tuple[OutFile, list[Tensor]]:
    """The tree as it is, arrays as tensors. Tied tensors share their memory."""
    chosen = node if selected is everything else prune(node, selected, root)
    if chosen is ABSENT:
        raise _nothing(snapshot, root)
    made = pickled(snapshot, chosen, root)
    _refuse(snapshot, made.refused, "torch.load(weights_only=True)")
    tensors = [Tensor(key, key, *snapshot.leaves[key]) for key in made.sources]
    return torch_file(name, made.data(), tensors), tensors


def _refuse(snapshot: Snapshot, refused: dict[str, str], target: str) -> None:
    if not refused:
        return
    several = [f"{key} ({why})" for key, why in list(refused.items())[:SHOWN]]
    more = f" and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
    raise Unsupported(
        f"{snapshot.url} has leaves that {target} cannot express",
        found=", ".join(several) + more,
        todo="Choose what is exported by --root KEY or --keys PATTERN, such as --keys 'model/**'",
        leaves=tuple(refused),
    )


def _nothing(snapshot: Snapshot, root: str) -> MissingLeaf:
    return MissingLeaf(
        f"Nothing that can be exported is chosen of {snapshot.url}",
        expected=f"tensors or arrays below {root}" if root else "tensors or arrays",
        found=", ".join(snapshot.keys()[:10]),
        todo="`holdfast show SNAPSHOT --keys '**'` prints the keys; * stays within a level, **"
        " crosses levels",
    )


# -- writing --------------------------------------------------------------------------------------


def _refuse_existing(place: Location, export: Export) -> None:
    """Raise ``AlreadyExists`` before anything is written."""
    if is_snapshot(place) or versions_in(place):
        raise AlreadyExists(
            f"{place.url} is a snapshot or a run; nothing was exported into it",
            todo="Name a folder of its own",
            key=place.folder,
            store=place.store.url,
        )
    names = {file.name for file in export.files}
    if export.kind == "hf":  # which readers would take instead of what is to be written
        names |= {SINGLE, INDEX}
    for name in sorted(names):
        with suppress(NotFound):
            place.store.stat(place.key(name))
            raise AlreadyExists(
                f"There is {name} in {place.url} already; nothing was changed",
                todo="Export to another folder, or delete that file first",
                key=place.key(name),
                store=place.store.url,
            )


def _write(snapshot: Snapshot, file: OutFile, place: Location, progress: Progress | None) -> None:
    """Write one file: the leaves, then what is around them. Raises as ``write_export``."""
    sums: list[list[tuple[int, int, int]]] = [[] for _ in file.keys]

    def write(number: int, at: int, data: memoryview) -> None:
        upload.write_at(file.begins[number] + at, data)
        if file.summed:
            sums[number].append((at, len(data), zlib.crc32(data)))
        if progress is not None:
            progress(len(data))

    with place.store.put(place.key(file.name), file.length) as upload:
        if file.keys:
            pour(snapshot, file.keys, write)
        whole = [torchzip.joined((n, crc) for _, n, crc in sorted(several)) for several in sums]
        for at, raw in file.frame(whole):
            upload.write_at(at, memoryview(raw))
        upload.commit()
