"""Finds the boxes of a global tensor that this process has: DTensor, ShardedTensor, and Boxed.

It starts no collective, copies no elements, and imports no part of torch that the program has not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import msgspec

from limpet.arguments import require, whole
from limpet.errors import Unsupported
from limpet.layout.placements import Placements, ShardPlacement, local_boxes
from limpet.state.arrays import LocalBoxes, library_of, part_library
from limpet.text import format_list, with_article
from limpet.types import Box

MATERIALIZE = (
    "Create the module on a device with memory. Or call module.to_empty(device=...), and then set"
    " the buffers that are not saved (persistent=False): they have arbitrary elements"
)
"""The advice for a module on the meta device."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxed:
    """A value in a state that declares a local tensor to be a box of a global tensor.

    Use it for layers that you shard by hand. Each rank passes its own part under the same key. The
    parts are saved as one tensor of ``shape``, which any layout can load, including a single
    process::

        # 4 ranks share a linear layer: each computes 256 of its 1024 outputs
        weight = torch.nn.Parameter(torch.empty(256, 512))
        state = {"weight": limpet.Boxed(weight, offsets=(256 * rank, 0), shape=(1024, 512))}
        limpet.save("runs/a/version_100", state)

    ``tensor``: a torch tensor or a NumPy array. A load fills its memory in place. ``offsets``: the
    position of its first element in the global tensor. ``shape``: the shape of the global tensor.
    Ranks may have equal boxes if the elements are equal too.

    Raises ``LimpetError`` if ``tensor`` is of another type or if the box is not within the shape.
    """

    tensor: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        library = library_of(type(self.tensor))
        is_plain = library is not None and type(self.tensor) in library.plain_types
        expected = "a torch.Tensor or a numpy.ndarray (a DTensor needs no Boxed)"
        require("The tensor of a Boxed", is_plain, expected, type(self.tensor))
        object.__setattr__(self, "offsets", _to_integers("offsets", self.offsets))
        object.__setattr__(self, "shape", _to_integers("shape", self.shape))
        expected = f"within the shape {list(self.shape)}, with as many dimensions"
        require("The box of a Boxed", self.box.is_within(self.shape), expected, self.box)

    @property
    def box(self) -> Box:
        """The box of the global tensor that the local tensor holds."""
        return Box(self.offsets, tuple(self.tensor.shape))


def is_distributed_tensor(value: Any) -> bool:
    """Return True if a tensor describes which part of a global tensor it is."""
    return is_dtensor(value) or _is_sharded_tensor(value)


def get_local_boxes(value: Any, key: str) -> LocalBoxes | None:
    """Return the boxes that this process has of a distributed tensor; None for another one. Raises
    ``Unsupported`` for placements such as ``Partial``, or another local tensor."""
    if is_dtensor(value):
        return _boxes_of_dtensor(value, key)
    return _boxes_of_sharded_tensor(value, key) if _is_sharded_tensor(value) else None


def resolve_parts(boxes: LocalBoxes) -> LocalBoxes:
    """Return boxes with parts whose bytes are their elements."""
    if boxes.tag != "tensor":
        return boxes
    resolved = [(box, part.resolve_conj().resolve_neg()) for box, part in boxes.box_tensors]
    return msgspec.structs.replace(boxes, box_tensors=resolved)


def is_dtensor(value: Any) -> bool:
    return isinstance(value, _loaded_class("torch.distributed.tensor", "DTensor"))


def _is_sharded_tensor(value: Any) -> bool:
    module = "torch.distributed._shard.sharded_tensor.api"
    return isinstance(value, _loaded_class(module, "ShardedTensorBase"))


def empty_like(parameter: Any, dtype: Any, device: Any = None) -> Any:
    """Return an uninitialized tensor of ``dtype`` like ``parameter``, with its strides. A DTensor
    also has its placements and device. It requires no gradient."""
    import torch

    if not is_dtensor(parameter):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    # ``torch.empty_like`` of a DTensor loses a custom order of the mesh dimensions
    spec, local = parameter._spec, _wait_tensor(parameter._local_tensor)
    return type(parameter)(
        torch.empty_like(local, dtype=dtype, requires_grad=False),
        replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype)),
        requires_grad=False,
    )


def _loaded_class(module: str, name: str) -> Any:
    """Return a class of torch, or ``()``, which matches no type, if its module is not imported."""
    return getattr(sys.modules.get(module), name, ())


# -- DTensor -------------------------------------------------------------------------------------


def _boxes_of_dtensor(value: Any, key: str) -> LocalBoxes:
    spec, shape = value._spec, tuple(value.shape)
    placements = _parse_placements(spec.placements, key)
    local = _to_dense_local(value._local_tensor, key)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return _make_local_boxes(shape, [], local, on_this_rank=False)
    layout = local_boxes(
        shape, tuple(spec.mesh.shape), tuple(coordinate), placements, _shard_order(spec, placements)
    )
    if local.shape != layout.shape and (local.numel() or prod(layout.shape)):
        raise Unsupported(
            f"The shape of the local tensor of {key!r} does not match its placements",
            expected=f"{list(layout.shape)} of {list(shape)}, by {list(spec.placements)} on a mesh"
            f" of {list(spec.mesh.shape)}",
            found=list(local.shape),
            todo="Pass shape= and stride= to DTensor.from_local if the parts of the ranks differ in"
            " size; use limpet.Boxed for a tensor that is sharded in another way",
            leaf=key,
        )
    is_single = len(layout.boxes) == 1
    box_tensors = [(box, local if is_single else local[slices]) for box, slices in layout.boxes]
    return _make_local_boxes(shape, box_tensors, local)


def _make_local_boxes(
    shape: tuple[int, ...],
    box_tensors: list[tuple[Box, Any]],
    local: Any,
    on_this_rank: bool = True,
) -> LocalBoxes:
    """Return the ``LocalBoxes`` of a tensor or an array whose local part is ``local``.
    ``on_this_rank``: a global tensor without elements gets its one box here."""
    if on_this_rank and not prod(shape):
        box_tensors = [(Box.whole(shape), local.reshape(shape))]
    library = part_library(type(local))
    _, name = library.describe(local)
    if library.tag != "tensor":
        return LocalBoxes(shape, box_tensors, name, tag=library.tag)
    boxes = [box for box, _ in box_tensors]
    # the storage object, not its address: no other storage can get the address while it is alive
    tie_key = (local.untyped_storage(), local.storage_offset(), local.stride(), *boxes)
    return LocalBoxes(shape, box_tensors, name, tie_key)


def _parse_placements(placements: Sequence[Any], key: str) -> Placements:
    """Return the placements as plain records. Raises ``Unsupported`` for any but the exact classes,
    because a subclass may have another meaning."""
    replicate, shard, strided = _placement_classes()
    parsed: list[ShardPlacement | None] = []
    for p in placements:
        cls = type(p)
        if cls not in (replicate, shard, strided):
            raise Unsupported(
                f"{key!r} is a DTensor whose placement {p!r} does not describe which elements a"
                " rank has",
                expected="Shard or Replicate on every dimension of its mesh",
                found=tuple(placements),
                todo="Redistribute it with tensor.redistribute(placements=[...]) to Shard and"
                " Replicate, or save tensor.full_tensor()",
                leaf=key,
            )
        split_factor = int(p.split_factor) if cls is strided else 1
        parsed.append(None if cls is replicate else ShardPlacement(p.dim, split_factor))
    return tuple(parsed)


@lru_cache(1)
def _placement_classes() -> tuple[Any, Any, Any]:
    from torch.distributed.tensor import placement_types as types

    return types.Replicate, types.Shard, getattr(types, "_StridedShard", None)


def _shard_order(spec: Any, placements: Placements) -> tuple[int, ...] | None:
    """Return the order of the mesh dimensions if the spec records one (torch >= 2.9); None: the
    split factors determine it."""
    uses_split_factors = getattr(spec, "use_strided_shard_as_shard_order", None)
    if uses_split_factors is None:
        uses_split_factors = any(p is not None and p.split_factor > 1 for p in placements)
    order = None if uses_split_factors else getattr(spec, "shard_order", None)
    return tuple(m for entry in order for m in entry.mesh_dims) if order else None


# -- ShardedTensor and Boxed ---------------------------------------------------------------------


def _boxes_of_sharded_tensor(value: Any, key: str) -> LocalBoxes:
    metadata = value.metadata()
    shape, shards = tuple(metadata.size), value.local_shards()
    local = _to_dense_local(shards[0].tensor if shards else _empty_local_tensor(value), key)
    box_tensors = []
    for shard in shards:
        placed = shard.metadata
        box, tensor = Box(tuple(placed.shard_offsets), tuple(placed.shard_sizes)), shard.tensor
        if box.sizes != tensor.shape or not box.is_within(shape):
            raise Unsupported(
                f"A local shard of {key!r} does not match its metadata",
                expected=f"offsets {list(box.offsets)} and sizes {list(box.sizes)} within"
                f" {list(shape)}",
                found=list(tensor.shape),
                todo="Create the ShardedTensor again, or save its parts with limpet.Boxed",
                leaf=key,
            )
        if box.numel:
            box_tensors.append((box, _to_dense_local(tensor, key)))
    return _make_local_boxes(shape, box_tensors, local)


def _empty_local_tensor(value: Any) -> Any:
    """Return the one local tensor of a ``ShardedTensor`` without a shard on this rank."""
    import torch

    empty = torch.empty(0, dtype=value.metadata().tensor_properties.dtype, device="cpu")
    return value.__dict__.setdefault("_limpet_local", empty)


def boxes_of_boxed(value: Boxed, key: str) -> LocalBoxes:
    tensor = value.tensor
    if part_library(type(tensor)).tag == "tensor":
        tensor = _to_dense_local(tensor, key)
    box_tensors = [(value.box, tensor)] if value.box.numel else []
    return _make_local_boxes(value.shape, box_tensors, tensor)


def _to_dense_local(tensor: Any, key: str) -> Any:
    """Return a dense local tensor, detached from the autograd graph. Raises ``Unsupported`` for one
    that is not dense, on the meta device, or of a subclass, whose memory layout is unknown."""
    import torch

    if type(tensor) is not torch.Tensor:
        tensor = _wait_tensor(tensor)
    problem = None
    todo = "Save its dense components"
    if hasattr(type(tensor), "__tensor_flatten__"):
        names = format_list(tensor.__tensor_flatten__()[0], 5)
        problem = f"{with_article(type(tensor).__qualname__)}, which consists of inner tensors"
        todo = (
            f"Save its inner tensors ({names}), each as a DTensor or a limpet.Boxed, or save the"
            " model before it is quantized"
        )
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        name = with_article(type(tensor).__qualname__)
        problem = f"{name}, a subclass of Tensor whose structure is not known"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        problem = f"a tensor with layout {tensor.layout} on the device {tensor.device}"
        if tensor.is_meta:
            todo = MATERIALIZE
    if problem is not None:
        raise Unsupported(
            f"Limpet cannot read or fill the memory of the local tensor of {key!r}",
            expected="a dense tensor on a real device",
            found=problem,
            todo=todo,
            leaf=key,
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _wait_tensor(tensor: Any) -> Any:
    """Wait for the collective that fills an ``AsyncCollectiveTensor``; return the result."""
    wait = getattr(type(tensor), "trigger_wait", None)
    return tensor if wait is None else wait(tensor)


def _to_integers(argument: str, values: Any) -> tuple[int, ...]:
    numbers = [whole(v, -math.inf) for v in values] if isinstance(values, Iterable) else [None]
    expected = "a whole number for each dimension, such as (256, 0)"
    require(f"{argument} of a Boxed", None not in numbers, expected, values)
    return tuple(number or 0 for number in numbers)
