"""An object in the state of another one would be a dict after a load: the save refuses it."""

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import limpet
from limpet.errors import Unsupported
from tests.states import Stateful, assert_same, save_state


class WarmUp(lrs.LRScheduler):
    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


class Extra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def sgd(module=None, **options):
    module = module or nn.Linear(2, 2)
    return optim.SGD([{"params": module.parameters(), **options}], lr=0.1, momentum=0.9)


def with_slot(value):
    opt = sgd()
    opt.state[opt.param_groups[0]["params"][0]]["inner"] = value
    return opt


def hooked(value):
    m = nn.Linear(2, 2)
    m.register_state_dict_post_hook(lambda _, state, prefix, *a: state.update({"inner": value}))
    return m


INNER = {
    "module": lambda: nn.Linear(2, 2),
    "optimizer": sgd,
    "scheduler": lambda: lrs.CosineAnnealingLR(sgd(), 10),
    "scaler": lambda: torch.amp.GradScaler(enabled=False),
    "object": lambda: Stateful(a=1),
    "progress": limpet.Progress,
    "rng": limpet.RNG,
    "PerRank": lambda: limpet.PerRank(1),
    "Replicated": lambda: limpet.Replicated(torch.ones(2)),
    "in a list": lambda: [1, {"a": (nn.Linear(2, 2),)}],
}
OUTER = {
    "object": lambda v: Stateful(inner=v),
    "object of a rank": lambda v: limpet.PerRank(Stateful(inner=v)),
    "scheduler": lambda v: WarmUp(sgd(), v),
    "extra state": lambda v: nn.Sequential(Extra({"inner": v})),
    "state dict hook": hooked,
    "group": lambda v: sgd(inner=v),
    "slot": with_slot,
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_an_object_in_the_state_of_another_one_is_refused(inner, outer, tmp_path):
    state = {"m": nn.Linear(1, 1), "x": OUTER[outer](INNER[inner]())}
    with pytest.raises(
        Unsupported, match=r"in the state of another one.*Return its state_dict"
    ) as e:
        limpet.save("memory://nested/version_1", state)
    assert e.value.leaf.startswith("x/")
    assert "inner" in e.value.leaf or "after" in e.value.leaf
    with pytest.raises(Unsupported), limpet.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save()


def test_the_advice_works():
    class Trainer:
        def __init__(self, seed):
            torch.manual_seed(seed)
            self.net, self.n = nn.Linear(2, 2), seed
            self.opt = optim.Adam(self.net.parameters())
            self.net(torch.ones(1, 2)).sum().backward()
            self.opt.step()

        def state_dict(self):
            return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "n": self.n}

        def load_state_dict(self, state):
            self.net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.n = state["n"]

    saved, live = Trainer(0), Trainer(1)
    net = live.net
    limpet.load(save_state({"t": saved}), into={"t": live})
    assert live.net is net
    assert_same(dict(saved.net.state_dict()), dict(net.state_dict()))
    assert_same(saved.opt.state_dict(), live.opt.state_dict())
    assert live.n == 0


def test_schedulers_that_keep_states_of_others_are_restored():
    def make(steps):
        opt = sgd()
        chained = lrs.ChainedScheduler([lrs.ConstantLR(opt), lrs.ExponentialLR(opt, 0.9)], opt)
        after = lrs.SequentialLR(opt, [lrs.LinearLR(opt), lrs.CosineAnnealingLR(opt, 9)], [2])
        for _ in range(steps):
            opt.step()
            chained.step()
            after.step()
        return {"c": chained, "s": after}

    saved, live = make(5), make(0)
    limpet.load(save_state(saved), into=live)
    for key in saved:
        assert_same(saved[key].state_dict(), live[key].state_dict())
        assert all(isinstance(s, lrs.LRScheduler) for s in live[key]._schedulers)


def test_names_of_slots_and_options():
    def make():
        opt = sgd(nn.Linear(2, 2))
        opt.state[opt.param_groups[0]["params"][0]].update({0: torch.ones(2, 2), (1, "a/b"): 3})
        return opt

    saved, live = make(), make()
    slots = live.state[live.param_groups[0]["params"][0]]
    slots[0].zero_()
    slots[1, "a/b"] = 0
    limpet.load(save_state({"o": saved}), into={"o": live})
    assert_same(saved.state_dict(), live.state_dict())
    saved.param_groups[0][5] = "x"
    with pytest.raises(Unsupported, match=r"'o/groups/0/5' .* name of an option must be a string"):
        limpet.save("memory://options/version_1", {"o": saved})
