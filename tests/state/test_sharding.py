"""The arithmetic of placements, compared with torch's own code, and ``Boxed``. No test needs a
process group."""

from itertools import product
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import limpet
from limpet.errors import LimpetError
from limpet.layout.placements import ShardPlacement, infer_shard_order, local_boxes
from limpet.state import sharding
from limpet.types import Box

meshes = (
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple).filter(lambda m: prod(m) < 25)
)
shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(draw, factors=(1, 2, 3, 4, 7)):
    """Draw a shape, a mesh, and the placement of each mesh dimension."""
    shape, mesh = draw(shapes), draw(meshes)
    dims = st.integers(0, len(shape) - 1)
    sharded = st.builds(ShardPlacement, dims, st.sampled_from(factors))
    return (
        shape,
        mesh,
        tuple(draw(st.lists(st.none() | sharded, min_size=len(mesh), max_size=len(mesh)))),
    )


@st.composite
def orders(draw):
    """Draw a shape, a mesh, and the mesh dimensions that shard each dimension, in any order."""
    shape, mesh = draw(shapes), draw(meshes)
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    return shape, mesh, dims, order


def placements(shardings):
    """Return the placements as torch's classes."""
    return [
        Replicate()
        if c is None
        else Shard(c.dim)
        if c.split_factor == 1
        else _StridedShard(c.dim, split_factor=c.split_factor)
        for c in shardings
    ]


def ranks(mesh):
    return product(*map(range, mesh))


def arange(shape):
    return torch.arange(prod(shape)).reshape(shape)


def split(tensor, placement, count, index):
    """Return one rank's part, split by torch's own code."""
    if placement == Replicate():
        return tensor
    return placement._split_tensor(tensor, count, with_padding=False)[0][index]


def check(found, whole, local):
    """Assert that the boxes describe the rank's local tensor, with each element once."""
    assert found.shape == tuple(local.shape)
    seen = torch.zeros(local.shape, dtype=torch.int8)
    for box, where in found.boxes:
        assert box.is_within(tuple(whole.shape))
        assert box.numel
        assert torch.equal(whole[box.slices((0,) * whole.ndim)], local[where])
        seen[where] += 1
    assert (seen == 1).all()


@pytest.mark.slow
@settings(max_examples=200)
@given(layouts())
def test_left_to_right_placements_give_the_same_parts_as_torch(layout):
    shape, mesh, shardings = layout
    whole, torch_placements = arange(shape), placements(shardings)
    for rank in ranks(mesh):
        local = whole
        for torch_placement, count, index in zip(torch_placements, mesh, rank, strict=True):
            local = split(local, torch_placement, count, index)
        found = local_boxes(shape, mesh, rank, shardings, tuple(range(len(mesh))))
        check(found, whole, local)
        size, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(rank), torch_placements
        )
        assert found.shape == size
        if found.boxes:
            assert found.boxes[0][0].offsets == offset


@pytest.mark.slow
@settings(max_examples=200)
@given(orders())
def test_any_shard_order_is_inferred_from_the_split_factors_that_torch_writes(drawn):
    shape, mesh, dims, order = drawn
    whole, size = arange(shape), SimpleNamespace(size=lambda m: mesh[m])
    plain = tuple(Replicate() if d is None else Shard(d) for d in dims)
    entries = tuple(
        ShardOrderEntry(d, tuple(m for m in order if dims[m] == d))
        for d in sorted({*dims} - {None})
    )
    written = DTensorSpec._convert_shard_order_to_StridedShard(entries, plain, size)
    shardings = tuple(
        None if p == Replicate() else ShardPlacement(p.dim, getattr(p, "split_factor", 1))
        for p in written
    )
    assert infer_shard_order(mesh, shardings) is not None
    for rank in ranks(mesh):
        local = whole
        for m in order:
            local = split(local, plain[m], mesh[m], rank[m])
        check(local_boxes(shape, mesh, rank, shardings), whole, local)
        plain_shardings = tuple(None if d is None else ShardPlacement(d) for d in dims)
        check(local_boxes(shape, mesh, rank, plain_shardings, tuple(order)), whole, local)


@pytest.mark.slow
@settings(max_examples=300)
@given(layouts())
def test_the_boxes_of_all_ranks_contain_each_element_once_per_replica(layout):
    shape, mesh, shardings = layout
    counts = np.zeros(shape, np.int64)
    for rank in ranks(mesh):
        for box, _ in local_boxes(shape, mesh, rank, shardings).boxes:
            counts[box.slices((0,) * len(shape))] += 1
    assert (
        counts == prod(n for n, sharded in zip(mesh, shardings, strict=True) if sharded is None)
    ).all()


@settings(max_examples=200)
@given(layouts(factors=(1, 2, 3, 4, 6, 8, 12)))
@pytest.mark.slow
def test_the_inferred_shard_order_matches_that_of_torch(layout):
    _, mesh, shardings = layout
    size = SimpleNamespace(size=lambda m: mesh[m])
    torch_placements = tuple(placements(shardings))
    theirs = DTensorSpec._maybe_convert_StridedShard_to_shard_order(torch_placements, size)
    ours = infer_shard_order(mesh, shardings)
    if theirs is None:
        assert ours is None
        return
    for entry in theirs:
        assert entry.mesh_dims == tuple(m for m in ours if shardings[m].dim == entry.tensor_dim)


def test_the_cost_does_not_depend_on_the_length_of_a_dimension():
    n = 10**15
    found = local_boxes((n, n), (4, 3), (3, 2), (ShardPlacement(0, 5), ShardPlacement(1, 7)))
    assert len(found.boxes) == 5 * 7
    assert found.shape == (n // 4, sum(box.sizes[1] for box, _ in found.boxes[:7]))
    for rank, length in ((0, n), (1, 0)):  # blocks of one element go to the first rank
        found = local_boxes((n,), (2,), (rank,), (ShardPlacement(0, n),))
        assert (found.shape, len(found.boxes)) == ((length,), length // n)
    assert local_boxes((n,), (1,), (0,), (ShardPlacement(0, n - 1),)).shape == (n,)


@pytest.mark.parametrize(
    "make", [np.zeros, torch.zeros, lambda s: torch.nn.Parameter(torch.zeros(s))]
)
def test_a_boxed_tensor_has_one_box_that_shares_its_memory(make):
    boxed = limpet.Boxed(make((2, 3)), offsets=[np.int64(4), 0], shape=torch.Size([6, 3]))
    assert (boxed.offsets, boxed.shape) == ((4, 0), (6, 3))
    assert type(boxed.shape) is tuple
    assert {type(n) for n in (*boxed.offsets, *boxed.shape)} == {int}
    parts = sharding.boxes_of_boxed(boxed, "k")
    assert parts.shape == (6, 3)
    [(box, tensor)] = parts.box_tensors
    assert box == Box((4, 0), (2, 3))
    tensor[1, 2] = 7
    assert boxed.tensor[1, 2].item() == 7
    assert not getattr(tensor, "requires_grad", False)


def test_a_tensor_in_two_different_boxes_is_not_tied():
    tensor = torch.zeros(2)
    first, again, other = (limpet.Boxed(tensor, (at,), (4,)) for at in (0, 0, 2))
    storage = sharding.boxes_of_boxed(first, "k").tie_key
    assert (
        storage
        == sharding.boxes_of_boxed(again, "k").tie_key
        != sharding.boxes_of_boxed(other, "k").tie_key
    )
    array = limpet.Boxed(np.zeros(2), (0,), (4,))
    assert sharding.boxes_of_boxed(array, "k").tie_key is None, "arrays are never tied"


@pytest.mark.parametrize(
    ("size", "offsets", "shape", "boxes"),
    [
        ((), (), (), [Box((), ())]),
        ((0, 3), (2, 0), (4, 3), []),
        ((0, 3), (0, 0), (0, 6), [Box((0, 0), (0, 6))]),
        ((4,), (0,), (4,), [Box((0,), (4,))]),
    ],
)
def test_boxes_of_scalars_empty_tensors_and_whole_tensors(size, offsets, shape, boxes):
    for make in (np.zeros, torch.zeros):
        parts = sharding.boxes_of_boxed(limpet.Boxed(make(size), offsets, shape), "k")
        assert [box for box, _ in parts.box_tensors] == boxes
        assert all(tuple(t.shape) == box.sizes for box, t in parts.box_tensors)


@pytest.mark.parametrize(
    ("tensor", "offsets", "shape", "message"),
    [
        (np.zeros(3), (2,), (4,), r"within the shape \[4\].*offsets=\(2,\), sizes=\(3,\)"),
        (np.zeros(3), (-1,), (4,), r"offsets=\(-1,\)"),
        (np.zeros(3), (0, 0), (4,), "with as many dimensions"),
        (np.zeros(3), (0,), (4, 3), "with as many dimensions"),
        (np.zeros((3, 1)), (0,), (4,), "with as many dimensions"),
        (np.zeros(0), (5,), (4,), r"within the shape \[4\]"),
        (np.zeros(0), (0,), (-1,), r"within the shape \[-1\]"),
        (np.zeros(3), 0, (4,), "a whole number for each dimension.*not 0"),
        (
            np.zeros(3),
            (0.0,),
            (4,),
            r"offsets of a Boxed must be a whole number .*\(0\.0,\)",
        ),
        (np.zeros(3), (0,), ("4",), "shape of a Boxed must be a whole number for each"),
        (np.zeros(3), None, (4,), "not None"),
        ([1, 2, 3], (0,), (4,), "of a Boxed must be a torch.Tensor or .*not <class 'list'>"),
        (np.ma.zeros(3), (0,), (4,), "not <class 'numpy.ma.MaskedArray'>"),
        (np.float64(3), (), (), "not <class 'numpy.float64'>"),
    ],
)
def test_an_invalid_box_is_refused_when_it_is_created(tensor, offsets, shape, message):
    with pytest.raises(LimpetError, match=message):
        limpet.Boxed(tensor, offsets, shape)


def test_a_boxed_tensor_is_immutable_and_compared_by_identity():
    boxed = limpet.Boxed(np.zeros(3), (0,), (4,))
    with pytest.raises(AttributeError):
        boxed.offsets = (1,)
    assert boxed != limpet.Boxed(boxed.tensor, (0,), (4,)), "elements are not compared"
    assert {boxed: 1}[boxed] == 1


# -- ordinary values -----------------------------------------------------------------------------
