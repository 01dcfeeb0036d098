"""Plan an export: select a part of the tree, and lay out the files and the leaves in them.

Values that the format cannot represent are refused, and the error names all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from limpet.errors import MissingLeaf, StoreError, Unsupported
from limpet.exporting.output_layout import (
    SINGLE_FILE,
    UNSUPPORTED_DTYPES,
    OutputFile,
    OutputTensor,
    Record,
    plan_hf_files,
    plan_safetensors_file,
    plan_sidecar,
    plan_torch_file,
)
from limpet.exporting.torch_pickle import build_torch_pickle
from limpet.exporting.training_files import TRAINING_KINDS, plan_training_files
from limpet.format import tree
from limpet.format.names import join_key
from limpet.format.numpy_dtypes import from_descr
from limpet.layout.select import ABSENT, KeyFilter, make_key_filter, match_all, prune
from limpet.snapshot.location import Location, locate
from limpet.snapshot.reader import SnapshotReader
from limpet.text import format_list

SUFFIXES = {
    "safetensors": (".safetensors",),
    "torch": (".pt", ".pth", ".bin", ".ckpt"),
    "hf": (),
    "accelerate": (),
    "transformers": (),
    "lightning": (".ckpt",),
}
"""The export formats, each with the suffixes that make the target a file name, not a folder."""

MODEL_KEY = "model"
"""The part of a state that is exported to ``safetensors`` and ``hf`` by default."""

MAX_SHARD_SIZE = 5 * 10**9
"""Maximum bytes of tensors in one Hugging Face file: the default of its libraries."""

MAX_LISTED = 20

_AVERAGED, _AVERAGED_COUNT = "module.", "n_averaged"
"""The state of a ``torch.optim.swa_utils.AveragedModel``: the prefix of the names of the model, and
the name of the count next to it."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files to write.

    ``root``: the key below which everything is exported. ``tensor_count`` and ``nbytes``: the
    number of tensors, and the bytes of their elements. ``left_out``: the number of plain values
    that the format cannot represent. ``not_exported``: the members of the state that the library
    cannot resume from.
    """

    kind: str
    root: str
    files: tuple[OutputFile, ...]
    tensor_count: int
    nbytes: int
    left_out: int = 0
    not_exported: tuple[str, ...] = ()


def plan_export(
    snapshot: SnapshotReader,
    kind: str,
    *,
    root: str | None = None,
    keys: Sequence[str] = (),
    max_shard_size: float = MAX_SHARD_SIZE,
    file_name: str | None = None,
    record: Record = None,
) -> ExportPlan:
    """Plan an export to ``kind``, one of ``SUFFIXES``. Only the manifest is read.

    ``root``: the key below which everything is exported; ``"/"`` exports all. None means ``model``
    if there is one, no ``keys`` are given, and ``kind`` is not ``torch``; otherwise all. ``keys``:
    patterns; only leaves that match one of them are exported. ``file_name``: the name of the file,
    if the export is a single one. ``record``: what the files say about their origin.

    The state of a ``torch.optim.swa_utils.AveragedModel`` at ``root`` is exported under the names
    of the model's own parameters.

    Raises ``MissingLeaf`` if nothing is selected, and ``Unsupported``, which names everything that
    ``kind`` cannot represent.
    """
    if root is None:
        has_model = any(k == MODEL_KEY for _, k in tree.members(snapshot.manifest.tree, "") or ())
        root = MODEL_KEY if has_model and not keys and kind != "torch" else ""
    root = root.strip("/")
    node = _find_container(snapshot, root)
    prefix = _averaged_model_prefix(node, root)
    selected = make_key_filter(list(keys)) if keys else match_all
    if prefix:
        matches, count = selected, join_key(root, _AVERAGED_COUNT)
        selected = lambda key: key != count and matches(key)  # noqa: E731  (mypy knows its type)
    left_out = 0
    not_exported: tuple[str, ...] = ()
    if kind == "torch":
        name = file_name or "model.pt"
        files, tensors = _plan_torch(snapshot, node, root, selected, name, prefix)
        files += [] if record is None else [plan_sidecar(files[0], record)]
    elif kind in TRAINING_KINDS:
        tensors, left_out = _select_tensors(snapshot, node, root, selected, prefix)
        sizes = (max_shard_size, file_name)
        planned = plan_training_files(snapshot, kind, (node, root), tensors, *sizes, record)
        _raise_if_refused(snapshot, planned.refused, "torch.load(weights_only=True)")
        files, not_exported = planned.files, tuple(planned.left_out)
        tensors = [*([] if kind == "lightning" else tensors), *planned.tensors]
    else:
        tensors, left_out = _select_tensors(snapshot, node, root, selected, prefix)
        files = (
            plan_hf_files(tensors, max_shard_size, record)
            if kind == "hf"
            else [plan_safetensors_file(file_name or SINGLE_FILE, tensors, record)]
        )
    nbytes = sum(t.nbytes for t in tensors)
    return ExportPlan(
        kind=kind,
        root=root,
        files=tuple(files),
        tensor_count=len(tensors),
        nbytes=nbytes,
        left_out=left_out,
        not_exported=not_exported,
    )


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
            found=", ".join(keys[:MAX_LISTED]) or f"a leaf, {key}",
            todo="`limpet show SNAPSHOT` prints the keys",
            leaf=root,
        )
    return node


def _averaged_model_prefix(node: Any, root: str) -> str:
    """Return ``module.`` if the members of ``node`` are those of an ``AveragedModel``, else "".

    Such a model has its count, ``n_averaged``, next to the averaged model, its member ``module``.
    """
    is_dict = not {"dict", "ordered", "items"}.isdisjoint(node)
    names = {str(name) for name, _, _ in tree.children(node, root)} if is_dict else set()
    others = names - {_AVERAGED_COUNT}
    is_averaged = len(names) > len(others) > 0 and all(n.startswith(_AVERAGED) for n in others)
    return _AVERAGED if is_averaged else ""


def _select_tensors(
    snapshot: SnapshotReader, node: Any, root: str, is_selected: KeyFilter, prefix: str
) -> tuple[list[OutputTensor], int]:
    """Return the selected tensors and arrays in tree order, and the number of plain values."""
    tensors: dict[str, OutputTensor] = {}
    refused: dict[str, str] = {}
    left_out = 0
    for key, leaf in tree.walk(node, root, split_sparse=False):
        tag = next(iter(leaf), "") if type(leaf) is dict else ""
        if not any(is_selected(k) for k, _ in tree.walk(leaf, key)):
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
            tensor = OutputTensor(name.removeprefix(prefix), source, *snapshot.leaves[source])
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
    snapshot: SnapshotReader,
    node: Any,
    root: str,
    is_selected: KeyFilter,
    file_name: str,
    prefix: str,
) -> tuple[list[OutputFile], list[OutputTensor]]:
    """Plan one file with the selected tree. Arrays become tensors; tied tensors share a record."""
    selected = node if is_selected is match_all else prune(node, is_selected, root)
    if selected is ABSENT:
        raise _nothing_selected_error(snapshot, root)
    pickled = build_torch_pickle(snapshot, selected, root, prefix)
    _raise_if_refused(snapshot, pickled.refused, "torch.load(weights_only=True)")
    tensors = [OutputTensor(key, key, *snapshot.leaves[key]) for key in pickled.tensors]
    return [plan_torch_file(file_name, pickled.to_bytes(), tensors)], tensors


def _raise_if_refused(snapshot: SnapshotReader, refused: dict[str, str], target: str) -> None:
    if refused:
        raise Unsupported(
            f"{snapshot.url} has leaves that {target} cannot represent",
            found=format_list([f"{key} ({why})" for key, why in refused.items()], MAX_LISTED),
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
