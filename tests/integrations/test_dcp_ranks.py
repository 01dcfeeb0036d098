"""DCP with Limpet's reader and writer on four gloo ranks: layouts, wrappers, options, failures.

The tests cover what PyTorch's own DCP tests cover.
"""

import gc
import inspect
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import limpet
from limpet.errors import CommitError, DigestMismatch, NotFound, Unsupported
from limpet.integrations.dcp import StorageReader, StorageWriter
from limpet.loading.snapshot import reader_of
from tests.integrations.world import SIZE, RankProcesses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    made = RankProcesses(tmp_path_factory.mktemp("world"))
    yield made
    made.stop()


def save(state, url, **options):
    return dcp.save(state, storage_writer=StorageWriter(url), **options)


def load(state, url, **options):
    dcp.load(state, storage_reader=StorageReader(url), **options)
    return state


def arange(*shape):
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


SHAPES = [(8, 4), (5, 3), (3, 7), (1, 9), (0, 4), (2, 2, 6), (11,)]
LINE_PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()]]
GRID_PLACEMENTS = [
    [Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)],
    [Shard(1), Replicate()], [Replicate(), Replicate()],
]  # fmt: skip


def layouts():
    line_mesh = init_device_mesh("cpu", (SIZE,))
    grid_mesh = init_device_mesh("cpu", (2, 2))
    return [(line_mesh, placements) for placements in LINE_PLACEMENTS] + [
        (grid_mesh, placements) for placements in GRID_PLACEMENTS
    ]


def distribute(shape, mesh, placements, fill):
    fits = all(not isinstance(p, Shard) or p.dim < len(shape) for p in placements)
    value = arange(*shape) if fill else torch.full(shape, -1.0)
    return distribute_tensor(value, mesh, placements) if fits else value


def check_resharding(folder):
    """Save every shape in every layout, and load each into a third of the layouts."""
    all_layouts = layouts()
    for i, (mesh, placements) in enumerate(all_layouts):
        save({str(s): distribute(s, mesh, placements, True) for s in SHAPES}, f"{folder}/{i}")
        for target_mesh, target_placements in all_layouts[i % 3 :: 3]:
            into = {str(s): distribute(s, target_mesh, target_placements, False) for s in SHAPES}
            load(into, f"{folder}/{i}")
            for shape in SHAPES:
                loaded = into[str(shape)]
                loaded = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
                assert loaded.equal(arange(*shape)), (placements, target_placements, shape)


def test_dtensors_of_any_layout_load_into_other_layouts(world, tmp_path):
    world.run(check_resharding, str(tmp_path))
    for i in range(len(LINE_PLACEMENTS + GRID_PLACEMENTS)):
        snap = limpet.open(tmp_path / str(i))
        assert snap.verify().ok
        loaded = limpet.load(snap.url)
        assert all(loaded[str(s)].equal(arange(*s)) for s in SHAPES)
        expected_bytes = sum(prod(s) * 4 for s in SHAPES)
        boxes = [b for x in reader_of(snap).indexes() for leaf in x.leaves for b in leaf.boxes]
        assert sum(prod(b.sizes) * 4 for b in boxes) == expected_bytes, "each element is saved once"


def check_sharded_tensors(folder):
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank = dist.get_rank()
    saved_row_counts = [3, 1, 0, 2]

    def make_tensor(fill, row_counts):
        first, count = sum(row_counts[:rank]), row_counts[rank]
        if not count:
            return init_from_local_shards([], (6, 5))
        local = arange(6, 5)[first : first + count].clone() * fill
        shard = ShardMetadata([first, 0], [count, 5], f"rank:{rank}/cpu")
        return init_from_local_shards([LocalShard(local, shard)], (6, 5))

    save({"a": make_tensor(True, saved_row_counts)}, folder)
    for row_counts in ([2, 2, 1, 1], [0, 0, 6, 0]):
        into = load({"a": make_tensor(False, row_counts)}, folder)["a"]
        first = sum(row_counts[:rank])
        for shard in into.local_shards():
            assert shard.tensor.equal(arange(6, 5)[first : first + row_counts[rank]])
    assert load({"a": torch.zeros(6, 5)}, folder)["a"].equal(arange(6, 5))


def test_sharded_tensors_load_into_other_shards_and_whole_tensors(world, tmp_path):
    world.run(check_sharded_tensors, str(tmp_path / "a"))
    assert limpet.load(tmp_path / "a")["a"].equal(arange(6, 5))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    seen: torch.Tensor

    def forward(self, x):
        self.seen += len(x)
        return self.down(torch.tanh(self.up(x)))


def make_model(kind):
    torch.manual_seed(1)
    model = Model()
    if kind in ("fsdp", "hsdp"):
        shape, names = ((SIZE,), ("dp",)) if kind == "fsdp" else ((2, 2), ("copies", "dp"))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    elif kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallel_plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], parallel_plan)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer):
    optimizer.zero_grad()
    (model(arange(4, 6).sin()) * arange(4, 6).cos()).sum().backward()
    optimizer.step()


def full_state(model, optimizer):
    options = StateDictOptions(full_state_dict=True)
    return state_dicts.get_state_dict(model, optimizer, options=options)


KINDS = ["fsdp", "hsdp", "fsdp+tp", "ddp"]


def check_training(folder, kind, other, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state(model, optimizer):
        both = state_dicts.get_state_dict(model, optimizer, options=options)
        return dict(zip(("model", "optimizer"), both, strict=True))

    model, optimizer = make_model(kind)
    train(model, optimizer)
    train(model, optimizer)
    save(state(model, optimizer), folder)
    other_model, other_optimizer = make_model(other)
    train(other_model, other_optimizer)
    with torch.no_grad():
        for p in other_model.parameters():
            p.zero_()
    into = load(state(other_model, other_optimizer), folder)
    state_dicts.set_state_dict(
        other_model,
        other_optimizer,
        model_state_dict=into["model"],
        optim_state_dict=into["optimizer"],
        options=options,
    )
    for _ in range(2):
        a, optimizer_state = full_state(model, optimizer)
        b, other_optimizer_state = full_state(other_model, other_optimizer)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(optimizer_state["state"], other_optimizer_state["state"])
        assert [g["lr"] for g in optimizer_state["param_groups"]] == [0.05]
        train(model, optimizer)
        train(other_model, other_optimizer)
    return True


@pytest.mark.parametrize(
    ("kind", "other", "flat"),
    [
        ("fsdp", "fsdp", False), ("fsdp", "hsdp", True), ("hsdp", "fsdp+tp", True),
        ("fsdp+tp", "fsdp", False), ("fsdp+tp", "ddp", True), ("ddp", "fsdp+tp", False),
    ],
)  # fmt: skip
def test_training_continues_identically_after_a_load(world, tmp_path, kind, other, flat):
    assert all(world.run(check_training, str(tmp_path / "version_2"), kind, other, flat))
    snap = limpet.open(tmp_path / "version_2")
    assert snap.verify().ok
    model = Model()
    limpet.load(snap.url, into={"model": model}, unexpected="ignore")
    assert [p.name for p in tmp_path.iterdir()] == ["version_2"], "no pin is left"


def save_full_state(folder):
    """Save with options that gather the full state on rank 0, and load with ``strict=False``."""
    model, optimizer = make_model("fsdp")
    train(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = state_dicts.get_model_state_dict(model, options=options)
    save({"model": saved}, folder)
    other_model, _ = make_model("hsdp")
    into = state_dicts.get_model_state_dict(other_model)
    del into["up.bias"]
    load({"model": into}, folder)
    lenient_options = StateDictOptions(strict=False)
    state_dicts.set_model_state_dict(other_model, into, options=lenient_options)
    loaded = state_dicts.get_model_state_dict(
        other_model, options=StateDictOptions(full_state_dict=True)
    )
    if dist.get_rank() == 0:
        assert loaded["down.weight"].equal(saved["down.weight"])
    return dict(saved)


def test_full_state_of_rank_0_is_saved(world, tmp_path):
    first, *others = world.run(save_full_state, str(tmp_path / "a"))
    assert not any(others)
    loaded = limpet.load(tmp_path / "a")["model"]
    assert all(loaded[k].equal(v) for k, v in first.items())


class CachedPlanner(DefaultSavePlanner):
    """A planner with its own name, because DCP caches plans by class name."""


def save_with_cached_plans(folder):
    for step in range(3):
        state = {"a": arange(8, 2) + step, "n": step}
        distributed = distribute_tensor(state["a"], init_device_mesh("cpu", (SIZE,)), [Shard(0)])
        save(
            {**state, "d": distributed},
            f"{folder}/version_{step}",
            planner=CachedPlanner(**CACHING),
        )
        if step == 1:  # a save that fails between two that succeed
            with pytest.raises(CheckpointException):
                save(
                    {**state, "d": distributed},
                    f"{folder}/version_1",
                    planner=CachedPlanner(**CACHING),
                )


CACHING: dict[str, Any] = {"enable_plan_caching": True}


def test_saves_with_cached_plans_contain_the_current_state(world, tmp_path):
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip(f"torch {torch.__version__} does not cache plans")
    world.run(save_with_cached_plans, str(tmp_path))
    for step in range(3):
        loaded = limpet.load(tmp_path / f"version_{step}")
        assert loaded["d"].equal(arange(8, 2) + step)
        assert loaded["a"].equal(arange(8, 2) + step)
        assert len(reader_of(limpet.open(tmp_path / f"version_{step}")).manifest.shards) == SIZE


def save_async(folder):
    state = {"a": distribute_tensor(arange(8, 2), init_device_mesh("cpu", (SIZE,)), [Shard(0)])}
    future = dcp.async_save(state, storage_writer=StorageWriter(folder))
    state["a"].to_local().zero_()
    getattr(future, "upload_completion", future).result()


def test_async_save_saves_the_state_at_the_time_of_the_call(world, tmp_path):
    world.run(save_async, str(tmp_path / "a"))
    assert limpet.load(tmp_path / "a")["a"].equal(arange(8, 2))


def save_async_in_process(folder):
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS
    for step in range(2):
        state = {"a": arange(8, 2) + step, "n": step}
        writer = StorageWriter(f"{folder}/version_{step}")
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        getattr(future, "upload_completion", future).result()


def test_async_save_in_another_process(tmp_path):
    world = RankProcesses(tmp_path)  # not the shared processes: DCP keeps its own process running
    try:
        world.run(save_async_in_process, str(tmp_path))
    finally:
        world.stop(seconds=20)
    for step in range(2):
        assert limpet.load(tmp_path / f"version_{step}")["a"].equal(arange(8, 2) + step)


def save_in_subgroup_and_alone(folder):
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        state = {"a": arange(4) + 1, "n": 3}
        save(state, folder, process_group=group)
        into = load({"a": torch.zeros(4), "n": 0}, folder, process_group=group)
        assert into["n"] == 3
        assert into["a"].equal(arange(4) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own_folder = f"{folder}-{dist.get_rank()}"
        save({"rank": torch.tensor(dist.get_rank())}, own_folder, no_dist=True)
        assert load({"rank": torch.tensor(-1)}, own_folder, no_dist=True)["rank"] == dist.get_rank()


def test_some_ranks_save_as_a_group_and_each_rank_saves_alone(world, tmp_path):
    world.run(save_in_subgroup_and_alone, str(tmp_path / "a"))
    assert len(list(tmp_path.iterdir())) == 1 + SIZE
    assert limpet.open(tmp_path / "a").verify().ok


def save_stages(folder):
    """Save keys that differ on each rank, and keys that all ranks have."""
    rank = dist.get_rank()
    state = {"stages": {f"stage{rank}": arange(3) + rank}, "shared": arange(5), "n": 7}
    save(state, folder)
    into = {"stages": {f"stage{rank}": torch.zeros(3)}, "shared": torch.zeros(5), "n": 0}
    load(into, folder)
    assert into["stages"][f"stage{rank}"].equal(arange(3) + rank)
    assert into["n"] == 7


def test_ranks_can_save_different_keys(world, tmp_path):
    world.run(save_stages, str(tmp_path / "a"))
    snap = limpet.open(tmp_path / "a")
    assert {f"stages/stage{r}" for r in range(SIZE)} | {"shared", "n"} == set(snap.keys())


def save_replicated(folder):
    state = {f"{i}": arange(100) + i for i in range(8)}
    save(state, f"{folder}/spread")
    lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(state, f"{folder}/lowest", planner=lowest)


def test_replicated_tensors_are_written_once(world, tmp_path):
    world.run(save_replicated, str(tmp_path))
    spread, lowest = limpet.open(tmp_path / "spread"), limpet.open(tmp_path / "lowest")
    for snap in (spread, lowest):
        assert sum(len(x.leaves) for x in reader_of(snap).indexes()) == 8
        assert snap.verify().ok
    assert [len(x.leaves) for x in reader_of(spread).indexes()] == [2] * SIZE
    assert len(reader_of(lowest).indexes()) == 1, (
        "a rank with nothing to write does not write a shard"
    )


class FailsOnRank2(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if dist.get_rank() == 2:
            raise OSError("the disk of rank 2 is broken")
        return super().resolve_data(write_item)


def distributed_state():
    mesh = init_device_mesh("cpu", (SIZE,))
    return {"a": distribute_tensor(arange(8, 2), mesh, [Shard(0)]), "n": 1}


def failures_by_rank(caught):
    return {rank: repr(error[0]) for rank, error in caught.value.failures.items()}


def save_with_failing_rank(folder):
    writer = StorageWriter(folder)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(distributed_state(), storage_writer=writer, planner=FailsOnRank2())
    failures = failures_by_rank(caught)
    dist.barrier()
    with pytest.raises(NotFound):
        limpet.open(folder)
    caught = None
    dcp.save(distributed_state(), storage_writer=writer)
    gc.collect()
    return failures


def test_failure_of_one_rank_fails_all_ranks_and_the_next_save_works(world, tmp_path):
    reports = world.run(save_with_failing_rank, str(tmp_path / "version_1"))
    assert all(list(report) == [2] and "is broken" in report[2] for report in reports)
    assert limpet.open(tmp_path / "version_1").verify().ok
    assert limpet.load(tmp_path / "version_1")["a"].equal(arange(8, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["version_1"], "no pin is left"


def load_different_versions(folder):
    """Each rank resolves the address, and the run changes meanwhile."""
    address = f"{folder}@{'latest' if dist.get_rank() else '1'}"
    state = distributed_state()
    with pytest.raises(CheckpointException) as caught:
        load(state, address)
    assert state["a"].to_local().equal(distributed_state()["a"].to_local())
    return failures_by_rank(caught)


def test_ranks_that_open_different_versions_are_refused(world, tmp_path):
    for step in (1, 2):
        limpet.save(tmp_path / f"version_{step}", {"a": arange(8, 2) * step, "n": step})
    for report in world.run(load_different_versions, str(tmp_path)):
        assert "different versions" in report[0]


def save_to_unshared_folders(folder):
    host_folder = f"{folder}/{dist.get_rank() // 2}/version_1"
    with pytest.raises(CheckpointException) as caught:
        save(distributed_state(), host_folder)
    return [type(e[0]) for e in caught.value.failures.values()]


def test_folder_that_hosts_do_not_share_is_refused(world, tmp_path):
    for kinds in world.run(save_to_unshared_folders, str(tmp_path)):
        assert kinds == [CommitError]
    assert not list(tmp_path.rglob("manifest.json"))


class LosesItems(DefaultSavePlanner):
    """Drops the items of one plan after DCP's own check."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return [replace(plans[0], items=[]), *plans[1:]], metadata


def save_with_lost_items(folder):
    with pytest.raises(CheckpointException) as caught:
        save({"a": distributed_state()["a"]}, folder, planner=LosesItems())
    return [repr(e[0]) for e in caught.value.failures.values()]


def test_partially_written_leaf_is_not_committed(world, tmp_path):
    for errors in world.run(save_with_lost_items, str(tmp_path / "a")):
        assert len(errors) == 1
        assert "leave gaps" in errors[0], errors
    assert not list(tmp_path.rglob("manifest.json"))


def save_different_states(folder):
    """Save states that nest the same DCP name differently."""
    state = {"a": {"b": arange(3)}} if dist.get_rank() else {"a.b": arange(3)}
    with pytest.raises(CheckpointException):
        save({**state, f"x{dist.get_rank()}": {}}, folder, planner=SavesHalfPerRank())
    return True


class SavesHalfPerRank(DefaultSavePlanner):
    """Plans one part of a leaf from rank 0 and one from rank 1, which nest it differently."""

    def _dedup_save_plans(self, all_plans):
        return [
            replace(plan, items=[cut_item(i, r) for i in plan.items] if r < 2 else [])
            for r, plan in enumerate(all_plans)
        ]

    def resolve_data(self, write_item):
        chunk = write_item.tensor_data.chunk
        whole = super().lookup_object(replace(write_item.index, offset=torch.Size([0])))
        return whole[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]


def cut_item(item, rank):
    from torch.distributed.checkpoint.planner import WriteItemType

    offsets, sizes = torch.Size([2 * rank]), torch.Size([2 - rank])
    chunk = replace(item.tensor_data.chunk, offsets=offsets, sizes=sizes)
    data = replace(item.tensor_data, chunk=chunk)
    index = type(item.index)(item.index.fqn, offsets)
    return replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)


def test_leaf_that_ranks_nest_differently_is_refused(world, tmp_path):
    assert all(world.run(save_different_states, str(tmp_path / "a")))
    assert not list(tmp_path.rglob("manifest.json"))


def load_damaged(folder):
    into = distributed_state()
    with pytest.raises(CheckpointException) as caught:
        load(into, folder)
    return {rank: type(e[0]) for rank, e in caught.value.failures.items()}


def test_damage_in_the_shard_of_one_rank_fails_the_load_on_all_ranks(world, tmp_path):
    world.run(save_distributed_state, str(tmp_path / "a"))
    (shard,) = (tmp_path / "a").glob("shard-00003*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    for errors in world.run(load_damaged, str(tmp_path / "a")):
        assert errors == {3: DigestMismatch}


def save_distributed_state(folder):
    save(distributed_state(), folder)


needs_collectives_option = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason=f"torch {torch.__version__} always uses collectives",
)


def save_without_collectives(folder):
    with pytest.raises(Unsupported, match="cannot save with use_collectives=False"):
        save(distributed_state(), folder, use_collectives=False)


@needs_collectives_option
def test_a_save_without_collectives_is_refused(world, tmp_path):
    world.run(save_without_collectives, str(tmp_path / "a"))
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]


def load_damaged_manifest(folder):
    save(distributed_state(), folder)
    if dist.get_rank() == 0:
        manifest = Path(folder, "manifest.json")
        manifest.write_bytes(manifest.read_bytes()[:-9])
    dist.barrier()
    try:
        load(distributed_state(), folder)
    except CheckpointException as e:
        return str(e)
    return ""


def test_a_damaged_manifest_fails_the_load_on_all_ranks(world, tmp_path):
    for message in world.run(load_damaged_manifest, str(tmp_path / "a")):
        assert "manifest" in message


def load_native(folder):
    model, _ = make_model("fsdp+tp")
    into = load({"model": state_dicts.get_model_state_dict(model)}, folder)["model"]
    state_dicts.set_model_state_dict(model, into)
    options = StateDictOptions(full_state_dict=True)
    loaded = state_dicts.get_model_state_dict(model, options=options)
    expected = limpet.load(folder)["model"]
    if dist.get_rank() == 0:
        assert loaded.keys() == expected.keys()
        assert all(v.equal(expected[k]) for k, v in loaded.items())


def test_native_snapshot_loads_into_a_sharded_model(world, tmp_path):
    torch.manual_seed(5)
    limpet.save(tmp_path / "a", {"model": Model()})
    world.run(load_native, str(tmp_path / "a"))
