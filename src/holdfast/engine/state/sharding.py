"""Which boxes of a global tensor this process has: ``DTensor``, ``ShardedTensor``, ``Boxed``.

Nothing here starts a collective, copies elements, or loads a part of torch that the program has
not loaded itself.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np

from holdfast.engine.planning.placements import Placements, ShardPlacement, local_boxes
from holdfast.errors import PlanError, Unsupported
from holdfast.lazy_torch import dtype_name, torch_or_none
from holdfast.text import with_article
from holdfast.types import DTYPES, Box

_DTENSOR_MODULE = "torch.distributed.tensor"
_SHARDED_TENSOR_MODULE = "torch.distributed._shard.sharded_tensor.api"


@dataclass(frozen=True, slots=True, eq=False)
class Boxed:
    """A part of a global tensor, in a state: this local tensor is that box of it.

    For layers that are cut by hand. Each rank gives its own part under the same key; together
    they make one tensor of ``shape``, which any layout can load, and one process too::

        # 4 ranks share a linear layer: each computes 256 of its 1024 outputs
        weight = torch.nn.Parameter(torch.empty(256, 512))
        state = {"weight": holdfast.Boxed(weight, offsets=(256 * rank, 0), shape=(1024, 512))}
        holdfast.save("runs/a/version_100", state)

    ``tensor``: a torch tensor or a NumPy array; a load fills its memory in place. ``offsets``:
    where in the global tensor its first element stands. ``shape``: that of the global tensor.
    Boxes of different ranks may be equal, if their elements are.

    Raises ``PlanError`` if the box does not lie within the shape.
    """

    tensor: Any
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        torch = torch_or_none()
        plain = type(self.tensor) is np.ndarray or (
            torch is not None and type(self.tensor) in (torch.Tensor, torch.nn.Parameter)
        )
        if not plain:
            raise PlanError(
                f"The tensor of a Boxed is {with_article(type(self.tensor).__name__)}",
                expected="a torch.Tensor or a numpy.ndarray with the elements that this rank has",
                todo="A DTensor needs no Boxed: its own placements say which part it is",
            )
        object.__setattr__(self, "offsets", _to_integers("offsets", self.offsets))
        object.__setattr__(self, "shape", _to_integers("shape", self.shape))
        if not self.box.is_within(self.shape):
            raise PlanError(
                "A boxed tensor does not lie within its global tensor",
                expected=f"a box inside of {list(self.shape)}, with as many dimensions",
                found=f"offsets {list(self.offsets)} and sizes {list(self.box.sizes)}",
                todo="offsets say where in the global tensor the first element of this one"
                " stands, shape is that of the global tensor",
            )

    @property
    def box(self) -> Box:
        """The part of the global tensor that the local one is."""
        return Box(self.offsets, tuple(self.tensor.shape))


class LocalBoxes(msgspec.Struct, frozen=True):
    """The parts of one global tensor that this process has.

    ``shape``: that of the global tensor. ``pieces``: boxes of it, each with a tensor of the box's
    sizes that shares the memory of the live one. There are none where this rank has no element;
    a global tensor without elements is one piece on every rank that has it. ``dtype``: its name, or
    None for one that has no bytes. ``storage``: hashable, and equal for values that are one tensor
    under several names, on ranks without elements too. ``array``: of NumPy.
    """

    shape: tuple[int, ...]
    box_tensors: list[tuple[Box, Any]]
    dtype: str | None
    tie_key: Any
    is_numpy: bool = False


def is_distributed_tensor(value: Any) -> bool:
    """Whether a value says itself which part of a global tensor it is."""
    return _extractor(value) is not None


def get_local_boxes(value: Any, key: str) -> LocalBoxes | None:
    """The boxes that this process has of a tensor that is spread over ranks; None for a value
    that is not. ``key`` is its name in errors.

    Raises ``Unsupported`` for placements that do not say which elements a rank has (a sum that
    is still to be made), and where a local tensor is not as its placements say.
    """
    take = _extractor(value)
    return None if take is None else take(value, key)


def empty_like(parameter: Any, dtype: Any) -> Any:
    """A tensor of that dtype, not filled, with the shape, layout and device of ``parameter``: a
    DTensor of the same placements for a DTensor. It needs no gradient.

    Not by ``torch.empty_like``, which forgets an order of the mesh dimensions of one's own.
    """
    import torch

    if not isinstance(parameter, _loaded_class(_DTENSOR_MODULE, "DTensor")):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    spec, local = parameter._spec, _wait_tensor(parameter._local_tensor)
    return type(parameter)(
        torch.empty_like(local, dtype=dtype, requires_grad=False),
        replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype)),
        requires_grad=False,
    )


def _extractor(value: Any) -> Callable[[Any, str], LocalBoxes] | None:
    """What takes a value apart; None for an ordinary one."""
    return _extractor_for_type(type(value))  # type: ignore[arg-type]  # a class is hashable


@lru_cache(256)
def _extractor_for_type(kind: type) -> Callable[[Any, str], LocalBoxes] | None:
    """Remembered: nearly all values are of a few types, and a class never gets another base."""
    if issubclass(kind, _loaded_class(_DTENSOR_MODULE, "DTensor")):
        return _boxes_of_dtensor
    if issubclass(kind, _loaded_class(_SHARDED_TENSOR_MODULE, "ShardedTensorBase")):
        return _boxes_of_sharded_tensor
    return _boxes_of_boxed if issubclass(kind, Boxed) else None


def _loaded_class(module: str, name: str) -> Any:
    """A class of torch if the program has loaded it; nothing is an instance of ``()``."""
    return getattr(sys.modules.get(module), name, ())


# -- DTensor -------------------------------------------------------------------------------------


def _boxes_of_dtensor(value: Any, key: str) -> LocalBoxes:
    spec, shape = value._spec, tuple(value.shape)
    cuts = _parse_placements(spec.placements, key)
    local = _to_dense_local(value._local_tensor, key)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:  # the tensor is spread over other ranks
        return _make_local_boxes(shape, [], local)
    found = local_boxes(
        shape, tuple(spec.mesh.shape), tuple(coordinate), cuts, _shard_order(spec, cuts)
    )
    if local.shape != found.shape and (local.numel() or prod(found.shape)):
        raise Unsupported(
            f"The local tensor of {key!r} has another shape than its placements say",
            expected=f"{list(found.shape)} of {list(shape)}, by {_describe_spec(spec)}",
            found=list(local.shape),
            todo="DTensor.from_local needs shape= and stride= where ranks have parts of different"
            " sizes; a tensor cut by hand in another way is saved with holdfast.Boxed",
            leaf=key,
        )
    if len(found.boxes) == 1:
        return _make_local_boxes(shape, [(found.boxes[0][0], local)], local)
    return _make_local_boxes(
        shape, [(box, local[where]) for box, where in found.boxes], local, on_this_rank=True
    )


def _make_local_boxes(
    shape: tuple[int, ...],
    box_tensors: list[tuple[Box, Any]],
    local: Any,
    on_this_rank: bool = False,
) -> LocalBoxes:
    """The parts of a tensor of which ``local`` is what this rank has, if it is ``here``.

    The storage object and not its number: while it is kept, no other one can get its address."""
    if on_this_rank and not prod(shape):
        box_tensors = [(Box.whole(shape), local.reshape(shape))]
    boxes = [box for box, _ in box_tensors]
    storage = (local.untyped_storage(), local.storage_offset(), local.stride(), *boxes)
    return LocalBoxes(shape, box_tensors, dtype_name(local.dtype), storage)


def _parse_placements(placements: Sequence[Any], key: str) -> Placements:
    """Placements as plain records. By their exact classes: another one may mean anything."""
    replicate, shard, strided = _placement_classes()
    cuts: list[ShardPlacement | None] = []
    for p in placements:
        kind = type(p)
        if kind is shard:
            cuts.append(ShardPlacement(p.dim))
        elif kind is replicate:
            cuts.append(None)
        elif kind is strided:
            cuts.append(ShardPlacement(p.dim, int(p.split_factor)))
        else:
            raise Unsupported(
                f"{key!r} is a DTensor whose placement {p!r} does not say which elements a rank"
                " has",
                expected="Shard or Replicate on every dimension of its mesh",
                found=tuple(placements),
                todo="Give the state tensor.redistribute(placements=[...]) with these, or"
                " tensor.full_tensor()",
                leaf=key,
            )
    return tuple(cuts)


@lru_cache(1)
def _placement_classes() -> tuple[Any, Any, Any]:
    from torch.distributed.tensor import placement_types as types

    return types.Replicate, types.Shard, getattr(types, "_StridedShard", None)


def _shard_order(spec: Any, cuts: Placements) -> tuple[int, ...] | None:
    """The order of the mesh dimensions where the spec keeps one of its own (torch >= 2.9); None
    where the factors of the cuts tell it."""
    told = getattr(spec, "use_strided_shard_as_shard_order", None)
    if told or (told is None and any(cut is not None and cut.split_factor > 1 for cut in cuts)):
        return None
    order = getattr(spec, "shard_order", None)
    return tuple(m for entry in order for m in entry.mesh_dims) if order else None


def _describe_spec(spec: Any) -> str:
    return f"{list(spec.placements)} on a mesh of {list(spec.mesh.shape)}"


# -- the others ----------------------------------------------------------------------------------


def _boxes_of_sharded_tensor(value: Any, key: str) -> LocalBoxes:
    metadata = value.metadata()
    shape, shards = tuple(metadata.size), value.local_shards()
    local = _to_dense_local(shards[0].tensor if shards else _empty_local_tensor(value), key)
    pieces = []
    for shard in shards:
        said = shard.metadata
        box, tensor = Box(tuple(said.shard_offsets), tuple(said.shard_sizes)), shard.tensor
        if box.sizes != tensor.shape or not box.is_within(shape):
            raise Unsupported(
                f"A local shard of {key!r} is not what its metadata says",
                expected=f"offsets {list(box.offsets)} and sizes {list(box.sizes)} inside of"
                f" {list(shape)}",
                found=list(tensor.shape),
                todo="Make the ShardedTensor anew, or save its parts with holdfast.Boxed",
                leaf=key,
            )
        if box.numel:
            pieces.append((box, _to_dense_local(tensor, key)))
    return _make_local_boxes(shape, pieces, local, on_this_rank=True)


def _empty_local_tensor(value: Any) -> Any:
    """What stands for the local tensor of a ``ShardedTensor`` that has no shard here: without
    elements, and the same one each time, for as long as the value lives."""
    import torch

    dtype = value.metadata().tensor_properties.dtype
    return value.__dict__.setdefault("_holdfast_local", torch.empty(0, dtype=dtype))


def _boxes_of_boxed(value: Boxed, key: str) -> LocalBoxes:
    shape, array = value.shape, type(value.tensor) is np.ndarray
    tensor = value.tensor if array else _to_dense_local(value.tensor, key)
    pieces = [(value.box, tensor)] if value.box.numel else []
    if not array:
        return _make_local_boxes(shape, pieces, tensor, on_this_rank=True)
    if not prod(shape):
        pieces = [(Box.whole(shape), tensor.reshape(shape))]
    name = tensor.dtype.name if tensor.dtype.name in DTYPES and tensor.dtype.isnative else None
    return LocalBoxes(shape, pieces, name, object(), True)  # arrays are never tied


def _to_dense_local(tensor: Any, key: str) -> Any:
    """A local tensor with memory of its own, without its place in a graph of gradients.

    Raises ``Unsupported`` for a subclass of Tensor, whose memory may be laid out in any way.
    """
    import torch

    if type(tensor) is not torch.Tensor:
        tensor = _wait_tensor(tensor)
    why = None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        name = with_article(type(tensor).__qualname__)
        why = f"{name}, a subclass of Tensor whose parts are not known"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        why = f"of the layout {tensor.layout} on the device {tensor.device}"
    if why is not None:
        raise Unsupported(
            f"The local tensor of {key!r} has no memory that can be read and filled",
            expected="a dense tensor on a real device",
            found=why,
            todo="Give a module on the meta device memory by module.to_empty(device=...); of"
            " another kind of tensor, save what it is made of",
            leaf=key,
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _wait_tensor(tensor: Any) -> Any:
    """A tensor that a collective still fills (``AsyncCollectiveTensor``), when it is filled."""
    wait = getattr(type(tensor), "trigger_wait", None)
    return tensor if wait is None else wait(tensor)


def _to_integers(name: str, values: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(v) for v in values)
    except TypeError as e:
        raise PlanError(
            f"The {name} of a boxed tensor are not one number for each dimension",
            expected="whole numbers such as (256, 0)",
            found=repr(values),
            todo=f"Give {name} as a tuple",
        ) from e
