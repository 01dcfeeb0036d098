"""The replication of tensors by DistributedDataParallel, found by their addresses."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from limpet.errors import Unsupported
from limpet.state.flatten import flatten
from limpet.state.replication import Replication, find_ddp_replication


@pytest.fixture
def reported_world_size_2(monkeypatch):
    """Initialize a process group of one rank that reports a world size of 2."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    yield
    monkeypatch.undo()
    dist.destroy_process_group()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def step_once(parameters):
    optimizer = torch.optim.AdamW(parameters)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_parameters_slots_and_buffers_of_ddp_are_replicated(reported_world_size_2):
    wrapped, plain = nn.parallel.DistributedDataParallel(net()), net()
    optimizer, other = step_once(wrapped.parameters()), step_once(plain.parameters())
    replication = find_ddp_replication(
        {"a": [wrapped, plain], "b": {"c": optimizer, "d": other}, "n": 3}
    )
    slots = [t for s in optimizer.state.values() for t in s.values()]
    same = {t.data_ptr() for t in [*wrapped.parameters(), *slots]}
    first = {b.data_ptr() for b in wrapped.buffers()}
    assert replication == {
        **dict.fromkeys(same, Replication.REPLICATED),
        **dict.fromkeys(first, Replication.FROM_FIRST),
    }
    assert len(same) == 4 + 4 * 3


def test_buffers_that_are_not_broadcast_are_compared(reported_world_size_2):
    wrapped = nn.parallel.DistributedDataParallel(net())
    wrapped.broadcast_buffers = False  # torch 2.13 warns if it is passed as an argument
    replication = find_ddp_replication({"model": wrapped})
    assert set(replication) == {p.data_ptr() for p in wrapped.parameters()}


def test_tensors_that_ddp_ignores_are_compared(reported_world_size_2):
    module = net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["0.weight", "1.running_mean"]
    )
    wrapped = nn.parallel.DistributedDataParallel(module)
    optimizer = step_once(wrapped.parameters())
    replication = find_ddp_replication({"model": wrapped, "optimizer": optimizer})
    weight = module[0].weight
    slots = [t.data_ptr() for t in optimizer.state[weight].values()]
    for address in [weight.data_ptr(), module[1].running_mean.data_ptr(), *slots]:
        assert address not in replication
    assert replication[module[0].bias.data_ptr()] == Replication.REPLICATED
    assert replication[module[1].running_var.data_ptr()] == Replication.FROM_FIRST


class FullyShardedDataParallel(nn.Module):
    """A class with the name of the first FSDP."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.zeros(7))


def test_an_optimizer_of_flat_parameters_is_refused_but_not_the_module(reported_world_size_2):
    module = FullyShardedDataParallel()
    assert find_ddp_replication({"model": module, "optimizer": step_once(net().parameters())}) == {}
    with pytest.raises(
        Unsupported, match="SGD optimizes flat parameters of FullyShardedDataParallel"
    ):
        find_ddp_replication(
            {"model": module, "optimizer": [torch.optim.SGD(module.parameters(), lr=1.0)]}
        )


def test_a_single_process_has_no_replicated_tensors():
    assert {leaf.replication for leaf in flatten({"model": net()}).leaves} == {
        Replication.UNVERIFIED
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert find_ddp_replication({"model": nn.parallel.DistributedDataParallel(net())}) == {}
    finally:
        dist.destroy_process_group()
