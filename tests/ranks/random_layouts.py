"""Random tensors in random layouts: as DTensors, as manually cut boxes, and replicated.

The elements that a rank has are computed by slicing an array of element numbers with
``torch.chunk``, once for each mesh dimension. No arithmetic of Limpet is used.
"""

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

import limpet
from limpet.types import DTYPES
from tests.states import TORCH_DTYPES, random_tensor, tensor_bytes

NUMPY_DTYPES = [d for d in DTYPES if d.replace("complex", "float") in dir(np) and d != "complex32"]
MESH_SHAPES = {
    n: [(n,), *((a, n // a) for a in range(1, n + 1) if n % a == 0)] for n in range(1, 9)
}
MESH_SHAPES[4] += [(2, 1, 2)]
MESH_SHAPES[8] += [(2, 2, 2)]


@dataclass(frozen=True)
class Layout:
    """How one tensor is split across ranks.

    ``ranks``: the ranks of a mesh of shape ``mesh_shape``, row-major. ``sharded_dims``: the tensor
    dimension that each mesh dimension cuts, or None. ``shard_order``: the order in which the mesh
    dimensions cut. ``representation``: how the state holds the tensor, as "dtensor", "boxed", or
    "plain".
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    sharded_dims: tuple[int | None, ...]
    shard_order: tuple[int, ...]
    representation: str

    def element_numbers(self, shape, rank):
        """Return the numbers of the elements that a rank has, or None if it is not in the mesh."""
        if rank not in self.ranks:
            return None
        coordinate = np.unravel_index(self.ranks.index(rank), self.mesh_shape)
        numbers = torch.arange(prod(shape)).reshape(shape)
        for m in self.shard_order:
            dim = self.sharded_dims[m]
            if dim is not None:
                parts = list(torch.chunk(numbers, self.mesh_shape[m], dim))
                parts += [numbers.narrow(dim, 0, 0)] * (self.mesh_shape[m] - len(parts))
                numbers = parts[coordinate[m]]
        return numbers.numpy()

    def placements(self):
        """Return the placements of this layout in PyTorch's notation.

        The split factor of a ``_StridedShard`` is the number of parts that later mesh dimensions
        cut before this one.
        """
        placements = []
        for m, dim in enumerate(self.sharded_dims):
            earlier = self.shard_order[: self.shard_order.index(m)]
            factor = prod(
                self.mesh_shape[n] for n in earlier if n > m and self.sharded_dims[n] == dim
            )
            if dim is None:
                placements.append(Replicate())
            elif factor == 1:
                placements.append(Shard(dim))
            else:
                placements.append(_StridedShard(dim, split_factor=factor))
        return tuple(placements)


@dataclass(frozen=True)
class LaidOutTensor:
    """A tensor with its layout in each world that saves or loads it.

    ``is_numpy``: the tensor is a NumPy array. ``is_strided``: the local tensors are not row-major.
    """

    dtype: str
    shape: tuple[int, ...]
    layouts: tuple[Layout, ...]
    is_numpy: bool
    is_strided: bool
    seed: int

    def element_bytes(self):
        """Return the bytes of the tensor, one row per element."""
        whole = random_tensor(getattr(torch, self.dtype), self.shape, self.seed)
        rows = np.frombuffer(tensor_bytes(whole), np.uint8)
        return rows.reshape(prod(self.shape), DTYPES[self.dtype].itemsize)

    def local_value(self, world, rank, empty):
        """Return a rank's value for the state, and its correct bytes, one row per element.

        With ``empty``, the value holds other bytes, as the target of a load. Returns (None, None)
        if the rank has no part of the tensor.
        """
        layout = self.layouts[world]
        numbers = layout.element_numbers(self.shape, rank)
        if numbers is None and layout.representation != "dtensor":
            return None, None
        rows = self.element_bytes()[np.zeros(0, int) if numbers is None else numbers.reshape(-1)]
        sizes = (0,) if numbers is None else numbers.shape
        value = _local_tensor(np.full_like(rows, 1) if empty else rows, self.dtype, sizes, self)
        if layout.representation == "dtensor":
            value = _dtensor(value, layout, self.shape, rank)
        elif layout.representation == "boxed":
            first = int(numbers.reshape(-1)[0]) if numbers.size else 0
            if numbers.size:
                offsets = np.unravel_index(first, self.shape)
            else:
                offsets = (0,) * len(self.shape)
            value = limpet.Boxed(value, tuple(map(int, offsets)), self.shape)
        return value, rows


def local_bytes(value):
    """Return the bytes of the local part of a value, row-major."""
    value = getattr(value, "tensor", value)
    value = getattr(value, "_local_tensor", value)
    return value.tobytes() if isinstance(value, np.ndarray) else tensor_bytes(value)


def _local_tensor(rows, dtype, sizes, laid_out):
    if laid_out.is_numpy:
        local = np.frombuffer(rows.tobytes(), dtype).reshape(sizes)
        return np.array(local, order="F" if laid_out.is_strided else "C")
    torch_dtype = getattr(torch, dtype)
    if not rows.size:
        return torch.empty(sizes, dtype=torch_dtype)
    local = torch.from_numpy(rows.copy()).reshape(-1).view(torch_dtype).reshape(sizes)
    if laid_out.is_strided and len(sizes) > 1:
        swapped = torch.from_numpy(np.ascontiguousarray(rows.reshape(*sizes, -1).swapaxes(0, 1)))
        local = swapped.view(torch_dtype).reshape(sizes[1], sizes[0], *sizes[2:]).transpose(0, 1)
    return local


_meshes: dict[Any, DeviceMesh] = {}


def _dtensor(local, layout, shape, rank):
    """Return a real DTensor as that rank has it, without a process group."""
    key = layout.ranks, layout.mesh_shape, rank
    if key not in _meshes:
        ranks = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
        _meshes[key] = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = DTensorSpec(_meshes[key], layout.placements(), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


# -- strategies ----------------------------------------------------------------------------------
# Hypothesis draws a tensor as one number, and a random generator with this seed draws everything
# else. Hypothesis can then shrink a failing state by removing tensors, and is ten times as fast.


def draw_layout(random, size, shape, is_numpy):
    """Draw a layout over some of ``size`` ranks."""
    count = size if random.random() < 0.75 else random.randint(1, size)
    ranks = random.sample(range(size), count)
    if random.random() < 0.5:
        ranks.sort()
    mesh = random.choice(MESH_SHAPES[count])
    dims = [None, *range(len(shape))]
    sharded_dims = tuple(random.choice(dims) for _ in mesh)
    representations = ["boxed"] if is_numpy else ["dtensor", "dtensor", "boxed"]
    if all(dim is None for dim in sharded_dims):
        representations.append("plain")
    representation = random.choice(representations)
    order = list(range(len(mesh)))
    if representation == "dtensor" and random.random() < 0.5:  # several boxes on a rank
        random.shuffle(order)
        if shape:  # all mesh dimensions cut the longest dimension: uneven parts of uneven parts
            sharded_dims = (shape.index(max(shape)),) * len(mesh)
    return Layout(tuple(ranks), mesh, sharded_dims, tuple(order), representation)


def draw_tensor(number, sizes):
    """Return the tensor with this number, with a layout for a world of each of the ``sizes``."""
    random = Random(number)
    shape = [random.choice((0, 1, *range(1, 8))) for _ in range(random.randint(0, 4))]
    if shape and random.random() < 0.5:
        shape[random.randrange(len(shape))] = random.randint(8, 45)
    is_numpy = random.random() < 0.15
    dtypes = NUMPY_DTYPES if is_numpy else [str(d).removeprefix("torch.") for d in TORCH_DTYPES]
    layouts = tuple(draw_layout(random, size, tuple(shape), is_numpy) for size in sizes)
    return LaidOutTensor(
        random.choice(dtypes), tuple(shape), layouts, is_numpy, random.random() < 0.5, number
    )


@st.composite
def states(draw, max_tensors=60):
    """Draw the sizes of three worlds, of which the first saves, and tensors laid out in each."""
    sizes = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6, 8, 1]), min_size=3, max_size=3)))
    count = draw(st.integers(1, max_tensors))
    numbers = draw(st.lists(st.integers(0, 1 << 60), min_size=count, max_size=count))
    return sizes, [draw_tensor(n, sizes) for n in numbers]


def leaf_key(i):
    return f"{('model', 'other')[i % 2]}/{i}"


def state_of(tensors, world, rank, empty=False):
    """Return the state of a rank, and the correct bytes of each of its tensors by number."""
    state: dict[str, dict[str, Any]] = {"model": {}, "other": {}}
    expected: dict[int, Any] = {}
    for i, tensor in enumerate(tensors):
        value, rows = tensor.local_value(world, rank, empty)
        if value is not None:
            level, name = leaf_key(i).split("/")
            state[level][name] = value
            expected[i] = rows
    return state, expected
