"""A model in every layout, its training, and its state as plain tensors."""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import limpet


class Net(nn.Module):
    """A model with awkward sizes.

    Some sizes are not divisible by the number of ranks, some are smaller than it, and some
    parameters have a single element.
    """

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 10)
        self.b = nn.Linear(10, 6)
        self.c = nn.Linear(6, 3, bias=False)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return self.norm(x)


def seeded_net(seed):
    torch.manual_seed(seed)
    return Net()


def fsdp(mesh=None, seed=1):
    net = seeded_net(seed)
    for layer in (net.a, net.b):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def hsdp():
    return fsdp(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(mesh, seed=1):
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    return parallelize_module(seeded_net(seed), mesh, plan)


def fsdp_and_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = tensor_parallel(mesh["tp"])
    for layer in (net.a, net.b):
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def fsdp_from_meta():
    with torch.device("meta"):
        net = Net()
    for layer in (net.a, net.b):
        fully_shard(layer)
    fully_shard(net)
    return net.to_empty(device="cpu")


AdamW = partial(torch.optim.AdamW, lr=0.01)


def state_of(net, optimizer_type=AdamW, **options):
    """Return a state whose optimizer has not stepped, so it has no slots yet."""
    return {"model": net, "optimizer": optimizer_type(net.parameters(), **options), "n": 0}


def train(state, steps=2, seed=0):
    """Train with the same batch on all ranks."""
    for i in range(steps):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed + i))
        state["optimizer"].zero_grad()
        state["model"](x).square().sum().backward()
        for p in state["model"].parameters():  # the unused scalar has no gradient
            if p.grad is None:
                p.grad = torch.ones_like(p)
        state["optimizer"].step()
        state["n"] += 1


def step_without_forward(state):
    """Make a step without a forward pass, which PyTorch refuses for uneven shards."""
    for p in state["model"].parameters():
        p.grad = p.detach() * 0.3 + 1
    state["optimizer"].step()
    state["n"] += 1


def full_tensor(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def parameter_name(name):
    return name.replace("_orig_mod.", "").removeprefix("module.")


def gather_state(state):
    """Return the state as plain tensors. All ranks must call this function."""
    model = state["model"]
    tensors = {
        parameter_name(k): full_tensor(v).detach().clone() for k, v in model.state_dict().items()
    }
    names = {p: parameter_name(n) for n, p in model.named_parameters()}
    for p, slots in state["optimizer"].state.items():
        for slot, value in slots.items():
            tensors[f"{names[p]}:{slot}"] = full_tensor(value).clone()
    tensors["n"] = torch.tensor(state["n"])
    return tensors


def assert_same_tensors(a, b):
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    for key, value in a.items():
        assert value.dtype == b[key].dtype, key
        assert torch.equal(value, b[key]), key


def save_with_reference(ranks, name, state, asynchronous=False):
    """Save the state, and write the same tensors to ``NAME.pt`` with ``torch.save``."""
    if asynchronous:
        pending = limpet.save_async(ranks.url(name), state)
        reference = gather_state(state)
        train(state, 1, seed=99)
        pending.wait()
    else:
        limpet.save(ranks.url(name), state)
        reference = gather_state(state)
    if ranks.rank == 0:
        torch.save(reference, ranks.folder / f"{name}.pt")


def load_and_compare(ranks, name, state):
    limpet.load(ranks.url(name), into=state)
    assert_same_tensors(torch.load(ranks.folder / f"{name}.pt"), gather_state(state))
