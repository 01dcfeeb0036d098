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

from holdfast.engine.planning.select import ABSENT, KeyFilter, make_key_filter, match_all, prune
from holdfast.engine.snapshot.location import Location, is_snapshot, locate, versions_in
from holdfast.engine.snapshot.snapshot import Snapshot
from holdfast.errors import AlreadyExists, MissingLeaf, NotFound, StoreError, Unsupported
from holdfast.format import torchzip, tree
from holdfast.format.names import join_key
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

SUFFIXES = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
    "hf": (),
}
"""What can be exported to; and what a file is called, rather than the folder that it will be in."""

MODEL_KEY = "model"
"""The part of a state that is exported to ``safetensors`` and ``hf`` unless another is named."""

MAX_SHARD_SIZE = 5 * 10**9
"""Most bytes of tensors in one file of a Hugging Face checkpoint, as its libraries have it."""

MAX_LISTED = 20

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is to be written. ``root``: the key below which it is; ``nbytes``: of its ``tensors``;
    ``left_out``: how many plain values the target has no place for."""

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
    """What an export to ``kind`` (one of ``SUFFIXES``) would write; only the manifest is read.

    ``root``: the key of what is exported, ``"/"`` for all. None: ``model`` where there is one and
    no ``keys`` are given, except to ``torch``; else all. ``keys``: only leaves that match one of
    these patterns. ``name``: of the file, where it is one.

    Raises ``MissingLeaf`` if nothing is chosen, ``Unsupported`` naming all that ``kind`` cannot
    express.
    """
    if root is None:
        top = any(k == MODEL_KEY for _, k in _members(snapshot.manifest.tree, "") or ())
        root = MODEL_KEY if top and not keys and kind != "torch" else ""
    root = root.strip("/")
    node = _find_container(snapshot, root)
    selected = make_key_filter(list(keys)) if keys else match_all
    left_out = 0
    if kind == "torch":
        file, tensors = _plan_torch(snapshot, node, root, selected, file_name or "model.pt")
        files = [file]
    else:
        tensors, left_out = _select_tensors(snapshot, node, root, selected)
        if kind == "hf":
            files = plan_hf_files(tensors, max_shard_size)
        else:
            files = [plan_safetensors_file(file_name or SINGLE_FILE, tensors)]
    nbytes = sum(t.nbytes for t in tensors)
    return ExportPlan(kind, root, tuple(files), len(tensors), nbytes, left_out)


def locate_export(to: str, kind: str) -> tuple[Location, str | None]:
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
    snapshot: Snapshot, plan: ExportPlan, location: Location, advance: Advance | None = None
) -> None:
    """Write the files into the folder ``place``; whenever this raises, none of them is there.

    ``progress(nbytes)`` is called as bytes of tensors are done, from several threads. Raises
    ``AlreadyExists``, ``FormatError`` if the snapshot is damaged, ``StoreError``.
    """
    _refuse_existing(location, plan)
    made: list[str] = []
    try:
        with snapshot.pin_while_reading():
            for file in plan.files:
                _write_file(snapshot, file, location, advance)
                made.append(location.key(file.name))
    except BaseException:
        for key in made:
            with suppress(StoreError):  # the first error is told
                location.store.delete(key)
        raise


# -- choosing -------------------------------------------------------------------------------------


def _members(node: Any, key: str) -> list[tuple[Any, str]] | None:
    """Node and key of all that is right in a container; None for what is none."""
    tag = next(iter(node), None) if type(node) is dict else None
    if tag in ("dict", "ordered", "items"):
        return [(child, k) for _, child, k in tree.children(node, key)]
    if tag in ("list", "tuple"):
        return [(child, join_key(key, str(i))) for i, child in enumerate(node[tag])]
    return None


def _find_container(snapshot: Snapshot, root: str) -> Any:
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
            found=", ".join(k for _, k in (members or ())[:MAX_LISTED]) or f"a leaf, {key}",
            todo="`holdfast show SNAPSHOT` prints the keys",
            leaf=root,
        )
    return node


def _walk_leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """As ``tree.walk``, but a sparse tensor is one."""
    members = _members(node, key)
    if members is None:
        yield key, node
    for child, k in members or ():
        yield from _walk_leaves(child, k)


def _select_tensors(
    snapshot: Snapshot, node: Any, root: str, is_selected: KeyFilter
) -> tuple[list[OutputTensor], int]:
    """The chosen tensors and arrays in order of the tree, and how many plain values there are."""
    made: dict[str, OutputTensor] = {}
    refused: dict[str, str] = {}
    left_out = 0
    for key, leaf in _walk_leaves(node, root):
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
            if tensor.name in made or tensor.name == "__metadata__":
                refused[key] = f"its name {tensor.name} is taken"
            made[tensor.name] = tensor
    _raise_if_refused(snapshot, refused, "safetensors")
    if not made:
        raise _nothing_selected_error(snapshot, root)
    return list(made.values()), left_out


def _tensor_name(key: str, root: str) -> str:
    """The key below the root, with the names in it as they were before they were escaped."""
    plain = {"~0": "~", "~1": "/"}
    return "/".join(
        "" if level == "~" else re.sub("~[01]", lambda found: plain[found[0]], level)
        for level in key.removeprefix(f"{root}/").split("/")
    )


def _plan_torch(
    snapshot: Snapshot, node: Any, root: str, is_selected: KeyFilter, file_name: str
) -> tuple[OutputFile, list[OutputTensor]]:
    """The tree as it is, arrays as tensors. Tied tensors share their memory."""
    chosen = node if is_selected is match_all else prune(node, is_selected, root)
    if chosen is ABSENT:
        raise _nothing_selected_error(snapshot, root)
    made = build_torch_pickle(snapshot, chosen, root)
    _raise_if_refused(snapshot, made.refused, "torch.load(weights_only=True)")
    tensors = [OutputTensor(key, key, *snapshot.leaves[key]) for key in made.tensors]
    return plan_torch_file(file_name, made.to_bytes(), tensors), tensors


def _raise_if_refused(snapshot: Snapshot, refused: dict[str, str], target: str) -> None:
    if not refused:
        return
    several = [f"{key} ({why})" for key, why in list(refused.items())[:MAX_LISTED]]
    more = f" and {len(refused) - MAX_LISTED} more" if len(refused) > MAX_LISTED else ""
    raise Unsupported(
        f"{snapshot.url} has leaves that {target} cannot express",
        found=", ".join(several) + more,
        todo="Choose what is exported by --root KEY or --keys PATTERN, such as --keys 'model/**'",
        leaves=tuple(refused),
    )


def _nothing_selected_error(snapshot: Snapshot, root: str) -> MissingLeaf:
    return MissingLeaf(
        f"Nothing that can be exported is chosen of {snapshot.url}",
        expected=f"tensors or arrays below {root}" if root else "tensors or arrays",
        found=", ".join(snapshot.keys()[:10]),
        todo="`holdfast show SNAPSHOT --keys '**'` prints the keys; * stays within a level, **"
        " crosses levels",
    )


# -- writing --------------------------------------------------------------------------------------


def _refuse_existing(location: Location, plan: ExportPlan) -> None:
    """Raise ``AlreadyExists`` before anything is written."""
    if is_snapshot(location) or versions_in(location):
        raise AlreadyExists(
            f"{location.url} is a snapshot or a run; nothing was exported into it",
            todo="Name a folder of its own",
            key=location.folder,
            store=location.store.url,
        )
    names = {file.name for file in plan.files}
    if plan.kind == "hf":  # which readers would take instead of what is to be written
        names |= {SINGLE_FILE, INDEX_FILE}
    for name in sorted(names):
        with suppress(NotFound):
            location.store.stat(location.key(name))
            raise AlreadyExists(
                f"There is {name} in {location.url} already; nothing was changed",
                todo="Export to another folder, or delete that file first",
                key=location.key(name),
                store=location.store.url,
            )


def _write_file(
    snapshot: Snapshot, file: OutputFile, location: Location, advance: Advance | None
) -> None:
    """Write one file: the leaves, then what is around them. Raises as ``write_export``."""
    sums: list[list[tuple[int, int, int]]] = [[] for _ in file.keys]

    def write(number: int, at: int, data: memoryview) -> None:
        upload.write_at(file.offsets[number] + at, data)
        if file.needs_crc:
            sums[number].append((at, len(data), zlib.crc32(data)))
        if advance is not None:
            advance(len(data))

    with location.store.put(location.key(file.name), file.length) as upload:
        if file.keys:
            stream_leaves(snapshot, file.keys, write)
        whole = [
            torchzip.combine_crc32((n, crc) for _, n, crc in sorted(several)) for several in sums
        ]
        for at, raw in file.build_framing(whole):
            upload.write_at(at, memoryview(raw))
        upload.commit()
