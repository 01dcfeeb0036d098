"""Changes of a state between two saves, and the second save as a fresh process makes it."""

import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

import limpet

Json = dict[str, Any]


class Custom(torch.nn.Linear):
    """A layer that saves a member that is not a tensor."""

    def __init__(self):
        super().__init__(3, 3)
        self.extra: Any = {"a": 1, "b": [torch.ones(2), 2.5]}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def train(model, optimizer, grad):
    """Change parameters, slots, and buffers, to the same bits with any number of threads."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, grad)
    optimizer.step()
    model[1].running_mean += grad


def build():
    """Return a state with every kind of member."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3), Custom()
    )
    optimizer = torch.optim.AdamW(
        [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 0.5}]
    )
    train(model, optimizer, 0.5)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "plain": {"n": 1, "list": [1, "two", 3.0], "t": torch.arange(6.0).view(2, 3)},
        "array": np.arange(4),
    }


def replace(path, make):
    """Return a change that replaces a member of the state's "plain" by a function of it."""

    def change(s):
        s["plain"][path] = make(s["plain"][path])

    return change


def swap_layers(s):
    first, last = s["model"]._modules["0"], s["model"]._modules["2"]
    s["model"]._modules.update({"0": last, "2": first})


def reorder(s):
    s["plain"]["n"] = s["plain"].pop("n")


def rename_layer(s):
    s["model"]._modules["norm"] = s["model"]._modules.pop("1")


def same_address(s):
    """Free a tensor, and put another one, which usually gets its memory and its id, in its place"""
    s["plain"].pop("t")
    s["plain"]["t"] = torch.arange(6.0).view(3, 2)


def retype_slots(s):
    for slots in s["optimizer"].state.values():
        slots["exp_avg"] = slots["exp_avg"].half()


def data_of(index, make):
    """Return a change that gives the weight of a layer, the same object, other data."""

    def change(s):
        weight = s["model"][index].weight
        weight.data = make(weight.data)

    return change


CHANGES: dict[str, Callable[[Json], object]] = {
    "nothing": lambda s: None,
    "a value in place": lambda s: s["plain"]["t"].add_(1),
    "a value through NumPy": lambda s: s["model"][0].weight.detach().numpy().fill(7),
    "a training step": lambda s: (train(s["model"], s["optimizer"], 2.0), s["scheduler"].step()),
    "dtype": replace("t", torch.Tensor.double),
    "dtype of the same size": replace("t", lambda t: t.view(torch.int32)),
    "dtype of the same object": lambda s: setattr(
        s["model"][1].running_mean, "data", s["model"][1].running_mean.view(torch.int32)
    ),
    "dtype of a parameter": data_of(2, torch.Tensor.bfloat16),
    "dtype of slots": retype_slots,
    "shape": replace("t", lambda t: t[:1].clone()),
    "shape in place": lambda s: s["plain"]["t"].resize_(3, 2),
    "shape of a parameter": data_of(2, lambda w: w[:2]),
    "stride": replace("t", lambda t: t.t().contiguous().t()),
    "stride in place": lambda s: s["plain"]["t"].t_(),
    "stride of a parameter": data_of(2, lambda w: w.t().contiguous().t()),
    "negated view": replace("t", torch._neg_view),
    "conjugate": replace("t", lambda t: torch.complex(t, t).conj()),
    "sparse": replace("t", torch.Tensor.to_sparse),
    "expanded": replace("t", lambda t: t[:1].expand(5, 3)),
    "empty": replace("t", lambda t: t[:0]),
    "an array instead": replace("t", torch.Tensor.numpy),
    "a number instead": replace("t", lambda t: 5),
    "key order": reorder,
    "key order of slots": lambda s: [
        slots.update(step=slots.pop("step")) for slots in s["optimizer"].state.values()
    ],
    "a leaf added": lambda s: s["plain"].update(u=torch.ones(3)),
    "a leaf removed": lambda s: s["plain"].pop("t"),
    "a leaf renamed": lambda s: s["plain"].update(u=s["plain"].pop("t")),
    "a leaf renamed to a name with a slash": lambda s: s["plain"].update(
        {"a/b": s["plain"].pop("t"), "a~1b": 3, "": 4}
    ),
    "a key of another type": lambda s: s["plain"].update({1: 2, "1": s["plain"].pop("t")}),
    "a container of another type": lambda s: s.update(plain=OrderedDict(s["plain"])),
    "a replaced tensor": replace("t", lambda t: torch.randn(2, 3)),
    "a replaced tensor at the same address": same_address,
    "tied": lambda s: s["plain"].update(u=s["plain"]["t"]),
    "tied weights": lambda s: (
        setattr(s["model"][3], "weight", s["model"][3].weight)
        or s["plain"].update(w=s["model"][3].weight)
    ),
    "tied to a view of another shape": lambda s: s["plain"].update(u=s["plain"]["t"].view(6)),
    "a replaced parameter": lambda s: setattr(
        s["model"][3], "bias", torch.nn.Parameter(torch.randn(3))
    ),
    "a replaced module": lambda s: s["model"]._modules.update({"3": torch.nn.Linear(3, 3)}),
    "a replaced module with buffers": lambda s: (
        s["optimizer"].state.pop(s["model"][1].bias),  # the slots of two could be mixed up
        s["model"]._modules.update({"1": torch.nn.BatchNorm1d(5)}),
    ),
    "exchanged modules": swap_layers,
    "a renamed module": rename_layer,
    "an appended module": lambda s: s["model"].append(torch.nn.Linear(1, 1)),
    "a buffer that is not persistent": lambda s: s["model"][1]._non_persistent_buffers_set.add(
        "running_var"
    ),
    "a hook": lambda s: s["model"]._register_state_dict_hook(
        lambda m, state, prefix, local: state.update({prefix + "hook": torch.ones(1)}) or None
    ),
    "extra state": lambda s: s["model"][3].extra.update(a=2),
    "extra state of another type": lambda s: setattr(s["model"][3], "extra", torch.ones(1)),
    "a parametrization": lambda s: torch.nn.utils.parametrizations.weight_norm(s["model"][2]),
    "another option of a group": lambda s: s["optimizer"].param_groups[1].update(lr=0.25),
    "a parameter in another group": lambda s: (
        s["optimizer"]
        .param_groups[0]["params"]
        .append(s["optimizer"].param_groups[1]["params"].pop())
    ),
    "a new group": lambda s: s["optimizer"].add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(2))]}
    ),
    "a group removed": lambda s: s["optimizer"].param_groups.append({"params": []}),
    "slots removed": lambda s: s["optimizer"].state.clear(),
    "one slot added": lambda s: s["optimizer"].state[s["model"][0].bias].update(x=torch.ones(2)),
    "a slot that becomes a number": lambda s: (
        s["optimizer"].state[s["model"][0].bias].update(step=3)
    ),
    "another optimizer": lambda s: s.update(
        optimizer=torch.optim.SGD(s["model"].parameters(), lr=0.1)
    ),
    "a plain value": lambda s: s["plain"].update(n=2),
    "a plain value of another type": lambda s: s["plain"].update(n=1.0),
    "a plain value in a list": lambda s: s["plain"]["list"].__setitem__(2, -0.0),
    "a scheduler": lambda s: setattr(s["scheduler"], "last_epoch", 9),
    "an array in place": lambda s: s["array"].fill(3),
    "an array of another dtype": lambda s: s.update(array=s["array"].astype(">i4")),
}


def digest_of(folder):
    """Return a digest of the tree and of the bytes of the only version in a folder."""
    manifest = json.loads(next(folder.glob("**/manifest.json")).read_bytes())
    parts = [json.dumps(manifest["tree"]).encode()]
    parts += [path.read_bytes() for path in sorted(folder.glob("**/*.safetensors"))]
    return sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()


def _digest_of_fresh_save(change):
    with tempfile.TemporaryDirectory() as folder:
        state = build()
        change(state)
        limpet.save(folder + "/version_2", state)
        return digest_of(Path(folder))


def send_fresh_digests(pipe):
    """Send a digest of the save after each change. Every save is made by a process of its own,
    which has saved nothing before."""
    torch.set_num_threads(1)
    # import what each process would import otherwise; nothing is saved here
    assert callable(limpet.save)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step()
    torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(1, 1))
    found = {}
    for name, change in CHANGES.items():
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(writing, _digest_of_fresh_save(change).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with os.fdopen(reading) as digests:
            found[name] = digests.read()
    pipe.send(found)
