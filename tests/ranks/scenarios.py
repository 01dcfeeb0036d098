"""Scenarios of real processes, which ``test_gloo.py`` runs.

A scenario runs the same code on all ranks. ``ranks(size, work)`` calls ``work()`` in a world of the
first ``size`` ranks.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import limpet
from limpet.errors import PlanError, ShapeMismatch, Unsupported
from tests.ranks.models import (
    AdamW,
    assert_same_tensors,
    fsdp,
    fsdp_and_tensor_parallel,
    fsdp_from_meta,
    full_tensor,
    gather_state,
    hsdp,
    load_and_compare,
    save_with_reference,
    seeded_net,
    state_of,
    step_without_forward,
    tensor_parallel,
    train,
)


def load_train_save(
    ranks,
    source,
    target,
    size,
    make_model,
    *,
    optimizer_type=AdamW,
    step_first=False,
    asynchronous=False,
    train_step=train,
):
    """Load the version ``source`` of another layout, continue training, and save it as ``target``.

    The loaded state is compared with the saved one. If ``source`` is None, train from scratch. With
    ``step_first``, the optimizer has slots before the load.
    """

    def work():
        state = state_of(make_model(), optimizer_type)
        if source is None or step_first:
            train_step(state)
        if source is not None:
            load_and_compare(ranks, source, state)
            train_step(state)
        save_with_reference(ranks, target, state, asynchronous)

    ranks(size, work)


def fsdp_on_4_2_3_1(ranks):
    load_train_save(ranks, None, "fsdp4", 4, fsdp)
    load_train_save(ranks, "fsdp4", "fsdp2", 2, fsdp, step_first=True, asynchronous=True)
    load_train_save(ranks, "fsdp2", "fsdp3", 3, fsdp)
    load_train_save(ranks, "fsdp3", "one", 1, lambda: seeded_net(9))
    load_train_save(ranks, "one", "fsdp4again", 4, fsdp_from_meta)


def hsdp_fsdp_with_tp_and_plain(ranks):
    load_train_save(ranks, "fsdp4", "hsdp", 4, hsdp)
    load_train_save(ranks, "hsdp", "both", 4, fsdp_and_tensor_parallel, step_first=True)
    load_train_save(ranks, "both", "plain", 1, lambda: seeded_net(9))
    load_train_save(ranks, "both", "fsdp4c", 4, fsdp)
    load_train_save(ranks, "plain", "both2", 4, fsdp_and_tensor_parallel)


def tensor_parallel_only(ranks):
    def make():
        return tensor_parallel(init_device_mesh("cpu", (dist.get_world_size(),)))

    load_train_save(ranks, None, "tp4", 4, make, train_step=step_without_forward)
    load_train_save(ranks, "tp4", "tp3", 3, make, step_first=True, train_step=step_without_forward)
    load_train_save(ranks, "tp3", "tp1", 1, lambda: seeded_net(9))
    load_train_save(ranks, "tp3", "tpfsdp", 2, fsdp)


def all_optimizers(ranks):
    for name, optimizer_type in {
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adam-for": partial(torch.optim.Adam, lr=0.1, foreach=False, amsgrad=True),
        "adam-lr": partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
        "adagrad": partial(torch.optim.Adagrad, lr=0.1, foreach=False),
    }.items():
        load_train_save(
            ranks,
            None,
            f"{name}4",
            4,
            fsdp,
            optimizer_type=optimizer_type,
            asynchronous=name == "sgd",
        )
        load_train_save(
            ranks, f"{name}4", f"{name}1", 1, lambda: seeded_net(9), optimizer_type=optimizer_type
        )
        load_train_save(ranks, f"{name}1", f"{name}3", 3, fsdp, optimizer_type=optimizer_type)


class FactoredOptimizer(torch.optim.Optimizer):
    """Slots like Adafactor's: DTensors whose shapes differ from the parameter's shape."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            mesh, squares = p.device_mesh, p.full_tensor().detach().square()
            self.state[p] = {
                "step": torch.tensor(1.0),
                "rows": distribute_tensor(squares.mean(1, keepdim=True), mesh, [Shard(0)]),
                "columns": distribute_tensor(squares.mean(0, keepdim=True), mesh, [Replicate()]),
                "all": distribute_tensor(squares, mesh, [Shard(1)]),
            }


def factored_slots(ranks):
    def make(size, factor):
        mesh = init_device_mesh("cpu", (size,))
        numbers = factor * torch.arange(35.0).reshape(7, 5)
        p = nn.Parameter(distribute_tensor(numbers, mesh, [Shard(0)]))
        return {"w": {"p": p}, "optimizer": FactoredOptimizer([p])}

    def plain_tensors(state):
        p = state["w"]["p"]
        return {
            k: full_tensor(v) for k, v in [("p", p.detach()), *state["optimizer"].state[p].items()]
        }

    def save():
        state = make(4, 1)
        state["optimizer"].step()
        limpet.save(ranks.url("factored"), state)
        reference = plain_tensors(state)
        if ranks.rank == 0:
            torch.save(reference, ranks.folder / "factored.pt")

    def load():
        state = make(3, 2)
        state["optimizer"].step()
        limpet.load(ranks.url("factored"), into=state)
        assert_same_tensors(torch.load(ranks.folder / "factored.pt"), plain_tensors(state))
        unstepped = make(3, 2)
        with pytest.raises(PlanError) as e:
            limpet.load(ranks.url("factored"), into=unstepped)
        assert "let the optimizer step once" in str(e.value)
        assert torch.equal(plain_tensors(unstepped)["p"], 2 * plain_tensors(state)["p"])

    ranks(4, save)
    ranks(3, load)


class BatchNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.n = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.n(self.l(x))


def evaluation_in_training(ranks):
    """FSDP communicates in ``forward()``, so all ranks must call it equally often: three ranks
    evaluate four batches."""
    rows = torch.randn(7, 7, generator=torch.Generator().manual_seed(5))

    def evaluate(model, batch):
        return {"size": (model(batch).abs().sum(), len(batch))}

    def work(make_model, on):
        state = {**state_of(make_model()), "progress": limpet.Progress()}
        every, url = limpet.EverySteps(1), ranks.folder / f"{on}-{make_model.__name__}"
        options = {"data": rows, "batch_size": 2, "every": every, "on": on}
        model = state["model"]
        with limpet.Checkpointer(url, state, save=limpet.Never()) as ckpt:
            with limpet.TrainingEvaluation(ckpt, model, evaluate, **options) as evaluation:
                for _ in range(2):
                    evaluation.step()
                    train(state, steps=1)
                    ckpt.step()
            with torch.no_grad():
                expected = model(rows).abs().sum().item() / len(rows)
        assert evaluation.newest.metrics["size"] == pytest.approx(expected, rel=1e-5)
        assert model.training

    def ddp():
        return nn.parallel.DistributedDataParallel(seeded_net(1), find_unused_parameters=True)

    for make_model in (fsdp, ddp):
        for on in ("paused", "current"):
            ranks(3, partial(work, make_model, on))


def ddp_with_batch_norm(ranks):
    def make_state(size):
        torch.manual_seed(size)
        net = BatchNormNet()
        model = nn.parallel.DistributedDataParallel(net) if size > 1 else net
        return net, {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def step(state):
        torch.manual_seed(100 + ranks.rank)  # each rank has its own batch, so the buffers differ
        state["model"](torch.randn(8, 3)).square().sum().backward()
        state["optimizer"].step()

    def save():
        net, state = make_state(3)
        step(state)
        means = [torch.zeros(4) for _ in range(3)]
        dist.all_gather(means, net.n.running_mean)
        assert not torch.equal(means[0], means[1])
        limpet.save(ranks.url("ddp"), state)
        if ranks.rank == 0:
            torch.save(net.state_dict(), ranks.folder / "ddp.pt")
        with pytest.raises(PlanError) as e:
            limpet.save(ranks.url("bare"), {"model": net})
        assert "model/n.running_mean" in e.value.leaves
        assert "model/l.weight" not in e.value.leaves
        assert "(different on every rank)" in str(e.value)
        limpet.save(ranks.url("bare"), {"model": limpet.Replicated(net)})

    def load(size):
        net, state = make_state(size)
        limpet.load(ranks.url("ddp"), into=state)
        assert_same_tensors(torch.load(ranks.folder / "ddp.pt"), net.state_dict())
        assert len(state["optimizer"].state) == 4
        net = BatchNormNet()
        limpet.load(ranks.url("bare"), into={"model": net})
        assert_same_tensors(torch.load(ranks.folder / "ddp.pt"), net.state_dict())

    ranks(3, save)
    for size in (2, 1):
        ranks(size, partial(load, size))


def pipeline_stages(ranks):
    def make_stage(rank, size):
        net = seeded_net(size)
        layers = [["a"], ["b", "c", "norm"]] if size == 2 else [["a", "b", "c", "norm"]]
        model = nn.ModuleDict({name: getattr(net, name) for name in layers[rank]})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + rank)
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "n": 0}

    def save_stages():
        state = make_stage(ranks.rank, 2)
        limpet.save(ranks.url("stages"), state)
        torch.save(gather_state(state), ranks.folder / f"stages{ranks.rank}.pt")

    def load_on_one_rank():
        state = make_stage(0, 1)
        limpet.load(ranks.url("stages"), into=state)
        reference = {}
        for r in range(2):
            reference |= torch.load(ranks.folder / f"stages{r}.pt")
        assert_same_tensors(reference, gather_state(state))

    def load_stages():
        state = make_stage(ranks.rank, 2)
        state["optimizer"].state.clear()
        limpet.load(ranks.url("stages"), into=state)
        reference = torch.load(ranks.folder / f"stages{ranks.rank}.pt")
        assert_same_tensors(reference, gather_state(state))

    ranks(2, save_stages)
    ranks(1, load_on_one_rank)
    ranks(2, load_stages)


def compiled(ranks):
    load_train_save(ranks, None, "compiled", 2, lambda: torch.compile(fsdp(), backend="eager"))
    load_train_save(ranks, "compiled", "compiled1", 1, lambda: seeded_net(9))
    load_train_save(
        ranks, "compiled1", "compiled3", 3, lambda: torch.compile(fsdp(), backend="eager")
    )


def sharded_tensors(ranks):
    whole = torch.arange(27.0).reshape(9, 3)

    def make(size):
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(size)])
        return sharded_tensor.empty(spec, 9, 3)

    def save():
        value = make(4)
        for shard in value.local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(whole[start : start + len(shard.tensor)])
        limpet.save(ranks.url("sharded"), {"x": value})

    def load(size):
        value = make(size)
        limpet.load(ranks.url("sharded"), into={"x": value})
        for shard in value.local_shards():
            start = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor, whole[start : start + len(shard.tensor)])
        dtensor = distribute_tensor(torch.zeros(9, 3), init_device_mesh("cpu", (size,)), [Shard(1)])
        limpet.load(ranks.url("sharded"), into={"x": dtensor})
        assert torch.equal(dtensor.full_tensor(), whole)

    ranks(4, save)
    ranks(3, partial(load, 3))
    ranks(1, lambda: assert_same_tensors({"x": whole}, limpet.load(ranks.url("sharded"))))


def tensors_in_a_dict(ranks):
    """DTensors of several meshes, and plain tensors, as in the result of ``model.state_dict()``."""
    numbers = torch.arange(60.0).reshape(5, 12)

    def save():
        line = init_device_mesh("cpu", (4,))
        square = init_device_mesh("cpu", (2, 2))
        named = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
        limpet.save(
            ranks.url("dict"),
            {
                "rows": distribute_tensor(numbers, line, [Shard(0)]),
                "nested": [{"both": distribute_tensor(numbers, square, [Shard(1), Shard(0)])}],
                "twice": distribute_tensor(numbers, square, [Shard(1), Shard(1)]),
                "all": distribute_tensor(numbers, named, [Replicate()]),
                "plain": numbers.clone(),
                3: distribute_tensor(torch.tensor(3.0), line, [Replicate()]),
                "empty": distribute_tensor(torch.zeros(0, 3), line, [Shard(1)]),
            },
        )
        partial_sum = DTensor.from_local(torch.ones(2), line, [Partial()])
        with pytest.raises(Unsupported) as e:
            limpet.save(ranks.url("partial_sum"), {"good": numbers, "sums": {"grad": partial_sum}})
        assert "sums/grad" in str(e.value)
        assert "Partial" in str(e.value)
        assert not Path(ranks.url("partial_sum")).exists()

    def load():
        mesh = init_device_mesh("cpu", (3,))
        rows = distribute_tensor(torch.zeros(5, 12), mesh, [Shard(1)])
        state = {
            "rows": rows,
            "nested": [{"both": torch.zeros(5, 12)}],
            "twice": limpet.Boxed(torch.zeros(5, 4), (0, 4 * ranks.rank), (5, 12)),
            "all": distribute_tensor(torch.zeros(5, 12), mesh, [Shard(0)]),
            "plain": distribute_tensor(torch.zeros(5, 12), mesh, [Replicate()]),
            3: torch.zeros(()),
            "empty": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]),
        }
        limpet.load(ranks.url("dict"), into=state, keys=["rows", "nested", "twice", "empty"])
        assert torch.equal(rows.full_tensor(), numbers)
        assert torch.equal(state["nested"][0]["both"], numbers)
        part = numbers[:, 4 * ranks.rank :][:, :4]
        assert torch.equal(state["twice"].tensor, part)
        assert not state["all"].full_tensor().any()
        limpet.load(ranks.url("dict"), into=state)
        assert torch.equal(state["all"].full_tensor(), numbers)
        assert torch.equal(state["plain"].to_local(), numbers)
        assert state[3] == 3

    ranks(4, save)
    ranks(3, load)


def groups_of_two_ranks(ranks):
    def work():
        pair = dist.new_group([1, 3])
        others = dist.new_group([0, 2])
        group = pair if ranks.rank in (1, 3) else others
        name = f"pair{ranks.rank % 2}"
        state = {"r": limpet.PerRank(ranks.rank), "w": torch.full((3,), ranks.rank % 2)}
        limpet.save(ranks.url(name), state, group=group)
        loaded = limpet.load(ranks.url(name))
        assert loaded["r"] == {"0": ranks.rank % 2, "1": ranks.rank % 2 + 2}
        state = {"r": limpet.PerRank(-1), "w": torch.zeros(3, dtype=torch.int64)}
        limpet.load(ranks.url(name), into=state, group=group)
        assert state["r"].value == ranks.rank
        assert state["w"][0] == ranks.rank % 2
        limpet.save(ranks.url(f"alone{ranks.rank}"), state, group="alone")
        assert limpet.load(ranks.url(f"alone{ranks.rank}"))["r"] == {"0": ranks.rank}

    ranks(4, work)


def resized_head(ranks):
    """The last layers of the live model have another size; each rank has a part of them."""

    def make(outputs):
        net = seeded_net(outputs)
        net.c, net.norm = nn.Linear(6, outputs, bias=False), nn.LayerNorm(outputs)
        for layer in (net.a, net.b):
            fully_shard(layer)
        return state_of(fully_shard(net))

    def work():
        state = make(3)
        train(state)
        limpet.save(ranks.url("resized"), state)
        saved = gather_state(state)
        for steps in (0, 2):  # with and without slots before the load
            state = make(5)
            train(state, steps)
            before = gather_state(state)
            with pytest.raises(ShapeMismatch) as e:
                limpet.load(ranks.url("resized"), into=state)
            resized = ("model/c.weight", "model/norm.weight", "model/norm.bias")
            assert e.value.mismatched == resized
            assert_same_tensors(before, gather_state(state))
            url = ranks.url("resized")
            # the optimizer first: what it keeps is known only after the model
            into = dict(reversed(state.items()))
            report = limpet.load(url, into=into, mismatched="keep")
            state["n"] = into["n"]
            assert {key for key in report.kept if key.startswith("model")} == {*resized}
            kept = {key for key in before if any(name in key for name in ("c.", "norm."))}
            loaded = {
                key: v for key, v in saved.items() if not any(n in key for n in ("c.", "norm."))
            }
            after = gather_state(state)
            assert after.keys() == loaded.keys() | kept
            assert_same_tensors(loaded | {key: before[key] for key in kept}, after)
            train(state)

    ranks(2, work)


def own_loading_code(ranks):
    """The code of a sharded module converts old values. Other names are refused on all ranks, and
    found by a module that each rank has as a whole."""

    class Layer(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.zeros(4, 6)))

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            is_old = self._version == 2 and metadata.get("version") == 1
            for name in [n for n in state if n.startswith(prefix)] if is_old else ():
                state[name.replace("old", "new")] = state.pop(name) + 1
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    class Layer2(Layer):
        _version = 2

    def work():
        limpet.save(ranks.url("a"), {"m": fully_shard(nn.Sequential(Layer("new")))})
        live = fully_shard(nn.Sequential(Layer2("new")))
        limpet.load(ranks.url("a"), into={"m": live})
        assert (full_tensor(live[0].new) == 1).all()
        limpet.save(ranks.url("b"), {"m": nn.Sequential(Layer("old"))})
        with pytest.raises(PlanError, match=r"missing in the snapshot: m/0\.new"):
            limpet.load(ranks.url("b"), into={"m": live})
        whole = nn.parallel.DistributedDataParallel(nn.Sequential(Layer2("new")))
        limpet.load(ranks.url("b"), into={"m": whole})
        assert (whole.module[0].new == 1).all()

    ranks(2, work)


SCENARIOS = [
    own_loading_code,
    fsdp_on_4_2_3_1,
    hsdp_fsdp_with_tp_and_plain,
    tensor_parallel_only,
    all_optimizers,
    factored_slots,
    evaluation_in_training,
    ddp_with_batch_norm,
    pipeline_stages,
    compiled,
    sharded_tensors,
    tensors_in_a_dict,
    groups_of_two_ranks,
    resized_head,
]
