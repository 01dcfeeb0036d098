"""Real DTensors, FSDP2, and tensor parallelism, in one process that simulates each rank in turn."""

from contextlib import contextmanager
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from limpet.errors import Unsupported
from limpet.state.sharding import empty_like, get_local_boxes, is_distributed_tensor
from limpet.types import Box


@contextmanager
def simulated_rank(rank, size):
    """Act as rank ``rank`` of ``size``, with a process group whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with CommDebugMode() as calls:
            yield calls
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # the cache keeps meshes of the previous rank


def arange(shape, dtype=torch.float32):
    return torch.arange(prod(shape), dtype=dtype).reshape(shape)


def distribute(shape, mesh, placements):
    """Return a DTensor, whose local part torch computes without communication."""
    return distribute_tensor(arange(shape), mesh, placements, src_data_rank=None)


class CoverageCheck:
    """Asserts that the boxes of all ranks have the right elements, and counts each element."""

    def __init__(self):
        self.counts = {}

    def add(self, key, value, whole):
        found = get_local_boxes(value, key)
        assert found.shape == tuple(whole.shape)
        counts = self.counts.setdefault(key, torch.zeros(found.shape, dtype=torch.int64))
        for box, tensor in found.box_tensors:
            assert tuple(tensor.shape) == box.sizes
            assert box.numel or not whole.numel()
            assert tensor.dtype == whole.dtype
            assert not tensor.requires_grad
            assert torch.equal(tensor, whole[box.slices((0,) * whole.ndim)])
            counts[box.slices((0,) * whole.ndim)] += 1

    def check(self, times):
        for key, counts in self.counts.items():
            assert (counts == times(key)).all(), key


R, S = Replicate(), Shard


def strided(dim, factor):
    return _StridedShard(dim, split_factor=factor)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((3,), [S(0)]),
        ((3,), [S(1)]),
        ((4,), [R]),
        ((5,), [strided(1, 2)]),
        ((2, 3), [S(0), S(1)]),
        ((2, 3), [S(1), S(1)]),
        ((2, 3), [R, S(0)]),
        ((2, 3), [S(0), R]),
        ((3, 2), [R, R]),
        ((3, 2), [strided(0, 2), R]),
        ((2, 2), [strided(0, 2), S(0)]),
        ((2, 2, 2), [R, S(1), S(0)]),
        ((2, 2, 2), [S(0), S(0), S(0)]),
        ((2, 2, 2), [strided(1, 3), S(0), strided(1, 2)]),
    ],
)
def test_the_boxes_of_all_ranks_cover_the_tensor(mesh, placements):
    coverage = CoverageCheck()
    shapes = [(7, 5), (8, 8), (1, 12), (2, 3, 2), (0, 6), (6, 0)]
    for rank in range(prod(mesh)):
        with simulated_rank(rank, prod(mesh)):
            made = init_device_mesh("cpu", mesh)
            for shape in shapes:
                coverage.add(str(shape), distribute(shape, made, placements), arange(shape))
    replicas = prod(n for n, p in zip(mesh, placements, strict=True) if p == R)
    coverage.check(lambda _: replicas)


def test_box_tensors_are_views_of_the_live_memory():
    with simulated_rank(1, 2) as calls:
        value = torch.nn.Parameter(
            distribute((8, 3), init_device_mesh("cpu", (2,)), [strided(0, 2)])
        )
        assert is_distributed_tensor(value)
        found = get_local_boxes(value, "k")
        assert [box for box, _ in found.box_tensors] == [Box((2, 0), (2, 3)), Box((6, 0), (2, 3))]
        found.box_tensors[1][1][0, 0] = -1
        assert value._local_tensor[2, 0].item() == -1
        storage = value._local_tensor.untyped_storage().data_ptr()
        for _, tensor in found.box_tensors:
            assert tensor.untyped_storage().data_ptr() == storage
            assert not tensor.requires_grad
        assert calls.get_total_counts() == 0


def test_a_flattened_tensor_has_several_boxes():
    """Torch marks that the split factors of this tensor state no order of the mesh."""
    for rank in range(6):
        with simulated_rank(rank, 6):
            flat = distribute((4, 6), init_device_mesh("cpu", (2, 3)), [R, S(1)]).flatten()
            found = get_local_boxes(flat, "k")
            at = rank % 3 * 2
            assert [box for box, _ in found.box_tensors] == [
                Box((n + at,), (2,)) for n in (0, 6, 12, 18)
            ]
            for box, tensor in found.box_tensors:
                assert torch.equal(tensor, torch.arange(24.0)[box.slices((0,))])


def test_split_factors_are_not_read_as_an_order_if_torch_marks_that_they_are_none():
    """With the mark, the rank has strided elements. Without it, the same placements mean that FSDP2
    sharded a tensor that was already sharded. This gives other sizes, so the tensor is refused."""
    with simulated_rank(12, 16):
        mesh, placements = init_device_mesh("cpu", (4, 4)), [strided(0, 4), S(0)]
        unmarked = distribute((38,), mesh, placements)
        assert unmarked._local_tensor.tolist() == [9, 19]
        with pytest.raises(Unsupported, match="does not match its placements"):
            get_local_boxes(unmarked, "k")
        order = (ShardOrderEntry(0, (0, 1)),)
        fields = {"shard_order": order, "use_strided_shard_as_shard_order": False}
        marked = DTensor(
            unmarked._local_tensor, replace(unmarked._spec, **fields), requires_grad=False
        )
        found = get_local_boxes(marked, "k").box_tensors
        assert [(box.offsets[0], tensor.tolist()) for box, tensor in found] == [
            (9, [9]),
            (19, [19]),
        ]


def test_an_explicit_shard_order_is_used_and_kept():
    counts = torch.zeros(12, dtype=torch.int64)
    for rank in range(6):
        with simulated_rank(rank, 6):
            mesh = init_device_mesh("cpu", (2, 3))
            spec = DTensorSpec(
                mesh,
                (S(0), S(0)),
                tensor_meta=TensorMeta(torch.Size((12,)), (1,), torch.float32),
                shard_order=(ShardOrderEntry(0, (1, 0)),),
            )
            dp, tp = mesh.get_coordinate()
            value = DTensor(torch.zeros(2), spec, requires_grad=False)
            [(box, _)] = get_local_boxes(value, "k").box_tensors
            assert box == Box((4 * tp + 2 * dp,), (2,))
            counts[box.slices((0,))] += 1
            assert empty_like(value, torch.int8)._spec.shard_order == spec.shard_order
    assert (counts == 1).all()


def test_ranks_outside_the_mesh_have_no_box():
    for rank in range(4):
        with simulated_rank(rank, 4):
            mesh = DeviceMesh("cpu", [1, 2])
            for shape in ((4, 6), (0, 6)):
                found = get_local_boxes(distribute(shape, mesh, [S(1)]), "k")
                assert found.shape == shape
                assert len(found.box_tensors) == (rank in (1, 2))
                assert found.dtype == "float32"


def test_a_rank_without_elements_has_no_box_but_an_empty_tensor_has_one():
    with simulated_rank(2, 3):
        mesh = init_device_mesh("cpu", (3,))
        assert get_local_boxes(distribute((2, 4), mesh, [S(0)]), "k").box_tensors == []
        [(box, tensor)] = get_local_boxes(distribute((0, 6), mesh, [S(1)]), "k").box_tensors
        assert (box, tuple(tensor.shape)) == (Box((0, 0), (0, 6)), (0, 6))
        scalar = distribute_tensor(torch.tensor(3.0), mesh, [R], src_data_rank=None)
        [(box, tensor)] = get_local_boxes(scalar, "k").box_tensors
        assert (box, tensor.item()) == (Box((), ()), 3.0)


@pytest.mark.parametrize(
    "partial", [Partial(), Partial("avg"), _MaskPartial(offset_shape=(4, 4), offset_dim=0)]
)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_partial_tensor_is_refused(partial, rank):
    with simulated_rank(rank, 4) as calls:
        mesh = DeviceMesh("cpu", [[0], [1]])
        meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
        spec = DTensorSpec(mesh, (S(0), partial), tensor_meta=meta)
        value = DTensor(torch.zeros(2, 4), spec, requires_grad=False)
        with pytest.raises(Unsupported) as e:
            get_local_boxes(value, "model/w")
        assert "'model/w'" in str(e.value)
        assert repr(partial) in e.value.what
        assert "redistribute" in e.value.todo
        assert "full_tensor" in e.value.todo
        assert e.value.leaf == "model/w"
        assert calls.get_total_counts() == 0


def test_a_placement_of_an_unknown_class_is_refused():
    class Ragged(Shard):
        pass

    with simulated_rank(0, 2):
        value = distribute((4, 4), init_device_mesh("cpu", (2,)), [S(0)])
        value._spec = replace(value._spec, placements=(Ragged(0),))
        with pytest.raises(Unsupported, match="does not describe which elements"):
            get_local_boxes(value, "k")


def test_the_error_for_a_local_tensor_of_another_shape_names_both_shapes():
    with simulated_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        stride = (2, 1)
        value = DTensor.from_local(torch.zeros(3, 2), mesh, [S(0)], shape=(4, 2), stride=stride)
        with pytest.raises(Unsupported) as e:
            get_local_boxes(value, "model/w")
        assert "'model/w'" in e.value.what
        assert "[2, 2] of [4, 2]" in e.value.expected
        assert e.value.found == "[3, 2]"
        assert "stride=" in e.value.todo
        empty = DTensor.from_local(torch.zeros(0), mesh, [S(0)], shape=(1, 2), stride=stride)
        assert get_local_boxes(empty, "k").box_tensors == [], (
            "any shape is accepted without elements"
        )
        missing = DTensor.from_local(torch.zeros(0), mesh, [S(0)], shape=(4, 2), stride=stride)
        with pytest.raises(Unsupported, match="does not match its placements"):
            get_local_boxes(missing, "k")


def with_local(local, mesh, shape):
    spec = distribute(shape, mesh, [S(0)])._spec
    return DTensor(local, spec, requires_grad=False)


def test_an_asynchronous_local_tensor_is_awaited(monkeypatch):
    waited = []
    original = AsyncCollectiveTensor.trigger_wait
    monkeypatch.setattr(
        AsyncCollectiveTensor, "trigger_wait", lambda t: waited.append(t) or original(t)
    )
    with simulated_rank(0, 2):
        local = torch.ones(2, 4)
        value = with_local(AsyncCollectiveTensor(local), init_device_mesh("cpu", (2,)), (4, 4))
        [(_, tensor)] = get_local_boxes(value, "k").box_tensors
        assert waited
        assert type(tensor) is torch.Tensor
        assert tensor.data_ptr() == local.data_ptr()
        assert type(empty_like(value, torch.int8)._local_tensor) is torch.Tensor


def test_a_local_tensor_of_an_unknown_subclass_is_refused():
    class Scaled(torch.Tensor):
        pass

    with simulated_rank(0, 2):
        local = torch.zeros(2, 4).as_subclass(Scaled)
        value = with_local(local, init_device_mesh("cpu", (2,)), (4, 4))
        with pytest.raises(Unsupported, match=r"memory of the local tensor of 'model/w'.*Scaled"):
            get_local_boxes(value, "model/w")


def test_a_tensor_on_the_meta_device_is_refused():
    with simulated_rank(0, 2):
        value = with_local(torch.zeros(2, 4).to("meta"), init_device_mesh("cpu", (2,)), (4, 4))
        with pytest.raises(Unsupported, match="to_empty"):
            get_local_boxes(value, "model/w")
        assert empty_like(value, torch.int8).is_meta


def test_tied_tensors_have_equal_tie_keys_and_shapes():
    for rank in range(2):
        with simulated_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            square = torch.nn.Parameter(distribute((4, 4), mesh, [S(0)]))
            single = torch.nn.Parameter(distribute((1, 4), mesh, [S(0)]))
            flat = distribute((8, 4), mesh, [S(1)])
            values = [
                square, single, square.t(), distribute((4, 4), mesh, [S(0)]), flat[:4], flat[4:],
            ]  # fmt: skip
            replicas = distribute((4, 4), mesh, [R])
            values += [distribute((1, 4), mesh, [S(0)]), replicas, replicas.t()]
            keys = [
                (get_local_boxes(v, "k").tie_key, get_local_boxes(v, "k").shape) for v in values
            ]
            assert len(set(keys)) == len(values), "all differ, although some share memory"
            for value, one in zip(values, keys, strict=True):
                assert (get_local_boxes(value.detach(), "k").tie_key, tuple(value.shape)) == one


class Model(torch.nn.Module):
    """A model with sizes that neither 2 nor 3 divides, a tied weight, and a parameter with fewer
    elements than there are ranks."""

    def __init__(self, rows=13):
        super().__init__()
        self.embed = torch.nn.Embedding(rows, 6)
        self.up = torch.nn.Linear(6, rows)
        self.down = torch.nn.Linear(rows, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.head = torch.nn.Linear(6, rows, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(arange(p.shape) + 1000 * i)


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": RowwiseParallel()}


def check_training(size, shard, times, rows=13):
    """Make a step of AdamW on each rank in turn. Assert that the boxes of all parameters and slots
    have the right elements, each as often as ``times`` returns for its key."""
    coverage = CoverageCheck()
    whole = dict(Model(rows).named_parameters(remove_duplicate=False))
    for rank in range(size):
        with simulated_rank(rank, size):
            model = Model(rows)
            shard(model)
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.5), foreach=False)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    coverage.add(name, p, whole[name].detach())
                    p.grad = p.detach().clone()
            optimizer.step()
            for name, p in model.named_parameters():
                slots = optimizer.state[p]
                coverage.add(f"{name}:avg", slots["exp_avg"], whole[name].detach() / 2)
                made = empty_like(p, torch.float64)
                assert made._spec.placements == p._spec.placements
                assert made._local_tensor.shape == p._local_tensor.shape
                assert not is_distributed_tensor(slots["step"])
    coverage.check(times)


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2)])
@pytest.mark.slow
def test_boxes_cover_the_training_state_with_fsdp2_over_tensor_parallelism(mesh):
    def shard(model):
        made = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, made["tp"], TENSOR_PARALLEL, src_data_rank=None)
        fully_shard(model.up, mesh=made["dp"])
        fully_shard(model, mesh=made["dp"])

    tp = {"embed.weight", "up.weight", "up.bias", "down.weight"}
    check_training(prod(mesh), shard, lambda k: 1 if k.split(":")[0] in tp else mesh[1])


@pytest.mark.slow
def test_fsdp2_over_tensor_parallelism_with_equal_sizes_but_other_rows():
    """38 rows are sharded over a 4 x 4 mesh. By its placements alone, rank (3, 2) would have row
    37, but it has row 29."""

    def shard(model):
        made = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, made["tp"], {"embed": RowwiseParallel()}, src_data_rank=None)
        fully_shard(model, mesh=made["dp"])
        if dist.get_rank() == 14:
            [(box, _)] = get_local_boxes(model.embed.weight, "k").box_tensors
            assert box == Box((29, 0), (1, 6))

    check_training(16, shard, lambda k: 1 if k.startswith("embed") else 4, rows=38)


@pytest.mark.parametrize("mesh", [(3,), (4,), (2, 2), (2, 3)])
def test_boxes_cover_the_training_state_with_fsdp2_and_hsdp(mesh):
    def shard(model):
        names = ("replicate", "shard")[-len(mesh) :]
        made = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        fully_shard(model.up, mesh=made)
        fully_shard(model, mesh=made)

    check_training(prod(mesh), shard, lambda _: prod(mesh[:-1]))


@pytest.mark.slow
def test_boxes_cover_the_training_state_with_hsdp_over_tensor_parallelism():
    def shard(model):
        names = ("replicate", "shard", "tp")
        made = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        parallelize_module(model, made["tp"], TENSOR_PARALLEL, src_data_rank=None)
        fully_shard(model, mesh=made["replicate", "shard"])

    tp = {"embed.weight", "up.weight", "up.bias", "down.weight"}
    check_training(8, shard, lambda k: 2 if k.split(":")[0] in tp else 4)


def chunked(shape, size):
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(size)])
    return sharded_tensor.empty(spec, *shape, dtype=torch.float32)


def test_the_boxes_of_all_ranks_cover_a_sharded_tensor():
    coverage = CoverageCheck()
    for rank in range(4):
        with simulated_rank(rank, 4) as calls:
            for shape in ((9, 2), (3, 2), (8, 1, 2)):
                value = chunked(shape, 4)
                for shard in value.local_shards():
                    metadata = shard.metadata
                    box = Box(tuple(metadata.shard_offsets), tuple(metadata.shard_sizes))
                    shard.tensor.copy_(arange(shape)[box.slices((0,) * len(shape))])
                assert is_distributed_tensor(value)
                coverage.add(str(shape), value, arange(shape))
            assert calls.get_total_counts() == 0
    coverage.check(lambda _: 1)


def test_a_rank_without_a_shard_has_no_box():
    with simulated_rank(3, 4):
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        value, other = (sharded_tensor.empty(spec, 3, 2, dtype=torch.float16) for _ in range(2))
        assert value.local_shards() == []
        found = get_local_boxes(value, "k")
        assert (found.shape, found.box_tensors, found.dtype) == ((3, 2), [], "float16")
        assert (
            get_local_boxes(value, "k").tie_key
            == found.tie_key
            != get_local_boxes(other, "k").tie_key
        )
        [(box, tensor)] = get_local_boxes(chunked((0, 2), 4), "k").box_tensors
        assert (box, tuple(tensor.shape)) == (Box((0, 0), (0, 2)), (0, 2))


def test_a_shard_that_does_not_match_its_metadata_is_refused():
    with simulated_rank(0, 2):
        value = chunked((4, 2), 2)
        value.local_shards()[0].metadata.shard_offsets[0] = 3
        with pytest.raises(
            Unsupported, match=r"local shard of 'model/w' does not match .*\[3, 0\]"
        ):
            get_local_boxes(value, "model/w")
        value = chunked((4, 2), 2)
        value.local_shards()[0].tensor = torch.zeros(1, 2)
        with pytest.raises(Unsupported, match=r"found \[1, 2\]"):
            get_local_boxes(value, "k")


# -- empty_like ----------------------------------------------------------------------------------
