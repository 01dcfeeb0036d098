"""Cutting by arithmetic against torch's own code, and ``Boxed``, all without a process group."""

from __future__ import annotations

import subprocess
import sys
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

import holdfast
from holdfast.engine.planning.placements import ShardPlacement, infer_shard_order, local_boxes
from holdfast.engine.state import sharding
from holdfast.errors import PlanError
from holdfast.types import Box

meshes = (
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple).filter(lambda m: prod(m) < 25)
)
shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(draw, factors=(1, 2, 3, 4, 7)):
    """A shape, a mesh, and what each mesh dimension does."""
    shape, mesh = draw(shapes), draw(meshes)
    dims = st.integers(0, len(shape) - 1)
    cut = st.builds(ShardPlacement, dims, st.sampled_from(factors))
    return (
        shape,
        mesh,
        tuple(draw(st.lists(st.none() | cut, min_size=len(mesh), max_size=len(mesh)))),
    )


@st.composite
def orders(draw):
    """A shape, a mesh, and the mesh dimensions that cut each dimension, in any order."""
    shape, mesh = draw(shapes), draw(meshes)
    dims = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    return shape, mesh, dims, order


def placements(cuts):
    """The same in torch's words."""
    return [
        Replicate()
        if c is None
        else Shard(c.dim)
        if c.split_factor == 1
        else _StridedShard(c.dim, split_factor=c.split_factor)
        for c in cuts
    ]


def ranks(mesh):
    return product(*map(range, mesh))


def numbered(shape):
    return torch.arange(prod(shape)).reshape(shape)


def split(tensor, placement, count, index):
    """One rank's part, by torch's own code."""
    if placement == Replicate():
        return tensor
    return placement._split_tensor(tensor, count, with_padding=False)[0][index]


def check(found, whole, local):
    """The boxes are what the local tensor of that rank holds, each element once."""
    assert found.shape == tuple(local.shape)
    seen = torch.zeros(local.shape, dtype=torch.int8)
    for box, where in found.boxes:
        assert box.is_within(tuple(whole.shape))
        assert box.numel
        assert torch.equal(whole[box.slices((0,) * whole.ndim)], local[where])
        seen[where] += 1
    assert (seen == 1).all()


# -- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(layouts())
def test_from_left_to_right_each_rank_has_what_torch_splits_off(layout):
    shape, mesh, cuts = layout
    whole, kinds = numbered(shape), placements(cuts)
    for rank in ranks(mesh):
        local = whole
        for kind, count, index in zip(kinds, mesh, rank, strict=True):
            local = split(local, kind, count, index)
        found = local_boxes(shape, mesh, rank, cuts, tuple(range(len(mesh))))
        check(found, whole, local)
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(rank), kinds)
        assert found.shape == size
        if found.boxes:
            assert found.boxes[0][0].offsets == offset


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(orders())
def test_any_order_is_read_from_the_factors_that_torch_writes_for_it(drawn):
    shape, mesh, dims, order = drawn
    whole, size = numbered(shape), SimpleNamespace(size=lambda m: mesh[m])
    plain = tuple(Replicate() if d is None else Shard(d) for d in dims)
    entries = tuple(
        ShardOrderEntry(d, tuple(m for m in order if dims[m] == d))
        for d in sorted({*dims} - {None})
    )
    written = DTensorSpec._convert_shard_order_to_StridedShard(entries, plain, size)
    cuts = tuple(
        None if p == Replicate() else ShardPlacement(p.dim, getattr(p, "split_factor", 1))
        for p in written
    )
    assert infer_shard_order(mesh, cuts) is not None
    for rank in ranks(mesh):
        local = whole
        for m in order:
            local = split(local, plain[m], mesh[m], rank[m])
        check(local_boxes(shape, mesh, rank, cuts), whole, local)
        told = tuple(None if d is None else ShardPlacement(d) for d in dims)
        check(local_boxes(shape, mesh, rank, told, tuple(order)), whole, local)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(layouts())
def test_the_boxes_of_all_ranks_have_each_element_as_often_as_it_is_replicated(layout):
    shape, mesh, cuts = layout
    held = np.zeros(shape, np.int64)
    for rank in ranks(mesh):
        for box, _ in local_boxes(shape, mesh, rank, cuts).boxes:
            held[box.slices((0,) * len(shape))] += 1
    assert (held == prod(n for n, cut in zip(mesh, cuts, strict=True) if cut is None)).all()


@settings(max_examples=500, deadline=None)
@given(layouts(factors=(1, 2, 3, 4, 6, 8, 12)))
def test_factors_say_an_order_where_torch_finds_one(layout):
    _, mesh, cuts = layout
    size = SimpleNamespace(size=lambda m: mesh[m])
    kinds = tuple(placements(cuts))
    theirs = DTensorSpec._maybe_convert_StridedShard_to_shard_order(kinds, size)
    ours = infer_shard_order(mesh, cuts)
    if theirs is None:
        assert ours is None
        return
    for entry in theirs:
        assert entry.mesh_dims == tuple(m for m in ours if cuts[m].dim == entry.tensor_dim)


@pytest.mark.parametrize(
    ("shape", "mesh", "rank", "cuts", "local", "boxes"),
    [
        ((), (2,), (1,), (None,), (), [((), ())]),
        ((8,), (2,), (1,), (ShardPlacement(0),), (4,), [((4,), (4,))]),
        ((5,), (4,), (2,), (ShardPlacement(0),), (1,), [((4,), (1,))]),
        ((5,), (4,), (3,), (ShardPlacement(0),), (0,), []),
        ((0,), (2,), (0,), (ShardPlacement(0),), (0,), []),
        ((4, 0), (2,), (1,), (ShardPlacement(0),), (2, 0), []),
        ((6,), (2, 3), (1, 0), (None, ShardPlacement(0)), (2,), [((0,), (2,))]),
        (
            (6, 4),
            (2, 2),
            (1, 1),
            (ShardPlacement(1), ShardPlacement(0)),
            (3, 2),
            [((3, 2), (3, 2))],
        ),
        # one tensor dimension over two mesh dimensions
        ((7,), (2, 2), (1, 0), (ShardPlacement(0), ShardPlacement(0)), (2,), [((4,), (2,))]),
        # FSDP2 over tensor parallelism: even, and uneven, where left to right is another row
        ((8,), (2, 2), (0, 1), (ShardPlacement(0, 2), ShardPlacement(0)), (2,), [((4,), (2,))]),
        ((38,), (4, 4), (3, 2), (ShardPlacement(0, 4), ShardPlacement(0)), (1,), [((29,), (1,))]),
        ((7,), (3, 2), (2, 0), (ShardPlacement(0, 2), ShardPlacement(0)), (0,), []),
        # over columns that are cut by tensor parallelism the factor is 1
        (
            (8, 6),
            (2, 2),
            (1, 1),
            (ShardPlacement(0), ShardPlacement(1)),
            (4, 3),
            [((4, 3), (4, 3))],
        ),
        # strides that no order of the mesh gives: runs, and runs that touch
        ((8,), (2,), (0,), (ShardPlacement(0, 2),), (4,), [((0,), (2,)), ((4,), (2,))]),
        ((8,), (2,), (1,), (ShardPlacement(0, 8),), (0,), []),
        ((8,), (2,), (0,), (ShardPlacement(0, 8),), (8,), [((0,), (8,))]),
        ((8,), (1,), (0,), (ShardPlacement(0, 3),), (8,), [((0,), (8,))]),
        (
            (4, 2),
            (2, 2),
            (1, 0),
            (ShardPlacement(0, 2), ShardPlacement(1, 2)),
            (2, 2),
            [((1, 0), (1, 2)), ((3, 0), (1, 2))],
        ),
        # more blocks than elements
        ((3,), (2,), (0,), (ShardPlacement(0, 10**12),), (3,), [((0,), (3,))]),
    ],
)
def test_boxes(shape, mesh, rank, cuts, local, boxes):
    found = local_boxes(shape, mesh, rank, cuts)
    assert found.shape == local
    assert [(box.offsets, box.sizes) for box, _ in found.boxes] == boxes


def test_the_left_to_right_reading_of_the_uneven_case_is_another():
    """What makes the order matter: the same size, and other rows."""
    read = local_boxes((38,), (4, 4), (3, 2), (ShardPlacement(0, 4), ShardPlacement(0)), (0, 1))
    assert [box for box, _ in read.boxes] == [Box((37,), (1,))]
    assert (
        read.shape
        == local_boxes((38,), (4, 4), (3, 2), (ShardPlacement(0, 4), ShardPlacement(0))).shape
    )


def test_the_length_of_a_dimension_costs_nothing():
    n = 10**15
    found = local_boxes((n, n), (4, 3), (3, 2), (ShardPlacement(0, 5), ShardPlacement(1, 7)))
    assert len(found.boxes) == 5 * 7
    assert found.shape == (n // 4, sum(box.sizes[1] for box, _ in found.boxes[:7]))
    for rank, length in ((0, n), (1, 0)):  # blocks of one element go to the first rank
        found = local_boxes((n,), (2,), (rank,), (ShardPlacement(0, n),))
        assert (found.shape, len(found.boxes)) == ((length,), length // n)
    assert local_boxes((n,), (1,), (0,), (ShardPlacement(0, n - 1),)).shape == (n,)


@pytest.mark.parametrize(
    ("spec", "cuts", "order"),
    [
        ({}, (ShardPlacement(0), ShardPlacement(0)), None),  # torch 2.6: neither
        ({}, (ShardPlacement(0, 2), ShardPlacement(0)), None),
        (
            {"shard_order": (ShardOrderEntry(0, (1, 0)),)},
            (ShardPlacement(0), ShardPlacement(0)),
            (1, 0),
        ),
        (
            {"shard_order": (ShardOrderEntry(0, (0, 1)),)},
            (ShardPlacement(0, 2), ShardPlacement(0)),
            None,
        ),
        ({"shard_order": (), "flag": False}, (None, None), None),
        ({"shard_order": None, "flag": True}, (ShardPlacement(0, 2), ShardPlacement(0)), None),
        (
            {"shard_order": (ShardOrderEntry(0, (1, 0)),), "flag": True},
            (ShardPlacement(0, 2), ShardPlacement(0)),
            None,
        ),
        (
            {"shard_order": (ShardOrderEntry(0, (0, 1)),), "flag": False},
            (ShardPlacement(0, 2), None),
            (0, 1),
        ),
        (
            {"shard_order": (ShardOrderEntry(0, (2,)), ShardOrderEntry(1, (1, 0))), "flag": False},
            (ShardPlacement(1), ShardPlacement(1), ShardPlacement(0)),
            (2, 1, 0),
        ),
    ],
)
def test_the_order_that_a_spec_tells(spec, cuts, order):
    if "flag" in spec:
        spec = {**spec, "use_strided_shard_as_shard_order": spec["flag"]}
    assert sharding._shard_order(SimpleNamespace(**spec), cuts) == order


# -- Boxed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [np.zeros, torch.zeros, lambda s: torch.nn.Parameter(torch.zeros(s))]
)
def test_a_boxed_tensor_is_one_piece_that_shares_its_memory(make):
    boxed = holdfast.Boxed(make((2, 3)), offsets=[np.int64(4), 0], shape=torch.Size([6, 3]))
    assert (boxed.offsets, boxed.shape) == ((4, 0), (6, 3))
    assert type(boxed.shape) is tuple
    assert {type(n) for n in (*boxed.offsets, *boxed.shape)} == {int}
    assert sharding.is_distributed_tensor(boxed)
    parts = sharding.get_local_boxes(boxed, "k")
    assert parts.shape == (6, 3)
    [(box, tensor)] = parts.box_tensors
    assert box == Box((4, 0), (2, 3))
    tensor[1, 2] = 7
    assert boxed.tensor[1, 2].item() == 7
    assert not getattr(tensor, "requires_grad", False)


def test_one_tensor_in_two_boxes_is_not_tied():
    tensor = torch.zeros(2)
    first, again, other = (holdfast.Boxed(tensor, (at,), (4,)) for at in (0, 0, 2))
    storage = sharding.get_local_boxes(first, "k").tie_key
    assert (
        storage
        == sharding.get_local_boxes(again, "k").tie_key
        != sharding.get_local_boxes(other, "k").tie_key
    )
    array = holdfast.Boxed(np.zeros(2), (0,), (4,))
    told = [sharding.get_local_boxes(array, "k").tie_key for _ in range(2)]
    assert told[0] != told[1], "arrays are never tied"


@pytest.mark.parametrize(
    ("size", "offsets", "shape", "pieces"),
    [
        ((), (), (), [Box((), ())]),
        ((0, 3), (2, 0), (4, 3), []),
        ((0, 3), (0, 0), (0, 6), [Box((0, 0), (0, 6))]),
        ((4,), (0,), (4,), [Box((0,), (4,))]),
    ],
)
def test_boxes_at_the_edges(size, offsets, shape, pieces):
    for make in (np.zeros, torch.zeros):
        parts = sharding.get_local_boxes(holdfast.Boxed(make(size), offsets, shape), "k")
        assert [box for box, _ in parts.box_tensors] == pieces
        assert all(tuple(t.shape) == box.sizes for box, t in parts.box_tensors)


@pytest.mark.parametrize(
    ("tensor", "offsets", "shape", "says"),
    [
        (np.zeros(3), (2,), (4,), r"box within \[4\].*offsets \[2\] and sizes \[3\]"),
        (np.zeros(3), (-1,), (4,), r"offsets \[-1\]"),
        (np.zeros(3), (0, 0), (4,), "same number of dimensions"),
        (np.zeros(3), (0,), (4, 3), "same number of dimensions"),
        (np.zeros((3, 1)), (0,), (4,), "same number of dimensions"),
        (np.zeros(0), (5,), (4,), r"box within \[4\]"),
        (np.zeros(0), (0,), (-1,), r"box within \[-1\]"),
        (np.zeros(3), 0, (4,), "one integer for each dimension.*found 0"),
        (np.zeros(3), (0.0,), (4,), r"Invalid offsets .*one integer for each.*\(0\.0,\)"),
        (np.zeros(3), (0,), ("4",), r"Invalid shape .*one integer for each"),
        (np.zeros(3), None, (4,), "found None"),
        ([1, 2, 3], (0,), (4,), "of a Boxed is a list.*a torch.Tensor or"),
        (np.ma.zeros(3), (0,), (4,), "is a MaskedArray"),
        (np.float64(3), (), (), "is a float64"),
    ],
)
def test_a_box_that_cannot_be_is_refused_when_it_is_made(tensor, offsets, shape, says):
    with pytest.raises(PlanError, match=says):
        holdfast.Boxed(tensor, offsets, shape)


def test_a_boxed_tensor_stays_as_it_is():
    boxed = holdfast.Boxed(np.zeros(3), (0,), (4,))
    with pytest.raises(AttributeError):
        boxed.offsets = (1,)
    assert boxed != holdfast.Boxed(boxed.tensor, (0,), (4,)), "elements are not compared"
    assert {boxed: 1}[boxed] == 1


# -- ordinary values -----------------------------------------------------------------------------


def test_ordinary_values_are_not_spread():
    for value in (3, "x", None, [1], {}, np.zeros(3), torch.zeros(3), torch.nn.Linear(2, 2), Box):
        assert not sharding.is_distributed_tensor(value)
        assert sharding.get_local_boxes(value, "k") is None


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import torch"])
def test_asking_loads_nothing(first):
    code = (
        f"import sys\n{first}\nfrom holdfast.engine.state import sharding\n"
        "before = {m for m in sys.modules if m.startswith('torch')}\n"
        "value = sys.modules['torch'].zeros(3) if before else 3\n"
        "assert not sharding.is_distributed_tensor(value)\n"
        "assert sharding.get_local_boxes(value, 'k') is None\n"
        "print({m for m in sys.modules if m.startswith('torch')} - before)\n"
        "print('torch.distributed.tensor' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["set()", "False"]
