"""The targets of one load: live memory to fill, and fresh memory on a device for other leaves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from limpet.errors import DTypeMismatch, LimpetError
from limpet.format import torch_types, tree
from limpet.format.names import MANIFEST, join_key
from limpet.format.numpy_dtypes import from_descr
from limpet.layout.devices import find_device
from limpet.layout.read_plan import ReadRequest
from limpet.snapshot.chunks import Target
from limpet.snapshot.leaf import allocate, as_records
from limpet.snapshot.reader import SnapshotReader
from limpet.state import composites
from limpet.state.arrays import part_library
from limpet.state.sharding import empty_like, is_dtensor
from limpet.types import Box

Finalize = Callable[[], Any]
"""A function to call after the bytes are read. It returns the value for the loaded state."""


@dataclass(slots=True)
class LoadTargets:
    """All targets of one load. ``fresh`` holds the memory of leaves that have no live memory, and
    ``device_of`` returns its device for a leaf's key."""

    snapshot: SnapshotReader
    device_of: Callable[[SnapshotReader, str], Any] = lambda snapshot, key: None
    requests: list[ReadRequest] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    fresh: dict[str, Any] = field(default_factory=dict)
    is_live: bool = False
    """Whether there is a live state: it never gets the inner tensors of a tensor subclass."""
    is_dry: bool = False
    """Whether nothing will be read, so that no memory is allocated."""

    def clear(self) -> None:
        """Discard all targets, and release the fresh memory."""
        for part in (self.requests, self.targets, self.fresh):
            part.clear()

    def resolve_leaf(self, node: Any, key: str) -> tuple[str, Any]:
        """Return the key under which a leaf's bytes are stored, and the node that describes it."""
        source = node.get("tied", key)
        return source, self.snapshot.nodes()[source] if tree.tag_of(node) == "tied" else node

    def add(self, source: str, into: Any, box: Box) -> None:
        """Request that a box of a leaf is read into ``into``."""
        dtype, _ = self.snapshot.leaves[source]
        if 0 not in box.sizes:
            self.requests.append(ReadRequest(source, box))
            self.targets.append(Target.from_tensor(dtype, box.sizes, into))

    def add_fresh(
        self, node: Any, key: str, device: Any = None, like: Any = None, dtype: str | None = None
    ) -> Finalize:
        """Allocate memory for all leaves of a node, and request them. Return the ``Finalize``
        function that decodes the node's value. ``like``: a tensor and its own saved order of
        dimensions; a leaf of its shape and order gets its strides and placements. ``dtype``: None
        for the saved ones."""
        is_plain = type(node) is not dict  # as most options of an optimizer are
        if self.is_live and not is_plain:
            self._refuse_subclasses(node, key)
        for k, n in () if is_plain or self.is_dry else tree.walk(node, key):
            if tree.is_leaf(n):
                source, leaf = self.resolve_leaf(n, k)
                if source not in self.fresh:
                    leaf_device = device
                    if device is None and "tensor" in leaf:
                        leaf_device = self.device_of(self.snapshot, source)
                    stored, shape = self.snapshot.leaves[source]
                    made = _empty_like(like, leaf, dtype or stored, shape, leaf_device)
                    if made is None:
                        made = allocate(leaf, k, dtype or stored, shape, leaf_device)
                    self.fresh[source] = made
                    for box, part in part_library(type(made)).local_boxes(made, k).box_tensors:
                        self.add(source, part, box)
        return lambda: tree.decode(node, key, self.decode_leaf)

    def decode_leaf(self, node: Any, key: str) -> Any:
        """Return the value of a leaf whose bytes are read. Callback for ``tree.decode``."""
        if not torch_types.TAGS.isdisjoint(node):
            return torch_types.decode(node, key)
        if "sparse" in node:
            return self._make_sparse(node["sparse"], key)
        if "subclass" in node:
            return self._inner_tensors(node, key)
        source, leaf = self.resolve_leaf(node, key)
        loaded = self.fresh[source]
        if "blob" in leaf:
            return {"bytes": bytes, "bytearray": bytearray}[leaf["blob"][0]](loaded.data)
        if "array" in leaf and len(leaf["array"]) == 3:
            dtype = from_descr(leaf["array"][2])
            return as_records(loaded, dtype).reshape(loaded.shape[:-1])
        return loaded

    def _refuse_subclasses(self, node: Any, key: str) -> None:
        """Raise ``DTypeMismatch`` if the node has a tensor of another class than ``Tensor``."""
        for k, n in tree.walk(node, key, split_sparse=False):
            if tree.tag_of(n) == "subclass":
                name = n["subclass"]["class"]
                raise DTypeMismatch(
                    f"The live state has no tensor of the class {name} at {k!r}; nothing was"
                    " changed",
                    expected="a live tensor of that class, which is filled in place",
                    found="none, and no class is created from its name",
                    todo="Quantize the live model first, or let the optimizer step once before the"
                    " load; or exclude it with keys=, and load its inner tensors without into=",
                    leaf=k,
                )

    def _inner_tensors(self, node: Any, key: str) -> dict[str, Any]:
        """Return what a tensor subclass consists of. Its class is not looked up."""
        body = node["subclass"]
        return {
            "class": body["class"],
            "dtype": torch_types.decode({"dtype": body["dtype"]}, key),
            "shape": torch_types.decode({"size": body["shape"]}, key),
            "context": tree.decode(body["context"], key, torch_types.decode),
            "tensors": {
                name: self.decode_leaf(part, k)
                for name, (part, k) in zip(body["parts"], tree.parts(node, key), strict=True)
            },
        }

    def _make_sparse(self, body: Any, key: str) -> Any:
        parts = {n: self.decode_leaf(p, join_key(key, n)) for n, p in body["parts"].items()}
        try:
            return composites.make_sparse(body, parts)
        except composites.BAD_PARTS as e:
            file = self.snapshot.location.key(MANIFEST)
            raise tree.invalid_node({"sparse": body}, key, file) from e


def _empty_like(like: Any, leaf: Any, dtype: str, shape: tuple[int, ...], device: Any) -> Any:
    """Return memory of another dtype like a tensor, if that has the leaf's shape and order."""
    if like is None or tuple(like[0].shape) != shape or "tensor" not in leaf:
        return None
    import torch

    found = getattr(torch, dtype, None)
    if found is None or (leaf["tensor"][2:] != like[1] and not is_dtensor(like[0])):
        return None
    with torch.inference_mode(False):
        return empty_like(like[0], found, device)


# -- devices ---------------------------------------------------------------------------------------


def device_chooser(device: Any) -> Callable[[SnapshotReader, str], Any]:
    """Return a function that returns the device for a snapshot and the key of a leaf.

    ``device`` is one device for all, None for the CPU, ``"saved"``, or a mapping from saved devices
    to devices, as ``map_location`` of ``torch.load``: a device that is not in it stays. A name
    without an index stands for all devices of that type that are not in the mapping. Raises
    ``LimpetError`` for an invalid one; the function, if a device is not known or not here.
    """
    is_mapping = isinstance(device, Mapping)
    if device != "saved" and not is_mapping:
        if device not in (None, "cpu"):
            _check_device(device, f"device={device!r:.80}")
        return lambda snapshot, key: device
    mapping = {str(_parse(k)): _parse(v) for k, v in device.items()} if is_mapping else {}
    records: list[Any] = []
    checked: dict[str, Any] = {}

    def choose(snapshot: SnapshotReader, key: str) -> Any:
        if not records:  # read now, because the ranks of a load raise together
            records.append(snapshot.metadata.get("devices"))
        saved = find_device(records[0], key)
        if saved is None:
            raise LimpetError(
                f"It is not known from which device {key!r} in {snapshot.url} was saved",
                expected="a version in which all ranks that have the tensor recorded one kind of"
                " device",
                found="no record" if records[0] is None else "a record without this tensor",
                todo='Pass one device, such as device="cpu"',
                leaf=key,
            )
        if saved not in checked:
            chosen = mapping.get(saved, mapping.get(saved.partition(":")[0], saved))
            what = f"{key!r} in {snapshot.url} was saved from {saved}, and device= loads it to"
            todo = f'Map it to a device that exists: device={{"{saved}": "cpu"}}, or pass one'
            todo += ' device for all tensors: device="cpu"'
            checked[saved] = _check_device(chosen, f"{what} {chosen}, which", todo)
        return checked[saved]

    return choose


def _parse(device: Any) -> Any:
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as e:
        expected = 'a mapping of devices, such as {"cuda:0": "cpu"}'
        raise LimpetError(f"device= must be {expected}, not with {device!r:.80}") from e


def _check_device(device: Any, what: str, todo: str | None = None) -> Any:
    """Return the device. Raises ``LimpetError`` if this process cannot use it."""
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, ImportError, RuntimeError, TypeError) as e:
        problem = re.split(r"\n|\. ", str(e))[0][:200] or type(e).__name__
        raise LimpetError(f"{what} cannot be used in this process: {problem}", todo=todo) from e
    return device
