"""DCP over our classes on four gloo ranks: layouts, wrappers, options, failures.

What PyTorch's own tests of DCP cover; ``upstream.py`` runs those themselves.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as options_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import holdfast
from holdfast.errors import CommitError, DigestMismatch, HoldfastError, NotFound, Unsupported
from holdfast.integrations.dcp.reading import StorageReader
from holdfast.integrations.dcp.writing import StorageWriter
from tests.integrations.world import SIZE, RankProcesses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    made = RankProcesses(tmp_path_factory.mktemp("world"))
    yield made
    made.stop()


def save(state: Any, url: Any, **how: Any) -> Any:
    return dcp.save(state, storage_writer=StorageWriter(url), **how)


def load(state: Any, url: Any, **how: Any) -> Any:
    dcp.load(state, storage_reader=StorageReader(url), **how)
    return state


def number(*shape: int) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


# -- layouts -------------------------------------------------------------------------------------

SHAPES = [(8, 4), (5, 3), (3, 7), (1, 9), (0, 4), (2, 2, 6), (11,)]
LINES = [[Shard(0)], [Shard(1)], [Replicate()]]
GRIDS = [
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Replicate()],
]


def layouts() -> list[tuple[Any, Any]]:
    line = init_device_mesh("cpu", (SIZE,))
    grid = init_device_mesh("cpu", (2, 2))
    return [(line, p) for p in LINES] + [(grid, p) for p in GRIDS]


def spread(shape: tuple[int, ...], mesh: Any, placements: Any, fill: bool) -> Any:
    fits = all(not isinstance(p, Shard) or p.dim < len(shape) for p in placements)
    value = number(*shape) if fill else torch.full(shape, -1.0)
    return distribute_tensor(value, mesh, placements) if fits else value


def resharding(folder: str) -> None:
    """Every layout into every other, of every shape."""
    made = layouts()
    for i, (mesh, placements) in enumerate(made):
        save({str(s): spread(s, mesh, placements, True) for s in SHAPES}, f"{folder}/{i}")
        for other, target in made[i % 3 :: 3]:
            into = {str(s): spread(s, other, target, False) for s in SHAPES}
            load(into, f"{folder}/{i}")
            for shape in SHAPES:
                found = into[str(shape)]
                found = found.full_tensor() if isinstance(found, DTensor) else found
                assert found.equal(number(*shape)), (placements, target, shape)


def test_dtensors_of_any_layout_load_into_any_other(world: RankProcesses, tmp_path: Path) -> None:
    world.run(resharding, str(tmp_path))
    for i in range(len(LINES + GRIDS)):
        snap = holdfast.open(tmp_path / str(i))
        assert snap.verify().ok
        whole = holdfast.load(snap.url)
        assert all(whole[str(s)].equal(number(*s)) for s in SHAPES)
        held = sum(prod(s) * 4 for s in SHAPES)
        data = [b for x in snap.indexes() for leaf in x.leaves for b in leaf.boxes]
        assert sum(prod(b.sizes) * 4 for b in data) == held, "each element once"


def sharded_tensors(folder: str) -> None:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as Part
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    rank = dist.get_rank()
    rows = [3, 1, 0, 2]

    def made(fill: bool, cuts: list[int]) -> Any:
        first, count = sum(cuts[:rank]), cuts[rank]
        if not count:
            return init_from_local_shards([], (6, 5))
        local = number(6, 5)[first : first + count].clone() * fill
        part = ShardMetadata([first, 0], [count, 5], f"rank:{rank}/cpu")
        return init_from_local_shards([Part(local, part)], (6, 5))

    save({"a": made(True, rows)}, folder)
    for cuts in ([2, 2, 1, 1], [0, 0, 6, 0]):
        into = load({"a": made(False, cuts)}, folder)["a"]
        first = sum(cuts[:rank])
        for part in into.local_shards():
            assert part.tensor.equal(number(6, 5)[first : first + cuts[rank]])
    plain = load({"a": torch.zeros(6, 5)}, folder)["a"]
    assert plain.equal(number(6, 5))


def test_sharded_tensors(world: RankProcesses, tmp_path: Path) -> None:
    world.run(sharded_tensors, str(tmp_path / "a"))
    assert holdfast.load(tmp_path / "a")["a"].equal(number(6, 5))


# -- models --------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    seen: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += len(x)
        return self.down(torch.tanh(self.up(x)))


def wrapped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model()
    if kind in ("fsdp", "hsdp"):
        shape, names = ((SIZE,), ("dp",)) if kind == "fsdp" else ((2, 2), ("copies", "dp"))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    elif kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        cuts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], cuts)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(number(4, 6).sin()) * number(4, 6).cos()).sum().backward()
    optimizer.step()


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    how = StateDictOptions(full_state_dict=True)
    return options_of.get_state_dict(model, optimizer, options=how)


KINDS = ["fsdp", "hsdp", "fsdp+tp", "ddp"]


def models(folder: str, kind: str, other: str, flat: bool) -> bool:
    how = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state(model: Any, optimizer: Any) -> Any:
        taken = options_of.get_state_dict(model, optimizer, options=how)
        return dict(zip(("model", "optimizer"), taken, strict=True))

    model, optimizer = wrapped(kind)
    train(model, optimizer)
    train(model, optimizer)
    save(state(model, optimizer), folder)
    again, its = wrapped(other)
    train(again, its)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    into = load(state(again, its), folder)
    options_of.set_state_dict(
        again, its, model_state_dict=into["model"], optim_state_dict=into["optimizer"], options=how
    )
    for _ in range(2):
        (a, mine), (b, other_state) = full(model, optimizer), full(again, its)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(mine["state"], other_state["state"])
        assert [g["lr"] for g in mine["param_groups"]] == [0.05]
        train(model, optimizer)
        train(again, its)
    return True


@pytest.mark.parametrize(
    ("kind", "other", "flat"),
    [
        ("fsdp", "fsdp", False),
        ("fsdp", "hsdp", True),
        ("hsdp", "fsdp+tp", True),
        ("fsdp+tp", "fsdp", False),
        ("fsdp+tp", "ddp", True),
        ("ddp", "fsdp+tp", False),
    ],
)
def test_training_goes_on_the_same(
    world: RankProcesses, tmp_path: Path, kind: str, other: str, flat: bool
) -> None:
    assert all(world.run(models, str(tmp_path / "version_2"), kind, other, flat))
    snap = holdfast.open(tmp_path / "version_2")
    assert snap.verify().ok
    model = Model()
    holdfast.load(snap.url, into={"model": model}, unexpected="ignore")
    assert [p.name for p in tmp_path.iterdir()] == ["version_2"], "no pin is left"


def full_states(folder: str) -> Any:
    """Options that make whole states on rank 0 alone, and load leniently."""
    model, optimizer = wrapped("fsdp")
    train(model, optimizer)
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    taken = options_of.get_model_state_dict(model, options=how)
    save({"model": taken}, folder)
    again, _ = wrapped("hsdp")
    into = options_of.get_model_state_dict(again)
    del into["up.bias"]
    load({"model": into}, folder)
    lenient = StateDictOptions(strict=False)
    options_of.set_model_state_dict(again, into, options=lenient)
    after = options_of.get_model_state_dict(again, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert after["down.weight"].equal(taken["down.weight"])
    return dict(taken)


def test_whole_states_of_rank_0(world: RankProcesses, tmp_path: Path) -> None:
    first, *others = world.run(full_states, str(tmp_path / "a"))
    assert not any(others)
    loaded = holdfast.load(tmp_path / "a")["model"]
    assert all(loaded[k].equal(v) for k, v in first.items())


# -- the ways to call it -------------------------------------------------------------------------


class Cached(DefaultSavePlanner):
    """Of a name of its own: DCP keeps plans by it."""


def plans_that_are_kept(folder: str) -> None:
    for step in range(3):
        state = {"a": number(8, 2) + step, "n": step}
        spread = distribute_tensor(state["a"], init_device_mesh("cpu", (SIZE,)), [Shard(0)])
        save({**state, "d": spread}, f"{folder}/version_{step}", planner=Cached(**CACHING))
        if step == 1:  # one that fails in between
            with pytest.raises(CheckpointException):
                save({**state, "d": spread}, f"{folder}/version_1", planner=Cached(**CACHING))


CACHING: dict[str, Any] = {"enable_plan_caching": True}


def test_plans_that_dcp_keeps(world: RankProcesses, tmp_path: Path) -> None:
    if "enable_plan_caching" not in DefaultSavePlanner.__init__.__code__.co_varnames:
        pytest.skip(f"torch {torch.__version__} keeps no plans")
    world.run(plans_that_are_kept, str(tmp_path))
    for step in range(3):
        loaded = holdfast.load(tmp_path / f"version_{step}")
        assert loaded["d"].equal(number(8, 2) + step)
        assert loaded["a"].equal(number(8, 2) + step)
        assert len(holdfast.open(tmp_path / f"version_{step}").manifest.shards) == SIZE


def asynchronous(folder: str) -> None:
    state = {"a": distribute_tensor(number(8, 2), init_device_mesh("cpu", (SIZE,)), [Shard(0)])}
    future = dcp.async_save(state, storage_writer=StorageWriter(folder))
    state["a"].to_local().zero_()
    getattr(future, "upload_completion", future).result()


def test_an_asynchronous_save(world: RankProcesses, tmp_path: Path) -> None:
    world.run(asynchronous, str(tmp_path / "a"))
    assert holdfast.load(tmp_path / "a")["a"].equal(number(8, 2))


def in_a_process(folder: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS
    for step in range(2):
        state = {"a": number(8, 2) + step, "n": step}
        writer = StorageWriter(f"{folder}/version_{step}")
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        getattr(future, "upload_completion", future).result()


def test_an_asynchronous_save_by_another_process(tmp_path: Path) -> None:
    world = RankProcesses(tmp_path)  # of its own: DCP keeps its process
    try:
        world.run(in_a_process, str(tmp_path))
    finally:
        world.stop(seconds=20)
    for step in range(2):
        assert holdfast.load(tmp_path / f"version_{step}")["a"].equal(number(8, 2) + step)


def of_some_ranks(folder: str) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        state = {"a": number(4) + 1, "n": 3}
        save(state, folder, process_group=group)
        into = load({"a": torch.zeros(4), "n": 0}, folder, process_group=group)
        assert into["n"] == 3
        assert into["a"].equal(number(4) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = f"{folder}-{dist.get_rank()}"
        save({"rank": torch.tensor(dist.get_rank())}, own, no_dist=True)
        into = load({"rank": torch.tensor(-1)}, own, no_dist=True)
        assert into["rank"] == dist.get_rank()


def test_some_ranks_and_each_alone(world: RankProcesses, tmp_path: Path) -> None:
    world.run(of_some_ranks, str(tmp_path / "a"))
    assert len(list(tmp_path.iterdir())) == 1 + SIZE
    assert holdfast.open(tmp_path / "a").verify().ok


def stages(folder: str) -> None:
    """Different keys on each rank, and what all have."""
    rank = dist.get_rank()
    state = {"stages": {f"stage{rank}": number(3) + rank}, "shared": number(5), "n": 7}
    save(state, folder)
    into = {"stages": {f"stage{rank}": torch.zeros(3)}, "shared": torch.zeros(5), "n": 0}
    load(into, folder)
    assert into["stages"][f"stage{rank}"].equal(number(3) + rank)
    assert into["n"] == 7


def test_stages_with_keys_of_their_own(world: RankProcesses, tmp_path: Path) -> None:
    world.run(stages, str(tmp_path / "a"))
    snap = holdfast.open(tmp_path / "a")
    assert {f"stages/stage{r}" for r in range(SIZE)} | {"shared", "n"} == set(snap.keys())


def replicated(folder: str) -> None:
    state = {f"{i}": number(100) + i for i in range(8)}
    save(state, f"{folder}/spread")
    lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    save(state, f"{folder}/lowest", planner=lowest)


def test_what_all_ranks_have_is_written_once(world: RankProcesses, tmp_path: Path) -> None:
    world.run(replicated, str(tmp_path))
    spread, lowest = holdfast.open(tmp_path / "spread"), holdfast.open(tmp_path / "lowest")
    for snap in (spread, lowest):
        assert sum(len(x.leaves) for x in snap.indexes()) == 8
        assert snap.verify().ok
    assert [len(x.leaves) for x in spread.indexes()] == [2] * SIZE
    assert len(lowest.indexes()) == 1, "a rank without anything to write writes no shard"


# -- failures ------------------------------------------------------------------------------------


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 2:
            raise OSError("the disk of rank 2 is on fire")
        return super().resolve_data(write_item)


def spread_state() -> Any:
    mesh = init_device_mesh("cpu", (SIZE,))
    return {"a": distribute_tensor(number(8, 2), mesh, [Shard(0)]), "n": 1}


def failures(caught: Any) -> dict[int, str]:
    return {rank: repr(error[0]) for rank, error in caught.value.failures.items()}


def a_rank_fails(folder: str) -> Any:
    writer = StorageWriter(folder)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(spread_state(), storage_writer=writer, planner=Failing())
    told = failures(caught)
    dist.barrier()
    with pytest.raises(NotFound):
        holdfast.open(folder)
    caught = None
    dcp.save(spread_state(), storage_writer=writer)
    gc.collect()
    return told


def test_a_rank_that_fails_fails_all_and_the_next_save_works(
    world: RankProcesses, tmp_path: Path
) -> None:
    told = world.run(a_rank_fails, str(tmp_path / "version_1"))
    assert all(list(t) == [2] and "on fire" in t[2] for t in told)
    assert holdfast.open(tmp_path / "version_1").verify().ok
    assert holdfast.load(tmp_path / "version_1")["a"].equal(number(8, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["version_1"], "no pin is left"


def folders_that_are_not_shared(folder: str) -> Any:
    own = f"{folder}/{dist.get_rank() // 2}/version_1"
    with pytest.raises(CheckpointException) as caught:
        save(spread_state(), own)
    return [type(e[0]) for e in caught.value.failures.values()]


def test_a_folder_that_hosts_do_not_share(world: RankProcesses, tmp_path: Path) -> None:
    for kinds in world.run(folders_that_are_not_shared, str(tmp_path)):
        assert kinds == [CommitError]
    assert not list(tmp_path.rglob("manifest.json"))


class Losing(DefaultSavePlanner):
    """Plans of which one has lost its items, past DCP's own check."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return [replace(plans[0], items=[]), *plans[1:]], metadata


def a_part_is_not_written(folder: str) -> Any:
    with pytest.raises(CheckpointException) as caught:
        save({"a": spread_state()["a"]}, folder, planner=Losing())
    return [repr(e[0]) for e in caught.value.failures.values()]


def test_a_leaf_of_which_a_part_is_not_written_is_not_committed(
    world: RankProcesses, tmp_path: Path
) -> None:
    for told in world.run(a_part_is_not_written, str(tmp_path / "a")):
        assert len(told) == 1
        assert "leave gaps" in told[0], told
    assert not list(tmp_path.rglob("manifest.json"))


def different_states(folder: str) -> Any:
    """Nested in other ways under the same names."""
    state = {"a": {"b": number(3)}} if dist.get_rank() else {"a.b": number(3)}
    with pytest.raises(CheckpointException):
        save({**state, f"x{dist.get_rank()}": {}}, folder, planner=Half())
    return True


class Half(DefaultSavePlanner):
    """Half of a leaf from a rank that nests it in another way than the others."""

    def _dedup_save_plans(self, all_plans: Any) -> Any:
        return [
            replace(plan, items=[cut(i, r) for i in plan.items] if r < 2 else [])
            for r, plan in enumerate(all_plans)
        ]

    def resolve_data(self, write_item: Any) -> Any:
        chunk = write_item.tensor_data.chunk
        whole = super().lookup_object(replace(write_item.index, offset=torch.Size([0])))
        return whole[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]


def cut(item: Any, rank: int) -> Any:
    from torch.distributed.checkpoint.planner import WriteItemType

    offsets, sizes = torch.Size([2 * rank]), torch.Size([2 - rank])
    chunk = replace(item.tensor_data.chunk, offsets=offsets, sizes=sizes)
    data = replace(item.tensor_data, chunk=chunk)
    index = type(item.index)(item.index.fqn, offsets)
    return replace(item, index=index, type=WriteItemType.SHARD, tensor_data=data)


def test_ranks_that_nest_one_leaf_in_two_ways(world: RankProcesses, tmp_path: Path) -> None:
    assert all(world.run(different_states, str(tmp_path / "a")))
    assert not list(tmp_path.rglob("manifest.json"))


def damaged(folder: str) -> Any:
    into = spread_state()
    with pytest.raises(CheckpointException) as caught:
        load(into, folder)
    return {rank: type(e[0]) for rank, e in caught.value.failures.items()}


def test_damage_in_the_part_of_one_rank_fails_all(world: RankProcesses, tmp_path: Path) -> None:
    world.run(save_spread, str(tmp_path / "a"))
    (shard,) = (tmp_path / "a").glob("shard-00003*.safetensors")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    for told in world.run(damaged, str(tmp_path / "a")):
        assert told == {3: DigestMismatch}


def save_spread(folder: str) -> None:
    save(spread_state(), folder)


def missing(folder: str) -> None:
    more = {**spread_state(), "more": number(2)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: more"):
        load(more, folder)
    more["a"].to_local().zero_()
    load(more, folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert more["a"].full_tensor().equal(number(8, 2))
    assert more["more"].equal(number(2))
    one = {"a": copy.deepcopy(more["a"])}
    one["a"].to_local().zero_()
    assert load(one, folder)["a"].full_tensor().equal(number(8, 2))


def test_missing_keys_and_a_part_of_the_state(world: RankProcesses, tmp_path: Path) -> None:
    world.run(save_spread, str(tmp_path / "a"))
    world.run(missing, str(tmp_path / "a"))


def without_collectives(folder: str) -> Any:
    try:
        save(spread_state(), folder, use_collectives=False)
    except TypeError:
        pytest.skip(f"torch {torch.__version__} always has collectives")
    except HoldfastError as e:
        return type(e)


def test_without_collectives_is_refused(world: RankProcesses, tmp_path: Path) -> None:
    assert Counter(world.run(without_collectives, str(tmp_path / "a"))) == {Unsupported: SIZE}


def native(folder: str) -> None:
    model, _ = wrapped("fsdp+tp")
    into = load({"model": options_of.get_model_state_dict(model)}, folder)["model"]
    options_of.set_model_state_dict(model, into)
    how = StateDictOptions(full_state_dict=True)
    found = options_of.get_model_state_dict(model, options=how)
    expected = holdfast.load(folder)["model"]
    if dist.get_rank() == 0:
        assert found.keys() == expected.keys()
        assert all(v.equal(expected[k]) for k, v in found.items())


def test_a_native_snapshot_loads_into_a_sharded_model(world: RankProcesses, tmp_path: Path) -> None:
    torch.manual_seed(5)
    holdfast.save(tmp_path / "a", {"model": Model()})
    world.run(native, str(tmp_path / "a"))
