"""Random tensors laid over ranks in random ways: as DTensors, as boxes cut by hand, and whole.

Which elements a rank has is told by slicing an array of the elements' numbers with ``torch.chunk``,
once for each mesh dimension: nothing of Holdfast's own arithmetic is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast.types import DTYPES
from tests.engine.states import TORCH_DTYPES, random_tensor, tensor_bytes

NUMPY_DTYPES = [d for d in DTYPES if d.replace("complex", "float") in dir(np) and d != "complex32"]
MESH_SHAPES = {
    n: [(n,), *((a, n // a) for a in range(1, n + 1) if n % a == 0)] for n in range(1, 9)
}
MESH_SHAPES[4] += [(2, 1, 2)]
MESH_SHAPES[8] += [(2, 2, 2)]


@dataclass(frozen=True)
class Layout:
    """How one tensor lies over ranks: ``ranks`` of a mesh of shape ``mesh`` (row-major); the tensor
    dimension that each mesh dimension cuts, or None; the order in which they cut; and what stands
    for it in the state: "dtensor", "boxed" or "plain"."""

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    sharded_dims: tuple[int | None, ...]
    shard_order: tuple[int, ...]
    representation: str

    def element_numbers(self, shape: tuple[int, ...], rank: int) -> np.ndarray | None:
        """The numbers of the elements that a rank has; None if it has none of the tensor."""
        if rank not in self.ranks:
            return None
        place = np.unravel_index(self.ranks.index(rank), self.mesh_shape)
        held = torch.arange(prod(shape)).reshape(shape)
        for m in self.shard_order:
            dim = self.sharded_dims[m]
            if dim is not None:
                several = list(torch.chunk(held, self.mesh_shape[m], dim))
                several += [held.narrow(dim, 0, 0)] * (self.mesh_shape[m] - len(several))
                held = several[place[m]]
        return held.numpy()

    def placements(self) -> tuple[Any, ...]:
        """As PyTorch writes it: the factor of a cut says what has been cut before it although it
        stands behind it."""
        made = []
        for m, dim in enumerate(self.sharded_dims):
            before = self.shard_order[: self.shard_order.index(m)]
            factor = prod(
                self.mesh_shape[n] for n in before if n > m and self.sharded_dims[n] == dim
            )
            if dim is None:
                made.append(Replicate())
            else:
                made.append(Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor))
        return tuple(made)


@dataclass(frozen=True)
class LaidOutTensor:
    """A tensor and the layouts of each world that it is saved in or loaded into. ``array``: of
    NumPy. ``strides``: its local tensors do not lie row-major."""

    dtype: str
    shape: tuple[int, ...]
    layouts: tuple[Layout, ...]
    is_numpy: bool
    is_strided: bool
    seed: int

    def element_bytes(self) -> np.ndarray:
        """A row of bytes for each element."""
        whole = random_tensor(getattr(torch, self.dtype), self.shape, self.seed)
        rows = np.frombuffer(tensor_bytes(whole), np.uint8)
        return rows.reshape(prod(self.shape), DTYPES[self.dtype].itemsize)

    def local_value(self, world: int, rank: int, empty: bool) -> tuple[Any, np.ndarray | None]:
        """What a rank has of it in the state, and the bytes that belong there."""
        layout = self.layouts[world]
        numbers = layout.element_numbers(self.shape, rank)
        if numbers is None and layout.representation != "dtensor":
            return None, None
        held = self.element_bytes()[np.zeros(0, int) if numbers is None else numbers.reshape(-1)]
        sizes = (0,) if numbers is None else numbers.shape
        value = _local_tensor(np.full_like(held, 1) if empty else held, self.dtype, sizes, self)
        if layout.representation == "dtensor":
            value = _dtensor(value, layout, self.shape, rank)
        elif layout.representation == "boxed":
            first = int(numbers.reshape(-1)[0]) if numbers.size else 0
            at = np.unravel_index(first, self.shape) if numbers.size else (0,) * len(self.shape)
            value = holdfast.Boxed(value, tuple(map(int, at)), self.shape)
        return value, held


def local_bytes(value: Any) -> bytes:
    """The bytes that a rank has of a value, row-major."""
    value = getattr(value, "tensor", value)
    value = getattr(value, "_local_tensor", value)
    return value.tobytes() if isinstance(value, np.ndarray) else tensor_bytes(value)


def _local_tensor(
    rows: np.ndarray, dtype: str, sizes: tuple[int, ...], laid_out: LaidOutTensor
) -> Any:
    if laid_out.is_numpy:
        made = np.frombuffer(rows.tobytes(), dtype).reshape(sizes)
        return np.array(made, order="F" if laid_out.is_strided else "C")
    kind = getattr(torch, dtype)
    if not rows.size:
        return torch.empty(sizes, dtype=kind)
    made = torch.from_numpy(rows.copy()).reshape(-1).view(kind).reshape(sizes)
    if laid_out.is_strided and len(sizes) > 1:
        turned = torch.from_numpy(np.ascontiguousarray(rows.reshape(*sizes, -1).swapaxes(0, 1)))
        made = turned.view(kind).reshape(sizes[1], sizes[0], *sizes[2:]).transpose(0, 1)
    return made


_meshes: dict[Any, DeviceMesh] = {}


def _dtensor(local: Any, layout: Layout, shape: tuple[int, ...], rank: int) -> DTensor:
    """A real one, as that rank has it; no process group is needed."""
    at = layout.ranks, layout.mesh_shape, rank
    if at not in _meshes:
        numbers = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
        _meshes[at] = DeviceMesh("cpu", numbers, _init_backend=False, _rank=rank)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(_meshes[at], layout.placements(), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


# -- drawn ---------------------------------------------------------------------------------------
# A tensor is drawn as one number, of which a plain generator makes all else: hypothesis then takes
# tensors away from a state that fails, and is ten times as fast.


def draw_layout(random: Random, size: int, shape: tuple[int, ...], is_numpy: bool) -> Layout:
    """A layout over some of ``size`` ranks."""
    count = size if random.random() < 0.75 else random.randint(1, size)
    ranks = random.sample(range(size), count)
    if random.random() < 0.5:
        ranks.sort()
    mesh = random.choice(MESH_SHAPES[count])
    dims = [None, *range(len(shape))]
    cuts = tuple(random.choice(dims) for _ in mesh)
    kinds = ["boxed"] if is_numpy else ["dtensor", "dtensor", "boxed"]
    if all(c is None for c in cuts):
        kinds.append("plain")
    kind = random.choice(kinds)
    order = list(range(len(mesh)))
    if kind == "dtensor" and random.random() < 0.5:  # several boxes on a rank
        random.shuffle(order)
        if shape:  # the longest dimension cut by all: uneven parts of uneven parts
            cuts = (shape.index(max(shape)),) * len(mesh)
    return Layout(tuple(ranks), mesh, cuts, tuple(order), kind)


def draw_tensor(number: int, sizes: tuple[int, ...]) -> LaidOutTensor:
    """A tensor, with a layout over each of these numbers of ranks."""
    random = Random(number)
    shape = [random.choice((0, 1, *range(1, 8))) for _ in range(random.randint(0, 4))]
    if shape and random.random() < 0.5:
        shape[random.randrange(len(shape))] = random.randint(8, 45)
    array = random.random() < 0.15
    dtypes = NUMPY_DTYPES if array else [str(d).removeprefix("torch.") for d in TORCH_DTYPES]
    laid = tuple(draw_layout(random, size, tuple(shape), array) for size in sizes)
    return LaidOutTensor(
        random.choice(dtypes), tuple(shape), laid, array, random.random() < 0.5, number
    )


@st.composite
def states(draw: Any, max_tensors: int = 60) -> tuple[tuple[int, ...], list[LaidOutTensor]]:
    """Numbers of ranks (the first saves), and tensors laid over all of them."""
    sizes = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6, 8, 1]), min_size=3, max_size=3)))
    count = draw(st.integers(1, max_tensors))
    numbers = draw(st.lists(st.integers(0, 1 << 60), min_size=count, max_size=count))
    return sizes, [draw_tensor(n, sizes) for n in numbers]


def leaf_key(i: int) -> str:
    return f"{('model', 'other')[i % 2]}/{i}"


def state_of(
    tensors: list[LaidOutTensor], world: int, rank: int, empty: bool = False
) -> tuple[Any, Any]:
    """The state of a rank, and the bytes that belong into each tensor of it, by its number."""
    state: dict[str, dict[str, Any]] = {"model": {}, "other": {}}
    held: dict[int, Any] = {}
    for i, one in enumerate(tensors):
        value, rows = one.local_value(world, rank, empty)
        if value is not None:
            level, name = leaf_key(i).split("/")
            state[level][name] = value
            held[i] = rows
    return state, held
