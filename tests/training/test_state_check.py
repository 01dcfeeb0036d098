"""The warning about what the state lacks for an exact resume."""

import copy
import warnings

import pytest
import torch
from torch import nn

import limpet
from limpet.errors import InexactResume, PlanError
from limpet.preemption import PreemptionGuard


def adam(*modules):
    return torch.optim.Adam([p for module in modules for p in module.parameters()])


def model(*layers):
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1), *layers)


def warnings_of(folder, state, trained=None, optimizers=(), **options):
    """Make three steps of the modules and optimizers of a state, and return the warnings."""
    own = [v for v in state.values() if isinstance(v, nn.Module)]
    modules = own if trained is None else [trained]
    found = (*optimizers, *(v for v in state.values() if isinstance(v, torch.optim.Optimizer)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with limpet.Checkpointer(folder / "run", state, **options) as ckpt:
            ckpt.resume()
            for _ in range(3):
                for module in modules:
                    output = module(torch.ones(4, 2))
                    if output.requires_grad:
                        output.sum().backward()
                for optimizer in found:
                    optimizer.step()
                ckpt.step()
    return [str(w.message) for w in caught if w.category is InexactResume]


class Own:
    """An object of the user, which may save whatever seems to be missing."""

    def state_dict(self):
        return {"at": 0}

    def load_state_dict(self, state):
        pass


def test_the_steps_of_a_guarded_call_are_checked(tmp_path):
    net, other = model(), nn.Linear(2, 3)
    with (
        limpet.Checkpointer(tmp_path, {"model": net, "optimizer": adam(other)}) as ckpt,
        pytest.warns(InexactResume, match="It lacks 2 parameters of optimizer"),
    ):
        guard = PreemptionGuard(ckpt)
        for _ in range(2):
            guard.run(lambda: (other(torch.ones(4, 2)).sum().backward(), ckpt.step()))


def test_a_training_that_saves_nothing_is_not_checked(tmp_path):
    net = model(nn.Dropout(0.5))
    state = {"model": net, "optimizer": adam(model())}
    assert warnings_of(tmp_path, state, save=limpet.Never()) == []


def test_a_head_that_was_replaced_is_reported_once(tmp_path):
    net = model()
    optimizer = adam(net)
    net(torch.ones(4, 2)).sum().backward()
    net[2] = nn.Linear(3, 5)
    (warning,) = warnings_of(tmp_path, {"model": net, "optimizer": optimizer})
    assert "2 parameters of optimizer ([1, 3], [1]): no module in the state has them" in warning


def test_a_copy_of_the_model_is_reported_or_refused(tmp_path):
    net = nn.Linear(2, 3)
    state = {"model": copy.deepcopy(net), "own": limpet.PerRank(adam(net))}
    (warning,) = warnings_of(tmp_path / "a", state, net, optimizers=(state["own"].value,))
    assert "2 parameters of own" in warning
    assert "Add their module, not a copy of it" in warning
    net = model()
    with pytest.raises(PlanError, match=r"'optimizer' has slots of 3 parameters"):
        warnings_of(tmp_path / "b", {"model": copy.deepcopy(net), "optimizer": adam(net)}, net)


class WithExtraState(nn.Linear):
    """Saves a parameter of another object."""

    def __init__(self, other):
        super().__init__(2, 1)
        self.others = [other]

    def get_extra_state(self):
        return self.others[0].detach()

    def set_extra_state(self, state):
        self.others[0].data.copy_(state)


def complete_states():
    net, other = model(), model()
    free = nn.Parameter(torch.ones(3))

    class Scaled(nn.Module):
        def forward(self, x):
            return net(x) * free

    scaled, sgd = Scaled(), torch.optim.SGD([free], lr=0.1)
    both = nn.Sequential(nn.Linear(2, 2), model())
    return {
        "one": (net, {"model": net, "optimizer": adam(net)}),
        "two": (net, {"models": [net, other], "optimizer": adam(net, other)}),
        "a part": (net, {"model": net, "optimizer": adam(net[0])}),
        "a tensor": (scaled, {"model": net, "scale": free, "optimizer": sgd}),
        "detached": (scaled, {"model": net, "scale": free.detach(), "optimizer": sgd}),
        "an array": (scaled, {"model": net, "scale": free.detach().numpy(), "optimizer": sgd}),
        "per rank": (scaled, {"model": net, "own": limpet.PerRank([free]), "optimizer": sgd}),
        "extra state": (scaled, {"model": WithExtraState(free), "optimizer": sgd}),
        "an own object": (scaled, {"model": net, "own": Own(), "optimizer": sgd}),
        "a state_dict": (net, {"m": other, "part": dict(net.state_dict()), "optimizer": adam(net)}),
        "no module": (net, {"optimizer": torch.optim.Adam(net.named_parameters())}),
        # what is not trained need not be saved
        "a frozen backbone": (both, {"head": both[1], "optimizer": adam(both)}),
        "unused": (net, {"model": net, "optimizer": adam(net, other)}),
    }


@pytest.mark.parametrize("name", complete_states())
def test_a_complete_state_is_not_reported(name, tmp_path):
    trained, state = complete_states()[name]
    if name == "a frozen backbone":
        trained[0].requires_grad_(requires_grad=False)
    assert warnings_of(tmp_path, state, trained) == []
